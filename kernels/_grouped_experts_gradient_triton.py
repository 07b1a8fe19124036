"""Device code of the routed experts' gradients with respect to activations and routing weights; weights are read as stored, and no
decoded matrix is kept. L is the clamp's limit, p a place in the order sorted by expert, s a slot, t a token, v the cotangent.

    gate, up = W_e x[t]                                            computed again
    u[p]     = down_e^T v[t]
    dweight[s]      = u[p] . neurons[p]
    dgate, dup [p]  = gradient of silu(min(g, L)) * clamp(u, -L, L) for weight[s] u[p]
    dx[t]    = sum over slots of gate_e^T dgate[p] + up_e^T dup[p], in slot order

Sums are in a fixed order: no atomic addition.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels._device_triton import INTERPRETER, architecture
from dsv4.kernels._grouped_experts_triton import gate_up, grid, grid_of_scales, sum_of, tile_of, tile_rows
from dsv4.kernels._products_triton import Tile, as_bytes, launch_options, multiply_transposed, swiglu_gradient, widens
from dsv4.kernels._route_triton import groups
from dsv4.kernels.grouped_experts import Stored

# (architecture, form of the weights, rows of a tile) -> (through down, through gate and up). Columns and depth divide 128.
LAUNCH: Mapping[tuple[str, str, int], tuple[Tile, Tile]] = {
    **{("sm_90", form, 16): (Tile(64, 64, 4, 4), Tile(64, 64, 4, 3)) for form in ("dense", "fp8", "fp4")},
    **{("sm_90", form, 64): (Tile(64, 64, 4, 4), Tile(64, 64, 4, 3)) for form in ("dense", "fp8", "fp4")},
    ("sm_90", "dense", 128): (Tile(64, 64, 8, 3), Tile(128, 64, 8, 3)),
    ("sm_90", "fp8", 128): (Tile(64, 64, 8, 3), Tile(64, 64, 8, 3)),
    ("sm_90", "fp4", 128): (Tile(64, 64, 8, 3), Tile(64, 64, 8, 3)),
    **{("sm_100", form, 16): (Tile(64, 64, 4, 4), Tile(64, 64, 4, 3)) for form in ("dense", "fp8", "fp4")},
    **{("sm_100", form, 64): (Tile(64, 64, 4, 4), Tile(64, 64, 4, 3)) for form in ("dense", "fp8", "fp4")},
    **{("sm_100", form, 128): (Tile(64, 64, 8, 3), Tile(128, 64, 8, 3)) for form in ("dense", "fp8", "fp4")},
    **{("sm_80", form, 16): (Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)) for form in ("dense", "fp4")},
    **{("sm_80", form, 64): (Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)) for form in ("dense", "fp4")},
    **{(INTERPRETER, form, 16): (Tile(64, 64, 1, 1), Tile(64, 64, 1, 1)) for form in ("dense", "fp8", "fp4")},
}
# Gate and up are computed again with the forward's tile, but where storing both apart spills.
AGAIN: Mapping[tuple[str, str, int], Tile] = {("sm_90", "fp4", 128): Tile(64, 128, 8, 3)}


@triton.jit
def through_down(
    v, order, weights, tile_expert, tile_row, ends, codes, scales, gate_up, d_gate_up, neurons, d_weights, limit, top_k, n,
    N, K, SCALES_HIGH, SCALES_WIDE,
    FORM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """v [t K], codes [E K N ..], gate_up [n 2N] -> d_gate_up [n 2N], shares of d_weights [blocks of columns, n], KEEP: neurons [n N]."""
    blocks = tl.cdiv(N, COLUMNS)
    pid = tl.program_id(0)
    e, place, inside = tile_of(tile_expert, tile_row, ends, pid // blocks, ROWS)
    if e < 0:
        return
    e = e.to(tl.int64)
    column0 = (pid % blocks) * COLUMNS
    column = column0 + tl.arange(0, COLUMNS)
    slot = tl.load(order + place)
    v_at = v + (slot // top_k).to(tl.int64)[None, :] * K
    codes += e * K * (N // 2 if FORM == "fp4" else N)
    scales += e * SCALES_HIGH * SCALES_WIDE
    acc = tl.zeros((COLUMNS, ROWS), tl.float32)
    # acc = down^T v
    for k0 in tl.range(0, K, DEPTH, num_stages=STAGES):
        k = k0 + tl.arange(0, DEPTH)[:, None]
        v_t = tl.load(v_at + k) if EVEN else tl.load(v_at + k, mask=k < K, other=0.0)
        if WIDEN:
            v_t = v_t.to(tl.float32)
        acc = multiply_transposed(
            acc, codes, scales, v_t, k0, 0, K, k0 // 128, column0, N, SCALES_WIDE, FORM, COLUMNS, DEPTH, WIDEN,
        )  # fmt: skip
    u = tl.trans(acc)
    mask = inside[:, None] & (column < N)[None, :]
    at = place.to(tl.int64)[:, None] * 2 * N + column[None, :]
    gate = tl.load(gate_up + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + N, mask=mask, other=0.0).to(tl.float32)
    inner, d_gate, d_up = swiglu_gradient(gate, up, u * tl.load(weights + slot)[:, None], limit)
    tl.store(d_gate_up + at, d_gate.to(d_gate_up.dtype.element_ty), mask=mask)
    tl.store(d_gate_up + at + N, d_up.to(d_gate_up.dtype.element_ty), mask=mask)
    # As down read them.
    inner = inner.to(neurons.dtype.element_ty)
    if KEEP:
        tl.store(neurons + place.to(tl.int64)[:, None] * N + column[None, :], inner, mask=mask)
    share = tl.sum(tl.where(mask, u * inner.to(tl.float32), 0.0), 1)
    tl.store(d_weights + (pid % blocks).to(tl.int64) * n + slot, share, mask=inside)


@triton.jit
def through_gate_up(
    d_gate_up, order, tile_expert, tile_row, ends, codes, scales, slots,
    N, K, SCALES_HIGH, SCALES_WIDE,
    FORM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """d_gate_up [n 2K] in sorted order, codes [E 2K N ..] -> slots [n N]."""
    blocks = tl.cdiv(N, COLUMNS)
    pid = tl.program_id(0)
    e, place, inside = tile_of(tile_expert, tile_row, ends, pid // blocks, ROWS)
    if e < 0:
        return
    e = e.to(tl.int64)
    column0 = (pid % blocks) * COLUMNS
    column = column0 + tl.arange(0, COLUMNS)
    d_at = d_gate_up + place.to(tl.int64)[None, :] * 2 * K
    codes += e * 2 * K * (N // 2 if FORM == "fp4" else N)
    scales += e * SCALES_HIGH * SCALES_WIDE
    acc = tl.zeros((COLUMNS, ROWS), tl.float32)
    # acc = gate^T dgate + up^T dup
    for k0 in tl.range(0, K, DEPTH, num_stages=STAGES):
        k = k0 + tl.arange(0, DEPTH)[:, None]
        d_gate = tl.load(d_at + k) if EVEN else tl.load(d_at + k, mask=k < K, other=0.0)
        d_up = tl.load(d_at + K + k) if EVEN else tl.load(d_at + K + k, mask=k < K, other=0.0)
        if WIDEN:
            d_gate, d_up = d_gate.to(tl.float32), d_up.to(tl.float32)
        acc = multiply_transposed(
            acc, codes, scales, d_gate, k0, 0, K, k0 // 128, column0, N, SCALES_WIDE, FORM, COLUMNS, DEPTH, WIDEN,
        )  # fmt: skip
        acc = multiply_transposed(
            acc, codes, scales, d_up, K + k0, K, 2 * K, SCALES_HIGH // 2 + k0 // 128, column0, N, SCALES_WIDE,
            FORM, COLUMNS, DEPTH, WIDEN,
        )  # fmt: skip
    slot = tl.load(order + place)
    at = slots + slot.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(at, tl.trans(acc).to(slots.dtype.element_ty), mask=inside[:, None] & (column < N)[None, :])


def run(
    v: Tensor, x: Tensor, indices: Tensor, weights: Tensor, valid: Tensor | None, bank: Stored, limit: float, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """v [t H] float32, the rest as in `_grouped_experts_triton.run`.

    Returns:
        (dx [t H] float32, dweights [t k] float32; with `keep`, what the gradient of a dense bank is made of, in sorted order: gradients
        of gate and up [n 2I], neurons [n I]; without, empty).
    """
    arch, form = architecture(x.device), bank.form
    width, inner, slot_count, top_k = x.shape[1], bank.first.shape[1] // 2, weights.numel(), weights.shape[1]
    kept = torch.empty(slot_count if keep else 0, inner, dtype=x.dtype, device=x.device)
    if slot_count == 0:
        none = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        return none, torch.zeros_like(weights), torch.empty(0, 2 * inner, dtype=x.dtype, device=x.device), kept
    rows = tile_rows(arch, form, slot_count / bank.num_experts)
    down, up = LAUNCH[arch, form, rows]
    order, *tiles = groups(indices, valid, bank.num_experts, rows)
    apart = gate_up(x, order, tiles, top_k, bank, limit, form, rows, apart=True, tile=AGAIN.get((arch, form, rows)))
    d_gate_up = torch.empty_like(apart)
    shares = torch.zeros(triton.cdiv(inner, down.columns), slot_count, dtype=torch.float32, device=x.device)
    shared = dict(FORM=form, ROWS=rows, WIDEN=widens(x, arch, "dense"))
    through_down[grid(tiles, down, inner)](
        v.to(x.dtype), order, weights, *tiles, *as_bytes(bank.second, bank.second_scale), apart, d_gate_up, kept, shares,
        limit, top_k, slot_count, inner, width, *grid_of_scales(bank.second_scale),
        KEEP=keep, **shared, **launch_options(down, width),
    )  # fmt: skip
    slots = torch.empty(slot_count, width, dtype=x.dtype, device=x.device)
    through_gate_up[grid(tiles, up, width)](
        d_gate_up, order, *tiles, *as_bytes(bank.first, bank.first_scale), slots,
        width, inner, *grid_of_scales(bank.first_scale), **shared, **launch_options(up, inner),
    )  # fmt: skip
    return sum_of(slots, valid, weights.shape), shares.sum(0).view(weights.shape), d_gate_up if keep else d_gate_up[:0], kept
