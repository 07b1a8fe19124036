"""The mixture on every block: routed experts chosen by scores or by the token's id, and one shared expert.

    mlp_output = sum over slots of weight_slot * expert_slot(x)  +  shared(x)

Axes: b batch, s token, top_k slot, I neurons.
"""

import torch
from torch import Tensor, nn

from dsv4.call import Call
from dsv4.config import Dsv4Config
from dsv4.experts import WHOLE, Experts
from dsv4.hooks import HookPoint, Probed, is_watched
from dsv4.kernels import few_tokens
from dsv4.kernels.gated_linear import gated_linear
from dsv4.kernels.grouped_experts import activation, neurons, swiglu
from dsv4.kernels.numeric import wide
from dsv4.kernels.router import Routes
from dsv4.linear import Fp8Linear, Linear
from dsv4.router import HashRouter, TopKRouter

# What the fused ways hide.
EXPERT_VALUES = frozenset(("expert_gate", "expert_up", "expert_activation", "expert_neurons", "expert_outputs"))
SHARED_VALUES = frozenset(("mlp_gate", "mlp_up", "mlp_activation", "mlp_neurons"))
# What adding both up in one launch does not have.
SUMS = EXPERT_VALUES | {"routed_output", "shared_expert_output"}


class SharedExpert(nn.Module):
    """down(silu(clamped gate) * clamped up), on every token.

    Attributes:
        backend: who computes gate, up and what becomes of them; chosen once, when the model is built (pretrained.use_kernels).
    """

    backend = "torch"

    def __init__(self, config: Dsv4Config):
        super().__init__()
        width, inner = config.hidden_size, config.moe_intermediate_size
        self.limit = config.swiglu_limit
        self.gate_proj = Linear(width, inner)
        self.up_proj = Linear(width, inner)
        self.down_proj = Linear(inner, width)

    @property
    def form(self) -> str | None:
        """Of gate's and up's weights, "dense" or "fp8"; None where one launch cannot read both: they are held differently, or in parts
        by several processes.
        """
        kinds = {type(self.gate_proj), type(self.up_proj)}
        return {Linear: "dense", Fp8Linear: "fp8"}.get(kinds.pop()) if len(kinds) == 1 else None

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.neurons(x))

    def neurons(self, x: Tensor) -> Tensor:
        """x [... hidden] -> [... I]."""
        gate, up = self.gate_proj, self.up_proj
        is_read = self.backend == "torch" and self.form == "dense" and not (is_watched(gate) or is_watched(up))
        if is_read and few_tokens.takes_gated(x, gate.weight, up.weight):
            return few_tokens.gated(x, gate.weight, up.weight, self.limit)
        if self.backend == "torch" or self.form is None or any(map(is_watched, (gate, up))):
            gate, up = gate(x), up(x)
            return (few_tokens.swiglu if few_tokens.takes_swiglu(gate, up) else swiglu)(gate, up, self.limit)
        if self.form == "dense":
            held, deployed = (gate.weight.to(x.dtype), None, up.weight.to(x.dtype), None), False
        else:
            held = (gate.weight, gate.weight_scale_inv, up.weight, up.weight_scale_inv)
            deployed = gate.numerics == "deployed"
        return gated_linear(x.flatten(0, -2), *held, self.limit, deployed).view(*x.shape[:-1], -1)


class Moe(Probed):
    """The mixture with the router that scores; `HashMoe` replaces the choice."""

    router_class = TopKRouter

    def __init__(self, config: Dsv4Config):
        super().__init__()
        self.limit = config.swiglu_limit
        self.router = self.router_class(config)
        self.experts = Experts(config)
        self.shared_experts = SharedExpert(config)

        self.router_logits = HookPoint("b s experts")
        self.router_scores = HookPoint("b s experts")
        self.declare_choice()
        self.expert_indices = HookPoint("b s top_k")
        self.expert_weights = HookPoint("b s top_k")
        self.expert_gate = HookPoint("b s top_k I")
        self.expert_up = HookPoint("b s top_k I")
        self.expert_activation = HookPoint("b s top_k I")
        self.expert_neurons = HookPoint("b s top_k I")
        self.expert_outputs = HookPoint("b s top_k hidden")
        self.routed_output = HookPoint("b s hidden")
        self.mlp_gate = HookPoint("b s I")
        self.mlp_up = HookPoint("b s I")
        self.mlp_activation = HookPoint("b s I")
        self.mlp_neurons = HookPoint("b s I")
        self.shared_expert_output = HookPoint("b s hidden")
        self.mlp_output = HookPoint("b s hidden")

    def declare_choice(self) -> None:
        self.router_selection_scores = HookPoint("b s experts")

    def choose(self, scores: Tensor, call: Call) -> Tensor:
        return self.router.choose(self.tap.router_selection_scores(self.router.selection_scores(scores)))

    def forward(self, x: Tensor, call: Call) -> Tensor:
        """x [b s hidden] -> [b s hidden]."""
        tap = self.tap
        if self.adds_in_one:
            return tap.mlp_output(self.in_one_sum(x, call))
        indices, weights, _ = self.routes(x, call)
        routed = self.spelled_experts if self.listened & EXPERT_VALUES else self.fused_experts
        routed = tap.routed_output(routed(x, indices, weights, call))
        return tap.mlp_output(routed + tap.shared_expert_output(self.shared(x)))

    def write(self, x: Tensor, call: Call, streams: Tensor, comb: Tensor, post: Tensor) -> Tensor:
        """What `forward` returns, written into streams [b s n hidden] in the launch that makes it, where `writes_in_one`."""
        return self.in_one_sum(x, call, (streams, comb, post))

    @property
    def writes_in_one(self) -> bool:
        """Whether nobody asks for what is written, nor looks at this module."""
        return self.adds_in_one and "mlp_output" not in self.live and not is_watched(self)

    def in_one_sum(self, x: Tensor, call: Call, into: tuple[Tensor, Tensor, Tensor] | None = None) -> Tensor:
        indices, weights, sorted_slots = self.routes(x, call)
        return self.experts.with_shared(x, indices, weights, call.without_padding, sorted_slots, self.shared(x), into)

    def shared(self, x: Tensor) -> Tensor:
        return self.spelled_shared(x) if self.listened & SHARED_VALUES else self.shared_experts(x)

    @property
    def adds_in_one(self) -> bool:
        """Whether the sum over slots may add the shared expert's output: nobody asks for either, by device code over a whole bank."""
        experts = self.experts
        return experts.backend == "triton" and type(experts) in WHOLE and not self.live & SUMS and not is_watched(experts)

    def routes(self, x: Tensor, call: Call) -> tuple[Tensor, Tensor, tuple[Tensor, ...] | None]:
        return self.route_in_one(x, call) if self.router.takes(x) else self.route(x, call)

    def route(self, x: Tensor, call: Call) -> tuple[Tensor, Tensor, None]:
        """(indices, weights [b s top_k], None): the slots are not sorted yet."""
        tap = self.tap
        scores = tap.router_scores(self.router.scores(tap.router_logits(self.router.logits(x))))
        indices = self.indices(self.choose(scores, call))
        return indices, tap.expert_weights(self.router.weights(scores, indices)), None

    def route_in_one(self, x: Tensor, call: Call) -> tuple[Tensor, Tensor, tuple[Tensor, ...] | None]:
        """(indices, weights, the slots sorted by expert, or None where the experts may be others than were sorted).

        What follows a point at which someone listens is made again from what the point returns, edited or not: by torch, so that a
        value replaced by itself changes nothing.
        """
        tap, live, router = self.tap, self.live, self.router
        made = router.in_one(x, call)
        logits = tap.router_logits(made.logits)
        is_made = "router_logits" not in live
        scores = tap.router_scores(made.scores if is_made else router.scores(logits))
        is_made = is_made and "router_scores" not in live
        chosen = self.chosen(made, scores, is_made)
        indices = self.indices(chosen)
        are_sorted = chosen is made.indices and "expert_indices" not in live
        weights = made.weights if is_made and are_sorted else router.weights(scores, indices)
        return indices, tap.expert_weights(weights), made.groups if are_sorted else None

    def chosen(self, made: Routes, scores: Tensor, is_made: bool) -> Tensor:
        """The indices made in one go, or others where their scores (is_made: those of `made`) or selection scores are listened to."""
        selection = self.tap.router_selection_scores(made.selection if is_made else self.router.selection_scores(scores))
        is_made = is_made and "router_selection_scores" not in self.live
        return made.indices if is_made else self.router.choose(selection)

    def indices(self, chosen: Tensor) -> Tensor:
        """[b s top_k] int64: the experts chosen, or those a hook wrote."""
        written = self.tap.expert_indices(chosen)
        if written is not chosen and self.expert_indices.can_edit:
            outside = (written < 0) | (written >= self.experts.num_experts)
            if bool(outside.any()):
                raise ValueError(
                    f"{self.expert_indices.name} was given expert {int(written[outside][0])}; expected 0 <= id < {self.experts.num_experts}"
                )
        return written

    def fused_experts(self, x: Tensor, indices: Tensor, weights: Tensor, call: Call) -> Tensor:
        """[b s hidden]. Device code leaves padding out, which then gets zeros; torch computes it as the spelled-out way does."""
        valid = None if self.experts.backend == "torch" else call.without_padding
        return self.experts(x, indices, weights, valid).to(x.dtype)

    def spelled_experts(self, x: Tensor, indices: Tensor, weights: Tensor, call: Call) -> Tensor:
        """Every slot's values in [b s top_k ...], padding's too, then their sum."""
        tap = self.tap
        gate, up = self.experts.slot_gate_up(x, indices)
        gate, up = tap.expert_gate(gate), tap.expert_up(up)
        active = show(tap.expert_activation, activation(gate, self.limit), x.dtype)
        inner = tap.expert_neurons(neurons(active, up, self.limit))
        outputs = wide(self.experts.slot_down(inner, indices)) * weights.unsqueeze(-1)
        return show(tap.expert_outputs, outputs, x.dtype).sum(2).to(x.dtype)

    def spelled_shared(self, x: Tensor) -> Tensor:
        tap, shared = self.tap, self.shared_experts
        gate, up = tap.mlp_gate(shared.gate_proj(x)), tap.mlp_up(shared.up_proj(x))
        active = show(tap.mlp_activation, activation(gate, self.limit), x.dtype)
        return shared.down_proj(tap.mlp_neurons(neurons(active, up, self.limit)))

    @property
    def gate(self):
        """The router, under transformers' name."""
        return self.router

    @property
    def scoring(self) -> str:
        """ "hash" on a hash block, the scoring function's name elsewhere."""
        return self.router.scoring

    SCORING = scoring


class HashMoe(Moe):
    """The experts are a table of the token id; edited logits change their weights, never the choice."""

    router_class = HashRouter

    def declare_choice(self) -> None:
        pass

    def choose(self, scores: Tensor, call: Call) -> Tensor:
        return self.router.look_up(call)

    def chosen(self, made: Routes, scores: Tensor, is_made: bool) -> Tensor:
        return made.indices


def show(point, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Pass a float32 value through a point in `dtype`, and go on in float32 with what the rounding took, where it was not replaced.

    The fused ways do not round there, so that looking does not change the run. The gradient is that of what the point returns.
    """
    rounded = exact.to(dtype)
    returned = point(rounded)
    if exact.dtype == dtype:
        return returned
    taken = (exact - wide(rounded)).masked_fill((returned != rounded) | ~rounded.isfinite(), 0.0)
    return wide(returned) + taken.detach()


KINDS = {"moe": Moe, "hash_moe": HashMoe}
