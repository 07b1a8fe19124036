"""One linear map for each group of rows: rows sorted by expert, each group through its expert's matrix.

    y[r] = W_e x[r]        for rows ends[e-1] <= r < ends[e]

`grouped_linear` is a registered op over a dense bank (fake implementation and gradient, so that it compiles), `coded_linear` the same
over FP8 or FP4 codes: each expert that is hit is decoded when its turn comes, in the backward pass again, and kept by neither.
`grouped_linear_each` asks for one expert's matrix at a time. Axes: n row, E expert.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dsv4.kernels.quantize import dequantize_fp4, dequantize_fp8

# torch's grouped product takes these dtypes, with rows that start at multiples of so many bytes.
GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GROUPED_ALIGNMENT = 16


def groups(ends: Tensor) -> list[tuple[int, int, int]]:
    """(expert, first row, last row + 1) of the experts that are hit."""
    stops = ends.tolist()
    return [(e, i, j) for e, (i, j) in enumerate(zip([0, *stops[:-1]], stops, strict=True)) if i < j]


def grouped_linear_each(x: Tensor, matrix: Callable[[int], Tensor], ends: Tensor, width: int) -> Tensor:
    """x [n in] sorted by expert, matrix(e) [width, in], ends [E] -> [n width]; only the experts that are hit are asked for."""
    parts = [torch.nn.functional.linear(x[i:j], matrix(e)) for e, i, j in groups(ends)]
    return torch.cat(parts) if parts else x.new_zeros(0, width)


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`grouped_linear`: torch's own product where it takes part in autograd as it is, which leaves out gradients that nobody asked for."""
    if not is_eager(x):
        return grouped_linear(x, weight, ends)
    # Neither product has a forward-mode derivative or takes part in a transform of torch.func.
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    if forward_ad._current_level >= 0 or is_wrapped(x) or is_wrapped(weight):
        return grouped_linear_each(x, lambda e: weight[e], ends, weight.shape[1])
    if takes_grouped(x, weight):
        return torch.nn.functional.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    return grouped_linear(x, weight, ends)


def is_eager(x: Tensor) -> bool:
    """Whether x is a tensor with numbers, and no compiler reads along."""
    return not torch.compiler.is_compiling() and type(x) in (Tensor, torch.nn.Parameter)


@torch.library.custom_op("dsv4::grouped_linear", mutates_args=())
def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [n in] sorted by expert, weight [E out in], ends [E] int32 (cumulative row counts) -> [n out]."""
    if takes_grouped(x, weight):
        return torch.nn.functional.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    return grouped_linear_each(x, lambda e: weight[e], ends, weight.shape[1])


@grouped_linear.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def takes_grouped(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped product takes rows like x [n in] over weight [E out in]."""
    return bool(x.shape[0] and _aligned(x) and _aligned(weight) and weight.shape[1] * weight.element_size() % GROUPED_ALIGNMENT == 0)


def _aligned(t: Tensor) -> bool:
    return t.dtype in GROUPED_DTYPES and t.stride(-1) == 1 and all(s * t.element_size() % GROUPED_ALIGNMENT == 0 for s in t.stride()[:-1])


@torch.library.custom_op("dsv4::grouped_outer", mutates_args=())
def grouped_outer(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """dy [n out], x [n in] -> [E out in]: each group's sum of outer products."""
    total = dy.new_zeros(ends.shape[0], dy.shape[1], x.shape[1])
    for e, i, j in groups(ends):
        torch.mm(dy[i:j].t(), x[i:j], out=total[e])
    return total


@grouped_outer.register_fake
def _(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return dy.new_empty(ends.shape[0], dy.shape[1], x.shape[1])


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx, dy: Tensor):
    x, weight, ends = ctx.saved_tensors
    dy = dy.contiguous()
    dx = grouped_linear(dy, weight.transpose(1, 2).contiguous(), ends) if ctx.needs_input_grad[0] else None
    dw = grouped_outer(dy, x, ends) if ctx.needs_input_grad[1] else None
    return dx, dw, None


def _gradient_of_outer(ctx, dw: Tensor):
    dy, x, ends = ctx.saved_tensors
    ddy = grouped_linear(x, dw.contiguous(), ends) if ctx.needs_input_grad[0] else None
    dx = grouped_linear(dy, dw.transpose(1, 2).contiguous(), ends) if ctx.needs_input_grad[1] else None
    return ddy, dx, None


grouped_linear.register_autograd(_gradient, setup_context=_keep)
# Second derivatives pass through the gradient of the weights.
grouped_outer.register_autograd(_gradient_of_outer, setup_context=_keep)


@torch.library.custom_op("dsv4::coded_linear", mutates_args=())
def coded_linear(x: Tensor, codes: Tensor, scale: Tensor, ends: Tensor, row_parts: int, transposed: bool) -> Tensor:
    """x [n in] sorted by expert -> [n out]; transposed: x [n out] -> [n in].

    Args:
        codes: [E out in] float8_e4m3fn with scales as `dequantize_fp8` takes them, row_parts included, or [E out in/2] int8 of packed
            FP4 with [E out in/32]. They take no gradient; x does, of every order.
    """

    def matrix(e: int) -> Tensor:
        decoded = decode(codes[e], scale[e], x.dtype, row_parts)
        return decoded.t() if transposed else decoded

    return grouped_linear_each(x, matrix, ends, _widths(codes)[transposed])


@coded_linear.register_fake
def _(x, codes, scale, ends, row_parts, transposed):
    return x.new_empty(x.shape[0], _widths(codes)[transposed])


def decode(codes: Tensor, scale: Tensor, dtype: torch.dtype, row_parts: int = 1, *, out: Tensor | None = None) -> Tensor:
    """The matrix of stored codes, by their dtype: float8_e4m3fn or packed FP4."""
    if codes.dtype == torch.float8_e4m3fn:
        return dequantize_fp8(codes, scale, dtype, row_parts=row_parts, out=out)
    return dequantize_fp4(codes, scale, dtype, out=out)


def _widths(codes: Tensor) -> tuple[int, int]:
    """(out, in) of each matrix."""
    return codes.shape[1], codes.shape[2] * (1 if codes.dtype == torch.float8_e4m3fn else 2)


def _keep_codes(ctx, inputs, output) -> None:
    _, *tensors, ctx.row_parts, ctx.transposed = inputs
    ctx.save_for_backward(*tensors)


def _gradient_of_rows(ctx, dy: Tensor):
    return coded_linear(dy.contiguous(), *ctx.saved_tensors, ctx.row_parts, not ctx.transposed), *[None] * 5


coded_linear.register_autograd(_gradient_of_rows, setup_context=_keep_codes)
