"""DeepSeek-V4 in PyTorch, written to be watched: every value of the forward can be read and edited.

    from dsv4 import Dsv4
    model = Dsv4.from_pretrained(folder_or_hub_id)
    logits, cache = model.run_with_cache(input_ids, names="layers.*.mlp.expert_indices")

Axes, one word for each, in every layout, docstring and error:

    b       row of the batch
    s       token of this call; `query` is the same axis seen from the keys
    k       key: the tokens a query may see, then the compressed entries
    e       compressed entries that exist after this call; e_new those that this call closed
    n       residual stream (config.hc_mult)
    hidden  width of a stream (config.hidden_size)
    N       attention head; D its width (config.head_dim), rotary in the last qk_rope_head_dim of it
    ih      indexer head; id its width
    E       routed expert; top_k the experts of one token; I an expert's width
    iters   round of the Sinkhorn normalisation
    vocab   token of the vocabulary

A dimension that is a product is written as one: `N*D`, `(2+n)*n`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv4.activation_cache import ActivationCache
    from dsv4.config import Dsv4Config
    from dsv4.hooks import HookPoint
    from dsv4.kv_cache import KVCache
    from dsv4.model import Dsv4

__all__ = ["ActivationCache", "Dsv4", "Dsv4Config", "HookPoint", "KVCache"]

# Imported on first use: `import dsv4.kernels` runs this file first and needs torch alone.
_HOME = {
    "ActivationCache": "dsv4.activation_cache",
    "Dsv4": "dsv4.model",
    "Dsv4Config": "dsv4.config",
    "HookPoint": "dsv4.hooks",
    "KVCache": "dsv4.kv_cache",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dsv4' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
