"""One block: read the streams, attend, write back; read them again, mixture, write back.

    layer_mid    = attention_comb^T x         + attention_post (x) attention_output
    layer_output = mlp_comb^T       layer_mid + mlp_post       (x) mlp_output

Axes: b batch, s token, n stream.
"""

from torch import Tensor, nn

from dsv4 import attention, moe
from dsv4.call import Call
from dsv4.config import Dsv4Config
from dsv4.hooks import HookPoint, Probed
from dsv4.hyper_connection import HyperConnection
from dsv4.kernels.hyper_connection import collapse, write_back
from dsv4.norm import RMSNorm

# Values of a read site that the read in one go does not have.
HIDDEN = {site: frozenset(f"{site}_{value}" for value in ("hc_logits", "comb_start", "sinkhorn")) for site in ("attention", "mlp")}


class Blocks(nn.ModuleList):
    """The blocks in order."""

    def leave(self, streams: Tensor) -> Tensor:
        """What the streams pass behind the last block that ran: where blocks are spread over processes, they come to all."""
        return streams


class Block(Probed):
    def __init__(self, config: Dsv4Config, layer: int):
        super().__init__()
        self.attn_hc = HyperConnection(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention.KINDS[config.layer_types[layer]](config)
        self.ffn_hc = HyperConnection(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = moe.KINDS[config.mlp_layer_types[layer]](config)

        self.layer_input = HookPoint("b s n hidden")
        self.attention_hc_logits = HookPoint("b s (2+n)*n")
        self.attention_pre = HookPoint("b s n")
        self.attention_post = HookPoint("b s n")
        self.attention_comb_start = HookPoint("b s n n")
        self.attention_sinkhorn = HookPoint("b s iters n n")
        self.attention_comb = HookPoint("b s n n")
        self.attention_collapsed = HookPoint("b s hidden")
        self.attention_norm_output = HookPoint("b s hidden")
        self.layer_mid = HookPoint("b s n hidden")
        self.mlp_hc_logits = HookPoint("b s (2+n)*n")
        self.mlp_pre = HookPoint("b s n")
        self.mlp_post = HookPoint("b s n")
        self.mlp_comb_start = HookPoint("b s n n")
        self.mlp_sinkhorn = HookPoint("b s iters n n")
        self.mlp_comb = HookPoint("b s n n")
        self.mlp_collapsed = HookPoint("b s hidden")
        self.mlp_norm_output = HookPoint("b s hidden")
        self.mlp_input = HookPoint("b s hidden")
        self.layer_output = HookPoint("b s n hidden")

    def forward(self, x: Tensor, call: Call, kv=None) -> Tensor:
        """Streams entering [b s n hidden] -> streams leaving."""
        tap = self.tap
        x = tap.layer_input(x)
        post, comb, collapsed = self.read("attention", self.attn_hc, x)
        normed = tap.attention_norm_output(self.input_layernorm(collapsed))
        x = tap.layer_mid(write_back(x, comb, post, self.self_attn(normed, call, kv)))
        post, comb, collapsed = self.read("mlp", self.ffn_hc, x)
        normed = tap.mlp_input(tap.mlp_norm_output(self.post_attention_layernorm(collapsed)))
        return tap.layer_output(write_back(x, comb, post, self.mlp(normed, call)))

    def read(self, site: str, hc: HyperConnection, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(post [b s n], comb [b s n n], collapsed [b s hidden]) of one read site."""

        def at(value: str):
            return getattr(self.tap, f"{site}_{value}")

        if not self.listened & HIDDEN[site]:
            pre, post, comb, collapsed = hc.read(x)
            read_by = at("pre")(pre)
            post, comb = at("post")(post), at("comb")(comb)
            collapsed = collapsed if read_by is pre else collapse(x, read_by)
            return post, comb, at("collapsed")(collapsed)
        logits = at("hc_logits")(hc.logits(x))
        pre = at("pre")(hc.pre(logits))
        post = at("post")(hc.post(logits))
        rounds = at("sinkhorn")(hc.sinkhorn(at("comb_start")(hc.comb_start(logits))))
        comb = at("comb")(rounds[..., -1, :, :])
        return post, comb, at("collapsed")(collapse(x, pre))
