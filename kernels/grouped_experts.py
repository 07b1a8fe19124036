"""Routed experts on tokens sorted by expert.

    gate, up   = split(gate_up_e . x)                up clamped to [-L, L], gate clamped from above only
    neurons    = silu(gate) * up                      out_slot = weight_slot * (down_e . neurons)

`backend` says who computes: "torch" (below), or "triton", a registered op (`dsv4::grouped_experts`) over device code that is imported
when it is first asked for. That one keeps gate and up in float32, rounds each weighted slot to x's dtype, and multiplies with the
codes as stored: FP8 weights as the nearest bfloat16, FP4 weights exactly but for an E8M0 byte of 0, which a tensor core takes for a
scale of zero (such a weight is at most 6 * 2^-127).
Axes: t token, k slot, n slot sorted by expert (t * k of them), H width, I neurons, E experts.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import silu

from dsv4.kernels.backend import BACKENDS, available
from dsv4.kernels.fp8_activations import as_quantized
from dsv4.kernels.grouped_linear import coded_linear, grouped_outer, grouped_product, is_eager
from dsv4.kernels.numeric import wide
from dsv4.kernels.quantize import fp4_scale_shape, fp8_scale_shape
from dsv4.kernels.routing import slots_in_order, sort_by_expert

# Slots go through the experts in chunks that hold about this many floats of width H, but not fewer than ROWS for each expert.
CHUNK = 1 << 22
ROWS = 64
# Up to so many slots the matrices of each are gathered, where nothing may be read back.
FEW_SLOTS = 32
NUMERICS = ("exact", "deployed")
# Dtypes of codes -> what the weights are called.
FORMS = {torch.float8_e4m3fn: "fp8", torch.int8: "fp4"}


class Bank(Protocol):
    """The experts' matrices, however they are held."""

    num_experts: int

    def gate_up(self, rows: Tensor, ends: Tensor) -> Tensor:
        """rows [n H] sorted by expert, ends [E] int32 -> [n 2I], gate beside up."""

    def down(self, rows: Tensor, ends: Tensor) -> Tensor:
        """rows [n I] sorted by expert -> [n H]."""

    def stored(self, dtype: torch.dtype) -> "Stored":
        """The matrices as they are held; dense ones in `dtype`. Not asked for where gradients of the bank are."""


@dataclass(frozen=True)
class Stored:
    """A bank by its tensors.

    Attributes:
        first: gate rows over up rows: [E 2I H] floating, or float8_e4m3fn, or [E 2I H/2] int8 of packed FP4.
        first_scale: None for dense; FP8 [E 2*ceil(I/128) ceil(H/128)] float8_e8m0fnu or float32; FP4 [E 2I H/32] float8_e8m0fnu.
        second, second_scale: down, [E H I], likewise.
    """

    first: Tensor
    first_scale: Tensor | None
    second: Tensor
    second_scale: Tensor | None

    @property
    def num_experts(self) -> int:
        return self.first.shape[0]

    @property
    def form(self) -> str:
        return FORMS.get(self.first.dtype, "dense")

    def gate_up(self, rows: Tensor, ends: Tensor) -> Tensor:
        return self._product(rows, ends, self.first, self.first_scale, 2)

    def down(self, rows: Tensor, ends: Tensor) -> Tensor:
        return self._product(rows, ends, self.second, self.second_scale, 1)

    def stored(self, dtype: torch.dtype) -> "Stored":
        return self

    def _product(self, rows: Tensor, ends: Tensor, codes: Tensor, scale: Tensor | None, parts: int) -> Tensor:
        return grouped_product(rows, codes, ends) if scale is None else coded_linear(rows, codes, scale, ends, parts, False)


class Deployed:
    """A bank of FP8 codes over rows rounded to E4M3."""

    def __init__(self, bank: Bank, dtype: torch.dtype):
        form = bank.stored(dtype).form
        if form != "fp8":
            raise ValueError(f'numerics="deployed" is for fp8 experts, and these are {form}; use numerics="exact"')
        self.bank, self.num_experts = bank, bank.num_experts

    def gate_up(self, rows: Tensor, ends: Tensor) -> Tensor:
        return self.bank.gate_up(as_quantized(rows), ends)

    def down(self, rows: Tensor, ends: Tensor) -> Tensor:
        return self.bank.down(as_quantized(rows), ends)


def clamp_gate(gate: Tensor, limit: float) -> Tensor:
    """From above only."""
    return gate.clamp(max=limit)


def clamp_up(up: Tensor, limit: float) -> Tensor:
    return up.clamp(min=-limit, max=limit)


def activation(gate: Tensor, limit: float) -> Tensor:
    """silu of the clamped gate, in float32."""
    return silu(wide(clamp_gate(gate, limit)))


def neurons(active: Tensor, up: Tensor, limit: float) -> Tensor:
    """activation * clamped up, what the down projection reads; one rounding to up's dtype."""
    return (wide(active) * wide(clamp_up(up, limit))).to(up.dtype)


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(clamped gate) * clamped up in float32, one rounding."""
    return neurons(activation(gate, limit), up, limit)


def grouped_experts(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    bank: Bank,
    limit: float,
    backend: str = "torch",
    valid: Tensor | None = None,
    numerics: str = "exact",
) -> Tensor:
    """x [t H], indices [t k] int64, weights [t k] float32 -> [t H] float32: sum over slots in slot order, weight after the down product.

    Args:
        valid: [t] bool or None. A token that is not valid gets zeros and costs nothing (but on a device with backend="torch", and in a
            compiler's graph, where leaving it out would have to wait for the data).
        numerics: "exact", or "deployed" for FP8 banks, which changes the numbers: what a matrix multiplies is rounded to E4M3 first,
            with a scale for each 128 numbers of a row, as served models do. Its gradient takes the rounding for the identity.
    Raises:
        ValueError: backend="triton" where it cannot run, with the reason; numerics="deployed" over weights that are not FP8.
    """
    deployed = is_deployed(numerics)
    if backend == "triton":
        stored = bank.stored(x.dtype)
        tensors = (stored.first, stored.first_scale, stored.second, stored.second_scale)
        return fused_experts(x, indices, weights, valid, *tensors, limit, deployed)
    if backend != "torch":
        raise ValueError(f"backend={backend!r}: expected one of {', '.join(map(repr, BACKENDS))}")
    bank = Deployed(bank, x.dtype) if deployed else bank
    can_read = x.device.type == "cpu" and is_eager(x)
    if not can_read and indices.numel() <= FEW_SLOTS:
        stored = bank.stored(x.dtype)
        if stored.form == "dense":
            out = few_tokens_experts(x, indices, weights, stored.first, stored.second, limit)
            return out if valid is None else out.masked_fill(~valid.unsqueeze(-1), 0.0)
    if valid is None:
        return _over_chunks(x, indices, weights, bank, limit, can_read)
    if not can_read:
        return _over_chunks(x, indices, weights, bank, limit, False).masked_fill(~valid.unsqueeze(-1), 0.0)
    rows = valid.nonzero().squeeze(-1)
    out = _over_chunks(*(t.index_select(0, rows) for t in (x, indices, weights)), bank, limit, True)
    return out.new_zeros(x.shape).index_copy(0, rows, out)


def few_tokens_experts(x: Tensor, indices: Tensor, weights: Tensor, first: Tensor, second: Tensor, limit: float) -> Tensor:
    """`grouped_experts` over a dense bank [E 2I H], [E H I] by a copy of the matrices of every slot: for a few tokens.

    Only operations of torch, no size that depends on the data and nothing read back, so that a compiler can take it whole (and leave
    the copies out) and a CUDA graph can hold it. Gradients of every order, forward mode included.
    """
    (t, width), k, inner = x.shape, indices.shape[1], second.shape[2]
    chosen = indices.flatten()
    gate_up = torch.bmm(first.index_select(0, chosen).view(t, 2 * k * inner, width), x.unsqueeze(-1)).view(t, k, 2 * inner)
    gate, up = gate_up.chunk(2, dim=-1)
    neurons = swiglu(gate, up, limit).view(t * k, inner, 1)
    slots = torch.bmm(second.index_select(0, chosen), neurons).view(t, k, width)
    return (weights.unsqueeze(-2) @ wide(slots)).squeeze(-2)


def refusal(backend: str, device: torch.device, dtype: torch.dtype, form: str, numerics: str = "exact") -> str | None:
    """None where `backend` takes activations of this device and dtype over weights of this form, else the reason it does not."""
    reason = available(backend, device)
    if reason is not None or backend == "torch":
        return reason
    # Elsewhere than on a CUDA device the interpreter runs it, which takes float32 too.
    dtypes = (torch.bfloat16,) if device.type == "cuda" else (torch.bfloat16, torch.float32)
    if dtype not in dtypes:
        return f"its activations are {' or '.join(map(str, dtypes))}, got {dtype}"
    from dsv4.kernels import _grouped_experts_triton as device_code

    return device_code.refusal(device, "fp8 x fp8" if is_deployed(numerics) else form)


def _over_chunks(x: Tensor, indices: Tensor, weights: Tensor, bank: Bank, limit: float, can_read: bool) -> Tensor:
    t, k = indices.shape
    step = max(1, max(CHUNK // x.shape[-1], ROWS * bank.num_experts) // k)
    way = _grouped
    # Forward-mode derivatives pass through no buffer either.
    if can_read and not isinstance(bank, Deployed) and not torch.is_grad_enabled() and forward_ad._current_level < 0:
        from dsv4.kernels import _grouped_experts_cpu

        stored = bank.stored(x.dtype)
        if _grouped_experts_cpu.covers(stored, x):
            way, bank = _grouped_experts_cpu.run, stored
    # One chunk in a compiler's graph, which else would have a branch for every number of them.
    if torch.compiler.is_compiling() or t <= step:
        return way(x, indices, weights, bank, limit)
    parts = (slice(i, i + step) for i in range(0, t, step))
    return torch.cat([way(x[part], indices[part], weights[part], bank, limit) for part in parts])


def _grouped(x: Tensor, indices: Tensor, weights: Tensor, bank: Bank, limit: float) -> Tensor:
    order, ends = sort_by_expert(indices, bank.num_experts)
    rows = x.index_select(0, order // indices.shape[-1])
    gate, up = bank.gate_up(rows, ends).chunk(2, dim=-1)
    out = bank.down(swiglu(gate, up, limit), ends)
    slots = slots_in_order(out, order).unflatten(0, indices.shape)
    return (weights.unsqueeze(-2) @ wide(slots)).squeeze(-2)


@torch.library.custom_op("dsv4::grouped_experts", mutates_args=())
def fused_experts(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    valid: Tensor | None,
    first: Tensor,
    first_scale: Tensor | None,
    second: Tensor,
    second_scale: Tensor | None,
    limit: float,
    deployed: bool = False,
) -> Tensor:
    """`grouped_experts` over device code, the fields of `Stored` one by one; deployed: numerics="deployed".

    Args:
        valid: [t] bool or None; a token that is not valid costs nothing and gets zeros.
    """
    x, indices, weights, bank = ready(x, indices, weights, valid, Stored(first, first_scale, second, second_scale), deployed)
    from dsv4.kernels import _grouped_experts_triton as device_code

    return device_code.run(x, indices, weights, valid, bank, limit, deployed)


@fused_experts.register_fake
def _(x, indices, weights, valid, first, first_scale, second, second_scale, limit, deployed=False):
    return x.new_empty(x.shape, dtype=torch.float32)


@torch.library.custom_op("dsv4::grouped_experts_gradient", mutates_args=())
def fused_gradient(
    v: Tensor,
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    valid: Tensor | None,
    first: Tensor,
    first_scale: Tensor | None,
    second: Tensor,
    second_scale: Tensor | None,
    limit: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For the cotangent v [t H] of `fused_experts`: gradients of x [t H] and weights [t k], both float32; gradient of gate beside up
    [n 2I] and neurons [n I] of the slots sorted by expert, which a dense bank's gradient is made of (empty unless `keep`).
    """
    x, indices, weights, bank = ready(x, indices, weights, valid, Stored(first, first_scale, second, second_scale), False)
    from dsv4.kernels import _grouped_experts_gradient_triton as device_code

    return device_code.run(v.contiguous(), x, indices, weights, valid, bank, limit, keep)


@fused_gradient.register_fake
def _(v, x, indices, weights, valid, first, first_scale, second, second_scale, limit, keep):
    n, inner = (weights.numel() if keep else 0), first.shape[1] // 2
    wide_x = x.new_empty(x.shape, dtype=torch.float32)
    return wide_x, torch.empty_like(weights), x.new_empty(n, 2 * inner), x.new_empty(n, inner)


def is_deployed(numerics: str) -> bool:
    if numerics not in NUMERICS:
        raise ValueError(f"numerics={numerics!r}: expected one of {', '.join(map(repr, NUMERICS))}")
    return numerics == "deployed"


def ready(x: Tensor, indices: Tensor, weights: Tensor, valid: Tensor | None, bank: Stored, deployed: bool):
    """Checked, and dense in memory."""
    _check(x, indices, weights, valid, bank)
    reason = refusal("triton", x.device, x.dtype, bank.form)
    if reason is not None:
        raise ValueError(f'backend="triton": {reason}; use backend="torch" (of a model: model.use_kernels("torch"))')
    if deployed and bank.form != "fp8":
        raise ValueError(f'numerics="deployed" is for fp8 experts, and these are {bank.form}; use numerics="exact"')
    x, indices, weights, first, second = (t.contiguous() for t in (x, indices, weights, bank.first, bank.second))
    return x, indices, weights, Stored(first, bank.first_scale, second, bank.second_scale)


def _check(x: Tensor, indices: Tensor, weights: Tensor, valid: Tensor | None, bank: Stored) -> None:
    (t, width), slots, (experts, rows, _) = x.shape, indices.shape, bank.first.shape
    per_byte = 2 if bank.form == "fp4" else 1
    inner = rows // 2
    if slots[0] != t or weights.shape != slots or weights.dtype != torch.float32 or (valid is not None and valid.shape != (t,)):
        raise ValueError(
            f"x [{t} {width}] with indices {list(slots)}, weights {list(weights.shape)} {weights.dtype} and valid "
            f"{None if valid is None else list(valid.shape)}; expected [t H], [t k], [t k] float32 and [t]"
        )
    shapes = ((experts, 2 * inner, width // per_byte), (experts, width, inner // per_byte))
    found = (tuple(bank.first.shape), tuple(bank.second.shape))
    if found != shapes or bank.first.dtype != bank.second.dtype or (bank.form == "dense" and bank.first.dtype != x.dtype):
        raise ValueError(
            f"gate_up {list(found[0])} {bank.first.dtype} and down {list(found[1])} {bank.second.dtype} over x [{t} {width}] {x.dtype}; "
            f"expected {list(shapes[0])} and {list(shapes[1])} of one dtype, x's for a dense bank"
        )
    scales = {"dense": (None, None), "fp4": tuple(map(fp4_scale_shape, shapes))}.get(bank.form)
    scales = scales or (fp8_scale_shape(shapes[0], 2), fp8_scale_shape(shapes[1]))
    held = tuple(None if s is None else tuple(s.shape) for s in (bank.first_scale, bank.second_scale))
    if held != scales:
        raise ValueError(f"scales {held} of a {bank.form} bank with gate_up {list(shapes[0])}; expected {scales}")


def _keep(ctx, inputs, output) -> None:
    *tensors, ctx.limit, ctx.deployed = inputs
    ctx.save_for_backward(*tensors)


def gradient(ctx, grad: Tensor):
    """By device code; by the torch definition where the gradient is to have a gradient."""
    if torch.is_grad_enabled():
        return *_differentiable_gradient(ctx, grad), None, None
    x, indices, weights, valid, *bank = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    keep = wanted[4] or wanted[6]
    dx, d_weights, d_gate_up, inner = fused_gradient(grad, *ctx.saved_tensors, ctx.limit, keep)
    d_first = d_second = None
    if keep:
        order, ends = sort_by_expert(indices, bank[0].shape[0], valid)
        tokens = order // indices.shape[1]
        d_first = grouped_outer(d_gate_up, x.index_select(0, tokens), ends)
        weighted = grad.index_select(0, tokens) * weights.flatten().index_select(0, order).unsqueeze(-1)
        d_second = grouped_outer(weighted.to(x.dtype), inner, ends)
    return dx.to(x.dtype), None, d_weights, None, d_first, None, d_second, None, None, None


def _differentiable_gradient(ctx, grad: Tensor) -> list[Tensor | None]:
    leaves: list[Tensor | None] = list(ctx.saved_tensors)
    wanted = [i for i in range(len(leaves)) if ctx.needs_input_grad[i]]
    for i in wanted:
        leaves[i] = leaves[i].view_as(leaves[i])
    x, indices, weights, valid, *bank = leaves
    if valid is not None:
        x, weights = x.masked_fill(~valid.unsqueeze(-1), 0.0), weights.masked_fill(~valid.unsqueeze(-1), 0.0)
    numerics = "deployed" if ctx.deployed else "exact"
    out = grouped_experts(x, indices, weights, Stored(*bank), ctx.limit, numerics=numerics)
    found = torch.autograd.grad(out, [leaves[i] for i in wanted], grad, create_graph=True)
    grads: list[Tensor | None] = [None] * len(leaves)
    for i, gradient in zip(wanted, found, strict=True):
        grads[i] = gradient
    return grads


fused_experts.register_autograd(gradient, setup_context=_keep)
