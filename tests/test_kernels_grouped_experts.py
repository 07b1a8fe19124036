"""Routed experts on sorted tokens against a loop over slots, in value and gradient."""

import math
import random

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4.kernels import grouped_experts as op
from dsv4.kernels import routing
from dsv4.kernels.grouped_linear import grouped_linear, grouped_linear_each, grouped_product, groups
from dsv4.kernels.quantize import quantize_fp4, quantize_fp8
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
    order, ends = routing.sort_by_expert(indices, experts)
    flat = indices.flatten().tolist()
    assert order.tolist() == sorted(range(len(flat)), key=lambda i: (flat[i], i))
    for e, first, last in groups(ends):
        assert [flat[i] for i in order[first:last].tolist()] == [e] * (last - first)
    assert sum(last - first for _, first, last in groups(ends)) == len(flat)
    x = torch.randn(len(flat), 2)
    assert torch.equal(routing.slots_in_order(x[order], order), x)


def test_first_and_second_derivatives_numerically():
    """Empty groups included; the second pass through the gradient of the weights as well."""
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: grouped_linear(x, w, ends), (x, weight))
    assert torch.autograd.gradgradcheck(lambda x, w: grouped_linear(x, w, ends), (x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ends", [[4, 4, 10], [0, 0, 0], [0, 9, 9]])
def test_the_product_in_autograd_is_the_op(dtype, ends):
    """What eager code calls: values, gradients, gradients of gradients; and those of the weights only when asked for."""
    x = torch.randn(ends[-1], 32, dtype=dtype, requires_grad=True)
    weight = torch.randn(3, 16, 32, dtype=dtype, requires_grad=True)
    stops = torch.tensor(ends, dtype=torch.int32)
    results = []
    for way in (grouped_product, grouped_linear):
        y = way(x, weight, stops)
        first = torch.autograd.grad((y * torch.arange(16)).square().sum(), (x, weight), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (x, weight))
        results.append([y, *first, *second])
    tight = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=tight, atol=tight * (float(other.detach().abs().max()) if other.numel() else 0.0))


def stored(form: str, experts: int, hidden: int, inner: int, dtype: torch.dtype) -> op.Stored:
    first = torch.randn(experts, 2 * inner, hidden) * hidden**-0.5
    second = torch.randn(experts, hidden, inner) * inner**-0.5
    if form == "dense":
        return op.Stored(first.to(dtype), None, second.to(dtype), None)
    if form == "fp4":
        return op.Stored(*quantize_fp4(first), *quantize_fp4(second))
    return op.Stored(*quantize_fp8(first, row_parts=2), *quantize_fp8(second))


@pytest.mark.parametrize("form", ["dense", "fp8", "fp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("hidden", "inner"), [(64, 32), (96, 160), (33, 7)])
def test_without_gradients_it_is_the_same_to_the_last_bit(form, dtype, hidden, inner):
    """One token, a few, enough to go expert by expert; an expert twice in a row of slots; empty groups; none. (Compiled code sums a
    single float32 token in another order.)
    """
    if form == "fp4" and inner % 32:
        return
    bank = stored(form, 5, hidden, inner, dtype)
    for tokens, slots in ((1, 3), (1, 1), (2, 4), (40, 2), (400, 2), (0, 2)):
        x = torch.randn(tokens, hidden, dtype=dtype)
        weights = torch.rand(tokens, slots, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        for indices in (torch.randint(0, 4, (tokens, slots)), torch.rand(tokens, 5).argsort(-1)[:, :slots]):
            expected = op.grouped_experts(x, indices, weights, bank, 1.0)
            with torch.no_grad():
                found = op.grouped_experts(x, indices, weights, bank, 1.0)
            is_compiled = tokens == 1 and form == "dense" and dtype == torch.float32
            assert_close(found, expected, "float32 op" if is_compiled else "equal")


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("form", ["dense", "fp8"])
def test_padding_costs_nothing_and_gets_zeros(form, grad, monkeypatch):
    bank = stored(form, 3, 64, 32, torch.float32)
    x, weights = torch.randn(9, 64), torch.rand(9, 2)
    indices, valid = torch.randint(0, 3, (9, 2)), torch.tensor([True, False, True] * 3)
    x[~valid], weights[~valid] = torch.nan, torch.nan
    rows = []
    plain = routing.sort_by_expert
    counted = lambda indices, *rest: rows.append(len(indices)) or plain(indices, *rest)  # noqa: E731
    monkeypatch.setattr("dsv4.kernels.grouped_experts.sort_by_expert", counted)
    monkeypatch.setattr("dsv4.kernels._grouped_experts_cpu.sort_by_expert", counted)
    x.requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        out = op.grouped_experts(x, indices, weights, bank, 1.0, valid=valid)
    assert rows == [6]
    assert not out[~valid].any()
    assert torch.equal(out[valid], op.grouped_experts(x[valid], indices[valid], weights[valid], bank, 1.0))
    if grad:
        (found,) = torch.autograd.grad(out.square().sum(), x)
        assert not found[~valid].any()
        assert found[valid].any(-1).all()


def few(x, indices, weights, bank, limit):
    return op.few_tokens_experts(x, indices, weights, bank.first, bank.second, limit)


@pytest.mark.parametrize(("tokens", "slots", "experts"), [(1, 1, 1), (1, 4, 6), (3, 2, 5), (2, 3, 2)])
def test_few_tokens_by_copies_of_their_experts(tokens, slots, experts):
    x, _, weights, bank = problem(tokens, slots, max(slots, experts))
    indices = torch.randint(0, experts, (tokens, slots))
    leaves = (x, weights, bank.first, bank.second)
    out, expected = few(x, indices, weights, bank, 0.5), slot_by_slot(x, indices, weights, bank, 0.5)
    assert_close(out, expected, "float64")
    cotangent = torch.randn_like(out)
    for one, other in zip(*(torch.autograd.grad((y * cotangent).sum(), leaves) for y in (out, expected)), strict=True):
        assert_close(one, other, "float64")


class Seen(TorchDispatchMode):
    """Names of the operations called while it is active."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_few_tokens_read_nothing_back():
    """No size depends on the data: fake tensors have none, and no operation asks for any."""
    x, indices, weights, bank = problem(2, 3, 5)
    with Seen() as seen:
        few(x, indices, weights, bank, 0.5)
    assert not seen.names & {"_local_scalar_dense", "nonzero", "item", "bincount", "masked_select", "unique"}
    with FakeTensorMode() as mode:
        made = [mode.from_tensor(t) for t in (x, indices, weights, bank.first, bank.second)]
        assert op.few_tokens_experts(*made, 0.5).shape == x.shape


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_tokens_compiled_whole(dtype):
    bank = stored("dense", 6, 64, 32, dtype)
    compiled = torch.compile(op.few_tokens_experts, fullgraph=True)
    for tokens in (1, 3):
        x, weights = torch.randn(tokens, 64, dtype=dtype), torch.rand(tokens, 2)
        indices = torch.randint(0, 6, (tokens, 2))
        with torch.no_grad():
            found = compiled(x, indices, weights, bank.first, bank.second, 1.0)
            assert_close(found, few(x, indices, weights, bank, 1.0), "float32 op" if dtype == torch.float32 else "bfloat16 rounding")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("grad", [True, False])
def test_forward_mode_derivatives_pass_through_the_bank(grad):
    bank = stored("dense", 4, 32, 32, torch.float64)
    routing_matrix, x, direction = (torch.randn(*shape, dtype=torch.float64) for shape in ((32, 4), (5, 32), (5, 32)))

    def mixture(x: Tensor) -> Tensor:
        scores = torch.sigmoid(x @ routing_matrix)
        weights, indices = scores.topk(2)
        return op.grouped_experts(x, indices, weights, bank, 1.0)

    with torch.set_grad_enabled(grad):
        _, found = torch.func.jvp(mixture, (x,), (direction,))
    step = 1e-6
    expected = (mixture(x + step * direction) - mixture(x - step * direction)) / (2 * step)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
