"""Device code of the routed experts, and the launch table; dsv4.kernels.grouped_experts checks the
arguments. L is the clamp's limit, p a place in the order sorted by expert, s a slot, t a token.

    expert_gate_up   neurons[p] = silu(min(g, L)) * clamp(u, -L, L), (g, u) = W_e . x[t]
    expert_down      slots[s]   = weight[s] * (down_e . neurons[p])
    sum_slots        out[t]     = slots[t k] + slots[t k + 1] + ... in this order

A program owns one tile of a group's rows (never two groups) and a tile of output columns; the products
are those of dsv4.kernels._products_triton. Addresses are int64 wherever an expert or a slot enters.
"""

import functools
from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels._device_triton import INTERPRETER, architecture
from dsv4.kernels._products_triton import OF_CODES, Tile, as_bytes, launch_options, multiply, quantize_rows, swiglu, widens
from dsv4.kernels._route_triton import groups
from dsv4.kernels.grouped_experts import Stored
from dsv4.kernels.routing import FEW_ROWS

# (architecture, form of the weights, rows of a tile) -> (gate and up, down). A depth divides FP8's
# 128 columns. sm_80 has no E4M3.
LAUNCH: Mapping[tuple[str, str, int], tuple[Tile, Tile]] = {
    ("sm_90", "dense", 16): (Tile(64, 128, 4, 3), Tile(128, 128, 4, 3)),
    ("sm_90", "dense", 64): (Tile(64, 64, 4, 4), Tile(128, 64, 4, 4)),
    ("sm_90", "dense", 128): (Tile(128, 64, 8, 4), Tile(256, 64, 8, 3)),
    ("sm_90", "fp8", 16): (Tile(64, 128, 4, 4), Tile(128, 128, 4, 4)),
    ("sm_90", "fp8", 64): (Tile(64, 128, 4, 4), Tile(128, 64, 4, 4)),
    ("sm_90", "fp8", 128): (Tile(128, 64, 8, 4), Tile(128, 128, 8, 4)),
    ("sm_90", "fp8 x fp8", 16): (Tile(64, 128, 4, 4), Tile(128, 128, 4, 4)),
    ("sm_90", "fp8 x fp8", 64): (Tile(64, 128, 4, 4), Tile(128, 128, 4, 4)),
    ("sm_90", "fp8 x fp8", 128): (Tile(64, 128, 8, 4), Tile(128, 128, 8, 4)),
    ("sm_90", "fp4", 16): (Tile(64, 128, 4, 4), Tile(128, 128, 4, 4)),
    ("sm_90", "fp4", 64): (Tile(64, 128, 4, 4), Tile(128, 128, 4, 4)),
    ("sm_90", "fp4", 128): (Tile(128, 128, 8, 3), Tile(128, 128, 8, 4)),
    ("sm_100", "dense", 16): (Tile(64, 128, 4, 3), Tile(128, 128, 4, 3)),
    ("sm_100", "dense", 64): (Tile(64, 64, 4, 4), Tile(128, 64, 4, 4)),
    ("sm_100", "dense", 128): (Tile(128, 64, 8, 3), Tile(128, 64, 8, 4)),
    ("sm_100", "fp8", 16): (Tile(64, 128, 4, 4), Tile(128, 128, 4, 4)),
    ("sm_100", "fp8", 64): (Tile(64, 64, 4, 4), Tile(128, 64, 4, 4)),
    ("sm_100", "fp8", 128): (Tile(128, 64, 8, 4), Tile(128, 64, 8, 4)),
    ("sm_100", "fp8 x fp8", 16): (Tile(64, 128, 4, 4), Tile(128, 128, 4, 4)),
    ("sm_100", "fp8 x fp8", 64): (Tile(64, 128, 4, 4), Tile(128, 128, 4, 4)),
    ("sm_100", "fp8 x fp8", 128): (Tile(64, 128, 8, 4), Tile(64, 128, 8, 4)),
    ("sm_100", "fp4", 16): (Tile(64, 128, 4, 3), Tile(128, 128, 4, 3)),
    ("sm_100", "fp4", 64): (Tile(64, 128, 4, 3), Tile(128, 128, 4, 3)),
    ("sm_100", "fp4", 128): (Tile(128, 64, 8, 3), Tile(128, 128, 8, 3)),
    ("sm_80", "dense", 16): (Tile(64, 64, 4, 4), Tile(128, 64, 4, 4)),
    ("sm_80", "dense", 64): (Tile(64, 64, 4, 3), Tile(128, 64, 4, 3)),
    ("sm_80", "fp4", 16): (Tile(64, 128, 4, 3), Tile(128, 128, 4, 3)),
    ("sm_80", "fp4", 64): (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3)),
    **{(INTERPRETER, form, 16): (Tile(64, 64, 1, 1), Tile(64, 64, 1, 1)) for form in ("dense", "fp8", "fp8 x fp8", "fp4")},
}
SUM_COLUMNS = 1024


@triton.jit
def tile_of(tile_expert, tile_row, ends, pid, ROWS: tl.constexpr):
    """Expert of a tile (-1: none), its sorted rows, the last one repeated past the group's end, and
    which of them are the group's.
    """
    e = tl.load(tile_expert + pid)
    first = tl.load(tile_row + pid)
    last = tl.load(ends + tl.maximum(e, 0))
    place = first + tl.arange(0, ROWS)
    return e, tl.minimum(place, last - 1), place < last


@triton.jit
def expert_gate_up(
    x, x_scales, order, tile_expert, tile_row, ends, codes, scales, neurons, limit, top_k,
    N, K, SCALES_HIGH, SCALES_WIDE,
    FORM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """x [t K], codes [E 2N ..], scales [E SCALES_HIGH SCALES_WIDE] -> neurons [n N], sorted; APART: gate beside up [n 2N]."""
    blocks = tl.cdiv(N, COLUMNS)
    pid = tl.program_id(0)
    e, place, inside = tile_of(tile_expert, tile_row, ends, pid // blocks, ROWS)
    if e < 0:
        return
    e = e.to(tl.int64)
    column = (pid % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.minimum(column, N - 1)
    token = (tl.load(order + place) // top_k).to(tl.int64)
    x_at = x + token[None, :] * K
    codes += e * 2 * N * (K // 2 if FORM == "fp4" else K)
    scales += e * SCALES_HIGH * SCALES_WIDE
    gate = tl.zeros((COLUMNS, ROWS), tl.float32)
    up = tl.zeros((COLUMNS, ROWS), tl.float32)
    # gate, up = W[gate rows] x, W[up rows] x
    for k0 in tl.range(0, K, DEPTH, num_stages=STAGES):
        k = k0 + tl.arange(0, DEPTH)[:, None]
        x_t = tl.load(x_at + k) if EVEN else tl.load(x_at + k, mask=k < K, other=0.0)
        x_scale = token
        if FORM == "fp8 x fp8":
            x_scale = tl.load(x_scales + token * tl.cdiv(K, 128) + k0 // 128)
        if WIDEN:
            x_t = x_t.to(tl.float32)
        gate = multiply(
            gate, codes, scales, x_t, x_scale, row, row // 128, k0,
            K, SCALES_WIDE, FORM, COLUMNS, DEPTH, EVEN, WIDEN,
        )  # fmt: skip
        up = multiply(
            up, codes, scales, x_t, x_scale, N + row, SCALES_HIGH // 2 + row // 128, k0,
            K, SCALES_WIDE, FORM, COLUMNS, DEPTH, EVEN, WIDEN,
        )  # fmt: skip
    mask = inside[:, None] & (column < N)[None, :]
    if APART:
        # What the clamps cut stays beyond the limit when it is rounded: no gradient passes there.
        gate = tl.where(gate > limit, 2 * limit, gate)
        up = tl.where(up > limit, 2 * limit, tl.where(up < -limit, -2 * limit, up))
        at = neurons + place.to(tl.int64)[:, None] * 2 * N + column[None, :]
        tl.store(at, tl.trans(gate).to(neurons.dtype.element_ty), mask=mask)
        tl.store(at + N, tl.trans(up).to(neurons.dtype.element_ty), mask=mask)
    else:
        at = neurons + place.to(tl.int64)[:, None] * N + column[None, :]
        tl.store(at, tl.trans(swiglu(gate, up, limit)).to(neurons.dtype.element_ty), mask=mask)


@triton.jit
def expert_down(
    neurons, x_scales, order, weights, tile_expert, tile_row, ends, codes, scales, slots,
    N, K, SCALES_HIGH, SCALES_WIDE,
    FORM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """neurons [n K] in sorted order, codes [E N ..], weights [n] by slot -> slots [n N]."""
    blocks = tl.cdiv(N, COLUMNS)
    pid = tl.program_id(0)
    e, place, inside = tile_of(tile_expert, tile_row, ends, pid // blocks, ROWS)
    if e < 0:
        return
    e = e.to(tl.int64)
    column = (pid % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.minimum(column, N - 1)
    x_at = neurons + place.to(tl.int64)[None, :] * K
    codes += e * N * (K // 2 if FORM == "fp4" else K)
    scales += e * SCALES_HIGH * SCALES_WIDE
    acc = tl.zeros((COLUMNS, ROWS), tl.float32)
    # acc = W x
    for k0 in tl.range(0, K, DEPTH, num_stages=STAGES):
        k = k0 + tl.arange(0, DEPTH)[:, None]
        x_t = tl.load(x_at + k) if EVEN else tl.load(x_at + k, mask=k < K, other=0.0)
        x_scale = place
        if FORM == "fp8 x fp8":
            x_scale = tl.load(x_scales + place.to(tl.int64) * tl.cdiv(K, 128) + k0 // 128)
        if WIDEN:
            x_t = x_t.to(tl.float32)
        acc = multiply(
            acc, codes, scales, x_t, x_scale, row, row // 128, k0,
            K, SCALES_WIDE, FORM, COLUMNS, DEPTH, EVEN, WIDEN,
        )  # fmt: skip
    slot = tl.load(order + place)
    value = tl.trans(acc * tl.load(weights + slot)[None, :])
    at = slots + slot.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(at, value.to(slots.dtype.element_ty), mask=inside[:, None] & (column < N)[None, :])


@triton.jit
def sum_slots(slots, valid, out, top_k, N, COLUMNS: tl.constexpr, MASKED: tl.constexpr):
    """slots [t k N] -> out [t N] float32, zeros for a token that is not valid."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.program_id(0).to(tl.int64)
    at = slots + token * top_k * N + column
    read = column < N
    if MASKED:
        read = tl.where(tl.load(valid + token) != 0, column, N) < N
    total = tl.zeros((COLUMNS,), tl.float32)
    for j in range(top_k):
        total += tl.load(at + j * N, mask=read, other=0.0).to(tl.float32)
    tl.store(out + token * N + column, total, mask=column < N)


def refusal(device: torch.device, form: str) -> str | None:
    """None where there are tiles for a product of this form, else a sentence."""
    arch = architecture(device)
    return None if _row_sizes(arch, form) else f"there are no tiles for {form} experts on {arch}"


@functools.cache
def _row_sizes(arch: str, form: str) -> list[int]:
    return sorted(rows for at, of, rows in LAUNCH if (at, of) == (arch, form))


def tile_rows(arch: str, form: str, mean: float) -> int:
    """Rows of a tile: the fewest that hold the mean group, or the most there are."""
    sizes = _row_sizes(arch, form)
    return next((rows for rows in sizes if mean <= rows), sizes[-1])


def run(x: Tensor, indices: Tensor, weights: Tensor, valid: Tensor | None, bank: Stored, limit: float, deployed: bool) -> Tensor:
    """x [t H], indices [t k], weights [t k] float32, valid [t] or None -> [t H] float32.

    Everything contiguous. Four launches (a sort in place of the first for very many slots), whose
    sizes come from shapes alone; two more where activations are quantised.
    """
    if weights.numel() == 0:
        return torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return sum_of(weighted_slots(x, indices, weights, valid, bank, limit, deployed), valid, weights.shape)


def weighted_slots(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    valid: Tensor | None,
    bank: Stored,
    limit: float,
    deployed: bool,
    sorted_slots: Sequence[Tensor] | None = None,
) -> Tensor:
    """As `run` -> [t*k H] of x's dtype, those of tokens that are not valid undefined. sorted_slots: in tiles of FEW_ROWS, a launch less."""
    arch, form = architecture(x.device), OF_CODES[bank.form] if deployed else bank.form
    width = x.shape[1]
    inner, slot_count = bank.first.shape[1] // 2, weights.numel()
    rows = FEW_ROWS if sorted_slots else tile_rows(arch, form, slot_count / bank.num_experts)
    second = LAUNCH[arch, form, rows][1]
    order, *tiles = sorted_slots or groups(indices, valid, bank.num_experts, rows)
    neurons = gate_up(x, order, tiles, weights.shape[1], bank, limit, form, rows, apart=False)
    slots = torch.empty(slot_count, width, dtype=x.dtype, device=x.device)
    expert_down[grid(tiles, second, width)](
        *as_read(neurons, form), order, weights, *tiles, *as_bytes(bank.second, bank.second_scale), slots,
        width, inner, *grid_of_scales(bank.second_scale),
        FORM=form, ROWS=rows, WIDEN=widens(x, arch, form), **launch_options(second, inner),
    )  # fmt: skip
    return slots


def gate_up(
    x: Tensor,
    order: Tensor,
    tiles: list[Tensor],
    top_k: int,
    bank: Stored,
    limit: float,
    form: str,
    rows: int,
    *,
    apart: bool,
    tile: Tile | None = None,
) -> Tensor:
    """-> neurons [n I] in sorted order, or gate beside up [n 2I] before the clamps (where these cut, twice the limit). tile: LAUNCH's."""
    arch, width, inner = architecture(x.device), x.shape[1], bank.first.shape[1] // 2
    tile = tile or LAUNCH[arch, form, rows][0]
    out = torch.empty(len(order), inner * (2 if apart else 1), dtype=x.dtype, device=x.device)
    expert_gate_up[grid(tiles, tile, inner)](
        *as_read(x, form), order, *tiles, *as_bytes(bank.first, bank.first_scale), out, limit, top_k,
        inner, width, *grid_of_scales(bank.first_scale),
        FORM=form, ROWS=rows, WIDEN=widens(x, arch, form), APART=apart, **launch_options(tile, width),
    )  # fmt: skip
    return out


def sum_of(slots: Tensor, valid: Tensor | None, shape: torch.Size) -> Tensor:
    """slots [t*k N], shape [t k] -> [t N] float32."""
    (tokens, top_k), width = shape, slots.shape[1]
    out = torch.empty(tokens, width, dtype=torch.float32, device=slots.device)
    sum_slots[(tokens, triton.cdiv(width, SUM_COLUMNS))](
        slots,
        out if valid is None else valid.view(torch.uint8),
        out,
        top_k,
        width,
        COLUMNS=SUM_COLUMNS,
        MASKED=valid is not None,
        enable_fp_fusion=True,
    )
    return out


def as_read(x: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """Rows as a product of this form reads them: themselves (twice, once unread), or codes and scales."""
    return quantize_rows(x) if form in OF_CODES.values() else (x, x)


def grid(tiles: list[Tensor], tile: Tile, columns: int) -> tuple[int]:
    return (tiles[0].shape[0] * triton.cdiv(columns, tile.columns),)


def grid_of_scales(scale: Tensor | None) -> tuple[int, int]:
    return (0, 0) if scale is None else tuple(scale.shape[1:])
