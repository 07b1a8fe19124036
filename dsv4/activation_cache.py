"""The values of one run, by name: a Mapping[str, Tensor] that can be stacked, moved, saved and read back lazily.

On disk a cache is one safetensors file: the names are the keys, axes, layouts and positions stand in the metadata.
"""

import difflib
import json
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

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


class ActivationCache(Mapping[str, Tensor]):
    """Captured values in forward order.

    Attributes:
        axes: name -> axes of the tensor held (with the axes that slicing or `remove_batch_dim` took out left out).
        positions: [b, n] int64, the row position of each captured token; -1 at padding.
    """

    def __init__(self, values: Mapping[str, Tensor], axes: Mapping[str, str], positions: Tensor | None = None):
        self._values = values if isinstance(values, _Lazy) else dict(values)
        self.axes = dict(axes)
        self.positions = positions

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
        leaf, layer = name
        layers = sorted({int(n.split(".")[1]) for n in self._values if n.startswith("layers.")})
        if layer < 0 and layers:
            layer += layers[-1] + 1
        for n in self._values:
            parts = n.split(".")
            if parts[0] == "layers" and parts[1] == str(layer) and n.endswith(f".{leaf}"):
                return n
        return f"layers.{layer}.{leaf}"

    def stack(self, leaf: str) -> Tensor:
        """[layers, ...]: the value of every layer that has it, in order. ValueError when the shapes differ."""
        names = [n for n in self._values if n.startswith("layers.") and n.split(".", 2)[2].endswith(leaf) and n.endswith(f".{leaf}")]
        if not names:
            raise KeyError(f"no layer's {leaf!r} is in this cache")
        shapes = {n: tuple(self._values[n].shape) for n in names}
        if len(set(shapes.values())) > 1:
            raise ValueError(f"{leaf!r} differs in shape between layers: {shapes}; take the layers of one kind")
        return torch.stack([self._values[n] for n in names])

    def to(self, device) -> "ActivationCache":
        """A cache on `device`; this one stays as it is."""
        positions = None if self.positions is None else self.positions.to(device)
        return ActivationCache({n: v.to(device) for n, v in self.items()}, self.axes, positions)

    def remove_batch_dim(self) -> "ActivationCache":
        """A cache without the batch axis. ValueError when it holds more than one row."""
        values, axes = {}, {}
        for name, value in self.items():
            words = self.axes[name].split()
            if words[0] == "b":
                if value.shape[0] != 1:
                    raise ValueError(f"remove_batch_dim: {name} holds {value.shape[0]} rows; index the one you want instead")
                value, words = value.squeeze(0), words[1:]
            values[name], axes[name] = value, " ".join(words)
        positions = self.positions
        return ActivationCache(values, axes, positions.squeeze(0) if positions is not None and positions.dim() == 2 else positions)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file. FileExistsError when it exists; a crash leaves none."""
        with StreamWriter(path, {n: self.axes[n] for n in self}) as writer:
            for name, value in self.items():
                writer.write(name, value)
            writer.positions = self.positions

    @classmethod
    def load(cls, path: str | Path) -> "ActivationCache":
        """Open a saved cache; values are read when they are asked for."""
        lazy = _Lazy(Path(path))
        return cls(lazy, lazy.axes, lazy.positions)

    def __repr__(self) -> str:
        lines = [f"ActivationCache of {len(self)} values"]
        lines += [f"  {n}  [{self.axes[n]}]" for n in self.names]
        return "\n".join(lines)


class _Lazy(Mapping[str, Tensor]):
    """A saved cache's tensors, read on access."""

    def __init__(self, path: Path):
        self.path = path
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            if "dsv4" not in about:
                raise ValueError(f"{path} is not a saved ActivationCache (no 'dsv4' entry in its metadata)")
            self.axes = json.loads(about["dsv4"])["axes"]
            self.positions = file.get_tensor(POSITIONS) if POSITIONS in file.keys() else None  # noqa: SIM118

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.axes:
            raise KeyError(name)
        with safe_open(self.path, framework="pt") as file:
            return file.get_tensor(name)

    def __iter__(self):
        return iter(self.axes)

    def __len__(self) -> int:
        return len(self.axes)


class StreamWriter:
    """Writes a cache while the run goes on: values in the order they come, the header when the last has come.

    Args:
        axes: name -> axes of each value that may be written. The file appears under its name only when the context ends well.
    """

    def __init__(self, path: str | Path, axes: Mapping[str, str]):
        self.path, self.axes = Path(path), axes
        if self.path.exists():
            raise FileExistsError(f"{self.path} exists; saved activations are never overwritten: choose another name or delete it")
        self.positions: Tensor | None = None
        self._header: dict = {}
        self._room = sum(len(json.dumps(n)) + len(axes[n]) + 2 * ENTRY_ROOM for n in axes) + 4 * ENTRY_ROOM
        self._room += -self._room % 8

    def __enter__(self) -> "StreamWriter":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
        self._partial = Path(name)
        self._file = os.fdopen(handle, "wb")
        self._file.seek(8 + self._room)
        self._written = 0
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
        axes = {n: self.axes[n] for n in self._header}
        if self.positions is not None:
            self.write(POSITIONS, self.positions)
        layouts = {n: VALUES[n.rsplit(".", 1)[-1]].layout for n in axes if n.rsplit(".", 1)[-1] in VALUES}
        about = {"dsv4": json.dumps({"axes": axes, "layouts": layouts})}
        header = json.dumps({"__metadata__": about, **self._header}).encode()
        assert len(header) <= self._room, "the header outgrew the room kept for it"
        self._file.seek(0)
        self._file.write(struct.pack("<Q", self._room) + header.ljust(self._room))
        self._file.truncate(8 + self._room + self._written)
        self._file.flush()
        os.fsync(self._file.fileno())
        if self.path.exists():
            raise FileExistsError(f"{self.path} appeared while this run was writing; nothing was overwritten")
        os.replace(self._partial, self.path)
