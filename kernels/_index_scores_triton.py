"""Device code of `dsv4.kernels.index_scores`: scores of entries, and the best of each query.

`score_kernel` multiplies a tile of entries with the heads of a few queries; entries are the rows of the product, so that the sum over
heads stays within a warp. FP8 keys are widened on their way to the tensor core, which is exact. `select_kernel` holds a query's scores in
registers: the k-th best is found bit by bit, by counting, then those above it are packed, and of those equal to it the lowest entries.
A row of more entries than the widest tile is selected from in parts first; what the parts keep holds the best of the whole.
Axes: q query, h head, e entry of a tile, d width.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels._device_triton import INTERPRETED, INTERPRETER, aligned_rows, architecture, processors

# Programs of `score_kernel` for each processor, where there are entries enough.
PROGRAMS = 4
COUNTS = ["query_begin", "query_count", "chunk", "entry_count", "seen", "rate", "tiles_of_program", "score_row", "kept"]


@dataclass(frozen=True)
class Scores:
    """How `score_kernel` is launched: queries and entries of a tile, warps, tiles in flight."""

    queries: int
    entries: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Choice:
    """How `select_kernel` is launched: entries of a program, warps."""

    entries: int
    warps: int


# For one query of a row (decoding), and for many; resources of each entry are held by tests.
SCORES: Mapping[str, tuple[Scores, Scores]] = {
    "sm_80": (Scores(queries=1, entries=64, warps=4, stages=3), Scores(queries=2, entries=128, warps=8, stages=2)),
    "sm_90": (Scores(queries=1, entries=64, warps=4, stages=3), Scores(queries=2, entries=128, warps=8, stages=3)),
    "sm_100": (Scores(queries=1, entries=64, warps=4, stages=3), Scores(queries=2, entries=128, warps=8, stages=3)),
    INTERPRETER: (Scores(queries=1, entries=16, warps=1, stages=1), Scores(queries=2, entries=32, warps=1, stages=1)),
}
# Fewest entries first; the last one is as many as a program's registers hold, and several times what is kept at most, so that parts shrink.
CHOICES: Mapping[str, tuple[Choice, ...]] = {
    "sm_80": (Choice(entries=1024, warps=4), Choice(entries=4096, warps=8), Choice(entries=8192, warps=16)),
    "sm_90": (Choice(entries=1024, warps=4), Choice(entries=4096, warps=8), Choice(entries=8192, warps=16)),
    "sm_100": (Choice(entries=1024, warps=4), Choice(entries=4096, warps=8), Choice(entries=8192, warps=16)),
    INTERPRETER: (Choice(entries=16, warps=1), Choice(entries=256, warps=1), Choice(entries=8192, warps=1)),
}


@triton.jit(do_not_specialize=COUNTS)
def score_kernel(
    query_ptr, key_ptr, key_scale_ptr, weight_ptr, position_ptr, score_ptr,
    query_begin, query_count, chunk, entry_count, seen, rate, tiles_of_program, score_row, query_b, query_s, key_b, key_e, heads, scale,
    D: tl.constexpr, SCALED: tl.constexpr, FILLS: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """scores[b, q, e] = scale key_scale_e sum over n of weight_qn relu(query_qn . key_e), for queries query_begin ... of each row."""
    blocks = tl.cdiv(chunk, BLOCK_Q)
    program = tl.program_id(0).to(tl.int64)
    batch = program // blocks
    first = (program % blocks).to(tl.int32) * BLOCK_Q
    n = tl.arange(0, BLOCK_Q * BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    q = first + n // BLOCK_N
    head = n % BLOCK_N
    is_head = (q < chunk) & (head < heads)
    of_query = (query_begin + q).to(tl.int64)
    rows = query_ptr + batch * query_b + (of_query * query_s + head * D)[:, None] + d[None, :]
    queries = tl.load(rows, mask=is_head[:, None] & (d < D)[None, :], other=0.0)
    weights = tl.load(weight_ptr + (batch * query_count + of_query) * heads + head, mask=is_head, other=0.0)
    own = first + tl.arange(0, BLOCK_Q)
    is_query = own < chunk
    position = tl.load(position_ptr + batch * query_count + query_begin + own, mask=is_query, other=-1)
    closed = tl.minimum((position + 1) // rate, seen).to(tl.int32)
    to = score_ptr + (batch * chunk + own)[None, :] * score_row
    begin = tl.program_id(1) * tiles_of_program
    end = tl.minimum(begin + tiles_of_program, tl.cdiv(seen, BLOCK_E))
    needed = tl.minimum(end, tl.cdiv(tl.max(closed, 0), BLOCK_E))
    keys_of_row = key_ptr + batch * key_b
    for tile in tl.range(begin, needed, num_stages=STAGES):
        e = tile * BLOCK_E + tl.arange(0, BLOCK_E)
        is_entry = e < seen
        keys = tl.load(
            keys_of_row + (e.to(tl.int64) * key_e)[:, None] + d[None, :], mask=is_entry[:, None] & (d < D)[None, :], other=0.0
        )  # fmt: skip
        if WIDEN:
            products = tl.dot(keys.to(tl.float32), tl.trans(queries.to(tl.float32)), input_precision="ieee")
        else:
            products = tl.dot(keys.to(queries.dtype), tl.trans(queries))
        weighted = tl.maximum(products, 0.0) * weights[None, :]
        scores = tl.sum(tl.reshape(weighted, (BLOCK_E, BLOCK_Q, BLOCK_N)), 2) * scale
        if SCALED:
            scores = scores * tl.load(key_scale_ptr + batch * entry_count + e, mask=is_entry, other=0.0)[:, None]
        scores = tl.where(e[:, None] < closed[None, :], scores, float("-inf"))
        tl.store(to + e[:, None], scores, mask=is_entry[:, None] & is_query[None, :])
    if FILLS:
        for tile in range(tl.maximum(begin, needed), end):
            e = tile * BLOCK_E + tl.arange(0, BLOCK_E)
            blank = tl.full([BLOCK_E, BLOCK_Q], float("-inf"), tl.float32)
            tl.store(to + e[:, None], blank, mask=(e < seen)[:, None] & is_query[None, :])


@triton.jit
def sortable(score):
    """Integers that sort like the scores; -0.0 is 0.0."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=COUNTS)
def select_kernel(
    score_ptr, entry_ptr, position_ptr, kept_score_ptr, kept_entry_ptr, out_ptr,
    query_begin, query_count, chunk, seen, rate, score_row, kept,
    LISTED: tl.constexpr, FINAL: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The `kept` best of a part of a row, ties to the lowest. LISTED: places name entries in entry_ptr, in order, -1 for none.
    FINAL: sorted into out_ptr, best first; else in order of entries, with their scores.
    """
    LEAST: tl.constexpr = -2147483648
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    query = row // chunk * query_count + query_begin + row % chunk
    place = part * BLOCK_E + tl.arange(0, BLOCK_E)
    if LISTED:
        entry = tl.load(entry_ptr + row * score_row + place, mask=place < seen, other=-1)
        is_open = entry >= 0
    else:
        entry = place
        is_open = place < tl.minimum((tl.load(position_ptr + query) + 1) // rate, seen)
    score = tl.load(score_ptr + row * score_row + place, mask=is_open, other=float("-inf"))
    is_open = is_open & (score > float("-inf"))
    order = tl.where(is_open, sortable(score), LEAST)
    wanted = tl.minimum(tl.sum(is_open.to(tl.int32), 0), kept)
    # The largest number that at least `wanted` reach.
    bound = tl.full([], LEAST, tl.int32)
    bit = tl.full([], LEAST, tl.int32)
    for _ in range(32):
        trial = bound ^ bit
        reached = tl.sum((order >= trial).to(tl.int32), 0)
        bound = tl.where(reached >= wanted, trial, bound)
        bit = (bit >> 1) & 0x7FFFFFFF
    above = order > bound
    tied = is_open & (order == bound)
    # Both counts in one scan: a part has fewer than 2^15 entries.
    counts = tl.cumsum(above.to(tl.int32) + (tied.to(tl.int32) << 16), 0)
    room = wanted - tl.sum(above.to(tl.int32), 0)
    is_kept = above | (tied & ((counts >> 16) <= room))
    to = (counts & 0xFFFF) + tl.minimum(counts >> 16, room) - 1
    k = tl.arange(0, BLOCK_K)
    begin = (row * tl.num_programs(1) + part) * kept
    tl.store(kept_score_ptr + begin + to, score, mask=is_kept)
    tl.store(kept_entry_ptr + begin + to, entry, mask=is_kept)
    if FINAL:
        tl.debug_barrier()
        score = tl.load(kept_score_ptr + begin + k, mask=k < wanted, other=float("-inf"))
        entry = tl.load(kept_entry_ptr + begin + k, mask=k < wanted, other=0)
        # A score and an entry in one number that sorts as (score descending, entry ascending); none of them is the least of all.
        packed = (sortable(score).to(tl.int64) << 32) | (0xFFFFFFFF - entry.to(tl.int64))
        packed = tl.sort(tl.where(k < wanted, packed, -9223372036854775808), descending=True)
        tl.store(out_ptr + query * kept + k, tl.where(k < wanted, 0xFFFFFFFF - (packed & 0xFFFFFFFF), -1), mask=k < kept)
    else:
        tl.store(kept_entry_ptr + begin + k, tl.full([BLOCK_K], -1, tl.int32), mask=(k >= wanted) & (k < kept))


def score_options(launch: Scores, heads: int, width: int, is_scaled: bool, fills: bool) -> dict:
    """The constants of `score_kernel` and the compiler's options."""
    return {
        "D": width,
        "SCALED": is_scaled,
        "FILLS": fills,
        "BLOCK_Q": launch.queries,
        # A product is at least 16 wide.
        "BLOCK_N": max(triton.next_power_of_2(heads), 16 // launch.queries),
        "BLOCK_E": launch.entries,
        "BLOCK_D": max(16, triton.next_power_of_2(width)),
        "STAGES": launch.stages,
        # The interpreter takes the bits of 16-bit floats for integers.
        "WIDEN": INTERPRETED,
        "num_warps": launch.warps,
        "enable_fp_fusion": True,
    }


def select_options(launch: Choice, kept: int, is_listed: bool, is_final: bool) -> dict:
    """The constants of `select_kernel` and the compiler's options."""
    return {
        "LISTED": is_listed,
        "FINAL": is_final,
        "BLOCK_E": launch.entries,
        "BLOCK_K": triton.next_power_of_2(kept),
        "num_warps": launch.warps,
        "enable_fp_fusion": True,
    }


@dataclass(frozen=True)
class Rows:
    """Queries, keys and weights as the kernels can read them."""

    queries: Tensor
    keys: Tensor
    key_scale: Tensor | None
    weights: Tensor
    positions: Tensor
    rate: int

    @classmethod
    def of(cls, queries, keys, key_scale, weights, positions, rate: int) -> "Rows":
        queries = queries.contiguous()
        scale = None if key_scale is None else key_scale.contiguous()
        return cls(queries, aligned_rows(keys), scale, weights.contiguous(), positions.contiguous(), rate)

    def score(self, begin: int, chunk: int, seen: int, fills: bool, weight_scale: float = 1.0) -> Tensor:
        """[b chunk seen] float32 of queries begin ... begin + chunk, each against the first `seen` entries; where an entry is not
        closed -inf, or with fills=False whatever was there before.
        """
        b, s, heads, width = self.queries.shape
        scores = torch.empty(b, chunk, seen, dtype=torch.float32, device=self.queries.device)
        if scores.numel() == 0:
            return scores
        launch = SCORES[architecture(self.queries.device)][chunk > 1]
        # Without a scale the kernel is given an address it never reads.
        key_scale = self.weights if self.key_scale is None else self.key_scale
        blocks, tiles = b * triton.cdiv(chunk, launch.queries), triton.cdiv(seen, launch.entries)
        wanted = max(1, min(tiles, triton.cdiv(PROGRAMS * processors(self.queries.device), blocks)))
        each = triton.cdiv(tiles, wanted)
        with torch.cuda.device_of(self.queries):
            score_kernel[(blocks, triton.cdiv(tiles, each))](
                *(self.queries, self.keys, key_scale, self.weights, self.positions, scores),
                *(begin, s, chunk, self.keys.shape[1], seen, self.rate, each, seen),
                *(*self.queries.stride()[:2], *self.keys.stride()[:2], heads, width**-0.5 * weight_scale),
                **score_options(launch, heads, width, self.key_scale is not None, fills),
            )
        return scores

    def select(self, out: Tensor, begin: int, chunk: int, scores: Tensor) -> None:
        """Write the best of queries begin ... begin + chunk into out [b s k]."""
        (b, s, kept), seen = out.shape, scores.shape[2]
        table = CHOICES[architecture(scores.device)]
        entries = scores
        with torch.cuda.device_of(scores):
            while True:
                launch = next((choice for choice in table if choice.entries >= seen), table[-1])
                parts = triton.cdiv(seen, launch.entries)
                is_final = parts == 1
                sizes = (b, chunk, parts * kept)
                kept_scores = torch.empty(sizes, dtype=torch.float32, device=scores.device)
                kept_entries = torch.empty(sizes, dtype=torch.int32, device=scores.device)
                select_kernel[(b * chunk, parts)](
                    *(scores, entries, self.positions, kept_scores, kept_entries, out),
                    *(begin, s, chunk, seen, self.rate, seen, kept),
                    **select_options(launch, kept, entries is not scores, is_final),
                )
                if is_final:
                    return
                scores, entries, seen = kept_scores, kept_entries, parts * kept
