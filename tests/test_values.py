"""The table of standard values: complete, consistent, with sizes that follow the page's rules."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.config import CSA, HASH_MOE, HCA, LAYER_TYPES, MLP_LAYER_TYPES, MOE, SLIDING, Dsv4Config
from dsv4.values import (
    RESIDUAL_SET,
    VALUES,
    absent,
    absent_reason,
    all_names,
    nbytes,
    sizes,
)

# How many values the page lists in each module.
PER_MODULE = {
    "": 9,
    "layers.{i}": 20,
    "layers.{i}.self_attn": 16,
    "layers.{i}.self_attn.compressor": 2,
    "layers.{i}.self_attn.compressor.indexer": 6,
    "layers.{i}.mlp": 17,
}
READ_ONLY = {
    *("input_ids", "attention_mask", "next_token_probs", "attention_sinkhorn", "mlp_sinkhorn"),
    *("attention_key_positions", "attention_sink_probability"),
}
NATIVE = {
    *("attention_norm_output", "layer_mid", "mlp_norm_output", "mlp_input", "attention_premix"),
}
INTEGERS = {
    *("input_ids", "attention_mask", "attention_key_positions", "indexer_selection"),
    "expert_indices",
}
# Every value, in words that do not depend on the table: one block of each kind, in forward order.
HASH_SLIDING_BLOCK = [
    *("layer_input", "attention_hc_logits", "attention_pre", "attention_post"),
    *("attention_comb_start", "attention_sinkhorn", "attention_comb", "attention_collapsed"),
    *("attention_norm_output", "self_attn.attention_query_latent"),
    *("self_attn.attention_queries_unrotated", "self_attn.attention_queries"),
    *("self_attn.attention_keys_unrotated", "self_attn.attention_keys"),
    *("self_attn.attention_values", "self_attn.attention_key_positions"),
    *("self_attn.attention_scores", "self_attn.attention_sink_logits"),
    *("self_attn.attention_probabilities", "self_attn.attention_sink_probability"),
    *("self_attn.attention_head_outputs", "self_attn.attention_premix"),
    *("self_attn.attention_low_rank_output", "self_attn.attention_head_results"),
    *("self_attn.attention_output", "layer_mid", "mlp_hc_logits", "mlp_pre", "mlp_post"),
    *("mlp_comb_start", "mlp_sinkhorn", "mlp_comb", "mlp_collapsed", "mlp_norm_output"),
    *("mlp_input", "mlp.router_logits", "mlp.router_scores", "mlp.expert_indices"),
    *("mlp.expert_weights", "mlp.expert_gate", "mlp.expert_up", "mlp.expert_activation"),
    *("mlp.expert_neurons", "mlp.expert_outputs", "mlp.routed_output", "mlp.mlp_gate"),
    *("mlp.mlp_up", "mlp.mlp_activation", "mlp.mlp_neurons", "mlp.shared_expert_output"),
    *("mlp.mlp_output", "layer_output"),
]


def test_the_page_is_complete():
    found = dict.fromkeys(PER_MODULE, 0)
    for name, value in VALUES.items():
        assert value.name == name
        found[value.module] += 1
    assert found == PER_MODULE


def test_every_column_holds_what_the_page_allows():
    assert {value.kind for value in VALUES.values()} == {"std", "native", "new"}
    assert {value.read for value in VALUES.values()} == {"free", "mat"}
    assert {name for name, value in VALUES.items() if value.edit == "-"} == READ_ONLY
    assert {name for name, value in VALUES.items() if value.kind == "native"} == NATIVE
    assert {name for name, value in VALUES.items() if value.dtype == "i"} == INTEGERS
    for value in VALUES.values():
        assert value.edit in ("free", "mat", "-")
        # what is not there to be read cannot be there to be replaced
        assert (value.read, value.edit) != ("mat", "free")
        assert value.meaning
        assert value.meaning.isascii()
        assert not value.meaning.endswith(".")


def test_the_seven_around_attention_and_mixture_are_twins():
    for tail in ("hc_logits", "pre", "post", "comb_start", "sinkhorn", "comb", "collapsed"):
        first, second = VALUES[f"attention_{tail}"], VALUES[f"mlp_{tail}"]
        same = {"name": first.name, "meaning": first.meaning}
        assert dataclasses.replace(second, **same) == first


def test_full_names():
    assert VALUES["logits"].full_name() == "logits"
    assert VALUES["layer_mid"].full_name(3) == "layers.3.layer_mid"
    assert VALUES["expert_weights"].full_name(10) == "layers.10.mlp.expert_weights"
    indexer = "layers.2.self_attn.compressor.indexer.indexer_scores"
    assert VALUES["indexer_scores"].full_name(2) == indexer
    with pytest.raises(ValueError, match="a value of each block: got layer=None"):
        VALUES["layer_mid"].full_name()
    with pytest.raises(ValueError, match="of the model: got layer=0, expected None"):
        VALUES["logits"].full_name(0)


def test_names_of_a_model_in_forward_order():
    config = Dsv4Config.tiny(layer_types=[SLIDING, CSA, HCA], mlp_layer_types=[HASH_MOE, MOE, MOE])
    names = all_names(config)
    assert names[:3] == ["input_ids", "attention_mask", "token_embeddings"]
    after = ["readout_weights", "readout", "final_norm_output", "lm_head_output", "logits"]
    assert names[-6:] == [*after, "next_token_probs"]
    blocks = [[name.removeprefix(f"layers.{i}.") for name in names if name.startswith(f"layers.{i}.")] for i in range(3)]
    assert blocks[0] == HASH_SLIDING_BLOCK
    more = {
        "mlp.router_selection_scores",
        *(f"self_attn.compressor.{name}" for name in ("compressor_gates", "compressed_entries")),
    }
    indexer = {name for name in blocks[1] if ".indexer." in name}
    assert len(indexer) == 6
    assert set(blocks[1]) == {*HASH_SLIDING_BLOCK, *more, *indexer}
    assert blocks[2] == [name for name in blocks[1] if name not in indexer]
    order = [
        *("attention_keys_unrotated", "compressor.compressor_gates"),
        *("compressor.compressed_entries", "compressor.indexer.indexer_queries"),
        *("compressor.indexer.indexer_selection", "attention_keys"),
    ]
    places = [blocks[1].index(f"self_attn.{name}") for name in order]
    assert places == sorted(places)
    assert len(names) == len(set(names))


@pytest.mark.parametrize("layer_type", LAYER_TYPES)
@pytest.mark.parametrize("mlp_type", MLP_LAYER_TYPES)
def test_absent_values_say_why_and_where(layer_type, mlp_type):
    lacking = {name for name in VALUES if absent(name, layer_type, mlp_type)}
    expected = set()
    if layer_type == SLIDING:
        expected |= {"compressor_gates", "compressed_entries"}
    if layer_type != CSA:
        expected |= {name for name in VALUES if name.startswith("indexer_")}
    if mlp_type == HASH_MOE:
        expected |= {"router_selection_scores"}
    assert lacking == expected
    for name in lacking:
        reason = absent(name, layer_type, mlp_type)
        assert "the value exists on" in reason
        assert layer_type in reason or mlp_type in reason


def test_absent_reason_of_full_names():
    config = Dsv4Config.tiny()
    names = all_names(config)
    for layer in range(config.num_layers):
        for value in VALUES.values():
            if value.module:
                full = value.full_name(layer)
                assert (absent_reason(config, full) is None) == (full in names)
    for other in ("", "logits", "layers.0", "layers.9.mlp.router_selection_scores", "nothing"):
        assert absent_reason(config, other) is None
    # the right leaf under the wrong path is no standard value
    assert absent_reason(config, "layers.0.router_selection_scores") is None
    assert absent_reason(config, "layers.-6.mlp.router_selection_scores") is None


def test_residual_set():
    assert set(RESIDUAL_SET) <= set(VALUES)
    config = Dsv4Config.tiny(num_hidden_layers=1)
    leaves = [name.rpartition(".")[2] for name in all_names(config)]
    assert [leaf for leaf in leaves if leaf in RESIDUAL_SET] == list(RESIDUAL_SET)
    assert not any(VALUES[name].read == "mat" for name in RESIDUAL_SET)


@given(rate=st.integers(1, 9), seq=st.integers(0, 40), topk=st.integers(1, 12), n=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_sizes_follow_the_rules_of_the_key_axis(rate, seq, topk, n):
    config = Dsv4Config.tiny(
        layer_types=[SLIDING, CSA, HCA],
        compress_rates={CSA: rate, HCA: rate + 1},
        index_topk=topk,
        hc_mult=n,
    )
    sliding, csa, hca = (sizes(config, layer, 2, seq) for layer in range(3))
    assert sliding["k"] == seq
    assert not {"e", "e_new", "window", "min(index_topk,e)"} & set(sliding)
    assert (csa["e"], csa["e_new"], csa["k"]) == (seq // rate, seq // rate, seq + seq // rate)
    assert (hca["e"], hca["k"]) == (seq // (rate + 1), seq + seq // (rate + 1))
    assert (csa["window"], hca["window"]) == (2 * rate, rate + 1)
    assert csa["min(index_topk,e)"] == min(topk, seq // rate)
    assert csa["(2+n)*n"] == n * n + 2 * n
    assert "k" not in sizes(config, None, 2, seq)


def test_every_axis_has_a_size_wherever_its_value_exists():
    config = Dsv4Config.tiny()
    for value in VALUES.values():
        layers = range(config.num_layers) if value.module else [None]
        for layer in layers:
            if layer is not None and absent_reason(config, value.full_name(layer)):
                continue
            found = sizes(config, layer, 3, 17)
            assert all(axis in found for axis in value.axes.split())
            assert value.axes.split()[0] == "b"


def test_bytes():
    config = Dsv4Config.tiny()
    found = sizes(config, 2, 3, 17)
    stream = 3 * 17 * config.hc_mult * config.hidden_size
    assert nbytes(VALUES["layer_output"], found, torch.bfloat16) == 2 * stream
    assert nbytes(VALUES["layer_output"], found, torch.float64) == 8 * stream
    pattern = 3 * config.num_attention_heads * 17 * (17 + 17 // 4)
    assert nbytes(VALUES["attention_scores"], found, torch.bfloat16) == 4 * pattern
    assert nbytes(VALUES["expert_indices"], found, torch.bfloat16) == 8 * 3 * 17 * 2
    assert nbytes(VALUES["attention_keys"], found, torch.float32) == 4 * 3 * 21 * config.head_dim
    assert math.prod(found[axis] for axis in ("N", "D")) == found["N*D"]
