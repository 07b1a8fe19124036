"""A whole model whose fused ways are device code, in Triton's interpreter: the numbers of the torch backend, whole prompts and decoding,
what leaves a fused way and what does not.
"""

import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4 import Dsv4, Dsv4Config
from dsv4.config import CSA, HASH_MOE, HCA, MOE, SLIDING
from dsv4.testing import assert_close, assert_gradients_close
from dsv4.testing_kernels import interpreter

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

TINY = replace(
    Dsv4Config.tiny(),
    num_hidden_layers=3,
    layer_types=(SLIDING, CSA, HCA),
    mlp_layer_types=(HASH_MOE, MOE, MOE),
    # Tests of the op alone run as many as the published models have.
    hc_sinkhorn_iters=3,
)
# Calls of each op in one forward: two read sites in a block, of which the second is read as it is written, and the
# mixture's sum, which writes; norms of the query latent, queries, keys and the heads turned back in each block, the indexer's queries, the
# final norm; two pools on a CSA block, one on an HCA one.
CALLS = {
    "hyper_read": 3,
    "hyper_write_read": 3,
    "hyper_write": 0,
    "norm_rotary": 14,
    "pool_entries": 3,
    "index_select": 1,
    "sparse_attention": 3,
    "mixture": 0,
    "mixture_write": 3,
    "grouped_experts": 0,
}


@pytest.fixture(scope="module")
def interpreted():
    with interpreter(sys.modules[__name__]) as run:
        yield run


class Calls(TorchDispatchMode):
    """Counts calls of this package's ops."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "dsv4":
            self.count[func._opname] += 1
        return func(*args, **(kwargs or {}))

    def of_blocks(self) -> dict[str, int]:
        return {name: self.count[name] for name in CALLS}


def models() -> tuple[Dsv4, Dsv4]:
    plain, fused = (Dsv4.from_config(TINY, dtype=torch.float32, kernels=kernels, seed=0) for kernels in ("torch", "triton"))
    return plain, fused


def prompt(rows: int, tokens: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randint(0, TINY.vocab_size, (rows, tokens))


def check_numbers() -> None:
    """Padding, a prompt in two pieces, a step of fixed shape."""
    plain, fused = models()
    ids = prompt(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    results = []
    for model in (plain, fused):
        cache = model.new_kv_cache(2, 16)
        with torch.no_grad(), Calls() as calls:
            whole = model(ids, attention_mask=mask)
        expected = dict.fromkeys(CALLS, 0) if model is plain else CALLS
        assert calls.of_blocks() == expected, calls.of_blocks()
        with torch.no_grad():
            first = model(ids[:, :7], kv_cache=cache, attention_mask=mask[:, :7])
            fixed = cache.clone()
            rest = model(ids[:, 7:8], kv_cache=cache)
            step = model.forward_static(ids[:, 7:8], fixed)
        # What stands at padding is nobody's.
        results.append((whole[mask.bool()], first[mask[:, :7].bool()], rest, step))
    for got, expected in zip(results[1], results[0], strict=True):
        assert_close(got, expected, "watched", "logits")


def check_gradients() -> None:
    """Of every parameter, through the definitions of the ops."""
    plain, fused = models()
    ids = prompt(1, 9)
    found = []
    for model in (plain, fused):
        logits = model(ids)
        (logits * torch.linspace(-1, 1, logits.numel()).view(logits.shape)).sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert_gradients_close(found[1], found[0], "watched gradient")


# What is listened to in the CSA block, and how many calls of each op that takes away (negative: adds).
LEFT = {
    "layers.1.attention_sinkhorn": {"hyper_read": 1, "norm_rotary": -1},
    "layers.1.mlp_comb_start": {"hyper_write_read": 1, "hyper_write": -1, "norm_rotary": -1},
    "layers.1.layer_mid": {"hyper_write_read": 1, "hyper_read": -1, "hyper_write": -1},
    "layers.1.mlp_collapsed": {"norm_rotary": -1},
    "layers.1.attention_pre": {"norm_rotary": -1},
    "layers.1.attention_post": {},
    "layers.1.mlp_comb": {},
    "layers.1.self_attn.attention_queries_unrotated": {"norm_rotary": -1},
    "layers.1.self_attn.attention_keys_unrotated": {"norm_rotary": -1},
    "layers.1.self_attn.attention_queries": {},
    "layers.1.self_attn.attention_scores": {"sparse_attention": 1},
    "layers.1.self_attn.compressor.compressor_gates": {"pool_entries": 1, "norm_rotary": -1},
    "layers.1.self_attn.compressor.compressed_entries": {},
    "layers.1.self_attn.compressor.indexer.indexer_scores": {"index_select": 1},
    "layers.1.self_attn.compressor.indexer.indexer_selection": {},
    "layers.1.mlp.expert_weights": {},
    "layers.1.mlp.routed_output": {"mixture_write": 1, "grouped_experts": -1, "hyper_write": -1},
    "layers.1.mlp.shared_expert_output": {"mixture_write": 1, "grouped_experts": -1, "hyper_write": -1},
    "layers.1.mlp.expert_up": {"mixture_write": 1, "hyper_write": -1},
    "layers.1.mlp.mlp_output": {"mixture_write": 1, "mixture": -1, "hyper_write": -1},
}


def check_listening(names: tuple[str, ...]) -> None:
    """A value that a fused way hides moves its block to the spelled-out way, and no other; what is read is what torch makes."""
    plain, fused = models()
    # Three entries, of which two are kept.
    ids = prompt(1, 12)
    with torch.no_grad():
        expected, kept = plain.run_with_cache(ids, list(names))
        for name in names:
            with Calls() as calls:
                logits, seen = fused.run_with_cache(ids, name)
            assert calls.of_blocks() == {op: n - LEFT[name].get(op, 0) for op, n in CALLS.items()}, name
            assert_close(logits, expected, "watched", f"logits with {name}")
            if kept[name].dtype == torch.int64:
                assert torch.equal(seen[name], kept[name])
            else:
                assert_close(seen[name], kept[name], "watched", name)


def check_edits() -> None:
    """A value replaced by itself gives the very numbers of the run that reads it; an edit has torch's effect."""
    plain, fused = models()
    # As far as the block whose values are replaced.
    ids, only = prompt(1, 3), {"stop_at_layer": 2}
    with torch.no_grad():
        for leaf in ("attention_pre", "layer_mid", "mlp_collapsed", "mlp.mlp_output"):
            name = f"layers.1.{leaf}"
            read, _ = fused.run_with_cache(ids, name, **only)
            same = fused.run_with_hooks(ids, fwd_hooks=[(name, lambda value, hook: value.clone())], **only)
            assert torch.equal(read, same), name
            moved = [m.run_with_hooks(ids, fwd_hooks=[(name, lambda value, hook: value + 1)], **only) for m in (fused, plain)]
            assert_close(*moved, "watched", name)
            assert not torch.allclose(moved[0], read)


def check_modules_are_called() -> None:
    """PyTorch's own hook on a module that a fused way goes around."""
    plain, fused = models()
    ids = prompt(1, 12)
    block = fused.layers[1]
    modules = {
        "input_layernorm": block.input_layernorm,
        "post_attention_layernorm": block.post_attention_layernorm,
        "mlp": block.mlp,
        "q_a_norm": block.self_attn.q_a_norm,
        "q_b_norm": block.self_attn.q_b_norm,
        "kv_norm": block.self_attn.kv_norm,
        "entries": block.self_attn.compressor.kv_norm,
        "index keys": block.self_attn.compressor.indexer.kv_norm,
    }
    seen = set()
    handles = [m.register_forward_hook(lambda module, args, out, name=name: seen.add(name)) for name, m in modules.items()]
    with torch.no_grad():
        logits = fused(ids)
        assert seen == set(modules)
        assert_close(logits, plain(ids), "watched", "logits")
        handles[0].remove()
        block.input_layernorm.register_forward_hook(lambda module, args, out: out * 0)
        assert not torch.allclose(fused(ids), logits)


def check_traced() -> None:
    """A decoding step in one graph: the ops are opaque to it, and who listens is asked before."""
    plain, fused = models()
    ids = prompt(1, 12)
    with torch.no_grad():
        caches = [model.new_kv_cache(1, 16) for model in (plain, fused)]
        for model, cache in zip((plain, fused), caches, strict=True):
            model(ids[:, :11], kv_cache=cache)
        expected = plain.forward_static(ids[:, 11:], caches[0])
        step = torch.compile(fused._step, fullgraph=True, backend="aot_eager")
        logits = step(ids[:, 11:], caches[1].fix(1), torch.ones(1, dtype=torch.bool))
    assert_close(logits, expected, "watched", "logits")


@pytest.mark.parametrize("checked", [check_numbers, check_gradients, check_edits, check_modules_are_called, check_traced])
def test_model(interpreted, checked):
    interpreted(checked)


SHORT = ("layers.1.attention_sinkhorn", "layers.1.mlp_comb_start", "layers.1.self_attn.attention_queries_unrotated")


def test_listening(interpreted):
    interpreted(check_listening, SHORT)


@pytest.mark.slow
def test_listening_to_each(interpreted):
    interpreted(check_listening, tuple(LEFT))


def test_every_choice_is_made_once():
    """Modules with a backend are the ones that `use_kernels` asks."""
    from dsv4.pretrained import REFUSALS

    model = Dsv4.from_config(TINY)
    with_backend = {type(m).__name__ for m in model.modules() if hasattr(m, "backend")}
    asked = {type(m).__name__ for m in model.modules() if isinstance(m, tuple(kind for kind, _ in REFUSALS))}
    assert with_backend == asked
    assert {m.backend for m in model.modules() if hasattr(m, "backend")} == {"torch"}
