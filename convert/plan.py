"""How each tensor of the model is made from those of a checkpoint, and what does not fit.

The stored dtype decides: F8_E4M3 needs a scale per 128x128 block, I8 under the experts is packed
FP4 and needs one per 1x32, anything else is taken as it is and must have none. The config is
checked against that, never believed over it.
"""

import functools
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from dsv4.config import Dsv4Config
from dsv4.convert import names
from dsv4.convert.header import StoredTensor
from dsv4.convert.layout import INT64, Spec, layout
from dsv4.convert.names import SCHEMES, Place, Scheme
from dsv4.convert.problems import Problems
from dsv4.kernels.quantize import FP4_BLOCK, FP8_BLOCK, fp4_scale_shape, fp8_scale_shape

Format = Literal["dense", "fp8", "fp4"]

FLOAT_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
INTEGER_DTYPES = ("I64", "I32")
# Scale bytes written as plain U8 mean the same exponents.
SCALE_DTYPES = {"fp8": ("F8_E8M0", "U8", "F32"), "fp4": ("F8_E8M0", "U8")}
EXPERT_DTYPES: dict[str, Format] = {"fp4": "fp4", "fp8": "fp8"}


@dataclass(frozen=True)
class Piece:
    """One stored weight, with its scale where the format has one, and the place it fills."""

    place: Place
    weight: StoredTensor
    scale: StoredTensor | None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (self.scale.nbytes if self.scale else 0)


@dataclass(frozen=True)
class Source:
    """How one of our tensors is made: from one piece, or stacked from those of its experts."""

    name: str
    spec: Spec
    format: Format
    pieces: tuple[Piece, ...]

    @property
    def row_parts(self) -> int:
        """2 where gate and up share a tensor, each with a grid of scale blocks of its own."""
        return 2 if is_gate_up(self.name) else 1


@dataclass
class Plan:
    scheme: Scheme
    sources: dict[str, Source]
    formats: dict[str, Format]
    # label of a group of known extras -> stored names
    extras: dict[str, list[str]]
    problems: Problems


def is_gate_up(name: str) -> bool:
    return name.endswith("experts.gate_up_proj")


def module_of(name: str) -> str:
    """The module that owns a tensor of our name: `X` of `X.weight`, the bank of stacked experts."""
    return name.rpartition(".")[0]


def stored_dtype(source: Source) -> torch.dtype:
    """The floating dtype that holds every piece of a source: bfloat16 for codes."""
    stored = {FLOAT_DTYPES.get(piece.weight.dtype, torch.bfloat16) for piece in source.pieces}
    return functools.reduce(torch.promote_types, stored)


def make_plan(config: Dsv4Config, stored: Mapping[str, StoredTensor]) -> Plan:
    """Match the stored tensors with the layout of the config; what does not fit is a problem."""
    known = names.count_known(stored)
    scheme = max(SCHEMES, key=lambda scheme: known[scheme])
    problems = Problems()
    by_place: dict[Place, StoredTensor] = {}
    extras: dict[str, list[str]] = {}
    specs = layout(config)
    wanted = {place for name, spec in specs.items() for place in places(scheme, name, spec)}
    wanted |= {scale_place(place) for place in wanted}
    unexpected = []
    for name, tensor in stored.items():
        place = names.to_place(scheme, name)
        if place in wanted:
            by_place[place] = tensor
        elif (label := _extra_label(name, place, wanted)) is not None:
            extras.setdefault(label, []).append(name)
        else:
            unexpected.append(name)
    problems.add("unexpected tensors", unexpected)
    if known[scheme] == 0:
        problems.add("unknown naming", f"no name is one of the {', '.join(SCHEMES)} schemes")
    sources = {}
    for name, spec in specs.items():
        source = _source(scheme, name, spec, by_place, problems)
        if source is not None:
            sources[name] = source
    order = [*(label for label, _ in names.EXTRAS), names.HASH_BLOCK_EXTRA_LABEL]
    extras = {label: extras[label] for label in order if label in extras}
    formats = _formats(sources, problems)
    _check_config(config, formats, problems)
    return Plan(scheme, sources, formats, extras, problems)


def places(scheme: Scheme, name: str, spec: Spec) -> list[Place]:
    """The parts in which a scheme stores one of our tensors."""
    whole = Place(name)
    if names.from_place(scheme, whole) is not None:
        return [whole]
    halves = (names.GATE, names.UP) if is_gate_up(name) else (None,)
    return [Place(name, expert, half) for expert in range(spec.shape[0]) for half in halves]


def part_shape(spec: Spec, place: Place) -> tuple[int, ...]:
    """The logical shape of the tensor at a place."""
    if place.expert is None:
        return spec.shape
    _, rows, columns = spec.shape
    return (rows if place.half is None else rows // 2, columns)


def scale_place(place: Place) -> Place:
    """Where the scale of the weight at a place goes."""
    return Place(names.scale_of(place.name), place.expert, place.half)


def _extra_label(name: str, place: Place | None, wanted: Collection[Place]) -> str | None:
    label = names.extra_label(name)
    if label is None and place is not None and place.name.endswith(names.HASH_BLOCK_EXTRA):
        block = names.block_of(place.name)
        if Place(f"layers.{block}.mlp.router.tid2eid") in wanted:
            return names.HASH_BLOCK_EXTRA_LABEL
    return label


def _source(
    scheme: Scheme,
    name: str,
    spec: Spec,
    by_place: Mapping[Place, StoredTensor],
    problems: Problems,
) -> Source | None:
    pieces = []
    for place in places(scheme, name, spec):
        weight, scale = by_place.get(place), by_place.get(scale_place(place))
        if weight is None:
            problems.add("missing tensors", names.from_place(scheme, place) or name)
            if scale is not None:
                problems.add("scales without a weight", scale.name)
        else:
            pieces.append(Piece(place, weight, scale))
    formats = {_format(piece, spec, name, problems) for piece in pieces}
    if len(formats) > 1:
        stored = sorted({piece.weight.dtype for piece in pieces})
        problems.add("experts of one block in different formats", f"{name}: {', '.join(stored)}")
    kinds = {"F32" if piece.scale.dtype == "F32" else "E8M0" for piece in pieces if piece.scale}
    if len(kinds) > 1:
        problems.add("experts of one block in different formats", f"{name}: scales in E8M0 and in F32")
        return None
    if len(formats) != 1 or len(pieces) < len(places(scheme, name, spec)):
        return None
    found = formats.pop()
    return None if found is None else Source(name, spec, found, tuple(pieces))


def _format(piece: Piece, spec: Spec, name: str, problems: Problems) -> Format | None:
    """The format of one stored tensor; None, and a problem, if dtype, shape or scale is wrong."""
    weight = piece.weight
    if names.can_be_scaled(name) and weight.dtype == "F8_E4M3":
        found, allowed = "fp8", ()
    elif spec.is_experts and weight.dtype == "I8":
        found, allowed = "fp4", ()
    else:
        found = "dense"
        allowed = INTEGER_DTYPES if spec.dtype is INT64 else tuple(FLOAT_DTYPES)
    if allowed and weight.dtype not in allowed:
        codes = ("F8_E4M3", "I8") if spec.is_experts else ("F8_E4M3",)
        expected = (*allowed, *(codes if names.can_be_scaled(name) else ()))
        problems.add("wrong dtype", f"{weight.name}: {weight.dtype}, expected one of {', '.join(expected)}")
        return None
    shape = part_shape(spec, piece.place)
    expected = (*shape[:-1], shape[-1] // 2) if found == "fp4" else shape
    if weight.shape != expected or (found == "fp4" and shape[-1] % FP4_BLOCK):
        problems.add("wrong shape", f"{weight.name}: {list(weight.shape)}, expected {list(expected)}")
        return None
    return found if _scale_fits(piece, found, problems) else None


def _scale_fits(piece: Piece, found: Format, problems: Problems) -> bool:
    weight, scale = piece.weight, piece.scale
    if found == "dense":
        if scale is not None:
            problems.add(
                "scales of a weight that is not quantised",
                f"{scale.name}: its weight is {weight.dtype}",
            )
        return scale is None
    if scale is None:
        problems.add("quantised weights without a scale", f"{weight.name}: {weight.dtype}")
        return False
    if scale.dtype not in SCALE_DTYPES[found]:
        expected = ", ".join(SCALE_DTYPES[found])
        problems.add("wrong dtype", f"{scale.name}: {scale.dtype}, expected one of {expected}")
        return False
    stacked_pair = is_gate_up(piece.place.name) and piece.place.half is None
    if found == "fp8" and stacked_pair and (weight.shape[-2] // 2) % FP8_BLOCK:
        problems.add(
            f"stacked gate and up whose halves are no whole blocks of {FP8_BLOCK} rows",
            f"{weight.name}: {list(weight.shape)}; one grid of scales or two, it cannot be told",
        )
        return False
    expected = fp4_scale_shape(weight.shape) if found == "fp4" else fp8_scale_shape(weight.shape)
    if scale.shape != expected:
        problems.add("wrong shape", f"{scale.name}: {list(scale.shape)}, expected {list(expected)}")
        return False
    return True


def _formats(sources: Mapping[str, Source], problems: Problems) -> dict[str, Format]:
    """The format of each linear and of each expert bank, by our module name."""
    formats: dict[str, Format] = {}
    for name, source in sources.items():
        if not names.can_be_scaled(name):
            continue
        module = module_of(name)
        if formats.setdefault(module, source.format) != source.format:
            problems.add("experts of one block in different formats", module)
    return formats


def _check_config(config: Dsv4Config, formats: Mapping[str, Format], problems: Problems) -> None:
    found = Counter(format for module, format in formats.items() if module.endswith("mlp.experts"))
    declared = config.expert_dtype
    # BF16 experts under a stale expert_dtype are what transformers writes: harmless. So is its
    # absence (April files).
    for format in ("fp8", "fp4"):
        if found[format] and declared is not None and EXPERT_DTYPES.get(declared) != format:
            problems.add(
                "config.json against the files",
                f"expert_dtype is {declared!r}, but the experts of {found[format]} blocks are stored as {format}",
            )
    quantisation = config.quantization_config or {}
    block = quantisation.get("weight_block_size")
    if "fp8" in formats.values():
        if block is not None and list(block) != [FP8_BLOCK, FP8_BLOCK]:
            problems.add(
                "config.json against the files",
                f"weight_block_size is {list(block)}, read are 128 x 128",
            )
        if quantisation.get("fmt", "e4m3") != "e4m3":
            problems.add(
                "config.json against the files",
                f"fmt is {quantisation['fmt']!r}, stored is F8_E4M3",
            )
