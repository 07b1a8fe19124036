"""Linear maps over FP8 codes and the shared expert's first half: in torch what the decoded matrix gives, and no copy of it kept; their
device code in Triton's interpreter against float64, and compiled for devices that are not here.
"""

import sys

import pytest
import torch
from torch import Tensor

from dsv4.kernels import block_scaled_linear as op
from dsv4.kernels import gated_linear as gated
from dsv4.kernels.backend import available
from dsv4.kernels.fp8_activations import as_quantized, quantize_activations
from dsv4.kernels.quantize import dequantize_fp8, quantize_fp8
from dsv4.testing import assert_close, relative_error
from dsv4.testing_kernels import interpreter, resources

E8M0 = torch.float8_e8m0fnu
LIMIT = 1.0
SCALES = ("e8m0", "float32")
# Of torch.library.opcheck; that of the schema compares arguments by arithmetic, which E4M3 has none of.
RULES = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
# tokens, groups, rows of a group, columns of a group
SIZES = {
    "one": (1, 1, 32, 32),
    "ragged blocks": (5, 1, 200, 136),
    "groups that end inside a block": (3, 3, 72, 200),
}
MORE_SIZES = {
    "second tile of tokens": (20, 1, 96, 64),
    "odd widths": (4, 2, 37, 19),
    "groups of whole blocks": (17, 2, 128, 256),
}


def draw(out: int, width: int, scales: str = "e8m0") -> tuple[Tensor, Tensor]:
    codes, scale = quantize_fp8(torch.randn(out, width) * width**-0.5)
    return codes, scale if scales == "e8m0" else scale.float() * (1 + torch.rand(scale.shape))


def exact(x: Tensor, codes: Tensor, scale: Tensor, groups: int = 1) -> Tensor:
    matrix = dequantize_fp8(codes, scale, torch.float64).unflatten(0, (groups, -1))
    return torch.einsum("tgi,goi->tgo", x.double().unflatten(-1, (groups, -1)), matrix).flatten(-2)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(gate) * up


def fused(x, codes, scale, groups=1, numerics="exact") -> Tensor:
    return op.block_scaled_linear(x, codes, scale, groups, "triton", numerics)


def with_gradient(x, codes, scale, groups, cotangent) -> list[Tensor]:
    y = fused(x.requires_grad_(), codes, scale, groups)
    return [y.detach(), *torch.autograd.grad(y, x, cotangent)]


def gated_with_gradients(x, weights, cotangent, twice=False) -> list[Tensor]:
    leaves = [x.requires_grad_(), *(w.requires_grad_() for w in weights if w is not None and w.dtype == x.dtype and weights[1] is None)]
    y = gated.gated_linear(x, *weights, LIMIT)
    found = torch.autograd.grad(y, leaves, cotangent, create_graph=twice)
    if twice:
        found = torch.autograd.grad(found[0].square().sum(), leaves[0])
    return [y.detach(), *(f.detach() for f in found)]


@pytest.fixture(scope="module")
def run():
    """Calls a function of this file where Triton interprets."""
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    with interpreter(sys.modules[__name__]) as call:
        yield call


# In torch.


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_graph_keeps_codes_and_no_decoded_matrix(groups, dtype):
    codes, scale = draw(2 * 136, 200)
    x = torch.randn(2, 3, groups * 200, dtype=dtype, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = op.block_scaled_linear(x, codes, scale, groups)
    assert [t.dtype for t in kept if t.numel() >= codes.numel()] == [torch.float8_e4m3fn]
    matrix = dequantize_fp8(codes, scale, dtype)
    if groups == 1:
        expected = torch.nn.functional.linear(x, matrix)
        assert torch.equal(y, expected)
        with torch.no_grad():
            assert torch.equal(op.block_scaled_linear(x, codes, scale), expected)
        cotangent = torch.randn_like(y)
        assert torch.equal(*(torch.autograd.grad(t, x, cotangent)[0] for t in (y, expected)))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("groups", [1, 2])
def test_derivatives_numerically(groups):
    codes, scale = draw(4, 3, "float32")
    x = torch.randn(3, 3 * groups, dtype=torch.float64, requires_grad=True)
    product = lambda x: op.block_scaled_linear(x, codes, scale, groups)  # noqa: E731
    assert torch.autograd.gradcheck(product, x)
    assert torch.autograd.gradgradcheck(product, x)
    direction = torch.randn_like(x)
    assert_close(torch.func.jvp(product, (x.detach(),), (direction,))[1], product(direction), "float64")


def test_the_registered_op_keeps_torchs_rules():
    codes, scale = draw(24, 16)
    args = (torch.randn(5, 32, requires_grad=True), codes, scale.view(torch.uint8), 2, False, False, False)
    torch.library.opcheck(op.scaled_linear, args, test_utils=RULES)


def test_activations_are_quantised_to_the_nearest_code():
    """Every power of two, a number between two codes on either side, zeros, and a last block that is not whole."""
    x = torch.randn(6, 300) * 2.0 ** torch.randint(-140, 120, (6, 1))
    x[0, :128] = 0.0
    x[1, 5], x[1, 6] = 448.0, -17.0
    codes, scale = quantize_activations(x)
    assert codes.shape == x.shape
    assert scale.shape == (6, 3)
    blocks = torch.nn.functional.pad(x, (0, 84)).unflatten(-1, (3, 128)).double()
    most = blocks.abs().amax(-1)
    assert (most <= 448 * scale.double()).all()
    is_least = (most > 224 * scale.double()) | (scale == 2.0**-126)
    assert (is_least | (most == 0)).all()
    assert scale[0, 0] == 1.0
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    numbers = numbers[numbers.isfinite()]
    distance = (blocks / scale.double().unsqueeze(-1)).unsqueeze(-1) - numbers
    chosen = torch.nn.functional.pad(codes.double(), (0, 84)).unflatten(-1, (3, 128))
    assert torch.equal((blocks / scale.double().unsqueeze(-1) - chosen).abs(), distance.abs().amin(-1))
    again = as_quantized(x)
    assert torch.equal(as_quantized(again), again)


def test_quantised_activations_pass_gradients_straight_through():
    x = torch.randn(3, 40, requires_grad=True)
    y = as_quantized(x)
    assert torch.equal(y, as_quantized(x.detach()))
    assert torch.equal(torch.autograd.grad(y, x, torch.arange(40.0).expand(3, 40))[0], torch.arange(40.0).expand(3, 40))


def test_deployed_numerics_are_a_choice():
    codes, scale = draw(64, 200)
    x = torch.randn(4, 200)
    plain, deployed = (op.block_scaled_linear(x, codes, scale, numerics=n) for n in ("exact", "deployed"))
    assert 1e-3 < relative_error(deployed, plain) < 0.1
    assert_close(deployed, exact(as_quantized(x), codes, scale), "float32 op")
    with pytest.raises(ValueError, match="numerics='served': expected one of 'exact', 'deployed'"):
        op.block_scaled_linear(x, codes, scale, numerics="served")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(x=torch.ones(2, 64)), r"x \[... 64\] over codes \[24, 32\].*expected x \[... 32\]"),
        (dict(groups=5), r"in 5 groups"),
        (dict(scale=torch.ones(2, 1)), r"scales \[2, 1\]"),
        (dict(backend="cuda"), "backend='cuda'"),
    ],
)
def test_arguments_that_do_not_fit(change, words):
    codes, scale = draw(24, 32)
    with pytest.raises(ValueError, match=words):
        op.block_scaled_linear(**(dict(x=torch.ones(2, 32), codes=codes, scale=scale) | change))


# Device code.


def compare(run, size, scales, dtype=torch.float32):
    tokens, groups, out, width = size
    codes, scale = draw(groups * out, width, scales)
    x = torch.randn(tokens, groups * width).to(dtype)
    cotangent = torch.randn(tokens, groups * out).to(dtype)
    y, dx = run(with_gradient, x, codes, scale, groups, cotangent)
    assert y.dtype == dx.dtype == dtype
    limit = "float32 op" if dtype == torch.float32 else "truncated experts"
    assert_close(y, exact(x, codes, scale, groups), limit)
    wide = x.double().requires_grad_()
    assert_close(dx, torch.autograd.grad(exact(wide, codes, scale, groups), wide, cotangent.double())[0], limit)


@pytest.mark.parametrize("size", SIZES)
def test_interpreted(run, size):
    compare(run, SIZES[size], "e8m0")


@pytest.mark.slow
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("size", [*SIZES, *MORE_SIZES])
def test_interpreted_at_more_sizes(run, size, scales):
    compare(run, (SIZES | MORE_SIZES)[size], scales)
    compare(run, (SIZES | MORE_SIZES)[size], scales, torch.bfloat16)


def test_interpreted_with_float32_scales(run):
    compare(run, (4, 2, 40, 136), "float32")


def test_every_code_and_the_extreme_scales(run):
    """All codes that are numbers, -0 among them, under scales of 2^-127 and 2^127 in neighbouring blocks, forward and back."""
    every = torch.arange(256, dtype=torch.uint8)
    # Small codes alone where twice of them would leave float32.
    small = torch.where(every & 0x7F < 0x20, every, every & 0x9F)
    every = every.where(every & 0x7F != 0x7F, 0x80)
    codes = torch.cat((every.repeat(128, 1).flatten()[: 128 * 128].view(128, 128), small.repeat(64, 1).view(128, 128)), 1)
    scale = torch.tensor([[0, 254]], dtype=torch.uint8).view(E8M0)
    codes = codes.view(torch.float8_e4m3fn)
    x = torch.randn(3, 256)
    x = torch.cat((x[:, :128] * 2.0**100, x[:, 128:] * 2.0**-126), 1)
    for keep, power in ((slice(0, 128), 100), (slice(128, 256), -20)):
        cotangent = torch.randn(3, 128) * 2.0**power
        part = torch.zeros_like(x)
        part[:, keep] = x[:, keep]
        expected = exact(part, codes, scale)
        assert expected.abs().max() > 1e-10
        y, dx = run(with_gradient, part, codes, scale, 1, cotangent)
        assert_close(y, expected, "float32 op")
        wide = part.double().requires_grad_()
        expected = torch.autograd.grad(exact(wide, codes, scale), wide, cotangent.double())[0]
        assert_close(dx[:, keep], expected[:, keep], "float32 op")


def test_a_nan_in_one_group_stays_there(run):
    codes, scale = draw(2 * 72, 32)
    x, cotangent = torch.ones(2, 64), torch.ones(2, 144)
    x[1, 3] = cotangent[0, 80] = torch.nan
    y, dx = run(with_gradient, x, codes, scale, 2, cotangent)
    assert torch.equal(y.isnan(), torch.tensor([[False, False], [True, False]]).repeat_interleave(72, 1))
    assert torch.equal(dx.isnan(), torch.tensor([[False, True], [False, False]]).repeat_interleave(32, 1))


@pytest.mark.parametrize("size", ["one", "groups that end inside a block"])
def test_codes_times_codes(run, size):
    """numerics="deployed": the same quantisation in float64."""
    tokens, groups, out, width = SIZES[size]
    codes, scale = draw(groups * out, width)
    x = torch.randn(tokens, groups * width) * 2.0 ** torch.randint(-4, 4, (tokens, 1))
    rounded = as_quantized(x.unflatten(-1, (groups, -1))).flatten(-2)
    assert_close(run(fused, x, codes, scale, groups, "deployed"), exact(rounded, codes, scale, groups), "float32 op")


def quantised_in_one_launch(x: Tensor) -> tuple[Tensor, Tensor]:
    from dsv4.kernels._products_triton import quantize_rows

    return quantize_rows(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_quantising_kernel_is_its_definition(run, dtype):
    # The interpreter loses bfloat16's subnormals.
    x = torch.randn(19, 300) * 2.0 ** torch.randint(-140 if dtype == torch.float32 else -110, 120, (19, 1))
    x[0, :128] = 0.0
    # Ties, subnormal codes, both zeros.
    x[1, :12] = torch.tensor([448.0, 17.0, 19.0, 2.0**-9, 3 * 2.0**-10, 2.0**-10, -0.0, 0.0, 1.0625, 1.1875, -464.0, 240.0])
    x[2, 3], x[3, 200] = torch.nan, -torch.inf
    x = x.to(dtype)
    codes, scale = quantize_activations(x)
    found, found_scale = run(quantised_in_one_launch, x)
    assert scale.isnan().nonzero().tolist() == [[2, 0], [3, 1]]
    assert torch.equal(found_scale.nan_to_num(-1.0), scale.nan_to_num(-1.0))
    has_scale = scale.isfinite().repeat_interleave(128, 1)[:, :300]
    assert torch.equal(found.view(torch.uint8)[has_scale], codes.view(torch.uint8)[has_scale])


@pytest.mark.parametrize("form", ["dense", "fp8"])
@pytest.mark.parametrize("size", [(1, 32, 32), (5, 72, 136)])
def test_the_shared_experts_first_half(run, form, size):
    tokens, inner, width = size
    x, cotangent = torch.randn(tokens, width), torch.randn(tokens, inner)
    weights = [*draw(inner, width), *draw(inner, width)]
    leaves = [x.double(), *(dequantize_fp8(*weights[i : i + 2], torch.float64) for i in (0, 2))]
    if form == "dense":
        weights = [leaves[1].float(), None, leaves[2].float(), None]
    y, *found = run(gated_with_gradients, x, weights, cotangent)
    for leaf in leaves:
        leaf.requires_grad_()
    expected = swiglu(leaves[0] @ leaves[1].t(), leaves[0] @ leaves[2].t())
    assert_close(y, expected, "float32 op")
    assert len(found) == (3 if form == "dense" else 1)
    for one, other in zip(found, torch.autograd.grad(expected, leaves[: len(found)], cotangent.double()), strict=True):
        assert_close(one, other, "float32 op gradient")


@pytest.mark.slow
def test_the_shared_experts_second_derivative(run):
    x, cotangent, weights = torch.randn(4, 40), torch.randn(4, 24), [*draw(24, 40), *draw(24, 40)]
    _, found = run(gated_with_gradients, x, weights, cotangent, True)
    wide = x.double().requires_grad_()
    y = swiglu(exact(wide, *weights[:2]), exact(wide, *weights[2:]))
    (first,) = torch.autograd.grad(y, wide, cotangent.double(), create_graph=True)
    assert_close(found, torch.autograd.grad(first.square().sum(), wide)[0], "float32 op gradient")


def gated_deployed(x, weights) -> Tensor:
    return gated.gated_linear(x, *weights, LIMIT, True)


def test_the_shared_experts_first_half_over_codes(run):
    x, weights = torch.randn(5, 136), [*draw(72, 136), *draw(72, 136)]
    rounded = as_quantized(x)
    expected = swiglu(exact(rounded, *weights[:2]), exact(rounded, *weights[2:]))
    assert_close(run(gated_deployed, x, weights), expected, "float32 op")
    assert_close(gated.gated_definition(x, *weights, LIMIT, True), expected, "float32 op")


def test_device_code_is_refused_with_the_reason(run):
    codes, scale = draw(24, 32)
    with pytest.raises(ValueError, match=r"bfloat16 or torch.float32, got torch.float64; use backend=.torch."):
        run(fused, torch.ones(2, 32, dtype=torch.float64), codes, scale)
    if available("triton", "cpu"):
        for call in (lambda: fused(torch.ones(2, 32), codes, scale), lambda: gated_deployed(torch.ones(2, 32), [codes, scale] * 2)):
            with pytest.raises(ValueError, match=r"Triton needs a CUDA device.*; use backend=.torch."):
                call()


def check_rules(x, codes, scale) -> None:
    scale = scale.view(torch.uint8)
    torch.library.opcheck(op.scaled_linear, (x.requires_grad_(), codes, scale, 1, False, True, False), test_utils=RULES)
    torch.library.opcheck(gated.gated_linear, (x, codes, scale, codes, scale, LIMIT), test_utils=RULES)


@pytest.mark.slow
def test_the_registered_device_ops_keep_torchs_rules(run):
    run(check_rules, torch.randn(3, 32), *draw(24, 32))


# On a device.


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 33, 300])
@pytest.mark.parametrize(("groups", "out", "width"), [(1, 384, 512), (4, 72, 200), (1, 200, 136)])
def test_native(tokens, groups, out, width):
    codes, scale = draw(groups * out, width)
    x = torch.randn(tokens, groups * width).bfloat16()
    cotangent = torch.randn(tokens, groups * out).bfloat16()
    y, dx = with_gradient(x.cuda(), codes.cuda(), scale.cuda(), groups, cotangent.cuda())
    assert_close(y.cpu(), exact(x, codes, scale, groups), "bfloat16 sum")
    wide = x.double().requires_grad_()
    expected = torch.autograd.grad(exact(wide, codes, scale, groups), wide, cotangent.double())[0]
    assert_close(dx.cpu(), expected, "bfloat16 sum")
    rounded = as_quantized(x.float().unflatten(-1, (groups, -1))).flatten(-2)
    deployed = fused(x.cuda(), codes.cuda(), scale.cuda(), groups, "deployed")
    assert_close(deployed.cpu(), exact(rounded, codes, scale, groups), "bfloat16 sum")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 33, 300])
@pytest.mark.parametrize("form", ["dense", "fp8"])
def test_native_first_half_of_the_shared_expert(form, tokens):
    weights = [*draw(384, 512), *draw(384, 512)]
    matrices = [dequantize_fp8(*weights[i : i + 2], torch.bfloat16) for i in (0, 2)]
    if form == "dense":
        weights = [matrices[0], None, matrices[1], None]
    x, cotangent = torch.randn(tokens, 512).bfloat16(), torch.randn(tokens, 384).bfloat16()
    here = [None if w is None else w.cuda() for w in weights]
    y, dx = gated_with_gradients(x.cuda(), here, cotangent.cuda())[:2]
    wide = x.double().requires_grad_()
    expected = swiglu(*(wide @ m.double().t() for m in matrices))
    assert_close(y.cpu(), expected, "bfloat16 sum")
    assert_close(dx.cpu(), torch.autograd.grad(expected, wide, cotangent.double())[0], "truncated gradient")


# Compiled for devices that are not here.

DEVICES = {"sm_80": (80, 163, "mma.sync"), "sm_90": (90, 227, "wgmma.mma_async"), "sm_100": (100, 227, "tcgen05.mma")}


def check_needs(arch: str, form: str, rows: int) -> None:
    from dsv4.kernels import _block_scaled_linear_triton as device_code
    from dsv4.kernels._products_triton import launch_options

    capability, memory, instruction = DEVICES[arch]
    codes = "*bf16" if form == "dense" else "*fp8e4nv"
    scales = "*bf16" if form == "dense" else "*u8"
    types = {
        **dict.fromkeys(("n", "N", "K", "SCALES_WIDE"), "i32"),
        **dict.fromkeys(("codes", "gate_codes", "up_codes"), codes),
        **dict.fromkeys(("scales", "gate_scales", "up_scales"), scales),
        "x": "*fp8e4nv" if form == "fp8 x fp8" else "*bf16",
        "x_scales": "*fp32" if form == "fp8 x fp8" else "*bf16",
        "y": "*bf16",
        "limit": "fp32",
    }
    kernels = (device_code.linear, device_code.linear_transposed, device_code.gate_up_linear)
    for kernel, tile in zip(kernels, device_code.LAUNCH[arch, form, rows], strict=True):
        if tile is None:
            continue
        options = {"FORM": form, "ROWS": rows, "WIDEN": False, **launch_options(tile, tile.depth)}
        need = resources(kernel, types, options, capability, ("N", "K"))
        print(arch, form, rows, kernel.__name__, need)
        assert need.stack == 0, need
        assert not need.complaints, need
        assert need.shared <= memory * 1024, need
        assert need.tensor_memory <= 512, need
        assert need.instructions[instruction] > 0, need
        assert need.instructions["cp.async.c"] > 0, need
        assert instruction == "mma.sync" or need.instructions["mma.sync"] == 0, need


def test_compiled_for_a_hopper():
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    check_needs("sm_90", "fp8", 16)


@pytest.mark.slow
@pytest.mark.parametrize("arch", DEVICES)
def test_every_entry_compiled(arch):
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    from dsv4.kernels import _block_scaled_linear_triton as device_code
    from dsv4.kernels._products_triton import QUANTIZED_ROWS, _quantize_rows

    for entry in device_code.LAUNCH:
        if entry[0] == arch:
            check_needs(*entry)
    if arch != "sm_80":
        types = {"x": "*bf16", "codes": "*fp8e4nv", "scales": "*fp32", **dict.fromkeys(("n", "K", "WIDE"), "i32")}
        options = {"ROWS": QUANTIZED_ROWS, "num_warps": 4, "enable_fp_fusion": True}
        assert resources(_quantize_rows, types, options, DEVICES[arch][0], ("K",)).stack == 0
