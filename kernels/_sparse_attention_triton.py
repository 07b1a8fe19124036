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
from dsv4.kernels.sparse_attention import MAX_WIDTH

LOG2E = tl.constexpr(1.4426950408889634)
# Below every score, and finite: the difference of two running maxima is always defined.
LOWEST = tl.constexpr(-3.4028234663852886e38)
# tl.dot multiplies at least 16 x 16.
MIN_TILE = 16
REGISTERS_OF_THREAD = 255


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched.

    Attributes:
        heads, keys: rows of the queries' and of the keys' tile.
        warps: of a program.
        stages: tiles in flight where a selection, or the positions of a ring, have to arrive before
            the rows that they name. Elsewhere one less is as many rows in flight.
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
# Numbers that differ from call to call: no kernel is compiled anew for some of their values.
COUNTS = [
    *("query_count", "column_count", "back", "window", "rate", "entry_count", "slot_count"),
    *("query_position_b", "token_position_b", "selection_b", "selection_s"),
]


def pick(table: Mapping[str, tuple[Launch, ...]], name: str, heads: int) -> Launch:
    """The smallest tile that holds all heads in one program, else the largest."""
    return next((launch for launch in table[name] if launch.heads >= heads), table[name][-1])


@triton.jit
def product(a, b, total, WIDEN: tl.constexpr):
    # a @ b + total, in float32.
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def rows_of_program(heads, query_count, BLOCK_N: tl.constexpr):
    """(flat query, batch row, query column, heads) of this program."""
    program = tl.program_id(0).to(tl.int64)
    head_blocks = tl.cdiv(heads, BLOCK_N)
    row = program // head_blocks
    n = (program % head_blocks).to(tl.int32) * BLOCK_N + tl.arange(0, BLOCK_N)
    return row, row // query_count, (row % query_count).to(tl.int32), n


@triton.jit
def extent(
    position, query, query_count, column_count, back, rate, entry_count, slot_count,
    SELECTED: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Columns first ... last hold the window, then `listed` entries, of which `closed` are closed;
    a query at padding (position -1) has no tiles.
    """
    last = column_count - query_count + query
    first = tl.maximum(last - back, 0)
    window_tiles = tl.cdiv(last + 1 - first, BLOCK_K)
    closed = (position + 1) // rate
    listed = slot_count if SELECTED else tl.minimum(closed, entry_count)
    tiles = tl.where(position < 0, 0, window_tiles + tl.cdiv(listed, BLOCK_K))
    return first, last, closed, listed, window_tiles, tiles


@triton.jit
def keys_of_tile(
    tile, position, first, last, closed, listed, window_tiles, window, column_count, entry_count,
    token_rows, entry_rows, position_row, selection_row, token_k, entry_e,
    SELECTED: tl.constexpr, RING: tl.constexpr, ORDERED: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """(keys [BLOCK_K, BLOCK_D], which of them the query sees, their rows in their tensor).

    A ring may hold anything where it holds no token the query sees: there it is not read. ORDERED:
    first ... last are the positions the query sees, counted from one that stands in column 0.
    """
    k = tl.arange(0, BLOCK_K)
    d = tl.arange(0, BLOCK_D)
    column = first + tile * BLOCK_K + k
    in_window = column <= last
    if ORDERED:
        seen_token = in_window
        column = tl.where(column < column_count, column, column - column_count)
    else:
        token_position = tl.load(position_row + column, mask=in_window, other=-1).to(tl.int32)
        distance = position - token_position
        seen_token = in_window & (token_position >= 0) & (distance >= 0) & (distance < window)
    slot = (tile - window_tiles) * BLOCK_K + k
    in_list = (slot >= 0) & (slot < listed)
    entry = slot
    if SELECTED:
        entry = tl.load(selection_row + slot, mask=in_list, other=-1).to(tl.int32)
    seen_entry = in_list & (entry >= 0) & (entry < entry_count) & (entry < closed)
    is_window = tile < window_tiles
    # Arguments are aligned; the choice between two of them does not show it.
    base = tl.multiple_of(tl.where(is_window, token_rows, entry_rows), 16)
    step = tl.where(is_window, token_k, entry_e)
    place = tl.where(is_window, column, entry).to(tl.int64)
    seen = seen_token | seen_entry
    read = (seen if RING else in_window | seen_entry)[:, None] & (d < D)[None, :]
    keys = tl.load(base + (place * step)[:, None] + d[None, :], mask=read, other=0.0)
    return keys, seen, place


@triton.jit
def attend(
    q, first_tile, end_tile, scale,
    position, first, last, closed, listed, window_tiles, window, column_count, entry_count, slot_count,
    token_rows, entry_rows, position_row, selection_row, token_k, entry_e,
    SELECTED: tl.constexpr, RING: tl.constexpr, ORDERED: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    WIDEN: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """(largest score in base 2, sum of 2^(score - largest), that sum over the keys) of these tiles."""
    to_base2 = scale * LOG2E
    largest = tl.full([BLOCK_N], LOWEST, tl.float32)
    total = tl.full([BLOCK_N], 0.0, tl.float32)
    mixed = tl.full([BLOCK_N, BLOCK_D], 0.0, tl.float32)
    # mixed[n, d] = sum over k of exp(scale * sum over d' of q[n, d'] keys[k, d']) * keys[k, d]
    # Where rows are named by what is read, without hoisting: addresses kept for each step would spill.
    for tile in tl.range(first_tile, end_tile, num_stages=STAGES, disable_licm=SELECTED or RING):
        keys, seen, _ = keys_of_tile(
            tile, position, first, last, closed, listed, window_tiles, window, column_count, entry_count,
            token_rows, entry_rows, position_row, selection_row, token_k, entry_e,
            SELECTED, RING, ORDERED, D, BLOCK_D, BLOCK_K,
        )  # fmt: skip
        weights = tl.full([BLOCK_N, BLOCK_K], 0.0, tl.float32).to(NARROW)
        fade = tl.full([BLOCK_N], 1.0, tl.float32)
        # Always true, which the compiler cannot know. Chained products are laid out with each warp
        # group computing every score; a product of its own inside a branch is shared among them.
        if column_count + entry_count + slot_count > tile:
            scores = product(q, tl.trans(keys), None, WIDEN) * to_base2
            scores = tl.where(seen[None, :], scores, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(scores, 1))
            fade = tl.exp2(largest - new_largest)
            exact = tl.exp2(scores - new_largest[:, None])
            total = total * fade + tl.sum(exact, 1)
            largest = new_largest
            weights = exact.to(NARROW)
        mixed = product(weights, keys, mixed * fade[:, None], WIDEN)
    return largest, total, mixed


@triton.jit
def factors(largest, total, sink):
    """(what the mixed keys are multiplied with, log-sum-exp of the scores); the sink is in base 2."""
    top = tl.maximum(largest, sink)
    share = tl.exp2(largest - top)
    whole = total * share + tl.exp2(sink - top)
    saw = total > 0
    lse = tl.where(saw, (largest + tl.log2(tl.where(saw, total, 1.0))) / LOG2E, float("-inf"))
    return share / tl.where(whole > 0, whole, 1.0), lse


@triton.jit(do_not_specialize=COUNTS)
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
    row, batch, query, n = rows_of_program(heads, query_count, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    of_row = (n < heads)[:, None] & (d < D)[None, :]
    at = batch * query_b + query.to(tl.int64) * query_s + n[:, None].to(tl.int64) * query_n
    q = tl.load(query_ptr + at + d[None, :], mask=of_row, other=0.0)
    position = tl.load(query_position_ptr + batch * query_position_b + query).to(tl.int32)
    first, last, closed, listed, window_tiles, tiles = extent(
        position, query, query_count, column_count, back, rate, entry_count, slot_count,
        SELECTED, BLOCK_K,
    )  # fmt: skip
    largest, total, mixed = attend(
        q, 0, tiles, scale,
        position, first, last, closed, listed, window_tiles, window,
        column_count, entry_count, slot_count,
        token_ptr + batch * token_b, entry_ptr + batch * entry_b,
        token_position_ptr + batch * token_position_b,
        selection_ptr + batch * selection_b + query.to(tl.int64) * selection_s,
        token_k, entry_e,
        SELECTED, False, False, D, BLOCK_D, BLOCK_N, BLOCK_K, STAGES, WIDEN, NARROW,
    )  # fmt: skip
    sink = tl.load(sink_ptr + n, mask=n < heads, other=0.0) * LOG2E
    factor, lse = factors(largest, total, sink)
    to = row * heads + n
    tl.store(lse_ptr + to, lse, mask=n < heads)
    mixed = (mixed * factor[:, None]).to(out_ptr.dtype.element_ty)
    of_row = (n < heads)[:, None] & (d < D)[None, :]
    tl.store(out_ptr + to[:, None] * D + d[None, :], mixed, mask=of_row)


def options(launch: Launch, width: int, is_selected: bool, is_ring: bool = False) -> dict:
    """The constants of a kernel and the compiler's options."""
    block = max(MIN_TILE, triton.next_power_of_2(width))
    return {
        "SELECTED": is_selected,
        "D": width,
        "BLOCK_D": block,
        "BLOCK_N": launch.heads,
        "BLOCK_K": launch.keys,
        "STAGES": launch.stages if is_selected or is_ring else launch.stages - 1,
        # The interpreter takes the bits of 16-bit floats for integers.
        "WIDEN": INTERPRETED,
        "num_warps": launch.warps,
        # All there are: in narrow tiles the assembler aims at fewer, for more programs at a time, and spills.
        "maxnreg": None if block == MAX_WIDTH else REGISTERS_OF_THREAD,
        "enable_fp_fusion": True,
    }


@dataclass(frozen=True)
class Arguments:
    """What both directions are launched with: rows that the kernels can read, sizes, strides."""

    tensors: tuple[Tensor, Tensor, Tensor]
    lists: tuple[Tensor, Tensor, Tensor]
    sizes: tuple[int | float, ...]
    row_strides: tuple[int, ...]
    list_strides: tuple[int, ...]
    is_selected: bool

    @classmethod
    def of(
        cls, queries, tokens, entries, selection, query_positions, token_positions,
        window: int, gap: int, rate: int, scale: float,
    ) -> "Arguments":  # fmt: skip
        is_selected = selection is not None
        queries, tokens = aligned_rows(queries), aligned_rows(tokens)
        # Without entries, or without a selection, the kernel is given addresses it never reads.
        entries = tokens[:, :0] if entries is None else aligned_rows(entries)
        query_positions = query_positions.contiguous()
        token_positions = token_positions.contiguous()
        selection = selection.contiguous() if is_selected else query_positions[:, :, None]
        heads, s = queries.shape[2], queries.shape[1]
        counts = heads, s, tokens.shape[1], window - 1 + gap, window, max(rate, 1)
        return cls(
            (queries, tokens, entries),
            (query_positions, token_positions, selection),
            (scale, *counts, entries.shape[1], selection.shape[2]),
            (*queries.stride()[:3], *tokens.stride()[:2], *entries.stride()[:2]),
            (query_positions.stride(0), token_positions.stride(0), *selection.stride()[:2]),
            is_selected,
        )


def forward(
    queries: Tensor, tokens: Tensor, entries: Tensor | None, sinks: Tensor, *rest
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Arguments as in `dsv4.kernels.sparse_attention.fused_sparse_attention`, checked there."""
    b, s, heads, width = queries.shape
    out = torch.empty(b, s, heads, width, dtype=queries.dtype, device=queries.device)
    lse = torch.empty(b, s, heads, dtype=torch.float32, device=queries.device)
    if out.numel() == 0:
        return out, lse
    given = Arguments.of(queries, tokens, entries, *rest)
    launch = pick(FORWARD, architecture(queries.device), heads)
    with torch.cuda.device_of(queries):
        forward_kernel[(b * s * triton.cdiv(heads, launch.heads),)](
            *(*given.tensors, sinks.contiguous(), *given.lists, out, lse),
            *(*given.sizes, *given.row_strides, *given.list_strides),
            **options(launch, width, given.is_selected),
        )
    return out, lse
