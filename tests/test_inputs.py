"""What a run accepts as input, and what is said of the rest; the same in every entry point."""

import numpy
import pytest
import torch
import torch.nn.functional as F

from dsv4.testing_probes import padded_batch, watched_model

MODEL = watched_model()
IDS, MASK = padded_batch(MODEL.vocab_size)
REAL = MASK.bool()
ENTRIES = {
    "call": MODEL,
    "run_with_hooks": MODEL.run_with_hooks,
    "run_with_cache": lambda x, **run: MODEL.run_with_cache(x, [], **run)[0],
    "logit_lens": lambda x, **run: MODEL.logit_lens(x, pos=None, **run).logits[-1],
}


@pytest.fixture(scope="module")
def plain():
    with torch.no_grad():
        return MODEL(IDS)


@pytest.fixture(params=ENTRIES)
def run(request):
    with torch.no_grad():
        yield ENTRIES[request.param]


def test_forms_of_ids(run, plain):
    row = IDS[0]
    for one in (
        row,
        row.tolist(),
        tuple(row.tolist()),
        row.numpy(),
        row.int(),
        row.to(torch.uint8),
        list(row),
        list(row.numpy()),
    ):
        assert torch.equal(run(one), run(IDS[:1]))
    for batch in (
        IDS,
        IDS.tolist(),
        tuple(map(tuple, IDS.tolist())),
        IDS.numpy(),
        IDS.short(),
        list(IDS),
        [IDS[0].tolist(), IDS[1]],
    ):
        assert torch.equal(run(batch), plain)
    assert torch.equal(run(None, input_ids=IDS), plain)
    assert run(row).shape == (1, 19, 64)
    # Neither is kept nor written to.
    assert torch.equal(IDS, padded_batch(MODEL.vocab_size)[0])


def test_ragged_lists_are_padded_and_masked(run):
    rows = [[5, 6, 7, 8, 9], [1, 2], [3, 4, 5, 6]]
    logits = run(rows)
    assert logits.shape == (3, 5, 64)
    for row, got in zip(rows, logits, strict=True):
        torch.testing.assert_close(got[: len(row)], run(row)[0], rtol=1e-4, atol=1e-4)
    mask = [[1] * len(row) + [0] * (5 - len(row)) for row in rows]
    torch.testing.assert_close(run(rows, attention_mask=mask), logits)
    torch.testing.assert_close(run([torch.tensor(row) for row in rows]), logits)
    with pytest.raises(ValueError, match="disagrees with the lengths of the rows"):
        run(rows, attention_mask=[[1] * 5] * 3)
    # A row without tokens says nothing and disturbs nobody.
    torch.testing.assert_close(run([*rows, []])[:3], logits, rtol=1e-4, atol=1e-4)


def test_lists_of_equal_rows_take_a_mask(run):
    torch.testing.assert_close(run(IDS.tolist(), attention_mask=MASK)[REAL], run(IDS, attention_mask=MASK)[REAL])


@pytest.mark.parametrize(
    "form",
    [
        torch.bool,
        torch.int64,
        torch.int8,
        torch.uint8,
        torch.float32,
        torch.bfloat16,
        "list",
        "numpy",
    ],
)
def test_forms_of_masks(run, form, plain):
    expected = run(IDS, attention_mask=MASK)
    mask = {"list": MASK.tolist(), "numpy": MASK.numpy()}.get(form)
    assert torch.equal(run(IDS, attention_mask=MASK.to(form) if mask is None else mask), expected)
    assert torch.equal(run(IDS, attention_mask=torch.ones_like(IDS)), plain)
    torch.testing.assert_close(expected[1, 6:], run(IDS[1, 6:])[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(run(IDS[0], attention_mask=torch.ones(19)), run(IDS[:1]))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 16])
def test_a_padded_row_is_the_row_alone(side, count):
    row = IDS[0, :13]
    pads = torch.randint(0, 64, (count,))
    ids = torch.cat((pads, row) if side == "left" else (row, pads)).unsqueeze(0)
    mask = torch.ones_like(ids)
    (mask[:, :count] if side == "left" else mask[:, 13:]).zero_()
    with torch.no_grad():
        torch.testing.assert_close(MODEL(ids, attention_mask=mask)[mask.bool()], MODEL(row)[0], rtol=1e-4, atol=1e-4)


HOLES = [[1, 0, 1], [0, 1, 0], [1, 0, 0, 1], [0, 1, 0, 1], [1, 1, 0, 1, 0], [0, 1, 1, 0, 0]]


@pytest.mark.parametrize("mask", HOLES, ids=str)
def test_holes_are_refused(run, mask):
    ids = torch.ones(2, len(mask), dtype=torch.int64)
    with pytest.raises(ValueError, match="attention_mask row 1 has its zeros in more than one run"):
        run(ids, attention_mask=[[1] * len(mask), mask])


@pytest.mark.parametrize(
    ("mask", "error", "said"),
    [
        (torch.ones(2, 18), ValueError, r"attention_mask has shape \[2, 18\]; expected \[2, 19\]"),
        (torch.ones(1, 19), ValueError, r"shape \[1, 19\]"),
        (torch.ones(19), ValueError, r"shape \[19\]"),
        (torch.ones(2, 1, 19, 19), ValueError, r"shape \[2, 1, 19, 19\]"),
        (torch.ones(2, 24), ValueError, "covers 5 tokens before this call .* there is no KV cache"),
        (torch.zeros(2, 19) - float("inf"), ValueError, "additive masks are not accepted"),
        (torch.full((2, 19), 2), ValueError, "must hold 0"),
        (torch.full((2, 19), 0.5), ValueError, "must hold 0"),
        (torch.full((2, 19), float("nan")), ValueError, "must hold 0"),
    ],
)
def test_wrong_masks(run, mask, error, said):
    with pytest.raises(error, match=said):
        run(IDS, attention_mask=mask)


@pytest.mark.parametrize(
    ("ids", "error", "said"),
    [
        ([], ValueError, "an empty input of shape"),
        ([[]], ValueError, "an empty input of shape"),
        ([[], []], ValueError, "an empty input of shape"),
        (torch.zeros(1, 0, dtype=torch.int64), ValueError, r"an empty input of shape \[1, 0\]"),
        (torch.zeros(0, 3, dtype=torch.int64), ValueError, r"an empty input of shape \[0, 3\]"),
        (
            torch.tensor([1, 64]),
            ValueError,
            r"token id 64 at \[0, 1\] is outside the vocabulary: expected 0 <= id < 64",
        ),
        ([[1, 2], [3, -1]], ValueError, r"token id -1 at \[1, 1\]"),
        ([1, 2**70], ValueError, "outside the vocabulary"),
        (torch.tensor([1.0, 2.0]), TypeError, "token ids must be integers, got torch.float32"),
        ([1, 2.5], TypeError, "row 0 holds 2.5"),
        ([1, None], TypeError, "row 0 holds None"),
        ([True, False], TypeError, "row 0 holds True"),
        (torch.tensor([True]), TypeError, "torch.bool"),
        ([[1, 2], 3], TypeError, "rows and single ids in one list"),
        ([[[1]]], TypeError, r"row 0 holds \[1\]"),
        (["a", 3], TypeError, "holds 'a'"),
        (
            torch.zeros(1, 2, 3, dtype=torch.int64),
            ValueError,
            r"must be \[s\] or \[b, s\], got shape \[1, 2, 3\]",
        ),
        (torch.tensor(3), ValueError, r"got shape \[\]"),
        (3, TypeError, "expected text, token ids or a tensor, got int"),
        ({"input_ids": [1]}, TypeError, "got dict"),
        (None, ValueError, "nothing to run"),
    ],
    ids=str,
)
def test_wrong_ids(run, ids, error, said):
    before = MODEL.stage.runs
    with pytest.raises(error, match=said):
        run(ids)
    assert MODEL.stage.runs == before


def test_text_without_a_tokenizer(run):
    for text in ("text", ["a", "bb"], ""):
        with pytest.raises(ValueError, match="tokenizer"):
            run(text)


def test_ids_are_given_once(run):
    with pytest.raises(ValueError, match="give the ids once"):
        run(IDS, input_ids=IDS)
    with pytest.raises(ValueError, match="give the ids once"):
        run(IDS, input_ids=IDS, inputs_embeds=torch.zeros(2, 19, 32))


def test_embeddings_beside_ids(run, plain):
    vectors = MODEL.embed_tokens(IDS)
    assert torch.equal(run(None, inputs_embeds=vectors, input_ids=IDS), plain)
    assert torch.equal(run(IDS, inputs_embeds=vectors), plain)
    # Ids decide the hash routing, embeddings everything else.
    with MODEL.hooks([("token_embeddings", lambda v, hook: F.embedding(IDS.flip(1), MODEL.embed_tokens.weight))]):
        expected = run(IDS)
    assert torch.equal(run(IDS, inputs_embeds=MODEL.embed_tokens(IDS.flip(1))), expected)
    with pytest.raises(
        ValueError,
        match=r"layers \[0, 1, 2\] route by token id \(hash_moe\): pass input_ids beside the embeddings",
    ):
        run(None, inputs_embeds=vectors)


def test_embeddings_alone_where_nothing_hashes():
    model = watched_model(mlp_layer_types=["moe"] * 6)
    with torch.no_grad():
        assert torch.equal(model(inputs_embeds=model.embed_tokens(IDS)), model(IDS))
        torch.testing.assert_close(model(inputs_embeds=model.embed_tokens(IDS).double()), model(IDS))
        names = ["token_embeddings", "layers.*.mlp.expert_indices"]
        _, cache = model.run_with_cache(None, names, inputs_embeds=model.embed_tokens(IDS), attention_mask=MASK)
    assert torch.equal(cache["token_embeddings"][REAL], model.embed_tokens(IDS)[REAL])


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (
            torch.zeros(2, 19, 31),
            ValueError,
            r"inputs_embeds has shape \[2, 19, 31\]; expected \[\?, \?, 32\]",
        ),
        (
            torch.zeros(2, 18, 32),
            ValueError,
            r"input_ids has shape \[2, 19\]; the embeddings are for \[2, 18\] tokens",
        ),
        (torch.zeros(19, 32), ValueError, r"inputs_embeds has shape \[19, 32\]"),
        (
            torch.zeros(2, 19, 32, dtype=torch.int64),
            TypeError,
            "inputs_embeds must be a floating tensor",
        ),
        ([[0.0]], TypeError, "must be a floating tensor .* got list"),
    ],
)
def test_wrong_embeddings(run, given, error, said):
    with pytest.raises(error, match=said):
        run(IDS, inputs_embeds=given)


def test_embeddings_and_streams_together():
    with pytest.raises(ValueError, match="with start_at_layer pass streams"):
        MODEL(torch.zeros(2, 19, 4, 32), start_at_layer=3, inputs_embeds=torch.zeros(2, 19, 32))
    with pytest.raises(ValueError, match=r"input_ids has shape \[2, 18\]; the streams are for \[2, 19\] tokens"):
        MODEL(torch.zeros(2, 19, 4, 32), start_at_layer=3, input_ids=IDS[:, :18])


def test_gradient_reaches_embeddings_and_streams_given():
    for keywords in (
        {"inputs_embeds": torch.zeros(2, 19, 32), "input_ids": IDS},
        {"input": torch.zeros(2, 19, 4, 32), "start_at_layer": 3},
    ):
        given = next(x for x in keywords.values() if isinstance(x, torch.Tensor) and x.is_floating_point())
        given.normal_().requires_grad_()
        MODEL(**keywords, attention_mask=MASK)[REAL].sum().backward()
        assert given.grad[REAL].abs().sum() > 0
        assert torch.equal(given.grad[~REAL], torch.zeros_like(given.grad[~REAL]))
    MODEL.zero_grad()


def test_masks_with_a_kv_cache():
    kv = MODEL.new_kv_cache(2)
    with torch.no_grad():
        MODEL(IDS[:, :8], attention_mask=MASK[:, :8], kv_cache=kv)
        assert kv.length.tolist() == [8, 2]
        for mask in (torch.ones(2, 16), torch.ones(2, 12), MASK[:, :11]):
            with pytest.raises(ValueError, match=r"attention_mask (covers|counts)"):
                MODEL(
                    IDS[:, 8:11],
                    attention_mask=mask if mask.shape[1] != 11 else 1 - mask.flip(1),
                    kv_cache=kv,
                )
        whole = MODEL(IDS[:, 8:11], attention_mask=MASK[:, :11], kv_cache=kv.clone())
        own = MODEL(IDS[:, 8:11], attention_mask=MASK[:, 8:11], kv_cache=kv)
    assert torch.equal(whole, own)


@pytest.mark.parametrize("n", [-1, True, 1.0, "1"])
def test_logits_to_keep_is_a_count(n):
    with pytest.raises(ValueError, match="logits_to_keep"):
        MODEL(IDS, logits_to_keep=n)


def test_logits_to_keep_counts_real_tokens():
    for side in (MASK, MASK.flip(1)):
        with torch.no_grad():
            every = MODEL(IDS, attention_mask=side)
            for n in (1, 3, 13):
                kept = MODEL(IDS, attention_mask=side, logits_to_keep=n)
                for row in range(2):
                    torch.testing.assert_close(kept[row], every[row][side[row].bool()][-n:], rtol=1e-5, atol=1e-5)
            for n in (None, 0, 19, 100):
                assert MODEL(IDS, attention_mask=side, logits_to_keep=n).shape == (2, 19, 64)


def test_numpy_integers_are_integers():
    assert torch.equal(MODEL([numpy.int64(3), numpy.int32(4)]), MODEL([3, 4]))
