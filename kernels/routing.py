"""Slots sorted by expert, and tiles of them: no size depends on the data, and nothing is read back from a device.

Axes: t token, k slot, n slot sorted by expert (t * k of them), E experts, T tile.
"""

import torch
from torch import Tensor

# Rows of a tile where no group has more.
FEW_ROWS = 16


def sort_by_expert(indices: Tensor, num_experts: int, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """indices [t k] -> (order [n]: flat slots sorted by expert, stable; ends [E] int32: slots up to and with each expert).

    The slots of tokens that are not `valid` [t] come last and belong to no expert. No size depends on the data and nothing is read
    back from the device.
    """
    flat, bins = indices.flatten(), num_experts
    if valid is not None:
        flat, bins = indices.masked_fill(~valid.unsqueeze(-1), num_experts).flatten(), num_experts + 1
    order = torch.argsort(flat, stable=True)
    counts = torch.zeros(bins, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
    return order, counts[:num_experts].cumsum(0).int()


def tiles_of(ends: Tensor, rows: int, slots: int) -> tuple[Tensor, Tensor]:
    """Tiles of `rows` sorted rows that never span two experts: (expert [T] int32, -1 past the last tile; first row [T] int32).

    T is the most that `slots` rows in E groups can need, so that it is known without the device.
    """
    experts = ends.shape[0]
    tile = torch.arange(most_tiles(experts, rows, slots), device=ends.device)
    counts = ends.diff(prepend=ends.new_zeros(1))
    tiles = (counts + rows - 1) // rows
    upto = tiles.cumsum(0)
    expert = torch.searchsorted(upto, tile, right=True)
    group = expert.clamp(max=experts - 1)
    first = (ends - counts)[group] + (tile - (upto - tiles)[group]) * rows
    is_none = expert == experts
    return expert.masked_fill(is_none, -1).int(), first.masked_fill(is_none, 0).int()


def most_tiles(experts: int, rows: int, slots: int) -> int:
    """Tiles of `rows` that `slots` rows need where as many groups as can be hold one row, and one group the rest."""
    filled = min(experts, slots)
    return (slots - filled) // rows + filled


def slots_in_order(x: Tensor, order: Tensor) -> Tensor:
    """Undo the sort: row r of x goes to flat slot order[r]."""
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    return x.index_select(0, place)
