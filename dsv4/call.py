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
from dsv4.kernels.sparse_attention import Reach

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
        filled: [b e_new] bool, False where a row closes fewer.
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
    filled: Tensor
    index: Tensor
    present: Tensor
    rotation: Rotation
    kept: int


@dataclass(frozen=True)
class Call:
    """One forward.

    Attributes:
        input_ids: [b s] int64 or None. valid: [b s] bool. positions: [b s] int64, -1 at padding.
        start: [b] first real column. past, lengths: [b] tokens of each row before and after the call.
        earlier: [b w] int64 positions of the window tokens kept from before, right-aligned, -1 where a row has fewer.
        gap: largest left padding of a row that has earlier tokens.
        host: the rows as plain numbers.
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
    windows: Mapping[str, Windows]
    host: Host

    @property
    def lead(self) -> int:
        """The most by which a token's position exceeds its column, over rows."""
        return max(p - s for p, s in zip(self.host.past, self.host.start, strict=True))

    @property
    def token_positions(self) -> Tensor:
        """[b w+s] positions of the token keys; -1 where there is none."""
        return torch.cat((self.earlier, self.positions), dim=1)

    def reach(self, window: int, layer_type: str) -> Reach:
        rate = self.windows[layer_type].rate if layer_type in self.windows else 0
        return Reach(window, self.positions, self.token_positions, self.gap, rate)

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
    positions = (columns - start_t.unsqueeze(1) + past_t.unsqueeze(1)).masked_fill(~valid, -1)
    w = max((min(p, config.sliding_window - 1) for p in past), default=0)
    earlier = past_t.unsqueeze(1) - torch.arange(w, 0, -1, device=device)
    earlier = earlier.masked_fill(earlier < 0, -1)
    windows = {
        kind: _windows(config, kind, rotary["compress"], past, lengths, start_t)
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
    )


def kept_projections(rate: int, overlap: bool) -> int:
    """Unpooled projections before a call that its windows can still need."""
    return (2 if overlap else 1) * rate - 1


def _windows(config: Dsv4Config, kind: str, rotary, past: list[int], lengths: list[int], start: Tensor) -> Windows:
    rate, overlap = config.compress_rates[kind], kind == OVERLAPPING
    before, after = [p // rate for p in past], [n // rate for n in lengths]
    new = max((a - b for a, b in zip(after, before, strict=True)), default=0)
    device = start.device
    before_t, after_t, past_t, lengths_t = (torch.tensor(x, dtype=torch.int64, device=device) for x in (before, after, past, lengths))
    entry = before_t.unsqueeze(1) + torch.arange(new, device=device)
    filled = entry < after_t.unsqueeze(1)
    offsets = torch.arange(-rate if overlap else 0, rate, device=device)
    place = entry.unsqueeze(-1) * rate + offsets
    kept = kept_projections(rate, overlap) if any(past) else 0
    past_c, start_c = past_t[:, None, None], start[:, None, None]
    index = torch.where(place >= past_c, kept + start_c + place - past_c, kept - past_c + place)
    present = filled.unsqueeze(-1) & (place >= 0) & (place < lengths_t[:, None, None])
    return Windows(
        rate=rate,
        overlap=overlap,
        total=max(after, default=0),
        new=new,
        before=before_t,
        after=after_t,
        host_before=tuple(before),
        host_after=tuple(after),
        filled=filled,
        index=torch.where(present, index, kept + start_c),
        present=present,
        rotation=rotary(entry * rate),
        kept=kept,
    )
