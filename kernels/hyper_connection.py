"""Manifold-constrained hyper-connection: how a sublayer reads n residual streams and writes back into them.

    logits    = fn . x_flat / sqrt(mean(x_flat^2) + rms_eps)                         [(2 + n) n], order pre, post, comb
    pre       = sigmoid(s0 logits_pre + b_pre) + eps                                 [n]
    post      = 2 sigmoid(s1 logits_post + b_post)                                   [n]
    start     = softmax over the last axis(s2 logits_comb + b_comb) + eps            [n, n]
    comb      = start, columns / (sum + eps), then (iters - 1) times rows, columns   [n, n]
    collapsed = sum_j pre_j x_j
    written_k = sum_j comb_jk x_j + post_k out

All in float32 (float64 for float64 streams), one rounding at the end. Axes: b batch, s token, n stream, h hidden.
"""

import torch
from torch import Tensor

from dsv4.kernels.numeric import wide


def mix_logits(x: Tensor, fn: Tensor, rms_eps: float) -> Tensor:
    """x [b s n h], fn [m, n*h] -> [b s m]: the projection of the normed streams, before scale and bias."""
    flat = wide(x).flatten(-2)
    return torch.nn.functional.linear(flat, fn.to(flat.dtype)) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)


def read_weights(logits: Tensor, scale: Tensor, base: Tensor, eps: float) -> Tensor:
    """sigmoid(scale * logits + base) + eps: the weight of each stream in what is read."""
    return torch.sigmoid(logits * scale + base) + eps


def write_weights(logits: Tensor, scale: Tensor, base: Tensor) -> Tensor:
    """2 * sigmoid(scale * logits + base): how much of the output each stream receives, in (0, 2)."""
    return 2 * torch.sigmoid(logits * scale + base)


def mixing_start(logits: Tensor, scale: Tensor, base: Tensor, eps: float, n: int) -> Tensor:
    """logits [..., n*n] -> [..., n, n]: positive matrix from which the Sinkhorn rounds start."""
    return torch.softmax((logits * scale + base).unflatten(-1, (n, n)), dim=-1) + eps


def sinkhorn_rounds(start: Tensor, iters: int, eps: float) -> Tensor:
    """start [..., n, n] -> [..., iters, n, n]: slice 0 after the first column normalisation, slice t after t more (row, column) rounds."""
    comb = start / (start.sum(-2, keepdim=True) + eps)
    rounds = [comb]
    for _ in range(iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
        rounds.append(comb)
    return torch.stack(rounds, dim=-3)


def collapse(x: Tensor, pre: Tensor) -> Tensor:
    """x [b s n h], pre [b s n] -> [b s h]: the weighted sum over streams, rounded once to x's dtype."""
    return (pre.unsqueeze(-2) @ wide(x)).squeeze(-2).to(x.dtype)


def write_back(x: Tensor, comb: Tensor, post: Tensor, out: Tensor) -> Tensor:
    """x [b s n h], comb [b s n n], post [b s n], out [b s h] -> streams [b s n h] of x's dtype."""
    mixed = comb.transpose(-1, -2) @ wide(x)
    return torch.addcmul(mixed, post.unsqueeze(-1), wide(out).unsqueeze(-2)).to(x.dtype)


def read(
    x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *, iters: int, eps: float, rms_eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The whole read in one go: (pre [b s n], post [b s n], comb [b s n n], collapsed [b s h]).

    The rounds run with the tokens on the last axis, [n, n, tokens], so that a round is a few wide vector operations.
    """
    b, s, n, _ = x.shape
    logits = mix_logits(x, fn, rms_eps)
    pre = read_weights(logits[..., :n], scale[0], base[:n], eps)
    post = write_weights(logits[..., n : 2 * n], scale[1], base[n : 2 * n])
    mixing = (logits[..., 2 * n :] * scale[2] + base[2 * n :]).flatten(0, 1)
    comb = torch.softmax(mixing.t().contiguous().view(n, n, b * s), dim=1) + eps
    comb = comb / (comb.sum(0, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        comb = comb / (comb.sum(0, keepdim=True) + eps)
    comb = comb.permute(2, 0, 1).reshape(b, s, n, n)
    return pre, post, comb, collapse(x, pre)
