"""Float32 logits and block values against transformers from the same weights, over configs with
every parameter random.

A token after a choice that a near tie decided differently is not compared; such choices are
counted and bounded.
"""

import random

import pytest
import torch

from dsv4 import Dsv4, Dsv4Config
from dsv4.config import CSA, HASH_MOE, HCA, MOE, SLIDING
from dsv4.testing import (
    LIMITS,
    NEAR_TIES_ALLOWED,
    fault_config,
    parity,
    random_config,
    random_ids,
    relative_error,
    twin,
)

LIMIT = LIMITS["transformers"].relative
PLAIN = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in (("main", 1e4), ("compress", 16e4))}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 4e4,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
}
CASES = {
    "as is": {},
    "window 1": {"sliding_window": 1},
    "window 2": {"sliding_window": 2},
    "window 7": {"sliding_window": 7},
    "window 128": {"sliding_window": 128},
    "one entry kept": {"index_topk": 1},
    "more kept than there are": {"index_topk": 64},
    "CSA rate 2": {"compress_rates": {CSA: 2}},
    "CSA rate 7": {"compress_rates": {CSA: 7}},
    "CSA rate 1": {"compress_rates": {CSA: 1}},
    "HCA rate 3": {"compress_rates": {HCA: 3}},
    "HCA rate 1": {"compress_rates": {HCA: 1}},
    "rates longer than the input": {"compress_rates": {CSA: 100, HCA: 128}},
    "CSA slower than HCA": {"compress_rates": {CSA: 16, HCA: 4}},
    "one head": {"num_attention_heads": 1, "o_groups": 1},
    "a group for every head": {"num_attention_heads": 6, "o_groups": 6},
    "one group": {"num_attention_heads": 6, "o_groups": 1},
    "rotary over the whole head": {"head_dim": 8, "qk_rope_head_dim": 8},
    "rotary of two channels": {"qk_rope_head_dim": 2},
    "two streams": {"hc_mult": 2},
    "one stream": {"hc_mult": 1},
    "one Sinkhorn round": {"hc_sinkhorn_iters": 1},
    "two Sinkhorn rounds": {"hc_sinkhorn_iters": 2},
    "a large hc_eps": {"hc_eps": 1e-2},
    "a large rms_norm_eps": {"rms_norm_eps": 1e-2},
    "a limit that bites": {"swiglu_limit": 0.05},
    "no hash block": {"mlp_layer_types": (MOE,) * 4},
    "hash blocks only": {"mlp_layer_types": (HASH_MOE,) * 4},
    "hash blocks at the end": {"mlp_layer_types": (MOE, MOE, HASH_MOE, HASH_MOE)},
    "every expert": {"num_experts_per_tok": 8},
    "one expert": {"n_routed_experts": 1, "num_experts_per_tok": 1},
    "one of many experts": {"n_routed_experts": 40, "num_experts_per_tok": 1},
    "no YaRN": {"rope_parameters": PLAIN},
    "YaRN on both": {"rope_parameters": {"main": YARN, "compress": YARN}},
    "an attention factor": {"rope_parameters": PLAIN | {"compress": YARN | {"attention_factor": 1.3}}},
    "a large index head": {"index_head_dim": 24},
    "one sliding block": {"layer_types": (SLIDING,)},
    "one CSA block": {"layer_types": (CSA,)},
    "one HCA block": {"layer_types": (HCA,)},
    "twelve blocks": {"layer_types": (HCA, CSA, SLIDING, CSA) * 3},
}


def config_of(overrides: dict) -> Dsv4Config:
    if "mlp_layer_types" in overrides:
        return Dsv4Config.tiny(**{"layer_types": (SLIDING, CSA, HCA, CSA)} | overrides)
    return fault_config(**overrides)


def sweep(seeds: range, longest: int) -> None:
    """Two lengths of each random config; AssertionError names the seeds beyond the limit."""
    over, clean, ties, rows = [], [], 0, 0
    for seed in seeds:
        draw = random.Random(seed)
        config = random_config(draw)
        model = Dsv4.from_config(config, seed=seed)
        theirs = twin(model)
        for tokens in (draw.randint(1, 9), draw.randint(10, longest)):
            result = parity(model, theirs, random_ids(config, 2, tokens, seed))
            ties, rows = ties + result.agreement.ties, rows + result.agreement.rows
            clean.append(result.agreement.clean.double().mean().item())
            if not result.error <= LIMIT:
                over.append(f"seed {seed}, {tokens} tokens: {result.error:.3g}")
    assert not over, f"relative error above {LIMIT}: {over}"
    assert ties <= max(1, NEAR_TIES_ALLOWED * rows), f"{ties} near ties in {rows} choices"
    assert sum(clean) / len(clean) > 0.95


@pytest.mark.parametrize("first", range(0, 80, 10))
def test_random_configs(first: int):
    sweep(range(first, first + 10), 120)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 3000, 100))
def test_many_random_configs(first: int):
    sweep(range(first, first + 100), 300)


@pytest.mark.parametrize("case", CASES)
def test_one_field_at_a_time(case: str):
    config = config_of(CASES[case])
    model = Dsv4.from_config(config, seed=7)
    theirs = twin(model)
    for tokens in (1, 4, 50):
        result = parity(model, theirs, random_ids(config, 2, tokens, tokens))
        assert result.error <= LIMIT
        assert result.agreement.ties <= 1


def test_every_length_across_all_boundaries():
    config = fault_config()
    model = Dsv4.from_config(config, seed=1)
    theirs = twin(model)
    for tokens in range(1, 35):
        assert parity(model, theirs, random_ids(config, 3, tokens, tokens)).error <= LIMIT


def test_true_rates_and_window_past_their_ends():
    config = fault_config(sliding_window=128, compress_rates={CSA: 4, HCA: 128}, index_topk=16, index_n_heads=16)
    model = Dsv4.from_config(config, seed=2)
    result = parity(model, twin(model), random_ids(config, 1, 700))
    assert result.error <= LIMIT
    assert result.agreement.ties <= 1


@pytest.mark.slow
def test_far_positions():
    config = fault_config(index_topk=32, index_n_heads=16)
    model = Dsv4.from_config(config, seed=3)
    result = parity(model, twin(model), random_ids(config, 1, 3000))
    assert result.error <= LIMIT
    assert result.agreement.clean.float().mean() > 0.5


def test_values_of_every_block():
    """`compare` runs both models and names each value that transformers shows as well."""
    config = fault_config()
    model = Dsv4.from_config(config, seed=4)
    rows = model.compare(twin(model), random_ids(config, 2, 40))
    leaves = {row.name.rsplit(".", 1)[-1] for row in rows}
    assert {
        "layer_output",
        "attention_output",
        "mlp_output",
        "router_logits",
        "attention_comb",
        "logits",
    } <= leaves
    for row in rows:
        assert row.relative <= LIMIT, row


def test_weights_taken_from_a_transformers_model():
    config = fault_config()
    theirs = twin(Dsv4.from_config(config, seed=5))
    ids = random_ids(config, 2, 30)
    model = Dsv4.from_transformers(theirs)
    assert parity(model, theirs, ids).error <= LIMIT


def test_a_fault_in_the_weights_is_seen():
    """The comparison can fail: with noise on one tensor, each in turn, the error is far above the
    limit.
    """
    config = fault_config()
    model, other = (Dsv4.from_config(config, seed=6) for _ in range(2))
    theirs, ids = twin(other), random_ids(config, 2, 40)
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits
        for name, parameter in model.named_parameters():
            # Only the choice reads the indexer, and noise may leave it as it is.
            if ".indexer." in name:
                continue
            kept = parameter.clone()
            parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
            error = relative_error(model(ids), expected)
            parameter.copy_(kept)
            assert error > 10 * LIMIT, f"{name}: {error:.3g}"
