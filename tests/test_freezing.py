"""Freezing: a clean run's values put back under edits, padding, a KV cache and generation."""

import pytest
import torch

from dsv4 import ActivationCache
from dsv4.config import CSA, HASH_MOE, HCA, MOE, SLIDING
from dsv4.freezing import GROUPS
from dsv4.testing import assert_close
from dsv4.testing_probes import leaf, padded_batch, watched_model, writable

MODEL = watched_model(seed=4)
IDS, MASK = padded_batch(MODEL.vocab_size, seq=26, padding=9)
CLEAN = torch.randint(0, MODEL.vocab_size, (2, 26), generator=torch.Generator().manual_seed(1), device="cpu")
DECIDING = [name for names in GROUPS.values() for name in names]


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def run(ids, names, **keywords):
    return MODEL.run_with_cache(ids, names, max_bytes=None, **keywords)


def every(kind):
    return [name for name in MODEL.hook_dict if leaf(name) in kind]


def test_what_decides_is_replayed_under_an_edit():
    clean = run(CLEAN, None)[1]
    names = [name for name in every(DECIDING) if name in clean]
    assert len(names) == 6 * 8 + 1
    with MODEL.freeze(clean):
        changed = run(IDS, names, attention_mask=MASK)[1]
    for name in names:
        assert torch.equal(changed[name][0], clean[name][0]), name
        assert torch.equal(changed[name][1, 9:], clean[name][1, :17]), name
    assert MODEL.list_hooks() == []


@pytest.mark.parametrize("group", GROUPS)
def test_groups(group):
    names = every(GROUPS[group])
    clean = run(CLEAN, names)[1]
    with MODEL.freeze(clean, group):
        frozen = run(IDS, names)[1]
    for name in names:
        assert torch.equal(frozen[name], clean[name]), name
    hooks = [(name, lambda v, hook: clean[hook.name]) for name in names]
    with MODEL.freeze(clean, group):
        logits = MODEL(IDS)
    assert torch.equal(logits, MODEL.run_with_hooks(IDS, hooks))


# One block of each kind, for the many values.
SMALL = watched_model(seed=5, layer_types=[SLIDING, CSA, HCA], mlp_layer_types=[HASH_MOE, MOE, MOE])
VALUES = sorted({leaf(name) for name in writable(SMALL)} - {"lm_head_output", "logits"})


@pytest.mark.parametrize("value", VALUES)
def test_every_value_is_found_by_position(value):
    """In one forward by hand, under padding, in chunks and token by token: the same run."""
    names = [name for name in SMALL.hook_dict if leaf(name) == value]
    clean = SMALL.run_with_cache(CLEAN, names)[1]
    expected = SMALL.run_with_hooks(IDS, [(n, lambda v, hook: clean[hook.name]) for n in names])
    shifted, mask = torch.cat((IDS[:, :3], IDS), 1), torch.arange(29).expand(2, -1) >= 3
    with SMALL.freeze(clean, names):
        assert torch.equal(SMALL(IDS), expected)
        left = SMALL(shifted, attention_mask=mask)[:, 3:]
        kv = SMALL.new_kv_cache(2, 40)
        parts = [SMALL(part, kv_cache=kv) for part in IDS.split([11, 1, 7, 7], dim=1)]
    for found in (left, torch.cat(parts, 1)):
        assert (found - expected).abs().max() < 2e-4


def test_generation_goes_on_after_the_clean_run():
    names = every(DECIDING)
    clean = run(CLEAN[:1, :12], names)[1]
    with MODEL.freeze(clean):
        whole, cache = MODEL.generate(CLEAN[:1, :9], 8, names=names, align=True, eos_token_id=None)
        full = run(whole[:, :-1], names)[1]
    for name in names:
        if leaf(name) != "indexer_selection":
            assert torch.equal(cache[name][:, :12], clean[name]), name
            assert (cache[name].float() - full[name].float()).abs().max() < 1e-4, name
        else:
            ours, theirs = cache[name][:, :12], clean[name]
            assert torch.equal(ours.sort(-1).values, theirs.sort(-1).values), name


def test_caches_of_a_generation_are_replayed():
    names = every(["indexer_selection", "expert_indices", "attention_pre"])
    ids, clean = MODEL.generate(CLEAN[:1, :9], 8, names=names, eos_token_id=None)
    aligned = MODEL.generate(CLEAN[:1, :9], 8, names=names, eos_token_id=None, align=True)[1]
    logits = []
    for cache in (clean, aligned, run(ids[:, :-1], names)[1]):
        with MODEL.freeze(cache):
            logits.append(MODEL(IDS[:1]))
    assert torch.equal(logits[0], logits[1])
    assert (logits[0] - logits[2]).abs().max() < 1e-4


def test_sliced_caches_and_positions():
    names = ["layers.3.mlp.expert_indices", "layers.4.attention_pre"]
    whole, at, last = (run(CLEAN, names, pos=pos)[1] for pos in (None, [2, 5], -1))
    plain = run(IDS, names)[1]
    for cache, places, keywords in (
        (whole, [4, 25], {"pos": [4, -1]}),
        (at, [2, 5], {}),
        (last, [25], {}),
    ):
        with MODEL.freeze(cache, **keywords):
            found = run(IDS, names)[1]
        rest = [i for i in range(26) if i not in places]
        name = names[1]
        assert torch.equal(found[name][:, places], whole[name][:, places])
        assert torch.equal(found[names[0]][:, places], whole[names[0]][:, places])
        assert torch.equal(found[names[0]][:, rest], plain[names[0]][:, rest])
    one = run(CLEAN[:1], names)[1].remove_batch_dim()
    with MODEL.freeze(one):
        found = run(IDS, names)[1]
    for name in names:
        assert torch.equal(found[name], one[name].expand_as(found[name]))


def test_saved_caches(tmp_path):
    names = every(DECIDING)
    run(CLEAN, names, to=tmp_path / "clean.safetensors")
    saved = ActivationCache.load(tmp_path / "clean.safetensors")
    with MODEL.freeze(saved):
        found = MODEL(IDS)
    with MODEL.freeze(run(CLEAN, names)[1]):
        assert torch.equal(MODEL(IDS), found)


def test_wrong_freezing():
    clean = run(CLEAN, ["layers.3.mlp.expert_indices", "layers.1.attention_sinkhorn"])[1]
    wrong = [
        ((clean, "mixing"), {}, KeyError, "holds nothing of mixing"),
        ((clean, "layers.4.mlp.expert_indices"), {}, KeyError, "capture"),
        ((clean, "layers.4.mlp.no_such"), {}, KeyError, "nearest"),
        ((clean, "layers.1.attention_sinkhorn"), {}, ValueError, "read-only"),
        ((run(CLEAN, ["logits"])[1],), {}, KeyError, "no routing, selection or mixing"),
        ((clean,), {"pos": 1.5}, TypeError, "expected an int"),
    ]
    for args, keywords, kind, text in wrong:
        with pytest.raises(kind, match=text), MODEL.freeze(*args, **keywords):
            pass
    sliced = run(CLEAN, ["layers.2.self_attn.attention_scores"], pos=slice(0, 20))[1]
    with MODEL.freeze(sliced, "**"), pytest.raises(ValueError, match="without pos="):
        MODEL(IDS)
    with MODEL.freeze(clean, "routing"), pytest.raises(ValueError, match="holds 2 rows"):
        MODEL(IDS[:1].expand(3, -1))
    steps = MODEL.generate(CLEAN[:1], 3, names=["layers.2.self_attn.attention_scores"])[1]
    with pytest.raises(ValueError, match="align=True"), MODEL.freeze(steps, "**"):
        pass
    assert MODEL.list_hooks() == []


def test_bfloat16():
    """What is replayed is the same to the bit, in one forward, under padding and in chunks; what
    follows from it is rounded in every block.
    """
    model = watched_model(torch.bfloat16, seed=4)
    names = [*every(DECIDING), *every(["attention_output", "mlp_output"])]
    clean = model.run_with_cache(CLEAN, names)[1]
    with model.freeze(clean, names):
        logits, cache = model.run_with_cache(IDS, names)
        padded, shifted = model.run_with_cache(IDS, names, attention_mask=MASK)
        kv = model.new_kv_cache(2, 40)
        parts = [model(part, kv_cache=kv) for part in IDS.split([11, 1, 14], dim=1)]
    for name in names:
        assert cache[name].dtype == clean[name].dtype
        assert_close(cache[name], clean[name], "equal", name)
    for name in every(["attention_output", "mlp_output"]):
        assert_close(shifted[name][1, 9:], clean[name][1, :17], "equal", name)
    assert_close(torch.cat(parts, 1), logits, "bfloat16 way")
    assert_close(padded[0], logits[0], "bfloat16 way")
