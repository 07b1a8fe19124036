"""Small numeric functions that every op shares: the accumulation dtype, ordered top-k, the router's score function."""

from itertools import pairwise

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling

# What is looked through by the best of so many neighbours, where there are at least so many groups for one that is kept.
GROUP, GROUPS = 8, 3


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
    last = scores.shape[-1] - 1
    index = torch.arange(last + 1, device=scores.device)
    given = scores.detach()
    if scores.is_cpu and 0 < GROUP * GROUPS * k <= scores.shape[-1]:
        index = _candidates(given, k, index)
        given = given.gather(-1, index)
    keys = torch.topk(_keys(given, last - index), k, dim=-1).values
    indices = last - (keys & 0xFFFFFFFF)
    return scores.gather(-1, indices), indices


def _keys(scores: Tensor, rank: Tensor) -> Tensor:
    """A float32 and a rank packed into one int64 that sorts as (score, rank): where ranks differ, every key does."""
    bits = (scores + 0.0).contiguous().view(torch.int32)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    return (order << 32) | rank


def _candidates(scores: Tensor, k: int, index: Tensor) -> Tensor:
    """Places among which the k best are, [... e] -> [... n]: whoever is one of them stands in one of the k groups of neighbours whose best
    is best, of equal ones the first.
    """
    *rows, entries = scores.shape
    groups = entries // GROUP
    neighbours = scores[..., : GROUP * groups]
    if is_compiling():
        best = neighbours.unflatten(-1, (groups, GROUP)).amax(-1)
    else:
        # The same, three times as fast.
        best = torch.nn.functional.max_pool1d(neighbours.reshape(1, -1, GROUP * groups), GROUP).view(*rows, groups)
    last = groups - 1
    kept = last - (torch.topk(_keys(best, last - index[:groups]), k, dim=-1, sorted=False).values & 0xFFFFFFFF)
    within = (kept.unsqueeze(-1) * GROUP + index[:GROUP]).flatten(-2)
    return torch.cat((within, index[GROUP * groups :].expand(*rows, -1)), dim=-1)


def sqrt_softplus(x: Tensor) -> Tensor:
    """sqrt(log(1 + exp(x))) with a finite gradient everywhere: far below zero it equals exp(x / 2) to the last bit."""
    # exp(x) is then below the precision of log(1 + exp(x)) = exp(x) (1 - exp(x) / 2 + ...).
    far = -37.0 if x.dtype == torch.float64 else -17.0
    if is_plain(x) and x.numel() and x.min().item() >= far:
        return torch.nn.functional.softplus(x, threshold=40.0).sqrt_()
    small = x < far
    plain = torch.nn.functional.softplus(x.masked_fill(small, 0.0), threshold=40.0).sqrt()
    return torch.where(small, (x.clamp(max=far) / 2).exp(), plain)
