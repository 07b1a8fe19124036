"""A small printable table: rows are frozen dataclasses, found by name."""

import dataclasses
import difflib
from collections.abc import Callable, Iterator, Sequence
from typing import Any


class Table:
    """Iterable over its rows; `table[name]` is a row; printing it aligns the columns.

    `find` turns a name that is no row's into a row or None (support() answers for single layers that way).
    """

    def __init__(self, rows: Sequence[Any], *, title: str = "", find: Callable[[str], Any] | None = None):
        self.rows = list(rows)
        self.title = title
        self._find = find

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> Any:
        for row in self.rows:
            if row.name == name:
                return row
        found = self._find(name) if self._find else None
        if found is None:
            near = difflib.get_close_matches(name, [row.name for row in self.rows], n=3, cutoff=0.4)
            raise KeyError(f"no row {name!r}{'; nearest: ' + ', '.join(near) if near else ''}")
        return found

    def __contains__(self, name: str) -> bool:
        return any(row.name == name for row in self.rows) or (self._find is not None and self._find(name) is not None)

    def __str__(self) -> str:
        if not self.rows:
            return f"{self.title}\n(no rows)".strip()
        fields = [f.name for f in dataclasses.fields(self.rows[0])]
        lines = [fields, *[[_cell(getattr(row, f)) for f in fields] for row in self.rows]]
        widths = [max(len(line[i]) for line in lines) for i in range(len(fields))]
        text = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        return "\n".join([self.title, *text] if self.title else text)

    __repr__ = __str__


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}"
    return "" if value is None else str(value)
