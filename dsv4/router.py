"""Routers: which experts a token goes to and with what weight.

    scores  = sqrt(softplus(W x))
    indices = top-k of scores + bias (equal scores: lowest expert), or a table of the token id on hash blocks
    weights = scores of the chosen / their sum * routed_scaling_factor          (the bias never enters)

Float32 throughout. Axes: b batch, s token, E experts, k slot.
"""

import torch
from torch import Tensor, nn

from dsv4.call import Call
from dsv4.config import Dsv4Config
from dsv4.float32 import Float32
from dsv4.kernels.numeric import sqrt_softplus, topk_lowest
from dsv4.kernels.router import FEW_TOKENS, Routes, fused_router, router_weights
from dsv4.linear import Linear


class Router(Linear, Float32):
    """The shared half: scores and weights. Subclasses choose the experts.

    Attributes:
        backend: who computes `in_one`; chosen once, when the model is built (pretrained.use_kernels).
    """

    backend = "torch"
    scoring: str
    FLOAT32 = ()

    def __init__(self, config: Dsv4Config):
        super().__init__(config.hidden_size, config.n_routed_experts)
        self.top_k, self.factor = config.num_experts_per_tok, config.routed_scaling_factor

    def logits(self, x: Tensor) -> Tensor:
        return self.in_float32(x)

    def scores(self, logits: Tensor) -> Tensor:
        return sqrt_softplus(logits)

    def weights(self, scores: Tensor, indices: Tensor) -> Tensor:
        return router_weights(scores, indices, self.factor)

    def takes(self, x: Tensor) -> bool:
        """Whether there is device code that routes x [b s hidden] in one launch. What a class over these computes it does not know."""
        return type(self) in OWN and self.backend == "triton" and 0 < x.shape[0] * x.shape[1] <= FEW_TOKENS

    def in_one(self, x: Tensor, call: Call) -> Routes:
        """All of it at once: reals and indices [b s ...], the sorted slots of all tokens."""
        valid, chooser = call.without_padding, self.chooser(call)
        valid = None if valid is None else valid.flatten()
        routes = Routes(*fused_router(x.flatten(0, 1), self.weight, *chooser, valid, self.top_k, self.factor))
        return Routes(*(t.unflatten(0, x.shape[:2]) if t.numel() else t for t in routes[:5]), *routes[5:])

    def chooser(self, call: Call) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(bias [E], None, None), or (None, table, row of each token [b*s])."""
        raise NotImplementedError


class TopKRouter(Router):
    """The best of scores + correction bias."""

    FLOAT32 = ("e_score_correction_bias",)

    def __init__(self, config: Dsv4Config):
        super().__init__(config)
        self.scoring = config.scoring_func
        self.e_score_correction_bias = nn.Buffer(torch.empty(config.n_routed_experts, dtype=torch.float32))

    def selection_scores(self, scores: Tensor) -> Tensor:
        return scores + self.e_score_correction_bias

    def choose(self, selection_scores: Tensor) -> Tensor:
        return topk_lowest(selection_scores, self.top_k)[1]

    def chooser(self, call):
        return self.e_score_correction_bias, None, None


class HashRouter(Router):
    """A fixed table of the token id; there is no bias and nothing to choose."""

    scoring = "hash"

    def __init__(self, config: Dsv4Config):
        super().__init__(config)
        self.tid2eid = nn.Buffer(torch.empty(config.vocab_size, config.num_experts_per_tok, dtype=torch.int64))

    def look_up(self, call: Call) -> Tensor:
        return self.tid2eid[call.input_ids]

    def chooser(self, call):
        return None, self.tid2eid, call.input_ids.flatten()


OWN = (TopKRouter, HashRouter)
