"""The bench on which patches are measured: many patches of one input in one batch, entered at the
layer that the patch is in.

A patch is a row block: patch i has rows i * b ... (i + 1) * b - 1 of the run, b the rows of the
input. Axes: b row, s token, e what can be chosen.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
                f"clean and corrupt must have as many tokens in each row, got {counts[0]} and "
                f"{counts[1]}: patching goes by position"
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
            f"the metric returned {got} for logits {list(logits.shape)}; expected a tensor of one "
            "number: reduce over the rows yourself"
        )
    return value.reshape(())


class Bench:
    """Runs patched copies of `pair.base` from any layer on.

    Attributes:
        base, other: the metric of both runs, float.
    """

    def __init__(self, model, pair: Pair, metric: Metric, keep: int | None):
        self.model, self.pair, self.metric, self.keep = model, pair, metric, keep
        self.rows = len(pair.base)
        self._entered: tuple[int, Tensor] | None = None
        choices = [f"layers.{i}.mlp.expert_indices" for i in range(model.num_layers)]
        choices += [
            f"layers.{i}.self_attn.compressor.indexer.indexer_selection"
            for i, kind in enumerate(model.layer_types)
            if kind == CSA and pair.base.shape[1] // model.config.rate(i) > model.config.index_topk
        ]
        self.choices = [n for n in choices if model.hook_dict[n].layer not in model.skipped]
        run = {"attention_mask": pair.valid, "logits_to_keep": keep}
        logits, self.chosen = model.run_with_cache(pair.base, self.choices, **run)
        self.base = float(as_number(metric, logits))
        self.other = float(as_number(metric, model(pair.other, **run)))

    def measure(
        self, start: int | None, hooks: Sequence, count: int
    ) -> tuple[list[float], Tensor, Tensor]:
        """(metric, routing flips [count], selection flips [count]) of `count` patches.

        start: the layer that the patched runs enter; None runs all of it.
        """
        model = self.model
        run = {
            "attention_mask": self.pair.valid.repeat(count, 1),
            "logits_to_keep": self.keep,
        }
        ids = self.pair.base.repeat(count, 1)
        if start is not None:
            run |= {"start_at_layer": start, "input_ids": ids}
        given = ids if start is None else self.streams(start).repeat(count, 1, 1, 1)
        names = [n for n in self.choices if model.hook_dict[n].layer >= (start or 0)]
        with model.hooks(hooks):
            logits, chosen = self._quietly(lambda: model.run_with_cache(given, names, **run))
        values = [float(as_number(self.metric, part)) for part in logits.split(self.rows)]
        flips = {"expert_indices": 0, "indexer_selection": 0}
        for name in names:
            flips[name.rsplit(".", 1)[-1]] += self._flips(name, chosen[name], count)
        nothing = torch.zeros(count, dtype=torch.int64)
        return values, flips["expert_indices"] + nothing, flips["indexer_selection"] + nothing

    def streams(self, layer: int) -> Tensor:
        """[b s n hidden] entering a layer in the run that is patched; layers come in order."""
        start, given = self._entered or (None, self.pair.base)
        if start != layer:
            run = {"attention_mask": self.pair.valid, "stop_at_layer": layer}
            if start is not None:
                run |= {"start_at_layer": start, "input_ids": self.pair.base}
            self._entered = layer, self._quietly(lambda: self.model(given, **run))
        return self._entered[1]

    def _flips(self, name: str, chosen: Tensor, count: int) -> Tensor:
        """[count] choices of the unpatched run that the patched ones do not make."""
        size = int(max(chosen.amax(), self.chosen[name].amax())) + 1
        before, after = (_as_mask(t, size) for t in (self.chosen[name], chosen))
        lost = before.repeat(count, 1, 1) & ~after & self.pair.valid.repeat(count, 1).unsqueeze(-1)
        return lost.view(count, -1).sum(1).cpu()

    @staticmethod
    def _quietly(run: Callable):
        """Hooks of the user's on earlier layers, or on later ones, are not met, and need not be."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r".*never fired in this run: st")
            return run()


def _as_mask(chosen: Tensor, size: int) -> Tensor:
    """chosen [b s k], -1 for none -> [b s size] bool."""
    mask = torch.zeros(*chosen.shape[:2], size + 1, dtype=torch.bool, device=chosen.device)
    return mask.scatter(-1, chosen.masked_fill(chosen < 0, size), True)[..., :size]
