"""The layout of the full-size models against the tables of the released files, typed in by hand."""

import dataclasses

import torch

from dsv4.config import CSA, HCA, Dsv4Config
from dsv4.convert.layout import layout

# ours below the block: (Flash, Pro, format in the released files)
EVERY_BLOCK = {
    "self_attn.sinks": ((64,), (128,), "F32"),
    "self_attn.q_a_norm.weight": ((1024,), (1536,), "BF16"),
    "self_attn.kv_norm.weight": ((512,), (512,), "BF16"),
    "self_attn.q_a_proj.weight": ((1024, 4096), (1536, 7168), "FP8"),
    "self_attn.q_b_proj.weight": ((32768, 1024), (65536, 1536), "FP8"),
    "self_attn.kv_proj.weight": ((512, 4096), (512, 7168), "FP8"),
    "self_attn.o_a_proj.weight": ((8192, 4096), (16384, 4096), "FP8"),
    "self_attn.o_b_proj.weight": ((4096, 8192), (7168, 16384), "FP8"),
    "input_layernorm.weight": ((4096,), (7168,), "BF16"),
    "post_attention_layernorm.weight": ((4096,), (7168,), "BF16"),
    "attn_hc.fn": ((24, 16384), (24, 28672), "F32"),
    "attn_hc.base": ((24,), (24,), "F32"),
    "attn_hc.scale": ((3,), (3,), "F32"),
    "ffn_hc.fn": ((24, 16384), (24, 28672), "F32"),
    "ffn_hc.base": ((24,), (24,), "F32"),
    "ffn_hc.scale": ((3,), (3,), "F32"),
    "mlp.router.weight": ((256, 4096), (384, 7168), "BF16"),
    "mlp.shared_experts.gate_proj.weight": ((2048, 4096), (3072, 7168), "FP8"),
    "mlp.shared_experts.up_proj.weight": ((2048, 4096), (3072, 7168), "FP8"),
    "mlp.shared_experts.down_proj.weight": ((4096, 2048), (7168, 3072), "FP8"),
    "mlp.experts.gate_up_proj": ((256, 4096, 4096), (384, 6144, 7168), "FP4"),
    "mlp.experts.down_proj": ((256, 4096, 2048), (384, 7168, 3072), "FP4"),
}
CSA_BLOCK = {
    "self_attn.compressor.position_bias": ((4, 1024), (4, 1024), "F32"),
    "self_attn.compressor.kv_norm.weight": ((512,), (512,), "BF16"),
    "self_attn.compressor.kv_proj.weight": ((1024, 4096), (1024, 7168), "BF16"),
    "self_attn.compressor.gate_proj.weight": ((1024, 4096), (1024, 7168), "BF16"),
    "self_attn.compressor.indexer.position_bias": ((4, 256), (4, 256), "F32"),
    "self_attn.compressor.indexer.kv_norm.weight": ((128,), (128,), "BF16"),
    "self_attn.compressor.indexer.kv_proj.weight": ((256, 4096), (256, 7168), "BF16"),
    "self_attn.compressor.indexer.gate_proj.weight": ((256, 4096), (256, 7168), "BF16"),
    "self_attn.compressor.indexer.scorer.weights_proj.weight": ((64, 4096), (64, 7168), "BF16"),
    "self_attn.compressor.indexer.q_b_proj.weight": ((8192, 1024), (8192, 1536), "FP8"),
}
HCA_BLOCK = {
    "self_attn.compressor.position_bias": ((128, 512), (128, 512), "F32"),
    "self_attn.compressor.kv_norm.weight": ((512,), (512,), "BF16"),
    "self_attn.compressor.kv_proj.weight": ((512, 4096), (512, 7168), "BF16"),
    "self_attn.compressor.gate_proj.weight": ((512, 4096), (512, 7168), "BF16"),
}
TOP = {
    "embed_tokens.weight": ((129280, 4096), (129280, 7168), "BF16"),
    "lm_head.weight": ((129280, 4096), (129280, 7168), "BF16"),
    "norm.weight": ((4096,), (7168,), "BF16"),
    "hc_head.hc_fn": ((4, 16384), (4, 28672), "F32"),
    "hc_head.hc_base": ((4,), (4,), "F32"),
    "hc_head.hc_scale": ((1,), (1,), "F32"),
}


def expected_layout(config, which):
    """name -> (shape, format), from the tables above."""
    tensors = {name: (row[which], row[2]) for name, row in TOP.items()}
    for layer, kind in enumerate(config.layer_types):
        block = EVERY_BLOCK | {CSA: CSA_BLOCK, HCA: HCA_BLOCK}.get(kind, {})
        if layer < 3:
            block = block | {"mlp.router.tid2eid": ((129280, 6), (129280, 6), "I64")}
        else:
            block = block | {"mlp.router.e_score_correction_bias": ((256,), (384,), "F32")}
        for name, row in block.items():
            tensors[f"layers.{layer}.{name}"] = (row[which], row[2])
    return tensors


def test_flash_and_pro():
    for which, config in enumerate((Dsv4Config.flash(), Dsv4Config.pro())):
        found = {name: (spec.shape, spec.official) for name, spec in layout(config).items()}
        assert found == expected_layout(config, which)


def test_dtypes_in_memory():
    for name, spec in layout(Dsv4Config.tiny()).items():
        leaf = name.rpartition(".")[2]
        kept = "norm.weight" in name or "layernorm.weight" in name or "_hc." in name or "hc_head." in name
        kept = kept or leaf in ("sinks", "position_bias", "e_score_correction_bias")
        assert spec.dtype == (torch.float32 if kept else torch.int64 if leaf == "tid2eid" else None), name


def test_rates_come_from_the_config():
    config = dataclasses.replace(Dsv4Config.tiny(), compress_rates={CSA: 2, HCA: 16})
    shapes = {name: spec.shape for name, spec in layout(config).items()}
    for layer, kind in enumerate(config.layer_types):
        name = f"layers.{layer}.self_attn.compressor.position_bias"
        expected = {CSA: (2, 2 * config.head_dim), HCA: (16, config.head_dim)}.get(kind)
        assert shapes.get(name) == expected


def test_order_is_that_of_the_forward():
    order = list(layout(Dsv4Config.tiny()))
    assert order[0] == "embed_tokens.weight"
    assert order[-1] == "lm_head.weight"
    blocks = [int(name.split(".")[1]) for name in order if name.startswith("layers.")]
    assert blocks == sorted(blocks)
