"""A linear map over FP8 codes with a scale for each 128 x 128 block, dense or block-diagonal.

    y[t, g, o] = sum over i of W[g O + o, i] x[t, g, i]          W = codes times scales

The matrix is decoded for the product and again in the backward pass, and kept by neither. `backend` says who computes: "torch" (the
product of the decoded matrix, bit for bit), or "triton", device code that widens the codes on their way to the product.
Axes: t token, g group (1 where dense), i column, o row of a group.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dsv4.kernels.backend import BACKENDS, available
from dsv4.kernels.fp8_activations import as_quantized
from dsv4.kernels.grouped_experts import is_deployed
from dsv4.kernels.grouped_linear import is_eager
from dsv4.kernels.quantize import dequantize_fp8, fp8_scale_shape


def block_scaled_linear(
    x: Tensor, codes: Tensor, scale: Tensor, groups: int = 1, backend: str = "torch", numerics: str = "exact"
) -> Tensor:
    """x [... g*i] -> [... g*o]; codes [g*o, i] float8_e4m3fn, scale [ceil(g*o/128), ceil(i/128)] float8_e8m0fnu or float32.

    Codes take no gradient; x does, of every order.

    Args:
        numerics: "exact", or "deployed", which changes the numbers: x is rounded to E4M3 first, with a scale for each 128 numbers of a
            group, as served models do. Its gradient takes the rounding for the identity.
    Raises:
        ValueError: shapes that do not fit; backend="triton" where it cannot run, with the reason.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: expected one of {', '.join(map(repr, BACKENDS))}")
    rows, (out, width) = x.reshape(-1, x.shape[-1]), codes.shape
    if x.shape[-1] != groups * width or out % groups or tuple(scale.shape) != fp8_scale_shape((out, width)):
        raise ValueError(
            f"x [... {x.shape[-1]}] over codes {list(codes.shape)} with scales {list(scale.shape)} in {groups} groups; expected x "
            f"[... {groups * width}], rows of codes divisible by {groups}, scales {list(fp8_scale_shape((out, width)))}"
        )
    args = (codes, scale, groups, False, backend == "triton", is_deployed(numerics))
    # Forward-mode derivatives pass through no registered op.
    is_plain = forward_ad._current_level >= 0 or not (torch.is_grad_enabled() and x.requires_grad)
    if backend == "torch" and is_eager(x) and is_plain:
        return _product(rows, *args).view(*x.shape[:-1], out)
    return scaled_linear(rows, *args).view(*x.shape[:-1], out)


def refusal(backend: str, device: torch.device, dtype: torch.dtype, form: str = "fp8", numerics: str = "exact") -> str | None:
    """None where `backend` takes activations of this device and dtype over weights of this form, else the reason it does not."""
    reason = available(backend, device)
    if reason is not None or backend == "torch":
        return reason
    # Elsewhere than on a CUDA device the interpreter runs it, which takes float32 too.
    dtypes = (torch.bfloat16,) if device.type == "cuda" else (torch.bfloat16, torch.float32)
    if dtype not in dtypes:
        return f"its activations are {' or '.join(map(str, dtypes))}, got {dtype}"
    from dsv4.kernels import _block_scaled_linear_triton as device_code

    return device_code.refusal(device, "fp8 x fp8" if is_deployed(numerics) else form)


@torch.library.custom_op("dsv4::block_scaled_linear", mutates_args=())
def scaled_linear(x: Tensor, codes: Tensor, scale: Tensor, groups: int, transposed: bool, triton: bool, deployed: bool) -> Tensor:
    """`block_scaled_linear` of rows x [t g*i] -> [t g*o]; transposed: x [t g*o] -> [t g*i]."""
    if not triton:
        return _product(x, codes, scale, groups, transposed, triton, deployed)
    reason = refusal("triton", x.device, x.dtype, numerics="deployed" if deployed else "exact")
    if reason is not None:
        raise ValueError(f'backend="triton": {reason}; use backend="torch" (of a model: model.use_kernels("torch"))')
    from dsv4.kernels import _block_scaled_linear_triton as device_code

    return device_code.run(x.contiguous(), codes.contiguous(), scale.contiguous(), groups, transposed, deployed)


@scaled_linear.register_fake
def _(x, codes, scale, groups, transposed, triton, deployed):
    out, width = codes.shape
    return x.new_empty(x.shape[0], groups * width if transposed else out)


def _product(x: Tensor, codes: Tensor, scale: Tensor, groups: int, transposed: bool, triton: bool, deployed: bool) -> Tensor:
    matrix = dequantize_fp8(codes, scale, x.dtype)
    if deployed:
        x = as_quantized(x.unflatten(-1, (groups, -1))).flatten(-2)
    if groups == 1:
        return torch.nn.functional.linear(x, matrix.t() if transposed else matrix)
    by_group = matrix.unflatten(0, (groups, -1))
    product = torch.bmm(x.unflatten(-1, (groups, -1)).transpose(0, 1), by_group if transposed else by_group.transpose(1, 2))
    return product.transpose(0, 1).reshape(x.shape[0], -1)


def _keep(ctx, inputs, output) -> None:
    _, *tensors, ctx.groups, ctx.transposed, ctx.triton, _ = inputs
    ctx.save_for_backward(*tensors)


def _gradient(ctx, dy: Tensor):
    return scaled_linear(dy.contiguous(), *ctx.saved_tensors, ctx.groups, not ctx.transposed, ctx.triton, False), *[None] * 6


scaled_linear.register_autograd(_gradient, setup_context=_keep)
