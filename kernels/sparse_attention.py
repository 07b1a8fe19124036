"""Sliding-window sparse attention with shared keys and values, compressed entries and per-head sinks.

    scores        = q . k * scale over the window's tokens and the entries the query may see, -inf elsewhere
    probabilities = softmax([scores, sink]) with the sink dropped
    output        = sum over keys of probabilities * k                       (K = V)

A query at position p sees token positions p - window + 1 ... p, and entry j (of the selected ones, or of all) once
j * rate + rate - 1 <= p.
Softmax in float32, output rounded once. A query that sees nothing gets zeros.

`backend` says who computes: "torch" (below), or "triton", a registered op (`dsv4::sparse_attention`) over device code that is imported
when it is first asked for. Its weights are rounded to the keys' dtype before they are multiplied with the values.
Axes: b batch, s query column, w earlier window columns, N heads, D head width, e entries, t selected entries.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4.kernels.backend import available
from dsv4.kernels.index_scores import closed_entries
from dsv4.kernels.numeric import wide

# Queries of one banded block, and floats of scores and gathered entries that are held at a time.
BLOCK = 32
# Up to so many queries the bands are not worth their bookkeeping.
FEW_QUERIES = 4
CHUNK = 1 << 19
# Up to this many entries per selected one, masking a dense product is cheaper than gathering.
GATHER_RATIO = 8
# What the device code takes: a tile of head width 512 fills an SM.
DEVICE_DTYPES = (torch.bfloat16, torch.float16)
MAX_WIDTH = 512


def once(compute: Callable) -> property:
    """A property computed at the first reading; at each one while it is traced, where equal computations become one."""
    key = compute.__name__

    def value(self):
        if torch.compiler.is_compiling():
            return compute(self)
        if key not in self.__dict__:
            self.__dict__[key] = compute(self)
        return self.__dict__[key]

    return property(value, doc=compute.__doc__)


@dataclass(frozen=True)
class Reach:
    """Which keys a query may see.

    Attributes:
        window: tokens seen, the query's own included.
        query_positions: [b s] int64, -1 at padding.
        token_positions: [b w+s] int64 of the token keys, -1 where there is none.
        gap: columns by which a row's earlier tokens may stand further away than their positions say (left padding after a cache).
        rate: tokens per entry; 0 without entries.
    """

    window: int
    query_positions: Tensor
    token_positions: Tensor
    gap: int = 0
    rate: int = 0

    @once
    def tokens_hidden(self) -> Tensor:
        """[b s w+s] bool: tokens that a query does not see; one tensor for all blocks of a call."""
        return ~visible_tokens(self.query_positions, self.token_positions, self.window)

    @once
    def at_padding(self) -> Tensor:
        """[b s] bool."""
        return self.query_positions < 0


def visible_tokens(query_positions: Tensor, token_positions: Tensor, window: int) -> Tensor:
    """[... s], [... k] -> [... s k] bool: 0 <= p_query - p_token < window, both real."""
    distance = query_positions.unsqueeze(-1) - token_positions.unsqueeze(-2)
    return (distance >= 0) & (distance < window) & (token_positions >= 0).unsqueeze(-2)


def visible_entries(query_positions: Tensor, rate: int, entries: int, selection: Tensor | None) -> Tensor:
    """[b s e] bool: closed for the query and, where a selection [b s t] is given, among the selected."""
    closed = closed_entries(query_positions, rate, entries)
    if selection is None:
        return closed
    chosen = torch.zeros(*closed.shape[:2], entries + 1, dtype=torch.bool, device=closed.device)
    chosen = chosen.scatter(-1, selection.masked_fill(selection < 0, entries), True)
    return closed & chosen[..., :entries]


def softmax_with_sink(scores: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """scores [... k], sinks [...] -> (probabilities [... k], what the sink took [...]); a row that sees nothing and has no sink is zero."""
    full = torch.cat((scores, sinks.unsqueeze(-1)), dim=-1)
    blind = (full == float("-inf")).all(-1, keepdim=True)
    probabilities = torch.softmax(full.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)
    return probabilities[..., :-1], probabilities[..., -1]


def score_keys(queries: Tensor, keys: Tensor, tokens: int) -> Tensor:
    """queries [b s N D] scaled, keys [b k D], the first `tokens` of them tokens -> [b s N k].

    As `sparse_attention` computes them while one band holds every token, to the last bit; so does `mix_values`.
    """
    flat = queries.flatten(1, 2)
    parts = [flat @ part.transpose(1, 2) for part in keys.tensor_split((tokens,), dim=1)]
    return torch.cat(parts, dim=-1).unflatten(1, queries.shape[1:3])


def mix_values(probabilities: Tensor, values: Tensor, tokens: int) -> Tensor:
    """probabilities [b s N k], values [b k D] -> [b s N D]."""
    on_tokens, on_entries = probabilities.tensor_split((tokens,), dim=-1)
    mixed = (on_tokens.flatten(1, 2) @ values[:, :tokens]).view(*probabilities.shape[:-1], -1)
    return mixed + on_entries @ values[:, tokens:].unsqueeze(1)


def sparse_attention_reference(
    queries: Tensor, tokens: Tensor, entries: Tensor | None, sinks: Tensor, reach: Reach, selection: Tensor | None, scale: float
) -> Tensor:
    """The definition, with every score held: same arguments and result as `sparse_attention`."""
    keys = tokens if entries is None else torch.cat((tokens, entries), dim=1)
    seen = visible_tokens(reach.query_positions, reach.token_positions, reach.window)
    if entries is not None:
        seen = torch.cat((seen, visible_entries(reach.query_positions, reach.rate, entries.shape[1], selection)), dim=-1)
    scores = torch.einsum("bsnd,bkd->bnsk", wide(queries), wide(keys)) * scale
    scores = scores.masked_fill(~seen.unsqueeze(1), float("-inf"))
    probabilities, _ = softmax_with_sink(scores, wide(sinks)[:, None].expand(scores.shape[:-1]))
    return torch.einsum("bnsk,bkd->bsnd", probabilities, wide(keys)).to(queries.dtype)


def sparse_attention(
    queries: Tensor,
    tokens: Tensor,
    entries: Tensor | None,
    sinks: Tensor,
    reach: Reach,
    selection: Tensor | None,
    scale: float,
    backend: str = "torch",
) -> Tensor:
    """Cost linear in the number of queries: window keys in banded blocks, selected entries gathered, in chunks of queries.

    Args:
        queries: [b s N D] rotated. tokens: [b w+s D] rotated keys of the earlier window and of this call.
        entries: [b e D] or None. sinks: [N] float32. selection: [b s t] int64, an entry at
            most once, -1 for fewer; None for all closed entries.
        scale: multiplies q . k.
        backend: "torch" or "triton".
    Returns:
        [b s N D] of queries' dtype; the rotary slice is not yet turned back.
    Raises:
        ValueError: backend="triton" where it cannot run, with the reason.
    """
    b, s, heads, width = queries.shape
    if entries is not None and entries.shape[1] == 0:
        entries = None
    if backend != "torch":
        reason = refusal(backend, queries.device, queries.dtype, width)
        if reason is not None:
            raise ValueError(f'backend="{backend}": {reason}; use backend="torch" (of a model: model.use_kernels("torch"))')
        selection = None if entries is None else selection
        places = (reach.query_positions, reach.token_positions, reach.window, reach.gap, reach.rate)
        return fused_sparse_attention(queries, tokens, entries, sinks, selection, *places, scale)[0]
    if s <= FEW_QUERIES:
        return _few(wide(queries) * scale, wide(tokens), entries, wide(sinks), reach, selection).to(queries.dtype)
    block, before = min(BLOCK, s), tokens.shape[1] - s
    back = reach.window - 1 + reach.gap
    if before + s <= back + 2 * block:
        # Short: one band that holds every token.
        block, back = s, before
    front, tail = back - before, -s % block
    tokens = pad(tokens, (0, 0, max(front, 0), tail))[:, max(-front, 0) :]
    places = pad(reach.token_positions, (max(front, 0), tail), value=-1)[:, max(-front, 0) :]
    positions = pad(reach.query_positions, (0, tail), value=-1)
    per_query = heads * (back + block) + _entry_floats(entries, selection, heads, width)
    step = max(1, CHUNK // (b * per_query * block)) * block
    outputs = []
    for begin in range(0, s, step):
        end = min(s, begin + step)
        stop = end + -end % block
        outputs.append(
            _chunk(
                wide(queries[:, begin:end]) * scale,
                wide(tokens[:, begin : back + stop]),
                None if entries is None else wide(entries),
                wide(sinks),
                positions[:, begin:stop],
                places[:, begin : back + stop],
                None if selection is None else selection[:, begin:end],
                reach,
                block,
            )
        )
    return (torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]).to(queries.dtype)


def refusal(backend: str, device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """None where `backend` takes queries of this device, dtype and head width, else the reason it does not."""
    reason = available(backend, device)
    if reason is not None or backend == "torch":
        return reason
    # Elsewhere than on a CUDA device the interpreter runs it, which takes float32 too.
    dtypes = DEVICE_DTYPES if device.type == "cuda" else (*DEVICE_DTYPES, torch.float32)
    if dtype not in dtypes:
        return f"its queries and keys are {' or '.join(map(str, dtypes))}, got {dtype}"
    return None if width <= MAX_WIDTH else f"its heads are at most {MAX_WIDTH} wide, got {width}"


@torch.library.custom_op("dsv4::sparse_attention", mutates_args=())
def fused_sparse_attention(
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
) -> tuple[Tensor, Tensor]:
    """`sparse_attention` in one kernel, the fields of `reach` one by one.

    Returns:
        ([b s N D], log-sum-exp of each query's scores [b s N] float32, without the sink, -inf where nothing is seen; it has no gradient)
    """
    from dsv4.kernels import _decode_attention_triton as few
    from dsv4.kernels import _sparse_attention_triton as device_code

    given = queries, tokens, entries, sinks, selection, query_positions, token_positions, window
    if few.suits(queries, tokens, entries, selection):
        return few.forward(*given, rate, scale)
    return device_code.forward(*given, gap, rate, scale)


@fused_sparse_attention.register_fake
def _(queries, tokens, entries, sinks, selection, query_positions, token_positions, window, gap, rate, scale):
    return queries.new_empty(queries.shape), queries.new_empty(queries.shape[:3], dtype=torch.float32)


@torch.library.custom_op("dsv4::sparse_attention_gradient", mutates_args=())
def fused_sparse_attention_gradient(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
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
    """grad of `fused_sparse_attention`'s output, its results and arguments -> gradients of queries, tokens, entries ([b 0 D] without)
    and sinks. Those of tokens and entries are added up in no fixed order.
    """
    from dsv4.kernels import _sparse_attention_gradient_triton as device_code

    return device_code.backward(
        grad, out, lse, queries, tokens, entries, sinks, selection, query_positions, token_positions, window, gap, rate, scale
    )


@fused_sparse_attention_gradient.register_fake
def _(grad, out, lse, queries, tokens, entries, sinks, *rest):
    no_entries = tokens.new_empty(tokens.shape[0], 0, tokens.shape[2])
    given = queries, tokens, no_entries if entries is None else entries, sinks
    return tuple(x.new_empty(x.shape) for x in given)


def _keep(ctx, inputs, output) -> None:
    *tensors, window, gap, rate, scale = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.numbers = (window, gap, rate, scale)
    ctx.mark_non_differentiable(output[1])


def _gradient(ctx, grad: Tensor, _):
    """In device code; by torch's way where the gradient is to have a gradient, where an order of sums is asked for
    (torch.use_deterministic_algorithms) and on architectures without tiles.
    """
    from dsv4.kernels import _sparse_attention_gradient_triton as device_code

    twice = torch.is_grad_enabled()
    if twice or torch.are_deterministic_algorithms_enabled() or not device_code.supports(grad.device):
        return _gradient_by_torch(ctx, grad, twice)
    found = fused_sparse_attention_gradient(grad, *ctx.saved_tensors, *ctx.numbers)
    grads = [g if needed else None for g, needed in zip(found, ctx.needs_input_grad, strict=False)]
    return *grads, *(None,) * 7


def _gradient_by_torch(ctx, grad: Tensor, twice: bool):
    _, _, *leaves, selection, query_positions, token_positions = ctx.saved_tensors
    window, gap, rate, scale = ctx.numbers
    reach = Reach(window, query_positions, token_positions, gap, rate)
    wanted = [i for i, leaf in enumerate(leaves) if leaf is not None and ctx.needs_input_grad[i]]
    with torch.enable_grad():
        for i in wanted:
            leaves[i] = leaves[i].view_as(leaves[i]) if twice else leaves[i].detach().requires_grad_()
        out = sparse_attention(*leaves, reach, selection, scale)
        found = torch.autograd.grad(out, [leaves[i] for i in wanted], grad, create_graph=twice)
    grads: list[Tensor | None] = [None] * 11
    for i, gradient in zip(wanted, found, strict=True):
        grads[i] = gradient
    return tuple(grads)


fused_sparse_attention.register_autograd(_gradient, setup_context=_keep)


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
    """All queries at once, each against every token key; queries [b s N D] scaled."""
    b, s, heads, _ = queries.shape
    flat, hidden = queries.flatten(1, 2), reach.tokens_hidden.unsqueeze(2)
    on_tokens = torch.bmm(flat, tokens.transpose(1, 2)).view(b, s, heads, -1).masked_fill_(hidden, float("-inf"))
    # Padding sees nothing, whatever its sink: a finite one keeps its row finite.
    on_sink = sinks[:, None].expand(b, s, heads, 1).masked_fill(reach.at_padding[..., None, None], 0.0)
    if entries is None:
        weights = torch.softmax(torch.cat((on_tokens, on_sink), dim=-1), dim=-1)
        return torch.bmm(weights[..., :-1].flatten(1, 2), tokens).view_as(queries)
    on_entries, chosen = _entry_scores(queries, wide(entries), selection, reach.query_positions, reach.rate)
    weights = torch.softmax(torch.cat((on_tokens, on_entries, on_sink), dim=-1), dim=-1)
    mixed = torch.bmm(weights[..., : tokens.shape[1]].flatten(1, 2), tokens).view_as(queries)
    return mixed + weights[..., tokens.shape[1] : -1] @ chosen


def _chunk(queries, tokens, entries, sinks, positions, places, selection, reach: Reach, block: int) -> Tensor:
    """queries [b s N D] scaled, tokens [b back+s' D], positions [b s'] and places [b back+s'], s' = s rounded up to blocks."""
    b, s, heads, width = queries.shape
    blocks = positions.shape[1] // block
    band = tokens.shape[1] - (blocks - 1) * block
    padded = pad(queries, (0, 0, 0, 0, 0, blocks * block - s)) if s % block else queries
    keys = tokens.unfold(1, band, block)
    seen = visible_tokens(positions.view(b, blocks, block), places.unfold(1, band, block), reach.window)
    on_tokens = (padded.reshape(b, blocks, block * heads, width) @ keys).view(b, blocks, block, heads, band)
    on_tokens = on_tokens.masked_fill_(~seen.unsqueeze(3), float("-inf")).view(b, blocks * block, heads, band)[:, :s]
    # Padding sees nothing, whatever its sink: a finite one keeps its row finite.
    on_sink = torch.where((positions[:, :s] < 0)[..., None, None], 0.0, sinks[:, None])
    if entries is None:
        chosen, scores = None, torch.cat((on_tokens, on_sink), dim=-1)
    else:
        on_entries, chosen = _entry_scores(queries, entries, selection, positions[:, :s], reach.rate)
        scores = torch.cat((on_tokens, on_entries, on_sink), dim=-1)
    weights = torch.softmax(scores, dim=-1)
    if s % block:
        weights = pad(weights, (0, 0, 0, 0, 0, blocks * block - s))
    banded = weights.view(b, blocks, block * heads, -1)[..., :band]
    mixed = (banded @ keys.transpose(-1, -2)).view(b, blocks * block, heads, width)[:, :s]
    return mixed if chosen is None else mixed + weights[:, :s, :, band:-1] @ chosen


def _entry_scores(queries, entries, selection, positions, rate: int) -> tuple[Tensor, Tensor]:
    """(scores [b s N t or e], the entries they are of [b s t D] or [b 1 e D])."""
    b, s, heads, width = queries.shape
    if _gathers(entries, selection):
        rows = torch.arange(b, device=entries.device)[:, None, None]
        chosen = entries[rows, selection.clamp(min=0)]
        closed = (selection >= 0) & ((selection + 1) * rate <= positions.unsqueeze(-1) + 1)
        scores = queries @ chosen.transpose(-1, -2)
    else:
        chosen = entries.unsqueeze(1)
        closed = visible_entries(positions, rate, entries.shape[1], selection)
        scores = (queries.reshape(b, s * heads, width) @ entries.transpose(1, 2)).view(b, s, heads, -1)
    return scores.masked_fill_(~closed.unsqueeze(2), float("-inf")), chosen
