"""Device code of `dsv4.kernels.norm_rotary`: norm and rotary of rows in one pass, each row in the registers of its program.

A row [d] is seen as [d / 2, 2], so that a rotary pair stands side by side; channels before the rotary's are turned by an angle of zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels._device_triton import INTERPRETER, aligned_rows, architecture

COUNTS = ["row_count", "rows_of_token"]


@dataclass(frozen=True)
class Launch:
    """numbers: of a tile, whole rows of them; warps: of a program."""

    numbers: int
    warps: int


# 16 numbers a thread: two loads of 16 bytes in flight in each of many programs.
ROWS: Mapping[str, Launch] = {
    "sm_80": Launch(numbers=2048, warps=4),
    "sm_90": Launch(numbers=2048, warps=4),
    "sm_100": Launch(numbers=2048, warps=4),
    INTERPRETER: Launch(numbers=512, warps=1),
}


@triton.jit
def turn(y, cos, sin, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """y [ROWS, COLUMNS], its pairs turned; cos and sin broadcast over [ROWS, COLUMNS / 2]."""
    even, odd = tl.split(tl.reshape(y, (ROWS, COLUMNS // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (ROWS, COLUMNS))


@triton.jit
def normed_and_turned(
    y, t, is_row, weight_ptr, cos_ptr, sin_ptr, eps,
    DTYPE: tl.constexpr, D: tl.constexpr, TURNED: tl.constexpr, NORMS: tl.constexpr, WEIGHTED: tl.constexpr, BACK: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rows y [BLOCK_R, BLOCK_D] float32 of tokens t, zero beyond D channels; after the norm rounded to DTYPE, after the rotary not yet."""
    d = tl.arange(0, BLOCK_D)
    if NORMS:
        y = y * tl.rsqrt(tl.sum(y * y, 1) / D + eps)[:, None]
        if WEIGHTED:
            y = y * tl.load(weight_ptr + d, mask=d < D, other=0.0)[None, :]
        y = y.to(DTYPE).to(tl.float32)
    if TURNED > 0:
        pair = tl.arange(0, BLOCK_D // 2) - (D - TURNED) // 2
        turns = is_row[:, None] & ((pair >= 0) & (pair < TURNED // 2))[None, :]
        angle = t[:, None] * (TURNED // 2) + pair[None, :]
        cos = tl.load(cos_ptr + angle, mask=turns, other=1.0)
        sin = tl.load(sin_ptr + angle, mask=turns, other=0.0)
        if BACK:
            sin = -sin
        y = turn(y, cos, sin, BLOCK_R, BLOCK_D)
    return y


@triton.jit(do_not_specialize=COUNTS)
def norm_rotary_kernel(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, valid_ptr, out_ptr,
    row_count, rows_of_token, x_t, x_r, eps,
    D: tl.constexpr, TURNED: tl.constexpr, NORMS: tl.constexpr, WEIGHTED: tl.constexpr, BACK: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Row r of token t, r < rows_of_token, lies at t * x_t + r * x_r; rows are stored one after another."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    is_row = row < row_count
    inside = is_row[:, None] & (d < D)[None, :]
    t = row // rows_of_token
    at = t * x_t + (row % rows_of_token) * x_r
    y = tl.load(x_ptr + at[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    y = normed_and_turned(
        y, t, is_row, weight_ptr, cos_ptr, sin_ptr, eps, out_ptr.dtype.element_ty, D, TURNED, NORMS, WEIGHTED, BACK, BLOCK_R, BLOCK_D
    )  # fmt: skip
    if MASKED:
        valid = tl.load(valid_ptr + t, mask=is_row, other=0)
        y = tl.where((valid != 0)[:, None], y, 0.0)
    tl.store(out_ptr + row[:, None] * D + d[None, :], y.to(out_ptr.dtype.element_ty), mask=inside)


def options(launch: Launch, width: int, turned: int, norms: bool, weighted: bool, back: bool, masked: bool) -> dict:
    """The constants of the kernel and the compiler's options."""
    block = max(2, triton.next_power_of_2(width))
    return {
        "D": width,
        "TURNED": turned,
        "NORMS": norms,
        "WEIGHTED": weighted,
        "BACK": back,
        "MASKED": masked,
        "BLOCK_R": max(1, launch.numbers // block),
        "BLOCK_D": block,
        "num_warps": launch.warps,
        "enable_fp_fusion": True,
    }


def run(
    x: Tensor, weight: Tensor | None, cos: Tensor | None, sin: Tensor | None, valid: Tensor | None, eps: float, norms: bool, back: bool
) -> Tensor:
    """x [b s r d], checked by the caller."""
    b, s, rows, width = x.shape
    out = torch.empty(b, s, rows, width, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    x = aligned_rows(x.reshape(b * s, rows, width))
    turned = 0 if cos is None else 2 * cos.shape[-1]
    constants = options(ROWS[architecture(x.device)], width, turned, norms, weight is not None, back, valid is not None)
    # What is not there is given an address that the kernel never reads.
    given = [x if t is None else t.contiguous() for t in (weight, cos, sin, valid)]
    with torch.cuda.device_of(x):
        norm_rotary_kernel[(triton.cdiv(b * s * rows, constants["BLOCK_R"]),)](
            *(x, *given, out),
            *(b * s * rows, rows, x.stride(0), x.stride(1), eps),
            **constants,
        )
    return out
