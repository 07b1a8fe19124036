"""The lightning indexer: scores of compressed entries for each query token, and the selection of the best.

    head_scores_h = relu(q_h * d^-1/2 . k)           scores = sum over heads of weight_h * head_scores_h

An entry is open to a query once its last token has been reached; scores of entries not closed yet are -inf and never selected.
Equal scores go to the lowest entry. Axes: b batch, s query, e entry, h index head, d index width.
"""

import math

import torch
from torch import Tensor

from dsv4.kernels.numeric import topk_lowest, wide

# Head scores (floats) that are held at a time: what fits a core's cache.
CHUNK = 1 << 19


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
    b, s, h, _ = queries.shape
    entries = keys.shape[1]
    width = min(k, entries)
    parts = []
    begin = 0
    while begin < s:
        # The longest chunk whose last query sees no more entries than fit: n (begin + lead + n) / rate * b * h = CHUNK.
        seen_before = max(begin + lead, 0)
        length = (math.sqrt(seen_before**2 + 4 * CHUNK * rate / (b * h)) - seen_before) / 2
        end = min(s, begin + max(1, int(length)))
        seen = min(entries, max(0, (end + lead) // rate))
        scores = combine_heads(index_head_scores(queries[:, begin:end], keys[:, :seen]), weights[:, begin:end])
        closed = closed_entries(positions[:, begin:end], rate, seen)
        chosen = select_entries(scores.masked_fill_(~closed, float("-inf")), k)
        parts.append(torch.nn.functional.pad(chosen, (0, width - chosen.shape[-1]), value=-1))
        begin = end
    return torch.cat(parts, dim=1)
