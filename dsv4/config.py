"""The configuration of a DeepSeek-V4 model: one frozen dataclass with Hugging Face field names.

`from_hf` and `to_hf` read and write config.json in both hub styles (`dsv4/config_json.py`);
`flash`, `pro` and `tiny` are presets. Only the compressed blocks have YaRN, and no mscale:
`attention_factor`, by which cos and sin are multiplied, is 1 unless a file gives it.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

from dsv4 import config_json
from dsv4.config_json import (
    COMPRESS_ROPE_THETA,
    CSA,
    DEFAULT_RATES,
    HASH_MOE,
    HCA,
    MOE,
    ROPE_THETA,
    SLIDING,
    TOKEN_IDS,
    count,
    error,
    hash_blocks_first,
    number,
)

LAYER_TYPES = (SLIDING, CSA, HCA)
MLP_LAYER_TYPES = (HASH_MOE, MOE)
DEFAULT_HASH_LAYERS = 3
# What this model computes; another value is another model.
FIXED = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
COUNTS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("qk_rope_head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "sliding_window"),
    *("index_n_heads", "index_head_dim", "index_topk", "n_routed_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "hc_mult", "hc_sinkhorn_iters", "max_position_embeddings"),
)
POSITIVE = ("routed_scaling_factor", "swiglu_limit")
NOT_NEGATIVE = ("hc_eps", "rms_norm_eps", "initializer_range")


class ReadOnlyDict(dict):
    """A dict that refuses changes and can be hashed, so that a frozen config stays frozen."""

    def _refuse(self, *args, **kwargs):
        raise TypeError("a Dsv4Config is frozen; use dataclasses.replace(config, field=value)")

    __setitem__ = __delitem__ = __ior__ = _refuse
    update = setdefault = pop = popitem = clear = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self):
        return type(self), (dict(self),)


@dataclass(frozen=True, kw_only=True)
class Dsv4Config:
    """Sizes, per-block kinds and constants. Defaults are those of transformers' DeepseekV4Config.

    Raises ValueError with the field, what it got and what is expected. Lists become tuples and
    mappings read-only, so that a config is hashable. Variants: `dataclasses.replace`.
    """

    vocab_size: int = 129280
    hidden_size: int = 4096
    num_hidden_layers: int = 43
    num_attention_heads: int = 64
    num_key_value_heads: int = 1
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 1024
    o_groups: int = 8
    o_lora_rank: int = 1024
    sliding_window: int = 128
    # None: two HCA blocks, then HCA and CSA in turn, as in transformers
    layer_types: tuple[str, ...] = None  # type: ignore[assignment]
    # None: three hash blocks, then top-k blocks
    mlp_layer_types: tuple[str, ...] = None  # type: ignore[assignment]
    # tokens per compressed entry, by layer type; a type left out has its default, 4 or 128
    compress_rates: Mapping[str, int] = dataclasses.field(default_factory=dict)
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 512
    n_routed_experts: int = 256
    n_shared_experts: int = 1
    num_experts_per_tok: int = 6
    moe_intermediate_size: int = 2048
    routed_scaling_factor: float = 1.5
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    swiglu_limit: float = 10.0
    hidden_act: str = "silu"
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    # {"main", "compress"}, each rope_theta and rope_type, with YaRN's numbers; None: no YaRN
    rope_parameters: Mapping[str, Mapping[str, Any]] = None  # type: ignore[assignment]
    max_position_embeddings: int = 1048576
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 1
    pad_token_id: int | None = None
    torch_dtype: torch.dtype = torch.float32
    num_nextn_predict_layers: int = 1
    # the tail of the official compress_ratios: one per MTP stage
    mtp_compress_ratios: tuple[int, ...] = ()
    expert_dtype: str | None = None
    quantization_config: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for field, value in FIXED.items():
            if getattr(self, field) != value:
                raise error(field, getattr(self, field), f"{value!r}, all that is built here")
        for field in COUNTS:
            count(field, getattr(self, field), 1)
        count("num_nextn_predict_layers", self.num_nextn_predict_layers, 0)
        for field in (*POSITIVE, *NOT_NEGATIVE):
            self._set(field, number(field, getattr(self, field), field in NOT_NEGATIVE))
        for field in TOKEN_IDS:
            self._set(field, _token_id(field, getattr(self, field)))
        self._set("torch_dtype", _dtype(self.torch_dtype))
        self._set("quantization_config", _freeze(self.quantization_config))
        mtp = [count("mtp_compress_ratios", ratio, 0) for ratio in self.mtp_compress_ratios]
        self._set("mtp_compress_ratios", tuple(mtp))
        n, kinds, mlps = self.num_hidden_layers, self.layer_types, self.mlp_layer_types
        kinds = _alternating(HCA, HCA, CSA, n) if kinds is None else kinds
        mlps = hash_blocks_first(n, DEFAULT_HASH_LAYERS) if mlps is None else mlps
        self._set("layer_types", _per_layer("layer_types", kinds, n, LAYER_TYPES))
        self._set("mlp_layer_types", _per_layer("mlp_layer_types", mlps, n, MLP_LAYER_TYPES))
        self._set("compress_rates", _rates(self.compress_rates))
        self._set("rope_parameters", self._rope_tables())
        self._check_sizes()

    def _set(self, field: str, value: Any) -> None:
        object.__setattr__(self, field, value)

    def _rope_tables(self) -> ReadOnlyDict:
        thetas = (("main", ROPE_THETA), ("compress", COMPRESS_ROPE_THETA))
        plain = {label: {"rope_theta": theta} for label, theta in thetas}
        tables = plain if self.rope_parameters is None else self.rope_parameters
        sizes = (self.head_dim, self.qk_rope_head_dim, self.max_position_embeddings)
        return _freeze(config_json.rope_tables(tables, *sizes))

    def _check_sizes(self) -> None:
        heads, rope = self.num_attention_heads, self.qk_rope_head_dim
        chosen, experts = self.num_experts_per_tok, self.n_routed_experts
        if heads % self.o_groups:
            raise error("o_groups", self.o_groups, f"a divisor of num_attention_heads = {heads}")
        if rope % 2 or rope > self.head_dim:
            raise error("qk_rope_head_dim", rope, f"an even number <= head_dim = {self.head_dim}")
        if CSA in self.layer_types and self.index_head_dim < rope:
            raise error("index_head_dim", self.index_head_dim, f">= qk_rope_head_dim = {rope}")
        if chosen > experts:
            raise error("num_experts_per_tok", chosen, f"<= n_routed_experts = {experts}")
        if not isinstance(self.expert_dtype, str | None):
            raise error("expert_dtype", self.expert_dtype, "a string such as 'fp4', or None")

    @property
    def qk_head_dim(self) -> int:
        return self.head_dim

    @property
    def num_layers(self) -> int:
        return self.num_hidden_layers

    @property
    def streams(self) -> int:
        return self.hc_mult

    @property
    def num_hash_layers(self) -> int:
        """How many blocks route by token id, wherever they stand."""
        return self.mlp_layer_types.count(HASH_MOE)

    @property
    def partial_rotary_factor(self) -> float:
        return self.qk_rope_head_dim / self.head_dim

    def rate(self, layer: int) -> int | None:
        """Tokens per compressed entry of block `layer`; None on a sliding block."""
        return self.compress_rates.get(self.layer_types[layer])

    @classmethod
    def from_hf(cls, mapping: Mapping[str, Any], strict: bool = True) -> Self:
        """Read a config.json of either hub style; absent keys mean what they do to transformers.

        Raises ValueError for another model type, for keys neither handled nor known to be harmless
        (strict=False: a warning), and where keys contradict each other.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        values, tables = config_json.read(mapping, defaults, strict)
        configs = [cls(**values, rope_parameters=table) for table in tables]
        if configs[0] != configs[-1]:
            said = f"what rope_parameters says: {configs[0].rope_parameters}"
            raise error("rope_scaling", mapping["rope_scaling"], said)
        return configs[0]

    def to_hf(self, style: str = "official") -> dict[str, Any]:
        """The config.json of this model as JSON data, in style "official" or "transformers".

        What official keys cannot say (CSA rates but 4, hash blocks not at the front, YaRN on the
        main rotary) is said in the explicit keys. `from_hf` reads both back to an equal config.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return config_json.write({key: _thaw(value) for key, value in fields.items()}, style)

    @classmethod
    def flash(cls, **overrides: Any) -> Self:
        """DeepSeek-V4-Flash. Another num_hidden_layers continues or cuts its pattern of blocks."""
        return cls(**_preset("flash", (SLIDING, CSA, HCA), FLASH, overrides))

    @classmethod
    def pro(cls, **overrides: Any) -> Self:
        """DeepSeek-V4-Pro, which has no sliding block. Overrides as in `flash`."""
        return cls(**_preset("pro", (HCA, CSA, HCA), FLASH | PRO, overrides))

    @classmethod
    def tiny(cls, **overrides: Any) -> Self:
        """A model of every kind of block that runs in milliseconds. Overrides as in `flash`."""
        return cls(**_preset("tiny", (SLIDING, CSA, HCA), TINY, overrides))


def _token_id(field: str, value: Any) -> int | tuple[int, ...] | None:
    if isinstance(value, list | tuple) and field == "eos_token_id":
        return tuple(count(field, token, 0) for token in value)
    return None if value is None else count(field, value, 0)


def _dtype(value: Any) -> torch.dtype:
    name = str(value).removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16", "float64"):
        raise error("torch_dtype", value, "float32, bfloat16, float16 or float64")
    return getattr(torch, name)


def _per_layer(field: str, kinds: Any, n: int, allowed: tuple[str, ...]) -> tuple[str, ...]:
    if not isinstance(kinds, list | tuple) or len(kinds) != n:
        got = len(kinds) if isinstance(kinds, list | tuple) else kinds
        raise error(field, got, f"num_hidden_layers = {n} entries")
    for layer, kind in enumerate(kinds):
        if kind not in allowed:
            raise error(f"{field}[{layer}]", kind, f"one of {', '.join(allowed)}")
    return tuple(kinds)


def _rates(rates: Any) -> ReadOnlyDict:
    if not isinstance(rates, Mapping) or not set(rates) <= set(DEFAULT_RATES):
        raise error("compress_rates", rates, f"a mapping of {' and '.join(DEFAULT_RATES)} to int")
    checked = {kind: count(f"compress_rates[{kind!r}]", rate, 1) for kind, rate in rates.items()}
    return ReadOnlyDict(DEFAULT_RATES | checked)


def _alternating(first: str, even: str, odd: str, n: int) -> tuple[str, ...]:
    """Two `first` blocks, then the other two kinds in turn."""
    return tuple(first if i < 2 else odd if i % 2 else even for i in range(n))


def _freeze(value: Any) -> Any:
    if isinstance(value, Mapping):
        return ReadOnlyDict({key: _freeze(inner) for key, inner in value.items()})
    return tuple(map(_freeze, value)) if isinstance(value, list | tuple) else value


def _thaw(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _thaw(inner) for key, inner in value.items()}
    return [_thaw(inner) for inner in value] if isinstance(value, tuple) else value


def _yarn(theta: float, factor: float, original: int) -> dict[str, dict[str, Any]]:
    yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    return {"main": {"rope_theta": ROPE_THETA}, "compress": {"rope_theta": theta, **yarn}}


FLASH = {
    "num_hidden_layers": 43,
    "num_hash_layers": 3,
    "torch_dtype": torch.bfloat16,
    "rope_parameters": _yarn(COMPRESS_ROPE_THETA, 16.0, 65536),
    "mtp_compress_ratios": (0,),
    "expert_dtype": "fp4",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}
PRO = {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "index_topk": 1024,
    "n_routed_experts": 384,
    "moe_intermediate_size": 3072,
    "routed_scaling_factor": 2.5,
}
TINY = {
    "num_hidden_layers": 6,
    "num_hash_layers": 2,
    "vocab_size": 64,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "o_groups": 2,
    "o_lora_rank": 8,
    "sliding_window": 8,
    "compress_rates": {CSA: 4, HCA: 8},
    "index_n_heads": 8,
    "index_head_dim": 8,
    "index_topk": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "max_position_embeddings": 4096,
    "rope_parameters": _yarn(COMPRESS_ROPE_THETA, 16.0, 32),
    "num_nextn_predict_layers": 0,
}


def _preset(name: str, kinds: tuple[str, str, str], base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Field values of a preset: lists per block follow the number of blocks unless given."""
    known = [*(field.name for field in dataclasses.fields(Dsv4Config)), "num_hash_layers"]
    for key in overrides:
        if key not in known:
            near = ", ".join(difflib.get_close_matches(key, known, 1, 0.0))
            raise TypeError(f"Dsv4Config.{name}() has no field {key!r}; the nearest is {near!r}")
    values = base | overrides
    lists = [overrides[key] for key in ("layer_types", "mlp_layer_types") if key in overrides]
    if lists and "num_hidden_layers" not in overrides:
        values["num_hidden_layers"] = len(lists[0])
    n = count("num_hidden_layers", values["num_hidden_layers"], 1)
    num_hash = count("num_hash_layers", values.pop("num_hash_layers"), 0)
    mlps = hash_blocks_first(n, num_hash)
    if "num_hash_layers" in overrides and tuple(values.get("mlp_layer_types", mlps)) != mlps:
        raise error("num_hash_layers", num_hash, "what mlp_layer_types says; give only one")
    if isinstance(values.get("compress_rates"), Mapping):
        values["compress_rates"] = base.get("compress_rates", {}) | values["compress_rates"]
    return {"layer_types": _alternating(*kinds, n), "mlp_layer_types": mlps} | values
