"""cache.moe against counts made token by token."""

import math
import random
from collections import Counter
from itertools import combinations

import pytest
import torch

from dsv4 import ActivationCache, Dsv4
from dsv4.testing import assert_close, random_config, random_ids
from dsv4.testing_probes import changed, padded_batch, watched_model

MODEL = watched_model(seed=3)
IDS, MASK = padded_batch(MODEL.vocab_size)
REAL = MASK.bool()
ROUTING = ["**.expert_indices", "**.expert_weights", "**.router_selection_scores"]


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def models():
    for seed in range(8):
        config = random_config(random.Random(300 + seed))
        model = Dsv4.from_config(config, seed=seed)
        ids, mask = random_ids(config, 2, 15, seed), torch.ones(2, 15, dtype=torch.int64)
        mask[1, slice(0, 5) if seed % 2 else slice(10, 15)] = 0
        yield model, ids, mask


def scored(model):
    return [i for i in range(model.num_layers) if model.layers[i].mlp.scoring != "hash"]


def names_for(model):
    return ROUTING if scored(model) else ROUTING[:2]


def test_counts():
    for model, ids, mask in models():
        _, cache = model.run_with_cache(ids, names_for(model), attention_mask=mask)
        moe, real = cache.moe, mask.bool()
        assert moe.tokens == 25
        usage, load, pairs = moe.usage(), moe.load(), moe.coactivation()
        for i in range(model.num_layers):
            indices, weights = cache["expert_indices", i][real].tolist(), cache["expert_weights", i][real].tolist()
            counted, weighed, together = Counter(), Counter(), Counter()
            for token, amounts in zip(indices, weights, strict=True):
                counted.update(token)
                for e, w in zip(token, amounts, strict=True):
                    weighed[e] += w
                together.update((e, e) for e in set(token))
                together.update(pair for pair in combinations(sorted(set(token)), 2))
            experts = range(model.num_experts)
            assert usage[i].tolist() == [counted[e] for e in experts]
            assert usage[i].dtype == pairs[i].dtype == torch.int64
            assert load[i].tolist() == pytest.approx([weighed[e] for e in experts], rel=1e-5, abs=1e-6)
            assert pairs[i].tolist() == [[together[min(a, b), max(a, b)] for b in experts] for a in experts]
            assert int(usage[i].sum()) == 25 * model.top_k
            assert float(load[i].sum()) == pytest.approx(25 * model.config.routed_scaling_factor, rel=1e-4)


def test_entropies():
    for model, ids, mask in models():
        _, cache = model.run_with_cache(ids, names_for(model), attention_mask=mask)
        of_tokens, of_usage, of_load = (cache.moe.entropy(of) for of in ("weights", "usage", "load"))
        real = mask.bool()

        def entropy(amounts):
            total = sum(amounts)
            return -sum(x / total * math.log(x / total) for x in amounts if x > 0)

        for i in range(model.num_layers):
            assert of_tokens[i].shape == (2, 15)
            assert torch.equal(of_tokens[i].isnan(), ~real)
            expected = [entropy(w) for w in cache["expert_weights", i][real].tolist()]
            assert of_tokens[i][real].tolist() == pytest.approx(expected, abs=1e-5)
            assert float(of_usage[i]) == pytest.approx(entropy(cache.moe.usage()[i].tolist()), abs=1e-5)
            assert float(of_load[i]) == pytest.approx(entropy(cache.moe.load()[i].tolist()), abs=1e-5)
        assert "entropy" in str(of_tokens)
    with pytest.raises(ValueError, match="of='experts'"):
        cache.moe.entropy("experts")


def test_margins():
    seen = set()
    for model, ids, mask in models():
        if not scored(model):
            assert not model.run_with_cache(ids)[1].moe.router_margin()
            continue
        _, cache = model.run_with_cache(ids, ROUTING, attention_mask=mask)
        margins, real = cache.moe.router_margin(), mask.bool()
        assert margins.layers == scored(model)
        for i, margin in margins.items():
            assert torch.equal(margin.isnan(), ~real)
            for value, scores in zip(margin[real].tolist(), cache["router_selection_scores", i][real].tolist(), strict=True):
                best = sorted(scores, reverse=True)
                every = len(best) == model.top_k
                seen.add(every)
                assert value == pytest.approx(math.inf if every else best[model.top_k - 1] - best[model.top_k], rel=1e-5, abs=1e-7)
    assert seen == {False, True}


def test_an_edit_below_the_margin_moves_no_expert():
    """What the margin means: raising everyone left out by less changes no choice, by more changes it."""
    _, cache = MODEL.run_with_cache(IDS, ROUTING, attention_mask=MASK)
    margin, name = cache.moe.router_margin()[4], "layers.4.mlp.router_selection_scores"
    chosen = torch.zeros_like(cache[name]).scatter(-1, cache["expert_indices", 4], 1.0)
    for share, moves in ((0.9, False), (1.1, True)):

        def raise_others(scores, hook, share=share):
            return scores + (1 - chosen) * share * margin.nan_to_num().unsqueeze(-1)

        with MODEL.hooks([(name, raise_others)]):
            _, after = MODEL.run_with_cache(IDS, "layers.4.mlp.expert_indices", attention_mask=MASK)
        same = (after["expert_indices", 4].sort(-1).values == cache["expert_indices", 4].sort(-1).values).all(-1)
        assert same[REAL].all() if not moves else not same[REAL].any()


def test_the_residual_set_is_enough_and_edits_count_as_they_are():
    _, cache = MODEL.run_with_cache(IDS, attention_mask=MASK)
    assert cache.moe.usage().layers == list(range(6))
    cache.moe.load()
    cache.moe.coactivation()
    with MODEL.hooks([("layers.2.mlp.expert_indices", changed)]):
        _, edited = MODEL.run_with_cache(IDS, attention_mask=MASK)
    assert torch.equal(edited.moe.usage()[2].roll(-1), cache.moe.usage()[2])


def test_caches_of_every_shape(tmp_path):
    _, cache = MODEL.run_with_cache(IDS, ROUTING, attention_mask=MASK)
    _, last = MODEL.run_with_cache(IDS, ROUTING, attention_mask=MASK, pos=-1)
    assert last.moe.tokens == 2
    assert last.moe.entropy()[1].tolist() == cache.moe.entropy()[1][:, -1].tolist()
    assert last.moe.router_margin()[4].tolist() == cache.moe.router_margin()[4][:, -1].tolist()
    assert int(last.moe.usage()[0].sum()) == 4
    _, one = MODEL.run_with_cache(IDS[:1], ROUTING)
    flat = one.remove_batch_dim()
    assert torch.equal(flat.moe.usage()[3], one.moe.usage()[3])
    assert flat.moe.entropy()[3].shape == (19,)
    assert str(flat.moe.router_margin()) == str(one.moe.router_margin())
    cache.save(tmp_path / "x")
    loaded = ActivationCache.load(tmp_path / "x")
    with pytest.raises(ValueError, match="with_model"):
        loaded.moe.usage()
    assert torch.equal(loaded.with_model(MODEL).moe.coactivation()[5], cache.moe.coactivation()[5])
    out, generated = MODEL.generate(IDS[:1], max_new_tokens=3, names=ROUTING, eos_token_id=None)
    _, again = MODEL.run_with_cache(out[:, :-1], ROUTING)
    assert torch.equal(generated.moe.usage().stack(), again.moe.usage().stack())


def test_missing_values_and_wrong_layers():
    _, cache = MODEL.run_with_cache(IDS, ["layers.1.mlp.expert_indices", "layers.5.mlp.expert_indices"])
    assert cache.moe.usage().layers == [1, 5]
    with pytest.raises(ValueError, match=r"layers\.\*\.mlp\.expert_weights"):
        cache.moe.load()
    with pytest.raises(ValueError, match=r"layers\.3\.mlp\.expert_indices"):
        cache.moe.coactivation(layers=[1, 3])
    with pytest.raises(ValueError, match=r"layers\.\*\.mlp\.router_selection_scores"):
        cache.moe.router_margin()
    with pytest.raises(ValueError, match="hash block"):
        cache.moe.router_margin(layers=1)
    with pytest.raises(ValueError, match="went through layers"):
        cache.moe.usage(layers=[7])


def test_bfloat16():
    """What decides is float32 in a bfloat16 model: readings keep the error of one float32 op."""
    model = watched_model(torch.bfloat16, seed=3)
    _, cache = model.run_with_cache(IDS, ROUTING, attention_mask=MASK)
    moe = cache.moe
    for i in range(model.num_layers):
        indices, weights = cache["expert_indices", i][REAL], cache["expert_weights", i][REAL].double()
        slots = torch.nn.functional.one_hot(indices, model.num_experts)
        assert_close(moe.usage()[i], slots.sum((0, 1)), "equal")
        assert_close(moe.coactivation()[i], torch.einsum("tke,tjf->ef", slots, slots), "equal")
        assert_close(moe.load()[i], (slots * weights.unsqueeze(-1)).sum((0, 1)), "float32 op")
        shares = weights / weights.sum(-1, keepdim=True)
        assert_close(moe.entropy()[i][REAL], torch.special.entr(shares).sum(-1), "float32 op")
        assert moe.load()[i].dtype == moe.entropy()[i].dtype == torch.float32
    for i, margin in moe.router_margin().items():
        best = cache["router_selection_scores", i][REAL].double().sort(-1, descending=True).values
        assert_close(margin[REAL], best[:, model.top_k - 1] - best[:, model.top_k], "float32 op")
