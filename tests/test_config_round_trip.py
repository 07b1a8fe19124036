"""Random configs: written in either style they read back equal, and transformers reads the same."""

import dataclasses
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from dsv4.config import CSA, HCA, LAYER_TYPES, MLP_LAYER_TYPES, SLIDING, Dsv4Config

# Fields that transformers has under another name or in another form.
OTHERWISE = ("rope_parameters", "compress_rates", "quantization_config", "torch_dtype")

thetas = st.floats(2.0, 1e6)
yarns = st.fixed_dictionaries(
    {
        "rope_type": st.just("yarn"),
        "rope_theta": thetas,
        "factor": st.floats(1.0, 64.0),
        "original_max_position_embeddings": st.integers(1, 1000),
    },
    optional={
        "beta_fast": st.integers(1, 64),
        "beta_slow": st.floats(0.5, 4.0),
        "attention_factor": st.floats(0.5, 2.0),
    },
)
tables = yarns | st.fixed_dictionaries({"rope_theta": thetas})


@st.composite
def configs(draw) -> Dsv4Config:
    n = draw(st.integers(1, 7))
    groups, topk = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    width = 2 * draw(st.integers(1, 16))
    quantization = st.none() | st.just(Dsv4Config.flash().quantization_config)
    ids = st.none() | st.integers(0, 99)
    return Dsv4Config(
        vocab_size=draw(st.integers(1, 999)),
        hidden_size=draw(st.integers(1, 999)),
        num_hidden_layers=n,
        num_attention_heads=groups * draw(st.integers(1, 4)),
        head_dim=width + draw(st.integers(0, 40)),
        qk_rope_head_dim=width,
        o_groups=groups,
        sliding_window=draw(st.integers(1, 128)),
        layer_types=draw(st.lists(st.sampled_from(LAYER_TYPES), min_size=n, max_size=n)),
        mlp_layer_types=draw(st.lists(st.sampled_from(MLP_LAYER_TYPES), min_size=n, max_size=n)),
        compress_rates={CSA: draw(st.integers(1, 9)), HCA: draw(st.integers(1, 200))},
        index_head_dim=width + draw(st.integers(0, 9)),
        index_topk=draw(st.integers(1, 600)),
        n_routed_experts=topk + draw(st.integers(0, 5)),
        num_experts_per_tok=topk,
        routed_scaling_factor=draw(st.floats(0.1, 4.0)),
        swiglu_limit=draw(st.floats(0.1, 100.0)),
        hc_mult=draw(st.integers(1, 8)),
        hc_sinkhorn_iters=draw(st.integers(1, 20)),
        hc_eps=draw(st.floats(0.0, 1e-2)),
        rms_norm_eps=draw(st.floats(0.0, 1e-2)),
        rope_parameters={"main": draw(tables), "compress": draw(tables)},
        max_position_embeddings=draw(st.integers(1, 9999)),
        bos_token_id=draw(ids),
        eos_token_id=draw(ids | st.lists(st.integers(0, 99), max_size=3)),
        pad_token_id=draw(ids),
        torch_dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        num_nextn_predict_layers=draw(st.integers(0, 3)),
        mtp_compress_ratios=draw(st.lists(st.sampled_from([0, 4, 8, 128]), max_size=3)),
        expert_dtype=draw(st.sampled_from([None, "fp4", "fp8"])),
        quantization_config=draw(quantization),
    )


def listed(value):
    return list(value) if isinstance(value, tuple) else value


@given(configs(), st.sampled_from(["official", "transformers"]))
@settings(max_examples=200, deadline=None)
def test_any_config_survives_writing_and_reading(config, style):
    assert Dsv4Config.from_hf(json.loads(json.dumps(config.to_hf(style)))) == config


@given(configs())
@settings(max_examples=40, deadline=None)
def test_transformers_reads_what_is_written(config):
    written = config.to_hf("transformers")
    theirs = AutoConfig.for_model(written.pop("model_type"), **written)
    assert theirs.dtype == config.torch_dtype
    compared = [f.name for f in dataclasses.fields(config) if f.name not in OTHERWISE]
    for field in compared:
        value = listed(getattr(config, field))
        assert value in ([], None) or getattr(theirs, field) == value, field
    for layer, kind in enumerate(theirs.layer_types):
        assert config.rate(layer) == (None if kind == SLIDING else theirs.compress_rates[kind])
    for label, table in config.rope_parameters.items():
        said = dict(theirs.rope_parameters[label])
        assert said.pop("partial_rotary_factor") == pytest.approx(config.partial_rotary_factor)
        assert said == table
