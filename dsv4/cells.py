"""The tokens of one row as cells of a picture: what is drawn when a prompt has more tokens than a
picture has room.

Cells are counted from the end, so that the last token is the last of its cell; the first cell may
be smaller.
Axes: s token captured, t token, c cell.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.activation_cache import ActivationCache
from dsv4.reading import Reading

MAX_WORD = 40


@dataclass(frozen=True)
class Cells:
    """Attributes:
    row: of the cache. columns: [t] the captured tokens drawn. positions, words: of each of them.
    width: tokens in a cell. ends: the number of the first token behind each cell.
    """

    row: int
    columns: Tensor
    positions: list[int]
    words: list[str]
    width: int
    ends: list[int]

    @classmethod
    def of(cls, read: Reading, most: int, row: int = 0) -> "Cells":
        """The real tokens of a row in at most `most` cells. ValueError where the row does not exist
        or holds no token.
        """
        if not 0 <= row < len(read.positions):
            raise ValueError(f"row={row}: the cache holds {len(read.positions)} rows")
        columns = read.valid[row].nonzero().flatten().cpu()
        tokens = len(columns)
        if not tokens:
            raise ValueError(f"row {row} of the cache holds no real token")
        width = -(-tokens // most)
        ends = sorted(range(tokens, 0, -width))
        positions = read.positions[row, columns].tolist()
        return cls(row, columns, positions, words_of(read, row, columns), width, ends)

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def starts(self) -> list[int]:
        return [0, *self.ends[:-1]]

    @property
    def last(self) -> Tensor:
        """[c]: the captured token that a cell ends with."""
        return self.columns[torch.tensor([end - 1 for end in self.ends])]

    @property
    def labels(self) -> list[str]:
        """The word that each cell ends with."""
        return [self.words[end - 1] for end in self.ends]

    @property
    def texts(self) -> list[str]:
        """All words of each cell."""
        pairs = zip(self.starts, self.ends, strict=True)
        return [joined(self.words[start:end]) for start, end in pairs]

    @property
    def note(self) -> str:
        """What a title has to say of the downsampling; nothing where each token has its cell."""
        return "" if self.width == 1 else f"{len(self.words)} tokens, {self.width} to a cell"

    def at(self, value: Tensor) -> Tensor:
        """[b s ...] -> [c ...]: the value at the last token of each cell."""
        return value[self.row][self.last.to(value.device)]

    def pool(self, pattern: Tensor) -> Tensor:
        """[... s t] of this row -> [... c c] float32: summed over a cell's keys, the mean over its
        queries.
        """
        columns = self.columns.to(pattern.device)
        pattern = pattern.float()[..., columns, :][..., columns]
        if self.width == 1:
            return pattern
        cell = torch.bucketize(torch.arange(len(columns)), torch.tensor(self.ends), right=True)
        member = torch.nn.functional.one_hot(cell, len(self)).float().to(pattern.device)
        return (member / member.sum(0)).T @ (pattern @ member)


def words_of(read: Reading, row: int, columns: Tensor) -> list[str]:
    """The tokens, where the cache holds input_ids and its model has a tokenizer; else ids, else
    positions.
    """
    if "input_ids" not in read:
        return [str(p) for p in read.positions[row, columns].tolist()]
    ids = read["input_ids"][row, columns.to(read["input_ids"].device)].tolist()
    return spell(read.cache.model, ids)


def spell(model, ids: list[int]) -> list[str]:
    known = model is not None and model.tokenizer.is_present
    return model.to_str_tokens(ids) if known else [str(i) for i in ids]


def joined(words: list[str]) -> str:
    return " ".join(printable(word) for word in words)


def printable(word: str) -> str:
    """Without the blanks around it, unless it is nothing else."""
    bare = word.strip(" ")
    bare = bare if bare and bare.isprintable() else repr(word)
    return bare if len(bare) <= MAX_WORD else bare[: MAX_WORD - 3] + "..."


@torch.no_grad()
def lens_top(cache: ActivationCache, columns: Tensor, k: int, row: int = 0) -> tuple[Tensor, Tensor, list[int]]:
    """(probabilities, ids) [layers c k] of the best tokens that each layer's output reads as, and
    the layers.

    The readout is "head", as in model.logit_lens; one layer's logits are held at a time.
    """
    read = Reading(cache)
    held = {i: read.of("layer_output", i) for i in read.holding("layer_output")}
    streams = held if list(held) == read.layers else cache.residual.streams("layer_output")
    best = []
    for value in streams.values():
        value = value if read.has_rows else value.reshape(1, *read.positions.shape[1:], *value.shape[-2:])
        logits = read.model.project_on_vocab(value[row][columns.to(value.device)], readout="head")
        best.append(logits.softmax(-1).topk(min(k, logits.shape[-1])))
    return (
        torch.stack([x.values for x in best]).cpu(),
        torch.stack([x.indices for x in best]).cpu(),
        list(streams),
    )


def names_of(model, leaves, layers=None) -> list[str]:
    """Full names of the values with these last parts; of these layers only, values of the model in
    any case.
    """
    found = []
    for name, point in model.hook_dict.items():
        is_wanted = layers is None or point.layer is None or point.layer in layers
        if name.rsplit(".", 1)[-1] in leaves and is_wanted:
            found.append(name)
    return found
