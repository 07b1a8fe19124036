"""Device code of dsv4.kernels.few_tokens: a few rows on a CPU, compiled by numba when they are first asked for.

Arrays come as the address of their first number and are dense: eleven arrays cost 5 us more to hand over than their addresses. Numbers are
float32; what becomes of the 24 mixing numbers of a token is computed in float64, and rounded where dsv4.kernels.hyper_connection rounds.
Only sums of products may be reordered: NaN and infinity spread as they do in torch.
"""

import math
import warnings

import numpy as np
from numba import carray, config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

REORDERED = {"reassoc", "contract", "nsz"}
# Not where numba was told to leave functions as they are.
RUNS = not config.DISABLE_JIT


def compiled(function):
    """Kept on disk where there is a folder to keep it in."""
    options = {"error_model": "numpy", "fastmath": REORDERED}
    try:
        found = njit(cache=True, **options)(function)
    except (RuntimeError, OSError):
        return njit(**options)(function)
    if RUNS:
        for use in ("load_overload", "save_overload"):
            setattr(found._cache, use, unless_it_fails(getattr(found._cache, use), found._cache.cache_path))
    return found


def unless_it_fails(use, folder):
    """What is kept on disk saves seconds; it may be damaged, or find no room: then it is compiled without."""

    def guarded(*given):
        try:
            return use(*given)
        except Exception as error:
            message = f"numba's cache of compiled code failed ({type(error).__name__}: {error}): compiled anew, which takes seconds. Empty "
            message += f"{folder}, or set NUMBA_CACHE_DIR to a folder with room"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            return None

    return guarded


def exact(function):
    return njit(error_model="numpy")(function)


@intrinsic
def at(context, address):
    def generate(_, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@exact
def reals(address, shape):
    return carray(at(address), shape, np.float32)


@exact
def integers(address, shape):
    return carray(at(address), shape, np.int64)


# Loops, where numba would take an assignment to a slice: that takes it longer to compile (8 s for this file, against 6).


@exact
def copy(given, found):
    for i in range(len(found)):
        found[i] = given[i]


@exact
def copy_rows(given, found):
    for i in range(len(found)):
        copy(given[i], found[i])


@exact
def clear(found):
    for i in range(len(found)):
        found[i] = 0


@compiled
def dot(a, b, n):
    total = np.float32(0)
    for i in range(n):
        total += a[i] * b[i]
    return total


@exact
def sigmoid(z):
    return 1.0 / (1.0 + math.exp(-z))


@compiled
def inverse_rms(row, n, eps):
    return 1.0 / math.sqrt(np.float64(dot(row, row, n)) / n + eps)


# Hyper-connection.


@compiled
def project(row, fn, rms_eps, found):
    inverse = inverse_rms(row, len(row), rms_eps)
    for j in range(len(fn)):
        found[j] = dot(fn[j], row, len(row)) * inverse


@exact
def weigh(logits, scale, base, factor, eps, found):
    for j in range(len(found)):
        found[j] = factor * sigmoid(logits[j] * np.float64(scale) + base[j]) + eps


@exact
def begin(logits, scale, base, eps, n, found):
    for i in range(n):
        top = -np.inf
        for j in range(n):
            z = logits[i * n + j] * np.float64(scale) + base[i * n + j]
            found[i, j] = z
            top = max(top, z)
        total = 0.0
        for j in range(n):
            found[i, j] = math.exp(found[i, j] - top)
            total += found[i, j]
        for j in range(n):
            # Rounded, as between the steps.
            found[i, j] = np.float32(found[i, j] / total + eps)


@exact
def divide(comb, eps, n, by_rows):
    for i in range(n):
        total = 0.0
        for j in range(n):
            total += comb[i, j] if by_rows else comb[j, i]
        for j in range(n):
            if by_rows:
                comb[i, j] /= total + eps
            else:
                comb[j, i] /= total + eps


@compiled
def sum_streams(streams, weights, found):
    clear(found)
    for j in range(len(weights)):
        for i in range(len(found)):
            found[i] += weights[j] * streams[j, i]


@compiled
def write_streams(streams, comb, post, out, written):
    n, h = streams.shape
    for k in range(n):
        for i in range(h):
            written[k, i] = post[k] * out[i]
        for j in range(n):
            for i in range(h):
                written[k, i] += comb[j, k] * streams[j, i]


@compiled
def norm_row(row, weight, eps, found):
    inverse = np.float32(inverse_rms(row, len(row), eps))
    for i in range(len(row)):
        found[i] = row[i] * inverse
    if len(weight):
        for i in range(len(row)):
            found[i] *= weight[i]


@compiled
def mix_logits(tokens, m, d, x, fn, rms_eps, out):
    x, fn, out = reals(x, (tokens, d)), reals(fn, (m, d)), reals(out, (tokens, m))
    for t in range(tokens):
        project(x[t], fn, rms_eps, out[t])


@compiled
def stream_weights(tokens, n, logits, scale, base, factor, eps, out):
    logits, scale, base, out = reals(logits, (tokens, n)), reals(scale, (1,)), reals(base, (n,)), reals(out, (tokens, n))
    for t in range(tokens):
        weigh(logits[t], scale[0], base, factor, eps, out[t])


@compiled
def mixing_start(tokens, n, logits, scale, base, eps, out):
    logits, scale, base = reals(logits, (tokens, n * n)), reals(scale, (1,)), reals(base, (n * n,))
    out = reals(out, (tokens, n, n))
    found = np.empty((n, n))
    for t in range(tokens):
        begin(logits[t], scale[0], base, eps, n, found)
        copy_rows(found, out[t])


@compiled
def sinkhorn_rounds(tokens, n, iters, start, eps, out):
    start, out = reals(start, (tokens, n, n)), reals(out, (tokens, iters, n, n))
    comb = np.empty((n, n))
    for t in range(tokens):
        copy_rows(start[t], comb)
        divide(comb, eps, n, False)
        copy_rows(comb, out[t, 0])
        for i in range(1, iters):
            divide(comb, eps, n, True)
            divide(comb, eps, n, False)
            copy_rows(comb, out[t, i])


@compiled
def collapse(tokens, n, h, x, weights, out):
    x, weights, out = reals(x, (tokens, n, h)), reals(weights, (tokens, n)), reals(out, (tokens, h))
    for t in range(tokens):
        sum_streams(x[t], weights[t], out[t])


@compiled
def write(tokens, n, h, x, comb, post, out, written):
    x, comb, post = reals(x, (tokens, n, h)), reals(comb, (tokens, n, n)), reals(post, (tokens, n))
    out, written = reals(out, (tokens, h)), reals(written, (tokens, n, h))
    for t in range(tokens):
        write_streams(x[t], comb[t], post[t], out[t], written[t])


@compiled
def read(tokens, n, h, x, fn, scale, base, norm, iters, eps, rms_eps, norm_eps, pre, post, comb, collapsed, normed):
    """norm and normed: 0 for none."""
    m = (2 + n) * n
    x, fn, scale, base = reals(x, (tokens, n, h)), reals(fn, (m, n * h)), reals(scale, (3,)), reals(base, (m,))
    pre, post, comb = reals(pre, (tokens, n)), reals(post, (tokens, n)), reals(comb, (tokens, n, n))
    norms = norm != 0
    norm, collapsed, normed = reals(norm, (h if norms else 0,)), reals(collapsed, (tokens, h)), reals(normed, (tokens if norms else 0, h))
    logits = np.empty(m, np.float32)
    mix = np.empty((n, n))
    for t in range(tokens):
        project(x[t].reshape(n * h), fn, rms_eps, logits)
        weigh(logits[:n], scale[0], base[:n], 1.0, eps, pre[t])
        weigh(logits[n : 2 * n], scale[1], base[n : 2 * n], 2.0, 0.0, post[t])
        begin(logits[2 * n :], scale[2], base[2 * n :], eps, n, mix)
        divide(mix, eps, n, False)
        for _ in range(1, iters):
            divide(mix, eps, n, True)
            divide(mix, eps, n, False)
        copy_rows(mix, comb[t])
        sum_streams(x[t], pre[t], collapsed[t])
        if norms:
            norm_row(collapsed[t], norm, norm_eps, normed[t])


# Rows.


@compiled
def norm(rows, d, x, weight, eps, out):
    x, out, weight = reals(x, (rows, d)), reals(out, (rows, d)), reals(weight, (d if weight != 0 else 0,))
    for t in range(rows):
        norm_row(x[t], weight, eps, out[t])


@compiled
def linear(o, i, x, weight, out):
    x, weight, out = reals(x, (i,)), reals(weight, (o, i)), reals(out, (o,))
    for j in range(o):
        out[j] = dot(weight[j], x, i)


@compiled
def swiglu(gate, up, limit):
    if gate > limit:
        gate = limit
    if up > limit:
        up = limit
    if up < -limit:
        up = -limit
    return np.float32(gate * sigmoid(np.float64(gate)) * up)


@compiled
def gated(o, i, x, gate, up, limit, out):
    x, gate, up, out = reals(x, (i,)), reals(gate, (o, i)), reals(up, (o, i)), reals(out, (o,))
    for j in range(o):
        out[j] = swiglu(dot(gate[j], x, i), dot(up[j], x, i), np.float32(limit))


@compiled
def activate(n, gate, up, limit, out):
    gate, up, out = reals(gate, (n,)), reals(up, (n,)), reals(out, (n,))
    for j in range(n):
        out[j] = swiglu(gate[j], up[j], np.float32(limit))


@compiled
def add_slot(x, gate_up, down, weight, limit, neurons, out):
    i, h = len(neurons), len(x)
    for j in range(i):
        neurons[j] = swiglu(dot(gate_up[j], x, h), dot(gate_up[i + j], x, h), np.float32(limit))
    for j in range(h):
        out[j] += weight * dot(down[j], neurons, i)


@compiled
def experts(k, e, i, h, x, indices, weights, first, second, limit, out):
    """-> the first slot whose index is outside 0 <= index < e, or -1."""
    x, indices, weights, out = reals(x, (h,)), integers(indices, (k,)), reals(weights, (k,)), reals(out, (h,))
    first, second = reals(first, (e, 2 * i, h)), reals(second, (e, h, i))
    for slot in range(k):
        if indices[slot] < 0 or indices[slot] >= e:
            return slot
    neurons = np.empty(i, np.float32)
    clear(out)
    for slot in range(k):
        add_slot(x, first[indices[slot]], second[indices[slot]], weights[slot], limit, neurons, out)
    return -1


@compiled
def add_expert(i, h, x, gate_up, down, weights, slot, limit, out):
    x, out, weight = reals(x, (h,)), reals(out, (h,)), reals(weights, (slot + 1,))[slot]
    add_slot(x, reals(gate_up, (2 * i, h)), reals(down, (h, i)), weight, limit, np.empty(i, np.float32), out)


@compiled
def turn(rows, d, half, x, weight, cos, sin, norms, eps, out):
    """Each row's last 2 * half numbers, in pairs, turned by the one angle of each pair, with `norms` behind the norm."""
    x, out, weight = reals(x, (rows, d)), reals(out, (rows, d)), reals(weight, (d if weight != 0 else 0,))
    cos, sin = reals(cos, (half,)), reals(sin, (half,))
    begin = d - 2 * half
    for t in range(rows):
        if norms:
            norm_row(x[t], weight, eps, out[t])
        else:
            copy(x[t], out[t])
        turned = out[t, begin:]
        for i in range(half):
            even, odd = turned[2 * i], turned[2 * i + 1]
            turned[2 * i] = even * cos[i] - odd * sin[i]
            turned[2 * i + 1] = even * sin[i] + odd * cos[i]


@compiled
def add_keys(weights, keys, count, found):
    for j in range(count):
        for i in range(len(found)):
            found[i] += weights[j] * keys[j, i]


@compiled
def attend(heads, d, w, e, kept, queries, tokens, entries, sinks, selection, position, places, window, rate, scale, out):
    """kept: entries of `selection`, or -1 for all e. -> the first place of the selection that names no entry, or -1."""
    queries, out, sinks = reals(queries, (heads, d)), reals(out, (heads, d)), reals(sinks, (heads,))
    tokens, entries = reals(tokens, (w, d)), reals(entries, (e, d))
    position, places, selection = integers(position, (1,))[0], integers(places, (w,)), integers(selection, (max(kept, 0),))
    for j in range(kept):
        if selection[j] < -1 or selection[j] >= e:
            return j
    keys = np.empty((w + (e if kept < 0 else kept), d), np.float32)
    count = 0
    if position >= 0:
        for j in range(w):
            if places[j] >= 0 and 0 <= position - places[j] < window:
                copy(tokens[j], keys[count])
                count += 1
        for j in range(e if kept < 0 else kept):
            entry = j if kept < 0 else selection[j]
            if entry >= 0 and (entry + 1) * rate <= position + 1:
                copy(entries[entry], keys[count])
                count += 1
    scores = np.empty(count, np.float32)
    query = np.empty(d, np.float32)
    for head in range(heads):
        # Padding sees nothing, whatever its sink.
        sink = sinks[head] if position >= 0 else np.float32(0)
        top = sink
        for i in range(d):
            query[i] = queries[head, i] * np.float32(scale)
        for j in range(count):
            scores[j] = dot(query, keys[j], d)
            top = max(top, scores[j])
        total = np.float32(math.exp(sink - top))
        for j in range(count):
            scores[j] = math.exp(scores[j] - top)
            total += scores[j]
        for j in range(count):
            scores[j] /= total
        clear(out[head])
        add_keys(scores, keys, count, out[head])
    return -1
