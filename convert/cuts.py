"""Reading a part of a tensor: the experts or rows that one process of several holds.

A cut is (axis, begin, end) of our tensor. Views of a file's pages are narrowed, so that what lies outside is never read.
"""

from dataclasses import replace

from torch import Tensor

from dsv4.convert.plan import Format, Piece, Source
from dsv4.kernels.quantize import FP8_BLOCK

Cut = tuple[int, int, int]


def part_of(tensor: Tensor, cut: Cut) -> Tensor:
    axis, begin, end = cut
    return tensor.narrow(axis, begin, end - begin)


def cut_source(source: Source, cut: Cut | None) -> Source:
    """The source of the part: its shape, and of experts that are stored one by one those in it, counted anew."""
    if cut is None:
        return source
    axis, begin, end = cut
    shape = (*source.spec.shape[:axis], end - begin, *source.spec.shape[axis + 1 :])
    pieces = source.pieces
    if pieces[0].place.expert is not None:
        inside = [piece for piece in pieces if begin <= piece.place.expert < end]
        pieces = tuple(replace(piece, place=replace(piece.place, expert=piece.place.expert - begin)) for piece in inside)
    return replace(source, spec=replace(source.spec, shape=shape), pieces=pieces)


def cut_piece(
    piece: Piece, weight: Tensor, scale: Tensor | None, format: Format, cut: Cut | None
) -> tuple[Tensor, Tensor | None, Cut | None]:
    """(weight, scale, what to cut of them once decoded): as little of both as holds the part."""
    if cut is None or piece.place.expert is not None:
        return weight, scale, None
    axis, begin, end = cut
    if scale is None:
        return part_of(weight, cut), None, None
    if weight.dim() == 3:
        return part_of(weight, cut), part_of(scale, cut), None
    assert format == "fp8", f"{piece.weight.name}: {format} matrices are cut along experts only"
    low, high = begin // FP8_BLOCK, -(-end // FP8_BLOCK)
    first, last = low * FP8_BLOCK, min(high * FP8_BLOCK, weight.shape[axis])
    inner = None if (first, last) == (begin, end) else (axis, begin - first, end - first)
    return part_of(weight, (axis, first, last)), part_of(scale, (axis, low, high)), inner


def nbytes_read(piece: Piece, cut: Cut | None) -> int:
    """Bytes of a piece in the part, to a scale block."""
    if cut is None or piece.place.expert is not None:
        return piece.nbytes
    axis, begin, end = cut
    return piece.nbytes * (end - begin) // piece.weight.shape[axis]
