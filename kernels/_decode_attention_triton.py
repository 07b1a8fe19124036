"""Device code of `dsv4.kernels.decode_attention`: the tiles of a query's keys are shared among programs,
whose sums a second kernel puts together in the order of their keys.

In a ring in order (`ring`) a query's window is walked as the columns of its own tokens, so that a long ring costs no more than its
window; the rotary is turned back where the result is written.

How many programs share a query depends on sizes and on the device alone; which tiles each of them
walks, on the query's position. Axes: n heads of a program, k keys of a tile, D head width.
"""

from collections.abc import Mapping
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels._device_triton import INTERPRETER, aligned_rows, architecture, processors
from dsv4.kernels._norm_rotary_triton import turn
from dsv4.kernels._sparse_attention_triton import (
    LOG2E,
    LOWEST,
    Launch,
    attend,
    factors,
    options,
    pick,
)

# Fewest heads first, as FORWARD.
WIDE: Mapping[str, tuple[Launch, ...]] = {
    "sm_80": (
        Launch(heads=16, keys=64, warps=8, stages=3),
        Launch(heads=32, keys=32, warps=8, stages=3),
    ),
    "sm_90": (
        Launch(heads=16, keys=64, warps=8, stages=3),
        Launch(heads=64, keys=64, warps=8, stages=3),
    ),
    "sm_100": (
        Launch(heads=16, keys=64, warps=8, stages=3),
        Launch(heads=64, keys=64, warps=8, stages=3),
    ),
    INTERPRETER: (
        Launch(heads=16, keys=32, warps=1, stages=2),
        Launch(heads=64, keys=64, warps=1, stages=2),
    ),
}
# Where there are processors for more tiles than that: the least that a program waits for.
NARROW: Mapping[str, tuple[Launch, ...]] = {
    "sm_80": (
        Launch(heads=16, keys=32, warps=8, stages=3),
        Launch(heads=32, keys=32, warps=8, stages=3),
    ),
    "sm_90": (
        Launch(heads=16, keys=32, warps=8, stages=3),
        Launch(heads=64, keys=32, warps=8, stages=3),
    ),
    "sm_100": (
        Launch(heads=16, keys=32, warps=8, stages=3),
        Launch(heads=64, keys=32, warps=8, stages=3),
    ),
    INTERPRETER: (
        Launch(heads=16, keys=16, warps=1, stages=2),
        Launch(heads=64, keys=16, warps=1, stages=2),
    ),
}
# Most programs that share a query's keys. What a program takes beside its tiles, and putting sums together, in tiles' time (estimates).
MOST_SPLITS, START, COMBINE = 128, 1, 3
# Beyond, a row's windows are too far apart for every query to walk all columns.
FEW_QUERIES = 16
# Splits that are added up at a time, and columns, by a program of so many warps.
COMBINE_SPLITS, COMBINE_WIDTH, COMBINE_WARPS = 16, 128, 4
COUNTS = [
    *("query_count", "column_count", "window", "rate", "entry_count", "slot_count", "splits"),
    *("query_position_b", "token_position_b", "selection_b", "selection_s"),
]


@lru_cache(maxsize=1024)
def choose(queries: int, heads: int, keys: int, device: torch.device, narrow: bool = False) -> tuple[Launch, int]:
    """The tile, and how many programs share the keys of each of `queries` query tokens that has room for `keys` of them: whatever
    takes the fewest steps, where a device walks as many tiles at a time as it has processors. narrow: tiles are to be narrow ones.
    """
    name, room = architecture(device), processors(device)
    for table in (NARROW,) if narrow else (NARROW, WIDE):
        launch = pick(table, name, heads)
        programs = queries * triton.cdiv(heads, launch.heads)
        tiles = triton.cdiv(keys, launch.keys)
        if programs * tiles <= room:
            break

    def steps(splits: int) -> int:
        each = triton.cdiv(tiles, splits) + START
        return triton.cdiv(programs * splits, room) * each + (COMBINE if splits > 1 else 0)

    return launch, min(range(1, max(1, min(tiles, MOST_SPLITS)) + 1), key=steps)


def suits(queries: Tensor, tokens: Tensor, entries: Tensor | None, selection: Tensor | None) -> bool:
    """Whether these queries are so few that their keys are to be shared among programs."""
    b, s, heads, _ = queries.shape
    if s > FEW_QUERIES or queries.numel() == 0:
        return False
    listed = selection.shape[2] if selection is not None else 0 if entries is None else entries.shape[1]
    return choose(b * s, heads, tokens.shape[1] + listed, queries.device)[1] > 1


@triton.jit
def turned_back(mixed, row, first, cos_ptr, sin_ptr, DTYPE: tl.constexpr, TURNED: tl.constexpr, D: tl.constexpr,
                ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Channels first ... of heads [ROWS, COLUMNS] of one query, rounded to DTYPE, turned back by the query's angle."""
    mixed = mixed.to(DTYPE)
    if TURNED > 0:
        pair = first // 2 + tl.arange(0, COLUMNS // 2) - (D - TURNED) // 2
        turns = (pair >= 0) & (pair < TURNED // 2)
        cos = tl.load(cos_ptr + row * (TURNED // 2) + pair, mask=turns, other=1.0)
        sin = tl.load(sin_ptr + row * (TURNED // 2) + pair, mask=turns, other=0.0)
        mixed = turn(mixed.to(tl.float32), cos[None, :], -sin[None, :], ROWS, COLUMNS).to(DTYPE)
    return mixed


@triton.jit(do_not_specialize=COUNTS)
def split_kernel(
    query_ptr, token_ptr, entry_ptr, sink_ptr,
    query_position_ptr, token_position_ptr, selection_ptr, cos_ptr, sin_ptr,
    out_ptr, lse_ptr, mixed_ptr, largest_ptr, total_ptr,
    scale, heads, query_count, column_count, window, rate, entry_count, slot_count, splits,
    query_b, query_s, query_n, token_b, token_k, entry_b, entry_e,
    query_position_b, token_position_b, selection_b, selection_s,
    SPLIT: tl.constexpr, ORDERED: tl.constexpr, TURNED: tl.constexpr, SELECTED: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Of one query, up to BLOCK_N heads and a share of the keys; of all keys, if nothing is split."""
    KEPT: tl.constexpr = tl.float32 if WIDEN else token_ptr.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    head_blocks = tl.cdiv(heads, BLOCK_N)
    n = (program % head_blocks).to(tl.int32) * BLOCK_N + tl.arange(0, BLOCK_N)
    share = program // head_blocks
    row = share // splits
    split = (share % splits).to(tl.int32)
    batch = row // query_count
    query = row % query_count
    d = tl.arange(0, BLOCK_D)
    of_row = (n < heads)[:, None] & (d < D)[None, :]
    at = batch * query_b + query * query_s + n[:, None].to(tl.int64) * query_n
    q = tl.load(query_ptr + at + d[None, :], mask=of_row, other=0.0)
    position = tl.load(query_position_ptr + batch * query_position_b + query).to(tl.int32)
    closed = (position + 1) // rate
    listed = slot_count if SELECTED else tl.minimum(closed, entry_count)
    first = 0
    last = column_count - 1
    if ORDERED:
        # Token p stands in column p mod column_count: counted from the last one in column 0 that is not behind the window's first.
        first = tl.maximum(position - window + 1, 0)
        last = position - first
        first = first % column_count
        last = first + last
    window_tiles = tl.cdiv(last + 1 - first, BLOCK_K)
    tiles = tl.where(position < 0, 0, window_tiles + tl.cdiv(listed, BLOCK_K))
    largest, total, mixed = attend(
        q, tiles * split // splits, tiles * (split + 1) // splits, scale,
        position, first, last, closed, listed, window_tiles, window,
        column_count, entry_count, slot_count,
        token_ptr + batch * token_b, entry_ptr + batch * entry_b,
        token_position_ptr + batch * token_position_b,
        selection_ptr + batch * selection_b + query * selection_s,
        token_k, entry_e,
        SELECTED, True, ORDERED, D, BLOCK_D, BLOCK_N, BLOCK_K, STAGES, WIDEN, KEPT,
    )  # fmt: skip
    if SPLIT:
        to = share * heads
        tl.store(largest_ptr + to + n, largest, mask=n < heads)
        tl.store(total_ptr + to + n, total, mask=n < heads)
        # Where a share saw nothing, its sum is not read.
        saw = ((n < heads) & (total > 0))[:, None] & (d < D)[None, :]
        tl.store(mixed_ptr + to * D + (n[:, None] * D + d[None, :]), mixed, mask=saw)
    else:
        sink = tl.load(sink_ptr + n, mask=n < heads, other=0.0) * LOG2E
        factor, lse = factors(largest, total, sink)
        mixed = turned_back(
            mixed * factor[:, None], row, 0, cos_ptr, sin_ptr, out_ptr.dtype.element_ty, TURNED, D, BLOCK_N, BLOCK_D
        )  # fmt: skip
        tl.store(out_ptr + row * heads * D + (n[:, None] * D + d[None, :]), mixed, mask=of_row)
        tl.store(lse_ptr + row * heads + n, lse, mask=n < heads)


@triton.jit(do_not_specialize=["splits"])
def combine_kernel(
    mixed_ptr, largest_ptr, total_ptr, sink_ptr, cos_ptr, sin_ptr, out_ptr, lse_ptr,
    heads, splits,
    TURNED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Of one query and head, BLOCK_D columns: the shares' sums, from the first to the last."""
    head = tl.program_id(0).to(tl.int64)
    row, n = head // heads, head % heads
    first_d = tl.program_id(1) * BLOCK_D
    d = first_d + tl.arange(0, BLOCK_D)
    largest = tl.full([], LOWEST, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    mixed = tl.full([BLOCK_D], 0.0, tl.float32)
    # mixed[d] = sum over s of 2^(largest[s] - max largest) * mixed[s, d]
    for first in range(0, splits, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        at = (row * splits + split) * heads + n
        sums = tl.load(total_ptr + at, mask=split < splits, other=0.0)
        saw = sums > 0
        tops = tl.load(largest_ptr + at, mask=split < splits, other=LOWEST)
        parts = tl.load(mixed_ptr + at[:, None] * D + d[None, :], mask=saw[:, None] & (d < D)[None, :], other=0.0)
        new_largest = tl.maximum(largest, tl.max(tops, 0))
        fade = tl.exp2(largest - new_largest)
        weights = tl.exp2(tops - new_largest)
        total = total * fade + tl.sum(weights * sums, 0)
        mixed = mixed * fade + tl.sum(weights[:, None] * parts, 0)
        largest = new_largest
    factor, lse = factors(largest, total, tl.load(sink_ptr + n) * LOG2E)
    mixed = turned_back(
        (mixed * factor)[None, :], row, first_d, cos_ptr, sin_ptr, out_ptr.dtype.element_ty, TURNED, D, 1, BLOCK_D
    )  # fmt: skip
    tl.store(out_ptr + head * D + d[None, :], mixed, mask=(d < D)[None, :])
    tl.store(lse_ptr + head, lse, mask=tl.program_id(1) == 0)


def split_options(launch: Launch, width: int, is_selected: bool, is_split: bool, is_ordered: bool = False, turned: int = 0) -> dict:
    """The constants of `split_kernel` and the compiler's options."""
    return options(launch, width, is_selected, is_ring=not is_ordered) | {"SPLIT": is_split, "ORDERED": is_ordered, "TURNED": turned}


def combine_options(width: int, turned: int = 0) -> dict:
    """The constants of `combine_kernel` and the compiler's options."""
    return {
        "TURNED": turned,
        "D": width,
        "BLOCK_D": min(COMBINE_WIDTH, triton.next_power_of_2(width)),
        "BLOCK_S": COMBINE_SPLITS,
        "num_warps": COMBINE_WARPS,
        "enable_fp_fusion": True,
    }


def forward(
    queries: Tensor,
    tokens: Tensor,
    entries: Tensor | None,
    sinks: Tensor,
    selection: Tensor | None,
    query_positions: Tensor,
    token_positions: Tensor,
    window: int,
    rate: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Arguments as in `dsv4.kernels.decode_attention.fused_decode_attention`, checked there."""
    return _launch(queries, tokens, entries, sinks, selection, query_positions, token_positions, None, None, window, rate, scale)


def ring(
    queries: Tensor,
    tokens: Tensor,
    entries: Tensor | None,
    sinks: Tensor,
    selection: Tensor | None,
    query_positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    window: int,
    rate: int,
    scale: float,
) -> Tensor:
    """Arguments as in `dsv4.kernels.decode_attention.ring_attention`, checked there."""
    return _launch(queries, tokens, entries, sinks, selection, query_positions, None, cos, sin, window, rate, scale)[0]


def _launch(
    queries, tokens, entries, sinks, selection, query_positions, token_positions, cos, sin, window: int, rate: int, scale: float
) -> tuple[Tensor, Tensor]:
    """token_positions None: the tokens are a ring in order. cos, sin: by which the results are turned back, or None."""
    b, s, heads, width = queries.shape
    device = queries.device
    out = torch.empty(b, s, heads, width, dtype=queries.dtype, device=device)
    lse = torch.empty(b, s, heads, dtype=torch.float32, device=device)
    if out.numel() == 0:
        return out, lse
    is_selected, is_ordered, turned = selection is not None, token_positions is None, 0 if cos is None else 2 * cos.shape[-1]
    queries, tokens, sinks = aligned_rows(queries), aligned_rows(tokens), sinks.contiguous()
    sinks = sinks if sinks.dtype == torch.float32 else sinks.float()
    query_positions = query_positions.contiguous()
    # What is not there is given an address that the kernel never reads.
    entries = tokens[:, :0] if entries is None else aligned_rows(entries)
    token_positions = query_positions if is_ordered else token_positions.contiguous()
    angles = (sinks, sinks) if cos is None else (cos.contiguous(), sin.contiguous())
    selection = selection.contiguous() if is_selected else query_positions[:, :, None]
    listed = selection.shape[2] if is_selected else entries.shape[1]
    # Wide tiles of rows that no list names would spill the addresses of those in flight.
    keys = (window if is_ordered else tokens.shape[1]) + listed
    launch, splits = choose(b * s, heads, keys, device, is_ordered and not is_selected)
    shares = torch.empty(2, b * s, splits, heads, dtype=torch.float32, device=device)
    mixed = torch.empty(b * s if splits > 1 else 0, splits, heads, width, dtype=torch.float32, device=device)
    with torch.cuda.device_of(queries):
        split_kernel[(b * s * splits * triton.cdiv(heads, launch.heads),)](
            *(queries, tokens, entries, sinks, query_positions, token_positions, selection, *angles),
            *(out, lse, mixed, *shares, scale, heads, s, tokens.shape[1], window, max(rate, 1)),
            *(entries.shape[1], selection.shape[2], splits),
            *(*queries.stride()[:3], *tokens.stride()[:2], *entries.stride()[:2]),
            *(query_positions.stride(0), token_positions.stride(0), *selection.stride()[:2]),
            **split_options(launch, width, is_selected, splits > 1, is_ordered, turned),
        )
        if splits > 1:
            constants = combine_options(width, turned)
            combine_kernel[(b * s * heads, triton.cdiv(width, constants["BLOCK_D"]))](
                *(mixed, *shares, sinks, *angles, out, lse, heads, splits), **constants
            )
    return out, lse
