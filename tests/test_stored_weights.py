"""Weights kept as stored, module by module: they compute what their dequantised twins compute, and
stay the codes they are.
"""

import copy
import io

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import dsv4.kernels.grouped_linear
from dsv4 import Dsv4, Dsv4Config
from dsv4.experts import Experts, Fp4Experts, Fp8Experts
from dsv4.kernels.fp8_activations import as_quantized
from dsv4.kernels.quantize import quantize_fp4, quantize_fp8
from dsv4.linear import BlockDiagonalLinear, Fp8BlockDiagonalLinear, Fp8Linear, Linear
from dsv4.pretrained import keep_stored
from dsv4.testing import assert_close, relative_error

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


@pytest.mark.parametrize("kind", BUILT)
def test_no_graph_keeps_a_decoded_matrix(kind):
    module = BUILT[kind]()
    args = arguments(module, torch.float32, tokens=1)
    args[0].requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        module(*args)
    least = min(p.numel() for name, p in module.named_parameters() if not name.endswith("_scale_inv"))
    codes = (torch.float8_e4m3fn, torch.int8)
    assert all(t.dtype in codes for t in kept if t.numel() >= least)
    assert any(t.dtype in codes for t in kept)


@pytest.mark.parametrize("kind", BUILT)
def test_editing_and_reading_as_values_is_explicit(kind):
    """The parameter is codes and says so; values in its place are refused, and the way to edit is in the message."""
    holder = nn.ModuleDict({"module": BUILT[kind]()})
    module = holder["module"]
    name = next(name for name, _ in module.named_parameters() if not name.endswith("_scale_inv"))
    held = getattr(module, name)
    assert held.dtype in (torch.float8_e4m3fn, torch.int8)
    assert not held.requires_grad
    if held.dtype == torch.float8_e4m3fn:
        with pytest.raises((NotImplementedError, RuntimeError), match="Float8_e4m3fn"):
            held + 1.0
    for values in (nn.Parameter(torch.zeros(held.shape)), nn.Parameter(torch.zeros(held.shape, dtype=torch.bfloat16))):
        with pytest.raises(ValueError, match=rf"{type(module).__name__}.{name} holds codes.*{values.dtype}.*dequantized\(\)"):
            setattr(module, name, values)
    with pytest.raises(TypeError, match="cannot assign"):
        setattr(module, name, torch.zeros(held.shape))
    assert getattr(module, name) is held
    args = arguments(module, torch.float32)
    expected = module(*args)
    holder.set_submodule("module", module.dequantized(torch.float32))
    assert_close(holder["module"](*args), expected, "float32 op")
    with torch.no_grad():
        getattr(holder["module"], name).mul_(2.0)
    assert not torch.allclose(holder["module"](*args), expected)
    assert torch.equal(module(*args), expected)


@pytest.mark.parametrize("kind", BUILT)
def test_deployed_numerics_are_a_choice_of_the_module(kind):
    """Exact unless it says otherwise; then what it multiplies is rounded to E4M3, where its weights are FP8."""
    module = BUILT[kind]()
    args = arguments(module, torch.float32)
    assert module.numerics == "exact"
    plain = module(*args)
    module.numerics = "deployed"
    if kind == "fp4 experts":
        with pytest.raises(ValueError, match=r"numerics=.deployed. is for fp8 experts, and these are fp4"):
            module(*args)
        return
    assert 1e-3 < relative_error(module(*args), plain) < 0.2
    if isinstance(module, Linear):
        # Each group's numbers in blocks of their own.
        x = as_quantized(args[0].unflatten(-1, (module.groups, -1))).flatten(-2)
        module.numerics = "exact"
        rounded = module(x)
        module.numerics = "deployed"
        assert_close(module(*args), rounded, "float32 op")


class Work(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


ROUTING = ("router_logits", "router_scores", "expert_indices", "expert_weights")


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("layer", [0, 2])
def test_listening_to_the_router_costs_nothing_extra(layer, grad):
    """Not one operation more than the copies that are kept, on a block that routes by hash and on one that routes by score."""
    model = Dsv4.from_config(Dsv4Config.tiny(mlp_layer_types=("hash_moe", "moe", "moe")), seed=3)
    ids = torch.randint(0, model.config.vocab_size, (1, 9))
    names = [f"layers.{layer}.mlp.{leaf}" for leaf in ROUTING]
    counts = []
    with torch.set_grad_enabled(grad):
        for listened in (["layers.1.layer_output"], ["layers.1.layer_output", *names]):
            model.run_with_cache(ids, listened)
            with Work() as work:
                model.run_with_cache(ids, listened)
            counts.append(work.counts)
    plain, watched = counts
    more = {name: n - plain.get(name, 0) for name, n in watched.items() if n != plain.get(name, 0)}
    assert plain.keys() <= watched.keys()
    assert set(more) <= {"clone", "detach", "alias"}
    assert all(0 < n <= 2 * len(names) for n in more.values())
