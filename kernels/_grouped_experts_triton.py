"""Device code of the routed experts, and the launch table. Called from dsv4.kernels.grouped_experts, which checks the arguments.

    expert_gate_up   neurons[p] = silu(min(g, L)) * clamp(u, -L, L),  g, u = gate_e . x[token], up_e . x[token]     p: sorted slot
    expert_down      slots[s]   = weight[s] * (down_e . neurons[p])                                                 s: slot
    sum_slots        out[t]     = slots[t k] + slots[t k + 1] + ...                                                 in slot order

A program owns one tile of a group's rows (never two groups) and a tile of output columns. Products are transposed, weights on the
left: a tensor core wants 64 rows there, which decoding one token has only on the side of the weights, and stored codes are then
widened in registers on their way to it. Dense weights and FP8 codes multiply as they are, FP8's block scale goes onto each
block's product in float32; FP4 codes with their scales are bfloat16 exactly. Addresses are int64 wherever an expert or a slot enters.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

FP8_BLOCK = tl.constexpr(128)
FP4_BLOCK = tl.constexpr(32)


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
    """4-bit code in the low bits of an int32 -> its value in float32, exact: exponent and mantissa fields move up, the bias follows."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _fp4(packed, scale, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """[COLUMNS, DEPTH / 2] bytes, [COLUMNS, DEPTH / 32] scales in float32 -> [COLUMNS, DEPTH] float32; the low nibble is the even column."""
    code = packed.to(tl.int32)
    pairs = tl.join(_e2m1(code), _e2m1(code >> 4))
    blocks = tl.reshape(pairs, (COLUMNS, DEPTH // 32, 32)) * scale[:, :, None]
    return tl.reshape(blocks, (COLUMNS, DEPTH))


@triton.jit
def _multiply(acc, codes, scales, x, row, block_row, k0, K, SCALES_WIDE, FORM: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
              EVEN: tl.constexpr, WIDEN: tl.constexpr):
    """acc [COLUMNS, ROWS] += W[row, k0 : k0 + DEPTH] x [DEPTH, ROWS], for one expert's codes and scales."""
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
            if WIDEN:
                return acc + tl.dot(w.to(tl.float32), x, input_precision="ieee") * scale
            else:
                return acc + tl.dot(w.to(tl.bfloat16), x) * scale


@triton.jit
def _tile(tile_expert, tile_row, ends, pid, ROWS: tl.constexpr):
    """Expert of a tile (-1: none), its sorted rows, the last one repeated past the group's end, and which of them are the group's."""
    e = tl.load(tile_expert + pid)
    first = tl.load(tile_row + pid)
    last = tl.load(ends + tl.maximum(e, 0))
    place = first + tl.arange(0, ROWS)
    return e, tl.minimum(place, last - 1), place < last


@triton.jit
def expert_gate_up(x, order, tile_expert, tile_row, ends, codes, scales, neurons, limit, top_k, N, K, SCALES_HIGH, SCALES_WIDE,
                   FORM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
                   EVEN: tl.constexpr, WIDEN: tl.constexpr):
    """x [t K], codes [E 2N ..], scales [E SCALES_HIGH SCALES_WIDE] -> neurons [n N] in sorted order."""
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
        gate = _multiply(gate, codes, scales, x_t, row, row // 128, k0, K, SCALES_WIDE, FORM, COLUMNS, DEPTH, EVEN, WIDEN)
        up = _multiply(up, codes, scales, x_t, N + row, SCALES_HIGH // 2 + row // 128, k0, K, SCALES_WIDE, FORM, COLUMNS, DEPTH, EVEN, WIDEN)
    # Comparisons, not minimum: NaN goes through.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    value = tl.trans(gate / (1.0 + tl.exp(-gate)) * up)
    at = neurons + place.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(at, value.to(neurons.dtype.element_ty), mask=inside[:, None] & (column < N)[None, :])


@triton.jit
def expert_down(neurons, order, weights, tile_expert, tile_row, ends, codes, scales, slots, N, K, SCALES_HIGH, SCALES_WIDE,
                FORM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
                EVEN: tl.constexpr, WIDEN: tl.constexpr):
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
        acc = _multiply(acc, codes, scales, x_t, row, row // 128, k0, K, SCALES_WIDE, FORM, COLUMNS, DEPTH, EVEN, WIDEN)
    slot = tl.load(order + place)
    value = tl.trans(acc * tl.load(weights + slot)[None, :])
    at = slots + slot.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(at, value.to(slots.dtype.element_ty), mask=inside[:, None] & (column < N)[None, :])


@triton.jit
def sum_slots(slots, out, top_k, N, COLUMNS: tl.constexpr):
    """slots [t k N] -> out [t N] float32."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.program_id(0).to(tl.int64)
    at = slots + token * top_k * N + column
    total = tl.zeros((COLUMNS,), tl.float32)
    for j in range(top_k):
        total += tl.load(at + j * N, mask=column < N, other=0.0).to(tl.float32)
    tl.store(out + token * N + column, total, mask=column < N)
