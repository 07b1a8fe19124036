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
from torch.nn.functional import silu

from dsv4.kernels.backend import BACKENDS, available
from dsv4.kernels.grouped_linear import coded_linear, grouped_linear
from dsv4.kernels.numeric import wide
from dsv4.kernels.quantize import fp4_scale_shape, fp8_scale_shape

# Slots go through the experts in chunks that hold about this many floats of width H, but not fewer than ROWS for each expert.
CHUNK = 1 << 22
ROWS = 64
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
        """The matrices as they are held; dense ones in `dtype`. Asked for by backend="triton" alone."""


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
        return grouped_linear(rows, codes, ends) if scale is None else coded_linear(rows, codes, scale, ends, parts, False)


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


def sort_by_expert(indices: Tensor, num_experts: int, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """indices [t k] -> (order [n]: flat slots sorted by expert, stable; ends [E] int32: slots up to and with each expert).

    The slots of tokens that are not `valid` [t] come last and belong to no expert. No size depends on the data and nothing is read
    back from the device.
    """
    flat, bins = indices.flatten(), num_experts
    if valid is not None:
        flat, bins = indices.masked_fill(~valid.unsqueeze(-1), num_experts).flatten(), num_experts + 1
    order = torch.argsort(flat, stable=True)
    counts = torch.zeros(bins, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
    return order, counts[:num_experts].cumsum(0).int()


def tiles_of(ends: Tensor, rows: int, slots: int) -> tuple[Tensor, Tensor]:
    """Tiles of `rows` sorted rows that never span two experts: (expert [T] int32, -1 past the last tile; first row [T] int32).

    T is the most that `slots` rows in E groups can need, so that it is known without the device.
    """
    experts = ends.shape[0]
    tile = torch.arange(most_tiles(experts, rows, slots), device=ends.device)
    counts = ends.diff(prepend=ends.new_zeros(1))
    tiles = (counts + rows - 1) // rows
    upto = tiles.cumsum(0)
    expert = torch.searchsorted(upto, tile, right=True)
    group = expert.clamp(max=experts - 1)
    first = (ends - counts)[group] + (tile - (upto - tiles)[group]) * rows
    is_none = expert == experts
    return expert.masked_fill(is_none, -1).int(), first.masked_fill(is_none, 0).int()


def most_tiles(experts: int, rows: int, slots: int) -> int:
    """Tiles of `rows` that `slots` rows need where as many groups as can be hold one row, and one group the rest."""
    filled = min(experts, slots)
    return (slots - filled) // rows + filled


def slots_in_order(x: Tensor, order: Tensor) -> Tensor:
    """Undo the sort: row r of x goes to flat slot order[r]."""
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    return x.index_select(0, place)


def grouped_experts(x: Tensor, indices: Tensor, weights: Tensor, bank: Bank, limit: float, backend: str = "torch") -> Tensor:
    """x [t H], indices [t k] int64, weights [t k] float32 -> [t H] float32: sum over slots in slot order, weight after the down product.

    Raises:
        ValueError: backend="triton" where it cannot run, with the reason.
    """
    if backend == "triton":
        stored = bank.stored(x.dtype)
        return fused_experts(x, indices, weights, None, stored.first, stored.first_scale, stored.second, stored.second_scale, limit)
    if backend != "torch":
        raise ValueError(f"backend={backend!r}: expected one of {', '.join(map(repr, BACKENDS))}")
    t, k = indices.shape
    step = max(1, max(CHUNK // x.shape[-1], ROWS * bank.num_experts) // k)
    if t <= step:
        return _grouped(x, indices, weights, bank, limit)
    return torch.cat([_grouped(x[i : i + step], indices[i : i + step], weights[i : i + step], bank, limit) for i in range(0, t, step)])


def refusal(backend: str, device: torch.device, dtype: torch.dtype, form: str) -> str | None:
    """None where `backend` takes activations of this device and dtype over weights of this form, else the reason it does not."""
    reason = available(backend, device)
    if reason is not None or backend == "torch":
        return reason
    # Elsewhere than on a CUDA device the interpreter runs it, which takes float32 too.
    dtypes = (torch.bfloat16,) if device.type == "cuda" else (torch.bfloat16, torch.float32)
    if dtype not in dtypes:
        return f"its activations are {' or '.join(map(str, dtypes))}, got {dtype}"
    from dsv4.kernels import _grouped_experts_triton as device_code

    return device_code.refusal(device, form)


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
) -> Tensor:
    """`grouped_experts` over device code, the fields of `Stored` one by one.

    Args:
        valid: [t] bool or None; a token that is not valid costs nothing and gets zeros.
    """
    bank = Stored(first, first_scale, second, second_scale)
    _check(x, indices, weights, valid, bank)
    reason = refusal("triton", x.device, x.dtype, bank.form)
    if reason is not None:
        raise ValueError(f'backend="triton": {reason}; use backend="torch" (of a model: model.use_kernels("torch"))')
    from dsv4.kernels import _grouped_experts_triton as device_code

    x, indices, weights, first, second = (t.contiguous() for t in (x, indices, weights, first, second))
    return device_code.run(x, indices, weights, valid, Stored(first, first_scale, second, second_scale), limit)


@fused_experts.register_fake
def _(x, indices, weights, valid, first, first_scale, second, second_scale, limit):
    return x.new_empty(x.shape, dtype=torch.float32)


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
    *tensors, ctx.limit = inputs
    ctx.save_for_backward(*tensors)


def _gradient(ctx, grad: Tensor):
    """By the torch definition, which computes the output again; where it is asked for, the gradient has a gradient."""
    x, indices, weights, valid, first, first_scale, second, second_scale = ctx.saved_tensors
    leaves: list[Tensor] = [x, indices, weights, valid, first, first_scale, second, second_scale]
    wanted = [i for i in range(len(leaves)) if ctx.needs_input_grad[i]]
    twice = torch.is_grad_enabled()
    with torch.enable_grad():
        for i in wanted:
            leaves[i] = leaves[i].view_as(leaves[i]) if twice else leaves[i].detach().requires_grad_()
        x, _, weights, _, *bank = leaves
        if valid is not None:
            x, weights = x.masked_fill(~valid.unsqueeze(-1), 0.0), weights.masked_fill(~valid.unsqueeze(-1), 0.0)
        out = grouped_experts(x, indices, weights, Stored(*bank), ctx.limit)
        found = torch.autograd.grad(out, [leaves[i] for i in wanted], grad, create_graph=twice)
    grads: list[Tensor | None] = [None] * (len(leaves) + 1)
    for i, gradient in zip(wanted, found, strict=True):
        grads[i] = gradient
    return tuple(grads)


fused_experts.register_autograd(_gradient, setup_context=_keep)
