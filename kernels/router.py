"""Which experts a token goes to, and with what weight.

    logits_te    = sum_h weight_eh x_th
    scores       = sqrt(softplus(logits))
    selection    = scores + bias
    indices      = the k best of selection, equal ones by the lowest expert; or row id_t of a table
    weights_tk   = score of the chosen / their sum * factor                    (the bias never enters)

Float32 throughout (float64 for float64 activations). `fused_router` is a registered op (`dsv4::router`) over device code: all of it for
a few tokens in one launch, with the slots sorted by expert as the experts' device code reads them. Axes: t token, E experts, k slot.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.kernels.backend import available
from dsv4.kernels.numeric import is_plain, sqrt_softplus, topk_lowest, wide
from dsv4.kernels.recompute import gradients
from dsv4.kernels.routing import FEW_ROWS, most_tiles, sort_by_expert, tiles_of

DEVICE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# What the device code takes: the last of its programs holds every token's scores.
FEW_TOKENS, MAX_EXPERTS, MAX_SLOTS = 16, 512, 16
# A sum of scores below this is not divided by: its inverse, and with it the gradient, leaves float32's range.
UNDERFLOWN = 1e-30


class Routes(NamedTuple):
    """Attributes:
    logits, scores: [t E] float32. selection: the same, with a table [0]. indices: [t k] int64. weights: [t k] float32.
    order: [t k] int32, flat slots sorted by expert. tile_expert, tile_row: [T] int32, tiles of FEW_ROWS of them. ends: [E] int32.
    """

    logits: Tensor
    scores: Tensor
    selection: Tensor
    indices: Tensor
    weights: Tensor
    order: Tensor
    tile_expert: Tensor
    tile_row: Tensor
    ends: Tensor

    @property
    def groups(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The sorted slots, as `dsv4.kernels.mixture` takes them."""
        return self[5:]


def router_weights(scores: Tensor, indices: Tensor, factor: float) -> Tensor:
    """scores [... E], indices [... k] -> [... k]."""
    chosen = scores.gather(-1, indices)
    total = chosen.sum(-1, keepdim=True)
    if total.numel() == 1 and is_plain(total) and abs(total.item()) >= UNDERFLOWN:
        return chosen / total * factor
    return chosen / total.masked_fill(total.abs() < UNDERFLOWN, 1.0) * factor


def router_definition(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    ids: Tensor | None,
    valid: Tensor | None,
    top_k: int,
    factor: float,
    chosen: Tensor | None = None,
) -> Routes:
    """What `fused_router` computes, in plain torch; `chosen` [t k]: by whatever way the experts have been chosen."""
    x = wide(x)
    logits = torch.nn.functional.linear(x, weight.to(x.dtype))
    scores = sqrt_softplus(logits)
    selection = scores.new_empty(0) if bias is None else scores + bias
    indices = chosen
    if indices is None:
        indices = topk_lowest(selection, top_k)[1] if table is None else table[ids]
    weights = router_weights(scores, indices, factor)
    order, ends = sort_by_expert(indices, weight.shape[0], valid)
    return Routes(logits, scores, selection, indices, weights, order.int(), *tiles_of(ends, FEW_ROWS, indices.numel()), ends)


def refusal(backend: str, device: torch.device, dtype: torch.dtype, experts: int, top_k: int) -> str | None:
    """None where `backend` takes activations of this device and dtype, else the reason it does not."""
    reason = available(backend, device)
    if reason is not None or backend == "torch":
        return reason
    if dtype not in DEVICE_DTYPES:
        return f"its activations are {', '.join(map(str, DEVICE_DTYPES))}, got {dtype}"
    if experts <= MAX_EXPERTS and top_k <= MAX_SLOTS:
        return None
    return f"it chooses at most {MAX_SLOTS} of {MAX_EXPERTS} experts, got {top_k} of {experts}"


@torch.library.custom_op("dsv4::router", mutates_args=())
def fused_router(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    ids: Tensor | None,
    valid: Tensor | None,
    top_k: int,
    factor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of `Routes`.

    Args:
        x: [t H], t <= FEW_TOKENS. weight: [E H]. bias: [E] float32, or None with a table [vocabulary k] int64 and ids [t] int64 into it.
        valid: [t] bool or None; slots of a token that is not valid come last and belong to no expert.
    Raises:
        ValueError: shapes or dtypes that do not fit, or a device on which it cannot run.
    """
    _check(x, weight, bias, table, ids, valid, top_k)
    from dsv4.kernels import _router_triton as device_code

    return tuple(device_code.run(x.contiguous(), weight.contiguous(), bias, table, ids, valid, top_k, factor))


@fused_router.register_fake
def _(x, weight, bias, table, ids, valid, top_k, factor):
    t, experts = x.shape[0], weight.shape[0]

    def real(*shape: int) -> Tensor:
        return x.new_empty(shape, dtype=torch.float32)

    def whole(*shape: int) -> Tensor:
        return x.new_empty(shape, dtype=torch.int32)

    selection = real(0) if bias is None else real(t, experts)
    chosen = x.new_empty(t, top_k, dtype=torch.int64), real(t, top_k)
    tiles = most_tiles(experts, FEW_ROWS, t * top_k)
    return real(t, experts), real(t, experts), selection, *chosen, whole(t * top_k), whole(tiles), whole(tiles), whole(experts)


def _check(x: Tensor, weight: Tensor, bias, table, ids, valid, top_k: int) -> None:
    (t, width), (experts, _) = x.shape, weight.shape
    reason = refusal("triton", x.device, x.dtype, experts, top_k)
    if reason is not None:
        raise ValueError(f'backend="triton": {reason}; use backend="torch" (of a model: model.use_kernels("torch"))')
    if t > FEW_TOKENS or not 0 < top_k <= experts:
        raise ValueError(f"{t} tokens to {top_k} of {experts} experts; expected at most {FEW_TOKENS}, and 0 < k <= E")
    if (bias is None) == (table is None) or (table is None) != (ids is None):
        raise ValueError("expected a bias, or a table and ids into it")
    if weight.shape[1] != width or weight.dtype not in DEVICE_DTYPES:
        raise ValueError(f"weight {list(weight.shape)} {weight.dtype} over x {list(x.shape)}; expected [E {width}], one of {DEVICE_DTYPES}")
    given = {"bias": (bias, (experts,), torch.float32), "ids": (ids, (t,), torch.int64), "valid": (valid, (t,), torch.bool)}
    given |= {} if table is None else {"table": (table, (table.shape[0], top_k), torch.int64)}
    for name, (found, shape, dtype) in given.items():
        if found is not None and (found.shape != shape or found.dtype != dtype):
            raise ValueError(f"{name} {list(found.shape)} {found.dtype} over x {list(x.shape)}; expected {list(shape)} {dtype}")


def _keep(ctx, inputs, output) -> None:
    x, weight, bias, *rest = inputs
    ctx.rest = rest
    ctx.save_for_backward(x, weight, bias, output[3])


def _gradient(ctx, *grads: Tensor | None):
    """By the definition, of the experts that were chosen."""
    x, weight, bias, chosen = ctx.saved_tensors

    def definition(x: Tensor, weight: Tensor, bias: Tensor | None) -> Routes:
        return router_definition(x, weight, bias, *ctx.rest, chosen)

    return *gradients(definition, (x, weight, bias), ctx.needs_input_grad[:3], grads), *(None,) * 5


fused_router.register_autograd(_gradient, setup_context=_keep)
