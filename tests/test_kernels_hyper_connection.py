"""Reading and writing the streams: the one-go way against the spelled-out steps and against loops
over single numbers.
"""

import math

import pytest
import torch
from torch import Tensor

from dsv4.kernels import hyper_connection as op
from dsv4.testing import assert_close


def weights(n: int, hidden: int, dtype=torch.float64) -> dict[str, Tensor]:
    mixes = (2 + n) * n
    return {
        "fn": torch.randn(mixes, n * hidden, dtype=dtype) * (n * hidden) ** -0.5,
        "scale": 1 + 0.2 * torch.randn(3, dtype=dtype),
        "base": torch.randn(mixes, dtype=dtype),
    }


def one_token(x: list[list[float]], fn, scale, base, iters: int, eps: float, rms_eps: float):
    """(pre, post, comb, collapsed) of streams x [n][hidden], in Python floats."""
    n = len(x)
    flat = [value for stream in x for value in stream]
    norm = 1 / math.sqrt(sum(v * v for v in flat) / len(flat) + rms_eps)
    logits = [sum(w * v for w, v in zip(row, flat, strict=True)) * norm for row in fn]
    pre = [1 / (1 + math.exp(-(scale[0] * logits[i] + base[i]))) + eps for i in range(n)]
    post = [2 / (1 + math.exp(-(scale[1] * logits[n + i] + base[n + i]))) for i in range(n)]
    comb = []
    for j in range(n):
        row = [math.exp(scale[2] * logits[2 * n + j * n + k] + base[2 * n + j * n + k]) for k in range(n)]
        comb.append([v / sum(row) + eps for v in row])
    for step in range(2 * iters - 1):
        if step % 2:
            comb = [[v / (sum(row) + eps) for v in row] for row in comb]
        else:
            sums = [sum(comb[j][k] for j in range(n)) + eps for k in range(n)]
            comb = [[comb[j][k] / sums[k] for k in range(n)] for j in range(n)]
    collapsed = [sum(pre[j] * x[j][h] for j in range(n)) for h in range(len(x[0]))]
    return pre, post, comb, collapsed


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("iters", "eps"), [(1, 1e-6), (2, 1e-2), (20, 1e-6), (5, 0.3)])
def test_against_single_numbers(n: int, iters: int, eps: float):
    hidden, given = 5, weights(n, 5)
    x = torch.randn(2, 3, n, hidden, dtype=torch.float64)
    got = op.read(x, **given, iters=iters, eps=eps, rms_eps=1e-3)
    for b in range(2):
        for s in range(3):
            numbers = {name: t.tolist() for name, t in given.items()}
            expected = one_token(x[b, s].tolist(), **numbers, iters=iters, eps=eps, rms_eps=1e-3)
            for value, part in zip(got, expected, strict=True):
                assert_close(value[b, s], torch.tensor(part, dtype=torch.float64), "float64")


def spelled_out(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *, iters: int, eps: float, rms_eps: float):
    n = x.shape[2]
    logits = op.mix_logits(x, fn, rms_eps)
    pre = op.read_weights(logits[..., :n], scale[0], base[:n], eps)
    post = op.write_weights(logits[..., n : 2 * n], scale[1], base[n : 2 * n])
    rounds = op.sinkhorn_rounds(op.mixing_start(logits[..., 2 * n :], scale[2], base[2 * n :], eps, n), iters, eps)
    assert rounds.shape == (*x.shape[:2], iters, n, n)
    return pre, post, rounds[..., -1, :, :], op.collapse(x, pre)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, "float64"), (torch.float32, "float32 op")])
@pytest.mark.parametrize(("n", "iters"), [(1, 20), (2, 1), (3, 7), (4, 20)])
def test_the_steps_are_the_same_as_one_go(n: int, iters: int, dtype, limit: str):
    given = weights(n, 33, dtype)
    x = torch.randn(2, 7, n, 33, dtype=dtype)
    leaves = [x, *given.values()]
    for leaf in leaves:
        leaf.requires_grad_()
    results = []
    for way in (op.read, spelled_out):
        parts = way(x, **given, iters=iters, eps=1e-6, rms_eps=1e-6)
        out = op.write_back(x, parts[2], parts[1], parts[3].tanh())
        weight = torch.linspace(-1, 1, out.numel(), dtype=dtype).view(out.shape)
        results.append((parts, torch.autograd.grad((out * weight).sum(), leaves)))
    (parts, grads), (expected, expected_grads) = results
    for value, other in zip(parts, expected, strict=True):
        assert_close(value, other, limit)
    for grad, other in zip(grads, expected_grads, strict=True):
        assert_close(grad, other, limit if dtype == torch.float64 else "float32 op gradient")


def test_gradients_numerically():
    given = weights(3, 4)
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    names = list(given)
    leaves = [given[name].requires_grad_() for name in names]

    def both(x, *leaves):
        pre, post, comb, collapsed = op.read(x, **dict(zip(names, leaves, strict=True)), iters=4, eps=1e-3, rms_eps=1e-3)
        return pre, op.write_back(x, comb, post, collapsed)

    assert torch.autograd.gradcheck(both, (x, *leaves))


@pytest.mark.parametrize("size", [0.0, 1e-20, 1e3, 1e15])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
def test_extreme_logits_stay_finite(size: float, scale: float):
    """One-hot rows that all want one column leave the other columns next to empty."""
    n = 4
    given = weights(n, 8, torch.float32)
    given["scale"] = torch.full((3,), scale)
    given["base"][2 * n :] = torch.tensor([50.0, 0.0, 0.0, 0.0]).repeat(n)
    x = (torch.randn(2, 5, n, 8) * size).requires_grad_()
    leaves = [x, *(t.requires_grad_() for t in given.values())]
    parts = op.read(x, **given, iters=20, eps=1e-6, rms_eps=1e-6)
    for value in (*parts, *torch.autograd.grad(sum(part.sum() for part in parts), leaves)):
        assert bool(value.isfinite().all())


def test_columns_of_comb_sum_to_one():
    given = weights(4, 16, torch.float32)
    comb = op.read(torch.randn(3, 40, 4, 16), **given, iters=20, eps=1e-6, rms_eps=1e-6)[2]
    assert bool((comb > 0).all())
    assert_close(comb.sum(-2), torch.ones(3, 40, 4), "row alone")


@pytest.mark.parametrize("n", [1, 2, 4])
def test_write_back_is_comb_transposed(n: int):
    x, out = torch.randn(2, 3, n, 5, dtype=torch.float64), torch.randn(2, 3, 5, dtype=torch.float64)
    comb, post = (
        torch.rand(2, 3, n, n, dtype=torch.float64),
        torch.rand(2, 3, n, dtype=torch.float64),
    )
    written = op.write_back(x, comb, post, out)
    for k in range(n):
        expected = sum(comb[..., j, k, None] * x[:, :, j] for j in range(n)) + post[..., k, None] * out
        assert_close(written[:, :, k], expected, "float64")


def test_bfloat16_streams_are_rounded_once():
    n, given = 4, weights(4, 64, torch.float32)
    x, out = torch.randn(2, 9, n, 64).bfloat16(), torch.randn(2, 9, 64).bfloat16()
    pre, post, comb, collapsed = op.read(x, **given, iters=20, eps=1e-6, rms_eps=1e-6)
    assert {pre.dtype, post.dtype, comb.dtype} == {torch.float32}
    exact = op.read(x.float(), **given, iters=20, eps=1e-6, rms_eps=1e-6)
    for value, other in zip((pre, post, comb), exact[:3], strict=True):
        assert torch.equal(value, other)
    assert torch.equal(collapsed, exact[3].bfloat16())
    written = op.write_back(x, comb, post, out)
    assert written.dtype == torch.bfloat16
    assert torch.equal(written, op.write_back(x.float(), comb, post, out.float()).bfloat16())


def test_expanded_streams_are_read_like_copies():
    """The first block reads one storage seen n times."""
    given = weights(3, 6)
    one = torch.randn(2, 4, 6, dtype=torch.float64)
    seen = one.unsqueeze(2).expand(-1, -1, 3, -1)
    expected = op.read(seen.contiguous(), **given, iters=3, eps=1e-6, rms_eps=1e-6)
    for value, other in zip(op.read(seen, **given, iters=3, eps=1e-6, rms_eps=1e-6), expected, strict=True):
        assert_close(value, other, "float64")


@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 2, 4, 5])
@pytest.mark.parametrize("eps", [1e-6, 0.0])
def test_the_rounds_of_a_few_tokens_are_those_of_many(tokens, n, eps):
    """A few tokens go through compiled code where no gradient is recorded."""
    start = torch.rand(1, tokens, n, n, dtype=torch.float64).exp()
    with torch.enable_grad():
        recorded = op.sinkhorn_rounds(start.float().requires_grad_(), 20, eps).detach()
        exact = op.sinkhorn_rounds(start.requires_grad_(), 20, eps).detach()
    with torch.no_grad():
        plain = op.sinkhorn_rounds(start.float(), 20, eps)
    assert_close(plain, exact, "float32 op")
    assert_close(recorded, exact, "float32 op")


@pytest.mark.parametrize("eps", [0.5, 0.0])
@pytest.mark.parametrize("written", [[[1.0, -1.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]], [[1e30, 1.0], [-1e30, 1.0]]])
def test_rounds_of_what_a_hook_wrote_do_not_stop(written, eps: float):
    """Zeros and signs divide as in torch, whatever the number of tokens."""
    start = torch.tensor(written).view(1, 1, 2, 2)
    with torch.no_grad():
        few = op.sinkhorn_rounds(start, 3, eps)
    torch.testing.assert_close(few, op.sinkhorn_rounds(start.requires_grad_(), 3, eps), equal_nan=True)


@pytest.mark.parametrize("tokens", [(1, 1), (1, 2), (2, 1), (1, 3)])
@pytest.mark.parametrize("n", [1, 2, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_without_a_gradient_one_go_is_the_steps_to_the_last_bit(tokens, n: int, dtype):
    given = weights(n, 24, torch.float64 if dtype == torch.float64 else torch.float32)
    x = torch.randn(*tokens, n, 24).to(dtype)
    numbers = {"iters": 20, "eps": 1e-6, "rms_eps": 1e-6}
    with torch.no_grad():
        found = op.read(x, **given, **numbers)
        for value, step in zip(found, spelled_out(x, **given, **numbers), strict=True):
            assert_close(value, step, "equal")
    with torch.enable_grad():
        recorded = op.read(x.requires_grad_(), **given, **numbers)
    for value, other in zip(found, recorded, strict=True):
        if value.dtype == torch.bfloat16:
            # One rounding may fall the other way.
            assert (value.double() - other.double()).abs().max() <= 2**-7 * other.abs().max()
        else:
            assert_close(value, other, "float64" if dtype == torch.float64 else "float32 op")


@pytest.mark.parametrize("worst", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("tokens", [1, 2])
def test_numbers_that_are_none_spread_as_in_torch(worst: float, tokens: int):
    given = weights(4, 8, torch.float32)
    x = torch.randn(1, tokens, 4, 8)
    x[0, 0, 2, 3] = worst
    with torch.no_grad():
        found = op.read(x, **given, iters=20, eps=1e-6, rms_eps=1e-6)
    with torch.enable_grad():
        expected = op.read(x.requires_grad_(), **given, iters=20, eps=1e-6, rms_eps=1e-6)
    for value, other in zip(found, expected, strict=True):
        assert torch.equal(value.isnan(), other.isnan())


@pytest.mark.parametrize("scale", [1.0, 30.0, 2000.0])
def test_mixes_of_large_logits(scale: float):
    """exp of none of them overflows."""
    logits = scale * torch.randn(1, 1, 24)
    base, one = torch.randn(24), torch.ones(())
    with torch.no_grad():
        few = (op.read_weights(logits[..., :4], one, base[:4], 1e-6), op.write_weights(logits[..., 4:8], one, base[4:8]))
        few += (op.sinkhorn_rounds(op.mixing_start(logits[..., 8:], one, base[8:], 1e-6, 4), 20, 1e-6),)
    wide = logits.double().requires_grad_()
    many = (op.read_weights(wide[..., :4], one, base[:4], 1e-6), op.write_weights(wide[..., 4:8], one, base[4:8]))
    many += (op.sinkhorn_rounds(op.mixing_start(wide[..., 8:], one, base[8:], 1e-6, 4), 20, 1e-6),)
    for value, other in zip(few, many, strict=True):
        # Of matrices that are nearly permutations the rounds lift what is nearly nothing: relative to each number.
        assert ((value - other).abs() <= 2e-4 * other.abs() + 1e-7).all()


@pytest.mark.parametrize("nearly", [0.0, 1e-3, 1e-6])
@pytest.mark.parametrize("n", [2, 4])
def test_rounds_of_what_hardly_mixes(nearly: float, n: int):
    """However slowly a matrix settles."""
    start = torch.rand(40, n, n, dtype=torch.float64) * nearly + torch.eye(n, dtype=torch.float64)[torch.randperm(n)] + 1e-6
    start[:, 0, 0] += nearly * 1e-3
    start = start.float()
    with torch.enable_grad():
        exact = op.sinkhorn_rounds(start.double().requires_grad_(), 20, 1e-6).detach()
    with torch.no_grad():
        few = torch.stack([op.sinkhorn_rounds(one.unsqueeze(0), 20, 1e-6)[0] for one in start])
    assert (few - exact).abs().max() <= 1e-7


@pytest.mark.parametrize("chunk", [1, 96, 100, 1000])
def test_in_stretches_it_is_the_same(monkeypatch, chunk: int):
    n, hidden = 4, 24
    given = weights(n, hidden, torch.float32)
    x, out = torch.randn(2, 7, n, hidden), torch.randn(2, 7, hidden)
    comb, post = torch.rand(2, 7, n, n), torch.rand(2, 7, n)
    with torch.no_grad():
        whole = op.mix_logits(x, given["fn"], 1e-6), op.write_back(x, comb, post, out)
        monkeypatch.setattr(op, "CHUNK", chunk)
        parts = op.mix_logits(x, given["fn"], 1e-6), op.write_back(x, comb, post, out)
    for part, expected in zip(parts, whole, strict=True):
        assert_close(part, expected, "float32 op")
