"""What each component of the residual put into a logit, with the final norm's scale frozen: a table of labels and numbers.

    logit = direction . (w * r * h)     h = sum of components     r = 1 / sqrt(mean(h^2) + eps), as the run had it

Labels: ("embedding",); (layer, "attention") and (layer, "mlp"); their parts (layer, "attention", head), (layer, "expert", e),
(layer, "slot", k), (layer, "slot", k, neuron), (layer, "shared"), (layer, "shared", neuron), (layer, site, "rest");
("streams", layer) that a run entered with; ("edit", name); ("rounding",), what the sum lacks.
Axes: b row, s token, c component, N head, E expert, top_k slot, I neuron.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dsv4.kernels.norm_rotary import rms_norm
from dsv4.kernels.numeric import wide
from dsv4.reading import Reading
from dsv4.table import Table

Label = tuple
UNITS = {"attention": ("head",), "mlp": ("expert", "slot", "neuron")}
# Of the largest final_norm_output: how far the replayed readout may be from it before the cache is refused, in steps of its dtype.
STEPS_OF_ROUNDING = 8
HEAD_EDITS = ("lm_head_output", "logits")


@dataclass(frozen=True)
class Term:
    """A component of the readout: weight [b s] (None is one) times value [b s hidden]."""

    label: Label
    value: Tensor
    weight: Tensor | None


@dataclass(frozen=True)
class Row:
    name: str
    value: float
    share: float


@dataclass(frozen=True)
class Attribution:
    """Attributes:
    labels: one per component. values: [c b s] float32 contributions, without the axes that the cache dropped; they sum to `total`.
    total: [b s] the logit, difference or product that was asked for. scale: [b s] the final norm's scale, frozen at the run's.
    what: the same in words. experts: layer -> [b s top_k] expert of each slot, where slots were asked for.
    """

    labels: list[Label]
    values: Tensor
    total: Tensor
    scale: Tensor
    what: str
    positions: Tensor
    experts: dict[int, Tensor] = field(default_factory=dict)

    def __getitem__(self, label: Label) -> Tensor:
        """[b s]; KeyError for a label that is no component."""
        if label not in self.labels:
            raise KeyError(f"{label!r} is no component; they are {', '.join(map(repr, self.labels[:4]))}, ...")
        return self.values[self.labels.index(label)]

    def top(self, k: int = 10, row: int = 0, pos: int = -1) -> Table:
        """The k largest by absolute value, for one token: `pos` counts the row's real tokens that were captured."""
        column = (self.positions.view(-1, self.positions.shape[-1])[row] >= 0).nonzero().flatten()[pos]
        flat = (len(self.labels), -1, self.positions.shape[-1])
        values, total = self.values.reshape(flat)[:, row, column], self.total.reshape(flat[1:])[row, column]
        best = values.abs().topk(min(k, len(values))).indices.tolist()
        terms = values.abs().sum().clamp(min=torch.finfo(values.dtype).tiny)
        rows = [Row(self._name(self.labels[i], row, column), values[i].item(), (values[i] / terms).item()) for i in best]
        return Table(rows, title=f"{self.what} = {total:.4g} at position {int(self.positions.view(-1, flat[-1])[row, column])}")

    def _name(self, label: Label, row: int, column: Tensor) -> str:
        if len(label) < 3 or label[1] != "slot" or label[0] not in self.experts:
            return " ".join(map(str, label)) if isinstance(label[0], str) else " ".join(("layer", *map(str, label)))
        experts = self.experts[label[0]]
        expert = int(experts.reshape(-1, self.positions.shape[-1], experts.shape[-1])[row, column, label[2]])
        return " ".join(("layer", *map(str, label), f"(expert {expert})"))

    def __str__(self) -> str:
        return str(self.top())

    __repr__ = __str__


def attribute(read: Reading, terms: Sequence[Term], readout: Tensor, tokens, against, unit, layers) -> Attribution:
    """readout [b s hidden], of which the terms are the sum. See Residual.logit_attribution."""
    units = _units(unit)
    split = read.layers if layers is None else _layers(read, layers)
    for name in HEAD_EDITS:
        if name in read.origin.edited and not (_is_direction(tokens) and (against is None or _is_direction(against))):
            raise ValueError(
                f"this run edited {name}: it returned other logits than the head computed, and no component made the difference; "
                "give the direction model.lm_head.weight[token] in place of the token"
            )
    for unit_name in units.values():
        read.require(_needed(read, unit_name, split), f'logit_attribution(unit="{unit_name}")')
    direction, what = _direction(read, tokens)
    if against is not None:
        other, without = _direction(read, against)
        direction, what = direction - other, f"{what} - {without}"
    normed = wide(read["final_norm_output"])
    direction = direction.to(normed.device, normed.dtype)
    weight = wide(read.model.norm.weight.detach()).to(normed.device)
    scale = torch.rsqrt(wide(readout).square().mean(-1) + read.model.norm.eps)
    check_sum(read, readout)
    before_norm = direction * weight * scale.unsqueeze(-1)

    labels: list[Label] = []
    values: list[Tensor] = []
    for term in terms:
        whole = (term.value * before_norm).sum(-1)
        whole = whole if term.weight is None else whole * term.weight
        wanted = units.get(term.label[1]) if len(term.label) == 2 and term.label[0] in split else None
        if wanted is None:
            labels.append(term.label)
            values.append(whole.unsqueeze(0))
            continue
        rest = whole
        for suffixes, numbers in _parts(read, wanted, term.label[0], before_norm):
            numbers = numbers * term.weight
            labels += [(term.label[0], *suffix) for suffix in suffixes]
            values.append(numbers)
            rest = rest - numbers.sum(0)
        labels.append((*term.label, "rest"))
        values.append(rest.unsqueeze(0))
    if "final_norm_output" in read.origin.edited:
        unedited = (wide(readout) * scale.unsqueeze(-1) * weight).to(read["final_norm_output"].dtype)
        labels.append(("edit", "final_norm_output"))
        values.append(((normed - wide(unedited)) * direction).sum(-1).unsqueeze(0))
    total = (normed * direction).sum(-1)
    summed = torch.cat(values)
    every = torch.cat((summed, (total - summed.sum(0)).unsqueeze(0)))
    experts = {}
    if {"slot", "neuron"} & set(units.values()):
        experts = {i: read.drop(read.of("expert_indices", i)) for i in split if read.model is not None}
    found = Attribution([*labels, ("rounding",)], every, total, scale, f"{what}, final norm's scale frozen", read.cache.positions, experts)
    return replace(found, values=read.drop(every, 1, 2), total=read.drop(total), scale=read.drop(scale))


def check_sum(read: Reading, readout: Tensor) -> None:
    """ValueError when readout [b s hidden], normed, is not the cached final_norm_output.

    What hooks did is known; what something else did to streams or modules shows here.
    """
    if "final_norm_output" in read.origin.edited or not bool(read.valid.any()):
        return
    cached, norm = read["final_norm_output"], read.model.norm
    normed = rms_norm(wide(readout), wide(norm.weight.detach()).to(readout.device), norm.eps)
    error = (normed - wide(cached))[read.valid].abs().max() / wide(cached)[read.valid].abs().max()
    limit = STEPS_OF_ROUNDING * torch.finfo(cached.dtype).eps if cached.dtype.itemsize < 4 else 1e-4
    if not error <= limit:
        raise ValueError(
            f"the cached values make a final_norm_output that differs from the cached one by {error:.2g} of its largest value: something "
            "other than a hook at a value (a module hook, nnsight, other weights) changed the run; make the edit at a value by name"
        )


# What is asked for.


def _units(unit: str | Sequence[str]) -> dict[str, str]:
    """{"attention": "head", "mlp": "expert"}; nothing for "sublayer"."""
    found: dict[str, str] = {}
    for name in [unit] if isinstance(unit, str) else unit:
        sites = [site for site, names in UNITS.items() if name in names]
        if name != "sublayer" and not sites:
            raise ValueError(f'unit={name!r}: expected "sublayer", "head", "expert", "slot" or "neuron"')
        for site in sites:
            if site in found:
                raise ValueError(f"unit={unit!r}: {found[site]} and {name} split the same sublayer; give one of them")
            found[site] = name
    return found


def _layers(read: Reading, layers) -> list[int]:
    chosen = [layers] if isinstance(layers, int) else list(layers)
    outside = [i for i in chosen if i not in read.layers]
    if outside:
        raise ValueError(f"layers={chosen}: the run went through layers {read.layers}")
    return chosen


def _is_direction(tokens) -> bool:
    return isinstance(tokens, Tensor) and tokens.is_floating_point()


def _direction(read: Reading, tokens) -> tuple[Tensor, str]:
    """([b s hidden] or broadcasting to it, what it is)."""
    model, size = read.model, tuple(read.positions.shape)
    dropped = tuple(n for n, kept in zip(size, (read.has_rows, read.has_tokens), strict=True) if kept)
    if _is_direction(tokens):
        if tokens.shape == (model.hidden_size,):
            return wide(tokens.detach()), "direction"
        if tuple(tokens.shape) == (*dropped, model.hidden_size):
            return wide(tokens.detach()).reshape(*size, -1), "direction"
        raise ValueError(f"a direction is [{model.hidden_size}] or {[*dropped, model.hidden_size]}, got {list(tokens.shape)}")
    if isinstance(tokens, str):
        ids, what = torch.tensor(model.to_single_token(tokens), device="cpu"), f"logit of {tokens!r}"
    else:
        ids = torch.as_tensor(tokens, device="cpu") if not isinstance(tokens, Tensor) else tokens
        what = f"logit of {int(ids)}" if ids.dim() == 0 else "logit of given ids"
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"tokens: expected ids or a floating direction [hidden] as a Tensor, got {ids.dtype}")
    if tuple(ids.shape) == dropped and dropped:
        ids = ids.reshape(size)
    elif tuple(ids.shape) == size[:1]:
        ids = ids.unsqueeze(1)
    elif ids.dim():
        raise ValueError(f"tokens has shape {list(ids.shape)}; expected one id, {list(dropped)}, or {list(size[:1])}, one for each row")
    if bool(((ids < 0) | (ids >= model.vocab_size)).any()):
        raise ValueError(f"token ids run from 0 to {model.vocab_size - 1}, got {int(ids.min())} to {int(ids.max())}")
    rows = model.lm_head.whole_matrix(model.dtype).detach()
    return wide(rows[ids.to(rows.device)]), what


# Parts of a sublayer.


def _needed(read: Reading, unit: str, layers: Sequence[int]) -> Iterator[str]:
    for i in layers:
        if unit == "head":
            results = f"layers.{i}.self_attn.attention_head_results"
            if results not in read:
                yield f"layers.{i}.self_attn.attention_premix"
        else:
            yield f"layers.{i}.mlp.expert_indices"
            if unit == "neuron":
                yield from (f"layers.{i}.mlp.{x}" for x in ("expert_weights", "expert_neurons", "mlp_neurons"))
            else:
                yield from (f"layers.{i}.mlp.{x}" for x in ("expert_outputs", "shared_expert_output"))


def _parts(read: Reading, unit: str, layer: int, direction: Tensor) -> Iterator[tuple[list[Label], Tensor]]:
    """(labels behind the layer's number, [c b s]): the parts' products with the direction [b s hidden]."""
    if unit == "head":
        numbers = head_products(read, layer, direction)
        yield [("attention", n) for n in range(numbers.shape[-1])], numbers.movedim(-1, 0)
        return
    indices = read.of("expert_indices", layer)
    slots = range(indices.shape[-1])
    if unit == "neuron":
        weights = wide(read.of("expert_weights", layer))
        inner = wide(read.of("expert_neurons", layer))
        products = inner * weights.unsqueeze(-1) * _down_products(read, layer, indices, direction)
        yield [("slot", k, j) for k in slots for j in range(inner.shape[-1])], products.flatten(2).movedim(-1, 0)
        down = read.model.layers[layer].mlp.shared_experts.down_proj.whole_matrix(direction.dtype).detach().to(direction.device)
        shared = wide(read.of("mlp_neurons", layer)) * (direction @ down)
        yield [("shared", j) for j in range(shared.shape[-1])], shared.movedim(-1, 0)
        return
    products = (wide(read.of("expert_outputs", layer)) @ direction.unsqueeze(-1)).squeeze(-1)
    if unit == "slot":
        yield [("slot", k) for k in slots], products.movedim(-1, 0)
    else:
        by_expert = products.new_zeros(*products.shape[:2], read.model.num_experts).scatter_add(-1, indices, products)
        yield [("expert", e) for e in range(read.model.num_experts)], by_expert.movedim(-1, 0)
    yield [("shared",)], (wide(read.of("shared_expert_output", layer)) * direction).sum(-1).unsqueeze(0)


def head_products(read: Reading, layer: int, direction: Tensor) -> Tensor:
    """[b s N]: each head's contribution to attention_output times the direction [b s hidden]."""
    results = f"layers.{layer}.self_attn.attention_head_results"
    if results in read:
        return (wide(read[results]) @ direction.unsqueeze(-1)).squeeze(-1)
    back = head_directions(read.model.layers[layer].self_attn, direction)
    return (wide(read.of("attention_premix", layer)).unflatten(-1, back.shape[-2:]) * back).sum(-1)


def head_directions(attention, direction: Tensor) -> Tensor:
    """direction [b s hidden] -> [b s N D]: what each head's output is multiplied with to give its product with the direction."""
    groups, dtype = attention.o_a_proj.all_groups, direction.dtype
    second = attention.o_b_proj.whole_matrix(dtype).detach().to(direction.device)
    first = attention.o_a_proj.whole_matrix(dtype).unflatten(0, (groups, -1)).detach().to(direction.device)
    low_rank = (direction @ second).unflatten(-1, (groups, -1))
    return torch.einsum("bsgr,gri->bsgi", low_rank, first).flatten(2).unflatten(-1, (-1, attention.width))


def _down_products(read: Reading, layer: int, indices: Tensor, direction: Tensor) -> Tensor:
    """[b s top_k I]: the direction times each column of the chosen experts' down matrices."""
    experts = read.model.layers[layer].mlp.experts
    flat = indices.flatten(0, 1)
    rows = direction.flatten(0, 1)
    out = direction.new_zeros(*flat.shape, experts.neurons)
    for expert in flat.unique().tolist():
        token, slot = (flat == expert).nonzero(as_tuple=True)
        down = experts.down_matrix(expert, direction.dtype).detach().to(direction.device)
        out = out.index_put((token, slot), rows[token] @ down)
    return out.view(*indices.shape, -1)
