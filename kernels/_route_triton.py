"""Device code that sorts slots by expert in one launch: `sort_by_expert` and `tiles_of` of
dsv4.kernels.routing, to the last index.

A sort and the arithmetic around it are some twenty launches, which decoding a token would mostly
wait for. Here each slot counts those that come before it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels.routing import most_tiles, sort_by_expert, tiles_of

# Slots that a program ranks; slots, and tiles, that the last program takes at a time; warps.
RANKED, COUNTED, WARPS = 128, 32, 8
# Every slot is compared with every other; beyond so many a sort is quicker.
MAX_SLOTS = 16384


@triton.jit
def _expert_of(indices, valid, slot, n, top_k, E, MASKED: tl.constexpr):
    """Expert of each slot, E for a token that is not valid, E + 1 past the end."""
    inside = slot < n
    e = tl.load(indices + slot, mask=inside, other=E + 1).to(tl.int32)
    if MASKED:
        is_valid = tl.load(valid + slot // top_k, mask=inside, other=1)
        e = tl.where(is_valid == 0, E, e)
    return e


@triton.jit
def rank_slots(indices, valid, order, begin, n, top_k, E, RANKED: tl.constexpr, MASKED: tl.constexpr):
    """Places of RANKED slots from `begin` on."""
    i = begin + tl.arange(0, RANKED)
    mine = _expert_of(indices, valid, i, n, top_k, E, MASKED)
    rank = tl.zeros((RANKED,), tl.int32)
    # rank[i] = how many j have expert[j] < expert[i], or the same expert and j < i
    for j0 in range(0, n, RANKED):
        j = j0 + tl.arange(0, RANKED)
        other = _expert_of(indices, valid, j, n, top_k, E, MASKED)
        is_less = other[None, :] < mine[:, None]
        is_earlier = (other[None, :] == mine[:, None]) & (j[None, :] < i[:, None])
        rank += tl.sum((is_less | is_earlier).to(tl.int32), 1)
    tl.store(order + rank, i, mask=i < n)


@triton.jit
def count_slots(
    indices, valid, ends, tile_expert, tile_row, n, top_k, E, tiles,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, COUNTED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Ends of the groups, and tiles."""
    e = tl.arange(0, EXPERTS)
    count = tl.zeros((EXPERTS,), tl.int32)
    # count[e] = how many j have expert[j] = e
    for j0 in range(0, n, COUNTED):
        slot = j0 + tl.arange(0, COUNTED)
        other = _expert_of(indices, valid, slot, n, top_k, E, MASKED)
        count += tl.sum((other[None, :] == e[:, None]).to(tl.int32), 1)
    count = tl.where(e < E, count, 0)
    end = tl.cumsum(count, 0)
    tl.store(ends + e, end, mask=e < E)
    need = (count + ROWS - 1) // ROWS
    upto = tl.cumsum(need, 0)
    total = tl.sum(need, 0)
    # Where tile 0 would begin, were all tiles the expert's.
    base = end - count - (upto - need) * ROWS
    # expert[t] = how many e have upto[e] <= t
    for t0 in range(0, tiles, COUNTED):
        t = t0 + tl.arange(0, COUNTED)
        expert = tl.sum((upto[None, :] <= t[:, None]).to(tl.int32), 1)
        is_its = e[None, :] == expert[:, None]
        first = tl.sum(tl.where(is_its, base[None, :], 0), 1) + t * ROWS
        tl.store(tile_expert + t, tl.where(t < total, expert, -1), mask=t < tiles)
        tl.store(tile_row + t, tl.where(t < total, first, 0), mask=t < tiles)


@triton.jit
def route(
    indices, valid, order, ends, tile_expert, tile_row,
    n, top_k, E, tiles,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, RANKED: tl.constexpr, COUNTED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The last program counts, the others rank."""
    pid = tl.program_id(0)
    if pid < tl.num_programs(0) - 1:
        rank_slots(indices, valid, order, pid * RANKED, n, top_k, E, RANKED, MASKED)
    else:
        count_slots(indices, valid, ends, tile_expert, tile_row, n, top_k, E, tiles, ROWS, EXPERTS, COUNTED, MASKED)


def groups(indices: Tensor, valid: Tensor | None, experts: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """indices [t k] -> (order [n], expert and first row of each tile [T], ends [E]), all int32."""
    slots, top_k = indices.numel(), indices.shape[1]
    if slots > MAX_SLOTS:
        order, ends = sort_by_expert(indices, experts, valid)
        return order.int(), *tiles_of(ends, rows, slots), ends
    tiles = most_tiles(experts, rows, slots)
    order, tile_expert, tile_row, ends = (
        torch.empty(size, dtype=torch.int32, device=indices.device) for size in (slots, tiles, tiles, experts)
    )
    route[(triton.cdiv(slots, RANKED) + 1,)](
        indices, indices if valid is None else valid.view(torch.uint8),
        order, ends, tile_expert, tile_row, slots, top_k, experts, tiles,
        ROWS=rows, EXPERTS=triton.next_power_of_2(experts), RANKED=RANKED, COUNTED=COUNTED,
        MASKED=valid is not None, num_warps=WARPS, enable_fp_fusion=True,
    )  # fmt: skip
    return order, tile_expert, tile_row, ends
