"""Ready-made interventions and lenses: steering, skipping layers, reading streams through the vocabulary, the loss.

Each uses public values only, so that a user could have written it. Axes: b row, s token, n stream.
"""

import operator
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from dsv4.activation_cache import ActivationCache
from dsv4.capture import Last, Pos
from dsv4.inputs import Input, resolve
from dsv4.kernels.hyper_connection import collapse
from dsv4.lens import READOUTS, Lens
from dsv4.loss import next_token_loss
from dsv4.part import Positions


class Interventions:
    """Mixed into the model."""

    @contextmanager
    def steer(
        self,
        vector: Tensor,
        layers: int | Iterable[int],
        scale: float | None = None,
        *,
        factor: float | None = None,
        streams: int | str = "all",
        norm: str | None = None,
        pos: Pos = None,
    ) -> Iterator[None]:
        """Add scale * vector [hidden] to the streams leaving the given layers. scale is 1 unless given; `factor` is an alias of it.

        Args:
            streams: "all": to every stream; the columns of comb sum to one, so such a vector is carried on unchanged. An int k: to
                stream k alone; later layers spread it. "post": as if the mixture had written it, mlp_post (x) vector.
            norm: "read" divides by the sum of the weights with which the next read (the next layer's attention, or the readout)
                would have read the streams without the vector: with that mixing frozen the read moves by scale * vector. With an int
                it divides by that stream's weight, with "post" by the sum of the weights times mlp_post.
            pos: positions of the row to steer, negative from the row's last token of each call (see `dsv4.part.Positions`).
        """
        if scale is not None and factor is not None:
            raise TypeError("factor is another spelling of scale: give one of them")
        scale = next((x for x in (scale, factor) if x is not None), 1.0)
        vector = torch.as_tensor(vector, device=self.device)
        if vector.shape != (self.hidden_size,) or not vector.is_floating_point():
            raise ValueError(f"steer takes a floating vector [{self.hidden_size}], got {vector.dtype} {list(vector.shape)}")
        one_stream = not isinstance(streams, bool | str) and hasattr(streams, "__index__")
        if streams not in ("all", "post") and not (one_stream and 0 <= operator.index(streams) < self.streams):
            raise ValueError(f'steer: streams={streams!r}, expected "all", "post" or 0 <= k < {self.streams}')
        streams = operator.index(streams) if one_stream else streams
        if norm not in (None, "read"):
            raise ValueError(f'steer: norm={norm!r}, expected "read" or None')
        positions = Positions(pos)
        with ExitStack() as stack:
            stack.enter_context(positions.watched())
            for i in self._layers(layers):
                stack.enter_context(self._steered(i, scale * vector, streams, norm, positions))
            yield

    @contextmanager
    def _steered(self, layer: int, added: Tensor, streams: int | str, norm: str | None, positions: Positions) -> Iterator[None]:
        post = Last()
        everywhere = streams == "all" and norm is None and positions.given is None

        def add(x, hook):
            if everywhere:
                # In the wider of both dtypes, rounded once to the streams'.
                return x + added.to(x.device)
            weights = post.value if streams == "post" else torch.ones(x.shape[:-1], device=x.device)
            if isinstance(streams, int):
                weights = weights * (torch.arange(self.streams, device=x.device) == streams)
            if norm == "read":
                weights = weights / (self._read_weights(layer, x) * weights).sum(-1, keepdim=True)
            if positions.given is not None:
                weights = weights * positions.of(hook).unsqueeze(-1)
            return x + weights.unsqueeze(-1) * added.to(x.device)

        with self.hooks([(f"layers.{layer}.layer_output", add)]), ExitStack() as stack:
            if streams == "post":
                stack.enter_context(post.of(self.hook_dict[f"layers.{layer}.mlp_post"]))
            yield

    def _read_weights(self, layer: int, x: Tensor) -> Tensor:
        """[b s n] float32: weights with which the streams x leaving a layer are read next."""
        follows = next((i for i in range(layer + 1, self.num_layers) if i not in self.skipped), None)
        if follows is None:
            return self.hc_head.weights(x.to(self.device)).to(x.device)
        reads = self.layers[follows].attn_hc
        return reads.pre(reads.logits(x.to(reads.fn.device))).to(x.device)

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
        x = x.to(self.device)
        if readout == "head":
            if x.dim() < 2 or x.shape[-2] != self.streams:
                raise ValueError(f'project_on_vocab: readout="head" needs [..., {self.streams}, {self.hidden_size}], got {list(x.shape)}')
            x = self.hc_head(x)
        return self.lm_head(self.norm(x))

    def logit_lens(self, input=None, readout: str = "head", *, pos=-1, **run) -> Lens:
        """Every layer_output read as logits, of a run over `input`, or of the tokens of a cache given as `input`: its layer outputs, or
        those replayed from its residual set. With `readout`:

        "head": hc_head, norm, head (equals the logits at the last layer). "mean": the mean of the streams. "each": one per stream.
        "final_pre": the streams collapsed with the readout weights that this run's last layer got.
        """
        if readout not in READOUTS:
            raise ValueError(f"readout={readout!r}: expected one of {', '.join(READOUTS)}")
        if isinstance(input, ActivationCache):
            if run:
                raise TypeError(f"logit_lens of a cache makes no run and takes no {', '.join(run)}")
            cache = input if input.positions.dim() == 2 else input.add_batch_dim()
        else:
            wanted = ["layers.*.layer_output", *(["readout_weights"] if readout == "final_pre" else [])]
            _, cache = self.run_with_cache(input, wanted, pos=pos, **run)
        streams = {i: cache["layer_output", i] for i in range(self.num_layers) if ("layer_output", i) in cache}
        streams = streams or cache.residual.streams("layer_output")
        with torch.no_grad():
            read = {
                "head": lambda x: self.project_on_vocab(x, readout="head"),
                "mean": lambda x: self.project_on_vocab(x.mean(-2), readout="none"),
                "each": lambda x: self.project_on_vocab(x, readout="none"),
                "final_pre": lambda x: self.project_on_vocab(collapse(x, cache["readout_weights"].to(x.device)), readout="none"),
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
