"""Text to token ids and back, by the `tokenizer.json` that lies next to the weights.

Verbs and habits are TransformerLens's, but for one: no BOS is added unless `prepend_bos=True`,
whatever the file's own post-processor would do, since one token more moves every compression
window. Truncation and padding saved in the file are ignored as well: a text is never cut, and
padding is on the side the caller says.
"""

import json
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tokenizers
import torch
from torch import Tensor

from dsv4.config import Dsv4Config

Text = str | Sequence[str]
Ids = int | Sequence[int] | Sequence[Sequence[int]] | Tensor
Side = Literal["right", "left"]

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"
SAVED_FILES = (TOKENIZER_FILE, SETTINGS_FILE, "generation_config.json")


class TokenBatch(NamedTuple):
    """Rows of token ids padded to one length.

    ids [b, s] int64; attention_mask [b, s] int64, 1 = token, 0 = padding. The mask comes from the
    lengths: a pad token that is typed in the text is a token.
    """

    ids: Tensor
    attention_mask: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokenizer:
    """A tokenizer.json, with the ids that the checkpoint's config gives to its special tokens.

    vocab_size is the model's (without a config the file's): an id that it has no embedding for is
    an error here, before any forward. With `backend=None` every verb raises ValueError with
    `why_absent`; ids still work everywhere. files: what lies beside the weights and is copied
    when the model is saved.
    """

    backend: tokenizers.Tokenizer | None
    vocab_size: int = 0
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int = 0
    why_absent: str = "this model has no tokenizer: give token ids, or load a folder with a tokenizer.json"
    files: tuple[Path, ...] = ()

    @property
    def is_present(self) -> bool:
        """Text can be given to the model."""
        return self.backend is not None

    @classmethod
    def from_folder(cls, folder: str | Path, config: Dsv4Config | None = None) -> "Tokenizer":
        """The tokenizer of a checkpoint folder; one that only raises if it has no tokenizer.json.

        The config's bos, eos and pad ids come first, then those that tokenizer_config.json names.
        Padding falls back to eos, then to 0: what pads a row is masked and changes no value.
        ValueError for a file that cannot be read.
        """
        path = Path(folder) / TOKENIZER_FILE
        files = tuple(f for f in (Path(folder) / name for name in SAVED_FILES) if f.is_file())
        if not path.is_file():
            return cls(
                backend=None,
                files=files,
                why_absent=f"there is no {TOKENIZER_FILE} in {folder}: give token ids instead of "
                f"text, or put the checkpoint's {TOKENIZER_FILE} there and load the model again",
            )
        backend = _read(path)
        named = _special_ids(backend, Path(folder) / SETTINGS_FILE)
        given = {key: _first(getattr(config, key, None)) for key in named}
        bos, eos, pad = (named[key] if given[key] is None else given[key] for key in named)
        size = backend.get_vocab_size() if config is None else config.vocab_size
        return cls(
            backend=backend,
            files=files,
            vocab_size=size,
            bos_token_id=bos,
            eos_token_id=eos,
            pad_token_id=next(i for i in (pad, eos, 0) if i is not None and 0 <= i < size),
        )

    def to_tokens(self, text: Text, prepend_bos: bool = False, padding_side: Side = "right") -> Tensor:
        """A text or a list of texts -> ids [b, s] int64 on the CPU; b is 1 for a single text.

        prepend_bos=True: each row starts with exactly one BOS, also when its text already starts
        with the BOS string. Rows of unequal length are padded; `to_tokens_and_mask` says where.
        ValueError: no texts, no BOS known, an id outside the model's vocabulary. Words that the
        file does not know become its unknown token, with a warning that names them.
        """
        return self.to_tokens_and_mask(text, prepend_bos, padding_side).ids

    def to_tokens_and_mask(self, text: Text, prepend_bos: bool = False, padding_side: Side = "right") -> TokenBatch:
        """As `to_tokens`, with the attention mask [b, s] that tells tokens from padding."""
        if padding_side not in ("right", "left"):
            raise ValueError(f"padding_side is {padding_side!r}; it is 'right' or 'left'")
        rows = self._encode(_texts(text), prepend_bos)
        width = max(map(len, rows))
        ids, mask = [], []
        for row in rows:
            gap = width - len(row)
            before, after = (gap, 0) if padding_side == "left" else (0, gap)
            ids.append([self.pad_token_id] * before + row + [self.pad_token_id] * after)
            mask.append([0] * before + [1] * len(row) + [0] * after)
        # The device is said, so that torch.set_default_device does not move them.
        return TokenBatch(*(torch.tensor(x, dtype=torch.int64, device="cpu") for x in (ids, mask)))

    def to_string(self, ids: Ids) -> str | list[str]:
        """Ids -> text. One int, ints or [s] give a string; lists of ints or [b, s] a list of them.

        Special tokens are shown. An id of the model that the file has no token for is shown as
        `<id 63>`; one outside the model's vocabulary is a ValueError.
        """
        rows, is_batch = _rows(ids)
        texts = [self._decode(row) for row in rows]
        return texts if is_batch else texts[0]

    def to_str_tokens(self, text: Text | Ids, prepend_bos: bool = False) -> list[str] | list[list[str]]:
        """A text, or one row of ids -> its tokens as strings; a list of texts, or rows -> a list
        of such lists. [1, s] is one row, as in TransformerLens.

        A token that holds only part of a character is shown as U+FFFD.
        """
        if _is_text(text):
            rows, is_batch = self._encode(_texts(text), prepend_bos), not isinstance(text, str)
        elif prepend_bos:
            raise ValueError("prepend_bos=True with token ids: ids are taken as they are; put the BOS id first")
        else:
            rows, is_batch = _rows(text)
            is_batch = is_batch and len(rows) != 1
        pieces = [[self._decode([i]) for i in row] for row in rows]
        return pieces if is_batch else pieces[0]

    def to_single_token(self, text: str) -> int:
        """The id of a text that is one token; ValueError that lists the pieces when it is not."""
        if not isinstance(text, str):
            raise TypeError(f"to_single_token takes a str, got {type(text).__name__}")
        encoding = self._file.encode(text, add_special_tokens=False)
        pieces = [self._decode([i]) for i in encoding.ids]
        if len(pieces) != 1:
            raise ValueError(
                f"{text!r} is {len(pieces)} tokens, not one: {pieces}. In most vocabularies a word "
                "and the same word after a space are different tokens; try the other."
            )
        if unknown := self._unknown(text, encoding):
            raise ValueError(f"{unknown[0]!r} is not in the vocabulary of {TOKENIZER_FILE}")
        return encoding.ids[0]

    @property
    def _file(self) -> tokenizers.Tokenizer:
        if self.backend is None:
            raise ValueError(self.why_absent)
        return self.backend

    def _encode(self, texts: list[str], prepend_bos: bool) -> list[list[int]]:
        # One by one: encode_batch starts threads, about which a process that forks is warned.
        encodings = [self._file.encode(text, add_special_tokens=False) for text in texts]
        if prepend_bos and self.bos_token_id is None:
            raise ValueError(
                f"prepend_bos=True, but neither the config (bos_token_id) nor {SETTINGS_FILE} names a BOS token; leave prepend_bos out"
            )
        pairs = zip(texts, encodings, strict=True)
        if unknown := [word for pair in pairs for word in self._unknown(*pair)]:
            warnings.warn(
                f"{len(unknown)} words are not in the vocabulary of {TOKENIZER_FILE} and became "
                f"{self._file.model.unk_token!r}: {', '.join(map(repr, unknown[:10]))}",
                stacklevel=4,
            )
        rows = [encoding.ids for encoding in encodings]
        if prepend_bos:
            bos = self.bos_token_id
            rows = [row if row[:1] == [bos] else [bos, *row] for row in rows]
        for row in rows:
            self._check(row)
        return rows

    def _unknown(self, text: str, encoding: tokenizers.Encoding) -> list[str]:
        """The pieces of the text that became the unknown token without being it."""
        unk = getattr(self._file.model, "unk_token", None)
        unk_id = None if unk is None else self._file.token_to_id(unk)
        places = zip(encoding.ids, encoding.offsets, strict=True)
        words = [text[start:end] for i, (start, end) in places if i == unk_id]
        return [word for word in words if word != unk]

    def _decode(self, row: list[int]) -> str:
        file = self._file
        self._check(row)
        runs = groupby(row, lambda i: file.id_to_token(i) is None)
        return "".join(
            "".join(f"<id {i}>" for i in run) if has_none else file.decode(list(run), skip_special_tokens=False) for has_none, run in runs
        )

    def _check(self, row: list[int]) -> None:
        if bad := [i for i in row if not 0 <= i < self.vocab_size]:
            raise ValueError(
                f"{len(bad)} token ids are outside the model's vocabulary of {self.vocab_size}: "
                f"{bad[:10]}. If they come from text, this {TOKENIZER_FILE} "
                f"({self._file.get_vocab_size()} tokens) belongs to another checkpoint."
            )


def _read(path: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    # The library raises a bare Exception for every file that it cannot read.
    except Exception as error:
        raise ValueError(
            f"tokenizers {tokenizers.__version__} cannot read {path}: {error}. Download the file again, or a newer `tokenizers`."
        ) from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _special_ids(backend: tokenizers.Tokenizer, settings_path: Path) -> dict[str, int | None]:
    """bos, eos and pad ids by the strings in tokenizer_config.json; None where it names none."""
    settings: dict[str, Any] = {}
    if settings_path.is_file():
        settings = json.loads(settings_path.read_text(encoding="utf-8"))
    ids: dict[str, int | None] = {}
    for name in ("bos_token", "eos_token", "pad_token"):
        token = settings.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        ids[f"{name}_id"] = None if content is None else backend.token_to_id(content)
    return ids


def _first(ids: int | Sequence[int] | None) -> int | None:
    """Configs give one id or a list of them."""
    return ids if ids is None or isinstance(ids, int) else next(iter(ids), None)


def _is_text(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(isinstance(x, str) for x in value)
    return isinstance(value, str)


def _texts(text: Text) -> list[str]:
    texts = list(text) if isinstance(text, (list, tuple)) else [text]
    wrong = {type(x).__name__ for x in texts} - {"str"}
    if wrong:
        raise TypeError(f"text is a str or a list of str; got {min(wrong)}")
    if not texts:
        raise ValueError("an empty list of texts has no tokens; give at least one (it may be '')")
    return texts


def _rows(ids: Ids) -> tuple[list[list[int]], bool]:
    """Ids as rows, and whether they came as several."""
    values = ids.tolist() if hasattr(ids, "tolist") else ids
    if type(values) is int:
        return [[values]], False
    if not isinstance(values, Iterable):
        raise TypeError(f"token ids are ints, got {type(values).__name__}")
    values = [x.tolist() if hasattr(x, "tolist") else x for x in values]
    is_batch = any(isinstance(x, (list, tuple)) for x in values)
    rows = values if is_batch else [values]
    flat = [x for row in rows for x in (row if isinstance(row, (list, tuple)) else [rows])]
    if wrong := {type(x).__name__ for x in flat} - {"int"}:
        raise TypeError(f"token ids are ints in one row or in a list of rows; got {min(wrong)}")
    return [list(row) for row in rows], is_batch
