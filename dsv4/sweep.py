"""Sweeps of patches: every combination of names, layers, positions and parts, one patch for each.

Axes: b row, s token, k slot.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dsv4 import values
from dsv4.activation_cache import ActivationCache
from dsv4.bench import Bench, Part
from dsv4.capture import as_pos
from dsv4.hooks import HookPoint
from dsv4.kernels.numeric import wide
from dsv4.part import PART_AXES, Positions, check_tokens, indices_of, over_parts, over_tokens
from dsv4.part import part_size as size_of
from dsv4.replay import PLACED, SELECTION
from dsv4.stage import BEFORE_BLOCKS
from dsv4.values import VALUES

EACH = "each"
AXES = ("name", "layers", "pos", *PART_AXES)
SLOT_OUTPUTS = "expert_outputs"
# Axes whose places depend on which tokens are run: keys and entries.
KEYED = {*PLACED, SELECTION} - {"s"}
RESULTS = ("metric", "routing_flips", "selection_flips")


@dataclass(frozen=True)
class Grid:
    """What is swept.

    Attributes:
        axes: name of each axis of the result -> its labels.
        leaves, layers: last parts of names; [None] for values of the model.
        pos: positions, None where the sweep does not go over them. part: "heads", ... or None.
        numbers: of the part.
    """

    axes: Mapping[str, Sequence[Any]]
    leaves: Sequence[str]
    layers: Sequence[int | None]
    pos: Sequence[int | None]
    part: str | None
    numbers: Sequence[int | None]

    @classmethod
    def of(cls, model, over: Mapping[str, Any], valid: Tensor) -> "Grid":
        unknown = [key for key in over if key not in AXES]
        if unknown or "name" not in over:
            raise ValueError(f"patch_sweep: over={list(over)}, expected a name and some of {', '.join(AXES[1:])}")
        several = not isinstance(over["name"], str)
        leaves = list(over["name"]) if several else [over["name"]]
        for leaf in leaves:
            if leaf not in VALUES:
                raise KeyError(f"patch_sweep: {leaf!r} is the last part of no name; layers go under layers=")
        axes: dict[str, Sequence[Any]] = {"name": leaves} if several else {}
        layers = _layers(model, leaves, over.get("layers"))
        if layers != [None]:
            axes["layers"] = layers
        pos = _positions(over.get("pos"), int(valid.sum(1).max()))
        if pos != [None]:
            axes["pos"] = pos
        parts = [part for part in PART_AXES if over.get(part) is not None]
        if len(parts) > 1:
            raise ValueError(f"patch_sweep: over {parts}, expected one kind of part")
        grid = cls(axes, leaves, layers, pos, parts[0] if parts else None, [None])
        return grid if not parts else grid._with_part(model, parts[0], over[parts[0]])

    def _with_part(self, model, part: str, chosen) -> "Grid":
        sizes = values.sizes(model.config, None, 1, 1)
        counts = set()
        for name in self.names(model):
            if part == "experts" and name.endswith(f".{SLOT_OUTPUTS}"):
                counts.add(model.num_experts)
            else:
                counts.add(size_of(model.hook_dict[name], part, sizes))
        if len(counts) > 1:
            raise ValueError(f"patch_sweep: {self.leaves} have {sorted(counts)} {part}; sweep each")
        (count,) = counts
        every = isinstance(chosen, str) and chosen == EACH
        numbers = list(range(count)) if every else indices_of(part, chosen, count)
        axes = {**self.axes, part: numbers}
        return Grid(axes, self.leaves, self.layers, self.pos, part, numbers)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(labels) for labels in self.axes.values())

    def name(self, leaf: str, layer: int | None) -> str:
        return VALUES[leaf].full_name(layer)

    def names(self, model) -> list[str]:
        return [self.name(leaf, layer) for leaf in self.leaves for layer in self.layers]

    def cells(self) -> Iterator[tuple[int | None, str, int, list[tuple[Any, Any]]]]:
        """(layer, leaf, first flat index, its patches (pos, number)), layer by layer."""
        patches = list(product(self.pos, self.numbers))
        for row, layer in enumerate(self.layers):
            for column, leaf in enumerate(self.leaves):
                yield layer, leaf, (column * len(self.layers) + row) * len(patches), patches


def _layers(model, leaves: Sequence[str], chosen) -> list[int | None]:
    of_model = {leaf for leaf in leaves if not VALUES[leaf].module}
    if of_model:
        if len(of_model) < len(leaves) or chosen is not None:
            raise ValueError(f"patch_sweep: {sorted(of_model)} are values of the model, without layers: sweep them alone")
        return [None]
    if chosen is None or (isinstance(chosen, str) and chosen == EACH):
        every = [i for i in range(model.num_layers) if i not in model.skipped]
        names = model.hook_dict
        layers = [i for i in every if all(VALUES[x].full_name(i) in names for x in leaves)]
        if not layers:
            raise ValueError(f"patch_sweep: no layer has all of {leaves}")
        return layers
    layers = sorted(indices_of("layers", chosen, model.num_layers))
    # A value that a block lacks is a KeyError with the reason.
    model.match_names([VALUES[leaf].full_name(i) for leaf in leaves for i in layers])
    return layers


def _positions(pos, longest: int) -> list[int | None]:
    if pos is None:
        return [None]
    if isinstance(pos, str) and pos == EACH:
        return list(range(longest))
    if isinstance(pos, slice):
        return list(range(*pos.indices(longest)))
    places = torch.as_tensor(as_pos(pos)).reshape(-1).tolist()
    for place in places:
        if not -longest <= place < longest:
            raise ValueError(f"patch_sweep: pos {place} is outside rows of up to {longest} tokens")
    return list(dict.fromkeys(places))


class Sweep:
    """Fills the results of a grid, cell by cell."""

    def __init__(self, model, bench: Bench, grid: Grid):
        self.model, self.bench, self.grid = model, bench, grid
        self.by_expert = grid.part == "experts" and SLOT_OUTPUTS in grid.leaves
        if self.by_expert and len(grid.leaves) > 1:
            raise ValueError(f"patch_sweep: sweep {SLOT_OUTPUTS} over experts alone")
        names = grid.names(model)
        for name in names:
            point = model.hook_dict[name]
            if point.read_only:
                raise ValueError(f"patch_sweep: {name} is read-only")
            if grid.pos != [None]:
                check_tokens(point, Positions(0))
        if self.by_expert:
            names += [n.replace(SLOT_OUTPUTS, "expert_indices") for n in names]
        run = {"attention_mask": bench.pair.valid}
        if bench.keep is not None:
            run["logits_to_keep"] = bench.keep
        self.other = model.run_with_cache(bench.pair.other, names, **run)[1]
        self.own = model.run_with_cache(bench.pair.base, names, **run)[1] if self.by_expert else None

    def start(self, layer: int | None, leaf: str) -> int | None:
        if layer is None:
            return None if leaf in BEFORE_BLOCKS else self.model.num_layers
        return layer

    def measure(self, layer: int | None, leaf: str, patches: Sequence[tuple]):
        name, start = self.grid.name(leaf, layer), self.start(layer, leaf)
        axes, part = set(self.model.hook_dict[name].axes.split()), None
        if self.grid.pos != [None] and not axes & KEYED:
            part = self.bench.behind(start, [pos for pos, _ in patches])
        if self.by_expert:
            hook = (name.replace(SLOT_OUTPUTS, "routed_output"), self._on_sum(name, patches, part))
        else:
            hook = (name, self._on_value(name, patches, part))
        return self.bench.measure(start, [hook], len(patches), part)

    def _on_value(self, name: str, patches: Sequence[tuple], tokens: Part | None):
        other: ActivationCache = self.other
        part = self.grid.part

        def put(value: Tensor, hook: HookPoint) -> Tensor:
            words = hook.axes.split()
            source = other[name]
            if tokens is not None:
                source = tokens.of(source, words.index("s"))
            source = source.repeat(len(patches), *[1] * (value.dim() - 1))
            where = torch.ones_like(value, dtype=torch.bool)
            if self.grid.pos != [None]:
                where = where & over_tokens(self._tokens(patches, hook), hook)
            if part is not None:
                axis = next(i for i, word in enumerate(words) if word in PART_AXES[part])
                count = size_of(hook, part, values.sizes(self.model.config, None, 1, 1))
                numbers = torch.tensor([n for _, n in patches], device=value.device)
                chosen = torch.nn.functional.one_hot(numbers, count).bool()
                chosen = chosen.repeat_interleave(self.bench.rows, dim=0)
                where = where & over_parts(chosen, hook, part, value.shape[axis])
            return torch.where(where, source, value)

        return put

    def _on_sum(self, name: str, patches: Sequence[tuple], tokens: Part | None):
        """One expert's part of the routed output, whatever slot it has in either run."""

        def moved_by(expert: int) -> Tensor:
            moved = self._of_expert(self.other, name, expert) - self._of_expert(self.own, name, expert)
            return moved if tokens is None else tokens.of(moved)

        def put(value: Tensor, hook: HookPoint) -> Tensor:
            moved = torch.cat([moved_by(n) for _, n in patches])
            if self.grid.pos != [None]:
                moved = moved * self._tokens(patches, hook).unsqueeze(-1)
            return value + moved

        return put

    @staticmethod
    def _of_expert(cache: ActivationCache, name: str, expert: int) -> Tensor:
        slots = cache[name.replace(SLOT_OUTPUTS, "expert_indices")] == expert
        return (wide(cache[name]) * slots.unsqueeze(-1)).sum(2)

    def _tokens(self, patches: Sequence[tuple], hook: HookPoint) -> Tensor:
        """[patches * b s] bool."""
        positions, lengths = hook.positions, hook.stage.call.lengths
        blocks = zip(patches, positions.split(self.bench.rows), strict=True)
        own = lengths[: self.bench.rows]
        return torch.cat([Positions(pos).holds(block, own) for (pos, _), block in blocks])


class Saved:
    """Results so far, in a file that a later call goes on from; without a file they are kept here.

    Raises ValueError when the file is of another sweep.
    """

    def __init__(self, path: str | Path | None, shape: Sequence[int], about: Mapping[str, Any]):
        self.path = None if path is None else Path(path)
        self.key = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()
        self.metric = torch.full(shape, torch.nan)
        self.routing_flips, self.selection_flips = torch.zeros(2, *shape, dtype=torch.int64)
        self.done = torch.zeros(shape, dtype=torch.bool)
        if self.path is not None and self.path.exists():
            self._read()

    def _read(self) -> None:
        with safe_open(self.path, framework="pt") as file:
            held = (file.metadata() or {}).get("sweep")
            if held != self.key:
                raise ValueError(f"{self.path} holds another sweep (other inputs, axes, metric or model); give this one a file of its own")
            for name in (*RESULTS, "done"):
                setattr(self, name, file.get_tensor(name))

    def put(self, first: int, found: tuple[list[float], Tensor, Tensor]) -> None:
        metric, routing, selection = found
        place = slice(first, first + len(metric))
        for name, part in zip(RESULTS, (torch.tensor(metric), routing, selection), strict=True):
            getattr(self, name).view(-1)[place] = part
        self.done.view(-1)[place] = True
        if self.path is not None:
            partial = self.path.with_name(f".{self.path.name}.partial")
            tensors = {name: getattr(self, name) for name in (*RESULTS, "done")}
            save_file(tensors, partial, metadata={"sweep": self.key})
            os.replace(partial, self.path)
