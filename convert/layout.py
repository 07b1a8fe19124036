"""Which tensors a model of a config has: shape, dtype in memory, format in the released files.

The table is data; `layout(config)` expands it over the blocks. Axes: V vocabulary, D width, M
residual streams, N heads x H head width, R rope; Q and O the low ranks of queries and outputs, G
output groups; L and K indexer heads and their width; E experts, F expert width, T experts per
token; W tokens per compressed entry; C is 2 where windows overlap.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from dsv4.config import CSA, HASH_MOE, SLIDING, Dsv4Config

Official = Literal["F32", "BF16", "I64", "FP8", "FP4"]
When = Literal["always", "compressed", "csa", "hash", "topk"]

FLOAT32 = torch.float32
INT64 = torch.int64
# The dtype of the model.
MODEL = None

# name, axes, dtype in memory, format in the released files
TOP = (
    ("embed_tokens.weight", "V,D", MODEL, "BF16"),
    ("hc_head.hc_fn", "M,M*D", FLOAT32, "F32"),
    ("hc_head.hc_base", "M", FLOAT32, "F32"),
    ("hc_head.hc_scale", "1", FLOAT32, "F32"),
    ("norm.weight", "D", FLOAT32, "BF16"),
    ("lm_head.weight", "V,D", MODEL, "BF16"),
)
# Below layers.{layer}.: on which blocks, then as above.
BLOCK = (
    ("always", "attn_hc.fn", "X,M*D", FLOAT32, "F32"),
    ("always", "attn_hc.base", "X", FLOAT32, "F32"),
    ("always", "attn_hc.scale", "3", FLOAT32, "F32"),
    ("always", "input_layernorm.weight", "D", FLOAT32, "BF16"),
    ("always", "self_attn.sinks", "N", FLOAT32, "F32"),
    ("always", "self_attn.q_a_proj.weight", "Q,D", MODEL, "FP8"),
    ("always", "self_attn.q_a_norm.weight", "Q", FLOAT32, "BF16"),
    ("always", "self_attn.q_b_proj.weight", "N*H,Q", MODEL, "FP8"),
    ("always", "self_attn.kv_proj.weight", "H,D", MODEL, "FP8"),
    ("always", "self_attn.kv_norm.weight", "H", FLOAT32, "BF16"),
    ("always", "self_attn.o_a_proj.weight", "G*O,N*H/G", MODEL, "FP8"),
    ("always", "self_attn.o_b_proj.weight", "D,G*O", MODEL, "FP8"),
    ("compressed", "self_attn.compressor.kv_proj.weight", "C*H,D", MODEL, "BF16"),
    ("compressed", "self_attn.compressor.gate_proj.weight", "C*H,D", MODEL, "BF16"),
    ("compressed", "self_attn.compressor.position_bias", "W,C*H", FLOAT32, "F32"),
    ("compressed", "self_attn.compressor.kv_norm.weight", "H", FLOAT32, "BF16"),
    ("csa", "self_attn.compressor.indexer.kv_proj.weight", "C*K,D", MODEL, "BF16"),
    ("csa", "self_attn.compressor.indexer.gate_proj.weight", "C*K,D", MODEL, "BF16"),
    ("csa", "self_attn.compressor.indexer.position_bias", "W,C*K", FLOAT32, "F32"),
    ("csa", "self_attn.compressor.indexer.kv_norm.weight", "K", FLOAT32, "BF16"),
    ("csa", "self_attn.compressor.indexer.q_b_proj.weight", "L*K,Q", MODEL, "FP8"),
    ("csa", "self_attn.compressor.indexer.scorer.weights_proj.weight", "L,D", MODEL, "BF16"),
    ("always", "ffn_hc.fn", "X,M*D", FLOAT32, "F32"),
    ("always", "ffn_hc.base", "X", FLOAT32, "F32"),
    ("always", "ffn_hc.scale", "3", FLOAT32, "F32"),
    ("always", "post_attention_layernorm.weight", "D", FLOAT32, "BF16"),
    ("always", "mlp.router.weight", "E,D", MODEL, "BF16"),
    ("hash", "mlp.router.tid2eid", "V,T", INT64, "I64"),
    ("topk", "mlp.router.e_score_correction_bias", "E", FLOAT32, "F32"),
    ("always", "mlp.experts.gate_up_proj", "E,2*F,D", MODEL, "FP4"),
    ("always", "mlp.experts.down_proj", "E,D,F", MODEL, "FP4"),
    ("always", "mlp.shared_experts.gate_proj.weight", "F,D", MODEL, "FP8"),
    ("always", "mlp.shared_experts.down_proj.weight", "D,F", MODEL, "FP8"),
    ("always", "mlp.shared_experts.up_proj.weight", "F,D", MODEL, "FP8"),
)
# Held as buffers, not counted as parameters.
BUFFERS = ("mlp.router.tid2eid", "mlp.router.e_score_correction_bias")


@dataclass(frozen=True)
class Spec:
    """One tensor of the model: `dtype` is None where the model's own dtype decides."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    official: Official

    @property
    def is_norm(self) -> bool:
        """Float32 in memory, BF16 in the released files."""
        return self.dtype is FLOAT32 and self.official == "BF16"

    @property
    def is_experts(self) -> bool:
        return self.official == "FP4"


def layout(config: Dsv4Config) -> dict[str, Spec]:
    """Every tensor of the dense model by its state_dict name, in the order of the forward."""
    sizes = _sizes(config)
    top = {name: _spec(axes, dtype, official, sizes) for name, axes, dtype, official in TOP}
    tensors = {"embed_tokens.weight": top.pop("embed_tokens.weight")}
    for layer in range(config.num_hidden_layers):
        here = _conditions(config, layer)
        sizes |= {"W": config.rate(layer) or 0, "C": 2 if "csa" in here else 1}
        for when, name, axes, dtype, official in BLOCK:
            if when in here:
                tensors[f"layers.{layer}.{name}"] = _spec(axes, dtype, official, sizes)
    return tensors | top


def _conditions(config: Dsv4Config, layer: int) -> set[When]:
    here: set[When] = {"always", "hash" if config.mlp_layer_types[layer] == HASH_MOE else "topk"}
    if config.layer_types[layer] != SLIDING:
        here.add("compressed")
    if config.layer_types[layer] == CSA:
        here.add("csa")
    return here


def _sizes(config: Dsv4Config) -> dict[str, int]:
    return {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "M": config.hc_mult,
        "X": (2 + config.hc_mult) * config.hc_mult,
        "N": config.num_attention_heads,
        "H": config.head_dim,
        "Q": config.q_lora_rank,
        "G": config.o_groups,
        "O": config.o_lora_rank,
        "L": config.index_n_heads,
        "K": config.index_head_dim,
        "E": config.n_routed_experts,
        "F": config.moe_intermediate_size,
        "T": config.num_experts_per_tok,
    }


def _spec(axes: str, dtype: torch.dtype | None, official: Official, sizes: dict[str, int]) -> Spec:
    return Spec(tuple(_size(axis, sizes) for axis in axes.split(",")), dtype, official)


def _size(axis: str, sizes: dict[str, int]) -> int:
    """'N*H/G' -> the product of the sizes before '/', divided by the one after it."""
    product, _, divisor = axis.partition("/")
    size = 1
    for factor in product.split("*"):
        size *= int(factor) if factor.isdigit() else sizes[factor]
    return size // sizes[divisor] if divisor else size
