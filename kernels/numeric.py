"""Small numeric functions that every op shares: the accumulation dtype, ordered top-k, the router's score function."""

from itertools import pairwise

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling

# Of what is looked through by the best of so many at a time.
GROUP = 8


def wide(x: Tensor) -> Tensor:
    """x in float32, or in float64 when it is float64: the dtype in which this model's sensitive parts compute."""
    return x if x.dtype == torch.float64 else x.float()


def is_plain(x: Tensor) -> bool:
    """Whether x is an ordinary CPU tensor outside every recording and transform, so that its numbers may be read one by one."""
    return (
        x.is_cpu
        and type(x) is Tensor
        and not is_grad_enabled()
        and not is_compiling()
        and peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and not _len_torch_dispatch_stack()
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
    if is_plain(scores) and scores.numel() == scores.shape[-1] > k:
        best, indices = torch.topk(scores, k + 1, dim=-1)
        numbers = best.flatten().tolist()
        if all(a > b for a, b in pairwise(numbers)):
            # No two are equal: one order is possible.
            return best[..., :k], indices[..., :k]
    # A float32 and its index packed into one int64 that sorts as (score descending, index ascending): every key differs.
    bits = (scores.detach() + 0.0).contiguous().view(torch.int32)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    last = scores.shape[-1] - 1
    index = torch.arange(last, -1, -1, device=scores.device)
    keys = _best_keys((order << 32) | index, k)
    indices = last - (keys & 0xFFFFFFFF)
    return scores.gather(-1, indices), indices


def _best_keys(keys: Tensor, k: int) -> Tensor:
    """The k largest of the last axis, all different, in falling order."""
    columns = keys.shape[-1] // GROUP
    if keys.device.type == "cpu" and k > 0 and columns >= 2 * k:
        # Whoever is among the k best stands in one of the k groups whose best is best.
        grouped = keys[..., : GROUP * columns].unflatten(-1, (GROUP, columns))
        groups = torch.topk(grouped.amax(-2), k, dim=-1, sorted=False).indices.unsqueeze(-2)
        candidates = grouped.gather(-1, groups.expand(*grouped.shape[:-1], k)).flatten(-2)
        keys = torch.cat((candidates, keys[..., GROUP * columns :]), dim=-1)
    return torch.topk(keys, k, dim=-1).values


def sqrt_softplus(x: Tensor) -> Tensor:
    """sqrt(log(1 + exp(x))) with a finite gradient everywhere: far below zero it equals exp(x / 2) to the last bit."""
    # exp(x) is then below the precision of log(1 + exp(x)) = exp(x) (1 - exp(x) / 2 + ...).
    far = -37.0 if x.dtype == torch.float64 else -17.0
    if is_plain(x) and x.numel() and x.min().item() >= far:
        return torch.nn.functional.softplus(x, threshold=40.0).sqrt_()
    small = x < far
    plain = torch.nn.functional.softplus(x.masked_fill(small, 0.0), threshold=40.0).sqrt()
    return torch.where(small, (x.clamp(max=far) / 2).exp(), plain)
