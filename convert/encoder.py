"""What each tensor of a model becomes in a file: cut, cast, quantised or kept; and its name."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from dsv4.config import Dsv4Config
from dsv4.convert import names
from dsv4.convert.layout import FLOAT32, INT64, Spec, layout
from dsv4.convert.names import Place, Scheme
from dsv4.convert.plan import Format, is_gate_up, part_shape, places
from dsv4.convert.tensors import decode, encode, parts_of
from dsv4.kernels.quantize import FP4_BLOCK, fp4_scale_shape, fp8_scale_shape

FileDtype = Literal["stored", "official"] | torch.dtype
# A place, what is stored there, and its scale if those are codes.
Part = tuple[Place, Tensor, Tensor | None]

PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CODE_FORMATS: dict[torch.dtype, Format] = {torch.float8_e4m3fn: "fp8", torch.int8: "fp4"}
SCALE_DTYPES = (torch.float8_e8m0fnu, torch.float32)
# As the released files say it; FP4 experts are declared by expert_dtype alone.
QUANTIZATION_CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}


def pair_scales(tensors: Iterable[tuple[Place, Tensor]]) -> Iterator[Part]:
    """Bring codes and their scales, which arrive in any order, together.

    Raises ValueError for codes without a scale and for scales without codes.
    """
    codes: dict[Place, Tensor] = {}
    scales: dict[Place, Tensor] = {}
    for place, tensor in tensors:
        weight_name = names.weight_of_scale(place.name)
        if weight_name is not None:
            place = dataclasses.replace(place, name=weight_name)
            scales[place] = tensor.detach()
        elif tensor.dtype in CODE_FORMATS:
            codes[place] = tensor.detach()
        else:
            yield place, tensor.detach(), None
        if place in codes and place in scales:
            yield place, codes.pop(place), scales.pop(place)
    lonely = [f"{place.name} has no scale" for place in codes]
    lonely += [f"{names.scale_of(place.name)} belongs to no codes" for place in scales]
    if lonely:
        raise ValueError(f"codes and scales do not pair up ({len(lonely)}): {'; '.join(lonely[:10])}")


class Encoder:
    """Turns the parts of a model into named tensors of a file; then knows what config.json says."""

    def __init__(self, config: Dsv4Config, scheme: Scheme, dtype: FileDtype) -> None:
        self._config = config
        self._scheme: Scheme = scheme
        self._dtype = dtype
        self._specs = layout(config)
        self._left = {place for name, spec in self._specs.items() for place in places(scheme, name, spec)}
        self._formats: dict[str, Format] = {}
        self._plain_dtypes: set[torch.dtype] = set()

    def group_of(self, place: Place) -> int:
        """Order of the shards in the official layout: the embedding, the blocks, the head."""
        block = names.block_of(place.name)
        if block is None:
            return -1 if place.name == next(iter(self._specs)) else self._config.num_hidden_layers
        return block

    def group_sizes(self) -> Counter[int]:
        """How many weights each group has."""
        return Counter(self.group_of(place) for place in self._left)

    def encode(self, parts: Iterable[Part]) -> Iterator[tuple[Place, list[tuple[str, Tensor]]]]:
        """Every weight of the model as named tensors: itself, and its scale if it is quantised.

        Raises ValueError for tensors that are unknown, given twice or missing, or of a wrong shape
        or dtype.
        """
        for place, weight, scale in self._cut(parts):
            if place not in self._left:
                raise ValueError(f"{place.name} {_which(place)}is given twice or is no part of this model")
            self._left.remove(place)
            spec = self._specs[place.name]
            self._check(place, spec, weight, scale)
            weight, scale = self._convert(place, spec, weight, scale)
            file_name = names.from_place(self._scheme, place)
            assert file_name is not None
            named = [(file_name, weight)]
            if scale is not None:
                scale_name = names.from_place(self._scheme, dataclasses.replace(place, name=names.scale_of(place.name)))
                assert scale_name is not None
                named.append((scale_name, scale))
            yield place, named
        if self._left:
            missing = sorted({place.name for place in self._left})
            raise ValueError(f"{len(missing)} tensors of the model are missing: {', '.join(missing[:10])}")

    def final_config(self) -> Dsv4Config:
        """The config of what was written: its dtypes, and no MTP stages, which are not written."""
        experts = {form for name, form in self._formats.items() if self._specs[name].is_experts and form != "dense"}
        if len(experts) > 1:
            raise ValueError("experts in FP8 and in FP4 in one model; config.json can declare one expert_dtype")
        is_quantised = any(form != "dense" for form in self._formats.values())
        quantisation: Any = (self._config.quantization_config or QUANTIZATION_CONFIG) if is_quantised else None
        return dataclasses.replace(
            self._config,
            torch_dtype=max(self._plain_dtypes, key=lambda dtype: (dtype.itemsize, dtype == torch.bfloat16)),
            quantization_config=quantisation,
            expert_dtype=experts.pop() if experts else None,
            num_nextn_predict_layers=0,
            mtp_compress_ratios=(),
        )

    def _cut(self, parts: Iterable[Part]) -> Iterator[Part]:
        """Stacked experts one by one, where the scheme keeps them so."""
        for place, weight, scale in parts:
            if place.name not in self._specs:
                raise ValueError(f"{place.name} is no tensor of this model; expected the names of its state_dict")
            if place.expert is not None or names.from_place(self._scheme, place) is not None:
                yield place, weight, scale
                continue
            self._check(place, self._specs[place.name], weight, scale)
            scales = [None] * len(weight) * 2 if scale is None else [s for _, s in parts_of(place.name, scale)]
            for (part, tensor), part_scale in zip(parts_of(place.name, weight), scales, strict=False):
                yield part, tensor, part_scale

    def _check(self, place: Place, spec: Spec, weight: Tensor, scale: Tensor | None) -> None:
        shape = part_shape(spec, place)
        found = CODE_FORMATS.get(weight.dtype, "dense")
        if found == "fp4":
            shape = (*shape[:-1], shape[-1] // 2)
        if tuple(weight.shape) != shape:
            got = f"{place.name} {_which(place)}has shape {list(weight.shape)}"
            raise ValueError(f"{got}; expected {list(shape)}")
        if scale is None:
            allowed = (torch.int64, torch.int32) if spec.dtype is INT64 else PLAIN_DTYPES
            if weight.dtype not in allowed:
                expected = ", ".join(map(str, allowed))
                got = f"{place.name} is {weight.dtype}"
                raise ValueError(f"{got}; a file holds it as one of {expected}: cast it first")
            return
        if not names.can_be_scaled(place.name) or (found == "fp4" and not spec.is_experts):
            raise ValueError(f"{place.name} is {weight.dtype} with a scale; this tensor is never quantised so")
        row_parts = 2 if is_gate_up(place.name) and place.half is None else 1
        grid = fp4_scale_shape(shape) if found == "fp4" else fp8_scale_shape(shape, row_parts)
        if tuple(scale.shape) != grid or scale.dtype not in SCALE_DTYPES:
            got = f"{scale.dtype} {list(scale.shape)}"
            raise ValueError(f"{names.scale_of(place.name)} {_which(place)}is {got}; expected float8_e8m0fnu or float32 {list(grid)}")

    def _convert(self, place: Place, spec: Spec, weight: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What is stored of a weight, and its scale."""
        if spec.dtype is INT64:
            return weight.to(torch.int64), None
        if spec.dtype is FLOAT32:
            return self._float32(spec, weight), None
        found: Format = "dense" if scale is None else CODE_FORMATS[weight.dtype]
        row_parts = 2 if is_gate_up(place.name) and place.half is None else 1
        target = self._official_format(place, spec) if self._dtype == "official" else "dense"
        if scale is not None and isinstance(self._dtype, torch.dtype):
            weight, scale, found = (
                decode(weight, scale, found, self._dtype, row_parts=row_parts),
                None,
                "dense",
            )
        elif found == "dense" and target != "dense":
            weight, scale = _encode(place, weight, target, row_parts)
            found = target
        elif found == "dense" and self._dtype != "stored":
            weight = weight.to(torch.bfloat16 if self._dtype == "official" else self._dtype)
        if names.can_be_scaled(place.name):
            self._note_format(place.name, found)
        if found == "dense":
            self._plain_dtypes.add(weight.dtype)
        return weight, scale

    def _float32(self, spec: Spec, weight: Tensor) -> Tensor:
        """Float32 stays so, but for norms of official files: BF16 as in the release, where it says
        the same."""
        if spec.is_norm and self._scheme == "official":
            short = weight.to(torch.bfloat16)
            is_bf16 = self._dtype in ("official", torch.bfloat16) or (
                self._dtype == "stored" and self._config.torch_dtype == torch.bfloat16
            )
            if self._dtype == "official" or (is_bf16 and torch.equal(short.to(weight.dtype), weight)):
                return short
        return weight.to(torch.float32)

    def _official_format(self, place: Place, spec: Spec) -> Format:
        if not spec.is_experts:
            return "fp8" if spec.official == "FP8" else "dense"
        return "fp8" if self._config.expert_dtype == "fp8" else "fp4"

    def _note_format(self, name: str, form: Format) -> None:
        if self._formats.setdefault(name, form) != form:
            raise ValueError(f"{name} holds experts in {self._formats[name]} and in {form}; expected one format")


def _encode(place: Place, weight: Tensor, form: Format, row_parts: int) -> tuple[Tensor, Tensor]:
    if form == "fp4" and weight.shape[-1] % FP4_BLOCK:
        raise ValueError(
            f"{place.name} has {weight.shape[-1]} columns, which FP4 cannot hold: it needs whole blocks of {FP4_BLOCK}; write another dtype"
        )
    if not bool(weight.isfinite().all()):
        raise ValueError(f"{place.name} {_which(place)}holds NaN or infinity, which has no block scale")
    return encode(weight, form, row_parts=row_parts)


def _which(place: Place) -> str:
    return "" if place.expert is None else f"(expert {place.expert}) "
