"""The verbs: names, runs with hooks, which part of the model runs, what there is to see, printed forms."""

import inspect
import re
from pathlib import Path

import pytest
import torch

import dsv4
from dsv4 import Dsv4, Dsv4Config, budget
from dsv4.config import CSA, HCA, SLIDING
from dsv4.hooks import Probed
from dsv4.testing_probes import (
    calls_counted,
    every_kind,
    expected_shape,
    padded_batch,
    spelled,
    watched_model,
)
from dsv4.values import RESIDUAL_SET, VALUES, all_names

FROZEN = Path(__file__).parent / "frozen"
MODEL = watched_model()
IDS, MASK = padded_batch(MODEL.vocab_size)
ABSENT = "layers.0.mlp.router_selection_scores"


def nothing(value, hook):
    return None


def frozen(name):
    return (FROZEN / name).read_text().splitlines()


# Contracts.


def test_hook_names_are_frozen():
    """Every block kind, in forward order."""
    assert list(MODEL.hook_dict) == frozen("hook_names.txt")


def test_state_dict_names_are_frozen():
    assert list(MODEL.state_dict()) == frozen("state_dict_names.txt")


def test_public_names_are_frozen():
    own = [n for n in dir(Dsv4) if not n.startswith("_") and n not in dir(Probed)]
    assert [*sorted(dsv4.__all__), *(f"Dsv4.{n}" for n in sorted(own))] == frozen("public_names.txt")


# Names.


def test_hook_dict_is_the_tree_in_forward_order():
    points = MODEL.hook_dict
    for name, point in points.items():
        assert MODEL.get_submodule(name) is point
        assert point.name == name
    with torch.no_grad():
        MODEL.run_with_cache(IDS, [])
        with calls_counted(MODEL) as called:
            MODEL.run_with_cache(IDS, "**")
    assert called == list(points)
    with pytest.raises(TypeError):
        points["new"] = points["logits"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("layers.1.layer_output", ["layers.1.layer_output"]),
        ("layers.*.layer_output", [f"layers.{i}.layer_output" for i in range(6)]),
        (["logits", "layers.5.layer_mid"], ["layers.5.layer_mid", "logits"]),
        (("logits",), ["logits"]),
        (
            lambda name: name.endswith("mlp.mlp_output"),
            [f"layers.{i}.mlp.mlp_output" for i in range(6)],
        ),
        ([lambda name: name == "readout", "logits"], ["readout", "logits"]),
        ([], []),
        ("**", list(MODEL.hook_dict)),
    ],
)
def test_forms_of_names(names, expected):
    with torch.no_grad():
        assert list(MODEL.run_with_cache(IDS, names)[1]) == expected
        assert list(MODEL.run_with_cache(IDS, names_filter=names)[1]) == expected
        seen = []
        MODEL.run_with_hooks(IDS, [(names, lambda v, hook: seen.append(hook.name))])
        assert seen == expected
    assert list(MODEL.estimate(names, 1, 1)) == [*expected, "total"]


def test_layer_1_is_not_layer_10():
    model = Dsv4.from_config(Dsv4Config.tiny(num_hidden_layers=12))
    with torch.no_grad():
        _, cache = model.run_with_cache(IDS[:, :3], "layers.1.**")
    assert {name.split(".")[1] for name in cache} == {"1"}


@pytest.mark.parametrize("verb", ["hooks", "run_with_hooks", "run_with_cache", "add_hook", "estimate"])
def test_wrong_names_say_what_to_do(verb):
    def use(names):
        if verb == "hooks":
            with MODEL.hooks([(names, nothing)]):
                pass
        elif verb == "run_with_hooks":
            MODEL.run_with_hooks(IDS, [("logits", nothing), (names, nothing)])
        elif verb == "run_with_cache":
            MODEL.run_with_cache(IDS, names)
        elif verb == "add_hook":
            MODEL.add_hook(names, nothing)
        else:
            MODEL.estimate(names, 1, 1)

    for names, said in (
        ("layers.3.mlp", r"write 'layers.3.mlp.\*\*'"),
        ("layers.3.mlp.expert_weigths", "layers.3.mlp.expert_weights"),
        (ABSENT, "a hash_moe block chooses experts by token id"),
        (
            ["logits", "layers.0.self_attn.compressor.compressed_entries"],
            "keeps no compressed entries",
        ),
        ("layers.9.layer_output", "no such block"),
    ):
        with pytest.raises(KeyError, match=said):
            use(names)
    with pytest.raises(TypeError):
        use(3)
    assert MODEL.list_hooks() == []


def test_unknown_keywords_raise():
    for call in (
        lambda: MODEL(IDS, attention_masks=MASK),
        lambda: MODEL.run_with_hooks(IDS, [], return_type="logits"),
        lambda: MODEL.run_with_cache(IDS, return_type="logits"),
        lambda: MODEL.run_with_cache(IDS, remove_batch_dim=True),
        lambda: MODEL.logit_lens(IDS, readouts="head"),
        lambda: MODEL.loss(IDS, labels=IDS),
        lambda: MODEL.estimate("logits", batch_size=3),
        lambda: MODEL.add_hook("logits", nothing, direction="fwd"),
        lambda: MODEL.hooks(backward=[]).__enter__(),
        lambda: MODEL.steer(torch.zeros(32), layers=1, strength=2).__enter__(),
        lambda: MODEL.support(layers=1),
    ):
        with pytest.raises(TypeError):
            call()
    assert MODEL.list_hooks() == []


def test_the_three_aliases_and_no_second_spelling_beside_the_first():
    zero = [("layers.2.mlp.mlp_output", torch.zeros_like)]
    with torch.no_grad():
        expected = MODEL.run_with_hooks(IDS, zero)
        assert torch.equal(MODEL.run_with_hooks(IDS, fwd_hooks=zero), expected)
        with MODEL.hooks(fwd_hooks=zero):
            assert torch.equal(MODEL(IDS), expected)
        vector = torch.randn(32)
        with MODEL.steer(vector, layers=1, factor=2.0):
            steered = MODEL(IDS)
        with MODEL.steer(vector, layers=1, scale=2.0):
            assert torch.equal(MODEL(IDS), steered)
    for both in (
        lambda: MODEL.run_with_hooks(IDS, [], fwd_hooks=zero),
        lambda: MODEL.hooks(zero, fwd_hooks=zero).__enter__(),
        lambda: MODEL.run_with_cache(IDS, [], names_filter="logits"),
        lambda: MODEL.steer(vector, layers=1, scale=1.0, factor=1.0).__enter__(),
    ):
        with pytest.raises(TypeError, match="another spelling"):
            both()


def test_a_pattern_and_a_name_at_one_point():
    order = []
    with MODEL.hooks(
        [
            ("layers.*.layer_mid", lambda v, hook: order.append("pattern")),
            ("layers.2.layer_mid", lambda v, hook: order.append("name")),
        ]
    ):
        MODEL(IDS)
    assert order == ["pattern"] * 3 + ["name"] + ["pattern"] * 3


def test_one_pair_need_not_be_in_a_list():
    with torch.no_grad():
        expected = MODEL.run_with_hooks(IDS, [("readout", torch.zeros_like)])
        assert torch.equal(MODEL.run_with_hooks(IDS, ("readout", torch.zeros_like)), expected)


# The residual set.


def test_without_names_it_is_the_residual_set():
    with torch.no_grad():
        _, cache = MODEL.run_with_cache(IDS)
    per_block = [
        *("attention_pre", "attention_post", "attention_comb", "self_attn.attention_output"),
        *(
            "mlp_pre",
            "mlp_post",
            "mlp_comb",
            "mlp.expert_indices",
            "mlp.expert_weights",
            "mlp.mlp_output",
        ),
    ]
    blocks = [f"layers.{i}.{leaf}" for i in range(6) for leaf in per_block]
    assert list(cache) == ["token_embeddings", *blocks, "readout_weights", "final_norm_output"]
    assert {name.rsplit(".", 1)[-1] for name in cache} == set(RESIDUAL_SET)
    assert list(MODEL.estimate(batch=2, seq=19)) == [*cache, "total"]


# Which part of the model runs.


def test_stop_and_start_are_the_two_halves():
    with torch.no_grad():
        plain, cache = MODEL.run_with_cache(IDS, "layers.*.layer_input", attention_mask=MASK)
        for layer in range(7):
            streams = MODEL(IDS, attention_mask=MASK, stop_at_layer=layer)
            assert streams.shape == (2, 19, 4, 32)
            if layer < 6:
                assert torch.equal(streams, cache["layer_input", layer])
            rest = MODEL(streams, start_at_layer=layer, input_ids=IDS, attention_mask=MASK)
            torch.testing.assert_close(rest[MASK.bool()], plain[MASK.bool()], rtol=1e-5, atol=1e-5)
        middle = MODEL(MODEL(IDS, stop_at_layer=2), start_at_layer=2, stop_at_layer=4, input_ids=IDS)
        assert torch.equal(middle, MODEL(IDS, stop_at_layer=4))
        # No hash block follows layer 3: no ids are needed.
        streams = MODEL(IDS, stop_at_layer=3)
        assert torch.equal(MODEL(streams, start_at_layer=3), MODEL(IDS))
        assert torch.equal(
            MODEL(MODEL(IDS, stop_at_layer=1), start_at_layer=1, stop_at_layer=1),
            MODEL(IDS, stop_at_layer=1),
        )


def test_stop_with_hooks_and_cache():
    with torch.no_grad():
        streams, cache = MODEL.run_with_cache(IDS, stop_at_layer=3)
        assert torch.equal(streams, MODEL(IDS, stop_at_layer=3))
        assert {name.split(".")[1] for name in cache if name.startswith("layers.")} == {
            "0",
            "1",
            "2",
        }
        assert "readout_weights" not in cache
        _, cache = MODEL.run_with_cache(IDS, "layers.*.layer_output", stop_at_layer=3)
        assert list(cache) == [f"layers.{i}.layer_output" for i in range(3)]
        edited = MODEL.run_with_hooks(IDS, [("layers.1.layer_output", torch.zeros_like)], stop_at_layer=2)
        assert torch.equal(edited, torch.zeros_like(edited))
        _, cache = MODEL.run_with_cache(MODEL(IDS, stop_at_layer=4), "layers.*.layer_input", start_at_layer=4)
        assert list(cache) == ["layers.4.layer_input", "layers.5.layer_input"]


@pytest.mark.parametrize(
    ("names", "keywords", "said"),
    [
        (
            "layers.4.layer_output",
            {"stop_at_layer": 3},
            "does not reach layers.4.layer_output: stop_at_layer=3",
        ),
        ("logits", {"stop_at_layer": 3}, "logits: stop_at_layer=3"),
        (
            ["layers.0.layer_output", "readout*"],
            {"stop_at_layer": 3},
            "readout_weights and 1 more: stop_at_layer=3",
        ),
        (lambda name: "layers.5" in name, {"stop_at_layer": 3}, "stop_at_layer=3"),
        (
            "layers.0.**",
            {"start_at_layer": 3},
            "layers.0.layer_input and .* more: start_at_layer=3",
        ),
        ("token_embeddings", {"start_at_layer": 0}, "token_embeddings: start_at_layer=0"),
        ("input_ids", {"start_at_layer": 3}, "input_ids: the call was given no input_ids"),
    ],
)
def test_values_that_a_run_does_not_reach(names, keywords, said):
    given = torch.zeros(2, 19, 4, 32) if "start_at_layer" in keywords else IDS
    if keywords.get("start_at_layer") == 0:
        keywords = {**keywords, "input_ids": IDS}
    with pytest.raises(KeyError, match=said):
        MODEL.run_with_cache(given, names, **keywords)
    with (
        MODEL.skip_layers([2]),
        pytest.raises(KeyError, match=r"layers.2.layer_mid: skip_layers\(\[2\]\)"),
    ):
        MODEL.run_with_cache(IDS, ["layers.1.layer_mid", "layers.2.layer_mid"])


@pytest.mark.parametrize("layer", [-1, 7, True, 1.0, "3", [1]])
def test_stop_and_start_out_of_range(layer):
    for call in (MODEL, MODEL.run_with_cache, MODEL.run_with_hooks):
        with pytest.raises(ValueError, match="stop_at_layer="):
            call(IDS, stop_at_layer=layer)
    with pytest.raises(ValueError, match="start_at_layer="):
        MODEL(torch.zeros(2, 19, 4, 32), start_at_layer=layer, input_ids=IDS)


def test_start_beyond_stop_and_with_a_cache():
    streams = MODEL(IDS, stop_at_layer=3)
    with pytest.raises(ValueError, match="stop_at_layer=2: expected 3 <= layer <= 6"):
        MODEL(streams, start_at_layer=3, stop_at_layer=2)
    kv = MODEL.new_kv_cache(2)
    for call in (
        lambda: MODEL(IDS, kv_cache=kv, stop_at_layer=3),
        lambda: MODEL(streams, kv_cache=kv, start_at_layer=3),
        lambda: MODEL(MODEL(IDS, stop_at_layer=0), kv_cache=kv, start_at_layer=0, input_ids=IDS),
    ):
        with pytest.raises(ValueError, match="refused with a kv_cache"):
            call()
    with MODEL.skip_layers([0]), pytest.raises(ValueError, match="refused with a kv_cache"):
        MODEL(IDS, kv_cache=kv)
    assert kv.length.tolist() == [0, 0]


def test_start_needs_streams():
    for wrong in (IDS, "text", torch.zeros(2, 19, 32), torch.zeros(2, 19, 3, 32), None):
        with pytest.raises((TypeError, ValueError), match="streams entering layer 3"):
            MODEL(wrong, start_at_layer=3)
    with pytest.raises(ValueError, match=r"layers \[2\] route by token id"):
        MODEL(torch.zeros(2, 19, 4, 32), start_at_layer=2)
    # Hash blocks that do not run ask for nothing.
    with MODEL.skip_layers([2]):
        MODEL(torch.zeros(2, 19, 4, 32), start_at_layer=2)
    MODEL(torch.zeros(2, 19, 4, 32), start_at_layer=2, stop_at_layer=2)


# What there is.


def test_support_of_the_whole_model():
    table = MODEL.support()
    assert len(table) == len(VALUES)
    for row in table:
        value = VALUES[row.name.rsplit(".", 1)[-1]]
        assert (row.layout, row.axes, row.dtype, row.read, row.edit) == (
            value.layout,
            value.axes,
            value.dtype,
            value.read,
            value.edit,
        )
        assert row.available
    assert table["layers.*.mlp.router_selection_scores"].reason == "not on layers 0, 1, 2"
    assert table["layers.*.self_attn.compressor.compressed_entries"].reason == "not on layers 0, 3"
    assert table["logits"].reason is None
    assert table["layers.3.mlp.expert_weights"].available
    assert table[ABSENT].reason.startswith("a hash_moe block")
    assert not table[ABSENT].available
    assert table["expert_weights"].name == "layers.*.mlp.expert_weights"
    assert ABSENT in table
    assert "layers.9.layer_output" not in table
    for wrong in ("layers.9.layer_output", "layers.0.expert_weights", "nothing"):
        with pytest.raises(KeyError, match="no row"):
            table[wrong]


@pytest.mark.parametrize("layer", range(6))
def test_support_of_a_layer_is_what_the_layer_has(layer):
    table = MODEL.support(layer)
    here = {n for n, p in MODEL.hook_dict.items() if p.layer in (None, layer)}
    assert {row.name for row in table if row.available} == here
    assert all(row.reason for row in table if not row.available)
    assert table["expert_weights"].name == f"layers.{layer}.mlp.expert_weights"


def test_support_prints():
    text = str(MODEL.support())
    lines = text.splitlines()
    assert lines[1].split() == [
        "name",
        "layout",
        "axes",
        "dtype",
        "read",
        "edit",
        "available",
        "reason",
    ]
    assert len(lines) == len(VALUES) + 2
    assert re.search(
        r"layers\.\*\.self_attn\.attention_scores +Pattern +b N s k +f +mat +mat +yes$",
        text,
        re.MULTILINE,
    )
    assert text.isascii()
    for wrong in (6, -1, True, "1"):
        with pytest.raises(ValueError, match="expected 0 <= layer < 6"):
            MODEL.support(wrong)


def test_a_value_that_no_block_has():
    config = Dsv4Config.tiny(layer_types=[SLIDING, HCA], mlp_layer_types=["moe", "moe"])
    row = Dsv4.from_config(config).support()["indexer_selection"]
    assert not row.available
    assert "a sliding_attention block has no indexer" in row.reason
    assert "a heavily_compressed_attention block has no indexer" in row.reason


def test_print_shows_every_value_with_layout_and_meaning():
    text = repr(MODEL)
    for name, point in MODEL.hook_dict.items():
        value, leaf = point.value, name.rsplit(".", 1)[-1]
        assert f"({leaf}): HookPoint({value.layout} [{value.axes}]" in text
        assert value.meaning in text
    assert "read-only" in text
    # Equal blocks in a row are shown once.
    config = every_kind(layer_types=[SLIDING] * 5 + [CSA], mlp_layer_types=["hash_moe"] * 2 + ["moe"] * 4)
    text = repr(Dsv4.from_config(config))
    assert "(0-1): 2 x Block(" in text
    assert "(2-4): 3 x Block(" in text
    assert text.count("(layer_output)") == 3


def test_sizes_and_attributes():
    config = MODEL.config
    assert (MODEL.num_layers, MODEL.hidden_size, MODEL.num_heads, MODEL.num_kv_heads) == (
        6,
        32,
        4,
        1,
    )
    assert (MODEL.head_dim, MODEL.qk_head_dim, MODEL.vocab_size, MODEL.intermediate_size) == (
        16,
        16,
        64,
        16,
    )
    assert (MODEL.num_experts, MODEL.top_k, MODEL.streams) == (8, 2, 4)
    assert MODEL.layer_types == config.layer_types
    assert (MODEL.device, MODEL.dtype) == (torch.device("cpu"), torch.float32)
    MODEL(IDS)
    assert MODEL.input_size == (2, 19)
    MODEL(IDS[0, :5])
    assert MODEL.input_size == (1, 5)
    assert [layer.mlp.scoring for layer in MODEL.layers] == ["hash"] * 3 + ["sqrtsoftplus"] * 3
    assert [layer.mlp.SCORING for layer in MODEL.layers] == ["hash"] * 3 + ["sqrtsoftplus"] * 3
    assert MODEL.layers[0].mlp.gate is MODEL.layers[0].mlp.router
    assert not MODEL.training
    assert all(p.requires_grad for p in MODEL.parameters())


# What it costs.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "seq"), [(1, 1), (2, 3), (1, 9), (3, 19)])
def test_the_estimate_is_what_is_captured(dtype, rows, seq):
    model = watched_model(dtype)
    ids = torch.randint(0, model.vocab_size, (rows, seq))
    for pos in (None, -1, [0, -1], slice(0, 1)):
        with torch.no_grad():
            _, cache = model.run_with_cache(ids, "**", pos=pos)
        estimate = model.estimate("**", batch=rows, seq=seq, pos=pos)
        real = {name: value.untyped_storage().nbytes() for name, value in cache.items()}
        assert estimate == {**real, "total": sum(real.values())}


@pytest.mark.parametrize(("past", "new"), [(1, 1), (5, 3), (11, 1), (13, 6), (30, 9)])
def test_the_estimate_behind_a_kv_cache(past, new):
    ids = torch.randint(0, 64, (2, past + new))
    kv = MODEL.new_kv_cache(2)
    with torch.no_grad():
        MODEL(ids[:, :past], kv_cache=kv)
        _, cache = MODEL.run_with_cache(ids[:, past:], "**", kv_cache=kv)
    estimate = MODEL.estimate("**", batch=2, seq=new, past=past)
    assert {n: v.numel() * v.element_size() for n, v in cache.items()} == {n: b for n, b in estimate.items() if n != "total"}
    window, entries = min(past, 7) + new, (past + new) // 4
    assert cache["attention_probabilities", 1].shape == (2, 4, new, window + entries)
    assert cache["compressed_entries", 1].shape[1] == entries - past // 4


def test_shapes_of_every_value():
    for rows, seq in ((1, 1), (3, 11)):
        ids = torch.randint(0, MODEL.vocab_size, (rows, seq))
        with torch.no_grad():
            _, cache = MODEL.run_with_cache(ids, "**")
        for name, value in cache.items():
            assert value.shape == expected_shape(MODEL, name, rows, seq), name


def test_too_much_is_refused_before_anything_runs():
    names = "layers.*.self_attn.attention_probabilities"
    runs = MODEL.stage.runs
    with pytest.raises(ValueError, match="max_bytes is 1000 B") as caught:
        MODEL.run_with_cache(IDS, names, max_bytes=1000)
    said = str(caught.value)
    estimate = MODEL.estimate(names, 2, 19)
    assert f"({estimate['total']} bytes)" in said
    assert all(name in said for name in estimate if name != "total")
    with pytest.raises(ValueError, match="would take") as caught:
        MODEL.run_with_cache(IDS, "**", max_bytes=10_000)
    # Each value is there, by its name or among its like.
    listed = str(caught.value)
    for name in MODEL.hook_dict:
        assert name in listed or re.sub(r"^layers\.\d+", "layers.*", name) in listed
    assert MODEL.stage.runs == runs
    assert spelled(MODEL) == []
    _, cache = MODEL.run_with_cache(IDS, names, max_bytes=estimate["total"])
    assert len(cache) == 6
    MODEL.run_with_cache(IDS, names, max_bytes=None)
    MODEL.run_with_cache(IDS, names, pos=-1, max_bytes=estimate["total"] // 19)
    with pytest.raises(ValueError, match="would take"):
        MODEL.run_with_cache(IDS, names, pos=-1, max_bytes=estimate["total"] // 19 - 1)
    # Streamed values are not held.
    with pytest.raises(ValueError, match="would take"):
        MODEL.run_with_cache(IDS, "logits", max_bytes=1, logits_to_keep=2)
    MODEL.run_with_cache(IDS, "logits", max_bytes=2 * 2 * 64 * 4, logits_to_keep=2)


def test_the_real_model_would_take_what_the_table_says():
    """8k tokens of V4-Flash: from the config alone, nothing is built."""
    from dsv4 import budget, values

    config = Dsv4Config.flash()
    names = [n for n in values.all_names(config) if n.endswith("attention_probabilities")]
    total = sum(budget.sizes(config, names, torch.bfloat16, 1, 8192).values())
    # Float32.
    assert 770 < total / 2**30 < 780
    streams = [n for n in values.all_names(config) if n.endswith("layer_output")]
    assert round(sum(budget.sizes(config, streams, torch.bfloat16, 1, 8192).values()) / 2**30, 1) == 10.8


def test_signatures_are_the_documented_ones():
    def parameters(method):
        return list(inspect.signature(getattr(Dsv4, method)).parameters)[1:]

    assert parameters("run_with_hooks") == ["input", "hooks", "bwd_hooks", "fwd_hooks", "run"]
    assert parameters("run_with_cache")[:2] == ["input", "names"]
    assert parameters("add_hook") == ["name", "fn", "dir", "prepend"]
    assert parameters("steer")[:4] == ["vector", "layers", "scale", "factor"]
    assert parameters("project_on_vocab") == ["x", "readout"]
    assert parameters("loss") == ["input", "attention_mask", "per_token"]
    assert parameters("support") == ["layer"]
    assert parameters("estimate")[:3] == ["names", "batch", "seq"]


def test_sizes_the_readme_gives():
    """What is captured of V4-Flash without names, and every attention pattern, in GiB at 1024 and 8192 tokens."""
    config, gib = Dsv4Config.flash(), 2**30
    names = all_names(config)
    residual = [n for n in names if n.rsplit(".", 1)[-1] in RESIDUAL_SET]
    patterns = [n for n in names if n.endswith("attention_probabilities")]
    found = [
        round(sum(budget.sizes(config, chosen, torch.bfloat16, 1, seq).values()) / gib, digits)
        for chosen, digits in ((residual, 1), (patterns, 0))
        for seq in (1024, 8192)
    ]
    assert found == [0.7, 5.6, 12, 774]
