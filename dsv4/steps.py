"""Captures over the steps of a generation, put together as the values of one forward over all of
its tokens but the last.

Values whose token axis is the only one that grows are joined along it. Values with a key or entry
axis have another length in every step: they stay a list, or `align` puts them on the axes of the
whole run, with zeros (scores -inf, positions and selections -1) where a step had no such key or
entry. Axes: b row, s column of a step, k key, e entry.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.activation_cache import ActivationCache
from dsv4.call import Call
from dsv4.capture import Capture
from dsv4.config import Dsv4Config
from dsv4.hooks import HookPoint
from dsv4.origin import Origin

SELECTION_AXIS = "min(index_topk,e)"
STEP_AXES = ("k", "e", "e_new", SELECTION_AXIS)
# What stands where there is no key or entry; 0 for all others.
ABSENT = {
    "attention_scores": float("-inf"),
    "indexer_scores": float("-inf"),
    "indexer_selection": -1,
    "attention_key_positions": -1,
}


@dataclass(frozen=True)
class Step:
    values: dict[str, Tensor]
    call: Call
    edited: dict[str, None]


class StepCaptures:
    """Collects the values of `names` from every forward inside `attached`."""

    def __init__(self, model, names: Sequence[str], *, device=None):
        self.model, self.names = model, list(names)
        self.steps: list[Step] = []
        self._capture = Capture(self._store, device=device)

    @contextmanager
    def attached(self) -> Iterator[None]:
        points = [self.model.hook_dict[name] for name in self.names]
        self.model.stage.captures.append(self)
        try:
            for point in points:
                point.attach_capture(self._capture)
            yield
        finally:
            for point in points:
                point.detach_capture(self._capture)
            self.model.stage.captures.remove(self)

    def begin(self, call: Call) -> None:
        """A run's positions are known."""
        self._capture.begin(call)
        self.steps.append(Step({}, call, self.model.stage.edited))

    def _store(self, name: str, value: Tensor) -> None:
        self.steps[-1].values[name] = value

    def result(self, align: bool) -> ActivationCache:
        points = {name: self.model.hook_dict[name] for name in self.names}
        axes = {name: point.axes for name, point in points.items()}
        if not self.steps:
            return ActivationCache({}, {}, None, self.model.num_layers)
        whole = Whole(self.model.config, [step.call for step in self.steps])
        values = {}
        for name, point in points.items():
            parts, words = [step.values[name] for step in self.steps], point.axes.split()
            if any(word in STEP_AXES for word in words):
                values[name] = whole.align(point, parts) if align else parts
            elif "s" in words:
                values[name] = torch.cat(parts, dim=words.index("s"))
            else:
                values[name] = whole.last_of_each_row(parts)
        positions = whole.positions.to(self._capture.device or whole.positions.device)
        edited = dict.fromkeys(name for step in self.steps for name in step.edited)
        origin = Origin(edited=tuple(edited), token_keys=whole.columns if align else None)
        return ActivationCache(values, axes, positions, self.model.num_layers, origin, self.model)


class Whole:
    """The axes of one forward over the columns of all steps."""

    def __init__(self, config: Dsv4Config, calls: Sequence[Call]):
        self.config, self.calls = config, calls
        self.positions = torch.cat([call.positions for call in calls], dim=1)
        self.widths = [call.positions.shape[1] for call in calls]
        self.starts = [sum(self.widths[:i]) for i in range(len(calls))]
        rows, self.columns = self.positions.shape
        # Column of each row position; `columns` for those that a KV cache held before the run.
        self._nowhere = max(calls[-1].host.length)
        column_of = self.positions.new_full((rows, self._nowhere + 1), self.columns)
        place = self.positions.masked_fill(self.positions < 0, self._nowhere)
        number = torch.arange(self.columns, device=place.device).expand(rows, -1)
        self._column_of = column_of.scatter(1, place, number)
        self._column_of[:, self._nowhere] = self.columns

    def last_of_each_row(self, parts: Sequence[Tensor]) -> Tensor:
        """Of each row the part of the last step that fed it a token."""
        fed = torch.stack([call.lengths > call.past for call in self.calls])
        number = torch.arange(len(self.calls), device=fed.device).unsqueeze(1)
        last = torch.where(fed, number, 0).amax(0).to(parts[0].device)
        return torch.stack(list(parts))[last, torch.arange(len(last), device=last.device)]

    def align(self, point: HookPoint, parts: Sequence[Tensor]) -> Tensor:
        words = point.axes.split()
        kind = self.config.layer_types[point.layer]
        axis = next(i for i, word in enumerate(words) if word in STEP_AXES)
        if words[axis] == "e_new":
            return self._closed(parts, kind)
        fill = ABSENT.get(point.name.rsplit(".", 1)[-1], 0)
        if words[axis] == "k":
            steps = range(len(parts))
            spread = [self._spread(parts[i], axis, i, kind, fill) for i in steps]
            if "s" in words:
                return torch.cat(spread, dim=words.index("s"))
            # Each token's key from the step that fed it, the entries of the last step.
            own = [spread[i].narrow(axis, self.starts[i], self.widths[i]) for i in steps]
            return torch.cat([*own, spread[-1].narrow(axis, self.columns, self._entries(kind))], dim=axis)
        width = self._entries(kind)
        if words[axis] == SELECTION_AXIS:
            width = min(self.config.index_topk, width)
        padded = [_pad(part, axis, width, fill) for part in parts]
        return torch.cat(padded, dim=words.index("s")) if "s" in words else padded[-1]

    def _entries(self, kind: str, step: int = -1) -> int:
        windows = self.calls[step].windows
        return windows[kind].total if kind in windows else 0

    def _spread(self, part: Tensor, axis: int, step: int, kind: str, fill: float) -> Tensor:
        """A step's key axis -> that of the whole run: every column, then every entry."""
        call, total = self.calls[step], self.columns + self._entries(kind)
        rows = part.shape[0]
        earlier = call.earlier.masked_fill(call.earlier < 0, self._nowhere)
        earlier = self._column_of.gather(1, earlier)
        earlier = earlier.masked_fill(earlier == self.columns, total)
        start = self.starts[step]
        own = torch.arange(start, start + self.widths[step], device=earlier.device)
        entries = torch.arange(self._entries(kind, step), device=earlier.device) + self.columns
        both = torch.cat((own, entries)).expand(rows, -1)
        index = torch.cat((earlier, both), dim=1).to(part.device)
        index = index.view([n if i in (0, axis) else 1 for i, n in enumerate(part.shape)])
        size = list(part.shape)
        size[axis] = total + 1
        out = part.new_full(size, fill).scatter(axis, index.expand(part.shape), part)
        return out.narrow(axis, 0, total)

    def _closed(self, parts: Sequence[Tensor], kind: str) -> Tensor:
        """What each step said of the entries that it closed, by the entry's number."""
        total = self._entries(kind)
        rows, _, *rest = parts[0].shape
        out = parts[0].new_zeros(rows, total + 1, *rest)
        for part, call in zip(parts, self.calls, strict=True):
            windows = call.windows[kind]
            number = windows.before.unsqueeze(1) + torch.arange(windows.new, device=call.past.device)
            index = number.masked_fill(~windows.filled, total).to(part.device)
            index = index.view(*index.shape, *[1] * len(rest)).expand(part.shape)
            out = out.scatter(1, index, part)
        return out[:, :total]


def _pad(part: Tensor, axis: int, width: int, fill: float) -> Tensor:
    size = list(part.shape)
    size[axis] = width - size[axis]
    return torch.cat((part, part.new_full(size, fill)), dim=axis)
