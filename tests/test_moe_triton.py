"""The mixture in few launches, in Triton's interpreter: what it launches, every value and every edit as the torch backend has them."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dsv4 import Dsv4Config
from dsv4.kernels import mixture as op
from dsv4.kernels.grouped_experts import Stored, fused_experts
from dsv4.kernels.hyper_connection import fused_write, write_back
from dsv4.kernels.quantize import quantize_fp4, quantize_fp8
from dsv4.kernels.router import fused_router
from dsv4.moe import HashMoe, Moe
from dsv4.router import HashRouter, TopKRouter
from dsv4.testing import assert_close
from dsv4.testing_kernels import interpreter, resources

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

CONFIG = replace(Dsv4Config.tiny(), hidden_size=48, moe_intermediate_size=32, n_routed_experts=7, num_experts_per_tok=3, vocab_size=16)
KINDS = {"scores": Moe, "table": HashMoe}
# What few tokens launch; the shared expert's second half is a product of torch's.
FEW = {"router_kernel": 1, "expert_gate_up": 1, "expert_down": 1, "few_gate_up_kernel": 1, "mixture_kernel": 1}
MANY = {"route": 1, "expert_gate_up": 1, "expert_down": 1, "gate_up_linear": 1, "mixture_kernel": 1}


@dataclass(frozen=True)
class Step:
    """Of a Call, what a mixture reads."""

    input_ids: Tensor
    without_padding: Tensor | None


def mixtures(kind: str) -> tuple[Moe, Moe]:
    """The same by torch and by device code, every parameter random."""
    torch.manual_seed(0)
    plain = KINDS[kind](CONFIG)
    for name, t in (*plain.named_parameters(), *plain.named_buffers()):
        if t.is_floating_point():
            torch.nn.init.normal_(t, std=t.shape[-1] ** -0.5)
        else:
            t.copy_(torch.stack([torch.randperm(CONFIG.n_routed_experts)[: CONFIG.num_experts_per_tok] for _ in range(len(t))]))
        assert "." in name
    fused = deepcopy(plain)
    for module in (fused.router, fused.experts, fused.shared_experts):
        module.backend = "triton"
    return plain, fused


def inputs(rows: int, tokens: int, padded: bool = False) -> tuple[Tensor, Step]:
    torch.manual_seed(1)
    valid = torch.rand(rows, tokens) < 0.7 if padded else None
    return torch.randn(rows, tokens, CONFIG.hidden_size), Step(torch.randint(0, CONFIG.vocab_size, (rows, tokens)), valid)


@contextmanager
def launches() -> Iterator[Counter]:
    from triton.runtime.interpreter import GridExecutor

    count, run = Counter(), GridExecutor.__call__

    def counted(self, *args, **kwargs):
        count[self.fn.__name__] += 1
        return run(self, *args, **kwargs)

    with patch.object(GridExecutor, "__call__", counted):
        yield count


@pytest.fixture(scope="module")
def interpreted():
    with interpreter(sys.modules[__name__]) as run:
        yield run


def check_numbers(kind: str) -> None:
    """Few tokens, with padding and without, and many."""
    plain, fused = mixtures(kind)
    for (x, step), expected in ((inputs(1, 1), FEW), (inputs(2, 4, padded=True), FEW), (inputs(1, 17), MANY)):
        with torch.no_grad():
            with launches() as count:
                got = fused(x, step)
            value = plain(x, step)
        assert count == expected
        seen = slice(None) if step.without_padding is None else step.without_padding
        assert_close(got[seen], value[seen], "watched", f"{x.shape}")


POINTS = ("router_logits", "router_scores", "router_selection_scores", "expert_indices", "expert_weights", "routed_output", "mlp_gate")
MORE_POINTS = ("expert_up", "expert_outputs", "mlp_neurons", "shared_expert_output", "mlp_output")


def another(value: Tensor) -> Tensor:
    """Other experts, or reals of another order."""
    return (value + 1) % CONFIG.n_routed_experts if value.dtype == torch.int64 else value.flip(-1) + 0.5


def run(moe: Moe, given: tuple[Tensor, Step], leaf: str, hook: Callable) -> tuple[Tensor, Tensor]:
    """(output, value at a point as it came)."""
    seen = []

    def kept(value: Tensor, hook=None) -> Tensor | None:
        seen.append(value.clone())
        return change(value)

    change = hook
    with getattr(moe, leaf).add_hook(kept), torch.no_grad():
        out = moe(*given)
    assert len(seen) == 1
    return out, seen[0]


def check_points(kind: str, leaves: tuple[str, ...]) -> None:
    """What is read is what torch makes; a value replaced by itself changes nothing; an edit has torch's effect."""
    plain, fused = mixtures(kind)
    given = inputs(1, 2)
    with torch.no_grad():
        unwatched = fused(*given)
    for leaf in leaves:
        (out, value), (expected, wanted) = (run(moe, given, leaf, lambda value: None) for moe in (fused, plain))
        assert_close(out, expected, "watched", leaf)
        assert_close(out, unwatched, "watched", leaf)
        if value.dtype == torch.int64:
            assert torch.equal(value, wanted)
        else:
            assert_close(value, wanted, "watched", leaf)
        same, _ = run(fused, given, leaf, lambda value: value.clone())
        assert torch.equal(same, out), leaf
        (moved, _), (expected, _) = (run(moe, given, leaf, another) for moe in (fused, plain))
        assert_close(moved, expected, "watched", f"edited {leaf}")
        assert not torch.allclose(moved, out), leaf
        with torch.no_grad():
            assert torch.equal(fused(*given), unwatched)


def check_all_at_once(kind: str) -> None:
    """Points in forward order, each edited on top of the edits before it, and the edits of two in a row."""
    plain, fused = mixtures(kind)
    given = inputs(1, 3)
    orders, outs = [], []
    for moe in (plain, fused):
        order: list[str] = []
        handles = []
        for leaf, point in moe.points():

            def hook(value: Tensor, hook=None, leaf=leaf, order=order) -> Tensor:
                order.append(leaf)
                return value if value.dtype == torch.int64 else value * 1.25

            handles.append(point.add_hook(hook))
        with torch.no_grad():
            outs.append(moe(*given))
        orders.append(order)
        assert order == [leaf for leaf, _ in moe.points()]
    assert orders[0] == orders[1]
    assert_close(outs[1], outs[0], "watched")


def check_gradients(kind: str) -> None:
    """Of every parameter and the input, with and without a gradient hook; of what the points hold."""
    plain, fused = mixtures(kind)
    x, step = inputs(1, 3)
    for leaf in (None, "router_scores", "expert_weights"):
        found = []
        for moe in (plain, fused):
            pulled: list[Tensor] = []
            handle = None if leaf is None else getattr(moe, leaf).add_hook(lambda grad, pulled=pulled: pulled.append(grad), dir="bwd")
            entering = x.clone().requires_grad_()
            out = moe(entering, step)
            wanted = [entering, *moe.parameters()]
            grads = torch.autograd.grad((out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum(), wanted)
            found.append([*pulled, *grads])
            assert len(pulled) == (leaf is not None)
            if handle is not None:
                handle.remove()
        for got, expected in zip(found[1], found[0], strict=True):
            assert_close(got, expected, "watched gradient", str(leaf))


def check_modules_are_called(kind: str) -> None:
    """PyTorch's own hooks on the experts and on the shared expert."""
    _, fused = mixtures(kind)
    given = inputs(1, 2)
    with torch.no_grad():
        expected = fused(*given)
        for module in (fused.experts, fused.shared_experts):
            seen = []
            handle = module.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out))
            assert_close(fused(*given), expected, "watched")
            assert len(seen) == 1
            handle.remove()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checked", [check_numbers, check_all_at_once, check_gradients, check_modules_are_called])
def test_mixture(interpreted, checked, kind: str):
    interpreted(checked, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_points(interpreted, kind: str):
    # A table leaves nothing to choose.
    interpreted(check_points, kind, tuple(leaf for leaf in POINTS if kind == "scores" or leaf != "router_selection_scores"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_more_points(interpreted, kind: str):
    interpreted(check_points, kind, MORE_POINTS)


def bank(form: str, experts: int, hidden: int, inner: int, dtype: torch.dtype) -> Stored:
    first = torch.randn(experts, 2 * inner, hidden) * hidden**-0.5
    second = torch.randn(experts, hidden, inner) * inner**-0.5
    if form == "dense":
        return Stored(first.to(dtype), None, second.to(dtype), None)
    return (
        Stored(*quantize_fp4(first), *quantize_fp4(second))
        if form == "fp4"
        else Stored(*quantize_fp8(first, row_parts=2), *quantize_fp8(second))
    )


def arguments(form: str, tokens: int, sorts: bool, padded: bool, dtype: torch.dtype, device: str = "cpu") -> tuple:
    """Of `mixture`, and the bank."""
    torch.manual_seed(0)
    hidden, inner, experts, k = 64, 32, 5, 2
    x, shared = (torch.randn(tokens, hidden).to(dtype) for _ in range(2))
    stored = bank(form, experts, hidden, inner, dtype)
    valid = torch.rand(tokens) < 0.6 if padded else None
    routed = (x, torch.randn(experts, hidden), torch.randn(experts), None, None, valid)
    made = fused_router(*(t if t is None else t.to(device) for t in routed), k, 1.5)
    groups = made[5:] if sorts else (None,) * 4
    tensors = [t if t is None else t.to(device) for t in (valid, *vars(stored).values())]
    return (x.to(device), made[3], made[4], *tensors, 1.0, False, *groups, shared.to(device)), stored


SUMS = {
    "dense": ("dense", 3, True, False, torch.float32),
    "padding": ("dense", 5, True, True, torch.float32),
    "not sorted before": ("dense", 3, False, True, torch.float32),
    "fp8": ("fp8", 2, True, False, torch.float32),
    "fp4": ("fp4", 2, True, False, torch.float32),
    "bfloat16": ("dense", 4, True, False, torch.bfloat16),
    "no tokens": ("dense", 0, False, False, torch.float32),
}


def check_sum(name: str, device: str = "cpu", dtype: torch.dtype | None = None) -> None:
    """Bit for bit the sum of the experts' op, rounded, and the shared output; written into streams as the op that writes does it."""
    *case, kept = SUMS[name]
    dtype = dtype or kept
    given, stored = arguments(*case, dtype, device)
    out = op.mixture(*given)
    assert out.dtype == dtype
    apart = fused_experts(*given[:10])
    if dtype == torch.float32 or device != "cpu":
        assert torch.equal(out, apart.to(dtype) + given[-1])
    else:
        # The interpreter cuts off what torch rounds.
        assert_close(out, apart + given[-1].float(), "bfloat16 device code")
    if stored.form == "dense" and dtype == torch.float32:
        x, indices, weights, valid, limit = *given[:4], given[8]
        assert_close(out, op.mixture_definition(x, indices, weights, valid, stored, limit, given[-1]), "float32 op")
    for streams in (1, 4, 7):
        into = given_streams(len(out), streams, dtype, device)
        y, written = op.mixture_write(*given, *into)
        assert torch.equal(y, out)
        expected = fused_write(*(t.unsqueeze(0) for t in (*into, y)))[0]
        assert_close(written, expected, "float32 op" if dtype == torch.float32 else "bfloat16 device code")


def given_streams(tokens: int, streams: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Streams that lie apart by more than they hold, comb and post."""
    x = torch.randn(tokens, streams, 80).to(dtype)[..., :64]
    return tuple(t.to(device) for t in (x, torch.rand(tokens, streams, streams), torch.rand(tokens, streams)))


def check_write_gradients() -> None:
    """Of all that is written, and of what is written with it, against the torch way."""
    given, stored = arguments("dense", 3, True, True, torch.float32)
    into = given_streams(3, 4, torch.float32)
    tensors = [t.detach() for t in (given[0], given[2], stored.first, stored.second, given[-1], *into)]
    found = []
    for is_fused in (True, False):
        x, weights, first, second, shared, *onto = leaves = [t.clone().requires_grad_() for t in tensors]
        if is_fused:
            y, written = op.mixture_write(x, given[1], weights, given[3], first, None, second, None, *given[8:14], shared, *onto)
        else:
            y = op.mixture_definition(x, given[1], weights, given[3], Stored(first, None, second, None), given[8], shared)
            written = write_back(*(t.unsqueeze(0) for t in (*onto, y)))[0]
        for pulled in (written, y):
            total = (pulled * torch.linspace(-1, 1, pulled.numel()).view(pulled.shape)).sum()
            found.append(torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True))
    for got, expected in zip((*found[0], *found[1]), (*found[2], *found[3]), strict=True):
        if expected is not None:
            assert_close(got, expected, "float32 op gradient")
        else:
            assert got is None or not bool(got.any())


def check_registration() -> None:
    given, _ = arguments("dense", 2, True, False, torch.float32)
    into = given_streams(2, 4, torch.float32)
    given, into = ([t.requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t for t in each] for each in (given, into))
    torch.library.opcheck(op.mixture, tuple(given))
    torch.library.opcheck(op.mixture_write, (*given, *into))


def check_refusals() -> None:
    given, _ = arguments("dense", 2, True, False, torch.float32)
    with pytest.raises(ValueError, match=r"shared \[1, 64\] torch\.float32 beside x \[2, 64\]"):
        op.mixture(*given[:-1], given[-1][:1])
    with pytest.raises(ValueError, match=r"sorted slots .* expected sizes"):
        op.mixture(*given[:10], given[10][:-1], *given[11:])
    with pytest.raises(ValueError, match=r"sorted slots .* expected sizes"):
        op.mixture(*given[:10], None, *given[11:])
    streams, comb, post = given_streams(2, 4, torch.float32)
    with pytest.raises(ValueError, match=r"comb .* to write into .*; expected"):
        op.mixture_write(*given, streams, comb[..., 1:], post)


@pytest.mark.parametrize("name", [name if name in ("padding", "bfloat16") else pytest.param(name, marks=pytest.mark.slow) for name in SUMS])
def test_sum(interpreted, name: str):
    interpreted(check_sum, name)


@pytest.mark.parametrize("checked", [pytest.param(check_registration, marks=pytest.mark.slow), check_write_gradients, check_refusals])
def test_op(interpreted, checked):
    interpreted(checked)


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("streams", [pytest.param(0, marks=pytest.mark.slow), 4, pytest.param(8, marks=pytest.mark.slow)])
def test_compiled(capability: int, streams: int):
    """The launch that sums, adds and writes."""
    from dsv4.kernels import _mixture_triton as device_code

    kernel = device_code.mixture_kernel
    types = {name: "*bf16" if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
    types |= {"valid_ptr": "*u8", "comb_ptr": "*fp32", "post_ptr": "*fp32"}
    options = device_code.options(streams, is_masked=True)
    found = resources(kernel, types, options, capability, aligned=("hidden", "x_t", "x_n"))
    assert (found.stack, found.shared) == (0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SUMS)
def test_native_sum(name: str):
    check_sum(name, "cuda", torch.bfloat16)


def test_a_router_of_somebody_elses_is_asked():
    """Device code does not know what a class over the routers computes."""
    x = torch.randn(1, 2, CONFIG.hidden_size)
    for kind in (TopKRouter, HashRouter):
        own, derived = kind(CONFIG), type("Derived", (kind,), {})(CONFIG)
        own.backend = derived.backend = "triton"
        assert own.takes(x)
        assert not derived.takes(x)
