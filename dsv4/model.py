"""DeepSeek-V4: token embedding copied into n residual streams, blocks, a learned readout of the streams, norm, head.

What is unusual: the residual is hc_mult streams mixed by hyper-connections; keys are values, one head of them, and they carry the
rotary that each head's output is turned back from; entries of 4 or 128 tokens stand beside the window; a mixture on every block.
Axes: see `dsv4`.
"""

from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from dsv4.ablation import Ablating
from dsv4.block import Block, Blocks, passes_unseen
from dsv4.call import Call, plan
from dsv4.compiling import Compiling
from dsv4.config import Dsv4Config
from dsv4.freezing import Freezing
from dsv4.generate import Generating
from dsv4.hooks import HookPoint, Probed
from dsv4.hyper_connection import HyperHead
from dsv4.inputs import Input, resolve
from dsv4.interventions import Interventions
from dsv4.kernels.few_tokens import linear
from dsv4.kernels.hyper_connection import CHUNK, collapse
from dsv4.kernels.numeric import wide
from dsv4.knockout import KnockingOut
from dsv4.kv_cache import KVCache
from dsv4.linear import Linear
from dsv4.loading import NO_TOKENIZER, Loading
from dsv4.norm import RMSNorm
from dsv4.patching import Patching
from dsv4.rope import Rotary
from dsv4.splicing import Splicing
from dsv4.stage import Span, Stage
from dsv4.watch import Watching

# Rows of the head's weight that are widened at a time.
HEAD_ROWS = 16384


class Head(Linear):
    """Logits in float32: both sides are widened, a slice of the vocabulary at a time."""

    def forward(self, x: Tensor) -> Tensor:
        x = wide(x)
        if self.weight.dtype == x.dtype:
            return linear(x, self.weight)
        return torch.cat([nn.functional.linear(x, rows.to(x.dtype)) for rows in self.weight.split(HEAD_ROWS)], dim=-1)


class Dsv4(Watching, Interventions, Ablating, Freezing, KnockingOut, Splicing, Patching, Generating, Compiling, Loading, Probed):
    """The model. Build it with `from_pretrained`, `from_config` or `from_transformers`.

    Calling it returns logits [b, s, vocab] float32. Values are named by their module path (`model.hook_dict`); read them with
    `run_with_cache`, replace them with `run_with_hooks`, `hooks` or `add_hook`.
    """

    def __init__(self, config: Dsv4Config):
        super().__init__()
        self.config = config
        self.tokenizer = NO_TOKENIZER
        # Not by its constructor, which draws from the global generator.
        rows = torch.empty(config.vocab_size, config.hidden_size, dtype=torch.float32)
        self.embed_tokens = nn.Embedding.from_pretrained(rows, freeze=False)
        self.layers = Blocks(Block(config, i) for i in range(config.num_hidden_layers))
        self.hc_head = HyperHead(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Head(config.hidden_size, config.vocab_size)
        self.rotary = nn.ModuleDict({kind: Rotary(config.qk_rope_head_dim, rope) for kind, rope in config.rope_parameters.items()})

        self.input_ids = HookPoint("b s")
        self.attention_mask = HookPoint("b s")
        self.token_embeddings = HookPoint("b s hidden")
        self.readout_weights = HookPoint("b s n")
        self.readout = HookPoint("b s hidden")
        self.final_norm_output = HookPoint("b s hidden")
        self.lm_head_output = HookPoint("b s vocab")
        self.logits = HookPoint("b s vocab")
        self.next_token_probs = HookPoint("b vocab")

        self.stage = Stage()
        self.skipped: frozenset[int] = frozenset()
        # What this process holds, where the model is spread over a mesh (dsv4.parallel).
        self.spread = None
        self.input_size: tuple[int, int] | None = None
        self.name_points()
        self.eval()

    def forward(
        self,
        input: Input = None,
        *,
        attention_mask: Tensor | None = None,
        input_ids: Input = None,
        inputs_embeds: Tensor | None = None,
        kv_cache: KVCache | None = None,
        logits_to_keep: int | None = None,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
    ) -> Tensor:
        """Run the model.

        Args:
            input: text, a list of texts, ids [s] or [b, s] (tensor or lists); with start_at_layer, streams [b, s, n, hidden].
            attention_mask: [b, s], 1 = token, 0 = padding at the left or right of a row; rows give what they give alone.
            input_ids: the ids where `input` is not them (beside inputs_embeds or streams); hash blocks route by them.
            inputs_embeds: [b, s, hidden] in place of the embedding's output.
            kv_cache: a KVCache to continue from; it advances when the run succeeds and is as before when it raises.
            logits_to_keep: logits of each row's last n real tokens only; None or 0 keeps all.
            start_at_layer, stop_at_layer: enter with the streams of a layer; leave with the streams entering a layer (exclusive).
        Returns:
            logits [b, s or n, vocab] float32, or streams [b, s, n, hidden] with stop_at_layer.
        """
        if torch.compiler.is_compiling():
            return self._traced(
                input,
                attention_mask=attention_mask,
                input_ids=input_ids,
                inputs_embeds=inputs_embeds,
                kv_cache=kv_cache,
                logits_to_keep=logits_to_keep,
                start_at_layer=start_at_layer,
                stop_at_layer=stop_at_layer,
            )
        self._check_span(start_at_layer, stop_at_layer)
        inputs = resolve(
            self,
            input,
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            start_at_layer=start_at_layer,
            stop_at_layer=stop_at_layer,
            past=None if kv_cache is None else list(kv_cache.lengths),
        )
        start, stop = start_at_layer or 0, stop_at_layer
        keep = _kept(logits_to_keep, inputs.size[1])
        partial = start_at_layer is not None or stop is not None or bool(self.skipped)
        # The dtypes of values are a contract: autocast would take float32 away from those that decide.
        with self.stage.running(), torch.autocast(self.device.type, enabled=False):
            if kv_cache is not None:
                kv_cache.admit(self, inputs, partial=partial)
            with nullcontext() if kv_cache is None else kv_cache.in_use():
                self.notice_listeners()
                if self._runs_compiled(inputs, kv_cache):
                    self.input_size = inputs.size
                    return self._decode(inputs.ids, inputs.valid[:, 0], inputs.valid[:, 0].tolist(), kv_cache)
                past = [0] * inputs.size[0] if kv_cache is None else list(kv_cache.lengths)
                call = plan(self.config, self.rotary, inputs.ids, inputs.valid, past)
                self.input_size = inputs.size
                self.stage.begin(call, kv_cache)
                # Its calls into torch cost less; what leaves the run is an ordinary tensor.
                is_step = kv_cache is not None and inputs.size[1] == 1 and self._is_unwatched
                with torch.inference_mode() if is_step else nullcontext():
                    out = self.run(call, inputs.hidden, start, stop, keep, kv_cache)
                out = out.clone() if is_step else out
                self.stage.warn_unreached(Span(start_at_layer, stop, self.skipped, inputs.ids is not None))
                if kv_cache is not None:
                    kv_cache.commit(call)
                return out

    def run(self, call: Call, hidden: Tensor | None, start: int, stop: int | None, keep: int | None, kv) -> Tensor:
        """The forward itself, over checked inputs."""
        tap = self.tap
        if call.input_ids is not None:
            tap.input_ids(call.input_ids)
        tap.attention_mask(call.valid.long())
        streams = self.embed(call, hidden) if start == 0 and (hidden is None or hidden.dim() == 3) else hidden
        made_by = None
        for i in range(start, self.num_layers if stop is None else stop):
            if i not in self.skipped:
                block = self.layers[i]
                # A block of somebody else's knows of no such word.
                free = {"is_free": True} if streams.numel() > CHUNK and passes_unseen(made_by, block) else {}
                streams = block(streams, call, None if kv is None else kv.layers[i], **free)
                made_by = block
        streams = self.layers.leave(streams)
        if stop is not None:
            return streams.contiguous()
        streams = streams.to(call.valid.device)
        weights = tap.readout_weights(self.hc_head.weights(streams))
        x = tap.readout(collapse(streams, weights))
        x = tap.final_norm_output(self.norm(x))
        if keep is not None:
            self.stage.kept = call.last_columns(keep)
            x = x.gather(1, self.stage.kept.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        logits = tap.logits(tap.lm_head_output(self.lm_head(x)))
        if self.next_token_probs.live:
            last = call.last_columns(1) if keep is None else torch.full_like(call.last_columns(1), keep - 1)
            tap.next_token_probs(logits.gather(1, last.unsqueeze(-1).expand(-1, -1, logits.shape[-1])).squeeze(1).softmax(-1))
        return logits

    def embed(self, call: Call, embeddings: Tensor | None) -> Tensor:
        """[b s n hidden]: the embedding's output in every stream."""
        x = self.tap.token_embeddings(self.embed_tokens(call.input_ids) if embeddings is None else embeddings)
        return x.unsqueeze(2).expand(-1, -1, self.streams, -1).contiguous()

    def _check_span(self, start: int | None, stop: int | None) -> None:
        """ValueError unless 0 <= start <= stop <= num_layers; None leaves an end open."""
        for name, layer, first in (("start_at_layer", start, 0), ("stop_at_layer", stop, start or 0)):
            if layer is not None and (isinstance(layer, bool) or not isinstance(layer, int) or not first <= layer <= self.num_layers):
                raise ValueError(f"{name}={layer!r}: expected {first} <= layer <= {self.num_layers}, counted from the first")

    def new_kv_cache(self, batch_size: int = 1, max_length: int = 4096, *, rewind: int | None = None) -> KVCache:
        """An empty KVCache of this model's config, dtype and device."""
        device = self.device if self.placed is None else self.placed.devices
        return KVCache(self.config, batch_size, max_length, device=device, dtype=self.dtype, rewind=rewind)

    # Names.

    def name_points(self) -> None:
        """Give every point its path from the model and the stage it acts on."""
        for path, module in self.named_modules():
            if isinstance(module, HookPoint):
                module.name = path
                object.__setattr__(module, "stage", self.stage)
        object.__setattr__(self, "_probed", [m for m in self.modules() if isinstance(m, Probed)])

    def notice_listeners(self) -> None:
        for module in self.probed:
            module.notice()

    @property
    def probed(self) -> Iterable[Probed]:
        return self._probed

    # Sizes, under the names of the field.

    num_layers = property(lambda self: self.config.num_hidden_layers)
    hidden_size = property(lambda self: self.config.hidden_size)
    num_heads = property(lambda self: self.config.num_attention_heads)
    num_kv_heads = property(lambda self: self.config.num_key_value_heads)
    head_dim = property(lambda self: self.config.head_dim)
    qk_head_dim = property(lambda self: self.config.head_dim)
    vocab_size = property(lambda self: self.config.vocab_size)
    intermediate_size = property(lambda self: self.config.moe_intermediate_size)
    num_experts = property(lambda self: self.config.n_routed_experts)
    top_k = property(lambda self: self.config.num_experts_per_tok)
    streams = property(lambda self: self.config.hc_mult)
    layer_types = property(lambda self: self.config.layer_types)
    is_spread = property(lambda self: self.spread is not None and self.spread.dims.world.size() > 1)
    device = property(lambda self: self.embed_tokens.weight.device if self.placed is None else self.placed.main)
    dtype = property(lambda self: self.embed_tokens.weight.dtype if self.placed is None else self.placed.dtype)


def _kept(n: int | None, s: int) -> int | None:
    if n is None or (n == 0 and not isinstance(n, bool)):
        return None
    if isinstance(n, bool) or not isinstance(n, int) or n < 0:
        raise ValueError(f"logits_to_keep={n!r}: expected a count >= 0 of each row's last real tokens")
    return min(n, s)
