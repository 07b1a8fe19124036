"""Attention of a few query tokens over a ring of token keys and entries of a fixed capacity: a step of decoding.

    scores        = q . k * scale over the tokens and entries the query may see, -inf elsewhere
    probabilities = softmax([scores, sink]) with the sink dropped
    output        = sum over keys of probabilities * k                       (K = V)

Which keys those are is read from positions, on the device: a query at position p sees the tokens at p - window + 1 ... p, in whatever
slots of the ring they lie, and entry j (of the selected ones, or of all) once j * rate + rate - 1 <= p. Slots without a token, and entries
that are not closed, may hold anything. No size depends on a value, so that one CUDA graph serves every step.
Softmax in float32, output rounded once. A query that sees nothing gets zeros.

Axes: b batch, s query (1 to a few), N heads, D head width, R slots of the ring, E entries there is room for, t selected entries.
"""

import torch
from torch import Tensor

from dsv4.kernels import recompute
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


def _check(queries, tokens, entries, sinks, selection, query_positions, token_positions, window: int, rate: int) -> None:
    if queries.dim() != 4 or tokens.dim() != 3:
        raise ValueError(f"queries {list(queries.shape)} and tokens {list(tokens.shape)}; expected [b s N D] and [b R D]")
    (b, s, heads, width), slots = queries.shape, tokens.shape[1]
    expected = {"tokens": (tokens, (b, slots, width)), "sinks": (sinks, (heads,))}
    expected |= {"query_positions": (query_positions, (b, s)), "token_positions": (token_positions, (b, slots))}
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
