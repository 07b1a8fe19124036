"""KVCache: what a later call needs of the earlier ones, row by row, so that it does not matter how
the tokens arrive.

Per block: the window's rotated keys; on compressed blocks every entry and the unpooled projections
of the windows that are still open, the compressor's and the indexer's. All of it is kept by its
place in the row, so rows may differ in length.

A forward writes only behind what is committed, and committing is one assignment: whatever raises
before it leaves the cache as it was. What is stored is detached: gradients stop at the cache.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.attention import SlidingAttention
from dsv4.call import OVERLAPPING, Call, Windows, kept_projections
from dsv4.config import Dsv4Config
from dsv4.inputs import Inputs
from dsv4.tape import Tape, writing

# `expand` shares the entries of a prefix while rows * tokens are at most so many, else it copies them.
SHARED_ENTRIES = 1 << 16

_CLAIM = threading.Lock()


@dataclass(frozen=True)
class State:
    """All that is committed: lengths, what each row can still be cut to, a tape for every slot."""

    length: tuple[int, ...]
    floor: tuple[int, ...]
    tapes: tuple[Tape, ...]


class TokenSlot:
    """A value per token. `keep`: tokens before the end that a later call needs."""

    def __init__(self, cache: "KVCache", number: int, width: int, dtype: torch.dtype, keep: int):
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

    def __init__(self, cache: "KVCache", number: int, width: int, dtype: torch.dtype, rate: int):
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

    keys: TokenSlot
    compressor: PoolSlots | None
    indexer: PoolSlots | None


class KVCache:
    """The memory of earlier calls, for one batch of rows.

    Args:
        config: the model's. batch_size: rows. max_length: tokens that a row may reach; storage
            grows up to it as they come.
        device, dtype: the model's (device None is the CPU, dtype None the config's torch_dtype).
        rewind: tokens that can be cut off again. 0 keeps the window and the open windows, r keeps r
            tokens more, None everything: `truncate` is then exact at any length.

    Bytes on V4-Flash in bfloat16 (21 CSA, 20 HCA, 2 sliding blocks), for each row: 6,880 per token
    of entries, (512 + 128) * 2 / 4 on a CSA block and 512 * 2 / 128 on an HCA block. With rewind=0
    17.5 MB more, however long the row; with rewind=r those and 340,992 for each of r tokens (1,024
    on every block for the key; float32 projections, 10,240 on a CSA block, 4,096 on an HCA block).
    With rewind=None 347,872 per token and nothing else. Spare columns come on top: 32 tokens and 32
    entries, or an eighth of what is held.
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
        _check_count("batch_size", batch_size, 1)
        _check_count("max_length", max_length, 1)
        if rewind is not None:
            _check_count("rewind", rewind, 0)
        self.config, self.max_length, self.rewind = config, max_length, rewind
        self.device = torch.empty(0, device="cpu" if device is None else device).device
        self.dtype = config.torch_dtype if dtype is None else dtype
        self._slots: list[TokenSlot | EntrySlot] = []
        self.layers = tuple(self._layer(i) for i in range(config.num_hidden_layers))
        self.state = self._empty(batch_size)
        self._in_use = False

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
        """Bytes of storage held now; what rows share counts once."""
        return sum(tape.nbytes for tape in self.state.tapes)

    def reset(self) -> None:
        """Forget every row."""
        self._refuse_in_use("reset")
        self.state = self._empty(self.batch_size)

    def truncate(self, n: int | Sequence[int] | Tensor) -> None:
        """Cut every row to its first n tokens (shorter rows stay), or each to a length of its own.

        ValueError, with nothing cut, for a row that would be cut by more than `rewind` allows, or
        that is shorter than the length asked for it.
        """
        self._refuse_in_use("truncate")
        length = self.state.length
        wanted = _integers("truncate", n)
        if isinstance(wanted, int):
            wanted = [min(wanted, held) for held in length]
        if len(wanted) != len(length):
            raise ValueError(f"truncate: got {len(wanted)} lengths for {len(length)} rows; give one int, or one for each row")
        for r, (new, held, floor) in enumerate(zip(wanted, length, self.state.floor, strict=True)):
            if not 0 <= new <= held:
                raise ValueError(f"truncate: row {r} holds {held} tokens and cannot be cut to {new}; expected 0 <= n <= {held}")
            if new < floor:
                raise ValueError(
                    f"truncate: row {r} holds {held} tokens and cannot be cut to {new}: with "
                    f"rewind={self.rewind} it goes back to {floor} at the furthest; build the "
                    "cache with a larger rewind, or None"
                )
        self.state = replace(self.state, length=tuple(wanted))

    def expand(self, n: int) -> "KVCache":
        """A cache of n rows that all continue this one's row; this one stays usable.

        The rows share one copy of what the prefix needs to be cut back, and of its entries while n * length <= SHARED_ENTRIES;
        beyond, each row gets its own copy of the entries. Shared entries are put in front of a row's own in every call: of a decoding
        step of the model of benchmarks/decode.py that was 1 % with 8 rows after 8,192 tokens, 4 % after 16,384, 7 % with 32 rows
        after 8,192, and as much again (104 %) with 32 after 16,384.
        """
        _check_count("expand: n", n, 1)
        if self.batch_size != 1:
            raise ValueError(f"expand takes a cache of one row, this one has {self.batch_size}; use select([rows, with, repeats])")
        length = self.state.length[0]
        pairs = zip(self._slots, self.state.tapes, strict=True)
        with writing():
            tapes = [slot.expand(tape, n, length) for slot, tape in pairs]
        return self._of([0] * n, tapes)

    def clone(self) -> "KVCache":
        """A copy; neither sees what the other is fed."""
        return self.select(range(self.batch_size))

    def select(self, rows: Sequence[int] | Tensor) -> "KVCache":
        """A cache of these rows, in this order, with repeats where given; this one stays usable."""
        chosen = _integers("select", rows)
        if isinstance(chosen, int) or not chosen:
            raise ValueError(f"select: expected a list of rows, got {rows!r}")
        for r in chosen:
            if not 0 <= r < self.batch_size:
                raise IndexError(f"select: row {r} of a cache of {self.batch_size} rows")
        with writing():
            tapes = [tape.select(chosen) for tape in self.state.tapes]
        return self._of(chosen, tapes)

    def __repr__(self) -> str:
        return (
            f"KVCache(rows={self.batch_size}, length={list(self.state.length)}, "
            f"max_length={self.max_length}, rewind={self.rewind}, {self.nbytes / 2**20:.2f} MiB)"
        )

    # What a forward asks of it.

    def admit(self, model, inputs: Inputs, *, partial: bool) -> None:
        """Raise before anything changes when the call does not fit this cache."""
        self._refuse_in_use("a run")
        if partial:
            raise ValueError(
                "start_at_layer, stop_at_layer and skip_layers are refused with a kv_cache: "
                "every block has to see every token; run without the cache"
            )
        build = "build it with model.new_kv_cache(...)"
        if self.config != model.config:
            raise ValueError(f"the KV cache was made for another config; {build}")
        for name in ("dtype", "device"):
            own, models = getattr(self, name), getattr(model, name)
            if own != models:
                raise ValueError(f"the KV cache has {name} {own}, the model {models}; {build}")
        if inputs.size[0] != self.batch_size:
            raise ValueError(f"the KV cache holds {self.batch_size} rows, the input {inputs.size[0]}; use expand(n) or select(rows)")
        counts = inputs.valid.sum(1).tolist()
        for r, (held, count) in enumerate(zip(self.state.length, counts, strict=True)):
            if held + count > self.max_length:
                raise ValueError(
                    f"row {r} of the KV cache holds {held} tokens; {count} more exceed "
                    f"max_length={self.max_length}: build a longer cache, or truncate"
                )

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """For the length of a run: nobody else runs on it; what the run left pending is dropped."""
        with _CLAIM:
            self._refuse_in_use("a run")
            self._in_use = True
        try:
            yield
        finally:
            for slot in self._slots:
                slot.pending = None
            self._in_use = False

    def commit(self, call: Call) -> None:
        """Take in what the call added."""
        state, length = self.state, call.host.length
        rewind = self.max_length if self.rewind is None else self.rewind
        floor = tuple(max(f, n - rewind) for f, n in zip(state.floor, length, strict=True))
        with writing():
            tapes = tuple(slot.advanced(call, floor) for slot in self._slots)
        self.state = State(length, floor, tapes)

    def _refuse_in_use(self, what: str) -> None:
        if self._in_use:
            raise RuntimeError(f"{what} on a KV cache that a run in progress is using; wait until it has ended")

    # How it is laid out.

    def _of(self, rows: Sequence[int], tapes: Sequence[Tape]) -> "KVCache":
        """A cache of rows of this one, with those tapes."""
        other = KVCache(
            self.config,
            len(rows),
            self.max_length,
            device=self.device,
            dtype=self.dtype,
            rewind=self.rewind,
        )
        length, floor = self.state.length, self.state.floor
        other.state = State(tuple(length[r] for r in rows), tuple(floor[r] for r in rows), tuple(tapes))
        return other

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
        wide = torch.promote_types(self.dtype, torch.float32)
        columns = 2 * (2 if overlap else 1) * width
        projections = self._add(TokenSlot, columns, wide, kept_projections(rate, overlap))
        return PoolSlots(projections, self._add(EntrySlot, width, self.dtype, rate))

    def _add(self, kind, width: int, dtype: torch.dtype, rule: int):
        slot = kind(self, len(self._slots), width, dtype, rule)
        self._slots.append(slot)
        return slot

    def _empty(self, rows: int) -> State:
        tapes = [Tape.empty(rows, slot.width, slot.dtype, self.device) for slot in self._slots]
        return State((0,) * rows, (0,) * rows, tuple(tapes))


def _check_count(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: expected an int >= {least}")


def _integers(name: str, given) -> int | list[int]:
    """An int, or a list of them, from ints, sequences and integer tensors."""
    values = given.tolist() if hasattr(given, "tolist") else given
    values = values if isinstance(values, int) else list(values)
    for value in [values] if isinstance(values, int) else values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} takes ints, got {value!r}")
    return values
