"""config.json: both hub styles to one object and back, as transformers reads the same keys."""

import copy
import dataclasses
import json

import pytest
import torch
from transformers import AutoConfig

from dsv4.config import (
    CSA,
    HASH_MOE,
    HCA,
    LAYER_TYPES,
    MOE,
    SLIDING,
    Dsv4Config,
)

# The released config.json files; the later ones differ from Flash in the keys shown.
# fmt: off
FLASH = {
    "architectures": ["DeepseekV4ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 0, "eos_token_id": 1, "expert_dtype": "fp4", "hc_eps": 1e-06, "hc_mult": 4,
    "hc_sinkhorn_iters": 20, "head_dim": 512, "hidden_act": "silu", "hidden_size": 4096,
    "index_head_dim": 128, "index_n_heads": 64, "index_topk": 512, "initializer_range": 0.02,
    "max_position_embeddings": 1048576, "model_type": "deepseek_v4", "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 64, "num_experts_per_tok": 6, "num_hidden_layers": 43,
    "num_hash_layers": 3, "num_key_value_heads": 1, "num_nextn_predict_layers": 1, "o_groups": 8,
    "o_lora_rank": 1024, "q_lora_rank": 1024, "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
        "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 16,
        "original_max_position_embeddings": 65536, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus",
    "sliding_window": 128, "swiglu_limit": 10.0, "tie_word_embeddings": False,
    "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "transformers_version": "4.57.1",
    "use_cache": True, "vocab_size": 129280, "compress_rope_theta": 160000,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
}
# fmt: on
DSPARK = {
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
    "dspark_markov_rank": 256,
}
FLASH_0731 = FLASH | DSPARK | {"compress_ratios": [*FLASH["compress_ratios"], 0, 0]}
PRO = FLASH | {
    "hidden_size": 7168,
    "index_topk": 1024,
    "moe_intermediate_size": 3072,
    "n_routed_experts": 384,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "o_groups": 16,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
}
PRO_0813 = (
    PRO
    | DSPARK
    | {
        "compress_ratios": [*PRO["compress_ratios"], 0, 0],
        "dspark_target_layer_ids": [58, 59, 60],
        "dspark_markov_rank": 512,
    }
)
VISION_EXP = FLASH_0731 | {
    "rms_norm_eps": 1e-20,
    "num_nextn_predict_layers": 3,
    "vision_n_layers": 32,
    "vision_rope_theta": 10000,
    "vision_max_wh_ratio": 8,
}
# As the released files, small; the ratios are also said in the explicit style, as transformers
# reads no ratio of 8.
SMALL = {
    **FLASH,
    **{"vocab_size": 96, "hidden_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 4},
    **{"num_hash_layers": 1, "num_attention_heads": 4, "head_dim": 64, "qk_rope_head_dim": 16},
    **{"q_lora_rank": 48, "o_groups": 4, "o_lora_rank": 24, "n_routed_experts": 7},
    **{"num_experts_per_tok": 3, "sliding_window": 16, "index_n_heads": 8, "index_head_dim": 32},
    "compress_ratios": [8, 8, 4, 0, 4],
    "layer_types": [HCA, HCA, CSA, SLIDING],
    "compress_rates": {CSA: 4, HCA: 8},
    "compress_rope_theta": 40000,
    "rope_scaling": {
        **{"type": "yarn", "factor": 4, "original_max_position_embeddings": 256},
        **{"beta_fast": 8, "beta_slow": 1},
    },
}
# What transformers 5.24 writes for a model made in the explicit style.
SAVED = {
    **{"architectures": ["DeepseekV4ForCausalLM"], "attention_bias": False},
    **{"attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 1},
    "compress_rates": {CSA: 4, HCA: 16},
    **{"compress_rope_theta": 160000.0, "dtype": "float32", "hc_eps": 1e-06, "hc_mult": 4},
    **{"hc_sinkhorn_iters": 20, "head_dim": 64, "hidden_act": "silu", "hidden_size": 128},
    **{"index_head_dim": 32, "index_n_heads": 4, "index_topk": 2, "initializer_range": 0.02},
    "layer_types": [SLIDING, SLIDING, CSA, HCA, CSA, HCA],
    **{"max_position_embeddings": 1024, "mlp_bias": False},
    "mlp_layer_types": [HASH_MOE, HASH_MOE, MOE, MOE, MOE, MOE],
    **{"model_type": "deepseek_v4", "moe_intermediate_size": 64, "n_routed_experts": 8},
    **{"n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 4},
    **{"num_experts_per_tok": 2, "num_hidden_layers": 6, "num_key_value_heads": 1},
    **{"num_nextn_predict_layers": 0, "o_groups": 2, "o_lora_rank": 64, "q_lora_rank": 64},
    **{"output_router_logits": False, "partial_rotary_factor": 0.25, "qk_rope_head_dim": 16},
    "rope_parameters": {
        "compress": {"partial_rotary_factor": 0.25, "rope_theta": 160000.0, "rope_type": "default"},
        "main": {"partial_rotary_factor": 0.25, "rope_theta": 10000.0, "rope_type": "default"},
    },
    **{"rope_theta": 10000.0, "routed_scaling_factor": 1.5, "router_aux_loss_coef": 0.001},
    **{"router_jitter_noise": 0.0, "scoring_func": "sqrtsoftplus", "sliding_window": 16},
    **{"swiglu_limit": 10.0, "tie_word_embeddings": False, "transformers_version": "5.24.0"},
    **{"use_cache": True, "vocab_size": 70, "rms_norm_eps": 1e-06},
}
FILES = {
    "flash": FLASH,
    "flash_0731": FLASH_0731,
    "flash_base": FLASH | {"expert_dtype": "fp8"},
    "pro": PRO,
    "pro_0813": PRO_0813,
    "small": SMALL,
    "saved": SAVED,
}
YARN_BETAS = {"beta_fast": 32, "beta_slow": 1}
SAME_IN_TRANSFORMERS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("qk_rope_head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "sliding_window"),
    *("index_n_heads", "index_head_dim", "index_topk", "n_routed_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "hc_mult", "hc_sinkhorn_iters", "max_position_embeddings"),
    *("routed_scaling_factor", "swiglu_limit", "hc_eps", "rms_norm_eps", "initializer_range"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "num_nextn_predict_layers"),
)


def in_transformers(mapping):
    """transformers' own reading of a config.json."""
    given = copy.deepcopy(mapping)
    return AutoConfig.for_model(given.pop("model_type"), **given)


def assert_same_model(config: Dsv4Config, theirs) -> None:
    for field in SAME_IN_TRANSFORMERS:
        value = getattr(config, field)
        assert getattr(theirs, field) == (list(value) if isinstance(value, tuple) else value), field
    assert list(config.layer_types) == theirs.layer_types
    assert list(config.mlp_layer_types) == theirs.mlp_layer_types
    for layer, kind in enumerate(theirs.layer_types):
        assert config.rate(layer) == (None if kind == SLIDING else theirs.compress_rates[kind])
    for label, table in config.rope_parameters.items():
        said = {key: v for key, v in theirs.rope_parameters[label].items() if key != "type"}
        assert said.pop("partial_rotary_factor") == pytest.approx(config.partial_rotary_factor)
        # transformers keeps the absence of these two and fills them in when it computes
        assert (YARN_BETAS if said["rope_type"] == "yarn" else {}) | said == table


@pytest.mark.parametrize("name", FILES)
def test_files_mean_what_they_mean_to_transformers(name):
    assert_same_model(Dsv4Config.from_hf(FILES[name]), in_transformers(FILES[name]))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("style", ["official", "transformers"])
def test_files_survive_writing_and_reading(name, style):
    config = Dsv4Config.from_hf(FILES[name])
    written = json.loads(json.dumps(config.to_hf(style)))
    assert Dsv4Config.from_hf(written) == config
    assert_same_model(config, in_transformers(written))


@pytest.mark.parametrize("name", FILES)
def test_what_transformers_writes_reads_the_same(name):
    config = Dsv4Config.from_hf(FILES[name])
    theirs = in_transformers(FILES[name])
    for written in (theirs.to_dict(), theirs.to_diff_dict()):
        again = Dsv4Config.from_hf(json.loads(json.dumps(written)))
        # transformers forgets the ratios of the MTP stages
        assert again == dataclasses.replace(config, mtp_compress_ratios=())


def test_kinds_of_flash_and_pro():
    flash, pro = Dsv4Config.from_hf(FLASH_0731), Dsv4Config.from_hf(PRO)
    assert [flash.layer_types.count(kind) for kind in LAYER_TYPES] == [2, 21, 20]
    assert [pro.layer_types.count(kind) for kind in LAYER_TYPES] == [0, 30, 31]
    assert flash.mtp_compress_ratios == (0, 0, 0)
    assert (flash.num_hash_layers, flash.rate(0), flash.rate(2), flash.rate(3)) == (3, None, 4, 128)
    assert flash.torch_dtype == torch.bfloat16
    assert (flash.qk_head_dim, flash.num_layers, flash.streams) == (512, 43, 4)


def test_presets_are_the_released_files():
    assert Dsv4Config.flash() == Dsv4Config.from_hf(FLASH)
    assert Dsv4Config.pro() == Dsv4Config.from_hf(PRO)
    for preset, file in ((Dsv4Config.flash(), FLASH), (Dsv4Config.pro(), PRO)):
        extra = {"mlp_bias": False, "pad_token_id": None}
        written = preset.to_hf("official") | {"transformers_version": "4.57.1"}
        assert written == file | extra


def test_defaults_are_those_of_transformers():
    assert_same_model(Dsv4Config(), in_transformers({"model_type": "deepseek_v4"}))
    assert Dsv4Config.from_hf({"model_type": "deepseek_v4"}) == Dsv4Config()
    few = {"model_type": "deepseek_v4", "num_hidden_layers": 2, "head_dim": 128}
    assert_same_model(Dsv4Config.from_hf(few), in_transformers(few))


@pytest.mark.parametrize(
    "change",
    [
        {"qk_rope_head_dim": None, "partial_rotary_factor": 0.25},
        {"rope_scaling": None},
        {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000}},
        {"rope_scaling": None, "rope_parameters": FLASH["rope_scaling"]},
        {"rope_scaling": FLASH["rope_scaling"] | {"attention_factor": 1.25}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"num_hidden_layers": 2},
        {"compress_ratios": None, "layer_types": [HCA, CSA, SLIDING, HCA, CSA, CSA]},
        {"compress_ratios": None, "compress_rate_csa": 2, "compress_rate_hca": 32},
        {"num_hash_layers": None, "mlp_layer_types": [MOE, HASH_MOE, MOE, HASH_MOE, MOE]},
        {"num_hash_layers": 40},
        {"num_hash_layers": 0},
        {"rope_theta": 5000, "compress_rope_theta": 70000},
        {"torch_dtype": None, "dtype": "float16"},
        {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 2},
    ],
)
def test_older_and_other_spellings(change):
    given = FLASH | {"num_hidden_layers": 5} | change
    given = {key: value for key, value in given.items() if value is not None or "token" in key}
    config = Dsv4Config.from_hf(given)
    assert_same_model(config, in_transformers(given))
    assert str(config.torch_dtype) == f"torch.{given.get('torch_dtype') or given['dtype']}"


def test_nested_rope_alone_counts():
    yarn = {"rope_type": "yarn", "type": "yarn", "rope_theta": 7e4, "attention_factor": 1.0}
    yarn |= {"factor": 8, "original_max_position_embeddings": 128, "beta_fast": 16, "beta_slow": 2}
    nested = {"main": {"rope_theta": 5000.0, "type": "default"}, "compress": yarn}
    # transformers leaves its default bases beside the nested form
    given = SAVED | {"rope_parameters": nested}
    config = Dsv4Config.from_hf(given)
    assert config.rope_parameters["main"] == {"rope_type": "default", "rope_theta": 5000.0}
    del yarn["type"]
    assert config.rope_parameters["compress"] == yarn
    both = {"main": yarn, "compress": yarn}
    twice = Dsv4Config.from_hf(SAVED | {"rope_parameters": both})
    assert Dsv4Config.from_hf(twice.to_hf("official")) == twice
    assert_same_model(twice, in_transformers(twice.to_hf("transformers")))
    assert "rope_scaling" not in twice.to_hf("official")


def test_no_mscale_unless_given():
    given = FLASH | {"rope_scaling": FLASH["rope_scaling"] | {"attention_factor": 1.3}}
    assert Dsv4Config.from_hf(FLASH).rope_parameters["compress"]["attention_factor"] == 1.0
    config = Dsv4Config.from_hf(given)
    assert config.rope_parameters["compress"]["attention_factor"] == 1.3
    assert config.to_hf("official")["rope_scaling"]["attention_factor"] == 1.3


def test_hca_rates_of_any_size_without_the_explicit_style():
    given = {key: v for key, v in SMALL.items() if key not in ("layer_types", "compress_rates")}
    assert Dsv4Config.from_hf(given) == Dsv4Config.from_hf(SMALL)
    assert Dsv4Config.from_hf(given).mtp_compress_ratios == (4,)


def test_what_official_keys_cannot_say_is_added():
    config = Dsv4Config.tiny(compress_rates={CSA: 8, HCA: 4}, mlp_layer_types=[MOE] * 5 + [HASH_MOE])
    written = config.to_hf()
    assert "compress_ratios" not in written
    assert "num_hash_layers" not in written
    assert written["compress_rates"] == {CSA: 8, HCA: 4}
    assert Dsv4Config.from_hf(written) == config
    plain = Dsv4Config.flash().to_hf()
    assert not {"layer_types", "compress_rates", "mlp_layer_types", "rope_parameters"} & set(plain)


def test_a_width_that_truncation_would_lose():
    for head_dim in range(10, 600, 14):
        for width in range(2, head_dim, 18):
            config = Dsv4Config.flash(head_dim=head_dim, qk_rope_head_dim=width, index_head_dim=600)
            factor = config.to_hf("transformers")["partial_rotary_factor"]
            assert int(head_dim * factor) == width
            assert Dsv4Config.from_hf(config.to_hf("transformers")) == config


def test_harmless_keys_and_vision_files_load_as_text():
    config = Dsv4Config.from_hf(VISION_EXP)
    assert config.rms_norm_eps == 1e-20
    assert config.num_nextn_predict_layers == 3
    assert dataclasses.replace(config, rms_norm_eps=1e-6, num_nextn_predict_layers=1) == (Dsv4Config.from_hf(FLASH_0731))


def test_a_dequantised_save_keeps_its_stale_expert_dtype():
    given = SAVED | {"expert_dtype": "fp4"}
    assert Dsv4Config.from_hf(given).expert_dtype == "fp4"
    moved = FLASH | {"quantization_config": FLASH["quantization_config"] | {"expert_dtype": "fp4"}}
    assert Dsv4Config.from_hf(moved) == Dsv4Config.from_hf(FLASH)
    del moved["expert_dtype"]
    assert Dsv4Config.from_hf(moved) == Dsv4Config.from_hf(FLASH)


@pytest.mark.parametrize(
    ("key", "value", "near"),
    [
        ("n_group", 8, None),
        ("hidden_sise", 64, "hidden_size"),
        ("compress_ratio", [0, 4], "compress_ratios"),
        ("per_layer_config", {"0": {"head_dim": 32}}, None),
        ("engram_layers", [1], None),
    ],
)
def test_an_unknown_key_is_named(key, value, near):
    with pytest.raises(ValueError, match=f"does not know: {key} = ") as caught:
        Dsv4Config.from_hf(FLASH | {key: value})
    assert near is None or f"did you mean {near}?" in str(caught.value)
    with pytest.warns(UserWarning, match=f"does not know: {key} = "):
        config = Dsv4Config.from_hf(FLASH | {key: value}, strict=False)
    assert config == Dsv4Config.flash()


@pytest.mark.parametrize("key", ["per_layer_config", "pruned_heads"])
@pytest.mark.parametrize("value", [None, {}])
def test_keys_that_are_harmless_while_empty(key, value):
    assert Dsv4Config.from_hf(FLASH | {key: value}) == Dsv4Config.flash()


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("deepseek_v41", r"DeepSeek-V4\.1 is another architecture"),
        ("deepseek_v3", "model_type: got 'deepseek_v3', expected 'deepseek_v4'"),
        (None, "model_type: got None"),
    ],
)
def test_other_models_are_refused(model_type, said):
    with pytest.raises(ValueError, match=said):
        Dsv4Config.from_hf(FLASH | {"model_type": model_type})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("compress_ratios", [0] * 42),
        ("compress_ratios", [0] * 42 + [-4]),
        ("compress_ratios", [0.0] * 43),
        ("compress_ratios", 4),
        ("compress_ratios", [0] * 41 + [64, 128]),
        ("num_hash_layers", -1),
        ("rope_scaling", "yarn"),
        ("rope_scaling", {"type": "yarn"}),
        ("rope_scaling", {"type": "linear", "factor": 2}),
        ("rope_scaling", {"type": "yarn", "factor": 0}),
        ("rope_scaling", {"type": "yarn", "factor": 2, "mscale": 1.0}),
        ("rope_scaling", {"type": "yarn", "factor": 2, "truncate": False}),
        ("rope_scaling", {"type": "yarn", "rope_type": "default", "factor": 2}),
        ("rope_scaling", {"factor": 2}),
        ("rope_scaling", {"type": "yarn", "factor": 2, "rope_theta": 3.0}),
    ],
)
def test_a_wrong_value_is_refused_by_name(field, value):
    # rope_scaling becomes rope_parameters.compress before it is checked
    named = "(rope_scaling|rope_parameters.compress)" if field == "rope_scaling" else field
    with pytest.raises(ValueError, match=rf"{named}.*(got|contradicts|expected)"):
        Dsv4Config.from_hf(FLASH | {field: value})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layer_types": [CSA, HCA, CSA, SLIDING]}, r"compress_ratios\[0\]"),
        ({"compress_rates": {CSA: 4, HCA: 16}}, r"compress_ratios\[0\]: got 8, expected 16"),
        ({"compress_ratios": [8, 0, 4, 0]}, r"compress_ratios\[1\]"),
        ({"mlp_layer_types": [HASH_MOE, HASH_MOE, MOE, MOE]}, "num_hash_layers"),
        ({"dtype": "float32"}, "torch_dtype = 'bfloat16' but dtype = 'float32'"),
        ({"partial_rotary_factor": 0.5}, "qk_rope_head_dim = 16 but .*partial_rotary_factor"),
        ({"intermediate_size": 5}, "intermediate_size = 5 but moe_intermediate_size = 32"),
        ({"num_local_experts": 5}, "num_local_experts = 5 but n_routed_experts = 7"),
        ({"compress_rate_hca": 5}, "compress_rate_hca = 5 but compress_rates"),
        ({"quantization_config": {"expert_dtype": "fp8"}}, "expert_dtype = 'fp4' but"),
        ({"mtp_compress_ratios": [0]}, "mtp_compress_ratios"),
        (
            {"rope_parameters": {label: {"rope_theta": 1e4} for label in ("main", "compress")}},
            "rope_scaling: got .* expected what rope_parameters says",
        ),
        (
            {
                "rope_scaling": None,
                "rope_parameters": {
                    "main": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
                    "compress": {"rope_theta": 1e4},
                },
            },
            "rope_parameters.main.partial_rotary_factor: got 0.5",
        ),
    ],
)
def test_contradictions_are_refused(change, named):
    Dsv4Config.from_hf(SMALL)
    with pytest.raises(ValueError, match=named):
        Dsv4Config.from_hf(SMALL | change)


def test_aliases_that_agree():
    given = SMALL | {"intermediate_size": 32, "num_local_experts": 7, "dtype": "torch.bfloat16"}
    assert Dsv4Config.from_hf(given) == Dsv4Config.from_hf(SMALL)


def test_the_caller_keeps_his_own_dicts():
    given = copy.deepcopy(SMALL)
    config = Dsv4Config.from_hf(given)
    assert given == SMALL
    config.to_hf("transformers")["rope_parameters"]["main"]["rope_theta"] = 3.0
    config.to_hf()["quantization_config"]["weight_block_size"].append(1)
    assert config == Dsv4Config.from_hf(SMALL)


def test_an_unknown_style_is_refused():
    with pytest.raises(ValueError, match="style: got 'hub', expected 'official' or 'transformers'"):
        Dsv4Config.tiny().to_hf("hub")
