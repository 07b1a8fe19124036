"""The config: errors by field name, immutability, presets and their overrides."""

import copy
import dataclasses
import pickle

import pytest
import torch

from dsv4.config import CSA, FIXED, HASH_MOE, HCA, MOE, SLIDING, Dsv4Config


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_key_value_heads", 2),
        ("n_shared_experts", 2),
        ("norm_topk_prob", False),
        ("scoring_func", "sigmoid"),
        ("topk_method", "greedy"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("tie_word_embeddings", True),
        ("hidden_size", None),
        ("hidden_size", 64.0),
        ("vocab_size", "64"),
        ("num_hidden_layers", 0),
        ("hc_mult", True),
        ("hc_sinkhorn_iters", 0),
        ("sliding_window", -1),
        ("o_groups", 3),
        ("qk_rope_head_dim", 7),
        ("qk_rope_head_dim", 514),
        ("index_head_dim", 62),
        ("num_experts_per_tok", 257),
        ("rms_norm_eps", -1e-6),
        ("rms_norm_eps", float("nan")),
        ("swiglu_limit", 0),
        ("swiglu_limit", "10"),
        ("hc_eps", None),
        ("torch_dtype", "int8"),
        ("torch_dtype", "auto"),
        ("bos_token_id", -1),
        ("bos_token_id", [0]),
        ("eos_token_id", [1, -1]),
        ("expert_dtype", 4),
        ("num_nextn_predict_layers", -1),
        ("layer_types", [SLIDING]),
        ("layer_types", "sliding_attention"),
        ("layer_types", ["full_attention"] * 43),
        ("mlp_layer_types", [MOE]),
        ("mlp_layer_types", ["dense"] * 43),
        ("compress_rates", {CSA: 0}),
        ("compress_rates", {CSA: 4.0}),
        ("compress_rates", {SLIDING: 4}),
        ("compress_rates", [4, 128]),
        ("rope_parameters", {"main": {"rope_theta": 1e4}}),
        ("rope_parameters", {"main": {"rope_theta": 1e4}, "compress": {}}),
        ("rope_parameters", {"main": {"rope_theta": 1e4}, "compress": {"rope_theta": -1e4}}),
        ("rope_parameters", {"main": {"rope_theta": 1e4}, "compress": 3}),
    ],
)
def test_a_wrong_value_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=rf"^{field}.*: got .*, expected "):
        dataclasses.replace(Dsv4Config.flash(), **{field: value})


def test_a_config_is_frozen_hashable_and_copies():
    config = Dsv4Config.flash()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 3
    for change in (
        lambda: config.compress_rates.update({CSA: 8}),
        lambda: config.rope_parameters["main"].pop("rope_theta"),
        lambda: config.quantization_config.__setitem__("fmt", "e5m2"),
    ):
        with pytest.raises(TypeError, match="frozen"):
            change()
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), Dsv4Config.flash()):
        assert twin == config
        assert hash(twin) == hash(config)
    assert len({config, Dsv4Config.flash(), Dsv4Config.pro()}) == 2


def test_tiny():
    config = Dsv4Config.tiny()
    assert config.layer_types == (SLIDING, SLIDING, CSA, HCA, CSA, HCA)
    assert config.mlp_layer_types == (HASH_MOE, HASH_MOE, MOE, MOE, MOE, MOE)
    assert (config.rate(2), config.rate(3), config.vocab_size, config.hidden_size) == (4, 8, 64, 32)
    assert config.torch_dtype == torch.float32
    assert config.rope_parameters["compress"]["rope_type"] == "yarn"


def test_overrides_of_presets():
    tiny = Dsv4Config.tiny
    assert tiny(num_hidden_layers=3).layer_types == (SLIDING, SLIDING, CSA)
    assert tiny(num_hidden_layers=9).layer_types[6:] == (CSA, HCA, CSA)
    assert tiny(num_hidden_layers=1).mlp_layer_types == (HASH_MOE,)
    assert tiny(layer_types=[HCA, CSA]).num_hidden_layers == 2
    assert tiny(mlp_layer_types=[MOE] * 3).layer_types == (SLIDING, SLIDING, CSA)
    assert tiny(compress_rates={HCA: 16}).compress_rates == {CSA: 4, HCA: 16}
    assert tiny(num_hash_layers=0).mlp_layer_types == (MOE,) * 6
    assert tiny(torch_dtype="bfloat16").torch_dtype == torch.bfloat16
    assert tiny(num_hidden_layers=2, layer_types=[CSA, CSA]).layer_types == (CSA, CSA)
    assert Dsv4Config.pro(num_hidden_layers=4).layer_types == (HCA, HCA, CSA, HCA)
    assert Dsv4Config.flash(num_hidden_layers=2, vocab_size=8).vocab_size == 8
    with pytest.raises(ValueError, match="layer_types: got 2, expected num_hidden_layers = 3"):
        tiny(num_hidden_layers=3, layer_types=[CSA, CSA])
    with pytest.raises(ValueError, match="num_hash_layers: got 2"):
        tiny(num_hash_layers=2, mlp_layer_types=[MOE] * 6)


@pytest.mark.parametrize(
    ("name", "near"),
    [("hidden_sizes", "hidden_size"), ("num_layers", "num_hash_layers"), ("dtype", "torch_dtype")],
)
def test_an_unknown_override_names_the_nearest_field(name, near):
    with pytest.raises(TypeError, match=rf"tiny\(\) has no field '{name}'; the nearest is '{near}'"):
        Dsv4Config.tiny(**{name: 3})
    with pytest.raises(TypeError, match="got an unexpected keyword"):
        Dsv4Config(**{name: 3})


def test_every_fixed_value_is_a_field():
    assert set(FIXED) <= {field.name for field in dataclasses.fields(Dsv4Config)}
