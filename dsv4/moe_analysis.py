"""Who was routed where: experts of a run, over its real tokens; padding is left out of every count and is NaN per token.

Axes: b row, s token captured, E expert, top_k slot.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from dsv4.kernels.numeric import topk_lowest, wide
from dsv4.reading import ByLayer, Reading

ENTROPIES = ("weights", "usage", "load")


class MoeAnalysis:
    """`cache.moe`. The routing is in the residual set. Layers are those captured, unless `layers` says which."""

    def __init__(self, cache):
        self.read = Reading(cache)

    @property
    def tokens(self) -> int:
        """Real tokens counted."""
        return int(self.read.valid.sum())

    def usage(self, layers: int | Iterable[int] | None = None) -> ByLayer:
        """{layer: [E] int64}: slots that went to each expert; sums to tokens * top_k."""
        chosen = self._layers(layers, ["expert_indices"], "usage")
        return ByLayer({i: self._sums(i, torch.ones_like) for i in chosen}, "slots per expert", "E", self.read)

    def load(self, layers: int | Iterable[int] | None = None) -> ByLayer:
        """{layer: [E] float32}: routing weight that went to each expert; sums to tokens * routed_scaling_factor, unless edited."""
        chosen = self._layers(layers, ["expert_weights", "expert_indices"], "load")
        return ByLayer(
            {i: self._sums(i, lambda _, i=i: self._real("expert_weights", i)) for i in chosen}, "weight per expert", "E", self.read
        )

    def entropy(self, of: str = "weights", layers: int | Iterable[int] | None = None) -> ByLayer:
        """In nats. of="weights": {layer: [b s]}, over the slots of each token, NaN at padding; "usage" or "load": {layer: []}, over
        the experts.
        """
        if of not in ENTROPIES:
            raise ValueError(f"of={of!r}: expected one of {', '.join(ENTROPIES)}")
        if of != "weights":
            return ByLayer({i: _entropy(v) for i, v in getattr(self, of)(layers).items()}, f"entropy of {of}", "", self.read)
        chosen = self._layers(layers, ["expert_weights"], "entropy")
        return ByLayer(
            {i: self._per_token(_entropy(self.read.of("expert_weights", i))) for i in chosen}, "entropy of weights", "b s", self.read
        )

    def coactivation(self, layers: int | Iterable[int] | None = None) -> ByLayer:
        """{layer: [E E] int64}: tokens that went to both experts; on the diagonal, to the expert at all."""
        values = {}
        for i in self._layers(layers, ["expert_indices"], "coactivation"):
            indices = self._real("expert_indices", i)
            used = torch.zeros(len(indices), self._experts(i), dtype=torch.float64, device=indices.device).scatter_(-1, indices, 1.0)
            values[i] = (used.T @ used).long()
        return ByLayer(values, "tokens per pair of experts", "E E", self.read)

    def router_margin(self, layers: int | Iterable[int] | None = None) -> ByLayer:
        """{layer: [b s]}: the last chosen selection score minus the first left out; inf where all experts are chosen, NaN at padding.

        Hash blocks choose by no score and are left out.
        """
        scored = [i for i in self.read.layers if self.read.model.layers[i].mlp.scoring != "hash"]
        if layers is None and not any(i in self.read.holding("router_selection_scores") for i in scored):
            self.read.require_layers(["router_selection_scores"], scored, "router_margin")
        for i in [layers] if isinstance(layers, int) else layers or ():
            if i in self.read.layers and i not in scored:
                raise ValueError(f"router_margin: layer {i} is a hash block, which chooses by token id and by no score")
        chosen = self._layers(layers, ["router_selection_scores"], "router_margin") if scored else []
        values = {}
        for i in chosen:
            scores, k = self.read.of("router_selection_scores", i), self.read.model.top_k
            if scores.shape[-1] == k:
                margin = torch.full_like(scores[..., 0], torch.inf)
            else:
                best = topk_lowest(scores, k + 1)[0]
                margin = best[..., k - 1] - best[..., k]
            values[i] = self._per_token(margin)
        return ByLayer(values, "router margin", "b s", self.read)

    def _layers(self, layers: int | Iterable[int] | None, leaves: list[str], what: str) -> list[int]:
        if layers is None:
            chosen = [i for i in self.read.layers if i in self.read.holding(leaves[0])] or self.read.layers
        else:
            chosen = [layers] if isinstance(layers, int) else list(layers)
        outside = [i for i in chosen if i not in self.read.layers]
        if outside:
            raise ValueError(f"layer {outside[0]}: the run went through layers {self.read.layers}")
        self.read.require_layers(leaves, chosen, what)
        return chosen

    def _experts(self, layer: int) -> int:
        return self.read.model.layers[layer].mlp.experts.num_experts

    def _real(self, leaf: str, layer: int) -> Tensor:
        """[tokens top_k]: the real tokens' slots."""
        value = self.read.of(leaf, layer)
        return value[self.read.valid.to(value.device)]

    def _sums(self, layer: int, of) -> Tensor:
        indices = self._real("expert_indices", layer).flatten()
        amounts = of(indices).flatten()
        return torch.zeros(self._experts(layer), dtype=amounts.dtype, device=indices.device).scatter_add_(0, indices, amounts)

    def _per_token(self, value: Tensor) -> Tensor:
        return self.read.drop(value.masked_fill(~self.read.valid.to(value.device), torch.nan))


def _entropy(amounts: Tensor) -> Tensor:
    """[... n] -> [...]: of the amounts over their sum."""
    shares = wide(amounts) / wide(amounts).sum(-1, keepdim=True)
    return torch.special.entr(shares).sum(-1)
