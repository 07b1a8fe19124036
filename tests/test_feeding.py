"""However the tokens arrive, the numbers are those of each row alone in one call."""

import copy
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4 import Dsv4
from dsv4.config import CSA
from dsv4.testing import (
    CHOICES,
    LIMITS,
    NEAR_TIES_ALLOWED,
    as_sets,
    fault_config,
    names_of,
    random_config,
    random_ids,
    relative_error,
)
from dsv4.testing_feeding import (
    Alone,
    Feed,
    assert_fed,
    batch_of,
    draw_feeds,
    one_by_one,
    row_of,
    run_feeds,
)

LIMIT = LIMITS["row alone"].relative
LONGEST = 60


def examples(count):
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=checks,
    )


draws = st.randoms(use_true_random=False)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def draw_rows(draw, config, rows):
    """Ids of several lengths; some repeat a token or two."""
    words = draw.choice((1, 2, config.vocab_size, config.vocab_size))
    lengths = [draw.randint(1, LONGEST) for _ in range(rows)]
    generator = torch.Generator().manual_seed(draw.randint(0, 2**32))
    return [torch.randint(words, (n,), generator=generator) for n in lengths]


def draw_model(draw, dtype=torch.float32, **fixed):
    if draw.random() < 0.4:
        fixed["index_n_heads"] = draw.choice((1, 2))
    config = random_config(draw, **fixed)
    model = Dsv4.from_config(config, seed=draw.randint(0, 1000), dtype=dtype)
    if CSA in config.layer_types and draw.random() < 0.2:
        # Every index score is 0: all entries tie.
        for layer in model.layers:
            if hasattr(getattr(layer.self_attn, "compressor", None), "indexer"):
                layer.self_attn.compressor.indexer.scorer.weights_proj.weight.zero_()
    return model


def draw_cache(draw, model, rows):
    longest = max(map(len, rows)) + draw.choice((0, 0, 9))
    return model.new_kv_cache(len(rows), longest, rewind=draw.choice((None, 0, 0, 5)))


def check_feeding(draw, names):
    """(tokens compared, rows that met a near tie)."""
    model = draw_model(draw)
    rows = draw_rows(draw, model.config, draw.randint(1, 3))
    alone = [Alone(model, row) for row in rows]
    names = names if isinstance(names, str) else names_of(model, names)
    agrees, tokens = [True] * len(rows), 0
    feeds = draw_feeds(draw, [len(row) for row in rows])
    for fed in run_feeds(model, rows, feeds, draw_cache(draw, model, rows), names):
        for r in range(len(rows)):
            if agrees[r]:
                agrees[r] = assert_fed(model, alone[r], fed, r)
                tokens += fed.feed.counts[r]
    return tokens, agrees.count(False)


@examples(40)
@given(draws)
def test_every_value_of_every_call_is_that_of_the_row_alone(draw):
    _, ties = check_feeding(draw, "**")
    assert ties == 0


@examples(30)
@given(draws)
def test_logits_and_choices_without_watching_the_rest(draw):
    _, ties = check_feeding(draw, ("expert_indices", "indexer_selection"))
    assert ties == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_feeding_sweep(seed):
    tokens = ties = 0
    for trial in range(60):
        watched = "**" if trial % 2 else CHOICES
        counts = check_feeding(random.Random(1000 * seed + trial), watched)
        tokens, ties = tokens + counts[0], ties + counts[1]
    assert ties <= NEAR_TIES_ALLOWED * tokens


@examples(12)
@given(draws)
def test_float64(draw):
    model = draw_model(draw, torch.float64)
    rows = draw_rows(draw, model.config, 2)
    alone = [Alone(model, row, []) for row in rows]
    kv = draw_cache(draw, model, rows)
    for fed in run_feeds(model, rows, draw_feeds(draw, [len(row) for row in rows]), kv):
        for r in range(2):
            place = slice(fed.feed.columns[r], fed.feed.columns[r] + fed.feed.counts[r])
            expected = alone[r].logits[fed.starts[r] : fed.starts[r] + fed.feed.counts[r]]
            error = (fed.logits[r, place] - expected).abs().flatten()
            assert float(error.max(dim=0).values if len(error) else 0) <= 1e-12 * float(alone[r].logits.abs().max())


@pytest.mark.parametrize("seed", range(6))
def test_bfloat16_takes_the_same_routes(seed):
    draw = random.Random(seed)
    config = random_config(draw, sliding_window=8, index_topk=3)
    model = Dsv4.from_config(config, seed=seed, dtype=torch.bfloat16)
    exact = copy.deepcopy(model).float()
    row = random_ids(config, 1, 50, seed)[0]
    leaves = ("expert_indices", "indexer_selection")
    names = names_of(model, leaves)
    alone, truth = Alone(model, row, names), exact(row)[0]
    kv = model.new_kv_cache(1, 50, rewind=0)
    logits = []
    for fed in run_feeds(model, [row], draw_feeds(draw, [50]), kv, names):
        place = slice(fed.feed.columns[0], fed.feed.columns[0] + fed.feed.counts[0])
        logits.append(fed.logits[0, place])
        for name in names:
            ours = row_of(fed.values[name], model.hook_dict[name].axes, fed, 0)
            assert torch.equal(as_sets(ours), as_sets(alone.expected(name, fed, 0))), name
    ours, theirs = (relative_error(x, truth) for x in (torch.cat(logits), alone.logits))
    assert ours <= 2 * theirs


# Boundaries: windows that close in a call of their own, rows that hold nothing yet.


@pytest.fixture(scope="module")
def model():
    return Dsv4.from_config(fault_config(), seed=3)


@pytest.fixture(scope="module")
def row(model):
    return random_ids(model.config, 1, 24, seed=4)[0]


@pytest.fixture(scope="module")
def alone(model, row):
    return Alone(model, row)


@pytest.mark.parametrize("prefill", [0, 1, 2, 3, 4, 5, 7, 8, 9, 11, 15, 16, 17, 23])
def test_token_by_token_after_a_prefill(model, row, alone, prefill):
    kv = model.new_kv_cache(1, 24, rewind=0)
    names = "**" if prefill in (0, 11) else "**.compressed_entries"
    for fed in run_feeds(model, [row], one_by_one(24, prefill), kv, names):
        assert assert_fed(model, alone, fed, 0)
    assert kv.length.tolist() == [24]


@pytest.mark.parametrize("size", range(2, 24))
def test_chunks_of_one_size(model, row, alone, size):
    sizes = [min(size, 24 - at) for at in range(0, 24, size)]
    feeds = [Feed((n,), (0,), n) for n in sizes]
    kv = model.new_kv_cache(1, 24)
    for fed in run_feeds(model, [row], feeds, kv):
        assert assert_fed(model, alone, fed, 0)


def test_before_the_first_entry_the_entry_axes_are_empty(model, row):
    kv = model.new_kv_cache(1, 24)
    _, cache = model.run_with_cache(row[:3], "layers.1.**", kv_cache=kv)
    at = "layers.1.self_attn.compressor"
    assert cache[f"{at}.compressed_entries"].shape == (1, 0, model.head_dim)
    assert cache[f"{at}.indexer.indexer_scores"].shape == (1, 3, 0)
    assert cache[f"{at}.indexer.indexer_selection"].shape == (1, 3, 0)
    assert cache["layers.1.self_attn.attention_keys"].shape == (1, 1, 3, model.head_dim)
    _, cache = model.run_with_cache(row[3:4], "layers.1.**", kv_cache=kv)
    assert cache[f"{at}.compressed_entries"].shape == (1, 1, model.head_dim)
    assert cache["layers.1.self_attn.attention_key_positions"].tolist() == [[0, 1, 2, 3, 0]]


def test_a_call_in_which_no_row_has_a_token_changes_nothing(model, row):
    kv = model.new_kv_cache(2, 24)
    model(torch.stack((row[:9], row[9:18])), kv_cache=kv)
    before = kv.state
    logits = model(row[:4].expand(2, -1), attention_mask=torch.zeros(2, 4), kv_cache=kv)
    assert torch.isfinite(logits).all()
    assert kv.length.tolist() == [9, 9]
    assert all(
        torch.equal(a.read((0, 0), 1), b.read((0, 0), 1)) for a, b in zip(kv.state.tapes, before.tapes, strict=True) if a.held.shape[1]
    )
    rest = model(torch.stack((row[9:12], row[:3])), kv_cache=kv)
    for r, ids in enumerate((row[:12], torch.cat((row[9:18], row[:3])))):
        assert relative_error(rest[r], model(ids)[0, 9:]) <= LIMIT


@pytest.mark.parametrize("side", ["left", "right"])
def test_decoding_on_from_a_padded_prefill(model, side):
    """Rows of 5, 8 and 13 tokens in one batch, then 12 single tokens, as each alone."""
    rows = [random_ids(model.config, 1, n + 12, seed=n)[0] for n in (5, 8, 13)]
    counts = (5, 8, 13)
    columns = tuple(13 - n for n in counts) if side == "left" else (0, 0, 0)
    feeds = [Feed(counts, columns, 13), *[Feed((1, 1, 1), (0, 0, 0), 1)] * 12]
    alone = [Alone(model, row) for row in rows]
    names = ["**.attention_scores", "**.indexer_keys", "**.compressed_entries", "**.mlp_output"]
    for fed in run_feeds(model, rows, feeds, model.new_kv_cache(3, 25, rewind=0), names):
        assert all(assert_fed(model, alone[r], fed, r) for r in range(3))


def test_masks_with_and_without_the_past(model, row):
    """A mask of past + new columns is that of the new ones; its past has to be what was fed."""
    rows = [row[:9], row[9:20]]
    ids, mask = batch_of(rows, (0, 0), Feed((9, 11), (2, 0), 11))
    logits = []
    for shape in ("new", "both", "none"):
        kv = model.new_kv_cache(2, 30)
        model(ids, attention_mask=mask, kv_cache=kv)
        new = torch.ones(2, 2)
        given = {"new": new, "both": torch.cat((mask, new), dim=1), "none": None}[shape]
        logits.append(model(row[20:22].expand(2, -1), attention_mask=given, kv_cache=kv))
        wrong = torch.cat((torch.ones(2, 11), torch.ones(2, 2)), dim=1)
        with pytest.raises(ValueError, match="attention_mask"):
            model(row[:2].expand(2, -1), attention_mask=wrong, kv_cache=kv)
        assert kv.length.tolist() == [11, 13]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


# Ties.


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("equal", [True, False])
def test_entries_that_tie_are_taken_from_the_lowest_in_every_way_of_feeding(heads, equal):
    config = fault_config(index_n_heads=heads, index_topk=3)
    model = Dsv4.from_config(config, seed=heads)
    name = "layers.1.self_attn.compressor.indexer.indexer_selection"
    if equal:
        model.layers[1].self_attn.compressor.indexer.scorer.weights_proj.weight.zero_()
    row = torch.full((40,), 5)
    row[::7] = 6
    alone = Alone(model, row, [name, name.replace("selection", "scores")])
    if equal:
        assert alone.values[name][0, -1].tolist() == [0, 1, 2]
    draw = random.Random(heads)
    for feeds in (one_by_one(40), draw_feeds(draw, [40]), one_by_one(40, 17)):
        for fed in run_feeds(model, [row], feeds, model.new_kv_cache(1, 40), [name]):
            ours = row_of(fed.values[name], model.hook_dict[name].axes, fed, 0)
            # In this order, not only as a set.
            assert torch.equal(ours, alone.expected(name, fed, 0))


# Cutting, branching, going on: any order of operations.


class Branches:
    """Caches beside the rows that each of them holds."""

    def __init__(self, draw):
        self.draw, self.model = draw, draw_model(draw)
        rows = draw.choice((1, 1, 2, 3))
        kv = self.model.new_kv_cache(rows, 4 * LONGEST, rewind=draw.choice((None, None, 0, 6)))
        self.all = [(kv, [torch.zeros(0, dtype=torch.int64)] * rows)]

    def new_ids(self, count):
        return torch.tensor([self.draw.randrange(self.model.vocab_size) for _ in range(count)]).long()

    def feed(self, kv, rows):
        width = self.draw.choice((1, 3, 20, LONGEST))
        counts = [self.draw.randint(0, width) for _ in rows]
        columns = tuple(self.draw.choice((0, width - n)) for n in counts)
        starts = [len(row) for row in rows]
        rows[:] = [torch.cat((row, self.new_ids(n))) for row, n in zip(rows, counts, strict=True)]
        ids, mask = batch_of(rows, starts, Feed(tuple(counts), columns, width))
        if max(map(len, rows)) > kv.max_length:
            with pytest.raises(ValueError, match="max_length"):
                self.model(ids, attention_mask=mask, kv_cache=kv)
            rows[:] = [row[:n] for row, n in zip(rows, starts, strict=True)]
        else:
            self.model(ids, attention_mask=mask, kv_cache=kv)

    def truncate(self, kv, rows):
        least, held = kv.state.floor, kv.length.tolist()
        lengths = [self.draw.randint(f, n) for f, n in zip(least, held, strict=True)]
        if self.draw.random() < 0.5:
            one = self.draw.randint(max(least), max(*held, max(least)))
            if all(min(one, n) >= f for f, n in zip(least, held, strict=True)):
                kv.truncate(one)
                rows[:] = [row[:one] for row in rows]
                return
        kv.truncate(self.draw.choice((lengths, tuple(lengths), torch.tensor(lengths))))
        rows[:] = [row[:n] for row, n in zip(rows, lengths, strict=True)]

    def clone(self, kv, rows):
        self.all.append((kv.clone(), list(rows)))

    def deepcopy(self, kv, rows):
        self.all.append((copy.deepcopy(kv), list(rows)))

    def select(self, kv, rows):
        chosen = [self.draw.randrange(len(rows)) for _ in range(self.draw.choice((1, 2, 4)))]
        self.all.append((kv.select(chosen), [rows[r] for r in chosen]))

    def expand(self, kv, rows):
        if len(rows) == 1:
            count = self.draw.choice((1, 2, 5))
            self.all.append((kv.expand(count), rows * count))

    def reset(self, kv, rows):
        kv.reset()
        rows[:] = [row[:0] for row in rows]

    def fail(self, kv, rows):
        """A hook raises somewhere in a block."""

        def stop(value, hook):
            raise KeyboardInterrupt

        names = [name for name in self.model.hook_dict if name.startswith("layers")]
        ids = self.new_ids(7).expand(len(rows), -1)
        if max(map(len, rows)) + 7 <= kv.max_length:
            with pytest.raises(KeyboardInterrupt):
                self.model.run_with_hooks(ids, [(self.draw.choice(names), stop)], kv_cache=kv)

    def check(self, kv, rows):
        """One more call, against each row alone."""
        count = self.draw.choice((1, 1, 2, 7))
        if max(map(len, rows)) + count > kv.max_length:
            return
        rows[:] = [torch.cat((row, self.new_ids(count))) for row in rows]
        logits = self.model(torch.stack([row[-count:] for row in rows]), kv_cache=kv)
        for r, row in enumerate(rows):
            expected = self.model(row)[0]
            error = float((logits[r] - expected[-count:]).abs().max() / expected.abs().max())
            assert error <= LIMIT, f"row {r} of {len(row)} tokens"
        assert kv.length.tolist() == [len(row) for row in rows]

    def play(self, steps):
        ways = (self.feed, self.feed, self.truncate, self.clone, self.select, self.expand)
        ways += (self.reset, self.fail, self.deepcopy, self.check, self.check, self.check)
        for _ in range(steps):
            self.draw.choice(ways)(*self.draw.choice(self.all))
        for branch in self.all:
            self.check(*branch)


@examples(60)
@given(draws)
def test_cut_branch_and_go_on_in_any_order(draw):
    Branches(draw).play(draw.randint(2, 10))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_cutting_sweep(seed):
    for trial in range(60):
        draw = random.Random(1000 * seed + trial)
        Branches(draw).play(draw.randint(5, 25))


@pytest.mark.parametrize("rewind", [None, 24])
def test_cut_to_every_length_and_continued_differently(model, row, rewind):
    full = model.new_kv_cache(1, 40, rewind=rewind)
    model(row, kv_cache=full)
    other = random_ids(model.config, 1, 9, seed=9)[0]
    for length in range(24, -1, -1):
        kv = full.clone()
        kv.truncate(length)
        expected = model(torch.cat((row[:length], other)))
        logits = model(other, kv_cache=kv)
        assert relative_error(logits, expected[:, length:]) <= LIMIT


def test_a_sweep_of_suffixes_over_prefixes_of_one_row(model, row):
    """Each prefix is reached by cutting one cache, and continued by a batch of suffixes."""
    kv = model.new_kv_cache(1, 40, rewind=24)
    model(row, kv_cache=kv)
    suffixes = random_ids(model.config, 5, 6, seed=2)
    for length in (24, 20, 17, 9, 8, 3):
        kv.truncate(length)
        logits = model(suffixes, kv_cache=kv.expand(5))
        whole = model(torch.cat((row[:length].expand(5, -1), suffixes), dim=1))
        assert relative_error(logits, whole[:, length:]) <= LIMIT
