"""Shards and their index, written as tensors arrive.

Tensors wait in memory until their shard is complete: one block of the model for the official
layout, else as many as fit. When all that waits exceeds the size of a shard, the largest group is
written as it is, so that the memory is bounded whatever the order of the stream. In a file tensors
are grouped by dtype, widest first, which keeps every one aligned; before that come those of a whole
number of 64 bytes, so that all large ones lie on such a boundary: a reader that maps the file
computes on them as fast, and in the same order of sums, as on memory of its own.
"""

import json
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from dsv4.convert.folder import sync
from dsv4.convert.header import INDEX_NAME, SINGLE_NAME

DTYPE_NAMES = {
    torch.int64: "I64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
}
ALIGNMENT = 64
# transformers asks for the framework that a file was written by.
METADATA = {"format": "pt"}


class ShardWriter:
    """Writes shards into a folder; `finish` gives them their final names and writes the index.

    Args:
        group_sizes: how many times `add` will be called for each group; every group is a shard of
            its own, in the order of their numbers. None: one group without a known end, and a
            single file without an index if it fits.
    """

    def __init__(self, folder: Path, max_bytes: int, group_sizes: Mapping[int, int] | None) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._group_sizes = group_sizes
        self._added: Counter[int] = Counter()
        self._waiting: dict[int, dict[str, Tensor]] = {}
        self._waiting_bytes: Counter[int] = Counter()
        # (group, part of it) -> names in that file
        self._files: dict[tuple[int, int], list[str]] = {}
        self._total_bytes = 0

    def add(self, group: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take the tensors of one weight (itself, its scale) for a group."""
        group = group if self._group_sizes is not None else 0
        for name, tensor in tensors:
            if self._waiting_bytes[group] and self._waiting_bytes[group] + tensor.nbytes > self._max_bytes:
                self._write(group)
            self._waiting.setdefault(group, {})[name] = tensor
            self._waiting_bytes[group] += tensor.nbytes
        self._added[group] += 1
        if self._group_sizes is not None and self._added[group] == self._group_sizes[group]:
            self._write(group)
        while self._waiting_bytes.total() > self._max_bytes:
            self._write(self._waiting_bytes.most_common(1)[0][0])

    def finish(self) -> None:
        """Write what waits, name the files and write the index."""
        for group in list(self._waiting):
            self._write(group)
        keys = sorted(self._files)
        if self._group_sizes is None and len(keys) == 1:
            self._path(keys[0]).rename(self._folder / SINGLE_NAME)
            return
        weight_map = {}
        for number, key in enumerate(keys, start=1):
            file = f"model-{number:05d}-of-{len(keys):05d}.safetensors"
            self._path(key).rename(self._folder / file)
            weight_map |= dict.fromkeys(self._files[key], file)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        with (self._folder / INDEX_NAME).open("wb") as stream:
            stream.write(json.dumps(index, indent=2).encode() + b"\n")
            sync(stream)

    def _path(self, key: tuple[int, int]) -> Path:
        return self._folder / f"group{key[0]}.part{key[1]}"

    def _write(self, group: int) -> None:
        tensors = self._waiting.pop(group, {})
        self._total_bytes += self._waiting_bytes.pop(group, 0)
        if tensors:
            key = (group, sum(written == group for written, _ in self._files))
            self._files[key] = list(tensors)
            write_shard(self._path(key), tensors)


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One safetensors file, synced. Tensors may be on any device; the CPU's are not copied."""
    widths = list(DTYPE_NAMES)
    order = sorted(tensors, key=lambda n: (tensors[n].nbytes % ALIGNMENT != 0, widths.index(tensors[n].dtype)))
    header: dict[str, object] = {"__metadata__": METADATA}
    at = 0
    for name in order:
        tensor = tensors[name]
        entry = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = entry | {"data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    # The format allows spaces after the header.
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            flat = tensors[name].detach().cpu().contiguous().flatten()
            if flat.numel():
                stream.write(memoryview(flat.view(torch.uint8).numpy()))
        sync(stream)
