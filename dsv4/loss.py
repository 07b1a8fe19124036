"""Next-token loss over real tokens: what padding holds never counts. Axes: b row, s token."""

import torch
from torch import Tensor


def next_token_loss(logits: Tensor, ids: Tensor, valid: Tensor, per_token: bool = False) -> Tensor:
    """Cross entropy, in nats, of logits[:, :-1] on ids[:, 1:] where both tokens are real.

    Args:
        logits: [b s vocab]. ids: [b s] int64. valid: [b s] bool.
    Returns:
        The mean over all such pairs of the batch, or with per_token [b s-1], 0 where there is no pair. ValueError without any pair.
    """
    pairs = valid[:, 1:] & valid[:, :-1]
    if not bool(pairs.any()):
        raise ValueError(f"the loss needs a row of at least two tokens; the rows have {valid.sum(1).tolist()}")
    targets = ids[:, 1:].masked_fill(~pairs, 0)
    each = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), targets, reduction="none")
    each = each.masked_fill(~pairs, 0.0)
    return each if per_token else each.sum() / pairs.sum()
