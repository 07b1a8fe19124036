"""Ablating values and experts, and steering: against edits by hand and models without the part."""

import copy

import pytest
import torch

from dsv4 import ActivationCache
from dsv4.config import HASH_MOE
from dsv4.testing import assert_close
from dsv4.testing_probes import padded_batch, watched_model

MODEL = watched_model(seed=3)
IDS, MASK = padded_batch(MODEL.vocab_size, seq=23, padding=7)
OTHER = torch.randint(0, MODEL.vocab_size, (2, 23), generator=torch.Generator().manual_seed(8), device="cpu")
REAL = MASK.bool()
HASH = [i for i, kind in enumerate(MODEL.config.mlp_layer_types) if kind == HASH_MOE]
SCORED = [i for i in range(MODEL.num_layers) if i not in HASH]
FACTOR = MODEL.config.routed_scaling_factor


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def run(ids=IDS, mask=MASK, names=(), model=MODEL):
    logits, cache = model.run_with_cache(ids, list(names), attention_mask=mask)
    return logits, cache


def by_hand(name, fn, ids=IDS, mask=MASK):
    return MODEL.run_with_hooks(ids, [(name, fn)], attention_mask=mask)


# Values.

FLOATING = [
    "layers.1.self_attn.attention_output",
    "layers.2.self_attn.attention_premix",
    "layers.3.mlp.expert_outputs",
    "layers.4.layer_output",
    "layers.5.mlp_post",
    "token_embeddings",
]


@pytest.mark.parametrize("name", FLOATING)
def test_zero(name):
    with MODEL.ablate(name):
        logits, cache = run(names=[name])
    assert bool((cache[name] == 0).all())
    assert torch.equal(logits, by_hand(name, lambda v, hook: torch.zeros_like(v)))
    assert torch.equal(run()[0], run()[0]), "nothing is left behind"


def test_positions_of_rows():
    """The same positions under left padding, in another batch, and with negatives."""
    name = "layers.2.mlp.mlp_output"
    for pos, places in ((3, {3}), ([-1, 0], {-1, 0}), (slice(2, None, 3), set(range(2, 23, 3)))):
        with MODEL.ablate(name, pos=pos):
            together, cache = run(names=[name])
            alone = MODEL(IDS[1:, 7:])
        zero = (cache[name] == 0).all(-1)
        for row, start in ((0, 0), (1, 7)):
            length = 23 - start
            expected = {p % length for p in places if p < length}
            found = {i - start for i in range(start, 23) if zero[row, i]}
            assert found == expected, (pos, row)
        assert (together[1, 7:] - alone[0]).abs().max() < 1e-4


def test_positions_of_each_row():
    name = "layers.0.layer_output"
    with MODEL.ablate(name, pos=torch.tensor([[1, 2], [0, -1]])):
        _, cache = run(names=[name])
    zero = (cache[name] == 0).flatten(2).all(-1)
    assert zero[0].nonzero().flatten().tolist() == [1, 2]
    assert zero[1].nonzero().flatten().tolist() == [7, 22]


def test_the_same_tokens_when_generating_and_with_a_cache():
    name = "layers.1.mlp.mlp_output"
    ids = IDS[:1]
    with MODEL.ablate(name, pos=[5, 20, 24]):
        whole = MODEL.generate(ids, 6, eos_token_id=None)
        kv = MODEL.new_kv_cache(1, 40)
        parts = [MODEL(part, kv_cache=kv) for part in whole.split(4, dim=1)]
        full = MODEL(whole)
    assert (torch.cat(parts, 1) - full).abs().max() < 1e-4
    assert torch.equal(full[:, 22:-1].argmax(-1), whole[:, 23:])


def test_last_token_of_every_step():
    name = "layers.1.mlp.mlp_output"
    with MODEL.ablate(name, pos=-1):
        _, cache = MODEL.generate(IDS[:1], 4, eos_token_id=None, names=[name])
    assert (cache[name] == 0).all(-1)[0].nonzero().flatten().tolist() == [22, 23, 24, 25]


HEADED = [
    ("layers.1.self_attn.attention_head_outputs", 2),
    ("layers.2.self_attn.attention_premix", -1),
    ("layers.3.self_attn.attention_probabilities", 1),
    ("layers.4.self_attn.compressor.indexer.indexer_head_weights", 2),
    ("layers.5.self_attn.attention_head_results", 2),
]


@pytest.mark.parametrize(("name", "axis"), HEADED)
def test_heads(name, axis):
    def one(value, hook):
        value = value.clone()
        if axis == -1:
            value.unflatten(-1, (MODEL.num_heads, -1))[..., 1, :] = 0
        else:
            value.select(axis, 1).zero_()
        return value

    with MODEL.ablate(name, heads=1):
        logits, _ = run(names=[name])
    assert torch.equal(logits, by_hand(name, one))


def test_masked_scores_stay_masked():
    name = "layers.4.self_attn.attention_scores"
    with MODEL.ablate(name):
        _, cache = run(names=[name])
    before = run(names=[name])[1][name]
    assert torch.equal(cache[name].isinf(), before.isinf())
    assert bool((cache[name][~before.isinf()] == 0).all())


def test_mean_of_real_tokens():
    name = "layers.2.self_attn.attention_head_outputs"
    source = run(OTHER, MASK, [name])[1]
    mean = source[name][REAL].mean(0)
    with MODEL.ablate(name, "mean", source=source, pos=slice(4, 9)):
        _, cache = run(names=[name])
    before = run(names=[name])[1]
    for row, start in ((0, 0), (1, 7)):
        inside = cache[name][row, start + 4 : start + 9]
        assert torch.allclose(inside, mean.expand_as(inside), atol=1e-6)
        assert torch.equal(cache[name][row, : start + 4], before[name][row, : start + 4])
    sliced = MODEL.run_with_cache(OTHER, [name], attention_mask=MASK, pos=-1)[1]
    for given in (sliced, {name: sliced[name].mean(0)}):
        with MODEL.ablate(name, "mean", source=given):
            found = run(names=[name])[1][name][0, 0]
        assert torch.allclose(found, sliced[name].mean(0), atol=1e-6)


def test_resample_takes_the_same_position():
    name = "layers.4.mlp.expert_weights"
    source = MODEL.run_with_cache(OTHER[:, 7:], [name])[1]
    with MODEL.ablate(name, "resample", source=source, pos=slice(0, 16)):
        _, cache = run(names=[name])
    assert torch.equal(cache[name][1, 7:], source[name][1])
    assert torch.equal(cache[name][0, :16], source[name][0])
    one = MODEL.run_with_cache(OTHER[:1], [name])[1]
    with MODEL.ablate(name, "resample", source=one):
        _, cache = run(names=[name])
    assert torch.equal(cache[name][0], one[name][0])
    assert torch.equal(cache[name][1, 7:], one[name][0, :16])
    with MODEL.ablate(name, "resample", source=one, seed=4):
        again = run()[0]
    with MODEL.ablate(name, "resample", source=one, seed=4):
        assert torch.equal(run()[0], again)


def test_wrong_ablations():
    name, cache = FLOATING[0], run(names=[FLOATING[0]])[1]
    wrong = [
        ((name, "median"), {}, ValueError, "mode='median'"),
        ((name, "mean"), {}, ValueError, "needs source="),
        ((name, "zero"), {"source": cache}, ValueError, "takes no source="),
        ((name, "zero"), {"seed": 1}, ValueError, "seed="),
        ((name,), {"heads": 0}, ValueError, "no axis of heads"),
        (("layers.3.mlp.expert_indices",), {}, ValueError, "holds integers"),
        (("layers.3.attention_sinkhorn",), {}, ValueError, "read-only"),
        (("layers.3.nothing",), {}, KeyError, "nearest"),
        (("layers.1.self_attn.compressor.compressed_entries",), {"pos": 1}, ValueError, "no token"),
        (("layers.1.self_attn.attention_head_outputs",), {"heads": 99}, ValueError, "got 99"),
        (("layers.1.self_attn.attention_scores", "mean"), {"source": cache}, ValueError, "no mean"),
        ((FLOATING[1], "mean"), {"source": cache}, KeyError, "not in this cache"),
        ((name,), {"pos": "x"}, TypeError, "pos='x'"),
        ((name,), {"pos": slice(None, None, -1)}, ValueError, "step"),
        ((name, "resample"), {"source": {}}, TypeError, "ActivationCache"),
    ]
    for args, keywords, kind, text in wrong:
        with pytest.raises(kind, match=text), MODEL.ablate(*args, **keywords):
            pass
    assert MODEL.list_hooks() == []
    short = MODEL.run_with_cache(OTHER[:, :5], [name])[1]
    with MODEL.ablate(name, "resample", source=short), pytest.raises(ValueError, match="as long"):
        run()
    three = MODEL.run_with_cache(OTHER[[0, 1, 0]], [name])[1]
    with MODEL.ablate(name, "resample", source=three), pytest.raises(ValueError, match="3 rows"):
        run()
    with pytest.warns(UserWarning, match="met no token"), MODEL.ablate(name, pos=99):
        run()
    with (
        MODEL.ablate(name, pos=torch.zeros(3, 1, dtype=int)),
        pytest.raises(ValueError, match="one row of positions"),
    ):
        run()


# Experts.


def without_expert(layer, experts):
    """The model with experts whose down projection is zero."""
    other = copy.deepcopy(MODEL)
    other.layers[layer].mlp.experts.down_proj.data[experts] = 0
    return other


@pytest.mark.parametrize("layer", range(6))
def test_zeroed_experts_are_experts_that_give_zero(layer):
    with MODEL.ablate_experts({layer: [0, 2]}):
        logits = run()[0]
    expected = run(model=without_expert(layer, [0, 2]))[0]
    assert (logits - expected)[REAL].abs().max() < 1e-5
    assert (logits - run()[0])[REAL].abs().max() > 1e-3


@pytest.mark.parametrize("layer", range(6))
def test_renorm(layer):
    names = [f"layers.{layer}.mlp.{leaf}" for leaf in ("expert_indices", "expert_weights")]
    plain = run(names=names)[1]
    with MODEL.ablate_experts({layer: 1}, "renorm"):
        cache = run(names=names)[1]
    indices, weights = cache[names[0]], cache[names[1]]
    hit = indices == 1
    assert bool(hit.any())
    assert torch.equal(indices, plain[names[0]])
    assert bool((weights[hit] == 0).all())
    assert torch.allclose(weights.sum(-1)[REAL], torch.tensor(FACTOR), atol=1e-5)
    left = plain[names[1]].masked_fill(hit, 0)
    assert torch.allclose(weights, left / left.sum(-1, keepdim=True) * FACTOR, atol=1e-5)
    everything = list(range(MODEL.num_experts))
    with MODEL.ablate_experts({layer: everything}, "renorm"):
        gone = MODEL.run_with_cache(IDS, [f"layers.{layer}.mlp.routed_output"])[1]
    assert bool((gone[f"layers.{layer}.mlp.routed_output"] == 0).all())


@pytest.mark.parametrize("layer", SCORED)
def test_reroute_is_a_model_without_the_expert(layer):
    other = copy.deepcopy(MODEL)
    other.layers[layer].mlp.router.e_score_correction_bias[[1, 3]] = -torch.inf
    with MODEL.ablate_experts({layer: (1, 3)}, "reroute"):
        logits, cache = run(names=[f"layers.{layer}.mlp.expert_indices"])
    assert not bool(torch.isin(cache["expert_indices", layer][REAL], torch.tensor([1, 3])).any())
    assert torch.equal(logits[REAL], run(model=other)[0][REAL])


def test_reroute_of_hash_blocks_needs_a_replacement():
    layer = HASH[1]
    with (
        pytest.raises(ValueError, match="table of the token"),
        MODEL.ablate_experts({layer: 1}, "reroute"),
    ):
        pass
    plain = run(names=[f"layers.{layer}.mlp.expert_indices"])[1]["expert_indices", layer]
    other = copy.deepcopy(MODEL)
    table = other.layers[layer].mlp.router.tid2eid
    table[table == 1] = 3
    table[table == 2] = 0
    with MODEL.ablate_experts({layer: [1, 2]}, "reroute", replacement={1: 3, 2: 0}):
        logits, cache = run(names=[f"layers.{layer}.mlp.expert_indices"])
    assert torch.equal(logits[REAL], run(model=other)[0][REAL])
    expected = torch.where(plain == 1, 3, torch.where(plain == 2, 0, plain))
    assert torch.equal(cache["expert_indices", layer], expected)


@pytest.mark.parametrize("layer", [1, 4])
def test_mean_output_of_an_expert(layer):
    mlp = f"layers.{layer}.mlp"
    leaves = ("expert_outputs", "expert_weights", "expert_indices")
    source = run(OTHER, MASK, [f"{mlp}.{leaf}" for leaf in leaves])[1]
    slots = (source[f"{mlp}.expert_indices"] == 2) & REAL.unsqueeze(-1)
    weights = source[f"{mlp}.expert_weights"][slots].unsqueeze(-1)
    mean = (source[f"{mlp}.expert_outputs"][slots] / weights).mean(0)
    plain = run(names=[f"{mlp}.{leaf}" for leaf in leaves])[1]
    hit = plain[f"{mlp}.expert_indices"] == 2
    expected = torch.where(
        hit.unsqueeze(-1),
        mean * plain[f"{mlp}.expert_weights"].unsqueeze(-1),
        plain[f"{mlp}.expert_outputs"],
    )
    logits = by_hand(f"{mlp}.expert_outputs", lambda value, hook: expected)
    for given in (source, {layer: {2: mean}}):
        with MODEL.ablate_experts({layer: 2}, "mean", source=given):
            found, cache = run(names=[f"{mlp}.expert_outputs"])
        assert torch.allclose(cache[f"{mlp}.expert_outputs"], expected, atol=1e-5)
        assert (found - logits)[REAL].abs().max() < 1e-4


def test_experts_at_positions_and_in_generation():
    names = [f"layers.4.mlp.{leaf}" for leaf in ("expert_indices", "expert_weights")]
    experts = [0, 1]
    with MODEL.ablate_experts({4: experts}, pos=slice(20, None)):
        whole, cache = MODEL.generate(IDS[:1], 5, eos_token_id=None, names=names)
        full = MODEL(whole[:, :-1])
    hit = torch.isin(cache[names[0]], torch.tensor(experts))
    assert bool((cache[names[1]][:, 20:][hit[:, 20:]] == 0).all())
    assert bool((cache[names[1]][:, :20] > 0).all())
    assert torch.equal(full[:, 22:].argmax(-1), whole[:, 23:])


def test_edited_choices_count():
    """An expert that an earlier hook chose is ablated too."""
    names = [f"layers.4.mlp.{leaf}" for leaf in ("expert_indices", "expert_weights")]
    flip = (names[0], lambda v, hook: (v + 1) % MODEL.num_experts)
    with MODEL.ablate_experts({4: 2}), MODEL.hooks([flip]):
        cache = run(names=names)[1]
    assert bool((cache[names[1]][cache[names[0]] == 2] == 0).all())
    assert bool((cache[names[1]][cache[names[0]] != 2] > 0).all())


def test_wrong_expert_ablations():
    wrong = [
        (({9: 1},), {}, ValueError, "layer"),
        (({4: 99},), {}, ValueError, "experts of layer 4: got 99"),
        (({4: True},), {}, TypeError, "expected ints"),
        (([4],), {}, TypeError, "expected {layer: experts}"),
        (({4: 1}, "drop"), {}, ValueError, "mode='drop'"),
        (({4: 1}, "mean"), {}, ValueError, "needs source="),
        (({4: 1}, "mean"), {"source": {4: {2: 0}}}, ValueError, "no mean of experts"),
        (({4: 1},), {"source": {}}, ValueError, 'source= is for mode="mean"'),
        (({4: 1},), {"replacement": 1}, ValueError, 'replacement= is for mode="reroute"'),
        (({4: 1}, "reroute"), {"replacement": 1}, ValueError, "among the ablated"),
        (({4: 1}, "reroute"), {"replacement": {2: 0}}, ValueError, "replacement is for"),
        (({4: range(MODEL.num_experts)}, "reroute"), {}, ValueError, "keeps 0 of"),
    ]
    for args, keywords, kind, text in wrong:
        with pytest.raises(kind, match=text), MODEL.ablate_experts(*args, **keywords):
            pass
    assert MODEL.list_hooks() == []
    leaves = ("expert_outputs", "expert_weights", "expert_indices")
    few = MODEL.run_with_cache(IDS[:1, :1], [f"layers.4.mlp.{leaf}" for leaf in leaves])[1]
    absent = next(e for e in range(MODEL.num_experts) if e not in few["expert_indices", 4])
    with (
        pytest.raises(ValueError, match="no token of the source"),
        MODEL.ablate_experts({4: absent}, "mean", source=few),
    ):
        pass


# Steering.

VECTOR = torch.randn(MODEL.hidden_size, generator=torch.Generator().manual_seed(5), device="cpu")


@pytest.mark.parametrize("layer", [1, 5])
def test_steering_of_streams(layer):
    name = f"layers.{layer}.layer_output"
    names = [name, f"layers.{layer}.mlp_post"]
    plain = run(names=names)[1]
    post = plain[names[1]].unsqueeze(-1)
    one = torch.zeros(MODEL.streams, 1)
    one[2] = 1
    for streams, weights in (("all", torch.ones(MODEL.streams, 1)), (2, one), ("post", post)):
        with MODEL.steer(VECTOR, layer, 1.5, streams=streams):
            cache = run(names=names)[1]
        expected = plain[name] + 1.5 * weights * VECTOR
        assert torch.allclose(cache[name], expected, atol=1e-5), streams
    with MODEL.steer(VECTOR, layer, 1.5, streams="post"):
        written = run()[0]
    output = f"layers.{layer}.mlp.mlp_output"
    assert (by_hand(output, lambda v, hook: v + 1.5 * VECTOR) - written)[REAL].abs().max() < 1e-4


@pytest.mark.parametrize("layer", [0, 5])
@pytest.mark.parametrize("streams", ["all", 1, "post"])
def test_steering_by_what_is_read(layer, streams):
    last = layer == MODEL.num_layers - 1
    read = "readout" if last else f"layers.{layer + 1}.attention_collapsed"
    weights = "readout_weights" if last else f"layers.{layer + 1}.attention_pre"
    plain = run(names=[read, weights])[1]
    with (
        MODEL.freeze(plain, weights),
        MODEL.steer(VECTOR, layer, 0.7, streams=streams, norm="read", pos=slice(3, None)),
    ):
        cache = run(names=[read])[1]
    moved = cache[read] - plain[read]
    for row, start in ((0, 0), (1, 7)):
        assert (moved[row, start + 3 :] - 0.7 * VECTOR).abs().max() < 2e-5
        assert bool((moved[row, start : start + 3] == 0).all())


def test_wrong_steering():
    wrong = [
        ({"streams": 4}, "streams=4"),
        ({"streams": "each"}, "streams='each'"),
        ({"streams": True}, "streams=True"),
        ({"norm": "write"}, "norm='write'"),
        ({"pos": slice(None, None, -1)}, "step"),
    ]
    for keywords, text in wrong:
        with pytest.raises(ValueError, match=text), MODEL.steer(VECTOR, 1, **keywords):
            pass
    assert MODEL.list_hooks() == []
    assert ActivationCache is type(run()[1])


def test_bfloat16():
    """Means are rounded once; an expert's slots and no others are gone from the routed output."""
    model = watched_model(torch.bfloat16, seed=3)
    values = ["layers.2.mlp.mlp_output", "layers.4.self_attn.attention_head_outputs"]
    source = run(OTHER, names=values, model=model)[1]
    with model.ablate(values, "mean", source=source):
        logits, cache = run(names=values, model=model)
    for name in values:
        mean = source[name][REAL].double().mean(0)
        assert cache[name].dtype == torch.bfloat16
        assert_close(cache[name][REAL], mean.expand_as(cache[name][REAL]), "bfloat16 rounding")
    hooks = [(name, lambda v, hook: cache[hook.name]) for name in values]
    assert_close(model.run_with_hooks(IDS, hooks, attention_mask=MASK), logits, "equal")
    for layer in (HASH[1], SCORED[1]):
        leaves = ("expert_outputs", "expert_indices", "routed_output")
        names = [f"layers.{layer}.mlp.{leaf}" for leaf in leaves]
        outputs, indices, _ = (run(names=names, model=model)[1][name] for name in names)
        left = (outputs.double() * (indices != 1).unsqueeze(-1)).sum(2)
        assert bool((indices == 1).any())
        with model.ablate_experts({layer: 1}):
            routed = run(names=names[2:], model=model)[1][names[2]]
        # Each slot's output was rounded, and their sum.
        assert_close(routed[REAL], left[REAL], "bfloat16 sum")
