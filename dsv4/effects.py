"""What patching found: a metric for every patch on labelled axes, or an estimate for every element.

Axes of estimates are those of the values, without the widths that were summed over.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4.table import Table


@dataclass(frozen=True)
class Patched:
    """One row of a table of patches."""

    name: str
    effect: float
    metric: float
    routing_flips: int
    selection_flips: int


@dataclass(frozen=True)
class Estimated:
    """One row of a table of estimates."""

    name: str
    effect: float


@dataclass(frozen=True)
class Effects:
    """The metric of one run for each patch.

    Attributes:
        axes: name of each axis -> what stands along it, in the order of the tensors' axes.
        metric: float32, NaN where no patch was run.
        routing_flips, selection_flips: int64, how many experts and entries that the unpatched run
            chose, over all blocks and real tokens, the patched run did not.
        base, other: the metric of the run that was patched, and of the run the values came from.
    """

    axes: Mapping[str, Sequence[Any]]
    metric: Tensor
    routing_flips: Tensor
    selection_flips: Tensor
    base: float
    other: float

    @property
    def effect(self) -> Tensor:
        """What each patch changed of the metric."""
        return self.metric - self.base

    @property
    def normalised(self) -> Tensor:
        """The same, 1 where the patch does all that the other input does."""
        return self.effect / (self.other - self.base)

    def at(self, **where: Any) -> Tensor:
        """The effects at these labels, `at(layers=3, pos=-1)`; axes not named stay."""
        found = self.effect
        for i, (axis, labels) in reversed(list(enumerate(self.axes.items()))):
            if axis in where:
                if where[axis] not in labels:
                    raise KeyError(f"{axis}={where[axis]!r} is not among {list(labels)}")
                found = found.select(i, list(labels).index(where[axis]))
        unknown = set(where) - set(self.axes)
        if unknown:
            raise KeyError(f"no axis {sorted(unknown)}; the axes are {list(self.axes)}")
        return found

    def top(self, k: int = 10) -> Table:
        """The k largest effects, by size."""
        flat = self.effect.nan_to_num(nan=0.0).flatten()
        best = flat.abs().topk(min(k, len(flat))).indices.tolist()
        flips = self.routing_flips.flatten(), self.selection_flips.flatten()
        labels = [
            Patched(
                self._label(i),
                float(flat[i]),
                float(self.metric.flatten()[i]),
                *(int(f[i]) for f in flips),
            )
            for i in best
        ]
        return Table(labels, title=f"metric {self.base:.4g}, in the other run {self.other:.4g}")

    def _label(self, flat: int) -> str:
        index = torch.unravel_index(torch.tensor(flat), self.metric.shape)
        pairs = zip(self.axes.items(), index, strict=True)
        return " ".join(f"{axis}={labels[int(i)]}" for (axis, labels), i in pairs)

    def __str__(self) -> str:
        return str(self.top())


class Estimates(Mapping[str, Tensor]):
    """{name: estimated effect of patching each element}, float32.

    Attributes:
        axes: name -> axes of its tensor, space-separated.
        base, other: the metric of the run that would be patched, and of the other one.
    """

    def __init__(self, values: Mapping[str, Tensor], axes: Mapping[str, str], base, other):
        self._values, self.axes, self.base, self.other = dict(values), dict(axes), base, other

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._values:
            raise KeyError(f"no estimate for {name!r}; there are {', '.join(list(self)[:5])}, ...")
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def total(self) -> dict[str, float]:
        """{name: the sum of its estimates}: for patching the whole value."""
        return {name: float(value.sum()) for name, value in self.items()}

    def top(self, k: int = 10) -> Table:
        """The k largest elements, by size, over all names."""
        flat = torch.cat([value.flatten().cpu() for value in self.values()])
        ends = torch.tensor([value.numel() for value in self.values()]).cumsum(0)
        names, rows = list(self), []
        for i in flat.abs().topk(min(k, len(flat))).indices:
            at = int(torch.searchsorted(ends, i, right=True))
            name = names[at]
            place = i - (ends[at] - self[name].numel())
            index = torch.unravel_index(place, self[name].shape)
            where = zip(self.axes[name].split(), index, strict=True)
            rows.append(Estimated(" ".join([name, *[f"{a}={int(j)}" for a, j in where]]), float(flat[i])))
        return Table(rows, title=f"metric {self.base:.4g}, in the other run {self.other:.4g}")

    def __str__(self) -> str:
        return str(self.top())
