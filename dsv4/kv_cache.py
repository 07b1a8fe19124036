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
from dataclasses import replace

import torch
from torch import Tensor

from dsv4.attention import SlidingAttention
from dsv4.call import OVERLAPPING, Call, kept_projections
from dsv4.config import Dsv4Config
from dsv4.fixed_cache import FixedCache, FixedLayer, FixedPool, KeyRing, ProjectionRing, entries_of, ring_of, tape_of
from dsv4.inputs import Inputs
from dsv4.slots import EntrySlot, LayerSlots, PoolSlots, State, TokenSlot
from dsv4.tape import Tape, writing

_CLAIM = threading.Lock()


class KVCache:
    """The memory of earlier calls, for one batch of rows.

    Args:
        config: the model's. batch_size: rows. max_length: tokens that a row may reach; storage
            grows up to it as they come.
        device, dtype: the model's (device None is the CPU, several are one for each block; dtype None the config's torch_dtype).
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
        device: str | torch.device | Sequence[torch.device] | None = None,
        dtype: torch.dtype | None = None,
        rewind: int | None = None,
    ):
        _check_count("batch_size", batch_size, 1)
        _check_count("max_length", max_length, 1)
        if rewind is not None:
            _check_count("rewind", rewind, 0)
        self.config, self.max_length, self.rewind = config, max_length, rewind
        self.devices = _devices(device, config.num_hidden_layers)
        self.dtype = config.torch_dtype if dtype is None else dtype
        self._slots: list[TokenSlot | EntrySlot] = []
        self.layers = tuple(self._layer(i) for i in range(config.num_hidden_layers))
        self.fixed: FixedCache | None = None
        self.state = self._empty(batch_size)
        self._in_use = False

    # What it holds.

    @property
    def device(self) -> torch.device:
        """Where it is; where its first block is, of a model on several devices."""
        return self.devices[0]

    @property
    def state(self) -> State:
        """All that is committed. Asking for it ends the fixed form."""
        if self.fixed is not None:
            self._unfix(self.fixed)
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self.fixed, self._state = None, state

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each row."""
        return self._state.length if self.fixed is None else self.fixed.lengths()

    @property
    def batch_size(self) -> int:
        return len(self._state.length)

    @property
    def length(self) -> Tensor:
        """Tokens of each row, int64 on the CPU [b]."""
        return torch.tensor(self.lengths, dtype=torch.int64, device="cpu")

    @property
    def nbytes(self) -> int:
        """Bytes of storage held now; what rows share counts once."""
        return sum(tape.nbytes for tape in self._state.tapes) if self.fixed is None else self.fixed.nbytes

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
            f"KVCache(rows={self.batch_size}, length={list(self.lengths)}, "
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
        if self.dtype != model.dtype:
            raise ValueError(f"the KV cache has dtype {self.dtype}, the model {model.dtype}; {build}")
        devices = [model.device] * len(self.devices) if model.placed is None else model.placed.devices
        for own, models in zip(self.devices, devices, strict=True):
            if own != models:
                raise ValueError(f"the KV cache has device {own}, the model {models}; {build}")
        if inputs.size[0] != self.batch_size:
            raise ValueError(f"the KV cache holds {self.batch_size} rows, the input {inputs.size[0]}; use expand(n) or select(rows)")
        self.check_room(inputs.valid.sum(1).tolist())

    def check_room(self, counts: Sequence[int]) -> None:
        """ValueError where a row cannot take so many more tokens."""
        for r, (held, count) in enumerate(zip(self.lengths, counts, strict=True)):
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
        length = call.host.length
        floor = self._floor(length)
        with writing():
            tapes = tuple(slot.advanced(call, floor) for slot in self._slots)
        self.state = State(length, floor, tapes)

    # The form that `forward_static` runs over.

    def fix(self, step: int = 1) -> FixedCache:
        """Move what is held into buffers of max_length, for steps of up to `step` tokens; `fixed` until something asks for `state`.

        Any other use of the cache works as before and moves it back first. Bytes: those of rewind=None or of `rewind` tokens, at
        max_length, held or not.
        """
        self._refuse_in_use("fix")
        _check_count("step", step, 1)
        return self.in_fixed_form(step)

    def in_fixed_form(self, step: int) -> FixedCache:
        """What `fix` returns; for the run that is using the cache."""
        if self.fixed is None or self.fixed.step < step:
            self.fixed = self._fixed(step)
            # What the tapes held is in the buffers.
            self._state = replace(self._state, tapes=())
        return self.fixed

    def _fixed(self, step: int) -> FixedCache:
        if len(set(self.devices)) > 1:
            places = ", ".join(map(str, dict.fromkeys(self.devices)))
            raise ValueError(f"the fixed form of a KV cache is on one device, this cache is on {places}; feed it with the model itself")
        state, config = self.state, self.config
        layers = []
        columns: dict[str, int] = {}

        def ring(slot: TokenSlot, kind):
            back = self.max_length if self.rewind is None else min(slot.keep + self.rewind, self.max_length)
            return ring_of(state.tapes[slot.number], state.length, back + step, kind)

        def pool(slots: PoolSlots | None, layer_type: str) -> FixedPool | None:
            if slots is None:
                return None
            rate = slots.entries.rate
            after = [n // rate for n in state.length]
            most = -(-self.max_length // rate) + 2 + (step + rate - 2) // rate
            projections = ring(slots.projections, ProjectionRing)
            columns[layer_type] = projections.buffer.shape[1]
            return FixedPool(projections, entries_of(state.tapes[slots.entries.number], after, most))

        for layer_type, slots in zip(config.layer_types, self.layers, strict=True):
            pools = (pool(slots.compressor, layer_type), pool(slots.indexer, layer_type))
            layers.append(FixedLayer(ring(slots.keys, KeyRing), *pools))
        return FixedCache(layers, columns, state.length, step, self.max_length, self.device)

    def _unfix(self, fixed: FixedCache) -> None:
        length = fixed.lengths()
        tapes: list[Tape | None] = [None] * len(self._slots)
        for slots, layer in zip(self.layers, fixed.layers, strict=True):
            tapes[slots.keys.number] = tape_of(layer.keys, length, fixed.step)
            for held, pool in ((slots.compressor, layer.compressor), (slots.indexer, layer.indexer)):
                if held is not None:
                    tapes[held.projections.number] = tape_of(pool.projections, length, fixed.step)
                    tapes[held.entries.number] = Tape(pool.entries.buffer, (0,) * len(length))
        self.state = State(length, self._floor(length), tuple(tapes))

    def _floor(self, length: Sequence[int]) -> tuple[int, ...]:
        """What each row can still be cut to once it holds `length` tokens."""
        rewind = self.max_length if self.rewind is None else self.rewind
        return tuple(max(f, n - rewind) for f, n in zip(self._state.floor, length, strict=True))

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
            device=self.devices,
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
        # Slots are numbered block by block: keys, then two for each pool.
        pools = [sum(pool is not None for pool in (slots.compressor, slots.indexer)) for slots in self.layers]
        places = [device for device, count in zip(self.devices, pools, strict=True) for _ in range(1 + 2 * count)]
        tapes = [Tape.empty(rows, slot.width, slot.dtype, device) for slot, device in zip(self._slots, places, strict=True)]
        return State((0,) * rows, (0,) * rows, tuple(tapes))


def _devices(given, blocks: int) -> tuple[torch.device, ...]:
    several = given if isinstance(given, Sequence) and not isinstance(given, str) else [given] * blocks
    if len(several) != blocks:
        raise ValueError(f"KVCache: got {len(several)} devices for {blocks} blocks; give one device, or one for each block")
    found = {device: torch.empty(0, device="cpu" if device is None else device).device for device in dict.fromkeys(several)}
    return tuple(found[device] for device in several)


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
