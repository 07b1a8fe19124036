"""nnsight wraps the model and reads and writes values by name: with the real package."""

import copy

import pytest
import torch
from nnsight import NNsight

from dsv4.testing_probes import calls_counted, changed, leaf, padded_batch, watched_model, writable

IDS, MASK = padded_batch(64)
QUERIES = "layers.1.self_attn.attention_queries"
OUTPUT = "layers.4.self_attn.attention_output"


@pytest.fixture(scope="module")
def bare():
    return watched_model()


@pytest.fixture(scope="module")
def model():
    return watched_model()


@pytest.fixture(scope="module")
def nn(model):
    return NNsight(model)


def at(nn, name):
    for part in name.split("."):
        nn = nn[int(part)] if part.isdigit() else getattr(nn, part)
    return nn


def test_a_wrapped_model_gives_the_same_numbers(bare, model, nn):
    with torch.no_grad():
        torch.testing.assert_close(model(IDS), bare(IDS), rtol=1e-5, atol=1e-5)
        expected, cache = bare.run_with_cache(IDS, "**")
        logits, other = model.run_with_cache(IDS, "**")
        assert torch.equal(logits, expected)
        assert all(torch.equal(other[name], cache[name]) for name in cache)
        zero = [(OUTPUT, torch.zeros_like)]
        torch.testing.assert_close(model.run_with_hooks(IDS, zero), bare.run_with_hooks(IDS, zero), rtol=1e-5, atol=1e-5)
    assert list(model.state_dict()) == list(bare.state_dict())


def test_every_point_is_reached_once_in_the_documented_order(model, nn):
    """nnsight finds values by execution order: one call each, also of those nobody asked for."""
    with torch.no_grad(), calls_counted(model) as called:
        model(IDS)
    assert called == list(model.hook_dict)


def test_reading_by_name(bare, nn):
    with torch.no_grad():
        expected, cache = bare.run_with_cache(IDS, "**")
        with nn.trace(IDS):
            raw = nn.layers[1].self_attn.attention_queries.input.save()
            queries = nn.layers[1].self_attn.attention_queries.output.save()
            pattern = nn.layers[1].self_attn.attention_probabilities.output.save()
            weights = nn.layers[4].mlp.expert_weights.output.save()
            comb = nn.layers[5].attention_comb.output.save()
            logits = nn.logits.output.save()
            out = nn.output.save()
    assert torch.equal(queries, cache[QUERIES])
    assert torch.equal(raw, cache[QUERIES])
    assert torch.equal(pattern, cache["layers.1.self_attn.attention_probabilities"])
    assert torch.equal(weights, cache["layers.4.mlp.expert_weights"])
    assert torch.equal(comb, cache["layers.5.attention_comb"])
    assert torch.equal(logits, expected)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_reading_every_value_in_one_trace(bare, nn, mode):
    with mode():
        _, cache = bare.run_with_cache(IDS, "**", attention_mask=MASK)
        seen = {}
        with nn.trace(IDS, attention_mask=MASK):
            for name in cache:
                seen[name] = at(nn, name).output.save()
    assert list(seen) == list(cache)
    for name, value in cache.items():
        assert torch.equal(seen[name], value), name


@pytest.mark.parametrize(
    ("layer", "every"),
    [(4, 4), *(pytest.param(i, 1, marks=pytest.mark.slow) for i in (0, 1, 2, 3, 4, 5))],
)
def test_writing_the_values_of_a_block(bare, nn, layer, every):
    """Assigned and in place: the effect of a hook."""
    names = [n for n in writable(bare) if bare.hook_dict[n].layer == layer]
    for i, name in enumerate(names[::every]):
        value = changed(bare.run_with_cache(IDS, name)[1][name], bare.hook_dict[name])
        with torch.no_grad(), bare.hooks([("**", lambda v, hook: None)]):
            expected = bare.run_with_hooks(IDS, [(name, lambda v, hook, value=value: value)])
            if i % 2 or leaf(name) in ("attention_keys", "attention_values"):
                with nn.trace(IDS):
                    at(nn, name).output = value
                    logits = nn.logits.output.save()
            else:
                with nn.trace(IDS):
                    at(nn, name).output[:] = value
                    logits = nn.logits.output.save()
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_zeroing_in_two_ways(bare, nn, mode):
    with mode():
        expected = bare.run_with_hooks(IDS, [(OUTPUT, torch.zeros_like)])
        with nn.trace(IDS):
            nn.layers[4].self_attn.attention_output.output = nn.layers[4].self_attn.attention_output.output * 0
            assigned = nn.logits.output.save()
        with nn.trace(IDS):
            nn.layers[4].self_attn.attention_output.output[:] = 0
            written = nn.logits.output.save()
    torch.testing.assert_close(assigned, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(written, assigned)


def test_in_place_keys_are_values_too(bare, nn):
    with torch.no_grad():
        keys, values = "layers.1.self_attn.attention_keys", "layers.1.self_attn.attention_values"
        expected = bare.run_with_hooks(IDS, [([keys, values], lambda v, hook: v * 2)])
        with nn.trace(IDS):
            nn.layers[1].self_attn.attention_keys.output[:] *= 2
            logits = nn.logits.output.save()
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_nothing_of_a_trace_stays(bare, model, nn):
    with torch.no_grad():
        with nn.trace(IDS):
            nn.layers[2].layer_output.output[:] = 0
        torch.testing.assert_close(model(IDS), bare(IDS), rtol=1e-5, atol=1e-5)
        with pytest.raises(Exception, match="read-only"), nn.trace(IDS):
            nn.layers[1].self_attn.attention_key_positions.output[:] = 0
        torch.testing.assert_close(model(IDS), bare(IDS), rtol=1e-5, atol=1e-5)


def test_gradients(bare, nn):
    with nn.trace(IDS):
        streams = nn.layers[2].layer_output.output
        pattern = nn.layers[4].self_attn.attention_probabilities.output
        loss = nn.logits.output.square().mean()
        with loss.backward():
            of_pattern = pattern.grad.save()
            of_streams = streams.grad.save()
    names = ["layers.2.layer_output", "layers.4.self_attn.attention_probabilities"]
    logits, cache = bare.run_with_cache(IDS, names, detach=False)
    expected = torch.autograd.grad(logits.square().mean(), [cache[n] for n in names])
    torch.testing.assert_close([of_streams, of_pattern], list(expected), rtol=1e-4, atol=1e-7)


def test_writing_a_gradient(bare, model, nn):
    model.zero_grad()
    with nn.trace(IDS):
        streams = nn.layers[2].layer_output.output
        loss = nn.logits.output.square().mean()
        with loss.backward():
            streams.grad = streams.grad * 0
    assert model.embed_tokens.weight.grad.abs().max() == 0
    assert model.layers[3].self_attn.q_a_proj.weight.grad.abs().max() > 0
    model.zero_grad()


def test_the_cache_of_a_tracer(bare, nn):
    with torch.no_grad():
        _, expected = bare.run_with_cache(IDS, "layers.*.layer_output")
        with nn.trace(IDS) as tracer:
            cache = tracer.cache(modules=[layer.layer_output for layer in nn.layers])
    for i in range(6):
        assert torch.equal(cache[f"model.layers.{i}.layer_output"].output, expected["layer_output", i])


def test_skipping_a_sublayer(bare, nn):
    with torch.no_grad():
        expected = bare.run_with_hooks(IDS, [("layers.3.mlp.mlp_output", torch.zeros_like)])
        with nn.trace(IDS):
            nn.layers[3].mlp.skip(torch.zeros(2, 19, 32))
            logits = nn.logits.output.save()
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_native_hooks_and_a_trace_together(bare, model, nn):
    """Ours first: `.output` is what they returned; what the trace writes goes on."""
    with torch.no_grad():
        expected = bare.run_with_hooks(IDS, [(OUTPUT, lambda v, hook: (v * 0 + 1) * 3)])
        with model.hooks([(OUTPUT, lambda v, hook: v * 0 + 1)]), nn.trace(IDS):
            seen = nn.layers[4].self_attn.attention_output.output.save()
            nn.layers[4].self_attn.attention_output.output = seen * 3
            logits = nn.logits.output.save()
        assert torch.equal(seen, torch.ones_like(seen))
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_steps_of_a_generation(bare, model, nn):
    """The model's own loop under a trace; each step is an iteration."""
    ids, steps = IDS[:1, :9], []
    expected = bare.generate(ids, max_new_tokens=3, eos_token_id=None)
    with nn.trace(ids, fn=model.generate, max_new_tokens=3, eos_token_id=None) as tracer:
        for _ in tracer.iter[:3]:
            steps.append(nn.layers[2].layer_output.output)
        result = tracer.result.save()
    assert torch.equal(result, expected)
    assert [tuple(step.shape) for step in steps] == [(1, 9, 4, 32), (1, 1, 4, 32), (1, 1, 4, 32)]
    with torch.no_grad():
        _, cache = bare.run_with_cache(expected[:, :-1], "layers.2.layer_output")
    torch.testing.assert_close(torch.cat(steps, dim=1), cache["layer_output", 2], rtol=1e-4, atol=1e-4)


def test_renamed(bare):
    renamed = NNsight(watched_model(), rename={"self_attn": "attn"})
    with torch.no_grad():
        _, cache = bare.run_with_cache(IDS, QUERIES)
        with renamed.trace(IDS):
            queries = renamed.layers[1].attn.attention_queries.output.save()
    assert torch.equal(queries, cache[QUERIES])


def test_copies_of_a_wrapped_model(bare, model, nn):
    other = copy.deepcopy(model)
    with torch.no_grad():
        torch.testing.assert_close(other(IDS), bare(IDS), rtol=1e-5, atol=1e-5)
        other.lm_head.weight.zero_()
        assert other(IDS).abs().max() == 0
        torch.testing.assert_close(model(IDS), bare(IDS), rtol=1e-5, atol=1e-5)


def test_no_name_is_one_of_nnsights_own(nn, model):
    taken = {n for n in dir(type(nn)) if not n.startswith("__")}
    children = {path.rsplit(".", 1)[-1] for path, _ in model.named_modules() if path}
    assert children & taken == set()
