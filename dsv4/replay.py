"""Values of an earlier run, found again in another by what they stand for: the token's position in
its row, the entry's number.

So a cache of one prompt serves under other padding, with a KV cache, and in every step of a
generation. What the cache does not have stays as the run computes it. Axes: b row, s token of the
call, n of the cache, k key, e entry.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.activation_cache import ActivationCache
from dsv4.call import Call
from dsv4.config import Dsv4Config
from dsv4.hooks import HookPoint

SELECTION = "min(index_topk,e)"
# Axes whose places are tokens, keys or entries; every other is as long in each run.
PLACED = ("s", "k", "e", "e_new")


@dataclass(frozen=True)
class Recorded:
    """One value of a cache with every axis in its place.

    Attributes:
        value: [b ...]; axes: its words. positions: [b n] of the tokens it holds, -1 at padding.
    """

    name: str
    value: Tensor
    axes: tuple[str, ...]
    positions: Tensor

    @classmethod
    def of(cls, cache: ActivationCache, point: HookPoint) -> "Recorded":
        name, axes = point.name, tuple(point.axes.split())
        value, positions, held = cache[name], cache.positions, cache.axes[name].split()
        if isinstance(value, list):
            if SELECTION not in axes:
                raise ValueError(f"{name} is a list of steps in this cache: generate with align=True")
            width = max(step.shape[-1] for step in value)
            pad = torch.nn.functional.pad
            steps = [pad(step, (0, width - step.shape[-1]), value=-1) for step in value]
            value = torch.cat(steps, dim=1)
        if positions is None:
            raise ValueError(f"the cache that holds {name} does not know its positions")
        if "b" not in held:
            value, positions = value.unsqueeze(0), positions.view(1, -1)
        positions = positions.view(len(value), -1)
        if "s" in axes:
            place = axes.index("s")
            value = value if "s" in held else value.unsqueeze(place)
            if value.shape[place] != positions.shape[1]:
                raise ValueError(
                    f"{name} holds {value.shape[place]} tokens in this cache of {positions.shape[1]}: capture it without logits_to_keep"
                )
        return cls(name, value, axes, positions)


class Replay:
    """The value of a cache at one point; `find` fits it to the call of a run."""

    def __init__(self, cache: ActivationCache, point: HookPoint, config: Dsv4Config):
        self.recorded = Recorded.of(cache, point)
        self.window = config.sliding_window
        self.kind = None if point.layer is None else config.layer_types[point.layer]
        self.rate = None if point.layer is None else config.rate(point.layer)

    def find(self, value: Tensor, hook: HookPoint, rows: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """(what the cache has for each element, whether it has it), both of the value's shape.

        rows: the row of the cache that each row of the run takes. None: row r takes row r, or all
        take the only one.
        """
        stored, positions = self._rows(len(value), rows)
        stored, positions = stored.to(value.device), positions.to(value.device)
        found = torch.ones_like(value, dtype=torch.bool)
        for axis, word in enumerate(self.recorded.axes):
            if word == SELECTION:
                stored = _of_width(stored, value.shape[axis])
            elif word in PLACED:
                index = self._index(word, stored.shape[axis], positions, hook)
                view = [n if i in (0, axis) else 1 for i, n in enumerate(value.shape)]
                shape = list(stored.shape)
                shape[axis] = index.shape[1]
                index = index.view(view)
                found = found & (index >= 0)
                stored = _gather(stored, axis, index.clamp(min=0).expand(shape))
        if stored.shape != value.shape:
            raise ValueError(
                f"{hook.name} is {list(value.shape)} in this run and {list(stored.shape)} in the cache: it is of another model"
            )
        return stored.to(value.dtype), found

    def _rows(self, count: int, rows: Sequence[int] | None) -> tuple[Tensor, Tensor]:
        held, positions = self.recorded.value, self.recorded.positions
        if rows is not None:
            return held[list(rows)], positions[list(rows)]
        if len(held) not in (1, count):
            raise ValueError(
                f"{self.recorded.name}: the cache holds {len(held)} rows, the run {count}; give a cache of one row or of as many"
            )
        return held.expand(count, *held.shape[1:]), positions.expand(count, -1)

    def _index(self, word: str, size: int, positions: Tensor, hook: HookPoint) -> Tensor:
        """[b m] place in the cache of each place of the run on this axis, -1 where it has none."""
        call = hook.stage.call
        if word == "s":
            return _match(hook.positions, positions)
        if word == "k":
            return self._key_index(size, positions, call)
        return _match(_numbers(word, call, self.kind), self._held_numbers(word, size, positions))

    def _key_index(self, size: int, positions: Tensor, call: Call) -> Tensor:
        past = _first(positions)
        width = int(past.clamp(max=self.window - 1).amax())
        last = 0 if self.rate is None else size - width - positions.shape[1]
        if last != (0 if self.rate is None else int(self._entries(positions).amax())):
            raise ValueError(f"the key axis of {self.recorded.name} is longer than the tokens this cache holds: capture it without pos=")
        earlier = past.unsqueeze(1) - torch.arange(width, 0, -1, device=past.device)
        tokens = torch.cat((earlier.clamp(min=-1), positions), dim=1)
        index = _match(call.token_positions, tokens)
        if self.rate is None:
            return index
        held = self._held_numbers("e", last, positions)
        entries = _match(_numbers("e", call, self.kind), held)
        entries = torch.where(entries < 0, entries, entries + tokens.shape[1])
        return torch.cat((index, entries), dim=1)

    def _held_numbers(self, word: str, size: int, positions: Tensor) -> Tensor:
        before = _first(positions) // self.rate if word == "e_new" else _first(positions) * 0
        number = before.unsqueeze(1) + torch.arange(size, device=before.device)
        return number.masked_fill(number >= self._entries(positions).unsqueeze(1), -1)

    def _entries(self, positions: Tensor) -> Tensor:
        """[b] entries that existed after the run that was recorded."""
        return (positions.amax(1) + 1) // self.rate


def _first(positions: Tensor) -> Tensor:
    """[b] position of the first real token; 0 in a row that has none."""
    first = positions.masked_fill(positions < 0, torch.iinfo(positions.dtype).max).amin(1)
    return first.masked_fill((positions < 0).all(1), 0)


def _numbers(word: str, call: Call, kind: str) -> Tensor:
    """[b m] number of each entry on an axis of the call, -1 where a row has none."""
    windows = call.windows[kind]
    if word == "e":
        number = torch.arange(windows.total, device=windows.after.device)
        return torch.where(number < windows.after.unsqueeze(1), number, -1)
    number = windows.before.unsqueeze(1) + torch.arange(windows.new, device=windows.before.device)
    return number.masked_fill(~windows.filled, -1)


def _match(wanted: Tensor, held: Tensor) -> Tensor:
    """Where each number of wanted [b m] stands in held [b n]; -1 where it does not, or is -1."""
    size = max(int(t.amax()) if t.numel() else 0 for t in (wanted, held)) + 1
    table = held.new_full((len(held), size + 1), -1)
    column = torch.arange(held.shape[1], device=held.device).expand_as(held)
    table = table.scatter(1, held.masked_fill(held < 0, size), column)
    found = table.gather(1, wanted.clamp(min=0))
    return found.masked_fill(wanted < 0, -1)


def _gather(stored: Tensor, axis: int, index: Tensor) -> Tensor:
    if stored.shape[axis] == 0:
        shape = list(stored.shape)
        shape[axis] = index.shape[axis]
        return stored.new_zeros(shape)
    return stored.gather(axis, index)


def _of_width(selection: Tensor, width: int) -> Tensor:
    """Selections with their -1 at the end, cut or filled to `width`: no query has more entries."""
    order = (selection < 0).to(torch.int8).argsort(dim=-1, stable=True)
    packed = selection.gather(-1, order)
    packed = torch.nn.functional.pad(packed, (0, max(width - packed.shape[-1], 0)), value=-1)
    return packed[..., :width]
