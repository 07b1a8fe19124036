"""Splicing modules in: values, gradients, the error term, the points inside."""

import copy

import pytest
import torch
from torch import nn

from dsv4 import ActivationCache, HookPoint
from dsv4.testing_probes import padded_batch, watched_model

MODEL = watched_model(seed=7)
IDS, MASK = padded_batch(MODEL.vocab_size, seq=19, padding=5)
AT = "layers.3.layer_output"
CHOICES = ["**.expert_indices", "**.indexer_selection"]
PAIR = ("layers.2.mlp_input", "layers.2.mlp.mlp_output")


class Autoencoder(nn.Module):
    """relu(W x) -> W' ...; its latents are a point."""

    def __init__(self, width=MODEL.hidden_size, latents=48, axes="b s n latents", seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *size: torch.randn(*size, generator=generator, device="cpu")  # noqa: E731
        self.encoder = nn.Parameter(draw(latents, width) * width**-0.5)
        self.decoder = nn.Parameter(draw(width, latents) * latents**-0.5)
        self.latents = HookPoint(axes)

    def forward(self, x):
        return self.latents((x @ self.encoder.T).relu()) @ self.decoder.T


def make(at=AT):
    return Autoencoder(axes="b s n latents" if at == AT else "b s latents")


def run(names=(), model=MODEL, **keywords):
    return model.run_with_cache(IDS, list(names), attention_mask=MASK, **keywords)


@pytest.mark.parametrize("at", [AT, "layers.1.self_attn.attention_output", "token_embeddings"])
def test_without_the_error_term(at):
    sae = make(at)
    with torch.no_grad():
        with MODEL.splice(at, sae, use_error_term=False) as inner:
            logits, cache = run([at, *inner])
        value = run([at])[1][at]
        latents = (value @ sae.encoder.T).relu()
        assert inner == [f"{at}.splice.latents"]
        assert torch.equal(cache[inner[0]], latents)
        assert torch.equal(cache[at], latents @ sae.decoder.T)
        by_hand = MODEL.run_with_hooks(IDS, [(at, sae)], attention_mask=MASK)
        assert torch.equal(logits, by_hand)
    assert inner[0] not in MODEL.hook_dict
    assert list(MODEL.hook_dict) == list(watched_model(seed=7).hook_dict)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at", [AT, PAIR])
def test_the_error_term_leaves_the_run_as_it_is(at, dtype):
    model = MODEL if dtype == torch.float32 else watched_model(dtype, seed=7)
    written = at if at == AT else at[1]
    with torch.no_grad():
        plain = run([written], model)[0]
        with model.splice(at, make(at)):
            spliced, cache = run([written, f"{written}.splice.latents"], model)
    assert torch.equal(plain, spliced)
    assert cache[f"{written}.splice.latents"].dtype == torch.float32


@pytest.mark.parametrize("at", [AT, PAIR])
@pytest.mark.parametrize("with_error", [True, False])
def test_edits_of_latents(at, with_error):
    """Adding to a latent adds its decoder column."""
    sae, written = make(at), at if at == AT else at[1]

    def more(latents, hook):
        latents = latents.clone()
        latents[..., 5] += 2.0
        return latents

    with torch.no_grad(), MODEL.splice(at, sae, with_error) as inner:
        before = run([written])[1][written]
        with MODEL.hooks([(inner[0], more)]):
            logits, cache = run([written, inner[0]])
        base = run(inner)[1][inner[0]]
    assert torch.allclose(cache[written], before + 2 * sae.decoder[:, 5], atol=1e-5)
    assert torch.allclose(cache[inner[0]][..., 5], base[..., 5] + 2, atol=1e-6)
    expected = before + 2 * sae.decoder[:, 5]
    hooks = [(written, lambda v, hook: v + 2 * sae.decoder[:, 5] if with_error else expected)]
    with torch.no_grad():
        by_hand = MODEL.run_with_hooks(IDS, hooks, attention_mask=MASK)
    assert (logits - by_hand).abs().max() < 1e-4


def test_a_transcoder_reads_what_hooks_left():
    sae = make(PAIR)
    with torch.no_grad(), MODEL.ablate(PAIR[0], pos=3), MODEL.splice(PAIR, sae, False):
        cache = run(PAIR)[1]
    assert bool((cache[PAIR[0]][0, 3] == 0).all())
    assert torch.equal(cache[PAIR[1]], sae(cache[PAIR[0]]))


def test_gradients_pass_through_the_module():
    """The gradient of a latent and of the value read, against finite differences."""
    sae, names = make(PAIR), [PAIR[0], f"{PAIR[1]}.splice.latents"]
    with MODEL.splice(PAIR, sae):
        logits, cache = run(names, detach=False)
        loss = logits[:, -1].square().mean()
        gradients = torch.autograd.grad(loss, [cache[n] for n in names])
        generator = torch.Generator().manual_seed(2)
        step = torch.randn(gradients[1].shape, generator=generator, device="cpu")
        ends = [shifted(names[1], step, sign * 1e-3) for sign in (1, -1)]
    found = (ends[0] - ends[1]) / 2e-3
    assert found == pytest.approx(float((gradients[1] * step).sum()), rel=0.05, abs=1e-4)
    # All that the value read does, it does through the latents: its other way is the error term.
    latents = (cache[PAIR[0]].detach() @ sae.encoder.T).relu()
    through = (gradients[1] * (latents > 0)) @ sae.encoder
    assert torch.allclose(gradients[0], through, atol=1e-6)
    (encoder,) = torch.autograd.grad(run_loss(sae), [sae.encoder])
    assert bool((encoder != 0).any())


def run_loss(sae):
    with MODEL.splice(PAIR, sae):
        return MODEL(IDS, attention_mask=MASK)[:, -1].square().mean()


def shifted(name, step, size):
    """The loss, with the choices of the plain run."""
    with (
        torch.no_grad(),
        MODEL.freeze(run(CHOICES)[1]),
        MODEL.hooks([(name, lambda v, hook: v + size * step)]),
    ):
        return float(MODEL(IDS, attention_mask=MASK)[:, -1].square().mean())


def test_points_inside_are_values(tmp_path):
    """Read by glob, by layer, at positions, to disk, over a generation, with gradient hooks."""
    with MODEL.splice(AT, make()) as inner:
        (name,) = inner
        assert MODEL.match_names("layers.*.layer_output.splice.*") == inner
        order = list(MODEL.hook_dict)
        assert order.index(name) == order.index(AT) + 1
        assert MODEL.hook_dict[name].layer == 3
        with torch.no_grad():
            cache = run(["**"])[1]
            assert torch.equal(cache["latents", 3], cache[name])
            last = run([name], pos=-1, to=tmp_path / "latents.safetensors")[1]
            assert torch.equal(last[name], cache[name][:, -1])
            early = run([name], stop_at_layer=4)[1]
            assert torch.equal(early[name], cache[name])
            with pytest.raises(KeyError, match="stop_at_layer=3"):
                run([name], stop_at_layer=3)
            ids, steps = MODEL.generate(IDS[:1], 4, names=[name], eos_token_id=None)
            full = MODEL.run_with_cache(ids[:, :-1], [name])[1]
        assert (steps[name] - full[name]).abs().max() < 1e-4
        seen = []
        with MODEL.hooks(bwd_hooks=[(name, lambda g, hook: seen.append(hook.name))]):
            MODEL(IDS)[0, -1, 0].backward()
        assert seen == inner
        MODEL.zero_grad()
        MODEL.add_hook(name, lambda v, hook: None)
    assert MODEL.list_hooks() == []
    assert ActivationCache.load(tmp_path / "latents.safetensors").names == inner
    assert run([AT])[1].names == [AT]


def test_several_and_again():
    first, second = make(), copy.deepcopy(make())
    with torch.no_grad():
        for _ in range(2):
            with (
                MODEL.splice(AT, first, False),
                MODEL.splice("layers.4.layer_output", second, False),
            ):
                logits = run()[0]
        hooks = [(AT, first), ("layers.4.layer_output", second)]
        assert torch.equal(logits, MODEL.run_with_hooks(IDS, hooks, attention_mask=MASK))
        with MODEL.splice(AT, lambda x: x * 0.5, False) as inner:
            half = run()[0]
        assert inner == []
        by_hand = MODEL.run_with_hooks(IDS, [(AT, lambda v, hook: v * 0.5)], attention_mask=MASK)
        assert torch.equal(half, by_hand)


def test_wrong_splices():
    sae = make()
    wrong = [
        (("layers.*.layer_output", sae), ValueError, "means 6 values"),
        (("layers.3.no_such", sae), KeyError, "nearest"),
        ((PAIR[::-1], sae), ValueError, "comes after"),
        (((AT,), sae), ValueError, "a name or"),
        (("layers.3.mlp.expert_indices", sae), ValueError, "holds integers"),
        (("layers.3.attention_sinkhorn", sae), ValueError, "is read-only"),
    ]
    for args, kind, text in wrong:
        with pytest.raises(kind, match=text), MODEL.splice(*args):
            pass
    twice = MODEL.splice("layers.4.layer_output", sae)
    with MODEL.splice(AT, sae), pytest.raises(ValueError, match="spliced in already"):
        twice.__enter__()
    for bad in (lambda x: x[:1], lambda x: (x,)):
        with MODEL.splice(AT, bad), pytest.raises(ValueError, match="expected a tensor"):
            MODEL(IDS)
    with MODEL.splice(PAIR, make(PAIR)), torch.no_grad():
        streams = MODEL(IDS, stop_at_layer=3)
    pair = (PAIR[0], "layers.4.mlp.mlp_output")
    with MODEL.splice(pair, make(PAIR)), torch.no_grad():
        MODEL(IDS)
        with pytest.raises(ValueError, match="did not compute"):
            MODEL(streams, start_at_layer=3, input_ids=IDS)
    assert MODEL.list_hooks() == []
    assert sae.latents.name == ""
