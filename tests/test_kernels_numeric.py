"""Ordered top-k against a slow reference, the router's score function at its ends, the
accumulation dtype.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.kernels.numeric import sqrt_softplus, topk_lowest, wide
from dsv4.testing import assert_close

# Few values, so that most rows hold ties: both zeros, both infinities, neighbours, subnormals,
# the ends of float32.
TYING = [
    *(0.0, -0.0, 1.0, -1.0, 1.0 + 2**-23, 1.0 - 2**-24, 2.0, -2.0, 1e-45, -1e-45),
    *(3.4028234663852886e38, -3.4028234663852886e38, math.inf, -math.inf),
]
NUMBERS = st.one_of(st.sampled_from(TYING), st.floats(width=32, allow_nan=False))


def slow_topk(row: list[float], k: int) -> list[int]:
    """Best first, equal numbers by index. Python compares -0.0 and 0.0 as equal."""
    return sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]


@settings(max_examples=200, deadline=None)
@given(row=st.lists(NUMBERS, min_size=1, max_size=40), data=st.data())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_topk_agrees_with_a_slow_one(dtype, row, data):
    k = data.draw(st.integers(0, len(row)))
    scores = torch.tensor([row, row[::-1]], dtype=dtype)
    values, indices = topk_lowest(scores, k)
    assert indices.dtype == torch.int64
    for given_row, ours in zip(scores.tolist(), indices.tolist(), strict=True):
        assert ours == slow_topk(given_row, k)
    assert torch.equal(values, scores.gather(-1, indices))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 31, 64, 1000, 4097])
def test_topk_of_equal_scores_is_the_lowest(dtype, size: int):
    zeros = torch.zeros(3, size, dtype=dtype)
    zeros[:, 1::2] = -0.0
    k = min(5, size)
    _, indices = topk_lowest(zeros, k)
    assert indices.tolist() == [list(range(k))] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_topk_of_many_ties_in_long_rows(dtype):
    scores = torch.randint(-3, 3, (4, 7, 1500)).to(dtype) / 2
    _, indices = topk_lowest(scores, 200)
    for row, ours in zip(scores.flatten(0, 1).tolist(), indices.flatten(0, 1).tolist(), strict=True):
        assert ours == slow_topk(row, 200)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_topk_takes_any_strides_and_no_scores(dtype):
    scores = torch.randn(9, 5, 4, dtype=dtype).transpose(0, 2)
    assert torch.equal(topk_lowest(scores, 3)[1], topk_lowest(scores.contiguous(), 3)[1])
    assert torch.equal(topk_lowest(scores[..., :1].expand(-1, -1, 6), 2)[1], torch.tensor([0, 1]).expand(4, 5, 2))
    values, indices = topk_lowest(torch.empty(2, 3, 0, dtype=dtype), 0)
    assert values.shape == indices.shape == (2, 3, 0)


def test_topk_in_float64_sees_what_float32_does_not():
    scores = torch.tensor([1.0, 1.0 + 2**-40], dtype=torch.float64)
    assert topk_lowest(scores, 1)[1].tolist() == [1]
    assert topk_lowest(scores.float(), 1)[1].tolist() == [0]


def test_topk_passes_the_gradient_to_the_chosen():
    for dtype in (torch.float32, torch.float64):
        scores = torch.tensor([[1.0, 3.0, 2.0]], dtype=dtype, requires_grad=True)
        topk_lowest(scores, 2)[0].sum().backward()
        assert scores.grad.tolist() == [[0.0, 1.0, 1.0]]


def exact_sqrt_softplus(x: float) -> float:
    """In Python floats, without overflow on either side."""
    return math.sqrt(max(x, 0.0) + math.log1p(math.exp(-abs(x))))


# Reported faults: overflow to infinity, and the square root of an underflown zero.
POINTS = [
    -200.0,
    -103.0,
    -100.0,
    -50.0,
    -20.0,
    -17.0001,
    -17.0,
    -16.9999,
    -5.0,
    -1e-3,
    0.0,
    1e-3,
    1.0,
    19.9,
    20.1,
    100.0,
    3e38,
]


@pytest.mark.parametrize("x", POINTS)
def test_score_function(x: float):
    for dtype, tolerance in ((torch.float32, 3e-7), (torch.float64, 1e-14)):
        logit = torch.tensor(x, dtype=dtype)
        value, expected = sqrt_softplus(logit).item(), exact_sqrt_softplus(logit.item())
        # Subnormal float32 results have fewer bits.
        assert value == pytest.approx(expected, rel=tolerance if expected > 1e-37 else 0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_score_function_has_a_finite_exact_gradient(dtype):
    x = torch.tensor([*POINTS[:-1], -1000.0, -3e38, 3e38], dtype=dtype, requires_grad=True)
    sqrt_softplus(x).sum().backward()
    assert bool(x.grad.isfinite().all())
    for at, slope in zip(x.tolist(), x.grad.tolist(), strict=True):
        if -80 < at < 200:
            expected = 0.5 / exact_sqrt_softplus(at) / (1 + math.exp(-at))
            assert slope == pytest.approx(expected, rel=1e-6 if dtype == torch.float32 else 1e-13)


def test_score_function_rises():
    x = torch.linspace(-30, 30, 100_001, dtype=torch.float32)
    assert bool((sqrt_softplus(x).diff() >= 0).all())


def test_wide():
    for dtype, expected in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
    ):
        assert wide(torch.ones(1, dtype=dtype)).dtype == expected
    x = torch.ones(1, dtype=torch.float64)
    assert wide(x) is x


def test_assert_close_can_fail():
    """The judge of every other test."""
    a = torch.tensor([1.0, -torch.inf, 3.0])
    assert_close(a, a.clone(), "equal")
    for wrong in (
        [1.0, 0.0, 3.0],
        [1.0, -torch.inf, 3.1],
        [1.0, torch.inf, 3.0],
        [torch.nan, -torch.inf, 3.0],
    ):
        with pytest.raises(AssertionError):
            assert_close(torch.tensor(wrong), a, "watched")
    with pytest.raises(AssertionError):
        assert_close(a[:2], a, "watched")
