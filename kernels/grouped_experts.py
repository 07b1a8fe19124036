"""Routed experts on tokens sorted by expert.

    gate, up   = split(gate_up_e . x)                up clamped to [-L, L], gate clamped from above only
    neurons    = silu(gate) * up                      out_slot = weight_slot * (down_e . neurons)

A bank is anything with `gate_up(e)` [2I, H] and `down(e)` [H, I] in the compute dtype (dense, FP8, packed FP4).
Axes: t token, k slot, H width, I neurons, E experts.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from dsv4.kernels.numeric import wide

# Slots go through the experts in chunks that hold about this many floats of width H, but not fewer than ROWS for each expert.
CHUNK = 1 << 22
ROWS = 64


class Bank(Protocol):
    num_experts: int

    def gate_up(self, expert: int) -> Tensor: ...

    def down(self, expert: int) -> Tensor: ...


def clamp_gate(gate: Tensor, limit: float) -> Tensor:
    """From above only."""
    return gate.clamp(max=limit)


def clamp_up(up: Tensor, limit: float) -> Tensor:
    return up.clamp(min=-limit, max=limit)


def activation(gate: Tensor, limit: float) -> Tensor:
    """silu of the clamped gate, rounded once to gate's dtype."""
    return silu(wide(clamp_gate(gate, limit))).to(gate.dtype)


def neurons(active: Tensor, up: Tensor, limit: float) -> Tensor:
    """activation * clamped up, what the down projection reads."""
    return (wide(active) * wide(clamp_up(up, limit))).to(up.dtype)


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(clamped gate) * clamped up in float32, one rounding."""
    return (silu(wide(clamp_gate(gate, limit))) * wide(clamp_up(up, limit))).to(gate.dtype)


def sort_by_expert(indices: Tensor, num_experts: int) -> tuple[Tensor, list[tuple[int, int, int]]]:
    """indices [t k] -> (order [t*k]: flat slots sorted by expert, stable; [(expert, first, last)] of the experts that are hit)."""
    flat = indices.flatten()
    order = torch.argsort(flat, stable=True)
    ends = torch.bincount(flat, minlength=num_experts).cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    return order, [(e, i, j) for e, (i, j) in enumerate(zip(starts, ends, strict=True)) if i < j]


def expert_linear(x: Tensor, weight_of, groups: list[tuple[int, int, int]], width: int) -> Tensor:
    """x [slots, in] sorted by expert -> [slots, width]: each group through its expert's matrix."""
    parts = [linear(x[i:j], weight_of(e)) for e, i, j in groups]
    return torch.cat(parts) if parts else x.new_zeros(0, width)


def slots_in_order(x: Tensor, order: Tensor) -> Tensor:
    """Undo the sort: row r of x goes to flat slot order[r]."""
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    return x.index_select(0, place)


def grouped_experts(x: Tensor, indices: Tensor, weights: Tensor, bank: Bank, limit: float) -> Tensor:
    """x [t H], indices [t k] int64, weights [t k] float32 -> [t H] float32: sum over slots in slot order, weight after the down product."""
    t, k = indices.shape
    slots = max(CHUNK // x.shape[-1], ROWS * bank.num_experts)
    step = max(1, slots // k)
    parts = [_grouped(x[i : i + step], indices[i : i + step], weights[i : i + step], bank, limit) for i in range(0, t, step)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _grouped(x: Tensor, indices: Tensor, weights: Tensor, bank: Bank, limit: float) -> Tensor:
    order, groups = sort_by_expert(indices, bank.num_experts)
    rows = x.index_select(0, order // indices.shape[-1])
    outputs = []
    for e, i, j in groups:
        gate, up = linear(rows[i:j], bank.gate_up(e)).chunk(2, dim=-1)
        outputs.append(linear(swiglu(gate, up, limit), bank.down(e)))
    slots = slots_in_order(torch.cat(outputs), order).unflatten(0, indices.shape)
    return (weights.unsqueeze(-2) @ wide(slots)).squeeze(-2)
