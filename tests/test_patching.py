"""Patching: each verb against runs with the same edit made by hand."""

import random
import re
from contextlib import contextmanager

import pytest
import torch

from dsv4 import Dsv4
from dsv4.block import Block
from dsv4.config import CSA, HASH_MOE, HCA, MOE, SLIDING
from dsv4.testing import assert_close, names_of, random_config, random_ids
from dsv4.testing_probes import every_kind, leaf, padded_batch, watched_model

MODEL = watched_model(seed=9)
CLEAN, MASK = padded_batch(MODEL.vocab_size, seq=17, padding=4)
CORRUPT = torch.randint(0, MODEL.vocab_size, (2, 17), generator=torch.Generator().manual_seed(3), device="cpu")
ROWS = ((0, 0), (1, 4))
CHOICES = ["**.expert_indices", "**.indexer_selection"]


def metric(logits):
    return (logits[:, -1, 3] - logits[:, -1, 7]).mean() + logits[:, 8, 1].sum()


def run(ids, names=(), model=MODEL, **keywords):
    with torch.no_grad():
        return model.run_with_cache(ids, list(names), attention_mask=MASK, **keywords)


def by_hand(name, where, ids=CLEAN, other=CORRUPT):
    """The metric with the other run's value at the elements that where(mask, value) marks."""
    source = run(other, [name])[1][name]

    def put(value, hook):
        mask = torch.zeros_like(value, dtype=torch.bool)
        where(mask)
        return torch.where(mask, source, value)

    with torch.no_grad():
        return float(metric(MODEL.run_with_hooks(ids, [(name, put)], attention_mask=MASK)))


def sweep(over, **keywords):
    keywords = {"attention_mask": MASK, "progress": False} | keywords
    return MODEL.patch_sweep(CLEAN, CORRUPT, metric, over, **keywords)


def mark(mask, pos, axis=None, number=None):
    """Positions of each row (None: all), on an axis behind the token's if given."""
    for row, start in ROWS:
        length = 17 - start
        places = range(17) if pos is None else [start + (pos + length if pos < 0 else pos)]
        for place in places:
            if place < 17:
                at = mask[row, place]
                (at if axis is None else at.select(axis, number)).fill_(True)


def test_layers_and_positions():
    found = sweep({"name": "layer_output", "layers": [1, 4], "pos": [0, 5, -1]}, batch=4)
    assert found.axes == {"layers": [1, 4], "pos": [0, 5, -1]}
    assert found.base == pytest.approx(float(metric(run(CLEAN)[0])), abs=1e-6)
    assert found.other == pytest.approx(float(metric(run(CORRUPT)[0])), abs=1e-6)
    for i, layer in enumerate((1, 4)):
        for j, pos in enumerate((0, 5, -1)):
            expected = by_hand(f"layers.{layer}.layer_output", lambda m, p=pos: mark(m, p))
            assert float(found.metric[i, j]) == pytest.approx(expected, abs=2e-5)
    assert torch.allclose(found.at(layers=4), found.effect[1])
    assert float(found.at(layers=1, pos=-1)) == float(found.effect[0, 2])
    assert torch.allclose(found.normalised * (found.other - found.base), found.effect)
    assert "layers=" in str(found)
    with pytest.raises(KeyError, match="pos=3 is not among"):
        found.at(pos=3)
    with pytest.raises(KeyError, match="no axis"):
        found.at(heads=3)


def test_denoising():
    found = sweep({"name": "mlp_output", "layers": 3}, direction="denoise")
    expected = by_hand("layers.3.mlp.mlp_output", lambda m: m.fill_(True), CORRUPT, CLEAN)
    assert float(found.metric[0]) == pytest.approx(expected, abs=2e-5)
    assert found.base == pytest.approx(float(metric(run(CORRUPT)[0])), abs=1e-6)


PARTS = [
    ("attention_head_outputs", "heads", 0),
    ("attention_premix", "heads", None),
    ("layer_mid", "streams", 0),
    ("expert_outputs", "slots", 0),
    ("router_selection_scores", "experts", 0),
]


@pytest.mark.parametrize(("value", "part", "axis"), PARTS)
def test_parts(value, part, axis):
    numbers = [0, 1]
    layers = [3] if value == "router_selection_scores" else [1, 3]
    found = sweep({"name": value, "layers": layers, "pos": [6], part: numbers}, batch=3)
    assert list(found.axes) == ["layers", "pos", part]
    for i, layer in enumerate(layers):
        (name,) = [n for n in MODEL.hook_dict if n.startswith(f"layers.{layer}.") and leaf(n) == value]
        for number in numbers:

            def where(mask, number=number):
                if axis is None:
                    mask = mask.unflatten(-1, (MODEL.num_heads, -1))
                mark(mask, 6, 0, number)

            assert float(found.metric[i, 0, number]) == pytest.approx(by_hand(name, where), abs=2e-5)


def test_every_head_of_every_layer():
    found = sweep({"name": "attention_head_outputs", "heads": "each"}, batch=5)
    assert found.axes == {"layers": list(range(6)), "heads": list(range(4))}
    assert not bool(found.metric.isnan().any())


def test_scores_with_heads_first():
    """attention_scores has its heads before its tokens."""
    found = sweep({"name": "attention_scores", "layers": [2], "pos": [9], "heads": [3]})
    expected = by_hand(
        "layers.2.self_attn.attention_scores",
        lambda m: [m[row, 3, start + 9].fill_(True) for row, start in ROWS],
    )
    assert float(found.metric) == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("layer", [1, 4])
def test_experts_in_whatever_slot(layer):
    """An expert's part of the routed output, by expert and not by slot."""
    found = sweep({"name": "expert_outputs", "layers": [layer], "pos": [-1], "experts": "each"})
    names = [f"layers.{layer}.mlp.{x}" for x in ("expert_outputs", "expert_indices")]
    caches = [run(ids, names)[1] for ids in (CORRUPT, CLEAN)]
    for expert in range(MODEL.num_experts):
        parts = [(c[names[0]] * (c[names[1]] == expert).unsqueeze(-1)).sum(2)[:, -1] for c in caches]

        def put(value, hook, parts=parts):
            value[:, -1] += parts[0] - parts[1]

        with torch.no_grad():
            hooks = [(f"layers.{layer}.mlp.routed_output", put)]
            expected = metric(MODEL.run_with_hooks(CLEAN, hooks, attention_mask=MASK))
        assert float(found.metric[0, 0, expert]) == pytest.approx(float(expected), abs=2e-5)


def test_values_of_the_model_and_names_together():
    found = sweep({"name": "token_embeddings", "pos": [3]})
    expected = by_hand("token_embeddings", lambda m: mark(m, 3))
    assert float(found.metric) == pytest.approx(expected, abs=2e-5)
    found = sweep({"name": "final_norm_output", "pos": [-1]})
    expected = by_hand("final_norm_output", lambda m: mark(m, -1))
    assert float(found.metric) == pytest.approx(expected, abs=2e-5)
    found = sweep({"name": ["attention_output", "mlp_output"], "layers": [5, 2]}, batch=1)
    assert found.axes == {"name": ["attention_output", "mlp_output"], "layers": [2, 5]}
    for i, name in enumerate(("self_attn.attention_output", "mlp.mlp_output")):
        for j, layer in enumerate((2, 5)):
            expected = by_hand(f"layers.{layer}.{name}", lambda m: m.fill_(True))
            assert float(found.metric[i, j]) == pytest.approx(expected, abs=2e-5)


def test_flips_are_counted():
    found = sweep({"name": "layer_output", "layers": [0, 3], "pos": [2]})
    for i, layer in enumerate((0, 3)):
        name = f"layers.{layer}.layer_output"
        source, base = run(CORRUPT, [name])[1][name], run(CLEAN, CHOICES)[1]

        def put(value, hook, source=source):
            mask = torch.zeros_like(value, dtype=torch.bool)
            mark(mask, 2)
            return torch.where(mask, source, value)

        with MODEL.hooks([(name, put)]):
            edited = run(CLEAN, CHOICES)[1]
        counts = {"expert_indices": 0, "indexer_selection": 0}
        for choice in base:
            for row, start in ROWS:
                for before, after in zip(
                    base[choice][row, start:].tolist(),
                    edited[choice][row, start:].tolist(),
                    strict=True,
                ):
                    counts[leaf(choice)] += len(set(before) - {-1} - set(after))
        assert int(found.routing_flips[i, 0]) == counts["expert_indices"]
        assert int(found.selection_flips[i, 0]) == counts["indexer_selection"]
        assert counts["expert_indices"] > 0
    assert int(found.selection_flips.sum()) > 0


def test_frozen_sweeps_flip_nothing():
    """Contexts around a sweep act in all its runs."""
    ids = CLEAN[:1]
    clean = MODEL.run_with_cache(ids, CHOICES)[1]
    with torch.no_grad(), MODEL.freeze(clean):
        found = MODEL.patch_sweep(ids, CORRUPT[:1], metric, {"name": "layer_output", "pos": "each"}, progress=False)
    assert found.metric.shape == (6, 17)
    assert int(found.routing_flips.sum()) == int(found.selection_flips.sum()) == 0
    assert bool((found.effect != 0).any())
    assert MODEL.list_hooks() == []


class StoppedError(Exception):
    pass


def test_a_stopped_sweep_goes_on(tmp_path):
    over = {"name": "attention_output", "pos": [1, 3, 4], "layers": [0, 1, 5]}
    whole, path, calls = sweep(over), tmp_path / "sweep.safetensors", []

    def stopping(logits):
        calls.append(1)
        if len(calls) > 6:
            raise StoppedError
        return metric(logits)

    with pytest.raises(StoppedError):
        MODEL.patch_sweep(CLEAN, CORRUPT, stopping, over, attention_mask=MASK, batch=2, file=path, progress=False)
    calls.clear()
    found = MODEL.patch_sweep(
        CLEAN,
        CORRUPT,
        lambda x: calls.append(1) or metric(x),
        over,
        attention_mask=MASK,
        batch=2,
        file=path,
        progress=False,
    )
    # Two for the runs without a patch, and the six patches that were left.
    assert len(calls) == 8
    assert torch.allclose(found.metric, whole.metric, atol=2e-5)
    assert torch.equal(found.routing_flips, whole.routing_flips)
    calls.clear()
    again = sweep(over, file=path)
    assert torch.equal(again.metric, found.metric)
    with pytest.raises(ValueError, match="another sweep"):
        sweep({**over, "pos": [1, 3, 5]}, file=path)
    assert [p.name for p in tmp_path.iterdir()] == ["sweep.safetensors"]


def test_kept_logits_and_text_lengths():
    def last(logits):
        assert logits.shape[1] == 1
        return logits[:, 0, 3].sum()

    found = MODEL.patch_sweep(
        CLEAN,
        CORRUPT,
        last,
        {"name": "layer_output", "layers": [5], "pos": [-1]},
        attention_mask=MASK,
        logits_to_keep=1,
        progress=False,
    )
    with torch.no_grad():
        assert float(found.metric) == pytest.approx(found.other, abs=2e-5)
    estimates = MODEL.attribution_patch(CLEAN, CORRUPT, last, "logits", attention_mask=MASK, logits_to_keep=1)
    assert estimates["logits"].shape == (2, 1)


def test_wrong_sweeps():
    wrong = [
        ({"layers": [1]}, {}, ValueError, "expected a name"),
        ({"name": "layer_output", "rows": [1]}, {}, ValueError, "expected a name"),
        ({"name": "layers.3.layer_output"}, {}, KeyError, "last part of no name"),
        ({"name": "layer_output", "layers": [9]}, {}, ValueError, "layers: got 9"),
        ({"name": "indexer_scores", "layers": [0]}, {}, KeyError, "no indexer"),
        ({"name": "logits", "layers": [0]}, {}, ValueError, "without layers"),
        ({"name": "layer_output", "heads": [0]}, {}, ValueError, "no axis of heads"),
        ({"name": "expert_outputs", "slots": [0], "experts": [1]}, {}, ValueError, "one kind"),
        ({"name": "layer_output", "pos": [40]}, {}, ValueError, "pos 40 is outside"),
        (
            {"name": "compressed_entries", "layers": [1], "pos": [1]},
            {},
            ValueError,
            "no token axis",
        ),
        ({"name": "attention_sinkhorn"}, {}, ValueError, "read-only"),
        ({"name": ["expert_outputs", "router_logits"], "experts": [1]}, {}, ValueError, "alone"),
        ({"name": "layer_output"}, {"batch": 0}, ValueError, "batch=0"),
        ({"name": "layer_output"}, {"direction": "both"}, ValueError, "direction='both'"),
    ]
    for over, keywords, kind, text in wrong:
        with pytest.raises(kind, match=text):
            sweep(over, **keywords)
    with pytest.raises(ValueError, match="as many tokens"):
        MODEL.patch_sweep(CLEAN, CORRUPT[:, 1:], metric, {"name": "layer_output"})
    for bad in (lambda x: x, lambda x: 1.0):
        with pytest.raises(ValueError, match="one number"):
            MODEL.patch_sweep(CLEAN, CORRUPT, bad, {"name": "layer_output"})
    assert MODEL.list_hooks() == []


# Estimates.

ESTIMATED = [
    "layers.0.layer_input",
    "layers.1.self_attn.attention_scores",
    "layers.2.self_attn.attention_premix",
    "layers.3.mlp.expert_neurons",
    "layers.4.self_attn.compressor.compressed_entries",
    "layers.5.attention_comb",
    "layers.5.mlp.router_scores",
    "readout",
]


@pytest.fixture(scope="module")
def exact():
    """A model in float64, whose steps may be small."""
    return Dsv4.from_config(every_kind(), seed=9, dtype=torch.float64)


def test_estimates_are_slopes(exact):
    """Of the metric, from the value towards the other one, choices held."""
    found = exact.attribution_patch(CLEAN, CORRUPT, metric, ESTIMATED, attention_mask=MASK)
    base, other = (run(ids, [*ESTIMATED, *CHOICES], exact)[1] for ids in (CLEAN, CORRUPT))
    assert list(found) == ESTIMATED
    assert found.axes["layers.2.self_attn.attention_premix"] == "b s N"
    assert found.axes["layers.3.mlp.expert_neurons"] == "b s top_k I"
    assert found["layers.0.layer_input"].shape == (2, 17, 4)
    for name in ESTIMATED:
        for row in (0, 1):

            def step(value, hook, row=row):
                change = (other[hook.name] - value).nan_to_num(0.0, 0.0, 0.0)
                value = value.clone()
                value[row] += 1e-6 * change[row]
                return value

            moved = []
            with torch.no_grad(), exact.freeze(base, CHOICES):
                moved = exact.run_with_hooks(CLEAN, [(name, step)], attention_mask=MASK)
                slope = (metric(moved) - metric(exact(CLEAN, attention_mask=MASK))) / 1e-6
            assert float(found[name][row].sum()) == pytest.approx(float(slope), rel=1e-3, abs=1e-6)
        assert float(found[name].abs().sum()) > 0
    assert found.total()["readout"] == pytest.approx(float(found["readout"].sum()))
    assert len(found.top(3)) == 3


def test_estimates_are_exact_where_the_metric_is_linear():
    names = ["logits"]
    found = MODEL.attribution_patch(CLEAN, CORRUPT, metric, names, attention_mask=MASK)
    assert found.total()["logits"] == pytest.approx(found.other - found.base, abs=1e-5)


def test_estimates_leave_nothing_behind():
    frozen = watched_model(seed=9)
    frozen.requires_grad_(False)
    names = ["layers.*.mlp.**", "token_embeddings"]
    with torch.no_grad():
        found = frozen.attribution_patch(CLEAN, CORRUPT, metric, names, attention_mask=MASK)
    other = MODEL.attribution_patch(CLEAN, CORRUPT, metric, names, attention_mask=MASK)
    assert list(found) == list(other)
    assert not any("expert_indices" in name for name in found)
    for name in found:
        assert torch.equal(found[name], other[name])
        assert not found[name].requires_grad
    assert all(p.grad is None for p in MODEL.parameters())
    assert MODEL.list_hooks() == []
    with pytest.raises(KeyError, match="no estimate"):
        found["layers.9"]
    with pytest.raises(ValueError, match="no value with a gradient"):
        MODEL.attribution_patch(CLEAN, CORRUPT, metric, "**.expert_indices")
    with pytest.raises(ValueError, match="has no gradient"):
        MODEL.attribution_patch(CLEAN, CORRUPT, lambda x: x.detach().sum(), names)


# Paths.


def test_paths_are_what_one_sender_changes_of_what_is_read():
    """Against a run in which all writes and all mixing are held, and one sender is not."""
    written = ["token_embeddings", "**.attention_output", "**.mlp_output"]
    mixing = ["**.attention_pre", "**.attention_post", "**.attention_comb", "readout_weights"]
    mixing += [name.replace("attention", "mlp") for name in mixing[:3]]
    reads = ["layers.1.mlp_collapsed", "layers.3.attention_collapsed", "readout"]
    clean = run(CLEAN, [*written, *mixing])[1]
    corrupt = run(CORRUPT, written)[1]
    senders = ["token_embeddings", "layers.1.self_attn.attention_output", "layers.2.mlp.mlp_output"]
    found = MODEL.path_patch(CLEAN, CORRUPT, senders, reads, metric, attention_mask=MASK, batch=2)
    assert found.axes == {"senders": senders, "receivers": reads}
    for i, sender in enumerate(senders):
        hook = (sender, lambda v, hook: corrupt[hook.name])
        with torch.no_grad(), MODEL.freeze(clean, [*written, *mixing]), MODEL.hooks([hook]):
            changed = run(CLEAN, reads)[1]
        for j, read in enumerate(reads):
            with torch.no_grad():
                put = (read, lambda v, hook, to=changed[read]: to)
                expected = metric(MODEL.run_with_hooks(CLEAN, [put], attention_mask=MASK))
            assert float(found.metric[i, j]) == pytest.approx(float(expected), abs=5e-5), (i, j)
    assert bool((found.effect[2, :1] == 0).all())
    assert float(found.effect[2, 1]) != 0


def test_heads_add_up_to_their_attention():
    """What is linear in the readout is a sum over heads, and over both parts of a mixture."""
    names = ["layers.4.self_attn.attention_head_results", "layers.4.self_attn.attention_output"]
    names += [f"layers.4.mlp.{x}" for x in ("routed_output", "shared_expert_output", "mlp_output")]
    before = {}

    def linear(logits):
        return before["readout"].double().sum().float() + 0 * logits.sum()

    handle = MODEL.add_hook("readout", lambda v, hook: before.update({"readout": v[:, -1].clone()}))
    with handle:
        found = MODEL.path_patch(CLEAN[:1], CORRUPT[:1], names, "readout", linear, batch=1)
    labels = found.axes["senders"]
    effect = dict(zip(labels, found.effect[:, 0].tolist(), strict=True))
    heads = sum(effect[(names[0], h)] for h in range(4))
    assert heads == pytest.approx(effect[names[1]], abs=1e-4)
    parts = effect[names[2]] + effect[names[3]]
    assert parts == pytest.approx(effect[names[4]], abs=1e-4)


def test_wrong_paths():
    good = "layers.3.attention_collapsed"
    for senders, receivers, text in (
        ("layers.1.layer_output", good, "is no sender"),
        ("token_embeddings", "layers.3.layer_input", "is no receiver"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            MODEL.path_patch(CLEAN, CORRUPT, senders, receivers, metric)
    with pytest.raises(KeyError, match="nearest"):
        MODEL.path_patch(CLEAN, CORRUPT, "token_embedding", good, metric)


# What a sweep reuses of the unpatched run.


@contextmanager
def tokens_counted(monkeypatch):
    """How many tokens blocks are given inside, summed over blocks: {"run": count}."""
    counts, forward = {"run": 0}, Block.forward

    def counting(block, streams, *args):
        counts["run"] += streams.shape[0] * streams.shape[1]
        return forward(block, streams, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Block, "forward", counting)
        yield counts


def models_and_rows():
    """Random models with every kind of block; rows padded left, right, not at all, and alone."""
    for seed in range(6):
        draw = random.Random(700 + seed)
        kinds = [*draw.sample((SLIDING, CSA, HCA), 3), draw.choice((CSA, HCA))]
        rates = {CSA: draw.choice((2, 4)), HCA: draw.choice((3, 6))}
        config = random_config(
            draw,
            num_hidden_layers=4,
            layer_types=kinds,
            mlp_layer_types=draw.sample((HASH_MOE, MOE, MOE, HASH_MOE), 4),
            compress_rates=rates,
            index_topk=draw.choice((1, 2)),
        )
        model = Dsv4.from_config(config, seed=seed)
        rows = 1 if seed == 0 else 3
        mask = torch.ones(rows, 21, dtype=torch.int64)
        if rows == 3:
            mask[1, : draw.randint(1, 9)] = 0
            mask[2, 21 - draw.randint(1, 9) :] = 0
        yield model, random_ids(config, rows, 21, seed), random_ids(config, rows, 21, 99), mask


OVERS = [
    {"name": "layer_output", "pos": [-1, -2]},
    {"name": "layer_input", "pos": [11, 19, -3]},
    {"name": ["attention_output", "mlp_output"], "pos": "each"},
    {"name": "attention_queries", "layers": [0, 1], "pos": [14], "heads": [0]},
    {"name": "expert_outputs", "layers": [1, 0], "pos": [-1, 9], "experts": [0]},
    {"name": "expert_outputs", "pos": [9, 20], "slots": [0]},
    {"name": "token_embeddings", "pos": [8, -1]},
]


class Weighed:
    """A metric of all real logits that writes into them, and keeps what it was given."""

    def __init__(self, weights):
        self.weights, self.seen = weights, []

    def __call__(self, logits):
        self.seen.append(logits.clone())
        return logits.mul_(self.weights).sum()


@pytest.mark.parametrize("keep", [None, 4])
@pytest.mark.parametrize("over", OVERS, ids=lambda over: str(over["name"]))
def test_reused_prefixes_change_nothing(over, keep, monkeypatch):
    """Against the same sweep with a hook attached that does nothing, which reuses none."""
    saved, flips = 0, torch.zeros(2, dtype=torch.int64)
    for model, clean, corrupt, mask in models_and_rows():
        real = mask.bool() if keep is None else torch.ones(len(clean), keep, dtype=torch.bool)
        generator = torch.Generator().manual_seed(5)
        weights = torch.randn(*real.shape, model.vocab_size, generator=generator)
        weights = weights * real.unsqueeze(-1)
        ways = []
        for nothing in ([], [("readout", lambda value, hook: None)]):
            weighed = Weighed(weights)
            run = {"attention_mask": mask, "logits_to_keep": keep, "batch": 3, "progress": False}
            with tokens_counted(monkeypatch) as counts, model.hooks(nothing):
                effects = model.patch_sweep(clean, corrupt, weighed, over, **run)
            ways.append((effects, weighed.seen, counts["run"]))
        (found, ours, count), (expected, theirs, count_of_all) = ways
        for one, other in zip(ours, theirs, strict=True):
            assert one.shape == other.shape
            assert_close(one[real], other[real], "reused prefix")
        assert_close(found.metric, expected.metric, "reused prefix")
        assert (found.base, found.other) == (expected.base, expected.other)
        assert torch.equal(found.routing_flips, expected.routing_flips)
        assert torch.equal(found.selection_flips, expected.selection_flips)
        assert count <= count_of_all
        saved += count_of_all - count
        flips += torch.stack((found.routing_flips.sum(), found.selection_flips.sum()))
    assert saved > 0
    assert bool((flips > 0).all())


@pytest.mark.parametrize("value", ["layer_output", "attention_queries_unrotated", "mlp_output"])
def test_reused_prefixes_against_runs_by_hand(value, monkeypatch):
    for model, clean, corrupt, mask in models_and_rows():
        places = [-1, 13, 2]

        def weighed(logits, mask=mask):
            return (logits * mask.unsqueeze(-1)).square().mean()

        found = model.patch_sweep(
            clean,
            corrupt,
            weighed,
            {"name": value, "pos": places},
            attention_mask=mask,
            batch=1,
            progress=False,
        )
        for i in range(4):
            (name,) = [n for n in names_of(model, [value]) if n.startswith(f"layers.{i}.")]
            source = model.run_with_cache(corrupt, [name], attention_mask=mask)[1][name]
            for j, pos in enumerate(places):

                def put(v, hook, source=source, pos=pos, mask=mask):
                    for row, real in enumerate(mask.bool()):
                        columns = real.nonzero().flatten().tolist()
                        if pos < len(columns):
                            heads = [slice(None)] * hook.axes.split()[1:].index("s")
                            at = (row, *heads, columns[pos])
                            v[at] = source[at]

                with torch.no_grad():
                    logits = model.run_with_hooks(clean, [(name, put)], attention_mask=mask)
                assert float(found.metric[i, j]) == pytest.approx(float(weighed(logits)), rel=1e-5)


def test_how_many_tokens_a_sweep_runs(monkeypatch):
    """Late positions: each prefix token once. Early ones and late layers: from the layer on."""
    ids, other = CLEAN[:1], CORRUPT[:1]

    def run_sweep(over, metric=lambda x: x.mean(), **keywords):
        with tokens_counted(monkeypatch) as counts:
            MODEL.patch_sweep(ids, other, metric, over, progress=False, **keywords)
        # Without the three runs of all tokens: both metrics, and the values of the other input.
        return counts["run"] - 3 * 6 * 17

    # Four layers of one patch: 15 tokens of prefix once, then two tokens in each of six layers.
    assert run_sweep({"name": "layer_input", "layers": [0, 1, 2, 3], "pos": [-2]}) == 6 * (15 + 8)
    # Two patches in a run: from the first of them on.
    assert run_sweep({"name": "layer_input", "layers": [0], "pos": [12, 16]}) == 6 * (12 + 2 * 5)
    # The first token: nothing to reuse but the layers before. The last layer: 17 < 6 * 8.
    assert run_sweep({"name": "layer_input", "layers": [2], "pos": [0]}) == (2 + 4) * 17
    assert run_sweep({"name": "layer_input", "layers": [5], "pos": [9]}) == (5 + 1) * 17
    assert run_sweep({"name": "layer_input", "layers": [5], "pos": [15]}) == 6 * (15 + 2)
    # Keys and entries move with the tokens that are run, and hooks may count columns.
    scores = {"name": "attention_scores", "layers": [0], "pos": [-1]}
    assert run_sweep(scores) == 6 * 17
    with MODEL.ablate("layers.1.mlp.mlp_output", pos=-1):
        assert run_sweep({"name": "layer_input", "layers": [0], "pos": [-2]}) == 6 * 17
    with MODEL.skip_layers(3):
        found = run_sweep({"name": "layer_input", "layers": [0], "pos": [-2]})
        assert found == 5 * 17 - 3 * 17


def test_bfloat16():
    """Logits of patched runs by hand, with prefixes reused and without: each way rounds in every
    block. Estimates of the logits themselves are exact.
    """
    model = watched_model(torch.bfloat16, seed=9)
    seen = []

    def keeping(logits):
        seen.append(logits[:, 4:].clone())
        return logits[:, 4:].mean()

    for layer in (1, 4):
        name = f"layers.{layer}.layer_output"
        source = run(CORRUPT, [name], model)[1][name]
        for pos in (3, -1):

            def put(value, hook, source=source, pos=pos):
                mask = torch.zeros_like(value, dtype=torch.bool)
                mark(mask, pos)
                return torch.where(mask, source, value)

            with torch.no_grad():
                expected = model.run_with_hooks(CLEAN, [(name, put)], attention_mask=MASK)[:, 4:]
            over = {"name": "layer_output", "layers": [layer], "pos": [pos]}
            for nothing in ([], [("readout", lambda value, hook: None)]):
                seen.clear()
                with model.hooks(nothing):
                    model.patch_sweep(CLEAN, CORRUPT, keeping, over, attention_mask=MASK, progress=False)
                assert_close(seen[-1], expected, "bfloat16 way", f"{name} {pos}")
    found = model.attribution_patch(CLEAN, CORRUPT, metric, "logits", attention_mask=MASK)
    assert found.total()["logits"] == pytest.approx(found.other - found.base, abs=1e-5)
