"""Several maps of a few tokens in one launch: device code in Triton's interpreter against float64, and compiled for devices that are not
here.
"""

import sys
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dsv4.kernels import few_linears as op
from dsv4.kernels.backend import available
from dsv4.kernels.norm_rotary import rms_norm
from dsv4.kernels.quantize import dequantize_fp8, quantize_fp8
from dsv4.testing import assert_close
from dsv4.testing_kernels import interpreter, resources

F32, BF16, F16, E4M3 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn
EPS = 1e-6
# Of torch.library.opcheck; that of the schema compares arguments by arithmetic, which E4M3 has none of.
RULES = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@dataclass(frozen=True)
class Case:
    """outputs: of each, whether it is float32, and its weights: (rows, form), the form a dtype or the kind of FP8 scales."""

    tokens: int
    width: int
    outputs: tuple[tuple[bool, tuple[tuple[int, object], ...]], ...]
    norms: bool = True
    dtype: torch.dtype = F32

    def arguments(self) -> tuple:
        weights, scales = [], []
        for _, parts in self.outputs:
            for rows, form in parts:
                weight, scale = torch.randn(rows, self.width) * self.width**-0.5, None
                if isinstance(form, str):
                    weight, scale = quantize_fp8(weight)
                    scale = scale if form == "e8m0" else scale.float() * (1 + torch.rand(scale.shape))
                else:
                    weight = weight.to(form)
                weights.append(weight)
                scales.append(scale)
        x = (torch.randn(self.tokens, self.width) * 3).to(self.dtype)
        norm = torch.rand(self.width) + 0.5 if self.norms else None
        return x, norm, weights, scales, [len(parts) for _, parts in self.outputs], [wide for wide, _ in self.outputs], EPS


def dense(*rows: int, dtype: torch.dtype = F32, wide: bool = False) -> tuple:
    return wide, tuple((r, dtype) for r in rows)


CASES = {
    "one row": Case(1, 16, (dense(1),), norms=False),
    "three tokens, outputs of two weights": Case(3, 40, (dense(33), dense(5, 70), dense(17, wide=True))),
    "two tiles of rows, odd width": Case(9, 67, (dense(40, 3), dense(1))),
    "fp8 beside dense": Case(5, 136, (dense(24), (False, ((200, "e8m0"), (24, F32))), (True, ((40, "float32"),)))),
    "bfloat16": Case(2, 72, (dense(24, dtype=BF16), dense(24, 8, dtype=BF16, wide=True), (False, ((24, "e8m0"),))), dtype=BF16),
}
MORE_CASES = {
    "no token": Case(0, 32, (dense(8), dense(8, wide=True))),
    "sixteen tokens, eight weights": Case(16, 64, (dense(8, 8, 8), dense(8, wide=True), dense(8, 8, 8, 8))),
    "as many programs as columns": Case(2, 200, (dense(300, 300),)),
    "whole steps": Case(8, 96, (dense(32), dense(64)), norms=False),
    "float32 weights of bfloat16 tokens": Case(4, 48, (dense(16), dense(16, wide=True)), dtype=BF16),
    "float16": Case(4, 48, (dense(16, dtype=F16), dense(16, dtype=F16, wide=True)), dtype=F16),
    "fp8 with float32 scales to float32": Case(4, 300, ((True, ((140, "float32"), (130, "e8m0"))),), dtype=BF16),
}


def cut_off(z: Tensor, dtype: torch.dtype) -> Tensor:
    """z float32 in `dtype`; to bfloat16 as the interpreter does it, which cuts off where a device rounds."""
    return (z.view(torch.int32) & -0x10000).view(F32) if dtype == BF16 else z.to(dtype)


def exact(x, norm, weights, scales, beside, in_float32, eps) -> list[Tensor]:
    """In float64; what is rounded before the products is rounded here too."""
    found = []
    z = x.double()
    if norm is not None:
        found.append(rms_norm(z, norm.double(), eps))
        z = cut_off(rms_norm(x.float(), norm, eps), x.dtype).double()
    given = zip(weights, scales, strict=True)
    for count, wide in zip(beside, in_float32, strict=True):
        matrices = []
        for _ in range(count):
            w, s = next(given)
            matrix = w.float() if s is None else dequantize_fp8(w, s, F32)
            matrices.append(cut_off(matrix, F32 if wide else x.dtype).double())
        found.append(z @ torch.cat(matrices).t())
    return found


def fused(*arguments) -> list[Tensor]:
    return op.few_linears(*arguments)


def with_gradients(x, norm, weights, scales, beside, in_float32, eps, cotangents) -> list[Tensor]:
    leaves = [t for t in (x, norm, *weights) if t is not None and t.dtype != E4M3]
    for leaf in leaves:
        leaf.requires_grad_()
    outputs = op.few_linears(x, norm, weights, scales, beside, in_float32, eps)
    return list(torch.autograd.grad(outputs, leaves, cotangents))


@pytest.fixture(scope="module")
def run():
    """Calls a function of this file where Triton interprets."""
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    with interpreter(sys.modules[__name__]) as call:
        yield call


def check_numbers(run, case: Case) -> None:
    arguments = case.arguments()
    outputs, expected = run(fused, *arguments), exact(*arguments)
    assert len(outputs) == len(expected) == case.norms + len(case.outputs)
    wide = ([False] if case.norms else []) + [w for w, _ in case.outputs]
    for y, other, is_wide in zip(outputs, expected, wide, strict=True):
        assert y.dtype == (F32 if is_wide else case.dtype)
        assert y.is_contiguous()
        assert_close(y, other, "float32 op" if case.dtype == F32 else "bfloat16 device code")


@pytest.mark.parametrize("case", CASES)
def test_numbers(run, case):
    check_numbers(run, CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE_CASES)
def test_more_numbers(run, case):
    check_numbers(run, MORE_CASES[case])


def test_each_map_in_float32_is_exact_products_and_float32_sums(run):
    """bfloat16 factors that a rounding on the way would change."""
    x = torch.tensor([[1.0, -1.0, 0.0078125, 1.0]]).to(BF16)
    weight = torch.tensor([[1.0, 1.0, 1.0078125, 0.0], [256.0, 255.0, 0.0, 2.0**-9]]).to(BF16)
    (y,) = run(fused, x, None, [weight], [None], [1], [True], EPS)
    assert y.tolist() == [[0.0078125 * 1.0078125, 1.0 + 2.0**-9]]


def test_nan_and_infinity_stay_in_their_token(run):
    x, norm, *rest = Case(3, 40, (dense(20), dense(20, wide=True))).arguments()
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    normed, *outputs = run(fused, x, norm, *rest)
    for y in (normed, *outputs):
        assert y[0].isfinite().all()
    for y in outputs:
        assert y[1:].isnan().all()


@pytest.mark.parametrize("case", ["three tokens, outputs of two weights", "fp8 beside dense"])
def test_gradients(run, case):
    arguments = CASES[case].arguments()
    x, norm, weights, scales, *rest = arguments
    wide = [x.double(), norm.double(), *(w if s is not None else w.double() for w, s in zip(weights, scales, strict=True))]
    leaves = [t.requires_grad_() for t in wide if t.dtype != E4M3]
    outputs = op.few_linears_definition(*wide[:2], wide[2:], scales, *rest)
    cotangents = [torch.randn(y.shape) for y in outputs]
    expected = torch.autograd.grad(outputs, leaves, [c.double() for c in cotangents])
    found = run(with_gradients, *arguments, cotangents)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, "float32 op gradient")


def test_the_definition_is_the_modules():
    """Bit for bit what a norm and a linear map of each weight give."""
    from dsv4.linear import Fp8Linear, Linear
    from dsv4.norm import RMSNorm

    x, (codes, scale) = torch.randn(5, 72).to(BF16), quantize_fp8(torch.randn(40, 72))
    norm, maps, coded = RMSNorm(72, EPS), [Linear(72, 24).to(BF16), Linear(72, 8).to(BF16)], Fp8Linear(72, 40)
    for p in (norm.weight, *(m.weight for m in maps)):
        p.data.normal_()
    coded.weight.data, coded.weight_scale_inv.data = codes, scale
    with torch.no_grad():
        weights = [*(m.weight for m in maps), codes, maps[0].weight]
        found = op.few_linears_definition(x, norm.weight, weights, [None, None, scale, None], [2, 1, 1], [False, False, True], EPS)
        z = norm(x)
        expected = [z, torch.cat([m(z) for m in maps], dim=-1), coded(z), maps[0].in_float32(z)]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


WRONG = {
    "17 tokens": (lambda a: a.update(x=torch.ones(17, 8)), "takes 16 tokens and 8 weights at most, got 17 and 2"),
    "9 weights": (
        lambda a: a.update(weights=[torch.ones(3, 8)] * 9, scales=[None] * 9, beside=[9], in_float32=[False]),
        "takes 16 tokens and 8 weights at most, got 2 and 9",
    ),
    "float64": (lambda a: a.update(x=torch.ones(2, 8, dtype=torch.float64)), "activations are .*, got torch.float64"),
    "fp8 of float16": (lambda a: a.update(x=torch.ones(2, 8, dtype=F16)), "over FP8 codes its activations are .*, got torch.float16"),
    "width": (lambda a: a.update(weights=[torch.ones(3, 9), a["weights"][1]]), r"weights\[0\] \[3, 9\] .*; expected \[o 8\]"),
    "codes without scales": (lambda a: a.update(scales=[None, None]), r"weights\[1\] .* torch.float8_e4m3fn"),
    "scales": (lambda a: a.update(scales=[None, torch.ones(2, 1)]), r"scales\[1\] \[2, 1\] of codes \[3, 8\]; expected \[1, 1\]"),
    "outputs": (lambda a: a.update(beside=[1, 2]), "together take each once"),
    "no weight of an output": (lambda a: a.update(beside=[2, 0]), "outputs of one weight or more"),
    "norm": (lambda a: a.update(norm_weight=torch.ones(7)), r"with a norm's weight \[7\]"),
}


def refused(change: str) -> str:
    codes, scale = quantize_fp8(torch.ones(3, 8))
    a = {
        "x": torch.ones(2, 8),
        "norm_weight": None,
        "weights": [torch.ones(3, 8), codes],
        "scales": [None, scale],
        "beside": [1, 1],
        "in_float32": [False, True],
        "eps": EPS,
    }
    WRONG[change][0](a)
    with pytest.raises(ValueError, match=WRONG[change][1]):
        op.few_linears(**a)
    return change


@pytest.mark.parametrize("change", WRONG)
def test_what_does_not_fit_is_refused(run, change):
    assert run(refused, change) == change


def test_device_code_is_refused_with_the_reason():
    if available("triton", "cpu"):
        with pytest.raises(ValueError, match=r"Triton needs a CUDA device.*; use backend=.torch."):
            fused(torch.ones(2, 8), None, [torch.ones(3, 8)], [None], [1], [False], EPS)


def check_rules(x, norm, weights, scales, *rest) -> None:
    scales = [None if s is None else s.view(torch.uint8) if s.dtype == torch.float8_e8m0fnu else s for s in scales]
    torch.library.opcheck(op.few_linears, (x.requires_grad_(), norm, weights, scales, *rest), test_utils=RULES)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["three tokens, outputs of two weights", "fp8 beside dense"])
def test_the_registered_op_keeps_torchs_rules(run, case):
    run(check_rules, *CASES[case].arguments())


# On a device.


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, 16])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("width", "more"), [(4096, 0), (1024, 40960), (200, 72)])
def test_native(tokens, norms, width, more):
    forms = dense(1024, 512, dtype=BF16), dense(300, 64, dtype=BF16, wide=True), (False, ((more + 8, "e8m0"),)), (True, ((40, F32),))
    case = Case(tokens, width, forms, norms, BF16)
    x, norm, weights, scales, *rest = case.arguments()
    here = [None if t is None else t.cuda() for t in (x, norm, *weights, *scales)]
    count = len(weights)
    outputs = op.few_linears(*here[:2], here[2 : 2 + count], here[2 + count :], *rest)
    z = x if norm is None else outputs[0].cpu()
    if norms:
        assert_close(z, rms_norm(x.double(), norm.double(), EPS), "bfloat16 rounding")
    expected = exact(z, None, weights, scales, *rest)
    for y, other, (is_wide, _) in zip(outputs[norms:], expected, forms, strict=True):
        assert_close(y.cpu(), other, "float32 op gradient" if is_wide else "bfloat16 sum")
    again = op.few_linears(*here[:2], here[2 : 2 + count], here[2 + count :], *rest)
    assert all(torch.equal(a, b) for a, b in zip(outputs, again, strict=True))


# Compiled for devices that are not here.

DEVICES = {"sm_80": (80, 163), "sm_90": (90, 227), "sm_100": (100, 227)}
TYPES = {BF16: ("*bf16", "*bf16"), F32: ("*fp32", "*fp32"), "e8m0": ("*fp8e4nv", "*u8"), "float32": ("*fp8e4nv", "*fp32")}
# Bytes under way on a processor that keep memory busy: 4.8 TB/s for 700 ns, shared among 132.
UNDER_WAY = 25456


def check_needs(arch: str, tokens: int, tile, forms: tuple, wide: tuple, norms: bool) -> None:
    from dsv4.kernels import _few_linears_triton as device_code

    capability, memory = DEVICES[arch]
    on_tensor_cores = [form != F32 or not w for form, w in zip(forms, wide, strict=True)]
    types = {
        **dict.fromkeys(("x", "normed"), "*bf16"),
        **{"norm_weight": "*fp32", "n": "i32", "K": "i32", "eps": "fp32"},
        "weights": tuple(TYPES[form][0] for form in forms),
        "scales": tuple(TYPES[form][1] for form in forms),
        "outputs": tuple("*fp32" if w else "*bf16" for w in wide),
        **dict.fromkeys(("rows", "strides"), ("i32",) * len(forms)),
    }
    options = device_code.options(tile, tokens, 4096) | device_code.norm_options(4096, norms)
    need = resources(device_code.few_linears_kernel, types, options, capability, ("K", "strides"))
    print(arch, tokens, tile, forms, norms, need)
    assert need.stack == 0, need
    assert not need.complaints, need
    assert need.shared <= memory * 1024, need
    assert (need.instructions["mma.sync"] > 0) == any(on_tensor_cores), need
    assert need.instructions["cp.async.cg"] > 0, need
    if forms[0] == BF16 and not norms:
        # Nothing is copied in less than 16 bytes.
        assert need.instructions["cp.async.ca"] == 0, need
        by_memory = memory * 1024 // (need.shared + 1024)
        by_registers = 65536 // (need.registers * 32 * tile.warps)
        step = 2 * tile.rows * tile.parts * tile.depth
        assert min(by_memory, by_registers, device_code.PROGRAMS_EACH) * (tile.stages - 1) * step >= UNDER_WAY, need


# Of one launch: weights' forms, which outputs are float32, and whether x is normed first.
LAUNCHES = (
    ((BF16,) * 3, (False, True, True), False),
    ((BF16, BF16), (False, False), True),
    (("e8m0", "e8m0"), (False, False), True),
    (("e8m0", "e8m0", BF16, BF16), (False, False, True, True), False),
    (("float32", "float32"), (False, True), True),
    ((F32,), (False,), True),
    ((F32, F32), (False, True), True),
)


def test_compiled_for_a_hopper():
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    from dsv4.kernels import _few_linears_triton as device_code

    wide = (False, False, True, True, True, True, True)
    check_needs("sm_90", 8, device_code.LAUNCH["sm_90", "dense", 8][-1], (BF16,) * len(wide), wide, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "launch"),
    # There is no FP8 to widen on sm_80.
    [(arch, i) for arch in DEVICES for i, (forms, *_) in enumerate(LAUNCHES) if not (arch == "sm_80" and isinstance(forms[0], str))],
)
def test_every_entry_compiled(arch, launch):
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    from dsv4.kernels import _few_linears_triton as device_code

    forms, wide, norms = LAUNCHES[launch]
    is_coded = all(isinstance(form, str) for form in forms)
    form = "float32" if F32 in forms and any(wide) else "fp8" if is_coded else "dense"
    for tokens in device_code.TOKENS:
        for tile in device_code.LAUNCH[arch, form, tokens]:
            check_needs(arch, tokens, tile, forms, wide, norms)


@pytest.mark.slow
@pytest.mark.parametrize("arch", DEVICES)
def test_gate_and_up_compiled(arch):
    """The shared expert's first half, whose numbers test_kernels_block_scaled_linear.py compares."""
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    from dsv4.kernels import _few_linears_triton as device_code

    for (of_arch, form, tokens), tiles in device_code.LAUNCH.items():
        if of_arch != arch or form == "float32":
            continue
        weight, scale = TYPES[BF16 if form == "dense" else "e8m0"]
        types = {
            **{"x": "*bf16", "y": "*bf16", "limit": "fp32", "n": "i32", "N": "i32", "K": "i32"},
            **{"gate": weight, "up": weight, "gate_scales": scale, "up_scales": scale},
        }
        options = device_code.options(tiles[-1], tokens, 4096)
        need = resources(device_code.few_gate_up_kernel, types, options, DEVICES[arch][0], ("N", "K"))
        print(arch, form, tokens, tiles[-1], need)
        assert need.stack == 0, need
        assert need.shared <= DEVICES[arch][1] * 1024, need
        assert need.instructions["mma.sync"] > 0, need
        assert need.instructions["cp.async.ca"] == 0, need
