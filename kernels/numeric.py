"""Small numeric functions that every op shares: the accumulation dtype, ordered top-k, the router's score function."""

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """x in float32, or in float64 when it is float64: the dtype in which this model's sensitive parts compute."""
    return x if x.dtype == torch.float64 else x.float()


def is_plain(x: Tensor) -> bool:
    """Whether x is an ordinary CPU tensor outside every recording and transform, so that its numbers may be read one by one."""
    return (
        x.device.type == "cpu"
        and type(x) is Tensor
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        and not torch.autograd.forward_ad._current_level >= 0
        and not torch._C._len_torch_dispatch_stack()
    )


def topk_lowest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of the last axis, best first; scores equal as numbers (-0.0 = 0.0) go to the lowest index.

    Args:
        scores: [..., e] float32 or float64, no NaN; -inf allowed.
        k: 0 <= k <= e.
    Returns:
        (values [..., k], indices [..., k] int64). One exact rule on every device: torch.topk itself promises no order among ties.
    """
    if scores.dtype != torch.float32:
        values, indices = torch.sort(scores + 0.0, dim=-1, descending=True, stable=True)
        return values[..., :k], indices[..., :k]
    # A float32 and its index packed into one int64 that sorts as (score descending, index ascending): every key differs.
    bits = (scores.detach() + 0.0).contiguous().view(torch.int32)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    last = scores.shape[-1] - 1
    index = torch.arange(last, -1, -1, device=scores.device)
    keys = torch.topk((order << 32) | index, k, dim=-1).values
    indices = last - (keys & 0xFFFFFFFF)
    return scores.gather(-1, indices), indices


def sqrt_softplus(x: Tensor) -> Tensor:
    """sqrt(log(1 + exp(x))) with a finite gradient everywhere: far below zero it equals exp(x / 2) to the last bit."""
    # exp(x) is then below the precision of log(1 + exp(x)) = exp(x) (1 - exp(x) / 2 + ...).
    far = -37.0 if x.dtype == torch.float64 else -17.0
    small = x < far
    plain = torch.nn.functional.softplus(x.masked_fill(small, 0.0), threshold=40.0).sqrt()
    return torch.where(small, (x.clamp(max=far) / 2).exp(), plain)
