"""The bench on which patches are measured: many patches of one input in one batch, entered at the
layer that the patch is in, or behind the tokens that no patch reaches.

A patch is a row block: patch i has rows i * b ... (i + 1) * b - 1 of the run, b the rows of the
input. Axes: b row, s token, w token of a part of the row, e what can be chosen.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4.config import CSA
from dsv4.inputs import Inputs, resolve

Metric = Callable[[Tensor], Tensor]
DIRECTIONS = ("noise", "denoise")


@dataclass(frozen=True)
class Pair:
    """The run that is patched and the run that the values come from: ids [b s] of each."""

    base: Tensor
    other: Tensor
    valid: Tensor

    @classmethod
    def of(cls, model, clean, corrupt, attention_mask, direction: str) -> "Pair":
        if direction not in DIRECTIONS:
            raise ValueError(f"direction={direction!r}: expected one of {', '.join(DIRECTIONS)}")
        found: list[Inputs] = []
        for given in (clean, corrupt):
            found.append(resolve(model, given, attention_mask=attention_mask))
        first, second = found
        if first.ids.shape != second.ids.shape or not torch.equal(first.valid, second.valid):
            counts = [i.valid.sum(1).tolist() for i in found]
            raise ValueError(
                f"clean and corrupt must have as many tokens in each row, got {counts[0]} and {counts[1]}: patching goes by position"
            )
        ids = [i.ids for i in found]
        base, other = ids if direction == "noise" else ids[::-1]
        return cls(base, other, first.valid)


def as_number(metric: Metric, logits: Tensor) -> Tensor:
    """The metric as a 0-d tensor."""
    value = metric(logits)
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"the metric returned {got} for logits {list(logits.shape)}; expected a tensor of one number: reduce over the rows yourself"
        )
    return value.reshape(())


@dataclass(frozen=True)
class Part:
    """Consecutive tokens of each row, left aligned.

    Attributes:
        past: tokens of each row before them.
        columns: [b w] int64, where they stand in the rows given. valid: [b w] bool.
    """

    past: Sequence[int]
    columns: Tensor
    valid: Tensor

    def of(self, value: Tensor, axis: int = 1) -> Tensor:
        """What a value of the whole rows, its tokens on `axis`, holds for this part."""
        shape, sizes = [1] * value.dim(), list(value.shape)
        shape[0], shape[axis] = self.columns.shape
        sizes[axis] = shape[axis]
        return value.gather(axis, self.columns.view(shape).expand(sizes))


class Bench:
    """Runs patched copies of `pair.base` from any layer on, or from any token on.

    Attributes:
        base, other: the metric of both runs, float. logits: of the run that is patched.
    """

    def __init__(self, model, pair: Pair, metric: Metric, keep: int | None):
        self.model, self.pair, self.metric, self.keep = model, pair, metric, keep
        self.rows = len(pair.base)
        self.lengths = pair.valid.sum(1).tolist()
        self._entered: tuple[int, Tensor] | None = None
        # A KV cache of the unpatched run, once something was run behind it.
        self._prefix = None
        # A hook of the user's may count columns, and is to see those it saw without reuse.
        self._has_prefixes = any(self.lengths) and not model.skipped and not _is_listened_to(model)
        choices = [f"layers.{i}.mlp.expert_indices" for i in range(model.num_layers)]
        choices += [
            f"layers.{i}.self_attn.compressor.indexer.indexer_selection"
            for i, kind in enumerate(model.layer_types)
            if kind == CSA and max(self.lengths) // model.config.rate(i) > model.config.index_topk
        ]
        self.choices = [n for n in choices if model.hook_dict[n].layer not in model.skipped]
        run = {"attention_mask": pair.valid, "logits_to_keep": keep}
        self.logits, self.chosen = model.run_with_cache(pair.base, self.choices, **run)
        # A metric may write into what it is given.
        self.base = float(as_number(metric, self.logits.clone()))
        self.other = float(as_number(metric, model(pair.other, **run)))

    def behind(self, start: int | None, positions: Sequence[int]) -> Part | None:
        """The tokens from the first of these positions on; None where all tokens from layer `start`
        on cost no more, counted in layers * tokens.
        """
        if not self._has_prefixes:
            return None
        past = []
        for length in self.lengths:
            places = [pos if pos >= 0 else length + pos for pos in positions]
            # Where no patch meets the row its last token is run, so that no row is empty.
            first = min((p for p in places if 0 <= p < length), default=length - 1)
            past.append(max(first, 0))
        part, layers = self._part(past, self.lengths), self.model.num_layers
        cheaper = layers * part.columns.shape[1] < (layers - (start or 0)) * self.pair.base.shape[1]
        return part if cheaper else None

    def measure(self, start: int | None, hooks: Sequence, count: int, part: Part | None = None) -> tuple[list[float], Tensor, Tensor]:
        """(metric, routing flips [count], selection flips [count]) of `count` patches.

        start: the first layer that a patch reaches, which the patched runs enter; None for all.
        part: run these tokens in all layers instead, behind the unpatched run's prefix.
        """
        model = self.model
        names = [n for n in self.choices if model.hook_dict[n].layer >= (start or 0)]
        given, run = self._from_layer(start, count) if part is None else self._of(part, count)
        with model.hooks(hooks):
            logits, chosen = self._quietly(lambda: model.run_with_cache(given, names, logits_to_keep=self.keep, **run))
        if part is not None:
            logits = self._with_prefix(logits, part, count)
        values = [float(as_number(self.metric, one)) for one in logits.split(self.rows)]
        flips = {"expert_indices": 0, "indexer_selection": 0}
        for name in names:
            flips[name.rsplit(".", 1)[-1]] += self._flips(name, chosen[name], count, part)
        nothing = torch.zeros(count, dtype=torch.int64)
        return values, flips["expert_indices"] + nothing, flips["indexer_selection"] + nothing

    def _from_layer(self, start: int | None, count: int) -> tuple[Tensor, dict[str, Any]]:
        """What the model is called with to run all tokens from a layer on."""
        run = {"attention_mask": self.pair.valid.repeat(count, 1)}
        ids = self.pair.base.repeat(count, 1)
        if start is None:
            return ids, run
        streams = self.streams(start).repeat(count, 1, 1, 1)
        return streams, run | {"start_at_layer": start, "input_ids": ids}

    def _of(self, part: Part, count: int) -> tuple[Tensor, dict[str, Any]]:
        """What the model is called with to run a part of the rows in all layers."""
        self._feed(part.past)
        if self.rows == 1:
            one = self._prefix.clone()
            one.truncate(part.past)
            kv = one.expand(count)
        else:
            kv = self._prefix.select(list(range(self.rows)) * count)
            kv.truncate(list(part.past) * count)
        run = {"attention_mask": part.valid.repeat(count, 1), "kv_cache": kv}
        return part.of(self.pair.base).repeat(count, 1), run

    def _feed(self, past: Sequence[int]) -> None:
        """Have at least so many tokens of each row in the cache of the unpatched run."""
        if self._prefix is None:
            longest = max(self.lengths)
            self._prefix = self.model.new_kv_cache(self.rows, longest, rewind=None)
        held = self._prefix.length.tolist()
        part = self._part(held, [max(h, p) for h, p in zip(held, past, strict=True)])
        if part.columns.shape[1] > 0:
            ids, run = part.of(self.pair.base), {"attention_mask": part.valid}
            self.model(ids, kv_cache=self._prefix, logits_to_keep=1, **run)

    def _part(self, begin: Sequence[int], end: Sequence[int]) -> Part:
        """Positions begin[r] ... end[r] - 1 of each row."""
        valid = self.pair.valid
        before, after = (torch.tensor(x, device=valid.device).unsqueeze(1) for x in (begin, end))
        steps = torch.arange(int((after - before).max()), device=valid.device)
        columns = valid.int().argmax(1, keepdim=True) + before + steps
        return Part(begin, columns.clamp(max=valid.shape[1] - 1), before + steps < after)

    def _with_prefix(self, logits: Tensor, part: Part, count: int) -> Tensor:
        """logits [count * b, w, vocab] of a part -> of the rows, the unpatched run's before it."""
        valid, width = self.pair.valid, logits.shape[1]
        past, lengths = (torch.tensor(x, device=valid.device).unsqueeze(1) for x in (part.past, self.lengths))
        if self.keep:
            kept = torch.arange(self.logits.shape[1] - 1, -1, -1, device=valid.device)
            positions = (lengths - 1 - kept).clamp(min=0)
            own = width + positions - lengths
            of_part = (positions >= past) & (lengths > 0)
        else:
            positions = torch.arange(valid.shape[1], device=valid.device)
            positions = positions - valid.int().argmax(1, keepdim=True)
            own = positions - past
            of_part = (positions >= past) & valid
        index = own.clamp(0, width - 1).repeat(count, 1).unsqueeze(-1)
        found = logits.gather(1, index.expand(-1, -1, logits.shape[-1]))
        whole = self.logits.repeat(count, 1, 1)
        return torch.where(of_part.repeat(count, 1).unsqueeze(-1), found, whole)

    def streams(self, layer: int) -> Tensor:
        """[b s n hidden] entering a layer in the run that is patched; layers come in order."""
        start, given = self._entered or (None, self.pair.base)
        if start != layer:
            run = {"attention_mask": self.pair.valid, "stop_at_layer": layer}
            if start is not None:
                run |= {"start_at_layer": start, "input_ids": self.pair.base}
            self._entered = layer, self._quietly(lambda: self.model(given, **run))
        return self._entered[1]

    def _flips(self, name: str, chosen: Tensor, count: int, part: Part | None) -> Tensor:
        """[count] choices of the unpatched run that the patched ones do not make."""
        own, valid = self.chosen[name], self.pair.valid
        if part is not None:
            own, valid = part.of(own), part.valid
        size = int(max(chosen.amax(), own.amax())) + 1
        before, after = (_as_mask(t, size) for t in (own, chosen))
        lost = before.repeat(count, 1, 1) & ~after & valid.repeat(count, 1).unsqueeze(-1).to(after.device)
        return lost.view(count, -1).sum(1).cpu()

    @staticmethod
    def _quietly(run: Callable):
        """Hooks of the user's on earlier layers, or on later ones, are not met, and need not be."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r".*never fired in this run: st")
            return run()


def _is_listened_to(model) -> bool:
    """Whether a hook or a capture is attached anywhere, ours or PyTorch's."""
    return any(point.live for point in model.hook_dict.values()) or any(
        module._forward_hooks or module._forward_pre_hooks for module in model.modules()
    )


def _as_mask(chosen: Tensor, size: int) -> Tensor:
    """chosen [b s k], -1 for none -> [b s size] bool."""
    mask = torch.zeros(*chosen.shape[:2], size + 1, dtype=torch.bool, device=chosen.device)
    return mask.scatter(-1, chosen.masked_fill(chosen < 0, size), True)[..., :size]
