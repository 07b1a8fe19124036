"""What a decoding step of fixed shape launches, by kind of block, counted in Triton's interpreter.

Run by `python benchmarks/blocks.py --launches`. A block's launches are those of two blocks less those of one.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch
from attention import device
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from dsv4.config import CSA, HCA, MOE, SLIDING, Dsv4Config

# What a block is to launch at most.
TARGETS = {SLIDING: 18, CSA: 24, HCA: 18}


class Launches(TorchDispatchMode):
    """Counts ops that launch a kernel, those inside this package's ops among them; views and empty tensors launch none."""

    # Whole names: index_select is none of these. What reads a number back is counted.
    QUIET = frozenset(
        (
            *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "view", "_unsafe_view", "reshape"),
            *("_reshape_alias", "view_as_real", "view_as_complex", "expand", "as_strided", "slice", "select", "transpose", "t", "permute"),
            *("squeeze", "unsqueeze", "split", "split_with_sizes", "chunk", "unbind", "unfold", "narrow", "detach", "alias", "lift_fresh"),
        )
    )

    def __init__(self):
        super().__init__()
        self.count: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name in OPDEFS:
            # The op's own function, whose tensor ops come here too.
            with self:
                return OPDEFS[name]._init_fn(*args, **(kwargs or {}))
        name = name.split("::")[1]
        out = func(*args, **(kwargs or {}))
        if name not in self.QUIET:
            self.count[name] += 1
        return out


@contextmanager
def triton_launches(count: Counter) -> Iterator[None]:
    """Counts kernels that Triton's interpreter is asked for."""
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__

    def counted(self, *args, **kwargs):
        count[self.fn.__name__] += 1
        # What the interpreter does with tensors is no launch.
        with _disable_current_modes():
            return run(self, *args, **kwargs)

    with patch.object(GridExecutor, "__call__", counted):
        yield


def step_launches(kinds: tuple[str, ...]) -> Counter:
    """What one decoding step of fixed shape launches in a small bfloat16 model."""
    from dsv4 import Dsv4

    rates = {CSA: 4, HCA: 8}
    config = replace(
        Dsv4Config.tiny(),
        num_hidden_layers=len(kinds),
        layer_types=kinds,
        mlp_layer_types=(MOE,) * len(kinds),
        compress_rates=rates,
        # So many keys that programs share them, as at the published sizes.
        sliding_window=256,
        index_topk=16,
        torch_dtype=torch.bfloat16,
    )
    model = Dsv4.from_config(config, dtype=torch.bfloat16, device=device())
    cache = model.new_kv_cache(1, 512)
    ids = torch.arange(300, device=device())[None] % config.vocab_size
    with torch.no_grad():
        model(ids, kv_cache=cache)
        model.use_kernels("triton")
        model.forward_static(ids[:, :1], cache)
        with Launches() as launches, triton_launches(launches.count):
            model.forward_static(ids[:, :1], cache)
    return launches.count


def block_launches() -> dict[str, Counter]:
    """By kind of block: two blocks' launches less one block's."""
    return {kind: step_launches((kind, kind)) - step_launches((kind,)) for kind in (SLIDING, CSA, HCA)}


def report(found: dict[str, Counter]) -> list[str]:
    """A line for each kind of block: its launches beside what they are to be at most."""
    return [
        f"{kind}: {count.total()} launches of {TARGETS[kind]} at most: " + ", ".join(f"{n} {name}" for name, n in count.most_common())
        for kind, count in found.items()
    ]
