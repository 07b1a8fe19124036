"""RMS norms: with a learned weight (kept in float32) and without (the queries' per-head norm), alone and before a rotary."""

import torch
from torch import Tensor, nn

from dsv4.float32 import Float32
from dsv4.hooks import is_watched
from dsv4.kernels.norm_rotary import fused_norm_rotary, norm_and_rotate, rms_norm, rotate, rotate_back


class Norm:
    """What both have. `backend`: of both ways; chosen once, when the model is built (pretrained.use_kernels)."""

    backend = "torch"
    weight: Tensor | None
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        if self.backend == "torch":
            return rms_norm(x, self.weight, self.eps)
        return fused_norm_rotary(x.reshape(1, -1, 1, x.shape[-1]), self.weight, None, None, None, self.eps, True, False).view(x.shape)

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor, valid: Tensor | None = None, *, is_free: bool = False) -> Tensor:
        """The norm, then the rotary: x [b s r d], cos and sin [b s turned / 2], valid [b s] (zeros elsewhere) -> [b s r d].

        is_free: nobody needs x any more.
        """
        if self.backend == "triton" and not is_watched(self):
            return fused_norm_rotary(x, self.weight, cos, sin, valid, self.eps, True, False)
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
        if is_watched(self) or self.backend == "triton":
            y = rotate(self(x), cos, sin)
        else:
            y = norm_and_rotate(x, self.weight, cos, sin, self.eps, is_free=is_free)
        return y if valid is None else y.masked_fill(~valid[..., None, None], 0.0)

    def only_turned(self, x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False, is_free: bool = False) -> Tensor:
        """The rotary without the norm, by the same backend; back: the other way. is_free: nobody needs x any more."""
        if self.backend == "triton":
            return fused_norm_rotary(x, None, cos, sin, None, 0.0, False, back)
        return (rotate_back if back else rotate)(x, cos.unsqueeze(2), sin.unsqueeze(2), is_free=is_free)


class RMSNorm(Norm, Float32):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; float32 inside, one rounding to x's dtype."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.float32))
        self.eps = eps

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class UnweightedRMSNorm(Norm, nn.Module):
    """The same without a weight."""

    weight = None

    def __init__(self, eps: float):
        super().__init__()
        self.eps = eps

    def extra_repr(self) -> str:
        return f"eps={self.eps}"
