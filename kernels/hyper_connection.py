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

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4.kernels.numeric import wide


def mix_logits(x: Tensor, fn: Tensor, rms_eps: float) -> Tensor:
    """x [b s n h], fn [m, n*h] -> [b s m]: the projection of the normed streams, before scale and bias."""
    flat = wide(x).flatten(-2)
    mean_square = torch.linalg.vector_norm(flat, dim=-1, keepdim=True).square() / flat.shape[-1]
    return torch.nn.functional.linear(flat, fn.to(flat.dtype)) * torch.rsqrt(mean_square + rms_eps)


def read_weights(logits: Tensor, scale: Tensor, base: Tensor, eps: float) -> Tensor:
    """sigmoid(scale * logits + base) + eps: the weight of each stream in what is read."""
    return torch.sigmoid(logits * scale + base) + eps


def write_weights(logits: Tensor, scale: Tensor, base: Tensor) -> Tensor:
    """2 * sigmoid(scale * logits + base): how much of the output each stream receives, in (0, 2)."""
    return 2 * torch.sigmoid(logits * scale + base)


def mixing_start(logits: Tensor, scale: Tensor, base: Tensor, eps: float, n: int) -> Tensor:
    """logits [..., n*n] -> [..., n, n]: positive matrix from which the Sinkhorn rounds start."""
    return _tokens_first(_start(logits, scale, base, eps, n), logits.shape[:-1])


def sinkhorn_rounds(start: Tensor, iters: int, eps: float) -> Tensor:
    """start [..., n, n] -> [..., iters, n, n]: slice 0 after the first column normalisation, slice t after t more (row, column) rounds."""
    n = start.shape[-1]
    rounds = list(_rounds(start.reshape(-1, n, n).permute(1, 2, 0).contiguous(), iters, eps))
    return torch.stack([_tokens_first(comb, start.shape[:-2]) for comb in rounds], dim=-3)


# The rounds run with the tokens on the last axis, [n, n, tokens], so that a round is a few wide vector operations. The steps above do
# the same as `read`, to the last bit.


def _start(logits: Tensor, scale: Tensor, base: Tensor, eps: float, n: int) -> Tensor:
    mixing = (logits * scale + base).flatten(0, -2)
    return torch.softmax(mixing.t().contiguous().view(n, n, -1), dim=1) + eps


def _rounds(start: Tensor, iters: int, eps: float) -> Iterator[Tensor]:
    comb = start / (start.sum(0, keepdim=True) + eps)
    yield comb
    for _ in range(iters - 1):
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        comb = comb / (comb.sum(0, keepdim=True) + eps)
        yield comb


def _tokens_first(x: Tensor, tokens: torch.Size) -> Tensor:
    """[n, n, tokens] -> [..., n, n]."""
    return x.permute(2, 0, 1).reshape(*tokens, *x.shape[:2])


def collapse(x: Tensor, pre: Tensor) -> Tensor:
    """x [b s n h], pre [b s n] -> [b s h]: the weighted sum over streams, rounded once to x's dtype."""
    return (pre.unsqueeze(-2) @ wide(x)).squeeze(-2).to(x.dtype)


def write_back(x: Tensor, comb: Tensor, post: Tensor, out: Tensor) -> Tensor:
    """x [b s n h], comb [b s n n], post [b s n], out [b s h] -> streams [b s n h] of x's dtype."""
    # Dense first: a transposed 4 x 4 matrix is several times slower in a batched product.
    mixed = comb.transpose(-1, -2).contiguous() @ wide(x)
    return mixed.addcmul_(post.unsqueeze(-1), wide(out).unsqueeze(-2)).to(x.dtype)


def read(
    x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *, iters: int, eps: float, rms_eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The whole read in one go: (pre [b s n], post [b s n], comb [b s n n], collapsed [b s h])."""
    n = x.shape[2]
    logits = mix_logits(x, fn, rms_eps)
    pre = read_weights(logits[..., :n], scale[0], base[:n], eps)
    post = write_weights(logits[..., n : 2 * n], scale[1], base[n : 2 * n])
    for comb in _rounds(_start(logits[..., 2 * n :], scale[2], base[2 * n :], eps, n), iters, eps):
        last = comb
    return pre, post, _tokens_first(last, x.shape[:2]), collapse(x, pre)
