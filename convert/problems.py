"""What is wrong with a checkpoint, collected by kind so that one error tells all of it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

SHOWN = 10


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as it is; the message lists what is wrong, with names."""


@dataclass
class Problems:
    """Names (or sentences) by kind of fault, in the order found."""

    by_kind: dict[str, list[str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(self.by_kind.values())

    def add(self, kind: str, names: str | Iterable[str]) -> None:
        names = [names] if isinstance(names, str) else list(names)
        if names:
            self.by_kind.setdefault(kind, []).extend(names)

    def extend(self, other: "Problems") -> None:
        for kind, names in other.by_kind.items():
            self.add(kind, names)

    def error(self, where: object, advice: str = "") -> CheckpointError:
        """The error that lists every kind: a count and the first ten names of each."""
        lines = [f"{where} cannot be loaded:"]
        for kind, names in self.by_kind.items():
            lines.append(f"  {kind} ({len(names)}):")
            lines += [f"    {name}" for name in names[:SHOWN]]
            if len(names) > SHOWN:
                lines.append(f"    ... and {len(names) - SHOWN} more")
        if advice:
            lines.append(advice)
        return CheckpointError("\n".join(lines))
