"""Choosing each row's next token from its logits.

Filters work one after the other on what the one before left: temperature divides the logits; top_k
keeps the k best and what ties with the last of them; top_p the fewest tokens, best first, whose
probability together reaches p; min_p those with at least min_p times the best's probability. What
is left is sampled with a generator for each row, so that no row depends on its neighbours.
Axes: b row, vocab.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to choose.

    Greedy with temperature 0, or None with no filter given; a filter given alone samples at
    temperature 1. `seed`: an int (row r draws from seed + r), or one int for each row; None draws
    seeds from PyTorch's global generator.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, lambda t: 0 <= t < float("inf"), "a number >= 0")
        _check("top_k", self.top_k, lambda k: k >= 1 and k == int(k), "a count >= 1")
        _check("top_p", self.top_p, lambda p: 0 < p <= 1, "0 < top_p <= 1")
        _check("min_p", self.min_p, lambda p: 0 <= p <= 1, "0 <= min_p <= 1")
        if self.repetition_penalty is None:
            raise ValueError("repetition_penalty=None: expected a number > 0; 1 leaves it out")
        _check("repetition_penalty", self.repetition_penalty, lambda p: p > 0, "a number > 0")

    @property
    def is_greedy(self) -> bool:
        if self.temperature is None:
            return self.top_k is None and self.top_p is None and self.min_p is None
        return self.temperature == 0

    def generators(self, rows: int) -> list[torch.Generator]:
        """One generator for each row, on the CPU whatever the model's device."""
        if self.seed is None:
            seeds = torch.randint(0, 2**62, (rows,), device="cpu").tolist()
        elif _is_int(self.seed):
            seeds = [int(self.seed) + r for r in range(rows)]
        else:
            given = self.seed.tolist() if hasattr(self.seed, "tolist") else self.seed
            seeds = list(given) if hasattr(given, "__iter__") else []
            if not seeds or not all(map(_is_int, seeds)):
                raise ValueError(f"seed={self.seed!r}: expected an int, or one int for each row")
            if len(seeds) != rows:
                raise ValueError(f"seed gives {len(seeds)} numbers for {rows} rows; pass one int, or one each")
        return [torch.Generator(device="cpu").manual_seed(int(seed)) for seed in seeds]


def penalise(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """logits [b vocab], seen [b vocab] bool -> logits of seen tokens made smaller (penalty > 1):
    divided by the penalty where positive, multiplied by it where negative.
    """
    smaller = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, smaller, logits)


def keep_likely(logits: Tensor, sampling: Sampling) -> Tensor:
    """logits [b vocab] -> float64 [b vocab], over the temperature; -inf where filtered out."""
    temperature = 1.0 if sampling.temperature is None else sampling.temperature
    ordered, order = torch.sort(logits.double() / temperature, dim=-1, descending=True, stable=True)
    if sampling.top_k is not None and sampling.top_k < ordered.shape[-1]:
        last = ordered[..., int(sampling.top_k) - 1, None]
        ordered = ordered.masked_fill(ordered < last, -torch.inf)
    if sampling.top_p is not None and sampling.top_p < 1:
        chances = ordered.softmax(-1)
        better = chances.cumsum(-1) - chances
        ordered = ordered.masked_fill(better >= sampling.top_p, -torch.inf)
    if sampling.min_p is not None:
        chances = ordered.softmax(-1)
        ordered = ordered.masked_fill(chances < sampling.min_p * chances[..., :1], -torch.inf)
    return torch.empty_like(ordered).scatter_(-1, order, ordered)


def choose(logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> Tensor:
    """logits [b vocab] -> next token of each row [b] int64 on the logits' device.

    Greedy is the best, of equals the lowest. ValueError where a row's logits are NaN or all -inf.
    """
    best = logits.amax(-1)
    if bool((best.isnan() | (best == -torch.inf)).any()):
        row = int((best.isnan() | (best == -torch.inf)).nonzero()[0])
        raise ValueError(f"row {row} has nothing to choose from: its logits are NaN or all -inf")
    if sampling.is_greedy:
        return (logits == best.unsqueeze(-1)).int().argmax(-1)
    ladder = keep_likely(logits, sampling).cpu().softmax(-1).cumsum(-1)
    draws = [torch.rand(1, generator=g, dtype=torch.float64, device="cpu") for g in generators]
    # A draw is below 1, so that no token without probability is reached: the last step of the
    # ladder is the first to stand at its top.
    top = ladder[:, -1:]
    return torch.searchsorted(ladder, torch.stack(draws) * top, right=True).squeeze(-1).to(best.device)


def _is_int(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool) and not getattr(value, "ndim", 0)


def _check(name: str, value, holds, expected: str) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and holds(value)):
        raise ValueError(f"{name}={value!r}: expected {expected}")
