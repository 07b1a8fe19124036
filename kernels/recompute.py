"""Gradients of device code by its definition in plain torch, which computes the output again.

What the forward made is not kept. Where the gradient is to have a gradient, the graph of the definition carries it.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def register(op, definition: Callable, tensors: int) -> None:
    """Give a custom op whose first `tensors` arguments are tensors (or None) the gradient of `definition`, called with the same arguments.

    Args:
        definition: returns what the op returns, a Tensor or a tuple; an output that does not depend on an argument gives it no gradient.
    """

    def keep(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs[:tensors])
        ctx.numbers = inputs[tensors:]

    def gradient(ctx, *grads: Tensor | None) -> tuple:
        found = gradients(lambda *given: definition(*given, *ctx.numbers), ctx.saved_tensors, ctx.needs_input_grad, grads)
        return *found, *(None,) * len(ctx.numbers)

    op.register_autograd(gradient, setup_context=keep)


def gradients(
    definition: Callable, tensors: Sequence[Tensor | None], needed: Sequence[bool], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Of `definition(*tensors)`, with respect to the tensors that are `needed`, from the gradients of its outputs."""
    wanted = [i for i, t in enumerate(tensors) if t is not None and needed[i]]
    twice = torch.is_grad_enabled()
    leaves = list(tensors)
    with torch.enable_grad():
        for i in wanted:
            leaves[i] = leaves[i].view_as(leaves[i]) if twice else leaves[i].detach().requires_grad_()
        outputs = definition(*leaves)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        pulled = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None and out.requires_grad]
        found = torch.autograd.grad(
            [out for out, _ in pulled],
            [leaves[i] for i in wanted],
            [grad for _, grad in pulled],
            create_graph=twice,
            allow_unused=True,
        )
    result: list[Tensor | None] = [None] * len(leaves)
    for i, gradient in zip(wanted, found, strict=True):
        result[i] = gradient
    return result
