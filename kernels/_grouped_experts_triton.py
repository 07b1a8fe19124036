"""Device code of the routed experts, and the launch table; dsv4.kernels.grouped_experts checks the
arguments. L is the clamp's limit, p a place in the order sorted by expert, s a slot, t a token.

    expert_gate_up   neurons[p] = silu(min(g, L)) * clamp(u, -L, L), (g, u) = W_e . x[t]
    expert_down      slots[s]   = weight[s] * (down_e . neurons[p])
    sum_slots        out[t]     = slots[t k] + slots[t k + 1] + ... in this order

A program owns one tile of a group's rows (never two groups) and a tile of output columns. Products
are transposed, weights on the left: a tensor core wants 64 rows there, which decoding one token has
only on the side of the weights, and stored codes are then widened in registers on their way to it:
FP8 codes times scale to the nearest bfloat16, FP4 codes times scale exactly. Addresses are int64
wherever an expert or a slot enters.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from dsv4.kernels._device_triton import INTERPRETER, architecture
from dsv4.kernels._route_triton import groups
from dsv4.kernels.grouped_experts import Stored


@dataclass(frozen=True)
class Tile:
    """How one product is launched: output columns and inner depth of a program, warps, loads in
    flight.
    """

    columns: int
    depth: int
    warps: int
    stages: int


# (architecture, form of the weights, rows of a tile) -> (gate and up, down). A depth divides FP8's
# 128 columns. sm_80 has no E4M3.
LAUNCH: Mapping[tuple[str, str, int], tuple[Tile, Tile]] = {
    ("sm_90", "dense", 16): (Tile(64, 128, 4, 3), Tile(128, 128, 4, 3)),
    ("sm_90", "dense", 64): (Tile(64, 64, 4, 4), Tile(128, 64, 4, 4)),
    ("sm_90", "dense", 128): (Tile(128, 64, 8, 4), Tile(256, 64, 8, 3)),
    ("sm_90", "fp8", 16): (Tile(64, 128, 4, 4), Tile(128, 128, 4, 4)),
    ("sm_90", "fp8", 64): (Tile(64, 128, 4, 4), Tile(128, 64, 4, 4)),
    ("sm_90", "fp8", 128): (Tile(128, 64, 8, 4), Tile(128, 128, 8, 4)),
    ("sm_90", "fp4", 16): (Tile(64, 128, 4, 4), Tile(128, 128, 4, 4)),
    ("sm_90", "fp4", 64): (Tile(64, 128, 4, 4), Tile(128, 128, 4, 4)),
    ("sm_90", "fp4", 128): (Tile(128, 128, 8, 3), Tile(128, 128, 8, 4)),
    ("sm_100", "dense", 16): (Tile(64, 128, 4, 3), Tile(128, 128, 4, 3)),
    ("sm_100", "dense", 64): (Tile(64, 64, 4, 4), Tile(128, 64, 4, 4)),
    ("sm_100", "dense", 128): (Tile(128, 64, 8, 3), Tile(128, 64, 8, 4)),
    ("sm_100", "fp8", 16): (Tile(64, 128, 4, 4), Tile(128, 128, 4, 4)),
    ("sm_100", "fp8", 64): (Tile(64, 64, 4, 4), Tile(128, 64, 4, 4)),
    ("sm_100", "fp8", 128): (Tile(128, 64, 8, 4), Tile(128, 64, 8, 4)),
    ("sm_100", "fp4", 16): (Tile(64, 128, 4, 3), Tile(128, 128, 4, 3)),
    ("sm_100", "fp4", 64): (Tile(64, 128, 4, 3), Tile(128, 128, 4, 3)),
    ("sm_100", "fp4", 128): (Tile(128, 64, 8, 3), Tile(128, 128, 8, 3)),
    ("sm_80", "dense", 16): (Tile(64, 64, 4, 4), Tile(128, 64, 4, 4)),
    ("sm_80", "dense", 64): (Tile(64, 64, 4, 3), Tile(128, 64, 4, 3)),
    ("sm_80", "fp4", 16): (Tile(64, 128, 4, 3), Tile(128, 128, 4, 3)),
    ("sm_80", "fp4", 64): (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3)),
    **{(INTERPRETER, form, 16): (Tile(64, 64, 1, 1), Tile(64, 64, 1, 1)) for form in ("dense", "fp8", "fp4")},
}
SUM_COLUMNS = 1024


@triton.jit
def _e8m0(byte):
    """Scale byte -> 2^(byte - 127) in float32, with the subnormal of byte 0 and the NaN of 255."""
    byte = byte.to(tl.int32)
    bits = tl.where(byte == 0, 1 << 22, tl.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _scale(pointers):
    value = tl.load(pointers)
    if value.dtype == tl.uint8:
        return _e8m0(value)
    else:
        return value


@triton.jit
def _e2m1(code):
    """4-bit code, low in an int32 -> float32, exact: its fields move up, the bias follows."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _fp4(packed, scale, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """Bytes [COLUMNS, DEPTH / 2], scales [COLUMNS, DEPTH / 32] -> [COLUMNS, DEPTH] float32; the low
    nibble is the even column.
    """
    code = packed.to(tl.int32)
    pairs = tl.join(_e2m1(code), _e2m1(code >> 4))
    blocks = tl.reshape(pairs, (COLUMNS, DEPTH // 32, 32)) * scale[:, :, None]
    return tl.reshape(blocks, (COLUMNS, DEPTH))


@triton.jit
def _multiply(
    acc, codes, scales, x, row, block_row, k0, K, SCALES_WIDE,
    FORM: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    EVEN: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """acc [COLUMNS, ROWS] += W[row, k0 : k0 + DEPTH] x [DEPTH, ROWS], of one expert."""
    if FORM == "fp4":
        half = k0 // 2 + tl.arange(0, DEPTH // 2)
        fours = k0 // 32 + tl.arange(0, DEPTH // 32)
        at = codes + row[:, None] * (K // 2) + half[None, :]
        scale_at = scales + row[:, None] * SCALES_WIDE + fours[None, :]
        if EVEN:
            packed, scale = tl.load(at), tl.load(scale_at)
        else:
            packed = tl.load(at, mask=half[None, :] < K // 2, other=0)
            scale = tl.load(scale_at, mask=fours[None, :] < SCALES_WIDE, other=127)
        if WIDEN:
            return tl.dot(_fp4(packed, _e8m0(scale), COLUMNS, DEPTH), x, acc, input_precision="ieee")
        else:
            return tl.dot_scaled(packed, scale, "e2m1", x, None, "bf16", acc)
    else:
        k = k0 + tl.arange(0, DEPTH)
        at = codes + row[:, None] * K + k[None, :]
        w = tl.load(at) if EVEN else tl.load(at, mask=k[None, :] < K, other=0.0)
        if FORM == "dense":
            if WIDEN:
                return tl.dot(w.to(tl.float32), x, acc, input_precision="ieee")
            else:
                return tl.dot(w, x, acc)
        else:
            scale = _scale(scales + block_row * SCALES_WIDE + k0 // 128)[:, None]
            w = w.to(tl.float32) * scale
            if WIDEN:
                return tl.dot(w, x, acc, input_precision="ieee")
            else:
                return tl.dot(w.to(tl.bfloat16), x, acc)


@triton.jit
def _tile(tile_expert, tile_row, ends, pid, ROWS: tl.constexpr):
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
    x, order, tile_expert, tile_row, ends, codes, scales, neurons, limit, top_k,
    N, K, SCALES_HIGH, SCALES_WIDE,
    FORM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """x [t K], codes [E 2N ..], scales [E SCALES_HIGH SCALES_WIDE] -> neurons [n N], sorted."""
    blocks = tl.cdiv(N, COLUMNS)
    pid = tl.program_id(0)
    e, place, inside = _tile(tile_expert, tile_row, ends, pid // blocks, ROWS)
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
        if WIDEN:
            x_t = x_t.to(tl.float32)
        gate = _multiply(
            gate, codes, scales, x_t, row, row // 128, k0,
            K, SCALES_WIDE, FORM, COLUMNS, DEPTH, EVEN, WIDEN,
        )  # fmt: skip
        up = _multiply(
            up, codes, scales, x_t, N + row, SCALES_HIGH // 2 + row // 128, k0,
            K, SCALES_WIDE, FORM, COLUMNS, DEPTH, EVEN, WIDEN,
        )  # fmt: skip
    # Comparisons, not minimum: NaN goes through.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    value = tl.trans(gate / (1.0 + tl.exp(-gate)) * up)
    at = neurons + place.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(at, value.to(neurons.dtype.element_ty), mask=inside[:, None] & (column < N)[None, :])


@triton.jit
def expert_down(
    neurons, order, weights, tile_expert, tile_row, ends, codes, scales, slots,
    N, K, SCALES_HIGH, SCALES_WIDE,
    FORM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """neurons [n K] in sorted order, codes [E N ..], weights [n] by slot -> slots [n N]."""
    blocks = tl.cdiv(N, COLUMNS)
    pid = tl.program_id(0)
    e, place, inside = _tile(tile_expert, tile_row, ends, pid // blocks, ROWS)
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
        if WIDEN:
            x_t = x_t.to(tl.float32)
        acc = _multiply(
            acc, codes, scales, x_t, row, row // 128, k0,
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
    """None where there are tiles for weights of this form, else a sentence."""
    arch = architecture(device)
    return None if _row_sizes(arch, form) else f"there are no tiles for {form} experts on {arch}"


@functools.cache
def _row_sizes(arch: str, form: str) -> list[int]:
    return sorted(rows for at, of, rows in LAUNCH if (at, of) == (arch, form))


def tile_rows(arch: str, form: str, mean: float) -> int:
    """Rows of a tile: the fewest that hold the mean group, or the most there are."""
    sizes = _row_sizes(arch, form)
    return next((rows for rows in sizes if mean <= rows), sizes[-1])


def run(x: Tensor, indices: Tensor, weights: Tensor, valid: Tensor | None, bank: Stored, limit: float) -> Tensor:
    """x [t H], indices [t k], weights [t k] float32, valid [t] or None -> [t H] float32.

    Everything contiguous. Four launches (a sort in place of the first for very many slots), whose
    sizes come from shapes alone.
    """
    arch, form = architecture(x.device), bank.form
    tokens, width = x.shape
    top_k, inner, slot_count = weights.shape[1], bank.first.shape[1] // 2, weights.numel()
    out = torch.empty(tokens, width, dtype=torch.float32, device=x.device)
    if slot_count == 0:
        return out.zero_()
    rows = tile_rows(arch, form, slot_count / bank.num_experts)
    first, second = LAUNCH[arch, form, rows]
    order, *tiles = groups(indices, valid, bank.num_experts, rows)
    # The interpreter multiplies no bfloat16 but in dot_scaled, which Triton 3.7's does not have.
    scaled = form == "fp4" and hasattr(InterpreterBuilder, "create_dot_scaled")
    widen = x.dtype == torch.float32 or (arch == INTERPRETER and not scaled)
    shared = dict(FORM=form, ROWS=rows, WIDEN=widen)
    neurons = torch.empty(slot_count, inner, dtype=x.dtype, device=x.device)
    slots = torch.empty(slot_count, width, dtype=x.dtype, device=x.device)
    expert_gate_up[_grid(tiles, first, inner)](
        x, order, *tiles, *_codes(bank.first, bank.first_scale), neurons, limit, top_k,
        inner, width, *_grid_of_scales(bank.first_scale), **shared, **launch_options(first, width),
    )  # fmt: skip
    expert_down[_grid(tiles, second, width)](
        neurons, order, weights, *tiles, *_codes(bank.second, bank.second_scale), slots,
        width, inner, *_grid_of_scales(bank.second_scale),
        **shared, **launch_options(second, inner),
    )  # fmt: skip
    sum_slots[(tokens, triton.cdiv(width, SUM_COLUMNS))](
        slots,
        order if valid is None else valid.view(torch.uint8),
        out,
        top_k,
        width,
        COLUMNS=SUM_COLUMNS,
        MASKED=valid is not None,
        enable_fp_fusion=True,
    )
    return out


def _grid(tiles: list[Tensor], tile: Tile, columns: int) -> tuple[int]:
    return (tiles[0].shape[0] * triton.cdiv(columns, tile.columns),)


def launch_options(tile: Tile, depth: int) -> dict:
    sizes = dict(COLUMNS=tile.columns, DEPTH=tile.depth, STAGES=tile.stages, EVEN=depth % tile.depth == 0)
    # Fused multiply-adds by request: the default of Triton changes with its version.
    return dict(**sizes, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True)


def _codes(codes: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Packed codes and E8M0 scales as bytes; without scales the codes stand in for them, unread."""
    scale = codes if scale is None else scale.contiguous()
    return tuple(t.view(torch.uint8) if t.dtype in (torch.int8, torch.float8_e8m0fnu) else t for t in (codes, scale))


def _grid_of_scales(scale: Tensor | None) -> tuple[int, int]:
    return (0, 0) if scale is None else tuple(scale.shape[1:])
