"""What a user may pass to a run, brought to one form and checked before anything runs.

Axes: b row, s token of the call, n stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4.config import HASH_MOE

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


def resolve(
    model,
    given: Input,
    *,
    input_ids=None,
    inputs_embeds=None,
    attention_mask=None,
    start_at_layer=None,
    stop_at_layer=None,
    past=None,
) -> Inputs:
    """Text, ids (a list, lists, a 1-D or 2-D tensor), embeddings or streams -> Inputs on the model's device.

    `past`: tokens of each row already in a KV cache, for masks that cover them. Raises ValueError or TypeError that says what came.
    """
    return model.stage.before_run(
        lambda: _resolve(model, given, input_ids, inputs_embeds, attention_mask, start_at_layer, stop_at_layer, past)
    )


def _resolve(model, given, input_ids, inputs_embeds, attention_mask, start_at_layer, stop_at_layer, past) -> Inputs:
    hidden, what = None, ""
    if start_at_layer is not None:
        if inputs_embeds is not None:
            raise ValueError("inputs_embeds enter before layer 0; with start_at_layer pass streams as the first argument")
        hidden, what = _streams(model, given, start_at_layer), "streams"
        given = None
    elif inputs_embeds is not None:
        hidden, what = _embeddings(model, inputs_embeds), "embeddings"
    if given is not None and input_ids is not None:
        raise ValueError("give the ids once: as the first argument or as input_ids")
    given = input_ids if given is None else given
    if given is None and hidden is None:
        raise ValueError("nothing to run: pass text, token ids, or inputs_embeds")

    ids, listed = (None, None) if given is None else _ids(model, given)
    if hidden is not None and ids is not None and ids.shape != hidden.shape[:2]:
        raise ValueError(f"input_ids has shape {list(ids.shape)}; the {what} are for {list(hidden.shape[:2])} tokens")
    if ids is None:
        reached = range(start_at_layer or 0, model.num_layers if stop_at_layer is None else stop_at_layer)
        hashed = [i for i in reached if model.config.mlp_layer_types[i] == HASH_MOE and i not in model.skipped]
        if hashed:
            raise ValueError(f"layers {hashed} route by token id (hash_moe): pass input_ids beside the {what}")
    shape = tuple(hidden.shape[:2] if ids is None else ids.shape)
    if 0 in shape:
        raise ValueError(f"an empty input of shape {list(shape)}: expected at least one row and one token")
    valid = _valid(attention_mask, listed, shape, model.device, past)
    if hidden is not None:
        # What stands at padding reaches no token, whatever it is.
        hidden = hidden.masked_fill(~valid.view(*valid.shape, *[1] * (hidden.dim() - 2)), 0.0)
    is_text = _is_text(given)
    return Inputs(ids, valid, hidden, is_text, is_text and not isinstance(given, str))


def _is_text(x: Any) -> bool:
    return isinstance(x, str) or (isinstance(x, list | tuple) and len(x) > 0 and all(isinstance(t, str) for t in x))


def _ids(model, given) -> tuple[Tensor, Tensor | None]:
    """(ids [b s], mask of rows that differ in length, or None)."""
    mask = None
    if _is_text(given):
        ids, mask = model.tokenizer.to_tokens_and_mask(given)
    elif isinstance(given, list | tuple):
        ids, mask = _listed(model, given)
    elif isinstance(given, Tensor) or hasattr(given, "__array__"):
        ids = torch.as_tensor(given, device=model.device)
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


def _listed(model, given: Sequence) -> tuple[Tensor, Tensor | None]:
    """A list of ids, or a list of rows of ids -> (ids padded at the right, mask where the rows differ in length)."""
    are_rows = [isinstance(x, list | tuple) or getattr(x, "ndim", 0) > 0 for x in given]
    if any(are_rows) and not all(are_rows):
        raise TypeError("token ids: got rows and single ids in one list; expected a list of ids, or a list of rows of ids")
    rows = [row.tolist() if hasattr(row, "tolist") else list(row) for row in (given if any(are_rows) else [given])]
    for i, row in enumerate(rows):
        for x in row:
            if isinstance(x, bool | list | tuple) or not hasattr(x, "__index__"):
                raise TypeError(f"token ids must be integers; row {i} holds {x!r}")
            if not -(1 << 63) <= int(x) < 1 << 63:
                raise ValueError(f"token id {x} in row {i} is outside the vocabulary: expected 0 <= id < {model.config.vocab_size}")
    width, pad = max(len(row) for row in rows), model.config.pad_token_id or 0
    ids = [[*map(int, row), *[pad] * (width - len(row))] for row in rows]
    mask = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
    ids, mask = (torch.tensor(x, dtype=torch.int64, device=model.device).view(len(rows), width) for x in (ids, mask))
    return ids, None if len({len(row) for row in rows}) == 1 else mask


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
    return _floating(
        model,
        x,
        f"the streams entering layer {layer}",
        "b s n hidden",
        (None, None, model.streams, model.hidden_size),
    )


def _valid(mask, listed: Tensor | None, shape: tuple[int, int], device, past: list[int] | None) -> Tensor:
    """[b s] bool, from an explicit mask, else from the lengths of ragged lists, else all ones."""
    if mask is None:
        if listed is None:
            return torch.ones(shape, dtype=torch.bool, device=device)
        mask = listed
    mask = torch.as_tensor(mask, device=device)
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
    broken = (mask[:, 1:] != mask[:, :-1]).sum(1) > 1
    if bool(broken.any()):
        row = int(broken.nonzero()[0])
        raise ValueError(
            f"attention_mask row {row} has its zeros in more than one run: {mask[row].int().tolist()[:64]}; "
            "padding stands at the left or at the right of a row, never inside it or at both ends"
        )
    return mask


def _agree(before: Tensor, past: list[int] | None, shape: tuple[int, int]) -> None:
    counts = before.sum(1).tolist()
    if past is None or (max(past) != before.shape[1] and counts != past):
        raise ValueError(
            f"attention_mask covers {before.shape[1]} tokens before this call of {list(shape)}; "
            f"{'there is no KV cache' if past is None else f'the KV cache holds {past}'}: pass the mask of this call's tokens"
        )
    if counts != past:
        raise ValueError(f"attention_mask counts {counts} earlier tokens per row; the KV cache holds {past}")
