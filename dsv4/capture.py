"""Capturing: what `run_with_cache` puts on the points, which positions it keeps, and where the values go.

A captured tensor is dense, owns its storage, shows the value after edits, and is never written to by the model.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dsv4.call import Call
from dsv4.hooks import HookPoint

Pos = int | slice | Sequence[int] | Tensor | None


class Capture:
    """One run's captures. `store(name, value)` receives each value once."""

    def __init__(self, store: Callable[[str, Tensor], None], *, pos: Pos = None, device=None, detach: bool = True):
        self.store, self.pos, self.device = store, pos, device
        self.keeps_graph = not detach
        self.positions: Tensor | None = None
        self._columns: Tensor | None = None
        self._waiting: list[tuple[HookPoint, Tensor]] = []

    def __call__(self, point: HookPoint, value: Tensor) -> None:
        # Keys and values are one tensor: a hook at the second may still write into it.
        if point.private:
            self._waiting.append((point, value))
        else:
            self._take(point, value)

    def finish(self) -> None:
        for point, value in self._waiting:
            self._take(point, value, copy=True)
        self._waiting.clear()

    def _take(self, point: HookPoint, value: Tensor, copy: bool = False) -> None:
        taken = value if self.keeps_graph else value.detach()
        axes = point.axes.split()
        if self.pos is not None and "s" in axes:
            taken = self._slice(taken, axes.index("s"), point.stage.call)
        if self.device is not None:
            taken = taken.to(self.device)
        if not self.keeps_graph:
            taken = own(taken.clone() if copy and taken.data_ptr() == value.data_ptr() else taken)
        self.store(point.name, taken)

    def begin(self, call: Call) -> None:
        """Fix the columns that `pos` means for this call."""
        if self.pos is None:
            self.positions = call.positions
            return
        self._columns = columns(self.pos, call)
        self.positions = call.positions.gather(1, self._columns)

    def _slice(self, value: Tensor, axis: int, call: Call) -> Tensor:
        if self._columns is None:
            self.begin(call)
        index = self._columns
        shape = [1] * value.dim()
        shape[0], shape[axis] = index.shape
        target = list(value.shape)
        target[axis] = index.shape[1]
        taken = value.gather(axis, index.view(shape).expand(target))
        return taken.squeeze(axis) if isinstance(self.pos, int) else taken


def own(value: Tensor) -> Tensor:
    """The value dense and in a storage of exactly its size, copied only where it is not."""
    value = value.contiguous()
    exact = value.untyped_storage().nbytes() == value.numel() * value.element_size()
    return value if exact else value.clone()


def count(pos: Pos, seq: int) -> int:
    """Tokens that `pos` keeps of `seq`."""
    if pos is None:
        return seq
    if isinstance(pos, int):
        return 1
    if isinstance(pos, slice):
        return len(range(*pos.indices(seq)))
    return pos.shape[-1] if isinstance(pos, Tensor) else len(pos)


def columns(pos: Pos, call: Call) -> Tensor:
    """[b n] columns of the call: `pos` counts each row's real tokens of this call, negatives from its last.

    IndexError when a row has no such token; ValueError when a slice keeps unequal counts, unless it is the whole row.
    """
    counts = (call.lengths - call.past).tolist()
    rows = len(counts)
    device = call.valid.device
    if isinstance(pos, bool) or pos is None:
        raise TypeError(f"pos={pos!r}: expected an int, a slice, a list of ints or an integer tensor [b, n]")
    if isinstance(pos, slice):
        kept = [list(range(*pos.indices(c))) for c in counts]
        if len({len(k) for k in kept}) > 1:
            raise ValueError(f"pos={pos} keeps {[len(k) for k in kept]} tokens of rows with {counts}: give a [b, n] tensor instead")
        places = torch.tensor(kept, dtype=torch.int64, device=device).view(rows, -1)
    elif isinstance(pos, int):
        places = torch.full((rows, 1), pos, dtype=torch.int64, device=device)
    else:
        places = torch.as_tensor(pos, device=device)
        if places.dtype.is_floating_point or places.dtype == torch.bool:
            raise TypeError(f"pos must hold integers, got {places.dtype}")
        places = places.long()
        places = places.expand(rows, -1) if places.dim() == 1 else places
        if places.dim() != 2 or places.shape[0] != rows:
            raise ValueError(f"pos has shape {list(places.shape)}; expected [n] or [{rows}, n], one row of positions per row of the batch")
    total = (call.lengths - call.past).unsqueeze(1)
    from_start = torch.where(places < 0, places + total, places)
    outside = (from_start < 0) | (from_start >= total)
    if bool(outside.any()):
        row, column = outside.nonzero()[0].tolist()
        raise IndexError(f"pos {int(places[row, column])} is outside row {row}, which has {counts[row]} real tokens in this call")
    return from_start + call.start.unsqueeze(1)
