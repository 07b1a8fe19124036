"""Gated pooling of a compression window: one entry out of `slots` tokens, with a softmax over the slots for every channel.

    gates = softmax over slots(gate + bias)          entry = sum over slots of gates * kv

Slots that hold no token have gate logit -inf and weight 0; an entry with no slot at all is zero. Axes: b batch, e entry, m slot, d channel.
"""

import torch
from torch import Tensor

from dsv4.kernels.numeric import wide


def pool_gates(logits: Tensor, present: Tensor) -> Tensor:
    """logits [b e m d], present [b e m] bool -> gates [b e m d] float32, summing to one over m (all zero where nothing is present)."""
    hidden = ~present.unsqueeze(-1)
    any_present = present.any(-1)[..., None, None]
    logits = wide(logits).masked_fill(hidden, float("-inf")).masked_fill(~any_present, 0.0)
    return torch.softmax(logits, dim=-2).masked_fill(hidden, 0.0)


def pool(kv: Tensor, gates: Tensor) -> Tensor:
    """kv [b e m d], gates [b e m d] -> [b e d] float32."""
    return (wide(kv) * gates).sum(-2)
