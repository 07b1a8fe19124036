"""The lightning indexer of CSA blocks: which compressed entries each query keeps.

    scores    = sum over heads of weight_h * relu(q_h . k) * id^-1/2              weight = W x * ih^-1/2
    selection = the index_topk best of the entries closed for the query; equal scores: lowest entry first

It pools entries of its own, by the same windows as the attention's. The choice has no gradient.
Axes: b batch, s query, e entry, ih index head, id index width.
"""

import torch
from torch import Tensor, nn

from dsv4.call import OVERLAPPING, Call
from dsv4.compressor import EntryPool
from dsv4.config import Dsv4Config
from dsv4.hooks import HookPoint
from dsv4.kernels.index_scores import closed_entries, combine_heads, fused_select, index_head_scores, select_by_index, select_entries
from dsv4.linear import Linear


class Scorer(nn.Module):
    """Weights of the index heads."""

    def __init__(self, config: Dsv4Config):
        super().__init__()
        self.weights_proj = Linear(config.hidden_size, config.index_n_heads)

    def forward(self, x: Tensor) -> Tensor:
        """x [b s hidden] -> [b s ih] float32."""
        return self.weights_proj.in_float32(x) * self.weights_proj.out_features**-0.5


class Indexer(EntryPool):
    """Returns the selection [b s min(index_topk, e)], or None where every entry fits and nobody asks."""

    def __init__(self, config: Dsv4Config):
        super().__init__(config, OVERLAPPING, config.index_head_dim, series=2)
        self.heads, self.top_k = config.index_n_heads, config.index_topk
        self.q_b_proj = Linear(config.q_lora_rank, self.heads * self.width)
        self.scorer = Scorer(config)
        self.indexer_queries = HookPoint("b s ih id")
        self.indexer_keys = HookPoint("b e id")
        self.indexer_head_weights = HookPoint("b s ih")
        self.indexer_head_scores = HookPoint("b s ih e")
        self.indexer_scores = HookPoint("b s e")
        self.indexer_selection = HookPoint("b s min(index_topk,e)")

    def forward(self, x: Tensor, latent: Tensor, call: Call, kv=None) -> Tensor | None:
        """x [b s hidden], latent [b s q_lora_rank]."""
        windows = call.windows[self.layer_type]
        everything_fits = windows.total <= self.top_k and not self.spelled_out and not self.indexer_selection.live
        if everything_fits and kv is None:
            return None
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.spelled_out):
            keys = self.keys(x, call, kv)
            if everything_fits:
                return None
            return self.select(x, latent, keys, call)

    def keys(self, x: Tensor, call: Call, kv) -> Tensor:
        windows = call.windows[self.layer_type]
        projected = self.project(x) if kv is None else kv.projections.extend(self.project(x), windows.kept)
        entries = self.entries(projected, windows, x.dtype)
        return entries if kv is None else kv.entries.extend(entries, windows)

    def select(self, x: Tensor, latent: Tensor, keys: Tensor, call: Call) -> Tensor:
        tap = self.tap
        cos, sin = call.rotations["compress"]
        queries = self.q_b_proj(latent).unflatten(-1, (self.heads, self.width))
        queries = tap.indexer_queries(self.kv_norm.only_turned(queries, cos, sin))
        keys = tap.indexer_keys(keys)
        weights = tap.indexer_head_weights(self.scorer(x))
        rate = call.windows[self.layer_type].rate
        if self.spelled_out:
            chosen = self.spelled(queries, keys, weights, closed_entries(call.positions, rate, keys.shape[1]), call)
        else:
            chosen = self.fused(queries, keys, weights, call)
        selection = tap.indexer_selection(chosen)
        if selection is chosen:
            return chosen
        return self.as_set(selection, closed_entries(call.positions, rate, keys.shape[1]), call)

    def fused(self, queries: Tensor, keys: Tensor, weights: Tensor, call: Call) -> Tensor:
        rate = call.windows[self.layer_type].rate
        if self.backend == "triton":
            return fused_select(queries, keys, None, weights, call.positions, rate, self.top_k, call.lead)
        return select_by_index(queries, keys, weights, call.positions, rate, self.top_k, call.lead)

    def combine(self, head_scores: Tensor, weights: Tensor) -> Tensor:
        """[b s ih e], [b s ih] -> [b s e]."""
        return combine_heads(head_scores, weights)

    def spelled(self, queries: Tensor, keys: Tensor, weights: Tensor, closed: Tensor, call: Call) -> Tensor:
        """The definition, every score in its place; closed [b s e] -> the best of each query."""
        tap = self.tap
        head_scores = tap.indexer_head_scores(index_head_scores(queries, keys))
        scores = self.combine(head_scores, weights).masked_fill(~closed, float("-inf"))
        scores = tap.indexer_scores(scores).masked_fill(~closed, float("-inf"))
        if bool((scores.isnan() & call.valid.unsqueeze(-1)).any()):
            raise ValueError(f"{self.indexer_scores.name} holds NaN; an entry without a score is -inf")
        return select_entries(scores.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf")), self.top_k)

    def as_set(self, selection: Tensor, closed: Tensor, call: Call) -> Tensor:
        """A written selection: checked against the entries closed for each query, duplicates counted once."""
        entries = closed.shape[-1]
        allowed = torch.cat((closed, torch.ones_like(closed[..., :1])), dim=-1)
        inside = (selection >= -1) & (selection < entries)
        known = inside & allowed.gather(-1, selection.masked_fill(~inside | (selection < 0), entries))
        if bool((~known & call.valid.unsqueeze(-1)).any()):
            b, s, t = (~known & call.valid.unsqueeze(-1)).nonzero()[0].tolist()
            raise ValueError(
                f"{self.indexer_selection.name}[{b}, {s}, {t}] = {int(selection[b, s, t])}: that query may keep "
                f"{int(closed[b, s].sum())} of {entries} entries, numbered from 0; write -1 for fewer"
            )
        kept = selection.masked_fill(~known, -1)
        ordered, place = kept.sort(dim=-1, stable=True)
        # Later places that say what an earlier one says.
        repeated = torch.zeros_like(ordered, dtype=torch.bool)
        repeated[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
        return kept.masked_fill(torch.zeros_like(repeated).scatter(-1, place, repeated), -1)
