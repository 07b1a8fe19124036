"""Faults that other implementations of this model had, and kinds of fault near them, on a model of one block of each kind.

Held elsewhere: padding (test_padding), rotary pairs, tables and magnitude (test_kernels_norm_rotary), Sinkhorn's order, rounds
and eps (test_kernels_hyper_connection), underflow of the scores (test_kernels_numeric), ties (test_kernels_*), everything that
moves a logit (test_parity, test_golden).
"""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor

from dsv4 import Dsv4
from dsv4.config import CSA, HASH_MOE, HCA, MOE, SLIDING
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
        assert cache[f"layers.{i}.self_attn.compressor.indexer.indexer_selection"].shape == (3, tokens, 0)
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
        else:
            assert bool(seen.any())


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
    """Fault 7: one base for all blocks. Only the compressed table moves compressed blocks, only the main one the sliding block."""
    config = fault_config()
    names = ["**.attention_queries", "**.attention_keys", "**.compressed_entries", "**.indexer_queries", "**.indexer_keys"]
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
    """Fault 10. At the first token there is nothing to turn; the unturned channels are never touched."""
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
    leaves = ("attention_queries_unrotated", "attention_keys_unrotated", "attention_query_latent", "attention_norm_output")
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
        queries, keys = cache[f"{at}.indexer_queries"].double(), cache[f"{at}.indexer_keys"].double()
        weights = model.get_submodule(f"{at}.scorer").weights_proj.weight.double() @ cache[f"layers.{i}.attention_norm_output"].double().transpose(1, 2)
        weights = weights.transpose(1, 2) * 8**-0.5
        scores = torch.einsum("bsh,bshe->bse", weights, torch.einsum("bshd,bed->bshe", queries, keys).relu() * 8**-0.5)
        closed = torch.arange(TOKENS // 4) < (torch.arange(TOKENS)[:, None] + 1) // 4
        scores = scores.masked_fill(~closed, -torch.inf)
        assert_close(cache[f"{at}.indexer_scores"], scores, "watched")
        for picked, row in zip(cache[f"{at}.indexer_selection"].flatten(0, 1).tolist(), scores.flatten(0, 1).tolist(), strict=True):
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
    """Fault 38: casts, copies, state dicts. It stays int64 and equal; a missing, floating or wild table is refused."""
    table = model.layers[0].mlp.router.tid2eid
    name = "layers.0.mlp.router.tid2eid"
    for other in (copy.deepcopy(model).half(), copy.deepcopy(model).to(torch.bfloat16), copy.deepcopy(model).double()):
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
    for form in (strided, every_other, ids.int(), ids.short(), ids.to(torch.uint8), ids.tolist(), tuple(map(tuple, ids.tolist()))):
        assert torch.equal(model(form), expected)
    one = model(ids[0])
    assert one.shape == (1, TOKENS, 64)
    assert torch.equal(model(ids[0].tolist()), one)
    for wrong in (ids.float(), ids.bool(), ids > 3):
        with pytest.raises(TypeError, match="integers"):
            model(wrong)
    for empty in (ids[:, :0], ids[:0], []):
        with pytest.raises(ValueError, match="empty|token ids"):
            model(empty)


def test_positions_are_not_taken(model: Dsv4, ids: Tensor):
    """Fault 5: positions from outside open future windows. They follow the mask; there is no argument for them."""
    with pytest.raises(TypeError, match="position_ids"):
        model(ids, position_ids=torch.arange(TOKENS)[None])


# Rows are independent, runs leave nothing behind.


def test_rows_do_not_hear_each_other(model: Dsv4, ids: Tensor):
    logits = model(ids)
    for row in range(3):
        assert_close(logits[row][None], model(ids[row][None]), "watched")
    order = [2, 0, 1]
    assert_close(model(ids[order]), logits[order], "watched")
    other = ids.clone()
    other[1] = (other[1] + 9) % 64
    assert_close(model(other)[[0, 2]], logits[[0, 2]], "watched")


def test_runs_leave_nothing_behind(model: Dsv4, ids: Tensor):
    """Fault 31: A, B, A with other lengths, a run that raised half-way, training in between."""
    first = model(ids)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model(ids[:1, :3])
    model(ids[:2, :17])
    assert torch.equal(model(ids), first)

    def fail(value, hook):
        raise KeyError("on purpose")

    with pytest.raises(KeyError, match="on purpose"):
        model.run_with_hooks(ids, [("layers.2.mlp.expert_weights", fail)])
    assert torch.equal(model(ids), first)
    torch.autograd.grad(model(ids).sum(), model.embed_tokens.weight)
    model.train()
    assert torch.equal(model(ids), first)
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(ids), first)
    with torch.inference_mode():
        assert torch.equal(model(ids), first)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_training_after_a_first_run_in_inference_mode(ids: Tensor):
    """Fault 100: what is made at the first use must not be an inference tensor."""
    fresh = Dsv4.from_config(fault_config(), seed=3)
    with torch.inference_mode():
        fresh(ids)
        fresh.run_with_cache(ids, "**")
    fresh(ids).square().mean().backward()
    assert fresh.embed_tokens.weight.grad.abs().max() > 0


def test_copies_and_pickles(model: Dsv4, ids: Tensor):
    expected = model(ids)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    loaded = Dsv4.from_config(model.config, seed=77)
    assert not torch.equal(loaded(ids), expected)
    loaded.load_state_dict(model.state_dict())
    assigned = Dsv4.from_config(model.config, seed=78)
    assigned.load_state_dict(model.state_dict(), assign=True)
    for other in (*copies, loaded, assigned):
        assert torch.equal(other(ids), expected)
        assert_close(other.run_with_cache(ids, "**")[0], expected, "watched")
    for other in copies:
        with torch.no_grad():
            other.embed_tokens.weight.zero_()
            other.layers[1].self_attn.sinks.zero_()
    assert torch.equal(model(ids), expected)


def test_a_copy_has_its_own_hooks(model: Dsv4, ids: Tensor):
    expected = model(ids)
    other = copy.deepcopy(model)
    other.add_hook("layers.1.layer_output", lambda x, hook: x * 0)
    assert torch.equal(model(ids), expected)
    assert not torch.equal(other(ids), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_default_dtype_changes_nothing(model: Dsv4, ids: Tensor, dtype):
    expected, watched = model(ids), model.run_with_cache(ids, "**")[0]
    torch.set_default_dtype(dtype)
    try:
        built = Dsv4.from_config(fault_config(), seed=21)
        results = [model(ids), built(ids), model.run_with_cache(ids, "**")[0]]
        padded = model(ids, attention_mask=torch.ones(3, TOKENS))
    finally:
        torch.set_default_dtype(torch.float32)
    assert {t.dtype for t in built.state_dict().values()} == {torch.float32, torch.int64}
    for result, other in zip((*results, padded), (expected, expected, watched, expected), strict=True):
        assert torch.equal(result, other)


def test_the_default_device_changes_nothing(model: Dsv4, ids: Tensor):
    expected, watched = model(ids), model.run_with_cache(ids, "**")[0]
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    padded = model(ids, attention_mask=mask)
    with torch.device("meta"):
        results = [model(ids), model(ids.tolist()), model.run_with_cache(ids, "**")[0]]
        masked = [model(ids, attention_mask=mask), model(ids.tolist(), attention_mask=mask.tolist())]
    for result, other in zip((*results, *masked), (expected, expected, watched, padded, padded), strict=True):
        assert torch.equal(result, other)


def test_the_global_seed_is_not_touched(ids: Tensor):
    state = torch.get_rng_state()
    built = Dsv4.from_config(fault_config(), seed=21)
    built(ids)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(built.lm_head.weight, Dsv4.from_config(fault_config(), seed=21).lm_head.weight)


# Sizes at their ends.


EDGES = {
    "window 1": {"sliding_window": 1},
    "rates longer than the input": {"compress_rates": {CSA: 100, HCA: 100}},
    "rate 1": {"compress_rates": {CSA: 1, HCA: 1}},
    "every expert": {"num_experts_per_tok": 8},
    "one expert": {"n_routed_experts": 1, "num_experts_per_tok": 1},
    "a group for every head": {"o_groups": 4},
    "one head": {"num_attention_heads": 1, "o_groups": 1},
    "rotary over the whole head": {"head_dim": 8},
    "one stream": {"hc_mult": 1},
    "hash everywhere": {"mlp_layer_types": (HASH_MOE,) * 4, "num_hash_layers": 4},
    "widths of one": {"o_lora_rank": 1, "q_lora_rank": 1, "moe_intermediate_size": 1},
    "a hidden size of one": {"hidden_size": 1},
    "a vocabulary of one": {"vocab_size": 1},
}


@pytest.mark.parametrize("edge", EDGES)
def test_edges_run_watched_and_backwards(edge: str):
    model = Dsv4.from_config(fault_config(**EDGES[edge]), seed=8)
    ids = random_ids(model.config, 2, 21)
    logits, cache = model.run_with_cache(ids, "**")
    assert_close(logits, model(ids), "watched")
    for name, value in cache.items():
        assert not (value.is_floating_point() and bool(value.isnan().any())), name
    for gradient in torch.autograd.grad(model(ids).square().mean(), list(model.parameters()), allow_unused=True):
        assert gradient is None or bool(gradient.isfinite().all())


def test_three_thousand_tokens(model: Dsv4):
    """Far positions: a prefix is still the same, and padding still is none."""
    far = random_ids(model.config, 1, 3000, 5)
    with torch.no_grad():
        logits = model(far)
        assert bool(logits.isfinite().all())
        assert_close(model(far[:, :1500]), logits[:, :1500], "far prefix")


# Gradients.


def test_only_the_indexer_has_no_gradient(model: Dsv4, ids: Tensor):
    """Fault 52: six tensors of each CSA block, since the pick is not differentiable; with no entry yet, every compressor's too."""
    names = [name for name, _ in model.named_parameters()]

    def without(tokens: int) -> set[str]:
        grads = torch.autograd.grad(model(ids[:, :tokens]).square().mean(), list(model.parameters()), allow_unused=True)
        assert all(g is None or bool(g.isfinite().all()) for g in grads)
        return {name for name, g in zip(names, grads, strict=True) if g is None}

    indexer = {name for name in names if ".indexer." in name}
    assert len(indexer) == 6 * len(layers_of(model, CSA))
    assert without(TOKENS) == indexer
    assert without(3) == {name for name in names if ".compressor." in name}


def test_watching_everything_gives_the_indexer_no_gradient_either(model: Dsv4, ids: Tensor):
    out, _ = model.run_with_cache(ids, "**", detach=False)
    names = [name for name, _ in model.named_parameters()]
    grads = torch.autograd.grad(out.square().mean(), list(model.parameters()), allow_unused=True)
    assert {name for name, g in zip(names, grads, strict=True) if g is None} == {name for name in names if ".indexer." in name}
