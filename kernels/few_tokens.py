"""A few tokens on a CPU where nobody records or transforms: one call into compiled code instead of dozens into torch.

Equations: those of the functions that ask here first (`takes`). Results are float32 where torch's would be, equal to torch's but for the
order of sums. Without numba torch computes them, with a warning. Axes: b batch, s token, n stream, h hidden, m (2 + n) n, t token.
"""

import warnings
from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor, float32
from torch._C import _len_torch_function_stack
from torch.nn import Parameter

from dsv4.kernels.numeric import is_plain, wide

# For more, every mode of recording gives the same numbers.
FEW_TOKENS = 2
# Numbers of a matrix up to which one thread is to read it; torch shares larger ones among its threads.
SMALL = 1 << 19


@cache
def device_code():
    """The module, or None where numba does not run: its absence is told once."""
    try:
        from dsv4.kernels import _few_tokens_numba
    except (ImportError, OSError, SystemError) as error:
        message = f"numba cannot be imported ({error}): torch computes single tokens on a CPU, in about twice the time. Install a "
        message += "numba that takes this numpy"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return None
    return _few_tokens_numba if _few_tokens_numba.RUNS else None


def takes(x: Tensor, tokens: int, *held: tuple[Tensor, Sequence[int]]) -> bool:
    """Whether so many tokens of x go through compiled code, beside dense float32 tensors `held`, each with the shape it has to have: what
    does not fit is left to torch, which says why.
    """
    is_few = 0 < tokens <= FEW_TOKENS and x.dtype != torch.float64 and is_plain(x) and has_memory(x)
    return is_few and all(is_held(*pair) for pair in held) and not _len_torch_function_stack() and device_code() is not None


def has_memory(x: Tensor) -> bool:
    """Whether x's numbers stand in memory as they are."""
    return x.data_ptr() != 0 and not x.is_neg()


def is_held(t: Tensor, shape: Sequence[int]) -> bool:
    """Whether compiled code reads t, which has to have this shape."""
    fits = t.shape == shape and t.dtype == float32 and t.is_cpu and (type(t) is Parameter or type(t) is Tensor)
    return fits and t.is_contiguous() and has_memory(t)


def _dense(x: Tensor) -> Tensor:
    return wide(x).contiguous()


# Hyper-connection: arguments and results as in dsv4.kernels.hyper_connection.


def mix_logits(x: Tensor, fn: Tensor, rms_eps: float) -> Tensor:
    tokens = x.shape[:-2]
    x = _dense(x)
    out = x.new_empty(*tokens, len(fn))
    device_code().mix_logits(tokens.numel(), *fn.shape, x.data_ptr(), fn.data_ptr(), float(rms_eps), out.data_ptr())
    return out


def stream_weights(logits: Tensor, scale: Tensor, base: Tensor, factor: float, eps: float) -> Tensor:
    """factor * sigmoid(scale * logits + base) + eps."""
    n = logits.shape[-1]
    logits = logits.contiguous()
    out = torch.empty_like(logits)
    pointers = (t.data_ptr() for t in (logits, scale, base))
    device_code().stream_weights(logits.numel() // n, n, *pointers, factor, float(eps), out.data_ptr())
    return out


def mixing_start(logits: Tensor, scale: Tensor, base: Tensor, eps: float, n: int) -> Tensor:
    tokens = logits.shape[:-1]
    logits = logits.contiguous()
    out = logits.new_empty(*tokens, n, n)
    pointers = (t.data_ptr() for t in (logits, scale, base))
    device_code().mixing_start(tokens.numel(), n, *pointers, float(eps), out.data_ptr())
    return out


def sinkhorn_rounds(start: Tensor, iters: int, eps: float) -> Tensor:
    *tokens, n, _ = start.shape
    start = start.contiguous()
    out = start.new_empty(*tokens, iters, n, n)
    device_code().sinkhorn_rounds(start.numel() // (n * n), n, iters, start.data_ptr(), float(eps), out.data_ptr())
    return out


def collapse(x: Tensor, pre: Tensor) -> Tensor:
    *tokens, n, h = x.shape
    given = _dense(x)
    out = given.new_empty(*tokens, h)
    device_code().collapse(pre.numel() // n, n, h, given.data_ptr(), pre.data_ptr(), out.data_ptr())
    return out.to(x.dtype)


def write_back(x: Tensor, comb: Tensor, post: Tensor, out: Tensor) -> Tensor:
    *_, n, h = x.shape
    given, out = _dense(x), _dense(out)
    written = torch.empty_like(given)
    pointers = (t.data_ptr() for t in (given, comb, post, out, written))
    device_code().write(post.numel() // n, n, h, *pointers)
    return written.to(x.dtype)


def read(
    x: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm: Tensor | None,
    iters: int,
    eps: float,
    rms_eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """(pre [b s n], post [b s n], comb [b s n n], collapsed [b s h], normed [b s h], or None without a norm and for streams that are not
    float32, whose collapsed row is rounded first).
    """
    b, s, n, h = x.shape
    dtype = x.dtype
    norm = norm if dtype == float32 else None
    x = _dense(x)
    pre, post, comb, collapsed = x.new_empty(b, s, n), x.new_empty(b, s, n), x.new_empty(b, s, n, n), x.new_empty(b, s, h)
    normed = None if norm is None else torch.empty_like(collapsed)
    device_code().read(
        *(b * s, n, h, x.data_ptr(), fn.data_ptr(), scale.data_ptr(), base.data_ptr(), 0 if norm is None else norm.data_ptr()),
        *(iters, float(eps), float(rms_eps), float(norm_eps), pre.data_ptr(), post.data_ptr(), comb.data_ptr()),
        *(collapsed.data_ptr(), 0 if norm is None else normed.data_ptr()),
    )
    return pre, post, comb, collapsed.to(dtype), normed


# Rows.


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [..., d], weight [d] or None -> [..., d] of x's dtype."""
    d = x.shape[-1]
    given = _dense(x)
    out = torch.empty_like(given)
    device_code().norm(given.numel() // d, d, given.data_ptr(), 0 if weight is None else weight.data_ptr(), float(eps), out.data_ptr())
    return out.to(x.dtype)


def turn(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float | None) -> Tensor:
    """`rms_norm`, left out without eps, and the rotary of one token: x [..., d] float32, cos and sin [..., r / 2] of one angle each."""
    d, half = x.shape[-1], cos.shape[-1]
    x = x.contiguous()
    out = torch.empty_like(x)
    pointers = (x.data_ptr(), 0 if weight is None else weight.data_ptr(), cos.data_ptr(), sin.data_ptr())
    device_code().turn(x.numel() // d, d, half, *pointers, eps is not None, float(eps or 0.0), out.data_ptr())
    return out


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [... i], weight [o i] -> [... o], of any device and number of rows.

    A row takes a small matrix in order, at the speed of memory: 256 x 256 numbers that no cache of the core holds in 4 us, where torch's
    product takes 5 to 19, by what else the machine does.
    """
    i = x.shape[-1]
    is_row = x.numel() == i and x.dtype == float32 and weight.numel() <= SMALL
    if is_row and takes(x, 1, (weight, (len(weight), i))):
        given, o = x.contiguous(), len(weight)
        out = given.new_empty(*x.shape[:-1], o)
        device_code().linear(o, i, given.data_ptr(), weight.data_ptr(), out.data_ptr())
        return out
    return torch.nn.functional.linear(x, weight)


def takes_gated(x: Tensor, gate: Tensor, up: Tensor) -> bool:
    """Whether `gated` takes x, a row, over these small dense weights."""
    shape, is_row = (len(gate), x.shape[-1]), x.numel() == x.shape[-1] and x.dtype == float32
    return is_row and gate.numel() <= SMALL and takes(x, 1, (gate, shape), (up, shape))


def gated(x: Tensor, gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate x, limit)) * clamp(up x, -limit, limit) of one row: x [... i], gate and up [o i] -> [... o]."""
    (o, i), x = gate.shape, x.contiguous()
    out = x.new_empty(*x.shape[:-1], o)
    device_code().gated(o, i, x.data_ptr(), gate.data_ptr(), up.data_ptr(), float(limit), out.data_ptr())
    return out


def takes_swiglu(gate: Tensor, up: Tensor) -> bool:
    """Whether `swiglu` takes these rows."""
    is_row = gate.numel() == gate.shape[-1] and gate.dtype == float32
    return is_row and takes(gate, 1, (gate, gate.shape), (up, gate.shape))


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """What `gated` makes of its products, of one row."""
    out = torch.empty_like(gate)
    device_code().activate(gate.numel(), gate.data_ptr(), up.data_ptr(), float(limit), out.data_ptr())
    return out


def takes_slots(x: Tensor, weights: Tensor, inner: int) -> bool:
    """Whether `add_experts` takes one token x [1 h] through dense matrices of so many neurons."""
    return len(x) == 1 and x.dtype == float32 and 2 * inner * x.shape[1] <= SMALL and takes(x, 1, (weights, (1, weights.shape[-1])))


def add_experts(x: Tensor, weights: Tensor, matrices: Iterable[tuple[Tensor, Tensor]], limit: float) -> Tensor:
    """`experts` over matrices that come one after another, (gate over up [2i h], down [h i]) for each slot, float32."""
    x, out = x.contiguous(), x.new_zeros(x.shape)
    for slot, (gate_up, down) in enumerate(matrices):
        h, i = down.shape
        if not (h == x.shape[1] and is_held(down, (h, i)) and is_held(gate_up, (2 * i, h)) and slot < weights.numel()):
            raise ValueError(
                f"matrices {list(gate_up.shape)} and {list(down.shape)} of slot {slot} of {weights.numel()} for a row of {x.shape[1]}"
            )
        pointers = (t.data_ptr() for t in (x, gate_up, down, weights))
        device_code().add_expert(i, h, *pointers, slot, float(limit), out.data_ptr())
    return out


def takes_bank(x: Tensor, indices: Tensor, weights: Tensor, first: Tensor, second: Tensor) -> bool:
    """Whether `experts` takes one token over this bank: it is dense, and a matrix of it is small."""
    e, h, i = second.shape
    is_row = len(x) == len(indices) == 1 and x.dtype == float32 and x.shape[1] == h and 2 * i * h <= SMALL
    fits = is_row and indices.dtype == torch.int64 and is_plain(indices) and has_memory(indices)
    return fits and takes(x, 1, (weights, indices.shape), (first, (e, 2 * i, h)), (second, (e, h, i)))


def experts(x: Tensor, indices: Tensor, weights: Tensor, first: Tensor, second: Tensor, limit: float) -> Tensor:
    """x [1 h], indices and weights [1 k], a dense bank first [e 2i h], second [e h i] -> [1 h], the sum over slots.

    IndexError for an expert that the bank does not have.
    """
    e, h, i = second.shape
    x, indices = x.contiguous(), indices.contiguous()
    out = torch.empty_like(x)
    pointers = (t.data_ptr() for t in (x, indices, weights, first, second))
    outside = device_code().experts(indices.numel(), e, i, h, *pointers, float(limit), out.data_ptr())
    if outside >= 0:
        raise IndexError(f"expert {int(indices[0, outside])} of a bank of {e}; expected 0 <= index < {e}")
    return out


def takes_attention(queries: Tensor, tokens: Tensor, entries: Tensor | None, sinks: Tensor, reach, selection: Tensor | None) -> bool:
    """Whether `attention` takes these arguments."""
    b, s, heads, d = queries.shape
    if b * s != 1 or queries.dtype != float32:
        return False
    held = [(tokens, (1, tokens.shape[1], d)), (sinks, (heads,))]
    if entries is not None:
        held.append((entries, (1, entries.shape[1], d)))
    places = [(reach.query_positions, (1, 1)), (reach.token_positions, tokens.shape[:2])]
    if selection is not None and selection.shape[-1]:
        places.append((selection, (1, 1, selection.shape[-1])))
    fit = all(t.shape == shape and t.dtype == torch.int64 and is_plain(t) and has_memory(t) for t, shape in places)
    return fit and takes(queries, 1, *held)


def attention(
    queries: Tensor, tokens: Tensor, entries: Tensor | None, sinks: Tensor, reach, selection: Tensor | None, scale: float
) -> Tensor:
    """`dsv4.kernels.sparse_attention.sparse_attention` of one query [1 1 N D]."""
    _, _, heads, d = queries.shape
    position, places = reach.query_positions.contiguous(), reach.token_positions.contiguous()
    queries = queries.contiguous()
    selection = None if selection is None else selection.contiguous()
    out = torch.empty_like(queries)
    counts = (tokens.shape[1], 0 if entries is None else entries.shape[1], -1 if selection is None else selection.shape[-1])
    pointers = (0 if t is None else t.data_ptr() for t in (queries, tokens, entries, sinks, selection, position, places))
    outside = device_code().attend(heads, d, *counts, *pointers, int(reach.window), reach.rate, float(scale), out.data_ptr())
    if outside >= 0:
        entry = int(selection[0, 0, outside])
        raise IndexError(f"entry {entry} is selected of {counts[1]}; expected 0 <= entry < {counts[1]}, or -1")
    return out
