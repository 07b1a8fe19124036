"""Captures over the steps of a generation, put together as the values of one forward over prompt + new - 1 tokens.

Values with a token axis only are joined along it. Values with a key or entry axis have another length in every step: they stay a list,
or `align` scatters them onto the axes of the full run. Axes: b row, s column of a step, S columns of all steps, K = S + entries.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.activation_cache import ActivationCache
from dsv4.call import Call
from dsv4.capture import Capture

STEP_AXES = ("k", "e", "e_new", "min(index_topk,e)")
# What stands where a step had no such key or entry; 0 for all others.
ABSENT = {"attention_scores": float("-inf"), "indexer_scores": float("-inf"), "indexer_selection": -1, "attention_key_positions": -1}


@dataclass(frozen=True)
class Step:
    values: dict[str, Tensor]
    call: Call


class StepCaptures:
    """Attached for the length of a `with`; `step_done()` after every forward, `result(mask)` at the end."""

    def __init__(self, model, names, *, device=None, align: bool = False):
        self.model, self.device, self.align = model, device, align
        self.names = [] if names is None else model.match_names(names)
        self.idle = not self.names
        self.steps: list[Step] = []
        self._now: dict[str, Tensor] = {}
        self._capture = Capture(self._store, device=device)

    def _store(self, name: str, value: Tensor) -> None:
        self._now[name] = value

    def __enter__(self) -> "StepCaptures":
        for name in self.names:
            self.model.hook_dict[name].attach_capture(self._capture)
        self.model.stage.captures.append(self)
        return self

    def __exit__(self, *exc) -> None:
        self.model.stage.captures.remove(self)
        for name in self.names:
            self.model.hook_dict[name].detach_capture(self._capture)

    def begin(self, call: Call) -> None:
        """Called by the stage when a run's positions are known."""
        self._capture.begin(call)
        self._call = call

    def step_done(self) -> None:
        self._capture.finish()
        self.steps.append(Step(self._now, self._call))
        self._now = {}

    def result(self, mask: Tensor) -> ActivationCache:
        """mask: [b, prompt + new] of the ids returned."""
        values, axes = {}, {}
        full = _Full(self.model.config, self.steps) if self.steps else None
        for name in self.names:
            point = self.model.hook_dict[name]
            parts = [step.values[name] for step in self.steps if name in step.values]
            words = point.axes.split()
            axes[name] = point.axes
            if not parts:
                continue
            if any(w in STEP_AXES for w in words):
                values[name] = full.align(point, parts) if self.align else parts
            elif "s" in words:
                values[name] = torch.cat(parts, dim=words.index("s"))
            else:
                values[name] = parts[-1]
        positions = torch.cat([step.call.positions for step in self.steps], dim=1) if self.steps else None
        return ActivationCache(values, {n: axes[n] for n in values}, positions)


class _Full:
    """The axes of the full run."""

    def __init__(self, config, steps: Sequence[Step]):
        self.config, self.calls = config, [step.call for step in steps]
        self.widths = [call.positions.shape[1] for call in self.calls]
        positions = torch.cat([call.positions for call in self.calls], dim=1)
        b, self.columns = positions.shape
        longest = max(self.calls[-1].host.length)
        # Column of each row position; columns of the prefill that a cache brought along are not in this run.
        self.column_of = torch.full((b, longest + 1), self.columns, device=positions.device)
        number = torch.arange(self.columns, device=positions.device).expand(b, -1)
        self.column_of.scatter_(1, positions.masked_fill(positions < 0, longest), number)
        self.column_of[:, longest] = self.columns

    def entries(self, kind: str) -> int:
        return self.calls[-1].windows[kind].total if kind in self.calls[-1].windows else 0

    def align(self, point, parts: list[Tensor]) -> Tensor:
        words, leaf = point.axes.split(), point.name.rsplit(".", 1)[-1]
        kind = self.config.layer_types[point.layer]
        fill = ABSENT.get(leaf, 0)
        axis = next(i for i, w in enumerate(words) if w in STEP_AXES)
        if words[axis] == "e_new":
            return self._new_entries(parts, kind)
        if words[axis] == "k":
            keyed = [self._keys(part, axis, call, at, kind, fill) for part, call, at in zip(parts, self.calls, self._starts(), strict=True)]
            return torch.cat(keyed, dim=words.index("s")) if "s" in words else self._latest(keyed, axis, kind)
        total = self.entries(kind)
        width = min(self.config.index_topk, total) if words[axis].startswith("min") else total
        padded = [_pad(part, axis, width, fill) for part in parts]
        return torch.cat(padded, dim=words.index("s")) if "s" in words else padded[-1]

    def _starts(self) -> list[int]:
        return [sum(self.widths[:i]) for i in range(len(self.widths))]

    def _key_index(self, call: Call, start: int, kind: str) -> Tensor:
        """[b k of the step]: column of the full run's key axis; K is the place of what the full run does not have."""
        b, s = call.positions.shape
        device = call.positions.device
        total = self.columns + self.entries(kind)
        earlier = self.column_of.gather(1, call.earlier.masked_fill(call.earlier < 0, self.column_of.shape[1] - 1))
        earlier = earlier.masked_fill(earlier == self.columns, total)
        own = torch.arange(start, start + s, device=device).expand(b, -1)
        closed = call.windows[kind].total if kind in call.windows else 0
        entries = torch.arange(self.columns, self.columns + closed, device=device).expand(b, -1)
        return torch.cat((earlier, own, entries), dim=1)

    def _keys(self, part: Tensor, axis: int, call: Call, start: int, kind: str, fill) -> Tensor:
        index = self._key_index(call, start, kind).to(part.device)
        shape = [1] * part.dim()
        shape[0], shape[axis] = index.shape
        size = list(part.shape)
        size[axis] = self.columns + self.entries(kind) + 1
        out = part.new_full(size, fill).scatter(axis, index.view(shape).expand(part.shape), part)
        return out.narrow(axis, 0, size[axis] - 1)

    def _latest(self, keyed: list[Tensor], axis: int, kind: str) -> Tensor:
        """Keys without a query axis: each token's from the step that fed it, the entries of the last step."""
        own = [k.narrow(axis, start, width) for k, start, width in zip(keyed, self._starts(), self.widths, strict=True)]
        return torch.cat([*own, keyed[-1].narrow(axis, self.columns, self.entries(kind))], dim=axis)

    def _new_entries(self, parts: list[Tensor], kind: str) -> Tensor:
        total = self.entries(kind)
        b = parts[0].shape[0]
        out = parts[0].new_zeros(b, total + 1, *parts[0].shape[2:])
        for part, call in zip(parts, self.calls, strict=True):
            windows = call.windows[kind]
            number = windows.before.unsqueeze(1) + torch.arange(part.shape[1], device=windows.before.device)
            index = number.masked_fill(~windows.filled, total).to(part.device)
            out = out.scatter(1, index.view(*index.shape, *[1] * (part.dim() - 2)).expand(part.shape), part)
        return out[:, :total]


def _pad(part: Tensor, axis: int, width: int, fill) -> Tensor:
    size = list(part.shape)
    size[axis] = width - size[axis]
    return torch.cat((part, part.new_full(size, fill)), dim=axis)
