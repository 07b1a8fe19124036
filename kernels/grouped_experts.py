"""Routed experts on tokens sorted by expert.

    gate, up   = split(gate_up_e . x)                up clamped to [-L, L], gate clamped from above only
    neurons    = silu(gate) * up                      out_slot = weight_slot * (down_e . neurons)

Axes: t token, k slot, n slot sorted by expert (t * k of them), H width, I neurons, E experts.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import silu

from dsv4.kernels.numeric import wide

# Slots go through the experts in chunks that hold about this many floats of width H, but not fewer than ROWS for each expert.
CHUNK = 1 << 22
ROWS = 64


class Bank(Protocol):
    """The experts' matrices, however they are held."""

    num_experts: int

    def gate_up(self, rows: Tensor, ends: Tensor) -> Tensor:
        """rows [n H] sorted by expert, ends [E] int32 -> [n 2I], gate beside up."""

    def down(self, rows: Tensor, ends: Tensor) -> Tensor:
        """rows [n I] sorted by expert -> [n H]."""


def clamp_gate(gate: Tensor, limit: float) -> Tensor:
    """From above only."""
    return gate.clamp(max=limit)


def clamp_up(up: Tensor, limit: float) -> Tensor:
    return up.clamp(min=-limit, max=limit)


def activation(gate: Tensor, limit: float) -> Tensor:
    """silu of the clamped gate, in float32."""
    return silu(wide(clamp_gate(gate, limit)))


def neurons(active: Tensor, up: Tensor, limit: float) -> Tensor:
    """activation * clamped up, what the down projection reads; one rounding to up's dtype."""
    return (wide(active) * wide(clamp_up(up, limit))).to(up.dtype)


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(clamped gate) * clamped up in float32, one rounding."""
    return neurons(activation(gate, limit), up, limit)


def sort_by_expert(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """indices [t k] -> (order [n]: flat slots sorted by expert, stable; ends [E] int32: slots up to and with each expert).

    No size depends on the data and nothing is read back from the device.
    """
    flat = indices.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
    return order, counts.cumsum(0).int()


def slots_in_order(x: Tensor, order: Tensor) -> Tensor:
    """Undo the sort: row r of x goes to flat slot order[r]."""
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    return x.index_select(0, place)


def grouped_experts(x: Tensor, indices: Tensor, weights: Tensor, bank: Bank, limit: float) -> Tensor:
    """x [t H], indices [t k] int64, weights [t k] float32 -> [t H] float32: sum over slots in slot order, weight after the down product."""
    t, k = indices.shape
    step = max(1, max(CHUNK // x.shape[-1], ROWS * bank.num_experts) // k)
    if t <= step:
        return _grouped(x, indices, weights, bank, limit)
    return torch.cat([_grouped(x[i : i + step], indices[i : i + step], weights[i : i + step], bank, limit) for i in range(0, t, step)])


def _grouped(x: Tensor, indices: Tensor, weights: Tensor, bank: Bank, limit: float) -> Tensor:
    order, ends = sort_by_expert(indices, bank.num_experts)
    rows = x.index_select(0, order // indices.shape[-1])
    gate, up = bank.gate_up(rows, ends).chunk(2, dim=-1)
    out = bank.down(swiglu(gate, up, limit), ends)
    slots = slots_in_order(out, order).unflatten(0, indices.shape)
    return (weights.unsqueeze(-2) @ wide(slots)).squeeze(-2)
