"""Hyper-connections: the learned maps by which a sublayer reads the residual streams and writes back, and the final readout.

Equations: dsv4/kernels/hyper_connection.py. Axes: b batch, s token, n stream.
"""

import torch
from torch import Tensor, nn

from dsv4.config import Dsv4Config
from dsv4.float32 import Float32
from dsv4.hooks import is_watched
from dsv4.kernels import few_tokens
from dsv4.kernels import hyper_connection as op
from dsv4.norm import RMSNorm


class HyperConnection(Float32):
    """One read site. The steps are methods, so that the block can spell them out; `read` is the same in one go."""

    # Of what is done in one go; chosen once, when the model is built (pretrained.use_kernels).
    backend = "torch"

    def __init__(self, config: Dsv4Config):
        super().__init__()
        n = self.streams = config.hc_mult
        self.iters, self.eps, self.rms_eps = config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps
        self.fn = nn.Parameter(torch.empty((2 + n) * n, n * config.hidden_size, dtype=torch.float32))
        self.base = nn.Parameter(torch.empty((2 + n) * n, dtype=torch.float32))
        self.scale = nn.Parameter(torch.empty(3, dtype=torch.float32))

    def read(self, x: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """x [b s n hidden] -> pre [b s n], post [b s n], comb [b s n n], collapsed [b s hidden], and what `norm` makes of that, where it
        is made on the way, else None.
        """
        is_torch = self.backend == "torch"
        given = (x, self.fn, self.scale, self.base)
        if is_torch and not op.takes_few(*given):
            return *op.read(*given, iters=self.iters, eps=self.eps, rms_eps=self.rms_eps), None
        weight, numbers = self._norm(norm)
        *values, normed = (few_tokens.read if is_torch else op.fused_read)(*given, weight, *numbers)
        return *values, None if weight is None else normed

    def write(self, x: Tensor, comb: Tensor, post: Tensor, out: Tensor, *, is_free: bool = False) -> Tensor:
        """x [b s n hidden], comb [b s n n], post [b s n], out [b s hidden] -> streams [b s n hidden]. is_free: nobody needs x any more."""
        return op.write_back(x, comb, post, out, is_free=is_free) if self.backend == "torch" else op.fused_write(x, comb, post, out)

    def write_and_read(
        self, x: Tensor, comb: Tensor, post: Tensor, out: Tensor, norm: RMSNorm, *, is_free: bool = False
    ) -> tuple[Tensor, ...]:
        """What another site writes back, and `read` of it: (streams, the five results of the read). is_free: as of `write`."""
        if self.backend == "torch":
            written = self.write(x, comb, post, out, is_free=is_free)
            return written, *self.read(written, norm)
        weight, numbers = self._norm(norm)
        *values, normed = op.fused_write_read(x, comb, post, out, self.fn, self.scale, self.base, weight, *numbers)
        return *values, None if weight is None else normed

    def _norm(self, norm: RMSNorm) -> tuple[Tensor | None, tuple[int, float, float, float]]:
        """(the norm's weight where it may be fused, the op's numbers)."""
        is_fused = norm.backend == self.backend and type(norm) is RMSNorm and not is_watched(norm)
        # What compiled code does not read is left to the norm itself.
        is_fused = is_fused and (self.backend == "triton" or few_tokens.is_held(norm.weight, (self.fn.shape[1] // self.streams,)))
        return norm.weight if is_fused else None, (self.iters, self.eps, self.rms_eps, norm.eps)

    def logits(self, x: Tensor) -> Tensor:
        return op.mix_logits(x, self.fn, self.rms_eps)

    def pre(self, logits: Tensor) -> Tensor:
        n = self.streams
        return op.read_weights(logits[..., :n], self.scale[0], self.base[:n], self.eps)

    def post(self, logits: Tensor) -> Tensor:
        n = self.streams
        return op.write_weights(logits[..., n : 2 * n], self.scale[1], self.base[n : 2 * n])

    def comb_start(self, logits: Tensor) -> Tensor:
        n = self.streams
        return op.mixing_start(logits[..., 2 * n :], self.scale[2], self.base[2 * n :], self.eps, n)

    def sinkhorn(self, start: Tensor) -> Tensor:
        return op.sinkhorn_rounds(start, self.iters, self.eps)


class HyperHead(Float32):
    """The readout: streams weighted by sigmoid(scale * logits + base) + eps and summed, without mixing."""

    def __init__(self, config: Dsv4Config):
        super().__init__()
        n = config.hc_mult
        self.eps, self.rms_eps = config.hc_eps, config.rms_norm_eps
        self.hc_fn = nn.Parameter(torch.empty(n, n * config.hidden_size, dtype=torch.float32))
        self.hc_base = nn.Parameter(torch.empty(n, dtype=torch.float32))
        self.hc_scale = nn.Parameter(torch.empty(1, dtype=torch.float32))

    def weights(self, x: Tensor) -> Tensor:
        """x [b s n hidden] -> [b s n] float32."""
        return op.read_weights(op.mix_logits(x, self.hc_fn, self.rms_eps), self.hc_scale, self.hc_base, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        """x [b s n hidden] -> [b s hidden]."""
        return op.collapse(x, self.weights(x))
