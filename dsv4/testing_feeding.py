"""Ways of feeding tokens into a KVCache, and what each value of each call has to be: a slice of
what the row alone gives in one call.

Axes: b row, s column of the call, k key, e entry.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.kv_cache import KVCache
from dsv4.model import Dsv4
from dsv4.steps import ABSENT
from dsv4.testing import LIMITS, NEAR_TIE, SCORES_OF, as_sets, boundary_gap

# What padding holds: any id will do, it is masked.
FILLER = 1


@dataclass(frozen=True)
class Feed:
    """One call: how many of its next tokens each row gets, from which column on; how wide it is."""

    counts: tuple[int, ...]
    columns: tuple[int, ...]
    width: int

    @property
    def is_padded(self) -> bool:
        return any(count != self.width for count in self.counts)


def draw_feeds(draw: random.Random, lengths: Sequence[int], most: int | None = None) -> list[Feed]:
    """Any way to feed rows of these lengths: pieces of 0 to `most` tokens, padded left or right."""
    left, feeds = list(lengths), []
    while any(left):
        limit = draw.choice((1, 2, 4, 9, 33, max(lengths))) if most is None else most
        counts = [draw.randint(0, min(limit, n)) for n in left]
        if draw.random() < 0.5:
            counts = [min(limit, n) for n in left]
        if not any(counts):
            continue
        left = [n - count for n, count in zip(left, counts, strict=True)]
        width = max(counts) + draw.choice((0, 0, 0, 1, 5))
        columns = [draw.choice((0, width - count)) for count in counts]
        feeds.append(Feed(tuple(counts), tuple(columns), width))
    return feeds


def one_by_one(length: int, prefill: int = 0) -> list[Feed]:
    """A prefill of some tokens of one row, then a call for each further token."""
    first = [Feed((prefill,), (0,), prefill)] if prefill else []
    return [*first, *[Feed((1,), (0,), 1)] * (length - prefill)]


def batch_of(rows: Sequence[Tensor], starts: Sequence[int], feed: Feed) -> tuple[Tensor, Tensor]:
    """(ids [b, width], mask [b, width]) of a call, from rows of ids [n] fed up to `starts`."""
    ids = torch.full((len(rows), feed.width), FILLER)
    mask = torch.zeros(len(rows), feed.width, dtype=torch.int64)
    for r, row in enumerate(rows):
        place = slice(feed.columns[r], feed.columns[r] + feed.counts[r])
        ids[r, place] = row[starts[r] : starts[r] + feed.counts[r]]
        mask[r, place] = 1
    return ids, mask


@dataclass(frozen=True)
class Fed:
    """What a call gave. starts: tokens of each row before it."""

    feed: Feed
    starts: tuple[int, ...]
    logits: Tensor
    values: Mapping[str, Tensor]


def run_feeds(model: Dsv4, rows: Sequence[Tensor], feeds: Sequence[Feed], kv: KVCache, names=()) -> Iterator[Fed]:
    """Make the calls one after the other; `kv` says how far each row has been fed."""
    for feed in feeds:
        starts = tuple(kv.length.tolist())
        ids, mask = batch_of(rows, starts, feed)
        given = {"attention_mask": mask} if feed.is_padded else {}
        logits, cache = model.run_with_cache(ids, names, kv_cache=kv, max_bytes=None, **given)
        yield Fed(feed, starts, logits, cache)


class Alone:
    """A row's run alone, in one call: the values that each call has to show a slice of."""

    def __init__(self, model: Dsv4, row: Tensor, names="**"):
        self.model, self.config, self.length = model, model.config, len(row)
        with torch.no_grad():
            self.logits, self.values = model.run_with_cache(row.unsqueeze(0), names, max_bytes=None)
        self.logits = self.logits[0]

    def expected(self, name: str, fed: Fed, r: int) -> Tensor:
        """The call's value for row r at its real columns; zeros, -inf or -1 for what it lacks."""
        if name == "next_token_probs":
            return self.logits[fed.starts[r] + fed.feed.counts[r] - 1].softmax(-1)
        leaf, words = name.rsplit(".", 1)[-1], self.model.hook_dict[name].axes.split()
        value = self.values[name][0]
        for axis, word in enumerate(words[1:]):
            index = self._index(word, name, fed, r)
            if index is not None:
                shape = [*value.shape[:axis], 1, *value.shape[axis + 1 :]]
                absent = value.new_full(shape, ABSENT.get(leaf, 0))
                value = torch.cat((value, absent), dim=axis).index_select(axis, index)
        return value

    def _index(self, word: str, name: str, fed: Fed, r: int) -> Tensor | None:
        """Places on the axis of the run alone, -1 for what is absent; None for a common axis."""
        feed, past, count = fed.feed, fed.starts[r], fed.feed.counts[r]
        ends = [start + n for start, n in zip(fed.starts, feed.counts, strict=True)]
        layer = self.model.hook_dict[name].layer
        rate = None if layer is None else self.config.rate(layer)
        rate = max(self.length, *ends) + 1 if rate is None else rate
        before, after, most = past // rate, (past + count) // rate, max(ends) // rate
        closed = [*range(after), *[-1] * (most - after)]
        if word == "s":
            places = list(range(past, past + count))
        elif word == "e":
            places = closed
        elif word == "e_new":
            new = max(n // rate - start // rate for start, n in zip(fed.starts, ends, strict=True))
            places = [*range(before, after), *[-1] * (new - (after - before))]
        elif word.startswith("min("):
            places = list(range(min(self.config.index_topk, most)))
        elif word == "k":
            reach = self.config.sliding_window - 1
            window = max(min(start, reach) for start in fed.starts)
            held = min(past, reach)
            own = [-1] * feed.width
            own[feed.columns[r] : feed.columns[r] + count] = range(past, past + count)
            entries = [-1 if place < 0 else self.length + place for place in closed]
            places = [*[-1] * (window - held), *range(past - held, past), *own, *entries]
        else:
            return None
        size = self.values[name].shape[self.model.hook_dict[name].axes.split().index(word)]
        # A longer row of the batch makes the selection wider than this row's own.
        known = [place if 0 <= place < size else size for place in places]
        return torch.tensor(known, dtype=torch.int64)


def row_of(value: Tensor, axes: str, fed: Fed, r: int) -> Tensor:
    """Row r of a call's value, at its real columns."""
    words = axes.split()
    value = value[r]
    if "s" in words:
        value = value.narrow(words.index("s") - 1, fed.feed.columns[r], fed.feed.counts[r])
    return value


def differs_from(model: Dsv4, alone: Alone, fed: Fed, r: int) -> int | None:
    """The first token of row r in the call for which a block chooses otherwise than in the run
    alone (its place in the row), None where all agree.

    AssertionError when the scores of that choice do not tie. Up to that token everything has to
    agree; from there on it may differ.
    """
    firsts = []
    for name in fed.values:
        leaf = name.rsplit(".", 1)[-1]
        scores = SCORES_OF.get(leaf) and alone.values.get(name.replace(leaf, SCORES_OF[leaf]))
        if scores is None:
            continue
        ours = as_sets(row_of(fed.values[name], model.hook_dict[name].axes, fed, r))
        theirs = as_sets(alone.expected(name, fed, r))
        places = (ours != theirs).any(-1).nonzero()
        if len(places):
            place = fed.starts[r] + int(places[0])
            gap = float(boundary_gap(scores[0, place], theirs.shape[-1]))
            if place < min(firsts, default=place + 1):
                assert gap <= NEAR_TIE, f"{name}, token {place} of row {r}: no tie, gap {gap:.3g}"
            firsts.append(place)
    return min(firsts, default=None)


def assert_fed(model: Dsv4, alone: Alone, fed: Fed, r: int) -> bool:
    """Row r of the call agrees with its run alone in all that was captured; False at a near tie.

    Errors are taken over the largest value of the run alone, so that a slice of small numbers is
    held to what the whole is held to.
    """
    first, count = fed.feed.columns[r], fed.feed.counts[r]
    if not count:
        return True
    if differs_from(model, alone, fed, r) is not None:
        return False
    where = f"row {r}, tokens {fed.starts[r]} to {fed.starts[r] + count - 1}"
    expected = alone.logits[fed.starts[r] : fed.starts[r] + count]
    logits = fed.logits[r, first : first + count]
    _assert_near(logits, expected, alone.logits, "row alone", f"logits, {where}")
    for name, value in fed.values.items():
        ours = row_of(value, model.hook_dict[name].axes, fed, r)
        whole = alone.values[name]
        _assert_near(ours, alone.expected(name, fed, r), whole, "fed value", f"{name}, {where}")
    return True


def _assert_near(actual: Tensor, expected: Tensor, whole: Tensor, limit: str, what: str) -> None:
    assert actual.shape == expected.shape, f"{what}: {list(actual.shape)}, not {list(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, not {expected.dtype}"
    assert not actual.isnan().any(), f"{what}: NaN"
    infinite = expected.isinf()
    assert torch.equal(actual.isinf(), infinite), f"{what}: infinities stand elsewhere"
    error = (actual.double() - expected.double()).masked_fill(infinite, 0.0).abs().flatten()
    largest = whole.double().masked_fill(whole.isinf(), 0.0).abs().flatten()
    if len(error):
        allowed = LIMITS[limit].relative * (float(largest.max()) if len(largest) else 0.0)
        assert float(error.max()) <= allowed, f"{what}: error {float(error.max()):.3g}"
