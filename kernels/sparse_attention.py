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

import torch
from torch import Tensor

from dsv4.kernels.backend import available
from dsv4.kernels.banded_attention import banded_attention, few_queries
from dsv4.kernels.numeric import wide
from dsv4.kernels.reach import Reach, visible_entries, visible_tokens

# Up to so many queries the bands are not worth their bookkeeping.
FEW_QUERIES = 4
# What the device code takes: a tile of head width 512 fills an SM.
DEVICE_DTYPES = (torch.bfloat16, torch.float16)
MAX_WIDTH = 512


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
    width = queries.shape[-1]
    if entries is not None and entries.shape[1] == 0:
        entries = None
    if backend != "torch":
        reason = refusal(backend, queries.device, queries.dtype, width)
        if reason is not None:
            raise ValueError(f'backend="{backend}": {reason}; use backend="torch" (of a model: model.use_kernels("torch"))')
        selection = None if entries is None else selection
        places = (reach.query_positions, reach.token_positions, reach.window, reach.gap, reach.rate)
        return fused_sparse_attention(queries, tokens, entries, sinks, selection, *places, scale)[0]
    if queries.shape[1] <= FEW_QUERIES:
        return few_queries(queries, tokens, entries, sinks, reach, selection, scale)
    return banded_attention(queries, tokens, entries, sinks, reach, selection, scale)


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
    from dsv4.kernels import _decode_attention_triton as split
    from dsv4.kernels import _packed_attention_triton as packed
    from dsv4.kernels import _sparse_attention_triton as single

    given = queries, tokens, entries, sinks, selection, query_positions, token_positions, window
    if split.suits(queries, tokens, entries, selection):
        return split.forward(*given, rate, scale)
    device_code = packed if packed.suits(queries, selection) else single
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
    """In device code; by torch's way where the gradient is to have a gradient and where an order of sums is asked for
    (torch.use_deterministic_algorithms).
    """
    twice = torch.is_grad_enabled()
    if twice or torch.are_deterministic_algorithms_enabled():
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
