"""One block: read the streams, attend, write back; read them again, mixture, write back.

    layer_mid    = attention_comb^T x         + attention_post (x) attention_output
    layer_output = mlp_comb^T       layer_mid + mlp_post       (x) mlp_output

Axes: b batch, s token, n stream.
"""

from torch import Tensor, nn

from dsv4 import attention, moe
from dsv4.call import Call
from dsv4.config import Dsv4Config
from dsv4.hooks import HookPoint, Probed, is_watched
from dsv4.hyper_connection import HyperConnection
from dsv4.kernels.hyper_connection import collapse
from dsv4.norm import RMSNorm

# Values of a read site that the read in one go does not have.
HIDDEN = {site: frozenset(f"{site}_{value}" for value in ("hc_logits", "comb_start", "sinkhorn")) for site in ("attention", "mlp")}

# Those that it has.
SHOWN = {site: frozenset(f"{site}_{value}" for value in ("pre", "post", "comb", "collapsed")) for site in ("attention", "mlp")}


class Blocks(nn.ModuleList):
    """The blocks in order."""

    def leave(self, streams: Tensor) -> Tensor:
        """What the streams pass behind the last block that ran: where blocks are spread over processes, they come to all."""
        return streams


def passes_unseen(made_by: nn.Module | None, block: nn.Module) -> bool:
    """Whether nobody but `block` gets to see what `made_by`, the block before it, returned."""
    are_own = type(made_by) is type(block) is Block
    return are_own and not ("layer_output" in made_by.live or "layer_input" in block.live or is_watched(made_by) or is_watched(block))


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

    def forward(self, x: Tensor, call: Call, kv=None, *, is_free: bool = False) -> Tensor:
        """Streams entering [b s n hidden] -> streams leaving. is_free: nobody else needs x, and long ones may be written over."""
        tap = self.tap
        x = tap.layer_input(x)
        post, comb, normed = self.read("attention", x)
        out = self.self_attn(tap.attention_norm_output(normed), call, kv)
        is_shown = self.layer_mid.live or bool(self.listened & HIDDEN["mlp"])
        if is_shown:
            x = tap.layer_mid(self.attn_hc.write(x, comb, post, out, is_free=is_free))
            post, comb, normed = self.read("mlp", x)
        else:
            x, *values = self.ffn_hc.write_and_read(x, comb, post, out, self.post_attention_layernorm, is_free=is_free)
            post, comb, normed = self.shown("mlp", x, *values)
        normed = tap.mlp_input(tap.mlp_norm_output(normed))
        # A module of somebody else's may stand in the mixture's place.
        if self.ffn_hc.backend == "triton" and getattr(self.mlp, "writes_in_one", False):
            return tap.layer_output(self.mlp.write(normed, call, x, comb, post))
        return tap.layer_output(self.ffn_hc.write(x, comb, post, self.mlp(normed, call), is_free=not is_shown))

    def read(self, site: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(post [b s n], comb [b s n n], normed [b s hidden]) of one read site."""
        hc, norm = self.site(site)
        if not self.listened & HIDDEN[site]:
            return self.shown(site, x, *hc.read(x, norm))

        def at(value: str):
            return getattr(self.tap, f"{site}_{value}")

        logits = at("hc_logits")(hc.logits(x))
        pre = at("pre")(hc.pre(logits))
        post = at("post")(hc.post(logits))
        rounds = at("sinkhorn")(hc.sinkhorn(at("comb_start")(hc.comb_start(logits))))
        comb = at("comb")(rounds[..., -1, :, :])
        return post, comb, norm(at("collapsed")(collapse(x, pre)))

    def shown(self, site: str, x: Tensor, pre: Tensor, post: Tensor, comb: Tensor, collapsed: Tensor, normed: Tensor | None):
        """What a read in one go made, through its points. What follows a point at which someone listens is made again from what the
        point returns, edited or not: by torch, so that a value replaced by itself changes nothing.
        """
        hc, norm = self.site(site)
        if self.live.isdisjoint(SHOWN[site]):
            return post, comb, norm(collapsed) if normed is None else normed

        def at(value: str):
            return getattr(self.tap, f"{site}_{value}")

        read_by = at("pre")(pre)
        post, comb = at("post")(post), at("comb")(comb)
        if read_by is not pre or (hc.backend == "triton" and getattr(self, f"{site}_pre").live):
            collapsed, normed = collapse(x, read_by), None
        if getattr(self, f"{site}_collapsed").live:
            normed = None
        collapsed = at("collapsed")(collapsed)
        return post, comb, norm(collapsed) if normed is None else normed

    def site(self, site: str) -> tuple[HyperConnection, RMSNorm]:
        return (self.attn_hc, self.input_layernorm) if site == "attention" else (self.ffn_hc, self.post_attention_layernorm)
