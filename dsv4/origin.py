"""What a cache remembers of the run that filled it: what the values alone do not tell."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


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

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Origin":
        held: Mapping[str, Any] = json.loads(text)
        values = {f.name: held[f.name] for f in fields(cls)}
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
