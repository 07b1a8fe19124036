"""Which keys a query of sparse attention may see: the window's tokens by their positions, entries by when they close.

Axes: b batch, s query column, w earlier window columns, e entries, t selected entries.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.kernels.index_scores import closed_entries
from dsv4.kernels.numeric import is_plain


def once(compute: Callable) -> property:
    """A property computed at the first reading; at each one while it is traced, where equal computations become one."""
    key = compute.__name__

    def value(self):
        if torch.compiler.is_compiling():
            return compute(self)
        if key not in self.__dict__:
            self.__dict__[key] = compute(self)
        return self.__dict__[key]

    return property(value, doc=compute.__doc__)


@dataclass(frozen=True)
class Reach:
    """Which keys a query may see.

    Attributes:
        window: tokens seen, the query's own included.
        query_positions: [b s] int64, -1 at padding.
        token_positions: [b w+s] int64 of the token keys, -1 where there is none.
        gap: columns by which a row's earlier tokens may stand further away than their positions say (left padding after a cache).
        rate: tokens per entry; 0 without entries.
    """

    window: int
    query_positions: Tensor
    token_positions: Tensor
    gap: int = 0
    rate: int = 0

    @once
    def tokens_hidden(self) -> Tensor:
        """[b s w+s] bool: tokens that a query does not see; one tensor for all blocks of a call."""
        return ~visible_tokens(self.query_positions, self.token_positions, self.window)

    @once
    def at_padding(self) -> Tensor:
        """[b s] bool."""
        return self.query_positions < 0

    @once
    def hides_any(self) -> tuple[bool, bool]:
        """Whether there is anything in `tokens_hidden`, and in `at_padding`; True where it is not worth knowing."""
        return tuple(not is_plain(x) or bool(x.any()) for x in (self.tokens_hidden, self.at_padding))

    @once
    def _hidden_entries(self) -> dict[int, Tensor | None]:
        return {}

    def entries_hidden(self, entries: int) -> Tensor | None:
        """[b s e] bool: entries that are not closed for a query; None where that is known to be none."""
        found = self._hidden_entries
        if entries not in found:
            hidden = ~closed_entries(self.query_positions, self.rate, entries)
            found[entries] = hidden if not is_plain(hidden) or bool(hidden.any()) else None
        return found[entries]


def visible_tokens(query_positions: Tensor, token_positions: Tensor, window: int) -> Tensor:
    """[... s], [... k] -> [... s k] bool: 0 <= p_query - p_token < window, both real."""
    distance = query_positions.unsqueeze(-1) - token_positions.unsqueeze(-2)
    return (distance >= 0) & (distance < window) & (token_positions >= 0).unsqueeze(-2)


def visible_entries(query_positions: Tensor, rate: int, entries: int, selection: Tensor | None) -> Tensor:
    """[b s e] bool: closed for the query and, where a selection [b s t] is given, among the selected."""
    closed = closed_entries(query_positions, rate, entries)
    if selection is None:
        return closed
    chosen = torch.zeros(*closed.shape[:2], entries + 1, dtype=torch.bool, device=closed.device)
    chosen = chosen.scatter(-1, selection.masked_fill(selection < 0, entries), True)
    return closed & chosen[..., :entries]
