"""The router's device code: its numbers in Triton's interpreter and, where there is a CUDA device, natively; what it needs of each
architecture, compiled for devices that are not here.
"""

import sys
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dsv4.kernels import router as op
from dsv4.kernels.numeric import topk_lowest
from dsv4.kernels.routing import FEW_ROWS, sort_by_expert, tiles_of
from dsv4.testing import assert_close
from dsv4.testing_kernels import interpreter, resources

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

VOCABULARY = 11


@dataclass(frozen=True, kw_only=True)
class Case:
    """`whole`: small whole numbers, of which many scores are equal. `spread`: of the logits."""

    tokens: int = 1
    hidden: int = 40
    experts: int = 8
    top_k: int = 3
    hashed: bool = False
    padded: bool = False
    whole: bool = False
    spread: float = 1.0
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype | None = None

    def given(self, device: str = "cpu") -> tuple:
        t, h, e, k = self.tokens, self.hidden, self.experts, self.top_k

        def draw(*sizes: int) -> Tensor:
            return torch.randint(-1, 2, sizes).float() if self.whole else torch.randn(sizes)

        x, weight = draw(t, h), draw(e, h) * self.spread * (1.0 if self.whole else h**-0.5)
        bias = None if self.hashed else 0.25 * draw(e)
        table = torch.stack([torch.randperm(e)[:k] for _ in range(VOCABULARY)]) if self.hashed else None
        ids = torch.randint(0, VOCABULARY, (t,)) if self.hashed else None
        valid = torch.rand(t) < 0.6 if self.padded else None
        tensors = (x.to(self.dtype), weight.to(self.weight_dtype or self.dtype), bias, table, ids, valid)
        return *(None if each is None else each.to(device) for each in tensors), k, 1.5


CASES = {
    "one token": Case(),
    "sixteen tokens": Case(tokens=16, hidden=130, experts=11, top_k=4),
    "three tokens, odd sizes": Case(tokens=3, hidden=33, experts=7, top_k=6),
    "padding": Case(tokens=5, experts=6, padded=True),
    "one expert": Case(tokens=2, experts=1, top_k=1),
    "all experts": Case(tokens=2, experts=5, top_k=5),
    "many experts": Case(tokens=2, hidden=16, experts=384, top_k=8),
    "one channel": Case(tokens=2, hidden=1),
    "ties": Case(tokens=9, hidden=3, experts=40, top_k=6, whole=True),
    "a table": Case(tokens=4, hashed=True),
    "a table, padding": Case(tokens=6, experts=9, top_k=6, hashed=True, padded=True),
    "logits of any size": Case(tokens=7, spread=60.0),
    "bfloat16": Case(tokens=3, dtype=torch.bfloat16),
    "float16 over float32": Case(tokens=2, dtype=torch.float16, weight_dtype=torch.float32),
    "no tokens": Case(tokens=0),
}
CI = ("sixteen tokens", "three tokens, odd sizes", "padding", "many experts", "ties", "a table, padding", "logits of any size", "bfloat16")


@pytest.fixture(scope="module")
def interpreted():
    with interpreter(sys.modules[__name__]) as run:
        yield run


def check(name: str, device: str = "cpu", dtype: torch.dtype | None = None) -> None:
    """Reals against float64, choices and places to the last index, gradients through the experts that were chosen."""
    torch.manual_seed(0)
    case = CASES[name] if dtype is None else replace(CASES[name], dtype=dtype)
    given = case.given(device)
    leaves = [t.detach().requires_grad_() for t in given[:2]]
    found = op.Routes(*op.fused_router(*leaves, *given[2:]))
    exact = [t.detach().double().requires_grad_() for t in given[:2]]
    bias = None if given[2] is None else given[2].double()
    expected = op.router_definition(*exact, bias, *given[3:], chosen=found.indices)
    for got, value in zip(found[:5], expected[:5], strict=True):
        assert got.shape == value.shape
        if got.is_floating_point() and case.tokens:
            assert_close(got, value, "float32 op", name)
    table, ids, valid, top_k = given[3:7]
    indices = topk_lowest(found.selection, top_k)[1] if table is None else table[ids]
    assert torch.equal(found.indices, indices)
    order, ends = sort_by_expert(indices, case.experts, valid)
    places = (order.int(), *tiles_of(ends, FEW_ROWS, indices.numel()), ends)
    for got, value in zip(found.groups, places, strict=True):
        assert got.dtype == torch.int32
        assert torch.equal(got, value)
    if case.tokens == 0:
        return
    pulled = []
    for routes, wanted in ((found, leaves), (expected, exact)):
        reals = (routes.logits, routes.scores, routes.selection, routes.weights)
        total = sum((real.double() * torch.linspace(-1, 1, real.numel(), device=device).view(real.shape)).sum() for real in reals)
        pulled.append(torch.autograd.grad(total, wanted))
    for got, value in zip(*pulled, strict=True):
        narrow = got.dtype in (torch.bfloat16, torch.float16)
        assert_close(got, value, "bfloat16 device code gradient" if narrow else "float32 op gradient", name)


@pytest.mark.parametrize("name", [name if name in CI else pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_numbers(interpreted, name: str):
    interpreted(check, name)


def check_registration(name: str) -> None:
    torch.manual_seed(0)
    x, weight, *rest = CASES[name].given()
    torch.library.opcheck(op.fused_router, (x.requires_grad_(), weight.requires_grad_(), *rest))


@pytest.mark.parametrize("name", ["padding", pytest.param("a table, padding", marks=pytest.mark.slow)])
def test_registration(interpreted, name: str):
    interpreted(check_registration, name)


def check_arrivals() -> None:
    """The same in any order of arrival and once more; the counter is left as it was."""
    from triton.runtime import interpreter as interpreting

    from dsv4.kernels import _arrival_triton as arrivals

    torch.manual_seed(0)
    builder = interpreting.interpreter_builder
    given = Case(tokens=2, experts=13).given()
    expected = op.fused_router(*given)
    place = builder.set_grid_idx
    for order in (lambda i, n: i, lambda i, n: n - 1 - i, lambda i, n: (3 * i + 1) % n):
        builder.set_grid_idx = lambda x, y, z, order=order: place(order(x, builder.grid_dim[0]), y, z)
        for got, value in zip(op.fused_router(*given), expected, strict=True):
            assert torch.equal(got, value)
    builder.set_grid_idx = place
    assert builder.grid_dim[0] == 7
    assert not bool(arrivals.counters(torch.device("cpu"), arrivals.OF_STREAM).any())


def check_edges() -> None:
    """Scores that underflow are not divided by their sum; -0.0 is 0.0; NaN chooses experts that there are."""
    x, weight, bias, *rest = Case(tokens=2, hidden=2, experts=6).given()
    x, weight = torch.ones(2, 2), torch.full((6, 2), -72.0)
    found = op.Routes(*op.fused_router(x, weight, bias, *rest))
    assert_close(found.scores, torch.full((2, 6), -72.0).double().exp(), "float32 op gradient")
    assert bool((found.weights > 0).all())
    assert_close(found.weights, found.scores.gather(1, found.indices) * 1.5, "float32 op")
    signed = torch.tensor([-0.0, 0.0] * 3)
    found = op.Routes(*op.fused_router(x, torch.full((6, 2), -200.0), signed, *rest))
    assert found.indices.tolist() == [[0, 1, 2]] * 2
    spoiled = op.Routes(*op.fused_router(x * torch.tensor([[torch.nan], [1.0]]), weight, bias, *rest))
    assert bool(((spoiled.indices >= 0) & (spoiled.indices < 6)).all())
    assert bool(spoiled.weights[0].isnan().all())
    assert bool(spoiled.weights[1].isfinite().all())


def check_refusals() -> None:
    x, weight, bias, table, ids, valid, top_k, factor = Case(tokens=3).given()
    with pytest.raises(ValueError, match="17 tokens to 3 of 8 experts; expected at most 16"):
        op.fused_router(x[:1].expand(17, -1), weight, bias, table, ids, valid, top_k, factor)
    with pytest.raises(ValueError, match=r"got torch\.float64; use backend=\"torch\""):
        op.fused_router(x.double(), weight, bias, table, ids, valid, top_k, factor)
    with pytest.raises(ValueError, match=r"weight \[8, 39\] torch\.float32 over x \[3, 40\]"):
        op.fused_router(x, weight[:, 1:], bias, table, ids, valid, top_k, factor)
    with pytest.raises(ValueError, match=r"bias \[7\] torch\.float32 over x"):
        op.fused_router(x, weight, bias[1:], table, ids, valid, top_k, factor)
    with pytest.raises(ValueError, match="expected a bias, or a table and ids into it"):
        op.fused_router(x, weight, None, table, ids, valid, top_k, factor)
    assert "at most 16 of 512 experts, got 6 of 2000" in op.refusal("triton", torch.device("cpu"), torch.float32, 2000, 6)


@pytest.mark.parametrize("checked", [check_arrivals, check_edges, check_refusals])
def test_properties(interpreted, checked):
    interpreted(checked)


def test_triton_where_it_cannot_run():
    assert op.refusal("triton", torch.device("cpu"), torch.bfloat16, 256, 6).startswith("Triton needs a CUDA device, and this is cpu")
    assert op.refusal("torch", torch.device("cpu"), torch.float64, 5000, 60) is None


# Bytes of shared memory that one program may take.
DEVICES = {"sm_80": (80, 163 << 10), "sm_90": (90, 227 << 10), "sm_100": (100, 227 << 10)}
# Tokens, hidden, experts, top_k, whether by a table, whether there is padding.
COMPILED = {
    "flash, one token": (1, 4096, 256, 6, False, False),
    "flash, sixteen tokens, padding": (16, 4096, 256, 6, False, True),
    "flash, a table": (1, 4096, 256, 6, True, False),
    "pro, one token": (1, 7168, 384, 6, False, False),
    "pro, sixteen tokens": (16, 7168, 384, 6, False, False),
    "the most there may be": (16, 8192, 512, 16, False, True),
}


@pytest.mark.parametrize(
    ("arch", "what"),
    [
        pytest.param(arch, what, marks=[] if arch == "sm_90" and what == "flash, one token" else pytest.mark.slow, id=f"{arch} {what}")
        for arch in DEVICES
        for what in COMPILED
    ],
)
def test_compiled(arch: str, what: str):
    """Nothing spills, and the last to arrive sees what the others left."""
    from dsv4.kernels import _router_triton as device_code

    *sizes, is_hash, is_masked = COMPILED[what]
    kernel = device_code.router_kernel
    types = {
        **{name: "*fp32" for name in kernel.arg_names if name.endswith("_ptr")},
        **dict.fromkeys(("x_ptr", "weight_ptr"), "*bf16"),
        **dict.fromkeys(("table_ptr", "id_ptr", "index_ptr"), "*i64"),
        **dict.fromkeys(("order_ptr", "tile_expert_ptr", "tile_row_ptr", "end_ptr", "counter_ptr"), "*i32"),
        **dict.fromkeys(("token_count", "hidden", "experts", "tiles"), "i32"),
        **dict.fromkeys(("factor", "least"), "fp32"),
        "valid_ptr": "*u8",
    }
    capability, memory = DEVICES[arch]
    options = device_code.options(*sizes, is_hash=is_hash, is_masked=is_masked)
    found = resources(kernel, types, options, capability, aligned=("hidden", "experts"))
    print(arch, what, found)
    assert found.stack == 0
    assert found.shared <= memory
    assert found.complaints == ()
    assert found.arrives


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_native(name: str):
    check(name, "cuda", torch.bfloat16)
