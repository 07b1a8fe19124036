"""Captures over a generation: the values of one forward over all of its tokens but the last."""

import pytest
import torch

from dsv4 import Dsv4
from dsv4.steps import ABSENT, STEP_AXES
from dsv4.testing import LIMITS, fault_config, random_ids

LIMIT = LIMITS["fed value"].relative
# Scores of single heads are not masked: the full run also has them for entries that a step did not
# have yet.
UNMASKED = "indexer_head_scores"


@pytest.fixture(scope="module")
def model():
    return Dsv4.from_config(fault_config(), seed=3).requires_grad_(False)


@pytest.fixture(scope="module")
def ids(model):
    return random_ids(model.config, 2, 11, seed=4)


@pytest.fixture(scope="module")
def generated(model, ids):
    """(ids, listed, aligned, full): 13 new tokens, the captures both ways, and a full forward."""
    out, listed = model.generate(ids, 13, eos_token_id=None, names="**", max_bytes=None)
    same, aligned = model.generate(ids, 13, eos_token_id=None, names="**", align=True)
    assert torch.equal(out, same)
    return out, listed, aligned, model.run_with_cache(out[:, :-1], "**", max_bytes=None)[1]


def has_step_axis(model, name):
    return any(word in STEP_AXES for word in model.hook_dict[name].axes.split())


def assert_near(actual, expected, what):
    assert actual.shape == expected.shape, what
    assert actual.dtype == expected.dtype, what
    infinite = expected.isinf()
    assert torch.equal(actual.isinf(), infinite), what
    error = (actual.double() - expected.double()).masked_fill(infinite, 0).abs()
    largest = expected.double().masked_fill(infinite, 0).abs()
    if error.numel():
        assert float(error.max()) <= LIMIT * float(largest.max()), what


def test_every_value_aligned_is_that_of_a_full_forward(model, generated):
    _, _, aligned, full = generated
    assert list(aligned) == list(full) == list(model.hook_dict)
    for name, expected in full.items():
        ours = aligned[name]
        if name.endswith(UNMASKED):
            scores = full[name.replace("head_scores", "scores")]
            closed = ~scores.isinf().unsqueeze(2).expand_as(expected)
            assert ours.shape == expected.shape
            ours, expected = ours * closed, expected * closed
        assert_near(ours, expected, name)
    assert torch.equal(aligned.positions, full.positions)
    assert aligned.axes == full.axes


def test_values_that_only_grow_by_tokens_are_joined_without_asking(model, generated):
    _, listed, aligned, _ = generated
    for name, value in listed.items():
        assert isinstance(value, list) == has_step_axis(model, name), name
        if not has_step_axis(model, name):
            assert torch.equal(value, aligned[name])


def test_lists_hold_each_step_as_a_call_gives_it(model, ids, generated):
    out, listed, _, _ = generated
    kv = model.new_kv_cache(2, 40)
    for step in range(13):
        start, end = (0, 11) if step == 0 else (10 + step, 11 + step)
        _, cache = model.run_with_cache(out[:, start:end], "**", kv_cache=kv, max_bytes=None)
        for name, value in cache.items():
            if has_step_axis(model, name):
                assert_near(listed[name][step], value, f"{name}, step {step}")


def test_positions_run_on(model, ids):
    mask = torch.ones(2, 11)
    mask[1, :4] = 0
    _, cache = model.generate(ids, 5, attention_mask=mask, eos_token_id=None, names="layers.0.layer_output")
    assert cache.positions[0].tolist() == list(range(15))
    assert cache.positions[1].tolist() == [-1] * 4 + list(range(11))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_against_each_row_alone(model, ids, side):
    mask = torch.ones(2, 11, dtype=torch.int64)
    mask[1, slice(0, 4) if side == "left" else slice(7, 11)] = 0
    out, cache = model.generate(ids, 9, attention_mask=mask, eos_token_id=None, names="**", align=True, max_bytes=None)
    for r in range(2):
        real = cache.positions[r] >= 0
        row = out[r, :-1][real]
        _, alone = model.run_with_cache(row, "**", max_bytes=None)
        # The row's columns, then its entries.
        for name, expected in alone.items():
            words = model.hook_dict[name].axes.split()
            value = cache[name][r]
            for axis, word in enumerate(words[1:]):
                if word == "s":
                    value = value[(slice(None),) * axis + (real,)]
                elif word == "k":
                    entries = torch.arange(expected.shape[axis + 1] - len(row))
                    places = torch.cat((real.nonzero().flatten(), len(real) + entries))
                    value = value.index_select(axis, places)
                elif word in STEP_AXES:
                    value = value.narrow(axis, 0, expected.shape[axis + 1])
            if not name.endswith(UNMASKED):
                assert_near(value, expected[0], f"{name}, row {r}")


def test_rows_that_have_ended_keep_their_values_and_add_none(model, ids):
    free = model.generate(ids, 12, eos_token_id=None)
    eos = int(free[0, 11 + 3])
    names = ["layers.*.layer_output", "next_token_probs", "attention_mask", "**.indexer_keys"]
    out, cache = model.generate(ids, 12, eos_token_id=eos, names=names, align=True)
    new = out[0, 11:].tolist()
    held = 11 + new.index(eos)
    assert held < out.shape[1] - 1
    assert cache.positions[0].tolist() == [*range(held), *[-1] * (out.shape[1] - 1 - held)]
    _, alone = model.run_with_cache(out[:1, :held], names)
    assert_near(cache["layer_output", 3][:1, :held], alone["layer_output", 3], "layer_output")
    assert_near(cache["next_token_probs"][:1], alone["next_token_probs"], "next_token_probs")
    keys = alone["indexer_keys", 3]
    assert_near(cache["indexer_keys", 3][:1, : keys.shape[1]], keys, "indexer_keys")
    assert cache["attention_mask"][0].tolist() == (cache.positions[0] >= 0).long().tolist()


def test_what_a_cache_held_before_is_left_out(model, ids):
    out = model.generate(ids, 9, eos_token_id=None)
    kv = model.new_kv_cache(2, 40)
    model(ids[:, :6], kv_cache=kv)
    names = ["**.attention_scores", "**.attention_keys", "layers.1.layer_output"]
    _, cache = model.generate(ids[:, 6:], 9, eos_token_id=None, kv_cache=kv, names=names, align=True)
    _, full = model.run_with_cache(out[:, :-1], names, max_bytes=None)
    assert cache.positions[0].tolist() == list(range(6, 19))
    assert_near(cache["layer_output", 1], full["layer_output", 1][:, 6:], "layer_output")
    for layer in range(4):
        scores, keys = full["attention_scores", layer], full["attention_keys", layer]
        assert_near(cache["attention_scores", layer], scores[:, :, 6:, 6:], f"scores {layer}")
        assert_near(cache["attention_keys", layer], keys[:, :, 6:], f"keys {layer}")


def test_edits_show_in_what_is_captured(model, ids):
    vector = torch.linspace(-1, 1, model.hidden_size)
    with model.steer(vector, layers=[1]):
        out, cache = model.generate(ids, 6, eos_token_id=None, names="**.layer_output")
        _, full = model.run_with_cache(out[:, :-1], "**.layer_output")
    for name in full:
        assert_near(cache[name], full[name], name)


def test_no_names_and_device(model, ids):
    _, cache = model.generate(ids, 3, names=[])
    assert len(cache) == 0
    _, cache = model.generate(ids, 3, eos_token_id=None, names="**", device="cpu", align=True)
    assert {value.device.type for value in cache.values()} == {"cpu"}
    _, cache = model.generate(ids, 3, eos_token_id=None, names="**.layer_output", device="meta")
    assert {value.device.type for value in cache.values()} == {"meta"}


def test_captures_are_not_changed_by_later_steps_or_runs(model, ids):
    _, cache = model.generate(ids, 4, eos_token_id=None, names="**", align=True)
    copies = {name: value.clone() for name, value in cache.items()}
    model.generate(ids.flip(1), 9, eos_token_id=None)
    for name, value in cache.items():
        assert torch.equal(value, copies[name]), name


def test_a_cache_of_lists_can_be_moved_and_says_how_to_be_saved(model, ids, tmp_path):
    _, cache = model.generate(ids[:1], 4, eos_token_id=None, names="**.attention_scores")
    moved = cache.to("cpu")
    assert [x.shape for x in moved["attention_scores", 1]] == [x.shape for x in cache["attention_scores", 1]]
    for refused in (lambda: cache.save(tmp_path / "x"), lambda: cache.stack("attention_scores")):
        with pytest.raises(ValueError, match="align=True"):
            refused()
    _, aligned = model.generate(ids, 4, eos_token_id=None, names="**", align=True)
    aligned.save(tmp_path / "all.safetensors")
    loaded = type(aligned).load(tmp_path / "all.safetensors")
    assert all(torch.equal(loaded[name], value) for name, value in aligned.items())


def test_what_is_absent_is_said_for_every_kind_of_axis():
    assert set(ABSENT) == {
        "attention_scores",
        "indexer_scores",
        "indexer_selection",
        "attention_key_positions",
    }
