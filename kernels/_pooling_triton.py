"""Device code of `dsv4.kernels.pooling`: one entry a program, from the projections of its window to the normed and turned row.

`pool_kernel` makes the entries of a call, `step_kernel` keeps a decoding step's projections and makes the entries that the step closes.
The softmax over the window's slots is online, each channel for itself: d channel, m slot of a tile.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels._device_triton import INTERPRETER, aligned_rows, architecture

# Below every score, and finite: the difference of two running maxima is always defined.
LOWEST = tl.constexpr(-3.4028234663852886e38)
COUNTS = ["entry_count", "slot_count", "rate", "token_count", "columns", "new_entries", "entry_columns"]


@dataclass(frozen=True)
class Launch:
    """slots: of a tile; warps: of a program; stages: tiles in flight."""

    slots: int
    warps: int
    stages: int


# For windows of one tile, of which there are many, and for longer ones, of which there are few.
POOL: Mapping[str, tuple[Launch, Launch]] = {
    "sm_80": (Launch(slots=8, warps=4, stages=1), Launch(slots=8, warps=8, stages=3)),
    "sm_90": (Launch(slots=8, warps=4, stages=1), Launch(slots=8, warps=8, stages=4)),
    "sm_100": (Launch(slots=8, warps=4, stages=1), Launch(slots=8, warps=8, stages=4)),
    INTERPRETER: (Launch(slots=8, warps=1, stages=1), Launch(slots=8, warps=1, stages=1)),
}


@triton.jit
def taken_in(largest, total, mixed, kv, logits, present):
    """The running softmax of every channel with the slots of one more tile."""
    logits = tl.where(present[:, None], logits, LOWEST)
    new_largest = tl.maximum(largest, tl.max(logits, 0))
    fade = tl.exp(largest - new_largest)
    shares = tl.where(present[:, None], tl.exp(logits - new_largest[None, :]), 0.0)
    return new_largest, total * fade + tl.sum(shares, 0), mixed * fade + tl.sum(shares * kv, 0)


@triton.jit
def entry_of(
    total, mixed, entry, weight_ptr, cos_ptr, sin_ptr, eps,
    DTYPE: tl.constexpr, D: tl.constexpr, TURNED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """What was pooled, rounded, normed, rounded and turned: [BLOCK_D] float32."""
    d = tl.arange(0, BLOCK_D)
    y = (mixed / tl.where(total > 0, total, 1.0)).to(DTYPE).to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / D + eps) * tl.load(weight_ptr + d, mask=d < D, other=0.0)
    y = y.to(DTYPE).to(tl.float32)
    if TURNED > 0:
        pair = tl.arange(0, BLOCK_D // 2) - (D - TURNED) // 2
        turns = (pair >= 0) & (pair < TURNED // 2)
        cos = tl.load(cos_ptr + entry * (TURNED // 2) + pair, mask=turns, other=1.0)
        sin = tl.load(sin_ptr + entry * (TURNED // 2) + pair, mask=turns, other=0.0)
        even, odd = tl.split(tl.reshape(y, (BLOCK_D // 2, 2)))
        y = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (BLOCK_D,))
    return y


@triton.jit(do_not_specialize=COUNTS)
def pool_kernel(
    projected_ptr, bias_ptr, weight_ptr, cos_ptr, sin_ptr, index_ptr, present_ptr, filled_ptr, out_ptr,
    entry_count, slot_count, rate, projected_b, projected_t, eps,
    D: tl.constexpr, SERIES: tl.constexpr, TURNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    rows = projected_ptr + entry // entry_count * projected_b
    largest = tl.full([BLOCK_D], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_D], tl.float32)
    mixed = tl.zeros([BLOCK_D], tl.float32)
    filled = tl.load(filled_ptr + entry) != 0
    # A step of fixed shape asks for entries that are not there yet.
    for begin in tl.range(0, tl.where(filled, slot_count, 0), BLOCK_M, num_stages=STAGES):
        m = begin + tl.arange(0, BLOCK_M)
        is_slot = m < slot_count
        present = is_slot & (tl.load(present_ptr + entry * slot_count + m, mask=is_slot, other=0) != 0)
        token = tl.load(index_ptr + entry * slot_count + m, mask=is_slot, other=0)
        # Slot m is the (m mod rate)-th token of its window, seen through series m / rate.
        at = (m // rate * D)[:, None] + d[None, :]
        read = present[:, None] & (d < D)[None, :]
        kv = tl.load(rows + (token * projected_t)[:, None] + at, mask=read, other=0.0)
        gate = tl.load(rows + (token * projected_t)[:, None] + SERIES * D + at, mask=read, other=0.0)
        bias = tl.load(bias_ptr + (m % rate * (SERIES * D))[:, None] + at, mask=read, other=0.0)
        largest, total, mixed = taken_in(largest, total, mixed, kv, gate + bias, present)
    y = entry_of(total, mixed, entry, weight_ptr, cos_ptr, sin_ptr, eps, out_ptr.dtype.element_ty, D, TURNED, BLOCK_D)
    y = tl.where(filled, y, 0.0)
    tl.store(out_ptr + entry * D + d, y.to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=COUNTS)
def step_kernel(
    new_ptr, ring_ptr, entries_ptr, bias_ptr, weight_ptr, cos_ptr, sin_ptr, past_ptr, after_ptr,
    token_count, columns, new_entries, entry_columns, rate, new_t, ring_b, ring_r, entries_b, entries_e, eps,
    D: tl.constexpr, SERIES: tl.constexpr, TURNED: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One window that the step may touch: its new tokens into the ring, and its entry if they close it. What a window needs of earlier
    tokens stands in columns that no token of the step takes; what it needs of the step is read where the step left it.
    """
    program = tl.program_id(0).to(tl.int64)
    row = program // new_entries
    past = tl.load(past_ptr + row).to(tl.int32)
    after = tl.load(after_ptr + row).to(tl.int32)
    number = past // rate + (program % new_entries).to(tl.int32)
    begin = number * rate
    end = begin + rate
    new = new_ptr + row * token_count * new_t
    ring = ring_ptr + row * ring_b
    c = tl.arange(0, BLOCK_C)
    is_channel = c < 2 * SERIES * D
    for p in range(tl.maximum(begin, past), tl.minimum(end, after)):
        column = (p % columns).to(tl.int64)
        tl.store(ring + column * ring_r + c, tl.load(new + (p - past) * new_t + c, mask=is_channel), mask=is_channel)
    if (end <= after) & (number < entry_columns):
        d = tl.arange(0, BLOCK_D)
        largest = tl.full([BLOCK_D], LOWEST, tl.float32)
        total = tl.zeros([BLOCK_D], tl.float32)
        mixed = tl.zeros([BLOCK_D], tl.float32)
        for first in tl.range(0, SERIES * rate, BLOCK_M, num_stages=STAGES):
            m = first + tl.arange(0, BLOCK_M)
            place = end - SERIES * rate + m
            present = (m < SERIES * rate) & (place >= 0)
            place = tl.maximum(place, 0)
            column = (place % columns).to(tl.int64)
            token = tl.multiple_of(tl.where(place >= past, new + (place - past) * new_t, ring + column * ring_r), [16])
            # Slot m is the (m mod rate)-th token of its window, seen through series m / rate.
            at = (m // rate * D)[:, None] + d[None, :]
            read = present[:, None] & (d < D)[None, :]
            kv = tl.load(token[:, None] + at, mask=read, other=0.0)
            gate = tl.load(token[:, None] + SERIES * D + at, mask=read, other=0.0)
            bias = tl.load(bias_ptr + (m % rate * (SERIES * D))[:, None] + at, mask=read, other=0.0)
            largest, total, mixed = taken_in(largest, total, mixed, kv, gate + bias, present)
        y = entry_of(total, mixed, program, weight_ptr, cos_ptr, sin_ptr, eps, entries_ptr.dtype.element_ty, D, TURNED, BLOCK_D)
        to = entries_ptr + row * entries_b + number.to(tl.int64) * entries_e
        tl.store(to + d, y.to(entries_ptr.dtype.element_ty), mask=d < D)


def pick(name: str, slots: int) -> Launch:
    short, long = POOL[name]
    return short if slots <= short.slots else long


def options(launch: Launch, width: int, series: int, turned: int) -> dict:
    """The constants of the kernel and the compiler's options."""
    return {
        "D": width,
        "SERIES": series,
        "TURNED": turned,
        "BLOCK_M": launch.slots,
        "BLOCK_D": max(2, triton.next_power_of_2(width)),
        "STAGES": launch.stages,
        "num_warps": launch.warps,
        "enable_fp_fusion": True,
    }


def step_options(launch: Launch, width: int, series: int, turned: int) -> dict:
    """The constants of `step_kernel` and the compiler's options."""
    return options(launch, width, series, turned) | {"BLOCK_C": triton.next_power_of_2(2 * series * width)}


def run(
    projected: Tensor, bias: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, index: Tensor, present: Tensor, filled: Tensor,
    eps: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Arguments as in `dsv4.kernels.pooling.fused_pool`, checked there."""
    b, entries, slots = index.shape
    width, rate = weight.shape[0], bias.shape[0]
    out = torch.empty(b, entries, width, dtype=dtype, device=projected.device)
    if out.numel() == 0:
        return out
    projected = aligned_rows(projected)
    constants = options(pick(architecture(projected.device), slots), width, bias.shape[1] // width, 2 * cos.shape[-1])
    given = [t.contiguous() for t in (bias, weight, cos, sin, index, present, filled)]
    with torch.cuda.device_of(projected):
        pool_kernel[(b * entries,)](
            *(projected, *given, out),
            *(entries, slots, rate, projected.stride(0), projected.stride(1), eps),
            **constants,
        )
    return out


def step(
    projected: Tensor, ring: Tensor, entries: Tensor, bias: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, past: Tensor, after: Tensor,
    eps: float,
) -> None:  # fmt: skip
    """Arguments as in `dsv4.kernels.pooling.pool_step`, checked there."""
    (b, s, _), new = projected.shape, cos.shape[1]
    width, rate = weight.shape[0], bias.shape[0]
    if b * s == 0:
        return
    projected = projected.contiguous()
    series = bias.shape[1] // width
    constants = step_options(pick(architecture(projected.device), series * rate), width, series, 2 * cos.shape[-1])
    given = [t.contiguous() for t in (bias, weight, cos, sin, past, after)]
    with torch.cuda.device_of(projected):
        step_kernel[(b * new,)](
            *(projected, ring, entries, *given),
            *(s, ring.shape[1], new, entries.shape[1], rate, projected.stride(1), *ring.stride()[:2], *entries.stride()[:2], eps),
            **constants,
        )
