"""Device code of linear maps over FP8 codes, dense or block-diagonal, of their gradients, and of two maps with SwiGLU (the shared
expert's gate and up).

    linear              y[t, g, o] = W[g O + o] . x[t, g]
    linear_transposed   y[t, g, i] = W[g O :, i] . x[t, g]
    gate_up_linear      y[t, o]    = silu(min(gate, L)) * clamp(up, -L, L)      gate = G[o] . x[t], up = U[o] . x[t]

A program owns a tile of tokens and a tile of output columns of one group; the products are those of dsv4.kernels._products_triton. Of a
few tokens maps without groups are those of dsv4.kernels._few_linears_triton.
"""

import functools
from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels import _few_linears_triton as few_linears
from dsv4.kernels._device_triton import INTERPRETER, architecture
from dsv4.kernels._products_triton import (
    OF_CODES,
    Tile,
    as_bytes,
    launch_options,
    multiply,
    multiply_transposed,
    quantize_rows,
    swiglu,
    widens,
)

# (architecture, form of the product, tokens of a tile) -> (linear, transposed, gate and up). A depth divides FP8's 128 columns, and
# so do the columns of the transposed product; there are no transposed products of activations as codes, and few tokens over dense
# weights come here no more than over codes without groups. sm_80 has no E4M3.
LAUNCH: Mapping[tuple[str, str, int], tuple[Tile | None, Tile | None, Tile]] = {
    ("sm_90", "fp8", 16): (Tile(64, 128, 4, 4), Tile(64, 64, 4, 4), Tile(64, 128, 4, 4)),
    ("sm_90", "fp8", 64): (Tile(64, 128, 4, 4), Tile(64, 64, 4, 4), Tile(64, 128, 4, 4)),
    ("sm_90", "fp8", 128): (Tile(128, 64, 8, 4), Tile(128, 64, 8, 3), Tile(128, 64, 8, 4)),
    ("sm_90", "fp8 x fp8", 16): (Tile(64, 128, 4, 4), None, Tile(64, 128, 4, 4)),
    ("sm_90", "fp8 x fp8", 128): (Tile(128, 128, 8, 4), None, Tile(64, 128, 8, 4)),
    ("sm_90", "dense", 128): (None, None, Tile(128, 64, 8, 4)),
    ("sm_100", "fp8", 16): (Tile(64, 128, 4, 4), Tile(64, 64, 4, 4), Tile(64, 128, 4, 4)),
    ("sm_100", "fp8", 64): (Tile(64, 64, 4, 4), Tile(64, 64, 4, 4), Tile(64, 64, 4, 4)),
    ("sm_100", "fp8", 128): (Tile(128, 64, 8, 4), Tile(128, 64, 8, 3), Tile(128, 64, 8, 4)),
    ("sm_100", "fp8 x fp8", 16): (Tile(64, 128, 4, 4), None, Tile(64, 128, 4, 4)),
    ("sm_100", "fp8 x fp8", 128): (Tile(128, 128, 8, 4), None, Tile(64, 128, 8, 4)),
    ("sm_100", "dense", 128): (None, None, Tile(128, 64, 8, 3)),
    ("sm_80", "dense", 64): (None, None, Tile(64, 64, 4, 3)),
    **{(INTERPRETER, form, 16): (Tile(64, 64, 1, 1), Tile(64, 64, 1, 1), Tile(64, 64, 1, 1)) for form in ("dense", "fp8", "fp8 x fp8")},
}


@triton.jit
def _place(n, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Tokens of a tile, the last one repeated past the end, and which are real; first column; group. Tiles of tokens go fastest, so
    that programs which run together read the same weights.
    """
    tiles = tl.cdiv(n, ROWS)
    pid = tl.program_id(0)
    token = (pid % tiles) * ROWS + tl.arange(0, ROWS)
    return tl.minimum(token, n - 1).to(tl.int64), token < n, (pid // tiles) * COLUMNS, tl.program_id(1).to(tl.int64)


@triton.jit
def linear(
    x, x_scales, codes, scales, y, n, N, K, SCALES_WIDE,
    FORM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """x [n g*K], codes [g*N K] -> y [n g*N]; x_scales [n*g ceil(K/128)] of FP8 activations."""
    token, inside, column0, group = _place(n, N, ROWS, COLUMNS)
    groups = tl.num_programs(1)
    column = column0 + tl.arange(0, COLUMNS)
    row = group * N + tl.minimum(column, N - 1)
    place = token * groups + group
    x_at = x + place[None, :] * K
    acc = tl.zeros((COLUMNS, ROWS), tl.float32)
    # acc = W x
    for k0 in tl.range(0, K, DEPTH, num_stages=STAGES):
        k = k0 + tl.arange(0, DEPTH)[:, None]
        x_t = tl.load(x_at + k) if EVEN else tl.load(x_at + k, mask=k < K, other=0.0)
        x_scale = place
        if FORM == "fp8 x fp8":
            x_scale = tl.load(x_scales + place * tl.cdiv(K, 128) + k0 // 128)
        if WIDEN:
            x_t = x_t.to(tl.float32)
        acc = multiply(
            acc, codes, scales, x_t, x_scale, row, row // 128, k0, K, SCALES_WIDE, FORM, COLUMNS, DEPTH, EVEN, WIDEN,
        )  # fmt: skip
    at = y + place[:, None] * N + column[None, :]
    tl.store(at, tl.trans(acc).to(y.dtype.element_ty), mask=inside[:, None] & (column < N)[None, :])


@triton.jit
def linear_transposed(
    x, codes, scales, y, n, N, K, SCALES_WIDE,
    FORM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """x [n g*K], codes [g*K N] -> y [n g*N]. Steps end with the blocks of the grid, which a group may begin inside of."""
    token, inside, column0, group = _place(n, N, ROWS, COLUMNS)
    groups = tl.num_programs(1)
    column = column0 + tl.arange(0, COLUMNS)
    place = token * groups + group
    first, last = group * K, (group + 1) * K
    x_at = x + place[None, :] * K - first
    acc = tl.zeros((COLUMNS, ROWS), tl.float32)
    # acc = W^T x
    for step in tl.range(0, (last - 1) // DEPTH - first // DEPTH + 1, 1, num_stages=STAGES):
        row0 = (first // DEPTH + step) * DEPTH
        row = row0 + tl.arange(0, DEPTH)[:, None]
        x_t = tl.load(x_at + row) if EVEN else tl.load(x_at + row, mask=(row >= first) & (row < last), other=0.0)
        if WIDEN:
            x_t = x_t.to(tl.float32)
        acc = multiply_transposed(
            acc, codes, scales, x_t, row0, first, last, row0 // 128, column0, N, SCALES_WIDE, FORM, COLUMNS, DEPTH, WIDEN,
        )  # fmt: skip
    at = y + place[:, None] * N + column[None, :]
    tl.store(at, tl.trans(acc).to(y.dtype.element_ty), mask=inside[:, None] & (column < N)[None, :])


@triton.jit
def gate_up_linear(
    x, x_scales, gate_codes, gate_scales, up_codes, up_scales, y, limit, n, N, K, SCALES_WIDE,
    FORM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """x [n K], codes [N K] each -> y [n N]."""
    token, inside, column0, _ = _place(n, N, ROWS, COLUMNS)
    column = column0 + tl.arange(0, COLUMNS)
    row = tl.minimum(column, N - 1).to(tl.int64)
    x_at = x + token[None, :] * K
    gate = tl.zeros((COLUMNS, ROWS), tl.float32)
    up = tl.zeros((COLUMNS, ROWS), tl.float32)
    # gate, up = G x, U x
    for k0 in tl.range(0, K, DEPTH, num_stages=STAGES):
        k = k0 + tl.arange(0, DEPTH)[:, None]
        x_t = tl.load(x_at + k) if EVEN else tl.load(x_at + k, mask=k < K, other=0.0)
        x_scale = token
        if FORM == "fp8 x fp8":
            x_scale = tl.load(x_scales + token * tl.cdiv(K, 128) + k0 // 128)
        if WIDEN:
            x_t = x_t.to(tl.float32)
        gate = multiply(
            gate, gate_codes, gate_scales, x_t, x_scale, row, row // 128, k0,
            K, SCALES_WIDE, FORM, COLUMNS, DEPTH, EVEN, WIDEN,
        )  # fmt: skip
        up = multiply(
            up, up_codes, up_scales, x_t, x_scale, row, row // 128, k0,
            K, SCALES_WIDE, FORM, COLUMNS, DEPTH, EVEN, WIDEN,
        )  # fmt: skip
    at = y + token[:, None] * N + column[None, :]
    value = tl.trans(swiglu(gate, up, limit))
    tl.store(at, value.to(y.dtype.element_ty), mask=inside[:, None] & (column < N)[None, :])


def refusal(device: torch.device, form: str) -> str | None:
    """None where there are tiles for a product of this form, else a sentence."""
    arch = architecture(device)
    return None if _row_sizes(arch, form) else f"there are no tiles for {form} products on {arch}"


@functools.cache
def _row_sizes(arch: str, form: str) -> list[int]:
    return sorted(rows for at, of, rows in LAUNCH if (at, of) == (arch, form))


def _tiles(x: Tensor, form: str, tokens: int) -> tuple[int, tuple[Tile | None, Tile | None, Tile]]:
    arch = architecture(x.device)
    sizes = _row_sizes(arch, form)
    rows = next((rows for rows in sizes if tokens <= rows), sizes[-1])
    return rows, LAUNCH[arch, form, rows]


def run(x: Tensor, codes: Tensor, scale: Tensor, groups: int, transposed: bool, deployed: bool) -> Tensor:
    """x [t g*i], codes [g*o i], scale as `block_scaled_linear` takes it -> [t g*o]; transposed: [t g*o] -> [t g*i]. All contiguous."""
    form = OF_CODES["fp8"] if deployed and not transposed else "fp8"
    n, (rows, width) = x.shape[0], codes.shape
    of_group = rows // groups
    N, K = (width, of_group) if transposed else (of_group, width)
    if form == "fp8" and groups == 1 and not transposed and n <= few_linears.TOKENS[-1]:
        # Tiles of 64 rows are too few programs to keep memory busy.
        return few_linears.run(x, None, [codes], [scale], [1], [False], 0.0)[0]
    y = torch.empty(n, groups * N, dtype=x.dtype, device=x.device)
    if n == 0:
        return y
    tokens, tiles = _tiles(x, form, n)
    tile = tiles[1 if transposed else 0]
    shared = dict(FORM=form, ROWS=tokens, WIDEN=widens(x, architecture(x.device), form), **launch_options(tile, K))
    grid = (triton.cdiv(n, tokens) * triton.cdiv(N, tile.columns), groups)
    if transposed:
        linear_transposed[grid](x, *as_bytes(codes, scale), y, n, N, K, scale.shape[1], **shared)
    else:
        read = (x, x) if form == "fp8" else quantize_rows(x.view(n * groups, width))
        linear[grid](*read, *as_bytes(codes, scale), y, n, N, K, scale.shape[1], **shared)
    return y


def run_gate_up(
    x: Tensor, gate: Tensor, gate_scale: Tensor | None, up: Tensor, up_scale: Tensor | None, limit: float, deployed: bool
) -> Tensor:
    """x [t i], gate and up [o i], dense or FP8 codes with scales -> neurons [t o]. All contiguous."""
    form = "dense" if gate_scale is None else OF_CODES["fp8"] if deployed else "fp8"
    n, (N, K) = x.shape[0], gate.shape
    if form != "fp8 x fp8" and n <= few_linears.TOKENS[-1]:
        return few_linears.run_gate_up(x, gate, gate_scale, up, up_scale, limit)
    y = torch.empty(n, N, dtype=x.dtype, device=x.device)
    if n == 0:
        return y
    tokens, tiles = _tiles(x, form, n)
    read = quantize_rows(x) if form == "fp8 x fp8" else (x, x)
    wide = 0 if gate_scale is None else gate_scale.shape[1]
    gate_up_linear[(triton.cdiv(n, tokens) * triton.cdiv(N, tiles[2].columns),)](
        *read, *as_bytes(gate, gate_scale), *as_bytes(up, up_scale), y, limit, n, N, K, wide,
        FORM=form, ROWS=tokens, WIDEN=widens(x, architecture(x.device), form), **launch_options(tiles[2], K),
    )  # fmt: skip
    return y
