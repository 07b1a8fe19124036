"""Which part of a value an edit acts on: tokens by position in the row, heads, streams, slots.

Positions count from a row's first real token, so that they mean the same tokens under any padding,
with a KV cache, and in every step of a generation. Axes: b row, s token.
"""

import operator
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from dsv4.capture import Pos, as_pos
from dsv4.hooks import HookPoint

# What a part is called, and the axes it may be counted on.
PART_AXES = {
    "heads": ("N", "N*D", "ih"),
    "streams": ("n",),
    "slots": ("top_k",),
    "experts": ("experts",),
}


class Positions:
    """Tokens by position in the row.

    Args:
        pos: None for every token, an int, a slice, a list of ints, or an integer tensor [n] or
            [b, n]. Counts from 0 are places in the row; negative ones count back from the last
            token that the call brings to the row, so in a generation -1 is every step's own token.
        what: the argument's name, for messages.
    """

    def __init__(self, pos: Pos, what: str = "pos"):
        self.given, self.what = as_pos(pos, what), what
        if isinstance(self.given, slice) and (self.given.step or 1) < 1:
            raise ValueError(f"{what}={pos}: expected a slice with a step of at least 1")
        self._asked = self._met = False

    @property
    def counts_back(self) -> bool:
        """Whether a position is counted from the end."""
        if self.given is None:
            return False
        if isinstance(self.given, slice):
            return any(end is not None and end < 0 for end in (self.given.start, self.given.stop))
        return bool((torch.as_tensor(self.given) < 0).any())

    def of(self, hook: HookPoint) -> Tensor:
        """[b s] bool over the tokens that the value at the point holds.

        Padding is in it only where no positions were given.
        """
        if self.given is None:
            return torch.ones_like(hook.positions, dtype=torch.bool)
        found = self.holds(hook.positions, hook.stage.call.lengths)
        self._asked = True
        self._met = self._met or bool(found.any())
        return found

    def holds(self, positions: Tensor, lengths: Tensor) -> Tensor:
        """positions [b ...] int64, -1 for none, in rows of `lengths` [b] -> bool of that shape."""
        real = positions >= 0
        if self.given is None:
            return real
        ends = lengths.view(-1, *[1] * (positions.dim() - 1))
        if isinstance(self.given, slice):
            return real & self._in_slice(positions, ends)
        rows = len(lengths)
        places = torch.as_tensor(self.given, dtype=torch.int64, device=positions.device)
        places = places.view(1, -1) if places.dim() < 2 else places
        if len(places) not in (1, rows):
            raise ValueError(
                f"{self.what} has shape {list(places.shape)}; expected [n] or [{rows}, n], one row of positions for each row of the batch"
            )
        places = torch.where(places < 0, places + lengths.unsqueeze(1), places)
        # One column for each position of the call, and a last one for what lies outside.
        size = int(torch.maximum(positions.amax(), lengths.amax())) + 1 if positions.numel() else 1
        outside = (places < 0) | (places >= size)
        table = torch.zeros(rows, size + 1, dtype=torch.bool, device=positions.device)
        table = table.scatter(1, places.masked_fill(outside, size), True)
        flat = positions.flatten(1).clamp(min=0)
        return real & table.gather(1, flat).view(positions.shape)

    def _in_slice(self, positions: Tensor, ends: Tensor) -> Tensor:
        start, stop, step = self.given.start or 0, self.given.stop, self.given.step or 1
        first = (ends + start).clamp(min=0) if start < 0 else torch.full_like(ends, start)
        inside = (positions >= first) & ((positions - first) % step == 0)
        if stop is None:
            return inside
        return inside & (positions < (ends + stop if stop < 0 else stop))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Warn at the end when runs were made inside and none had such a token."""
        yield
        if self._asked and not self._met:
            warnings.warn(
                f"{self.what}={self.given} met no token of any run made inside; positions count from each row's first real token",
                UserWarning,
                stacklevel=4,
            )


def over_tokens(mask: Tensor, point: HookPoint) -> Tensor:
    """mask [b s] -> the same, broadcasting over the value at the point."""
    words = point.axes.split()
    shape = [1] * len(words)
    shape[0], shape[words.index("s")] = mask.shape
    return mask.view(shape)


def check_tokens(point: HookPoint, positions: Positions) -> None:
    """ValueError when positions are asked of a value that has no token axis."""
    if positions.given is not None and "s" not in point.axes.split():
        raise ValueError(f"{point.name} [{point.axes}] has no token axis: leave {positions.what}= out there")


def indices_of(what: str, chosen, size: int) -> list[int]:
    """An int or several -> distinct ints in range(size), in the order given."""
    several = isinstance(chosen, Iterable) and not isinstance(chosen, str)
    given = list(chosen) if several else [chosen]
    for i in given:
        if isinstance(i, bool | str) or not hasattr(i, "__index__"):
            raise TypeError(f"{what}: got {i!r}, expected ints")
        if not 0 <= operator.index(i) < size:
            raise ValueError(f"{what}: got {operator.index(i)}, expected 0 <= i < {size}")
    return list(dict.fromkeys(map(operator.index, given)))


def part_axis(point: HookPoint, part: str) -> str:
    """The axis of the value on which `part` ("heads", ...) is counted; ValueError without one."""
    words = point.axes.split()
    found = [word for word in PART_AXES[part] if word in words]
    if not found:
        raise ValueError(f"{point.name} [{point.axes}] has no axis of {part}: leave {part}= out there, or name a value that has one")
    if words.count(found[0]) > 1:
        raise ValueError(f"{point.name} [{point.axes}] has two axes of {part}: edit it in a hook")
    return found[0]


def part_size(point: HookPoint, part: str, sizes: Mapping[str, int]) -> int:
    """How many of `part` the value has; sizes: of the axes (`dsv4.values.sizes`)."""
    axis = part_axis(point, part)
    return sizes["N"] if axis == "N*D" else sizes[axis]


def over_parts(chosen: Tensor, point: HookPoint, part: str, size: int) -> Tensor:
    """chosen [size] or [b size] bool -> the same, broadcasting over the value at the point.

    size: length of the axis in the value; on `N*D` a head's channels go with it.
    """
    words = point.axes.split()
    axis = words.index(part_axis(point, part))
    chosen = chosen if chosen.dim() == 2 else chosen.unsqueeze(0)
    chosen = chosen.repeat_interleave(size // chosen.shape[1], dim=1)
    shape = [1] * len(words)
    shape[0], shape[axis] = chosen.shape
    return chosen.view(shape)


def as_mask(indices: list[int], size: int, device: torch.device) -> Tensor:
    """[size] bool, True at the indices."""
    mask = torch.zeros(size, dtype=torch.bool)
    mask[indices] = True
    return mask.to(device)
