"""What a cache remembers of the run that filled it: what the values alone do not tell."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class Origin:
    """Attributes:
    edited: names of the values that hooks replaced or wrote into, in the order in which the run came by them.
    skipped: layers that were left out. start, stop: start_at_layer and stop_at_layer as given.
    token_keys: columns of the key axis that are tokens (entries follow); None where steps differ or it is not known.
    """

    edited: tuple[str, ...] = ()
    skipped: tuple[int, ...] = ()
    start: int | None = None
    stop: int | None = None
    token_keys: int | None = None

    @classmethod
    def from_json(cls, held: Mapping[str, Any]) -> Self:
        """From the fields as JSON holds them: tuples are lists there."""
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in held.items()})
