"""Manifold-constrained hyper-connection: how a sublayer reads n residual streams and writes back into them.

    logits    = fn . x_flat / sqrt(mean(x_flat^2) + rms_eps)                         [(2 + n) n], order pre, post, comb
    pre       = sigmoid(s0 logits_pre + b_pre) + eps                                 [n]
    post      = 2 sigmoid(s1 logits_post + b_post)                                   [n]
    start     = softmax over the last axis(s2 logits_comb + b_comb) + eps            [n, n]
    comb      = start, columns / (sum + eps), then (iters - 1) times rows, columns   [n, n]
    collapsed = sum_j pre_j x_j
    written_k = sum_j comb_jk x_j + post_k out

All in float32 (float64 for float64 streams), one rounding at the end. Axes: b batch, s token, n stream, h hidden.

The `fused_` functions are the same as registered ops (`dsv4::hyper_read`, `dsv4::hyper_write`, `dsv4::hyper_write_read`) over device code
that is imported when it is first asked for. A read can norm what it collapsed (`rms_norm`), in the same pass.
"""

import math
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4.kernels import few_tokens, recompute
from dsv4.kernels.backend import available
from dsv4.kernels.norm_rotary import rms_norm
from dsv4.kernels.numeric import is_plain, wide

# What the device code takes: a token's collapsed row stands in the registers of one program, its streams' mixing in one tile.
DEVICE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HIDDEN = 8192
MAX_STREAMS = 8
# Numbers of the streams that are taken at a time on a CPU.
CHUNK = 1 << 19


def tokens_of_chunk(x: Tensor) -> int:
    """x [... width] -> rows that are taken at a time."""
    return max(1, CHUNK // x.shape[-1])


def mix_logits(x: Tensor, fn: Tensor, rms_eps: float) -> Tensor:
    """x [b s n h], fn [m, n*h] -> [b s m]: the projection of the normed streams, before scale and bias."""
    if few_tokens.takes(x, x.shape[:-2].numel(), (fn, (len(fn), x.shape[-2:].numel()))):
        return few_tokens.mix_logits(x, fn, rms_eps)
    flat = wide(x).flatten(-2)
    fn = fn.to(flat.dtype)
    if is_plain(flat) and flat.numel() > CHUNK:
        # A stretch of tokens at a time, which the cache still holds for the second pass.
        logits = flat.new_empty(*flat.shape[:-1], len(fn))
        for rows, into in zip(*(t.flatten(0, -2).split(tokens_of_chunk(flat)) for t in (flat, logits)), strict=True):
            length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
            torch.mul(torch.nn.functional.linear(rows, fn), torch.rsqrt(length.square_() / rows.shape[-1] + rms_eps), out=into)
        return logits
    logits = torch.nn.functional.linear(flat, fn)
    mean_square = torch.linalg.vector_norm(flat, dim=-1, keepdim=True).square() / flat.shape[-1]
    return logits * torch.rsqrt(mean_square + rms_eps)


def read_weights(logits: Tensor, scale: Tensor, base: Tensor, eps: float) -> Tensor:
    """sigmoid(scale * logits + base) + eps: the weight of each stream in what is read."""
    if _takes_logits(logits, scale, base):
        return few_tokens.stream_weights(logits, scale, base, 1.0, eps)
    return torch.sigmoid(logits * scale + base) + eps


def write_weights(logits: Tensor, scale: Tensor, base: Tensor) -> Tensor:
    """2 * sigmoid(scale * logits + base): how much of the output each stream receives, in (0, 2)."""
    if _takes_logits(logits, scale, base):
        return few_tokens.stream_weights(logits, scale, base, 2.0, 0.0)
    return 2 * torch.sigmoid(logits * scale + base)


def mixing_start(logits: Tensor, scale: Tensor, base: Tensor, eps: float, n: int) -> Tensor:
    """logits [..., n*n] -> [..., n, n]: positive matrix from which the Sinkhorn rounds start."""
    tokens = logits.shape[:-1]
    if logits.shape[-1] == n * n and _takes_logits(logits, scale, base):
        return few_tokens.mixing_start(logits, scale, base, eps, n)
    return _tokens_first(_start(logits, scale, base, eps, n), tokens)


def sinkhorn_rounds(start: Tensor, iters: int, eps: float) -> Tensor:
    """start [..., n, n] -> [..., iters, n, n]: slice 0 after the first column normalisation, slice t after t more (row, column) rounds."""
    *tokens, n, _ = start.shape
    if start.dtype == torch.float32 and start.shape[-2:] == (n, n) and iters > 0 and few_tokens.takes(start, math.prod(tokens)):
        return few_tokens.sinkhorn_rounds(start, iters, eps)
    rounds = torch.stack(list(_rounds(start.reshape(-1, n, n).permute(1, 2, 0).contiguous(), iters, eps)))
    return rounds.permute(3, 0, 1, 2).reshape(*tokens, iters, n, n)


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
    *tokens, n, h = x.shape
    if few_tokens.takes(x, math.prod(tokens), (pre, x.shape[:-1])):
        return few_tokens.collapse(x, pre)
    return torch.bmm(pre.reshape(-1, 1, n), wide(x).reshape(-1, n, h)).view(*tokens, h).to(x.dtype)


def write_back(x: Tensor, comb: Tensor, post: Tensor, out: Tensor, *, is_free: bool = False) -> Tensor:
    """x [b s n h], comb [b s n n], post [b s n], out [b s h] -> streams [b s n h] of x's dtype. is_free: nobody needs x any more; long
    streams are then written over.
    """
    b, s, n, h = x.shape
    is_few = few_tokens.takes(x, b * s, (comb, (b, s, n, n)), (post, (b, s, n)))
    if is_few and is_plain(out) and few_tokens.has_memory(out) and out.shape == (b, s, h) and out.dtype == x.dtype:
        return few_tokens.write_back(x, comb, post, out)
    turned = comb.reshape(b * s, n, n).transpose(1, 2)
    if x.dtype == comb.dtype and x.numel() > CHUNK and is_plain(x):
        is_free = is_free and x.is_contiguous()
        written = x if is_free else torch.empty_like(x, memory_format=torch.contiguous_format)
        parts = (turned.contiguous(), x.flatten(0, 1), post.reshape(b * s, n, 1), out.reshape(b * s, 1, h), written.view(b * s, n, h))
        for mix, rows, weight, new, into in zip(*(t.split(tokens_of_chunk(x.flatten(-2))) for t in parts), strict=True):
            if is_free:
                into.copy_(torch.bmm(mix, rows).addcmul_(weight, new))
            else:
                torch.bmm(mix, rows, out=into).addcmul_(weight, new)
        return written
    # Dense first: with many tokens a transposed 4 x 4 matrix is several times slower in a batched product.
    mixed = torch.bmm(turned.contiguous(), wide(x).reshape(b * s, n, h)).view(x.shape)
    return mixed.addcmul_(post.unsqueeze(-1), wide(out).unsqueeze(-2)).to(x.dtype)


def read(
    x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *, iters: int, eps: float, rms_eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The whole read in one go: (pre [b s n], post [b s n], comb [b s n n], collapsed [b s h])."""
    if takes_few(x, fn, scale, base):
        return few_tokens.read(x, fn, scale, base, None, iters, eps, rms_eps, 0.0)[:-1]
    n = x.shape[2]
    logits = mix_logits(x, fn, rms_eps)
    pre = read_weights(logits[..., :n], scale[0], base[:n], eps)
    post = write_weights(logits[..., n : 2 * n], scale[1], base[n : 2 * n])
    last = deque(_rounds(_start(logits[..., 2 * n :], scale[2], base[2 * n :], eps, n), iters, eps), maxlen=1)[0]
    return pre, post, _tokens_first(last, x.shape[:2]), collapse(x, pre)


def takes_few(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> bool:
    """Whether `few_tokens.read` takes streams x [b s n h]."""
    b, s, n, h = x.shape
    m = (2 + n) * n
    return few_tokens.takes(x, b * s, (fn, (m, n * h)), (scale, (3,)), (base, (m,)))


def _takes_logits(logits: Tensor, scale: Tensor, base: Tensor) -> bool:
    width = logits.shape[-1]
    return (
        scale.numel() == 1
        and scale.dim() <= 1
        and logits.dtype == torch.float32
        and few_tokens.takes(logits, logits.shape[:-1].numel(), (scale, scale.shape), (base, (width,)))
    )


def read_definition(
    x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm: Tensor | None, iters: int, eps: float, rms_eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `fused_read` computes, in plain torch."""
    pre, post, comb, collapsed = read(x, fn, scale, base, iters=iters, eps=eps, rms_eps=rms_eps)
    return pre, post, comb, collapsed, collapsed.new_empty(0) if norm is None else rms_norm(collapsed, norm, norm_eps)


def write_read_definition(
    x: Tensor, comb: Tensor, post: Tensor, out: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm: Tensor | None, *numbers
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `fused_write_read` computes, in plain torch."""
    written = write_back(x, comb, post, out)
    return written, *read_definition(written, fn, scale, base, norm, *numbers)


def refusal(backend: str, device: torch.device, dtype: torch.dtype, streams: int, hidden: int) -> str | None:
    """None where `backend` takes streams of this device, dtype, number and width, else the reason it does not."""
    reason = available(backend, device)
    if reason is not None or backend == "torch":
        return reason
    if dtype not in DEVICE_DTYPES:
        return f"its streams are {', '.join(map(str, DEVICE_DTYPES))}, got {dtype}"
    if streams > MAX_STREAMS:
        return f"it reads at most {MAX_STREAMS} streams, got {streams}"
    return None if hidden <= MAX_HIDDEN else f"its streams are at most {MAX_HIDDEN} wide, got {hidden}"


@torch.library.custom_op("dsv4::hyper_read", mutates_args=())
def fused_read(
    x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm: Tensor | None, iters: int, eps: float, rms_eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`read`, then `rms_norm` of what was collapsed.

    Args:
        x: [b s n h]. fn: [(2 + n) n, n h], scale [3], base [(2 + n) n], float32. norm: [h] float32, or None for no norm.
    Returns:
        (pre [b s n], post [b s n], comb [b s n n] float32, collapsed [b s h], normed [b s h], without a norm [0]).
    Raises:
        ValueError: shapes or dtypes that do not fit, or a device on which it cannot run.
    """
    _check(x, fn, scale, base, norm)
    from dsv4.kernels import _hyper_connection_triton as device_code

    return device_code.read(x, None, fn, scale, base, norm, iters, eps, rms_eps, norm_eps)[1:]


@fused_read.register_fake
def _(x, fn, scale, base, norm, iters, eps, rms_eps, norm_eps):
    b, s, n, h = x.shape
    mixes = [x.new_empty(b, s, *shape, dtype=torch.float32) for shape in ((n,), (n,), (n, n))]
    return *mixes, x.new_empty(b, s, h), x.new_empty(0) if norm is None else x.new_empty(b, s, h)


@torch.library.custom_op("dsv4::hyper_write", mutates_args=())
def fused_write(x: Tensor, comb: Tensor, post: Tensor, out: Tensor) -> Tensor:
    """`write_back`: x [b s n h], comb [b s n n], post [b s n] float32, out [b s h] of x's dtype -> [b s n h]."""
    check_written(x, comb, post, out)
    from dsv4.kernels import _hyper_connection_triton as device_code

    return device_code.write(x, comb, post, out)


@fused_write.register_fake
def _(x, comb, post, out):
    return x.new_empty(x.shape)


@torch.library.custom_op("dsv4::hyper_write_read", mutates_args=())
def fused_write_read(
    x: Tensor,
    comb: Tensor,
    post: Tensor,
    out: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm: Tensor | None,
    iters: int,
    eps: float,
    rms_eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`fused_write`, then `fused_read` of what was written: (written [b s n h], and the five results of the read)."""
    check_written(x, comb, post, out)
    _check(x, fn, scale, base, norm)
    from dsv4.kernels import _hyper_connection_triton as device_code

    return device_code.read(x, (comb, post, out), fn, scale, base, norm, iters, eps, rms_eps, norm_eps)


@fused_write_read.register_fake
def _(x, comb, post, out, fn, scale, base, norm, *numbers):
    b, s, n, h = x.shape
    mixes = [x.new_empty(b, s, *shape, dtype=torch.float32) for shape in ((n,), (n,), (n, n))]
    return x.new_empty(x.shape), *mixes, x.new_empty(b, s, h), x.new_empty(0) if norm is None else x.new_empty(b, s, h)


def _check(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm: Tensor | None) -> None:
    _, _, n, h = x.shape
    reason = refusal("triton", x.device, x.dtype, n, h)
    if reason is not None:
        raise ValueError(f'backend="triton": {reason}; use backend="torch" (of a model: model.use_kernels("torch"))')
    mixes = (2 + n) * n
    given = {"fn": (fn, (mixes, n * h)), "scale": (scale, (3,)), "base": (base, (mixes,))}
    given |= {} if norm is None else {"norm": (norm, (h,))}
    for name, (t, shape) in given.items():
        if t.shape != shape or t.dtype != torch.float32:
            raise ValueError(f"{name} {list(t.shape)} {t.dtype} over streams {list(x.shape)}; expected {list(shape)} torch.float32")


def check_written(x: Tensor, comb: Tensor, post: Tensor, out: Tensor) -> None:
    """ValueError for what `fused_write` does not take."""
    b, s, n, h = x.shape
    reason = refusal("triton", x.device, x.dtype, n, h)
    if reason is not None:
        raise ValueError(f'backend="triton": {reason}; use backend="torch" (of a model: model.use_kernels("torch"))')
    expected = {"comb": (comb, (b, s, n, n), torch.float32), "post": (post, (b, s, n), torch.float32), "out": (out, (b, s, h), x.dtype)}
    for name, (t, shape, dtype) in expected.items():
        if t.shape != shape or t.dtype != dtype:
            raise ValueError(f"{name} {list(t.shape)} {t.dtype} to write into {list(x.shape)}; expected {list(shape)} {dtype}")


recompute.register(fused_read, read_definition, tensors=5)
recompute.register(fused_write, write_back, tensors=4)
recompute.register(fused_write_read, write_read_definition, tensors=8)
