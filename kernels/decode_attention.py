"""Attention of a few query tokens over a ring of token keys and entries of a fixed capacity: a step of decoding.

    scores        = q . k * scale over the tokens and entries the query may see, -inf elsewhere
    probabilities = softmax([scores, sink]) with the sink dropped
    output        = sum over keys of probabilities * k                       (K = V)

Which keys those are is read from positions, on the device: a query at position p sees the tokens at p - window + 1 ... p, in whatever
slots of the ring they lie, and entry j (of the selected ones, or of all) once j * rate + rate - 1 <= p. Slots without a token, and entries
that are not closed, may hold anything. No size depends on a value, so that one CUDA graph serves every step.
Softmax in float32, output rounded once. A query that sees nothing gets zeros.

`ring_attention` is the same over a ring in order, token p in slot p mod R, which a cache is between steps: nothing says where a token is
but its position, only a query's own window is walked, and what comes back is turned back by the query's angle. It has no gradient.

Axes: b batch, s query (1 to a few), N heads, D head width, R slots of the ring, E entries there is room for, t selected entries.
"""

import torch
from torch import Tensor

from dsv4.kernels import recompute
from dsv4.kernels.norm_rotary import rotate_back
from dsv4.kernels.numeric import wide
from dsv4.kernels.reach import visible_entries, visible_tokens
from dsv4.kernels.sparse_attention import refusal, softmax_with_sink


def decode_attention_reference(
    queries: Tensor,
    tokens: Tensor,
    entries: Tensor | None,
    sinks: Tensor,
    selection: Tensor | None,
    query_positions: Tensor,
    token_positions: Tensor,
    window: int,
    rate: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The definition, with every score held: same arguments and results as `decode_attention`."""
    keys = tokens if entries is None else torch.cat((tokens, entries), dim=1)
    seen = visible_tokens(query_positions, token_positions, window)
    if entries is not None:
        seen = torch.cat((seen, visible_entries(query_positions, rate, entries.shape[1], selection)), dim=-1)
    keys = wide(keys).masked_fill(~seen.any(1).unsqueeze(-1), 0.0)
    scores = torch.einsum("bsnd,bkd->bsnk", wide(queries), keys) * scale
    scores = scores.masked_fill(~seen.unsqueeze(2), float("-inf"))
    probabilities, _ = softmax_with_sink(scores, wide(sinks).expand(scores.shape[:-1]))
    out = torch.einsum("bsnk,bkd->bsnd", probabilities, keys).to(queries.dtype)
    return out, scores.logsumexp(-1).detach()


def decode_attention(
    queries: Tensor,
    tokens: Tensor,
    entries: Tensor | None,
    sinks: Tensor,
    selection: Tensor | None,
    query_positions: Tensor,
    token_positions: Tensor,
    window: int,
    rate: int,
    scale: float,
    backend: str = "torch",
) -> tuple[Tensor, Tensor]:
    """The keys of every query, in one call whose work on the host does not depend on any value.

    Args:
        queries: [b s N D] rotated. tokens: [b R D] rotated keys, in any order. entries: [b E D] or None. sinks: [N] float32.
        selection: [b s t] int64, an entry at most once, -1 for none; None for all closed entries.
        query_positions: [b s] int64, -1 at padding. token_positions: [b R] int64, -1 where a slot is empty; a position at most once.
        window: tokens seen, the query's own included. rate: tokens per entry (1 or more; any number without entries).
        scale: multiplies q . k. backend: "torch" or "triton".
    Returns:
        ([b s N D] of queries' dtype, log-sum-exp of the scores [b s N] float32 without the sink, -inf where nothing is seen; the second
        has no gradient)
    Raises:
        ValueError: shapes or dtypes that do not fit; backend="triton" where it cannot run, with the reason.
    """
    _check(queries, tokens, entries, sinks, selection, query_positions, token_positions, window, rate)
    given = queries, tokens, entries, sinks, selection, query_positions, token_positions, window, rate, scale
    if backend == "torch":
        return decode_attention_reference(*given)
    reason = refusal(backend, queries.device, queries.dtype, queries.shape[-1])
    if reason is not None:
        raise ValueError(f'backend="{backend}": {reason}; use backend="torch" (of a model: model.use_kernels("torch"))')
    return fused_decode_attention(*given)


@torch.library.custom_op("dsv4::decode_attention", mutates_args=())
def fused_decode_attention(
    queries: Tensor,
    tokens: Tensor,
    entries: Tensor | None,
    sinks: Tensor,
    selection: Tensor | None,
    query_positions: Tensor,
    token_positions: Tensor,
    window: int,
    rate: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`decode_attention` in device code: shares of the keys side by side, then their sums in a fixed order."""
    from dsv4.kernels import _decode_attention_triton as device_code

    return device_code.forward(queries, tokens, entries, sinks, selection, query_positions, token_positions, window, rate, scale)


@fused_decode_attention.register_fake
def _(queries, tokens, entries, sinks, selection, query_positions, token_positions, window, rate, scale):
    return queries.new_empty(queries.shape), queries.new_empty(queries.shape[:3], dtype=torch.float32)


recompute.register(fused_decode_attention, decode_attention_reference, tensors=7)


def ring_positions(query_positions: Tensor, slots: int) -> Tensor:
    """Of a ring in order, query_positions [b s] of its last tokens -> [b R] positions of the tokens it holds, -1 where there is none."""
    last = query_positions.amax(1, keepdim=True)
    held = last - (last - torch.arange(slots, device=last.device)) % slots
    return held.clamp(min=-1)


def ring_attention_reference(
    queries: Tensor,
    ring: Tensor,
    entries: Tensor | None,
    sinks: Tensor,
    selection: Tensor | None,
    query_positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    window: int,
    rate: int,
    scale: float,
) -> Tensor:
    """The definition: same arguments and result as `ring_attention`."""
    places = ring_positions(query_positions, ring.shape[1])
    out, _ = decode_attention_reference(queries, ring, entries, sinks, selection, query_positions, places, window, rate, scale)
    return rotate_back(out, cos.unsqueeze(2), sin.unsqueeze(2))


@torch.library.custom_op("dsv4::ring_attention", mutates_args=())
def ring_attention(
    queries: Tensor,
    ring: Tensor,
    entries: Tensor | None,
    sinks: Tensor,
    selection: Tensor | None,
    query_positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    window: int,
    rate: int,
    scale: float,
) -> Tensor:
    """`decode_attention` in device code over a ring in order, turned back.

    Args:
        ring: [b R D] rotated keys, token p in slot p mod R; R >= window + s - 1, or no row is longer than R. A row's queries are the last
            of its tokens.
        cos, sin: [b s turned / 2] float32 of the queries' positions. The other arguments are those of `decode_attention`.
    Returns:
        [b s N D] of queries' dtype, rounded once before it is turned and once after.
    Raises:
        ValueError: shapes or dtypes that do not fit, or a device on which it cannot run.
    """
    b, s, _, width = queries.shape
    _check(queries, ring, entries, sinks, selection, query_positions, None, window, rate)
    for name, angle in (("cos", cos), ("sin", sin)):
        half = angle.shape[-1]
        if angle.shape != (b, s, half) or angle.dtype != torch.float32 or (half and width % 2) or 2 * half > width:
            raise ValueError(f"{name} {list(angle.shape)} {angle.dtype} for heads of {width}; expected [{b} {s} turned/2] torch.float32")
    reason = refusal("triton", queries.device, queries.dtype, width)
    if reason is not None:
        raise ValueError(f'backend="triton": {reason}; use backend="torch" (of a model: model.use_kernels("torch"))')
    from dsv4.kernels import _decode_attention_triton as device_code

    return device_code.ring(queries, ring, entries, sinks, selection, query_positions, cos, sin, window, rate, scale)


@ring_attention.register_fake
def _(queries, ring, entries, sinks, selection, query_positions, cos, sin, window, rate, scale):
    return queries.new_empty(queries.shape)


def _check(queries, tokens, entries, sinks, selection, query_positions, token_positions, window: int, rate: int) -> None:
    if queries.dim() != 4 or tokens.dim() != 3:
        raise ValueError(f"queries {list(queries.shape)} and tokens {list(tokens.shape)}; expected [b s N D] and [b R D]")
    (b, s, heads, width), slots = queries.shape, tokens.shape[1]
    expected = {"tokens": (tokens, (b, slots, width)), "sinks": (sinks, (heads,))}
    expected["query_positions"] = (query_positions, (b, s))
    if token_positions is not None:
        expected["token_positions"] = (token_positions, (b, slots))
    if entries is not None:
        expected["entries"] = (entries, (b, entries.shape[1] if entries.dim() == 3 else -1, width))
    if selection is not None:
        expected["selection"] = (selection, (b, s, selection.shape[-1] if selection.dim() == 3 else -1))
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} {list(tensor.shape)} with queries [{b} {s} {heads} {width}]; expected {list(shape)}")
    if tokens.dtype != queries.dtype or (entries is not None and entries.dtype != queries.dtype):
        found = f"{tokens.dtype} and {None if entries is None else entries.dtype}"
        raise ValueError(f"tokens and entries are {found}; expected the dtype of the queries, {queries.dtype}")
    for name in ("query_positions", "token_positions", "selection"):
        if name in expected and expected[name][0].dtype != torch.int64:
            raise ValueError(f"{name} is {expected[name][0].dtype}; expected torch.int64")
    if selection is not None and entries is None:
        raise ValueError("a selection without entries; pass the entries it is of, or selection=None")
    if window < 1 or (entries is not None and rate < 1):
        raise ValueError(f"window={window}, rate={rate}; expected at least 1")
