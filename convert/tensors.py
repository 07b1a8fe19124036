"""From stored tensors to ours and back: each transform beside its inverse.

part of a stack       slice_of(stack, place)             <->  parts_of(stacked tensor)
FP8, FP4 -> floating  decode(weight, scale, format)      <->  encode(weight, format)
bytes -> checked      check_codes, check_scale, check_ids: what no header can tell
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4.convert.names import GATE, UP, Place
from dsv4.convert.plan import Format, is_gate_up
from dsv4.convert.problems import CheckpointError
from dsv4.kernels import quantize


def slice_of(stack: Tensor, place: Place) -> Tensor:
    """The part of our tensor that a place names, as a view: all, an expert [o, i], half its rows.

    A stack of scales [e, o', i'] is cut in the same way: each half has a grid of its own.
    """
    if place.expert is None:
        return stack
    expert = stack[place.expert]
    return expert if place.half is None else expert.unflatten(0, (2, -1))[place.half]


def parts_of(name: str, tensor: Tensor) -> Iterator[tuple[Place, Tensor]]:
    """A stack of our name (experts, or their scales) -> the parts that official files keep."""
    halves = (GATE, UP) if is_gate_up(name.removesuffix("_scale_inv")) else (None,)
    for expert in range(len(tensor)):
        for half in halves:
            place = Place(name, expert, half)
            yield place, slice_of(tensor, place)


def decode(
    weight: Tensor,
    scale: Tensor,
    format: Format,
    dtype: torch.dtype,
    *,
    row_parts: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Stored codes and scales -> `dtype`, or into `out`."""
    if format == "fp4":
        return quantize.dequantize_fp4(weight, scale, dtype, out=out)
    return quantize.dequantize_fp8(weight, scale, dtype, row_parts=row_parts, out=out)


def encode(weight: Tensor, format: Format, *, row_parts: int = 1) -> tuple[Tensor, Tensor]:
    """A floating weight -> (codes, float8_e8m0fnu scale) as the official files hold them."""
    if format == "fp4":
        return quantize.quantize_fp4(weight)
    return quantize.quantize_fp8(weight, row_parts=row_parts)


def as_scale(scale: Tensor) -> Tensor:
    """Scale bytes stored as U8 -> float8_e8m0fnu, the same bits; others unchanged."""
    return scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale


def check_codes(name: str, weight: Tensor) -> None:
    """Raises CheckpointError if FP8 codes hold a NaN; every FP4 code is a number."""
    if weight.dtype == torch.float8_e4m3fn and quantize.has_nan_code(weight):
        raise CheckpointError(f"{name} holds the FP8 code 0x7F or 0xFF, which is NaN; the file is damaged")


def check_scale(name: str, scale: Tensor) -> float:
    """The largest scale. Raises CheckpointError if one is NaN (E8M0 byte 255) or infinite."""
    largest = quantize.largest_scale(scale)
    if not math.isfinite(largest):
        what = "is not finite" if scale.dtype == torch.float32 else "is the E8M0 byte 255, NaN"
        raise CheckpointError(f"{name}: a scale {what}; the file is damaged")
    return largest


def check_range(name: str, weight: Tensor, largest: float | None, result: Tensor) -> None:
    """Raises CheckpointError if finite stored values became infinite in the result's dtype.

    Looked for only where it can happen: with an enormous `largest` scale, or where the dtype has
    less range than the stored one.
    """
    limit = torch.finfo(result.dtype).max
    if largest is not None:
        is_possible = largest * quantize.FP8_MAX > limit
    else:
        is_possible = weight.is_floating_point() and torch.finfo(weight.dtype).max > limit
    if not is_possible:
        return
    # Codes have no infinity, plain weights may hold one.
    was_infinite = weight.isinf() if largest is None else torch.zeros((), dtype=torch.bool)
    if bool((result.isinf() & ~was_infinite).any()):
        raise CheckpointError(f"{name} has values beyond {limit:.4g}, the largest of {result.dtype}; load in float32")


def check_ids(name: str, ids: Tensor, num_experts: int) -> None:
    """Raises CheckpointError unless every entry of a token -> expert table is an expert."""
    low, high = (int(end) for end in ids.aminmax()) if ids.numel() else (0, 0)
    if low < 0 or high >= num_experts:
        raise CheckpointError(
            f"{name} holds expert ids from {low} to {high}; expected 0 to {num_experts - 1}, since n_routed_experts is {num_experts}"
        )
