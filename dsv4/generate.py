"""Generation: a prefill and one forward for each further token, with hooks live in every step.

n new tokens are n forwards: the last token is chosen and not fed. Hooks read `hook.step` (0 in the prefill, then 1, 2, ...) and
`hook.positions`. Axes: b row, s column.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from dsv4.inputs import resolve
from dsv4.sampling import Sampling, choose, penalise
from dsv4.steps import StepCaptures

CONFIG = object()


class Generating:
    """Mixed into the model."""

    generation_config: dict[str, Any] = {}

    def generate(
        self,
        input=None,
        max_new_tokens: int = 16,
        *,
        attention_mask: Tensor | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | Sequence[int] | None = None,
        repetition_penalty: float = 1.0,
        eos_token_id: Any = CONFIG,
        stop: str | Sequence[str] = (),
        kv_cache=None,
        progress: bool = False,
        names=None,
        device=None,
        align: bool = False,
    ):
        """Continue each row by up to max_new_tokens tokens; greedy unless a sampling keyword is given.

        Args:
            input, attention_mask: as for calling the model; rows may differ in length.
            temperature, top_k, top_p, min_p, repetition_penalty: see dsv4.sampling. 0 or None is greedy.
            seed: an int (row r draws from seed + r) or one for each row; a row's sample does not depend on its neighbours.
            eos_token_id: id or ids that end a row; default the generation config's, else the config's; None never stops.
            stop: strings that end a row once its new text holds one, also across token borders (needs a tokenizer).
            kv_cache: continue from it; it holds all but the last token afterwards. Default: a new one.
            names: also return the values of the run (see below). align: put values with a key or entry axis on the full run's axes.
            progress: show a bar.
        Returns:
            ids [b, prompt + new] including the prompt, the rows that have ended filled with eos; for text the continuation as text
            (a list for a list), which ends with the stop string. With names, (that, ActivationCache): captures over
            prompt + new - 1 positions, equal to a forward over ids[:, :-1]; values with a key or entry axis are a list, one per step,
            unless align=True.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
        run = _Run(self, input, max_new_tokens, attention_mask, sampling, eos_token_id, stop, kv_cache)
        with StepCaptures(self, names, device=device, align=align) as captures:
            for _ in tqdm(run.steps(captures), total=max_new_tokens, desc="generating", disable=not progress):
                pass
        result = run.texts() if run.inputs.is_text else run.ids
        return result if names is None else (result, captures.result(run.mask))

    def generate_stream(self, input=None, max_new_tokens: int = 16, *, attention_mask=None, eos_token_id=CONFIG, stop=(), kv_cache=None,
                        **sampling) -> Iterator:
        """As `generate`, yielding each step as it is made: the new tokens [b], or for text the new piece of each row (str, or a list).

        A row that has ended yields eos, or "".
        """
        run = _Run(self, input, max_new_tokens, attention_mask, Sampling(**sampling), eos_token_id, stop, kv_cache)
        said = [""] * run.rows
        for token in run.steps(None):
            if not run.inputs.is_text:
                yield token
                continue
            texts = run.row_texts()
            # A token that ends inside a character shows as U+FFFD until the rest has come.
            whole = [t if run.ended[r] or not t.endswith("\ufffd") else said[r] for r, t in enumerate(texts)]
            pieces = [t[len(old) :] for t, old in zip(whole, said, strict=True)]
            said = whole
            yield pieces if run.inputs.is_text_list else pieces[0]


@dataclass
class _Run:
    """One generation in progress."""

    model: Any
    input: Any
    budget: int
    attention_mask: Any
    sampling: Sampling
    eos: Any
    stop: Any
    kv: Any
    new: list[Tensor] = field(default_factory=list)

    def __post_init__(self):
        model = self.model
        if isinstance(self.budget, bool) or not isinstance(self.budget, int) or self.budget < 0:
            raise ValueError(f"max_new_tokens={self.budget!r}: expected an int >= 0")
        past = None if self.kv is None else self.kv.length.tolist()
        self.inputs = resolve(model, self.input, attention_mask=self.attention_mask, past=past)
        self.rows = self.inputs.size[0]
        self.eos = _ids(model, self.eos)
        self.stop = [self.stop] if isinstance(self.stop, str) else list(self.stop)
        if self.stop and (any(not isinstance(s, str) or not s for s in self.stop)):
            raise ValueError(f"stop={self.stop!r}: expected non-empty strings")
        if self.stop:
            model.to_string([0])
        self.generators = self.sampling.generators(self.rows)
        self.prompt, self.prompt_mask = self.inputs.ids, self.inputs.valid
        if bool((self.prompt_mask.sum(1) == 0).any()) and (past is None or 0 in past):
            raise ValueError("a row without a single token has nothing to continue")
        self.ended = [False] * self.rows
        self.produced: list[list[int]] = [[] for _ in range(self.rows)]
        self.fed: list[Tensor] = []

    def steps(self, captures: StepCaptures | None) -> Iterator[Tensor]:
        """Yield the new token of each row [b], as often as there are new columns."""
        if self.budget == 0:
            return
        model = self.model
        counts = self.prompt_mask.sum(1)
        if self.kv is None:
            longest = int(counts.max()) + self.budget
            self.kv = model.new_kv_cache(self.rows, longest, rewind=0)
        seen = torch.zeros(self.rows, model.vocab_size, dtype=torch.bool, device=model.device)
        rows = torch.arange(self.rows, device=model.device).unsqueeze(1).expand_as(self.prompt)
        seen[rows[self.prompt_mask], self.prompt[self.prompt_mask]] = True
        ids, mask = self.prompt, self.prompt_mask
        for step in range(self.budget):
            with torch.no_grad():
                logits = self.forward(ids, mask, step, captures)
                if self.sampling.repetition_penalty != 1.0:
                    logits = penalise(logits, seen, self.sampling.repetition_penalty)
                token = choose(logits, self.sampling, self.generators)
            fill = self.eos[0] if self.eos else self.model.config.pad_token_id or 0
            ended = torch.tensor(self.ended, device=token.device)
            token = torch.where(ended, torch.full_like(token, fill), token)
            mask = ~ended.unsqueeze(1)
            self.fed.append(mask)
            seen = seen.scatter(1, token.unsqueeze(1), mask | seen.gather(1, token.unsqueeze(1)))
            self.note(token)
            ids = token.unsqueeze(1)
            self.new.append(ids)
            yield token
            if all(self.ended):
                return

    def forward(self, ids: Tensor, mask: Tensor, step: int, captures: StepCaptures | None) -> Tensor:
        """[b vocab]: logits at each row's last token."""
        stage = self.model.stage
        before, stage.step = stage.step, step
        try:
            logits = self.model(ids, attention_mask=mask, kv_cache=self.kv, logits_to_keep=1 if captures is None or captures.idle else None)
            if captures is not None:
                captures.step_done()
        finally:
            stage.step = before
        if logits.shape[1] == 1:
            return logits[:, 0]
        columns = torch.arange(mask.shape[1], device=mask.device)
        last = torch.where(mask, columns, 0).amax(1)
        return logits.gather(1, last.view(-1, 1, 1).expand(-1, 1, logits.shape[-1]))[:, 0]

    def note(self, token: Tensor) -> None:
        """Record the new tokens and which rows have ended."""
        for r, t in enumerate(token.tolist()):
            if self.ended[r]:
                continue
            self.produced[r].append(t)
            self.ended[r] = t in self.eos or (bool(self.stop) and self.stops(r))

    def stops(self, r: int) -> bool:
        text = self.model.to_string(self.produced[r])
        return any(s in text for s in self.stop)

    @property
    def ids(self) -> Tensor:
        return torch.cat([self.prompt, *self.new], dim=1)

    @property
    def mask(self) -> Tensor:
        """[b, prompt + new] bool: prompt tokens and new tokens of rows that had not ended."""
        return torch.cat([self.prompt_mask, *self.fed], dim=1)

    def row_texts(self) -> list[str]:
        kept = [[t for t in row if t not in self.eos] for row in self.produced]
        return [self.model.to_string(row) if row else "" for row in kept]

    def texts(self) -> str | list[str]:
        texts = self.row_texts()
        return texts if self.inputs.is_text_list else texts[0]


def _ids(model, eos) -> list[int]:
    if eos is CONFIG:
        eos = model.generation_config.get("eos_token_id", model.config.eos_token_id)
    if eos is None:
        return []
    ids = [eos] if isinstance(eos, int) else [int(i) for i in eos]
    for i in ids:
        if not 0 <= i < model.vocab_size:
            raise ValueError(f"eos_token_id {i} is outside the vocabulary: expected 0 <= id < {model.vocab_size}")
    return ids


def read_generation_config(folder: Path) -> dict[str, Any]:
    """generation_config.json of a checkpoint folder, {} when there is none."""
    path = Path(folder) / "generation_config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
