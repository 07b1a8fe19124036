"""The ten identities of the values, on every kind of block, from what a run returns."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import dsv4
from dsv4 import Dsv4
from dsv4.kernels.norm_rotary import rotate_back
from dsv4.testing_probes import (
    CHOOSING,
    changed,
    expected_shape,
    leaf,
    names_of,
    padded_batch,
    watched_model,
    writable,
)

KINDS = {
    "as it is": {},
    "one round, two streams": {"hc_sinkhorn_iters": 1, "hc_mult": 2},
    "twenty rounds, everything selected": {"hc_sinkhorn_iters": 20, "index_topk": 64},
    "three groups, clamp bites": {
        "num_attention_heads": 6,
        "o_groups": 3,
        "swiglu_limit": 0.5,
        "num_experts_per_tok": 3,
    },
}
LAYERS = range(6)


@pytest.fixture(scope="module", params=KINDS)
def seen(request):
    """(model, logits, every value, real tokens) of a padded batch."""
    model = watched_model(seed=1, **KINDS[request.param])
    ids, mask = padded_batch(model.vocab_size)
    with torch.no_grad():
        logits, cache = model.run_with_cache(ids, "**", attention_mask=mask)
    return model, logits, cache, mask.bool()


def block(cache, layer, *names):
    return tuple(cache[name, layer] for name in names)


def close(actual, expected, limit=1e-5):
    """Within limit of the largest expected value."""
    assert actual.shape == expected.shape
    error = (actual - expected).abs().max() if actual.numel() else torch.tensor(0.0)
    size = expected.abs().max() if actual.numel() else 1.0
    assert error <= limit * size, f"{error / size:.2e}"


@pytest.mark.parametrize("layer", LAYERS)
def test_1_the_block_is_its_formula(seen, layer):
    _, _, cache, _ = seen
    x, mid, out = block(cache, layer, "layer_input", "layer_mid", "layer_output")
    comb, post, attention = block(cache, layer, "attention_comb", "attention_post", "attention_output")
    close(comb.mT @ x + post[..., None] * attention[..., None, :], mid)
    comb, post, mixture = block(cache, layer, "mlp_comb", "mlp_post", "mlp_output")
    close(comb.mT @ mid + post[..., None] * mixture[..., None, :], out)
    if layer + 1 < len(LAYERS):
        assert torch.equal(out, cache["layer_input", layer + 1])
    for site, streams in (("attention", x), ("mlp", mid)):
        pre, collapsed = block(cache, layer, f"{site}_pre", f"{site}_collapsed")
        close((pre[..., None] * streams).sum(2), collapsed)
        assert ((cache[f"{site}_post", layer] > 0) & (cache[f"{site}_post", layer] < 2)).all()


@pytest.mark.parametrize("layer", LAYERS)
def test_2_columns_of_comb_sum_to_one_and_the_stream_mean_follows(seen, layer):
    model, _, cache, _ = seen
    for site, before, after, added in (
        ("attention", "layer_input", "layer_mid", "attention_output"),
        ("mlp", "layer_mid", "layer_output", "mlp_output"),
    ):
        comb, post, rounds, start = block(cache, layer, f"{site}_comb", f"{site}_post", f"{site}_sinkhorn", f"{site}_comb_start")
        assert (comb.sum(-2) - 1).abs().max() <= 1e-4
        x, y, out = block(cache, layer, before, after, added)
        mean = (comb.sum(-1)[..., None] * x).mean(2) + post.mean(-1, keepdim=True) * out
        close(mean, y.mean(2))
        if model.config.hc_sinkhorn_iters == 20:
            assert (x.mean(2) + post.mean(-1, keepdim=True) * out - y.mean(2)).abs().max() <= 1e-3 * y.abs().max()
        # The rounds: columns first, then (row, column) pairs; the last is comb.
        eps = model.config.hc_eps
        step = start / (start.sum(-2, keepdim=True) + eps)
        for t in range(model.config.hc_sinkhorn_iters):
            close(rounds[:, :, t], step)
            step = step / (step.sum(-1, keepdim=True) + eps)
            step = step / (step.sum(-2, keepdim=True) + eps)
        assert torch.equal(rounds[:, :, -1], comb)


def test_3_the_lens_on_the_last_block_is_the_logits(seen):
    model, logits, cache, _ = seen
    with torch.no_grad():
        lens = model.project_on_vocab(cache["layer_output", 5])
        assert torch.equal(lens, logits)
        assert torch.equal(model.project_on_vocab(cache["readout"]), logits)
    assert torch.equal(cache["logits"], logits)
    assert torch.equal(cache["lm_head_output"], logits)
    last = torch.tensor([18, 18])
    close(cache["next_token_probs"], logits[torch.arange(2), last].softmax(-1))
    close((cache["readout_weights"][..., None] * cache["layer_output", 5]).sum(2), cache["readout"])


@pytest.mark.parametrize("layer", LAYERS)
def test_4_the_mixture(seen, layer):
    model, _, cache, _ = seen
    mlp, config = model.layers[layer].mlp, model.config
    raw, scores, indices, weights = block(cache, layer, "router_logits", "router_scores", "expert_indices", "expert_weights")
    close(F.softplus(raw).sqrt(), scores)
    chosen = scores.gather(-1, indices)
    close(chosen / chosen.sum(-1, keepdim=True) * config.routed_scaling_factor, weights)
    if mlp.scoring == "hash":
        assert torch.equal(indices, mlp.router.tid2eid[cache["input_ids"]])
    else:
        close(scores + mlp.router.e_score_correction_bias, cache["router_selection_scores", layer])
        assert torch.equal(
            cache["router_selection_scores", layer].topk(config.num_experts_per_tok).indices,
            indices,
        )
    routed, shared, out, slots = block(cache, layer, "routed_output", "shared_expert_output", "mlp_output", "expert_outputs")
    close(routed + shared, out)
    close(slots.sum(2), routed)
    x, gate, up, active, neurons = block(cache, layer, "mlp_input", "expert_gate", "expert_up", "expert_activation", "expert_neurons")
    limit = config.swiglu_limit
    matrices = mlp.experts.gate_up_proj[indices]
    close(torch.einsum("bsh,bskoh->bsko", x, matrices), torch.cat((gate, up), dim=-1))
    close(F.silu(gate.clamp(max=limit)), active)
    close(active * up.clamp(-limit, limit), neurons)
    close(
        torch.einsum("bski,bskhi->bskh", neurons, mlp.experts.down_proj[indices]) * weights[..., None],
        slots,
    )
    gate, up, active, neurons = block(cache, layer, "mlp_gate", "mlp_up", "mlp_activation", "mlp_neurons")
    close(mlp.shared_experts.gate_proj(x), gate)
    close(F.silu(gate.clamp(max=limit)), active)
    close(active * up.clamp(-limit, limit), neurons)
    close(mlp.shared_experts.down_proj(neurons), shared)


@pytest.mark.parametrize("layer", LAYERS)
def test_5_the_pattern_is_a_softmax_with_a_sink(seen, layer):
    model, _, cache, real = seen
    attention = model.layers[layer].self_attn
    scores, sinks, pattern, on_sink = block(
        cache,
        layer,
        "attention_scores",
        "attention_sink_logits",
        "attention_probabilities",
        "attention_sink_probability",
    )
    full = torch.cat((scores, sinks[..., None]), dim=-1).softmax(-1)
    close(full[..., :-1], pattern)
    close(full[..., -1], on_sink)
    assert (pattern.sum(-1) < 1).all()
    close(pattern.sum(-1) + on_sink, torch.ones_like(on_sink))
    queries, keys, values, heads = block(
        cache,
        layer,
        "attention_queries",
        "attention_keys",
        "attention_values",
        "attention_head_outputs",
    )
    seen_keys = ~scores.isinf()
    products = queries @ keys.mT * model.head_dim**-0.5
    close(products[seen_keys], scores[seen_keys])
    cos, sin = model.rotary[attention.rope_kind](cache.positions)
    close(rotate_back((pattern @ values).transpose(1, 2), cos.unsqueeze(2), sin.unsqueeze(2)), heads)
    assert torch.equal(heads.flatten(2), cache["attention_premix", layer])
    assert torch.equal(sinks, attention.sinks[None, :, None].expand_as(sinks))
    # A query sees the window of tokens and the entries that are closed, counted from the row's first real token.
    places = cache["attention_key_positions", layer]
    at, key = cache.positions[:, :, None], places[:, None, :19]
    expected = (key >= 0) & (key <= at) & (key > at - model.config.sliding_window)
    assert torch.equal(seen_keys[:, 0, :, :19], expected)
    assert torch.equal(places[:, :19], cache.positions)
    assert (keys[:, 0][places < 0] == 0).all()
    rate = model.config.rate(layer)
    if rate is not None:
        entries = cache["compressed_entries", layer]
        assert torch.equal(keys[:, 0, 19:][places[:, 19:] >= 0], entries[places[:, 19:] >= 0])
        counts = real.sum(1) // rate
        assert places[:, 19:].tolist() == [[w * rate if w < n else -1 for w in range(19 // rate)] for n in counts.tolist()]
        closed = (places[:, None, 19:] >= 0) & (places[:, None, 19:] + rate - 1 <= at)
        assert (seen_keys[:, 0, :, 19:] <= closed).all()


@pytest.mark.parametrize("layer", LAYERS)
def test_6_head_results_sum_to_the_output_and_the_selection_bounds_the_pattern(seen, layer):
    model, _, cache, real = seen
    results, output, pattern = block(cache, layer, "attention_head_results", "attention_output", "attention_probabilities")
    close(results.sum(2), output)
    if model.layer_types[layer] == "compressed_sparse_attention":
        selection = cache["indexer_selection", layer]
        for b, s in real.nonzero().tolist():
            kept = {e for e in selection[b, s].tolist() if e >= 0}
            attended = set(pattern[b, :, s, 19:].sum(0).nonzero().flatten().tolist())
            assert attended == kept
            scores = cache["indexer_scores", layer][b, s]
            best = scores.sort(descending=True, stable=True).indices[: selection.shape[-1]].tolist()
            assert selection[b, s].tolist() == [e if scores[e] > float("-inf") else -1 for e in best]
        heads, weights = block(cache, layer, "indexer_head_scores", "indexer_head_weights")
        combined = (heads * weights[..., None]).sum(2)
        finite = ~cache["indexer_scores", layer].isinf()
        close(cache["indexer_scores", layer][finite], combined[finite])


@pytest.mark.parametrize("layer", [None, *LAYERS])
def test_7_and_8_replacing(layer):
    """A value by itself: the run in which it is read, bit for bit. By another: that is what is cached, and it is felt."""
    model = watched_model()
    ids, mask = padded_batch(model.vocab_size)
    real = mask.bool()
    with torch.no_grad():
        plain = model(ids, attention_mask=mask)
        for name in names_of(model, layer):
            logits, cache = model.run_with_cache(ids, name, attention_mask=mask)
            value = cache[name]
            assert value.shape == expected_shape(model, name, 2, 19), name
            assert (logits - plain)[real].abs().max() <= 1e-5 * plain.abs().max(), name
            if name not in writable(model):
                continue
            same = model.run_with_hooks(ids, [(name, lambda v, hook, value=value: value)], attention_mask=mask)
            assert torch.equal(same, logits), name
            with model.hooks([(name, changed)]):
                edited, after = model.run_with_cache(ids, name, attention_mask=mask)
            assert torch.equal(after[name], changed(value, model.hook_dict[name])), name
            assert edited[real].isfinite().all(), name
            assert (edited - plain)[real].abs().max() > 0, name


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("seq", "padding", "rows"), [(1, 0, 1), (3, 1, 2), (5, 0, 1), (80, 7, 2)])
def test_7_and_8_at_other_lengths(dtype, seq, padding, rows):
    """One token, no entry yet, and so many entries that the selected ones are gathered."""
    model = watched_model(dtype)
    ids, mask = (x[:rows] for x in padded_batch(model.vocab_size, seq, padding))
    entries = seq // 4
    with torch.no_grad():
        plain = model(ids, attention_mask=mask)
        for name in writable(model):
            logits, cache = model.run_with_cache(ids, name, attention_mask=mask)
            value = cache[name]
            assert value.shape == expected_shape(model, name, rows, seq), name
            for fn in (lambda v, hook, value=value: value, lambda v, hook: None):
                assert torch.equal(model.run_with_hooks(ids, [(name, fn)], attention_mask=mask), logits), name
            edited = model.run_with_hooks(ids, [(name, changed)], attention_mask=mask)
            decides_nothing = leaf(name) in CHOOSING and name.count("indexer") and entries <= model.config.index_topk
            # The streams of block 0 are equal, and every mixing of equal streams is the same.
            mixes_equals = name.startswith("layers.0.attention_comb")
            if value.numel() and not decides_nothing and not mixes_equals:
                assert not torch.equal(edited[mask.bool()], plain[mask.bool()]), name


def test_8_what_comes_after_is_what_a_run_with_that_value_gives():
    """Edits whose effect is known from elsewhere."""
    model = watched_model()
    ids, mask = padded_batch(model.vocab_size)
    other = torch.roll(ids, 1, dims=1)
    keys = {"attention_mask": mask}
    with torch.no_grad():
        # Streams of another document: the logits of that document, but for the hash blocks, which see ids.
        _, cache = model.run_with_cache(other, "layers.3.layer_input", **keys)
        patched = model.run_with_hooks(ids, [("layers.3.layer_input", lambda v, hook: cache[hook.name])], **keys)
        assert torch.equal(patched, model(other, **keys))
        # Embeddings never decide the routing.
        with model.hooks([("token_embeddings", changed)]):
            _, edited = model.run_with_cache(ids, "layers.0.mlp.expert_indices", **keys)
        _, plain = model.run_with_cache(
            ids,
            [
                "layers.*.mlp.expert_indices",
                "layers.*.mlp.expert_weights",
                "layers.*.mlp.router_scores",
            ],
            **keys,
        )
        assert torch.equal(edited["expert_indices", 0], plain["expert_indices", 0])
        embedded = model.run_with_hooks(ids, [("token_embeddings", changed)], **keys)
        vectors = changed(model.embed_tokens(ids), model.hook_dict["token_embeddings"])
        close(model(inputs_embeds=vectors, input_ids=ids, **keys)[mask.bool()], embedded[mask.bool()])
        # An edited pre moves collapsed and neither post nor comb.
        names = [
            "layers.2.mlp_pre",
            "layers.2.mlp_post",
            "layers.2.mlp_comb",
            "layers.2.mlp_collapsed",
            "layers.2.layer_mid",
        ]
        with model.hooks([("layers.2.mlp_pre", changed)]):
            _, after = model.run_with_cache(ids, names, **keys)
        _, before = model.run_with_cache(ids, names, **keys)
        assert torch.equal(after["mlp_post", 2], before["mlp_post", 2])
        assert torch.equal(after["mlp_comb", 2], before["mlp_comb", 2])
        close(
            after["mlp_collapsed", 2],
            (after["mlp_pre", 2][..., None] * after["layer_mid", 2]).sum(2),
        )
        # Logits of a hash block change weights and never indices; elsewhere the selection's scores change who, not how much.
        with model.hooks([("layers.1.mlp.router_logits", changed)]):
            _, after = model.run_with_cache(ids, "layers.1.mlp.*", **keys)
        assert torch.equal(after["expert_indices", 1], plain["expert_indices", 1])
        assert not torch.equal(after["expert_weights", 1], plain["expert_weights", 1])
        with model.hooks([("layers.3.mlp.router_selection_scores", changed)]):
            _, after = model.run_with_cache(ids, "layers.3.mlp.*", **keys)
        assert torch.equal(after["router_scores", 3], plain["router_scores", 3])
        assert not torch.equal(after["expert_indices", 3], plain["expert_indices", 3])
        chosen = after["router_scores", 3].gather(-1, after["expert_indices", 3])
        close(
            after["expert_weights", 3],
            chosen / chosen.sum(-1, keepdim=True) * model.config.routed_scaling_factor,
        )
        # Written indices re-derive the weights from the edited scores.
        for layer in (1, 4):
            name = f"layers.{layer}.mlp"
            with model.hooks(
                [
                    (f"{name}.router_scores", lambda v, hook: v + 1),
                    (f"{name}.expert_indices", changed),
                ]
            ):
                _, after = model.run_with_cache(ids, f"{name}.*", **keys)
            chosen = after["router_scores", layer].gather(-1, after["expert_indices", layer])
            close(
                after["expert_weights", layer],
                chosen / chosen.sum(-1, keepdim=True) * model.config.routed_scaling_factor,
            )
        # Two points in series.
        for first, second in (
            ("mlp_norm_output", "mlp_input"),
            ("self_attn.attention_head_outputs", "self_attn.attention_premix"),
        ):
            with model.hooks([(f"layers.2.{first}", lambda v, hook: v + 1)]):
                _, after = model.run_with_cache(ids, [f"layers.2.{first}", f"layers.2.{second}"], **keys)
            assert torch.equal(after[f"layers.2.{first}"].flatten(2), after[f"layers.2.{second}"])


@pytest.mark.parametrize("layer", [1, 3, 5])
def test_8_scores_go_into_the_softmax_as_they_are(layer):
    model = watched_model()
    ids, _ = padded_batch(model.vocab_size)
    name = f"layers.{layer}.self_attn"
    with torch.no_grad():

        def unmask(scores, hook):
            return torch.zeros_like(scores)

        with model.hooks([(f"{name}.attention_scores", unmask)]):
            _, cache = model.run_with_cache(ids, f"{name}.*")
        keys, sinks = (
            cache["attention_probabilities", layer].shape[-1],
            cache["attention_sink_logits", layer],
        )
        close(cache["attention_probabilities", layer][..., 0], 1 / (keys + sinks.exp()))

        def no_sink(logits, hook):
            return torch.full_like(logits, float("-inf"))

        with model.hooks([(f"{name}.attention_sink_logits", no_sink)]):
            logits, cache = model.run_with_cache(ids, f"{name}.*")
        close(cache["attention_probabilities", layer].sum(-1), torch.ones_like(sinks))
        # A query that sees nothing at all gets zeros, not NaN.
        with model.hooks(
            [
                (f"{name}.attention_sink_logits", no_sink),
                (f"{name}.attention_scores", lambda v, hook: v - float("inf")),
            ]
        ):
            logits, cache = model.run_with_cache(ids, f"{name}.*")
        assert cache["attention_head_outputs", layer].abs().max() == 0
        assert logits.isfinite().all()
        # The sink's share is what it took before the pattern is edited.
        with model.hooks([(f"{name}.attention_probabilities", torch.zeros_like)]):
            _, cache = model.run_with_cache(ids, f"{name}.*")
        assert cache["attention_sink_probability", layer].min() > 0


def test_8_head_results():
    """An edit adds its difference; without one the output is that of the projections."""
    model = watched_model()
    ids, _ = padded_batch(model.vocab_size)
    name, output = (
        "layers.4.self_attn.attention_head_results",
        "layers.4.self_attn.attention_output",
    )
    with torch.no_grad():
        _, plain = model.run_with_cache(ids, [name, output])

        def without_head(results, hook):
            results[:, :, 1] = 0

        with model.hooks([(name, without_head)]):
            _, cache = model.run_with_cache(ids, output)
        close(cache[output], plain[output] - plain[name][:, :, 1])
        low_rank = "layers.4.self_attn.attention_low_rank_output"
        with model.hooks([(low_rank, torch.zeros_like)]):
            _, cache = model.run_with_cache(ids, [name, output])
        # Computed from the premix: an edit behind it is not seen in them.
        assert torch.equal(cache[name], plain[name])
        assert cache[output].abs().max() == 0
        premix = "layers.4.self_attn.attention_premix"
        with model.hooks([(premix, torch.zeros_like)]):
            _, cache = model.run_with_cache(ids, [name, output])
        assert cache[name].abs().max() == cache[output].abs().max() == 0


@pytest.mark.parametrize("layer", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_9_a_slot_without_weight_is_an_expert_that_says_nothing(layer, dtype):
    model, muted = (watched_model(dtype) for _ in range(2))
    ids, mask = padded_batch(model.vocab_size)
    with torch.no_grad():
        _, cache = model.run_with_cache(ids, f"layers.{layer}.mlp.expert_indices", attention_mask=mask)
        indices = cache["expert_indices", layer]
        expert = int(indices[0, -1, 0])
        muted.layers[layer].mlp.experts.down_proj[expert] = 0
        ablated = model.run_with_hooks(
            ids,
            [
                (
                    f"layers.{layer}.mlp.expert_weights",
                    lambda w, hook: w.masked_fill(indices == expert, 0),
                )
            ],
            attention_mask=mask,
        )
        close(ablated.float(), muted(ids, attention_mask=mask).float())
        assert not torch.equal(ablated, model(ids, attention_mask=mask))


def test_10_reading_everything_changes_no_logit(seen):
    model, logits, _, real = seen
    ids, mask = padded_batch(model.vocab_size)
    with torch.no_grad():
        close(logits[real], model(ids, attention_mask=mask)[real])


@pytest.mark.parametrize("seed", range(3))
def test_6_and_10_in_bfloat16(seed):
    model, exact = watched_model(torch.bfloat16, seed), watched_model(torch.float32, seed)
    exact.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in model.state_dict().items()})
    ids, mask = padded_batch(model.vocab_size, 40)
    real = mask.bool()
    choices = ["**.expert_indices", "**.indexer_selection"]
    with torch.no_grad():
        plain, chosen = model.run_with_cache(ids, choices, attention_mask=mask)
        logits, cache = model.run_with_cache(ids, "**", attention_mask=mask)
        frozen = [(n, lambda v, hook: chosen[hook.name]) for n in chosen]
        error = (plain - exact.run_with_hooks(ids, frozen, attention_mask=mask))[real].abs().max()
    for name in chosen:
        assert torch.equal(chosen[name][real], cache[name][real]), name
    assert (logits - plain)[real].abs().max() <= 2 * error
    for layer in LAYERS:
        results, output = block(cache, layer, "attention_head_results", "attention_output")
        assert results.dtype == torch.float32
        # One rounding of the output, and of the low-rank values it is made from.
        close(results.sum(2)[real], output.float()[real], 2**-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_codes_are_watched_like_dense_weights(dtype):
    """FP8 and FP4 kept as stored: every value read, replaced by itself, and differentiated through."""
    model = Dsv4.from_pretrained(Path(dsv4.__file__).parent / "demo_checkpoint", dtype=dtype)
    assert any(p.dtype == torch.float8_e4m3fn for p in model.parameters())
    ids, mask = padded_batch(model.vocab_size)
    with torch.no_grad():
        plain = model(ids, attention_mask=mask)
        logits, cache = model.run_with_cache(ids, "**", attention_mask=mask)
        close(logits[mask.bool()], plain[mask.bool()], 1e-5 if dtype == torch.float32 else 2e-2)
        for name in writable(model)[::9]:
            read, one = model.run_with_cache(ids, name, attention_mask=mask)
            same = model.run_with_hooks(ids, [(name, lambda v, hook, one=one: one[hook.name])], attention_mask=mask)
            assert torch.equal(same, read), name
    assert {n: v.numel() * v.element_size() for n, v in cache.items()} | {"total": 0} == model.estimate("**", 2, 19) | {"total": 0}
    names = [n for n in writable(model) if model.hook_dict[n].dtype != "i" and not n.endswith(CHOOSING)]
    logits, cache = model.run_with_cache(ids, names, attention_mask=mask, detach=False)
    grads = torch.autograd.grad(logits[mask.bool()].sum(), [cache[n] for n in names])
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_are_as_declared(dtype):
    model = watched_model(dtype)
    ids, mask = padded_batch(model.vocab_size)
    declared = {"f": torch.float32, "m": dtype, "i": torch.int64}
    _, cache = model.run_with_cache(ids, "**", attention_mask=mask)
    assert list(cache) == list(model.hook_dict)
    for name, value in cache.items():
        assert value.dtype == declared[model.hook_dict[name].dtype], name
        assert not value.isnan().any(), name
        if leaf(name) not in ("attention_scores", "indexer_scores"):
            assert value.isfinite().all(), name
