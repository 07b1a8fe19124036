"""Device code of `dsv4.kernels.hyper_connection`: a read, with or without a write before it, is one launch of `read_kernel`.

It walks the streams once: sum of squares and the projection to (2 + n) n numbers, with float32's precision on the tensor cores; where
it writes first, it mixes the streams, adds the output, stores, and projects what it stored. What follows (the Sinkhorn rounds, the
collapse, the norm) needs a token's whole row:

    few tokens      programs share the hidden width and leave partial sums; the last one to arrive adds them up and goes on
    many tokens     a program has its tokens' whole rows, and walks them again, the last token first: the L2 still holds the end
    in between      partial sums, which `finish_kernel` adds up, one token a program: one of few programs would be long at it

Axes: t token, h hidden, m mixing number.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels._arrival_triton import counters, is_last
from dsv4.kernels._device_triton import INTERPRETED, INTERPRETER, aligned_rows, architecture, processors
from dsv4.kernels._hyper_mixing_triton import (
    collapse_token,
    collapse_tokens,
    exact_product,
    load_streams,
    mixing_shares,
    place,
    rounds,
    store_mixes,
    sum_of_parts,
)

# Programs of `read_kernel` for each processor, where the tokens alone make fewer; from this share of the processors on they do.
PROGRAMS, ENOUGH = 2, 0.75
# The largest offset within a program of `read_kernel`.
REACH = (1 << 31) - 1
# Up to so many tokens one program finishes them all.
FEW_TOKENS = 16
# Partial sums added at a time.
PARTS = 4096
# Rows on their way while a program walks its tokens again.
ROWS_AHEAD = 2
# What becomes of a program's sums.
LEFT, LAST, WHOLE = "left", "last", "whole"


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched: tokens and hidden columns of a tile, warps, tiles in flight."""

    tokens: int
    hidden: int
    warps: int
    stages: int


# Fewest tokens first. Resources of each entry are held by tests.
READ: Mapping[str, tuple[Launch, ...]] = {
    "sm_80": (Launch(tokens=16, hidden=32, warps=4, stages=3), Launch(tokens=32, hidden=32, warps=4, stages=3)),
    "sm_90": (Launch(tokens=16, hidden=32, warps=4, stages=3), Launch(tokens=64, hidden=32, warps=4, stages=3)),
    "sm_100": (Launch(tokens=16, hidden=32, warps=4, stages=3), Launch(tokens=64, hidden=32, warps=4, stages=3)),
    INTERPRETER: (Launch(tokens=16, hidden=32, warps=1, stages=1), Launch(tokens=64, hidden=32, warps=1, stages=1)),
}
# What is written first stands in registers beside what it is made of: 64 tokens by 32 columns spill.
WRITE_READ: Mapping[str, tuple[Launch, ...]] = {
    "sm_80": (Launch(tokens=16, hidden=32, warps=4, stages=3), Launch(tokens=32, hidden=32, warps=4, stages=3)),
    "sm_90": (Launch(tokens=16, hidden=32, warps=8, stages=3), Launch(tokens=64, hidden=16, warps=4, stages=3)),
    "sm_100": (Launch(tokens=16, hidden=32, warps=8, stages=3), Launch(tokens=64, hidden=16, warps=4, stages=3)),
    INTERPRETER: (Launch(tokens=16, hidden=32, warps=1, stages=1), Launch(tokens=64, hidden=16, warps=1, stages=1)),
}
FINISH_WARPS = 8
WRITE: Mapping[str, Launch] = {
    "sm_80": Launch(tokens=1, hidden=1024, warps=4, stages=1),
    "sm_90": Launch(tokens=1, hidden=1024, warps=4, stages=1),
    "sm_100": Launch(tokens=1, hidden=1024, warps=4, stages=1),
    INTERPRETER: Launch(tokens=16, hidden=64, warps=1, stages=1),
}
# Numbers that differ from call to call: no kernel is compiled anew for some of their values.
COUNTS = ["token_count", "tiles_of_split", "splits"]


@triton.jit
def finish_few(
    x_ptr, partial_ptr, square_ptr, counter_ptr, scale_ptr, base_ptr, norm_ptr,
    pre_ptr, post_ptr, comb_ptr, collapsed_ptr, normed_ptr, token_count, hidden, x_t, x_n, eps, rms_eps, norm_eps,
    N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ITERS: tl.constexpr, NORMS: tl.constexpr,
    FEW: tl.constexpr, PARTS: tl.constexpr, BLOCK_ROW: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """What follows the projection of all tokens, in the last program to arrive."""
    parts = tl.num_programs(1)
    if is_last(counter_ptr, parts):
        t = tl.arange(0, FEW)
        total, square = sum_of_parts(partial_ptr, square_ptr, t, token_count, parts, ROWS * COLUMNS, FEW, PARTS)
        sigmoids, comb = rounds(total, square, scale_ptr, base_ptr, N * hidden, eps, rms_eps, N, ROWS, COLUMNS, ITERS, FEW)
        store_mixes(sigmoids, comb, t, t < token_count, pre_ptr, post_ptr, comb_ptr, eps, N, ROWS, COLUMNS)
        collapse_tokens(
            x_ptr, pre_ptr, norm_ptr, collapsed_ptr, normed_ptr, token_count, hidden, x_t, x_n, norm_eps, N, NORMS, BLOCK_ROW, AHEAD
        )  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def read_kernel(
    x_ptr, old_comb_ptr, old_post_ptr, out_ptr, written_ptr, fn_ptr, scale_ptr, base_ptr, norm_ptr,
    partial_ptr, square_ptr, counter_ptr, pre_ptr, post_ptr, comb_ptr, collapsed_ptr, normed_ptr,
    token_count, hidden, tiles_of_split, x_t, x_n, out_t, eps, rms_eps, norm_eps,
    N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ITERS: tl.constexpr, WRITES: tl.constexpr, NORMS: tl.constexpr,
    SUMS: tl.constexpr, FEW: tl.constexpr, PARTS: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_ROW: tl.constexpr, STAGES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    MIXES: tl.constexpr = ROWS * COLUMNS
    # Far addresses once, for the program's first token; from there 32 bits reach.
    begin = tl.program_id(0).to(tl.int64) * BLOCK_T
    t = tl.arange(0, BLOCK_T)
    is_token = t < token_count - begin
    x_ptr += begin * x_t
    out_ptr += begin * out_t
    written_ptr += begin * (N * hidden)
    old_comb_ptr += begin * (N * N)
    old_post_ptr += begin * N
    split = tl.program_id(1)
    at, used = place(tl.arange(0, MIXES), N, COLUMNS)
    h = tl.arange(0, BLOCK_H)
    total = tl.zeros([BLOCK_T, MIXES], tl.float32)
    square = tl.zeros([BLOCK_T], tl.float32)
    first = split * tiles_of_split
    last = tl.minimum(first + tiles_of_split, tl.cdiv(hidden, BLOCK_H))
    for tile in tl.range(first, last, num_stages=STAGES):
        column = tile * BLOCK_H + h
        inside = column < hidden
        of_tile = is_token[:, None] & inside[None, :]
        streams = load_streams(x_ptr + (t[:, None] * x_t + column[None, :]), x_n, of_tile, N)
        if WRITES:
            shares = mixing_shares(old_comb_ptr, old_post_ptr, t, is_token, N)
            out = tl.load(out_ptr + (t[:, None] * out_t + column[None, :]), mask=of_tile, other=0.0).to(tl.float32)
        # Its own accumulator for each tile: a tensor core cuts off what a long sum does not hold.
        part = tl.zeros([BLOCK_T, MIXES], tl.float32)
        for k in tl.static_range(N):
            stream = streams[k]
            if WRITES:
                mixed = shares[N * N + k][:, None] * out
                for j in tl.static_range(N):
                    mixed += shares[j * N + k][:, None] * streams[j].to(tl.float32)
                stream = mixed.to(written_ptr.dtype.element_ty)
                tl.store(written_ptr + ((t[:, None] * N + k) * hidden + column[None, :]), stream, mask=of_tile)
            weights = tl.load(
                fn_ptr + (at[None, :] * (N * hidden) + k * hidden + column[:, None]),
                mask=inside[:, None] & used[None, :],
                other=0.0,
            )
            part = exact_product(stream, weights, part, WIDEN)
            wide = stream.to(tl.float32)
            square += tl.sum(wide * wide, 1)
        total += part
    if WRITES:
        x_ptr, x_t, x_n = written_ptr, N * hidden, hidden
    if SUMS == "whole":
        sigmoids, comb = rounds(
            total, square, scale_ptr, base_ptr, N * hidden, eps, rms_eps, N, ROWS, COLUMNS, ITERS, BLOCK_T
        )  # fmt: skip
        pre_ptr += begin * N
        store_mixes(sigmoids, comb, t, is_token, pre_ptr, post_ptr + begin * N, comb_ptr + begin * (N * N), eps, N, ROWS, COLUMNS)
        count = tl.minimum(token_count - begin, BLOCK_T).to(tl.int32)
        collapse_tokens(
            x_ptr, pre_ptr, norm_ptr, collapsed_ptr + begin * hidden, normed_ptr + begin * hidden, count, hidden, x_t, x_n, norm_eps,
            N, NORMS, BLOCK_ROW, AHEAD,
        )  # fmt: skip
    else:
        row = split.to(tl.int64) * token_count + begin
        to = t[:, None] * MIXES + tl.arange(0, MIXES)[None, :]
        tl.store(partial_ptr + row * MIXES + to, total, mask=is_token[:, None])
        tl.store(square_ptr + row + t, square, mask=is_token)
        if SUMS == "last":
            finish_few(
                x_ptr, partial_ptr, square_ptr, counter_ptr, scale_ptr, base_ptr, norm_ptr,
                pre_ptr, post_ptr, comb_ptr, collapsed_ptr, normed_ptr, token_count, hidden, x_t, x_n, eps, rms_eps, norm_eps,
                N, ROWS, COLUMNS, ITERS, NORMS, FEW, PARTS, BLOCK_ROW, AHEAD,
            )  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def finish_kernel(
    x_ptr, partial_ptr, square_ptr, scale_ptr, base_ptr, norm_ptr, pre_ptr, post_ptr, comb_ptr, collapsed_ptr, normed_ptr,
    token_count, hidden, splits, x_t, x_n, eps, rms_eps, norm_eps,
    N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ITERS: tl.constexpr, NORMS: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_ROW: tl.constexpr,
):  # fmt: skip
    # Last token first: the end of what `read_kernel` walked is what the L2 still holds.
    t = (token_count - 1 - tl.program_id(0)).to(tl.int64)
    one = t + tl.arange(0, 1)
    total, square = sum_of_parts(partial_ptr, square_ptr, one, token_count, splits, ROWS * COLUMNS, 1, PARTS)
    sigmoids, comb = rounds(total, square, scale_ptr, base_ptr, N * hidden, eps, rms_eps, N, ROWS, COLUMNS, ITERS, 1)
    store_mixes(sigmoids, comb, one, one < token_count, pre_ptr, post_ptr, comb_ptr, eps, N, ROWS, COLUMNS)
    tl.debug_barrier()
    collapse_token(x_ptr, pre_ptr, norm_ptr, collapsed_ptr, normed_ptr, t, hidden, x_t, x_n, norm_eps, N, NORMS, BLOCK_ROW)


@triton.jit(do_not_specialize=COUNTS)
def write_kernel(
    x_ptr, comb_ptr, post_ptr, out_ptr, written_ptr, token_count, hidden, x_t, x_n, out_t,
    N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = t < token_count
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    of_tile = is_token[:, None] & (column < hidden)[None, :]
    shares = mixing_shares(comb_ptr, post_ptr, t, is_token, N)
    streams = load_streams(x_ptr + (t * x_t)[:, None] + column[None, :], x_n, of_tile, N)
    out = tl.load(out_ptr + (t * out_t)[:, None] + column[None, :], mask=of_tile, other=0.0).to(tl.float32)
    for k in tl.static_range(N):
        mixed = shares[N * N + k][:, None] * out
        for j in tl.static_range(N):
            mixed += shares[j * N + k][:, None] * streams[j].to(tl.float32)
        tl.store(written_ptr + ((t * N + k) * hidden)[:, None] + column[None, :], mixed.to(written_ptr.dtype.element_ty), mask=of_tile)


def pick(table: Mapping[str, tuple[Launch, ...]], name: str, tokens: int) -> Launch:
    """The smallest tile that holds all tokens, else the largest."""
    return next((launch for launch in table[name] if launch.tokens >= tokens), table[name][-1])


def padded(n: int) -> dict:
    """Constants that say how n streams lie in the padded tile; a product is at least 16 wide."""
    columns = triton.next_power_of_2(n)
    return {"N": n, "COLUMNS": columns, "ROWS": max(triton.next_power_of_2(2 + n), 16 // columns)}


def of_rows(n: int, iters: int, hidden: int, norms: bool, tokens: int) -> dict:
    """The constants of whoever adds up partial sums of `tokens` at a time, runs the rounds, and collapses and norms rows."""
    tile = padded(n)
    at_a_time = max(1, PARTS // (tokens * tile["ROWS"] * tile["COLUMNS"]))
    shared = {"ITERS": iters, "NORMS": norms, "PARTS": at_a_time, "BLOCK_ROW": triton.next_power_of_2(hidden), "enable_fp_fusion": True}
    return tile | shared


def read_options(launch: Launch, n: int, iters: int, hidden: int, tokens: int, sums: str, *, writes: bool, norms: bool) -> dict:
    """The constants of `read_kernel` and the compiler's options."""
    few = triton.next_power_of_2(tokens) if sums == LAST else 1
    return of_rows(n, iters, hidden, norms, few) | {
        "WRITES": writes,
        "SUMS": sums,
        "FEW": few,
        "AHEAD": ROWS_AHEAD,
        "BLOCK_T": launch.tokens,
        "BLOCK_H": launch.hidden,
        "STAGES": launch.stages,
        # The interpreter takes the bits of 16-bit floats for integers.
        "WIDEN": INTERPRETED,
        "num_warps": launch.warps,
    }


def finish_options(n: int, iters: int, hidden: int, norms: bool) -> dict:
    """The constants of `finish_kernel` and the compiler's options."""
    return of_rows(n, iters, hidden, norms, 1) | {"num_warps": FINISH_WARPS}


def write_options(launch: Launch, n: int) -> dict:
    """The constants of `write_kernel` and the compiler's options."""
    return {"N": n, "BLOCK_T": launch.tokens, "BLOCK_H": launch.hidden, "num_warps": launch.warps, "enable_fp_fusion": True}


def split(launch: Launch, tokens: int, hidden: int, device: torch.device) -> tuple[int, int]:
    """(programs that share the hidden width, tiles of each): enough programs for the device, no more than there are tiles."""
    tiles, rows = triton.cdiv(hidden, launch.hidden), triton.cdiv(tokens, launch.tokens)
    if rows >= ENOUGH * processors(device):
        return 1, tiles
    each = triton.cdiv(tiles, min(tiles, PROGRAMS * processors(device) // rows))
    return triton.cdiv(tiles, each), each


def way(tokens: int, splits: int) -> str:
    """What becomes of a program's sums."""
    return WHOLE if splits == 1 else LAST if tokens <= FEW_TOKENS else LEFT


def read(
    x: Tensor, written: tuple[Tensor, Tensor, Tensor] | None, fn: Tensor, scale: Tensor, base: Tensor, norm: Tensor | None,
    iters: int, eps: float, rms_eps: float, norm_eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(streams read, pre, post, comb, collapsed, normed), checked by the caller; `written`: comb, post and output to write back first."""
    b, s, n, hidden = x.shape
    tokens, writes, norms = b * s, written is not None, norm is not None
    x = aligned_rows(x.reshape(tokens, n, hidden))
    mixes = [torch.empty(b, s, *shape, dtype=torch.float32, device=x.device) for shape in ((n,), (n,), (n, n))]
    collapsed = torch.empty(b, s, hidden, dtype=x.dtype, device=x.device)
    normed = torch.empty(b, s, hidden, dtype=x.dtype, device=x.device) if norms else collapsed.new_empty(0)
    streams = torch.empty(b, s, n, hidden, dtype=x.dtype, device=x.device) if writes else x
    if tokens == 0:
        return streams, *mixes, collapsed, normed
    launch = pick(WRITE_READ if writes else READ, architecture(x.device), tokens)
    if x.stride(0) * min(launch.tokens, tokens) + x.stride(1) * n > REACH:
        x = x.contiguous()
    splits, each = split(launch, tokens, hidden, x.device)
    sums = way(tokens, splits)
    fn, scale, base = (t.contiguous() for t in (fn, scale, base))
    options = read_options(launch, n, iters, hidden, tokens, sums, writes=writes, norms=norms)
    # Without parts, a write or a norm the kernel is given addresses that it never reads.
    partial = square = counter = fn
    if sums != WHOLE:
        partial = torch.empty(splits, tokens, options["ROWS"] * options["COLUMNS"], dtype=torch.float32, device=x.device)
        square = torch.empty(splits, tokens, dtype=torch.float32, device=x.device)
    if sums == LAST:
        counter = counters(x.device, 1)
    comb, post, out = (t.contiguous() for t in written) if writes else (fn, fn, x)
    weight = norm if norms else fn
    with torch.cuda.device_of(x):
        read_kernel[(triton.cdiv(tokens, launch.tokens), splits)](
            *(x, comb, post, out, streams, fn, scale, base, weight, partial, square, counter, *mixes, collapsed, normed),
            *(tokens, hidden, each, x.stride(0), x.stride(1), hidden, eps, rms_eps, norm_eps),
            **options,
        )
        if sums == LEFT:
            rows = streams.view(tokens, n, hidden) if writes else x
            finish_kernel[(tokens,)](
                *(rows, partial, square, scale, base, weight, *mixes, collapsed, normed),
                *(tokens, hidden, splits, rows.stride(0), rows.stride(1), eps, rms_eps, norm_eps),
                **finish_options(n, iters, hidden, norms),
            )
    return streams, *mixes, collapsed, normed


def write(x: Tensor, comb: Tensor, post: Tensor, out: Tensor) -> Tensor:
    """[b s n h], checked by the caller."""
    b, s, n, hidden = x.shape
    written = torch.empty(b, s, n, hidden, dtype=x.dtype, device=x.device)
    if written.numel() == 0:
        return written
    x = aligned_rows(x.reshape(b * s, n, hidden))
    launch = WRITE[architecture(x.device)]
    constants = write_options(launch, n)
    with torch.cuda.device_of(x):
        write_kernel[(triton.cdiv(b * s, launch.tokens), triton.cdiv(hidden, launch.hidden))](
            *(x, comb.contiguous(), post.contiguous(), out.contiguous(), written),
            *(b * s, hidden, x.stride(0), x.stride(1), hidden),
            **constants,
        )
    return written
