"""Knockout: in chosen blocks, chosen queries do not see chosen tokens, or chosen entries.

A token reaches a query of a compressed block three ways, and all three are closed:

    window   its own key: the score is -inf
    entries  every entry pooled from it: the queries see a copy pooled without it (its gate is -inf)
    indexer  the indexer's entries likewise, which decide what is selected

The softmax, with its sink, is taken over what is left, so what the block adds at those queries is
what it would add had the token not been there. This is about one block: the token still travels
through other tokens, and through the blocks that are not named.
Axes: b row, s query, N head, T token key, e entry, m slot of an entry.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dsv4.call import Call, Windows
from dsv4.capture import Last, Pos
from dsv4.config import CSA, SLIDING
from dsv4.hooks import HookPoint
from dsv4.kernels.index_scores import (
    closed_entries,
    combine_heads,
    index_head_scores,
    select_entries,
)
from dsv4.kernels.norm_rotary import rotate_back
from dsv4.kernels.numeric import wide
from dsv4.kernels.sparse_attention import mix_values, visible_entries
from dsv4.part import Positions, as_mask, indices_of

CHANNELS = ("window", "entries", "indexer")
LEVELS = ("token", "entry")
MASKED = float("-inf")


class KnockingOut:
    """Mixed into the model."""

    @contextmanager
    def knockout(
        self,
        layers: int | Iterable[int],
        queries: Pos,
        keys: Pos,
        *,
        channels: str | Iterable[str] = CHANNELS,
        heads: int | Iterable[int] | None = None,
        level: str = "token",
        before_topk: bool = False,
    ) -> Iterator[None]:
        """In these blocks, the queries do not see the keys, in every run made inside.

        Args:
            queries, keys: positions of the row (see `dsv4.part.Positions`); None is all. With a KV
                cache, and so in a generation, keys count from the row's start.
            channels: of "window", "entries", "indexer", those that are closed. With all of them no
                change of a key reaches what the block adds at the queries; a query that is a key
                itself still asks with what it holds.
            heads: only these heads do not see the keys. The choice of entries is shared by all
                heads: the others keep the one they had, which `indexer_selection` shows.
            level: "token", or "entry": keys are numbers of entries, whose scores are masked.
            before_topk: at the level of entries, mask them before the choice, so that others take
                their places.
        The blocks are spelled out: memory as for reading attention_scores there. Copies are pooled
        from what the block reads; hooks on compressor_gates and compressed_entries do not act on
        them. Tokens that a KV cache was fed before the context was entered have no copies: a run
        that needs one raises ValueError. Two knockouts of one block may not share queries, unless
        they are of entries.
        """
        if level not in LEVELS:
            raise ValueError(f'knockout: level={level!r}, expected "token" or "entry"')
        closed = (channels,) if isinstance(channels, str) else tuple(channels)
        if not closed or not set(closed) <= set(CHANNELS):
            raise ValueError(f"knockout: channels={channels!r}, expected some of {CHANNELS}")
        if level == "entry" and set(closed) != set(CHANNELS):
            raise ValueError('knockout: channels= is for level="token"; an entry has one way')
        if before_topk and (level == "token" or heads is not None):
            raise ValueError('knockout: before_topk= is for level="entry" and all heads, which share the choice')
        asking, hidden = Positions(queries, "queries"), Positions(keys, "keys")
        only = None
        if heads is not None:
            only = as_mask(indices_of("heads", heads, self.num_heads), self.num_heads, self.device)
        with ExitStack() as stack:
            stack.enter_context(asking.watched())
            for layer in self._layers(layers):
                if level == "token":
                    block = _TokenKnockout(self, layer, asking, hidden, frozenset(closed), only)
                else:
                    block = _EntryKnockout(self, layer, asking, hidden, only, before_topk)
                stack.enter_context(block.attached())
            yield

    @property
    def _knocked_out(self) -> list["_TokenKnockout"]:
        """Knockouts of tokens in force now."""
        return self.__dict__.setdefault("_token_knockouts", [])


@dataclass(frozen=True)
class _Without:
    """Entries pooled without the keys.

    values: [b e D]. affected, gone: [b e] bool, those that change, those of which nothing is left.
    """

    values: Tensor
    affected: Tensor
    gone: Tensor


class _Knockout:
    """One block's."""

    def __init__(self, model, layer: int, queries: Positions, keys: Positions, heads):
        self.model, self.layer, self.heads = model, layer, heads
        self.queries, self.keys = queries, keys
        self.kind = model.config.layer_types[layer]
        self.path = f"layers.{layer}.self_attn"
        self.attention = model.layers[layer].self_attn

    def point(self, name: str) -> HookPoint:
        return self.model.hook_dict[f"{self.path}.{name}"]

    def where(self, rows: Tensor) -> Tensor:
        """rows [b s] -> [b 1 or N s 1]: the scores that change."""
        changed = rows[:, None, :, None]
        return changed if self.heads is None else changed & self.heads.to(changed.device).view(1, -1, 1, 1)

    def hooks(self) -> dict[str, object]:
        raise NotImplementedError

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Before other hooks, so that those act on what is left."""
        with ExitStack() as stack:
            for name, fn in self.hooks().items():
                stack.enter_context(self.point(name).add_hook(fn, prepend=True))
            yield


class _EntryKnockout(_Knockout):
    def __init__(self, model, layer, queries, keys, heads, before_topk: bool):
        super().__init__(model, layer, queries, keys, heads)
        self.before_topk = before_topk
        if self.kind == SLIDING:
            raise ValueError(f"knockout: layer {layer} is a {SLIDING} block and has no entries")

    def hooks(self):
        found = {"attention_scores": self.mask_scores}
        if self.before_topk and self.kind == CSA:
            found["compressor.indexer.indexer_scores"] = self.mask_choice
        return found

    def entries(self, call: Call) -> Tensor:
        """[b e] bool: the entries knocked out."""
        windows = call.windows[self.kind]
        number = torch.arange(windows.total, device=windows.after.device)
        return self.keys.holds(number.expand(len(windows.after), -1), windows.after)

    def mask_choice(self, scores: Tensor, hook: HookPoint) -> Tensor:
        masked = self.queries.of(hook).unsqueeze(-1) & self.entries(hook.stage.call).unsqueeze(1)
        return scores.masked_fill(masked, MASKED)

    def mask_scores(self, scores: Tensor, hook: HookPoint) -> Tensor:
        entries = self.entries(hook.stage.call)
        keys = torch.nn.functional.pad(entries, (scores.shape[-1] - entries.shape[1], 0))
        return scores.masked_fill(self.where(self.queries.of(hook)) & keys[:, None, None, :], MASKED)


class _TokenKnockout(_Knockout):
    def __init__(self, model, layer, queries, keys, channels: frozenset[str], heads):
        super().__init__(model, layer, queries, keys, heads)
        self.pools_entries = "entries" in channels and self.kind != SLIDING
        self.pools_index = "indexer" in channels and self.kind == CSA
        self.hides_window = "window" in channels
        self.read, self.asked, self.held, self.valued, self.weights = (Last() for _ in range(5))
        self.index_queries, self.index_weights = Last(), Last()
        self.reads = {
            f"layers.{layer}.attention_norm_output": self.read,
            f"{self.path}.attention_queries": self.asked,
            f"{self.path}.attention_keys": self.held,
        }
        if self.pools_entries:
            self.reads[f"{self.path}.attention_values"] = self.valued
            self.reads[f"{self.path}.attention_probabilities"] = self.weights
        if self.pools_index:
            indexer = f"{self.path}.compressor.indexer"
            self.reads[f"{indexer}.indexer_queries"] = self.index_queries
            self.reads[f"{indexer}.indexer_head_weights"] = self.index_weights
        compressor = getattr(self.attention, "compressor", None)
        self.entries = _Copies(compressor, self.kind, keys, lambda slots: slots.compressor)
        self.index = _Copies(getattr(compressor, "indexer", None), self.kind, keys, lambda slots: slots.indexer)
        # Of the run in progress: the choice without the keys, and the tokens that ask.
        self.chosen: Tensor | None = None
        self.rows: Tensor | None = None

    def hooks(self):
        found = {"attention_scores": self.edit_scores}
        if self.pools_index:
            found["compressor.indexer.indexer_scores"] = self.edit_choice
        if self.pools_entries:
            found["attention_head_outputs"] = self.edit_outputs
        return found

    @contextmanager
    def attached(self):
        active = self.model._knocked_out
        with ExitStack() as stack:
            for name, last in self.reads.items():
                stack.enter_context(last.of(self.model.hook_dict[name]))
            stack.enter_context(super().attached())
            active.append(self)
            stack.callback(active.remove, self)
            yield

    def edit_choice(self, scores: Tensor, hook: HookPoint) -> Tensor | None:
        """Index scores [b s e] without the keys, for the queries."""
        rows, call = self.queries.of(hook), hook.stage.call
        without = self.index.of(self.read.value, rows, self.layer, hook)
        fresh = combine_heads(index_head_scores(self.index_queries.value, without.values), self.index_weights.value)
        edited = torch.where(without.affected.unsqueeze(1), fresh, scores)
        edited = edited.masked_fill(without.gone.unsqueeze(1), MASKED)
        if self.heads is None:
            return torch.where(rows.unsqueeze(-1), edited, scores)
        closed = closed_entries(call.positions, call.windows[self.kind].rate, scores.shape[-1])
        top_k = self.model.config.index_topk
        self.chosen = select_entries(edited.masked_fill(~closed, MASKED), top_k)
        return None

    def edit_scores(self, scores: Tensor, hook: HookPoint) -> Tensor:
        """Scores [b N s T+e] without the keys, for the queries."""
        self.rows, call = self.queries.of(hook), hook.stage.call
        self._refuse_shared(hook)
        if self.keys.counts_back and hook.stage.kv is not None:
            raise ValueError(
                f"knockout: keys={self.keys.given} counts from the end, which moves from call to "
                "call of a KV cache: count keys from the row's start"
            )
        where, tokens = self.where(self.rows), call.token_positions.shape[1]
        on_tokens, on_entries = scores.tensor_split((tokens,), dim=-1)
        if self.hides_window:
            hidden = self.keys.holds(call.token_positions, call.lengths)
            on_tokens = on_tokens.masked_fill(where & hidden[:, None, None, :], MASKED)
        if on_entries.shape[-1]:
            on_entries = torch.where(where, self._entry_scores(on_entries, call, hook), on_entries)
        if not self.pools_entries:
            self._release()
        return torch.cat((on_tokens, on_entries), dim=-1)

    def _entry_scores(self, scores: Tensor, call: Call, hook: HookPoint) -> Tensor:
        """[b N s e]: as if every query were asked without the keys."""
        queries = wide(self.asked.value) * self.attention.scale
        seen = scores > MASKED
        if self.chosen is not None:
            windows = call.windows[self.kind]
            others = wide(self.held.value)[:, :, call.token_positions.shape[1] :]
            scores = torch.where(seen, scores, queries @ others.transpose(2, 3))
            chosen = visible_entries(call.positions, windows.rate, windows.total, self.chosen)
            seen = chosen.unsqueeze(1)
            scores = scores.masked_fill(~seen, MASKED)
        if not self.pools_entries:
            return scores
        without = self.entries.of(self.read.value, self.rows, self.layer, hook)
        fresh = queries @ wide(without.values).transpose(1, 2).unsqueeze(1)
        scores = torch.where(without.affected[:, None, None, :] & seen, fresh, scores)
        return scores.masked_fill(without.gone[:, None, None, :], MASKED)

    def edit_outputs(self, outputs: Tensor, hook: HookPoint) -> Tensor | None:
        """Head outputs [b s N D], of copies where the queries see copies."""
        without, columns = self.entries.last, self.rows.any(0).nonzero().flatten()
        edited = None
        if without is not None and len(columns) and bool(without.affected.any()):
            mixed = self._mixed(without, columns, hook.stage.call)
            changed = outputs.index_copy(1, columns, mixed)
            edited = torch.where(self.where(self.rows).transpose(1, 2), changed, outputs)
        self._release()
        return edited

    def _mixed(self, without: _Without, columns: Tensor, call: Call) -> Tensor:
        """[b q N D]: outputs of the tokens in these columns, if all their entries were copies."""
        tokens = call.token_positions.shape[1]
        weights = self.weights.value[:, :, columns].transpose(1, 2)
        copied = torch.nn.functional.pad(without.affected, (tokens, 0))[:, None, None, :]
        values = wide(self.valued.value).squeeze(1)
        mixed = mix_values(weights.masked_fill(copied, 0.0), values, tokens)
        on_copies = weights.masked_fill(~copied, 0.0)[..., tokens:]
        mixed = mixed + on_copies @ wide(without.values).unsqueeze(1)
        cos, sin = (t[:, columns].unsqueeze(2) for t in call.rotations[self.attention.rope_kind])
        return rotate_back(mixed.to(self.valued.value.dtype), cos, sin)

    def _release(self) -> None:
        """Of a block that has run nothing is kept but what a KV cache will need."""
        for last in self.reads.values():
            last.value = None
        self.rows = self.chosen = self.entries.last = self.index.last = None

    def _refuse_shared(self, hook: HookPoint) -> None:
        for other in self.model._knocked_out:
            if other is self or other.layer != self.layer:
                continue
            if bool((self.rows & other.queries.of(hook) & hook.valid).any()):
                raise ValueError(f"two knockouts of layer {self.layer} share queries: give all keys of a query in one knockout")


class _Copies:
    """Pools a block's entries without the keys, and keeps what each KV cache will need of them.

    Args:
        pool: the compressor, or the indexer. slots: the same part of a KV cache's block.
    """

    def __init__(self, entries, kind: str, keys: Positions, slots):
        self.pool, self.kind, self.keys, self.slots = entries, kind, keys, slots
        self.kept: WeakKeyDictionary = WeakKeyDictionary()
        self.last: _Without | None = None

    def of(self, x: Tensor, rows: Tensor, layer: int, hook: HookPoint) -> _Without:
        """x [b s hidden] is what the block reads; rows [b s]: the tokens that will look."""
        call, kv = hook.stage.call, hook.stage.kv
        windows = call.windows[self.kind]
        number = torch.arange(windows.total, device=x.device).expand(len(x), -1)
        hidden, real = self._slots(number, windows, call)
        exists = number < windows.after.unsqueeze(1)
        affected = hidden.any(-1) & exists
        gone = affected & ~(real & ~hidden).any(-1)
        values = self._pooled(x, windows, call, None if kv is None else kv.layers[layer])
        if kv is not None:
            values, known = self._joined(values, windows, kv)
            lacking = affected & ~gone & ~known & rows.any(1, keepdim=True)
            if bool(lacking.any()):
                row, entry = lacking.nonzero()[0].tolist()
                raise ValueError(
                    f"knockout: entry {entry} of row {row} was pooled from a key before the "
                    'context was entered: feed those tokens inside it, or use level="entry"'
                )
        self.last = _Without(values, affected, gone)
        return self.last

    def _slots(self, number: Tensor, windows: Windows, call: Call) -> tuple[Tensor, Tensor]:
        """(slots that hold a key, slots that hold a token), [b e m] bool, of entries [b e]."""
        first = -windows.rate if windows.overlap else 0
        offsets = torch.arange(first, windows.rate, device=number.device)
        place = number.unsqueeze(-1) * windows.rate + offsets
        real = (place >= 0) & (place < call.lengths[:, None, None])
        place = place.masked_fill(~real, -1)
        return self.keys.holds(place, call.lengths), real

    def _pooled(self, x: Tensor, windows: Windows, call: Call, slots) -> Tensor:
        """[b e_new D]: the entries that this call closes."""
        pooling = self.pool
        new = pooling.project(x)
        projected = new if slots is None else self.slots(slots).projections.joined(new, windows.kept)
        number = windows.before.unsqueeze(1) + torch.arange(windows.new, device=x.device)
        hidden, _ = self._slots(number, windows, call)
        gates = pooling.gates(projected, windows, windows.present & ~hidden)
        return pooling.pooled(projected, gates, windows, x.dtype)

    def _joined(self, new: Tensor, windows: Windows, kv) -> tuple[Tensor, Tensor]:
        """(all entries' copies [b e D], which of them are known [b e]), this call's put in."""
        rows, total, device = len(new), windows.total, new.device
        values = new.new_zeros(rows, total + 1, new.shape[-1])
        known = torch.zeros(rows, total + 1, dtype=torch.bool, device=device)
        earlier = torch.arange(total, device=device) < windows.before.unsqueeze(1)
        if kv in self.kept:
            old, had = self.kept[kv]
            width = min(total, old.shape[1])
            values[:, :width], known[:, :width] = old[:, :width], had[:, :width]
            known[:, :total] &= earlier
        number = windows.before.unsqueeze(1) + torch.arange(windows.new, device=device)
        number = number.masked_fill(~windows.filled, total)
        values = values.scatter(1, number.unsqueeze(-1).expand_as(new), new)[:, :total]
        known = known.scatter(1, number, True)[:, :total]
        self.kept[kv] = values.detach(), known
        return values, known
