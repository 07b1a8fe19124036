"""What the device code of hyper-connections is made of: the mixing numbers of a tile of tokens, exact products, streams.

The mixing numbers lie in a padded tile of rows x columns, row 0 pre, row 1 post, rows 2 ... comb: n columns are padded to `COLUMNS`.
Axes: t token, h hidden, m mixing number.
"""

import triton
import triton.language as tl


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


@triton.jit
def sum_of_parts(
    partial_ptr, square_ptr, t, token_count, parts,
    MIXES: tl.constexpr, BLOCK_T: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """partial [parts, tokens, MIXES], square [parts, tokens] -> sums of tokens t [BLOCK_T, MIXES], [BLOCK_T], PARTS at a time in order."""
    m = tl.arange(0, MIXES)
    total = tl.zeros([BLOCK_T, MIXES], tl.float32)
    square = tl.zeros([BLOCK_T], tl.float32)
    for begin in range(0, parts, PARTS):
        part = begin + tl.arange(0, PARTS)
        row = part.to(tl.int64)[:, None] * token_count + t[None, :]
        is_there = (part < parts)[:, None] & (t < token_count)[None, :]
        # From the L2, where other programs have put them.
        at = partial_ptr + row[:, :, None] * MIXES + m[None, None, :]
        total += tl.sum(tl.load(at, mask=is_there[:, :, None], other=0.0, cache_modifier=".cg"), 0)
        square += tl.sum(tl.load(square_ptr + row, mask=is_there, other=0.0, cache_modifier=".cg"), 0)
    return total, square


@triton.jit
def collapse_token(
    x_ptr, pre_ptr, norm_ptr, collapsed_ptr, normed_ptr, t, hidden, x_t, x_n, norm_eps,
    N: tl.constexpr, NORMS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Collapsed and normed row of token t, by the pre in memory."""
    h = tl.arange(0, BLOCK_H)
    inside = h < hidden
    collapsed = tl.zeros([BLOCK_H], tl.float32)
    for j in tl.static_range(N):
        stream = tl.load(x_ptr + t * x_t + j * x_n + h, mask=inside, other=0.0, cache_modifier=".cg")
        collapsed += tl.load(pre_ptr + t * N + j) * stream.to(tl.float32)
    rounded = collapsed.to(collapsed_ptr.dtype.element_ty)
    tl.store(collapsed_ptr + t * hidden + h, rounded, mask=inside)
    if NORMS:
        seen = rounded.to(tl.float32)
        length = tl.rsqrt(tl.sum(seen * seen, 0) / hidden + norm_eps)
        normed = seen * length * tl.load(norm_ptr + h, mask=inside, other=0.0)
        tl.store(normed_ptr + t * hidden + h, normed.to(normed_ptr.dtype.element_ty), mask=inside)


@triton.jit
def collapse_tokens(
    x_ptr, pre_ptr, norm_ptr, collapsed_ptr, normed_ptr, count, hidden, x_t, x_n, norm_eps,
    N: tl.constexpr, NORMS: tl.constexpr, BLOCK_H: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """`collapse_token` of tokens 0 ... count - 1, the last one first."""
    # What a thread has stored, of the streams too, another one loads.
    tl.debug_barrier()
    for back in tl.range(0, count, num_stages=AHEAD):
        t = count - 1 - back
        collapse_token(x_ptr, pre_ptr, norm_ptr, collapsed_ptr, normed_ptr, t, hidden, x_t, x_n, norm_eps, N, NORMS, BLOCK_H)
