"""Indexer scores against loops, in chunks and whole; which entries are closed; the selection and
its ties.
"""

import pytest
import torch

import dsv4.kernels.index_scores as op
from dsv4.kernels.index_scores import (
    closed_entries,
    combine_heads,
    index_head_scores,
    select_by_index,
    select_entries,
)


def index_scores(queries, keys, weights):
    return combine_heads(index_head_scores(queries, keys), weights)


def arguments(b: int, s: int, heads: int, entries: int, width: int, dtype=torch.float64):
    return (
        torch.randn(b, s, heads, width, dtype=dtype),
        torch.randn(b, entries, width, dtype=dtype),
        torch.randn(b, s, heads, dtype=dtype),
    )


@pytest.mark.parametrize(("s", "heads", "entries", "width"), [(1, 1, 1, 2), (3, 5, 7, 6), (4, 8, 1, 3), (2, 3, 0, 4)])
def test_against_single_numbers(s: int, heads: int, entries: int, width: int):
    queries, keys, weights = arguments(2, s, heads, entries, width)
    scores, head_scores = index_scores(queries, keys, weights), index_head_scores(queries, keys)
    assert scores.shape == (2, s, entries)
    assert head_scores.shape == (2, s, heads, entries)
    for b in range(2):
        for t in range(s):
            for e in range(entries):
                dots = [sum((queries[b, t, h] * keys[b, e]).tolist()) for h in range(heads)]
                parts = [max(dot, 0.0) * width**-0.5 for dot in dots]
                assert head_scores[b, t, :, e].tolist() == pytest.approx(parts, rel=1e-10)
                expected = sum(w * part for w, part in zip(weights[b, t].tolist(), parts, strict=True))
                assert scores[b, t, e].item() == pytest.approx(expected, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("chunk", [1, 100, 5000, 1 << 19])
@pytest.mark.parametrize(("past", "start", "top_k"), [((0, 0), (0, 0), 3), ((9, 2), (0, 4), 5), ((0, 40), (3, 0), 60)])
def test_the_selection_in_chunks_is_that_of_all_scores(monkeypatch, chunk: int, past, start, top_k: int):
    s, rate = 37, 4
    positions = torch.stack([torch.arange(s) - a + p for p, a in zip(past, start, strict=True)])
    for row, (p, a) in enumerate(zip(past, start, strict=True)):
        positions[row, :a] = -1
        assert p >= 0
    entries = (int(positions.max()) + 1) // rate
    queries, keys, weights = arguments(2, s, 8, entries, 6)
    scores = index_scores(queries, keys, weights).masked_fill(~closed_entries(positions, rate, entries), -torch.inf)
    monkeypatch.setattr(op, "CHUNK", chunk)
    monkeypatch.setattr(op, "SCORES", chunk)
    lead = max(p - a for p, a in zip(past, start, strict=True))
    found = select_by_index(queries, keys, weights, positions, rate, top_k, lead)
    assert torch.equal(found, select_entries(scores, top_k))


def test_gradients_numerically():
    given = [t.requires_grad_() for t in arguments(1, 2, 3, 4, 2)]
    assert torch.autograd.gradcheck(index_scores, given)


def test_scores_are_float32_of_bfloat16():
    queries, keys, weights = (t.bfloat16() for t in arguments(1, 5, 8, 9, 16))
    scores = index_scores(queries, keys, weights.float())
    assert scores.dtype == torch.float32
    assert torch.equal(scores, index_scores(queries.float(), keys.float(), weights.float()))


@pytest.mark.parametrize("rate", [1, 2, 4, 7, 128])
def test_an_entry_is_seen_from_its_last_token_on(rate: int):
    positions = torch.tensor([[-1, -1, *range(3 * rate + 2)]])
    closed = closed_entries(positions, rate, 4)
    for column, p in enumerate(positions[0].tolist()):
        assert closed[0, column].tolist() == [p >= j * rate + rate - 1 for j in range(4)]


def test_selection_takes_the_best_then_the_lowest_and_fills_with_minus_one():
    inf = torch.inf
    scores = torch.tensor([[[0.5, 2.0, -1.0, 2.0], [0.0, -0.0, 0.0, -inf], [-inf, -3.0, -inf, -inf], [-inf] * 4]])
    assert select_entries(scores, 3).tolist() == [[[1, 3, 0], [0, 1, 2], [1, -1, -1], [-1, -1, -1]]]
    assert select_entries(scores, 9).shape == (1, 4, 4)
    assert select_entries(scores[..., :0], 3).shape == (1, 4, 0)


@pytest.mark.parametrize("entries", [6, 33, 130])
@pytest.mark.parametrize("heads", [1, 2, 8, 19])
def test_entries_that_no_head_reaches_tie_at_zero(entries: int, heads: int):
    """ReLU zeros times weights of both signs are 0.0 and -0.0: one number, wherever in the product
    it stands.
    """
    queries, keys = torch.rand(1, 5, heads, 24), -torch.rand(1, entries, 24)
    for sign in (torch.ones(heads), -torch.ones(heads), torch.randn(heads)):
        scores = index_scores(queries, keys, sign.expand(1, 5, heads))
        assert select_entries(scores, 4).tolist() == [[[0, 1, 2, 3]] * 5]


@pytest.mark.parametrize("chunk", [1, 300, 4000, 1 << 19])
@pytest.mark.parametrize("top_k", [1, 3, 8, 30])
def test_ties_go_to_the_lowest_entry_in_every_path(monkeypatch, chunk: int, top_k: int):
    """Small whole numbers, so that every order of summing gives the same score and most rows tie:
    in chunks, whole, and by a slow sort.
    """
    b, s, heads, width, rate = 2, 90, 8, 16, 4
    queries, weights = (torch.randint(-1, 2, shape).float() for shape in ((b, s, heads, width), (b, s, heads)))
    keys = torch.randint(-1, 2, (b, s // rate, width)).float()
    positions = torch.arange(s).expand(b, s)
    closed = closed_entries(positions, rate, s // rate)
    scores = index_scores(queries, keys, weights).masked_fill(~closed, -torch.inf)
    monkeypatch.setattr(op, "CHUNK", chunk)
    monkeypatch.setattr(op, "SCORES", chunk)
    found = select_by_index(queries, keys, weights, positions, rate, top_k, 0)
    assert torch.equal(found, select_entries(scores, top_k))
    for row, ours in zip(scores.flatten(0, 1).tolist(), found.flatten(0, 1).tolist(), strict=True):
        best = sorted(range(len(row)), key=lambda e: (-row[e], e))[:top_k]
        assert ours == [e if row[e] > -torch.inf else -1 for e in best]


def by_sorting(scores: torch.Tensor, k: int) -> torch.Tensor:
    values, order = torch.sort(scores.double() + 0.0, dim=-1, descending=True, stable=True)
    return order[..., :k].masked_fill(values[..., :k] == float("-inf"), -1)


@pytest.mark.parametrize("k", [1, 2, 5, 64])
@pytest.mark.parametrize("entries", [6, 65, 130, 1027, 4100])
@pytest.mark.parametrize("levels", [2, 50, 10**9])
def test_the_best_of_many_are_found_whatever_ties(k: int, entries: int, levels: int):
    """Levels: so many different scores. Some rows have fewer open entries than are asked for, one has none, one ties at its edge."""
    scores = torch.randint(-levels, levels, (2, 9, entries)).float() / 7
    scores[0, :3, entries // 3 :] = float("-inf")
    scores[0, 3, 2:] = float("-inf")
    scores[1, 0] = float("-inf")
    scores[1, 1] = 0.0
    scores[1, 1, ::2] = -0.0
    scores[1, 2, : entries // 2] = scores[1, 2, entries // 2 : 2 * (entries // 2)]
    k = min(k, entries)
    with torch.no_grad():
        assert torch.equal(select_entries(scores, k), by_sorting(scores, k))
        one_row = scores[:1, :1]
        assert torch.equal(select_entries(one_row, k), by_sorting(one_row, k))
    assert torch.equal(select_entries(scores, k), by_sorting(scores, k))
