"""What a mixture writes: the routed experts' weighted sum and the shared expert's output, added in the launch that sums the slots.

    y_t          = round(sum over slots of weight_slot * expert_slot(x_t)) + shared_t
    written_tk   = sum_j comb_tjk streams_tj + post_tk y_t

Rounded to the activations' dtype where the sums are apart, too, so that the numbers are the same. `mixture` is a registered op over
device code, `mixture_write` another that writes into the streams in the same launch. Axes: t token, k slot or stream, E experts.
"""

from types import SimpleNamespace

import torch
from torch import Tensor

from dsv4.kernels import recompute
from dsv4.kernels.grouped_experts import Stored, gradient, grouped_experts, ready
from dsv4.kernels.hyper_connection import check_written, write_back
from dsv4.kernels.routing import FEW_ROWS, most_tiles

# Arguments of the experts: tensors that gradients need, and all, sorted slots among them.
KEPT, OF_EXPERTS = 8, 14


def mixture_definition(
    x: Tensor, indices: Tensor, weights: Tensor, valid: Tensor | None, bank: Stored, limit: float, shared: Tensor, numerics: str = "exact"
) -> Tensor:
    """What `mixture` computes, in plain torch."""
    return grouped_experts(x, indices, weights, bank, limit, valid=valid, numerics=numerics).to(x.dtype) + shared


@torch.library.custom_op("dsv4::mixture", mutates_args=())
def mixture(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    valid: Tensor | None,
    first: Tensor,
    first_scale: Tensor | None,
    second: Tensor,
    second_scale: Tensor | None,
    limit: float,
    deployed: bool,
    order: Tensor | None,
    tile_expert: Tensor | None,
    tile_row: Tensor | None,
    ends: Tensor | None,
    shared: Tensor,
) -> Tensor:
    """`mixture_definition` over device code.

    Args:
        x ... deployed: as `dsv4.kernels.grouped_experts.fused_experts` takes them. shared: [t H] of x's dtype.
        order, tile_expert, tile_row, ends: the slots of `indices` sorted by expert, as `dsv4.kernels.router.Routes` has them, or None
            four times.
    Returns:
        [t H] of x's dtype.
    Raises:
        ValueError: shapes or dtypes that do not fit, or a device on which it cannot run.
    """
    bank = Stored(first, first_scale, second, second_scale)
    sorted_slots = (order, tile_expert, tile_row, ends)
    return _run((x, indices, weights, valid), bank, limit, deployed, sorted_slots, shared, None)[0]


@torch.library.custom_op("dsv4::mixture_write", mutates_args=())
def mixture_write(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    valid: Tensor | None,
    first: Tensor,
    first_scale: Tensor | None,
    second: Tensor,
    second_scale: Tensor | None,
    limit: float,
    deployed: bool,
    order: Tensor | None,
    tile_expert: Tensor | None,
    tile_row: Tensor | None,
    ends: Tensor | None,
    shared: Tensor,
    streams: Tensor,
    comb: Tensor,
    post: Tensor,
) -> tuple[Tensor, Tensor]:
    """`mixture`, and `write_back` of it: (y [t H], written [t n H]).

    Args:
        streams: [t n H] of x's dtype. comb: [t n n], post: [t n], float32.
    """
    check_written(streams.unsqueeze(0), comb.unsqueeze(0), post.unsqueeze(0), shared.unsqueeze(0))
    bank = Stored(first, first_scale, second, second_scale)
    sorted_slots = (order, tile_expert, tile_row, ends)
    return _run((x, indices, weights, valid), bank, limit, deployed, sorted_slots, shared, (streams, comb, post))


def _run(routed: tuple, bank: Stored, limit: float, deployed: bool, sorted_slots: tuple, shared: Tensor, into: tuple | None):
    valid = routed[3]
    x, indices, weights, bank = ready(*routed, bank, deployed)
    if shared.shape != x.shape or shared.dtype != x.dtype:
        raise ValueError(f"shared {list(shared.shape)} {shared.dtype} beside x {list(x.shape)} {x.dtype}; expected the same")
    given = [t for t in sorted_slots if t is not None]
    tiles = most_tiles(bank.num_experts, FEW_ROWS, indices.numel())
    sizes = [indices.numel(), tiles, tiles, bank.num_experts]
    found = [(list(t.shape), t.dtype) for t in given]
    if given and found != [([size], torch.int32) for size in sizes]:
        raise ValueError(f"sorted slots {found} of {list(indices.shape)} slots; expected sizes {sizes} of torch.int32, or none")
    from dsv4.kernels import _grouped_experts_triton as experts
    from dsv4.kernels import _mixture_triton as device_code

    slots = experts.weighted_slots(x, indices, weights, valid, bank, limit, deployed, given) if len(x) else x
    return device_code.finish(slots, valid, shared.contiguous(), into)


@mixture.register_fake
def _(x, *rest):
    return x.new_empty(x.shape)


@mixture_write.register_fake
def _(x, *rest):
    return x.new_empty(x.shape), x.new_empty(rest[-3].shape)


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:KEPT])
    ctx.limit, ctx.deployed = inputs[KEPT : KEPT + 2]


def _gradient(ctx, grad: Tensor):
    """The experts' own, and the shared expert's as it comes."""
    return *gradient(ctx, grad.float()), *(None,) * 4, grad


def _keep_write(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:KEPT], *inputs[OF_EXPERTS + 1 :], output[0])
    ctx.limit, ctx.deployed = inputs[KEPT : KEPT + 2]


def _write_gradient(ctx, grad: Tensor | None, grad_written: Tensor):
    """Of what was written by its definition; that of y goes on to the experts."""
    saved, needed = ctx.saved_tensors, ctx.needs_input_grad
    streams, comb, post, y = saved[KEPT:]
    *others, d_y = recompute.gradients(_write_back, (streams, comb, post, y), (*needed[OF_EXPERTS + 1 :], True), (grad_written,))
    experts = SimpleNamespace(saved_tensors=saved[:KEPT], needs_input_grad=needed, limit=ctx.limit, deployed=ctx.deployed)
    return *_gradient(experts, d_y if grad is None else grad + d_y), *others


def _write_back(streams: Tensor, comb: Tensor, post: Tensor, y: Tensor) -> Tensor:
    """Of one row."""
    return write_back(*(t.unsqueeze(0) for t in (streams, comb, post, y))).squeeze(0)


mixture.register_autograd(_gradient, setup_context=_keep)
mixture_write.register_autograd(_write_gradient, setup_context=_keep_write)
