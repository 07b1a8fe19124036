"""DeepSeek's own decoding, token after token, against our cache fed in several ways."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dsv4 import Dsv4
from dsv4.testing import as_sets, assert_close

GOLDEN = Path(__file__).parent / "golden"
CASES = [
    ("a1_exact", "decode_1_20"),
    ("a1_exact", "decode_13_40"),
    ("a1_exact", "decode_122_136"),
    ("a2_exact_hca8", "decode_3_19"),
    ("b1_fp8_fp4", "exact_decode_13_30"),
]
NAMES = [
    "logits",
    "layers.*.layer_output",
    "**.expert_indices",
    "**.compressed_entries",
    "**.indexer_keys",
    "**.indexer_selection",
]
# How the prompt is split; the rest comes one token at a time.
SPLITS = {"at once": lambda n: [n], "one by one": lambda n: [1] * n, "by five": lambda n: _fives(n)}


def _fives(n):
    return [min(5, n - at) for at in range(0, n, 5)]


@pytest.fixture(scope="module", params=CASES, ids=".".join)
def case(request):
    folder, name = request.param
    weights = "dequantized"
    model = Dsv4.from_pretrained(GOLDEN / folder, dtype=torch.float32, weights=weights)
    return model.requires_grad_(False), load_file(GOLDEN / folder / f"{name}.safetensors")


@pytest.mark.parametrize(("split", "rewind"), [("at once", 0), ("one by one", None), ("by five", 3)])
def test_prefill_and_decode(case, split, rewind):
    model, expected = case
    ids, prompt = expected["input_ids"].long(), int(expected["prompt_len"])
    kv = model.new_kv_cache(*ids.shape, rewind=rewind)
    sizes = [*SPLITS[split](prompt), *[1] * (ids.shape[1] - prompt)]
    calls, at = [], 0
    for size in sizes:
        _, cache = model.run_with_cache(ids[:, at : at + size], NAMES, kv_cache=kv)
        calls.append(cache)
        at += size

    def joined(name, calls=calls):
        return torch.cat([cache[name] for cache in calls], dim=1)

    logits = torch.cat((expected["prefill.logits"], expected["decode.logits"]), dim=1)
    assert_close(joined("logits"), logits, "golden logits")
    for key, value in expected.items():
        *_, layer, kind = ["", *key.split(".")]
        at = f"layers.{layer}"
        if kind == "stream":
            ours = joined(f"{at}.layer_output")[:1, prompt:]
            assert_close(ours, value, "golden streams", key)
        elif kind == "comp_kv":
            ours = joined(f"{at}.self_attn.compressor.compressed_entries")[:1]
            assert_close(ours, value, "golden entries", key)
        elif kind == "index_kv":
            ours = calls[-1][f"{at}.self_attn.compressor.indexer.indexer_keys"][:1]
            assert_close(ours, value, "golden entries", key)
        elif kind == "router_idx":
            ours = joined(f"{at}.mlp.expert_indices")[:1, prompt:]
            assert torch.equal(as_sets(ours), as_sets(value.long())), key
        elif kind == "index_topk":
            name = f"{at}.self_attn.compressor.indexer.indexer_selection"
            parts = [cache[name][:1, -1] for cache in calls[-value.shape[1] :]]
            # Official rows are as wide as the last one.
            wide = torch.full_like(value.long(), -1)
            for i, part in enumerate(parts):
                wide[:, i, : part.shape[1]] = part
            assert torch.equal(as_sets(wide), as_sets(value.long())), key


def test_generate_is_the_official_argmax_where_it_leads_there(case):
    """Greedy tokens from each prefix of the case are the best of its logits."""
    model, expected = case
    ids, prompt = expected["input_ids"].long(), int(expected["prompt_len"])
    best = expected["decode.logits"].argmax(-1)
    for at in range(prompt, ids.shape[1], 5):
        new = model.generate(ids[:, : at + 1], 1, eos_token_id=None)[:, -1]
        assert torch.equal(new, best[:, at - prompt])
