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

from dsv4.kernels._device_triton import INTERPRETED, INTERPRETER, aligned_rows, architecture

LOG2E = tl.constexpr(1.4426950408889634)
# Below every score, and finite: the difference of two running maxima is always defined.
LOWEST = tl.constexpr(-3.4028234663852886e38)
# tl.dot multiplies at least 16 x 16.
MIN_TILE = 16


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched.

    Attributes:
        heads, keys: rows of the queries' and of the keys' tile.
        warps: of a program.
        stages: tiles in flight where a selection has to arrive before the rows it names. Dense
            entries need one less for as many rows in flight.
    """

    heads: int
    keys: int
    warps: int
    stages: int


# Fewest heads first. For head widths up to 512 of two bytes an element; resources of each entry
# are held by tests: no spills, and the shared memory of one program.
FORWARD: Mapping[str, tuple[Launch, ...]] = {
    "sm_80": (
        Launch(heads=16, keys=64, warps=8, stages=3),
        # 64 heads spill: each warp holds its queries' whole width in registers.
        Launch(heads=32, keys=32, warps=8, stages=3),
    ),
    "sm_90": (
        # Below 64 rows there is no wgmma, but a quarter of the products.
        Launch(heads=16, keys=64, warps=8, stages=3),
        Launch(heads=64, keys=64, warps=8, stages=3),
    ),
    "sm_100": (
        Launch(heads=16, keys=64, warps=8, stages=3),
        Launch(heads=64, keys=64, warps=8, stages=3),
    ),
    INTERPRETER: (
        Launch(heads=16, keys=16, warps=1, stages=2),
        Launch(heads=64, keys=64, warps=1, stages=2),
    ),
}


def pick(table: Mapping[str, tuple[Launch, ...]], name: str, heads: int) -> Launch:
    """The smallest tile that holds all heads in one program, else the largest."""
    return next((launch for launch in table[name] if launch.heads >= heads), table[name][-1])


@triton.jit
def _product(a, b, total, WIDEN: tl.constexpr):
    # a @ b + total, in float32.
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


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
    WIDEN: tl.constexpr,
):  # fmt: skip
    NARROW: tl.constexpr = tl.float32 if WIDEN else token_ptr.dtype.element_ty
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
        in_window = column <= last
        token_position = tl.load(position_row + column, mask=in_window, other=-1).to(tl.int32)
        distance = position - token_position
        slot = (tile - token_tiles) * BLOCK_K + k
        in_list = (slot >= 0) & (slot < listed)
        if SELECTED:
            entry = tl.load(selection_row + slot, mask=in_list, other=-1).to(tl.int32)
        else:
            entry = slot
        is_open = (entry >= 0) & (entry < entry_count) & (entry < closed)
        seen_token = in_window & (token_position >= 0) & (distance >= 0) & (distance < window)
        seen = seen_token | (in_list & is_open)
        read = in_window | (in_list & is_open)
        base = tl.multiple_of(tl.where(is_window, token_rows, entry_rows), 16)
        step = tl.where(is_window, token_k, entry_e)
        place = tl.where(is_window, column, entry).to(tl.int64) * step
        key = tl.load(
            base + place[:, None] + d[None, :], mask=read[:, None] & (d < D)[None, :], other=0.0
        )
        weights = tl.full([BLOCK_N, BLOCK_K], 0.0, tl.float32).to(NARROW)
        fade = tl.full([BLOCK_N], 1.0, tl.float32)
        # Always true, which the compiler cannot know. Chained products are laid out with each warp
        # group computing every score; a product of its own inside a branch is shared among them.
        if column_count + entry_count + slot_count > tile:
            scores = _product(q, tl.trans(key), None, WIDEN) * to_base2
            scores = tl.where(seen[None, :], scores, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(scores, 1))
            fade = tl.exp2(largest - new_largest)
            exact = tl.exp2(scores - new_largest[:, None])
            total = total * fade + tl.sum(exact, 1)
            largest = new_largest
            weights = exact.to(NARROW)
        mixed = _product(weights, key, mixed * fade[:, None], WIDEN)

    sink = tl.load(sink_ptr + n, mask=n < heads, other=0.0) * LOG2E
    top = tl.maximum(largest, sink)
    share = tl.exp2(largest - top)
    whole = total * share + tl.exp2(sink - top)
    mixed = mixed * (share / tl.where(whole > 0, whole, 1.0))[:, None]
    to = (row * heads + n)[:, None] * D + d[None, :]
    tl.store(out_ptr + to, mixed.to(out_ptr.dtype.element_ty), mask=of_row)
    saw = total > 0
    lse = tl.where(saw, (largest + tl.log2(tl.where(saw, total, 1.0))) / LOG2E, float("-inf"))
    tl.store(lse_ptr + row * heads + n, lse, mask=n < heads)


def options(launch: Launch, width: int, is_selected: bool) -> dict:
    """The constants of `forward_kernel` and the compiler's options."""
    return {
        "SELECTED": is_selected,
        "D": width,
        "BLOCK_D": max(MIN_TILE, triton.next_power_of_2(width)),
        "BLOCK_N": launch.heads,
        "BLOCK_K": launch.keys,
        "STAGES": launch.stages if is_selected else launch.stages - 1,
        # The interpreter takes the bits of 16-bit floats for integers.
        "WIDEN": INTERPRETED,
        "num_warps": launch.warps,
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
    gap: int,
    rate: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Launch: arguments as in `dsv4.kernels.sparse_attention`, checked there."""
    b, s, heads, width = queries.shape
    out = torch.empty(b, s, heads, width, dtype=queries.dtype, device=queries.device)
    lse = torch.empty(b, s, heads, dtype=torch.float32, device=queries.device)
    if out.numel() == 0:
        return out, lse
    queries, tokens = aligned_rows(queries), aligned_rows(tokens)
    # Without entries the kernel is given addresses that it never reads.
    entries = tokens[:, :0] if entries is None else aligned_rows(entries)
    is_selected = selection is not None
    query_positions, token_positions = query_positions.contiguous(), token_positions.contiguous()
    selection = query_positions[:, :, None] if selection is None else selection.contiguous()
    launch = pick(FORWARD, architecture(queries.device), heads)
    with torch.cuda.device_of(queries):
        forward_kernel[(b * s * triton.cdiv(heads, launch.heads),)](
            *(queries, tokens, entries, sinks.contiguous()),
            *(query_positions, token_positions, selection, out, lse),
            *(scale, heads, s, tokens.shape[1], window - 1 + gap, window, max(rate, 1)),
            *(entries.shape[1], selection.shape[2]),
            *queries.stride()[:3],
            *tokens.stride()[:2],
            *entries.stride()[:2],
            *(query_positions.stride(0), token_positions.stride(0), *selection.stride()[:2]),
            **options(launch, width, is_selected),
        )
    return out, lse
