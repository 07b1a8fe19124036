"""Device code of `dsv4.kernels.hyper_connection`, two kernels for a read.

`project_kernel` walks the streams once: sum of squares and the projection to (2 + n) n numbers, with float32's precision on the tensor
cores; where it writes first, it mixes the streams, adds the output, stores, and projects what it stored. With few tokens the hidden
width is shared among programs, each leaving partial sums. `finish_kernel`, one token a program, adds them up, runs the Sinkhorn rounds,
collapses the streams and norms the result. With many tokens the first kernel runs the rounds itself, for a tile of tokens at once.

The mixing numbers lie in a padded tile of rows x columns, row 0 pre, row 1 post, rows 2 ... comb: n columns are padded to `COLUMNS`.
Axes: t token, h hidden, m mixing number.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels._device_triton import INTERPRETED, INTERPRETER, aligned_rows, architecture, processors

# Programs of `project_kernel` for each processor, where the tokens alone make fewer.
PROGRAMS = 2
# The largest offset within a program of `project_kernel`.
REACH = (1 << 31) - 1
# Partial sums that `finish_kernel` adds at a time.
PARTS = 32


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
# What is written first stands in registers beside what it is made of: 64 tokens by 32 columns spill on sm_80 and sm_90.
WRITE_READ: Mapping[str, tuple[Launch, ...]] = {
    "sm_80": (Launch(tokens=16, hidden=32, warps=4, stages=3), Launch(tokens=32, hidden=32, warps=4, stages=3)),
    "sm_90": (Launch(tokens=16, hidden=32, warps=8, stages=3), Launch(tokens=64, hidden=16, warps=4, stages=3)),
    "sm_100": (Launch(tokens=16, hidden=32, warps=8, stages=3), Launch(tokens=64, hidden=32, warps=4, stages=3)),
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
def place(i, N: tl.constexpr, COLUMNS: tl.constexpr):
    """(row in fn and base, whether there is one) of place i in the padded tile."""
    r = i // COLUMNS
    c = i % COLUMNS
    return r * N + c, (r < 2 + N) & (c < N)


@triton.jit
def rounds(
    total, square, scale_ptr, base_ptr, width, eps, rms_eps,
    N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ITERS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Projection [BLOCK_T, ROWS * COLUMNS] and sum of squares [BLOCK_T] -> (sigmoids, comb), each [BLOCK_T, ROWS, COLUMNS]."""
    m = tl.arange(0, ROWS * COLUMNS)
    at, used = place(m, N, COLUMNS)
    r = m // COLUMNS
    scale = tl.where(r == 0, tl.load(scale_ptr), tl.where(r == 1, tl.load(scale_ptr + 1), tl.load(scale_ptr + 2)))
    base = tl.load(base_ptr + at, mask=used, other=0.0)
    logits = total * tl.rsqrt(square / width + rms_eps)[:, None] * scale[None, :] + base[None, :]
    logits = tl.reshape(logits, (BLOCK_T, ROWS, COLUMNS))
    row = tl.arange(0, ROWS)
    is_mixing = (row >= 2) & (row < 2 + N)
    is_stream = tl.arange(0, COLUMNS) < N
    inside = is_mixing[None, :, None] & is_stream[None, None, :]
    lifted = tl.where(is_stream[None, None, :], logits, float("-inf"))
    shares = tl.exp(lifted - tl.max(lifted, 2)[:, :, None])
    comb = tl.where(inside, shares / tl.sum(shares, 2)[:, :, None] + eps, 0.0)
    # Places outside are 0 and are divided by 1.
    comb = comb / tl.where(is_stream[None, :], tl.sum(comb, 1) + eps, 1.0)[:, None, :]
    for _ in range(ITERS - 1):
        comb = comb / tl.where(is_mixing[None, :], tl.sum(comb, 2) + eps, 1.0)[:, :, None]
        comb = comb / tl.where(is_stream[None, :], tl.sum(comb, 1) + eps, 1.0)[:, None, :]
    return 1.0 / (1.0 + tl.exp(-logits)), comb


@triton.jit
def store_mixes(
    sigmoids, comb, t, is_token, pre_ptr, post_ptr, comb_ptr, eps,
    N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store pre, post and comb of tokens t; returns pre [tokens, COLUMNS]."""
    row = tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    pre = tl.sum(tl.where((row == 0)[None, :, None], sigmoids, 0.0), 1) + eps
    post = 2.0 * tl.sum(tl.where((row == 1)[None, :, None], sigmoids, 0.0), 1)
    of_token = is_token[:, None] & (c < N)[None, :]
    to = t[:, None] * N + c[None, :]
    tl.store(pre_ptr + to, pre, mask=of_token)
    tl.store(post_ptr + to, post, mask=of_token)
    is_mixing = (row >= 2) & (row < 2 + N)
    to = (t * (N * N))[:, None, None] + ((row - 2) * N)[None, :, None] + c[None, None, :]
    tl.store(comb_ptr + to, comb, mask=of_token[:, None, :] & is_mixing[None, :, None])
    return pre


@triton.jit
def exact_product(x, weights, total, WIDEN: tl.constexpr):
    """x @ weights + total with float32 weights: those of bfloat16 x as three bfloat16 numbers, which hold all their bits."""
    if x.dtype == tl.bfloat16:
        high = weights.to(tl.bfloat16)
        rest = weights - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        if WIDEN:
            x = x.to(tl.float32)
            high = high.to(tl.float32)
            middle = middle.to(tl.float32)
            low = low.to(tl.float32)
        total = tl.dot(x, low, total, input_precision="ieee")
        total = tl.dot(x, middle, total, input_precision="ieee")
        return tl.dot(x, high, total, input_precision="ieee")
    else:
        x = x.to(tl.float32)
        if WIDEN:
            return tl.dot(x, weights, total, input_precision="ieee")
        else:
            return tl.dot(x, weights, total, input_precision="tf32x3")


@triton.jit
def mixing_shares(comb_ptr, post_ptr, t, is_token, N: tl.constexpr):
    """comb[j, k] of tokens t at j * N + k, then post[k]."""
    shares = ()
    for jk in tl.static_range(N * N):
        shares += (tl.load(comb_ptr + t * (N * N) + jk, mask=is_token, other=0.0),)
    for k in tl.static_range(N):
        shares += (tl.load(post_ptr + t * N + k, mask=is_token, other=0.0),)
    return shares


@triton.jit
def load_streams(rows, x_n, of_tile, N: tl.constexpr):
    streams = ()
    for j in tl.static_range(N):
        streams += (tl.load(rows + j * x_n, mask=of_tile, other=0.0),)
    return streams


@triton.jit(do_not_specialize=COUNTS)
def project_kernel(
    x_ptr, old_comb_ptr, old_post_ptr, out_ptr, written_ptr, fn_ptr, scale_ptr, base_ptr,
    partial_ptr, square_ptr, pre_ptr, post_ptr, comb_ptr,
    token_count, hidden, tiles_of_split, x_t, x_n, out_t, eps, rms_eps,
    N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ITERS: tl.constexpr,
    WRITES: tl.constexpr, SPLIT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, STAGES: tl.constexpr, WIDEN: tl.constexpr,
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
    if SPLIT:
        row = split.to(tl.int64) * token_count + begin
        to = t[:, None] * MIXES + tl.arange(0, MIXES)[None, :]
        tl.store(partial_ptr + row * MIXES + to, total, mask=is_token[:, None])
        tl.store(square_ptr + row + t, square, mask=is_token)
    else:
        sigmoids, comb = rounds(
            total, square, scale_ptr, base_ptr, N * hidden, eps, rms_eps, N, ROWS, COLUMNS, ITERS, BLOCK_T
        )  # fmt: skip
        store_mixes(sigmoids, comb, begin + t, is_token, pre_ptr, post_ptr, comb_ptr, eps, N, ROWS, COLUMNS)


@triton.jit(do_not_specialize=COUNTS)
def finish_kernel(
    x_ptr, partial_ptr, square_ptr, scale_ptr, base_ptr, norm_ptr, pre_ptr, post_ptr, comb_ptr, collapsed_ptr, normed_ptr,
    token_count, hidden, splits, x_t, x_n, eps, rms_eps, norm_eps,
    N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ITERS: tl.constexpr,
    SPLIT: tl.constexpr, NORMS: tl.constexpr, BLOCK_H: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    MIXES: tl.constexpr = ROWS * COLUMNS
    # Last token first: the end of what `project_kernel` walked is what the L2 still holds.
    t = (token_count - 1 - tl.program_id(0)).to(tl.int64)
    c = tl.arange(0, COLUMNS)
    if SPLIT:
        total = tl.zeros([MIXES], tl.float32)
        square = tl.zeros([1], tl.float32)
        m = tl.arange(0, MIXES)
        for begin in range(0, splits, PARTS):
            part = begin + tl.arange(0, PARTS)
            row = part.to(tl.int64) * token_count + t
            total += tl.sum(tl.load(partial_ptr + row[:, None] * MIXES + m[None, :], mask=(part < splits)[:, None], other=0.0), 0)
            square += tl.sum(tl.load(square_ptr + row, mask=part < splits, other=0.0), 0)
        sigmoids, comb = rounds(
            tl.reshape(total, (1, MIXES)), square, scale_ptr, base_ptr, N * hidden, eps, rms_eps, N, ROWS, COLUMNS, ITERS, 1
        )  # fmt: skip
        one = t + tl.arange(0, 1)
        pre = store_mixes(sigmoids, comb, one, one < token_count, pre_ptr, post_ptr, comb_ptr, eps, N, ROWS, COLUMNS)
        pre = tl.reshape(pre, (COLUMNS,))
    else:
        pre = tl.load(pre_ptr + t * N + c, mask=c < N, other=0.0)
    h = tl.arange(0, BLOCK_H)
    inside = h < hidden
    collapsed = tl.zeros([BLOCK_H], tl.float32)
    for j in tl.static_range(N):
        share = tl.sum(tl.where(c == j, pre, 0.0), 0)
        collapsed += share * tl.load(x_ptr + t * x_t + j * x_n + h, mask=inside, other=0.0).to(tl.float32)
    rounded = collapsed.to(collapsed_ptr.dtype.element_ty)
    tl.store(collapsed_ptr + t * hidden + h, rounded, mask=inside)
    if NORMS:
        seen = rounded.to(tl.float32)
        length = tl.rsqrt(tl.sum(seen * seen, 0) / hidden + norm_eps)
        normed = seen * length * tl.load(norm_ptr + h, mask=inside, other=0.0)
        tl.store(normed_ptr + t * hidden + h, normed.to(normed_ptr.dtype.element_ty), mask=inside)


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


def project_options(launch: Launch, n: int, iters: int, writes: bool, is_split: bool) -> dict:
    """The constants of `project_kernel` and the compiler's options."""
    return padded(n) | {
        "ITERS": iters,
        "WRITES": writes,
        "SPLIT": is_split,
        "BLOCK_T": launch.tokens,
        "BLOCK_H": launch.hidden,
        "STAGES": launch.stages,
        # The interpreter takes the bits of 16-bit floats for integers.
        "WIDEN": INTERPRETED,
        "num_warps": launch.warps,
        "enable_fp_fusion": True,
    }


def finish_options(n: int, iters: int, hidden: int, is_split: bool, norms: bool) -> dict:
    """The constants of `finish_kernel` and the compiler's options."""
    return padded(n) | {
        "ITERS": iters,
        "SPLIT": is_split,
        "NORMS": norms,
        "BLOCK_H": triton.next_power_of_2(hidden),
        "PARTS": PARTS,
        "num_warps": FINISH_WARPS,
        "enable_fp_fusion": True,
    }


def write_options(launch: Launch, n: int) -> dict:
    """The constants of `write_kernel` and the compiler's options."""
    return {"N": n, "BLOCK_T": launch.tokens, "BLOCK_H": launch.hidden, "num_warps": launch.warps, "enable_fp_fusion": True}


def split(launch: Launch, tokens: int, hidden: int, device: torch.device) -> tuple[int, int]:
    """(programs that share the hidden width, tiles of each): enough programs for the device, no more than there are tiles."""
    tiles = triton.cdiv(hidden, launch.hidden)
    wanted = min(tiles, PROGRAMS * processors(device) // triton.cdiv(tokens, launch.tokens) or 1)
    each = triton.cdiv(tiles, wanted)
    return triton.cdiv(tiles, each), each


def read(
    x: Tensor, written: tuple[Tensor, Tensor, Tensor] | None, fn: Tensor, scale: Tensor, base: Tensor, norm: Tensor | None,
    iters: int, eps: float, rms_eps: float, norm_eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(streams read, pre, post, comb, collapsed, normed), checked by the caller; `written`: comb, post and output to write back first."""
    b, s, n, hidden = x.shape
    x = aligned_rows(x.reshape(b * s, n, hidden))
    mixes = [torch.empty(b, s, *shape, dtype=torch.float32, device=x.device) for shape in ((n,), (n,), (n, n))]
    collapsed = torch.empty(b, s, hidden, dtype=x.dtype, device=x.device)
    normed = torch.empty(b, s, hidden, dtype=x.dtype, device=x.device) if norm is not None else collapsed.new_empty(0)
    streams = torch.empty(b, s, n, hidden, dtype=x.dtype, device=x.device) if written else x
    if b * s == 0:
        return streams, *mixes, collapsed, normed
    launch = pick(READ if written is None else WRITE_READ, architecture(x.device), b * s)
    if x.stride(0) * min(launch.tokens, b * s) + x.stride(1) * n > REACH:
        x = x.contiguous()
    splits, each = split(launch, b * s, hidden, x.device)
    fn, scale, base = (t.contiguous() for t in (fn, scale, base))
    options = project_options(launch, n, iters, written is not None, splits > 1)
    partial = torch.empty(splits, b * s, options["ROWS"] * options["COLUMNS"], dtype=torch.float32, device=x.device) if splits > 1 else fn
    square = torch.empty(splits, b * s, dtype=torch.float32, device=x.device) if splits > 1 else fn
    # Without something to write, the kernel is given addresses it never reads.
    comb, post, out = (fn, fn, x) if written is None else (t.contiguous() for t in written)
    with torch.cuda.device_of(x):
        project_kernel[(triton.cdiv(b * s, launch.tokens), splits)](
            *(x, comb, post, out, streams, fn, scale, base, partial, square, *mixes),
            *(b * s, hidden, each, x.stride(0), x.stride(1), hidden, eps, rms_eps),
            **options,
        )
        read_from = streams.view(b * s, n, hidden)
        finish_kernel[(b * s,)](
            *(read_from, partial, square, scale, base, fn if norm is None else norm, *mixes, collapsed, normed),
            *(b * s, hidden, splits, read_from.stride(0), read_from.stride(1), eps, rms_eps, norm_eps),
            **finish_options(n, iters, hidden, splits > 1, norm is not None),
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
