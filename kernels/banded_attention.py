"""Sparse attention in plain torch, at a cost linear in the number of queries: window keys in banded blocks of queries, selected
entries gathered, in chunks of queries. Equations and arguments: dsv4.kernels.sparse_attention.

`banded_attention` is a registered op where its chunks would be in the way: a compiler would unroll them, a graph of gradients would
keep every chunk's weights and gathered entries. The op keeps its arguments and computes the output again.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import pad

from dsv4.kernels import few_tokens
from dsv4.kernels.numeric import is_plain, wide
from dsv4.kernels.reach import Reach, visible_entries, visible_tokens
from dsv4.kernels.recompute import gradients

# Queries of one banded block, and floats of scores and gathered entries that are held at a time.
BLOCK = 32
CHUNK = 1 << 19
# Up to this many entries per selected one, masking a dense product is cheaper than gathering.
GATHER_RATIO = 8
# From so many queries on, what a graph would keep is worth a second computation.
RECOMPUTED = 512


def banded_attention(queries, tokens, entries, sinks, reach: Reach, selection, scale: float) -> Tensor:
    """-> [b s N D] of queries' dtype."""
    given = (queries, tokens, entries, sinks)
    # The second is not to be asked where a compiler traces.
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and queries.shape[1] >= RECOMPUTED and not _are_transformed(given)):
        places = (reach.query_positions, reach.token_positions, reach.window, reach.gap, reach.rate)
        return banded_attention_op(queries, tokens, entries, sinks, selection, *places, scale)
    return _in_chunks(queries, tokens, entries, sinks, reach, selection, scale)


def _are_transformed(tensors) -> bool:
    """Inside a transform of torch.func or a forward-mode derivative, neither of which a registered op takes part in."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return forward_ad._current_level >= 0 or any(is_wrapped(x) for x in tensors if x is not None)


@torch.library.custom_op("dsv4::banded_attention", mutates_args=())
def banded_attention_op(
    queries: Tensor,
    tokens: Tensor,
    entries: Tensor | None,
    sinks: Tensor,
    selection: Tensor | None,
    query_positions: Tensor,
    token_positions: Tensor,
    window: int,
    gap: int,
    rate: int,
    scale: float,
) -> Tensor:
    """`banded_attention`, the fields of `reach` one by one."""
    reach = Reach(window, query_positions, token_positions, gap, rate)
    return _in_chunks(queries, tokens, entries, sinks, reach, selection, scale).contiguous()


@banded_attention_op.register_fake
def _(queries, *rest):
    return queries.new_empty(queries.shape)


@torch.library.custom_op("dsv4::banded_attention_gradient", mutates_args=())
def banded_attention_gradient(
    grad: Tensor,
    queries: Tensor,
    tokens: Tensor,
    entries: Tensor | None,
    sinks: Tensor,
    selection: Tensor | None,
    query_positions: Tensor,
    token_positions: Tensor,
    window: int,
    gap: int,
    rate: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of queries, tokens, entries ([b 0 D] without) and sinks, chunk by chunk; the weights of one chunk are held."""
    reach = Reach(window, query_positions, token_positions, gap, rate)
    plan = _Bands.of(queries, tokens, entries, selection, reach)
    kept = tokens[:, :0] if entries is None else entries
    d_queries, d_sinks, d_entries = (torch.zeros_like(wide(t)) for t in (queries, sinks, kept))
    d_tokens = torch.zeros_like(plan.tokens)
    for begin, end, chunk in plan.chunks(queries, entries, sinks, scale):
        found = chunk.gradient(wide(grad[:, begin:end]))
        d_queries[:, begin:end] = found.queries * scale
        d_sinks += found.sinks
        for i, part in enumerate(found.tokens.unbind(1)):
            first = begin + i * plan.block
            d_tokens[:, first : first + part.shape[1]] += part
        if entries is not None:
            chunk.add_to_entries(found, d_entries)
    d_tokens = plan.without_padding(d_tokens).contiguous()
    return d_queries.to(queries.dtype), d_tokens.to(tokens.dtype), d_entries.to(tokens.dtype), d_sinks.to(sinks.dtype)


@banded_attention_gradient.register_fake
def _(grad, queries, tokens, entries, sinks, *rest):
    given = queries, tokens, tokens[:, :0] if entries is None else entries, sinks
    return tuple(x.new_empty(x.shape) for x in given)


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.numbers = inputs[7:]


def _gradient(ctx, grad: Tensor) -> tuple:
    *leaves, selection, query_positions, token_positions = ctx.saved_tensors
    if torch.is_grad_enabled():
        window, gap, rate, scale = ctx.numbers
        reach = Reach(window, query_positions, token_positions, gap, rate)
        found = gradients(lambda *given: _in_chunks(*given, reach, selection, scale), leaves, ctx.needs_input_grad[:4], (grad,))
        return *found, *(None,) * 7
    found = banded_attention_gradient(grad, *ctx.saved_tensors, *ctx.numbers)
    return *(g if needed else None for g, needed in zip(found, ctx.needs_input_grad, strict=False)), *(None,) * 7


banded_attention_op.register_autograd(_gradient, setup_context=_keep)


def few_queries(queries, tokens, entries, sinks, reach: Reach, selection, scale: float) -> Tensor:
    """All queries at once, each against every token key."""
    if few_tokens.takes_attention(queries, tokens, entries, sinks, reach, selection):
        return few_tokens.attention(queries, tokens, entries, sinks, reach, selection, scale)
    dtype, queries, tokens = queries.dtype, wide(queries) * scale, wide(tokens)
    return _few(queries, tokens, entries, wide(sinks), reach, selection).to(dtype)


def _in_chunks(queries, tokens, entries, sinks, reach: Reach, selection, scale: float) -> Tensor:
    plan = _Bands.of(queries, tokens, entries, selection, reach)
    chunks = plan.chunks(queries, entries, sinks, scale)
    if plan.step < queries.shape[1] and is_plain(queries):
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for begin, end, chunk in chunks:
            out[:, begin:end] = chunk.mixed()
        return out
    outputs = [chunk.mixed() for _, _, chunk in chunks]
    return (torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]).to(queries.dtype)


@dataclass(frozen=True)
class _Bands:
    """How the queries are cut: blocks of `block` queries, each against a band of token keys, `step` queries at a time.

    Attributes:
        tokens, places, positions: keys [b back+s' D], their positions and the queries', padded so that every block is whole.
        back: columns that a band begins before its block. front: columns of padding before the first key, negative for keys left out.
    """

    tokens: Tensor
    places: Tensor
    positions: Tensor
    selection: Tensor | None
    reach: Reach
    block: int
    back: int
    front: int
    step: int
    given: int

    @classmethod
    def of(cls, queries, tokens, entries, selection, reach: Reach) -> "_Bands":
        b, s, heads, width = queries.shape
        block, before = min(BLOCK, s), tokens.shape[1] - s
        back = reach.window - 1 + reach.gap
        if before + s <= back + 2 * block:
            # Short: one band that holds every token.
            block, back = s, before
        front, tail = back - before, -s % block
        per_query = heads * (back + block) + _entry_floats(entries, selection, heads, width)
        return cls(
            tokens=pad(tokens, (0, 0, max(front, 0), tail))[:, max(-front, 0) :],
            places=pad(reach.token_positions, (max(front, 0), tail), value=-1)[:, max(-front, 0) :],
            positions=pad(reach.query_positions, (0, tail), value=-1),
            selection=selection,
            reach=reach,
            block=block,
            back=back,
            front=front,
            step=max(1, CHUNK // (b * per_query * block)) * block,
            given=tokens.shape[1],
        )

    def chunks(self, queries, entries, sinks, scale: float) -> Iterator[tuple[int, int, "_Chunk"]]:
        """(first query, last query + 1, their chunk)."""
        s = queries.shape[1]
        for begin in range(0, s, self.step):
            end = min(s, begin + self.step)
            stop = end + -end % self.block
            yield (
                begin,
                end,
                _Chunk(
                    wide(queries[:, begin:end]) * scale,
                    wide(self.tokens[:, begin : self.back + stop]),
                    None if entries is None else wide(entries),
                    wide(sinks),
                    self.positions[:, begin:stop],
                    self.places[:, begin : self.back + stop],
                    None if self.selection is None else self.selection[:, begin:end],
                    self.reach,
                    self.block,
                ),
            )

    def without_padding(self, tokens: Tensor) -> Tensor:
        """[b back+s' D] -> [b w+s D], zeros for keys left out."""
        return pad(tokens[:, max(self.front, 0) :], (0, 0, max(-self.front, 0), 0))[:, : self.given]


@dataclass(frozen=True)
class _Gradients:
    """queries [b s N D], before the scale; tokens [b blocks band D]; scores of entries [b s N t]; grad, as given; sinks [N]."""

    queries: Tensor
    tokens: Tensor
    on_entries: Tensor
    grad: Tensor
    sinks: Tensor


class _Chunk:
    """queries [b s N D] scaled, tokens [b back+s' D], positions [b s'] and places [b back+s'], s' = s rounded up to blocks."""

    def __init__(self, queries, tokens, entries, sinks, positions, places, selection, reach: Reach, block: int):
        b, s, heads, _ = queries.shape
        self.queries, self.selection, self.reach = queries, selection, reach
        self.blocks, self.block = positions.shape[1] // block, block
        band = self.band = tokens.shape[1] - (self.blocks - 1) * block
        self.keys = tokens.unfold(1, band, block)
        seen = visible_tokens(positions.view(b, self.blocks, block), places.unfold(1, band, block), reach.window)
        on_tokens = (self.by_block(queries) @ self.keys).view(b, self.blocks, block, heads, band)
        on_tokens = self.by_query(on_tokens.masked_fill_(~seen.unsqueeze(3), float("-inf")))
        # Padding sees nothing, whatever its sink: a finite one keeps its row finite.
        self.at_padding = (positions[:, :s] < 0)[..., None, None]
        parts = [on_tokens, torch.where(self.at_padding, 0.0, sinks[:, None])]
        self.chosen = None
        if entries is not None:
            on_entries, self.chosen = _entry_scores(queries, entries, selection, positions[:, :s], reach.rate)
            parts.insert(1, on_entries)
        self.weights = torch.softmax(torch.cat(parts, dim=-1), dim=-1)

    def by_block(self, x: Tensor) -> Tensor:
        """[b s N d] -> [b blocks block*N d]."""
        b, s, heads, width = x.shape
        missing = self.blocks * self.block - s
        x = pad(x, (0, 0, 0, 0, 0, missing)) if missing else x
        return x.reshape(b, self.blocks, self.block * heads, width)

    def by_query(self, x: Tensor) -> Tensor:
        """[b blocks block*N d] -> [b s N d]."""
        b, s, heads, _ = self.queries.shape
        return x.view(b, self.blocks * self.block, heads, -1)[:, :s]

    def mixed(self) -> Tensor:
        """[b s N D]."""
        banded = self.by_block(self.weights)[..., : self.band]
        mixed = self.by_query(banded @ self.keys.transpose(-1, -2))
        return mixed if self.chosen is None else mixed + self.weights[..., self.band : -1] @ self.chosen

    def gradient(self, grad: Tensor) -> _Gradients:
        """grad [b s N D] of `mixed`."""
        weights, band = self.weights, self.band
        by_weight = [self.by_query(self.by_block(grad) @ self.keys)]
        if self.chosen is not None:
            by_weight.append(grad @ self.chosen.transpose(-1, -2))
        by_weight = torch.cat(by_weight, dim=-1)
        total = (weights[..., :-1] * by_weight).sum(-1, keepdim=True)
        by_score = weights[..., :-1] * (by_weight - total)
        by_sink = (-weights[..., -1:] * total).masked_fill(self.at_padding, 0.0)
        blocked = self.by_block(by_score[..., :band])
        queries = self.by_query(blocked @ self.keys.transpose(-1, -2))
        on_entries = by_score[..., band:]
        if self.chosen is not None:
            queries = queries + on_entries @ self.chosen
        tokens = blocked.transpose(-1, -2) @ self.by_block(self.queries)
        tokens = tokens + self.by_block(weights[..., :band]).transpose(-1, -2) @ self.by_block(grad)
        return _Gradients(queries, tokens, on_entries, grad, by_sink.sum((0, 1, 3)))

    def add_to_entries(self, found: _Gradients, into: Tensor) -> None:
        """into [b e D], added to."""
        scores, weights = found.on_entries, self.weights[..., self.band : -1]
        if not _gathers(into, self.selection):
            scores, weights = (x.flatten(1, 2).transpose(1, 2) for x in (scores, weights))
            into += scores @ self.queries.flatten(1, 2) + weights @ found.grad.flatten(1, 2)
            return
        part = scores.transpose(-1, -2) @ self.queries + weights.transpose(-1, -2) @ found.grad
        part = part.masked_fill((self.selection < 0).unsqueeze(-1), 0.0).flatten(1, 2)
        into.scatter_add_(1, self.selection.clamp(min=0).flatten(1, 2).unsqueeze(-1).expand_as(part), part)


def _entry_floats(entries: Tensor | None, selection: Tensor | None, heads: int, width: int) -> int:
    """Floats a query holds of its entries."""
    if entries is None:
        return 0
    if _gathers(entries, selection):
        return selection.shape[-1] * (heads + width)
    return entries.shape[1] * heads


def _gathers(entries: Tensor, selection: Tensor | None) -> bool:
    return selection is not None and entries.shape[1] > GATHER_RATIO * selection.shape[-1]


def _few(queries, tokens, entries, sinks, reach: Reach, selection) -> Tensor:
    """queries [b s N D] scaled."""
    b, s, heads, _ = queries.shape
    hides_tokens, has_padding = reach.hides_any
    on_tokens = torch.bmm(queries.flatten(1, 2), tokens.transpose(1, 2)).view(b, s, heads, -1)
    if hides_tokens:
        on_tokens.masked_fill_(reach.tokens_hidden.unsqueeze(2), float("-inf"))
    on_sink = sinks[:, None].expand(b, s, heads, 1)
    if has_padding:
        # Padding sees nothing, whatever its sink: a finite one keeps its row finite.
        on_sink = on_sink.masked_fill(reach.at_padding[..., None, None], 0.0)
    if entries is None:
        weights = torch.softmax(torch.cat((on_tokens, on_sink), dim=-1), dim=-1)
        return torch.bmm(weights[..., :-1].flatten(1, 2), tokens).view_as(queries)
    entries = wide(entries)
    if selection is None:
        on_entries, hidden, chosen = _dense_scores(queries, entries), reach.entries_hidden(entries.shape[1]), entries.unsqueeze(1)
        if hidden is not None:
            on_entries.masked_fill_(hidden.unsqueeze(2), float("-inf"))
    else:
        on_entries, chosen = _entry_scores(queries, entries, selection, reach.query_positions, reach.rate)
    weights = torch.softmax(torch.cat((on_tokens, on_entries, on_sink), dim=-1), dim=-1)
    mixed = torch.bmm(weights[..., : tokens.shape[1]].flatten(1, 2), tokens).view_as(queries)
    return mixed + weights[..., tokens.shape[1] : -1] @ chosen


def _entry_scores(queries, entries, selection, positions, rate: int) -> tuple[Tensor, Tensor]:
    """(scores [b s N t or e], the entries they are of [b s t D] or [b 1 e D])."""
    if _gathers(entries, selection):
        chosen = _gathered(entries, selection.clamp(min=0))
        closed = (selection >= 0) & ((selection + 1) * rate <= positions.unsqueeze(-1) + 1)
        scores = queries @ chosen.transpose(-1, -2)
    else:
        chosen = entries.unsqueeze(1)
        closed = visible_entries(positions, rate, entries.shape[1], selection)
        scores = _dense_scores(queries, entries)
    return scores.masked_fill_(~closed.unsqueeze(2), float("-inf")), chosen


def _dense_scores(queries: Tensor, entries: Tensor) -> Tensor:
    """[b s N D], [b e D] -> [b s N e]."""
    b, s, heads, width = queries.shape
    return (queries.reshape(b, s * heads, width) @ entries.transpose(1, 2)).view(b, s, heads, -1)


def _gathered(entries: Tensor, index: Tensor) -> Tensor:
    """[b e D], [b s t] -> [b s t D]."""
    if len(entries) == 1:
        return entries[0].index_select(0, index.flatten()).view(*index.shape, -1)
    rows = torch.arange(len(entries), device=entries.device)[:, None, None]
    return entries[rows, index]
