"""The values of one run, by name: a Mapping[str, Tensor] that can be stacked, moved, saved and read back lazily.

On disk a cache is one safetensors file: the names are the keys, axes, layouts and positions stand in the metadata.
"""

import difflib
import json
import os
import struct
import uuid
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from dsv4.origin import Origin
from dsv4.values import VALUES

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}
# Room for one entry of the header beside its name: dtype, up to six sizes, two offsets.
ENTRY_ROOM = 256
POSITIONS = "dsv4.positions"
NOTHING_SPECIAL = Origin()


class ActivationCache(Mapping[str, Tensor]):
    """Captured values in forward order. A value of a generation whose length differs from step to step is a list of tensors.

    Attributes:
        axes: name -> axes of the tensor held (with the axes that slicing or `remove_batch_dim` took out left out).
        positions: [b, n] int64, the row position of each captured token; -1 at padding.
        num_layers: of the model, so that layers can be counted from the end; None where it is not known.
        origin: what the run was.
    """

    def __init__(
        self,
        values: Mapping[str, Tensor],
        axes: Mapping[str, str],
        positions: Tensor | None = None,
        num_layers: int | None = None,
        origin: Origin = NOTHING_SPECIAL,
        model=None,
    ):
        self._values = values if isinstance(values, _Lazy) else dict(values)
        self.axes = dict(axes)
        self.positions = positions
        self.num_layers = num_layers
        self.origin = origin
        # Not kept alive: a cache of a few numbers must not hold a model's memory.
        self._model = None if model is None else weakref.ref(model)

    @property
    def model(self):
        """The model that ran; None when it is gone or was never known (a loaded cache)."""
        return None if self._model is None else self._model()

    def with_model(self, model) -> "ActivationCache":
        """A cache of the same values that knows its model: for analyses of a loaded cache that need weights."""
        if self.num_layers not in (None, model.num_layers):
            raise ValueError(f"with_model: the cache comes from a model of {self.num_layers} layers, this one has {model.num_layers}")
        return ActivationCache(self._values, self.axes, self.positions, self.num_layers, self.origin, model)

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_model": None}

    @property
    def residual(self):
        """The algebra of the residual streams: `dsv4.residual.Residual`."""
        from dsv4.residual import Residual

        return Residual(self)

    @property
    def attention(self):
        """Where the attention looked: `dsv4.attention_analysis.AttentionAnalysis`."""
        from dsv4.attention_analysis import AttentionAnalysis

        return AttentionAnalysis(self)

    @property
    def moe(self):
        """Who was routed where: `dsv4.moe_analysis.MoeAnalysis`."""
        from dsv4.moe_analysis import MoeAnalysis

        return MoeAnalysis(self)

    @property
    def names(self) -> list[str]:
        return list(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __contains__(self, name) -> bool:
        return self._path(name) in self._values

    def __getitem__(self, name) -> Tensor:
        """By full name, or by (leaf name, layer)."""
        path = self._path(name)
        if path in self._values:
            return self._values[path]
        leaves = [n for n in self._values if n.rsplit(".", 1)[-1] == path]
        near = leaves[:3] or difflib.get_close_matches(path, self._values, n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}?" if near else "it was not captured: name it in run_with_cache(names=...)"
        if leaves:
            hint += f' Read one layer as cache["{path}", layer], all of them as cache.stack("{path}").'
        raise KeyError(f"{path!r} is not in this cache of {len(self)} values; {hint}")

    def _path(self, name) -> str:
        if not isinstance(name, tuple):
            return name
        if len(name) != 2 or not isinstance(name[0], str) or isinstance(name[1], bool) or not isinstance(name[1], int):
            raise TypeError(f"cache[{name!r}]: expected a full name, or (leaf name, layer)")
        leaf, layer = name
        if layer < 0:
            if self.num_layers is None:
                raise KeyError(f"layer {layer}: this cache does not know how many layers the model has; count from 0")
            layer += self.num_layers
        for n in self._values:
            if n.startswith(f"layers.{layer}.") and n.endswith(f".{leaf}"):
                return n
        return f"layers.{layer}.{leaf}"

    def stack(self, leaf: str) -> Tensor:
        """[layers, ...]: the value of every layer that has it, in order. ValueError when the shapes differ."""
        names = [n for n in self._values if n.startswith("layers.") and n.endswith(f".{leaf}")]
        if not names:
            raise KeyError(f"no layer's {leaf!r} is in this cache")
        parts = {n: self._values[n] for n in names}
        steps = [n for n, part in parts.items() if isinstance(part, list)]
        if steps:
            raise ValueError(f"{steps[0]} is a list of steps; generate with align=True to stack it")
        shapes = {n: list(part.shape) for n, part in parts.items()}
        if len({tuple(shape) for shape in shapes.values()}) > 1:
            raise ValueError(f"{leaf!r} differs in shape between layers: {shapes}; take the layers of one kind")
        first = next(iter(parts.values()))
        return torch.stack([part.to(first.device) for part in parts.values()])

    def to(self, device) -> "ActivationCache":
        """A cache on `device`; this one stays as it is."""
        positions = None if self.positions is None else self.positions.to(device)
        moved = {n: [step.to(device) for step in v] if isinstance(v, list) else v.to(device) for n, v in self.items()}
        return ActivationCache(moved, self.axes, positions, self.num_layers, self.origin, self.model)

    def remove_batch_dim(self) -> "ActivationCache":
        """A cache without the batch axis. ValueError when it holds more than one row."""

        def only_row(name: str, value: Tensor) -> Tensor:
            if value.shape[0] != 1:
                raise ValueError(f"remove_batch_dim: {name} holds {value.shape[0]} rows; index the one you want instead")
            return value.squeeze(0)

        values, axes = {}, dict(self.axes)
        for name, value in self.items():
            words = self.axes[name].split()
            if words[0] == "b":
                value = [only_row(name, step) for step in value] if isinstance(value, list) else only_row(name, value)
                axes[name] = " ".join(words[1:])
            values[name] = value
        positions = self.positions
        positions = positions.squeeze(0) if positions is not None and positions.dim() == 2 else positions
        return ActivationCache(values, axes, positions, self.num_layers, self.origin, self.model)

    def add_batch_dim(self) -> "ActivationCache":
        """A cache with the batch axis that `remove_batch_dim` took out."""
        if self.positions is None or self.positions.dim() != 1:
            raise ValueError("add_batch_dim: this cache has its batch axis")
        values, axes = {}, {}
        for name, value in self.items():
            value = [step.unsqueeze(0) for step in value] if isinstance(value, list) else value.unsqueeze(0)
            values[name], axes[name] = value, f"b {self.axes[name]}"
        return ActivationCache(values, axes, self.positions.unsqueeze(0), self.num_layers, self.origin, self.model)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file. FileExistsError when it exists; a crash leaves none."""
        steps = [n for n, v in self.items() if isinstance(v, list)] if not isinstance(self._values, _Lazy) else []
        if steps:
            raise ValueError(f"{steps[0]} is a list of steps and has no one shape to save; generate with align=True")
        with StreamWriter(path, {n: self.axes[n] for n in self}, self.num_layers, self.origin.edited) as writer:
            for name, value in self.items():
                writer.write(name, value)
            writer.positions, writer.origin = self.positions, self.origin

    @classmethod
    def load(cls, path: str | Path, device="cpu") -> "ActivationCache":
        """Open a saved cache; values are read when they are asked for, to `device`."""
        lazy = _Lazy(Path(path), str(device))
        return cls(lazy, lazy.axes, lazy.positions, lazy.num_layers, lazy.origin)

    def __repr__(self) -> str:
        lines = [f"ActivationCache of {len(self)} values"]
        lines += [f"  {n}  [{self.axes[n]}]" for n in self.names]
        return "\n".join(lines)


class _Lazy(Mapping[str, Tensor]):
    """A saved cache's tensors, read on access."""

    def __init__(self, path: Path, device: str):
        self.path, self.device = path, device
        with safe_open(path, framework="pt", device=device) as file:
            about = file.metadata() or {}
            if "dsv4" not in about:
                raise ValueError(f"{path} is not a saved ActivationCache (no 'dsv4' entry in its metadata)")
            held = json.loads(about["dsv4"])
            self.axes, self.num_layers = held["axes"], held["num_layers"]
            self.positions = file.get_tensor(POSITIONS) if held["positions"] else None
            self.origin = Origin.from_json(held["origin"])

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.axes:
            raise KeyError(name)
        with safe_open(self.path, framework="pt", device=self.device) as file:
            return file.get_tensor(name)

    def __iter__(self):
        return iter(self.axes)

    def __len__(self) -> int:
        return len(self.axes)


class StreamWriter:
    """Writes a cache while the run goes on: values in the order they come, the header when the last has come.

    The file appears under its name only when the context ends well; what a killed process leaves is a hidden file beside it.

    Args:
        axes: name -> axes of each value that may be written. FileExistsError when the file exists.
        editable: names of the values that the run may turn out to have edited.
    """

    def __init__(self, path: str | Path, axes: Mapping[str, str], num_layers: int | None = None, editable: Iterable[str] = ()):
        self.path, self.axes, self.num_layers = Path(path), axes, num_layers
        if self.path.exists():
            raise FileExistsError(f"{self.path} exists; saved activations are never overwritten: choose another name or delete it")
        self.positions: Tensor | None = None
        self.origin = NOTHING_SPECIAL
        self._partial = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}.partial")
        self._header: dict = {}
        # A name stands in the header once, and in axes and layouts once more inside a JSON string.
        self._room = sum(3 * len(json.dumps(json.dumps(n))) + len(axes[n]) + ENTRY_ROOM for n in axes) + 4 * ENTRY_ROOM
        self._room += 2 * sum(len(json.dumps(json.dumps(n))) for n in editable)
        self._room += -self._room % 8
        self._written = 0

    def __enter__(self) -> "StreamWriter":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._partial.open("xb")
        self._file.seek(8 + self._room)
        return self

    def write(self, name: str, value: Tensor) -> None:
        value = value.detach().cpu().contiguous()
        data = value.view(-1).view(torch.uint8).numpy() if value.numel() else b""
        self._file.write(data)
        size = value.numel() * value.element_size()
        offsets = [self._written, self._written + size]
        self._header[name] = {"dtype": DTYPES[value.dtype], "shape": list(value.shape), "data_offsets": offsets}
        self._written += size

    def __exit__(self, kind, error, traceback) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._file.close()
            self._partial.unlink(missing_ok=True)

    def _finish(self) -> None:
        axes = {n: self.axes[n] for n in self.axes if n in self._header}
        if self.positions is not None:
            self.write(POSITIONS, self.positions)
        layouts = {n: VALUES[n.rsplit(".", 1)[-1]].layout for n in axes if n.rsplit(".", 1)[-1] in VALUES}
        held = {"axes": axes, "layouts": layouts, "num_layers": self.num_layers, "positions": self.positions is not None}
        held["origin"] = asdict(self.origin)
        header = json.dumps({"__metadata__": {"dsv4": json.dumps(held)}, **self._header}).encode()
        assert len(header) <= self._room, "the header outgrew the room kept for it"
        self._file.seek(0)
        self._file.write(struct.pack("<Q", self._room) + header.ljust(self._room))
        self._file.truncate(8 + self._room + self._written)
        self._file.flush()
        os.fsync(self._file.fileno())
        if self.path.exists():
            raise FileExistsError(f"{self.path} appeared while this run was writing; nothing was overwritten")
        os.replace(self._partial, self.path)
