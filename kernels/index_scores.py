"""The lightning indexer: scores of compressed entries for each query token, and the selection of the best.

    head_scores_h = relu(q_h . k) * d^-1/2           scores = sum over heads of weight_h * head_scores_h

An entry is open to a query once its last token has been reached; scores of entries not closed yet are -inf and never selected.
Equal scores go to the lowest entry. Axes: b batch, s query, e entry, h index head, d index width.
"""

import torch
from torch import Tensor

from dsv4.kernels.numeric import topk_lowest, wide

# Floats of head scores held at a time by the chunked way.
CHUNK = 1 << 24


def index_head_scores(queries: Tensor, keys: Tensor) -> Tensor:
    """queries [b s h d], keys [b e d] -> [b s h e] float32."""
    b, s, h, d = queries.shape
    products = wide(queries).reshape(b, s * h, d) @ wide(keys).transpose(1, 2)
    return torch.relu(products).view(b, s, h, -1) * d**-0.5


def combine_heads(head_scores: Tensor, weights: Tensor) -> Tensor:
    """head_scores [b s h e], weights [b s h] -> [b s e]."""
    return (weights.unsqueeze(-2) @ head_scores).squeeze(-2)


def index_scores(queries: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """queries [b s h d], keys [b e d], weights [b s h] float32 -> scores [b s e] float32, in chunks of queries."""
    b, s, h, _ = queries.shape
    step = max(1, CHUNK // max(1, b * h * keys.shape[1]))
    parts = [
        combine_heads(index_head_scores(queries[:, i : i + step], keys), weights[:, i : i + step]) for i in range(0, s, step)
    ]
    return torch.cat(parts, dim=1)


def select_entries(scores: Tensor, k: int) -> Tensor:
    """scores [b s e] with -inf where not closed -> [b s min(k, e)] int64, best first, -1 where nothing is left."""
    values, indices = topk_lowest(scores, min(k, scores.shape[-1]))
    return indices.masked_fill(values == float("-inf"), -1)


def closed_entries(positions: Tensor, rate: int, entries: int) -> Tensor:
    """positions [b s] (-1 at padding) -> [b s e] bool: entry j is visible once its last token, j * rate + rate - 1, has been reached."""
    last = torch.arange(entries, device=positions.device) * rate + (rate - 1)
    return last <= positions.unsqueeze(-1)
