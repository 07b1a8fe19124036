"""Patterns over full names: what they match, and what is said where they match nothing."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.config import CSA, HCA, SLIDING, Dsv4Config
from dsv4.names import match
from dsv4.values import absent_reason, all_names

CONFIG = Dsv4Config.tiny(num_hidden_layers=12)
NAMES = all_names(CONFIG)
absent = functools.partial(absent_reason, CONFIG)


def complaint(pattern, names=NAMES, absent=absent) -> str:
    with pytest.raises(KeyError) as caught:
        match(pattern, names, absent=absent)
    return caught.value.args[0]


def fits(pattern: list[str], name: list[str]) -> bool:
    """The definition over dotted parts: a ** of its own takes any number of them, also none."""
    if not pattern:
        return not name
    head, rest = pattern[0], pattern[1:]
    if head == "**":
        return any(fits(rest, name[i:]) for i in range(len(name) + 1))
    longest = len(name) if "**" in head else min(1, len(name))
    taken = range(1, longest + 1)
    return any(letters(head, ".".join(name[:i])) and fits(rest, name[i:]) for i in taken)


def letters(pattern: str, text: str) -> bool:
    """The definition within a part: ** takes any characters, * any but a dot."""
    if not pattern:
        return not text
    if pattern.startswith("**"):
        return any(letters(pattern[2:], text[i:]) for i in range(len(text) + 1))
    if pattern.startswith("*"):
        part = text.partition(".")[0]
        return any(letters(pattern[1:], text[i:]) for i in range(len(part) + 1))
    return text[:1] == pattern[0] and letters(pattern[1:], text[1:])


parts = st.sampled_from(["a", "b", "ab", "a1", "a10", "ba"])
some_names = st.lists(st.lists(parts, min_size=1, max_size=4).map(".".join), min_size=1, max_size=12, unique=True)
globs = st.lists(
    st.sampled_from(["a", "b", "ab", "a1", "*", "**", "a*", "*b", "a**", "**b", "*1*", "a*b"]),
    min_size=1,
    max_size=5,
).map(".".join)


@given(globs, some_names)
@settings(max_examples=400, deadline=None)
def test_globs_match_what_the_definition_matches(pattern, names):
    expected = [name for name in names if fits(pattern.split("."), name.split("."))]
    if expected:
        assert match(pattern, names) == expected
    else:
        with pytest.raises(KeyError):
            match(pattern, names)


@given(st.lists(st.sampled_from(NAMES), max_size=8), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_lists_give_each_name_once_in_forward_order(chosen, random):
    shuffled = random.sample(chosen * 2, len(chosen) * 2)
    expected = [name for name in NAMES if name in chosen]
    for kind in (list, tuple, set, frozenset):
        assert match(kind(shuffled), NAMES) == expected
    predicates = [functools.partial(lambda a, b: a == b, name) for name in shuffled]
    assert match(predicates, NAMES) == expected


@given(st.sampled_from(NAMES))
@settings(max_examples=60, deadline=None)
def test_an_exact_name_means_itself_only(name):
    assert match(name, NAMES, absent=absent) == [name]


def test_empty_means_nothing():
    for nothing in ([], (), set(), {}.keys()):
        assert match(nothing, NAMES) == []


def test_everything():
    assert match("**", NAMES) == NAMES
    assert match(lambda name: True, NAMES) == NAMES


def test_layer_1_is_not_layer_10():
    found = match("layers.1.**", NAMES)
    assert found
    assert all(name.startswith("layers.1.") for name in found)
    assert match("layers.1*.layer_output", NAMES) == [f"layers.{i}.layer_output" for i in (1, 10, 11)]


def test_star_stays_within_a_part():
    assert match("layers.*.layer_output", NAMES) == [f"layers.{i}.layer_output" for i in range(12)]
    assert match("layers.3.*", NAMES) == [name for name in NAMES if name.startswith("layers.3.") and name.count(".") == 2]


def test_two_stars_anywhere_and_at_no_part():
    assert match("**.logits", NAMES) == ["logits"]
    assert match("layers.3.**.layer_output", NAMES) == ["layers.3.layer_output"]
    weights = [f"layers.{i}.mlp.expert_weights" for i in range(12)]
    assert match("**.expert_weights", NAMES) == weights
    assert match("layers.**weights", NAMES) == [n for n in NAMES if n.endswith("weights")][:-1]
    assert match("**.**", NAMES) == NAMES
    assert match("**.mlp.**", NAMES) == [name for name in NAMES if ".mlp." in name]


def test_a_str_is_not_a_list_of_letters():
    assert match("logits", ["l", "o", "g", "i", "t", "s", "logits"]) == ["logits"]


@pytest.mark.parametrize("wrong", [None, 3, b"logits", {"logits": 1}, [3], ["logits", None], [["logits"]]])
def test_other_types_are_type_errors(wrong):
    with pytest.raises(TypeError, match=r"expected a str, a predicate .* list, tuple or set"):
        match(wrong, NAMES)


def test_a_generator_is_a_type_error():
    with pytest.raises(TypeError, match="generator"):
        match((name for name in NAMES), NAMES)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("layers.3.mlp.expert_weigths", "the nearest: layers.3.mlp.expert_weights"),
        ("layers.*.mlp.expert_weigths", r"the nearest: layers.*.mlp.expert_weights"),
        ("model.layers.3.layer_output", "the nearest: layers.3.layer_output"),
        ("blocks.3.hook_resid_post", "the nearest: layers"),
        ("", "the nearest: "),
        ("layers.[34].layer_output", "only * and ** stand for other characters"),
        ("layers.3.mlp", "is a module, not a value: write 'layers.3.mlp.**'"),
        ("layers.3", "write 'layers.3.**'"),
        ("layers", "write 'layers.**'"),
        ("layers.*.self_attn", "write 'layers.*.self_attn.**'"),
        ("self_attn", "write '**.self_attn.**'"),
        ("layer_output", "write 'layers.*.layer_output'"),
        ("mlp.expert_weights", "write 'layers.*.mlp.expert_weights'"),
        ("3.layer_output", "write 'layers.3.layer_output'"),
        ("expert_*", "write '**.expert_*'"),
        ("layers.-1.layer_output", "do not count blocks from the end; write layers.0 to layers.11"),
        ("layers.12.layer_output", "no such block; write layers.0 to layers.11"),
        ("layers.0.mlp.router_selection_scores", "a hash_moe block chooses experts by token id"),
        ("layers.0.self_attn.compressor.compressed_entries", "keeps no compressed entries"),
        ("layers.3.self_attn.compressor.indexer.indexer_scores", "block has no indexer"),
        ("layers.0.**.indexer_*", "block has no indexer"),
        ("layers.0.self_attn.compressor.*", "keeps no compressed entries"),
        ("layers.0.self_attn.compressor", "keeps no compressed entries"),
    ],
)  # fmt: skip
def test_what_is_said(pattern, said):
    assert said in complaint(pattern)
    assert repr(pattern) in complaint(pattern)
    assert complaint(["logits", pattern]) == complaint(pattern)


def test_a_value_that_no_block_has():
    config = Dsv4Config.tiny(layer_types=[SLIDING, HCA])
    reason = functools.partial(absent_reason, config)
    names = all_names(config)
    assert f"exists on {CSA} blocks" in complaint("indexer_scores", names, reason)
    assert f"exists on {CSA} blocks" in complaint("layers.*.**.indexer_scores", names, reason)
    assert match("**.compressed_entries", names) == ["layers.1.self_attn.compressor.compressed_entries"]


def test_a_glob_needs_only_one_block_that_has_the_value():
    assert len(match("layers.*.mlp.router_selection_scores", NAMES, absent=absent)) == 10


def test_a_predicate_that_is_never_true():
    assert "is true for none of" in complaint(lambda name: False)


def test_without_reasons_an_absent_name_has_neighbours():
    said = complaint("layers.0.mlp.router_selection_scores", absent=None)
    assert "the nearest: " in said
