"""Several linear maps of the same few tokens in one launch, after an RMS norm where one is asked for.

    z = norm(x), rounded to x's dtype, or x                  y_m = W_m z

Every y_m is either of x's dtype (W_m in x's dtype, float32 sums, one rounding) or float32 (both sides widened exactly). Maps side by side
fill one tensor, columns after columns. Weights are dense, or FP8 codes with scales of 128 x 128 blocks, which nobody keeps decoded.
`few_linears` is a registered op (`dsv4::few_linears`) over device code, `few_linears_definition` the same in plain torch.
Axes: t token, h column of x, o row of a weight.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4.kernels import recompute
from dsv4.kernels.backend import available
from dsv4.kernels.block_scaled_linear import block_scaled_linear
from dsv4.kernels.norm_rotary import rms_norm
from dsv4.kernels.numeric import wide
from dsv4.kernels.quantize import fp8_scale_shape

# Of one launch: beyond these a product of its own for each weight is the faster way.
MAX_TOKENS, MAX_WEIGHTS = 16, 8
DEVICE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def few_linears_definition(
    x: Tensor,
    norm_weight: Tensor | None,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor | None],
    beside: Sequence[int],
    in_float32: Sequence[bool],
    eps: float,
) -> list[Tensor]:
    """What `few_linears` computes, in plain torch, for any number of tokens and weights."""
    outputs = []
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
        outputs.append(x)
    given = zip(weights, scales, strict=True)
    for count, widens in zip(beside, in_float32, strict=True):
        z = wide(x) if widens else x
        parts = []
        for _ in range(count):
            weight, scale = next(given)
            is_dense = scale is None
            parts.append(torch.nn.functional.linear(z, weight.to(z.dtype)) if is_dense else block_scaled_linear(z, weight, scale))
        outputs.append(torch.cat(parts, dim=-1))
    return outputs


def refusal(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    tokens: int,
    weights: Sequence[Tensor] = (),
    scales: Sequence[Tensor | None] = (),
) -> str | None:
    """None where `backend` takes so many tokens of this device and dtype over these weights, else the reason it does not."""
    reason = available(backend, device)
    if reason is not None or backend == "torch":
        return reason
    if dtype not in DEVICE_DTYPES:
        return f"its activations are {', '.join(map(str, DEVICE_DTYPES))}, got {dtype}"
    if tokens > MAX_TOKENS or len(weights) > MAX_WEIGHTS:
        return f"it takes {MAX_TOKENS} tokens and {MAX_WEIGHTS} weights at most, got {tokens} and {len(weights)}"
    if any(scale is not None for scale in scales):
        if dtype == torch.float16:
            return f"over FP8 codes its activations are {torch.bfloat16} or {torch.float32}, got {dtype}"
        from dsv4.kernels import _few_linears_triton as device_code

        return device_code.refusal_of_codes(device)
    return None


@torch.library.custom_op("dsv4::few_linears", mutates_args=())
def few_linears(
    x: Tensor,
    norm_weight: Tensor | None,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor | None],
    beside: Sequence[int],
    in_float32: Sequence[bool],
    eps: float,
) -> list[Tensor]:
    """One launch over device code.

    Args:
        x: [t h], t <= MAX_TOKENS.
        norm_weight: [h] float32, or None for no norm.
        weights: MAX_WEIGHTS of them at most, each [o h] dense (bfloat16, float16, float32) or float8_e4m3fn.
        scales: one for each weight: [ceil(o/128) ceil(h/128)] float8_e8m0fnu or float32 of FP8 codes, None of a dense weight.
        beside: of each output, how many weights side by side make it, in order.
        in_float32: of each output, whether it is float32; else it has x's dtype.
        eps: of the norm; unread without one.
    Returns:
        The normed x [t h] where a norm is asked for, then the outputs [t, sum of its o], dense.
    Raises:
        ValueError: shapes, dtypes or counts that do not fit, or a device on which it cannot run.
    """
    _check(x, norm_weight, weights, scales, beside, in_float32)
    from dsv4.kernels import _few_linears_triton as device_code

    held = [None if scale is None else scale.contiguous() for scale in scales]
    return device_code.run(x.contiguous(), norm_weight, [w.contiguous() for w in weights], held, list(beside), list(in_float32), eps)


@few_linears.register_fake
def _(x, norm_weight, weights, scales, beside, in_float32, eps):
    outputs = [] if norm_weight is None else [x.new_empty(x.shape)]
    given = iter(weights)
    for count, widens in zip(beside, in_float32, strict=True):
        width = sum(next(given).shape[0] for _ in range(count))
        outputs.append(x.new_empty(x.shape[0], width, dtype=torch.float32 if widens else x.dtype))
    return outputs


def _check(x, norm_weight, weights, scales, beside, in_float32) -> None:
    if len(weights) != len(scales) or len(beside) != len(in_float32) or not weights or sum(beside) != len(weights) or min(beside) < 1:
        raise ValueError(
            f"{len(weights)} weights with {len(scales)} scales into outputs of {list(beside)} weights, {len(in_float32)} dtypes; expected "
            "a scale or None for each weight, and outputs of one weight or more that together take each once"
        )
    if x.dim() != 2 or (norm_weight is not None and (norm_weight.shape != x.shape[1:] or norm_weight.dtype != torch.float32)):
        held = None if norm_weight is None else f"{list(norm_weight.shape)} {norm_weight.dtype}"
        raise ValueError(f"x {list(x.shape)} with a norm's weight {held}; expected [t h] and [h] float32 or None")
    for i, (weight, scale) in enumerate(zip(weights, scales, strict=True)):
        dtypes = DEVICE_DTYPES if scale is None else (torch.float8_e4m3fn,)
        if weight.dim() != 2 or weight.shape[1] != x.shape[1] or weight.dtype not in dtypes:
            raise ValueError(
                f"weights[{i}] {list(weight.shape)} {weight.dtype} over x {list(x.shape)}; expected [o {x.shape[1]}], "
                f"{' or '.join(map(str, dtypes))}"
            )
        if scale is not None and tuple(scale.shape) != fp8_scale_shape(tuple(weight.shape)):
            expected = list(fp8_scale_shape(tuple(weight.shape)))
            raise ValueError(f"scales[{i}] {list(scale.shape)} of codes {list(weight.shape)}; expected {expected}")
    reason = refusal("triton", x.device, x.dtype, x.shape[0], weights, scales)
    if reason is not None:
        raise ValueError(f'backend="triton": {reason}; use backend="torch" (of a model: model.use_kernels("torch"))')


def _keep(ctx, inputs, output) -> None:
    x, norm_weight, weights, scales, *ctx.numbers = inputs
    ctx.save_for_backward(x, norm_weight, *weights, *scales)
    # A list of tensors alone takes a gradient for each, any other list takes one None.
    ctx.are_scales_tensors = all(scale is not None for scale in scales)


def _gradient(ctx, grads: list[Tensor | None]):
    x, norm_weight, *held = ctx.saved_tensors
    count = len(held) // 2
    scales = held[count:]
    needs_x, needs_norm, needed, *_ = ctx.needs_input_grad
    # Codes take no gradient.
    needed = [need and scale is None for need, scale in zip(needed, scales, strict=True)]

    def definition(x, norm_weight, *weights) -> tuple[Tensor, ...]:
        return tuple(few_linears_definition(x, norm_weight, weights, scales, *ctx.numbers))

    found = recompute.gradients(definition, (x, norm_weight, *held[:count]), (needs_x, needs_norm, *needed), grads)
    return found[0], found[1], found[2:], [None] * count if ctx.are_scales_tensors else None, None, None, None


few_linears.register_autograd(_gradient, setup_context=_keep)
