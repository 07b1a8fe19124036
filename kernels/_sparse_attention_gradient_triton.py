"""Device code of the gradient of `dsv4.kernels.sparse_attention`, with the weights computed again
from the log-sum-exp. Axes: n heads of a program, k keys of a tile, D head width.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels._device_triton import INTERPRETER, aligned_rows, architecture
from dsv4.kernels._sparse_attention_triton import (
    COUNTS,
    LOG2E,
    LOWEST,
    MIN_TILE,
    Arguments,
    Launch,
    extent,
    keys_of_tile,
    options,
    pick,
    product,
    rows_of_program,
)

# Fewest heads first, as FORWARD.
BACKWARD: Mapping[str, tuple[Launch, ...]] = {
    # More heads or keys spill: each warp holds its queries' whole width in registers.
    "sm_80": (Launch(heads=16, keys=32, warps=8, stages=3),),
    "sm_90": (
        Launch(heads=16, keys=32, warps=8, stages=3),
        Launch(heads=64, keys=32, warps=8, stages=3),
    ),
    "sm_100": (
        Launch(heads=16, keys=32, warps=8, stages=3),
        Launch(heads=64, keys=32, warps=8, stages=3),
    ),
    INTERPRETER: (
        Launch(heads=16, keys=16, warps=1, stages=2),
        Launch(heads=64, keys=64, warps=1, stages=2),
    ),
}


@triton.jit(do_not_specialize=["query_count"])
def pull_kernel(
    sink_ptr, out_ptr, lse_ptr, grad_ptr, whole_ptr, pull_ptr, sink_grad_ptr,
    heads, query_count, grad_b, grad_s, grad_n,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Of each query and head: log2-sum-exp2 with the sink, sum over keys of weight * (grad . key),
    and the sink's gradient.
    """
    row, batch, query, n = rows_of_program(heads, query_count, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    of_row = (n < heads)[:, None] & (d < D)[None, :]
    at = batch * grad_b + query.to(tl.int64) * grad_s + n[:, None].to(tl.int64) * grad_n
    grad = tl.load(grad_ptr + at + d[None, :], mask=of_row, other=0.0).to(tl.float32)
    to = (row * heads + n)[:, None] * D + d[None, :]
    out = tl.load(out_ptr + to, mask=of_row, other=0.0).to(tl.float32)
    seen = tl.load(lse_ptr + row * heads + n, mask=n < heads, other=0.0) * LOG2E
    sink = tl.load(sink_ptr + n, mask=n < heads, other=0.0) * LOG2E
    top = tl.maximum(tl.maximum(seen, sink), LOWEST)
    total = tl.exp2(seen - top) + tl.exp2(sink - top)
    whole = top + tl.log2(tl.where(total > 0, total, 1.0))
    pull = tl.sum(grad * out, 1)
    tl.store(whole_ptr + row * heads + n, whole, mask=n < heads)
    tl.store(pull_ptr + row * heads + n, pull, mask=n < heads)
    tl.store(sink_grad_ptr + row * heads + n, -tl.exp2(sink - whole) * pull, mask=n < heads)


@triton.jit(do_not_specialize=COUNTS)
def backward_kernel(
    query_ptr, token_ptr, entry_ptr,
    query_position_ptr, token_position_ptr, selection_ptr,
    grad_ptr, whole_ptr, pull_ptr, query_grad_ptr, token_grad_ptr, entry_grad_ptr,
    scale, heads, query_count, column_count, back, window, rate, entry_count, slot_count,
    query_b, query_s, query_n, token_b, token_k, entry_b, entry_e, grad_b, grad_s, grad_n,
    query_position_b, token_position_b, selection_b, selection_s,
    OF_KEYS: tl.constexpr, SELECTED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """The gradient of the keys, added up over queries in no fixed order, or that of the queries:
    sums of both do not fit the registers.
    """
    NARROW: tl.constexpr = tl.float32 if WIDEN else token_ptr.dtype.element_ty
    row, batch, query, n = rows_of_program(heads, query_count, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    of_row = (n < heads)[:, None] & (d < D)[None, :]
    at = batch * query_b + query.to(tl.int64) * query_s + n[:, None].to(tl.int64) * query_n
    q = tl.load(query_ptr + at + d[None, :], mask=of_row, other=0.0)
    at = batch * grad_b + query.to(tl.int64) * grad_s + n[:, None].to(tl.int64) * grad_n
    grad = tl.load(grad_ptr + at + d[None, :], mask=of_row, other=0.0)
    whole = tl.load(whole_ptr + row * heads + n, mask=n < heads, other=0.0)
    pull = tl.load(pull_ptr + row * heads + n, mask=n < heads, other=0.0)
    position = tl.load(query_position_ptr + batch * query_position_b + query).to(tl.int32)
    first, last, closed, listed, window_tiles, tiles = extent(
        position, query, query_count, column_count, back, rate, entry_count, slot_count,
        SELECTED, BLOCK_K,
    )  # fmt: skip
    token_rows = token_ptr + batch * token_b
    entry_rows = entry_ptr + batch * entry_b
    token_grads = token_grad_ptr + batch * column_count * D
    entry_grads = entry_grad_ptr + batch * entry_count * D
    position_row = token_position_ptr + batch * token_position_b
    selection_row = selection_ptr + batch * selection_b + query.to(tl.int64) * selection_s

    to_base2 = scale * LOG2E
    query_grad = tl.full([BLOCK_N, BLOCK_D], 0.0, tl.float32)
    # weight = exp(score - log-sum-exp)     score_grad = weight * (grad . key - pull) * scale
    # query_grad[n] = sum over k of score_grad[n, k] keys[k]
    # key_grad[k] = sum over n of score_grad[n, k] q[n] + weight[n, k] grad[n]
    # Without hoisting: addresses of q and grad, kept for each step, would spill.
    for tile in tl.range(0, tiles, num_stages=STAGES, disable_licm=True):
        keys, seen, place = keys_of_tile(
            tile, position, first, last, closed, listed, window_tiles, window, column_count, entry_count,
            token_rows, entry_rows, position_row, selection_row, token_k, entry_e,
            SELECTED, False, False, D, BLOCK_D, BLOCK_K,
        )  # fmt: skip
        weights = tl.full([BLOCK_N, BLOCK_K], 0.0, tl.float32).to(NARROW)
        score_grad = tl.full([BLOCK_N, BLOCK_K], 0.0, tl.float32).to(NARROW)
        # Always true, as in forward_kernel.
        if column_count + entry_count + slot_count > tile:
            scores = product(q, tl.trans(keys), None, WIDEN) * to_base2
            scores = tl.where(seen[None, :], scores, float("-inf"))
            exact = tl.exp2(scores - whole[:, None])
            along = product(grad, tl.trans(keys), None, WIDEN)
            weights = exact.to(NARROW)
            score_grad = (exact * (along - pull[:, None]) * scale).to(NARROW)
        if OF_KEYS:
            key_grad = product(tl.trans(q), score_grad, None, WIDEN)
            key_grad = product(tl.trans(grad), weights, key_grad, WIDEN)
            rows = tl.where(tile < window_tiles, token_grads, entry_grads)
            to = rows + (place * D)[None, :] + d[:, None]
            tl.atomic_add(to, key_grad, mask=seen[None, :] & (d < D)[:, None], sem="relaxed")
        else:
            query_grad = product(score_grad, keys, query_grad, WIDEN)
    if not OF_KEYS:
        to = query_grad_ptr + row * heads * D + (n[:, None] * D + d[None, :])
        tl.store(to, query_grad.to(query_grad_ptr.dtype.element_ty), mask=of_row)


def backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    queries: Tensor,
    tokens: Tensor,
    entries: Tensor | None,
    sinks: Tensor,
    *rest,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, tokens, entries (empty without them) and sinks, each in its dtype."""
    b, s, heads, width = queries.shape
    device, entry_count = queries.device, 0 if entries is None else entries.shape[1]
    query_grad = torch.empty(queries.shape, dtype=queries.dtype, device=device)
    token_grad = torch.zeros(tokens.shape, dtype=torch.float32, device=device)
    entry_grad = torch.zeros(b, entry_count, width, dtype=torch.float32, device=device)
    whole, pull, sink_grad = torch.empty(3, b, s, heads, dtype=torch.float32, device=device)
    if grad.numel() > 0:
        given, grad = Arguments.of(queries, tokens, entries, *rest), aligned_rows(grad)
        launch = pick(BACKWARD, architecture(device), heads)
        constants = options(launch, width, given.is_selected)
        with torch.cuda.device_of(queries):
            pull_kernel[(b * s * triton.cdiv(heads, MIN_TILE),)](
                *(sinks.contiguous(), out.contiguous(), lse.contiguous(), grad),
                *(whole, pull, sink_grad, heads, s, *grad.stride()[:3]),
                D=width,
                BLOCK_D=constants["BLOCK_D"],
                BLOCK_N=MIN_TILE,
                enable_fp_fusion=True,
            )
            for of_keys in (False, True):
                backward_kernel[(b * s * triton.cdiv(heads, launch.heads),)](
                    *(*given.tensors, *given.lists, grad, whole, pull),
                    *(query_grad, token_grad, entry_grad),
                    *(*given.sizes, *given.row_strides, *grad.stride()[:3], *given.list_strides),
                    OF_KEYS=of_keys,
                    **constants,
                )
    return (
        query_grad,
        token_grad.to(tokens.dtype),
        entry_grad.to(tokens.dtype),
        sink_grad.sum((0, 1)).to(sinks.dtype),
    )
