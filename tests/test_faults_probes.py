"""Faults that other hook, cache and intervention libraries had, tried here. The number is that of the project's list of faults.

Those not here are tests elsewhere: 58, 59, 61, 62, 67, 82, 89, 94, 95, 97, 98 in test_hooks, 64, 71 in test_watch and
test_identities, 65, 73, 74, 79, 83 in test_capture, 53, 76 in test_interventions, 37, 85 in test_inputs and test_activation_cache.
"""

import numpy
import pytest
import torch
import torch.nn.functional as F

from dsv4.testing_probes import calls_counted, padded_batch, watched_model, writable

MODEL = watched_model()
IDS, MASK = padded_batch(MODEL.vocab_size)
PROMPT = IDS[:1, :11]


def without_cache(model, ids, new):
    """Greedy continuation by full forwards."""
    with torch.no_grad():
        for _ in range(new):
            ids = torch.cat((ids, model(ids)[:, -1:].argmax(-1)), dim=1)
    return ids


@pytest.mark.parametrize(
    "scale",
    [
        lambda v: v * 2.0,
        lambda v: v * numpy.float32(2),
        lambda v: v * torch.tensor(2.0),
        lambda v: v.float() * 2,
        lambda v: v * torch.full_like(v, 2).double(),
    ],
)
def test_43_a_hook_of_another_dtype_does_not_promote_what_follows(scale):
    model = watched_model(torch.bfloat16)
    names = [
        "layers.0.layer_output",
        "layers.1.mlp.router_logits",
        "layers.2.self_attn.attention_output",
    ]
    with torch.no_grad():
        _, plain = model.run_with_cache(IDS, "**")
        with model.hooks([(names, lambda v, hook: scale(v))]):
            logits, cache = model.run_with_cache(IDS, "**")
    assert {n: v.dtype for n, v in cache.items()} == {n: v.dtype for n, v in plain.items()}
    assert logits.dtype == torch.float32
    model.run_with_hooks(IDS, [(names, lambda v, hook: scale(v))]).sum().backward()


def test_68_identity_hooks_change_no_dtype_and_no_logit():
    """Also in a mixed model whose first parameter is float32."""
    model = watched_model(torch.bfloat16)
    model.embed_tokens = torch.nn.Embedding.from_pretrained(model.embed_tokens.weight.data.clone(), freeze=False)
    assert next(model.layers[0].attn_hc.parameters()).dtype == torch.float32
    with torch.no_grad():
        expected, cache = model.run_with_cache(IDS, "**")
        logits = model.run_with_hooks(IDS, [("**", lambda v, hook: None)])
        returned = model.run_with_hooks(IDS, [(writable(model), lambda v, hook: v.clone())])
        again, other = model.run_with_cache(IDS, "**")
    assert torch.equal(logits, expected)
    assert torch.equal(returned, expected)
    assert torch.equal(again, expected)
    assert {n: v.dtype for n, v in other.items()} == {n: v.dtype for n, v in cache.items()}


def test_70_an_edit_is_applied_once_and_values_are_what_their_names_say():
    output, mid, post, before = (f"layers.3.{n}" for n in ("self_attn.attention_output", "layer_mid", "attention_post", "layer_input"))
    with torch.no_grad():
        _, plain = MODEL.run_with_cache(IDS, [output, mid, post, before, "layers.3.attention_comb"])
        with MODEL.hooks([(output, lambda v, hook: v + 1)]):
            _, edited = MODEL.run_with_cache(IDS, [output, mid])
    torch.testing.assert_close(edited[output], plain[output] + 1)
    torch.testing.assert_close(
        edited[mid] - plain[mid],
        plain[post].unsqueeze(-1).expand_as(plain[mid]),
        rtol=1e-4,
        atol=1e-5,
    )
    # The attention's output does not hold the residual.
    residual = plain["layers.3.attention_comb"].mT @ plain[before]
    torch.testing.assert_close(
        plain[mid] - residual,
        plain[post].unsqueeze(-1) * plain[output].unsqueeze(2),
        rtol=1e-4,
        atol=1e-4,
    )
    with torch.no_grad():
        kv = MODEL.new_kv_cache(1)
        MODEL(PROMPT, kv_cache=kv)
        with MODEL.hooks([("**", lambda v, hook: None)]), calls_counted(MODEL) as called:
            MODEL(IDS[:1, 11:12], kv_cache=kv)
    # A decoding step too reaches each once, in order.
    assert called == list(MODEL.hook_dict)


def test_71_all_ways_of_running_agree():
    results = {}
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            results[mode, "plain"] = MODEL(IDS)
            results[mode, "residual set"] = MODEL.run_with_cache(IDS)[0]
            results[mode, "everything"] = MODEL.run_with_cache(IDS, "**")[0]
            results[mode, "identity hooks"] = MODEL.run_with_hooks(IDS, [("**", lambda v, hook: None)])
    expected = results[torch.no_grad, "plain"]
    for logits in results.values():
        assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert torch.equal(results[torch.no_grad, "residual set"], expected)


def test_85_a_batch_of_three_keeps_its_batch_axis():
    ids = torch.randint(0, 64, (3, 5))
    _, cache = MODEL.run_with_cache(ids, "layers.*.layer_output")
    with pytest.raises(ValueError, match="holds 3 rows"):
        cache.remove_batch_dim()
    for entry in (
        lambda x: MODEL(x),
        lambda x: MODEL.run_with_cache(x, [])[0],
        lambda x: MODEL.run_with_hooks(x),
    ):
        assert torch.equal(entry(ids[0]), entry(ids[:1]))
    assert MODEL.generate(ids[0], max_new_tokens=2).shape == (1, 7)


def test_86_patching_across_lengths_and_head_counts():
    """Keys and values have one head; the pattern's key axis differs by kind of block and by length."""
    with torch.no_grad():
        _, cache = MODEL.run_with_cache(IDS, "layers.*.self_attn.*")
        for layer, keys in ((0, 19), (1, 23), (2, 21)):
            assert cache["attention_probabilities", layer].shape == (2, 4, 19, keys)
            assert cache["attention_keys", layer].shape == (2, 1, keys, 16)
            assert cache["attention_queries", layer].shape == (2, 4, 19, 16)
        for name in ("attention_probabilities", "attention_keys", "attention_queries"):
            value = cache[name, 1]
            with pytest.raises(ValueError, match=rf"layers.1.self_attn.{name} returned shape"):
                MODEL.run_with_hooks(IDS[:, :7], [(f"layers.1.self_attn.{name}", lambda v, hook, value=value: value)])


@pytest.mark.parametrize("grad", [True, False])
def test_88_a_cached_prefix_holds_no_graph(grad):
    kv = MODEL.new_kv_cache(1)
    with torch.set_grad_enabled(grad):
        MODEL(PROMPT, kv_cache=kv)
    grads = []
    logits = MODEL.run_with_hooks(
        IDS[:1, 11:],
        bwd_hooks=[("layers.*.layer_output", lambda g, hook: grads.append(hook.layer))],
        kv_cache=kv,
    )
    logits.sum().backward()
    assert grads == [5, 4, 3, 2, 1, 0]
    assert all(not tape.held.requires_grad for tape in kv.state.tapes)
    MODEL.zero_grad()


def test_91_interventions_reach_every_step():
    vector = torch.randn(32)
    with MODEL.steer(vector, layers=1, scale=3):
        steered = MODEL.generate(PROMPT, max_new_tokens=8, eos_token_id=None)
        assert torch.equal(steered, without_cache(MODEL, PROMPT, 8))
    plain = MODEL.generate(PROMPT, max_new_tokens=8, eos_token_id=None)
    assert torch.equal(plain, without_cache(MODEL, PROMPT, 8))
    assert not torch.equal(steered, plain)

    # One absolute position, in the prompt or among the new tokens.
    for position in (3, 12):

        def at_position(value, hook, position=position):
            value[hook.positions == position] += 5 * vector

        with MODEL.hooks([("layers.1.layer_output", at_position)]):
            assert torch.equal(
                MODEL.generate(PROMPT, max_new_tokens=8, eos_token_id=None),
                without_cache(MODEL, PROMPT, 8),
            )


def test_91_what_a_window_closes_in_a_step():
    """compressed_entries is called in every step, with no entries where no window closes; an edit stays for later steps."""
    shapes = []

    def zero(value, hook):
        shapes.append((hook.step, tuple(value.shape)))
        return torch.zeros_like(value)

    name = "layers.1.self_attn.compressor.compressed_entries"
    with MODEL.hooks([(name, zero)]):
        ids = MODEL.generate(PROMPT, max_new_tokens=6, eos_token_id=None)
        assert shapes == [
            (0, (1, 2, 16)),
            (1, (1, 1, 16)),
            *((i, (1, 0, 16)) for i in (2, 3, 4)),
            (5, (1, 1, 16)),
        ]
        assert torch.equal(ids, without_cache(MODEL, PROMPT, 6))


def test_91_what_stays_in_the_kv_cache_and_what_does_not():
    attention = "layers.{}.self_attn"
    stays = [
        "attention_keys_unrotated",
        "compressor.compressor_gates",
        "compressor.compressed_entries",
    ]
    for_this_call = [
        "attention_keys",
        "attention_values",
        "attention_scores",
        "attention_probabilities",
        "compressor.indexer.indexer_keys",
    ]
    for layer in (1, 2):
        for name in [*stays, *for_this_call]:
            if "indexer" in name and layer == 2:
                continue
            kv, plain = MODEL.new_kv_cache(1), MODEL.new_kv_cache(1)

            def turned(value, hook):
                value.copy_(value.flip(-1) * 2 if "scores" not in hook.name else value * 2)

            with torch.no_grad():
                MODEL(PROMPT, kv_cache=plain)
                # Later blocks see an edit anyway; the block itself keeps it or not.
                with MODEL.hooks([(f"{attention.format(layer)}.{name}", turned)]):
                    MODEL(PROMPT, kv_cache=kv)
                values = [attention.format(layer) + ".attention_head_outputs"]
                same_input = [(f"layers.{layer}.layer_input", lambda v, hook: torch.ones_like(v))]
                with MODEL.hooks(same_input):
                    _, after = MODEL.run_with_cache(IDS[:1, 11:12], values, kv_cache=kv)
                    _, before = MODEL.run_with_cache(IDS[:1, 11:12], values, kv_cache=plain)
            assert torch.equal(after[values[0]], before[values[0]]) == (name in for_this_call), name


@pytest.mark.parametrize("count", [0, 1, 5])
def test_92_n_new_tokens_are_n_forwards(count):
    steps = []
    with MODEL.hooks(
        [
            (
                "layers.0.layer_output",
                lambda v, hook: steps.append((hook.step, v.shape[1], hook.positions.flatten().tolist())),
            )
        ]
    ):
        ids = MODEL.generate(PROMPT, max_new_tokens=count, eos_token_id=None)
    assert ids.shape == (1, 11 + count)
    expected = [(0, 11, list(range(11))), *((i, 1, [10 + i]) for i in range(1, count))]
    assert steps == expected[:count]
    assert MODEL.layers[0].layer_output.step == 0


def test_100_bfloat16_is_no_worse_with_everything_watched():
    model, exact = watched_model(torch.bfloat16), watched_model()
    exact.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in model.state_dict().items()})
    with torch.no_grad():
        expected = exact(IDS)
        error = (model(IDS) - expected).abs().mean()
        watched = (model.run_with_cache(IDS, "**")[0] - expected).abs().mean()
    assert watched <= 1.1 * error


def test_101_sinks_the_readout_and_the_norm():
    with torch.no_grad():
        logits, cache = MODEL.run_with_cache(IDS, "**", attention_mask=MASK)
    for layer in range(6):
        rows = cache["attention_probabilities", layer].sum(-1)
        assert (rows < 1).all()
        torch.testing.assert_close(rows + cache["attention_sink_probability", layer], torch.ones_like(rows))
    # From cached streams and weights to the logits.
    collapsed = (cache["readout_weights"].unsqueeze(-1) * cache["layer_output", 5]).sum(2)
    normed = F.rms_norm(collapsed, (32,), MODEL.norm.weight, MODEL.config.rms_norm_eps)
    torch.testing.assert_close(F.linear(normed, MODEL.lm_head.weight), logits, rtol=1e-4, atol=1e-4)
    # Every sublayer's contribution, through the run's own mixing, sums to what is read.
    total = cache["token_embeddings"].unsqueeze(2).expand(-1, -1, 4, -1)
    for layer in range(6):
        for site, out in (("attention", "attention_output"), ("mlp", "mlp_output")):
            comb, post = cache[f"{site}_comb", layer], cache[f"{site}_post", layer]
            total = comb.mT @ total + post.unsqueeze(-1) * cache[out, layer].unsqueeze(2)
    torch.testing.assert_close(total, cache["layer_output", 5], rtol=1e-4, atol=1e-4)
