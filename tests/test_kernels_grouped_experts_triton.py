"""The experts' device code: its numbers in Triton's interpreter and, where there is a CUDA device,
natively; what it needs of each architecture, compiled for devices that are not here.

The interpreter cannot multiply bfloat16, so there the kernels widen first and round by truncation:
float32 activations test the arithmetic, bfloat16 ones the bound.
"""

import sys

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4 import Dsv4, Dsv4Config
from dsv4.experts import Experts
from dsv4.kernels import grouped_experts as op
from dsv4.kernels import routing
from dsv4.kernels.backend import available
from dsv4.kernels.fp8_activations import as_quantized
from dsv4.kernels.quantize import (
    dequantize_fp4,
    dequantize_fp8,
    fp4_scale_shape,
    fp8_scale_shape,
    quantize_fp4,
    quantize_fp8,
)
from dsv4.pretrained import keep_stored, use_kernels
from dsv4.testing import assert_close, relative_error
from dsv4.testing_kernels import interpreter, resources

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

E8M0 = torch.float8_e8m0fnu
FORMS = ("dense", "fp8", "fp8 float32", "fp4")
LIMIT = 1.0
# Capability, shared memory of a program, and the instruction that multiplies.
DEVICES = {
    "sm_80": (80, 163 * 1024, "mma.sync"),
    "sm_90": (90, 227 * 1024, "wgmma.mma_async"),
    "sm_100": (100, 227 * 1024, "tcgen05.mma"),
}
TENSOR_MEMORY = 512


def make_bank(form: str, experts: int, hidden: int, inner: int, dtype=torch.float32) -> op.Stored:
    first = torch.randn(experts, 2 * inner, hidden) * hidden**-0.5
    second = torch.randn(experts, hidden, inner) * inner**-0.5
    if form == "dense":
        return op.Stored(first.to(dtype), None, second.to(dtype), None)
    if form == "fp4":
        return op.Stored(*quantize_fp4(first), *quantize_fp4(second))
    bank = op.Stored(*quantize_fp8(first, row_parts=2), *quantize_fp8(second))
    if form == "fp8":
        return bank
    scales = [s.float() * (1 + torch.rand(s.shape)) for s in (bank.first_scale, bank.second_scale)]
    return op.Stored(bank.first, scales[0], bank.second, scales[1])


def decoded(bank: op.Stored, dtype=torch.float64) -> op.Stored:
    if bank.form == "dense":
        return op.Stored(bank.first.to(dtype), None, bank.second.to(dtype), None)
    if bank.form == "fp4":
        first = dequantize_fp4(bank.first, bank.first_scale, dtype)
        return op.Stored(first, None, dequantize_fp4(bank.second, bank.second_scale, dtype), None)
    first = dequantize_fp8(bank.first, bank.first_scale, dtype, row_parts=2)
    return op.Stored(first, None, dequantize_fp8(bank.second, bank.second_scale, dtype), None)


def fused(x, indices, weights, bank: op.Stored, limit=LIMIT, valid=None) -> Tensor:
    tensors = (bank.first, bank.first_scale, bank.second, bank.second_scale)
    return op.fused_experts(x, indices, weights, valid, *tensors, limit)


def exact(x, indices, weights, bank: op.Stored, limit=LIMIT, rounded=lambda rows: rows) -> Tensor:
    """The equations in float64, one slot at a time; `rounded`: what becomes of the rows that matrices multiply."""
    bank = decoded(bank)
    rows = []
    for token, slots, row_weights in zip(rounded(x.double()), indices.tolist(), weights.double(), strict=True):
        total = torch.zeros_like(token)
        for e, weight in zip(slots, row_weights, strict=True):
            gate, up = (bank.first[e] @ token).chunk(2)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            total = total + weight * (bank.second[e] @ rounded(gate * torch.sigmoid(gate) * up))
        rows.append(total)
    return torch.stack(rows)


def problem(tokens: int, slots: int, experts: int, hidden: int, dtype=torch.float32):
    x = torch.randn(tokens, hidden).to(dtype)
    indices = torch.rand(tokens, max(experts, slots)).argsort(-1)[:, :slots] % experts
    return x, indices, torch.rand(tokens, slots)


def compare(run, form, tokens, slots, experts, hidden, inner, dtype=torch.float32):
    bank = make_bank(form, experts, hidden, inner, dtype)
    x, indices, weights = problem(tokens, slots, experts, hidden, dtype)
    limit = "float32 op" if dtype == torch.float32 else "truncated experts"
    out = run(fused, x, indices, weights, bank)
    assert_close(out, exact(x, indices, weights, bank), limit, form)


@pytest.fixture(scope="module")
def run():
    """Calls a function of this file where Triton interprets."""
    with interpreter(sys.modules[__name__]) as call:
        yield call


def with_gradients(x, indices, weights, bank: op.Stored, cotangent, valid=None) -> list[Tensor]:
    """The op's value, and its gradients of activations, routing weights and dense weights."""
    leaves = [x.requires_grad_(), weights.requires_grad_()]
    if bank.form == "dense":
        leaves += [bank.first.requires_grad_(), bank.second.requires_grad_()]
    out = fused(x, indices, weights, bank, valid=valid)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


def check_rules(bank: op.Stored, x, indices, weights) -> None:
    # Scales as bytes: opcheck compares its arguments by arithmetic, which E8M0 has none of.
    tensors = [None if t is None else t.view(torch.uint8) if t.dtype == E8M0 else t for t in vars(bank).values()]
    args = (x.requires_grad_(), indices, weights.requires_grad_(), None, *tensors, LIMIT)
    torch.library.opcheck(op.fused_experts, args)


SIZES = {
    # tokens, slots, experts, hidden, inner
    "one": (1, 1, 1, 32, 32),
    "no tile is full": (7, 3, 5, 96, 160),
    "second tile of a group": (20, 2, 2, 64, 32),
    "more slots than experts": (3, 8, 3, 32, 64),
}
MORE_SIZES = {
    **{f"top {k}": (5, k, 9, 64, 32) for k in range(1, 9)},
    "deeper than a tile": (4, 2, 3, 224, 96),
    "many experts": (3, 6, 384, 32, 32),
}


@pytest.mark.parametrize("form", ["dense", "fp8", "fp4"])
@pytest.mark.parametrize("size", ["one", "no tile is full"])
def test_interpreted(run, form, size):
    compare(run, form, *SIZES[size])


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [*SIZES, *MORE_SIZES])
def test_interpreted_at_more_sizes(run, form, size):
    compare(run, form, *(SIZES | MORE_SIZES)[size])


@pytest.mark.parametrize("form", ["fp4", *(pytest.param(form, marks=pytest.mark.slow) for form in FORMS[:3])])
def test_interpreted_in_bfloat16(run, form):
    compare(run, form, 9, 2, 4, 96, 64, torch.bfloat16)


@pytest.mark.parametrize(
    ("form", "hidden", "inner"),
    [
        ("fp8", 136, 72),
        *(pytest.param(*p, marks=pytest.mark.slow) for p in [("fp8", 200, 264), ("dense", 37, 19), ("fp8 float32", 200, 130)]),
    ],
)
def test_ragged_blocks_and_odd_widths(run, form, hidden, inner):
    """Widths inside a scale block, where gate's last block and up's first one meet."""
    compare(run, form, 5, 2, 2, hidden, inner)


def test_duplicates_one_expert_for_all_and_empty_groups(run):
    bank = make_bank("fp4", 6, 32, 32)
    x, indices, weights = problem(18, 3, 6, 32)
    for indices in (torch.full((18, 3), 4), torch.tensor([[0, 0, 5]]).expand(18, 3)):
        assert_close(run(fused, x, indices, weights, bank), exact(x, indices, weights, bank), "float32 op")


@pytest.mark.parametrize("form", ["fp8", "fp4"])
def test_every_code_and_the_extreme_scales(run, form):
    """All codes that are numbers, -0 among them, under scales of 2^-127 and 2^127 side by side."""
    hidden = inner = 128
    x, indices, weights = problem(3, 2, 2, hidden)
    codes = torch.arange(2 * 2 * inner * hidden // (2 if form == "fp4" else 1)) * 37 % 256
    codes = codes.where(codes & 0x7F != 0x7F, 0x80) if form == "fp8" else codes
    shape = (2, 2 * inner, hidden if form == "fp8" else hidden // 2)
    codes = codes.to(torch.uint8).view(shape)
    # Small codes alone where twice of them would leave float32.
    codes[1] = codes[1] & (0x9F if form == "fp8" else 0x99)
    grid = fp8_scale_shape((2, 2 * inner, hidden), 2) if form == "fp8" else fp4_scale_shape(shape)
    scale = torch.empty(grid, dtype=torch.uint8)
    scale[0], scale[1] = 0, 254
    down = make_bank(form, 2, hidden, inner)
    kind = torch.float8_e4m3fn if form == "fp8" else torch.int8
    bank = op.Stored(codes.view(kind), scale.view(E8M0), down.second, down.second_scale)
    for expert, power in ((0, 120), (1, -127)):
        chosen = torch.full_like(indices, expert)
        shrunk = x * 2.0**power
        expected = exact(shrunk, chosen, weights, bank, 100.0)
        assert expected.abs().max() > 1e-3
        assert_close(run(fused, shrunk, chosen, weights, bank, 100.0), expected, "float32 op")
    tiny = op.Stored(
        down.first,
        down.first_scale,
        down.second,
        torch.zeros_like(down.second_scale.view(torch.uint8)).view(E8M0),
    )
    expected = exact(x, indices, weights, tiny)
    assert 0 < expected.abs().max() < 1e-34
    assert_close(run(fused, x, indices, weights, tiny), expected, "float32 op")


def test_the_low_nibble_is_the_even_column(run):
    bank = make_bank("fp4", 2, 32, 32)
    x, indices, weights = problem(3, 1, 2, 32)
    byte = bank.first.view(torch.uint8)
    swapped = op.Stored(((byte >> 4) | (byte << 4)).view(torch.int8), *list(vars(bank).values())[1:])
    out = run(fused, x, indices, weights, bank)
    assert_close(out, exact(x, indices, weights, bank), "float32 op")
    assert relative_error(run(fused, x, indices, weights, swapped), out) > 0.1


@pytest.mark.parametrize("form", ["fp8", "fp4"])
def test_nan_scales_reach_the_tokens_of_their_expert_alone(run, form):
    bank = make_bank(form, 3, 32, 32)
    bank.second_scale.view(torch.uint8)[1].fill_(255)
    x, _, weights = problem(3, 1, 3, 32)
    out = run(fused, x, torch.tensor([[0], [1], [2]]), weights, bank)
    assert out.isnan().all(-1).tolist() == [False, True, False]
    assert out.isnan().any(-1).tolist() == [False, True, False]


def test_nan_activations_pass_the_clamps(run):
    bank = make_bank("dense", 2, 32, 32)
    x, indices, weights = problem(3, 2, 2, 32)
    x[1, 5] = torch.nan
    assert run(fused, x, indices, weights, bank).isnan().all(-1).tolist() == [False, True, False]


def test_tokens_that_are_not_valid_cost_nothing_and_get_zeros(run):
    bank = make_bank("dense", 3, 32, 32)
    x, indices, weights = problem(5, 2, 3, 32)
    valid = torch.tensor([True, False, True, True, False])
    x[~valid] = torch.nan
    out, *grads = run(with_gradients, x, indices, weights, bank, x, valid)
    assert_close(out[valid], exact(x[valid], indices[valid], weights[valid], bank), "float32 op")
    assert not out[~valid].any()
    assert out[~valid].isfinite().all()
    for grad in grads[:2]:
        assert grad[valid].any(-1).all()
        assert grad[~valid].eq(0).all()


def compare_gradients(run, x, indices, weights, bank: op.Stored, dtype=torch.float32, limit=None):
    """Of activations and routing weights, and of a dense bank's weights, against the equations in float64."""
    cotangent = torch.randn(x.shape)
    out, *found = run(with_gradients, x, indices, weights, bank, cotangent)
    whole = decoded(bank)
    leaves = [t.double().requires_grad_() for t in (x, weights, whole.first, whole.second)]
    expected = exact(leaves[0], indices, leaves[1], op.Stored(leaves[2], None, leaves[3], None))
    assert_close(out, expected, limit or "float32 op")
    assert len(found) == (4 if bank.form == "dense" else 2)
    wanted = torch.autograd.grad(expected, leaves[: len(found)], cotangent.double())
    for name, grad, other in zip(("x", "weights", "gate_up", "down"), found, wanted, strict=False):
        assert_close(grad, other, limit or "float32 op gradient", name)


@pytest.mark.parametrize("form", ["dense", "fp8", "fp4"])
def test_gradients(run, form):
    compare_gradients(run, *problem(7, 3, 5, 96), make_bank(form, 5, 96, 160))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [*SIZES, *MORE_SIZES])
def test_gradients_at_more_sizes(run, form, size):
    tokens, slots, experts, hidden, inner = (SIZES | MORE_SIZES)[size]
    compare_gradients(run, *problem(tokens, slots, experts, hidden), make_bank(form, experts, hidden, inner))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_gradients_in_bfloat16(run, form):
    """Each number on the way was truncated."""
    bank = make_bank(form, 4, 96, 64, torch.bfloat16)
    compare_gradients(run, *problem(9, 2, 4, 96, torch.bfloat16), bank, torch.bfloat16, "truncated gradient")


@pytest.mark.parametrize(
    ("form", "hidden", "inner"),
    [
        ("fp8", 136, 72),
        *(pytest.param(*p, marks=pytest.mark.slow) for p in [("fp8", 200, 264), ("dense", 37, 19), ("fp8 float32", 200, 130)]),
    ],
)
def test_gradients_of_ragged_blocks_and_odd_widths(run, form, hidden, inner):
    compare_gradients(run, *problem(5, 2, 2, hidden), make_bank(form, 2, hidden, inner))


def test_gradients_of_duplicates_and_empty_groups(run):
    bank = make_bank("fp4", 6, 32, 32)
    x, indices, weights = problem(18, 3, 6, 32)
    for indices in (torch.full((18, 3), 4), torch.tensor([[0, 0, 5]]).expand(18, 3)):
        compare_gradients(run, x, indices, weights, bank)


@pytest.mark.parametrize("form", ["fp8", "fp4"])
def test_gradients_under_the_extreme_scales(run, form):
    """Gate and up of one expert under 2^-127, of the other under 2^127; the low nibble is the even column here too."""
    bank = make_bank(form, 2, 128, 128)
    first = bank.first.view(torch.uint8).clone()
    # Small codes alone, -0 among them, where twice of them would leave float32.
    first[1] = first[1] & (0x9F if form == "fp8" else 0x99)
    first[1, 0, 0] = 0x80
    scale = torch.empty_like(bank.first_scale.view(torch.uint8))
    scale[0], scale[1] = 0, 254
    bank = op.Stored(first.view(bank.first.dtype), scale.view(E8M0), bank.second, bank.second_scale)
    x, indices, weights = problem(3, 1, 2, 128)
    for expert, power, weight in ((0, 120, 2.0**90), (1, -127, 2.0**-100)):
        compare_gradients(run, x * 2.0**power, torch.full_like(indices, expert), weights * weight, bank)


def test_the_gradient_is_the_same_each_time(run):
    bank, (x, indices, weights) = make_bank("fp8", 3, 64, 160), problem(20, 2, 3, 64)
    one, other = (run(with_gradients, x, indices, weights, bank, torch.ones(20, 64)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def second_derivative(x, indices, weights, bank: op.Stored, cotangent) -> Tensor:
    x.requires_grad_()
    (first,) = torch.autograd.grad(fused(x, indices, weights, bank), x, cotangent, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)[0]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["dense", "fp8"])
def test_the_gradient_has_a_gradient(run, form):
    bank, (x, indices, weights) = make_bank(form, 3, 32, 32), problem(6, 2, 3, 32)
    cotangent = torch.randn(6, 32)
    found = run(second_derivative, x, indices, weights, bank, cotangent)
    wide = x.double().requires_grad_()
    (first,) = torch.autograd.grad(exact(wide, indices, weights, bank), wide, cotangent.double(), create_graph=True)
    assert_close(found, torch.autograd.grad(first.square().sum(), wide)[0], "float32 op gradient")


def over_codes(x, indices, weights, bank: op.Stored) -> list[Tensor]:
    x.requires_grad_()
    out = op.grouped_experts(x, indices, weights, bank, LIMIT, "triton", numerics="deployed")
    return [out.detach(), torch.autograd.grad(out.sum(), x)[0]]


@pytest.mark.parametrize("size", ["one", pytest.param("no tile is full", marks=pytest.mark.slow), "ragged"])
def test_codes_times_codes(run, size):
    """numerics="deployed" against the same quantisation in float64; its gradient takes the rounding for the identity."""
    tokens, slots, experts, hidden, inner = (SIZES | {"ragged": (5, 2, 2, 136, 72)})[size]
    bank = make_bank("fp8", experts, hidden, inner)
    x, indices, weights = problem(tokens, slots, experts, hidden)
    out, grad = run(over_codes, x, indices, weights, bank)
    # Neurons that lie between two codes may take either.
    assert_close(out, exact(x, indices, weights, bank, rounded=as_quantized), "codes")
    plain = run(fused, x, indices, weights, bank)
    assert relative_error(plain, out) > 1e-3
    assert_close(op.grouped_experts(x, indices, weights, bank, LIMIT, numerics="deployed"), out, "codes")
    wide = x.double().requires_grad_()
    expected = torch.autograd.grad(exact(wide, indices, weights, bank).sum(), wide)[0]
    assert_close(grad, expected, "float32 op gradient")


def test_deployed_numerics_are_a_choice_for_fp8(run):
    bank, (x, indices, weights) = make_bank("fp4", 2, 32, 32), problem(2, 1, 2, 32)
    for backend in ("torch", "triton"):
        with pytest.raises(ValueError, match=r"numerics=.deployed. is for fp8 experts, and these are fp4"):
            run(op.grouped_experts, x, indices, weights, bank, LIMIT, backend, None, "deployed")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["dense", "fp4"])
def test_the_registered_op_keeps_torchs_rules(run, form):
    run(check_rules, make_bank(form, 3, 32, 32), *problem(4, 2, 3, 32))


def test_the_public_op_chooses_and_refuses(run):
    bank = make_bank("fp8", 2, 32, 32)
    x, indices, weights = problem(2, 1, 2, 32)
    out = run(op.grouped_experts, x, indices, weights, bank, LIMIT, "triton")
    assert_close(out, exact(x, indices, weights, bank), "float32 op")
    with pytest.raises(ValueError, match=r"bfloat16 or torch.float32, got torch.float64; use backend=.torch."):
        run(op.grouped_experts, x.double(), indices, weights, bank, LIMIT, "triton")
    if available("triton", "cpu"):
        with pytest.raises(ValueError, match=r"Triton needs a CUDA device.*; use backend=.torch."):
            op.grouped_experts(x, indices, weights, bank, LIMIT, "triton")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(weights=torch.ones(2, 1, dtype=torch.float64)), "weights"),
        (dict(indices=torch.zeros(3, 1, dtype=torch.int64)), r"indices \[3, 1\]"),
        (dict(second=torch.zeros(2, 32, 16)), "down"),
        (dict(first_scale=torch.ones(1)), "scales"),
        (dict(valid=torch.ones(3, dtype=torch.bool)), r"valid \[3\]"),
    ],
)
def test_arguments_that_do_not_fit(change, words):
    bank = make_bank("dense", 2, 32, 32)
    args = dict(
        x=torch.randn(2, 32),
        indices=torch.zeros(2, 1, dtype=torch.int64),
        weights=torch.ones(2, 1),
        valid=None,
    )
    args |= dict(vars(bank), limit=LIMIT) | change
    with pytest.raises(ValueError, match=words):
        op.fused_experts(**args)


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("seed", range(4))
def test_tiles_cover_every_group_once(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    experts = int(torch.randint(1, 9, (), generator=generator))
    indices = torch.randint(0, experts, (7 * seed, 2), generator=generator) // (1 + seed % 2)
    _, ends = routing.sort_by_expert(indices, experts)
    found = list(zip(*(t.tolist() for t in routing.tiles_of(ends, rows, indices.numel())), strict=True))
    expected = [
        (e, row)
        for e, (first, last) in enumerate(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True))
        for row in range(first, last, rows)
    ]
    assert found[: len(expected)] == expected
    assert all(e == -1 for e, _ in found[len(expected) :])


def routed(indices: Tensor, valid: Tensor | None, experts: int, rows: int) -> list[Tensor]:
    from dsv4.kernels._route_triton import groups

    return list(groups(indices, valid, experts, rows))


@pytest.mark.parametrize(("tokens", "slots", "experts"), [(1, 1, 1), (3, 6, 384), (150, 2, 7), (40, 8, 3)])
@pytest.mark.parametrize("is_padded", [False, True])
def test_the_routing_kernel_is_the_sort(run, tokens, slots, experts, is_padded):
    indices = torch.randint(0, experts, (tokens, slots))
    valid = torch.rand(tokens) < 0.6 if is_padded else None
    order, ends = routing.sort_by_expert(indices, experts, valid)
    expected = [order.int(), *routing.tiles_of(ends, 16, indices.numel()), ends]
    for one, other in zip(run(routed, indices, valid, experts, 16), expected, strict=True):
        assert torch.equal(one, other)


def test_the_bound_on_tiles_is_reached():
    ends = torch.tensor([1, 2, 3, 3 + 9])
    expert, _ = routing.tiles_of(ends, 8, 12)
    assert expert.tolist() == [0, 1, 2, 3, 3][: len(expert)]
    assert len(expert) == 5


def test_routing_reads_nothing_back():
    """Fake tensors have no data: what asks for some raises."""
    with FakeTensorMode():
        valid = torch.ones(5, dtype=torch.bool)
        order, ends = routing.sort_by_expert(torch.zeros(5, 2, dtype=torch.int64), 4, valid)
        expert, first = routing.tiles_of(ends, 16, 10)
    assert (order.shape, ends.shape, expert.shape, first.shape) == ((10,), (4,), (4,), (4,))


@pytest.mark.slow
def test_a_bank_longer_than_an_int32(run):
    """Pages that are not touched are not there: the last expert begins past 2^31 bytes."""
    experts, inner, hidden = 513, 1024, 2048
    first = torch.empty(experts, 2 * inner, hidden, dtype=torch.uint8).view(torch.float8_e4m3fn)
    second = torch.empty(experts, hidden, inner, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert first[-1].data_ptr() - first.data_ptr() >= 2**31
    small = make_bank("fp8", 1, hidden, inner)
    first[-1:], second[-1:] = small.first, small.second
    scales = [s.view(torch.uint8).expand(experts, -1, -1).contiguous().view(E8M0) for s in (small.first_scale, small.second_scale)]
    bank = op.Stored(first, scales[0], second, scales[1])
    x, indices, weights = problem(1, 1, 1, hidden)
    out = run(fused, x, indices + experts - 1, weights, bank)
    assert_close(out, exact(x, indices, weights, small), "float32 op")


def native(form, tokens, slots, experts, hidden, inner):
    bank = make_bank(form, experts, hidden, inner, torch.bfloat16)
    x, indices, weights = problem(tokens, slots, experts, hidden, torch.bfloat16)
    here = [t.cuda() for t in (x, indices, weights)]
    bank = op.Stored(*(None if t is None else t.cuda() for t in vars(bank).values()))
    out = op.grouped_experts(*here, bank, LIMIT, "triton")
    assert torch.equal(op.grouped_experts(*here, bank, LIMIT, "triton"), out)
    wide = decoded(bank)
    expected = op.grouped_experts(here[0].double(), here[1], here[2].double(), wide, LIMIT)
    plain = op.grouped_experts(*here, bank, LIMIT)
    assert relative_error(out, expected) <= 2 * relative_error(plain, expected)


def model_values(ids: Tensor, kernels: str, form: str) -> list[Tensor]:
    """Logits of a tiny model whose second mixture is stored, alone and with a slot's value read."""
    model = Dsv4.from_config(Dsv4Config.tiny(moe_intermediate_size=32), seed=1)
    name = "layers.1.mlp.experts"
    dense = model.get_submodule(name)
    keep_stored(model, name, form)
    quantize = {"fp4": quantize_fp4, "fp8": quantize_fp8}[form]
    for leaf in ("gate_up_proj", "down_proj"):
        parts = {"row_parts": 2} if (form, leaf) == ("fp8", "gate_up_proj") else {}
        codes, scale = quantize(getattr(dense, leaf).detach(), **parts)
        model.get_submodule(name).load_state_dict({leaf: codes, f"{leaf}_scale_inv": scale}, strict=False)
    use_kernels(model, kernels, "cpu", torch.float32)
    assert {m.backend for m in model.modules() if isinstance(m, Experts)} == {kernels}
    with torch.no_grad():
        watched, cache = model.run_with_cache(ids, ["layers.1.mlp.expert_outputs"])
        return [model(ids), watched, cache["layers.1.mlp.expert_outputs"]]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["fp8", "fp4"])
def test_a_model_with_either_backend(run, form):
    ids = torch.randint(0, 64, (1, 5))
    here, there = model_values(ids, "torch", form), run(model_values, ids, "triton", form)
    for one, other in zip(there, here, strict=True):
        assert_close(one, other, "watched")


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 5, 16, 100, 700])
def test_native(form, tokens):
    native(form, tokens, 6, 16, 512, 384)


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "inner"), [(136, 72), (200, 264), (1000, 130)])
def test_native_with_widths_inside_a_block(hidden, inner):
    native("fp8", 33, 3, 5, hidden, inner)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 16, 100, 700])
def test_native_gradients(form, tokens):
    bank = make_bank(form, 16, 512, 384, torch.bfloat16)
    x, indices, weights = problem(tokens, 6, 16, 512, torch.bfloat16)
    cotangent = torch.randn(tokens, 512)
    there = op.Stored(*(None if t is None else t.cuda() for t in vars(bank).values()))
    args = (x.cuda(), indices.cuda(), weights.cuda(), there, cotangent.cuda())
    found, again = with_gradients(*args), with_gradients(*args)
    # The gradient of a dense bank's weights is torch's.
    assert all(torch.equal(one, other) for one, other in zip(found[:3], again[:3], strict=True))
    whole = decoded(bank)
    leaves = [t.double().requires_grad_() for t in (x, weights, whole.first, whole.second)]
    expected = op.grouped_experts(leaves[0], indices, leaves[1], op.Stored(leaves[2], None, leaves[3], None), LIMIT)
    for grad, other in zip(found[1:], torch.autograd.grad(expected, leaves[: len(found) - 1], cotangent.double()), strict=True):
        assert_close(grad.cpu(), other, "truncated gradient")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 100])
def test_native_codes_times_codes(tokens):
    bank = make_bank("fp8", 16, 512, 384)
    x, indices, weights = problem(tokens, 6, 16, 512, torch.bfloat16)
    there = op.Stored(*(t.cuda() for t in vars(bank).values()))
    out = op.grouped_experts(x.cuda(), indices.cuda(), weights.cuda(), there, LIMIT, "triton", numerics="deployed")
    assert_close(out.cpu(), exact(x, indices, weights, bank, rounded=as_quantized), "truncated experts")


@pytest.mark.gpu
def test_native_scales_of_zero_byte_count_as_zero_at_most():
    """A tensor core takes the E8M0 byte 0 for zero; nothing becomes NaN."""
    bank = make_bank("fp4", 2, 64, 64)
    bank.second_scale.view(torch.uint8).zero_()
    x, indices, weights = problem(3, 2, 2, 64, torch.bfloat16)
    bank = op.Stored(*(t.cuda() for t in vars(bank).values()))
    out = op.grouped_experts(x.cuda(), indices.cuda(), weights.cuda(), bank, LIMIT, "triton")
    assert out.abs().max() < 64 * 6 * 2.0**-127


def needs(arch: str, form: str, rows: int) -> list:
    """What the two products of a launch-table entry take."""
    from dsv4.kernels import _grouped_experts_triton as device_code

    types = {
        **dict.fromkeys(("x", "neurons", "slots"), "*bf16"),
        **dict.fromkeys(("tile_expert", "tile_row", "ends"), "*i32"),
        **dict.fromkeys(("top_k", "N", "K", "SCALES_HIGH", "SCALES_WIDE"), "i32"),
        "order": "*i32",
        "weights": "*fp32",
        "limit": "fp32",
        "codes": {"dense": "*bf16", "fp4": "*u8"}.get(form, "*fp8e4nv"),
        "scales": "*bf16" if form == "dense" else "*u8",
        "x_scales": "*fp32" if form == "fp8 x fp8" else "*bf16",
    }
    if form == "fp8 x fp8":
        types |= dict.fromkeys(("x", "neurons", "codes"), "*fp8e4nv")
    # K / 32 scales in a row are a multiple of 16 at the models' widths.
    aligned = ("N", "K", *(("SCALES_WIDE",) if form == "fp4" else ()))
    shared = {"FORM": form, "ROWS": rows, "WIDEN": False}

    def need(kernel, tile, **changes):
        options = shared | device_code.launch_options(tile, tile.depth) | changes
        return resources(kernel, types | {"neurons": outputs[kernel]}, options, DEVICES[arch][0], aligned)

    outputs = {device_code.expert_gate_up: "*bf16", device_code.expert_down: types["neurons"]}
    first, second = device_code.LAUNCH[arch, form, rows]
    found = [need(device_code.expert_gate_up, first, APART=False), need(device_code.expert_down, second)]
    if form == "fp8 x fp8":
        return found
    from dsv4.kernels import _grouped_experts_gradient_triton as gradient

    found.append(need(device_code.expert_gate_up, gradient.AGAIN.get((arch, form, rows), first), APART=True))
    types |= dict.fromkeys(("v", "gate_up", "d_gate_up"), "*bf16") | {"d_weights": "*fp32", "n": "i32"}
    outputs |= dict.fromkeys((gradient.through_down, gradient.through_gate_up), "*bf16")
    down, up = gradient.LAUNCH[arch, form, rows]
    kept = [need(gradient.through_down, down, KEEP=form == "dense"), need(gradient.through_gate_up, up)]
    return found + kept


def check_routing(capability: int) -> None:
    from dsv4.kernels import _route_triton as device_code

    types = {
        **dict.fromkeys(("order", "ends", "tile_expert", "tile_row"), "*i32"),
        **dict.fromkeys(("n", "top_k", "E", "tiles"), "i32"),
        "indices": "*i64",
        "valid": "*u8",
    }
    sizes = {"RANKED": device_code.RANKED, "COUNTED": device_code.COUNTED}
    for is_masked in (False, True):
        options = {"ROWS": 16, "EXPERTS": 512, "MASKED": is_masked, "num_warps": device_code.WARPS}
        options["enable_fp_fusion"] = True
        need = resources(device_code.route, types, sizes | options, capability, ())
        print("route", capability, need)
        assert need.stack == 0, need


def check_needs(arch: str, form: str, rows: int) -> None:
    _, memory, instruction = DEVICES[arch]
    for need in needs(arch, form, rows):
        print(arch, form, rows, need)
        assert need.stack == 0, need
        assert not need.complaints, need
        assert need.shared <= memory, need
        assert need.tensor_memory <= TENSOR_MEMORY, need
        assert need.instructions[instruction] > 0, need
        assert need.instructions["cp.async.c"] > 0, need
        # A tile of 16 rows too: the weights are the side of 64.
        assert instruction == "mma.sync" or need.instructions["mma.sync"] == 0, need


def test_compiled_for_a_hopper():
    check_needs("sm_90", "fp4", 16)


@pytest.mark.slow
@pytest.mark.parametrize("arch", DEVICES)
def test_every_entry_compiled(arch):
    from dsv4.kernels import _grouped_experts_gradient_triton as gradient
    from dsv4.kernels import _grouped_experts_triton as device_code

    chosen = [entry for entry in device_code.LAUNCH if entry[0] == arch]
    assert {form for _, form, _ in chosen} >= ({"dense", "fp4"} if arch == "sm_80" else {"dense", "fp8", "fp8 x fp8", "fp4"})
    assert {entry for entry in chosen if entry[1] != "fp8 x fp8"} == {entry for entry in gradient.LAUNCH if entry[0] == arch}
    for entry in chosen:
        check_needs(*entry)
    check_routing(DEVICES[arch][0])
