"""Filters as in transformers, draws that follow the probabilities, rows that do not meet."""

import pytest
import torch

from dsv4.sampling import Sampling, choose, keep_likely, penalise

VOCAB = 50


def logits(rows, seed, scale=3.0):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def theirs(scores, sampling):
    """transformers' processors, in the order in which its generate applies them."""
    from transformers import generation

    chain = []
    if sampling.temperature not in (None, 1.0):
        chain.append(generation.TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k is not None:
        chain.append(generation.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None and sampling.top_p < 1:
        chain.append(generation.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p is not None:
        chain.append(generation.MinPLogitsWarper(sampling.min_p))
    for step in chain:
        scores = step(None, scores)
    return scores


@pytest.mark.parametrize(
    "fields",
    [
        dict(temperature=0.7),
        dict(temperature=1.5, top_k=1),
        dict(top_k=7),
        dict(top_k=VOCAB),
        dict(top_k=500),
        dict(top_p=0.001),
        dict(top_p=0.5),
        dict(top_p=0.95),
        dict(top_p=1.0),
        dict(min_p=0.0),
        dict(min_p=0.1),
        dict(min_p=1.0),
        dict(temperature=0.3, top_k=20, top_p=0.9, min_p=0.02),
        dict(temperature=2.0, top_k=3, top_p=0.6),
        dict(temperature=1.3, top_p=0.7, min_p=0.3),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_filters_are_those_of_transformers(fields, seed):
    sampling, scores = Sampling(**fields), logits(20, seed)
    ours, expected = keep_likely(scores, sampling), theirs(scores, sampling)
    assert torch.equal(ours.isinf(), expected.isinf())
    kept = ~expected.isinf()
    torch.testing.assert_close(ours[kept], expected[kept].double())


def test_ties_with_the_last_of_top_k_are_kept_as_there():
    scores = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    kept = ~keep_likely(scores, Sampling(top_k=2)).isinf()
    assert kept.tolist() == [[False, True, True, True, True, False]]
    assert torch.equal(kept, ~theirs(scores, Sampling(top_k=2)).isinf())


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 10.0])
def test_repetition_penalty_is_that_of_transformers(penalty):
    from transformers.generation import RepetitionPenaltyLogitsProcessor

    scores = logits(6, 1)
    ids = torch.randint(VOCAB, (6, 9), generator=torch.Generator().manual_seed(2))
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, scores.clone())
    seen = torch.zeros(6, VOCAB, dtype=torch.bool).scatter(1, ids, True)
    assert torch.equal(penalise(scores, seen, penalty), expected)


def test_greedy_takes_the_best_and_of_equals_the_lowest():
    scores = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 5.0], [-torch.inf, -1.0, -2.0]])
    for sampling in (Sampling(), Sampling(temperature=0), Sampling(temperature=0.0, top_k=2)):
        assert sampling.is_greedy
        assert choose(scores, sampling, sampling.generators(3)).tolist() == [1, 0, 1]
    for sampling in (Sampling(temperature=1.0), Sampling(top_k=5), Sampling(top_p=0.5)):
        assert not sampling.is_greedy


def only(keywords):
    """What torch.tensor takes of torch.rand's."""
    return {name: value for name, value in keywords.items() if name != "generator"}


def test_draws_follow_the_probabilities():
    sampling = Sampling(temperature=0.8, top_k=6, seed=0)
    row = logits(1, 3, scale=1.0)
    generators = sampling.generators(1)
    draws = torch.cat([choose(row, sampling, generators) for _ in range(6000)])
    expected = keep_likely(row, sampling).softmax(-1)[0]
    found = torch.bincount(draws, minlength=VOCAB) / 6000
    assert (found[expected == 0] == 0).all()
    # Five standard deviations of a count of 6000.
    assert (found - expected).abs().max() < 5 * (0.25 / 6000) ** 0.5


def test_what_has_no_probability_is_never_drawn(monkeypatch):
    scores = torch.full((1, VOCAB), -torch.inf)
    scores[0, [7, 30]] = torch.tensor([0.0, -20.0])
    sampling = Sampling(temperature=1.0)
    for draw, expected in ((0.0, 7), (0.5, 7), (1 - 2**-53, 30)):
        monkeypatch.setattr(torch, "rand", lambda *_, draw=draw, **kw: torch.tensor([draw], **only(kw)))
        assert int(choose(scores, sampling, sampling.generators(1))) == expected


def test_a_row_draws_the_same_whoever_its_neighbours_are():
    sampling = Sampling(temperature=1.0, seed=[5, 6, 7])
    scores = logits(3, 4, scale=0.1)
    generators = sampling.generators(3)
    together = torch.stack([choose(scores, sampling, generators) for _ in range(8)])
    for r, seed in enumerate((5, 6, 7)):
        own = Sampling(temperature=1.0, seed=seed)
        generators = own.generators(1)
        alone = torch.cat([choose(scores[r : r + 1], own, generators) for _ in range(8)])
        assert torch.equal(together[:, r], alone)


def test_seeds():
    def first(sampling, rows=3):
        return [int(torch.randint(10**9, (1,), generator=g)) for g in sampling.generators(rows)]

    assert first(Sampling(seed=4)) == first(Sampling(seed=[4, 5, 6]))
    assert first(Sampling(seed=4)) == first(Sampling(seed=torch.tensor([4, 5, 6])))
    assert len(set(first(Sampling(seed=4)))) == 3
    torch.manual_seed(0)
    drawn = first(Sampling())
    assert drawn != first(Sampling())
    torch.manual_seed(0)
    assert drawn == first(Sampling())
    for wrong, said in (([1, 2], "2 numbers for 3 rows"), ("7", "expected an int"), (1.5, "int")):
        with pytest.raises(ValueError, match=said):
            Sampling(seed=wrong).generators(3)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(temperature=-1), "temperature=-1"),
        (dict(temperature=float("nan")), "temperature=nan"),
        (dict(temperature=float("inf")), "temperature=inf"),
        (dict(temperature="hot"), "temperature='hot'"),
        (dict(top_k=0), "top_k=0"),
        (dict(top_k=2.5), "top_k=2.5"),
        (dict(top_k=True), "top_k=True"),
        (dict(top_p=0), "0 < top_p <= 1"),
        (dict(top_p=1.1), "top_p=1.1"),
        (dict(min_p=-0.1), "min_p=-0.1"),
        (dict(min_p=2), "min_p=2"),
        (dict(repetition_penalty=0), "repetition_penalty=0"),
        (dict(repetition_penalty=None), "repetition_penalty=None"),
    ],
)
def test_fields_are_checked(fields, said):
    with pytest.raises(ValueError, match=said):
        Sampling(**fields)


@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_a_row_without_a_choice_is_an_error(bad):
    scores = logits(2, 0)
    scores[1] = bad
    with pytest.raises(ValueError, match="row 1 has nothing to choose from"):
        choose(scores, Sampling(), Sampling().generators(2))
