"""How the analyses read a cache: every value with its batch and token axes, whatever the cache has dropped of them.

Axes: b row, s token captured.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dsv4.values import VALUES, absent_reason


class Reading:
    """Attributes:
    positions: [b s] int64, -1 at padding. valid: [b s] bool.
    origin: what the run was. layers: those it went through.
    """

    def __init__(self, cache):
        self.cache, self.origin = cache, cache.origin
        if cache.num_layers is None or cache.positions is None:
            raise ValueError("this cache was not filled by a run (it knows neither layers nor positions); use run_with_cache")
        held = {n: cache.axes[n].split() for n in cache if n.rsplit(".", 1)[-1] in VALUES}
        declared = {n: VALUES[n.rsplit(".", 1)[-1]].axes.split() for n in held}
        self.has_rows = cache.positions.dim() == 2
        self.has_tokens = not any("s" in declared[n] and "s" not in axes for n, axes in held.items())
        self.positions = cache.positions if self.has_rows else cache.positions.unsqueeze(0)
        self.valid = self.positions >= 0
        self._missing_axes = {
            n: [i for i, axis in enumerate(declared[n]) if axis in ("b", "s") and axis not in axes] for n, axes in held.items()
        }
        stop = cache.num_layers if self.origin.stop is None else self.origin.stop
        self.layers = [i for i in range(self.origin.start or 0, stop) if i not in self.origin.skipped]

    @property
    def model(self):
        """ValueError when it is not at hand."""
        if self.cache.model is None:
            raise ValueError("this needs weights, and the cache's model is gone or was never known: use cache.with_model(model)")
        return self.cache.model

    def __contains__(self, name: str) -> bool:
        return name in self.cache

    def __getitem__(self, name: str) -> Tensor:
        value = self.cache[name]
        if isinstance(value, list):
            raise ValueError(f"{name} is a list of steps; generate with align=True to analyse it")
        for i in self._missing_axes[name]:
            value = value.unsqueeze(i)
        # Values of a model on several devices come together where the positions are.
        return value.to(self.positions.device)

    def holding(self, leaf: str) -> list[int]:
        """Layers whose value of this leaf name was captured."""
        return [i for i in range(self.cache.num_layers) if VALUES[leaf].full_name(i) in self.cache]

    def of(self, leaf: str, layer: int) -> Tensor:
        return self[VALUES[leaf].full_name(layer)]

    def require(self, names: Iterable[str], what: str) -> None:
        """ValueError that lists what is missing, as patterns where every layer lacks it."""
        missing = [n for n in names if n not in self.cache]
        if missing:
            spelled = ", ".join(f'"{n}"' for n in self._spelled(missing))
            raise ValueError(f"{what} needs values that this cache does not hold; capture names=[{spelled}] as well")

    def require_layers(self, leaves: Sequence[str], layers: Iterable[int], what: str) -> None:
        self.require([VALUES[leaf].full_name(i) for leaf in leaves for i in layers], what)

    def _spelled(self, missing: list[str]) -> list[str]:
        spelled: dict[str, None] = {}
        for name in missing:
            value = VALUES[name.rsplit(".", 1)[-1]]
            of_all = [value.full_name(i) for i in self.layers] if name.startswith("layers.") else [name]
            if self.cache.model is not None:
                of_all = [n for n in of_all if absent_reason(self.cache.model.config, n) is None]
            everywhere = len(of_all) > 1 and set(of_all) <= set(missing)
            spelled[value.full_name("*") if everywhere else name] = None
        return list(spelled)

    def drop(self, value: Tensor, rows: int = 0, tokens: int = 1) -> Tensor:
        """Take out of a result the axes that the cache has dropped; `rows` and `tokens` say which of its axes they are."""
        # The later axis first, so that the earlier one's number stays right.
        for axis in sorted(([] if self.has_tokens else [tokens]) + ([] if self.has_rows else [rows]), reverse=True):
            value = value.squeeze(axis)
        return value

    def refuse_edits(self, leaves: Sequence[str], layers: Iterable[int], why: str) -> None:
        """ValueError when the run edited one of these values."""
        names = {VALUES[leaf].full_name(i) for leaf in leaves for i in layers}
        for name in self.origin.edited:
            if name in names:
                raise ValueError(f"this run edited {name}: {why}")


def per_layer_table(title: str, rows: Iterable[tuple[int, Sequence[float]]], columns: Sequence[str]) -> str:
    """A few numbers for each layer, aligned."""
    lines = [["layer", *columns], *[[str(layer), *[f"{x:.4g}" for x in numbers]] for layer, numbers in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join([title, *["  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines]])


class ByLayer(dict[int, Tensor]):
    """{layer: value}, with what it is: printable as one line per layer, stackable where shapes agree.

    Attributes:
        title: what the values are. axes: of each value, before the axes that the cache dropped were taken out.
    """

    def __init__(self, values: dict[int, Tensor], title: str, axes: str, read: Reading):
        super().__init__(values)
        self.title, self.axes, self._read = title, axes, read

    @property
    def layers(self) -> list[int]:
        return list(self)

    def stack(self) -> Tensor:
        """[layers, ...]."""
        return torch.stack(list(self.values()))

    def __str__(self) -> str:
        rows = [(i, _summary(self.real(i))) for i in self]
        return per_layer_table(f"{self.title} [{self.axes}]", rows, ("mean", "smallest", "largest"))

    __repr__ = __str__

    def real(self, layer: int) -> Tensor:
        """[tokens ...]: the values of real tokens, in order; all there is where the value has no token axis."""
        value, words = self[layer], self.axes.split()
        if "s" not in words:
            return value
        dropped = {"b": not self._read.has_rows, "s": not self._read.has_tokens}
        for i, word in enumerate(words):
            if dropped.get(word):
                value = value.unsqueeze(i)
        return value.movedim((words.index("b"), words.index("s")), (0, 1))[self._read.valid.to(value.device)]


def _summary(value: Tensor) -> tuple[float, float, float]:
    """Of the finite values."""
    finite = value[value.isfinite()].double() if value.is_floating_point() else value.double()
    return (finite.mean().item(), finite.min().item(), finite.max().item()) if finite.numel() else (float("nan"),) * 3
