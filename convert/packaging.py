"""Repackagings of DeepSeek-V4 by third parties that dsv4 does not read, and how each is recognised.

They quantise by other rules, so that a reader of the official formats would at best fail on a
missing name and at worst take codes for weights. The signs are data: names of the quantiser in
config.json, and endings of tensor names.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dsv4.convert.problems import CheckpointError

READABLE = "dsv4 reads the official FP8 and FP4 files and plain BF16, F16 or F32 ones"
# The one quant_method of the official files.
OFFICIAL_METHOD = "fp8"


@dataclass(frozen=True)
class Packaging:
    """methods: of quant_method; config_keys: of config.json or its quantization_config."""

    what: str
    methods: tuple[str, ...] = ()
    config_keys: tuple[str, ...] = ()
    endings: tuple[str, ...] = ()


# The first that matches is named, so the more special ones stand first.
PACKAGINGS = (
    Packaging(
        "an NVFP4 file of NVIDIA's Model Optimizer",
        methods=("modelopt", "modelopt_fp4", "nvfp4"),
        config_keys=("quant_algo", "moe_quant_algo", "quantized_layers"),
        endings=(".weight_scale_2", ".input_scale"),
    ),
    Packaging(
        "a compressed-tensors file",
        methods=("compressed-tensors",),
        endings=(".weight_packed", ".weight_global_scale", ".weight_zero_point"),
    ),
    Packaging(
        "an MLX file",
        methods=("mlx",),
        config_keys=("quantization",),
        endings=(".scales", ".biases"),
    ),
    Packaging("an AMD Quark file", methods=("quark",)),
    Packaging(
        "an Ascend W8A8 or W4A8 file",
        methods=("ascend", "msmodelslim"),
        endings=(".weight_offset", ".scale_bias", ".deq_scale", ".quant_bias"),
    ),
    Packaging(
        "a file with integer weights by AutoRound, GPTQ or AWQ",
        methods=("auto-round", "auto_round", "intel/auto-round", "gptq", "awq", "gptqmodel"),
        endings=(".qweight", ".qzeros", ".g_idx"),
    ),
    Packaging(
        "an ExLlama file",
        methods=("exl2", "exl3"),
        endings=(".trellis", ".q_weight", ".suh", ".svh"),
    ),
    Packaging(
        "a bitsandbytes file",
        methods=("bitsandbytes",),
        endings=(".quant_map", ".absmax", ".nested_absmax", ".SCB"),
    ),
    Packaging("a torchao file", methods=("torchao",)),
    Packaging("an MXFP4 file in gpt-oss style", methods=("mxfp4",), endings=("_blocks", "_scales")),
    Packaging("a file with scales that dsv4 does not know", endings=(".weight_scale",)),
)


def refuse_packagings(where: object, config: Mapping[str, Any], names: Iterable[str], dtypes: Iterable[str]) -> None:
    """Raises CheckpointError where config.json or the names say another format."""
    quantisation = config.get("quantization_config") or {}
    if not isinstance(quantisation, Mapping):
        raise CheckpointError(f"{where}: quantization_config is {quantisation!r}; expected an object")
    method = quantisation.get("quant_method", OFFICIAL_METHOD)
    keys = {*config, *quantisation}
    names = list(names)
    for packaging in PACKAGINGS:
        sign = _sign(packaging, method, keys, names)
        if sign is not None:
            raise CheckpointError(f"{where} is {packaging.what} ({sign}); {READABLE}. Use one of those instead.")
    if method != OFFICIAL_METHOD:
        raise CheckpointError(f"{where} has quant_method {method!r}; {READABLE}. Use one of those instead.")
    if "F4" in set(dtypes):
        raise CheckpointError(
            f"{where} holds tensors of dtype F4, as DeepSeek's inference/convert.py writes them; "
            f"{READABLE}. Use the release that it was made from."
        )


def _sign(packaging: Packaging, method: str, keys: set[str], names: list[str]) -> str | None:
    if method in packaging.methods:
        return f"quant_method {method!r} in config.json"
    for key in packaging.config_keys:
        if key in keys:
            return f"{key!r} in config.json"
    for name in names:
        # tuple: str.endswith tests them all at once
        if name.endswith(packaging.endings):
            return name
    return None
