"""Device code of maps of a few tokens: several of the same ones (`dsv4.kernels.few_linears`), or the shared expert's gate and up.

    acc[p, o, t] += W[o, k_p] z[t, k_p]          y[t, o] = sum over p of acc[p, o, t]          z = norm(x) or x

Each program makes rows of one weight, or the same rows of gate and up.

All of it is reading weights once, at the speed of memory. A step reads ROWS x PARTS * DEPTH of a weight, copied to shared memory STAGES - 1
steps ahead; the columns of a step are PARTS parts, a batch of products, so that the warps share columns where they have few rows to
share. The tensor cores take tokens in eights, which is why one token and eight cost the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels._device_triton import INTERPRETER, architecture, processors
from dsv4.kernels._products_triton import as_bytes, load_scale, swiglu

# Programs for each processor that a grid should have, so that one reads while another begins or ends.
PROGRAMS_EACH = 2
# Columns of the normed x that a program stores at a time, and columns of which it sums squares at a time.
STORED, SQUARED = 64, 1024
COUNTS = ["n"]


@dataclass(frozen=True)
class Tile:
    """Rows of a program, parts of a step's columns, columns of a part; warps, loads in flight, registers that a thread may take (left to
    itself the assembler spills to make room for more programs than shared memory has).
    """

    rows: int
    parts: int
    depth: int
    warps: int
    stages: int
    registers: int = 168


DEVICES, TOKENS = ("sm_80", "sm_90", "sm_100"), (8, 16)
# (architecture, form, tokens of a tile) -> tiles, of most rows first: the first whose grid is large enough is taken, else the last. Fewer
# rows read x more often. 8 to 16 KB of a weight a step, of which three are under way. The depth of codes divides a block's 128 columns.
LAUNCH: Mapping[tuple[str, str, int], tuple[Tile, ...]] = {
    **{
        (arch, "dense", n): (Tile(64, 4, 32, 4, 4), Tile(32, 4, 64, 4, 4), Tile(16, 8, 64, 8, 4, registers=128))
        for arch in DEVICES
        for n in TOKENS
    },
    # sm_80 has no instructions that widen E4M3.
    **{(arch, "fp8", n): (Tile(64, 4, 64, 4, 4), Tile(32, 4, 128, 4, 4), Tile(16, 4, 128, 4, 4)) for arch in DEVICES[1:] for n in TOKENS},
    **{(arch, "float32", n): (Tile(16, 4, 32, 4, 4, registers=255),) for arch in DEVICES for n in TOKENS},
    **{(INTERPRETER, form, n): (Tile(32, 2, 16, 1, 1), Tile(16, 2, 16, 1, 1)) for form in ("dense", "fp8", "float32") for n in TOKENS},
}


@triton.jit(do_not_specialize=COUNTS)
def few_linears_kernel(
    x, norm_weight, normed, weights, scales, outputs, rows, strides, n, K, eps,
    NORMS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr, TOKENS: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr, STORED: tl.constexpr, SQUARED: tl.constexpr,
):  # fmt: skip
    """x [n K]; of each weight: [rows K], its scales, its output [n rows] with rows `strides` apart. normed [n K]."""
    pid = tl.program_id(0)
    token = tl.arange(0, TOKENS)
    factor = tl.full((TOKENS,), 1.0, tl.float32)
    if NORMS:
        factor = _factor(x, token, n, K, eps, SQUARED)
        for first in range(pid * STORED, K, tl.num_programs(0) * STORED):
            column = first + tl.arange(0, STORED)
            inside = (token < n)[:, None] & (column < K)[None, :]
            at = token[:, None] * K + column[None, :]
            z = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * factor[:, None]
            z = z * tl.load(norm_weight + column, mask=column < K, other=0.0)[None, :]
            tl.store(normed + at, z.to(normed.dtype.element_ty), mask=inside)
    before = 0
    for i in tl.static_range(len(weights)):
        programs = tl.cdiv(rows[i], ROWS)
        if (pid >= before) & (pid < before + programs):
            _rows(
                x, factor, norm_weight, weights[i], scales[i], outputs[i], (pid - before) * ROWS, token, n, rows[i], strides[i], K,
                NORMS, ROWS, PARTS, DEPTH, TOKENS, STAGES, EVEN, WIDEN,
            )  # fmt: skip
        before += programs


@triton.jit
def _factor(x, token, n, K, eps, SQUARED: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of each token."""
    total = tl.zeros((token.shape[0],), tl.float32)
    for first in range(0, K, SQUARED):
        column = first + tl.arange(0, SQUARED)
        inside = (token < n)[:, None] & (column < K)[None, :]
        value = tl.load(x + token[:, None] * K + column[None, :], mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(value * value, 1)
    return tl.rsqrt(total / K + eps)


@triton.jit
def _rows(
    x, factor, norm_weight, weight, scales, out, row0, token, n, N, stride, K,
    NORMS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr, TOKENS: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """out[:, row0 : row0 + ROWS]."""
    sums = _sums(
        x, factor, norm_weight, weight, scales, row0, token, n, N, K,
        out.dtype.element_ty == tl.float32, NORMS, ROWS, PARTS, DEPTH, TOKENS, STAGES, EVEN, WIDEN,
    )  # fmt: skip
    column = row0 + tl.arange(0, ROWS)
    y = tl.trans(sums).to(out.dtype.element_ty)
    tl.store(out + token[:, None] * stride + column[None, :], y, mask=(token < n)[:, None] & (column < N)[None, :])


@triton.jit
def _sums(
    x, factor, norm_weight, weight, scales, row0, token, n, N, K,
    IN_FLOAT32: tl.constexpr, NORMS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr, TOKENS: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """[ROWS, TOKENS] of rows row0 ... of a weight; those past the last are the last one again. IN_FLOAT32: of both sides widened."""
    narrow: tl.constexpr = x.dtype.element_ty
    CODES: tl.constexpr = weight.dtype.element_ty == tl.float8e4nv
    # A code is a bfloat16, and times a power of two as well. Its scale then waits for the sum of a part, which lies in one block.
    LATER: tl.constexpr = CODES and narrow == tl.bfloat16 and (IN_FLOAT32 or scales.dtype.element_ty == tl.uint8)
    EXACT: tl.constexpr = LATER or weight.dtype.element_ty == narrow
    WIDE: tl.constexpr = narrow == tl.float32 or (IN_FLOAT32 and not EXACT)
    row = tl.minimum(row0 + tl.arange(0, ROWS), N - 1)
    w_at = weight + row.to(tl.int64)[None, :, None] * K
    x_at = x + token[None, None, :] * K
    is_token = (token < n)[None, None, :]
    own = tl.arange(0, PARTS)[:, None] * DEPTH + tl.arange(0, DEPTH)[None, :]
    acc = tl.zeros((PARTS, ROWS, TOKENS), tl.float32)
    # Which the compiler does not know.
    one = (row0 >= 0).to(tl.float32)
    # acc[p, o, t] += W[o, k_p] z[t, k_p]
    for k0 in tl.range(0, K, PARTS * DEPTH, num_stages=STAGES):
        k = k0 + own
        if EVEN:
            w = tl.load(w_at + k[:, None, :])
            z = tl.load(x_at + k[:, :, None], mask=is_token, other=0.0)
        else:
            w = tl.load(w_at + k[:, None, :], mask=(k < K)[:, None, :], other=0.0)
            z = tl.load(x_at + k[:, :, None], mask=is_token & (k < K)[:, :, None], other=0.0)
        if NORMS:
            by = tl.load(norm_weight + k) if EVEN else tl.load(norm_weight + k, mask=k < K, other=0.0)
            z = (z.to(tl.float32) * factor[None, None, :] * by[:, :, None]).to(narrow)
        if CODES:
            block = tl.minimum(k0 + tl.arange(0, PARTS) * DEPTH, K - 1) // 128
            scale = load_scale(scales + (row // 128)[None, :] * tl.cdiv(K, 128) + block[:, None])[:, :, None]
            w = w.to(tl.float32)
            if not LATER:
                w = w * scale
        if WIDE:
            acc = tl.dot(w.to(tl.float32), z.to(tl.float32), acc, input_precision="ieee")
        elif LATER or IN_FLOAT32:
            # A sum of its own for each step, and a factor that keeps it apart: a tensor core cuts off what a long sum does not hold.
            part = tl.dot(w.to(tl.float32), z.to(tl.float32), input_precision="ieee") if WIDEN else tl.dot(w.to(narrow), z)
            acc += part * scale if CODES else part * one
        elif WIDEN:
            acc = tl.dot(w.to(narrow).to(tl.float32), z.to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(w.to(narrow), z, acc)
    return tl.sum(acc, 0)


@triton.jit(do_not_specialize=COUNTS)
def few_gate_up_kernel(
    x, gate, gate_scales, up, up_scales, y, limit, n, N, K,
    ROWS: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr, TOKENS: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """y[t, o] = silu(min(gate, limit)) * clamp(up, -limit, limit), gate and up in float32: x [n K], both weights [N K], y [n N]."""
    row0 = tl.program_id(0) * ROWS
    token = tl.arange(0, TOKENS)
    of_gate = _sums(
        x, 1.0, x, gate, gate_scales, row0, token, n, N, K, False, False, ROWS, PARTS, DEPTH, TOKENS, STAGES, EVEN, WIDEN,
    )  # fmt: skip
    of_up = _sums(
        x, 1.0, x, up, up_scales, row0, token, n, N, K, False, False, ROWS, PARTS, DEPTH, TOKENS, STAGES, EVEN, WIDEN,
    )  # fmt: skip
    column = row0 + tl.arange(0, ROWS)
    value = tl.trans(swiglu(of_gate, of_up, limit)).to(y.dtype.element_ty)
    tl.store(y + token[:, None] * N + column[None, :], value, mask=(token < n)[:, None] & (column < N)[None, :])


def refusal_of_codes(device: torch.device) -> str | None:
    """None where FP8 codes are taken, else a sentence."""
    arch = architecture(device)
    return None if (arch, "fp8", TOKENS[0]) in LAUNCH else f"there are no tiles for fp8 products on {arch}"


def form_of(x: Tensor, weights: list[Tensor], scales: list[Tensor | None], in_float32: list[bool]) -> str:
    """Of a launch's tiles: "float32" where any product is one of float32 numbers, which tensor cores do not multiply; "fp8" where all
    weights are codes.
    """
    pairs = zip(weights, scales, in_float32, strict=True)
    if x.dtype == torch.float32 or any(wide and scale is None and weight.dtype != x.dtype for weight, scale, wide in pairs):
        return "float32"
    return "dense" if any(scale is None for scale in scales) else "fp8"


def tiles_for(x: Tensor, form: str) -> tuple[int, tuple[Tile, ...]]:
    """(tokens of a tile, the tiles) for the tokens x."""
    of_tile = next(n for n in TOKENS if x.shape[0] <= n)
    return of_tile, LAUNCH[architecture(x.device), form, of_tile]


def options(tile: Tile, tokens: int, width: int, widen: bool = False) -> dict:
    """The constants that both kernels have, and the compiler's options."""
    return {
        "ROWS": tile.rows,
        "PARTS": tile.parts,
        "DEPTH": tile.depth,
        "TOKENS": tokens,
        "STAGES": tile.stages,
        "EVEN": width % (tile.parts * tile.depth) == 0,
        "WIDEN": widen,
        "num_warps": tile.warps,
        "maxnreg": tile.registers,
        "enable_fp_fusion": True,
    }


def norm_options(width: int, norms: bool) -> dict:
    """The constants of a norm."""
    return {"NORMS": norms, "STORED": STORED, "SQUARED": min(SQUARED, triton.next_power_of_2(width))}


def run(
    x: Tensor, norm_weight: Tensor | None, weights: list[Tensor], scales: list[Tensor | None],
    beside: list[int], in_float32: list[bool], eps: float,
) -> list[Tensor]:  # fmt: skip
    """As `few_linears`, of contiguous tensors that it has checked."""
    n, width = x.shape
    normed = None if norm_weight is None else torch.empty_like(x)
    outputs, places = [], []
    given = iter(weights)
    for count, widens in zip(beside, in_float32, strict=True):
        heights = [next(given).shape[0] for _ in range(count)]
        outputs.append(torch.empty(n, sum(heights), dtype=torch.float32 if widens else x.dtype, device=x.device))
        places += outputs[-1].split(heights, dim=1)
    found = outputs if normed is None else [normed, *outputs]
    rows = [w.shape[0] for w in weights]
    if n == 0 or width == 0 or sum(rows) == 0:
        return [out.zero_() for out in found]
    wide = [wide for count, wide in zip(beside, in_float32, strict=True) for _ in range(count)]
    tokens, tiles = tiles_for(x, form_of(x, weights, scales, wide))
    enough = PROGRAMS_EACH * processors(x.device)
    tile = next((tile for tile in tiles if sum(triton.cdiv(r, tile.rows) for r in rows) >= enough), tiles[-1])
    codes = [as_bytes(*held) for held in zip(weights, scales, strict=True)]
    grid = (sum(triton.cdiv(r, tile.rows) for r in rows),)
    with torch.cuda.device_of(x):
        few_linears_kernel[grid](
            *(x, x if norm_weight is None else norm_weight.contiguous(), x if normed is None else normed),
            *(tuple(w for w, _ in codes), tuple(s for _, s in codes), tuple(places)),
            *(tuple(rows), tuple(place.stride(0) for place in places), n, width, eps),
            **options(tile, tokens, width, architecture(x.device) == INTERPRETER),
            **norm_options(width, norm_weight is not None),
        )
    return found


def run_gate_up(x: Tensor, gate: Tensor, gate_scale: Tensor | None, up: Tensor, up_scale: Tensor | None, limit: float) -> Tensor:
    """Of at most TOKENS[-1] tokens, as `dsv4.kernels.gated_linear.gated_linear`, checked by it and contiguous."""
    (n, width), rows = x.shape, gate.shape[0]
    y = torch.empty(n, rows, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    # Of two weights' rows, the smallest tile: an expert is not wide.
    tokens, (*_, tile) = tiles_for(x, form_of(x, [gate], [gate_scale], [False]))
    with torch.cuda.device_of(x):
        few_gate_up_kernel[(triton.cdiv(rows, tile.rows),)](
            *(x, *as_bytes(gate, gate_scale), *as_bytes(up, up_scale), y, limit, n, rows, width),
            **options(tile, tokens, width, architecture(x.device) == INTERPRETER),
        )
    return y
