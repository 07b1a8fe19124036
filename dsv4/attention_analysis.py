"""Where the attention of a run looked, by kind of key and by token, and what went along each path.

A query sees the last tokens and, on compressed blocks, entries, each a pool of tokens:

    entry = rotary(weight * rms * sum over slots of gates * kv)          (rms frozen: a sum over tokens)

so an entry, and the probability on it, splits into tokens. Definitions: docs/attention.md.
Axes: b row, s query, N head, k key, e entry, m slot of an entry, t token of the cache, D head width.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from dsv4.attribution import head_directions
from dsv4.config import CSA
from dsv4.kernels.norm_rotary import rotate
from dsv4.kernels.numeric import wide
from dsv4.reading import ByLayer, Reading, per_layer_table

KINDS = ("window", "entries", "sink")
MODES = ("shares", "gates")
# What comes between the values and what the attention adds: edited there, the paths do not sum to it.
BEHIND_VALUES = ("attention_head_outputs", "attention_premix", "attention_low_rank_output", "attention_head_results", "attention_output")


class MassByKind(ByLayer):
    """{layer: [b N s kind]}; its printout has one column for each kind of key, the mean over heads and real tokens."""

    def __str__(self) -> str:
        rows = [(layer, self.real(layer).double().flatten(0, -2).mean(0).tolist()) for layer in self]
        return per_layer_table("attention mass, mean over heads and real tokens", rows, KINDS)

    __repr__ = __str__


class AttentionAnalysis:
    """`cache.attention`. Layers are those whose values were captured, unless `layers` says which."""

    def __init__(self, cache):
        self.read = Reading(cache)

    def sink_mass(self, layers: int | Iterable[int] | None = None) -> ByLayer:
        """{layer: [b N s]}: the share of each head's attention that its sink took."""
        chosen = self._layers(layers, ["attention_sink_probability"], "sink_mass")
        values = {i: self._dropped(self.read.of("attention_sink_probability", i)) for i in chosen}
        return ByLayer(values, "sink mass", "b N s", self.read)

    def mass_by_kind(self, layers: int | Iterable[int] | None = None) -> MassByKind:
        """{layer: [b N s 3]}: probability on tokens of the window, on entries, and on the sink, in the order of KINDS; sums to one."""
        chosen = self._layers(layers, ["attention_probabilities", "attention_sink_probability"], "mass_by_kind")
        self.read.refuse_edits(["attention_probabilities"], chosen, "what the sink took was counted before, and the sum is not one")
        values = {}
        for i in chosen:
            window, entries = self._split(self.read.of("attention_probabilities", i))
            mass = (window.sum(-1), entries.sum(-1), self.read.of("attention_sink_probability", i))
            values[i] = self._dropped(torch.stack(mass, dim=-1))
        return MassByKind(values, "attention mass", "b N s kind", self.read)

    def token_pattern(self, mode: str = "shares", layers: int | Iterable[int] | None = None) -> ByLayer:
        """{layer: [b N s t]}: the pattern by token, on every kind of block: a token's own probability, and its part of every entry's.

        mode: how an entry's probability is dealt out among its tokens. "shares": <part, entry> / |entry|^2, the part of the entry
        that the token made along the entry itself; a share may be negative. "gates": the pooling gates, averaged over channels.
        Both sum to one over an entry's tokens, so a row sums to one minus what the sink took. Columns are the captured tokens.
        """
        if mode not in MODES:
            raise ValueError(f'mode={mode!r}: expected "shares" or "gates"')
        chosen = self._layers(layers, ["attention_probabilities"], "token_pattern")
        self._require_entries(chosen, "token_pattern", gates_only=mode == "gates")
        values = {}
        for i in chosen:
            window, entries = self._split(self.read.of("attention_probabilities", i))
            if entries.shape[-1]:
                columns, closed = self._slots(i)
                shares = self._shares(i, mode) * closed
                dealt = entries.new_zeros(*shares.shape[:2], window.shape[-1]).scatter_add(-1, columns, shares)
                window = window + entries @ dealt.unsqueeze(1)
            values[i] = self._dropped(window)
        return ByLayer(values, f"attention by token ({mode})", "b N s t", self.read)

    def head_results(self, layer: int) -> Tensor:
        """[b s N hidden] float32: what each head added; sums to attention_output. From the captured value, or from the premix."""
        results = f"layers.{layer}.self_attn.attention_head_results"
        if results in self.read:
            return self.read.drop(self.read[results])
        self.read.require_layers(["attention_premix"], self._known([layer]), "head_results")
        self.read.refuse_edits(["attention_head_results"], [layer], "the premix does not tell what the hook returned; capture them")
        attention = self.read.model.layers[layer].self_attn
        premix = wide(self.read.of("attention_premix", layer))
        groups = attention.o_a_proj.all_groups
        first = attention.o_a_proj.whole_matrix(premix.dtype).detach().to(premix.device).unflatten(0, (groups, -1))
        first = first.unflatten(-1, (-1, attention.width))
        second = attention.o_b_proj.whole_matrix(premix.dtype).detach().to(premix.device).unflatten(-1, (groups, -1))
        heads = premix.unflatten(-1, (groups, -1, attention.width))
        low_rank = torch.einsum("bsgnd,grnd->bsgnr", heads, first)
        return self.read.drop(torch.einsum("bsgnr,hgr->bsgnh", low_rank, second).flatten(2, 3))

    def value_paths(self, direction: Tensor | None = None, layers: int | Iterable[int] | None = None, by: str = "key") -> ByLayer:
        """{layer: [b N s k]}: what each key wrote through each head, as a product with a direction.

            path = probability * (O_head . rotate_back(value)) . direction

        Args:
            direction: [hidden] or [b s hidden]; the paths sum to attention_output . direction. None is attention_output / its square:
                shares of what the attention added, that sum to one.
            by: "key" (tokens of the window, then entries) or "token" (entries split into tokens: exact, since a value is a sum).
        """
        if by not in ("key", "token"):
            raise ValueError(f'by={by!r}: expected "key" or "token"')
        needed = ["attention_probabilities", "attention_values", *(["attention_output"] if direction is None else [])]
        chosen = self._layers(layers, needed, "value_paths")
        self.read.refuse_edits(BEHIND_VALUES, chosen, "the paths from the values do not sum to what it added")
        if by == "token":
            self._require_entries(chosen, 'value_paths(by="token")', gates_only=False)
        values = {i: self._dropped(self._paths(i, direction, by)) for i in chosen}
        return ByLayer(values, "value paths", "b N s k" if by == "key" else "b N s t", self.read)

    def _paths(self, layer: int, direction: Tensor | None, by: str) -> Tensor:
        attention = self.read.model.layers[layer].self_attn
        values = wide(self.read.of("attention_values", layer)).squeeze(1)
        if direction is None:
            output = wide(self.read.of("attention_output", layer))
            direction = output / output.square().sum(-1, keepdim=True).clamp(min=torch.finfo(output.dtype).tiny)
        size = (*self.read.positions.shape, attention.o_b_proj.out_features)
        along = wide(direction.detach()).to(values.device)
        along = along.expand(size) if along.dim() == 1 else along.reshape(size)
        # Turning back is linear, and its transpose is turning: the direction is turned in the values' stead.
        cos, sin = self._rotation(attention.rope_kind, self.read.positions, values.device)
        back = rotate(head_directions(attention, along), cos.unsqueeze(2), sin.unsqueeze(2)).transpose(1, 2)
        probabilities = self.read.of("attention_probabilities", layer)
        paths = probabilities * (back @ values.transpose(1, 2).unsqueeze(1))
        if by == "key":
            return paths
        window, entries = self._split(paths)[0], self._split(probabilities)[1]
        if not entries.shape[-1]:
            return window
        columns, closed = self._slots(layer)
        parts = self._parts(layer) * closed.unsqueeze(-1)
        starts = torch.arange(parts.shape[1], device=parts.device).mul(self._rate(layer)).expand(parts.shape[0], -1)
        parts = rotate(parts, *(x.unsqueeze(2) for x in self._rotation("compress", starts, parts.device)))
        # [b N s e m], an entry at a time less memory; summed into the tokens' columns.
        out = window
        for e in range(parts.shape[1]):
            path = entries[..., e : e + 1] * (back @ parts[:, e].transpose(1, 2).unsqueeze(1))
            index = columns[:, e].view(columns.shape[0], 1, 1, -1).expand(path.shape)
            out = out.scatter_add(-1, index, path)
        return out

    # Entries as sums of tokens.

    def _shares(self, layer: int, mode: str) -> Tensor:
        """[b e m], summing to one over m."""
        gates = self.read.of("compressor_gates", layer)
        if mode == "gates":
            return gates.mean(-1)
        parts = self._parts(layer)
        entry = parts.sum(2, keepdim=True)
        # Rotary is a rotation times its factor: it changes no share but through the factor.
        rope = self.read.model.rotary["compress"]
        metric = torch.ones(parts.shape[-1], dtype=parts.dtype, device=parts.device)
        metric[parts.shape[-1] - rope.width :] = rope.factor**2
        products = (parts * entry * metric).sum(-1)
        square = products.sum(-1, keepdim=True)
        return products / square.masked_fill(square == 0, 1.0)

    def _parts(self, layer: int) -> Tensor:
        """[b e m D]: what each slot put into the entry, with the norm's weight and frozen rms, before rotary."""
        compressor = self.read.model.layers[layer].self_attn.compressor
        gates = self.read.of("compressor_gates", layer)
        x = self.read.of("attention_norm_output", layer)
        matrix = compressor.kv_proj.matrix(wide(x).dtype).detach().to(x.device)
        columns, _ = self._slots(layer)
        rows = torch.arange(x.shape[0], device=x.device)[:, None, None]
        halves = zip((wide(x) @ matrix.mT).chunk(compressor.series, dim=-1), columns.chunk(compressor.series, dim=-1), strict=True)
        parts = gates * torch.cat([half[rows, index] for half, index in halves], dim=2)
        pooled = parts.sum(2, keepdim=True)
        rms = torch.rsqrt(pooled.square().mean(-1, keepdim=True) + compressor.kv_norm.eps)
        return parts * rms * compressor.kv_norm.weight.detach().to(x.device)

    def _slots(self, layer: int) -> tuple[Tensor, Tensor]:
        """(column of each slot's token [b e m], whether the row has the entry at all [b e 1]).

        A slot before the row's first token has gate 0; what a hook writes there weighs the first token, as in the run.
        """
        positions, rate = self.read.positions, self._rate(layer)
        rows, width = positions.shape
        gates = self.read.of("compressor_gates", layer)
        first = -rate if self.read.model.config.layer_types[layer] == CSA else 0
        number = torch.arange(gates.shape[1], device=positions.device)
        place = number.unsqueeze(-1) * rate + torch.arange(first, rate, device=positions.device)
        last = int(positions.max()) + 1
        column_of = positions.new_full((rows, last + 1), width)
        column_of = column_of.scatter(
            1, positions.masked_fill(positions < 0, last), torch.arange(width, device=positions.device).expand(rows, -1)
        )
        column_of[:, last] = width
        outside = (place < 0) | (place >= last)
        columns = column_of[:, place.masked_fill(outside, last).flatten()].view(rows, *place.shape)
        # A row with fewer entries has its last tokens in no entry.
        closed = number < (positions.amax(1, keepdim=True) + 1) // rate
        start = (positions >= 0).int().argmax(1).view(-1, 1, 1)
        return torch.where(columns < width, columns, start).to(gates.device), closed.unsqueeze(-1).to(gates.device)

    def _require_entries(self, layers: list[int], what: str, gates_only: bool) -> None:
        compressed = [i for i in layers if self._rate(i) is not None]
        self.read.require_layers(["compressor_gates", *([] if gates_only else ["attention_norm_output"])], compressed, what)
        edited = [] if gates_only else ["compressed_entries", "attention_keys", "attention_values"]
        self.read.refuse_edits(edited, compressed, "its entries are not the sums over tokens that they would be split into")
        tokens, captured = self.read.origin.token_keys, self.read.positions.shape[1]
        at = self.read.positions
        begins = (at == 0).any(1) | (at < 0).all(1)
        in_order = (at[:, 1:] == at[:, :-1] + 1) | (at[:, 1:] < 0)
        whole = tokens == captured and self.read.has_tokens and bool(begins.all()) and bool(in_order.all())
        if not whole:
            raise ValueError(
                f"{what} needs every token of the rows in one cache: run the whole prompt in one call without pos= or a kv_cache, "
                "or generate with align=True"
            )

    # Small pieces.

    def _layers(self, layers: int | Iterable[int] | None, leaves: list[str], what: str) -> list[int]:
        if layers is None:
            held = [i for i in self.read.layers if i in self.read.holding(leaves[0])]
            if not held:
                self.read.require_layers(leaves, self.read.layers, what)
            chosen = held
        else:
            chosen = self._known([layers] if isinstance(layers, int) else list(layers))
        self.read.require_layers(leaves, chosen, what)
        return chosen

    def _known(self, layers: list[int]) -> list[int]:
        outside = [i for i in layers if i not in self.read.layers]
        if outside:
            raise ValueError(f"layer {outside[0]}: the run went through layers {self.read.layers}")
        return layers

    def _split(self, pattern: Tensor) -> tuple[Tensor, Tensor]:
        """[b N s k] -> over tokens, over entries."""
        tokens = self.read.origin.token_keys
        if tokens is None:
            raise ValueError("this cache does not know which of its keys are tokens; generate with align=True")
        return pattern[..., :tokens], pattern[..., tokens:]

    def _rate(self, layer: int) -> int | None:
        return self.read.model.config.rate(layer)

    def _rotation(self, kind: str, positions: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        rope = self.read.model.rotary[kind]
        cos, sin = rope(positions.to(rope.frequencies.device))
        return cos.to(device), sin.to(device)

    def _dropped(self, value: Tensor) -> Tensor:
        return self.read.drop(value, 0, 2)
