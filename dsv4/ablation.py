"""Ablation: values set to zero, to a mean, or to those of another run; routed experts taken out.

Axes: b row, s token, k slot.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from dsv4 import values
from dsv4.activation_cache import ActivationCache
from dsv4.capture import Last, Pos
from dsv4.config import HASH_MOE
from dsv4.hooks import HookPoint
from dsv4.kernels.numeric import wide
from dsv4.part import (
    Positions,
    as_mask,
    check_tokens,
    indices_of,
    over_parts,
    over_tokens,
    part_size,
)
from dsv4.replay import PLACED, SELECTION, Recorded, Replay

MODES = ("zero", "mean", "resample")
EXPERT_MODES = ("zero", "renorm", "reroute", "mean")

# (value, hook, where it will be replaced) -> what replaces it.
Replacement = Callable[[Tensor, HookPoint, Tensor], Tensor]


class Ablating:
    """Mixed into the model."""

    @contextmanager
    def ablate(
        self,
        names,
        mode: str = "zero",
        *,
        source: ActivationCache | Mapping[str, Tensor] | None = None,
        pos: Pos = None,
        heads: int | Iterable[int] | None = None,
        seed: int | None = None,
    ) -> Iterator[None]:
        """Replace values in every run made inside.

        Args:
            names: name, glob, list or predicate; floating values that may be written.
            mode: "zero". "mean": the mean of `source` over rows and real tokens. "resample": what
                `source`, a run of other inputs, has at the same position of the row (row r takes
                row r, or the only one; with `seed`, rows of the source drawn at random).
            source: an ActivationCache that holds the values; for "mean" also {full name: tensor}
                of the value's shape without its row and token axes.
            pos: positions to replace (see `Positions`); heads: heads to replace.
        What is infinite stays: a masked score is no score. Raises ValueError where a value has no
        such axis, is read-only, holds integers, or where the source lacks a position.
        """
        if mode not in MODES:
            raise ValueError(f"ablate: mode={mode!r}, expected one of {', '.join(MODES)}")
        if (source is None) != (mode == "zero"):
            needs = "takes no source=" if mode == "zero" else "needs source=, a cache of the values"
            raise ValueError(f'ablate: mode="{mode}" {needs}')
        if seed is not None and mode != "resample":
            raise ValueError(f'ablate: seed= draws rows for mode="resample", not for "{mode}"')
        positions, hooks = Positions(pos), []
        sizes = values.sizes(self.config, None, 1, 1)
        for name in self.match_names(names):
            point = self.hook_dict[name]
            _check_ablated(point)
            check_tokens(point, positions)
            chosen = None
            if heads is not None:
                count = part_size(point, "heads", sizes)
                chosen = as_mask(indices_of("heads", heads, count), count, self.device)
            put = {"zero": _zero, "mean": _mean, "resample": _resample}[mode]
            hooks.append((name, _ablating(put(self, point, source, seed), positions, chosen)))
        with ExitStack() as stack:
            stack.enter_context(positions.watched())
            stack.enter_context(self.hooks(hooks))
            yield

    @contextmanager
    def ablate_experts(
        self,
        experts: Mapping[int, int | Iterable[int]],
        mode: str = "zero",
        *,
        source: ActivationCache | Mapping[int, Mapping[int, Tensor]] | None = None,
        replacement: int | Mapping[int, int] | None = None,
        pos: Pos = None,
    ) -> Iterator[None]:
        """Take routed experts out of every run made inside: {layer: expert or experts}.

        Args:
            mode: "zero": their slots weigh nothing, the others as before. "renorm": and the others
                are scaled up to routed_scaling_factor again (a token that chose ablated experts
                only gets nothing). "reroute": their selection score is -inf, so that the next best
                takes the slot. "mean": their output is their mean in `source`, with the weight of
                the run.
            source: for "mean", a cache with expert_outputs, expert_weights and expert_indices of
                those layers, or {layer: {expert: [hidden]}}, outputs before the routing weight.
            replacement: for "reroute", the expert that takes the slots, one for all or
                {ablated: replacement}; a token that has chosen it already then has it twice. Hash
                blocks need it: their experts are a table of the token, so there is no next best.
            pos: at these positions only (see `Positions`).
        """
        if mode not in EXPERT_MODES:
            raise ValueError(f"ablate_experts: mode={mode!r}, expected {', '.join(EXPERT_MODES)}")
        for given, what, owner in (
            (source, "source", "mean"),
            (replacement, "replacement", "reroute"),
        ):
            if given is not None and mode != owner:
                raise ValueError(f'ablate_experts: {what}= is for mode="{owner}", got mode="{mode}"')
        if not isinstance(experts, Mapping):
            raise TypeError(f"ablate_experts: got {experts!r}, expected {{layer: experts}}")
        positions = Positions(pos)
        with ExitStack() as stack:
            stack.enter_context(positions.watched())
            for layer, chosen in experts.items():
                (layer,) = indices_of("ablate_experts: layer", layer, self.num_layers)
                gone = indices_of(f"experts of layer {layer}", chosen, self.num_experts)
                edit = _EXPERT_EDITS[mode](self, layer, gone, positions, source, replacement)
                stack.enter_context(edit)
            yield


def _check_ablated(point: HookPoint) -> None:
    if point.read_only:
        raise ValueError(f"ablate: {point.name} is read-only; ablate what it is computed from")
    if point.dtype == "i":
        raise ValueError(
            f"ablate: {point.name} holds integers, of which zero or a mean mean nothing; use ablate_experts, or write them in a hook"
        )


def _ablating(put: Replacement, positions: Positions, heads: Tensor | None):
    """A hook function: `put` where positions and heads say so, and the value is finite."""

    def edit(value: Tensor, hook: HookPoint) -> Tensor:
        where = ~value.isinf()
        if positions.given is not None:
            where = where & over_tokens(positions.of(hook), hook)
        if heads is not None:
            words = hook.axes.split()
            axis = next(i for i, w in enumerate(words) if w in ("N", "ih", "N*D"))
            where = where & over_parts(heads.to(value.device), hook, "heads", value.shape[axis])
        return torch.where(where, put(value, hook, where), value)

    return edit


def _zero(model, point: HookPoint, source, seed) -> Replacement:
    return lambda value, hook, where: torch.zeros_like(value)


def _mean(model, point: HookPoint, source, seed) -> Replacement:
    words = point.axes.split()
    moving = [w for w in words if w in ("k", "e", "e_new", SELECTION)]
    if moving:
        raise ValueError(
            f"ablate: {point.name} [{point.axes}] has no mean: axis {moving[0]} stands for other "
            "keys in every run; ablate what it is computed from"
        )
    kept = [w for w in words if w not in ("b", "s")]
    if isinstance(source, ActivationCache):
        mean = _mean_over_tokens(Recorded.of(source, point))
    else:
        mean = torch.as_tensor(source[point.name])
        if mean.dim() != len(kept):
            raise ValueError(f"ablate: the mean of {point.name} has shape {list(mean.shape)}; expected [{' '.join(kept)}]")
    view = iter(mean.shape)
    shape = [1 if w in ("b", "s") else next(view) for w in words]
    mean = mean.view(shape)
    return lambda value, hook, where: mean.to(value.device, value.dtype).expand(value.shape)


def _mean_over_tokens(recorded: Recorded) -> Tensor:
    """The mean over rows and real tokens, of the remaining axes."""
    value, axes = recorded.value, recorded.axes
    if "s" not in axes:
        return wide(value).mean(0)
    value = wide(value).movedim(axes.index("s"), 1)
    return value[recorded.positions.to(value.device) >= 0].mean(0)


def _resample(model, point: HookPoint, source, seed: int | None) -> Replacement:
    if not isinstance(source, ActivationCache):
        raise TypeError(f'ablate: mode="resample" takes an ActivationCache, got {type(source).__name__}')
    replay = Replay(source, point, model.config)
    count = len(replay.recorded.value)

    def put(value: Tensor, hook: HookPoint, where: Tensor) -> Tensor:
        rows = None
        if seed is not None:
            generator = torch.Generator(device="cpu").manual_seed(seed)
            rows = torch.randint(count, (len(value),), generator=generator, device="cpu").tolist()
        stored, found = replay.find(value, hook, rows)
        words = hook.axes.split()
        lacking = where & ~found
        if "s" in words:
            lacking = lacking & over_tokens(hook.valid, hook)
        if not set(words) & set(PLACED[1:]) and bool(lacking.any()):
            raise ValueError(
                f"ablate: the source has no {hook.name} for some positions of the run (up to "
                f"{int(hook.positions.max())}, the source up to "
                f"{int(replay.recorded.positions.max())}): give a source that is as long, or pos="
            )
        return torch.where(found, stored, value)

    return put


# Experts.


@contextmanager
def _on_slots(model, layer: int, leaf: str, edit) -> Iterator[None]:
    """`edit(value, hook, indices [b s k])` at the point `leaf` of a mixture."""
    mlp = f"layers.{layer}.mlp"
    with (
        Last().of(model.hook_dict[f"{mlp}.expert_indices"]) as chosen,
        model.hooks([(f"{mlp}.{leaf}", lambda value, hook: edit(value, hook, chosen.value))]),
    ):
        yield


def _among(indices: Tensor, gone: list[int], positions: Positions, hook: HookPoint) -> Tensor:
    """[b s k] bool: slots that chose one of the experts, at these positions."""
    ablated = torch.isin(indices, torch.tensor(gone, dtype=torch.int64, device=indices.device))
    return ablated & positions.of(hook).unsqueeze(-1)


def _zero_slots(model, layer, gone, positions, source, replacement):
    def edit(weights, hook, indices):
        return weights.masked_fill(_among(indices, gone, positions, hook), 0.0)

    return _on_slots(model, layer, "expert_weights", edit)


def _renormed_slots(model, layer, gone, positions, source, replacement):
    def edit(weights, hook, indices):
        ablated = _among(indices, gone, positions, hook)
        rest = weights.masked_fill(ablated, 0.0)
        total = rest.sum(-1, keepdim=True)
        scaled = rest / total.masked_fill(total == 0, 1.0) * model.config.routed_scaling_factor
        return torch.where(ablated.any(-1, keepdim=True), scaled, weights)

    return _on_slots(model, layer, "expert_weights", edit)


def _rerouted(model, layer, gone, positions, source, replacement):
    mlp = f"layers.{layer}.mlp"
    if replacement is not None:
        return model.hooks([(f"{mlp}.expert_indices", _replaced(model, gone, positions, replacement))])
    if model.config.mlp_layer_types[layer] == HASH_MOE:
        raise ValueError(
            f"ablate_experts: layer {layer} is a hash block, its experts are a table of the token, "
            'so there is no next best to reroute to: use mode="zero" or "renorm", or name the '
            "expert that takes the slots with replacement="
        )
    left = model.num_experts - len(gone)
    if left < model.top_k:
        raise ValueError(
            f"ablate_experts: layer {layer} keeps {left} of {model.num_experts} experts, fewer "
            f'than the {model.top_k} of a token: use mode="zero" or "renorm"'
        )

    def edit(scores, hook):
        banned = as_mask(gone, model.num_experts, scores.device) & positions.of(hook).unsqueeze(-1)
        return scores.masked_fill(banned, float("-inf"))

    return model.hooks([(f"{mlp}.router_selection_scores", edit)])


def _replaced(model, gone: list[int], positions: Positions, replacement):
    taking = replacement if isinstance(replacement, Mapping) else dict.fromkeys(gone, replacement)
    if set(taking) != set(gone):
        raise ValueError(f"ablate_experts: replacement is for {sorted(taking)}, ablated are {gone}")
    instead = indices_of("replacement", [taking[e] for e in gone], model.num_experts)
    if set(instead) & set(gone):
        raise ValueError(f"ablate_experts: replacement {instead} is among the ablated {gone}")
    table = torch.arange(model.num_experts)
    table[gone] = torch.tensor([int(taking[e]) for e in gone])

    def edit(indices, hook):
        ablated = _among(indices, gone, positions, hook)
        return torch.where(ablated, table.to(indices.device)[indices], indices)

    return edit


def _mean_outputs(model, layer, gone, positions, source, replacement):
    means = _expert_means(model, layer, gone, source)
    table = torch.zeros(model.num_experts, model.hidden_size)
    table[gone] = torch.stack([means[e].float().cpu() for e in gone])
    weights = Last()

    def edit(outputs, hook, indices):
        ablated = _among(indices, gone, positions, hook).unsqueeze(-1)
        mean = table.to(outputs.device)[indices] * weights.value.unsqueeze(-1)
        return torch.where(ablated, mean.to(outputs.dtype), outputs)

    @contextmanager
    def attached():
        with (
            weights.of(model.hook_dict[f"layers.{layer}.mlp.expert_weights"]),
            _on_slots(model, layer, "expert_outputs", edit),
        ):
            yield

    return attached()


def _expert_means(model, layer: int, gone: list[int], source) -> Mapping[int, Tensor]:
    if source is None:
        raise ValueError('ablate_experts: mode="mean" needs source=, a cache with expert_outputs')
    if not isinstance(source, ActivationCache):
        lacking = [e for e in gone if e not in source.get(layer, {})]
        if lacking:
            raise ValueError(f"ablate_experts: source has no mean of experts {lacking} on {layer}")
        return source[layer]
    leaves = ("expert_outputs", "expert_weights", "expert_indices")
    points = [model.hook_dict[f"layers.{layer}.mlp.{leaf}"] for leaf in leaves]
    outputs, weights, indices = (Recorded.of(source, point) for point in points)
    used = (outputs.positions.to(weights.value.device) >= 0).unsqueeze(-1) & (weights.value != 0)
    means = {}
    for expert in gone:
        slots = used & (indices.value == expert)
        if not bool(slots.any()):
            raise ValueError(
                f"ablate_experts: no token of the source went to expert {expert} of layer {layer}, "
                "so it has no mean output there: give a larger source, or {layer: {expert: mean}}"
            )
        means[expert] = (wide(outputs.value[slots]) / weights.value[slots].unsqueeze(-1)).mean(0)
    return means


_EXPERT_EDITS = {
    "zero": _zero_slots,
    "renorm": _renormed_slots,
    "reroute": _rerouted,
    "mean": _mean_outputs,
}
