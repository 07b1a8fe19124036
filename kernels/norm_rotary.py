"""Root-mean-square norm and the partial interleaved rotary embedding.

Norm:   x / sqrt(mean(x^2) + eps) * weight, computed in float32, rounded once.
Rotary: the last r channels, in adjacent pairs (2i, 2i + 1), turned by position * frequency_i; the channels before them untouched.
        Turning back is the same with sin negated (values are the rotated keys, so outputs are turned back by the query's angle).

`fused_norm_rotary` is both in one pass, a registered op (`dsv4::norm_rotary`) over device code that is imported when it is first asked for.
"""

import torch
from torch import Tensor

from dsv4.kernels import recompute
from dsv4.kernels.backend import available
from dsv4.kernels.numeric import wide

# What the device code takes: a row stands in the registers of one program.
DEVICE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_WIDTH = 8192


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., d], weight [d] or None -> [..., d] of x's dtype."""
    w = wide(x)
    y = w * torch.rsqrt(w.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., d], cos and sin [..., r / 2] broadcasting over x's leading axes -> x with its last r channels turned."""
    r = 2 * cos.shape[-1]
    if x.device.type == "cpu" and x.dtype == cos.dtype and not torch.compiler.is_compiling():
        # The same products and sums, a pair at a time: several times faster than by halves. A copy: pairs begin at an even place.
        plain, turned = x.tensor_split((x.shape[-1] - r,), dim=-1)
        turned = turned.reshape(*turned.shape[:-1], r // 2, 2).clone(memory_format=torch.contiguous_format)
        pairs = torch.view_as_complex(turned) * torch.complex(cos, sin)
        return torch.cat((plain, torch.view_as_real(pairs).flatten(-2)), dim=-1)
    plain, turned = x[..., : x.shape[-1] - r], wide(x[..., x.shape[-1] - r :])
    even, odd = turned[..., 0::2], turned[..., 1::2]
    pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((plain, pairs.to(x.dtype)), dim=-1)


def rotate_back(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The inverse of `rotate`."""
    return rotate(x, cos, -sin)


def norm_rotary_definition(
    x: Tensor, weight: Tensor | None, cos: Tensor | None, sin: Tensor | None, valid: Tensor | None, eps: float, norms: bool, back: bool
) -> Tensor:
    """What `fused_norm_rotary` computes, in plain torch."""
    y = rms_norm(x, weight, eps) if norms else x
    if cos is not None:
        y = (rotate_back if back else rotate)(y, cos.unsqueeze(2), sin.unsqueeze(2))
    return y.clone() if valid is None else y.masked_fill(~valid[..., None, None], 0.0)


def refusal(backend: str, device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """None where `backend` takes rows of this device, dtype and width, else the reason it does not."""
    reason = available(backend, device)
    if reason is not None or backend == "torch":
        return reason
    if dtype not in DEVICE_DTYPES:
        return f"its rows are {', '.join(map(str, DEVICE_DTYPES))}, got {dtype}"
    return None if width <= MAX_WIDTH else f"its rows are at most {MAX_WIDTH} wide, got {width}"


@torch.library.custom_op("dsv4::norm_rotary", mutates_args=())
def fused_norm_rotary(
    x: Tensor, weight: Tensor | None, cos: Tensor | None, sin: Tensor | None, valid: Tensor | None, eps: float, norms: bool, back: bool
) -> Tensor:
    """`rms_norm`, then `rotate` (`rotate_back` where `back`), each only where asked for, each with its rounding.

    Args:
        x: [b s r d]: r rows of a token. norms: whether rows are normed; weight: [d] float32 or None.
        cos, sin: [b s turned / 2] float32, or None for no rotary.
        valid: [b s] bool or None; rows of a token that is not valid are zeros.
    Returns:
        [b s r d] of x's dtype, dense.
    Raises:
        ValueError: shapes or dtypes that do not fit, or a device on which it cannot run.
    """
    _check(x, weight, cos, sin, valid)
    from dsv4.kernels import _norm_rotary_triton as device_code

    return device_code.run(x, weight, cos, sin, valid, eps, norms, back)


@fused_norm_rotary.register_fake
def _(x, weight, cos, sin, valid, eps, norms, back):
    return x.new_empty(x.shape)


def _check(x: Tensor, weight: Tensor | None, cos: Tensor | None, sin: Tensor | None, valid: Tensor | None) -> None:
    b, s, _, d = x.shape
    reason = refusal("triton", x.device, x.dtype, d)
    if reason is not None:
        raise ValueError(f'backend="triton": {reason}; use backend="torch" (of a model: model.use_kernels("torch"))')
    half = 0 if cos is None else cos.shape[-1]
    if (cos is None) != (sin is None) or (half and d % 2) or 2 * half > d:
        raise ValueError(f"cos and sin of {2 * half} channels over rows of {d}: expected both or none, an even width, no more than the row")
    expected = {
        "weight": (weight, (d,), torch.float32),
        "cos": (cos, (b, s, half), torch.float32),
        "sin": (sin, (b, s, half), torch.float32),
        "valid": (valid, (b, s), torch.bool),
    }
    for name, (t, shape, dtype) in expected.items():
        if t is not None and (t.shape != shape or t.dtype != dtype):
            raise ValueError(f"{name} {list(t.shape)} {t.dtype} over rows {list(x.shape)}; expected {list(shape)} {dtype}")


recompute.register(fused_norm_rotary, norm_rotary_definition, tensors=5)
