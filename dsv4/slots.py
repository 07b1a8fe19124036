"""The slots of a KVCache: what one block keeps of one value, and how a call reads it and adds to it. Axes: b row, s token, e entry."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.call import Call, Windows
from dsv4.tape import Tape, writing

# `expand` shares the entries of a prefix while rows * tokens are at most so many, else it copies them.
SHARED_ENTRIES = 1 << 16


@dataclass(frozen=True)
class State:
    """All that is committed: lengths, what each row can still be cut to, a tape for every slot."""

    length: tuple[int, ...]
    floor: tuple[int, ...]
    tapes: tuple[Tape, ...]


class TokenSlot:
    """A value per token. `keep`: tokens before the end that a later call needs."""

    def __init__(self, cache, number: int, width: int, dtype: torch.dtype, keep: int):
        self.cache, self.number, self.width, self.dtype = cache, number, width, dtype
        self.keep = keep
        self.pending: Tensor | None = None

    def extend(self, new: Tensor, earlier: int) -> Tensor:
        """[b s width] -> [b earlier+s width]: before this call's columns each row's last tokens."""
        self.pending = new.detach()
        return self.joined(new, earlier)

    def joined(self, new: Tensor, earlier: int) -> Tensor:
        """What `extend` returns, with nothing put in."""
        if earlier == 0:
            return new
        state = self.cache.state
        begin = [n - earlier for n in state.length]
        return torch.cat((state.tapes[self.number].read(begin, earlier), new), dim=1)

    def advanced(self, call: Call, floor: Sequence[int]) -> Tape:
        """The tape after the call."""
        tape, rows = self.cache.state.tapes[self.number], call.host
        pairs = zip(floor, tape.lowest, strict=True)
        oldest = [max(least - self.keep, held, 0) for least, held in pairs]
        return tape.append(self.pending, rows.start, rows.past, rows.length, oldest, self.cache.max_length)

    def expand(self, tape: Tape, rows: int, length: int) -> Tape:
        return tape.share(rows, max(length - self.keep, 0), length)


class EntrySlot:
    """Closed entries, all of them kept. `rate`: tokens per entry."""

    def __init__(self, cache, number: int, width: int, dtype: torch.dtype, rate: int):
        self.cache, self.number, self.width, self.dtype = cache, number, width, dtype
        self.rate = rate
        self.pending: Tape | None = None

    def extend(self, new: Tensor, windows: Windows) -> Tensor:
        """[b e_new width] -> [b e width]: each row's entries in order, zeros where it has fewer."""
        before, after = windows.host_before, windows.host_after
        old = self.cache.state.tapes[self.number]
        self.pending = old
        if windows.new:
            with writing():
                self.pending = old.append(new.detach(), [0] * len(before), before, after, old.lowest, self.most)
        # A graph may hold on to what it is given, and this call's own entries carry theirs.
        joins = torch.is_grad_enabled()
        every = _joined(old.front(max(before)), new, windows) if joins else self.pending.front(windows.total)
        if len(set(after)) > 1:
            number = torch.arange(windows.total, device=new.device)
            absent = number >= windows.after.unsqueeze(1)
            every = every.masked_fill(absent.unsqueeze(-1), 0.0)
        return every

    @property
    def most(self) -> int:
        return self.cache.max_length // self.rate

    def advanced(self, call: Call, floor: Sequence[int]) -> Tape:
        return self.pending

    def expand(self, tape: Tape, rows: int, length: int) -> Tape:
        entries = length // self.rate
        return tape.share(rows, entries if rows * length <= SHARED_ENTRIES else 0, entries)


def _joined(stored: Tensor, new: Tensor, windows: Windows) -> Tensor:
    """Each row's stored entries, then its new ones."""
    both = torch.cat((stored, new), dim=1)
    number = torch.arange(windows.total, device=new.device)
    before = windows.before.unsqueeze(1)
    own = (stored.shape[1] + number - before).clamp(max=max(both.shape[1] - 1, 0))
    index = torch.where(number < before, number, own).unsqueeze(-1)
    return both.gather(1, index.expand(-1, -1, both.shape[-1]))


@dataclass(frozen=True)
class PoolSlots:
    """What an EntryPool keeps."""

    projections: TokenSlot
    entries: EntrySlot


@dataclass(frozen=True)
class LayerSlots:
    """What one block keeps."""

    # Whether it is of the fixed form (fixed_cache.FixedLayer).
    fixed = False

    keys: TokenSlot
    compressor: PoolSlots | None
    indexer: PoolSlots | None
