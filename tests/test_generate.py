"""Generation: the tokens of a full forward at every step, hooks in every step, rows that end."""

import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

import dsv4
from dsv4 import Dsv4
from dsv4.generate import read_generation_config
from dsv4.testing import LIMITS, fault_config, random_config, random_ids, relative_error, twin
from dsv4.text import Tokenizer

LIMIT = LIMITS["row alone"].relative
DEMO = Path(dsv4.__file__).parent / "demo_checkpoint"
PROMPT = "mira has key . tom has cup . 2 2 makes 4 ana has map . whose key ?"


@pytest.fixture(scope="module")
def model():
    return Dsv4.from_config(fault_config(), seed=3).requires_grad_(False)


@pytest.fixture(scope="module")
def ids(model):
    return random_ids(model.config, 3, 13, seed=4)


@pytest.fixture(scope="module")
def demo():
    return Dsv4.from_pretrained(DEMO, dtype=torch.float32)


@pytest.fixture
def written(model):
    """A model whose tokens are UTF-8 bytes, and a way to make its rows say texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    model = Dsv4.from_config(fault_config(vocab_size=256, eos_token_id=255), seed=0)
    model.tokenizer = Tokenizer(backend=backend, vocab_size=256, bos_token_id=0, eos_token_id=255, pad_token_id=0)

    def says(*texts):
        plans = [model.to_tokens(text)[0].tolist() for text in texts]

        def force(value, hook):
            for r, plan in enumerate(plans):
                value[r] = 0
                value[r, :, plan[hook.step] if hook.step < len(plan) else 255] = 9.0

        return model.hooks([("logits", force)])

    return model, says


def by_full_forwards(model, ids, count, **run):
    """Greedy tokens without a cache: one forward over everything for each."""
    for _ in range(count):
        ids = torch.cat((ids, model(ids, **run)[:, -1].argmax(-1, keepdim=True)), dim=1)
    return ids


# The tokens.


@pytest.mark.parametrize("seed", range(3))
def test_greedy_is_the_best_of_a_full_forward_at_every_step(seed):
    config = random_config(random.Random(seed), sliding_window=5)
    model = Dsv4.from_config(config, seed=seed)
    prompt = random_ids(config, 2, 3 + 4 * seed, seed=seed)
    with torch.no_grad():
        expected = by_full_forwards(model, prompt, 18)
    assert torch.equal(model.generate(prompt, 18, eos_token_id=None), expected)


@pytest.mark.parametrize("seed", range(3))
def test_greedy_is_that_of_transformers(seed):
    model = Dsv4.from_config(fault_config(vocab_size=101), seed=seed).requires_grad_(False)
    theirs, prompt = twin(model), random_ids(model.config, 2, 5 + 6 * seed, seed=seed)
    keywords = dict(max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=None)
    expected = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **keywords)
    assert torch.equal(model.generate(prompt, 20, eos_token_id=None), expected)


@pytest.mark.parametrize("penalty", [0.7, 1.4])
def test_repetition_penalty_is_that_of_transformers(penalty):
    model = Dsv4.from_config(fault_config(vocab_size=33), seed=2).requires_grad_(False)
    prompt = random_ids(model.config, 2, 9, seed=1)
    expected = twin(model).generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=20,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        repetition_penalty=penalty,
    )
    ours = model.generate(prompt, 20, eos_token_id=None, repetition_penalty=penalty)
    assert torch.equal(ours, expected)
    assert not torch.equal(ours, model.generate(prompt, 20, eos_token_id=None))


@pytest.mark.parametrize("form", ["left", "right", "lists"])
def test_rows_of_unequal_length_as_each_alone(model, form):
    rows = [random_ids(model.config, 1, n, seed=n)[0] for n in (5, 8, 13)]
    alone = [model.generate(row, 12, eos_token_id=None)[0, len(row) :] for row in rows]
    if form == "lists":
        ids = model.generate([row.tolist() for row in rows], 12, eos_token_id=None)
    else:
        width = 13
        padded, mask = torch.full((3, width), 1), torch.zeros(3, width)
        for r, row in enumerate(rows):
            at = slice(width - len(row), width) if form == "left" else slice(0, len(row))
            padded[r, at], mask[r, at] = row, 1
        ids = model.generate(padded, 12, attention_mask=mask, eos_token_id=None)
        assert torch.equal(ids[:, :width], padded)
    assert ids.shape == (3, 25)
    for r, row in enumerate(rows):
        assert torch.equal(ids[r, 13:], alone[r])
        if form != "right":
            # The row reads on without a gap.
            assert torch.equal(ids[r, 13 - len(row) : 13], row)


@pytest.mark.parametrize("given", [torch.int32, "1-D", "list", "mask", "bool mask"])
def test_every_form_of_input(model, ids, given):
    row = ids[:1]
    expected = model.generate(row, 5, eos_token_id=None)
    form, keywords = row, {}
    if given == "1-D":
        form = row[0]
    elif given == "list":
        form = row[0].tolist()
    elif given == "mask":
        keywords = {"attention_mask": torch.ones(1, 13)}
    elif given == "bool mask":
        keywords = {"attention_mask": torch.ones(1, 13, dtype=torch.bool)}
    else:
        form = row.to(given)
    assert torch.equal(model.generate(form, 5, eos_token_id=None, **keywords), expected)


def test_no_state_is_left_in_the_model(model, ids):
    """A, then others, then A: bit for bit the same; no parameter has moved."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    first, values = model.generate(ids, 9, names=["layers.3.layer_output"], eos_token_id=None)
    model.generate(ids[:1, :3], 5)
    model.generate(random_ids(model.config, 2, 17), 5, temperature=1.0)
    again, same = model.generate(ids, 9, names=["layers.3.layer_output"], eos_token_id=None)
    assert torch.equal(first, again)
    assert torch.equal(values["layer_output", 3], same["layer_output", 3])
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    for name, module in model.named_modules():
        assert set(vars(module)) - attributes[name] <= {"_hook_dict", "_probed"}, name


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_new_tokens(model, ids, count):
    runs = model.stage.runs
    out, cache = model.generate(ids, count, names="**.layer_output", eos_token_id=None)
    assert torch.equal(out, by_full_forwards(model, ids, count))
    assert model.stage.runs - runs == count + count
    assert out.dtype == torch.int64
    if count:
        assert cache["layer_output", 0].shape[1] == 13 + count - 1
    else:
        assert len(cache) == 0
        assert list(model.generate_stream(ids, 0)) == []


@pytest.mark.parametrize("wrong", [-1, 2.0, True, None, "3"])
def test_max_new_tokens_is_checked(model, ids, wrong):
    for verb in (model.generate, model.generate_stream):
        with pytest.raises(ValueError, match="max_new_tokens"):
            verb(ids, wrong)


def test_unknown_keywords_raise(model, ids):
    for verb in (model.generate, model.generate_stream):
        with pytest.raises(TypeError, match="do_sample"):
            verb(ids, 2, do_sample=True)
    with pytest.raises(TypeError, match="names"):
        model.generate_stream(ids, 2, names="**")


def test_an_empty_row_has_nothing_to_continue(model, ids):
    mask = torch.ones(3, 13)
    mask[1] = 0
    with pytest.raises(ValueError, match="row 1 has no token"):
        model.generate(ids, 3, attention_mask=mask)
    kv = model.new_kv_cache(3, 40)
    model(ids, kv_cache=kv)
    with pytest.raises(ValueError, match="row 1 has no token"):
        model.generate(ids, 3, attention_mask=mask, kv_cache=kv)
    for empty in ([], torch.zeros(1, 0, dtype=torch.int64)):
        with pytest.raises(ValueError, match="empty"):
            model.generate(empty, 3)


def test_skip_layers_is_refused_with_a_sentence(model, ids):
    with model.skip_layers([1]), pytest.raises(ValueError, match="skip_layers are refused"):
        model.generate(ids, 3)


# Rows that end.


def test_an_ended_row_is_filled_and_the_others_go_on(model, ids):
    free = model.generate(ids, 14, eos_token_id=None)
    eos = int(free[1, 13 + 4])
    runs = model.stage.runs
    out = model.generate(ids, 14, eos_token_id=eos)
    ends = []
    for r in range(3):
        new = free[r, 13:].tolist()
        end = new.index(eos) + 1 if eos in new else 14
        ends.append(end)
        assert out[r, 13 : 13 + end].tolist() == new[:end]
        assert (out[r, 13 + end :] == eos).all()
    assert out.shape[1] == 13 + max(ends)
    assert model.stage.runs - runs == max(ends)
    assert ends[1] < max(ends)


def test_generation_ends_when_every_row_has(model, ids):
    free = model.generate(ids, 14, eos_token_id=None)
    ends = free[:, 13 + 2].tolist()
    runs = model.stage.runs
    out = model.generate(ids, 14, eos_token_id=ends)
    assert out.shape[1] <= 13 + 3
    assert model.stage.runs - runs == out.shape[1] - 13
    # Filled with the first of them.
    for r in range(3):
        new = out[r, 13:].tolist()
        first = next(i for i, token in enumerate(new) if token in ends)
        assert set(new[first + 1 :]) <= {ends[0]}


def test_where_eos_comes_from(model, ids, monkeypatch):
    free = model.generate(ids[:1], 9, eos_token_id=None)[0, 13:].tolist()
    eos = free[3]
    expected = [*free[: free.index(eos) + 1]]

    def new(**keywords):
        return model.generate(ids[:1], 9, **keywords)[0, 13:].tolist()

    assert new(eos_token_id=eos) == expected
    assert new(eos_token_id=torch.tensor([eos])) == expected
    assert new(eos_token_id=(eos, free[0]))[:1] == free[:1]
    for config in ({"eos_token_id": eos}, {"eos_token_id": [eos, 63]}):
        monkeypatch.setattr(model, "generation_config", config)
        assert new() == expected
        assert new(eos_token_id=None) == free
    monkeypatch.setattr(model, "generation_config", {"eos_token_id": None})
    assert new() == free
    monkeypatch.setattr(model, "generation_config", {})
    other = Dsv4.from_config(fault_config(eos_token_id=[eos, 2]), seed=3)
    assert other.generate(ids[:1], 9)[0, 13:].tolist() == expected
    # An id that the model has no token for can end nothing.
    beyond = Dsv4.from_config(fault_config(eos_token_id=64), seed=3)
    assert beyond.generate(ids[:1], 9)[0, 13:].tolist() == free
    for wrong in (64, -1, "x", 1.5, [True]):
        with pytest.raises(ValueError, match="eos_token_id"):
            new(eos_token_id=wrong)


def test_generation_config_is_read_with_the_checkpoint(tmp_path, demo):
    assert read_generation_config(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert read_generation_config(tmp_path) == {"eos_token_id": [3, 5]}
    assert demo.generation_config == read_generation_config(DEMO)


# Sampling.


def test_a_rows_sample_does_not_depend_on_its_neighbours(model, ids):
    keywords = dict(temperature=1.3, top_k=30, eos_token_id=None)
    together = model.generate(ids, 9, seed=[5, 6, 7], **keywords)
    for r in range(3):
        alone = model.generate(ids[r], 9, seed=5 + r, **keywords)
        assert torch.equal(together[r], alone[0])
    others = torch.cat((random_ids(model.config, 1, 13, seed=8), ids[1:]))
    assert torch.equal(model.generate(others, 9, seed=5, **keywords)[1:], together[1:])
    same = model.generate(ids[:1].expand(3, -1), 9, seed=5, **keywords)
    assert len({tuple(row) for row in same.tolist()}) == 3


def test_sampling_keywords(model, ids):
    greedy = model.generate(ids, 6, eos_token_id=None)
    for keywords in (
        dict(temperature=0, top_k=5, seed=1),
        dict(temperature=1.5, top_k=1, seed=1),
        dict(top_p=1e-6, seed=1),
        dict(min_p=1.0, seed=1),
    ):
        assert torch.equal(model.generate(ids, 6, eos_token_id=None, **keywords), greedy)
    hot = model.generate(ids, 6, eos_token_id=None, temperature=50.0, seed=1)
    assert not torch.equal(hot, greedy)
    with pytest.raises(ValueError, match="2 numbers for 3 rows"):
        model.generate(ids, 6, temperature=1.0, seed=[1, 2])
    with pytest.raises(ValueError, match="top_p"):
        model.generate(ids, 6, top_p=2.0)


# Hooks.


def test_every_step_runs_each_hook_once_and_says_where_it_is(model, ids):
    mask = torch.ones(3, 13)
    mask[1, :4] = 0
    seen, calls = [], Counter()

    def look(value, hook):
        calls[hook.name, hook.step] += 1
        if hook.name == "layers.0.layer_output":
            seen.append((hook.step, hook.positions.clone(), value.shape[1]))

    names = [n for n in model.hook_dict if n != "next_token_probs"]
    with model.hooks([(names, look)]):
        model.generate(ids, 5, attention_mask=mask, eos_token_id=None)
    assert set(calls.values()) == {1}
    assert {step for _, step in calls} == set(range(5))
    assert len(calls) == 5 * len(names)
    assert [(step, width) for step, _, width in seen] == [(0, 13), (1, 1), (2, 1), (3, 1), (4, 1)]
    assert seen[0][1][1].tolist() == [-1] * 4 + list(range(9))
    assert [p[:, 0].tolist() for _, p, _ in seen[1:]] == [[13 + i, 9 + i, 13 + i] for i in range(4)]
    assert model.hook_dict["logits"].step == 0


@pytest.mark.parametrize("kind", ["steer", "one position", "entry", "every position"])
def test_edits_reach_every_step(model, ids, kind):
    """With the cache the same tokens as by full forwards under the same hooks."""

    def add(value, hook):
        return value + 0.5

    def at_position_15(value, hook):
        here = hook.positions == 15
        return torch.where(here[..., None, None], value * -2.0, value)

    def entry_1(value, hook):
        closed = (hook.positions.amax(1) + 1) // 8
        first = closed - value.shape[1]
        number = first[:, None] + torch.arange(value.shape[1])
        return torch.where((number == 1)[..., None], value * -3.0, value)

    hooks = {
        "one position": [("layers.1.layer_output", at_position_15)],
        "entry": [("layers.2.self_attn.compressor.compressed_entries", entry_1)],
        "every position": [("layers.*.attention_collapsed", add)],
    }
    vector = torch.linspace(-1, 1, model.hidden_size)
    context = model.steer(vector, layers=[1]) if kind == "steer" else model.hooks(hooks[kind])
    with context:
        expected = by_full_forwards(model, ids, 10)
        assert torch.equal(model.generate(ids, 10, eos_token_id=None), expected)
    assert not torch.equal(model.generate(ids, 10, eos_token_id=None), expected)


@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_in_a_step_leaves_all_as_it_was(model, ids, step, error):
    def stop(value, hook):
        if hook.step == step:
            raise error

    expected, kv = model.generate(ids, 6, eos_token_id=None), model.new_kv_cache(3, 40)
    user = model.add_hook("layers.2.layer_output", lambda value, hook: None)
    with pytest.raises(error), model.hooks([("layers.1.layer_output", stop)]):
        model.generate(ids, 6, eos_token_id=None, names="**", kv_cache=kv)
    assert kv.length.tolist() == [0 if step == 0 else 13 + step - 1] * 3
    assert model.list_hooks() == [user]
    user.remove()
    assert not any(point.live for point in model.hook_dict.values())
    assert model.hook_dict["logits"].step == 0
    assert torch.equal(model.generate(ids, 6, eos_token_id=None), expected)
    # What the cache holds is what was fed: going on from it gives the same.
    if step:
        held = expected[:, : 13 + step - 1]
        logits = model(ids[:, :4], kv_cache=kv)
        whole = model(torch.cat((held, ids[:, :4]), dim=1))[:, -4:]
        assert relative_error(logits, whole) <= LIMIT


def test_names_do_not_take_the_logits_of_the_whole_prompt(model, ids):
    widths = []

    def look(value, hook):
        widths.append(value.shape[1])

    with model.hooks([("lm_head_output", look)]):
        model.generate(ids, 3, names="layers.1.layer_output")
        model.generate(ids, 3)
    assert set(widths) == {1}
    _, cache = model.generate(ids, 3, names=["logits", "lm_head_output"], eos_token_id=None)
    assert cache["logits"].shape[1] == 13 + 2


def test_too_large_captures_are_refused_before_anything_runs(model, ids):
    runs = model.stage.runs
    with pytest.raises(ValueError, match="max_bytes"):
        model.generate(ids, 5, names="**", max_bytes=1000)
    with pytest.raises(KeyError, match="layer_outputs"):
        model.generate(ids, 5, names="layers.*.layer_outputs")
    assert model.stage.runs == runs


# Going on from a cache.


def test_a_second_turn_goes_on_from_the_cache(model, ids):
    kv = model.new_kv_cache(3, 60, rewind=0)
    first = model.generate(ids, 7, eos_token_id=None, kv_cache=kv)
    assert kv.length.tolist() == [13 + 6] * 3
    new = random_ids(model.config, 3, 5, seed=9)
    # The last token was chosen and not fed.
    second = model.generate(torch.cat((first[:, -1:], new), dim=1), 6, eos_token_id=None, kv_cache=kv)
    assert torch.equal(second[:, 6:], by_full_forwards(model, torch.cat((first, new), dim=1), 6)[:, 25:])


def test_a_row_that_has_ended_does_not_grow_in_the_cache(model, ids):
    free = model.generate(ids, 14, eos_token_id=None)
    eos = int(free[1, 13 + 4])
    kv = model.new_kv_cache(3, 40)
    out = model.generate(ids, 14, eos_token_id=eos, kv_cache=kv)
    for r, held in enumerate(kv.length.tolist()):
        new = out[r, 13:].tolist()
        end = new.index(eos) + 1 if eos in new else len(new)
        assert held == 13 + end - 1
        alone = model(ids[:1, :3], kv_cache=kv.select([r]))
        whole = model(torch.cat((out[r, :held], ids[0, :3])))
        assert relative_error(alone, whole[:, -3:]) <= LIMIT


def test_a_cache_that_cannot_hold_the_answer_is_refused_at_once(model, ids):
    kv = model.new_kv_cache(3, 20)
    runs = model.stage.runs
    with pytest.raises(ValueError, match=r"row 0 may come to 21 tokens.*max_length=20"):
        model.generate(ids, 9, kv_cache=kv)
    with pytest.raises(ValueError, match="holds 2 rows"):
        model.generate(ids, 3, kv_cache=model.new_kv_cache(2, 40))
    assert model.stage.runs == runs
    assert kv.length.tolist() == [0, 0, 0]
    assert model.generate(ids, 8, eos_token_id=None, kv_cache=kv).shape == (3, 21)
    assert kv.length.tolist() == [20, 20, 20]


def test_samples_of_one_prompt_over_a_shared_prefix(model, ids):
    kv = model.new_kv_cache(1, 60)
    model(ids[:1, :-1], kv_cache=kv)
    keywords = dict(temperature=1.0, seed=3, eos_token_id=None)
    many = model.generate(ids[:1, -1:].expand(5, -1), 8, kv_cache=kv.expand(5), **keywords)
    whole = model.generate(ids[:1].expand(5, -1), 8, **keywords)
    assert torch.equal(many, whole[:, -9:])


# Text.


def test_text_in_gives_the_continuation_as_text(demo):
    answer = demo.generate(PROMPT, 1)
    assert answer == "mira"
    assert demo.generate([PROMPT, "2 2 makes"], 1) == ["mira", "4"]
    ids = demo.to_tokens(PROMPT)
    assert demo.to_string(demo.generate(ids, 1)[0, -1:]) == "mira"


def test_texts_of_unequal_length_as_each_alone(demo):
    texts = [PROMPT, "tom has cup .", "3 1 makes"]
    together = demo.generate(texts, 9, eos_token_id=None)
    assert together == [demo.generate(text, 9, eos_token_id=None) for text in texts]
    assert demo.generate([PROMPT], 1) == ["mira"]


def test_text_without_a_tokenizer_raises(model, ids):
    with pytest.raises(ValueError, match="tokenizer"):
        model.generate("text", 2)
    with pytest.raises(ValueError, match="tokenizer"):
        model.generate(ids, 2, stop=".")


@pytest.mark.parametrize("stop", ["world", ["zzz", "o w"], ("ld", "world")])
def test_stop_strings_across_token_borders(written, stop):
    """Each token is one byte, so that every stop string spans several."""
    model, says = written
    strings = [stop] if isinstance(stop, str) else stop
    text = "hello world, and on"
    end = min(text.find(s) + len(s) for s in strings if s in text)
    with says(text, "never stops at all"):
        out = model.generate(["ab", "c"], 19, stop=stop)
        assert out == [text[:end], "never stops at all"]
        assert "".join(piece[0] for piece in model.generate_stream(["ab", "c"], 19, stop=stop)) == text[:end]
        ids = model.generate([[1, 2], [3]], 19, stop=stop)
    assert model.to_string(ids[0, 2 : 2 + end]) == text[:end]
    assert (ids[0, 2 + end :] == 255).all()


@pytest.mark.parametrize("wrong", ["", ["a", ""], [3], 5, None])
def test_stop_is_checked(demo, wrong):
    with pytest.raises(ValueError, match="stop="):
        demo.generate("tom", 2, stop=wrong)


def test_the_new_text_alone_is_searched_for_stop_strings(written):
    model, says = written
    with says("xyz"):
        assert model.generate("stop here", 3, stop="stop") == "xyz"


def test_eos_is_not_part_of_the_text_unless_nothing_ends_it(written):
    model, says = written
    last = model.to_string(255)
    with says("ab"):
        assert model.generate("x", 5) == "ab"
        assert model.generate("x", 3, eos_token_id=None) == "ab" + last


# Streams.


def test_a_stream_gives_what_generate_gives(model, ids):
    keywords = dict(temperature=1.0, seed=2, eos_token_id=7)
    out = model.generate(ids, 12, **keywords)
    steps = list(model.generate_stream(ids, 12, **keywords))
    assert all(step.shape == (3,) for step in steps)
    assert torch.equal(torch.stack(steps, dim=1), out[:, 13:])


def test_a_stream_of_text(demo):
    pieces = list(demo.generate_stream(PROMPT, 6, eos_token_id=None))
    assert "".join(pieces) == demo.generate(PROMPT, 6, eos_token_id=None)
    assert pieces[0] == "mira"
    lists = list(demo.generate_stream([PROMPT, "2 2 makes"], 3, eos_token_id=None))
    texts = demo.generate([PROMPT, "2 2 makes"], 3, eos_token_id=None)
    assert ["".join(row) for row in zip(*lists, strict=True)] == texts


def test_a_stream_waits_for_whole_characters(written):
    model, says = written
    text = "a\u00e9\u20acb\U0001f600"
    with says(text):
        pieces = list(model.generate_stream("x", 20))
    assert "".join(pieces) == text
    assert [piece for piece in pieces if piece] == list(text)
    with says(text):
        cut = list(model.generate_stream("x", 2))
    assert "".join(cut) == model.to_string(model.to_tokens(text)[0, :2])


def test_a_stream_can_be_left_and_the_model_used_meanwhile(model, ids):
    expected = model.generate(ids, 8, eos_token_id=None)
    stream = model.generate_stream(ids, 8, eos_token_id=None)
    taken = [next(stream) for _ in range(3)]
    model.generate(ids[:1], 4)
    taken += [next(stream) for _ in range(2)]
    stream.close()
    assert torch.equal(torch.stack(taken, dim=1), expected[:, 13:18])
    assert model.hook_dict["logits"].step == 0


def test_writing_into_a_streamed_token_changes_nothing(model, ids):
    expected, taken = model.generate(ids, 5, eos_token_id=None), []
    for token in model.generate_stream(ids, 5, eos_token_id=None):
        taken.append(token.clone())
        token.zero_()
    assert torch.equal(torch.stack(taken, dim=1), expected[:, 13:])


def test_streams_check_at_once(model, ids):
    with pytest.raises(ValueError, match="temperature"):
        model.generate_stream(ids, 3, temperature=-1)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        model.generate_stream([64], 3)


def test_progress_shows_a_bar(model, ids, capsys):
    model.generate(ids, 4, eos_token_id=None, progress=True)
    assert "4/4" in capsys.readouterr().err
    model.generate(ids, 4, eos_token_id=None)
    assert capsys.readouterr().err == ""


# Modes and devices.


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_under_every_grad_mode(mode):
    model = Dsv4.from_config(fault_config(), seed=3)
    ids = random_ids(model.config, 2, 9)
    with mode():
        out, cache = model.generate(ids, 5, names="**.layer_output", eos_token_id=None)
    assert not any(value.requires_grad for value in cache.values())
    with torch.no_grad():
        assert torch.equal(out, by_full_forwards(model, ids, 5))
    loss = model(ids).square().mean()
    loss.backward()


def test_a_default_device_does_not_reach_it(model, ids):
    expected = model.generate(ids, 5, temperature=1.0, seed=1)
    with torch.device("meta"):
        assert torch.equal(model.generate(ids, 5, temperature=1.0, seed=1), expected)
        lists = model.generate(ids.tolist(), 5, temperature=1.0, seed=1, repetition_penalty=1.2)
    assert lists.device.type == "cpu"


# nnsight.


def test_nnsight_sees_every_step(model, ids):
    import nnsight

    row = ids[:1]
    expected = model.generate(row, 3, eos_token_id=None, names="layers.1.layer_output")
    watched = nnsight.NNsight(model)
    with watched.trace(row, fn=model.generate, max_new_tokens=3, eos_token_id=None) as tracer:
        outputs = nnsight.save([])
        for _ in tracer.iter[:3]:
            outputs.append(watched.layers[1].layer_output.output.clone())
        result = tracer.result.save()
    assert torch.equal(result, expected[0])
    assert [x.shape[1] for x in outputs] == [13, 1, 1]
    assert relative_error(torch.cat(outputs, dim=1), expected[1]["layer_output", 1]) <= 1e-5
    with watched.trace(row, fn=model.generate, max_new_tokens=3, eos_token_id=None) as tracer:
        for _ in tracer.iter[:3]:
            watched.layers[1].layer_output.output = watched.layers[1].layer_output.output * -1.5
        edited = tracer.result.save()
    with model.hooks([("layers.1.layer_output", lambda value, hook: value * -1.5)]):
        assert torch.equal(edited, model.generate(row, 3, eos_token_id=None))
