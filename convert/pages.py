"""A checkpoint's tensors as pages of its files: mapped, read where they are used, never copied as a whole.

    pages = Pages(checkpoint)
    weight, scale = pages.read(source, piece)            # views of the files
    pages.ahead(pieces)                                  # ask the system to read on, and return at once

The maps are private and read-only, so that they count as no process's own memory (RLIMIT_DATA) and the system drops their pages
where memory is short. Writing into a view ends the process. What no header can tell (NaN codes, scales, expert ids) is checked
when a part is read for the first time.
"""

import mmap
import os
import threading
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from dsv4.convert.header import StoredTensor
from dsv4.convert.layout import INT64
from dsv4.convert.names import GATE, UP
from dsv4.convert.plan import Piece, Source
from dsv4.convert.reader import Checkpoint
from dsv4.convert.tensors import as_scale, check_codes, check_ids, check_range, check_scale, decode

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
# Where a stack's pieces are for one expert: gate over up.
HALVES = (GATE, UP)

# Codes (or values) of one matrix or of rows of it, its scales or None, and how many grids of scales stand one over the other.
Part = tuple[Tensor, Tensor | None, int]


class Pages:
    """The files of an opened checkpoint, mapped when they are first asked for."""

    def __init__(self, checkpoint: Checkpoint):
        self.folder = checkpoint.folder
        self._num_experts = checkpoint.config.n_routed_experts
        self._maps: dict[str, tuple[mmap.mmap, int]] = {}
        self._places: dict[str, dict[tuple[int | None, int | None], Piece]] = {}
        self._checked: set[tuple] = set()
        self._lock = threading.Lock()
        # A warning that torch gives once: what is mapped here is read and never written.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.frombuffer(bytes(1), dtype=torch.uint8)

    def __deepcopy__(self, memo) -> "Pages":
        return self

    def view(self, tensor: StoredTensor) -> Tensor:
        """The stored tensor, in the file's dtype."""
        dtype = DTYPES[tensor.dtype]
        count = tensor.nbytes // dtype.itemsize
        return torch.frombuffer(self._map(tensor.file)[0], dtype=dtype, count=count, offset=tensor.begin).view(tensor.shape)

    def read(self, source: Source, piece: Piece) -> tuple[Tensor, Tensor | None]:
        """A piece's weight and scale. Raises CheckpointError, the first time, where its data are damaged."""
        weight = self.view(piece.weight)
        scale = None if piece.scale is None else as_scale(self.view(piece.scale))
        # A stack of all experts is read and checked expert by expert.
        if piece.place.expert is not None or not source.spec.is_experts:
            self._check(source, piece, weight, scale, piece.weight.name)
        return weight, scale

    def values(self, source: Source, dtype: torch.dtype) -> Tensor:
        """A tensor of one piece, in `dtype` (or the one its kind always has), decoded; a view where the file holds that."""
        (piece,) = source.pieces
        weight, scale = self.read(source, piece)
        dtype = source.spec.dtype or dtype
        found = weight.to(dtype) if scale is None else decode(weight, scale, source.format, dtype)
        self._check_range(piece.weight.name, weight, scale, found)
        return found

    def codes(self, source: Source) -> tuple[Tensor, Tensor]:
        """Codes and scales of a tensor of one piece, as stored."""
        (piece,) = source.pieces
        return self.read(source, piece)

    def expert(self, source: Source, expert: int) -> list[Part]:
        """One expert's matrix as its parts, top to bottom."""
        parts = []
        for piece in self.pieces(source, expert):
            weight, scale = self.read(source, piece)
            if piece.place.expert is not None:
                parts.append((weight, scale, 1))
                continue
            weight, scale = weight[expert], None if scale is None else scale[expert]
            self._check(source, piece, weight, scale, (piece.weight.name, expert))
            parts.append((weight, scale, source.row_parts))
        return parts

    def pieces(self, source: Source, expert: int) -> list[Piece]:
        """The pieces that hold an expert."""
        places = self._places.get(source.name)
        if places is None:
            places = {(piece.place.expert, piece.place.half): piece for piece in source.pieces}
            self._places[source.name] = places
        keys = ((None, None), (expert, None), *((expert, half) for half in HALVES))
        return [places[key] for key in keys if key in places]

    def check_decoded(self, source: Source, expert: int, parts: list[Part], decoded: Tensor) -> None:
        """Raises CheckpointError, the first time, if an expert's values do not fit the dtype they were decoded to."""
        row = 0
        for weight, scale, _ in parts:
            rows = decoded[row : row + weight.shape[0]]
            self._check_range((source.name, expert, row), weight, scale, rows)
            row += weight.shape[0]

    def ahead(self, pieces: Iterable[Piece], experts: dict[str, tuple[int, int]] | None = None) -> None:
        """Have the system read these pieces in the background, where it can (posix_fadvise)."""
        advise = getattr(os, "posix_fadvise", None)
        if advise is None:
            return
        for tensor in _tensors(pieces):
            begin, end = tensor.begin, tensor.end
            if experts is not None and tensor.name in experts:
                number, of = experts[tensor.name]
                each = tensor.nbytes // of
                begin, end = begin + number * each, begin + (number + 1) * each
            advise(self._map(tensor.file)[1], begin, end - begin, os.POSIX_FADV_WILLNEED)

    def expert_ahead(self, source: Source, expert: int) -> None:
        pieces = self.pieces(source, expert)
        stacks = {t.name: (expert, source.spec.shape[0]) for piece in pieces if piece.place.expert is None for t in _tensors([piece])}
        self.ahead(pieces, stacks)

    def _map(self, file: str) -> tuple[mmap.mmap, int]:
        with self._lock:
            if file not in self._maps:
                descriptor = os.open(Path(self.folder) / file, os.O_RDONLY)
                self._maps[file] = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), descriptor
            return self._maps[file]

    def __del__(self):
        for _, descriptor in self.__dict__.get("_maps", {}).values():
            os.close(descriptor)

    def _check(self, source: Source, piece: Piece, weight: Tensor, scale: Tensor | None, key) -> None:
        if key in self._checked:
            return
        if source.spec.dtype is INT64:
            check_ids(piece.weight.name, weight, self._num_experts)
        check_codes(piece.weight.name, weight)
        if scale is not None:
            check_scale(piece.scale.name, scale)
        self._checked.add(key)

    def _check_range(self, name, weight: Tensor, scale: Tensor | None, found: Tensor) -> None:
        key = (name, found.dtype)
        if key in self._checked or not found.is_floating_point():
            return
        largest = None if scale is None else check_scale(str(name), scale)
        check_range(name if isinstance(name, str) else f"{name[0]}, expert {name[1]}", weight, largest, found)
        self._checked.add(key)


def _tensors(pieces: Iterable[Piece]) -> Iterator[StoredTensor]:
    for piece in pieces:
        yield piece.weight
        if piece.scale is not None:
            yield piece.scale
