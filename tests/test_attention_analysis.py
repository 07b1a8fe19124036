"""cache.attention against definitions written out token by token, and against finite edits."""

import random

import pytest
import torch

from dsv4 import ActivationCache, Dsv4
from dsv4.config import CSA, HCA, SLIDING
from dsv4.kernels.norm_rotary import rotate, rotate_back
from dsv4.testing import random_config, random_ids
from dsv4.testing_probes import changed, padded_batch, watched_model

LAYERS = range(6)
EXACT = 1e-5
MODEL = watched_model(seed=3)
IDS, MASK = padded_batch(MODEL.vocab_size)
REAL = MASK.bool()
PATTERN = ["**.attention_probabilities", "**.attention_sink_probability", "**.compressor_gates", "layers.*.attention_norm_output"]
PATHS = [*PATTERN, "**.attention_values", "**.attention_output"]


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def everything():
    with torch.no_grad():
        return MODEL.run_with_cache(IDS, "**", attention_mask=MASK)[1]


def models():
    for seed in range(8):
        config = random_config(random.Random(700 + seed))
        model = Dsv4.from_config(config, seed=seed)
        ids, mask = random_ids(config, 2, 26, seed), torch.ones(2, 26, dtype=torch.int64)
        mask[1, slice(0, 5) if seed % 2 else slice(21, 26)] = 0
        yield model, ids, mask


def per_query(x, real):
    """[b N s ...] -> [real tokens, N, ...]."""
    return x.transpose(1, 2)[real]


def parts_of(model, cache, layer, row):
    """{(entry, position): [D]}: the rotated part of each token in each entry, one at a time."""
    compressor, config = model.layers[layer].self_attn.compressor, model.config
    rate, width, overlaps = config.rate(layer), config.head_dim, config.layer_types[layer] == CSA
    x, gates = cache["attention_norm_output", layer][row], cache["compressor_gates", layer][row]
    column = {int(p): i for i, p in enumerate(cache.positions[row]) if p >= 0}
    found = {}
    for e in range(len(column) // rate):
        slots = []
        for m in range(gates.shape[1]):
            position = e * rate + m - (rate if overlaps else 0)
            if position >= 0:
                projected = compressor.kv_proj.weight @ x[column[position]]
                series = projected[width:] if overlaps and m >= rate else projected[:width]
                slots.append((position, gates[e, m] * series))
        pooled = sum(part for _, part in slots)
        scale = (pooled.square().mean() + compressor.kv_norm.eps).rsqrt() * compressor.kv_norm.weight
        cos, sin = model.rotary["compress"](torch.tensor([e * rate]))
        for position, part in slots:
            turned = rotate((part * scale)[None], cos, sin)[0]
            found[e, position] = found.get((e, position), 0) + turned
    return found


# Masses.


def test_mass_sums_to_one_and_is_zero_where_there_is_nothing():
    for model, ids, mask in models():
        _, cache = model.run_with_cache(ids, ["**.attention_probabilities", "**.attention_sink_probability"], attention_mask=mask)
        mass, sinks = cache.attention.mass_by_kind(), cache.attention.sink_mass()
        real = mask.bool()
        for i in range(model.num_layers):
            pattern = cache["attention_probabilities", i]
            assert mass[i].shape == (2, model.num_heads, 26, 3)
            assert (mass[i].sum(-1) - 1).abs().max() <= EXACT
            assert torch.equal(sinks[i], cache["attention_sink_probability", i])
            assert torch.equal(mass[i][..., 2], sinks[i])
            assert (mass[i][..., 0] - pattern[..., :26].sum(-1)).abs().max() <= EXACT
            if model.layer_types[i] == SLIDING:
                assert not mass[i][..., 1].any()
        shown = [float(cell) for cell in str(mass).splitlines()[-1].split()[1:]]
        assert shown == pytest.approx(per_query(mass[model.num_layers - 1], real).mean((0, 1)).tolist(), rel=1e-3)
        assert torch.equal(mass.stack()[0], mass[0])
        assert mass.layers == list(range(model.num_layers))


def test_layers_are_those_captured():
    _, cache = MODEL.run_with_cache(IDS, ["layers.1.**", "layers.4.**"], attention_mask=MASK)
    assert cache.attention.sink_mass().layers == [1, 4]
    assert cache.attention.token_pattern(layers=4).layers == [4]
    assert "sink mass" in str(cache.attention.sink_mass())
    with pytest.raises(ValueError, match=r"layers\.2\.self_attn\.attention_sink_probability"):
        cache.attention.sink_mass(layers=[1, 2])
    with pytest.raises(ValueError, match="went through layers"):
        cache.attention.sink_mass(layers=6)


# Patterns by token.


@pytest.mark.parametrize("mode", ["shares", "gates"])
def test_token_patterns_keep_the_mass(mode):
    kinds = set()
    for model, ids, mask in models():
        _, cache = model.run_with_cache(ids, PATTERN, attention_mask=mask)
        real, patterns = mask.bool(), cache.attention.token_pattern(mode)
        for i, pattern in patterns.items():
            kinds.add(model.layer_types[i])
            assert pattern.shape == (2, model.num_heads, 26, 26)
            left = 1 - cache["attention_sink_probability", i]
            assert (per_query(pattern.sum(-1), real) - per_query(left, real)).abs().max() <= EXACT
            # Nothing on padding, nothing on what comes later.
            at = cache.positions
            unseen = (at[:, None, :] > at[:, :, None]) | (at < 0)[:, None, :]
            assert not pattern[unseen[:, None].expand_as(pattern) & real[:, None, :, None]].any()
            if mode == "gates":
                assert pattern.min() >= 0
    assert kinds == {SLIDING, CSA, HCA}


@pytest.mark.parametrize("layer", [1, 2])
def test_shares_are_those_of_the_parts(everything, layer):
    """Every entry taken apart in a loop."""
    pattern = everything.attention.token_pattern()[layer]
    probabilities, entries = everything["attention_probabilities", layer], everything["compressed_entries", layer]
    for row in range(2):
        parts = parts_of(MODEL, everything, layer, row)
        column = {int(p): i for i, p in enumerate(everything.positions[row]) if p >= 0}
        expected = probabilities[row, :, :, :19].clone()
        for e in {e for e, _ in parts}:
            of_entry = {p: part for (entry, p), part in parts.items() if entry == e}
            # The parts are the entry.
            assert (sum(of_entry.values()) - entries[row, e]).abs().max() <= EXACT
            for position, part in of_entry.items():
                share = part @ entries[row, e] / entries[row, e].square().sum()
                expected[:, :, column[position]] += probabilities[row, :, :, 19 + e] * share
        assert (pattern[row] - expected)[:, REAL[row]].abs().max() <= EXACT


def test_a_rope_with_a_factor_of_its_own():
    rope = {"rope_type": "yarn", "rope_theta": 16e4, "factor": 4.0, "original_max_position_embeddings": 64}
    rope |= {"beta_fast": 32, "beta_slow": 1, "attention_factor": 1.5}
    plain = {"rope_type": "default", "rope_theta": 1e4}
    model = watched_model(seed=3, rope_parameters={"main": plain, "compress": rope})
    _, cache = model.run_with_cache(IDS, "**", attention_mask=MASK)
    for layer in (1, 2):
        entries, parts = cache["compressed_entries", layer], parts_of(model, cache, layer, 0)
        assert (sum(part for (e, _), part in parts.items() if e == 1) - entries[0, 1]).abs().max() <= EXACT
        shares = {p: part @ entries[0, 1] / entries[0, 1].square().sum() for (e, p), part in parts.items() if e == 1}
        window = cache["attention_probabilities", layer][0, :, -1, :19]
        dealt = cache.attention.token_pattern()[layer][0, :, -1] - window
        others = sum(
            cache["attention_probabilities", layer][0, :, -1, 19 + e, None] * _row(parts, entries[0, e], e)
            for e in range(entries.shape[1])
            if e != 1
        )
        expected = cache["attention_probabilities", layer][0, :, -1, 20, None] * torch.tensor([shares.get(p, 0.0) for p in range(19)])
        assert (dealt - others - expected).abs().max() <= EXACT
        paths = cache.attention.value_paths(by="token", layers=layer)[layer]
        assert (paths.sum((1, 3))[REAL] - 1).abs().max() <= 1e-4


def _row(parts, entry, e):
    return torch.tensor([float(parts[e, p] @ entry / entry.square().sum()) if (e, p) in parts else 0.0 for p in range(19)])


# Heads and paths.


def test_head_results():
    for layer in LAYERS:
        _, cache = MODEL.run_with_cache(IDS, [f"layers.{layer}.self_attn.attention_premix"], attention_mask=MASK)
        _, whole = MODEL.run_with_cache(IDS, f"layers.{layer}.self_attn.*", attention_mask=MASK)
        results = cache.attention.head_results(layer)
        assert (results - whole["attention_head_results", layer])[REAL].abs().max() <= EXACT * results.abs().max()
        assert (results.sum(2) - whole["attention_output", layer])[REAL].abs().max() <= EXACT * results.abs().max()
        assert torch.equal(whole.attention.head_results(layer), whole["attention_head_results", layer])
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.attention_premix"):
        cache.attention.head_results(1)
    name = "layers.5.self_attn.attention_head_results"
    with MODEL.hooks([(name, changed)]):
        _, cache = MODEL.run_with_cache(IDS, "layers.5.self_attn.attention_premix", attention_mask=MASK)
        _, held = MODEL.run_with_cache(IDS, name, attention_mask=MASK)
    with pytest.raises(ValueError, match="edited"):
        cache.attention.head_results(5)
    assert torch.equal(held.attention.head_results(5), held[name])


@pytest.mark.parametrize("by", ["key", "token"])
def test_paths_sum_to_what_the_attention_added(by):
    for model, ids, mask in models():
        _, cache = model.run_with_cache(ids, PATHS, attention_mask=mask)
        real = mask.bool()
        shares = cache.attention.value_paths(by=by)
        direction, each = torch.randn(model.hidden_size), torch.randn(2, 26, model.hidden_size)
        along, per_token = cache.attention.value_paths(direction, by=by), cache.attention.value_paths(each, by=by)
        for i in range(model.num_layers):
            output = cache["attention_output", i]
            size = along[i].abs().sum((1, 3))[real].max()
            assert ((along[i].sum((1, 3)) - output @ direction)[real].abs().max()) <= EXACT * size
            assert ((per_token[i].sum((1, 3)) - (output * each).sum(-1))[real].abs().max()) <= EXACT * per_token[i].abs().sum((1, 3))[
                real
            ].max()
            assert (shares[i].sum((1, 3))[real] - 1).abs().max() <= 1e-4
            if by == "key":
                assert along[i].shape == cache["attention_probabilities", i].shape


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_path_is_what_zeroing_its_probability_takes_away(everything, layer):
    direction = torch.randn(MODEL.hidden_size)
    paths = everything.attention.value_paths(direction, layers=layer)[layer]
    name = f"layers.{layer}.self_attn.attention_probabilities"
    output = f"layers.{layer}.self_attn.attention_output"
    for head, key in ((0, 3), (2, 7), (1, paths.shape[-1] - 1)):

        def cut(pattern, hook, head=head, key=key):
            pattern[:, head, :, key] = 0

        with MODEL.hooks([(name, cut)]):
            _, cache = MODEL.run_with_cache(IDS, output, attention_mask=MASK)
        fall = (everything[output] - cache[output]) @ direction
        assert (fall - paths[:, head, :, key])[REAL].abs().max() <= EXACT * everything[output].abs().max() * direction.norm()


@pytest.mark.parametrize("layer", [1, 2])
def test_paths_by_token_are_those_of_the_parts(everything, layer):
    direction = torch.randn(MODEL.hidden_size)
    paths = everything.attention.value_paths(direction, layers=layer, by="token")[layer]
    attention = MODEL.layers[layer].self_attn
    probabilities = everything["attention_probabilities", layer]
    row, query, head = 0, 17, 2
    cos, sin = MODEL.rotary["compress"](torch.tensor([query]))
    expected = torch.zeros(19)
    vectors = [(p, probabilities[row, head, query, p], everything["attention_values", layer][row, 0, p]) for p in range(19)]
    parts = parts_of(MODEL, everything, layer, row)
    vectors += [(p, probabilities[row, head, query, 19 + e], part) for (e, p), part in parts.items()]
    for position, probability, vector in vectors:
        heads = torch.zeros(1, 1, MODEL.num_heads, MODEL.head_dim)
        heads[0, 0, head] = rotate_back((probability * vector)[None], cos, sin)[0]
        added = attention.o_b_proj(attention.o_a_proj(heads.flatten(2)).flatten(2))[0, 0]
        expected[position] += added @ direction
    assert (paths[row, head, query] - expected).abs().max() <= EXACT * expected.abs().max()


# Caches of every shape.


def test_positions_and_batch_axis_dropped(everything):
    names = [*PATHS, "**.attention_premix"]
    _, last = MODEL.run_with_cache(IDS, names, attention_mask=MASK, pos=-1)
    for i in LAYERS:
        assert torch.equal(last.attention.sink_mass()[i], everything.attention.sink_mass()[i][:, :, -1])
        assert torch.equal(last.attention.mass_by_kind()[i], everything.attention.mass_by_kind()[i][:, :, -1])
        assert (last.attention.head_results(i) - everything["attention_head_results", i][:, -1]).abs().max() <= EXACT
        assert (last.attention.value_paths()[i] - everything.attention.value_paths()[i][:, :, -1]).abs().max() <= EXACT
    assert "mean" in str(last.attention.sink_mass())
    for cache in (
        last,
        MODEL.run_with_cache(IDS, names, attention_mask=MASK, pos=[1, 0])[1],
        MODEL.run_with_cache(IDS[:1], names, pos=list(range(18, -1, -1)))[1],
    ):
        with pytest.raises(ValueError, match="needs every token"):
            cache.attention.token_pattern()
    _, one = MODEL.run_with_cache(IDS[:1], PATTERN)
    flat = one.remove_batch_dim()
    for mode in ("shares", "gates"):
        for i, pattern in flat.attention.token_pattern(mode).items():
            assert pattern.shape == (4, 19, 19)
            assert torch.equal(pattern, one.attention.token_pattern(mode)[i][0])
    assert str(flat.attention.mass_by_kind()) == str(one.attention.mass_by_kind())


def test_saved_and_loaded(everything, tmp_path):
    everything.save(tmp_path / "cache")
    loaded = ActivationCache.load(tmp_path / "cache")
    assert torch.equal(loaded.attention.mass_by_kind()[1], everything.attention.mass_by_kind()[1])
    with pytest.raises(ValueError, match="with_model"):
        loaded.attention.token_pattern()
    loaded = loaded.with_model(MODEL)
    assert torch.equal(loaded.attention.token_pattern()[1], everything.attention.token_pattern()[1])


def test_decoding_and_generating():
    ids = IDS[:1]
    kv = MODEL.new_kv_cache(1)
    MODEL(ids[:, :11], kv_cache=kv)
    _, cache = MODEL.run_with_cache(ids[:, 11:], [*PATHS, "**.attention_key_positions"], kv_cache=kv)
    _, whole = MODEL.run_with_cache(ids, PATHS)
    for i in LAYERS:
        mass = cache.attention.mass_by_kind()[i]
        assert (mass - whole.attention.mass_by_kind()[i][:, :, 11:]).abs().max() <= EXACT
        assert (cache.attention.value_paths()[i].sum((1, 3)) - 1).abs().max() <= 1e-4
    with pytest.raises(ValueError, match="needs every token"):
        cache.attention.token_pattern()
    out, cache = MODEL.generate(ids, max_new_tokens=6, names=PATHS, eos_token_id=None, align=True)
    _, whole = MODEL.run_with_cache(out[:, :-1], PATHS)
    for i in LAYERS:
        assert (cache.attention.token_pattern()[i] - whole.attention.token_pattern()[i]).abs().max() <= 1e-4
        assert (cache.attention.mass_by_kind()[i] - whole.attention.mass_by_kind()[i]).abs().max() <= 1e-4
    _, cache = MODEL.generate(ids, max_new_tokens=2, names=PATHS, eos_token_id=None)
    for ask in ("mass_by_kind", "token_pattern"):
        with pytest.raises(ValueError, match="align=True"):
            getattr(cache.attention, ask)()


def test_bfloat16():
    model = watched_model(torch.bfloat16, seed=3)
    _, cache = model.run_with_cache(IDS, PATHS, attention_mask=MASK)
    for i, pattern in cache.attention.token_pattern().items():
        left = 1 - cache["attention_sink_probability", i]
        assert (per_query(pattern.sum(-1), REAL) - per_query(left, REAL)).abs().max() <= EXACT
    for by in ("key", "token"):
        for paths in cache.attention.value_paths(by=by).values():
            # One rounding of heads, of low rank values, of the output; entries are rounded twice.
            assert (paths.sum((1, 3))[REAL] - 1).abs().max() <= 0.02


# Edits and wrong questions.


@pytest.mark.parametrize(
    ("name", "ask"),
    [
        ("attention_probabilities", "mass_by_kind"),
        ("compressor.compressed_entries", "token_pattern"),
        ("attention_values", "token_pattern"),
        ("attention_premix", "value_paths"),
        ("attention_low_rank_output", "value_paths"),
        ("attention_output", "value_paths"),
    ],
)
def test_edits_that_break_the_sum_are_refused(name, ask):
    name = f"layers.1.self_attn.{name}"
    with MODEL.hooks([(name, changed)]):
        _, cache = MODEL.run_with_cache(IDS, PATHS, attention_mask=MASK)
    with pytest.raises(ValueError, match=f"edited {name}"):
        getattr(cache.attention, ask)()
    getattr(cache.attention, ask)(layers=[0, 2])


def test_edited_gates_and_patterns_are_taken_as_they_are():
    names = ["layers.1.self_attn.attention_probabilities", "layers.1.self_attn.attention_values"]
    with MODEL.hooks([(n, changed) for n in names]):
        _, cache = MODEL.run_with_cache(IDS, PATHS, attention_mask=MASK)
    assert (cache.attention.value_paths()[1].sum((1, 3))[REAL] - 1).abs().max() <= 1e-4
    with MODEL.hooks([("layers.1.self_attn.compressor.compressor_gates", changed)]):
        _, cache = MODEL.run_with_cache(IDS, PATHS, attention_mask=MASK)
    left = 1 - cache["attention_sink_probability", 1]
    pattern = cache.attention.token_pattern()[1]
    assert (per_query(pattern.sum(-1), REAL) - per_query(left, REAL)).abs().max() <= 1e-4


def test_missing_values_and_wrong_words():
    _, cache = MODEL.run_with_cache(IDS, attention_mask=MASK)
    for ask, leaf in (
        ("sink_mass", "attention_sink_probability"),
        ("mass_by_kind", "attention_probabilities"),
        ("value_paths", "attention_values"),
    ):
        with pytest.raises(ValueError, match=rf"layers\.\*\.self_attn\.{leaf}"):
            getattr(cache.attention, ask)()
    _, cache = MODEL.run_with_cache(IDS, "**.attention_probabilities", attention_mask=MASK)
    with pytest.raises(ValueError, match="compressor_gates"):
        cache.attention.token_pattern("gates")
    _, cache = MODEL.run_with_cache(IDS, ["**.attention_probabilities", "**.compressor_gates"], attention_mask=MASK)
    cache.attention.token_pattern("gates")
    with pytest.raises(ValueError, match="attention_norm_output"):
        cache.attention.token_pattern()
    with pytest.raises(ValueError, match="mode='norms'"):
        cache.attention.token_pattern("norms")
    with pytest.raises(ValueError, match="by='head'"):
        cache.attention.value_paths(by="head")


@pytest.mark.parametrize("length", [1, 3, 5])
def test_short_rows(length):
    """No entry at all, or one entry on one kind of block only."""
    _, cache = MODEL.run_with_cache(IDS[:, :length], PATHS)
    for mode in ("shares", "gates"):
        for i, pattern in cache.attention.token_pattern(mode).items():
            assert pattern.shape == (2, 4, length, length)
            assert (pattern.sum(-1) - (1 - cache["attention_sink_probability", i])).abs().max() <= EXACT
    for by in ("key", "token"):
        assert all((paths.sum((1, 3)) - 1).abs().max() <= 1e-4 for paths in cache.attention.value_paths(by=by).values())
