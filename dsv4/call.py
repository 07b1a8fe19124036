"""What depends only on the inputs of one forward, computed once: which columns are tokens, where each token stands in its row,
which keys a query can reach, which compression windows close. Padding, ragged rows and cache offsets are decided here and nowhere else.

Positions, windows and entries count from each row's first real token. Axes: b batch, s column of this call, w earlier window column,
e entry, m slot of a compression window.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.config import Dsv4Config
from dsv4.kernels.reach import Reach, once

Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Host:
    """The rows as plain numbers: first real column, tokens before and after the call."""

    start: tuple[int, ...]
    past: tuple[int, ...]
    length: tuple[int, ...]


@dataclass(frozen=True)
class Windows:
    """The compression windows that this call closes, for one kind of block.

    Attributes:
        rate: tokens per entry. overlap: an entry also pools the window before it (CSA).
        total: entries that exist after the call (largest row). new: those closed by it (largest row).
        before, after: [b] entries of each row before and after; host_before, host_after: the same as plain numbers.
        entry: [b e_new] int64 number of each new entry. filled: [b e_new] bool, False where a row closes fewer.
        index: [b e_new m] column of each slot's token in (kept projections, this call's), of the row's first token where there is none;
            present: [b e_new m] bool.
        rotation: compress rope at each new entry's first token, [b e_new r/2] each.
        kept: unpooled projections that stand before this call's columns.
    """

    rate: int
    overlap: bool
    total: int
    new: int
    before: Tensor
    after: Tensor
    host_before: tuple[int, ...]
    host_after: tuple[int, ...]
    entry: Tensor
    filled: Tensor
    index: Tensor
    present: Tensor
    rotation: Rotation
    kept: int


@dataclass(frozen=True)
class StepWindows:
    """`Windows` of a step of fixed shape: those that its tokens can touch, closed or not. What only the usual way of a block asks for is
    computed when it asks; slots are columns of the ring of projections.

    Attributes:
        past, lengths: [b] tokens of each row before and after. columns: of the ring. The others are those of `Windows`.
    """

    rate: int
    overlap: bool
    total: int
    new: int
    past: Tensor
    lengths: Tensor
    entry: Tensor
    rotation: Rotation
    columns: int
    kept: int = 0
    host_before: tuple[int, ...] = ()
    host_after: tuple[int, ...] = ()

    @once
    def before(self) -> Tensor:
        return self.past // self.rate

    @once
    def after(self) -> Tensor:
        return self.lengths // self.rate

    @once
    def filled(self) -> Tensor:
        return self.entry * self.rate < self.lengths.unsqueeze(1)

    @once
    def places(self) -> Tensor:
        """[b e_new m] position of each slot's token."""
        slots = torch.arange(-self.rate if self.overlap else 0, self.rate, device=self.past.device)
        return self.entry.unsqueeze(-1) * self.rate + slots

    @once
    def present(self) -> Tensor:
        return (self.places >= 0) & (self.places < self.lengths[:, None, None])

    @once
    def index(self) -> Tensor:
        return self.places.clamp(min=0) % self.columns


@dataclass(frozen=True)
class Call:
    """One forward.

    Attributes:
        input_ids: [b s] int64 or None. valid: [b s] bool. positions: [b s] int64, -1 at padding.
        start: [b] first real column. past, lengths: [b] tokens of each row before and after the call.
        earlier: [b w] int64 positions of the window tokens kept from before, right-aligned, -1 where a row has fewer.
        gap: largest left padding of a row that has earlier tokens.
        host: the rows as plain numbers. whole: every column is a token (False where that stands on the device alone).
        rotations: rope kind -> (cos, sin) at `positions`, [b s r/2] each. windows: layer type -> Windows.
    """

    input_ids: Tensor | None
    valid: Tensor
    positions: Tensor
    start: Tensor
    past: Tensor
    lengths: Tensor
    earlier: Tensor
    gap: int
    rotations: Mapping[str, Rotation]
    windows: Mapping[str, Windows | StepWindows]
    host: Host
    whole: bool = False

    @property
    def lead(self) -> int:
        """The most by which a token's position exceeds its column, over rows."""
        return max(p - s for p, s in zip(self.host.past, self.host.start, strict=True))

    @once
    def token_positions(self) -> Tensor:
        """[b w+s] positions of the token keys; -1 where there is none."""
        return torch.cat((self.earlier, self.positions), dim=1)

    @once
    def _reaches(self) -> dict[str, Reach]:
        return {}

    @property
    def without_padding(self) -> Tensor | None:
        """`valid`, or None where every column is a token."""
        columns = self.valid.shape[1]
        is_whole = all(n - p == columns for p, n in zip(self.host.past, self.host.length, strict=True))
        return None if is_whole else self.valid

    def reach(self, window: int, layer_type: str) -> Reach:
        """One for each kind of block; `window` is the same for all."""
        reaches = self._reaches
        if layer_type not in reaches:
            rate = self.windows[layer_type].rate if layer_type in self.windows else 0
            reaches[layer_type] = Reach(window, self.positions, self.token_positions, self.gap, rate)
        return reaches[layer_type]

    def last_columns(self, n: int) -> Tensor:
        """[b n] columns of each row's last n real tokens; a row with fewer repeats its first column."""
        last = self.start + (self.lengths - self.past) - 1
        offsets = torch.arange(n - 1, -1, -1, device=last.device)
        return torch.maximum(last.unsqueeze(-1) - offsets, self.start.unsqueeze(-1))


OVERLAPPING = "compressed_sparse_attention"


def plan(config: Dsv4Config, rotary: Mapping[str, torch.nn.Module], input_ids: Tensor | None, valid: Tensor, past: list[int]) -> Call:
    """Build the Call.

    Args:
        valid: [b s] bool with each row's real tokens in one run (checked by the caller); past: tokens of each row before the call.
    """
    device = valid.device
    b, s = valid.shape
    host = valid.cpu()
    counts = host.sum(1).tolist()
    start = [row.index(True) if True in row else 0 for row in host.tolist()] if not all(c == s for c in counts) else [0] * b
    lengths = [p + c for p, c in zip(past, counts, strict=True)]
    past_t, start_t, lengths_t = (torch.tensor(x, dtype=torch.int64, device=device) for x in (past, start, lengths))
    columns = torch.arange(s, device=device)
    positions = columns - start_t.unsqueeze(1) + past_t.unsqueeze(1)
    whole = all(c == s for c in counts)
    positions = positions if whole else positions.masked_fill(~valid, -1)
    w = max((min(p, config.sliding_window - 1) for p in past), default=0)
    earlier = past_t.unsqueeze(1) - torch.arange(w, 0, -1, device=device)
    earlier = earlier if all(p >= w for p in past) else earlier.masked_fill(earlier < 0, -1)
    windows = {
        kind: _windows(config, kind, rotary["compress"], past, lengths, start_t, past_t, lengths_t)
        for kind in dict.fromkeys(config.layer_types)
        if kind in config.compress_rates
    }
    return Call(
        input_ids=input_ids,
        valid=valid,
        positions=positions,
        start=start_t,
        past=past_t,
        lengths=lengths_t,
        earlier=earlier,
        gap=max((a for a, p in zip(start, past, strict=True) if p), default=0),
        rotations={kind: rope(positions) for kind, rope in rotary.items()},
        windows=windows,
        host=Host(tuple(start), tuple(past), tuple(lengths)),
        whole=whole,
    )


def kept_projections(rate: int, overlap: bool) -> int:
    """Unpooled projections before a call that its windows can still need."""
    return (2 if overlap else 1) * rate - 1


def _windows(config: Dsv4Config, kind: str, rotary, past: list[int], lengths: list[int], *numbers: Tensor) -> Windows:
    """numbers: start, past and lengths on the device."""
    rate = config.compress_rates[kind]
    before, after = [p // rate for p in past], [n // rate for n in lengths]
    return _windows_of(
        config,
        kind,
        rotary,
        *numbers,
        new=max((a - b for a, b in zip(after, before, strict=True)), default=0),
        total=max(after, default=0),
        kept=kept_projections(rate, kind == OVERLAPPING) if any(past) else 0,
        host_before=tuple(before),
        host_after=tuple(after),
    )


def _windows_of(config, kind: str, rotary, start: Tensor, past: Tensor, lengths: Tensor, *, new, total, kept, **host) -> Windows:
    """start, past, lengths: [b]; the sizes are the caller's."""
    rate, overlap = config.compress_rates[kind], kind == OVERLAPPING
    before, after = past // rate, lengths // rate
    if new == 0:
        none, slots = before.new_empty(len(before), 0), before.new_empty(len(before), 0, (2 if overlap else 1) * rate)
        angles = rotary.frequencies.new_empty(len(before), 0, len(rotary.frequencies))
        return Windows(
            rate=rate,
            overlap=overlap,
            total=total,
            new=new,
            before=before,
            after=after,
            entry=none,
            filled=none.bool(),
            index=slots,
            present=slots.bool(),
            rotation=(angles, angles),
            kept=kept,
            **host,
        )
    entry = before.unsqueeze(1) + torch.arange(new, device=start.device)
    filled = entry < after.unsqueeze(1)
    place = entry.unsqueeze(-1) * rate + torch.arange(-rate if overlap else 0, rate, device=start.device)
    start, past = start[:, None, None], past[:, None, None]
    index = torch.where(place >= past, kept + start + place - past, kept - past + place)
    present = filled.unsqueeze(-1) & (place >= 0) & (place < lengths[:, None, None])
    return Windows(
        rate=rate,
        overlap=overlap,
        total=total,
        new=new,
        before=before,
        after=after,
        entry=entry,
        filled=filled,
        index=torch.where(present, index, kept + start),
        present=present,
        rotation=rotary(entry * rate),
        kept=kept,
        **host,
    )


def plan_whole(config: Dsv4Config, rotary: Mapping[str, torch.nn.Module], input_ids: Tensor | None, valid: Tensor) -> Call:
    """The Call of rows that begin here, every size from the shape of `valid` [b s] and every number on the device: what is traced.

    Rows with padding get as many entries as a full one; those they do not have are closed to every query.
    """
    s = valid.shape[1]
    start, past, lengths = valid.long().argmax(1), torch.zeros_like(valid[:, 0], dtype=torch.int64), valid.sum(1)
    columns = torch.arange(s, device=valid.device)
    positions = (columns - start.unsqueeze(1)).masked_fill(~valid, -1)
    windows = {
        kind: _windows_of(
            config,
            kind,
            rotary["compress"],
            start,
            past,
            lengths,
            new=s // config.compress_rates[kind],
            total=s // config.compress_rates[kind],
            kept=0,
            host_before=(),
            host_after=(),
        )
        for kind in dict.fromkeys(config.layer_types)
        if kind in config.compress_rates
    }
    return Call(
        input_ids=input_ids,
        valid=valid,
        positions=positions,
        start=start,
        past=past,
        lengths=lengths,
        earlier=positions[:, :0],
        gap=0,
        rotations={kind: rope(positions) for kind, rope in rotary.items()},
        windows=windows,
        host=Host((0,), (0,), (s,)),
    )


def plan_step(config: Dsv4Config, rotary: Mapping[str, torch.nn.Module], input_ids: Tensor, active: Tensor, kv) -> Call:
    """The Call of a step over the fixed form of a KV cache: every size from shapes, every number on the device.

    Args:
        input_ids: [b s]. active: [b] bool; the other rows take part and advance by nothing. kv: a FixedCache; it learns its columns.
    """
    b, s = input_ids.shape
    past = kv.length
    after = past + active * s
    columns = torch.arange(s, device=past.device)
    place = past.unsqueeze(1) + columns
    valid = active.unsqueeze(1).expand(b, s)
    w = min(config.sliding_window - 1, kv.capacity)
    band = past.unsqueeze(1) + torch.arange(-w, s, device=past.device)
    kv.places.begin(place, band)
    windows = {
        kind: _step_windows(config, kind, rotary["compress"], past, after, s, kv)
        for kind in dict.fromkeys(config.layer_types)
        if kind in config.compress_rates
    }
    positions = place.masked_fill(~valid, -1)
    earlier = band[:, :w]
    return Call(
        input_ids=input_ids,
        valid=valid,
        positions=positions,
        start=torch.zeros_like(past),
        past=past,
        lengths=after,
        earlier=earlier.masked_fill(earlier < 0, -1),
        gap=0,
        rotations={kind: rope(positions) for kind, rope in rotary.items()},
        windows=windows,
        # A bound: no row is longer.
        host=Host((0,), (kv.span,), (kv.span + s,)),
    )


def _step_windows(config: Dsv4Config, kind: str, rotary, past: Tensor, lengths: Tensor, s: int, kv) -> StepWindows:
    rate = config.compress_rates[kind]
    new = 1 + (s + rate - 2) // rate
    entry = (past // rate).unsqueeze(1) + torch.arange(new, device=past.device)
    return StepWindows(
        rate=rate,
        overlap=kind == OVERLAPPING,
        total=-(-kv.span // rate),
        new=new,
        past=past,
        lengths=lengths,
        entry=entry,
        rotation=rotary(entry * rate),
        columns=kv.columns[kind],
    )
