"""Compressors: one entry for every `rate` tokens, pooled with gates of its own for each channel.

    kv, gate = W_kv x, W_gate x                      gates = softmax over slots(gate + position_bias)
    entry    = rotary(norm(sum over slots gates * kv)), at the position of the window's first token

A CSA window pools 2 * rate slots: the previous window's tokens through the projections' first half, then its own through the second.
An HCA window pools its own `rate` tokens. Projections, softmax and sum are float32, rounded once before the norm.
Axes: b batch, s token, e_new entry closed by the call, window slot of an entry, D width.
"""

import torch
from torch import Tensor, nn

from dsv4.call import Call, Windows
from dsv4.config import Dsv4Config
from dsv4.float32 import Float32
from dsv4.hooks import HookPoint, Probed, is_watched
from dsv4.kernels.pooling import fused_pool, pool, pool_gates, slots_of
from dsv4.linear import Linear
from dsv4.norm import RMSNorm


class EntryPool(Probed, Float32):
    """Pools windows of `rate` tokens into entries of `width`; `series` projections stand side by side (2 = overlapping windows)."""

    FLOAT32 = ("position_bias",)
    # Of what the module fuses; chosen once, when the model is built (pretrained.use_kernels).
    backend = "torch"

    def __init__(self, config: Dsv4Config, layer_type: str, width: int, series: int):
        super().__init__()
        self.layer_type, self.width, self.series = layer_type, width, series
        rate = config.compress_rates[layer_type]
        self.kv_proj = Linear(config.hidden_size, series * width)
        self.gate_proj = Linear(config.hidden_size, series * width)
        self.position_bias = nn.Parameter(torch.empty(rate, series * width, dtype=torch.float32))
        self.kv_norm = RMSNorm(width, config.rms_norm_eps)

    def project(self, x: Tensor) -> Tensor:
        """x [b s hidden] -> [b s 2 * series * width] float32: kv beside gate."""
        return torch.cat((self.kv_proj.in_float32(x), self.gate_proj.in_float32(x)), dim=-1)

    def entries(self, projected: Tensor, windows: Windows, dtype: torch.dtype) -> Tensor:
        """The entries that close [b e_new width], with nobody looking at the gates."""
        if self.backend == "torch" or windows.new == 0 or is_watched(self.kv_norm):
            return self.pooled(projected, self.gates(projected, windows, windows.present), windows, dtype)
        norm = self.kv_norm
        where = (*windows.rotation, windows.index, windows.present, windows.filled)
        return fused_pool(projected, self.position_bias, norm.weight, *where, norm.eps, dtype)

    def gates(self, projected: Tensor, windows: Windows, present: Tensor) -> Tensor:
        """projected [b kept+s ...], present [b e_new window] bool -> the weight of each slot and channel [b e_new window width]."""
        if windows.new == 0:
            return projected.new_zeros(*present.shape, self.width)
        gate = projected.chunk(2, dim=-1)[1]
        bias = torch.cat(self.position_bias.chunk(self.series, dim=-1))
        return pool_gates(self.slots(gate, windows) + bias, present)

    def pooled(self, projected: Tensor, gates: Tensor, windows: Windows, dtype: torch.dtype) -> Tensor:
        """The entries that close, normed and rotated [b e_new width]; zeros where a row closes fewer."""
        if windows.new == 0:
            return projected.new_zeros(len(projected), 0, self.width, dtype=dtype)
        kv = projected.chunk(2, dim=-1)[0]
        pooled = pool(self.slots(kv, windows), gates).to(dtype)
        entries = self.kv_norm.turned(pooled.unsqueeze(2), *windows.rotation).squeeze(2)
        return entries.masked_fill(~windows.filled.unsqueeze(-1), 0.0)

    def slots(self, projected: Tensor, windows: Windows) -> Tensor:
        """[b kept+s series * width] -> [b e_new window width]: each slot's token, seen through the series that the slot uses."""
        return slots_of(projected, windows.index, self.series)


class Compressor(EntryPool):
    """The attention's own entries."""

    def __init__(self, config: Dsv4Config, layer_type: str, series: int):
        super().__init__(config, layer_type, config.head_dim, series)
        self.compressor_gates = HookPoint("b e_new window D")
        self.compressed_entries = HookPoint("b e_new D")

    def forward(self, x: Tensor, call: Call, kv=None) -> Tensor:
        """x [b s hidden] -> entries that exist after the call [b e D]."""
        windows = call.windows[self.layer_type]
        projected = self.project(x) if kv is None else kv.projections.extend(self.project(x), windows.kept)
        if self.spelled_out:
            gates = self.tap.compressor_gates(self.gates(projected, windows, windows.present))
            made = self.pooled(projected, gates, windows, x.dtype)
        else:
            made = self.entries(projected, windows, x.dtype)
        entries = self.tap.compressed_entries(made)
        if entries is not made:
            entries = entries.masked_fill(~windows.filled.unsqueeze(-1), 0.0)
        return entries if kv is None else kv.entries.extend(entries, windows)
