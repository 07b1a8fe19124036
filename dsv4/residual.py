"""The residual streams of one run as sums of what was written into them, exactly.

    X_0 = embedding in every stream      X_{s+1} = comb_s^T X_s + post_s (x) o_s      read_s = pre_s . X_s

comb, post and pre are the run's own numbers, so each read, and the readout, is one scalar per sublayer and token times that
sublayer's output. Derivation: docs/residual.md. What hooks did to the streams is a component of its own.
Axes: b row, s token, n stream, c component, d sublayer that reads; L layers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsv4 import attribution
from dsv4.attribution import Attribution, Label, Term
from dsv4.kernels.hyper_connection import collapse, write_back
from dsv4.kernels.numeric import wide
from dsv4.reading import Reading
from dsv4.values import VALUES

EMBEDDING: Label = ("embedding",)
SITES = ("attention", "mlp")
# The way through a block: streams, reads, and the sublayers themselves.
STEPS = ("layer_input", "attention_collapsed", "attention", "layer_mid", "mlp_collapsed", "mlp", "layer_output")
STREAMS = ("layer_input", "layer_mid", "layer_output")
READS = {"attention_collapsed": "attention_pre", "mlp_collapsed": "mlp_pre"}


@dataclass(frozen=True)
class Decomposition:
    """A value of the run as a sum.

    Attributes:
        at: the value's name. labels: one per component, in the order in which they were written.
        values: [c b s hidden] float32, [c b s n hidden] for streams, without the axes that the cache dropped.
    """

    at: str
    labels: list[Label]
    values: Tensor

    @property
    def total(self) -> Tensor:
        return self.values.sum(0)

    def __getitem__(self, label: Label) -> Tensor:
        return self.values[self.labels.index(label)]


@dataclass(frozen=True)
class StreamMean:
    """The mean over streams before the first sublayer and after each.

    Attributes:
        labels: what was written last. values: [1+sublayers b s hidden] float32, without the axes that the cache dropped.
        exact: whether the row sums of comb were used, or taken for one. error: largest difference from the exact form, over its
            largest value, at real tokens.
    """

    labels: list[Label]
    values: Tensor
    exact: bool
    error: float


@dataclass
class _Mix:
    """The streams at one place, as sums: weights [b s n c] of `written`, and what hooks added [b s n hidden].

    order: labels of both in the order they came. now: the streams themselves, as the run had them, where they are replayed.
    """

    weights: Tensor
    written: list[Label]
    others: dict[Label, Tensor]
    now: Tensor | None
    order: list[Label] = field(default_factory=list)


class Residual:
    """`cache.residual`. Needs the residual set: what run_with_cache captures unless told otherwise."""

    def __init__(self, cache):
        self.read = Reading(cache)
        self.num_layers = cache.num_layers

    # Coefficients.

    def write_coefficients(self) -> Tensor:
        """gamma [b s 1+2L]: the weight of the embedding, then of each sublayer's output, in the readout.

        Sublayers that the run left out have 0.
        """
        self._require_mixing(len(self.read.layers), "write_coefficients")
        self._require_readout("write_coefficients")
        for _, _, mix in self._walk():
            last = mix
        return self.read.drop(self._spread(self._weights_read(self.read["readout_weights"], last), last.written))

    def read_matrix(self) -> Tensor:
        """R [b s 2L 1+2L]: row 2*layer (attention) or 2*layer + 1 (mlp) holds the weight of the embedding and of each sublayer's output
        in what that sublayer reads, before its norm. Sublayers that the run left out have 0, as rows and as columns.
        """
        self._require_mixing(len(self.read.layers), "read_matrix")
        self.read.require_layers(tuple(READS.values()), self.read.layers, "read_matrix")
        rows: dict[int, Tensor] = {}
        for layer, step, mix in self._walk():
            if step in READS:
                row = self._weights_read(self.read.of(READS[step], layer), mix)
                rows[2 * layer + list(READS).index(step)] = self._spread(row, mix.written)
        nothing = torch.zeros_like(self._spread(mix.weights[..., 0, :], mix.written))
        return self.read.drop(torch.stack([rows.get(d, nothing) for d in range(2 * self.num_layers)], dim=2))

    # Values as sums.

    def decompose(self, at: str | tuple[int, str] = "readout") -> Decomposition:
        """A value as the sum of what was written before it.

        Args:
            at: "readout"; a read, "layers.3.attention_collapsed" or (3, "attention"); or streams, "layers.3.layer_mid".
        """
        layer, leaf = self._place(at)
        mix = self._until(layer, leaf)
        parts = dict(self._parts(mix, leaf, layer))
        parts.update(self._edited_read(mix, leaf, layer))
        values = torch.stack(list(parts.values()))
        if leaf == "readout":
            self._compare(values.sum(0))
        return Decomposition(VALUES[leaf].full_name(layer), list(parts), self.read.drop(values, 1, 2))

    def accumulated(self, at: str | tuple[int, str] = "readout") -> Decomposition:
        """The same, each component with all before it: what `at` would hold if nothing more had been written (mixing as it was).

        Rows are not a layer's streams read early: they have gone through the mixing of all later blocks. The last is the value.
        """
        parts = self.decompose(at)
        return Decomposition(parts.at, parts.labels, parts.values.cumsum(0))

    def streams(self, at: str) -> Tensor | dict[int, Tensor]:
        """[b s n hidden] in the model's dtype: streams that were not captured, replayed from what was ("layers.3.layer_output").

        A last part alone ("layer_output") gives {layer: streams} of every layer, in one replay.
        """
        if at in STREAMS:
            self._until(self.read.layers[-1], at)
            return {layer: self.read.drop(mix.now) for layer, step, mix in self._walk(replay=True, edits=True) if step == at}
        layer, leaf = self._place(at)
        if leaf not in STREAMS:
            raise ValueError(f"streams: {at!r} is one vector per token; use decompose({at!r}).total")
        return self.read.drop(self._until(layer, leaf, replay=True).now)

    def stream_mean(self, exact: bool = True) -> StreamMean:
        """The mean over streams at every depth.

        exact: through the row sums of comb, mean_s+1 = mean over streams of (row sum * X_s) + mean(post_s) o_s. False is the sum
        mean(post_s) o_s alone, which holds as far as the Sinkhorn rounds have converged; its error is in the result.
        """
        self._require_terms(self.read.layers, "stream_mean")
        self._require_captured(self._edited_until(None, "readout", STREAMS))
        labels, means, sums, known = [], [], [], 0
        # Looked at before each write: a hook may edit twice in series (layer_output, the next layer_input).
        for _, step, mix in self._walk(replay=bool(self._edited_until(None, "readout", STREAMS)), edits=True):
            if step in (*SITES, "readout"):
                labels.append(mix.order[-1])
                means.append(self._mean(mix))
                sums.append(sum(self._mean_when_written(label, mix) for label in mix.order[known:]))
                known = len(mix.order)
        if "readout_weights" in self.read.cache and self.read.origin.stop is None:
            self.decompose()
        means, added = torch.stack(means), torch.stack(sums).cumsum(0)
        real = self.read.valid
        error = (added - means)[:, real].abs().max() / means[:, real].abs().max() if bool(real.any()) else torch.zeros(())
        values = self.read.drop(means if exact else added, 1, 2)
        return StreamMean(labels, values, exact, 0.0 if exact else error.item())

    def _compare(self, readout: Tensor) -> None:
        """Refuse a run that something other than hooks changed, where final_norm_output was captured to tell."""
        if "final_norm_output" in self.read.cache and self.read.cache.model is not None and not self._is_edited("readout"):
            attribution.check_sum(self.read, readout)

    # Attribution.

    def logit_attribution(self, tokens, against=None, unit: str | Sequence[str] = "sublayer", layers=None) -> Attribution:
        """How much each component put into a logit, a logit difference, or a direction of final_norm_output.

        The final norm's scale is that of the run (frozen), so that everything is linear; the components sum to the value.

        Args:
            tokens: a token id or word; ids [b s] (one for each token captured) or [b] (one for each row); or a direction
                [hidden] or [b s hidden], floating, that final_norm_output is multiplied with. against: the same, subtracted.
            unit: "sublayer"; "head" splits the attentions; "expert", "slot" or "neuron" split the mixtures. One of each may be
                given together. What the split does not cover (rounding, edits behind it) is the sublayer's "rest".
            layers: those to split; the others stay whole. None splits all.
        Raises:
            ValueError: a value is missing (its names are listed), or the cached values do not make up the readout.
        """
        self._require_readout("logit_attribution")
        self.read.require(["final_norm_output"], "logit_attribution")
        mix = self._until(None, "readout", replay=True)
        readout = self.read["readout"] if self._is_edited("readout") else collapse(mix.now, wide(self.read["readout_weights"]))
        weights = self._weights_read(self.read["readout_weights"], mix)
        terms = []
        for label in mix.order:
            if label in mix.others:
                terms.append(Term(label, self._through(self.read["readout_weights"], mix.others[label]), None))
            else:
                terms.append(Term(label, self._output(label), weights[..., mix.written.index(label)]))
        terms += [Term(label, value, None) for label, value in self._edited_read(mix, "readout", None)]
        return attribution.attribute(self.read, terms, readout, tokens, against, unit, layers)

    # The walk.

    def _walk(self, replay: bool = False, edits: bool = False) -> Iterator[tuple[int, str, _Mix]]:
        """(layer, step, mix before the step), then the same after the last one as (num_layers, "readout", mix).

        edits: what hooks did to streams enters the mix; replay: `mix.now` is carried along.
        """
        mix = self._start(replay, edits)
        for layer in self.read.layers:
            for step in STEPS:
                if step in STREAMS and edits:
                    mix = self._enter_edit(mix, VALUES[step].full_name(layer))
                yield layer, step, mix
                if step in SITES:
                    mix = self._write(mix, layer, step)
        yield self.num_layers, "readout", mix

    def _start(self, replay: bool, edits: bool) -> _Mix:
        origin = self.read.origin
        if origin.start is None:
            some = self.read.of("attention_post", self.read.layers[0]) if self.read.layers else self.read["readout_weights"]
            weights = torch.ones_like(wide(some)).unsqueeze(-1)
            now = None
            if replay:
                now = self.read["token_embeddings"].unsqueeze(2).expand(-1, -1, some.shape[-1], -1)
            return _Mix(weights, [EMBEDDING], {}, now, [EMBEDDING])
        post = wide(self.read.of("attention_post", self.read.layers[0]))
        weights = post.new_zeros(*post.shape, 0)
        if not (replay or edits):
            return _Mix(weights, [], {}, None)
        entered = self.read.of("layer_input", self.read.layers[0])
        label: Label = ("streams", self.read.layers[0])
        return _Mix(weights, [], {label: wide(entered)}, entered, [label])

    def _write(self, mix: _Mix, layer: int, site: str) -> _Mix:
        comb, post = wide(self.read.of(f"{site}_comb", layer)), wide(self.read.of(f"{site}_post", layer))
        mixed = comb.transpose(-1, -2)
        weights = torch.cat((mixed @ mix.weights, post.unsqueeze(-1)), dim=-1)
        others = {label: mixed @ value for label, value in mix.others.items()}
        now = None if mix.now is None else write_back(mix.now, comb, post, self.read.of(f"{site}_output", layer))
        label = (layer, site)
        return _Mix(weights, [*mix.written, label], others, now, [*mix.order, label])

    def _enter_edit(self, mix: _Mix, name: str) -> _Mix:
        started = self.read.origin.start is not None and name == VALUES["layer_input"].full_name(self.read.layers[0])
        # The streams entered are the captured ones: an edit of them is in them.
        if name not in self.read.origin.edited or started:
            return mix
        label: Label = ("edit", name)
        after = self.read[name]
        return _Mix(mix.weights, mix.written, {**mix.others, label: wide(after) - wide(mix.now)}, after, [*mix.order, label])

    def _until(self, layer: int | None, leaf: str, replay: bool = False) -> _Mix:
        """The mix at a place; layer None is the readout."""
        before = self.read.layers if layer is None else [i for i in self.read.layers if i <= layer]
        what = f"the sum at {VALUES[leaf].full_name(layer)}"
        self._require_terms([i for i in before if i != layer], what)
        if layer is not None:
            done = STEPS[: STEPS.index(leaf)]
            sites = [site for site in SITES if site in done]
            self.read.require_layers([f"{site}_{x}" for site in sites for x in ("comb", "post", "output")], [layer], what)
            self.read.require_layers(["attention_post"], [self.read.layers[0]], what)
            if leaf in READS:
                self.read.require_layers([READS[leaf]], [layer], what)
        else:
            self._require_readout(what)
        edited = self._edited_until(layer, leaf, (*STREAMS, *READS, "readout"))
        self._require_captured(edited)
        for i, step, mix in self._walk(replay or bool(edited), edits=True):
            if (i, step) == (layer, leaf) or (layer is None and step == "readout"):
                return mix
        raise AssertionError(f"the walk does not pass {leaf} of layer {layer}")

    def _parts(self, mix: _Mix, leaf: str, layer: int | None) -> Iterator[tuple[Label, Tensor]]:
        """(label, [b s hidden] or, for streams, [b s n hidden])."""
        pre = None if leaf in STREAMS else self._reader(leaf, layer)
        for label in mix.order:
            if label in mix.others:
                value = mix.others[label]
                yield label, value if pre is None else self._through(pre, value)
            else:
                weight = mix.weights[..., mix.written.index(label)]
                output = self._output(label)
                if pre is None:
                    yield label, weight.unsqueeze(-1) * output.unsqueeze(2)
                else:
                    yield label, (wide(pre) * weight).sum(-1, keepdim=True) * output

    def _edited_read(self, mix: _Mix, leaf: str, layer: int | None) -> Iterator[tuple[Label, Tensor]]:
        """What a hook did to the vector read itself."""
        name = VALUES[leaf].full_name(layer)
        if leaf not in STREAMS and name in self.read.origin.edited:
            yield ("edit", name), wide(self.read[name]) - wide(collapse(mix.now, wide(self._reader(leaf, layer))))

    # Small pieces.

    def _reader(self, leaf: str, layer: int | None) -> Tensor:
        return self.read["readout_weights"] if leaf == "readout" else self.read.of(READS[leaf], layer)

    def _output(self, label: Label) -> Tensor:
        """[b s hidden]: what a component wrote."""
        return wide(self.read["token_embeddings"] if label == EMBEDDING else self.read.of(f"{label[1]}_output", label[0]))

    def _mean(self, mix: _Mix) -> Tensor:
        parts = [mix.weights[..., i].mean(-1, keepdim=True) * self._output(label) for i, label in enumerate(mix.written)]
        return sum([*parts, *[value.mean(2) for value in mix.others.values()]])

    def _mean_when_written(self, label: Label, mix: _Mix) -> Tensor:
        if label in mix.others:
            return mix.others[label].mean(2)
        if label == EMBEDDING:
            return self._output(label)
        return wide(self.read.of(f"{label[1]}_post", label[0])).mean(-1, keepdim=True) * self._output(label)

    @staticmethod
    def _through(weights: Tensor, streams: Tensor) -> Tensor:
        return (wide(weights).unsqueeze(-2) @ streams).squeeze(-2)

    @staticmethod
    def _weights_read(reader: Tensor, mix: _Mix) -> Tensor:
        """[b s c]."""
        return (wide(reader).unsqueeze(-2) @ mix.weights).squeeze(-2)

    def _spread(self, row: Tensor, written: list[Label]) -> Tensor:
        """[b s c] -> [b s 1+2L], zeros for what was not written."""
        full = row.new_zeros(*row.shape[:-1], 1 + 2 * self.num_layers)
        places = [0 if label == EMBEDDING else 1 + 2 * label[0] + SITES.index(label[1]) for label in written]
        return full.index_copy(-1, torch.tensor(places, dtype=torch.int64, device=row.device), row)

    def _place(self, at: str | tuple[int, str]) -> tuple[int | None, str]:
        if at == "readout":
            return None, "readout"
        if isinstance(at, tuple) and len(at) == 2 and at[1] in SITES:
            at = f"layers.{at[0]}.{at[1]}_collapsed"
        layer, _, leaf = str(at).removeprefix("layers.").partition(".")
        if not layer.isdigit() or leaf not in (*STREAMS, *READS):
            raise ValueError(
                f'at={at!r}: expected "readout", (layer, "attention" or "mlp"), or layers.<i>.<one of {", ".join((*STREAMS, *READS))}>'
            )
        if int(layer) not in self.read.layers:
            raise ValueError(f"at={at!r}: the run went through layers {self.read.layers}")
        return int(layer), leaf

    # What is needed.

    def _is_edited(self, name: str) -> bool:
        return name in self.read.origin.edited

    def _edited_until(self, layer: int | None, leaf: str, leaves: Sequence[str]) -> list[str]:
        """The values that hooks edited, of those that the sum at this place has to take in."""
        order = [(i, step) for i in self.read.layers for step in STEPS] + [(None, "readout")]
        passed = order[: order.index((layer, leaf)) + 1]
        # A read is of the streams, and does not change them.
        names = [VALUES[step].full_name(i) for i, step in passed if step in leaves and (step in STREAMS or (i, step) == (layer, leaf))]
        return [name for name in names if self._is_edited(name)]

    def _require_captured(self, edited: list[str]) -> None:
        missing = [name for name in edited if name not in self.read]
        if missing:
            raise ValueError(
                f"this run edited {', '.join(missing)}, and without the edited streams the sum cannot be made; "
                f"capture names={missing} as well, and the edit becomes a component of its own"
            )

    def _require_mixing(self, depth: int, what: str) -> None:
        self.read.require_layers([f"{site}_{x}" for site in SITES for x in ("post", "comb")], self.read.layers[:depth], what)

    def _require_terms(self, layers: list[int], what: str) -> None:
        origin = self.read.origin
        if origin.start is None:
            self.read.require(["token_embeddings"], what)
        else:
            self.read.require_layers(["layer_input"], self.read.layers[:1], what)
        self.read.require_layers([f"{site}_{x}" for site in SITES for x in ("post", "comb", "output")], layers, what)

    def _require_readout(self, what: str) -> None:
        if self.read.origin.stop is not None:
            raise ValueError(f"{what} asks for the readout, and the run ended with stop_at_layer={self.read.origin.stop}")
        self.read.require(["readout_weights"], what)
