"""The shared expert's first half: two linear maps of one row and their SwiGLU.

    y[t] = silu(min(G x[t], L)) * clamp(U x[t], -L, L)

`gated_linear` is a registered op over device code (one launch; gate and up stay in float32 until the product), `gated_definition` the
same in plain torch. Weights are dense, or FP8 codes with scales of 128 x 128 blocks, which are decoded again in the backward pass and
kept by neither. Axes: t token, i column, o row.
"""

import torch
from torch import Tensor

from dsv4.kernels.block_scaled_linear import block_scaled_linear, refusal, scaled_linear
from dsv4.kernels.grouped_experts import swiglu
from dsv4.kernels.quantize import fp8_scale_shape


def gated_definition(
    x: Tensor, gate: Tensor, gate_scale: Tensor | None, up: Tensor, up_scale: Tensor | None, limit: float, deployed: bool = False
) -> Tensor:
    """x [t i], gate and up [o i] dense or float8_e4m3fn with their scales -> [t o]."""

    def product(weight: Tensor, scale: Tensor | None) -> Tensor:
        if scale is None:
            return torch.nn.functional.linear(x, weight)
        return block_scaled_linear(x, weight, scale, numerics="deployed" if deployed else "exact")

    return swiglu(product(gate, gate_scale), product(up, up_scale), limit)


@torch.library.custom_op("dsv4::gated_linear", mutates_args=())
def gated_linear(
    x: Tensor, gate: Tensor, gate_scale: Tensor | None, up: Tensor, up_scale: Tensor | None, limit: float, deployed: bool = False
) -> Tensor:
    """`gated_definition` over device code.

    Raises:
        ValueError: where it cannot run, with the reason; shapes that do not fit.
    """
    form = "dense" if gate_scale is None else "fp8"
    if deployed and form == "dense":
        raise ValueError('numerics="deployed" is for fp8 weights, and these are dense; use numerics="exact"')
    reason = refusal("triton", x.device, x.dtype, form, "deployed" if deployed else "exact")
    if reason is not None:
        raise ValueError(f'backend="triton": {reason}; use backend="torch" (of a model: model.use_kernels("torch"))')
    grid = None if gate_scale is None else fp8_scale_shape(tuple(gate.shape))
    held = [None if s is None else tuple(s.shape) for s in (gate_scale, up_scale)]
    if gate.shape != up.shape or x.shape[1:] != gate.shape[1:] or held != [grid, grid]:
        raise ValueError(
            f"x {list(x.shape)}, gate {list(gate.shape)} and up {list(up.shape)} with scales {held[0]} and {held[1]}; expected "
            f"[t i], [o i] twice, and scales {grid} twice"
        )
    from dsv4.kernels import _block_scaled_linear_triton as device_code

    scales = [None if s is None else s.contiguous() for s in (gate_scale, up_scale)]
    return device_code.run_gate_up(x.contiguous(), gate.contiguous(), scales[0], up.contiguous(), scales[1], limit, deployed)


@gated_linear.register_fake
def _(x, gate, gate_scale, up, up_scale, limit, deployed=False):
    return x.new_empty(x.shape[0], gate.shape[0])


def _keep(ctx, inputs, output) -> None:
    *tensors, ctx.limit, ctx.deployed = inputs
    ctx.save_for_backward(*tensors)


def _gradient(ctx, dy: Tensor):
    """Gate and up are computed again. Where the gradient is to have a gradient, by the torch definition."""
    x, gate, gate_scale, up, up_scale = ctx.saved_tensors
    twice = torch.is_grad_enabled()
    if twice or gate_scale is None:
        leaves = [t.view_as(t) if twice else t.detach().requires_grad_(t.requires_grad) for t in (x, gate, up)]
        wanted = [leaf for leaf, i in zip(leaves, (0, 1, 3), strict=True) if ctx.needs_input_grad[i]]
        with torch.enable_grad():
            y = gated_definition(leaves[0], leaves[1], gate_scale, leaves[2], up_scale, ctx.limit, ctx.deployed)
            found = iter(torch.autograd.grad(y, wanted, dy, create_graph=twice))
        dx, d_gate, d_up = (next(found) if ctx.needs_input_grad[i] else None for i in (0, 1, 3))
        return dx, d_gate, None, d_up, None, None, None
    parts = [scaled_linear(x, *held, 1, False, True, False).requires_grad_() for held in ((gate, gate_scale), (up, up_scale))]
    with torch.enable_grad():
        d_parts = torch.autograd.grad(swiglu(*parts, ctx.limit), parts, dy)
    dx, other = (
        scaled_linear(d, *held, 1, True, True, False) for d, held in zip(d_parts, ((gate, gate_scale), (up, up_scale)), strict=True)
    )
    return dx + other, *[None] * 6


gated_linear.register_autograd(_gradient, setup_context=_keep)
