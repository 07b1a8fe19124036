"""Device code of `dsv4.kernels.router`: every program makes the logits of a few experts, and the last one to arrive has the rest.

Products and sums are float32's, of numbers as they are stored: no tensor core. One program's share of the weight is a few rows of it,
so that the weight is read once; what is left is a table of tokens by experts, which stands in the registers of one program.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels._arrival_triton import counters, is_last
from dsv4.kernels._route_triton import count_slots, rank_slots
from dsv4.kernels.router import UNDERFLOWN, Routes
from dsv4.kernels.routing import FEW_ROWS, most_tiles

# Experts of a program, products that it holds at a time, warps; of the last one: slots ranked, and slots and tiles counted, at a time.
OF_PROGRAM, PRODUCTS, WARPS, RANKED, COUNTED = 2, 8192, 8, 32, 16


@triton.jit
def sqrt_softplus(x):
    """sqrt(log(1 + exp(x))) to float32's precision, without its cancellation."""
    # log(1 + e) of e in (0, 1], by its series in e / (2 + e): each term is at most a ninth of the one before.
    e = tl.exp(-tl.abs(x))
    part = e / (2.0 + e)
    square = part * part
    series = 1.0 / 15.0
    for i in tl.static_range(7):
        series = series * square + 1.0 / (13.0 - 2.0 * i)
    softplus = tl.where(x > 0.0, x, 0.0) + 2.0 * part * series
    # Far below zero it is exp(x / 2), which leaves float32 later than exp(x).
    return tl.where(x < -17.0, tl.exp(0.5 * x), tl.sqrt(softplus))


@triton.jit
def sortable(x, e, EXPERTS: tl.constexpr):
    """Scores x of experts e as int64 that order like (score, expert from the last to the first); -0.0 counts as 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (order.to(tl.int64) << 32) | (EXPERTS - 1 - e).to(tl.int64)


@triton.jit
def router_kernel(
    x_ptr, weight_ptr, bias_ptr, table_ptr, id_ptr, valid_ptr, logit_ptr, score_ptr, selection_ptr, index_ptr, share_ptr,
    order_ptr, tile_expert_ptr, tile_row_ptr, end_ptr, counter_ptr,
    token_count, hidden, experts, tiles, factor, least,
    TOP_K: tl.constexpr, FEW: tl.constexpr, EXPERTS: tl.constexpr, HASH: tl.constexpr, MASKED: tl.constexpr,
    ROWS: tl.constexpr, RANKED: tl.constexpr, COUNTED: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    t = tl.arange(0, FEW)
    mine = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    h = tl.arange(0, BLOCK_H)
    products = tl.zeros([FEW, BLOCK_E, BLOCK_H], tl.float32)
    for h0 in range(0, hidden, BLOCK_H):
        inside = h0 + h < hidden
        x = tl.load(x_ptr + t[:, None] * hidden + (h0 + h)[None, :], mask=(t < token_count)[:, None] & inside[None, :], other=0.0)
        at = weight_ptr + mine[:, None] * hidden + (h0 + h)[None, :]
        weight = tl.load(at, mask=(mine < experts)[:, None] & inside[None, :], other=0.0)
        products += x.to(tl.float32)[:, None, :] * weight.to(tl.float32)[None, :, :]
    is_mine = (t < token_count)[:, None] & (mine < experts)[None, :]
    tl.store(logit_ptr + t[:, None] * experts + mine[None, :], tl.sum(products, 2), mask=is_mine)
    if is_last(counter_ptr, tl.num_programs(0)):
        choose(
            bias_ptr, table_ptr, id_ptr, logit_ptr, score_ptr, selection_ptr, index_ptr, share_ptr,
            token_count, experts, factor, least, TOP_K, FEW, EXPERTS, HASH,
        )  # fmt: skip
        # What a thread has stored, another one loads.
        tl.debug_barrier()
        n = token_count * TOP_K
        for begin in range(0, n, RANKED):
            rank_slots(index_ptr, valid_ptr, order_ptr, begin, n, TOP_K, experts, RANKED, MASKED)
        count_slots(
            index_ptr, valid_ptr, end_ptr, tile_expert_ptr, tile_row_ptr, n, TOP_K, experts, tiles, ROWS, EXPERTS, COUNTED, MASKED
        )  # fmt: skip


@triton.jit
def choose(
    bias_ptr, table_ptr, id_ptr, logit_ptr, score_ptr, selection_ptr, index_ptr, share_ptr, token_count, experts, factor, least,
    TOP_K: tl.constexpr, FEW: tl.constexpr, EXPERTS: tl.constexpr, HASH: tl.constexpr,
):  # fmt: skip
    """Scores, the experts chosen, their weights."""
    t = tl.arange(0, FEW)
    e = tl.arange(0, EXPERTS)
    is_token = t < token_count
    is_score = is_token[:, None] & (e < experts)[None, :]
    at = t[:, None] * experts + e[None, :]
    # From the L2, where other programs have put them.
    scores = sqrt_softplus(tl.load(logit_ptr + at, mask=is_score, other=0.0, cache_modifier=".cg"))
    tl.store(score_ptr + at, scores, mask=is_score)
    if HASH:
        row = tl.load(id_ptr + t, mask=is_token, other=0) * TOP_K
    else:
        selection = scores + tl.load(bias_ptr + e, mask=e < experts, other=0.0)[None, :]
        tl.store(selection_ptr + at, selection, mask=is_score)
        key = tl.where((e < experts)[None, :], sortable(selection, e[None, :], EXPERTS), -0x8000000000000000)
    total = tl.zeros([FEW], tl.float32)
    for k in range(TOP_K):
        if HASH:
            expert = tl.load(table_ptr + row + k, mask=is_token, other=0).to(tl.int32)
        else:
            expert = EXPERTS - 1 - (tl.max(key, 1) & 0xFFFFFFFF).to(tl.int32)
            key = tl.where(e[None, :] == expert[:, None], -0x8000000000000000, key)
        tl.store(index_ptr + t * TOP_K + k, expert.to(tl.int64), mask=is_token)
        score = tl.sum(tl.where(e[None, :] == expert[:, None], scores, 0.0), 1)
        total += score
        tl.store(share_ptr + t * TOP_K + k, score, mask=is_token)
    total = tl.where(tl.abs(total) < least, 1.0, total)
    # What a thread has stored, another one loads.
    tl.debug_barrier()
    for k in tl.static_range(TOP_K):
        at = share_ptr + t * TOP_K + k
        tl.store(at, tl.load(at, mask=is_token, other=0.0) / total * factor, mask=is_token)


def options(tokens: int, hidden: int, experts: int, top_k: int, *, is_hash: bool, is_masked: bool) -> dict:
    """The constants of `router_kernel` and the compiler's options."""
    few = triton.next_power_of_2(tokens)
    return {
        "TOP_K": top_k,
        "FEW": few,
        "EXPERTS": triton.next_power_of_2(experts),
        "HASH": is_hash,
        "MASKED": is_masked,
        "ROWS": FEW_ROWS,
        "RANKED": RANKED,
        "COUNTED": COUNTED,
        "BLOCK_E": OF_PROGRAM,
        "BLOCK_H": min(PRODUCTS // (few * OF_PROGRAM), triton.next_power_of_2(hidden)),
        "num_warps": WARPS,
        "enable_fp_fusion": True,
    }


def run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    ids: Tensor | None,
    valid: Tensor | None,
    top_k: int,
    factor: float,
) -> Routes:
    """As `fused_router`, checked by it."""
    (tokens, hidden), experts = x.shape, weight.shape[0]
    tiles = most_tiles(experts, FEW_ROWS, tokens * top_k)

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    logits, scores = (empty(torch.float32, tokens, experts) for _ in range(2))
    selection = empty(torch.float32, 0) if bias is None else torch.empty_like(scores)
    indices, weights = empty(torch.int64, tokens, top_k), empty(torch.float32, tokens, top_k)
    order, tile_expert, tile_row, ends = (empty(torch.int32, size) for size in (tokens * top_k, tiles, tiles, experts))
    routes = Routes(logits, scores, selection, indices, weights, order, tile_expert, tile_row, ends)
    if tokens == 0:
        return routes._replace(ends=ends.zero_())
    # What is absent is given an address that the kernel never reads.
    bias, table, ids = (scores if t is None else t.contiguous() for t in (bias, table, ids))
    with torch.cuda.device_of(x):
        router_kernel[(triton.cdiv(experts, OF_PROGRAM),)](
            *(x, weight, bias, table, ids, scores if valid is None else valid.contiguous().view(torch.uint8), *routes),
            *(counters(x.device, 1), tokens, hidden, experts, tiles, factor, UNDERFLOWN),
            **options(tokens, hidden, experts, top_k, is_hash=selection.numel() == 0, is_masked=valid is not None),
        )
    return routes
