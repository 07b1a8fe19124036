"""Root-mean-square norm and the partial interleaved rotary embedding.

Norm:   x / sqrt(mean(x^2) + eps) * weight, computed in float32, rounded once.
Rotary: the last r channels, in adjacent pairs (2i, 2i + 1), turned by position * frequency_i; the channels before them untouched.
        Turning back is the same with sin negated (values are the rotated keys, so outputs are turned back by the query's angle).
"""

import torch
from torch import Tensor

from dsv4.kernels.numeric import wide


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., d], weight [d] or None -> [..., d] of x's dtype."""
    w = wide(x)
    y = w * torch.rsqrt(w.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., d], cos and sin [..., r / 2] broadcasting over x's leading axes -> x with its last r channels turned."""
    r = 2 * cos.shape[-1]
    plain, turned = x[..., : x.shape[-1] - r], wide(x[..., x.shape[-1] - r :])
    even, odd = turned[..., 0::2], turned[..., 1::2]
    pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((plain, pairs.to(x.dtype)), dim=-1)


def rotate_back(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The inverse of `rotate`."""
    return rotate(x, cos, -sin)
