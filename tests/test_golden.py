"""Results of DeepSeek's own inference code (tests/golden/README.md): logits, and every value that
the files hold.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dsv4 import Dsv4
from dsv4.kernels.hyper_connection import mixing_start, read_weights, sinkhorn_rounds, write_weights
from dsv4.kernels.index_scores import closed_entries
from dsv4.kernels.sparse_attention import (
    Reach,
    sparse_attention,
    sparse_attention_reference,
    visible_tokens,
)
from dsv4.rope import Rotary
from dsv4.testing import as_sets, assert_close

GOLDEN = Path(__file__).parent / "golden"
CASES = {
    "a1_exact": "decode_122_136",
    "a2_exact_hca8": "prefill_42",
    "a3_exact_clamp": "prefill_40",
    "b1_fp8_fp4": "exact_prefill_33",
    "b2_fp8_only": "exact_prefill_40",
}
# Tensors of a case -> (our value, limit).
VALUES = {
    "stream": ("layer_output", "golden streams"),
    "attn_out": ("self_attn.attention_output", "golden sublayers"),
    "ffn_out": ("mlp.mlp_output", "golden sublayers"),
    "index_score": ("self_attn.compressor.indexer.indexer_scores", "golden scores"),
    "comp_kv": ("self_attn.compressor.compressed_entries", "golden entries"),
    "index_kv": ("self_attn.compressor.indexer.indexer_keys", "golden entries"),
    **{
        f"hc_{theirs}_{part}": (f"{ours}_{part}", "golden weights")
        for theirs, ours in (("attn", "attention"), ("ffn", "mlp"))
        for part in ("pre", "post", "comb")
    },
}
# Of one entry each, not of one token each.
PER_ENTRY = ("comp_kv", "index_kv")


class Case:
    """One checkpoint, run over a case's ids with every value kept."""

    def __init__(self, folder: str, weights: str):
        self.model = Dsv4.from_pretrained(GOLDEN / folder, dtype=torch.float32, weights=weights)
        self.expected = load_file(GOLDEN / folder / f"{CASES[folder]}.safetensors")
        self.ids = self.expected["input_ids"].long()
        with torch.no_grad():
            self.plain = self.model(self.ids)
            self.logits, self.cache = self.model.run_with_cache(self.ids, "**", max_bytes=None)
        if "prompt_len" in self.expected:
            self.positions = torch.arange(int(self.expected["prompt_len"]), self.ids.shape[1])
        else:
            self.positions = self.expected["kept_positions"].long()

    def official(self, kind: str) -> dict[int, Tensor]:
        """{block: tensor} of one kind of value."""
        found = {}
        for key, tensor in self.expected.items():
            parts = key.removeprefix("decode.").split(".")
            if parts[0] == "layers" and parts[2] == kind:
                found[int(parts[1])] = tensor
        return found

    def ours(self, name: str, block: int, per_entry: bool = False) -> Tensor:
        value = self.cache[f"layers.{block}.{name}"][:1]
        return value if per_entry else value[:, self.positions]


@pytest.fixture(
    scope="module",
    params=[(folder, "native") for folder in CASES] + [("b1_fp8_fp4", "dequantized")],
    ids="-".join,
)
def case(request) -> Case:
    folder, weights = request.param
    stored = folder.startswith("b")
    return Case(folder, weights if stored else "dequantized")


def test_logits(case: Case):
    expected = case.expected.get("logits")
    if expected is None:
        expected = torch.cat((case.expected["prefill.logits"], case.expected["decode.logits"]), dim=1)
    assert_close(case.plain, expected, "golden logits", "logits")
    assert_close(case.logits, expected, "golden logits", "logits of the watched run")


@pytest.mark.parametrize("kind", VALUES)
def test_values(case: Case, kind: str):
    name, limit = VALUES[kind]
    for block, expected in case.official(kind).items():
        ours = case.ours(name, block, per_entry=kind in PER_ENTRY)
        assert_close(ours, expected, limit, f"layers.{block}.{name}")


def test_every_kind_of_value_is_met():
    kinds = set()
    for folder, name in CASES.items():
        keys = load_file(GOLDEN / folder / f"{name}.safetensors")
        kinds |= {key.rsplit(".", 1)[-1] for key in keys if "layers." in key}
    assert kinds == {*VALUES, "router_idx", "router_w", "index_topk"}


def test_routing(case: Case):
    for block, indices in case.official("router_idx").items():
        ours, weights = (case.ours(f"mlp.{name}", block) for name in ("expert_indices", "expert_weights"))
        order, expected_order = ours.argsort(-1), indices.argsort(-1)
        assert torch.equal(ours.gather(-1, order), indices.long().gather(-1, expected_order))
        expected = case.official("router_w")[block].gather(-1, expected_order)
        assert_close(
            weights.gather(-1, order),
            expected,
            "golden weights",
            f"layers.{block}.mlp.expert_weights",
        )


def test_selection(case: Case):
    for block, expected in case.official("index_topk").items():
        ours = case.ours("self_attn.compressor.indexer.indexer_selection", block)
        assert torch.equal(as_sets(ours), as_sets(expected.long())), f"layers.{block}"


# Unit vectors.


@pytest.fixture(scope="module")
def unit() -> dict[str, Tensor]:
    return load_file(GOLDEN / "kernels.safetensors")


ROPES = {
    "full_main": (64, {"rope_type": "default", "rope_theta": 10000.0}),
    "full_compress": (
        64,
        {
            "rope_type": "yarn",
            "rope_theta": 160000.0,
            "factor": 16,
            "original_max_position_embeddings": 65536,
        },
    ),
    "a1_compress": (16, None),
    "a2_compress": (16, None),
}


@pytest.mark.parametrize("table", ROPES)
def test_rotary_tables(unit, table: str):
    width, rope = ROPES[table]
    if rope is None:
        folder = next(name for name in CASES if name.startswith(table[:2]))
        rope = Dsv4.from_pretrained(GOLDEN / folder).config.rope_parameters["compress"]
    cos, sin = Rotary(width, {"beta_fast": 32, "beta_slow": 1} | dict(rope))(unit["rope.positions"].long())
    assert_close(cos, unit[f"rope.{table}.cos"], "golden rotary", "cos")
    assert_close(sin, unit[f"rope.{table}.sin"], "golden rotary", "sin")


@pytest.mark.parametrize(("name", "eps", "iters"), [("hc", 1e-6, 20), ("hc_eps1e-2", 1e-2, 20), ("hc_iters3", 1e-6, 3)])
def test_hyper_connection_weights(unit, name: str, eps: float, iters: int):
    logits, scale, base, n = unit["hc.mixes"], unit["hc.scale"], unit["hc.base"], 4
    pre = read_weights(logits[..., :n], scale[0], base[:n], eps)
    post = write_weights(logits[..., n : 2 * n], scale[1], base[n : 2 * n])
    comb = sinkhorn_rounds(mixing_start(logits[..., 2 * n :], scale[2], base[2 * n :], eps, n), iters, eps)[..., -1, :, :]
    for part, value in (("pre", pre), ("post", post), ("comb", comb)):
        assert_close(value, unit[f"{name}.{part}"], "golden weights", part)


@pytest.mark.parametrize("attend", [sparse_attention, sparse_attention_reference])
@pytest.mark.parametrize("kept", [100, 12])
def test_sparse_attention(unit, attend, kept: int):
    """The official kernel over listed keys: ours sees them as entries, all of them closed, and no
    token.
    """
    queries, keys, chosen = unit["attn.q"].float(), unit["attn.kv"].float(), unit["attn.idx"].long()
    b, s, _, width = queries.shape
    assert bool((chosen < 0).any())
    tokens = torch.full((b, s, width), 7.0)
    reach = Reach(1, torch.full((b, s), 10_000), torch.full((b, s), -1), 0, 1)
    if kept < chosen.shape[-1]:
        # Few of many: the way that gathers; it has to agree with the definition over the list.
        chosen = chosen[..., :kept]
        expected = sparse_attention_reference(
            queries.double(),
            tokens.double(),
            keys.double(),
            unit["attn.sink"],
            reach,
            chosen,
            width**-0.5,
        )
    else:
        expected = unit["attn.out_fp32"]
    ours = attend(queries, tokens, keys, unit["attn.sink"], reach, chosen, width**-0.5)
    assert_close(ours, expected, "float32 op", "attention")


def test_window_and_entries_seen(unit):
    positions = torch.arange(12)[None]
    seen = visible_tokens(positions, positions, 8)[0]
    for query, listed in enumerate(unit["window_idx.prefill_12"].tolist()):
        assert seen[query].nonzero().flatten().tolist() == sorted(i for i in listed if i >= 0)
    closed = closed_entries(positions, 4, 3)[0]
    for query, listed in enumerate(unit["hca_idx.prefill_12_ratio4"].tolist()):
        assert closed[query].nonzero().flatten().tolist() == sorted(i for i in listed if i >= 0)
