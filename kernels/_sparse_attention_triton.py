"""Device code of `dsv4.kernels.sparse_attention`: one query token times up to 64 heads per program.

The keys of a query are its window's columns, then its entries (the selected ones, or every closed
one), walked in tiles of `keys` rows that are gathered from memory: a row is read once per program.
Softmax is online in float32, in base 2. Axes: n heads of a program, k keys of a tile, D head width.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels._device_triton import architecture, interpreted

LOG2E = tl.constexpr(1.4426950408889634)
# Below every score, and finite: differences of two running maxima stay defined.
LOWEST = tl.constexpr(-3.4028234663852886e38)
# tl.dot needs 16 rows; more than 64 rows do not leave room for a tile of 512 float32 sums each.
MIN_TILE, MAX_HEADS = 16, 64


@dataclass(frozen=True)
class Launch:
    """How one kernel is launched: keys of a tile, warps of a program, tiles in flight."""

    keys: int
    warps: int
    stages: int


# (architecture, bytes of an element, heads of a program) -> launch, for head widths up to 512.
FORWARD: Mapping[tuple[str, int, int], Launch] = {
    ("sm_90", 2, 64): Launch(keys=64, warps=8, stages=3),
    ("sm_90", 2, 32): Launch(keys=64, warps=8, stages=2),
    ("sm_90", 2, 16): Launch(keys=64, warps=4, stages=2),
    ("interpreter", 2, 64): Launch(keys=16, warps=1, stages=1),
}


@triton.jit
def _product(a, b, total, WIDEN: tl.constexpr, PRECISION: tl.constexpr):
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit(
    do_not_specialize=[
        *("query_count", "column_count", "back", "window", "rate", "entry_count", "slot_count"),
        *("query_position_b", "token_position_b", "selection_b", "selection_s"),
    ]
)
def forward_kernel(
    query_ptr, token_ptr, entry_ptr, sink_ptr,
    query_position_ptr, token_position_ptr, selection_ptr,
    out_ptr, lse_ptr,
    scale, heads, query_count, column_count, back, window, rate, entry_count, slot_count,
    query_b, query_s, query_n, token_b, token_k, entry_b, entry_e,
    query_position_b, token_position_b, selection_b, selection_s,
    SELECTED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    WIDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    head_blocks = tl.cdiv(heads, BLOCK_N)
    row = program // head_blocks
    batch = row // query_count
    query = (row % query_count).to(tl.int32)
    n = (program % head_blocks).to(tl.int32) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    k = tl.arange(0, BLOCK_K)
    of_row = (n < heads)[:, None] & (d < D)[None, :]

    at = batch * query_b + query.to(tl.int64) * query_s + n[:, None].to(tl.int64) * query_n
    q = tl.load(query_ptr + at + d[None, :], mask=of_row, other=0.0)
    position = tl.load(query_position_ptr + batch * query_position_b + query).to(tl.int32)

    # Columns first ... last hold the window; padding (position -1) has no keys at all.
    last = column_count - query_count + query
    first = tl.maximum(last - back, 0)
    token_tiles = tl.cdiv(last + 1 - first, BLOCK_K)
    closed = (position + 1) // rate
    listed = slot_count if SELECTED else tl.minimum(closed, entry_count)
    tiles = tl.where(position < 0, 0, token_tiles + tl.cdiv(listed, BLOCK_K))

    token_rows = token_ptr + batch * token_b
    entry_rows = entry_ptr + batch * entry_b
    position_row = token_position_ptr + batch * token_position_b
    selection_row = selection_ptr + batch * selection_b + query.to(tl.int64) * selection_s
    to_base2 = scale * LOG2E
    largest = tl.full([BLOCK_N], LOWEST, tl.float32)
    total = tl.full([BLOCK_N], 0.0, tl.float32)
    mixed = tl.full([BLOCK_N, BLOCK_D], 0.0, tl.float32)
    # mixed[n, d] = sum over k of exp(scale * sum over d' of q[n, d'] key[k, d']) * key[k, d]
    for tile in tl.range(0, tiles, num_stages=STAGES):
        is_window = tile < token_tiles
        column = first + tile * BLOCK_K + k
        in_window = is_window & (column <= last)
        token_position = tl.load(position_row + column, mask=in_window, other=-1).to(tl.int32)
        distance = position - token_position
        slot = (tile - token_tiles) * BLOCK_K + k
        in_list = (tile >= token_tiles) & (slot < listed)
        if SELECTED:
            entry = tl.load(selection_row + slot, mask=in_list, other=-1).to(tl.int32)
        else:
            entry = slot
        is_open = (entry >= 0) & (entry < entry_count) & (entry < closed)
        seen_token = in_window & (token_position >= 0) & (distance >= 0) & (distance < window)
        seen = seen_token | (in_list & is_open)
        read = in_window | (in_list & is_open)
        base = tl.where(is_window, token_rows, entry_rows)
        place = tl.where(is_window, column.to(tl.int64) * token_k, entry.to(tl.int64) * entry_e)
        key = tl.load(
            base + place[:, None] + d[None, :], mask=read[:, None] & (d < D)[None, :], other=0.0
        )
        weights = tl.full([BLOCK_N, BLOCK_K], 0.0, tl.float32).to(key.dtype)
        fade = tl.full([BLOCK_N], 1.0, tl.float32)
        # Always true, which the compiler cannot know. Chained products are laid out with each warp
        # group computing every score; a product of its own inside a branch is shared among them.
        if slot_count + column_count > tile:
            scores = _product(q, tl.trans(key), None, WIDEN, PRECISION) * to_base2
            scores = tl.where(seen[None, :], scores, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(scores, 1))
            fade = tl.exp2(largest - new_largest)
            exact = tl.exp2(scores - new_largest[:, None])
            total = total * fade + tl.sum(exact, 1)
            largest = new_largest
            weights = exact.to(key.dtype)
        mixed = _product(weights, key, mixed * fade[:, None], WIDEN, PRECISION)

    sink = tl.load(sink_ptr + n, mask=n < heads, other=0.0) * LOG2E
    top = tl.maximum(largest, sink)
    share = tl.exp2(largest - top)
    whole = total * share + tl.exp2(sink - top)
    mixed = mixed * (share / tl.where(whole > 0, whole, 1.0))[:, None]
    to = (row * heads + n)[:, None] * D + d[None, :]
    tl.store(out_ptr + to, mixed.to(out_ptr.dtype.element_ty), mask=of_row)
    lse = tl.where(total > 0, (largest + tl.log2(total)) / LOG2E, float("-inf"))
    tl.store(lse_ptr + row * heads + n, lse, mask=n < heads)
