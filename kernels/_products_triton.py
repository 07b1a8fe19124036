"""What device code of linear maps shares: products with weights as they are stored, SwiGLU, FP8 activations.

    multiply              acc += W[row, k : k + DEPTH] x                 W [rows K] one matrix, or a stack of them
    multiply_transposed   acc += W[k : k + DEPTH, column]^T d

Products are transposed, weights on the left: a tensor core wants 64 rows there, which decoding one token has only on the side of
the weights, and stored codes are then widened in registers on their way to it: FP8 codes times scale to the nearest bfloat16, FP4
codes times scale exactly. FORM is "dense", "fp8", "fp4", or "fp8 x fp8": codes of weights times codes of activations, and the
scales of both once every 128 columns, in float32. WIDEN is for the interpreter, which multiplies no bfloat16.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from dsv4.kernels._device_triton import INTERPRETER

# Rows that a program of `quantize_rows` takes.
QUANTIZED_ROWS = 16
# Weights' form -> the form of the product with activations as FP8 codes.
OF_CODES = {"fp8": "fp8 x fp8"}


@dataclass(frozen=True)
class Tile:
    """How one product is launched: output columns and inner depth of a program, warps, loads in flight."""

    columns: int
    depth: int
    warps: int
    stages: int


def launch_options(tile: Tile, depth: int) -> dict:
    sizes = dict(COLUMNS=tile.columns, DEPTH=tile.depth, STAGES=tile.stages, EVEN=depth % tile.depth == 0)
    # Fused multiply-adds by request: the default of Triton changes with its version.
    return dict(**sizes, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True)


def widens(x: Tensor, arch: str, form: str) -> bool:
    """Whether factors are widened to float32 first. The interpreter multiplies no bfloat16 but in dot_scaled, which Triton 3.7's
    does not have.
    """
    scaled = form == "fp4" and hasattr(InterpreterBuilder, "create_dot_scaled")
    return x.dtype == torch.float32 or (arch == INTERPRETER and not scaled)


def as_bytes(codes: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Packed codes and E8M0 scales as bytes; without scales the codes stand in for them, unread."""
    scale = codes if scale is None else scale.contiguous()
    return tuple(t.view(torch.uint8) if t.dtype in (torch.int8, torch.float8_e8m0fnu) else t for t in (codes, scale))


@triton.jit
def _e8m0(byte):
    """Scale byte -> 2^(byte - 127) in float32, with the subnormal of byte 0 and the NaN of 255."""
    byte = byte.to(tl.int32)
    bits = tl.where(byte == 0, 1 << 22, tl.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_scale(pointers):
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
def _fp4(packed, scale, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Bytes [ROWS, WIDTH / 2], scales [ROWS, WIDTH / 32] -> [ROWS, WIDTH] float32; the low nibble is the even column."""
    code = packed.to(tl.int32)
    pairs = tl.join(_e2m1(code), _e2m1(code >> 4))
    blocks = tl.reshape(pairs, (ROWS, WIDTH // 32, 32)) * scale[:, :, None]
    return tl.reshape(blocks, (ROWS, WIDTH))


@triton.jit
def multiply(
    acc, codes, scales, x, x_scale, row, block_row, k0, K, SCALES_WIDE,
    FORM: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    EVEN: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """acc [COLUMNS, ROWS] += W[row, k0 : k0 + DEPTH] x [DEPTH, ROWS]. block_row: of FP8's grid of scales; x_scale [ROWS]: of FP8
    activations, else unread.
    """
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
            scale = load_scale(scales + block_row * SCALES_WIDE + k0 // 128)[:, None]
            if FORM == "fp8 x fp8":
                part = tl.dot(w.to(tl.float32), x, input_precision="ieee") if WIDEN else tl.dot(w, x)
                return acc + part * (scale * x_scale[None, :])
            elif WIDEN:
                return tl.dot(w.to(tl.float32) * scale, x, acc, input_precision="ieee")
            else:
                return tl.dot((w.to(tl.float32) * scale).to(tl.bfloat16), x, acc)


@triton.jit
def multiply_transposed(
    acc, codes, scales, d, row0, first, last, block_row, column0, N, SCALES_WIDE,
    FORM: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """acc [COLUMNS, ROWS] += W[row0 : row0 + DEPTH, column0 : column0 + COLUMNS]^T d [DEPTH, ROWS], W [.. N].

    Rows outside of first ... last - 1 count as zero; d is zero there. FP8: COLUMNS and DEPTH divide 128, and the tile is inside one
    block, in row block_row of the grid.
    """
    row = row0 + tl.arange(0, DEPTH)
    inside = (row >= first) & (row < last)
    row = tl.minimum(row, last - 1).to(tl.int64)
    column = column0 + tl.arange(0, COLUMNS)
    if FORM == "fp4":
        half = tl.minimum(column0 // 2 + tl.arange(0, COLUMNS // 2), N // 2 - 1)
        fours = tl.minimum(column0 // 32 + tl.arange(0, COLUMNS // 32), SCALES_WIDE - 1)
        packed = tl.load(codes + row[:, None] * (N // 2) + half[None, :])
        scale = _e8m0(tl.load(scales + row[:, None] * SCALES_WIDE + fours[None, :]))
        w = _fp4(packed, scale, DEPTH, COLUMNS)
        w = tl.where(inside[:, None], w, 0.0)
    else:
        mask = inside[:, None] & (column < N)[None, :]
        w = tl.load(codes + row[:, None] * N + column[None, :], mask=mask, other=0.0)
    part = tl.dot(tl.trans(w.to(tl.float32)), d, input_precision="ieee") if WIDEN else tl.dot(tl.trans(w.to(tl.bfloat16)), d)
    if FORM == "fp8":
        return acc + part * load_scale(scales + block_row * SCALES_WIDE + column0 // 128)
    elif FORM == "fp4":
        # Times one, or the sum would move into the product, whose parts then wait for each other on sm_90 (ptxas: C7515).
        return acc + part * (column0 >= 0).to(tl.float32)
    else:
        return acc + part


@triton.jit
def clamped(gate, up, limit):
    """Comparisons, not minimum: NaN goes through."""
    gate = tl.where(gate > limit, limit, gate)
    return gate, tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))


@triton.jit
def swiglu(gate, up, limit):
    gate, up = clamped(gate, up, limit)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def swiglu_gradient(gate, up, dn, limit):
    """float32 -> (neurons, gradients of gate and up) for dn, that of the neurons."""
    held, bound = clamped(gate, up, limit)
    sigmoid = 1.0 / (1.0 + tl.exp(-held))
    active = held * sigmoid
    d_gate = dn * bound * (sigmoid * (1.0 + held * (1.0 - sigmoid)))
    d_gate = tl.where(gate <= limit, d_gate, 0.0)
    d_up = tl.where((up <= limit) & (up >= -limit), dn * active, 0.0)
    return active * bound, d_gate, d_up


@triton.jit
def _quantize_rows(x, codes, scales, n, K, WIDE, ROWS: tl.constexpr):
    """x [n K] -> e4m3 codes, and a power of two for each 128 columns of a row, [n WIDE] float32.

    Rounded by arithmetic to what E4M3 holds, ties to even: the interpreter's conversion of the rest is not exact.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    column = block * 128 + tl.arange(0, 128)
    mask = (row < n)[:, None] & (column < K)[None, :]
    at = row.to(tl.int64)[:, None] * K + column[None, :]
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    bits = tl.abs(value).to(tl.int32, bitcast=True)
    # As integers: infinity and NaN are the largest.
    most = tl.max(bits, 1)
    # The smallest k with most <= 448 * 2^k; 448 = 1.75 * 2^8.
    power = (most >> 23) - 8 + ((most & 0x7FFFFF) > 0x600000).to(tl.int32)
    power = tl.where(most == 0, 127, tl.minimum(tl.maximum(power, 1), 253))
    scale = (power << 23).to(tl.float32, bitcast=True)
    scale = tl.where(most >= 0x7F800000, float("nan"), scale)
    inverse = ((254 - power) << 23).to(tl.float32, bitcast=True)
    shrunk = value * inverse[:, None]
    # Three bits of mantissa; below 2^-6 multiples of 2^-9, which adding 1.5 * 2^14 rounds to.
    u = shrunk.to(tl.int32, bitcast=True)
    normal = ((u + 0x7FFFF + ((u >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    small = (shrunk + 24576.0) - 24576.0
    rounded = tl.where(tl.abs(shrunk) < 0.015625, tl.abs(small), tl.abs(normal)).to(tl.int32, bitcast=True)
    # With its sign, a zero too.
    rounded = (rounded | (u & -0x80000000)).to(tl.float32, bitcast=True)
    tl.store(codes + at, rounded.to(tl.float8e4nv), mask=mask)
    tl.store(scales + row.to(tl.int64) * WIDE + block, scale, mask=row < n)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_activations` of dsv4.kernels.fp8_activations in one launch: x [n K] contiguous -> codes [n K], scales [n ceil(K/128)]."""
    n, width = x.shape
    blocks = triton.cdiv(width, 128)
    codes = torch.empty(n, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(n, blocks, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(n, QUANTIZED_ROWS), blocks)
    if n:
        _quantize_rows[grid](x, codes, scales, n, width, blocks, ROWS=QUANTIZED_ROWS, num_warps=4, enable_fp_fusion=True)
    return codes, scales
