"""Routed experts on sorted tokens against a loop over slots, in value and gradient."""

import math
import random

import pytest
import torch
from torch import Tensor

from dsv4.kernels import grouped_experts as op
from dsv4.testing import assert_close


class Dense:
    """A bank of random matrices; counts how often each expert's are asked for."""

    def __init__(self, experts: int, hidden: int, inner: int, dtype=torch.float64):
        self.num_experts = experts
        self.first = (torch.randn(experts, 2 * inner, hidden, dtype=dtype) * hidden**-0.5).requires_grad_()
        self.second = (torch.randn(experts, hidden, inner, dtype=dtype) * inner**-0.5).requires_grad_()
        self.asked: list[int] = []

    def gate_up(self, expert: int) -> Tensor:
        self.asked.append(expert)
        return self.first[expert]

    def down(self, expert: int) -> Tensor:
        return self.second[expert]


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


def problem(tokens: int, slots: int, experts: int, hidden: int = 6, inner: int = 5):
    x = torch.randn(tokens, hidden, dtype=torch.float64, requires_grad=True)
    indices = torch.rand(tokens, experts).argsort(-1)[:, :slots]
    weights = torch.rand(tokens, slots, dtype=torch.float64, requires_grad=True)
    return x, indices, weights, Dense(experts, hidden, inner)


def compare(x: Tensor, indices: Tensor, weights: Tensor, bank: Dense, limit: float) -> None:
    leaves = (x, weights, bank.first, bank.second)
    out, expected = (way(x, indices, weights, bank, limit) for way in (op.grouped_experts, slot_by_slot))
    assert_close(out, expected, "float64")
    cotangent = torch.randn_like(out)
    grads = [torch.autograd.grad((y * cotangent).sum(), leaves) for y in (out, expected)]
    for grad, other in zip(*grads, strict=True):
        assert_close(grad, other, "float64")


@pytest.mark.parametrize(("tokens", "slots", "experts"), [(1, 1, 1), (7, 2, 3), (40, 3, 8), (5, 4, 4), (3, 1, 50), (64, 6, 13)])
@pytest.mark.parametrize("limit", [0.1, 1.0, 10.0])
def test_against_a_loop(tokens: int, slots: int, experts: int, limit: float):
    compare(*problem(tokens, slots, experts), limit)


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
    assert_close(op.grouped_experts(x[order], indices[order], weights[order], bank, 1.0), out[order], "float64")


def test_float32_sum_of_bfloat16_slots():
    """Weights and the sum over slots stay float32: the error is that of the matrices' products alone."""
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
    expected = [min(g, limit) / (1 + math.exp(-min(g, limit))) * max(min(u, limit), -limit) for g, u in zip(gate.tolist(), up.tolist(), strict=True)]
    assert op.swiglu(gate, up, limit).tolist() == pytest.approx(expected, rel=1e-12)
    assert_close(op.neurons(op.activation(gate, limit), up, limit), op.swiglu(gate, up, limit), "float64")


@pytest.mark.parametrize("seed", range(5))
def test_sorting_is_stable_and_undone(seed: int):
    draw = random.Random(seed)
    experts = draw.choice((1, 3, 17))
    indices = torch.randint(0, experts, (draw.randint(1, 40), 3))
    order, groups = op.sort_by_expert(indices, experts)
    flat = indices.flatten().tolist()
    assert order.tolist() == sorted(range(len(flat)), key=lambda i: (flat[i], i))
    for e, first, last in groups:
        assert [flat[i] for i in order[first:last].tolist()] == [e] * (last - first)
    assert sum(last - first for _, first, last in groups) == len(flat)
    x = torch.randn(len(flat), 2)
    assert torch.equal(op.slots_in_order(x[order], order), x)
