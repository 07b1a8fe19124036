"""Capturing: what `run_with_cache` puts on the points, which positions it keeps, and where the values go.

A captured tensor is a copy: dense, of exactly its size, with the edits of every hook at its point, and never written to by the model,
later hooks or later runs. With the graph kept it is the very tensor that the model goes on with. Axes: b row, s token, n token kept.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from dsv4.call import Call
from dsv4.hooks import HookPoint

Pos = int | slice | Sequence[int] | Tensor | None
POS_FORMS = "an int, a slice, a list of ints or an integer tensor [n] or [b, n]"
# Just below the largest block that glibc learns from.
LEARNED = 31 << 20


@cache
def keep_freed_memory() -> None:
    """Have glibc keep up to 64 MB of what is freed for whoever asks next. It returns blocks to the system that are larger than any it has
    seen freed, and captured values, freed after every run, would be paid for in page faults. Other allocators take no notice.
    """
    torch.empty(LEARNED, dtype=torch.uint8, device="cpu")


class Capture:
    """One run's captures. `store(name, value)` receives each value once; `pos` is one of `as_pos`."""

    def __init__(self, store: Callable[[str, Tensor], None], *, pos: Pos = None, device=None, detach: bool = True):
        keep_freed_memory()
        self.store, self.pos, self.device = store, pos, device
        self.keeps_graph = not detach
        self.positions: Tensor | None = None
        self.token_keys: int | None = None
        self._columns: Tensor | None = None

    def begin(self, call: Call) -> None:
        """Fix the columns that `pos` means for this call."""
        self._columns = None if self.pos is None else columns(self.pos, call)
        positions = call.positions if self._columns is None else call.positions.gather(1, self._columns)
        self.positions = positions.clone() if self.device is None else positions.to(self.device)
        self.token_keys = call.token_positions.shape[1]

    def __call__(self, point: HookPoint, value: Tensor) -> None:
        if self.keeps_graph:
            self.store(point.name, self._taken(point, value))
            return
        # A run in inference mode leaves tensors that gradients can be computed with.
        with torch.inference_mode(False), torch.no_grad():
            taken = self._taken(point, value.detach()).contiguous()
            shares = taken.device == value.device and taken.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
            self.store(point.name, taken.clone() if shares else taken)

    def _taken(self, point: HookPoint, value: Tensor) -> Tensor:
        axes = point.axes.split()
        if self._columns is not None and "s" in axes:
            value = self._slice(value, axes.index("s"), point)
        return value if self.device is None else value.to(self.device)

    def _slice(self, value: Tensor, axis: int, point: HookPoint) -> Tensor:
        index = self._columns.to(value.device)
        held = point.stage.columns(point.name)
        if held is not None:
            index = places_among(held, index, point.name)
        shape = [1] * value.dim()
        shape[0], shape[axis] = index.shape
        target = list(value.shape)
        target[axis] = index.shape[1]
        taken = value.gather(axis, index.view(shape).expand(target))
        return taken.squeeze(axis) if isinstance(self.pos, int) else taken


class Last:
    """Keeps what a point returned last, after all hooks, for another hook of the same run to read."""

    keeps_graph = False

    def __init__(self):
        self.value: Tensor | None = None

    def __call__(self, point: HookPoint, value: Tensor) -> None:
        self.value = value

    @contextmanager
    def of(self, point: HookPoint) -> Iterator["Last"]:
        point.attach_capture(self)
        try:
            yield self
        finally:
            point.detach_capture(self)
            self.value = None


def as_pos(pos, what: str = "pos") -> Pos:
    """pos in one of its forms: None (all), int, slice, or an int64 tensor [n] or [b, n]. TypeError for anything else.

    what: the argument's name, for messages.
    """
    if pos is None or (isinstance(pos, slice) and pos == slice(None)):
        return None
    if isinstance(pos, slice):
        return pos
    if not isinstance(pos, bool) and hasattr(pos, "__index__") and getattr(pos, "ndim", 0) == 0:
        return operator.index(pos)
    if isinstance(pos, bool | str | dict | set) or not hasattr(pos, "__len__"):
        raise TypeError(f"{what}={pos!r}: expected {POS_FORMS}")
    places = torch.as_tensor(pos if hasattr(pos, "__array__") else list(pos), dtype=None if len(pos) else torch.int64, device="cpu")
    if places.dtype.is_floating_point or places.dtype.is_complex or places.dtype == torch.bool:
        raise TypeError(f"{what} holds {places.dtype}: expected {POS_FORMS}")
    if places.dim() not in (1, 2):
        raise TypeError(f"{what} has shape {list(places.shape)}: expected {POS_FORMS}")
    return places.long()


def count(pos: Pos, seq: int) -> int:
    """Tokens that `pos` keeps of `seq`."""
    if pos is None:
        return seq
    if isinstance(pos, int):
        return 1
    return len(range(*pos.indices(seq))) if isinstance(pos, slice) else pos.shape[-1]


def columns(pos: Pos, call: Call) -> Tensor:
    """[b n] columns of the call: `pos` counts each row's real tokens of this call, negatives from its last.

    IndexError when a row has no such token; ValueError when a slice keeps unequal counts.
    """
    total = (call.lengths - call.past).unsqueeze(1)
    counts = total.flatten().tolist()
    rows, device = len(counts), call.valid.device
    if isinstance(pos, slice):
        kept = [list(range(*pos.indices(c))) for c in counts]
        if len({len(k) for k in kept}) > 1:
            raise ValueError(f"pos={pos} keeps {[len(k) for k in kept]} tokens of rows with {counts}: give a [b, n] tensor instead")
        places = torch.tensor(kept, dtype=torch.int64, device=device).view(rows, -1)
    elif isinstance(pos, int):
        places = torch.full((rows, 1), pos, dtype=torch.int64, device=device)
    else:
        places = pos.to(device)
        places = places.expand(rows, -1) if places.dim() == 1 else places
        if places.shape[0] != rows:
            raise ValueError(f"pos has shape {list(places.shape)}; expected [n] or [{rows}, n], one row of positions per row of the batch")
    from_start = torch.where(places < 0, places + total, places)
    outside = (from_start < 0) | (from_start >= total)
    if bool(outside.any()):
        row, column = outside.nonzero()[0].tolist()
        raise IndexError(f"pos {int(places[row, column])} is outside row {row}, which has {counts[row]} real tokens in this call")
    return from_start + call.start.unsqueeze(1)


def places_among(held: Tensor, wanted: Tensor, name: str) -> Tensor:
    """Where the columns wanted [b n] stand among those that a value holds [b m]. IndexError when it does not hold one."""
    same = wanted.unsqueeze(-1) == held.unsqueeze(1)
    if not bool(same.any(-1).all()):
        raise IndexError(f"pos asks {name} for tokens that logits_to_keep={held.shape[1]} leaves out; keep more, or fewer positions")
    return same.int().argmax(-1)
