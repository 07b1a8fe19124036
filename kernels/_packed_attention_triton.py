"""Device code of `dsv4.kernels.sparse_attention` where a query has few heads and no selection of its own: the heads of
neighbouring query tokens are the rows of one program.

Neighbours share all but a few keys of their windows, and every entry. A key is read once per program rather than once per
token, and the rows are as many as wgmma takes. Axes: r rows of a program (token by token, head by head), k keys of a tile,
D head width.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels._device_triton import INTERPRETER, architecture
from dsv4.kernels._sparse_attention_triton import LOG2E, LOWEST, Arguments, Launch, factors, options, product

# heads: rows of a program.
PACKED: Mapping[str, Launch] = {
    "sm_80": Launch(heads=32, keys=32, warps=8, stages=3),
    "sm_90": Launch(heads=64, keys=64, warps=8, stages=3),
    # Twice the keys spill.
    "sm_100": Launch(heads=64, keys=32, warps=8, stages=4),
    INTERPRETER: Launch(heads=16, keys=16, warps=1, stages=2),
}
COUNTS = [
    *("query_count", "column_count", "back", "window", "rate", "entry_count"),
    *("query_position_b", "token_position_b"),
]


def suits(queries: Tensor, selection: Tensor | None) -> bool:
    """Whether the heads of two query tokens or more fit a program and see the same entries."""
    if selection is not None or queries.shape[1] < 2:
        return False
    return 2 * queries.shape[2] <= PACKED[architecture(queries.device)].heads


@triton.jit(do_not_specialize=COUNTS)
def packed_kernel(
    query_ptr, token_ptr, entry_ptr, sink_ptr, query_position_ptr, token_position_ptr,
    out_ptr, lse_ptr,
    scale, heads, query_count, column_count, back, window, rate, entry_count,
    query_b, query_s, query_n, token_b, token_k, entry_b, entry_e,
    query_position_b, token_position_b,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    NARROW: tl.constexpr = tl.float32 if WIDEN else token_ptr.dtype.element_ty
    TOKENS: tl.constexpr = BLOCK_N // HEADS
    program = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(query_count, TOKENS)
    batch = program // blocks
    first_query = (program % blocks).to(tl.int32) * TOKENS
    r = tl.arange(0, BLOCK_N)
    query = first_query + r // HEADS
    n = r % HEADS
    is_row = (query < query_count) & (n < heads)
    d = tl.arange(0, BLOCK_D)
    k = tl.arange(0, BLOCK_K)
    at = batch * query_b + query.to(tl.int64) * query_s + n.to(tl.int64) * query_n
    q = tl.load(query_ptr + at[:, None] + d[None, :], mask=is_row[:, None] & (d < D)[None, :], other=0.0)
    places = query_position_ptr + batch * query_position_b
    position = tl.load(places + query, mask=query < query_count, other=-1).to(tl.int32)
    furthest = tl.max(position, 0)
    closed = (position + 1) // rate
    listed = tl.minimum((furthest + 1) // rate, entry_count)
    # The columns of all windows.
    offset = column_count - query_count
    last = offset + tl.minimum(first_query + TOKENS, query_count) - 1
    first = tl.maximum(offset + first_query - back, 0)
    window_tiles = tl.cdiv(last + 1 - first, BLOCK_K)
    tiles = tl.where(furthest < 0, 0, window_tiles + tl.cdiv(listed, BLOCK_K))
    token_rows = token_ptr + batch * token_b
    entry_rows = entry_ptr + batch * entry_b
    position_row = token_position_ptr + batch * token_position_b

    to_base2 = scale * LOG2E
    largest = tl.full([BLOCK_N], LOWEST, tl.float32)
    total = tl.full([BLOCK_N], 0.0, tl.float32)
    mixed = tl.full([BLOCK_N, BLOCK_D], 0.0, tl.float32)
    # mixed[r, d] = sum over k of exp(scale * sum over d' of q[r, d'] keys[k, d']) * keys[k, d]
    # Without hoisting: addresses kept for each step would spill.
    for tile in tl.range(0, tiles, num_stages=STAGES, disable_licm=True):
        column = first + tile * BLOCK_K + k
        in_window = column <= last
        token_position = tl.load(position_row + column, mask=in_window, other=-1).to(tl.int32)
        entry = (tile - window_tiles) * BLOCK_K + k
        in_list = (entry >= 0) & (entry < listed)
        is_window = tile < window_tiles
        # Arguments are aligned; the choice between two of them does not show it.
        base = tl.multiple_of(tl.where(is_window, token_rows, entry_rows), 16)
        step = tl.where(is_window, token_k, entry_e)
        place = tl.where(is_window, column, entry).to(tl.int64)
        read = (in_window | in_list)[:, None] & (d < D)[None, :]
        keys = tl.load(base + (place * step)[:, None] + d[None, :], mask=read, other=0.0)
        weights = tl.full([BLOCK_N, BLOCK_K], 0.0, tl.float32).to(NARROW)
        fade = tl.full([BLOCK_N], 1.0, tl.float32)
        # Always true, as in `attend` of the kernel for one token.
        if column_count + entry_count > tile:
            scores = product(q, tl.trans(keys), None, WIDEN) * to_base2
            distance = position[:, None] - token_position[None, :]
            seen = (token_position >= 0)[None, :] & (distance >= 0) & (distance < window)
            seen = seen | (in_list[None, :] & (entry[None, :] < closed[:, None]))
            scores = tl.where(seen, scores, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(scores, 1))
            fade = tl.exp2(largest - new_largest)
            exact = tl.exp2(scores - new_largest[:, None])
            total = total * fade + tl.sum(exact, 1)
            largest = new_largest
            weights = exact.to(NARROW)
        mixed = product(weights, keys, mixed * fade[:, None], WIDEN)

    sink = tl.load(sink_ptr + n, mask=is_row, other=0.0) * LOG2E
    factor, lse = factors(largest, total, sink)
    to = (batch * query_count + query) * heads + n
    tl.store(lse_ptr + to, lse, mask=is_row)
    mixed = (mixed * factor[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + to[:, None] * D + d[None, :], mixed, mask=is_row[:, None] & (d < D)[None, :])


def packed_options(launch: Launch, width: int, heads: int) -> dict:
    """The constants of `packed_kernel` and the compiler's options."""
    found = options(launch, width, is_selected=False)
    del found["SELECTED"]
    return found | {"HEADS": triton.next_power_of_2(heads)}


def forward(queries: Tensor, tokens: Tensor, entries: Tensor | None, sinks: Tensor, *rest) -> tuple[Tensor, Tensor]:
    """Arguments as in `dsv4.kernels.sparse_attention.fused_sparse_attention`, checked there; no selection."""
    b, s, heads, width = queries.shape
    out = torch.empty(b, s, heads, width, dtype=queries.dtype, device=queries.device)
    lse = torch.empty(b, s, heads, dtype=torch.float32, device=queries.device)
    if out.numel() == 0:
        return out, lse
    given = Arguments.of(queries, tokens, entries, *rest)
    constants = packed_options(PACKED[architecture(queries.device)], width, heads)
    with torch.cuda.device_of(queries):
        packed_kernel[(b * triton.cdiv(s, constants["BLOCK_N"] // constants["HEADS"]),)](
            *(*given.tensors, sinks.contiguous(), *given.lists[:2], out, lse),
            *(*given.sizes[:-1], *given.row_strides, *given.list_strides[:2]),
            **constants,
        )
    return out, lse
