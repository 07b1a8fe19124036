"""Device code of `dsv4.kernels.step_rows`: programs of one launch take rows of two kinds, each row in the registers of its program."""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels._device_triton import INTERPRETER, aligned_rows, architecture
from dsv4.kernels._norm_rotary_triton import Launch, normed_and_turned

COUNTS = ["token_count", "tokens_of_row", "columns", "heads", "index_heads"]
# Few rows: a program takes one of them, and of narrow ones as many as make a wide one.
ROWS: Mapping[str, Launch] = {
    "sm_80": Launch(numbers=512, warps=4),
    "sm_90": Launch(numbers=512, warps=4),
    "sm_100": Launch(numbers=512, warps=4),
    INTERPRETER: Launch(numbers=64, warps=1),
}


# Each kind of row in a function of its own: names that both branches of a kernel set would have to be of one shape.


@triton.jit
def weighted_row(
    x_row, out_row, token, stored, weight_ptr, cos_ptr, sin_ptr, eps, D: tl.constexpr, TURNED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One row normed with a weight and turned by its token's angle, of which the first `stored` channels are stored: all or none."""
    DTYPE: tl.constexpr = out_row.dtype.element_ty
    d = tl.arange(0, BLOCK_D)[None, :]
    x = tl.load(x_row + d, mask=d < D, other=0.0).to(tl.float32)
    tokens = tl.full([1], 0, tl.int64) + token
    always = tl.arange(0, 1) == 0
    y = normed_and_turned(x, tokens, always, weight_ptr, cos_ptr, sin_ptr, eps, DTYPE, D, TURNED, True, True, False, 1, BLOCK_D)
    tl.store(out_row + d, y.to(DTYPE), mask=d < stored)


@triton.jit
def head_rows(
    x_ptr, out_ptr, token, block, heads, x_t, x_n, cos_ptr, sin_ptr, eps,
    D: tl.constexpr, TURNED: tl.constexpr, NORMS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK_N heads of a token, normed where asked for, and turned."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)[None, :]
    is_head = n < heads
    inside = is_head[:, None] & (d < D)
    x = tl.load(x_ptr + token * x_t + (n * x_n)[:, None] + d, mask=inside, other=0.0).to(tl.float32)
    tokens = tl.full([BLOCK_N], 0, tl.int64) + token
    y = normed_and_turned(x, tokens, is_head, x_ptr, cos_ptr, sin_ptr, eps, DTYPE, D, TURNED, NORMS, False, False, BLOCK_N, BLOCK_D)
    tl.store(out_ptr + ((token * heads + n) * D)[:, None] + d, y.to(DTYPE), mask=inside)


@triton.jit(do_not_specialize=COUNTS)
def latent_and_key_kernel(
    latent_ptr, key_ptr, ring_ptr, latent_weight_ptr, key_weight_ptr, cos_ptr, sin_ptr, past_ptr, after_ptr, out_ptr,
    token_count, tokens_of_row, columns, latent_t, key_t, ring_b, ring_r, latent_eps, key_eps,
    L: tl.constexpr, D: tl.constexpr, TURNED: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The first token_count programs norm a latent each, the others a key."""
    program = tl.program_id(0).to(tl.int64)
    if program < token_count:
        x, out = latent_ptr + program * latent_t, out_ptr + program * L
        weighted_row(x, out, program, L, latent_weight_ptr, cos_ptr, sin_ptr, latent_eps, L, 0, BLOCK_L)
    else:
        token = program - token_count
        row = token // tokens_of_row
        place = (tl.load(past_ptr + row) + token % tokens_of_row).to(tl.int32)
        stored = tl.where(place < tl.load(after_ptr + row), D, 0)
        column = ring_ptr + row * ring_b + (place % columns).to(tl.int64) * ring_r
        weighted_row(key_ptr + token * key_t, column, token, stored, key_weight_ptr, cos_ptr, sin_ptr, key_eps, D, TURNED, BLOCK_D)


@triton.jit(do_not_specialize=COUNTS)
def turned_queries_kernel(
    query_ptr, index_ptr, cos_ptr, sin_ptr, out_ptr, index_out_ptr,
    heads, index_heads, query_t, query_n, index_t, index_n, eps,
    D: tl.constexpr, INDEX_D: tl.constexpr, TURNED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, INDEX_BLOCK_N: tl.constexpr, INDEX_BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Of one token, up to BLOCK_N heads or up to INDEX_BLOCK_N index heads."""
    program = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(heads, BLOCK_N)
    programs = blocks + tl.cdiv(index_heads, INDEX_BLOCK_N)
    token, part = program // programs, program % programs
    if part < blocks:
        head_rows(query_ptr, out_ptr, token, part, heads, query_t, query_n, cos_ptr, sin_ptr, eps, D, TURNED, True, BLOCK_N, BLOCK_D)
    else:
        head_rows(
            index_ptr, index_out_ptr, token, part - blocks, index_heads, index_t, index_n, cos_ptr, sin_ptr, eps,
            INDEX_D, TURNED, False, INDEX_BLOCK_N, INDEX_BLOCK_D,
        )  # fmt: skip


def latent_and_key_options(launch: Launch, latent: int, width: int, turned: int) -> dict:
    """The constants of `latent_and_key_kernel` and the compiler's options."""
    return {
        "L": latent,
        "D": width,
        "TURNED": turned,
        "BLOCK_L": max(2, triton.next_power_of_2(latent)),
        "BLOCK_D": max(2, triton.next_power_of_2(width)),
        "num_warps": launch.warps,
        "enable_fp_fusion": True,
    }


def turned_queries_options(launch: Launch, width: int, index_width: int, turned: int) -> dict:
    """The constants of `turned_queries_kernel` and the compiler's options."""
    block, index_block = (max(2, triton.next_power_of_2(size)) for size in (width, index_width))
    return {
        "D": width,
        "INDEX_D": index_width,
        "TURNED": turned,
        "BLOCK_N": max(1, launch.numbers // block),
        "BLOCK_D": block,
        "INDEX_BLOCK_N": max(1, launch.numbers // index_block),
        "INDEX_BLOCK_D": index_block,
        "num_warps": launch.warps,
        "enable_fp_fusion": True,
    }


def latent_and_key(
    latent: Tensor, key: Tensor, ring: Tensor, latent_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor, past: Tensor,
    after: Tensor, latent_eps: float, key_eps: float,
) -> Tensor:  # fmt: skip
    """Arguments as in `dsv4.kernels.step_rows.latent_and_key`, checked there."""
    b, s, width = key.shape
    out = torch.empty(latent.shape, dtype=latent.dtype, device=latent.device)
    if b * s == 0:
        return out
    latent, key = (aligned_rows(x.reshape(b * s, x.shape[-1])) for x in (latent, key))
    constants = latent_and_key_options(ROWS[architecture(key.device)], latent.shape[1], width, 2 * cos.shape[-1])
    given = [t.contiguous() for t in (latent_weight, key_weight, cos, sin, past, after)]
    with torch.cuda.device_of(key):
        latent_and_key_kernel[(2 * b * s,)](
            *(latent, key, ring, *given, out),
            *(b * s, s, ring.shape[1], latent.stride(0), key.stride(0), *ring.stride()[:2], latent_eps, key_eps),
            **constants,
        )
    return out


def turned_queries(queries: Tensor, index_queries: Tensor, cos: Tensor, sin: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Arguments as in `dsv4.kernels.step_rows.turned_queries`, checked there."""
    (b, s, heads, width), (index_heads, index_width) = queries.shape, index_queries.shape[2:]
    out, index_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (queries, index_queries))
    if b * s == 0:
        return out, index_out
    queries, index_queries = (aligned_rows(x.reshape(b * s, *x.shape[2:])) for x in (queries, index_queries))
    constants = turned_queries_options(ROWS[architecture(queries.device)], width, index_width, 2 * cos.shape[-1])
    programs = triton.cdiv(heads, constants["BLOCK_N"]) + triton.cdiv(index_heads, constants["INDEX_BLOCK_N"])
    with torch.cuda.device_of(queries):
        turned_queries_kernel[(b * s * programs,)](
            *(queries, index_queries, cos.contiguous(), sin.contiguous(), out, index_out),
            *(heads, index_heads, *queries.stride()[:2], *index_queries.stride()[:2], eps),
            **constants,
        )
    return out, index_out
