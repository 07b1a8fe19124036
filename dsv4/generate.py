"""Generation: a prefill, then one forward for each further token, with hooks live in every step.

n new tokens are n forwards: the last one chosen is not fed. Hooks read `hook.step` (0 in the
prefill, then 1, 2, ...) and `hook.positions`. Axes: b row, s column.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from dsv4 import budget
from dsv4.activation_cache import ActivationCache
from dsv4.inputs import Input, Inputs, resolve
from dsv4.kv_cache import KVCache
from dsv4.sampling import Sampling, choose, penalise
from dsv4.stage import BEHIND_KEEP
from dsv4.steps import StepCaptures

AUTO = "auto"
GENERATION_CONFIG = "generation_config.json"


class Generating:
    """Mixed into the model."""

    generation_config: Mapping[str, Any] = MappingProxyType({})

    def generate(
        self,
        input: Input = None,
        max_new_tokens: int = 16,
        *,
        attention_mask: Tensor | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | Sequence[int] | None = None,
        repetition_penalty: float = 1.0,
        eos_token_id: int | Sequence[int] | str | None = AUTO,
        stop: str | Sequence[str] = (),
        kv_cache: KVCache | None = None,
        progress: bool = False,
        names=None,
        align: bool = False,
        device=None,
        max_bytes: int | str | None = AUTO,
    ) -> Tensor | str | list[str] | tuple[Tensor | str | list[str], ActivationCache]:
        """Continue each row by up to max_new_tokens tokens; greedy unless sampling is asked for.

        Args:
            input, attention_mask: as for calling the model. Rows may differ in length: lists and
                texts are padded at the left, tensors stay as they are.
            temperature, top_k, top_p, min_p: see `dsv4.sampling`; 0 or None is greedy.
            seed: an int (row r draws from seed + r), or one for each row.
            repetition_penalty: for tokens of the input and new ones; 1 is none.
            eos_token_id: id or ids that end a row. "auto": generation_config.json's, else the
                config's. None: nothing ends a row but max_new_tokens and `stop`.
            stop: strings that end a row when its new text holds one, also across token borders.
            kv_cache: go on from it; afterwards it holds every token but each row's last. A row
                that has ended does not grow in it. Default: a new one.
            progress: show a bar.
            names, device, max_bytes: capture values, as for `run_with_cache`.
            align: put values with a key or entry axis on the axes of the whole run.
        Returns:
            ids [b, prompt + new] with the prompt; a row that has ended is filled with eos, and no
            step is made once all have. For text the continuation as text (a list for a list): up
            to and with the stop string, without eos.
            With names (that, ActivationCache): the values of a forward over ids[:, :-1]. Those with
            a key or entry axis are a list, one tensor a step; with align=True one tensor that holds
            zeros (scores -inf, selections -1) where a step had no such key or entry. So aligned
            indexer_head_scores are 0 for entries that had not been closed. Tokens that kv_cache
            held before are not in it.
        """
        sampling = Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            repetition_penalty=repetition_penalty,
        )
        ends = _Ends.of(self, eos_token_id, stop)
        run = _Run(self, input, attention_mask, max_new_tokens, sampling, ends, kv_cache)
        if names is None:
            for _ in tqdm(run.steps(), "generating", max_new_tokens, disable=not progress):
                pass
            return run.result()
        with self.stage.reserve():
            chosen = self.match_names(names)
            run.keeps_logits = any(name in BEHIND_KEEP for name in chosen)
            _check_budget(self, chosen, run, device, max_bytes)
            captures = StepCaptures(self, chosen, device=device)
            with captures.attached():
                for _ in tqdm(run.steps(), "generating", max_new_tokens, disable=not progress):
                    pass
            return run.result(), captures.result(align)

    def generate_stream(
        self,
        input: Input = None,
        max_new_tokens: int = 16,
        *,
        attention_mask: Tensor | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | Sequence[int] | None = None,
        repetition_penalty: float = 1.0,
        eos_token_id: int | Sequence[int] | str | None = AUTO,
        stop: str | Sequence[str] = (),
        kv_cache: KVCache | None = None,
    ) -> Iterator[Tensor] | Iterator[str] | Iterator[list[str]]:
        """As `generate`, step by step: yields the new tokens [b], eos for a row that has ended.

        For text the new piece of text (a list for a list), "" for a row that has ended or whose
        token is only a part of a character. The pieces together are what `generate` returns.
        """
        sampling = Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            repetition_penalty=repetition_penalty,
        )
        ends = _Ends.of(self, eos_token_id, stop)
        run = _Run(self, input, attention_mask, max_new_tokens, sampling, ends, kv_cache)
        return run.pieces() if run.inputs.is_text else run.steps()


@dataclass(frozen=True)
class _Ends:
    """What ends a row, and the id that fills it up afterwards."""

    eos: tuple[int, ...]
    stop: tuple[str, ...]
    fill: int

    @classmethod
    def of(cls, model, eos: int | Sequence[int] | str | None, stop: str | Sequence[str]) -> "_Ends":
        named = _ids(model.generation_config.get("eos_token_id", model.config.eos_token_id))
        usual = [i for i in named if i < model.vocab_size]
        ids = usual if isinstance(eos, str) and eos == AUTO else _ids(eos)
        for i in ids:
            if not 0 <= i < model.vocab_size:
                raise ValueError(f"eos_token_id {i}: expected 0 <= id < {model.vocab_size}")
        is_many = isinstance(stop, Sequence) and not isinstance(stop, str)
        strings = tuple(stop) if is_many else (stop,)
        if not all(isinstance(string, str) and string for string in strings):
            raise ValueError(f"stop={stop!r}: expected a non-empty string, or several")
        if strings:
            # Without a tokenizer this raises.
            model.to_string([0])
        fill = next(iter([*ids, *usual]), model.config.pad_token_id or 0)
        return cls(tuple(ids), strings, fill)


class _Run:
    """One generation in progress."""

    def __init__(
        self,
        model,
        input: Input,
        attention_mask: Tensor | None,
        limit: int,
        sampling: Sampling,
        ends: _Ends,
        kv: KVCache | None,
    ):
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            raise ValueError(f"max_new_tokens={limit!r}: expected an int >= 0")
        self.model, self.limit, self.sampling, self.ends = model, limit, sampling, ends
        past = None if kv is None else kv.length.tolist()
        self.inputs = resolve(model, input, attention_mask=attention_mask, past=past)
        if attention_mask is None:
            self.inputs = _at_the_left(self.inputs)
        self.rows, self.longest = self.inputs.size[0], int(self.inputs.valid.sum(1).max())
        self._check(kv)
        self.kv = kv
        self.generators = sampling.generators(self.rows)
        self.keeps_logits = False
        self.ended = [False] * self.rows
        # Of each row: its new tokens, and its text as far as it may be shown.
        self.produced: list[list[int]] = [[] for _ in range(self.rows)]
        self.texts = [""] * self.rows
        self.new: list[Tensor] = []

    def _check(self, kv: KVCache | None) -> None:
        counts = self.inputs.valid.sum(1).tolist()
        if 0 in counts:
            raise ValueError(f"row {counts.index(0)} has no token to continue from; give it one")
        if kv is None:
            return
        kv.admit(self.model, self.inputs, partial=bool(self.model.skipped))
        for r, (held, count) in enumerate(zip(kv.length.tolist(), counts, strict=True)):
            needed = held + count + max(self.limit - 1, 0)
            if needed > kv.max_length:
                raise ValueError(
                    f"row {r} may come to {needed} tokens; the KV cache has "
                    f"max_length={kv.max_length}: build a longer one, or ask for fewer new tokens"
                )

    def steps(self) -> Iterator[Tensor]:
        """The new token of each row [b], until all have ended."""
        model, penalty = self.model, self.sampling.repetition_penalty
        ids, mask = self.inputs.ids, self.inputs.valid
        if self.kv is None and self.limit:
            self.kv = model.new_kv_cache(self.rows, model._capacity_for(self.longest + self.limit), rewind=0)
        seen = None
        for step in range(self.limit):
            logits = self._forward(ids, mask, step)
            if penalty != 1:
                seen = _seen(seen, ids, mask, logits)
                logits = penalise(logits, seen, penalty)
            token = model.stage.drawn(choose(logits, self.sampling, self.generators))
            ended = torch.tensor(self.ended, device=token.device)
            token = token.masked_fill(ended, self.ends.fill)
            self._note(token.tolist())
            self.new.append(token)
            # What the caller does to its copy does not reach the next step.
            yield token.clone()
            if all(self.ended):
                return
            ids = token.unsqueeze(1)
            mask = ~torch.tensor(self.ended, device=token.device).unsqueeze(1)

    def _forward(self, ids: Tensor, mask: Tensor, step: int) -> Tensor:
        """[b vocab]: logits at each row's last token."""
        stage = self.model.stage
        before, stage.step = stage.step, step
        keep = None if self.keeps_logits else 1
        try:
            with torch.no_grad():
                logits = self.model(ids, attention_mask=mask, kv_cache=self.kv, logits_to_keep=keep)
        finally:
            stage.step = before
        columns = torch.arange(logits.shape[1], device=logits.device)
        last = torch.where(mask, columns, 0).amax(1) if self.keeps_logits else columns
        return logits[torch.arange(self.rows, device=logits.device), last]

    def _note(self, tokens: list[int]) -> None:
        """Record the new tokens, the text they make, and which rows they end."""
        for r, token in enumerate(tokens):
            if self.ended[r]:
                continue
            self.produced[r].append(token)
            self.ended[r] = token in self.ends.eos
            if self.inputs.is_text or self.ends.stop:
                self._read(r)

    def _read(self, r: int) -> None:
        row = [token for token in self.produced[r] if token not in self.ends.eos]
        text = self.model.to_string(row) if row else ""
        stops = [at + len(s) for s in self.ends.stop if (at := text.find(s)) >= 0]
        if stops:
            self.ended[r], text = True, text[: min(stops)]
        is_last = self.ended[r] or len(self.produced[r]) == self.limit
        # A token that ends inside a character shows as U+FFFD until the rest has come.
        if is_last or not text.endswith("\ufffd"):
            self.texts[r] = text

    def pieces(self) -> Iterator[str] | Iterator[list[str]]:
        """What each step adds to the text of each row."""
        said = [""] * self.rows
        for _ in self.steps():
            new = [text[len(old) :] for text, old in zip(self.texts, said, strict=True)]
            said = list(self.texts)
            yield new if self.inputs.is_text_list else new[0]

    def result(self) -> Tensor | str | list[str]:
        if self.inputs.is_text:
            return self.texts if self.inputs.is_text_list else self.texts[0]
        return torch.cat([self.inputs.ids, *[token.unsqueeze(1) for token in self.new]], dim=1)


def _at_the_left(inputs: Inputs) -> Inputs:
    """Rows of unequal length, padded at the right by `resolve`, with their padding at the left."""
    valid = inputs.valid
    shift = valid.shape[1] - valid.sum(1, keepdim=True)
    column = torch.arange(valid.shape[1], device=valid.device) - shift
    ids = inputs.ids.gather(1, column % valid.shape[1])
    return Inputs(ids, column >= 0, None, inputs.is_text, inputs.is_text_list)


def _seen(seen: Tensor | None, ids: Tensor, mask: Tensor, logits: Tensor) -> Tensor:
    """[b vocab] bool: tokens seen before, and those of this call."""
    if seen is None:
        seen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    rows = torch.arange(len(ids), device=ids.device).unsqueeze(1).expand_as(ids)
    return seen.index_put((rows[mask], ids[mask]), torch.tensor(True, device=ids.device))


def _ids(eos: int | Sequence[int] | None) -> list[int]:
    given = eos.tolist() if hasattr(eos, "tolist") else eos
    given = [] if given is None else given
    is_many = isinstance(given, Sequence) and not isinstance(given, str)
    ids = list(given) if is_many else [given]
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int):
            raise ValueError(f"eos_token_id={eos!r}: expected an id, several, or None")
    return ids


def _check_budget(model, names: list[str], run: _Run, device, max_bytes: int | str | None) -> None:
    where = torch.device(device or model.device)
    limit = budget.default_limit(where) if max_bytes == AUTO else max_bytes
    if limit is not None and run.limit:
        past = 0 if run.kv is None else max(run.kv.length.tolist())
        tokens = run.inputs.size[1] + run.limit - 1
        sizes = budget.sizes(model.config, names, model.dtype, run.rows, tokens, past=past)
        budget.check(sizes, limit)


def read_generation_config(folder: Path) -> dict[str, Any]:
    """generation_config.json of a checkpoint folder, {} when there is none."""
    path = Path(folder) / GENERATION_CONFIG
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
