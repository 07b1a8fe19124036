"""Ready-made interventions and lenses: steering, skipping layers, reading streams through the vocabulary, the loss.

Each uses public values only, so that a user could have written it. Axes: b row, s token, n stream.
"""

import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dsv4.inputs import Input, resolve
from dsv4.kernels.hyper_connection import collapse
from dsv4.lens import READOUTS, Lens
from dsv4.loss import next_token_loss


class Interventions:
    """Mixed into the model."""

    @contextmanager
    def steer(
        self, vector: Tensor, layers: int | Iterable[int], scale: float | None = None, *, factor: float | None = None
    ) -> Iterator[None]:
        """Add scale * vector [hidden] to every stream of layer_output, at all positions, in the given layers. scale is 1 unless given.

        The columns of comb sum to one, so a vector added to all streams is carried on unchanged. `factor` is an alias of `scale`.
        """
        if scale is not None and factor is not None:
            raise TypeError("factor is another spelling of scale: give one of them")
        scale = next((x for x in (scale, factor) if x is not None), 1.0)
        vector = torch.as_tensor(vector, device=self.device)
        if vector.shape != (self.hidden_size,) or not vector.is_floating_point():
            raise ValueError(f"steer takes a floating vector [{self.hidden_size}], got {vector.dtype} {list(vector.shape)}")

        def add(streams, hook):
            # In the wider of both dtypes, rounded once to the streams'.
            return streams + scale * vector

        with self.hooks([(f"layers.{i}.layer_output", add) for i in self._layers(layers)]):
            yield

    @contextmanager
    def skip_layers(self, layers: int | Iterable[int]) -> Iterator[None]:
        """Leave these layers out: the streams pass through."""
        before = self.skipped
        self.skipped = before | frozenset(self._layers(layers))
        try:
            yield
        finally:
            self.skipped = before

    def project_on_vocab(self, x: Tensor, readout: str | None = None) -> Tensor:
        """Logits of a hidden value, float32.

        Args:
            x: streams [b, s, n, hidden] go through hc_head, norm and head; [b, s, hidden] through norm and head;
                [n, hidden] or [s, hidden] need readout="head" (streams) or "none".
        """
        if readout not in (None, "head", "none"):
            raise ValueError(f'readout={readout!r}: expected "head" (collapse the streams with hc_head) or "none"')
        if x.dim() < 1 or x.shape[-1] != self.hidden_size:
            raise ValueError(f"project_on_vocab: the last axis must be hidden = {self.hidden_size}, got shape {list(x.shape)}")
        if readout is None:
            if x.dim() not in (3, 4):
                raise ValueError(
                    f'project_on_vocab: shape {list(x.shape)} may be streams or not; say readout="head" ([..., n, hidden]) or "none"'
                )
            readout = "head" if x.dim() == 4 else "none"
        if readout == "head":
            if x.dim() < 2 or x.shape[-2] != self.streams:
                raise ValueError(f'project_on_vocab: readout="head" needs [..., {self.streams}, {self.hidden_size}], got {list(x.shape)}')
            x = self.hc_head(x)
        return self.lm_head(self.norm(x))

    def logit_lens(self, input=None, readout: str = "head", *, pos=-1, **run) -> Lens:
        """Every layer_output read as logits, with `readout`:

        "head": hc_head, norm, head (equals the logits at the last layer). "mean": the mean of the streams. "each": one per stream.
        "final_pre": the streams collapsed with the readout weights that this run's last layer got.
        """
        if readout not in READOUTS:
            raise ValueError(f"readout={readout!r}: expected one of {', '.join(READOUTS)}")
        wanted = ["layers.*.layer_output", *(["readout_weights"] if readout == "final_pre" else [])]
        _, cache = self.run_with_cache(input, wanted, pos=pos, **run)
        streams = {i: cache["layer_output", i] for i in range(self.num_layers) if ("layer_output", i) in cache}
        with torch.no_grad():
            read = {
                "head": lambda x: self.project_on_vocab(x, readout="head"),
                "mean": lambda x: self.project_on_vocab(x.mean(-2), readout="none"),
                "each": lambda x: self.project_on_vocab(x, readout="none"),
                "final_pre": lambda x: self.project_on_vocab(collapse(x, cache["readout_weights"]), readout="none"),
            }[readout]
            logits = torch.stack([read(x) for x in streams.values()])
        return Lens(readout, list(streams), logits, cache.positions, self.tokenizer)

    def loss(self, input: Input, attention_mask: Tensor | None = None, per_token: bool = False) -> Tensor:
        """Mean next-token cross entropy over the real tokens, a scalar; per_token gives [b, s-1], 0 at padding.

        ValueError when no row has two tokens.
        """
        inputs = resolve(self, input, attention_mask=attention_mask)
        return next_token_loss(self(inputs.ids, attention_mask=inputs.valid), inputs.ids, inputs.valid, per_token)

    def _layers(self, layers: int | Iterable[int]) -> list[int]:
        chosen = list(layers) if isinstance(layers, Iterable) else [layers]
        for i in chosen:
            if isinstance(i, bool) or not hasattr(i, "__index__") or not 0 <= operator.index(i) < self.num_layers:
                raise ValueError(f"layer {i!r}: expected 0 <= layer < {self.num_layers}")
        return list(dict.fromkeys(map(operator.index, chosen)))
