"""Freezing: values of a clean run replayed in others, by position in the row.

An edit then changes content and not routing, selection or mixing (or whatever is named).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from dsv4.activation_cache import ActivationCache
from dsv4.capture import Pos
from dsv4.hooks import HookPoint
from dsv4.part import Positions, check_tokens, over_tokens
from dsv4.replay import Replay

# Leaf names, by what they decide. All of them are frozen where no names are given.
GROUPS = {
    "routing": ("expert_indices", "expert_weights"),
    "selection": ("indexer_selection",),
    "mixing": (
        *("attention_pre", "attention_post", "attention_comb", "mlp_pre", "mlp_post", "mlp_comb"),
        "readout_weights",
    ),
}


class Freezing:
    """Mixed into the model."""

    @contextmanager
    def freeze(self, cache: ActivationCache, names=None, *, pos: Pos = None) -> Iterator[None]:
        """Replay values of `cache` in every run made inside.

        Args:
            cache: of a run with one row, which every row then gets, or with as many as the runs
                made inside. Tokens, keys and entries are found by their number in the row: padding,
                a KV cache and generation change nothing. What the cache has not got (tokens that
                come later, positions that its `pos=` left out) stays as computed.
            names: "routing" (expert_indices, expert_weights), "selection" (indexer_selection),
                "mixing" (pre, post, comb, readout_weights), or names, globs or predicates; a list
                of those. Of what they mean, the values that the cache holds. None: all three
                groups.
            pos: freeze these positions only (see `Positions`).
        Raises:
            KeyError: nothing of a name is in the cache. ValueError: a read-only value.
        """
        positions = Positions(pos)
        hooks = []
        for name in self._frozen_names(cache, names):
            point = self.hook_dict[name]
            if point.read_only:
                raise ValueError(f"freeze: {name} is read-only; freeze what it is computed from")
            check_tokens(point, positions)
            hooks.append((name, replaying(Replay(cache, point, self.config), positions)))
        with ExitStack() as stack:
            stack.enter_context(positions.watched())
            stack.enter_context(self.hooks(hooks))
            yield

    def _frozen_names(self, cache: ActivationCache, names) -> list[str]:
        groups = list(GROUPS) if names is None else names
        chosen: set[str] = set()
        for pattern in groups if isinstance(groups, list | tuple | set | frozenset) else [groups]:
            if isinstance(pattern, str) and pattern in GROUPS:
                found = [n for n in cache if n.rsplit(".", 1)[-1] in GROUPS[pattern]]
                meant = f"{pattern} ({', '.join(GROUPS[pattern])})"
            else:
                found = [n for n in self.match_names(pattern) if n in cache]
                meant = f"{pattern!r}"
            if not found and names is not None:
                raise KeyError(
                    f"freeze: the cache of {len(cache)} values holds nothing of {meant}; capture "
                    "it in the clean run with run_with_cache(names=...)"
                )
            chosen.update(found)
        if not chosen and names is None:
            raise KeyError(
                "freeze: the cache holds no routing, selection or mixing; capture it in the clean run (names=None does), or say names="
            )
        return [n for n in self.hook_dict if n in chosen]


def replaying(replay: Replay, positions: Positions):
    """A hook function that puts in what the cache has, at these positions."""

    def put(value: Tensor, hook: HookPoint) -> Tensor:
        stored, found = replay.find(value, hook)
        if positions.given is not None:
            found = found & over_tokens(positions.of(hook), hook)
        return torch.where(found, stored, value)

    return put
