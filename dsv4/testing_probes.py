"""What the tests of the probes share: a model with every kind of block, a padded batch, an edit that every value feels."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dsv4 import values
from dsv4.config import CSA, HASH_MOE, HCA, MOE, SLIDING, Dsv4Config
from dsv4.hooks import HookPoint, Probed
from dsv4.model import Dsv4
from dsv4.values import VALUES

# Values of the indexer decide and are not added to anything: to feel an edit, a choice has to change.
CHOOSING = (
    "router_selection_scores",
    "indexer_queries",
    "indexer_keys",
    "indexer_head_weights",
    "indexer_head_scores",
    "indexer_scores",
)
# Values that the model reads nowhere: they are for looking at.
LEAVES = (
    "input_ids",
    "attention_mask",
    "next_token_probs",
    "attention_key_positions",
    "attention_sink_probability",
)


def every_kind(**overrides) -> Dsv4Config:
    """Six blocks: sliding, CSA and HCA, each with hash and with top-k routing."""
    kinds = {"layer_types": [SLIDING, CSA, HCA] * 2, "mlp_layer_types": [HASH_MOE] * 3 + [MOE] * 3}
    return Dsv4Config.tiny(**{**kinds, "hc_sinkhorn_iters": 4, **overrides})


def watched_model(dtype: torch.dtype = torch.float32, seed: int = 0, **overrides) -> Dsv4:
    return Dsv4.from_config(every_kind(**overrides), seed=seed, dtype=dtype)


def padded_batch(vocab: int, seq: int = 19, padding: int = 6) -> tuple[Tensor, Tensor]:
    """(ids [2, seq], mask): a full row, and one with `padding` at its left."""
    generator = torch.Generator(device="cpu").manual_seed(seq)
    ids = torch.randint(0, vocab, (2, seq), generator=generator, device="cpu")
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    return ids, mask


def leaf(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def writable(model: Dsv4) -> list[str]:
    return [name for name, point in model.hook_dict.items() if not point.read_only]


def names_of(model: Dsv4, layer: int | None) -> list[str]:
    """The values of one block, or of the model itself."""
    return [name for name, point in model.hook_dict.items() if point.layer == layer]


def expected_shape(model: Dsv4, name: str, batch: int, seq: int) -> tuple[int, ...]:
    """What the axes of a value come to in a call without a cache."""
    sizes = values.sizes(model.config, model.hook_dict[name].layer, batch, seq)
    return tuple(sizes[axis] for axis in VALUES[leaf(name)].axes.split())


def changed(value: Tensor, hook: HookPoint) -> Tensor:
    """Another value that is allowed there, drawn from the point's name; -inf stays."""
    name = leaf(hook.name)
    if name == "expert_indices":
        return (value + 1) % hook.owner.experts.num_experts
    if name == "indexer_selection":
        return torch.full_like(value, -1)
    generator = torch.Generator(device="cpu").manual_seed(sum(map(ord, hook.name)))
    noise = torch.randn(value.shape, generator=generator, device="cpu").to(value.device)
    return value + (10.0 if name in CHOOSING else 0.5) * noise.to(value.dtype)


@contextmanager
def calls_counted(model: Dsv4) -> Iterator[list[str]]:
    """Names of the points called while inside, in order."""
    called: list[str] = []
    original = HookPoint.__call__

    def counting(point: HookPoint, x: Tensor) -> Tensor:
        called.append(point.name)
        return original(point, x)

    HookPoint.__call__ = counting
    try:
        yield called
    finally:
        HookPoint.__call__ = original


def spelled(model: Dsv4) -> list[str]:
    """Paths of the modules that would take the spelled-out way now."""
    return [path for path, module in model.named_modules() if isinstance(module, Probed) and module.spelled_out]
