"""Tapes: what a KVCache keeps of one value, by row and number: the token's or the entry's place.

A tape is never changed where anything is committed: appending writes behind that, in place where
there is room, else in a new tape. So whoever holds the older tape reads what it read before.
Axes: b row, n number, width.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

# Spare columns of a tape that has to grow: at least so many, and this share of what it holds.
SPARE = 32
SPARE_SHARE = 8


@contextmanager
def writing() -> Iterator[None]:
    """What is stored belongs to no graph, and is no inference tensor whoever calls."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@dataclass(frozen=True)
class Tape:
    """Rows of stored values.

    Attributes:
        held: [b columns width]; column 0 of row r is its number first[r].
        shared: [1 n width] or None; the numbers from `origin` on that all rows have in common.
            It is never written to.
    """

    held: Tensor
    first: tuple[int, ...]
    shared: Tensor | None = None
    origin: int = 0

    @classmethod
    def empty(cls, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> "Tape":
        with torch.inference_mode(False):
            held = torch.zeros(rows, 0, width, dtype=dtype, device=device)
        return cls(held, (0,) * rows)

    @property
    def nbytes(self) -> int:
        return self.held.nbytes + (0 if self.shared is None else self.shared.nbytes)

    @property
    def edge(self) -> int:
        """Where shared numbers end and each row holds its own; 0 where none are shared."""
        return 0 if self.shared is None else self.origin + self.shared.shape[1]

    @property
    def lowest(self) -> tuple[int, ...]:
        """The lowest number of each row."""
        return self.first if self.shared is None else (self.origin,) * len(self.first)

    def read(self, begin: Sequence[int], count: int) -> Tensor:
        """Numbers begin[r] ... begin[r] + count - 1 -> [b count width]; zeros before number 0."""
        starts = [b - f for b, f in zip(begin, self.first, strict=True)]
        if min(begin) >= self.edge and len(set(starts)) == 1 and starts[0] >= 0:
            return self.held[:, starts[0] : starts[0] + count]
        device = self.held.device
        steps = torch.arange(count, device=device)
        place = torch.tensor(starts, device=device).unsqueeze(1) + steps
        number = torch.tensor(begin, device=device).unsqueeze(1) + steps
        own = self.held
        if own.shape[1] == 0:
            own = own.new_zeros(own.shape[0], 1, own.shape[2])
        place = place.clamp(0, own.shape[1] - 1).unsqueeze(-1)
        values = own.gather(1, place.expand(-1, -1, own.shape[-1]))
        if self.shared is not None and self.shared.shape[1] > 0:
            common = self.shared[0][(number - self.origin).clamp(0, self.shared.shape[1] - 1)]
            values = torch.where((number < self.edge).unsqueeze(-1), common, values)
        return values.masked_fill((number < 0).unsqueeze(-1), 0.0)

    def front(self, count: int) -> Tensor:
        """Numbers 0 ... count - 1 of every row -> [b count width], of a tape that begins at 0."""
        if self.shared is None:
            return self.held[:, :count]
        common = self.shared[:, :count].expand(len(self.first), -1, -1)
        return torch.cat((common, self.held[:, : max(count - self.edge, 0)]), dim=1)

    def select(self, rows: Sequence[int]) -> "Tape":
        """These rows, copied; the shared part stays shared."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.held.device)
        first = tuple(self.first[r] for r in rows)
        return Tape(self.held.index_select(0, index), first, self.shared, self.origin)

    def share(self, rows: int, edge: int, end: int) -> "Tape":
        """One row -> `rows` that share its numbers before `edge` and copy those up to `end`."""
        low = self.lowest[0]
        if edge <= low:
            return self.select([0] * rows)
        own = self.read([edge], end - edge).repeat(rows, 1, 1)
        return Tape(own, (edge,) * rows, self.read([low], edge - low).clone(), low)

    def append(
        self,
        new: Tensor,
        start: Sequence[int],
        before: Sequence[int],
        after: Sequence[int],
        oldest: Sequence[int],
        most: int,
    ) -> "Tape":
        """The tape with numbers before[r] ... after[r] - 1 of row r taken from new[r, start[r]:].

        A tape without room for them is replaced by one that begins at number oldest[r] and has at
        most `most` columns, unless it needs more. To be called inside `writing`.
        """
        if tuple(before) == tuple(after):
            return self
        places = set(zip(start, before, after, self.first, strict=True))
        if len(places) == 1 and self.shared is None:
            place = places.pop()
            if place[2] - place[3] <= self.held.shape[1]:
                _write(self.held, new, *place)
                return self
        tape, rows = self, range(len(before))
        if any(before[r] < min(self.edge, after[r]) for r in rows):
            # A row was cut back into what it shares.
            count = max(before) - self.origin
            tape = Tape(self.read([self.origin] * len(before), count), self.lowest)
        if max(after[r] - tape.first[r] for r in rows) > tape.held.shape[1]:
            tape = tape._with_room(before, after, oldest, most)
        for r in rows:
            at = (start[r], before[r], after[r], tape.first[r])
            _write(tape.held[r : r + 1], new[r : r + 1], *at)
        return tape

    def _with_room(self, before: Sequence[int], after: Sequence[int], oldest: Sequence[int], most: int) -> "Tape":
        is_shared = min(oldest) < self.edge
        first = tuple(max(number, self.edge) for number in oldest)
        columns = max(a - f for a, f in zip(after, first, strict=True))
        columns = min(columns + max(SPARE, columns // SPARE_SHARE), max(most, columns))
        held = self.held.new_zeros(len(first), columns, self.held.shape[2])
        kept = max(b - f for b, f in zip(before, first, strict=True))
        if kept > 0:
            held[:, :kept] = self.read(first, kept)
        return Tape(held, first, self.shared if is_shared else None, self.origin)


def _write(held: Tensor, new: Tensor, start: int, before: int, after: int, first: int) -> None:
    begin = max(before, first)
    if begin < after:
        new = new[:, start + begin - before : start + after - before]
        held[:, begin - first : after - first] = new
