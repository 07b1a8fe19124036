"""Choosing the next token of each row from its logits.

temperature divides the logits; top_k, top_p and min_p keep the k best, the smallest set with probability p, and those with at least
min_p times the best's probability, in this order; the rest is renormalised. Draws come from a generator for each row, so that a row's
sample does not depend on its neighbours. Axes: b row, vocab.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How to choose. temperature None or 0 with no other field set is greedy; another field set alone samples at temperature 1."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | Sequence[int] | None = None

    def __post_init__(self):
        _check("temperature", self.temperature, lambda t: t >= 0, "a number >= 0")
        _check("top_k", self.top_k, lambda k: k >= 1 and float(k).is_integer(), "a count >= 1")
        _check("top_p", self.top_p, lambda p: 0 < p <= 1, "0 < top_p <= 1")
        _check("min_p", self.min_p, lambda p: 0 <= p <= 1, "0 <= min_p <= 1")
        _check("repetition_penalty", self.repetition_penalty, lambda p: p > 0, "a number > 0")

    @property
    def greedy(self) -> bool:
        if self.temperature is None:
            return self.top_k is None and self.top_p is None and self.min_p is None
        return self.temperature == 0

    def generators(self, rows: int) -> list[torch.Generator]:
        """One for each row: an int seed gives row r seed + r, a sequence gives each row its own."""
        if self.seed is None:
            seeds = torch.randint(0, 2**62, (rows,), device="cpu").tolist()
        elif isinstance(self.seed, int):
            seeds = [self.seed + r for r in range(rows)]
        else:
            seeds = [int(s) for s in self.seed]
        if len(seeds) != rows:
            raise ValueError(f"seed gives {len(seeds)} numbers for {rows} rows; pass one int, or one for each row")
        return [torch.Generator(device="cpu").manual_seed(s) for s in seeds]


def penalise(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """logits [b vocab], seen [b vocab] bool -> logits of seen tokens divided by the penalty where positive, multiplied where negative."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """[b vocab] float32 -> [b vocab], zero outside what the filters keep."""
    scaled = logits.float() / (1.0 if sampling.temperature is None else sampling.temperature)
    ordered, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    if sampling.top_k is not None:
        ordered[..., int(sampling.top_k) :] = float("-inf")
    chance = ordered.softmax(-1)
    if sampling.top_p is not None:
        before = chance.cumsum(-1) - chance
        chance = chance.masked_fill(before >= sampling.top_p, 0.0)
    if sampling.min_p is not None:
        chance = chance.masked_fill(chance < sampling.min_p * chance[..., :1], 0.0)
    return torch.zeros_like(chance).scatter(-1, order, chance / chance.sum(-1, keepdim=True))


def choose(logits: Tensor, sampling: Sampling, generators: list[torch.Generator]) -> Tensor:
    """logits [b vocab] -> next token of each row [b] int64 on the logits' device."""
    if sampling.greedy:
        return logits.argmax(-1)
    chances = probabilities(logits, sampling).double().cpu()
    draws = torch.stack([torch.rand(1, generator=g, dtype=torch.float64, device="cpu") for g in generators])
    ladder = chances.cumsum(-1)
    picked = torch.searchsorted(ladder, draws * ladder[:, -1:], right=True).squeeze(-1)
    last = chances.shape[-1] - 1 - (chances.flip(-1) > 0).long().argmax(-1)
    return torch.minimum(picked, last).to(logits.device)


def _check(name: str, value, holds, expected: str) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not holds(value)):
        raise ValueError(f"{name}={value!r}: expected {expected}")
