"""Modules that hold a part of their weights, for each way of `dsv4.parallel_plan`.

Each is a mixin over the whole module's class, which goes on computing, with a part: what is added is what enters and what leaves.
`shards` is the DeviceMesh of the processes that share the module. Axes: b batch, s token, k slot, e entry.
"""

from functools import cache

import torch
from torch import Tensor, nn

from dsv4.collectives import cut, embedding, enter, gather, join, reduce, send, send_counts
from dsv4.kernels.grouped_experts import grouped_experts, slots_in_order, sort_by_expert
from dsv4.kernels.index_scores import CHUNK, closed_entries, index_head_scores, select_entries
from dsv4.kernels.numeric import wide
from dsv4.traffic import ALL_TO_ALL, Traffic, traffic


class Shards:
    """What all of them have."""

    shards: object

    def dequantized(self, dtype: torch.dtype = torch.bfloat16):
        raise ValueError('this module holds a part of its weights: load with weights="dequantized" in place of dequantize()')

    @property
    def rank(self) -> int:
        return self.shards.get_local_rank()


class Rows(Shards):
    """A linear map that makes a part of its outputs from a whole input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(enter(x, self.shards))

    def in_float32(self, x: Tensor) -> Tensor:
        return super().in_float32(enter(x, self.shards))

    def whole_matrix(self, dtype: torch.dtype) -> Tensor:
        return gather(self.matrix(dtype), 0, self.shards)


class Logits(Rows):
    """The head: logits of a part of the vocabulary, put together."""

    def forward(self, x: Tensor) -> Tensor:
        return gather(super().forward(x), -1, self.shards)


class Groups(Shards):
    """A block-diagonal map of some of the groups: a part in, a part out."""

    def whole_matrix(self, dtype: torch.dtype) -> Tensor:
        return gather(self.matrix(dtype), 0, self.shards)


class Columns(Shards):
    """A linear map that reads a part of its inputs; the products are added up."""

    def forward(self, x: Tensor) -> Tensor:
        return reduce(super().forward(x), self.shards)

    def whole_matrix(self, dtype: torch.dtype) -> Tensor:
        return gather(self.matrix(dtype), 1, self.shards)


class Vocabulary(Shards):
    """The embedding of a part of the vocabulary."""

    def forward(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.weight, self.shards)


class Heads(Shards):
    """Attention with some of the heads. Keys and entries are whole, so that a KVCache is the same on every process."""

    def fused(self, queries, tokens, entries, selection, call) -> Tensor:
        entries = None if entries is None else enter(entries, self.shards)
        return super().fused(queries, enter(tokens, self.shards), entries, selection, call)

    def over_heads(self, x: Tensor) -> Tensor:
        return reduce(super().over_heads(x), self.shards)


class IndexHeads(Shards):
    """An indexer with some of the index heads: scores are added up before the choice."""

    def spelled(self, queries, keys, weights, closed, call) -> Tensor:
        return super().spelled(queries, enter(keys, self.shards), weights, closed, call)

    def combine(self, head_scores: Tensor, weights: Tensor) -> Tensor:
        return reduce(super().combine(head_scores, weights), self.shards)

    def fused(self, queries, keys, weights, call) -> Tensor:
        """As `select_by_index`: chunks of queries whose whole scores are held at a time."""
        b, s, heads, _ = queries.shape
        closed = closed_entries(call.positions, call.windows[self.layer_type].rate, keys.shape[1])
        length = max(1, CHUNK // max(1, b * heads * keys.shape[1]))
        parts = []
        for begin in range(0, s, length):
            part = slice(begin, begin + length)
            scores = self.combine(index_head_scores(queries[:, part], keys), weights[:, part])
            parts.append(select_entries(scores.masked_fill(~closed[:, part], float("-inf")), self.top_k))
        return torch.cat(parts, dim=1)


class ExpertShare(Shards):
    """Some of the routed experts, in order, each process those of its own. Tokens and experts meet in one of two forms, whichever costs
    fewer bytes by the rule of `dsv4.traffic`.

    `num_experts` counts all of them. The values of the spelled-out way are whole on every process, which takes the form that gathers.
    """

    @property
    def first(self) -> int:
        return self.rank * self.share

    @property
    def share(self) -> int:
        return self.num_experts // self.shards.size()

    def traffic(self, x: Tensor, indices: Tensor) -> Traffic:
        """Of one mixture of x [b s H] and indices [b s k]."""
        (b, s, k), processes = indices.shape, self.shards.size()
        return traffic(b * s, k, x.shape[-1], processes, self.num_experts, x.dtype.itemsize)

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor, valid: Tensor | None = None) -> Tensor:
        way = self.sent if self.traffic(x, indices).form == ALL_TO_ALL else self.gathered
        return way(x, indices, weights, valid)

    def gathered(self, x: Tensor, indices: Tensor, weights: Tensor, valid: Tensor | None) -> Tensor:
        """Every process computes the slots of its own experts, of all tokens; outputs are added up."""
        rows, token, own, counts = self._own_slots(x, indices, valid)
        weight = enter(weights, self.shards).flatten(0, 1).t()[own].unsqueeze(-1)
        chosen = (indices.flatten(0, 1).t()[own] - self.first).unsqueeze(-1)
        out = self._computed(rows, chosen, weight)
        total = out.new_zeros(x.shape[0] * x.shape[1], x.shape[2])
        # Slot by slot: each adds to a token once, so that the order of the sum is that of the slots.
        for place, part in zip(token.split(counts), out.split(counts), strict=True):
            total = total.index_add(0, place, part)
        return reduce(total, self.shards).view(x.shape)

    def sent(self, x: Tensor, indices: Tensor, weights: Tensor, valid: Tensor | None) -> Tensor:
        """Every process takes a slice of the tokens and sends the row of each slot to the process that has its expert; what comes back
        is weighted and added up in slot order, rounded to x's dtype, and joined.
        """
        mesh, tokens, k = self.shards, x.shape[0] * x.shape[1], indices.shape[-1]
        own, chosen, weight = (cut(t.flatten(0, 1), mesh) for t in (x, indices, weights))
        order, ends = sort_by_expert(chosen, self.num_experts, None if valid is None else cut(valid.flatten(), mesh))
        # Sorted by expert is sorted by process; padding comes last and stays.
        counts = ends.diff(prepend=ends.new_zeros(1)).long().view(mesh.size(), self.share)
        coming = send_counts(counts, mesh)
        there, here = torch.stack((counts.sum(1), coming.sum(1))).tolist()
        order = order[: sum(there)]
        rows = send(own.index_select(0, order // k), there, here, mesh)
        expert = torch.arange(self.share, device=x.device).repeat(mesh.size()).repeat_interleave(coming.flatten(), output_size=sum(here))
        out = self._computed(rows, expert.unsqueeze(-1), weights.new_ones(len(rows), 1)).to(x.dtype)
        slots = out.new_zeros(chosen.numel(), x.shape[-1]).index_copy(0, order, send(out, here, there, mesh))
        total = (weight.unsqueeze(-2) @ wide(slots.unflatten(0, (len(own), k)))).squeeze(-2)
        return wide(join(total.to(x.dtype), tokens, mesh)).view(x.shape)

    def _computed(self, rows: Tensor, expert: Tensor, weight: Tensor) -> Tensor:
        """rows [n H] through experts [n 1], of this process's numbering -> [n H] float32, weighted [n 1]."""
        return grouped_experts(rows, expert, weight, self.stored(rows.dtype), self.limit, self.backend, numerics=self.numerics)

    def slot_gate_up(self, x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        rows, _, own, _ = self._own_slots(x, indices)
        both = self._whole_slots(self._by_expert("gate_up", rows, indices, own), own, indices)
        return both.chunk(2, dim=-1)

    def slot_down(self, neurons: Tensor, indices: Tensor) -> Tensor:
        own = self._is_own(indices)
        rows = enter(neurons, self.shards).flatten(0, 1).transpose(0, 1)[own]
        return self._whole_slots(self._by_expert("down", rows, indices, own), own, indices)

    def gate_up_matrix(self, expert: int, dtype: torch.dtype) -> Tensor:
        return self._whole_matrix(super().gate_up_matrix, expert, dtype)

    def down_matrix(self, expert: int, dtype: torch.dtype) -> Tensor:
        return self._whole_matrix(super().down_matrix, expert, dtype)

    def _is_own(self, indices: Tensor) -> Tensor:
        """[k b*s] bool: slots of this process's experts, slot by slot."""
        chosen = indices.flatten(0, 1).t()
        return (chosen >= self.first) & (chosen < self.first + self.share)

    def _own_slots(self, x: Tensor, indices: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, list[int]]:
        """(inputs of the own slots [n H], their tokens [n], which they are [k b*s], how many in each of the k places)."""
        own = self._is_own(indices)
        own = own if valid is None else own & valid.flatten()
        token = own.nonzero()[:, 1]
        return enter(x, self.shards).flatten(0, 1).index_select(0, token), token, own, own.sum(1).tolist()

    def _by_expert(self, map_name: str, rows: Tensor, indices: Tensor, own: Tensor) -> Tensor:
        """A map of the bank over the own slots' rows [n in] -> [n out]."""
        order, ends = sort_by_expert((indices.flatten(0, 1).t()[own] - self.first).unsqueeze(-1), self.share)
        return slots_in_order(getattr(self.stored(rows.dtype), map_name)(rows.index_select(0, order), ends), order)

    def _whole_slots(self, out: Tensor, own: Tensor, indices: Tensor) -> Tensor:
        """[n out] -> [b s k out]: every slot's, from the process that computed it."""
        place = own.flatten().nonzero().squeeze(-1)
        spread = out.new_zeros(own.numel(), out.shape[-1]).index_copy(0, place, out)
        return reduce(spread, self.shards).unflatten(0, own.shape).transpose(0, 1).unflatten(0, indices.shape[:2])

    def _whole_matrix(self, matrix, expert: int, dtype: torch.dtype) -> Tensor:
        is_own = self.first <= expert < self.first + self.share
        found = matrix(expert - self.first if is_own else 0, dtype)
        return reduce(found if is_own else torch.zeros_like(found), self.shards)


MIXINS = {
    "vocabulary": Vocabulary,
    "logits": Logits,
    "heads": Heads,
    "index heads": IndexHeads,
    "rows": Rows,
    "groups": Groups,
    "columns": Columns,
    "experts": ExpertShare,
}
# Attributes that count what the module itself computes with.
COUNTS = {"heads": ("heads",), "index heads": ("heads",), "groups": ("groups",)}


@cache
def sharded(kind: type[nn.Module], how: str) -> type[nn.Module]:
    """The class of a module of that kind split that way."""
    return type(f"{MIXINS[how].__name__}Of{kind.__name__}", (MIXINS[how], kind), {"__module__": __name__})


def split(module: nn.Module, how: str, mesh) -> None:
    """Turn a module whose tensors have been cut into one that computes with its part."""
    for name in COUNTS.get(how, ()):
        setattr(module, name, getattr(module, name) // mesh.size())
    module.__class__ = sharded(type(module), how)
    module.shards = mesh


def is_sharded(module: nn.Module) -> bool:
    return isinstance(module, Shards)
