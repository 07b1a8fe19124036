"""Device code of `dsv4.kernels.mixture`: the launch that sums the slots adds the shared expert's output, and writes into the streams.

A program has one token's COLUMNS of every stream.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels._device_triton import aligned_rows
from dsv4.kernels._hyper_mixing_triton import load_streams, mixing_shares

COLUMNS, WARPS = 1024, 4


@triton.jit
def mixture_kernel(
    slot_ptr, valid_ptr, shared_ptr, out_ptr, x_ptr, comb_ptr, post_ptr, written_ptr, top_k, hidden, x_t, x_n,
    N: tl.constexpr, WRITES: tl.constexpr, MASKED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """slots [t k h], zeros for a token that is not valid, + shared [t h] -> out [t h]; WRITES: x [t n h], comb, post -> written [t n h]."""
    t = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (column < hidden)[None, :]
    is_read = inside
    if MASKED:
        is_read = is_read & (tl.load(valid_ptr + t) != 0)[:, None]
    total = tl.zeros([1, COLUMNS], tl.float32)
    for j in range(top_k):
        total += tl.load(slot_ptr + ((t * top_k + j) * hidden)[:, None] + column[None, :], mask=is_read, other=0.0).to(tl.float32)
    at = (t * hidden)[:, None] + column[None, :]
    # Rounded where both are rounded when they are apart.
    routed = total.to(out_ptr.dtype.element_ty).to(tl.float32)
    out = (routed + tl.load(shared_ptr + at, mask=inside, other=0.0).to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, out, mask=inside)
    if WRITES:
        shares = mixing_shares(comb_ptr, post_ptr, t, t >= 0, N)
        streams = load_streams(x_ptr + (t * x_t)[:, None] + column[None, :], x_n, inside, N)
        for k in tl.static_range(N):
            mixed = shares[N * N + k][:, None] * out.to(tl.float32)
            for j in tl.static_range(N):
                mixed += shares[j * N + k][:, None] * streams[j].to(tl.float32)
            to = written_ptr + ((t * N + k) * hidden)[:, None] + column[None, :]
            tl.store(to, mixed.to(written_ptr.dtype.element_ty), mask=inside)


def options(streams: int, *, is_masked: bool) -> dict:
    """The constants of `mixture_kernel` and the compiler's options; streams: 0 to write into none."""
    sizes = {"N": streams or 1, "WRITES": streams > 0, "MASKED": is_masked, "COLUMNS": COLUMNS}
    return sizes | {"num_warps": WARPS, "enable_fp_fusion": True}


def finish(
    slots: Tensor, valid: Tensor | None, shared: Tensor, into: tuple[Tensor, Tensor, Tensor] | None
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """slots [t*k H], shared [t H], into: streams [t n H], comb, post -> (the sum [t H], streams written [t n H] or None)."""
    tokens, width = shared.shape
    out = torch.empty_like(shared)
    x, comb, post = (shared, shared, shared) if into is None else (aligned_rows(into[0]), into[1].contiguous(), into[2].contiguous())
    written = None if into is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    steps = (0, 0) if into is None else x.stride()[:2]
    if tokens == 0:
        return out, written
    # What is absent is given an address that the kernel never reads.
    with torch.cuda.device_of(shared):
        mixture_kernel[(tokens, triton.cdiv(width, COLUMNS))](
            *(slots, shared if valid is None else valid.view(torch.uint8), shared, out, x, comb, post),
            *(out if written is None else written, len(slots) // tokens, width, *steps),
            **options(0 if into is None else x.shape[1], is_masked=valid is not None),
        )
    return out, written
