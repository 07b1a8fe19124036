"""Faults that other implementations of this model had, and kinds of fault near them, on a model of
one block of each kind.

Held elsewhere: padding (test_padding), rotary pairs, tables and magnitude
(test_kernels_norm_rotary), Sinkhorn's order, rounds
and eps (test_kernels_hyper_connection), underflow of the scores (test_kernels_numeric), ties
(test_kernels_*), everything that
moves a logit (test_parity, test_golden), runs and copies (test_model).
"""

import copy

import pytest
import torch
from torch import Tensor

from dsv4 import Dsv4
from dsv4.config import CSA, HCA, MOE, SLIDING
from dsv4.kernels.norm_rotary import rms_norm
from dsv4.testing import assert_close, fault_config, names_of, random_ids

TOKENS = 24


@pytest.fixture(scope="module")
def model() -> Dsv4:
    return Dsv4.from_config(fault_config(), seed=21)


@pytest.fixture(scope="module")
def ids(model: Dsv4) -> Tensor:
    return random_ids(model.config, 3, TOKENS, 21)


def layers_of(model: Dsv4, kind: str) -> list[int]:
    return [i for i, other in enumerate(model.layer_types) if other == kind]


# What a query may see.


def test_no_token_hears_a_later_one(model: Dsv4, ids: Tensor):
    """Fault 4: a query sees the compressed group that it is itself still inside."""
    logits = model(ids)
    for t in range(TOKENS - 1):
        other = ids.clone()
        other[:, t + 1] = (other[:, t + 1] + 5) % model.vocab_size
        assert_close(model(other)[:, : t + 1], logits[:, : t + 1], "watched", f"token {t + 1} changed")


def test_a_prefix_gives_the_same_logits(model: Dsv4, ids: Tensor):
    """Fault 22: faults appear exactly when the first window closes; tiny prompts crash."""
    logits = model(ids)
    for tokens in range(1, TOKENS):
        assert_close(model(ids[:, :tokens]), logits[:, :tokens], "watched", f"{tokens} tokens")


@pytest.mark.parametrize("tokens", [1, 3])
def test_no_entry_is_an_empty_value_not_a_missing_one(model: Dsv4, ids: Tensor, tokens: int):
    logits, cache = model.run_with_cache(ids[:, :tokens], "**")
    width = model.head_dim
    for i in layers_of(model, CSA):
        assert cache[f"layers.{i}.self_attn.compressor.compressed_entries"].shape == (3, 0, width)
        assert cache[f"layers.{i}.self_attn.compressor.indexer.indexer_selection"].shape == (
            3,
            tokens,
            0,
        )
    assert_close(logits, model(ids[:, :tokens]), "watched")


@pytest.mark.parametrize(("kind", "rate"), [(CSA, 4), (HCA, 8)])
def test_entries_are_weighed_from_their_last_token_on(model: Dsv4, ids: Tensor, kind: str, rate: int):
    """Faults 4 and 26: too early, or never."""
    layer = layers_of(model, kind)[0]
    _, cache = model.run_with_cache(ids, [f"layers.{layer}.self_attn.attention_probabilities", "**.indexer_selection"])
    weights = cache[f"layers.{layer}.self_attn.attention_probabilities"][..., TOKENS:]
    for entry in range(weights.shape[-1]):
        seen = weights[..., entry].sum((0, 1)) > 0
        assert not bool(seen[: rate * entry + rate - 1].any())
        if kind == HCA:
            assert bool(seen[rate * entry + rate - 1 :].all())
        elif entry < model.config.index_topk:
            # Chosen by whoever sees no more than are kept.
            assert bool(seen[rate * entry + rate - 1])


def test_the_window_is_exact_in_every_block(model: Dsv4, ids: Tensor):
    """Fault 28: off by one, or not applied in compressed blocks."""
    window = model.config.sliding_window
    _, cache = model.run_with_cache(ids, "**.attention_probabilities")
    for weights in cache.values():
        for t in range(TOKENS):
            seen = weights[:, :, t, :TOKENS].sum((0, 1)).nonzero().flatten().tolist()
            assert seen == list(range(max(0, t - window + 1), t + 1))


def test_one_block_reaches_exactly_one_window(ids: Tensor):
    one = Dsv4.from_config(fault_config(layer_types=(SLIDING,), num_hash_layers=0), seed=2)
    other = ids.clone()
    other[:, 0] = (other[:, 0] + 5) % one.vocab_size
    moved = (one(other) - one(ids)).abs().amax((0, 2))
    assert moved[7] > 1e-3
    assert bool((moved[8:] <= 1e-6).all())


def test_the_sink_takes_its_share(model: Dsv4, ids: Tensor):
    """Fault 17: dropped by a fast way, or mixed in as a key with a value."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for layer in changed.layers:
            layer.self_attn.sinks.fill_(5.0)
    logits, cache = changed.run_with_cache(ids, "**")
    assert_close(logits, changed(ids), "watched")
    for i in range(model.num_layers):
        at = f"layers.{i}.self_attn"
        rows = cache[f"{at}.attention_probabilities"].sum(-1)
        assert bool((rows < 1).all())
        assert_close(rows + cache[f"{at}.attention_sink_probability"], torch.ones_like(rows), "watched")


# Formulas.


def test_compressed_blocks_turn_everything_by_their_own_rotary(ids: Tensor):
    """Fault 7: one base for all blocks. Only the compressed table moves compressed blocks, only
    the main one the sliding block.
    """
    config = fault_config()
    names = [
        "**.attention_queries",
        "**.attention_keys",
        "**.compressed_entries",
        "**.indexer_queries",
        "**.indexer_keys",
    ]
    base = Dsv4.from_config(config, seed=1)
    for kind in ("main", "compress"):
        ropes = {k: dict(v) for k, v in config.rope_parameters.items()}
        ropes[kind]["rope_theta"] *= 3
        other = Dsv4.from_config(fault_config(rope_parameters=ropes), seed=1)
        for i, layer_type in enumerate(config.layer_types):
            streams = torch.randn(1, TOKENS, 4, 32)
            own = [n for n in names_of(base, {n.rsplit(".", 1)[-1] for n in names}) if n.startswith(f"layers.{i}.")]
            _, before = base.run_with_cache(streams, own, input_ids=ids[:1], start_at_layer=i, stop_at_layer=i + 1)
            _, after = other.run_with_cache(streams, own, input_ids=ids[:1], start_at_layer=i, stop_at_layer=i + 1)
            assert len(own) == {SLIDING: 2, HCA: 3, CSA: 5}[layer_type]
            for name in own:
                moved = not torch.equal(before[name], after[name])
                assert moved == ((kind == "main") == (layer_type == SLIDING)), f"{kind} and {name}"


def test_scores_are_products_times_the_head_widths_root(model: Dsv4, ids: Tensor):
    """Fault 8: YaRN's magnitude on the softmax scale."""
    leaves = ("attention_queries", "attention_keys", "attention_scores")
    _, cache = model.run_with_cache(ids, names_of(model, leaves))
    for i in range(model.num_layers):
        queries, keys, scores = (cache[f"layers.{i}.self_attn.{leaf}"] for leaf in leaves)
        products = queries @ keys.transpose(-1, -2) * model.head_dim**-0.5
        seen = scores.isfinite()
        assert_close(scores[seen], products[seen], "watched")


def test_head_outputs_are_turned_back(model: Dsv4, ids: Tensor):
    """Fault 10. At the first token there is nothing to turn; the unturned channels are never
    touched.
    """
    leaves = ("attention_probabilities", "attention_values", "attention_head_outputs")
    _, cache = model.run_with_cache(ids, names_of(model, leaves))
    plain = model.head_dim - model.config.qk_rope_head_dim
    for i in range(model.num_layers):
        probabilities, values, outputs = (cache[f"layers.{i}.self_attn.{leaf}"] for leaf in leaves)
        mixed = (probabilities @ values).transpose(1, 2)
        assert_close(outputs[:, 0], mixed[:, 0], "watched")
        assert_close(outputs[..., :plain], mixed[..., :plain], "watched")
        assert (outputs[:, 5, :, plain:] - mixed[:, 5, :, plain:]).abs().max() > 1e-2
        assert_close(outputs.norm(dim=-1), mixed.norm(dim=-1), "watched")


def test_queries_have_unit_root_mean_square_per_head(model: Dsv4, ids: Tensor):
    """Fault 16: left out, on the wrong axis, or with a weight."""
    leaves = (
        "attention_queries_unrotated",
        "attention_keys_unrotated",
        "attention_query_latent",
        "attention_norm_output",
    )
    _, cache = model.run_with_cache(ids, names_of(model, leaves))
    for i, layer in enumerate(model.layers):
        at, attention = f"layers.{i}.self_attn", layer.self_attn
        rms = cache[f"{at}.attention_queries_unrotated"].square().mean(-1).sqrt()
        assert_close(rms, torch.ones_like(rms), "queries")
        x = cache[f"layers.{i}.attention_norm_output"]
        latent = rms_norm(attention.q_a_proj(x), attention.q_a_norm.weight, 1e-6)
        assert_close(cache[f"{at}.attention_query_latent"], latent, "watched")
        keys = rms_norm(attention.kv_proj(x), attention.kv_norm.weight, 1e-6)
        assert_close(cache[f"{at}.attention_keys_unrotated"].squeeze(1), keys, "watched")


def test_indexer_scores_and_picks(ids: Tensor):
    """Fault 20: no ReLU, a mean, a missing scale. One head's weights are turned negative."""
    model = Dsv4.from_config(fault_config(), seed=4)
    with torch.no_grad():
        for i in layers_of(model, CSA):
            model.layers[i].self_attn.compressor.indexer.scorer.weights_proj.weight[0].abs_().neg_()
    _, cache = model.run_with_cache(ids, "**")
    for i in layers_of(model, CSA):
        at = f"layers.{i}.self_attn.compressor.indexer"
        queries, keys = (
            cache[f"{at}.indexer_queries"].double(),
            cache[f"{at}.indexer_keys"].double(),
        )
        weights = model.get_submodule(f"{at}.scorer").weights_proj.weight.double() @ cache[
            f"layers.{i}.attention_norm_output"
        ].double().transpose(1, 2)
        weights = weights.transpose(1, 2) * 8**-0.5
        scores = torch.einsum("bsh,bshe->bse", weights, torch.einsum("bshd,bed->bshe", queries, keys).relu() * 8**-0.5)
        closed = torch.arange(TOKENS // 4) < (torch.arange(TOKENS)[:, None] + 1) // 4
        scores = scores.masked_fill(~closed, -torch.inf)
        assert_close(cache[f"{at}.indexer_scores"], scores, "watched")
        for picked, row in zip(
            cache[f"{at}.indexer_selection"].flatten(0, 1).tolist(),
            scores.flatten(0, 1).tolist(),
            strict=True,
        ):
            best = sorted(range(len(row)), key=lambda e: (-row[e], e))[:2]
            assert picked == [e if row[e] > -torch.inf else -1 for e in best]


def test_routing_weights_ignore_the_bias_and_sum_to_the_factor(ids: Tensor):
    """Fault 35."""
    model = Dsv4.from_config(fault_config(routed_scaling_factor=2.5), seed=5)
    with torch.no_grad():
        for i in (2, 3):
            model.layers[i].mlp.router.e_score_correction_bias[5] = 10.0
    _, cache = model.run_with_cache(ids, "**")
    for i in range(4):
        indices, weights, scores = (cache[f"layers.{i}.mlp.{leaf}"] for leaf in ("expert_indices", "expert_weights", "router_scores"))
        assert_close(weights.sum(-1), torch.full_like(weights[..., 0], 2.5), "watched")
        chosen = scores.gather(-1, indices)
        assert_close(weights, 2.5 * chosen / chosen.sum(-1, keepdim=True), "watched")
        if i >= 2:
            assert bool((indices == 5).any(-1).all())
        else:
            assert torch.equal(indices, model.layers[i].mlp.router.tid2eid[ids])


def test_the_readout_weighs_all_streams(model: Dsv4, ids: Tensor):
    """Fault 14: the merge missing, or taking one stream."""
    logits = model(ids)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.hc_head.hc_fn.mul_(3)
    assert (changed(ids) - logits).abs().max() > 1e-2
    last = f"layers.{model.num_layers - 1}.layer_output"
    permuted = model.run_with_hooks(ids, [(last, lambda x, hook: x[:, :, [2, 0, 3, 1]])])
    assert (permuted - logits).abs().max() > 1e-2
    for stream in range(4):

        def only(x: Tensor, hook, stream=stream) -> Tensor:
            return x * torch.eye(4)[stream].view(1, 1, 4, 1)

        assert (model.run_with_hooks(ids, [(last, only)]) - logits).abs().max() > 1e-2


def test_the_routing_weight_comes_after_the_down_projection(model: Dsv4, ids: Tensor):
    """Fault 40: one order everywhere; neurons never contain the weight."""
    _, cache = model.run_with_cache(ids, "**")
    for i, layer in enumerate(model.layers):
        neurons, indices, weights, outputs = (
            cache[f"layers.{i}.mlp.{leaf}"] for leaf in ("expert_neurons", "expert_indices", "expert_weights", "expert_outputs")
        )
        down = torch.einsum("bski,bskhi->bskh", neurons, layer.mlp.experts.down_proj[indices])
        assert_close(outputs, down * weights[..., None], "watched")


# Routers at the ends of float32.


@pytest.mark.parametrize("logit", [-1e4, -300.0, -206.0, -200.0, -180.0, -150.0, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4])
@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_router_logits_of_any_size(model: Dsv4, ids: Tensor, logit: float, spread: float):
    """Fault 34: values and gradients stay finite, on hash blocks too."""
    parameters = list(model.parameters())
    out = model.run_with_hooks(ids, [("**.router_logits", lambda x, hook: spread * x + logit)])
    assert bool(out.isfinite().all())
    for gradient in torch.autograd.grad(out.square().mean(), parameters, allow_unused=True):
        assert gradient is None or bool(gradient.isfinite().all())


# Ids, tables and embeddings.


def test_hash_blocks_need_ids(model: Dsv4, ids: Tensor):
    """Fault 37: embeddings alone crash deep inside, or route every token as token 0."""
    embeddings = model.embed_tokens(ids)
    assert torch.equal(model(ids, inputs_embeds=embeddings), model(ids))
    assert torch.equal(model(inputs_embeds=embeddings, input_ids=ids), model(ids))
    with pytest.raises(ValueError, match=r"\[0, 1\].*hash_moe"):
        model(inputs_embeds=embeddings)
    free = Dsv4.from_config(fault_config(mlp_layer_types=(MOE,) * 4, num_hash_layers=0), seed=1)
    assert torch.equal(free(inputs_embeds=free.embed_tokens(ids)), free(ids))


def test_edited_embeddings_do_not_reroute(model: Dsv4, ids: Tensor):
    hooks = [("token_embeddings", lambda x, hook: torch.randn_like(x))]
    with model.hooks(hooks):
        _, cache = model.run_with_cache(ids, "**.expert_indices")
    for i in (0, 1):
        assert torch.equal(cache[f"layers.{i}.mlp.expert_indices"], model.layers[i].mlp.router.tid2eid[ids])


@pytest.mark.parametrize("wrong", [64, -1, 2**40])
def test_ids_outside_the_vocabulary(model: Dsv4, ids: Tensor, wrong: int):
    """Fault 38."""
    bad = ids.clone()
    bad[1, 3] = wrong
    with pytest.raises(ValueError, match=rf"token id {wrong} at \[1, 3\].*< 64"):
        model(bad)


def test_the_hash_table_survives(model: Dsv4, ids: Tensor):
    """Fault 38: casts, copies, state dicts. It stays int64 and equal; a missing, floating or wild
    table is refused.
    """
    table = model.layers[0].mlp.router.tid2eid
    name = "layers.0.mlp.router.tid2eid"
    for other in (
        copy.deepcopy(model).half(),
        copy.deepcopy(model).to(torch.bfloat16),
        copy.deepcopy(model).double(),
    ):
        assert other.layers[0].mlp.router.tid2eid.dtype == torch.int64
        assert torch.equal(other.layers[0].mlp.router.tid2eid, table)
    state = model.state_dict()
    assert torch.equal(state[name], table)
    fresh = Dsv4.from_config(model.config, seed=99)
    with pytest.raises(RuntimeError, match=name):
        fresh.load_state_dict({k: v for k, v in state.items() if k != name})
    for wrong in (state[name].float(), state[name] + 8, state[name] - 8):
        with pytest.raises(ValueError, match=name):
            fresh.load_state_dict(state | {name: wrong})


def test_forms_of_the_ids(model: Dsv4, ids: Tensor):
    expected = model(ids)
    strided = ids.t().contiguous().t()
    assert not strided.is_contiguous()
    every_other = torch.stack((ids, ids), dim=-1)[..., 0]
    for form in (
        strided,
        every_other,
        ids.int(),
        ids.short(),
        ids.to(torch.uint8),
        ids.tolist(),
        tuple(map(tuple, ids.tolist())),
    ):
        assert torch.equal(model(form), expected)
    one = model(ids[0])
    assert one.shape == (1, TOKENS, 64)
    assert torch.equal(model(ids[0].tolist()), one)
    for wrong in (ids.float(), ids.bool(), ids > 3):
        with pytest.raises(TypeError, match="integers"):
            model(wrong)
    for empty in (ids[:, :0], ids[:0], []):
        with pytest.raises(ValueError, match=r"empty|token ids"):
            model(empty)


def test_positions_are_not_taken(model: Dsv4, ids: Tensor):
    """Fault 5: positions from outside open future windows. They follow the mask; there is no
    argument for them.
    """
    with pytest.raises(TypeError, match="position_ids"):
        model(ids, position_ids=torch.arange(TOKENS)[None])
