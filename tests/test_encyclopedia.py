"""The code of the encyclopedia page's Notes for this family, in our API."""

import pytest
import torch
import torch.nn.functional as F

from dsv4 import Dsv4, Dsv4Config

# As on Flash: two sliding blocks, then CSA and HCA in turn; the first three route by hash.
CONFIG = Dsv4Config.tiny(
    layer_types=[
        *("sliding_attention", "sliding_attention", "compressed_sparse_attention"),
        *(
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ),
    ],
    mlp_layer_types=["hash_moe"] * 3 + ["moe"] * 3,
    head_dim=128,
)


@pytest.fixture(scope="module")
def model():
    return Dsv4.from_config(CONFIG, seed=0)


@pytest.fixture(scope="module")
def prompt():
    return torch.arange(2, 15).unsqueeze(0)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def test_layer_output_is_four_streams(model, prompt):
    _, cache = model.run_with_cache(prompt, "layers.1.layer_output")
    out = cache["layers.1.layer_output"]
    assert out.shape == (1, 13, 4, model.hidden_size)
    last = out[:, -1, -1]
    mean = out[:, -1].mean(-2)
    assert last.shape == mean.shape == (1, model.hidden_size)
    _, sliced = model.run_with_cache(prompt, "layers.1.layer_output", pos=-1)
    assert torch.equal(sliced["layer_output", 1][:, -1], last)
    # Block 0 reads the embedding in each stream; after it they differ.
    _, cache = model.run_with_cache(prompt, ["token_embeddings", "layers.0.*"])
    for stream in range(4):
        assert torch.equal(cache["layer_input", 0][:, :, stream], cache["token_embeddings"])
    assert not torch.equal(cache["layer_output", 0][:, :, 0], cache["layer_output", 0][:, :, 1])


@pytest.mark.parametrize("layer", range(6))
def test_the_identity_is_the_blocks_formula(model, prompt, layer):
    _, cache = model.run_with_cache(prompt, f"layers.{layer}.**")
    x, out = cache["layer_input", layer], cache["layer_output", layer]
    post_a, comb_a = cache["attention_post", layer], cache["attention_comb", layer]
    attn = cache["attention_output", layer]
    post_f, comb_f = cache["mlp_post", layer], cache["mlp_comb", layer]
    mlp = cache["mlp_output", layer]

    h = comb_a.mT @ x + post_a[..., None] * attn[..., None, :]
    torch.testing.assert_close(comb_f.mT @ h + post_f[..., None] * mlp[..., None, :], out)

    mean = x.mean(2) + post_a.mean(-1, keepdim=True) * attn + post_f.mean(-1, keepdim=True) * mlp
    assert (mean - out.mean(2)).abs().max() <= 1e-3 * out.abs().max()


def test_zeroing_the_output_is_zeroing_its_weights(model, prompt):
    for layer in (1, 3, 4):
        one = model.run_with_hooks(prompt, [(f"layers.{layer}.self_attn.attention_output", torch.zeros_like)])
        other = model.run_with_hooks(prompt, [(f"layers.{layer}.attention_post", torch.zeros_like)])
        torch.testing.assert_close(one, other)
        # The mixing is left.
        assert not torch.allclose(one, model.run_with_hooks(prompt, [(f"layers.{layer}.layer_mid", torch.zeros_like)]))


def test_the_readout_collapses_the_streams(model, prompt):
    logits, cache = model.run_with_cache(prompt, ["layers.5.layer_output", "logits"])
    resid = cache["layer_output", -1]
    assert torch.equal(model.project_on_vocab(resid), cache["logits"])
    assert torch.equal(cache["logits"], logits)
    one_stream = model.project_on_vocab(resid[:, :, 0])
    assert one_stream.shape == logits.shape
    assert not torch.allclose(one_stream, logits)


def test_keys_are_values(model, prompt):
    assert model.num_kv_heads == 1
    _, cache = model.run_with_cache(prompt, "layers.2.self_attn.*")
    assert torch.equal(cache["attention_keys", 2], cache["attention_values", 2])
    assert (cache["attention_probabilities", 2].sum(-1) < 1).all()
    # At position 0 nothing is turned; later the rotary slice is.
    unrotated, rotated = cache["attention_keys_unrotated", 2], cache["attention_keys", 2][:, :, :13]
    assert torch.equal(unrotated[:, :, 0], rotated[:, :, 0])
    assert torch.equal(unrotated[..., :-8], rotated[..., :-8])
    assert not torch.equal(unrotated[:, :, 5, -8:], rotated[:, :, 5, -8:])


def test_selection_and_key_lengths_on_a_13_token_prompt(model, prompt):
    attn = "layers.2.self_attn"
    _, cache = model.run_with_cache(
        prompt,
        [
            f"{attn}.compressor.indexer.indexer_selection",
            f"{attn}.attention_keys",
            f"{attn}.attention_probabilities",
        ],
    )
    sel, k = cache["indexer_selection", 2], cache["attention_keys", 2]
    assert sel.shape == (1, 13, min(CONFIG.index_topk, 3))
    assert k.shape == (1, 1, 13 + 13 // 4, 128)
    assert (sel[0, :3] == -1).all()
    # Within the entries the pattern is zero outside the selection.
    pattern = cache["attention_probabilities", 2][0, :, :, 13:]
    for query in range(13):
        kept = [e for e in sel[0, query].tolist() if e >= 0]
        outside = [e for e in range(3) if e not in kept]
        assert (pattern[:, query, kept] > 0).all()
        assert (pattern[:, query, outside] == 0).all()
    # The HCA block: one entry per 8 tokens, all kept.
    _, cache = model.run_with_cache(prompt, "layers.3.self_attn.attention_keys")
    assert cache["attention_keys", 3].shape == (1, 1, 13 + 13 // 8, 128)


@pytest.mark.parametrize("layer", [1, 4])
def test_the_mixture(model, prompt, layer):
    moe = f"layers.{layer}.mlp"
    _, cache = model.run_with_cache(prompt, f"{moe}.*")
    logits, w, idx = (cache[f"{moe}.{n}"] for n in ("router_logits", "expert_weights", "expert_indices"))
    routed, shared, out = (cache[f"{moe}.{n}"] for n in ("routed_output", "shared_expert_output", "mlp_output"))

    chosen = F.softplus(logits).sqrt().gather(-1, idx)
    scale = model.config.routed_scaling_factor
    torch.testing.assert_close(w, chosen / chosen.sum(-1, keepdim=True) * scale)
    torch.testing.assert_close(routed + shared, out)

    assert ("hash" if layer == 1 else "sqrtsoftplus") == model.layers[layer].mlp.SCORING
    if layer == 1:
        assert torch.equal(idx, model.layers[1].mlp.router.tid2eid[prompt])


def test_expert_ablation(model, prompt):
    _, cache = model.run_with_cache(prompt, ["layers.4.mlp.*", "layers.4.layer_output"])
    idx = cache["expert_indices", 4]
    e = idx[0, -1, 0].item()

    def ablate(weights, hook):
        return weights.masked_fill(idx == e, 0)

    with model.hooks([("layers.4.mlp.expert_weights", ablate)]):
        _, after = model.run_with_cache(prompt, ["layers.4.layer_output", "layers.4.mlp.routed_output"])
    ablated, before = after["layer_output", 4], cache["layer_output", 4]
    assert ablated[:, -1, -1].shape == ablated[:, -1].mean(-2).shape == (1, model.hidden_size)
    assert not torch.equal(ablated[:, -1], before[:, -1])
    untouched = ~(idx == e).any(-1)[0]
    assert torch.equal(ablated[0, untouched], before[0, untouched])
    slots = cache["expert_outputs", 4].masked_fill((idx == e).unsqueeze(-1), 0)
    torch.testing.assert_close(after["routed_output", 4], slots.sum(2))


def test_steer_and_skip(model, prompt):
    vector = torch.randn(model.hidden_size)
    _, before = model.run_with_cache(prompt, "layers.3.layer_output")
    with model.steer(vector, layers=3):
        _, after = model.run_with_cache(prompt, "layers.3.layer_output")
    torch.testing.assert_close(
        after["layer_output", 3] - before["layer_output", 3],
        vector.expand(1, 13, 4, -1),
        rtol=1e-4,
        atol=1e-5,
    )
    with model.skip_layers(range(2, 4)):
        _, skipped = model.run_with_cache(prompt, ["layers.1.layer_output", "layers.4.layer_input"])
    assert torch.equal(skipped["layer_output", 1], skipped["layer_input", 4])
