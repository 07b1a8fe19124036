"""KVCache: what a later call needs of the earlier ones, per row, so that it does not matter how the tokens arrive.

Per block: the window's rotated keys; on compressed blocks the entries (all of them) and the unpooled projections of windows that are
still open, the compressor's and the indexer's. Everything is stored by row position, so rows may differ in length.

A forward writes only beyond what is committed, and a commit replaces the state in one assignment: whatever raises before it leaves
the cache as it was. What is stored is detached; gradients stop at the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.attention import SlidingAttention
from dsv4.call import OVERLAPPING, Call, Windows, kept_projections
from dsv4.config import Dsv4Config
from dsv4.inputs import Inputs

# Spare columns that a tape gets when it has to grow, at least; and at least this share of what it holds.
SPARE = 128
SPARE_SHARE = 8


@dataclass(frozen=True)
class Tape:
    """Stored values of one kind: `held` [b, columns, width]; row r's column 0 is its position (or entry) number `first[r]`."""

    held: Tensor
    first: tuple[int, ...]

    def read(self, begin: Sequence[int], count: int) -> Tensor:
        """[b, count, width] from number begin[r] on; zeros before number 0."""
        starts = [b - f for b, f in zip(begin, self.first, strict=True)]
        if len(set(starts)) == 1 and starts[0] >= 0 and min(begin) >= 0:
            return self.held[:, starts[0] : starts[0] + count]
        device = self.held.device
        steps = torch.arange(count, device=device)
        index = torch.tensor(starts, device=device).unsqueeze(1) + steps
        number = torch.tensor(list(begin), device=device).unsqueeze(1) + steps
        inside = index.clamp(0, max(self.held.shape[1] - 1, 0)).unsqueeze(-1).expand(-1, -1, self.held.shape[-1])
        return self.held.gather(1, inside).masked_fill((number < 0).unsqueeze(-1), 0.0)

    def select(self, rows: Sequence[int]) -> "Tape":
        index = torch.tensor(rows, dtype=torch.int64, device=self.held.device)
        return Tape(self.held.index_select(0, index), tuple(self.first[r] for r in rows))

    def append(self, new: Tensor, start: Sequence[int], before: Sequence[int], after: Sequence[int], oldest: Sequence[int], most: int):
        """The tape with numbers before[r] ... after[r] - 1 taken from new[r, start[r]:]; in place when there is room.

        Room is made by a new tape that begins at number oldest[r] and never holds more than `most` columns. In place means beyond
        number before[r], where nothing is committed.
        """
        with torch.inference_mode(False), torch.no_grad():
            held, first = self.held, self.first
            if max(a - f for a, f in zip(after, first, strict=True)) > held.shape[1]:
                first = tuple(oldest)
                columns = max(a - f for a, f in zip(after, first, strict=True))
                columns = min(columns + max(SPARE, columns // SPARE_SHARE), max(most, columns))
                held = torch.zeros(held.shape[0], columns, held.shape[2], dtype=held.dtype, device=held.device)
                kept = max(b - f for b, f in zip(before, first, strict=True))
                if kept > 0:
                    held[:, :kept] = self.read(first, kept)
            rows = list(zip(start, before, after, first, strict=True))
            if len(set(rows)) == 1:
                _write(held, new, *rows[0])
            else:
                for r, row in enumerate(rows):
                    _write(held[r : r + 1], new[r : r + 1], *row)
            return Tape(held, first)


def _write(held: Tensor, new: Tensor, start: int, before: int, after: int, first: int) -> None:
    begin = max(before, first)
    if begin < after:
        held[:, begin - first : after - first] = new[:, start + begin - before : start + after - before]


@dataclass(frozen=True)
class State:
    """All that is committed: lengths, the shortest length each row can still be cut to, one tape per slot."""

    length: tuple[int, ...]
    floor: tuple[int, ...]
    tapes: tuple[Tape, ...]


class TokenSlot:
    """A value per token. `keep`: tokens before the end that a later call needs."""

    def __init__(self, cache: "KVCache", number: int, width: int, dtype: torch.dtype, keep: int):
        self.cache, self.number, self.width, self.dtype, self.keep = cache, number, width, dtype, keep
        self.pending: Tensor | None = None

    def extend(self, new: Tensor, earlier: int) -> Tensor:
        """[b s width] -> [b earlier+s width]: each row's last `earlier` tokens stand before this call's columns."""
        self.pending = new.detach()
        if earlier == 0:
            return new
        state = self.cache.state
        begin = [n - earlier for n in state.length]
        return torch.cat((state.tapes[self.number].read(begin, earlier), new), dim=1)

    def advanced(self, call: Call, floor: Sequence[int]) -> Tape:
        """The tape after the call."""
        tape = self.cache.state.tapes[self.number]
        rows = zip(floor, tape.first, call.host.length, strict=True)
        oldest = [max(lowest - self.keep, first, 0) if length else 0 for lowest, first, length in rows]
        return tape.append(self.pending, call.host.start, call.host.past, call.host.length, oldest, self.cache.max_length)


class EntrySlot:
    """Closed entries, all kept. `rate`: tokens per entry."""

    def __init__(self, cache: "KVCache", number: int, width: int, dtype: torch.dtype, rate: int):
        self.cache, self.number, self.width, self.dtype, self.rate = cache, number, width, dtype, rate
        self.pending: Tape | None = None

    def extend(self, new: Tensor, windows: Windows) -> Tensor:
        """[b e_new width] -> [b e width]: each row's entries in order, zeros where a row has fewer."""
        before, after = windows.host_before, windows.host_after
        old = self.cache.state.tapes[self.number]
        most = self.cache.max_length // self.rate
        self.pending = old.append(new.detach(), [0] * len(before), before, after, old.first, most)
        if not (torch.is_grad_enabled() and new.requires_grad):
            every = self.pending.held[:, : windows.total]
        else:
            # This call's own entries carry their graph.
            stored = max(before)
            both = torch.cat((old.held[:, :stored], new), dim=1)
            number = torch.arange(windows.total, device=new.device)
            own = stored + number - windows.before.unsqueeze(1)
            index = torch.where(number < windows.before.unsqueeze(1), number, own).clamp(max=both.shape[1] - 1)
            every = both.gather(1, index.unsqueeze(-1).expand(-1, -1, both.shape[-1]))
        if len(set(after)) > 1:
            absent = torch.arange(windows.total, device=new.device) >= windows.after.unsqueeze(1)
            every = every.masked_fill(absent.unsqueeze(-1), 0.0)
        return every

    def advanced(self, call: Call, floor: Sequence[int]) -> Tape:
        return self.pending


@dataclass(frozen=True)
class PoolSlots:
    """What an EntryPool keeps."""

    projections: TokenSlot
    entries: EntrySlot


@dataclass(frozen=True)
class LayerSlots:
    """What one block keeps."""

    keys: TokenSlot
    compressor: PoolSlots | None
    indexer: PoolSlots | None


class KVCache:
    """The memory of earlier calls, for one batch of rows.

    Args:
        config: the model's. batch_size: rows. max_length: tokens a row may reach (storage grows up to it).
        device, dtype: the model's (dtype None is the config's torch_dtype).
        rewind: tokens that can be cut off again. 0 keeps the window and the open windows only; r keeps r tokens more; None keeps
            everything, so that `truncate` is exact at any length.

    Bytes a token on V4-Flash in bfloat16 (21 CSA, 20 HCA, 2 sliding blocks): 6,880 with rewind=0 or r (the entries: CSA blocks
    (512 + 128) * 2 / 4, HCA blocks 512 * 2 / 128), 347,872 with rewind=None (also 1,024 for every block's key and the float32
    projections: 10,240 on a CSA block, 4,096 on an HCA block). The constant of rewind=0 is 16.7 MiB a row, and r tokens of
    rewind=None more with rewind=r; spare columns for growth come on top (SPARE, or an eighth).
    """

    def __init__(
        self,
        config: Dsv4Config,
        batch_size: int = 1,
        max_length: int = 4096,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        rewind: int | None = None,
    ):
        for name, value, least in (("batch_size", batch_size, 1), ("max_length", max_length, 1), ("rewind", rewind, 0)):
            allowed = value is None and name == "rewind"
            if not allowed and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ValueError(f"{name}={value!r}: expected an int >= {least}{' or None' if name == 'rewind' else ''}")
        self.config, self.max_length, self.rewind = config, max_length, rewind
        self.device = torch.empty(0, device="cpu" if device is None else device).device
        self.dtype = config.torch_dtype if dtype is None else dtype
        self._slots: list[TokenSlot | EntrySlot] = []
        self.layers = tuple(self._layer(i) for i in range(config.num_hidden_layers))
        self.state = self._empty(batch_size)
        self._busy = False

    # What it holds.

    @property
    def batch_size(self) -> int:
        return len(self.state.length)

    @property
    def length(self) -> Tensor:
        """Tokens of each row, int64 on the CPU [b]."""
        return torch.tensor(self.state.length, dtype=torch.int64, device="cpu")

    @property
    def nbytes(self) -> int:
        """Bytes of storage held now."""
        return sum(t.held.numel() * t.held.element_size() for t in self.state.tapes)

    def reset(self) -> None:
        """Forget every row."""
        self._idle("reset")
        self.state = self._empty(self.batch_size)

    def truncate(self, n: int | Sequence[int] | Tensor) -> None:
        """Cut each row to its first n tokens: an int (rows that are shorter stay), or one length per row.

        ValueError when a row would be cut by more than `rewind` allows, or is shorter than its length asked for.
        """
        self._idle("truncate")
        length = self.state.length
        if isinstance(n, int) and not isinstance(n, bool):
            wanted = [min(n, old) for old in length]
        else:
            wanted = [int(x) for x in (n.tolist() if isinstance(n, Tensor) else n)]
            if len(wanted) != len(length):
                raise ValueError(f"truncate takes one length per row: got {len(wanted)} for {len(length)} rows")
        for r, (new, old, floor) in enumerate(zip(wanted, length, self.state.floor, strict=True)):
            if not 0 <= new <= old:
                raise ValueError(f"truncate: row {r} holds {old} tokens and cannot be cut to {new}")
            if new < floor:
                raise ValueError(
                    f"truncate: row {r} was made with rewind={self.rewind} and can be cut to {floor} tokens at the least, not {new}; "
                    "build the cache with a larger rewind, or None"
                )
        self.state = replace(self.state, length=tuple(wanted))

    def expand(self, n: int) -> "KVCache":
        """A cache of n rows that all continue this one row. The prefix is copied for each row; this cache stays usable."""
        if self.batch_size != 1:
            raise ValueError(f"expand takes a cache of one row, this one has {self.batch_size}: use select([rows, with, repeats])")
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"expand({n!r}): expected a count of rows >= 1")
        return self.select([0] * n)

    def clone(self) -> "KVCache":
        """A copy; neither sees what the other is fed."""
        return self.select(range(self.batch_size))

    def select(self, rows: Sequence[int] | Tensor) -> "KVCache":
        """A cache of these rows, in this order, with repeats where given; this one stays usable."""
        self._idle("select")
        chosen = [int(r) for r in (rows.tolist() if isinstance(rows, Tensor) else rows)]
        for r in chosen:
            if not 0 <= r < self.batch_size:
                raise IndexError(f"select: row {r} of a cache of {self.batch_size} rows")
        if not chosen:
            raise ValueError("select: no rows given")
        other = KVCache(
            self.config, len(chosen), self.max_length, device=self.device, dtype=self.dtype, rewind=self.rewind
        )
        with torch.inference_mode(False), torch.no_grad():
            tapes = tuple(tape.select(chosen) for tape in self.state.tapes)
        other.state = State(
            tuple(self.state.length[r] for r in chosen), tuple(self.state.floor[r] for r in chosen), tapes
        )
        return other

    def __repr__(self) -> str:
        return (
            f"KVCache(rows={self.batch_size}, length={list(self.state.length)}, max_length={self.max_length}, rewind={self.rewind}, "
            f"{self.nbytes / 2**20:.2f} MiB)"
        )

    # What a forward asks of it.

    def admit(self, model, inputs: Inputs, *, partial: bool) -> None:
        """Raise before anything changes when the call does not fit this cache."""
        self._idle("a run")
        if partial:
            raise ValueError("start_at_layer, stop_at_layer and skip_layers are refused with a kv_cache: every block must see every token")
        if self.config != model.config:
            raise ValueError("the KV cache was made for another config; build it with model.new_kv_cache(...)")
        for name in ("dtype", "device"):
            if getattr(self, name) != getattr(model, name):
                raise ValueError(
                    f"the KV cache has {name} {getattr(self, name)}, the model {getattr(model, name)}; build it with model.new_kv_cache(...)"
                )
        if inputs.size[0] != self.batch_size:
            raise ValueError(f"the KV cache holds {self.batch_size} rows, the input {inputs.size[0]}; use expand(n) or select(rows)")
        counts = inputs.valid.sum(1).tolist()
        for r, (held, count) in enumerate(zip(self.state.length, counts, strict=True)):
            if held + count > self.max_length:
                raise ValueError(
                    f"row {r} of the KV cache holds {held} tokens; {count} more exceed max_length={self.max_length}: "
                    "build a longer cache, or truncate"
                )
        self._busy = True

    def commit(self, call: Call) -> None:
        """Take in what the call added."""
        state = self.state
        rewind = max(call.host.length) if self.rewind is None else self.rewind
        floor = tuple(max(f, n - rewind) for f, n in zip(state.floor, call.host.length, strict=True))
        tapes = tuple(slot.advanced(call, floor) for slot in self._slots)
        self.state = State(call.host.length, floor, tapes)

    def forget(self) -> None:
        """Drop what a call left pending, committed or not."""
        for slot in self._slots:
            slot.pending = None
        self._busy = False

    def _idle(self, what: str) -> None:
        if self._busy:
            raise RuntimeError(f"{what} on a KV cache that a run in progress is using; wait until the run has ended")

    # How it is laid out.

    def _layer(self, i: int) -> LayerSlots:
        config, kind = self.config, self.config.layer_types[i]
        keys = self._add(TokenSlot, config.head_dim, self.dtype, config.sliding_window - 1)
        if kind == SlidingAttention.layer_type:
            return LayerSlots(keys, None, None)
        overlap, rate = kind == OVERLAPPING, config.compress_rates[kind]
        return LayerSlots(
            keys,
            self._pool(config.head_dim, rate, overlap),
            self._pool(config.index_head_dim, rate, overlap) if overlap else None,
        )

    def _pool(self, width: int, rate: int, overlap: bool) -> PoolSlots:
        kept = torch.promote_types(self.dtype, torch.float32)
        series = 2 if overlap else 1
        projections = self._add(TokenSlot, 2 * series * width, kept, kept_projections(rate, overlap))
        return PoolSlots(projections, self._add(EntrySlot, width, self.dtype, rate))

    def _add(self, kind, width: int, dtype: torch.dtype, rule: int):
        slot = kind(self, len(self._slots), width, dtype, rule)
        self._slots.append(slot)
        return slot

    def _empty(self, rows: int) -> State:
        zeros = (0,) * rows
        with torch.inference_mode(False):
            tapes = tuple(
                Tape(torch.zeros(rows, 0, slot.width, dtype=slot.dtype, device=self.device), zeros) for slot in self._slots
            )
        return State(zeros, zeros, tapes)
