"""The fixed form of a KVCache: buffers of its capacity, written in place at the device's own counts, so that a step has one shape
whatever is held, reads nothing back and can be compiled or captured.

    token p stands in column p mod R of a ring of R; entry j in column j
    the entry of a window still open is computed at every step (by device code, when the window closes) and kept when it closes

Axes: b row, s token of the step, R column of a ring, e entry.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.call import Windows
from dsv4.tape import Tape, writing

# Spans (tokens that a step looks back over) are the capacity and these parts of it, each a shape of its own.
SPANS = (1, 4, 16, 64, 256)
LEAST_SPAN = 1024


class Places:
    """In which columns of a ring a step's tokens stand, and the keys that they see: computed when a ring asks, once for each size.

    Attributes:
        rows: [b 1] numbers of the rows. tokens: [b s] positions of the step's tokens. window: [b w+s] positions of the tokens in sight,
            negative before the first.
    """

    def __init__(self, rows: int, device: torch.device):
        self.rows = torch.arange(rows, device=device).unsqueeze(1)
        self.tokens: Tensor | None = None
        self.window: Tensor | None = None
        self._columns: dict[tuple[str, int], Tensor] = {}

    def begin(self, tokens: Tensor, window: Tensor) -> None:
        self.tokens, self.window = tokens, window
        self._columns.clear()

    def of(self, what: str, columns: int) -> Tensor:
        """what: "tokens" or "window"."""
        if torch.compiler.is_compiling():
            # Equal computations become one.
            return getattr(self, what).clamp(min=0) % columns
        key = what, columns
        if key not in self._columns:
            self._columns[key] = getattr(self, what).clamp(min=0) % columns
        return self._columns[key]


class Columns:
    """A buffer [b columns width]; `places`: of the cache that it belongs to."""

    def __init__(self, buffer: Tensor):
        self.buffer = buffer
        self.places: Places | None = None

    def put(self, columns: Tensor, new: Tensor) -> Tensor:
        """columns [b i], new [b i width] -> the buffer, written in place, by a compiler too (which copies the whole for a scatter)."""
        return self.buffer.index_put_((self.places.rows, columns), new.detach())


class Ring(Columns):
    """A value per token; what stands R tokens back is overwritten."""

    def __init__(self, buffer: Tensor, floor: Sequence[int]):
        super().__init__(buffer)
        self.floor = floor

    def write(self, new: Tensor) -> Tensor:
        """new [b s width] -> the buffer [b R width]."""
        return self.put(self.places.of("tokens", self.buffer.shape[1]), new)


class KeyRing(Ring):
    def extend(self, new: Tensor, earlier: int) -> Tensor:
        """new [b s width] -> [b earlier+s width], in the order of positions."""
        index = self.places.of("window", self.buffer.shape[1]).unsqueeze(-1).expand(-1, -1, new.shape[-1])
        return self.write(new).gather(1, index)


class ProjectionRing(Ring):
    def extend(self, new: Tensor, kept: int) -> Tensor:
        """new [b s width] -> [b R width]: the windows' slots are columns of the ring."""
        return self.write(new)


class Entries(Columns):
    """One column for each entry, those not closed yet included."""

    def extend(self, new: Tensor, windows: Windows) -> Tensor:
        """new [b e_new width] -> [b total width]."""
        return self.put(windows.entry, new)[:, : windows.total]


@dataclass(frozen=True)
class FixedPool:
    projections: ProjectionRing
    entries: Entries


@dataclass(frozen=True)
class FixedLayer:
    fixed = True

    keys: KeyRing
    compressor: FixedPool | None
    indexer: FixedPool | None


class FixedCache:
    """What `KVCache.fix` builds.

    Attributes:
        layers: what each block writes to and reads. length: [b] int64 tokens of each row, on the device.
        host: the same as plain numbers, None after steps that were not counted on the host.
        columns: layer type -> columns of its rings of projections.
        step: the most tokens of one step. capacity: tokens that a row may reach.
        span: the next step looks at the entries of the first so many tokens. places: told by `call.plan_step`.
    """

    def __init__(
        self,
        layers: Sequence[FixedLayer],
        columns: Mapping[str, int],
        host: tuple[int, ...],
        step: int,
        capacity: int,
        device: torch.device,
    ):
        self.layers = tuple(layers)
        self.columns = columns
        with writing():
            self.length = torch.tensor(host, dtype=torch.int64, device=device)
            self.places = Places(len(host), device)
        for part in (*self.rings, *self.entries):
            part.places = self.places
        self.host: tuple[int, ...] | None = host
        self.step, self.capacity = step, capacity
        self.span = capacity

    @property
    def rings(self) -> list[Ring]:
        pools = [pool for layer in self.layers for pool in (layer.compressor, layer.indexer) if pool is not None]
        return [layer.keys for layer in self.layers] + [pool.projections for pool in pools]

    @property
    def entries(self) -> list[Entries]:
        return [pool.entries for layer in self.layers for pool in (layer.compressor, layer.indexer) if pool is not None]

    @property
    def nbytes(self) -> int:
        return sum(part.buffer.nbytes for part in (*self.rings, *self.entries))

    def lengths(self) -> tuple[int, ...]:
        if self.host is None:
            self.host = tuple(self.length.tolist())
        return self.host

    def choose_span(self, tokens: int) -> None:
        """The least span that the next `tokens` tokens of every row fit in."""
        most = max(self.lengths()) + tokens
        fitting = [self.capacity // part for part in SPANS if self.capacity // part >= max(most, LEAST_SPAN)]
        self.span = min(fitting, default=self.capacity)

    def advance(self, counts: Sequence[int]) -> None:
        """Count on the host what a step has counted on the device."""
        self.host = tuple(held + n for held, n in zip(self.lengths(), counts, strict=True))

    def __deepcopy__(self, memo):
        raise TypeError("the fixed form of a KV cache is not copied; clone the KVCache itself")


def ring_of(tape: Tape, length: Sequence[int], columns: int, kind: type[Ring]) -> Ring:
    """The last tokens of each row of a tape, in a ring of `columns`."""
    with writing():
        buffer = tape.held.new_zeros(len(length), columns, tape.held.shape[2])
        for r, n in enumerate(length):
            first = max(n - columns, tape.lowest[r])
            if first < n:
                place = torch.arange(first, n, device=buffer.device) % columns
                begin = [0] * len(length)
                begin[r] = first
                buffer[r, place] = tape.read(begin, n - first)[r]
    return kind(buffer, tape.lowest)


def tape_of(ring: Ring, length: Sequence[int], spare: int) -> Tape:
    """The other way: all that the ring is sure to hold. `spare`: columns that a step may have written beyond its tokens."""
    columns = ring.buffer.shape[1]
    first = tuple(max(n - (columns - spare), held, 0) for n, held in zip(length, ring.floor, strict=True))
    with writing():
        most = max((n - f for n, f in zip(length, first, strict=True)), default=0)
        steps = torch.arange(most, device=ring.buffer.device)
        place = (torch.tensor(first, device=steps.device).unsqueeze(1) + steps) % columns
        held = ring.buffer.gather(1, place.unsqueeze(-1).expand(-1, -1, ring.buffer.shape[2]))
    return Tape(held, first)


def entries_of(tape: Tape, after: Sequence[int], columns: int) -> Entries:
    with writing():
        buffer = tape.held.new_zeros(len(after), columns, tape.held.shape[2])
        held = tape.front(max(after))
        buffer[:, : held.shape[1]] = held
    return Entries(buffer)
