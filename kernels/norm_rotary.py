"""Root-mean-square norm and the partial interleaved rotary embedding.

Norm:   x / sqrt(mean(x^2) + eps) * weight, computed in float32, rounded once.
Rotary: the last r channels, in adjacent pairs (2i, 2i + 1), turned by position * frequency_i; the channels before them untouched.
        Turning back is the same with sin negated (values are the rotated keys, so outputs are turned back by the query's angle).

`fused_norm_rotary` is both in one pass, a registered op (`dsv4::norm_rotary`) over device code that is imported when it is first asked for.
"""

import torch
from torch import Tensor

from dsv4.kernels import few_tokens, recompute
from dsv4.kernels.backend import available
from dsv4.kernels.numeric import is_plain, wide

# What the device code takes: a row stands in the registers of one program.
DEVICE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_WIDTH = 8192
# Numbers that are taken at a time on a CPU, so that the cache holds them from one operation to the next.
CHUNK = 1 << 18


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, is_free: bool = False) -> Tensor:
    """x [..., d], weight [d] or None -> [..., d] of x's dtype. is_free: nobody needs x any more; a long one is then written over."""
    tokens = x.shape[:-1][:2].numel()
    if few_tokens.takes(x, tokens, *_held(x, weight)):
        return few_tokens.rms_norm(x, weight, eps)
    w = wide(x)
    if w.numel() > CHUNK and is_plain(w):
        y = w if is_free and w.is_contiguous() else torch.empty_like(w, memory_format=torch.contiguous_format)
        for rows, into in zip(*(t.reshape(-1, w.shape[-1]).split(max(1, CHUNK // w.shape[-1])) for t in (w, y)), strict=True):
            torch.mul(rows, torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps), out=into)
            if weight is not None:
                into.mul_(weight)
        return y.to(x.dtype)
    y = w * torch.rsqrt(w.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, is_free: bool = False) -> Tensor:
    """x [..., d], cos and sin [..., r / 2] broadcasting over x's leading axes -> x with its last r channels turned. is_free: nobody needs
    x any more.
    """
    r = 2 * cos.shape[-1]
    if _is_one_token(x, cos, sin):
        return few_tokens.turn(x, None, cos, sin, None)
    if _turns_in_place(x, cos) and is_plain(x):
        is_free = is_free and x.is_contiguous() and x.storage_offset() % 2 == 0
        return _turn(x if is_free else x.clone(memory_format=torch.contiguous_format), cos, sin)
    if x.device.type == "cpu" and x.dtype == cos.dtype and not torch.compiler.is_compiling():
        # The same products and sums, a pair at a time: several times faster than by halves. Pairs have to begin at an even place.
        x = x.contiguous()
        x = x.clone() if x.storage_offset() % 2 else x
        plain, turned = x.tensor_split((x.shape[-1] - r,), dim=-1)
        turned = turned.unflatten(-1, (r // 2, 2))
        turned = turned if _turns_in_place(x, cos) else turned.clone(memory_format=torch.contiguous_format)
        pairs = torch.view_as_complex(turned) * torch.complex(cos, sin)
        return torch.cat((plain, torch.view_as_real(pairs).flatten(-2)), dim=-1)
    plain, turned = x[..., : x.shape[-1] - r], wide(x[..., x.shape[-1] - r :])
    even, odd = turned[..., 0::2], turned[..., 1::2]
    pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((plain, pairs.to(x.dtype)), dim=-1)


def _is_one_token(x: Tensor, cos: Tensor, sin: Tensor, *held: tuple[Tensor, torch.Size]) -> bool:
    """Whether compiled code turns all rows of x by one angle."""
    half = cos.shape[-1]
    is_one = cos.numel() == half and cos.dim() <= x.dim() and x.dtype == torch.float32 and 0 < 2 * half <= x.shape[-1]
    return is_one and few_tokens.takes(x, 1, (cos, cos.shape), (sin, cos.shape), *held)


def _held(x: Tensor, weight: Tensor | None) -> tuple[tuple[Tensor, torch.Size], ...]:
    return () if weight is None else ((weight, x.shape[-1:]),)


def _turns_in_place(x: Tensor, cos: Tensor) -> bool:
    """Whether x's pairs are complex numbers in memory, once x is dense."""
    return x.dtype == cos.dtype and x.shape[-1] % 2 == 0


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    r = 2 * cos.shape[-1]
    torch.view_as_complex(x[..., x.shape[-1] - r :].unflatten(-1, (r // 2, 2))).mul_(torch.complex(cos, sin))
    return x


def norm_and_rotate(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float, *, is_free: bool = False) -> Tensor:
    """`rotate` of `rms_norm`, to the last bit. is_free: as there."""
    if _is_one_token(x, cos, sin, *_held(x, weight)):
        return few_tokens.turn(x, weight, cos, sin, eps)
    return rotate(rms_norm(x, weight, eps, is_free=is_free), cos, sin, is_free=True)


def rotate_back(x: Tensor, cos: Tensor, sin: Tensor, *, is_free: bool = False) -> Tensor:
    """The inverse of `rotate`."""
    return rotate(x, cos, -sin, is_free=is_free)


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
