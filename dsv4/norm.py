"""RMS norms: with a learned weight (kept in float32) and without (the queries' per-head norm)."""

import torch
from torch import Tensor, nn

from dsv4.float32 import Float32
from dsv4.kernels.norm_rotary import rms_norm


class RMSNorm(Float32):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; float32 inside, one rounding to x's dtype."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.float32))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class UnweightedRMSNorm(nn.Module):
    """The same without a weight."""

    def __init__(self, eps: float):
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, None, self.eps)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"
