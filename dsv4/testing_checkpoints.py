"""Random checkpoints for tests: every tensor random, every stored format, each naming scheme,
several shards.

The values that a reader has to find are computed here element by element from the format's
definition, not by the functions under test. Nothing is named or written by the writer of
`dsv4.convert`, only the name table is shared.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from dsv4.config import Dsv4Config
from dsv4.convert import names
from dsv4.convert.header import INDEX_NAME, SINGLE_NAME
from dsv4.convert.layout import INT64, Spec, layout
from dsv4.convert.names import GATE, UP, Place, Scheme

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
QUANTIZATION_CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
VISION_EXTRAS = (
    ("vision.patch_embed.proj.weight", (16, 3, 2, 2)),
    ("vision.blocks.0.attn.wqkv.weight", (24, 8)),
    ("vision.blocks.0.attn.wqkv.bias", (24,)),
    ("aligner.w1.weight", (8, 8)),
    ("aligner.w2.weight", (8, 8)),
    ("image_start", (8,)),
    ("image_end", (8,)),
    ("image_pad", (8,)),
    ("image_newline", (8,)),
)

Stored = Literal["BF16", "F32", "FP8", "FP4"]


@dataclass(frozen=True)
class Recipe:
    """What a random checkpoint is like. linears, experts: stored format; scales: dtype of FP8's
    scales."""

    scheme: Scheme = "official"
    linears: Stored = "FP8"
    experts: Stored = "FP4"
    scales: Literal["E8M0", "F32"] = "E8M0"
    norms: Literal["BF16", "F32"] = "BF16"
    draft: Literal["plain", "dspark"] | None = None
    vision: bool = False
    num_shards: int = 3

    @property
    def is_quantised(self) -> bool:
        return self.linears == "FP8" or self.experts in ("FP8", "FP4")


@dataclass(frozen=True)
class Made:
    """`stored`: what is in the files, by their names. `expected`: our tensors, dequantised in
    float64, ids in int64."""

    folder: Path
    stored: dict[str, Tensor]
    expected: dict[str, Tensor]


def make_checkpoint(folder: Path, config: Dsv4Config, recipe: Recipe = Recipe(), *, seed: int = 0) -> Made:
    """Write a random checkpoint of that config into `folder`."""
    random = torch.Generator().manual_seed(seed)
    stored: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    for name, spec in layout(config).items():
        kind = _stored_as(name, spec, recipe)
        values = []
        for place in _places(recipe.scheme, name, spec):
            shape = spec.shape if place.expert is None else _part(spec.shape, place)
            weight, scale, value = _tensor(name, spec, shape, kind, recipe, config, random)
            stored[_name(recipe.scheme, place)] = weight
            if scale is not None:
                stored[_name(recipe.scheme, dataclasses.replace(place, name=names.scale_of(name)))] = scale
            values.append(value)
        expected[name] = values[0] if len(values) == 1 and "experts." not in name else _stack(values, spec)
    stored |= _extras(config, recipe, random)
    write_files(folder, stored, recipe.num_shards)
    style = "official" if recipe.scheme == "official" else "transformers"
    text = dataclasses.replace(
        config,
        torch_dtype=torch.float32 if "F32" in (recipe.linears, recipe.experts) else torch.bfloat16,
        quantization_config=QUANTIZATION_CONFIG if recipe.is_quantised else None,
        expert_dtype=recipe.experts.lower() if recipe.experts in ("FP8", "FP4") else None,
    ).to_hf(style)
    (folder / "config.json").write_text(json.dumps(text, indent=2))
    return Made(folder, stored, expected)


def write_files(folder: Path, stored: dict[str, Tensor], num_shards: int) -> None:
    """Deal the tensors out to shards in turn, so that scales and experts lie apart; one shard is a
    single file."""
    folder.mkdir(parents=True, exist_ok=True)
    if num_shards == 1:
        save_file(stored, folder / SINGLE_NAME, metadata={"format": "pt"})
        return
    files = [f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors" for i in range(num_shards)]
    weight_map = {name: files[i % num_shards] for i, name in enumerate(stored)}
    for file in files:
        save_file({n: t for n, t in stored.items() if weight_map[n] == file}, folder / file)
    total = sum(tensor.nbytes for tensor in stored.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2))


def fp8_values(codes: Tensor, scale: Tensor) -> Tensor:
    """[o, i] codes and [o/128, i/128] scales -> float64, by the definition."""
    rows = torch.arange(codes.shape[0]) // 128
    columns = torch.arange(codes.shape[1]) // 128
    return codes.double() * scale_values(scale)[rows][:, columns]


def fp4_values(packed: Tensor, scale: Tensor) -> Tensor:
    """[o, i/2] bytes and [o, i/32] scales -> float64, by the definition."""
    byte = packed.view(torch.uint8).long()
    codes = torch.stack((byte % 16, byte // 16), dim=-1).flatten(1)
    values = torch.tensor(E2M1, dtype=torch.float64)[codes % 8] * torch.where(codes >= 8, -1.0, 1.0).double()
    return values * scale_values(scale)[:, torch.arange(codes.shape[1]) // 32]


def scale_values(scale: Tensor) -> Tensor:
    """Scales in float64: 2^(byte - 127) for exponent bytes."""
    if scale.dtype == torch.float32:
        return scale.double()
    return torch.pow(2.0, scale.view(torch.uint8).double() - 127)


def _stored_as(name: str, spec: Spec, recipe: Recipe) -> str:
    if spec.dtype is INT64:
        return "I64"
    if spec.dtype is torch.float32:
        return recipe.norms if spec.is_norm else "F32"
    if spec.is_experts:
        return recipe.experts
    plain = "F32" if recipe.linears == "F32" else "BF16"
    return recipe.linears if spec.official == "FP8" else plain


def _places(scheme: Scheme, name: str, spec: Spec) -> list[Place]:
    if "experts." not in name or "shared_experts" in name or scheme == "transformers":
        return [Place(name)]
    halves = (GATE, UP) if "gate_up" in name else (None,)
    return [Place(name, expert, half) for expert in range(spec.shape[0]) for half in halves]


def _part(shape: tuple[int, ...], place: Place) -> tuple[int, ...]:
    return (shape[1] if place.half is None else shape[1] // 2, shape[2])


def _name(scheme: Scheme, place: Place) -> str:
    name = names.from_place(scheme, place)
    assert name is not None
    return name


def _tensor(name, spec, shape, kind, recipe: Recipe, config: Dsv4Config, random) -> tuple[Tensor, Tensor | None, Tensor]:
    """(stored, its scale or None, its values)."""
    if kind == "I64":
        ids = torch.randint(config.n_routed_experts, shape, generator=random)
        return ids, None, ids
    if kind in ("BF16", "F32"):
        # As wide as the other random models of the tests: norms around one.
        values = torch.randn(shape, generator=random) * (0.2 if spec.is_norm else 0.25) + (1.0 if spec.is_norm else 0.0)
        values = values.to(torch.bfloat16 if kind == "BF16" else torch.float32)
        return values, None, values.double()
    if len(shape) == 3:
        parts = [_tensor(name, spec, shape[1:], kind, recipe, config, random) for _ in range(shape[0])]
        codes, scales, values = zip(*parts, strict=True)
        return _stack_bytes(codes), _stack_bytes(scales), torch.stack(values)
    if kind == "FP4":
        packed = torch.randint(-128, 128, (shape[0], shape[1] // 2), dtype=torch.int8, generator=random)
        scale = _scale((shape[0], shape[1] // 32), "E8M0", random)
        return packed, scale, fp4_values(packed, scale)
    byte = torch.randint(256, shape, dtype=torch.uint8, generator=random)
    byte[byte % 128 == 127] = 0
    codes = byte.view(torch.float8_e4m3fn)
    scale = _scale((math.ceil(shape[0] / 128), math.ceil(shape[1] / 128)), recipe.scales, random)
    return codes, scale, fp8_values(codes, scale)


def _scale(shape: tuple[int, ...], dtype: str, random) -> Tensor:
    # e4m3 codes go up to 448, so these leave weights of ordinary size.
    if dtype == "F32":
        return torch.rand(shape, generator=random) * 2**-9 + 2**-11
    return torch.randint(116, 121, shape, dtype=torch.uint8, generator=random).view(torch.float8_e8m0fnu)


def _stack(values: list[Tensor], spec: Spec) -> Tensor:
    return torch.stack(values).reshape(spec.shape) if len(values) > 1 else values[0].reshape(spec.shape)


def _stack_bytes(tensors: tuple[Tensor, ...]) -> Tensor:
    """torch.stack, which has no kernels for some one-byte dtypes."""
    if tensors[0].dtype.itemsize > 1:
        return torch.stack(tensors)
    return torch.stack([tensor.view(torch.uint8) for tensor in tensors]).view(tensors[0].dtype)


def _extras(config: Dsv4Config, recipe: Recipe, random) -> dict[str, Tensor]:
    """What the released files hold beyond the language model, small."""
    extras: dict[str, Tensor] = {}
    width = config.hidden_size
    stages = {None: 0, "plain": 1, "dspark": 3}[recipe.draft]
    for stage in range(stages):
        prefix = f"mtp.{stage}"
        extras[f"{prefix}.attn_norm.weight"] = torch.randn(width, generator=random).bfloat16()
        extras[f"{prefix}.ffn.gate.bias"] = torch.randn(config.n_routed_experts, generator=random)
        extras[f"{prefix}.norm.weight"] = torch.randn(width, generator=random).bfloat16()
    if recipe.draft is not None:
        projection = "e_proj" if recipe.draft == "plain" else "main_proj"
        extras[f"mtp.0.{projection}.weight"] = torch.zeros(width, width).to(torch.float8_e4m3fn)
        side = math.ceil(width / 128)
        extras[f"mtp.0.{projection}.scale"] = _scale((side, side), "E8M0", random)
    if recipe.vision:
        extras |= {name: torch.randn(shape, generator=random).bfloat16() for name, shape in VISION_EXTRAS}
        for layer, kind in enumerate(config.mlp_layer_types):
            bias = torch.randn(config.n_routed_experts, generator=random)
            extras[f"layers.{layer}.ffn.gate.bias_vl"] = bias
            if kind == "hash_moe":
                place = Place(f"layers.{layer}.{names.HASH_BLOCK_EXTRA}")
                extras[_name(recipe.scheme, place)] = bias.clone()
    return extras
