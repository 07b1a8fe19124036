"""Which experts a block that routes by score is likely to use, guessed when the streams enter it, so that they come while it attends.

    guess = the block's own read site, norm and router, on the streams as they enter: as if its attention added nothing

A guess asks for bytes and for nothing else: what the router then chooses is brought in any case, what was guessed beside it and has not
come yet is not brought. No point of the model sees it.
"""

import math
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from dsv4.block import Block
from dsv4.kernels.hyper_connection import collapse, mix_logits
from dsv4.offload import AHEAD, LEAVES, OffloadedExperts
from dsv4.router import TopKRouter

# Tokens of a call that are asked, at most, and the share of a token's experts that is believed: the best by score are nearly always
# right, the last ones every other time (docs/scale.md).
TOKENS = 16
BELIEVED = 2 / 3


def can_guess(block: Block) -> bool:
    """Whether its experts are copied to a device and chosen by score. Pages of files are not guessed: it costs a CPU more than it saves
    (docs/scale.md).
    """
    bank = block.mlp.experts
    return isinstance(bank, OffloadedExperts) and bank.hot is not None and isinstance(block.mlp.router, TopKRouter)


def likely(block: Block, streams: Tensor) -> Tensor:
    """streams [b s n hidden] as they enter -> [t k]: what the router chooses for some of the tokens, spread evenly, with the attention
    left out; best first.
    """
    tokens = streams.detach().flatten(0, 1)
    x = tokens[:: -(-len(tokens) // TOKENS)].unsqueeze(0)
    hc, norm, router = block.ffn_hc, block.post_attention_layernorm, block.mlp.router
    collapsed = collapse(x, hc.pre(mix_logits(x, hc.fn[: hc.streams], hc.rms_eps)))
    # Not by calling the norm, which would tell those who watch the module.
    normed = type(norm).forward(norm, collapsed)
    return router.choose(router.selection_scores(router.scores(router.logits(normed)))).flatten(0, 1)


def believed_of(top_k: int) -> int:
    """How many of a token's experts are asked for."""
    return math.ceil(top_k * BELIEVED)


class Lookahead:
    """The guess that is open, one at a time.

    Attributes:
        guessed, right: experts asked for on a guess, and those of them that the block then used.
    """

    def __init__(self):
        self.guessed = self.right = 0
        self._open: tuple[OffloadedExperts, list[int]] | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._job: Future | None = None

    def __deepcopy__(self, memo) -> "Lookahead":
        return Lookahead()

    @torch.no_grad()
    def guess(self, block: Block, streams: Tensor) -> None:
        """Streams are about to enter a block: ask for the experts that most tokens are likely to use."""
        bank = block.mlp.experts
        if streams.numel() == 0:
            return
        chosen = likely(block, streams)
        self._open = opened = (bank, [])
        if chosen.device.type == "cuda":
            # The numbers are there when the device comes to them; this thread goes on to launch the attention.
            chosen = chosen.to("cpu", non_blocking=True)
            made = torch.cuda.current_stream(streams.device).record_event()
            self._later(lambda: (made.synchronize(), self._ask(opened, chosen)))
        else:
            self._ask(opened, chosen)

    def used(self, bank: OffloadedExperts, experts: Sequence[int]) -> None:
        """The block's router has chosen: the guess is over."""
        if self._open is None or self._open[0] is not bank:
            return
        (_, asked), self._open = self._open, None
        self.guessed += len(asked)
        self.right += len(set(asked).intersection(experts))
        bank.hot.settle({bank.key(leaf, expert) for leaf in LEAVES for expert in experts})

    def _ask(self, opened: tuple[OffloadedExperts, list[int]], chosen: Tensor) -> None:
        bank, asked = opened
        # By rank first: of equally many, the better ones.
        believed = chosen.t()[: believed_of(chosen.shape[1])].flatten().tolist()
        likeliest = [expert for expert, _ in Counter(believed).most_common(AHEAD)]
        for leaf in LEAVES:
            for expert in likeliest:
                if self._open is not opened:
                    return
                if leaf == LEAVES[0]:
                    asked.append(expert)
                bank.ahead(leaf, expert, is_guess=True)

    def _later(self, do) -> None:
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="dsv4-lookahead")
        if self._job is not None and self._job.done():
            # What the last one raised, if it did.
            self._job.result()
        self._job = self._worker.submit(do)
