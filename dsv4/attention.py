"""Shared-KV attention over a sliding window and compressed entries: the three kinds of block.

    latent  = q_a_norm(W_qa x)                     q = rotary(norm(W_qb latent)) per head
    k = v   = rotary(kv_norm(W_kv x))              keys = [tokens, entries]
    heads   = softmax([q . k * D^-1/2, sink]) v, the rotary slice turned back by the query's angle
    output  = W_ob(W_oa(heads by group))

Scores and softmax are float32. Axes: b batch, s token of the call, k key, N head, D head width.
"""

import torch
from torch import Tensor, nn

from dsv4 import attention_step
from dsv4.call import OVERLAPPING, Call
from dsv4.compressor import Compressor
from dsv4.config import Dsv4Config
from dsv4.float32 import Float32
from dsv4.hooks import HookPoint, Probed, is_watched
from dsv4.indexer import Indexer
from dsv4.kernels.numeric import wide
from dsv4.kernels.sparse_attention import mix_values, score_keys, softmax_with_sink, sparse_attention, visible_entries, visible_tokens
from dsv4.linear import BlockDiagonalLinear, Linear
from dsv4.norm import RMSNorm, UnweightedRMSNorm

# Values that the fused attention does not have.
FUSED_AWAY = frozenset(
    (
        *("attention_keys", "attention_values", "attention_key_positions", "attention_scores", "attention_sink_logits"),
        *("attention_probabilities", "attention_sink_probability"),
    )
)


class SlidingAttention(Probed, Float32):
    """A query sees the last `sliding_window` tokens, itself included. The compressed kinds derive from it and add entries."""

    layer_type = "sliding_attention"
    rope_kind = "main"
    FLOAT32 = ("sinks",)
    # Of the fused way; chosen once, when the model is built (pretrained.use_kernels).
    backend = "torch"

    def __init__(self, config: Dsv4Config):
        super().__init__()
        self.heads, self.width, self.window = config.num_attention_heads, config.head_dim, config.sliding_window
        self.scale = config.head_dim**-0.5
        self.q_a_proj = Linear(config.hidden_size, config.q_lora_rank)
        self.q_a_norm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.q_b_proj = Linear(config.q_lora_rank, self.heads * self.width)
        self.q_b_norm = UnweightedRMSNorm(config.rms_norm_eps)
        self.kv_proj = Linear(config.hidden_size, self.width)
        self.kv_norm = RMSNorm(self.width, config.rms_norm_eps)
        self.sinks = nn.Parameter(torch.empty(self.heads, dtype=torch.float32))
        self.o_a_proj = BlockDiagonalLinear(self.heads * self.width, config.o_lora_rank, config.o_groups)
        self.o_b_proj = Linear(config.o_groups * config.o_lora_rank, config.hidden_size)

        self.attention_query_latent = HookPoint("b s q_lora_rank")
        self.attention_queries_unrotated = HookPoint("b N s D")
        self.attention_queries = HookPoint("b N s D")
        self.attention_keys_unrotated = HookPoint("b 1 s D")
        self.attention_keys = HookPoint("b 1 k D", shared=True)
        self.attention_values = HookPoint("b 1 k D", shared=True)
        self.attention_key_positions = HookPoint("b k")
        self.attention_scores = HookPoint("b N s k")
        self.attention_sink_logits = HookPoint("b N s")
        self.attention_probabilities = HookPoint("b N s k")
        self.attention_sink_probability = HookPoint("b N s")
        self.attention_head_outputs = HookPoint("b s N D")
        self.attention_premix = HookPoint("b s N*D")
        self.attention_low_rank_output = HookPoint("b s o_groups o_lora_rank")
        self.attention_head_results = HookPoint("b s N hidden")
        self.attention_output = HookPoint("b s hidden")

    def compress(self, x: Tensor, latent: Tensor, call: Call, kv) -> tuple[Tensor | None, Tensor | None]:
        """(entries [b e D] or None, selection [b s t] or None for all that are closed)."""
        return None, None

    def forward(self, x: Tensor, call: Call, kv=None) -> Tensor:
        """x [b s hidden], what the norm returned -> [b s hidden], what is written back to the streams."""
        if kv is not None and kv.fixed and self.is_own_kind and attention_step.suits(self, x):
            return attention_step.run(self, x, call, kv)
        tap = self.tap
        cos, sin = call.rotations[self.rope_kind]
        latent = tap.attention_query_latent(self.q_a_norm(self.q_a_proj(x)))
        queries = tap.attention_queries(self.queries(latent, cos, sin).transpose(1, 2))
        tokens = self.keys(x, cos, sin, call)
        entries, selection = self.compress(x, latent, call, kv)
        tokens = tokens if kv is None else kv.keys.extend(tokens, call.earlier.shape[1])

        attend = self.spelled if self.listened & FUSED_AWAY else self.fused
        mixed = attend(queries, tokens, entries, selection, call)
        return self.output(self.q_b_norm.only_turned(mixed, cos, sin, back=True, is_free=True))

    def output(self, heads: Tensor) -> Tensor:
        """What the heads read, turned back [b s N D] -> [b s hidden]."""
        tap = self.tap
        premix = tap.attention_premix(tap.attention_head_outputs(heads).flatten(2))
        low_rank = tap.attention_low_rank_output(self.o_a_proj(premix))
        output = self.o_b_proj(low_rank.flatten(2))
        if self.attention_head_results.live:
            output = self.with_head_results(output, premix)
        return tap.attention_output(output)

    @property
    def is_own_kind(self) -> bool:
        """Whether it is what this file defines, and no class over it."""
        return type(self) is KINDS.get(self.layer_type)

    def queries(self, latent: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[b s q_lora_rank] -> [b s N D], normed and turned."""
        queries = self.q_b_proj(latent).unflatten(-1, (self.heads, self.width))
        if "attention_queries_unrotated" not in self.listened:
            is_free = type(self.q_b_proj) is Linear and not is_watched(self.q_b_proj)
            return self.q_b_norm.turned(queries, cos, sin, is_free=is_free)
        queries = self.tap.attention_queries_unrotated(self.q_b_norm(queries).transpose(1, 2)).transpose(1, 2)
        return self.q_b_norm.only_turned(queries, cos, sin)

    def keys(self, x: Tensor, cos: Tensor, sin: Tensor, call: Call) -> Tensor:
        """[b s hidden] -> this call's token keys [b s D], normed and turned, zeros at padding."""
        keys = self.kv_proj(x)
        if "attention_keys_unrotated" not in self.listened:
            return self.kv_norm.turned(keys.unsqueeze(2), cos, sin, None if call.whole else call.valid).squeeze(2)
        keys = self.tap.attention_keys_unrotated(self.kv_norm(keys).unsqueeze(1)).transpose(1, 2)
        return self.kv_norm.only_turned(keys, cos, sin).squeeze(2).masked_fill(~call.valid.unsqueeze(-1), 0.0)

    def fused(self, queries, tokens, entries, selection, call: Call) -> Tensor:
        reach = call.reach(self.window, self.layer_type)
        return sparse_attention(queries.transpose(1, 2), tokens, entries, self.sinks, reach, selection, self.scale, self.backend)

    def spelled(self, queries, tokens, entries, selection, call: Call) -> Tensor:
        """The definition, every value in its place: queries [b N s D], tokens [b w+s D], entries [b e D] -> [b s N D]."""
        tap = self.tap
        positions, seen = self.key_axis(entries, selection, call)
        both = torch.cat((tokens,) if entries is None else (tokens, entries), dim=1)
        both = both.masked_fill((positions < 0).unsqueeze(-1), 0.0).unsqueeze(1)
        keys = tap.attention_keys(both)
        # One tensor, until a hook returns another for the keys.
        values = tap.attention_values(both if keys is both else both.clone())
        keys, values = self.attention_keys.settle(keys), self.attention_values.settle(values)
        tap.attention_key_positions(positions)
        scaled = wide(queries).transpose(1, 2) * self.scale
        scores = score_keys(scaled, wide(keys).squeeze(1), tokens.shape[1]).masked_fill(~seen.unsqueeze(2), float("-inf"))
        scores = tap.attention_scores(scores.transpose(1, 2))
        sinks = tap.attention_sink_logits(wide(self.sinks)[None, :, None].expand(scores.shape[:-1]))
        probabilities, on_sink = softmax_with_sink(scores, sinks)
        probabilities = tap.attention_probabilities(probabilities)
        tap.attention_sink_probability(on_sink)
        return mix_values(probabilities.transpose(1, 2), wide(values).squeeze(1), tokens.shape[1]).to(queries.dtype)

    def key_axis(self, entries, selection, call: Call) -> tuple[Tensor, Tensor]:
        """(position each key stands for [b k], which keys each query sees [b s k])."""
        positions = call.token_positions
        seen = visible_tokens(call.positions, positions, self.window)
        if entries is None:
            return positions, seen
        windows = call.windows[self.layer_type]
        number = torch.arange(windows.total, device=positions.device)
        starts = (number * windows.rate).masked_fill(number >= windows.after.unsqueeze(-1), -1)
        seen_entries = visible_entries(call.positions, windows.rate, windows.total, selection)
        return torch.cat((positions, starts), dim=1), torch.cat((seen, seen_entries), dim=-1)

    def with_head_results(self, output: Tensor, premix: Tensor) -> Tensor:
        """Each head's own contribution in float32; what a hook changed of it is added to the output."""
        group = self.heads // self.o_a_proj.groups
        dtype = wide(premix).dtype
        first = self.o_a_proj.by_group(dtype).unflatten(-1, (group, self.width))
        second = self.o_b_proj.matrix(dtype).unflatten(-1, (self.o_a_proj.groups, -1))
        heads = wide(premix).unflatten(-1, (self.o_a_proj.groups, group, self.width))
        low_rank = torch.einsum("bsgnd,grnd->bsgnr", heads, first)
        computed = torch.einsum("bsgnr,hgr->bsgnh", low_rank, second).flatten(2, 3).contiguous()
        returned = self.tap.attention_head_results(computed)
        return output if returned is computed else (wide(output) + self.over_heads(returned - computed)).to(output.dtype)

    def over_heads(self, x: Tensor) -> Tensor:
        """[b s N hidden] -> [b s hidden]."""
        return x.sum(2)


class CompressedSparseAttention(SlidingAttention):
    """Adds overlapping entries of a few tokens each, of which the indexer keeps the best for every query."""

    layer_type = OVERLAPPING
    rope_kind = "compress"

    def __init__(self, config: Dsv4Config):
        super().__init__(config)
        self.compressor = Compressor(config, self.layer_type, series=2)
        self.compressor.indexer = Indexer(config)

    def compress(self, x, latent, call, kv):
        entries = self.compressor(x, call, kv and kv.compressor)
        return entries, self.compressor.indexer(x, latent, call, kv and kv.indexer)


class HeavilyCompressedAttention(SlidingAttention):
    """Adds entries of many tokens each, all of them seen once closed."""

    layer_type = "heavily_compressed_attention"
    rope_kind = "compress"

    def __init__(self, config: Dsv4Config):
        super().__init__(config)
        self.compressor = Compressor(config, self.layer_type, series=1)

    def compress(self, x, latent, call, kv):
        return self.compressor(x, call, kv and kv.compressor), None


KINDS = {kind.layer_type: kind for kind in (SlidingAttention, CompressedSparseAttention, HeavilyCompressedAttention)}
