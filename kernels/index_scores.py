"""The lightning indexer: scores of compressed entries for each query token, and the selection of the best.

    head_scores_h = relu(q_h * d^-1/2 . k)           scores = sum over heads of weight_h * head_scores_h

An entry is open to a query once its last token has been reached; scores of entries not closed yet are -inf and never selected.
Equal scores go to the lowest entry. Axes: b batch, s query, e entry, h index head, d index width.

`fused_index_scores` and `fused_select` are the same as registered ops (`dsv4::index_scores`, `dsv4::index_select`) over device code that
is imported when it is first asked for. Their keys may be float8_e4m3fn codes with a scale for each entry.
"""

import math

import torch
from torch import Tensor

from dsv4.kernels import recompute
from dsv4.kernels.backend import available
from dsv4.kernels.numeric import is_plain, topk_lowest, wide

# Head scores (floats) that are held at a time: what fits a core's cache. Scores that are: the more rows, the better threads share them.
CHUNK, SCORES = 1 << 19, 1 << 18
# A compiler may take the chunks of up to so many queries apart.
FEW_QUERIES = 4
# Scores (floats) that the device code holds at a time.
DEVICE_CHUNK = 1 << 26
# What it takes: a tile of queries and one of keys lie in shared memory, a row of what is kept in registers.
DEVICE_DTYPES = (torch.bfloat16, torch.float16)
MAX_HEADS = 64
MAX_WIDTH = 128
MAX_KEPT = 2048


def index_head_scores(queries: Tensor, keys: Tensor) -> Tensor:
    """queries [b s h d], keys [b e d] -> [b s h e] float32."""
    b, s, h, d = queries.shape
    products = (wide(queries) * d**-0.5).reshape(b, s * h, d) @ wide(keys).transpose(1, 2)
    return products.relu_().view(b, s, h, -1)


def combine_heads(head_scores: Tensor, weights: Tensor) -> Tensor:
    """head_scores [b s h e], weights [b s h] -> [b s e]."""
    return (weights.unsqueeze(-2) @ head_scores).squeeze(-2)


def select_entries(scores: Tensor, k: int) -> Tensor:
    """scores [b s e] with -inf where not closed -> [b s min(k, e)] int64, best first, -1 where nothing is left."""
    values, indices = topk_lowest(scores, min(k, scores.shape[-1]))
    return indices.masked_fill(values == float("-inf"), -1)


def closed_entries(positions: Tensor, rate: int, entries: int) -> Tensor:
    """positions [b s] (-1 at padding) -> [b s e] bool: entry j is visible once its last token, j * rate + rate - 1, has been reached."""
    last = torch.arange(entries, device=positions.device) * rate + (rate - 1)
    return last <= positions.unsqueeze(-1)


def select_by_index(queries: Tensor, keys: Tensor, weights: Tensor, positions: Tensor, rate: int, k: int, lead: int) -> Tensor:
    """The selection without the scores being kept: chunks of queries, each against the entries that its last query can see.

    Args:
        queries: [b s h d]. keys: [b e d]. weights: [b s h] float32. positions: [b s] int64, -1 at padding.
        lead: the most by which a position exceeds its column, over rows.
    Returns:
        [b s min(k, e)] int64, as `select_entries` of the masked scores.
    """
    if torch.compiler.is_compiling() and queries.shape[1] > FEW_QUERIES:
        return select_by_index_op(queries, keys, weights, positions, rate, k, lead)
    return _in_chunks(queries, keys, weights, positions, rate, k, lead)


@torch.library.custom_op("dsv4::select_by_index", mutates_args=())
def select_by_index_op(queries: Tensor, keys: Tensor, weights: Tensor, positions: Tensor, rate: int, k: int, lead: int) -> Tensor:
    """`select_by_index` as one operation, whose chunks a compiler does not unroll. A choice has no gradient."""
    return _in_chunks(queries, keys, weights, positions, rate, k, lead)


@select_by_index_op.register_fake
def _(queries, keys, weights, positions, rate, k, lead):
    return positions.new_empty(*queries.shape[:2], torch.sym_min(k, keys.shape[1]))


def _in_chunks(queries: Tensor, keys: Tensor, weights: Tensor, positions: Tensor, rate: int, k: int, lead: int) -> Tensor:
    b, s = queries.shape[:2]
    entries = keys.shape[1]
    width = min(k, entries)
    parts = []
    begin = 0
    while begin < s:
        end = begin + _fitting(begin + lead, SCORES * rate // b, s - begin)
        seen = min(entries, max(0, (end + lead) // rate))
        scores = _scores(queries[:, begin:end], keys[:, :seen], weights[:, begin:end], rate, begin + lead)
        # A single token sees all of them, unless `lead` is a bound (a step of fixed shape).
        if scores.numel() != seen or not is_plain(scores) or (positions[0, begin].item() + 1) // rate < seen:
            scores.masked_fill_(~closed_entries(positions[:, begin:end], rate, seen), float("-inf"))
        chosen = select_entries(scores, k)
        missing = width - chosen.shape[-1]
        parts.append(torch.nn.functional.pad(chosen, (0, missing), value=-1) if missing else chosen)
        begin = end
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def _fitting(seen_before: int, numbers: int, most: int) -> int:
    """The most queries n, at least 1, the last of which sees no more entries than fit: n (seen_before + n) <= numbers."""
    seen_before = max(seen_before, 0)
    return min(most, max(1, int((math.sqrt(seen_before**2 + 4 * numbers) - seen_before) / 2)))


def _scores(queries: Tensor, keys: Tensor, weights: Tensor, rate: int, seen_before: int) -> Tensor:
    """[b s e], its head scores a stretch of queries at a time."""
    b, s, h, _ = queries.shape
    stretch = _fitting(seen_before + s, CHUNK * rate // (b * h), s)
    if stretch == s:
        return combine_heads(index_head_scores(queries, keys), weights)
    parts = zip(queries.split(stretch, dim=1), weights.split(stretch, dim=1), strict=True)
    return torch.cat([combine_heads(index_head_scores(q, keys), w) for q, w in parts], dim=1)


def score_definition(queries: Tensor, keys: Tensor, key_scale: Tensor | None, weights: Tensor, positions: Tensor, rate: int) -> Tensor:
    """What `fused_index_scores` computes, in plain torch."""
    keys = wide(keys) if key_scale is None else wide(keys) * key_scale.unsqueeze(-1)
    scores = combine_heads(index_head_scores(queries, keys), weights)
    return scores.masked_fill(~closed_entries(positions, rate, keys.shape[1]), float("-inf"))


def refusal(backend: str, device: torch.device, dtype: torch.dtype, heads: int, width: int, k: int) -> str | None:
    """None where `backend` scores queries of this device, dtype, number of heads and width and keeps k entries, else the reason it
    does not.
    """
    reason = available(backend, device)
    if reason is not None or backend == "torch":
        return reason
    # Elsewhere than on a CUDA device the interpreter runs it, which takes float32 too.
    dtypes = DEVICE_DTYPES if device.type == "cuda" else (*DEVICE_DTYPES, torch.float32)
    if dtype not in dtypes:
        return f"its index queries are {' or '.join(map(str, dtypes))}, got {dtype}"
    if heads > MAX_HEADS or width > MAX_WIDTH:
        return f"it scores at most {MAX_HEADS} index heads of width {MAX_WIDTH}, got {heads} of {width}"
    return None if k <= MAX_KEPT else f"it keeps at most {MAX_KEPT} entries of a query, got {k}"


@torch.library.custom_op("dsv4::index_scores", mutates_args=())
def fused_index_scores(queries: Tensor, keys: Tensor, key_scale: Tensor | None, weights: Tensor, positions: Tensor, rate: int) -> Tensor:
    """Scores of every query and entry.

    Args:
        queries: [b s h d]. keys: [b e d] of the same dtype, or float8_e4m3fn with key_scale [b e] float32.
        weights: [b s h] float32. positions: [b s] int64, -1 at padding. rate: tokens of an entry.
    Returns:
        [b s e] float32, -inf where the entry is not closed.
    Raises:
        ValueError: shapes or dtypes that do not fit, or a device on which it cannot run.
    """
    _check(queries, keys, key_scale, weights, positions, rate, 0)
    from dsv4.kernels import _index_scores_triton as device_code

    rows = device_code.Rows.of(queries, keys, key_scale, weights, positions, rate)
    return rows.score(0, queries.shape[1], keys.shape[1], fills=True)


@fused_index_scores.register_fake
def _(queries, keys, key_scale, weights, positions, rate):
    return weights.new_empty(*queries.shape[:2], keys.shape[1])


@torch.library.custom_op("dsv4::index_select", mutates_args=())
def fused_select(
    queries: Tensor,
    keys: Tensor,
    key_scale: Tensor | None,
    weights: Tensor,
    positions: Tensor,
    rate: int,
    k: int,
    lead: int,
    weight_scale: float = 1.0,
) -> Tensor:
    """`select_by_index` of `fused_index_scores`, of which DEVICE_CHUNK are held at a time.

    Args:
        k: entries kept at most. lead: the most by which a position exceeds its column, over rows.
        weight_scale: multiplies the weights.
    Returns:
        [b s min(k, e)] int64, best first, equal scores lowest entry first, -1 where no entry is left (or its score is NaN).
    """
    _check(queries, keys, key_scale, weights, positions, rate, k)
    from dsv4.kernels import _index_scores_triton as device_code

    (b, s, _, _), entries = queries.shape, keys.shape[1]
    out = torch.empty(b, s, min(k, entries), dtype=torch.int64, device=queries.device)
    if out.numel() == 0:
        return out
    rows = device_code.Rows.of(queries, keys, key_scale, weights, positions, rate)
    begin = 0
    while begin < s:
        end = min(s, begin + _chunk(begin + lead, DEVICE_CHUNK * rate / b))
        seen = min(entries, max(1, (end + lead) // rate))
        rows.select(out, begin, end - begin, rows.score(begin, end - begin, seen, fills=False, weight_scale=weight_scale))
        begin = end
    return out


@fused_select.register_fake
def _(queries, keys, key_scale, weights, positions, rate, k, lead, weight_scale=1.0):
    return positions.new_empty(*queries.shape[:2], min(k, keys.shape[1]))


def _chunk(seen_before: int, room: float) -> int:
    """The most queries n with n (seen_before + n) <= room, but one at least."""
    before = max(seen_before, 0)
    return max(1, int((math.sqrt(before**2 + 4 * room) - before) / 2))


def _check(queries, keys, key_scale, weights, positions, rate: int, k: int) -> None:
    b, s, h, d = queries.shape
    reason = refusal("triton", queries.device, queries.dtype, h, d, k)
    if reason is not None:
        raise ValueError(f'backend="triton": {reason}; use backend="torch" (of a model: model.use_kernels("torch"))')
    entries = keys.shape[1]
    key_dtype = queries.dtype if key_scale is None else torch.float8_e4m3fn
    expected = {
        "keys": (keys, (b, entries, d), key_dtype),
        "key_scale": (key_scale, (b, entries), torch.float32),
        "weights": (weights, (b, s, h), torch.float32),
        "positions": (positions, (b, s), torch.int64),
    }
    for name, (t, shape, dtype) in expected.items():
        if t is not None and (t.shape != shape or t.dtype != dtype):
            raise ValueError(f"{name} {list(t.shape)} {t.dtype} for queries {list(queries.shape)}; expected {list(shape)} {dtype}")
    if rate < 1 or k < 0:
        raise ValueError(f"rate={rate} and k={k}: expected at least 1 and 0")


recompute.register(fused_index_scores, score_definition, tensors=5)
