"""Routed experts on sorted tokens against a loop over slots, in value and gradient."""

import math
import random

import pytest
import torch
from torch import Tensor

from dsv4.kernels import grouped_experts as op
from dsv4.kernels.grouped_linear import grouped_linear, grouped_linear_each, groups
from dsv4.testing import assert_close


class Dense:
    """A bank of random matrices, each asked for by itself; counts how often."""

    def __init__(self, experts: int, hidden: int, inner: int, dtype=torch.float64):
        self.num_experts = experts
        self.first = (torch.randn(experts, 2 * inner, hidden, dtype=dtype) * hidden**-0.5).requires_grad_()
        self.second = (torch.randn(experts, hidden, inner, dtype=dtype) * inner**-0.5).requires_grad_()
        self.asked: list[int] = []

    def gate_up(self, rows: Tensor, ends: Tensor) -> Tensor:
        def matrix(expert: int) -> Tensor:
            self.asked.append(expert)
            return self.first[expert]

        return grouped_linear_each(rows, matrix, ends, self.first.shape[1])

    def down(self, rows: Tensor, ends: Tensor) -> Tensor:
        return grouped_linear_each(rows, lambda expert: self.second[expert], ends, self.second.shape[1])


class Whole(Dense):
    """The same bank through the registered op."""

    def gate_up(self, rows: Tensor, ends: Tensor) -> Tensor:
        return grouped_linear(rows, self.first, ends)

    def down(self, rows: Tensor, ends: Tensor) -> Tensor:
        return grouped_linear(rows, self.second, ends)


def slot_by_slot(x: Tensor, indices: Tensor, weights: Tensor, bank: Dense, limit: float) -> Tensor:
    """The equations, one token and slot at a time."""
    rows = []
    for token, experts in enumerate(indices.tolist()):
        total = torch.zeros_like(x[token])
        for slot, e in enumerate(experts):
            gate, up = (bank.first[e] @ x[token]).chunk(2)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            total = total + weights[token, slot] * (bank.second[e] @ (gate * torch.sigmoid(gate) * up))
        rows.append(total)
    return torch.stack(rows) if rows else x


def problem(tokens: int, slots: int, experts: int, hidden: int = 6, inner: int = 5, kind=Dense):
    x = torch.randn(tokens, hidden, dtype=torch.float64, requires_grad=True)
    indices = torch.rand(tokens, experts).argsort(-1)[:, :slots]
    weights = torch.rand(tokens, slots, dtype=torch.float64, requires_grad=True)
    return x, indices, weights, kind(experts, hidden, inner)


def compare(x: Tensor, indices: Tensor, weights: Tensor, bank: Dense, limit: float) -> None:
    leaves = (x, weights, bank.first, bank.second)
    out, expected = (way(x, indices, weights, bank, limit) for way in (op.grouped_experts, slot_by_slot))
    assert_close(out, expected, "float64")
    cotangent = torch.randn_like(out)
    grads = [torch.autograd.grad((y * cotangent).sum(), leaves) for y in (out, expected)]
    for grad, other in zip(*grads, strict=True):
        assert_close(grad, other, "float64")


@pytest.mark.parametrize(
    ("tokens", "slots", "experts"),
    [(1, 1, 1), (7, 2, 3), (40, 3, 8), (5, 4, 4), (3, 1, 50), (64, 6, 13)],
)
@pytest.mark.parametrize("limit", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("kind", [Dense, Whole])
def test_against_a_loop(kind, tokens: int, slots: int, experts: int, limit: float):
    compare(*problem(tokens, slots, experts, kind=kind), limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "out"), [(32, 16), (24, 40), (7, 5), (20, 6)])
@pytest.mark.parametrize("ends", [[4, 4, 10], [0, 0, 0], [0, 9, 9], [9, 9, 9], [1, 2, 3]])
def test_the_registered_op_is_the_loop(dtype, width: int, out: int, ends: list[int]):
    """Sizes that torch's grouped product takes and that it refuses; empty groups; gradients."""
    x = torch.randn(ends[-1], width, dtype=dtype, requires_grad=True)
    weight = torch.randn(3, out, width, dtype=dtype, requires_grad=True)
    stops = torch.tensor(ends, dtype=torch.int32)
    results = [
        grouped_linear(x, weight, stops),
        grouped_linear_each(x, lambda e: weight[e], stops, out),
    ]
    if not ends[-1]:
        assert torch.autograd.grad(results[0].sum(), weight)[0].eq(0).all()
        return
    cotangent = torch.randn(ends[-1], out, dtype=dtype)
    grads = [torch.autograd.grad((y * cotangent).sum(), (x, weight), allow_unused=True) for y in results]
    tight = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(results[0], results[1], rtol=tight, atol=tight)
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, torch.zeros_like(one) if other is None else other, rtol=tight, atol=4 * tight)


def test_the_registered_op_keeps_torchs_rules():
    x, weight = torch.randn(10, 8, requires_grad=True), torch.randn(3, 4, 8, requires_grad=True)
    torch.library.opcheck(grouped_linear, (x, weight, torch.tensor([4, 4, 10], dtype=torch.int32)))


def test_all_tokens_to_one_expert_and_the_same_expert_twice():
    x, _, weights, bank = problem(9, 3, 5)
    compare(x, torch.full((9, 3), 4), weights, bank, 1.0)
    compare(x, torch.tensor([[0, 0, 2]]).expand(9, 3), weights, bank, 1.0)


def test_only_experts_that_are_hit_are_asked_for():
    x, _, weights, bank = problem(4, 2, 30)
    op.grouped_experts(x, torch.tensor([[3, 29]] * 4), weights[:, :2], bank, 1.0)
    assert bank.asked == [3, 29]


def test_no_token():
    x, indices, weights, bank = problem(0, 2, 3)
    assert op.grouped_experts(x, indices, weights, bank, 1.0).shape == (0, 6)


def test_order_of_the_slots_does_not_matter():
    x, indices, weights, bank = problem(20, 4, 9)
    out = op.grouped_experts(x, indices, weights, bank, 1.0)
    assert_close(op.grouped_experts(x, indices.flip(-1), weights.flip(-1), bank, 1.0), out, "float64")


def test_tokens_are_independent():
    x, indices, weights, bank = problem(20, 3, 6)
    out = op.grouped_experts(x, indices, weights, bank, 1.0)
    order = torch.randperm(20)
    assert_close(
        op.grouped_experts(x[order], indices[order], weights[order], bank, 1.0),
        out[order],
        "float64",
    )


def test_float32_sum_of_bfloat16_slots():
    """Weights and the sum over slots stay float32: the error is that of the matrices' products
    alone.
    """
    x, indices, weights, _ = problem(50, 4, 6, 64, 32)
    bank = Dense(6, 64, 32, torch.bfloat16)
    x, weights = x.detach().bfloat16(), weights.detach().float()
    out = op.grouped_experts(x, indices, weights, bank, 10.0)
    assert out.dtype == torch.float32
    exact = Dense(6, 64, 32)
    exact.first, exact.second = bank.first.double(), bank.second.double()
    expected = slot_by_slot(x.double(), indices, weights.double(), exact, 10.0)
    # Roundings of gate, up, neurons and each slot's output.
    assert (out.double() - expected).norm() / expected.norm() < 4 * 2**-9


def test_swiglu_by_number_and_by_its_parts():
    gate = torch.tensor([-50.0, -2.0, -0.1, 0.0, 0.1, 2.0, 50.0], dtype=torch.float64)
    up = torch.tensor([3.0, -3.0, 0.5, 1.0, -0.5, 2.5, -2.5], dtype=torch.float64)
    limit = 1.5
    expected = [
        min(g, limit) / (1 + math.exp(-min(g, limit))) * max(min(u, limit), -limit) for g, u in zip(gate.tolist(), up.tolist(), strict=True)
    ]
    assert op.swiglu(gate, up, limit).tolist() == pytest.approx(expected, rel=1e-12)
    assert_close(op.neurons(op.activation(gate, limit), up, limit), op.swiglu(gate, up, limit), "float64")


@pytest.mark.parametrize("seed", range(5))
def test_sorting_is_stable_and_undone(seed: int):
    draw = random.Random(seed)
    experts = draw.choice((1, 3, 17))
    indices = torch.randint(0, experts, (draw.randint(1, 40), 3))
    order, ends = op.sort_by_expert(indices, experts)
    flat = indices.flatten().tolist()
    assert order.tolist() == sorted(range(len(flat)), key=lambda i: (flat[i], i))
    for e, first, last in groups(ends):
        assert [flat[i] for i in order[first:last].tolist()] == [e] * (last - first)
    assert sum(last - first for _, first, last in groups(ends)) == len(flat)
    x = torch.randn(len(flat), 2)
    assert torch.equal(op.slots_in_order(x[order], order), x)


def test_first_and_second_derivatives_numerically():
    """Empty groups included; the second pass through the gradient of the weights as well."""
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: grouped_linear(x, w, ends), (x, weight))
    assert torch.autograd.gradgradcheck(lambda x, w: grouped_linear(x, w, ends), (x, weight))
