"""The routed experts on a CPU where nobody asks for a gradient: the definition of dsv4.kernels.grouped_experts in fewer calls, to
the last bit (matrix products of the same rows, sums in the same order) but for a token that goes through compiled code.

Buffers are written in place, and what is read back from tensors costs nothing here. Four ways: compiled code, for a float32 token over
small matrices; slot by slot, for another token whose experts differ; one grouped product over all rows; expert by expert, so that what an
expert's rows become stays in the cache. Codes are decoded expert by expert, once for each matrix that is hit. Axes: t token, k slot,
n slot sorted by expert.
"""

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, silu

from dsv4.kernels import few_tokens
from dsv4.kernels.grouped_experts import Stored, swiglu
from dsv4.kernels.grouped_linear import GROUPED_DTYPES, decode, groups, takes_grouped
from dsv4.kernels.numeric import wide
from dsv4.kernels.routing import slots_in_order, sort_by_expert

# From so many rows of an expert on (in the mean) experts are taken one after another.
MANY_ROWS = 128
# Elementwise functions take a tensor's last few numbers by other instructions: rows of such multiples have no last few.
UNROLLED = 32


def covers(bank: Stored, x: Tensor) -> bool:
    """Whether this is the definition for rows like x [t H]."""
    inner = bank.second.shape[2] * (1 if bank.form != "fp4" else 2)
    if len(x) == 1 and bank.first_scale is None:
        # The same products, grouped or one by one.
        return inner % UNROLLED == 0 and x.dtype in GROUPED_DTYPES
    return inner % UNROLLED == 0 and (bank.first_scale is not None or (takes_grouped(x, bank.first) and takes_grouped(x, bank.second)))


def run(x: Tensor, indices: Tensor, weights: Tensor, bank: Stored, limit: float) -> Tensor:
    """x [t H], indices [t k], weights [t k] -> [t H], float32 or wider."""
    tokens, k = indices.shape
    is_dense = bank.first_scale is None
    if tokens == 1 and is_dense:
        if few_tokens.takes_bank(x, indices, weights, bank.first, bank.second):
            return few_tokens.experts(x, indices, weights, bank.first, bank.second, limit)
        experts = indices[0].tolist()
        if len(set(experts)) == k:
            return weights @ wide(_slot_by_slot(x, experts, bank, limit))
    order, ends = sort_by_expert(indices, bank.num_experts)
    is_short = tokens * k <= MANY_ROWS * bank.num_experts
    way = _all_at_once if is_dense and is_short else _expert_by_expert
    slots = slots_in_order(way(x, order // k, ends, bank, limit), order).unflatten(0, indices.shape)
    return (weights.unsqueeze(-2) @ wide(slots)).squeeze(-2)


def _slot_by_slot(x: Tensor, experts: list[int], bank: Stored, limit: float) -> Tensor:
    """x [1 H] -> [k H]."""
    gate_up = torch.cat([torch.nn.functional.linear(x, bank.first[e]) for e in experts])
    neurons = _swiglu(gate_up, limit).split(1)
    return torch.cat([torch.nn.functional.linear(row, bank.second[e]) for row, e in zip(neurons, experts, strict=True)])


def _all_at_once(x: Tensor, tokens: Tensor, ends: Tensor, bank: Stored, limit: float) -> Tensor:
    """-> [n H], sorted by expert."""
    gate_up = grouped_mm(x.index_select(0, tokens), bank.first.transpose(1, 2), offs=ends)
    return grouped_mm(_swiglu(gate_up, limit), bank.second.transpose(1, 2), offs=ends)


def _expert_by_expert(x: Tensor, tokens: Tensor, ends: Tensor, bank: Stored, limit: float) -> Tensor:
    out = x.new_empty(tokens.shape[0], x.shape[1])
    first, second = (_Matrices(*held, x.dtype) for held in ((bank.first, bank.first_scale, 2), (bank.second, bank.second_scale, 1)))
    for e, start, stop in groups(ends):
        gate_up = x.index_select(0, tokens[start:stop]) @ first[e].t()
        torch.mm(_swiglu(gate_up, limit), second[e].t(), out=out[start:stop])
    return out


class _Matrices:
    """A bank's matrices one at a time; codes are decoded into one buffer."""

    def __init__(self, codes: Tensor, scale: Tensor | None, parts: int, dtype: torch.dtype):
        self.codes, self.scale, self.parts, self.dtype = codes, scale, parts, dtype
        self.buffer: Tensor | None = None

    def __getitem__(self, expert: int) -> Tensor:
        if self.scale is None:
            return self.codes[expert]
        self.buffer = decode(self.codes[expert], self.scale[expert], self.dtype, self.parts, out=self.buffer)
        return self.buffer


def _swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """`swiglu` of gate beside up [n 2I] -> [n I], which writes into its argument."""
    gate, up = gate_up.chunk(2, dim=-1)
    if wide(gate) is not gate:
        return swiglu(gate, up, limit)
    return silu(gate.clamp(max=limit), inplace=True).mul_(up.clamp_(min=-limit, max=limit))
