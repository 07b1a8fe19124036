"""Activations as FP8 weights meet them in served models: E4M3 codes with a scale for each 128 numbers of a row.

scale = the smallest power of two with max |block| <= 448 scale          code = x / scale to the nearest E4M3, ties to even
"""

import math

import torch
from torch import Tensor

from dsv4.kernels.quantize import E8M0_BIAS, FP8_BLOCK, FP8_MAX, power_of_two


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """[.., i] -> (float8_e4m3fn [.., i], float32 [.., ceil(i/128)]): a power of two for each 128 numbers of a row.

    The smallest from 2^-126 to 2^126 with max |block| <= 448 * scale (1 for a block of zeros), as served models quantise what their
    FP8 weights multiply. Where a block holds NaN or infinity the scale is NaN. Nothing is read back from the device.
    """
    columns = x.shape[-1]
    blocks = torch.nn.functional.pad(x.detach().float(), (0, -columns % FP8_BLOCK)).unflatten(-1, (-1, FP8_BLOCK))
    most = blocks.abs().amax(-1)
    top, top_exponent = math.frexp(FP8_MAX)
    mantissa, exponent = torch.frexp(most)
    exponent = exponent.to(torch.int32) - top_exponent + (mantissa > top).to(torch.int32)
    exponent = exponent.clamp(1 - E8M0_BIAS, E8M0_BIAS - 1).masked_fill((most == 0) | ~most.isfinite(), 0)
    codes = (blocks * power_of_two(-exponent).unsqueeze(-1)).to(torch.float8_e4m3fn)
    scale = power_of_two(exponent).masked_fill(~most.isfinite(), math.nan)
    return codes.flatten(-2)[..., :columns].contiguous(), scale


def as_quantized(x: Tensor) -> Tensor:
    """x as `quantize_activations` represents it, in x's dtype; its gradient is the result's (straight through)."""
    codes, scale = quantize_activations(x)
    value = codes.to(torch.float32) * scale.repeat_interleave(FP8_BLOCK, dim=-1)[..., : x.shape[-1]]
    return x + (value.to(x.dtype) - x).detach() if x.requires_grad else value.to(x.dtype)
