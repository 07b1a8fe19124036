"""A checkpoint's tensors as pages of its files: mapped, read where they are used, never copied as a whole.

    pages = Pages(checkpoint)
    weight, scale = pages.read(source, piece)            # views of the files
    pages.ahead(pieces)                                  # ask the system to read on, and return at once

What no header can tell (NaN codes, scales, expert ids) is checked when a part is read for the first time.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from dsv4.convert.header import StoredTensor
from dsv4.convert.layout import INT64
from dsv4.convert.mapped import Mapped
from dsv4.convert.names import GATE, UP
from dsv4.convert.plan import Piece, Source
from dsv4.convert.reader import Checkpoint
from dsv4.convert.tensors import as_scale, check_codes, check_ids, check_range, check_scale, decode

# Where a stack's pieces are for one expert: gate over up.
HALVES = (GATE, UP)

# Codes (or values) of one matrix or of rows of it, its scales or None, and how many grids of scales stand one over the other.
Part = tuple[Tensor, Tensor | None, int]


class Pages:
    """The files of an opened checkpoint, mapped when they are first asked for."""

    def __init__(self, checkpoint: Checkpoint):
        self._num_experts = checkpoint.config.n_routed_experts
        self._files = Mapped(checkpoint.folder)
        self._places: dict[str, dict[tuple[int | None, int | None], Piece]] = {}
        self._checked: set[tuple] = set()

    def __deepcopy__(self, memo) -> "Pages":
        return self

    def read(self, source: Source, piece: Piece) -> tuple[Tensor, Tensor | None]:
        """A piece's weight and scale. Raises CheckpointError, the first time, where its data are damaged."""
        weight = self._files.view(piece.weight)
        scale = None if piece.scale is None else as_scale(self._files.view(piece.scale))
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
        """Have the system read these pieces in the background; of a stack in `experts`, {stored name: (expert, of how many)}, one."""
        for tensor in _tensors(pieces):
            begin, end = tensor.begin, tensor.end
            if experts is not None and tensor.name in experts:
                number, of = experts[tensor.name]
                each = tensor.nbytes // of
                begin, end = begin + number * each, begin + (number + 1) * each
            self._files.ahead(tensor.file, begin, end - begin)

    def expert_ahead(self, source: Source, expert: int) -> None:
        pieces = self.pieces(source, expert)
        stacks = {t.name: (expert, source.spec.shape[0]) for piece in pieces if piece.place.expert is None for t in _tensors([piece])}
        self.ahead(pieces, stacks)

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
