"""The routed experts' weights, by how they are held: dense, FP8, or packed FP4. One expert at a time is dequantised, never the bank.

`gate_up_proj` stacks gate (w1) rows over up (w3) rows. Axes: E experts, I neurons, H width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dsv4.config import Dsv4Config
from dsv4.kernels.grouped_experts import Stored, grouped_experts, is_deployed, slots_in_order, sort_by_expert
from dsv4.kernels.grouped_linear import coded_linear, decode, grouped_product
from dsv4.kernels.mixture import mixture, mixture_write
from dsv4.linear import SCALE_BLOCK, Coded, apply_to_codes

FP4_GROUP = 32


class Experts(nn.Module):
    """Dense bank: gate_up_proj [E, 2I, H], down_proj [E, H, I]."""

    form = "dense"
    # Or "deployed", of FP8 banks (see grouped_experts).
    numerics = "exact"

    def __init__(self, config: Dsv4Config):
        super().__init__()
        self._sizes(config)
        e, i, h = self.num_experts, self.neurons, self.width
        self.gate_up_proj = nn.Parameter(torch.empty(e, 2 * i, h, dtype=torch.float32))
        self.down_proj = nn.Parameter(torch.empty(e, h, i, dtype=torch.float32))

    def _sizes(self, config: Dsv4Config) -> None:
        self.num_experts, self.neurons, self.width = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        self.limit = config.swiglu_limit
        self.backend = "torch"

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor, valid: Tensor | None = None) -> Tensor:
        """x [b s H], indices and weights [b s k] -> [b s H] float32: weighted sum over slots; zeros, at no cost, for tokens that are
        not `valid` [b s].
        """
        slots = (indices.flatten(0, 1), weights.flatten(0, 1))
        valid = None if valid is None else valid.flatten()
        return grouped_experts(x.flatten(0, 1), *slots, self, self.limit, self.backend, valid, self.numerics).view(x.shape)

    def with_shared(
        self,
        x: Tensor,
        indices: Tensor,
        weights: Tensor,
        valid: Tensor | None,
        sorted_slots: Sequence[Tensor] | None,
        shared: Tensor,
        into: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor:
        """What `forward` returns, in x's dtype, plus shared [b s H], by device code; with `into` the streams into which that is written.

        Args:
            sorted_slots: `dsv4.kernels.router.Routes.groups`. into: streams [b s n H], comb [b s n n], post [b s n].
        """
        stored = self.stored(x.dtype)
        bank = (stored.first, stored.first_scale, stored.second, stored.second_scale)
        valid = None if valid is None else valid.flatten()
        x, *given = (t.flatten(0, 1) for t in (x, indices, weights, shared))
        numbers = (self.limit, is_deployed(self.numerics))
        given = (x, *given[:2], valid, *bank, *numbers, *(sorted_slots or (None,) * 4), given[2])
        if into is None:
            return mixture(*given).view(shared.shape)
        return mixture_write(*given, *(t.flatten(0, 1) for t in into))[1].view(into[0].shape)

    def stored(self, dtype: torch.dtype) -> Stored:
        """What the device code reads."""
        return Stored(self.gate_up_proj.to(dtype), None, self.down_proj.to(dtype), None)

    def gate_up(self, rows: Tensor, ends: Tensor) -> Tensor:
        """rows [n H] sorted by expert, ends [E] int32 -> [n 2I]."""
        return grouped_product(rows, self.gate_up_proj.to(rows.dtype), ends)

    def down(self, rows: Tensor, ends: Tensor) -> Tensor:
        """rows [n I] sorted by expert -> [n H]."""
        return grouped_product(rows, self.down_proj.to(rows.dtype), ends)

    def slot_gate_up(self, x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """x [b s H], indices [b s k] -> gate, up [b s k I], for every slot."""
        order, ends = sort_by_expert(indices, self.num_experts)
        rows = x.flatten(0, 1).index_select(0, order // indices.shape[-1])
        return slots_in_order(self.gate_up(rows, ends), order).unflatten(0, indices.shape).chunk(2, dim=-1)

    def slot_down(self, neurons: Tensor, indices: Tensor) -> Tensor:
        """neurons [b s k I], indices [b s k] -> [b s k H], not weighted."""
        order, ends = sort_by_expert(indices, self.num_experts)
        out = self.down(neurons.flatten(0, 2).index_select(0, order), ends)
        return slots_in_order(out, order).unflatten(0, indices.shape)

    def gate_up_matrix(self, expert: int, dtype: torch.dtype) -> Tensor:
        """[2I, H] of one expert, gate rows over up rows."""
        return self.gate_up_proj[expert].to(dtype)

    def down_matrix(self, expert: int, dtype: torch.dtype) -> Tensor:
        """[H, I] of one expert."""
        return self.down_proj[expert].to(dtype)

    def extra_repr(self) -> str:
        return f"{self.num_experts} x ({self.width} -> {self.neurons} -> {self.width})"


class StoredExperts(Coded, Experts):
    """A bank of codes with scales, kept as stored. Codes take no gradient; activations and routing weights do."""

    def __init__(self, config: Dsv4Config):
        nn.Module.__init__(self)
        self._sizes(config)
        i, h = self.neurons, self.width
        for name, (rows, columns, stacked) in {"gate_up_proj": (2 * i, h, 2), "down_proj": (h, i, 1)}.items():
            codes, scales = self.empty(rows, columns, stacked)
            self.register_parameter(name, nn.Parameter(codes, requires_grad=False))
            self.register_parameter(f"{name}_scale_inv", nn.Parameter(scales, requires_grad=False))

    def empty(self, rows: int, columns: int, stacked: int) -> tuple[Tensor, Tensor]:
        """Uninitialised codes and scales of a bank of [rows, columns] matrices, each of `stacked` matrices one over the other."""
        raise NotImplementedError

    def stored(self, dtype):
        return Stored(self.gate_up_proj, self.gate_up_proj_scale_inv, self.down_proj, self.down_proj_scale_inv)

    def gate_up_matrix(self, expert, dtype):
        return decode(self.gate_up_proj[expert], self.gate_up_proj_scale_inv[expert], dtype, 2)

    def down_matrix(self, expert, dtype):
        return decode(self.down_proj[expert], self.down_proj_scale_inv[expert], dtype)

    def dequantized(self, dtype: torch.dtype = torch.bfloat16) -> Experts:
        """The dense bank of the same weights, new parameters."""
        dense = Experts.__new__(Experts)
        nn.Module.__init__(dense)
        for name in ("num_experts", "neurons", "width", "limit", "backend"):
            setattr(dense, name, getattr(self, name))
        for leaf, decoded in (("gate_up_proj", self.gate_up_matrix), ("down_proj", self.down_matrix)):
            setattr(dense, leaf, nn.Parameter(torch.stack([decoded(e, dtype) for e in range(self.num_experts)])))
        return dense

    def gate_up(self, rows, ends):
        return coded_linear(rows, self.gate_up_proj, self.gate_up_proj_scale_inv, ends, 2, False)

    def down(self, rows, ends):
        return coded_linear(rows, self.down_proj, self.down_proj_scale_inv, ends, 1, False)

    def _apply(self, fn, recurse=True):
        return apply_to_codes(self, fn)


class Fp8Experts(StoredExperts):
    """E4M3 codes with 128x128 scales; gate and up have a grid of scales each."""

    form = "fp8"
    CODES = torch.float8_e4m3fn

    def empty(self, rows, columns, stacked):
        e = self.num_experts
        grid = (stacked * -(-rows // stacked // SCALE_BLOCK), -(-columns // SCALE_BLOCK))
        return (
            torch.empty(e, rows, columns, dtype=torch.float8_e4m3fn),
            torch.empty(e, *grid, dtype=torch.float8_e8m0fnu),
        )


class Fp4Experts(StoredExperts):
    """E2M1 codes packed two to a byte (low nibble = even column) with one E8M0 scale per 32 columns."""

    form = "fp4"
    CODES = torch.int8

    def empty(self, rows, columns, stacked):
        e = self.num_experts
        return (
            torch.empty(e, rows, columns // 2, dtype=torch.int8),
            torch.empty(e, rows, columns // FP4_GROUP, dtype=torch.float8_e8m0fnu),
        )


# Banks that one process holds whole, in the memory of its device.
WHOLE = (Experts, Fp8Experts, Fp4Experts)
