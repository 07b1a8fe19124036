"""Rotary tables: cos and sin of position * frequency for a rope of the config, plain or YaRN.

YaRN interpolates the low frequencies by `factor` and keeps the high ones, with a linear ramp between the channels that turn beta_fast
and beta_slow times within the original length. It changes frequencies only; cos and sin are scaled by `attention_factor` where the
config carries one, never by a magnitude of their own.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dsv4.float32 import Float32


def frequencies(width: int, rope: Mapping) -> Tensor:
    """[width / 2] float32 on the CPU: radians per position of each channel pair."""
    theta = rope["rope_theta"]
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width
    plain = 1.0 / theta**exponents
    if rope.get("rope_type", "default") == "default":
        return plain
    length, factor = rope["original_max_position_embeddings"], rope["factor"]

    def channel(turns: float) -> float:
        return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(channel(rope["beta_fast"])), 0)
    high = min(math.ceil(channel(rope["beta_slow"])), width - 1)
    ramp = ((torch.arange(width // 2, dtype=torch.float32, device="cpu") - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp)


class Rotary(Float32):
    """positions [...] int64 -> (cos, sin), each [..., r / 2] float32."""

    def __init__(self, width: int, rope: Mapping):
        super().__init__()
        self.rope, self.width = dict(rope), width
        self.factor = float(rope.get("attention_factor") or 1.0)
        # Made on the CPU: on the meta device its few numbers would have torch import a compiler.
        self.frequencies = nn.Buffer(frequencies(width, rope).to(torch.get_default_device()), persistent=False)

    def reset(self, device=None) -> None:
        """Compute the table anew (after the model was built without memory)."""
        self.frequencies = frequencies(self.width, self.rope).to(device or "cpu")

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.clamp(min=0).unsqueeze(-1).to(self.frequencies.dtype) * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if self.factor == 1.0 else (cos * self.factor, sin * self.factor)

    def extra_repr(self) -> str:
        return f"{self.width}, theta={self.rope['rope_theta']}, {self.rope.get('rope_type', 'default')}"
