"""The standard values: what every HookPoint of the model is called, holds and costs, as data.

A value's full name is its module's path, a dot and its leaf name, which is unique over the page:
`VALUES["expert_weights"].full_name(3)` is `layers.3.mlp.expert_weights`. Axes are tokens with a
blank between: b batch, s tokens of the call, k keys, e entries after the call, e_new entries closed
by it, n streams, N heads, D head width, I expert width, ih and id indexer heads and width.
"""

from dataclasses import dataclass

import torch

from dsv4.config import CSA, HASH_MOE, SLIDING, Dsv4Config

MODEL = ""
BLOCK = "layers.{i}"
ATTENTION = "layers.{i}.self_attn"
COMPRESSOR = "layers.{i}.self_attn.compressor"
INDEXER = "layers.{i}.self_attn.compressor.indexer"
MIXTURE = "layers.{i}.mlp"


@dataclass(frozen=True)
class Value:
    """One standard value.

    kind: "std" a name of the nnterp page, "native" marked unavailable there, "new" of this package.
    dtype: "f" float32 always, "m" the model's dtype, "i" int64.
    read, edit: "free" the fused way has the tensor anyway, "mat" the block takes the spelled-out
    way while someone listens, "-" (edit only) read-only.
    module: path of the module that owns the point, with {i} for the number of the block.
    """

    name: str
    kind: str
    layout: str
    axes: str
    dtype: str
    read: str
    edit: str
    meaning: str
    module: str

    def full_name(self, layer: int | None = None) -> str:
        """Dotted path from the model; `layer` is needed for the values of a block."""
        is_of_block = "{i}" in self.module
        if is_of_block and layer is None:
            raise ValueError(f"{self.name} is a value of each block: got layer=None, give its number")
        if layer is not None and not is_of_block:
            raise ValueError(f"{self.name} is a value of the model: got layer={layer}, expected None")
        return ".".join(part for part in (self.module.format(i=layer), self.name) if part)


# fmt: off
_ROWS = {
    MODEL: (
        ("input_ids", "std", "Tokens", "b s", "i", "free", "-",
         "token ids of the call"),
        ("attention_mask", "std", "Tokens", "b s", "i", "free", "-",
         "1 = token, 0 = padding; ones when none was given"),
        ("token_embeddings", "std", "Residual", "b s hidden", "m", "free", "free",
         "embedding output, copied into every stream; an edit never changes hash routing"),
        ("readout_weights", "new", "StreamWeights", "b s n", "f", "free", "mat",
         "weights with which hc_head collapses the last block's streams"),
        ("readout", "new", "Residual", "b s hidden", "m", "free", "mat",
         "the collapsed streams, what the final norm reads"),
        ("final_norm_output", "std", "Residual", "b s hidden", "m", "free", "free",
         "what lm_head reads"),
        ("lm_head_output", "std", "Logits", "b s vocab", "f", "free", "free",
         "the head's output"),
        ("logits", "std", "Logits", "b s vocab", "f", "free", "free",
         "what the call returns; equals lm_head_output in this family"),
        ("next_token_probs", "std", "NextTokenProbs", "b vocab", "f", "mat", "-",
         "softmax of the logits at each row's last real token"),
    ),
    BLOCK: (
        ("layer_input", "std", "Streams", "b s n hidden", "m", "free", "mat",
         "streams entering the block"),
        ("attention_hc_logits", "new", "HcLogits", "b s (2+n)*n", "f", "mat", "mat",
         "projection of the normed streams before scale and bias, in order pre, post, comb"),
        ("attention_pre", "new", "StreamWeights", "b s n", "f", "free", "mat",
         "weight of each stream in what the attention reads: sigmoid + hc_eps"),
        ("attention_post", "std", "StreamWeights", "b s n", "f", "free", "mat",
         "how much of the attention's output each stream receives, in (0, 2)"),
        ("attention_comb_start", "new", "StreamMixing", "b s n n", "f", "mat", "mat",
         "softmax + hc_eps before any normalisation; an edit runs through all rounds"),
        ("attention_sinkhorn", "new", "Sinkhorn", "b s iters n n", "f", "mat", "-",
         "the rounds: slice t after the first column and t (row, column) normalisations"),
        ("attention_comb", "std", "StreamMixing", "b s n n", "f", "free", "mat",
         "doubly stochastic mixing; stream k gets the sum over j of comb[j, k] x_j"),
        ("attention_collapsed", "new", "Residual", "b s hidden", "m", "free", "mat",
         "streams weighted by attention_pre"),
        ("attention_norm_output", "native", "Residual", "b s hidden", "m", "free", "mat",
         "input_layernorm of attention_collapsed: what the attention reads"),
        ("layer_mid", "native", "Streams", "b s n hidden", "m", "free", "mat",
         "streams between attention and mixture"),
        ("mlp_hc_logits", "new", "HcLogits", "b s (2+n)*n", "f", "mat", "mat",
         "projection of the normed streams before scale and bias, in order pre, post, comb"),
        ("mlp_pre", "new", "StreamWeights", "b s n", "f", "free", "mat",
         "weight of each stream in what the mixture reads: sigmoid + hc_eps"),
        ("mlp_post", "std", "StreamWeights", "b s n", "f", "free", "mat",
         "how much of the mixture's output each stream receives, in (0, 2)"),
        ("mlp_comb_start", "new", "StreamMixing", "b s n n", "f", "mat", "mat",
         "softmax + hc_eps before any normalisation; an edit runs through all rounds"),
        ("mlp_sinkhorn", "new", "Sinkhorn", "b s iters n n", "f", "mat", "-",
         "the rounds: slice t after the first column and t (row, column) normalisations"),
        ("mlp_comb", "std", "StreamMixing", "b s n n", "f", "free", "mat",
         "doubly stochastic mixing; stream k gets the sum over j of comb[j, k] x_j"),
        ("mlp_collapsed", "new", "Residual", "b s hidden", "m", "free", "mat",
         "streams weighted by mlp_pre"),
        ("mlp_norm_output", "native", "Residual", "b s hidden", "m", "free", "mat",
         "post_attention_layernorm of mlp_collapsed"),
        ("mlp_input", "native", "Residual", "b s hidden", "m", "free", "mat",
         "what router, routed experts and shared expert read, after mlp_norm_output"),
        ("layer_output", "std", "Streams", "b s n hidden", "m", "free", "mat",
         "streams leaving the block"),
    ),
    ATTENTION: (
        ("attention_query_latent", "new", "Latent", "b s q_lora_rank", "m", "free", "free",
         "q_a_norm(q_a_proj(x)); the indexer reads it too"),
        ("attention_queries_unrotated", "new", "Queries", "b N s D", "m", "mat", "mat",
         "queries after q_b_norm, before rotary"),
        ("attention_queries", "std", "Queries", "b N s D", "m", "free", "mat",
         "queries after rotary, before the scale D^-1/2"),
        ("attention_keys_unrotated", "new", "Keys", "b 1 s D", "m", "mat", "mat",
         "this call's token keys before rotary; feeds the KV cache"),
        ("attention_keys", "std", "Keys", "b 1 k D", "m", "mat", "mat",
         "token keys, then entries"),
        ("attention_values", "std", "Values", "b 1 k D", "m", "mat", "mat",
         "the same tensor object as attention_keys, until a hook returns another"),
        ("attention_key_positions", "new", "KeyPositions", "b k", "i", "mat", "-",
         "position each key stands for (an entry: its window's first token); -1 = nothing there"),
        ("attention_scores", "std", "Pattern", "b N s k", "f", "mat", "mat",
         "scaled scores entering the softmax, without the sink; masked = -inf"),
        ("attention_sink_logits", "new", "Sinks", "b N s", "f", "mat", "mat",
         "the sink parameter, expanded, to ablate or patch sinks per position"),
        ("attention_probabilities", "std", "Pattern", "b N s k", "f", "mat", "mat",
         "softmax with the sink, sink dropped; rows sum to less than one"),
        ("attention_sink_probability", "new", "SinkMass", "b N s", "f", "mat", "-",
         "what the sink took, before edits of attention_probabilities"),
        ("attention_head_outputs", "std", "HeadOutputs", "b s N D", "m", "free", "mat",
         "per-head mix of values with its rotary slice rotated back"),
        ("attention_premix", "native", "Premix", "b s N*D", "m", "free", "mat",
         "the heads side by side in head order, entering o_a_proj"),
        ("attention_low_rank_output", "new", "LowRank", "b s o_groups o_lora_rank",
         "m", "free", "mat", "o_a_proj's output, what o_b_proj reads"),
        ("attention_head_results", "new", "HeadResults", "b s N hidden", "f", "mat", "mat",
         "each head's own contribution, in float32; an edit adds its difference to the output"),
        ("attention_output", "std", "Residual", "b s hidden", "m", "free", "mat",
         "what the attention adds, before post"),
    ),
    COMPRESSOR: (
        ("compressor_gates", "new", "PoolGates", "b e_new window D", "f", "mat", "mat",
         "softmax pooling weights per channel over the tokens of an entry's window"),
        ("compressed_entries", "new", "Entries", "b e_new D", "m", "free", "mat",
         "normed and rotated entries closed by this call, before they enter the KV cache"),
    ),
    INDEXER: (
        ("indexer_queries", "new", "IndexQueries", "b s ih id", "m", "mat", "mat",
         "the indexer's queries after rotary"),
        ("indexer_keys", "new", "IndexKeys", "b e id", "m", "mat", "mat",
         "normed and rotated entries of the indexer's own compressor"),
        ("indexer_head_weights", "new", "IndexWeights", "b s ih", "f", "mat", "mat",
         "weights_proj(x) * ih^-1/2"),
        ("indexer_head_scores", "new", "IndexHeadScores", "b s ih e", "f", "mat", "mat",
         "relu(q . k) * id^-1/2"),
        ("indexer_scores", "new", "IndexScores", "b s e", "f", "mat", "mat",
         "weighted sum over heads, -inf where the entry is not closed yet"),
        ("indexer_selection", "new", "Selection", "b s min(index_topk,e)", "i", "free", "mat",
         "entries the query keeps, best first, equal scores lowest entry first, -1 last"),
    ),
    MIXTURE: (
        ("router_logits", "std", "RouterLogits", "b s experts", "f", "free", "free",
         "before scoring; on a hash block an edit changes expert_weights, never expert_indices"),
        ("router_scores", "new", "RouterScores", "b s experts", "f", "free", "free",
         "sqrt(softplus(router_logits)), on hash blocks too"),
        ("router_selection_scores", "new", "RouterScores", "b s experts", "f", "free", "free",
         "router_scores + correction bias, what top-k sees: an edit changes only who is chosen"),
        ("expert_indices", "std", "ExpertIndices", "b s top_k", "i", "free", "free",
         "expert of each slot; an edit re-routes and re-derives expert_weights"),
        ("expert_weights", "std", "ExpertWeights", "b s top_k", "f", "free", "free",
         "scores of the chosen, renormalised to one, times routed_scaling_factor"),
        ("expert_gate", "new", "SlotNeurons", "b s top_k I", "m", "mat", "mat",
         "each slot's gate before the clamp"),
        ("expert_up", "new", "SlotNeurons", "b s top_k I", "m", "mat", "mat",
         "each slot's up before the clamp"),
        ("expert_activation", "new", "SlotNeurons", "b s top_k I", "m", "mat", "mat",
         "silu of the clamped gate"),
        ("expert_neurons", "new", "SlotNeurons", "b s top_k I", "m", "mat", "mat",
         "activation * clamped up, what down_proj reads; never contains the routing weight"),
        ("expert_outputs", "std", "ExpertOutputs", "b s top_k hidden", "m", "mat", "mat",
         "each slot's weighted output"),
        ("routed_output", "std", "Residual", "b s hidden", "m", "free", "mat",
         "float32 sum over slots, one rounding"),
        ("mlp_gate", "new", "Neurons", "b s I", "m", "mat", "mat",
         "the shared expert's gate before the clamp"),
        ("mlp_up", "new", "Neurons", "b s I", "m", "mat", "mat",
         "the shared expert's up before the clamp"),
        ("mlp_activation", "std", "Neurons", "b s I", "m", "mat", "mat",
         "silu of the shared expert's clamped gate"),
        ("mlp_neurons", "std", "Neurons", "b s I", "m", "mat", "mat",
         "what the shared expert's down projection reads"),
        ("shared_expert_output", "std", "Residual", "b s hidden", "m", "free", "mat",
         "what the shared expert adds for every token"),
        ("mlp_output", "std", "Residual", "b s hidden", "m", "free", "mat",
         "routed_output + shared_expert_output"),
    ),
}
# fmt: on
VALUES = {row[0]: Value(*row, module=module) for module, rows in _ROWS.items() for row in rows}

# What is captured when no names are given.
RESIDUAL_SET = (
    *("token_embeddings", "attention_pre", "attention_post", "attention_comb", "attention_output"),
    *("mlp_pre", "mlp_post", "mlp_comb", "expert_indices", "expert_weights", "mlp_output"),
    *("readout_weights", "final_norm_output"),
)


def absent(name: str, layer_type: str, mlp_type: str) -> str | None:
    """Why a block of these kinds has no value of this leaf name, and where it exists; else None."""
    module = VALUES[name].module
    if module == COMPRESSOR and layer_type == SLIDING:
        return (
            "a sliding_attention block keeps no compressed entries; the value exists on "
            "compressed_sparse_attention and heavily_compressed_attention blocks"
        )
    if module == INDEXER and layer_type != CSA:
        return f"a {layer_type} block has no indexer; the value exists on compressed_sparse_attention blocks"
    if name == "router_selection_scores" and mlp_type == HASH_MOE:
        return "a hash_moe block chooses experts by token id and selects by no score; the value exists on moe blocks"
    return None


def absent_reason(config: Dsv4Config, full_name: str) -> str | None:
    """Why this model has no value of that full name though other blocks have; else None."""
    parts = full_name.split(".")
    value = VALUES.get(parts[-1])
    if value is None or len(parts) < 3 or parts[1] not in map(str, range(config.num_layers)):
        return None
    layer = int(parts[1])
    if value.module == MODEL or value.full_name(layer) != full_name:
        return None
    return absent(value.name, config.layer_types[layer], config.mlp_layer_types[layer])


def all_names(config: Dsv4Config) -> list[str]:
    """Full name of every value the model has, in the order in which a forward reaches them."""
    names = {module: [row[0] for row in rows] for module, rows in _ROWS.items()}
    model, block, attention = names[MODEL], names[BLOCK], names[ATTENTION]
    entered = model.index("readout_weights")
    attends, mixes = block.index("layer_mid"), block.index("layer_output")
    keyed = attention.index("attention_keys")
    order = [
        *(*block[:attends], *attention[:keyed], *names[COMPRESSOR], *names[INDEXER]),
        *(*attention[keyed:], *block[attends:mixes], *names[MIXTURE], *block[mixes:]),
    ]
    blocks = [
        VALUES[name].full_name(layer)
        for layer, kinds in enumerate(zip(config.layer_types, config.mlp_layer_types, strict=True))
        for name in order
        if absent(name, *kinds) is None
    ]
    return [*model[:entered], *blocks, *model[entered:]]


def sizes(config: Dsv4Config, layer: int | None, batch: int, seq: int, past: int = 0) -> dict[str, int]:
    """Length of each axis token in one call of [batch, seq] tokens after `past` in a KV cache.

    `layer` is the block whose key and entry axes are meant; None leaves those tokens out. A sliding
    block has no entries, so neither e nor window.
    """
    n, heads, width = config.hc_mult, config.num_attention_heads, config.head_dim
    found = {
        "1": 1,
        "b": batch,
        "s": seq,
        "n": n,
        "(2+n)*n": (2 + n) * n,
        "iters": config.hc_sinkhorn_iters,
        "hidden": config.hidden_size,
        "vocab": config.vocab_size,
        "N": heads,
        "D": width,
        "N*D": heads * width,
        "q_lora_rank": config.q_lora_rank,
        "o_groups": config.o_groups,
        "o_lora_rank": config.o_lora_rank,
        "ih": config.index_n_heads,
        "id": config.index_head_dim,
        "experts": config.n_routed_experts,
        "top_k": config.num_experts_per_tok,
        "I": config.moe_intermediate_size,
    }
    if layer is None:
        return found
    rate = config.rate(layer)
    tokens = min(past, config.sliding_window - 1) + seq
    if rate is None:
        return found | {"k": tokens}
    entries = (past + seq) // rate
    window = 2 * rate if config.layer_types[layer] == CSA else rate
    chosen = min(config.index_topk, entries)
    own = {"e": entries, "window": window, "min(index_topk,e)": chosen}
    return found | {"k": tokens + entries, "e_new": entries - past // rate} | own


def nbytes(value: Value, sizes: dict[str, int], dtype: torch.dtype) -> int:
    """Bytes of one value whose axes have these sizes, in a model of this dtype."""
    total = {"f": 4, "i": 8, "m": dtype.itemsize}[value.dtype]
    for axis in value.axes.split():
        total *= sizes[axis]
    return total
