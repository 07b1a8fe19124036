"""The linear-cost way against the definition in float64: every shape of window, block, gap,
padding and selection.
"""

import random

import pytest
import torch
from torch import Tensor

import dsv4.kernels.banded_attention as banded
from dsv4.kernels.sparse_attention import (
    Reach,
    softmax_with_sink,
    sparse_attention,
    sparse_attention_reference,
    visible_entries,
    visible_tokens,
)
from dsv4.testing import assert_close


@pytest.fixture(autouse=True, params=[10**6, 5], ids=["weights kept", "weights computed again"])
def recomputed(request, monkeypatch):
    monkeypatch.setattr(banded, "RECOMPUTED", request.param)


def rows_of(window: int, s: int, past: list[int], start: list[int], count: list[int]):
    """(query positions [b s], token positions [b w+s], gap) of rows that continue `past` tokens,
    padded at the left by `start`.
    """
    w = max(min(p, window - 1) for p in past)
    query, tokens = [], []
    for p, a, c in zip(past, start, count, strict=True):
        earlier = [p - i if p - i >= 0 else -1 for i in range(w, 0, -1)]
        new = [-1] * a + list(range(p, p + c)) + [-1] * (s - a - c)
        query.append(new)
        tokens.append(earlier + new)
    gap = max((a for a, p in zip(start, past, strict=True) if p), default=0)
    return torch.tensor(query), torch.tensor(tokens), gap


def problem(
    draw: random.Random,
    s: int,
    window: int,
    entries: int,
    kept: int | None,
    rate: int = 3,
    rows: int = 2,
):
    """Random arguments of `sparse_attention`: rows of unequal past, padding and length."""
    heads, width = draw.choice((1, 3, 4)), draw.choice((2, 5, 16))
    count = [draw.randint(0, s) for _ in range(rows - 1)] + [s]
    start = [draw.choice((0, s - c)) for c in count]
    past = [draw.choice((0, 1, 7, 90)) for _ in range(rows)]
    query, places, gap = rows_of(window, s, past, start, count)
    keys = torch.randn(rows, places.shape[1], width, dtype=torch.float64)
    more = torch.randn(rows, entries, width, dtype=torch.float64) if entries else None
    selection = None
    if kept is not None:
        order = torch.rand(rows, s, entries).argsort(-1)[..., :kept]
        selection = order.masked_fill(torch.rand(order.shape) < 0.2, -1)
    return {
        "queries": torch.randn(rows, s, heads, width, dtype=torch.float64),
        "tokens": keys,
        "entries": more,
        "sinks": torch.randn(heads, dtype=torch.float64),
        "reach": Reach(window, query, places, gap, rate),
        "selection": selection,
        "scale": width**-0.5,
    }


def compare(arguments: dict, limit: str = "float64") -> None:
    """Value and gradients of both ways."""
    leaves = [name for name in ("queries", "tokens", "entries", "sinks") if arguments[name] is not None]
    results = []
    for attend in (sparse_attention, sparse_attention_reference):
        given = arguments | {name: arguments[name].clone().requires_grad_() for name in leaves}
        out = attend(**given)
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        grads = torch.autograd.grad((out * weight).sum(), [given[name] for name in leaves])
        results.append((out, grads))
    (out, grads), (expected, expected_grads) = results
    assert_close(out, expected, limit, "output")
    for name, grad, expected_grad in zip(leaves, grads, expected_grads, strict=True):
        assert_close(grad, expected_grad, limit, f"gradient of {name}")


@pytest.mark.parametrize("window", [1, 2, 5, 64, 300])
@pytest.mark.parametrize("s", [1, 2, 63, 64, 65, 130, 257])
def test_window_alone(s: int, window: int):
    compare(problem(random.Random(s * window), s, window, 0, None))


@pytest.mark.parametrize("s", [1, 7, 129, 200])
@pytest.mark.parametrize(
    ("entries", "kept"),
    [(1, None), (50, None), (1, 1), (5, 3), (50, 50), (50, 2), (50, 6), (41, 1), (0, None)],
)
def test_entries(s: int, entries: int, kept: int | None):
    """41 entries and one kept: gathered. 5 and 3: a masked dense product."""
    compare(problem(random.Random(s + entries), s, 8, entries, kept))


@pytest.mark.parametrize("seed", range(30))
def test_random_shapes(seed: int):
    draw = random.Random(seed)
    entries = draw.choice((0, 1, 3, 20, 70))
    kept = draw.choice((None, draw.randint(1, entries))) if entries else None
    s, window = draw.randint(1, 150), draw.choice((1, 2, 3, 9, 40, 128, 200))
    compare(
        problem(
            draw,
            s,
            window,
            entries,
            kept,
            rate=draw.choice((1, 2, 4, 128)),
            rows=draw.choice((1, 2, 5)),
        )
    )


@pytest.mark.parametrize("chunk", [1, 2000, 40_000])
@pytest.mark.parametrize(("entries", "kept"), [(0, None), (30, None), (30, 2)])
def test_chunks_of_queries_change_nothing(monkeypatch, chunk: int, entries: int, kept: int | None):
    arguments = problem(random.Random(3), 190, 20, entries, kept)
    monkeypatch.setattr(banded, "CHUNK", chunk)
    compare(arguments)


@pytest.mark.parametrize("ratio", [0, 10**6])
def test_gathering_and_masking_agree(monkeypatch, ratio: int):
    """Whichever way the number of entries would pick."""
    for kept in (1, 7, 30):
        arguments = problem(random.Random(kept), 40, 8, 30, kept)
        monkeypatch.setattr(banded, "GATHER_RATIO", ratio)
        compare(arguments)


@pytest.mark.parametrize("start", [1, 5, 70])
def test_a_gap_between_earlier_tokens_and_these(start: int):
    """Left padding after a cache: the earlier tokens stand `start` columns further away than their
    positions say.
    """
    s, window = start + 90, 9
    query, places, gap = rows_of(window, s, [30, 4, 0], [start, 0, start], [s - start, s, s - start])
    assert gap == start
    arguments = problem(random.Random(1), s, window, 0, None, rows=3)
    tokens = torch.randn(3, places.shape[1], arguments["tokens"].shape[-1], dtype=torch.float64)
    compare(arguments | {"tokens": tokens, "reach": Reach(window, query, places, gap, 0)})


def test_the_window_is_exact():
    """A query of position p weighs tokens p - window + 1 ... p and no other: probabilities by
    one-hot keys.
    """
    s, window = 150, 16
    positions = torch.arange(s)[None]
    keys = torch.eye(s, dtype=torch.float64)[None]
    queries = torch.zeros(1, s, 2, s, dtype=torch.float64)
    sinks = torch.zeros(2, dtype=torch.float64)
    mixed = sparse_attention(queries, keys, None, sinks, Reach(window, positions, positions), None, 1.0)
    for p in range(s):
        seen = list(range(max(0, p - window + 1), p + 1))
        for head in range(2):
            assert mixed[0, p, head].nonzero().flatten().tolist() == seen
            assert mixed[0, p, head, p].item() == pytest.approx(1 / (len(seen) + 1))


def test_the_sink_takes_its_share_and_adds_nothing():
    arguments = problem(random.Random(5), 20, 6, 9, 3)
    shifted = arguments | {"sinks": arguments["sinks"] + 5}
    assert sparse_attention(**shifted).norm() < sparse_attention(**arguments).norm()
    without = arguments | {"sinks": torch.full_like(arguments["sinks"], -torch.inf)}
    assert_close(sparse_attention(**without), sparse_attention_reference(**without), "float64")
    buried = arguments | {"sinks": torch.full_like(arguments["sinks"], 1e4)}
    assert_close(sparse_attention(**buried), torch.zeros_like(arguments["queries"]), "equal")


def test_a_query_that_sees_nothing_gets_zeros_and_finite_gradients():
    s = 9
    for sinks in (torch.zeros(2), torch.full((2,), -torch.inf)):
        queries = torch.randn(1, s, 2, 4, requires_grad=True)
        tokens = torch.randn(1, s, 4, requires_grad=True)
        entries = torch.randn(1, 3, 4, requires_grad=True)
        nobody = torch.full((1, s), -1)
        out = sparse_attention(queries, tokens, entries, sinks, Reach(4, nobody, nobody, 0, 2), None, 0.5)
        assert torch.equal(out, torch.zeros_like(out))
        for grad in torch.autograd.grad(out.sum(), (queries, tokens, entries)):
            assert bool(grad.isfinite().all())


def test_scores_of_any_size_stay_finite():
    for size in (1e3, 1e18):
        arguments = problem(random.Random(2), 30, 8, 10, None)
        arguments = {k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in arguments.items()}
        out = sparse_attention(**arguments | {"queries": arguments["queries"] * size})
        assert bool(out.isfinite().all())


def test_dtypes_and_strides():
    arguments = problem(random.Random(4), 80, 8, 10, 4)
    expected = sparse_attention(**arguments)
    queries = arguments["queries"].transpose(1, 2).contiguous().transpose(1, 2)
    tokens = arguments["tokens"].transpose(0, 1).contiguous().transpose(0, 1)
    assert_close(sparse_attention(**arguments | {"queries": queries, "tokens": tokens}), expected, "float64")
    for dtype, limit in ((torch.float32, "float32 op"), (torch.bfloat16, "bfloat16 rounding")):
        cast = {k: v.to(dtype) if k in ("queries", "tokens", "entries") else v for k, v in arguments.items()}
        cast["sinks"] = cast["sinks"].float()
        out = sparse_attention(**cast)
        assert out.dtype == dtype
        exact = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in cast.items()}
        assert_close(out, sparse_attention_reference(**exact), limit, str(dtype))


def test_visible_tokens_one_by_one():
    query, places, _ = rows_of(4, 9, [6, 0, 2], [0, 3, 2], [9, 6, 7])
    seen = visible_tokens(query, places, 4)
    for b, row in enumerate(seen.tolist()):
        for i, columns in enumerate(row):
            for j, visible in enumerate(columns):
                p, k = query[b, i].item(), places[b, j].item()
                assert visible == (p >= 0 and k >= 0 and p - 3 <= k <= p)


def test_visible_entries_one_by_one():
    query = torch.tensor([[-1, 0, 1, 2, 3, 4, 5, 6]])
    selection = torch.tensor([[[0, -1], [0, 1], [2, 0], [1, 1], [-1, -1], [1, 0], [2, 1], [1, -1]]])
    for chosen in (None, selection):
        seen = visible_entries(query, 3, 4, chosen)
        for i, p in enumerate(query[0].tolist()):
            for j in range(4):
                closed = 3 * j + 2 <= p
                assert seen[0, i, j].item() == (closed and (chosen is None or j in chosen[0, i].tolist()))


def test_softmax_with_sink_sums_to_one_with_the_sink():
    scores = torch.randn(2, 3, 5, dtype=torch.float64).masked_fill(torch.rand(2, 3, 5) < 0.3, -torch.inf)
    sinks = torch.randn(2, 3, dtype=torch.float64)
    probabilities, on_sink = softmax_with_sink(scores, sinks)
    weights = torch.cat((scores.exp(), sinks.exp()[..., None]), dim=-1)
    expected = weights / weights.sum(-1, keepdim=True)
    assert_close(torch.cat((probabilities, on_sink[..., None]), dim=-1), expected, "float64")
    blind, nothing = softmax_with_sink(torch.full((1, 4), -torch.inf), torch.tensor([-torch.inf]))
    assert blind.tolist() == [[0.0] * 4]
    assert nothing.tolist() == [0.0]


@pytest.mark.parametrize(("s", "entries", "kept"), [(7, 0, None), (190, 0, None), (190, 60, 2)])
def test_the_registered_ops_say_what_they_return(s: int, entries: int, kept: int | None):
    """Shapes, dtypes and strides of the fake implementations, which a compiler builds on."""
    given = problem(random.Random(s), s, 20, entries, kept)
    reach = given["reach"]
    tensors = (given["queries"], given["tokens"], given["entries"], given["sinks"], given["selection"])
    places = (reach.query_positions, reach.token_positions, reach.window, reach.gap, reach.rate)
    checks = ("test_schema", "test_faketensor")
    arguments = (*tensors, *places, given["scale"])
    torch.library.opcheck(banded.banded_attention_op, arguments, test_utils=checks)
    grad = torch.randn_like(given["queries"])
    torch.library.opcheck(banded.banded_attention_gradient, (grad, *arguments), test_utils=checks)
