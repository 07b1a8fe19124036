"""The name table: a bijection in each scheme, and no name is taken for another."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.config import Dsv4Config
from dsv4.convert import names
from dsv4.convert.layout import layout
from dsv4.convert.names import GATE, ROWS, SCHEMES, UP, Place, from_place, to_place

# Small ones, and pairs of which one is the beginning of the other.
NUMBERS = st.one_of(st.integers(0, 20), st.sampled_from([1, 10, 100, 101, 11, 110]), st.integers(0, 10**6))
SCHEME = st.sampled_from(SCHEMES)

# official, ours, hybrid, transformers; written out by hand, one of each kind and every pair that
# looks alike.
EXAMPLES = [
    (
        "embed.weight",
        "embed_tokens.weight",
        "model.embed_tokens.weight",
        "model.embed_tokens.weight",
    ),
    ("head.weight", "lm_head.weight", "head.weight", "lm_head.weight"),
    ("norm.weight", "norm.weight", "model.norm.weight", "model.norm.weight"),
    ("hc_head_fn", "hc_head.hc_fn", "model.hc_head.hc_fn", "model.hc_head.hc_fn"),
    (
        "layers.1.hc_attn_scale",
        "layers.1.attn_hc.scale",
        "model.layers.1.hc_attn_scale",
        "model.layers.1.attn_hc.scale",
    ),
    (
        "layers.13.attn.wq_a.scale",
        "layers.13.self_attn.q_a_proj.weight_scale_inv",
        "model.layers.13.attn.wq_a.scale",
        "model.layers.13.self_attn.q_a_proj.weight_scale_inv",
    ),
    (
        "layers.13.attn.kv_norm.weight",
        "layers.13.self_attn.kv_norm.weight",
        "model.layers.13.attn.norm.weight",
        "model.layers.13.self_attn.kv_norm.weight",
    ),
    (
        "layers.13.attn.compressor.norm.weight",
        "layers.13.self_attn.compressor.kv_norm.weight",
        "model.layers.13.attn.compressor.norm.weight",
        "model.layers.13.self_attn.compressor.kv_norm.weight",
    ),
    (
        "layers.13.attn.indexer.compressor.norm.weight",
        "layers.13.self_attn.compressor.indexer.kv_norm.weight",
        "model.layers.13.attn.indexer.compressor.norm.weight",
        "model.layers.13.self_attn.compressor.indexer.kv_norm.weight",
    ),
    (
        "layers.2.attn.wq_b.weight",
        "layers.2.self_attn.q_b_proj.weight",
        "model.layers.2.attn.wq_b.weight",
        "model.layers.2.self_attn.q_b_proj.weight",
    ),
    (
        "layers.2.attn.indexer.wq_b.weight",
        "layers.2.self_attn.compressor.indexer.q_b_proj.weight",
        "model.layers.2.attn.indexer.wq_b.weight",
        "model.layers.2.self_attn.compressor.indexer.q_b_proj.weight",
    ),
    (
        "layers.2.attn.indexer.weights_proj.weight",
        "layers.2.self_attn.compressor.indexer.scorer.weights_proj.weight",
        "model.layers.2.attn.indexer.weights_proj.weight",
        "model.layers.2.self_attn.compressor.indexer.scorer.weights_proj.weight",
    ),
    (
        "layers.2.attn.compressor.wgate.weight",
        "layers.2.self_attn.compressor.gate_proj.weight",
        "model.layers.2.attn.compressor.wgate.weight",
        "model.layers.2.self_attn.compressor.gate_proj.weight",
    ),
    (
        "layers.2.ffn.shared_experts.w1.weight",
        "layers.2.mlp.shared_experts.gate_proj.weight",
        "model.layers.2.ffn.shared_experts.w1.weight",
        "model.layers.2.mlp.shared_experts.gate_proj.weight",
    ),
    (
        "layers.2.ffn.gate.tid2eid",
        "layers.2.mlp.router.tid2eid",
        "model.layers.2.ffn.gate.tid2eid",
        "model.layers.2.mlp.gate.tid2eid",
    ),
    (
        "layers.2.ffn.gate.bias",
        "layers.2.mlp.router.e_score_correction_bias",
        "model.layers.2.ffn.gate.bias",
        "model.layers.2.mlp.gate.e_score_correction_bias",
    ),
]
STACKS = [
    ("w1.weight", "gate_up_proj", GATE),
    ("w3.weight", "gate_up_proj", UP),
    ("w2.weight", "down_proj", None),
    ("w1.scale", "gate_up_proj_scale_inv", GATE),
    ("w3.scale", "gate_up_proj_scale_inv", UP),
    ("w2.scale", "down_proj_scale_inv", None),
]


@pytest.mark.parametrize(("official", "ours", "hybrid", "transformers"), EXAMPLES)
def test_examples(official, ours, hybrid, transformers):
    written = {"official": official, "hybrid": hybrid, "transformers": transformers}
    for scheme, name in written.items():
        assert to_place(scheme, name) == Place(ours)
        assert from_place(scheme, Place(ours)) == name


@pytest.mark.parametrize(("leaf", "ours", "half"), STACKS)
def test_parts_of_stacks(leaf, ours, half):
    place = Place(f"layers.7.mlp.experts.{ours}", 12, half)
    assert to_place("official", f"layers.7.ffn.experts.12.{leaf}") == place
    assert to_place("hybrid", f"model.layers.7.ffn.experts.12.{leaf}") == place
    assert from_place("official", place) == f"layers.7.ffn.experts.12.{leaf}"
    assert from_place("transformers", place) is None
    whole = Place(place.name)
    assert from_place("transformers", whole) == f"model.layers.7.mlp.experts.{ours}"
    assert from_place("official", whole) is None


@settings(deadline=None)
@given(SCHEME, st.sampled_from(ROWS), NUMBERS, NUMBERS)
def test_there_and_back(scheme, row, layer, expert):
    template = row.template(scheme)
    if template is None:
        return
    name = template.replace("{layer}", str(layer)).replace("{expert}", str(expert))
    place = to_place(scheme, name)
    assert place is not None
    assert place.name == row.ours.replace("{layer}", str(layer))
    assert place.expert == (expert if "{expert}" in template else None)
    assert from_place(scheme, place) == name


@settings(deadline=None)
@given(SCHEME, st.lists(st.tuples(st.sampled_from(ROWS), NUMBERS, NUMBERS), min_size=2, max_size=30))
def test_different_names_go_to_different_places(scheme, picks):
    written = {
        template.replace("{layer}", str(layer)).replace("{expert}", str(expert))
        for row, layer, expert in picks
        if (template := row.template(scheme)) is not None
    }
    assert len({to_place(scheme, name) for name in written}) == len(written)


@settings(deadline=None)
@given(SCHEME, SCHEME, st.sampled_from(ROWS), NUMBERS, NUMBERS)
def test_from_one_scheme_to_another(source, target, row, layer, expert):
    template = row.template(source)
    if template is None:
        return
    name = template.replace("{layer}", str(layer)).replace("{expert}", str(expert))
    place = to_place(source, name)
    other = from_place(target, place)
    if other is not None:
        assert to_place(target, other) == place
        assert from_place(source, to_place(target, other)) == name


@settings(deadline=None)
@given(SCHEME, st.sampled_from(ROWS), NUMBERS, st.integers(0, 40), st.sampled_from("x.0_"))
def test_a_damaged_name_is_no_name_or_another(scheme, row, layer, at, inserted):
    template = row.template(scheme)
    if template is None:
        return
    name = template.replace("{layer}", str(layer)).replace("{expert}", "3")
    damaged = name[:at] + inserted + name[at:]
    place = to_place(scheme, damaged)
    if place is not None:
        assert from_place(scheme, place) == damaged
        assert place != to_place(scheme, name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "layers",
        "layers.01.attn.wq_a.weight",
        "layers.-1.attn.wq_a.weight",
        "layers.1.attn.wq_a",
        "layers.#.attn.wq_a.weight",
        "layers.{layer}.attn.wq_a.weight",
        "layers.1.attn.wq_a.weight.scale",
        "xlayers.1.attn.wq_a.weight",
        "model.layers.1.attn.wq_a.weight",
        "layers.1.attn.norm.weight",
        "layers.1.ffn.experts.w1.weight",
        "layers.1.ffn.experts.0.w4.weight",
        "mtp.0.attn.wq_a.weight",
        "hc.head.fn",
        "embed_weight",
        "1.2.3",
    ],
)
def test_names_that_are_none(name):
    assert to_place("official", name) is None


def test_every_tensor_of_a_model_has_a_name_in_every_scheme():
    for name, spec in layout(Dsv4Config.tiny()).items():
        for scheme in SCHEMES:
            place = Place(name)
            if spec.is_experts and scheme != "transformers":
                place = dataclasses.replace(place, expert=0, half=GATE if "gate_up" in name else None)
            assert from_place(scheme, place) is not None


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("mtp.0.norm.weight", "mtp"),
        ("mtp.2.markov_head.markov_w1.weight", "mtp"),
        ("model.mtp.0.norm.weight", "mtp"),
        ("vision.blocks.31.attn.wqkv.bias", "vision"),
        ("aligner.w2.weight", "vision"),
        ("image_newline", "image tokens"),
        ("layers.42.ffn.gate.bias_vl", "router bias for image"),
    ],
)
def test_known_extras(name, label):
    assert names.extra_label(name).startswith(label)


@pytest.mark.parametrize("name", ["mtp", "mtpx.0.norm.weight", "image_startx", "visions.a", "layers.1.ffn.gate.bias"])
def test_what_is_no_known_extra(name):
    assert names.extra_label(name) is None


def test_scales_and_their_weights():
    for row in ROWS:
        weight = names.weight_of_scale(row.ours)
        if weight is not None:
            assert names.scale_of(weight) == row.ours
            assert names.can_be_scaled(weight.replace("{layer}", "7"))
    assert not names.can_be_scaled("norm.weight")
    assert not names.can_be_scaled("layers.0.mlp.router.weight")
    assert names.weight_of_scale("layers.0.attn_hc.scale") is None
    assert names.block_of("layers.12.attn_hc.scale") == 12
    assert names.block_of("norm.weight") is None
