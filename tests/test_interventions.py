"""Steering, skipping, the vocabulary readouts, the lens, the loss."""

import math

import pytest
import torch
import torch.nn.functional as F

from dsv4.kernels.hyper_connection import collapse
from dsv4.testing_probes import padded_batch, watched_model

MODEL = watched_model()
IDS, MASK = padded_batch(MODEL.vocab_size)
REAL = MASK.bool()


def run(**keywords):
    with torch.no_grad():
        return MODEL(IDS, attention_mask=MASK, **keywords)


# Steering.


def test_steering_adds_to_every_stream_at_every_position():
    vector = torch.randn(32)
    names = [f"layers.{i}.layer_output" for i in (2, 3)]
    with torch.no_grad():
        _, before = MODEL.run_with_cache(IDS, names)
        with MODEL.steer(vector, layers=[2], scale=2.0):
            logits, after = MODEL.run_with_cache(IDS, names)
        torch.testing.assert_close(after["layer_output", 2], before["layer_output", 2] + 2 * vector)
        expected = MODEL.run_with_hooks(IDS, [(names[0], lambda v, hook: v + 2 * vector)])
        torch.testing.assert_close(logits, expected)
        with MODEL.steer(vector, layers=2):
            once = MODEL(IDS)
        for layers in ([2, 2], (2,), {2}, range(2, 3), iter([2]), torch.tensor([2])):
            with MODEL.steer(vector, layers=layers):
                assert torch.equal(MODEL(IDS), once)
        with MODEL.steer(vector, layers=[1, 4], scale=-1):
            assert not torch.equal(MODEL(IDS), once)
    assert MODEL.list_hooks() == []
    assert torch.equal(run(), MODEL(IDS, attention_mask=MASK))


def test_a_vector_in_all_streams_is_carried_on():
    """Columns of comb sum to one: with the writes silenced it arrives at the readout as it was."""
    vector = torch.randn(32)
    silent = [
        ("layers.*.attention_post", torch.zeros_like),
        ("layers.*.mlp_post", torch.zeros_like),
    ]
    with torch.no_grad(), MODEL.hooks(silent):
        _, plain = MODEL.run_with_cache(IDS, "layers.5.layer_output")
        with MODEL.steer(vector, layers=0):
            _, steered = MODEL.run_with_cache(IDS, "layers.5.layer_output")
    difference = steered["layer_output", 5] - plain["layer_output", 5]
    torch.testing.assert_close(difference, vector.expand_as(difference), rtol=1e-3, atol=1e-3)


def test_steering_in_bfloat16_rounds_once():
    model = watched_model(torch.bfloat16)
    vector = torch.randn(32)
    name = "layers.2.layer_output"
    with torch.no_grad():
        _, before = model.run_with_cache(IDS, name)
        with model.steer(vector, layers=2, scale=0.3):
            _, after = model.run_with_cache(IDS, name)
    assert torch.equal(after[name], (before[name].float() + 0.3 * vector).bfloat16())


def test_steering_is_differentiable_and_takes_lists():
    vector = torch.zeros(32, requires_grad=True)
    with MODEL.steer(vector, layers=[0, 3]):
        MODEL(IDS).sum().backward()
    assert vector.grad.abs().sum() > 0
    MODEL.zero_grad()
    with torch.no_grad(), MODEL.steer([0.0] * 32, layers=1):
        assert torch.equal(MODEL(IDS, attention_mask=MASK), run())


@pytest.mark.parametrize("vector", [torch.zeros(31), torch.zeros(1, 32), torch.zeros(32, dtype=torch.int64), [1] * 32])
def test_wrong_vectors(vector):
    with (
        pytest.raises(ValueError, match=r"steer takes a floating vector \[32\]"),
        MODEL.steer(vector, layers=1),
    ):
        pass


@pytest.mark.parametrize("layers", [6, -1, [0, 6], True, "1", 1.0, [None]])
def test_wrong_layers(layers):
    for context in (
        lambda: MODEL.steer(torch.zeros(32), layers=layers),
        lambda: MODEL.skip_layers(layers),
    ):
        with pytest.raises(ValueError, match="expected 0 <= layer < 6"), context():
            pass
    assert MODEL.list_hooks() == []
    assert MODEL.skipped == frozenset()


# Skipping.


def test_skipped_layers_let_the_streams_through():
    with torch.no_grad():
        with MODEL.skip_layers(range(2, 4)):
            skipped, cache = MODEL.run_with_cache(IDS, "layers.*.layer_input", attention_mask=MASK)
            assert list(cache) == [f"layers.{i}.layer_input" for i in (0, 1, 4, 5)]
            with MODEL.skip_layers(0):
                assert MODEL.skipped == {0, 2, 3}
                twice = MODEL(IDS, attention_mask=MASK)
            assert torch.equal(MODEL(IDS, attention_mask=MASK), skipped)
        expected = run(stop_at_layer=2)
        assert torch.equal(cache["layer_input", 4], expected)
        torch.testing.assert_close(MODEL(expected, start_at_layer=4, attention_mask=MASK)[REAL], skipped[REAL])
        assert not torch.equal(twice, skipped)
        with MODEL.skip_layers(range(6)):
            streams = run(stop_at_layer=6)
            assert torch.equal(streams, run(stop_at_layer=0))
            assert torch.equal(run(), MODEL.project_on_vocab(streams))
        with MODEL.skip_layers([]):
            assert torch.equal(MODEL(IDS, attention_mask=MASK), run())
    assert MODEL.skipped == frozenset()


# The vocabulary.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_project_on_vocab_of_the_last_streams_is_the_logits(dtype):
    model = watched_model(dtype)
    for ids in (IDS, IDS[:1], IDS[:, :1], IDS[:1, :3]):
        logits, cache = model.run_with_cache(ids, ["layers.5.layer_output", "readout", "final_norm_output"])
        assert torch.equal(model.project_on_vocab(cache["layer_output", 5]), logits)
        assert torch.equal(model.project_on_vocab(cache["layer_output", 5], readout="head"), logits)
        assert torch.equal(model.project_on_vocab(cache["readout"]), logits)
        assert logits.dtype == torch.float32


def test_project_on_vocab_by_axes():
    with torch.no_grad():
        logits, cache = MODEL.run_with_cache(IDS, ["layers.5.layer_output", "readout"])
        streams, collapsed = cache["layer_output", 5], cache["readout"]

        def close(actual, expected):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)

        close(MODEL.project_on_vocab(streams[0, 3], readout="head"), logits[0, 3])
        close(MODEL.project_on_vocab(streams[:, 3], readout="head"), logits[:, 3])
        close(MODEL.project_on_vocab(collapsed[0], readout="none"), logits[0])
        close(MODEL.project_on_vocab(collapsed[0, 3], readout="none"), logits[0, 3])
        # Three axes are a contribution or one stream: norm and head alone. Asked for, they may be streams.
        one = streams[:, :, 0]
        close(MODEL.project_on_vocab(one), MODEL.lm_head(MODEL.norm(one)))
        assert not torch.allclose(MODEL.project_on_vocab(one), logits)
        # Four axes without a readout: each stream.
        close(
            MODEL.project_on_vocab(streams, readout="none")[:, :, 2],
            MODEL.project_on_vocab(streams[:, :, 2]),
        )
        for x, readout, said in (
            (streams[0, 3], None, r"may be streams or not; say readout=\"head\""),
            (collapsed[0, 3], None, "may be streams or not"),
            (streams.unsqueeze(0), None, "may be streams or not"),
            (collapsed[:, :5], "head", r"needs \[..., 4, 32\]"),
            (collapsed[0, 0], "head", r"needs \[..., 4, 32\]"),
            (streams[..., :31], None, "the last axis must be hidden = 32"),
            (torch.tensor(1.0), None, "the last axis must be hidden = 32"),
            (streams, "mean", 'expected "head"'),
        ):
            with pytest.raises(ValueError, match=said):
                MODEL.project_on_vocab(x, readout=readout)


def test_project_on_vocab_inside_a_hook():
    """It is no run: a hook may look through the vocabulary."""
    seen = []

    def look(value, hook):
        seen.append(MODEL.project_on_vocab(value))

    with torch.no_grad():
        logits = MODEL.run_with_hooks(IDS, [("layers.5.layer_output", look)])
    assert torch.equal(seen[0], logits)


# The lens.


def test_lens_readouts():
    with torch.no_grad():
        logits, cache = MODEL.run_with_cache(IDS, ["layers.*.layer_output", "readout_weights"], attention_mask=MASK)
        lenses = {r: MODEL.logit_lens(IDS, readout=r, pos=None, attention_mask=MASK) for r in ("head", "mean", "each", "final_pre")}
    for layer in range(6):
        streams = cache["layer_output", layer]
        expected = {
            "head": MODEL.project_on_vocab(streams),
            "mean": MODEL.project_on_vocab(streams.mean(2)),
            "each": MODEL.project_on_vocab(streams, readout="none"),
            "final_pre": MODEL.project_on_vocab(collapse(streams, cache["readout_weights"])),
        }
        for readout, lens in lenses.items():
            torch.testing.assert_close(lens.logits[layer], expected[readout], rtol=1e-5, atol=1e-5)
            assert lens.readout == readout
            assert lens.layers == list(range(6))
    assert torch.equal(lenses["head"].logits[5], logits)
    torch.testing.assert_close(lenses["final_pre"].logits[5], logits)
    assert lenses["each"].logits.shape == (6, 2, 19, 4, 64)


def test_lens_of_the_last_token():
    lens = MODEL.logit_lens(IDS, attention_mask=MASK)
    assert lens.logits.shape == (6, 2, 64)
    assert not lens.logits.requires_grad
    torch.testing.assert_close(lens.logits[5], run()[:, -1], rtol=1e-5, atol=1e-5)
    assert lens.positions.tolist() == [[18], [12]]
    values, ids = lens.top(3)
    assert values.shape == ids.shape == (6, 2, 3)
    assert ids[5, 0, 0] == run()[0, -1].argmax()
    assert lens.words(5, k=2)[0] == (str(int(ids[5, 0, 0])), pytest.approx(float(values[5, 0, 0])))
    text = str(lens)
    assert 'readout "head"' in text
    assert len(text.splitlines()) == 7
    str(MODEL.logit_lens(IDS, readout="each"))
    str(MODEL.logit_lens(IDS, readout="each", pos=[0, 1]))
    assert MODEL.logit_lens(IDS, stop_at_layer=3).layers == [0, 1, 2]
    with MODEL.skip_layers([1]):
        assert MODEL.logit_lens(IDS).layers == [0, 2, 3, 4, 5]
    with MODEL.steer(torch.ones(32), layers=0, scale=5):
        assert not torch.allclose(MODEL.logit_lens(IDS, attention_mask=MASK).logits, lens.logits)
    with pytest.raises(ValueError, match="expected one of head, mean, each, final_pre"):
        MODEL.logit_lens(IDS, readout="tail")
    with pytest.raises(KeyError, match="readout_weights: stop_at_layer=3"):
        MODEL.logit_lens(IDS, readout="final_pre", stop_at_layer=3)


# The loss.


def own_loss(logits, ids):
    return F.cross_entropy(logits[:-1], ids[1:], reduction="none")


def test_loss_is_the_cross_entropy_of_the_next_token():
    logits = run()
    with torch.no_grad():
        each = own_loss(logits[0], IDS[0])
        torch.testing.assert_close(MODEL.loss(IDS[:1]), each.mean(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(MODEL.loss(IDS[:1], per_token=True)[0], each, rtol=1e-5, atol=1e-5)
        for form in (IDS[0], IDS[0].tolist(), IDS[:1].tolist()):
            torch.testing.assert_close(MODEL.loss(form), each.mean(), rtol=1e-5, atol=1e-6)
    assert MODEL.loss(IDS).shape == ()
    assert MODEL.loss(IDS).dtype == torch.float32


@pytest.mark.parametrize("side", ["left", "right"])
def test_loss_counts_real_targets_only(side):
    ids = torch.randint(0, 64, (3, 9))
    mask = torch.ones_like(ids)
    lengths = [6, 9, 1]
    for r, n in enumerate(lengths):
        (mask[r, : 9 - n] if side == "left" else mask[r, n:]).zero_()
    with torch.no_grad():
        loss, each = MODEL.loss(ids, attention_mask=mask), MODEL.loss(ids, mask, per_token=True)
        other = torch.where(mask.bool(), ids, (ids + 7) % 64)
        torch.testing.assert_close(MODEL.loss(other, attention_mask=mask), loss)
        torch.testing.assert_close(MODEL.loss(other, attention_mask=mask.bool(), per_token=True), each)
        alone = [MODEL.loss(ids[r][mask[r].bool()], per_token=True)[0] for r in range(2)]
    assert each.shape == (3, 8)
    pairs = mask[:, 1:].bool() & mask[:, :-1].bool()
    assert torch.equal(each[~pairs], torch.zeros(int((~pairs).sum())))
    torch.testing.assert_close(each[pairs], torch.cat(alone), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss, torch.cat(alone).mean(), rtol=1e-5, atol=1e-6)
    assert pairs.sum() == 5 + 8


def test_loss_of_ragged_lists_and_of_text_without_a_tokenizer():
    with torch.no_grad():
        loss = MODEL.loss([[1, 2, 3, 4], [5, 6]])
        alone = [MODEL.loss(row, per_token=True)[0] for row in ([1, 2, 3, 4], [5, 6])]
    torch.testing.assert_close(loss, torch.cat(alone).mean(), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="tokenizer"):
        MODEL.loss("text")


def test_one_token_has_no_loss():
    for ids, mask in ((IDS[:, :1], None), ([5], None), (IDS[:, :3], [[1, 0, 0], [0, 0, 1]])):
        with pytest.raises(ValueError, match="at least two tokens"):
            MODEL.loss(ids, attention_mask=mask)


def test_loss_is_differentiable_and_hooks_act():
    loss = MODEL.loss(IDS, attention_mask=MASK)
    loss.backward()
    assert MODEL.embed_tokens.weight.grad.isfinite().all()
    assert MODEL.embed_tokens.weight.grad.abs().sum() > 0
    MODEL.zero_grad()
    with torch.no_grad(), MODEL.hooks([("logits", torch.zeros_like)]):
        assert float(MODEL.loss(IDS, attention_mask=MASK)) == pytest.approx(math.log(64))
