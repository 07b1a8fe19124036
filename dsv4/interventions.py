"""Ready-made interventions and lenses: steering, skipping layers, reading streams through the vocabulary.

Each uses public values only, so that a user could have written it. Axes: b row, s token, n stream.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dsv4.kernels.hyper_connection import collapse
from dsv4.lens import READOUTS, Lens


class Interventions:
    """Mixed into the model."""

    @contextmanager
    def steer(self, vector: Tensor, layers: int | Iterable[int], scale: float = 1.0, *, factor: float | None = None) -> Iterator[None]:
        """Add scale * vector [hidden] to every stream of layer_output, at all positions, in the given layers.

        The columns of comb sum to one, so a vector added to all streams is carried on unchanged. `factor` is an alias of `scale`.
        """
        scale = scale if factor is None else factor
        vector = torch.as_tensor(vector, device=self.device)
        if vector.shape != (self.hidden_size,) or not vector.is_floating_point():
            raise ValueError(f"steer takes a floating vector [{self.hidden_size}], got {vector.dtype} {list(vector.shape)}")

        def add(streams, hook):
            return streams + scale * vector.to(streams.dtype)

        chosen = self._layers(layers)
        with self.hooks([(f"layers.{i}.layer_output", add) for i in chosen]):
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
        logits, cache = self.run_with_cache(input, ["layers.*.layer_output", "readout_weights"], pos=pos, **run)
        streams = [cache["layer_output", i] for i in range(self.num_layers) if f"layers.{i}.layer_output" in cache]
        layers = [i for i in range(self.num_layers) if f"layers.{i}.layer_output" in cache]
        weights = cache["readout_weights"]
        with torch.no_grad():
            read = {
                "head": lambda x: self.project_on_vocab(x, readout="head"),
                "mean": lambda x: self.project_on_vocab(x.mean(-2), readout="none"),
                "each": lambda x: self.project_on_vocab(x, readout="none"),
                "final_pre": lambda x: self.project_on_vocab(collapse(x, weights), readout="none"),
            }[readout]
            return Lens(readout, layers, torch.stack([read(x) for x in streams]), cache.positions, self.tokenizer)

    def _layers(self, layers: int | Iterable[int]) -> list[int]:
        chosen = [layers] if isinstance(layers, int) else list(layers)
        for i in chosen:
            if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < self.num_layers:
                raise ValueError(f"layer {i!r}: expected 0 <= layer < {self.num_layers}")
        return chosen
