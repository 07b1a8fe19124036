"""cache.residual against what the run itself held, against finite edits, and per-part sums made by hand."""

import copy
import gc
import pickle
import random

import pytest
import torch

from dsv4 import ActivationCache, Dsv4
from dsv4.testing import fault_config, random_config, random_ids
from dsv4.testing_probes import changed, padded_batch, watched_model

LAYERS = range(6)
SITES = ("attention", "mlp")
# Of the sum of absolute terms (attributions), or of the largest value: float32.
EXACT = 1e-5
PARTS = [
    "**.attention_head_results",
    "**.attention_premix",
    "**.expert_outputs",
    "**.shared_expert_output",
    "**.expert_neurons",
    "**.mlp_neurons",
]
PARTS += ["**.expert_indices", "**.expert_weights"]
RESIDUAL = ["token_embeddings", "readout_weights", "final_norm_output", "layers.*.*_pre", "layers.*.*_post", "layers.*.*_comb"]
RESIDUAL += ["layers.*.self_attn.attention_output", "layers.*.mlp.mlp_output"]
MODEL = watched_model(seed=3)
IDS, MASK = padded_batch(MODEL.vocab_size)
REAL = MASK.bool()


def off(actual, expected, real=REAL) -> float:
    """Largest difference over the largest expected value, at real tokens."""
    actual, expected = actual[real].double(), expected[real].double()
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def unexplained(found, real=REAL) -> float:
    """What the named components lack of the value, over the sum of absolute terms."""
    assert found.labels[-1] == ("rounding",)
    assert torch.allclose(found.values.sum(0), found.total, atol=1e-4)
    # A token against itself has no terms at all.
    return (found.values[-1].abs() / found.values.abs().sum(0).clamp(min=1e-30))[real].max().item()


def asked(logits, cache, tokens):
    """[b s]: the logits of one id, of one for each row or each token, or final_norm_output times a direction."""
    tokens = torch.as_tensor(tokens)
    if tokens.is_floating_point():
        return cache["final_norm_output"] @ tokens
    ids = tokens if tokens.dim() == 2 else tokens.view(-1, 1).expand(logits.shape[:2])
    return logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def models():
    """Random sizes, kinds of block, rounds, streams; two rows, one padded at the left or the right."""
    for seed in range(8):
        config = random_config(random.Random(900 + seed))
        model = Dsv4.from_config(config, seed=seed, dtype=torch.float64 if seed == 7 else torch.float32)
        ids, mask = random_ids(config, 2, 23, seed), torch.ones(2, 23, dtype=torch.int64)
        mask[1, slice(0, 5) if seed % 2 else slice(18, 23)] = 0
        yield model, ids, mask


# Reads, streams, means.


def test_every_read_and_the_readout_are_their_sums():
    for model, ids, mask in models():
        _, everything = model.run_with_cache(ids, "**", attention_mask=mask)
        # Nothing but the residual set.
        _, cache = model.run_with_cache(ids, attention_mask=mask)
        r, real, layers = cache.residual, mask.bool(), range(model.num_layers)
        outputs = torch.stack([cache["token_embeddings"], *[cache[f"{s}_output", i] for i in layers for s in SITES]], dim=2)
        gamma, matrix = r.write_coefficients(), r.read_matrix()
        assert gamma.shape == (2, 23, 1 + 2 * model.num_layers)
        assert matrix.shape == (2, 23, 2 * model.num_layers, 1 + 2 * model.num_layers)
        assert off((gamma.unsqueeze(-1) * outputs).sum(2), everything["readout"], real) <= EXACT
        for i in layers:
            for j, site in enumerate(SITES):
                d = 2 * i + j
                read = (matrix[:, :, d].unsqueeze(-1) * outputs).sum(2)
                assert off(read, everything[f"{site}_collapsed", i], real) <= EXACT
                # Nothing that comes later.
                assert not matrix[:, :, d, 1 + d :].any()
                assert torch.equal(r.decompose((i, site)).total, r.decompose(f"layers.{i}.{site}_collapsed").total)
                assert off(r.decompose((i, site)).total, everything[f"{site}_collapsed", i], real) <= EXACT
            for name in ("layer_input", "layer_mid", "layer_output"):
                assert off(r.decompose(f"layers.{i}.{name}").total, everything[name, i], real) <= EXACT
                assert off(r.streams(f"layers.{i}.{name}"), everything[name, i], real) <= EXACT
        parts = r.decompose()
        assert parts.labels == [("embedding",), *[(i, s) for i in layers for s in SITES]]
        assert off(parts.total, everything["readout"], real) <= EXACT
        sums = r.accumulated()
        assert torch.equal(sums.values[0], parts.values[0])
        assert off(sums.values[-1], everything["readout"], real) <= EXACT


def test_coefficients_are_the_effect_of_finite_edits():
    """Everything frozen but one output: the readout and the reads move by coefficient times the edit."""
    mixing = ["readout_weights", "layers.*.*_pre", "layers.*.*_post", "layers.*.*_comb"]
    _, cache = MODEL.run_with_cache(
        IDS, [*mixing, "token_embeddings", "layers.*.self_attn.attention_output", "layers.*.mlp.mlp_output"], attention_mask=MASK
    )
    r = cache.residual
    gamma, matrix = r.write_coefficients(), r.read_matrix()
    reads = [f"layers.{i}.{s}_collapsed" for i in LAYERS for s in SITES]
    vector = torch.randn(MODEL.hidden_size)
    frozen = [(n, lambda v, hook: cache[hook.name]) for n in cache]
    names = ["token_embeddings", *[f"layers.{i}.{m}" for i in LAYERS for m in ("self_attn.attention_output", "mlp.mlp_output")]]
    with MODEL.hooks(frozen):
        _, before = MODEL.run_with_cache(IDS, ["readout", *reads], attention_mask=MASK)
        for column in (0, 1, 4, 7, 12):
            with MODEL.hooks([(names[column], lambda v, hook: v + vector)]):
                _, after = MODEL.run_with_cache(IDS, ["readout", *reads], attention_mask=MASK)
            assert (after["readout"] - before["readout"] - gamma[:, :, column, None] * vector)[REAL].abs().max() <= 1e-4
            for d, name in enumerate(reads):
                moved = after[name] - before[name]
                assert (moved - matrix[:, :, d, column, None] * vector)[REAL].abs().max() <= 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streams_are_replayed_as_they_were(dtype):
    model = watched_model(dtype, seed=1)
    _, everything = model.run_with_cache(IDS, "**", attention_mask=MASK)
    _, cache = model.run_with_cache(IDS, attention_mask=MASK)
    for name in ("layer_input", "layer_mid", "layer_output"):
        replayed = cache.residual.streams(name)
        for i in LAYERS:
            assert replayed[i].dtype == dtype
            assert off(everything.residual.streams(name)[i], everything[name, i]) == 0
            assert off(replayed[i], everything[name, i]) <= (EXACT if dtype == torch.float32 else 2**-6)
    with pytest.raises(ValueError, match="one vector per token"):
        cache.residual.streams("layers.0.mlp_collapsed")


@pytest.mark.parametrize("rounds", [1, 4, 20])
def test_the_mean_over_streams(rounds):
    model = watched_model(seed=2, hc_sinkhorn_iters=rounds)
    _, everything = model.run_with_cache(IDS, "**", attention_mask=MASK)
    _, cache = model.run_with_cache(IDS, attention_mask=MASK)
    exact, additive = cache.residual.stream_mean(), cache.residual.stream_mean(exact=False)
    held = [everything["layer_input", 0]] + [everything[n, i] for i in LAYERS for n in ("layer_mid", "layer_output")]
    expected = torch.stack([x.mean(2) for x in held])
    assert exact.labels == [("embedding",), *[(i, s) for i in LAYERS for s in SITES]]
    for value, truth in zip(exact.values, expected, strict=True):
        assert off(value, truth) <= EXACT
    assert exact.error == 0
    error = (additive.values - expected)[:, REAL].abs().max() / expected[:, REAL].abs().max()
    assert abs(additive.error - error.item()) <= 1e-5
    assert not additive.exact
    if rounds == 20:
        assert additive.error <= 2e-3
    else:
        assert additive.error >= 1e-3


# Attribution.


@pytest.mark.parametrize("unit", ["sublayer", "head", "expert", "slot", "neuron", ("head", "expert")])
def test_attributions_sum_to_the_logit(unit):
    for model, ids, mask in models():
        real = mask.bool()
        logits, cache = model.run_with_cache(ids, [*RESIDUAL, *PARTS], attention_mask=mask)
        direction = torch.randn(model.hidden_size, dtype=model.dtype)
        for tokens, against in ((3, None), (3, 5), (ids, torch.tensor([1, 2])), (direction, None), (direction, 4)):
            found = cache.residual.logit_attribution(tokens, against, unit=unit)
            assert unexplained(found, real) <= EXACT
            assert len(set(found.labels)) == len(found.labels) == len(found.values)
            expected = asked(logits, cache, tokens) - (0 if against is None else asked(logits, cache, against))
            assert ((found.total - expected).abs() <= EXACT * found.values.abs().sum(0))[real].all()


def test_every_part_is_its_output_times_its_coefficient():
    _, cache = MODEL.run_with_cache(IDS, "**", attention_mask=MASK)
    r = cache.residual
    gamma = r.write_coefficients()
    # The readout's own scale, by hand.
    h = cache["readout"]
    scale = (h.square().mean(-1) + MODEL.norm.eps).rsqrt()
    along = scale[..., None] * MODEL.norm.weight * (MODEL.lm_head.weight[3] - MODEL.lm_head.weight[5])
    heads, experts = r.logit_attribution(3, 5, unit=("head", "expert")), r.logit_attribution(3, 5, unit="expert")
    slots, neurons = r.logit_attribution(3, 5, unit="slot"), r.logit_attribution(3, 5, unit="neuron")
    whole = r.logit_attribution(3, 5)
    size = whole.values.abs().max()

    def same(a, b):
        assert (a - b)[REAL].abs().max() <= EXACT * size

    assert off(whole.scale, scale) <= EXACT
    same(whole["embedding",], gamma[..., 0] * (cache["token_embeddings"] * along).sum(-1))
    for i in LAYERS:
        down = MODEL.layers[i].mlp.experts.down_proj
        indices, weights = cache["expert_indices", i], cache["expert_weights", i]
        post = {s: gamma[..., 1 + 2 * i + j] for j, s in enumerate(SITES)}
        for s in SITES:
            same(whole[i, s], post[s] * (cache[f"{s}_output", i] * along).sum(-1))
        for n in range(MODEL.num_heads):
            same(heads[i, "attention", n], post["attention"] * (cache["attention_head_results", i][:, :, n] * along).sum(-1))
        for k in range(MODEL.top_k):
            same(slots[i, "slot", k], post["mlp"] * (cache["expert_outputs", i][:, :, k] * along).sum(-1))
            for j in (0, MODEL.intermediate_size - 1):
                column = down[indices[:, :, k], :, j]
                written = cache["expert_neurons", i][:, :, k, j] * weights[:, :, k]
                same(neurons[i, "slot", k, j], post["mlp"] * written * (column * along).sum(-1))
        for j in (0, 7):
            column = MODEL.layers[i].mlp.shared_experts.down_proj.weight[:, j]
            same(neurons[i, "shared", j], post["mlp"] * cache["mlp_neurons", i][..., j] * (column * along).sum(-1))
        same(slots[i, "shared"], post["mlp"] * (cache["shared_expert_output", i] * along).sum(-1))
        for e in range(MODEL.num_experts):
            chose = (indices == e)[..., None] * cache["expert_outputs", i]
            same(experts[i, "expert", e], post["mlp"] * (chose.sum(2) * along).sum(-1))
        same(heads[i, "attention", "rest"], torch.zeros(2, 19))
        same(neurons[i, "mlp", "rest"], torch.zeros(2, 19))
    assert torch.equal(heads["embedding",], experts["embedding",])


def test_heads_from_the_premix_are_heads_from_their_results():
    _, cache = MODEL.run_with_cache(IDS, [*RESIDUAL, "**.attention_premix"], attention_mask=MASK)
    _, other = MODEL.run_with_cache(IDS, [*RESIDUAL, "**.attention_head_results"], attention_mask=MASK)
    one, two = (c.residual.logit_attribution(3, unit="head") for c in (cache, other))
    assert one.labels == two.labels
    assert (one.values - two.values)[:, REAL].abs().max() <= EXACT * one.values.abs().max()


def test_a_head_zeroed_is_its_attribution_gone():
    """With mixing, other sublayers and the norm frozen, the logit falls by what the table says."""
    _, cache = MODEL.run_with_cache(IDS, "**", attention_mask=MASK)
    found = cache.residual.logit_attribution(3, unit="head")
    name = "layers.2.self_attn.attention_head_results"
    frozen = [
        n for n in cache if n.endswith(("_pre", "_post", "_comb", "readout_weights", "mlp_output", "attention_output")) and ".2." not in n
    ]
    frozen += ["layers.2.mlp.mlp_output", *[f"layers.2.{s}_{x}" for s in SITES for x in ("pre", "post", "comb")]]

    def without(results, hook):
        results[:, :, 1] = 0

    with MODEL.hooks([(name, without), *[(n, lambda v, hook: cache[hook.name]) for n in frozen]]):
        _, after = MODEL.run_with_cache(IDS, "readout", attention_mask=MASK)
    scale = (cache["readout"].square().mean(-1) + MODEL.norm.eps).rsqrt()
    fall = ((cache["readout"] - after["readout"]) * scale[..., None] * MODEL.norm.weight) @ MODEL.lm_head.weight[3]
    assert (fall - found[2, "attention", 1])[REAL].abs().max() <= EXACT * found.values.abs().max()


def test_layers_split_only_where_asked():
    names = [*RESIDUAL, *[f"layers.4.mlp.{x}" for x in ("expert_neurons", "mlp_neurons", "expert_indices", "expert_weights")]]
    _, cache = MODEL.run_with_cache(IDS, names, attention_mask=MASK)
    found = cache.residual.logit_attribution(3, unit="neuron", layers=4)
    assert (3, "mlp") in found.labels
    assert (4, "mlp") not in found.labels
    assert (4, "mlp", "rest") in found.labels
    assert unexplained(found) <= EXACT


def test_the_table():
    _, cache = MODEL.run_with_cache(IDS, [*RESIDUAL, *PARTS], attention_mask=MASK)
    found = cache.residual.logit_attribution(3, 5, unit=("head", "slot"))
    table = found.top(4, row=1, pos=-2)
    assert len(table) == 4
    at = found.values[:, 1, 17]
    assert [row.value for row in table] == pytest.approx(at[at.abs().topk(4).indices].tolist())
    assert "frozen" in str(table)
    assert "position 11" in str(table)
    assert str(found) == str(found.top())
    slot = next(row.name for row in found.top(200) if "slot" in row.name)
    words = slot.split()
    expert = int(cache["expert_indices", int(words[1])][0, -1, int(words[3])])
    assert slot.endswith(f"(expert {expert})")
    with pytest.raises(KeyError, match="no component"):
        found[9, "attention"]


# Caches of every shape.


@pytest.mark.parametrize("pos", [-1, slice(-4, None), [1, -1, 4], torch.tensor([[0, 5], [3, -1]])], ids=str)
def test_at_any_positions(pos):
    _, whole = MODEL.run_with_cache(IDS, [*RESIDUAL, *PARTS], attention_mask=MASK)
    _, cache = MODEL.run_with_cache(IDS, [*RESIDUAL, *PARTS], attention_mask=MASK, pos=pos)
    where = cache.positions + torch.tensor([[0], [6]])
    for unit in ("sublayer", "head", "expert", "neuron"):
        part, full = (c.residual.logit_attribution(3, 5, unit=unit) for c in (cache, whole))
        expected = full.values.gather(2, where.expand(len(full.labels), -1, -1))
        part_values = part.values.unsqueeze(-1) if isinstance(pos, int) else part.values
        assert part_values.shape == expected.shape
        assert (part_values - expected).abs().max() <= EXACT * expected.abs().max()
        assert len(part.top(3, row=1)) == 3
    if isinstance(pos, int):
        assert cache.residual.write_coefficients().shape == (2, 13)
        assert cache.residual.read_matrix().shape == (2, 12, 13)
        assert cache.residual.decompose().values.shape == (13, 2, MODEL.hidden_size)
        assert cache.residual.decompose("layers.3.layer_mid").values.shape == (8, 2, 4, MODEL.hidden_size)
        assert cache.residual.stream_mean().values.shape == (13, 2, MODEL.hidden_size)
        tokens = torch.tensor([4, 9])
        found = cache.residual.logit_attribution(tokens)
        assert torch.allclose(found.total[1], cache.residual.logit_attribution(9).total[1])


def test_without_the_batch_axis():
    ids = IDS[:1]
    _, cache = MODEL.run_with_cache(ids, [*RESIDUAL, *PARTS])
    flat = cache.remove_batch_dim()
    for unit in ("sublayer", ("head", "slot")):
        one, two = (c.residual.logit_attribution(3, unit=unit) for c in (cache, flat))
        assert two.values.shape == (len(one.labels), 19)
        assert torch.equal(one.values[:, 0], two.values)
        assert str(one) == str(two)
    assert flat.residual.write_coefficients().shape == (19, 13)
    assert flat.residual.logit_attribution(ids[0]).total.shape == (19,)
    _, last = MODEL.run_with_cache(ids, pos=-1)
    found = last.remove_batch_dim().residual.logit_attribution(3)
    assert found.values.shape == (14,)
    assert found.top(2).rows[0].value == pytest.approx(found.values[found.values.abs().argmax()].item())
    assert torch.equal(flat.add_batch_dim()["layers.2.mlp_comb"], cache["layers.2.mlp_comb"])
    with pytest.raises(ValueError, match="has its batch axis"):
        cache.add_batch_dim()


def test_saved_and_loaded(tmp_path):
    with MODEL.hooks([("layers.2.layer_output", changed)]):
        _, cache = MODEL.run_with_cache(IDS, [*RESIDUAL, "layers.2.layer_output"], attention_mask=MASK)
        _, streamed = MODEL.run_with_cache(IDS, [*RESIDUAL, "layers.2.layer_output"], attention_mask=MASK, to=tmp_path / "streamed")
    expected = cache.residual.logit_attribution(3)
    assert ("edit", "layers.2.layer_output") in expected.labels
    cache.save(tmp_path / "saved")
    loaded = ActivationCache.load(tmp_path / "saved")
    assert torch.equal(loaded.residual.read_matrix(), cache.residual.read_matrix())
    with pytest.raises(ValueError, match="with_model"):
        loaded.residual.logit_attribution(3)
    with pytest.raises(ValueError, match="6 layers"):
        loaded.with_model(
            Dsv4.from_config(
                random_config(random.Random(0), num_hidden_layers=1, layer_types=["sliding_attention"], mlp_layer_types=["moe"])
            )
        )
    copies = (
        loaded.with_model(MODEL),
        streamed,
        cache.to("cpu"),
        copy.deepcopy(cache).with_model(MODEL),
        pickle.loads(pickle.dumps(cache)).with_model(MODEL),
    )
    for one in copies:
        assert one.origin == cache.origin
        assert torch.equal(one.residual.logit_attribution(3).values, expected.values)


def test_a_cache_does_not_keep_its_model():
    model = watched_model()
    _, cache = model.run_with_cache(IDS)
    del model
    gc.collect()
    cache.residual.write_coefficients()
    with pytest.raises(ValueError, match="gone"):
        cache.residual.logit_attribution(3)
    with pytest.raises(ValueError, match="not filled by a run"):
        ActivationCache({}, {}).residual.write_coefficients()


def test_decoding_and_generating():
    ids = IDS[:1]
    whole = MODEL.run_with_cache(ids)[1].residual.logit_attribution(3)
    kv = MODEL.new_kv_cache(1)
    MODEL(ids[:, :11], kv_cache=kv)
    _, cache = MODEL.run_with_cache(ids[:, 11:], kv_cache=kv)
    found = cache.residual.logit_attribution(3)
    assert found.labels == whole.labels
    assert (found.values - whole.values[:, :, 11:]).abs().max() <= 1e-4 * whole.values.abs().max()
    out, cache = MODEL.generate(ids, max_new_tokens=3, names=RESIDUAL, eos_token_id=None)
    assert cache.model is MODEL
    generated = cache.residual.logit_attribution(3)
    again = MODEL.run_with_cache(out[:, :-1])[1].residual.logit_attribution(3)
    assert (generated.values - again.values).abs().max() <= 1e-4 * again.values.abs().max()
    with MODEL.hooks([("layers.1.layer_mid", changed)]):
        _, cache = MODEL.generate(ids, max_new_tokens=3, names=RESIDUAL, eos_token_id=None)
    with pytest.raises(ValueError, match=r"edited layers\.1\.layer_mid"):
        cache.residual.logit_attribution(3)


# Edits.

EDITED = ["layers.0.layer_input", "layers.2.layer_mid", "layers.3.layer_output", "layers.5.layer_output", "readout"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edits_of_streams_are_components(dtype):
    model = watched_model(dtype, seed=3)
    deltas = {}

    def add(value, hook):
        deltas[hook.name] = (changed(value, hook) - value) if hook.name not in deltas else deltas[hook.name]
        return value + deltas[hook.name]

    with model.hooks([(n, add) for n in EDITED]):
        _, cache = model.run_with_cache(IDS, [*RESIDUAL, *EDITED], attention_mask=MASK)
        deltas.clear()
        _, everything = model.run_with_cache(IDS, "**", attention_mask=MASK)
    assert cache.origin.edited == tuple(EDITED)
    parts = cache.residual.decompose()
    assert [x for x in parts.labels if x[0] == "edit"] == [("edit", n) for n in EDITED]
    assert parts.labels[:3] == [("embedding",), ("edit", EDITED[0]), (0, "attention")]
    close = EXACT if dtype == torch.float32 else 2**-5
    assert off(parts.total, everything["readout"]) <= close
    # What was added to the readout is read with weight one.
    assert off(parts["edit", "readout"], deltas["readout"].float()) <= close
    # An edit at the last streams goes through the readout's weights.
    read = (cache["readout_weights"].unsqueeze(-2) @ deltas[EDITED[3]].float()).squeeze(-2)
    assert off(parts["edit", EDITED[3]], read) <= close
    assert off(cache.residual.decompose((4, "mlp")).total, everything["mlp_collapsed", 4]) <= close
    assert off(cache.residual.stream_mean().values[-1], everything["layer_output", 5].float().mean(2)) <= close
    found = cache.residual.logit_attribution(3, 5)
    if dtype == torch.float32:
        assert unexplained(found) <= EXACT
    # Coefficients are of the mixing alone.
    assert cache.residual.write_coefficients().shape == (2, 19, 13)


@pytest.mark.parametrize("name", ["layers.0.layer_input", "layers.3.layer_mid", "layers.5.layer_output", "readout"])
def test_edits_of_streams_not_captured_are_refused(name):
    with MODEL.hooks([(name, changed)]):
        _, cache = MODEL.run_with_cache(IDS, attention_mask=MASK)
    with pytest.raises(ValueError, match=f"edited {name}.*capture names"):
        cache.residual.logit_attribution(3)
    with pytest.raises(ValueError, match=f"edited {name}"):
        cache.residual.decompose()
    cache.residual.write_coefficients()
    cache.residual.read_matrix()
    # Before the edit nothing was changed.
    if name != "layers.0.layer_input":
        cache.residual.decompose((0, "attention"))
        cache.residual.decompose("layers.2.layer_output")


def test_an_edited_read_is_a_component_of_that_read_alone():
    name = "layers.3.mlp_collapsed"
    with MODEL.hooks([(name, changed)]):
        _, cache = MODEL.run_with_cache(IDS, [*RESIDUAL, name], attention_mask=MASK)
    parts = cache.residual.decompose((3, "mlp"))
    assert parts.labels[-1] == ("edit", name)
    assert off(parts.total, cache[name]) <= EXACT
    assert ("edit", name) not in cache.residual.decompose().labels
    assert unexplained(cache.residual.logit_attribution(3)) <= EXACT


@pytest.mark.parametrize(
    "name",
    [
        "token_embeddings",
        "layers.1.mlp_post",
        "layers.2.attention_comb",
        "layers.2.mlp.mlp_output",
        "layers.4.mlp.expert_weights",
        "readout_weights",
    ],
)
def test_what_is_captured_after_its_edit_needs_no_component(name):
    with MODEL.hooks([(name, changed)]):
        logits, cache = MODEL.run_with_cache(IDS, attention_mask=MASK)
    found = cache.residual.logit_attribution(3)
    assert unexplained(found) <= EXACT
    assert (found.total - logits[..., 3])[REAL].abs().max() <= EXACT * logits.abs().max()


def test_edits_behind_the_parts_are_the_rest():
    names = ["layers.2.self_attn.attention_low_rank_output", "layers.3.mlp.routed_output"]
    with MODEL.hooks([(n, changed) for n in names]):
        _, cache = MODEL.run_with_cache(IDS, [*RESIDUAL, *PARTS], attention_mask=MASK)
    found = cache.residual.logit_attribution(3, unit=("head", "slot"))
    assert unexplained(found) <= EXACT
    assert found[2, "attention", "rest"][REAL].abs().min() > 100 * found[1, "attention", "rest"][REAL].abs().max()
    assert found[3, "mlp", "rest"][REAL].abs().median() > 100 * found[2, "mlp", "rest"][REAL].abs().max()


def test_edits_after_the_readout():
    with MODEL.hooks([("final_norm_output", changed)]):
        logits, cache = MODEL.run_with_cache(IDS, attention_mask=MASK)
    found = cache.residual.logit_attribution(3)
    assert found.labels[-2] == ("edit", "final_norm_output")
    assert unexplained(found) <= EXACT
    assert (found.total - logits[..., 3])[REAL].abs().max() <= EXACT * logits.abs().max()
    with MODEL.hooks([("logits", changed)]):
        _, cache = MODEL.run_with_cache(IDS, attention_mask=MASK)
    with pytest.raises(ValueError, match="edited logits"):
        cache.residual.logit_attribution(3)
    cache.residual.logit_attribution(MODEL.lm_head.weight[3])


def test_steering_and_looking():
    vector = torch.randn(MODEL.hidden_size)
    with MODEL.steer(vector, layers=[1, 3]):
        _, cache = MODEL.run_with_cache(IDS, [*RESIDUAL, "layers.*.layer_output"], attention_mask=MASK)
    parts = cache.residual.decompose()
    # A vector in every stream stays in every stream, and is read with the sum of the weights.
    expected = cache["readout_weights"].sum(-1, keepdim=True) * vector
    assert off(parts["edit", "layers.1.layer_output"], expected) <= 1e-3
    seen = []
    with MODEL.hooks([("layers.1.layer_output", lambda v, hook: seen.append(hook.name))]):
        _, cache = MODEL.run_with_cache(IDS, attention_mask=MASK)
    assert seen
    assert cache.origin.edited == ()
    cache.residual.decompose()

    def in_place(value, hook):
        value += 1

    def looking(value, hook):
        seen.append(value)

    with torch.inference_mode():
        for hook, edited in ((in_place, True), (looking, False)):
            with MODEL.hooks([("layers.1.layer_output", hook)]):
                _, cache = MODEL.run_with_cache(IDS, attention_mask=MASK)
            assert bool(cache.origin.edited) == edited
    with MODEL.hooks([("layers.1.layer_output", in_place)]):
        _, cache = MODEL.run_with_cache(IDS, attention_mask=MASK)
    assert cache.origin.edited == ("layers.1.layer_output",)
    # The next run is another run.
    assert MODEL.run_with_cache(IDS, attention_mask=MASK)[1].origin.edited == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_no_point_has_seen_is_refused(dtype):
    """A module hook of PyTorch's changes streams without any value's hook."""
    model = watched_model(dtype, seed=3)
    handle = model.layers[2].register_forward_hook(lambda module, args, output: output + 1)
    _, cache = model.run_with_cache(IDS, attention_mask=MASK)
    handle.remove()
    with pytest.raises(ValueError, match="something other than a hook"):
        cache.residual.logit_attribution(3)


def test_bfloat16():
    """Components are exact products of the cached numbers; roundings of the streams between are the last component."""
    for seed in range(3):
        model = watched_model(torch.bfloat16, seed)
        logits, cache = model.run_with_cache(IDS, [*RESIDUAL, *PARTS, "readout"], attention_mask=MASK)
        assert off(cache.residual.decompose().total, cache["readout"]) <= 2**-5
        for unit in ("sublayer", "head", "slot", "neuron"):
            found = cache.residual.logit_attribution(3, 5, unit=unit)
            assert unexplained(found) <= 0.05
            assert (found.total - (logits[..., 3] - logits[..., 5]))[REAL].abs().max() <= EXACT * logits.abs().max()


# Runs over a part of the model.


def test_skipped_layers():
    with MODEL.skip_layers([1, 4]):
        _, everything = MODEL.run_with_cache(IDS, "**", attention_mask=MASK)
        _, cache = MODEL.run_with_cache(IDS, attention_mask=MASK)
    r = cache.residual
    gamma, matrix = r.write_coefficients(), r.read_matrix()
    assert not gamma[..., [3, 4, 9, 10]].any()
    assert not matrix[:, :, [2, 3, 8, 9]].any()
    assert unexplained(r.logit_attribution(3)) <= EXACT
    assert off(r.decompose().total, everything["readout"]) <= EXACT
    assert off(r.decompose((3, "mlp")).total, everything["mlp_collapsed", 3]) <= EXACT
    assert r.decompose().labels == [("embedding",), *[(i, s) for i in (0, 2, 3, 5) for s in SITES]]
    with pytest.raises(ValueError, match="went through layers"):
        r.decompose((1, "mlp"))
    with MODEL.skip_layers(LAYERS):
        _, cache = MODEL.run_with_cache(IDS, attention_mask=MASK)
    assert cache.residual.read_matrix().shape == (2, 19, 12, 13)
    assert unexplained(cache.residual.logit_attribution(3)) <= EXACT


def test_entered_and_left_early():
    _, cache = MODEL.run_with_cache(IDS, attention_mask=MASK, stop_at_layer=3)
    _, whole = MODEL.run_with_cache(IDS, "**", attention_mask=MASK)
    assert off(cache.residual.decompose("layers.2.layer_output").total, whole["layer_output", 2]) <= EXACT
    assert off(cache.residual.read_matrix()[:, :, :6], whole.residual.read_matrix()[:, :, :6]) <= EXACT
    for ask in (lambda r: r.write_coefficients(), lambda r: r.logit_attribution(3), lambda r: r.decompose()):
        with pytest.raises(ValueError, match="stop_at_layer=3"):
            ask(cache.residual)
    run = {"start_at_layer": 2, "input_ids": IDS, "attention_mask": MASK}
    _, cache = MODEL.run_with_cache(whole["layer_input", 2], [*RESIDUAL[1:], "layers.2.layer_input"], **run)
    found = cache.residual.logit_attribution(3)
    assert found.labels[0] == ("streams", 2)
    assert unexplained(found) <= EXACT
    same = whole.residual.logit_attribution(3)
    first = sum(same[label] for label in [("embedding",), *[(i, s) for i in (0, 1) for s in SITES]])
    assert off(found["streams", 2], first) <= 1e-4
    assert not cache.residual.write_coefficients()[..., :5].any()
    _, cache = MODEL.run_with_cache(whole["layer_input", 2], **run)
    with pytest.raises(ValueError, match=r"layers\.2\.layer_input"):
        cache.residual.logit_attribution(3)


# What is asked for wrongly.


def test_missing_values_are_named():
    _, cache = MODEL.run_with_cache(IDS, attention_mask=MASK)
    for unit, names in (
        ("head", ["layers.*.self_attn.attention_premix"]),
        ("slot", ["layers.*.mlp.expert_outputs", "layers.*.mlp.shared_expert_output"]),
        ("expert", ["layers.*.mlp.expert_outputs", "layers.*.mlp.shared_expert_output"]),
        ("neuron", ["layers.*.mlp.expert_neurons", "layers.*.mlp.mlp_neurons"]),
    ):
        with pytest.raises(ValueError, match="does not hold") as error:
            cache.residual.logit_attribution(3, unit=unit)
        for name in names:
            assert name in str(error.value)
        # What the error says is enough.
        _, more = MODEL.run_with_cache(IDS, [*RESIDUAL, "**.expert_indices", "**.expert_weights", *names], attention_mask=MASK)
        assert unexplained(more.residual.logit_attribution(3, unit=unit)) <= EXACT
    _, cache = MODEL.run_with_cache(IDS, "layers.*.mlp.mlp_output", attention_mask=MASK)
    with pytest.raises(ValueError, match=r"layers\.\*\.attention_post"):
        cache.residual.write_coefficients()
    with pytest.raises(ValueError, match="token_embeddings"):
        cache.residual.decompose()


def test_wrong_questions():
    _, cache = MODEL.run_with_cache(IDS, attention_mask=MASK)
    r = cache.residual
    for wrong, match in (
        ({"unit": "layer"}, "unit='layer'"),
        ({"unit": ("slot", "expert")}, "split the same sublayer"),
        ({"layers": [9], "unit": "head"}, "went through layers"),
        ({"against": 64}, "0 to 63"),
        ({"against": torch.tensor([1, 2, 3])}, r"shape \[3\]"),
        ({"against": torch.zeros(5)}, "a direction is"),
    ):
        with pytest.raises(ValueError, match=match):
            r.logit_attribution(3, **wrong)
    with pytest.raises(TypeError, match="expected ids"):
        r.logit_attribution([0.5, 1.0])
    for at in ("layers.0.mlp_input", (0, "head"), "layers.0", 3, "layer_mid"):
        with pytest.raises(ValueError, match='expected "readout"'):
            r.decompose(at)
    with pytest.raises(ValueError, match="went through layers"):
        r.decompose((6, "mlp"))


# The lens over a cache.


def test_lens_of_a_cache():
    for readout in ("head", "mean", "each", "final_pre"):
        expected = MODEL.logit_lens(IDS, readout=readout, pos=None, attention_mask=MASK)
        for names in (RESIDUAL, [*RESIDUAL, "layers.*.layer_output"]):
            _, cache = MODEL.run_with_cache(IDS, names, attention_mask=MASK)
            lens = MODEL.logit_lens(cache, readout=readout)
            assert lens.layers == expected.layers
            assert (lens.logits - expected.logits)[:, REAL].abs().max() <= EXACT * expected.logits.abs().max()
            assert str(lens) == str(expected)
    flat = MODEL.run_with_cache(IDS[:1])[1].remove_batch_dim()
    assert str(MODEL.logit_lens(flat)) == str(MODEL.logit_lens(IDS[:1]))
    with pytest.raises(TypeError, match="makes no run"):
        MODEL.logit_lens(cache, attention_mask=MASK)
    right = torch.ones_like(IDS)
    right[0, -3:] = 0
    table = str(MODEL.logit_lens(IDS, pos=None, attention_mask=right))
    assert table == str(MODEL.logit_lens(IDS[:1, :-3]))


@pytest.mark.parametrize("ask", ["decompose", "accumulated", "stream_mean"])
def test_a_run_changed_by_a_module_hook_is_refused(ask: str):
    model = Dsv4.from_config(fault_config(), seed=5)
    handle = model.layers[2].register_forward_hook(lambda module, args, out: out * 1.5)
    with torch.no_grad():
        _, cache = model.run_with_cache(random_ids(model.config, 2, 28))
    handle.remove()
    with pytest.raises(ValueError, match="something other than a hook at a value"):
        getattr(cache.residual, ask)()
