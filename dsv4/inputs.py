"""What a user may pass to a run, brought to one form and checked before anything runs.

Axes: b row, s token of the call, n stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Input = str | Sequence | Tensor | None


@dataclass(frozen=True)
class Inputs:
    """ids [b s] int64 or None; valid [b s] bool; hidden: token embeddings [b s hidden], streams [b s n hidden], or None."""

    ids: Tensor | None
    valid: Tensor
    hidden: Tensor | None
    is_text: bool = False
    is_text_list: bool = False

    @property
    def size(self) -> tuple[int, int]:
        return tuple(self.valid.shape)


def resolve(model, given: Input, *, input_ids=None, inputs_embeds=None, attention_mask=None, start_at_layer=None, past=None) -> Inputs:
    """Text, ids (a list, lists, a 1-D or 2-D tensor), embeddings or streams -> Inputs on the model's device.

    `past`: tokens of each row already in a KV cache, for masks that cover them. Raises ValueError or TypeError that says what came.
    """
    is_text = _is_text(given) or _is_text(input_ids)
    hidden = None
    if start_at_layer is not None:
        hidden = _streams(model, given, start_at_layer)
        given = input_ids
    elif inputs_embeds is not None:
        if given is not None and input_ids is not None:
            raise ValueError("give the ids once: as the first argument or as input_ids")
        hidden = _embeddings(model, inputs_embeds)
        given = given if given is not None else input_ids
    elif given is None:
        given = input_ids
    elif input_ids is not None:
        raise ValueError("give the ids once: as the first argument or as input_ids")
    if given is None and hidden is None:
        raise ValueError("nothing to run: pass text, token ids, or inputs_embeds")

    ids, listed = (None, None) if given is None else _ids(model, given)
    if hidden is not None and ids is not None and ids.shape != hidden.shape[:2]:
        raise ValueError(f"input_ids has shape {list(ids.shape)}; the {'streams' if start_at_layer is not None else 'embeddings'} "
                         f"are for {list(hidden.shape[:2])} tokens")
    if ids is None:
        hashed = [i for i in range(start_at_layer or 0, model.num_layers) if model.config.mlp_layer_types[i] == "hash_moe"]
        if hashed:
            raise ValueError(f"layers {hashed} route by token id (hash_moe): pass input_ids beside the embeddings or streams")
    shape = hidden.shape[:2] if ids is None else ids.shape
    if 0 in shape:
        raise ValueError(f"an empty input of shape {list(shape)}: expected at least one row and one token")
    valid = _valid(attention_mask, listed, tuple(shape), model.device, past)
    return Inputs(ids, valid, hidden, is_text, is_text and not isinstance(given, str))


def _is_text(x: Any) -> bool:
    return isinstance(x, str) or (isinstance(x, list | tuple) and len(x) > 0 and all(isinstance(t, str) for t in x))


def _ids(model, given) -> tuple[Tensor, Tensor | None]:
    """(ids [b s], mask from ragged lists or None)."""
    mask = None
    if _is_text(given):
        ids, mask = model.tokenizer.to_tokens_and_mask(given)
    elif isinstance(given, Tensor):
        ids = given
    elif isinstance(given, list | tuple) and given and all(isinstance(row, list | tuple) for row in given):
        width = max(len(row) for row in given)
        pad = model.config.pad_token_id or 0
        ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in given])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in given])
    elif isinstance(given, list | tuple):
        ids = torch.tensor(list(given), dtype=None if given else torch.int64)
    else:
        raise TypeError(f"expected text, token ids or a tensor, got {type(given).__name__}")
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise TypeError(f"token ids must be integers, got {ids.dtype}; embeddings go in as inputs_embeds=, streams with start_at_layer=")
    if ids.dim() == 1:
        ids = ids.unsqueeze(0)
        mask = mask if mask is None or mask.dim() == 2 else mask.unsqueeze(0)
    if ids.dim() != 2:
        raise ValueError(f"token ids must be [s] or [b, s], got shape {list(ids.shape)}")
    ids = ids.to(device=model.device, dtype=torch.int64)
    vocab = model.config.vocab_size
    outside = (ids < 0) | (ids >= vocab)
    if bool(outside.any()):
        row, column = outside.nonzero()[0].tolist()
        raise ValueError(f"token id {int(ids[row, column])} at [{row}, {column}] is outside the vocabulary: expected 0 <= id < {vocab}")
    return ids, mask


def _floating(model, x: Any, what: str, axes: str, shape: tuple[int | None, ...]) -> Tensor:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"{what} must be a floating tensor [{axes}], got {getattr(x, 'dtype', type(x).__name__)}")
    if x.dim() != len(shape) or any(e is not None and e != g for e, g in zip(shape, x.shape, strict=True)):
        expected = ", ".join("?" if e is None else str(e) for e in shape)
        raise ValueError(f"{what} has shape {list(x.shape)}; expected [{expected}] = [{axes}]")
    return x.to(device=model.device, dtype=model.dtype)


def _embeddings(model, x: Any) -> Tensor:
    return _floating(model, x, "inputs_embeds", "b s hidden", (None, None, model.hidden_size))


def _streams(model, x: Any, layer: int) -> Tensor:
    if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer <= model.num_layers:
        raise ValueError(f"start_at_layer={layer!r}: expected 0 <= layer <= {model.num_layers}")
    return _floating(model, x, f"the streams entering layer {layer}", "b s n hidden", (None, None, model.streams, model.hidden_size))


def _valid(mask, listed: Tensor | None, shape: tuple[int, int], device, past: list[int] | None) -> Tensor:
    """[b s] bool, from an explicit mask, else from the lengths of ragged lists, else all ones."""
    if mask is None:
        if listed is None:
            return torch.ones(shape, dtype=torch.bool, device=device)
        mask = listed
    mask = torch.as_tensor(mask)
    if mask.dim() == 1 and shape[0] == 1:
        mask = mask.unsqueeze(0)
    b, s = shape
    if mask.dim() != 2 or mask.shape[0] != b or mask.shape[1] < s:
        raise ValueError(f"attention_mask has shape {list(mask.shape)}; expected {list(shape)}, one value per token of this call")
    if mask.is_complex() or not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("attention_mask must hold 0 (padding) and 1 (token) only; additive masks are not accepted")
    mask = mask.to(device=device, dtype=torch.bool)
    if mask.shape[1] > s:
        _agree(mask[:, :-s], past, shape)
        mask = mask[:, -s:]
    if listed is not None and not torch.equal(mask, listed.to(device=device, dtype=torch.bool)):
        raise ValueError("attention_mask disagrees with the lengths of the rows given; leave it out, they are padded and masked for you")
    changes = (mask[:, 1:] != mask[:, :-1]).sum(1)
    holes = (changes > 1) & ~((changes == 2) & ~mask[:, 0] & ~mask[:, -1])
    both = (changes == 2) & ~mask[:, 0] & ~mask[:, -1]
    if bool((holes | both).any()):
        row = int((holes | both).nonzero()[0])
        raise ValueError(
            f"attention_mask row {row} has its zeros in more than one run: {mask[row].int().tolist()[:64]}; "
            "padding stands at the left or at the right of a row, never inside it or at both ends"
        )
    return mask


def _agree(before: Tensor, past: list[int] | None, shape: tuple[int, int]) -> None:
    counts = before.sum(1).tolist()
    if past is None or max(past) != before.shape[1] and counts != past:
        raise ValueError(
            f"attention_mask covers {before.shape[1]} tokens before this call of {list(shape)}; "
            f"{'there is no KV cache' if past is None else f'the KV cache holds {past}'}: pass the mask of this call's tokens"
        )
    if counts != past:
        raise ValueError(f"attention_mask counts {counts} earlier tokens per row; the KV cache holds {past}")
