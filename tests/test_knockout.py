"""Knockout: no leak, to the last bit; the output of a block that never had the token."""

import random

import pytest
import torch

from dsv4 import Dsv4
from dsv4.config import CSA, HASH_MOE, HCA, MOE, SLIDING
from dsv4.kernels.norm_rotary import rms_norm, rotate, rotate_back
from dsv4.knockout import CHANNELS
from dsv4.testing import random_config
from dsv4.testing_probes import padded_batch, watched_model

MODEL = watched_model(seed=6, layer_types=[SLIDING, CSA, HCA], mlp_layer_types=[HASH_MOE, MOE, MOE], index_topk=3)
KINDS = range(3)
SEQ, PAD = 37, 5
IDS, MASK = padded_batch(MODEL.vocab_size, seq=SEQ, padding=PAD)
ROWS = ((0, 0), (1, PAD))


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def output(layer, change=None, model=MODEL, names=(), mask=MASK, ids=IDS, stop=None):
    """attention_output of a layer, after `change(x)` of what the block reads."""
    name, read = (
        f"layers.{layer}.self_attn.attention_output",
        f"layers.{layer}.attention_norm_output",
    )
    stop = layer + 1 if stop is None else stop
    with model.hooks([] if change is None else [(read, change)]):
        cache = model.run_with_cache(ids, [name, read, *names], attention_mask=mask, stop_at_layer=stop)[1]
    return cache if names else cache[name]


def noise_at(keys):
    """Another token at these positions of each row."""

    def change(x, hook):
        generator = torch.Generator().manual_seed(1)
        hit = torch.isin(hook.positions, torch.tensor(keys))
        noise = 3 * torch.randn(x.shape, generator=generator, dtype=torch.float32, device="cpu")
        return torch.where(hit.unsqueeze(-1), noise.to(x.dtype), x)

    return change


def at(value, queries):
    """The value at positions of each row that has them."""
    kept = []
    for row, start in ROWS:
        kept += [value[row, start + q] for q in queries if start + q < value.shape[1]]
    return torch.stack(kept)


CASES = [
    ([3], [9, 10, 17, 36]),
    ([20, 21, 22], [23, 24, 31]),
    (list(range(8)), [8, 12, 31]),
    ([7, 8], [8, 11, 15, 16]),
]


@pytest.mark.parametrize("layer", KINDS)
@pytest.mark.parametrize(("keys", "queries"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_leak(layer, keys, queries, dtype):
    model = MODEL if dtype == torch.float32 else BFLOAT
    queries = [q for q in queries if q not in keys]
    with model.knockout(layer, queries, keys):
        without = output(layer, model=model)
        changed = output(layer, noise_at(keys), model=model)
    assert torch.equal(at(without, queries), at(changed, queries))
    plain, moved = output(layer, model=model), output(layer, noise_at(keys), model=model)
    felt = (at(plain, queries) - at(moved, queries)).abs().amax(-1) > 1e-3
    assert bool(felt.any())
    others = [q for q in range(max(keys), 32) if q not in queries]
    assert torch.equal(at(without, others), at(spelled(layer, model), others))


BFLOAT = watched_model(
    torch.bfloat16,
    6,
    layer_types=[SLIDING, CSA, HCA],
    mlp_layer_types=[HASH_MOE, MOE, MOE],
    index_topk=3,
)


def spelled(layer, model=MODEL):
    scores = f"layers.{layer}.self_attn.attention_scores"
    names = [scores]
    if model.layer_types[layer] == CSA:
        names.append(f"layers.{layer}.self_attn.compressor.indexer.indexer_scores")
    return output(layer, model=model, names=names)[f"layers.{layer}.self_attn.attention_output"]


# The block written out for one row and one query, from the parameters alone.


def rope(model, kind, x, position):
    return rotate(x, *model.rotary[kind](torch.tensor(position)))


def entry(model, pool, x, number, hidden, width):
    """One entry without the hidden tokens; None where nothing is left."""
    config = model.config
    rate, series = config.compress_rates[pool.layer_type], pool.series
    kv, gate = x @ pool.kv_proj.weight.T, x @ pool.gate_proj.weight.T
    values, logits = [], []
    for window in range(number - series + 1, number + 1):
        part = slice((window - number + series - 1) * width, (window - number + series) * width)
        for slot in range(rate):
            token = window * rate + slot
            if token >= 0 and token not in hidden:
                values.append(kv[token, part])
                logits.append(gate[token, part] + pool.position_bias[slot, part])
    if not values:
        return None
    pooled = (torch.stack(logits).softmax(0) * torch.stack(values)).sum(0)
    normed = rms_norm(pooled, pool.kv_norm.weight, config.rms_norm_eps)
    return rope(model, "compress", normed, number * rate)


def reference(layer, x, query, keys, channels=CHANNELS, heads=None, model=MODEL):
    """[hidden]: attention_output at one query; x [s hidden] is what the block reads."""
    attn, results = model.layers[layer].self_attn, []
    for head in range(model.num_heads):
        hidden = keys if heads is None or head in heads else []
        results.append(one_head(model, attn, x, query, hidden, channels, head))
    low_rank = attn.o_a_proj(torch.stack(results).flatten()[None, None])
    return attn.o_b_proj(low_rank.flatten(2))[0, 0]


def one_head(model, attn, x, query, keys, channels, head):
    config, width, kind = model.config, model.head_dim, attn.rope_kind
    latent = attn.q_a_norm(attn.q_a_proj(x[query]))
    q = rope(model, kind, attn.q_b_norm(attn.q_b_proj(latent).view(-1, width))[head], query)
    hidden = keys if "window" in channels else []
    window = range(max(0, query - config.sliding_window + 1), query + 1)
    tokens = [t for t in window if t not in hidden]
    seen = [rope(model, kind, attn.kv_norm(attn.kv_proj(x[t])), t) for t in tokens]
    if attn.layer_type != SLIDING:
        closed = range((query + 1) // config.compress_rates[attn.layer_type])
        pooled = keys if "entries" in channels else []
        if attn.layer_type == CSA:
            ignored = keys if "indexer" in channels else []
            closed = selected(model, attn.compressor.indexer, x, latent, query, closed, ignored)
        made = [entry(model, attn.compressor, x, e, pooled, width) for e in closed]
        seen += [e for e in made if e is not None]
    if not seen:
        return q * 0
    scores = torch.stack([*[q @ k * width**-0.5 for k in seen], attn.sinks[head]])
    mixed = (scores.softmax(0)[:-1, None] * torch.stack(seen)).sum(0)
    return rotate_back(mixed, *model.rotary[kind](torch.tensor(query)))


def selected(model, indexer, x, latent, query, closed, ignored):
    config, width = model.config, model.config.index_head_dim
    q = rope(model, "compress", indexer.q_b_proj(latent).view(-1, width), query)
    weights = indexer.scorer.weights_proj(x[query]) * config.index_n_heads**-0.5
    scores = {}
    for e in closed:
        k = entry(model, indexer, x, e, ignored, width)
        if k is not None:
            scores[e] = float((weights * (q @ k * width**-0.5).relu()).sum())
    return sorted(sorted(scores, key=lambda e: (-scores[e], e))[: config.index_topk])


SUBSETS = [CHANNELS, ("window",), ("entries",), ("indexer",), ("window", "entries")]


@pytest.mark.parametrize("layer", KINDS)
@pytest.mark.parametrize("channels", SUBSETS)
def test_the_block_without_the_token(layer, channels):
    for keys, queries in CASES:
        with MODEL.knockout(layer, queries, keys, channels=channels):
            cache = output(layer, names=["attention_mask"])
        found = cache["attention_output", layer]
        for row, start in ROWS:
            x = cache["attention_norm_output", layer][row, start:]
            for query in [q for q in queries if q < len(x)]:
                expected = reference(layer, x, query, keys, channels)
                error = (found[row, start + query] - expected).abs().max()
                assert error < 2e-5, (keys, query, row)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_models(seed):
    draw = random.Random(seed)
    model = Dsv4.from_config(random_config(draw), seed=seed)
    length = draw.randint(3, 60)
    ids = torch.randint(0, model.vocab_size, (1, length))
    for layer in range(model.num_layers):
        queries = draw.sample(range(length), min(4, length))
        first = draw.randrange(length)
        keys = draw.choice((draw.sample(range(length), 2), list(range(first, first + 9))))
        channels = draw.choice(SUBSETS)
        read = f"layers.{layer}.attention_norm_output"
        name = f"layers.{layer}.self_attn.attention_output"
        with model.knockout(layer, queries, keys, channels=channels):
            cache = model.run_with_cache(ids, [read, name])[1]
        size = cache[name].abs().max()
        for query in queries:
            expected = reference(layer, cache[read][0], query, keys, channels, model=model)
            assert (cache[name][0, query] - expected).abs().max() <= 1e-4 * size, (layer, query)


@pytest.mark.parametrize("layer", KINDS)
def test_heads(layer):
    keys, queries = CASES[2]
    with MODEL.knockout(layer, queries, keys, heads=[0, 3]):
        cache = output(layer, names=["attention_mask"])
        changed = output(layer, noise_at(keys), names=[f"layers.{layer}.self_attn.attention_premix"])
    for row, start in ROWS:
        x = cache["attention_norm_output", layer][row, start:]
        for query in queries:
            expected = reference(layer, x, query, keys, heads=[0, 3])
            found = cache["attention_output", layer][row, start + query]
            assert (found - expected).abs().max() < 2e-5
    name = f"layers.{layer}.self_attn.attention_premix"
    with MODEL.knockout(layer, queries, keys, heads=[0, 3]):
        plain = output(layer, names=[name])[name]
    heads = [at(v, queries).unflatten(-1, (MODEL.num_heads, -1)) for v in (plain, changed[name])]
    assert torch.equal(heads[0][:, [0, 3]], heads[1][:, [0, 3]])
    assert not torch.equal(heads[0][:, [1, 2]], heads[1][:, [1, 2]])


@pytest.mark.parametrize("layer", KINDS)
def test_the_gradient_of_the_token_is_zero(layer):
    keys, queries = [3, 4], [9, 10, 30]
    reads = f"layers.{layer}.attention_norm_output"
    names = [reads, f"layers.{layer}.self_attn.attention_output"]
    with torch.enable_grad(), MODEL.knockout(layer, queries, keys):
        cache = MODEL.run_with_cache(IDS, names, attention_mask=MASK, detach=False)[1]
        (gradient,) = torch.autograd.grad(at(cache[names[1]], queries).square().sum(), cache[reads])
    assert bool((at(gradient, keys) == 0).all())
    assert bool((at(gradient, [8]) != 0).any())


def test_all_blocks_and_rows_of_their_own():
    """Every block at once: the last token is as if the keys held anything."""
    queries, keys = torch.tensor([[36, 35], [31, 30]]), torch.tensor([[4, 5], [2, 3]])
    with MODEL.knockout(range(3), queries, keys):
        for layer in KINDS:
            name = f"layers.{layer}.self_attn.attention_output"

            def other(x, hook):
                x = x.clone()
                x[0, 4:6], x[1, PAD + 2 : PAD + 4] = 1.5, -0.5
                return x

            base, moved = output(layer, stop=3), output(layer, other, stop=3)
            assert torch.equal(base[0, 35:], moved[0, 35:]), name
            assert torch.equal(base[1, PAD + 30 :], moved[1, PAD + 30 :]), name


def test_nothing_is_hidden_from_earlier_queries():
    for layer in KINDS:
        with MODEL.knockout(layer, [5, 6], [8, 30]):
            assert torch.equal(at(output(layer), [5, 6]), at(spelled(layer), [5, 6]))
    with MODEL.knockout(1, None, None):
        assert bool((output(1)[MASK.bool()] == 0).all()), "only the sink is left"


def test_with_a_cache_and_in_generation():
    queries, keys = slice(10, None), [2, 3, 6, 13]
    for level, hidden in (("token", keys), ("entry", [0, 2])):
        layers = range(3) if level == "token" else [1, 2]
        with MODEL.knockout(layers, queries, hidden, level=level):
            full = MODEL(IDS)
            for sizes in ([8, 1, 6, 22], [1] * 15 + [22], [21, 16]):
                kv = MODEL.new_kv_cache(2, 64)
                parts = [MODEL(part, kv_cache=kv) for part in IDS.split(sizes, dim=1)]
                assert (torch.cat(parts, 1) - full).abs().max() < 2e-4, (level, sizes)
            padded = MODEL(torch.cat((IDS, IDS[:, :4]), 1), attention_mask=torch.arange(41).expand(2, -1) < 37)
            assert (padded[:, :37] - full).abs().max() < 2e-4
            whole = MODEL.generate(IDS[:1, :20], 12, eos_token_id=None)
            again = MODEL(whole)
        assert torch.equal(again[:, 19:-1].argmax(-1), whole[:, 20:])
        assert not torch.equal(whole, MODEL.generate(IDS[:1, :20], 12, eos_token_id=None))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_random_feeding(seed):
    """Padding and chunks change nothing, whatever is hidden from whom."""
    draw = random.Random(seed)
    model = Dsv4.from_config(random_config(draw), seed=seed)
    length, pad = draw.randint(6, 50), draw.randint(1, 6)
    ids = torch.randint(0, model.vocab_size, (2, length))
    level = draw.choice(("token", "entry"))
    layers = [i for i, k in enumerate(model.layer_types) if level == "token" or k != SLIDING]
    queries = draw.choice((slice(draw.randrange(length), None), torch.randint(0, length, (2, 3))))
    keys = draw.choice((draw.sample(range(length), 2), torch.randint(0, length, (2, 4))))
    heads = draw.choice((None, [0]))
    sizes = []
    while sum(sizes) < length:
        sizes.append(draw.randint(1, min(9, length - sum(sizes))))
    with model.knockout(layers, queries, keys, level=level, heads=heads):
        full = model(ids)
        padded = torch.cat((ids[:, :1].expand(-1, pad), ids), 1)
        mask = torch.arange(length + pad).expand(2, -1) >= pad
        left = model(padded, attention_mask=mask)[:, pad:]
        kv = model.new_kv_cache(2, 64)
        parts = [model(part, kv_cache=kv) for part in ids.split(sizes, dim=1)]
    for found in (left, torch.cat(parts, 1)):
        assert (found - full).abs().max() < 1e-4 * full.abs().max()


def test_a_cache_cut_back():
    """Copies of entries that closed again are those of the tokens fed last."""
    other = IDS.roll(3, 1)
    with MODEL.knockout(range(3), slice(10, None), [1, 9]):
        kv = MODEL.new_kv_cache(2, 64)
        MODEL(other, kv_cache=kv)
        kv.truncate(6)
        found = MODEL(IDS[:, 6:], kv_cache=kv)
        full = MODEL(torch.cat((other[:, :6], IDS[:, 6:]), 1))
    assert (found - full[:, 6:]).abs().max() < 2e-4


def test_keys_fed_before():
    kv = MODEL.new_kv_cache(2, 64)
    MODEL(IDS[:, :20], kv_cache=kv)
    with MODEL.knockout(1, None, [2]), pytest.raises(ValueError, match="before the context"):
        MODEL(IDS[:, 20:], kv_cache=kv)
    assert kv.length.tolist() == [20, 20]
    with MODEL.knockout(0, None, [18]):
        found = MODEL(IDS[:, 20:], kv_cache=kv)
    with MODEL.knockout(0, slice(20, None), [18]):
        assert (found - MODEL(IDS)[:, 20:]).abs().max() < 2e-4


@pytest.mark.parametrize("layer", [1, 2])
def test_entries(layer):
    entries, queries = [1, 2], [20, 30, 31]
    names = [f"layers.{layer}.self_attn.attention_{leaf}" for leaf in ("scores", "probabilities")]
    plain = output(layer, names=names)
    masks = slice(SEQ + 1, SEQ + 3)
    with MODEL.knockout(layer, queries, entries, level="entry"):
        cache = output(layer, names=names)
    expected = plain[names[0]].clone()
    for row, start in ROWS:
        for q in queries:
            expected[row, :, start + q, masks] = -torch.inf
    assert torch.equal(cache[names[0]], expected)
    assert torch.equal(cache[names[1]][:, :, :20], plain[names[1]][:, :, :20])
    with MODEL.knockout(layer, queries, entries, level="entry", heads=2):
        cache = output(layer, names=names)
    expected[:, [0, 1, 3]] = plain[names[0]][:, [0, 1, 3]]
    assert torch.equal(cache[names[0]], expected)


def test_another_entry_takes_the_place():
    name = "layers.1.self_attn.compressor.indexer.indexer_selection"
    scores = name.replace("selection", "scores")
    plain = output(1, names=[name, scores])
    gone = int(plain[name][0, 36, 0])
    for before, count in ((False, 3), (True, 3)):
        with MODEL.knockout(1, 36, gone, level="entry", before_topk=before):
            cache = output(1, names=[name, "layers.1.self_attn.attention_probabilities"])
        chosen = cache[name][0, 36]
        assert (gone in chosen) == (not before)
        seen = (cache["attention_probabilities", 1][0, 0, 36, SEQ:] > 0).sum()
        assert seen == (count if before else count - 1)
    best = plain[scores][0, 36].clone()
    best[gone] = -torch.inf
    assert set(chosen.tolist()) == set(best.topk(3).indices.tolist())


def test_other_edits_go_on():
    """Hooks at scores and probabilities act on what is left."""
    name = "layers.2.self_attn.attention_probabilities"
    with MODEL.knockout(2, [30], [3]), MODEL.ablate(name, pos=30, heads=1):
        cache = output(2, names=["layers.2.self_attn.attention_head_outputs"])
    outputs = cache["attention_head_outputs", 2]
    assert bool((outputs[0, 30, 1] == 0).all())
    assert bool((outputs[0, 30, 0] != 0).any())


def test_two_knockouts_of_one_block():
    """Queries of their own: the token before each is hidden."""
    with MODEL.knockout(2, 20, 19), MODEL.knockout(2, 21, 20):
        both = output(2)
    for query in (20, 21):
        with MODEL.knockout(2, query, query - 1):
            assert torch.allclose(at(output(2), [query]), at(both, [query]), atol=1e-6)
    with MODEL.knockout(2, [20, 21], 19), MODEL.knockout(2, 21, 20):  # noqa: SIM117
        with pytest.raises(ValueError, match="share queries"):
            output(2)


def test_wrong_knockouts():
    wrong = [
        ((9, 1, 0), {}, ValueError, "layer 9"),
        ((1, 1, 0), {"level": "word"}, ValueError, "level='word'"),
        ((1, 1, 0), {"channels": "values"}, ValueError, "channels='values'"),
        ((1, 1, 0), {"channels": ()}, ValueError, "expected some of"),
        ((1, 1, 0), {"channels": "window", "level": "entry"}, ValueError, "one way"),
        ((1, 1, 0), {"before_topk": True}, ValueError, "before_topk"),
        ((1, 1, 0), {"heads": 4}, ValueError, "got 4"),
        ((0, 1, 0), {"level": "entry"}, ValueError, "has no entries"),
        ((1, "last", 0), {}, TypeError, "queries='last'"),
        ((1, 1, 2.5), {}, TypeError, "keys=2.5"),
    ]
    for args, keywords, kind, text in wrong:
        with pytest.raises(kind, match=text), MODEL.knockout(*args, **keywords):
            pass
    assert MODEL.list_hooks() == []
    kv = MODEL.new_kv_cache(2, 64)
    with MODEL.knockout(1, -1, -2), pytest.raises(ValueError, match="from the row's start"):
        MODEL(IDS, kv_cache=kv)
    with MODEL.knockout(1, -1, -2):
        by_end = output(1)
    for row, start in ROWS:
        last = SEQ - start - 1
        with MODEL.knockout(1, last, last - 1):
            assert torch.equal(by_end[row, -1], output(1)[row, -1])
    with pytest.warns(UserWarning, match="met no token"), MODEL.knockout(1, 99, 1):
        output(1)
