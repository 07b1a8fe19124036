"""Weights kept as stored, module by module: they compute what their dequantised twins compute, and
stay the codes they are.
"""

import copy
import io

import pytest
import torch
from torch import Tensor, nn

import dsv4.kernels.grouped_linear
from dsv4 import Dsv4, Dsv4Config
from dsv4.experts import Experts, Fp4Experts, Fp8Experts
from dsv4.kernels.quantize import quantize_fp4, quantize_fp8
from dsv4.linear import BlockDiagonalLinear, Fp8BlockDiagonalLinear, Fp8Linear, Linear
from dsv4.pretrained import keep_stored
from dsv4.testing import assert_close

# Ragged blocks: 200 = 128 + 72 inputs, 2 * 136 outputs.
WIDTH, INNER, EXPERTS, TOP_K = 200, 136, 4, 2
FP4_WIDTH = 192


class Sizes:
    """What a bank reads of a config."""

    n_routed_experts, swiglu_limit = EXPERTS, 1.0

    def __init__(self, width: int, inner: int):
        self.hidden_size, self.moe_intermediate_size = width, inner


def codes(weight: Tensor, form: str, scales: str, parts: int = 1) -> tuple[Tensor, Tensor]:
    if form == "fp4":
        return quantize_fp4(weight)
    stored, scale = quantize_fp8(weight, row_parts=parts)
    # Not powers of two, as a checkpoint with float32 scales has them.
    return stored, scale if scales == "e8m0" else scale.float() * (1 + torch.rand(scale.shape))


def fill(module: nn.Module, **tensors: Tensor) -> None:
    for name, t in tensors.items():
        setattr(module, name, nn.Parameter(t, requires_grad=False))


def linear(scales: str, groups: int | None) -> Fp8Linear:
    out = 2 * INNER
    made = Fp8Linear(WIDTH, out) if groups is None else Fp8BlockDiagonalLinear(WIDTH * 2, out // 2, 2)
    weight, scale = codes(torch.randn(out, WIDTH), "fp8", scales)
    fill(made, weight=weight, weight_scale_inv=scale)
    return made


def bank(form: str, scales: str = "e8m0") -> Experts:
    width, inner = (WIDTH, INNER) if form == "fp8" else (FP4_WIDTH, 160)
    made = {"fp8": Fp8Experts, "fp4": Fp4Experts}[form](Sizes(width, inner))
    first, first_scale = codes(torch.randn(EXPERTS, 2 * inner, width), form, scales, 2)
    second, second_scale = codes(torch.randn(EXPERTS, width, inner), form, scales)
    fill(made, gate_up_proj=first, gate_up_proj_scale_inv=first_scale)
    fill(made, down_proj=second, down_proj_scale_inv=second_scale)
    return made


BUILT = {
    "linear": lambda: linear("e8m0", None),
    "linear, float32 scales": lambda: linear("float32", None),
    "grouped linear": lambda: linear("e8m0", 2),
    "fp8 experts": lambda: bank("fp8"),
    "fp8 experts, float32 scales": lambda: bank("fp8", "float32"),
    "fp4 experts": lambda: bank("fp4"),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def arguments(module: nn.Module, dtype: torch.dtype, tokens: int = 5) -> list[Tensor]:
    if isinstance(module, Experts):
        x = torch.randn(1, tokens, module.width).to(dtype)
        indices = torch.rand(1, tokens, EXPERTS).argsort(-1)[..., :TOP_K]
        return [
            x,
            indices,
            torch.rand(1, tokens, TOP_K).to(torch.float64 if dtype == torch.float64 else torch.float32),
        ]
    return [torch.randn(2, tokens, module.in_features * getattr(module, "groups", 1)).to(dtype)]


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


def same_bits(module: nn.Module, other: dict[str, Tensor]) -> None:
    state = module.state_dict()
    assert state.keys() == other.keys()
    for name, t in state.items():
        assert t.dtype == other[name].dtype
        assert torch.equal(bits(t), bits(other[name]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", BUILT)
def test_bit_equal_to_the_dequantised_weight(kind, dtype):
    module = BUILT[kind]()
    dense = module.dequantized(dtype)
    assert type(dense) in (Linear, BlockDiagonalLinear, Experts)
    assert all(p.requires_grad and p.dtype == dtype for p in dense.parameters())
    args = arguments(module, dtype)
    out, expected = module(*args), dense(*args)
    # A dense bank multiplies all groups in one call, whose sums may round elsewhere.
    if isinstance(module, Experts) and dtype != torch.float64:
        each = [dense.gate_up_matrix, dense.down_matrix]
        stored = [module.gate_up_matrix, module.down_matrix]
        for e in range(EXPERTS):
            for one, other in zip(each, stored, strict=True):
                assert torch.equal(one(e, dtype), other(e, dtype))
        assert_close(out, expected, "float32 op" if dtype == torch.float32 else "bfloat16 rounding")
    elif dtype == torch.float64:
        assert_close(out, expected, "float64")
    else:
        assert torch.equal(out, expected)


@pytest.mark.parametrize("kind", BUILT)
def test_gradients_flow_through_and_never_into_codes(kind):
    module = BUILT[kind]()
    dense = module.dequantized(torch.float64)
    args = arguments(module, torch.float64)
    leaves = [a.requires_grad_() for a in args if a.is_floating_point()]
    out, expected = module(*args), dense(*args)
    cotangent = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, cotangent, create_graph=True)
    wanted = torch.autograd.grad(expected, leaves, cotangent, create_graph=True)
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, "float64 gradient")
    if isinstance(module, Experts):
        second = [torch.autograd.grad(g[0].square().sum(), leaves[0])[0] for g in (found, wanted)]
        assert_close(*second, "float64 gradient")
    assert not any(p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("kind", BUILT)
def test_codes_stay_what_they_are(kind):
    module = BUILT[kind]()
    before = {name: t.clone() for name, t in module.state_dict().items()}
    for change in (
        lambda m: m.to(torch.float32),
        lambda m: m.bfloat16(),
        lambda m: m.double().half(),
        lambda m: m.to("cpu", torch.float64),
        copy.deepcopy,
    ):
        same_bits(change(module), before)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = BUILT[kind]()
    other.load_state_dict(torch.load(file, weights_only=True))
    same_bits(other, before)


@pytest.mark.parametrize("form", ["fp8", "fp4"])
def test_experts_that_are_hit_are_decoded_one_at_a_time(form, monkeypatch):
    module = bank(form)
    decoded = []
    plain = dsv4.kernels.grouped_linear.decode

    def counted(stored, *args):
        decoded.append(stored.shape)
        return plain(stored, *args)

    monkeypatch.setattr(dsv4.kernels.grouped_linear, "decode", counted)
    x = torch.randn(1, 3, module.width, requires_grad=True)
    indices = torch.tensor([[[1, 3]] * 3])
    module(x, indices, torch.rand(1, 3, 2)).sum().backward()
    matrices = [module.gate_up_proj.shape[1:], module.down_proj.shape[1:]]
    # Forward, then back through the same experts: nothing decoded was kept.
    assert decoded == [m for m in (*matrices, *matrices[::-1]) for _ in range(2)]


@pytest.mark.parametrize("form", ["fp8", "fp4"])
def test_a_model_of_stored_experts(form):
    """Chosen module by module, listened to or not, and dequantised in place."""
    model = Dsv4.from_config(Dsv4Config.tiny(moe_intermediate_size=32), seed=3)
    name = "layers.1.mlp.experts"
    dense = model.get_submodule(name)
    keep_stored(model, name, form)
    stored = model.get_submodule(name)
    for leaf, parts in (("gate_up_proj", 2), ("down_proj", 1)):
        weight, scale = codes(getattr(dense, leaf).detach().float(), form, "e8m0", parts)
        fill(stored, **{leaf: weight, f"{leaf}_scale_inv": scale})
    assert stored.num_experts == model.config.n_routed_experts
    ids = torch.randint(0, model.config.vocab_size, (1, 9))
    with torch.no_grad():
        plain = model(ids)
        watched, cache = model.run_with_cache(ids, ["layers.1.mlp.expert_outputs"])
        model.dequantize()
        dequantised = model(ids)
    assert cache["layers.1.mlp.expert_outputs"].shape[2] == model.config.num_experts_per_tok
    assert type(model.get_submodule(name)) is Experts
    assert_close(watched, plain, "watched")
    assert_close(dequantised, plain, "watched")
