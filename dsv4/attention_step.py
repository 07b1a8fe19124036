"""The attention of a decoding step in few launches, over the fixed form of a KV cache: the equations of `attention`, `compressor` and
`indexer`, with each step of them in device code that writes the cache in place.

    1 projections of x        2 latent normed, key normed, turned and kept        3 queries of the latent        4 queries turned
    for each pool: projections kept, entries of the windows that close            CSA: scores, selection
    5 attention over the ring as it lies, turned back                             6, 7 output

It goes around modules and points, so it runs where nobody looks at them (`suits`), and the block goes its usual way anywhere else.
Axes: b row, s token of the step, N head, D head width, ih index head.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from dsv4.call import Call
from dsv4.compressor import Compressor, EntryPool
from dsv4.hooks import is_watched
from dsv4.indexer import Indexer, Scorer
from dsv4.kernels import few_linears
from dsv4.kernels.decode_attention import ring_attention
from dsv4.kernels.index_scores import fused_select
from dsv4.kernels.norm_rotary import fused_norm_rotary
from dsv4.kernels.pooling import pool_step
from dsv4.kernels.step_rows import latent_and_key, turned_queries
from dsv4.linear import Fp8Linear, Linear
from dsv4.norm import RMSNorm, UnweightedRMSNorm

# Beyond so many tokens of a row the usual way shares the keys of a tile among queries.
MOST_TOKENS = 16
# What it has as a tensor of its own.
SHOWN = frozenset(
    (
        *("attention_query_latent", "attention_queries", "attention_head_outputs", "attention_premix"),
        *("attention_low_rank_output", "attention_head_results", "attention_output"),
    )
)
# Modules that it goes around. Another class, a part of a spread model or a user's own, computes something else.
KNOWN = frozenset((Linear, Fp8Linear, RMSNorm, UnweightedRMSNorm, Compressor, Indexer, Scorer))


def suits(attention, x: Tensor) -> bool:
    """Whether this block's step may be taken: on device code, without gradients, with nobody looking at what it goes around."""
    if attention.backend != "triton" or x.shape[1] > MOST_TOKENS or torch.is_grad_enabled() or not attention.live <= SHOWN:
        return False
    if any(pool.live for pool in pools_of(attention)):
        return False
    return all(type(m) in KNOWN and not is_watched(m) and _is_fused(m) for m in gone_around(attention))


def pools_of(attention) -> tuple[EntryPool, ...]:
    compressor = attention._modules.get("compressor")
    indexer = None if compressor is None else compressor._modules.get("indexer")
    return tuple(pool for pool in (compressor, indexer) if pool is not None)


def gone_around(attention) -> Iterator[nn.Module]:
    yield from (attention.q_a_proj, attention.q_a_norm, attention.q_b_proj, attention.q_b_norm, attention.kv_proj, attention.kv_norm)
    for pool in pools_of(attention):
        yield from (pool, pool.kv_proj, pool.gate_proj, pool.kv_norm)
        if isinstance(pool, Indexer):
            yield from (pool.q_b_proj, pool.scorer, pool.scorer.weights_proj)


def _is_fused(module: nn.Module) -> bool:
    """Linear maps have ways of their own, all of them to be had."""
    return isinstance(module, Linear | Scorer) or module.backend == "triton"


def run(attention, x: Tensor, call: Call, kv) -> Tensor:
    """x [b s hidden] -> [b s hidden]; kv: a FixedLayer, written in place."""
    tap, pools = attention.tap, pools_of(attention)
    cos, sin = call.rotations[attention.rope_kind]
    windows = call.windows.get(attention.layer_type)
    indexer = pools[1] if len(pools) > 1 and windows.total > pools[1].top_k else None
    wanted = [([attention.q_a_proj], False), ([attention.kv_proj], False), *(([p.kv_proj, p.gate_proj], True) for p in pools)]
    wanted += [] if indexer is None else [([indexer.scorer.weights_proj], True)]
    latent, key, *projected = project(x, wanted)

    ring = kv.keys.buffer
    norms = attention.q_a_norm, attention.kv_norm
    lengths = call.past, call.lengths
    latent = latent_and_key(latent, key, ring, *(n.weight for n in norms), cos, sin, *lengths, *(n.eps for n in norms))
    latent = tap.attention_query_latent(latent)
    for pool, held, made in zip(pools, (kv.compressor, kv.indexer), projected, strict=False):
        buffers = held.projections.buffer, held.entries.buffer
        pool_step(made, *buffers, pool.position_bias, pool.kv_norm.weight, *windows.rotation, *lengths, pool.kv_norm.eps)

    queries, selection = chosen(attention, indexer, latent, projected, call, kv)
    queries = tap.attention_queries(queries.transpose(1, 2)).transpose(1, 2)
    entries = kv.compressor.entries.buffer[:, : windows.total] if pools else None
    rate = windows.rate if pools else 1
    where = call.positions, cos, sin
    return attention.output(
        ring_attention(queries, ring, entries, attention.sinks, selection, *where, attention.window, rate, attention.scale)
    )


def chosen(attention, indexer: Indexer | None, latent: Tensor, projected: Sequence[Tensor], call: Call, kv) -> tuple[Tensor, Tensor | None]:
    """(queries [b s N D] normed and turned, selection [b s t], or None where every closed entry is seen)."""
    cos, sin = call.rotations[attention.rope_kind]
    eps = attention.q_b_norm.eps
    if indexer is None:
        (queries,) = project(latent, [([attention.q_b_proj], False)])
        queries = queries.unflatten(-1, (attention.heads, attention.width))
        return fused_norm_rotary(queries, None, cos, sin, None, eps, True, False), None
    queries, index_queries = project(latent, [([attention.q_b_proj], False), ([indexer.q_b_proj], False)])
    queries = queries.unflatten(-1, (attention.heads, attention.width))
    index_queries = index_queries.unflatten(-1, (indexer.heads, indexer.width))
    queries, index_queries = turned_queries(queries, index_queries, cos, sin, eps)
    windows = call.windows[attention.layer_type]
    keys, weights = kv.indexer.entries.buffer[:, : windows.total], projected[-1]
    sizes = windows.rate, indexer.top_k, call.lead, indexer.heads**-0.5
    return queries, fused_select(index_queries, keys, None, weights, call.positions, *sizes)


def project(x: Tensor, wanted: Sequence[tuple[Sequence[Linear], bool]]) -> list[Tensor]:
    """x [b s h] through several maps of it: for each (maps side by side, whether in float32) [b s o]; in one launch where that runs."""
    maps = [m for side, _ in wanted for m in side]
    weights, scales = [m.weight for m in maps], [getattr(m, "weight_scale_inv", None) for m in maps]
    is_exact = all(getattr(m, "numerics", "exact") == "exact" for m in maps)
    tokens = x.shape[0] * x.shape[1]
    # One map is one launch anyhow.
    if len(maps) > 1 and is_exact and few_linears.refusal("triton", x.device, x.dtype, tokens, weights, scales) is None:
        beside, in_float32 = zip(*((len(side), widens) for side, widens in wanted), strict=True)
        found = few_linears.few_linears(x.flatten(0, 1), None, weights, scales, beside, in_float32, 0.0)
        return [y.unflatten(0, x.shape[:2]) for y in found]
    made = [[m.in_float32(x) if widens else m(x) for m in side] for side, widens in wanted]
    return [torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0] for parts in made]
