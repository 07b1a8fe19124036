"""Which values a pattern means: exact names, globs, predicates and lists of them, over full names.

`*` stands for any characters of one dotted part, `**` for any across parts; as a part of its own
`**` also stands for no part at all, so `**.logits` has `logits` and `layers.3.**.layer_output` has
`layers.3.layer_output`. Everything that matches nothing is a KeyError that says what to write.
"""

import difflib
import re
from collections.abc import Callable, Sequence, Set
from typing import Any

from dsv4.values import VALUES

Predicate = Callable[[str], bool]
Absent = Callable[[str], str | None]
NUM_SUGGESTED = 3
_LAYER = re.compile(r"layers\.(-?\d+)(?=\.|$)")


def match(patterns: Any, names: Sequence[str], *, absent: Absent | None = None) -> list[str]:
    """The `names` that the patterns mean, in the order of `names`, each once.

    Args:
        patterns: a str (exact or glob), a predicate `name -> bool`, or a list, tuple or set of
            those; an empty one means nothing.
        names: every full name of the model, in forward order.
        absent: `name -> reason` for a standard value that a block of this model lacks, else None.

    Raises:
        KeyError: a pattern that means nothing; with the reason, the nearest names or the spelling.
        TypeError: patterns of another type, also inside a list.
    """
    is_many = isinstance(patterns, list | tuple | Set)
    chosen: set[str] = set()
    for pattern in patterns if is_many else (patterns,):
        if isinstance(pattern, str):
            found = _matching(pattern, names)
            if not found:
                raise KeyError(_explain(pattern, names, absent))
        elif callable(pattern):
            found = [name for name in names if pattern(name)]
            if not found:
                called = getattr(pattern, "__name__", repr(pattern))
                raise KeyError(f"the predicate {called} is true for none of {len(names)} values")
        else:
            raise TypeError(
                f"names: got {pattern!r} of type {type(pattern).__name__}, expected a str, a "
                "predicate name -> bool, or a list, tuple or set of those"
            )
        chosen.update(found)
    return [name for name in dict.fromkeys(names) if name in chosen]


def _matching(pattern: str, names: Sequence[str]) -> list[str]:
    if "*" not in pattern:
        return [pattern] if pattern in names else []
    fits = re.compile(_regex(pattern)).fullmatch
    return [name for name in names if fits(name)]


def _regex(pattern: str) -> str:
    regex, is_started, is_gap = "", False, False
    for part in re.sub(r"\*{2,}", "**", pattern).split("."):
        if part == "**":
            is_gap = True
            continue
        if is_started:
            regex += r"\.(?:.+\.)?" if is_gap else r"\."
        elif is_gap:
            regex += r"(?:.+\.)?"
        stars = {"**": ".*", "*": "[^.]*"}
        regex += "".join(stars.get(x, re.escape(x)) for x in re.split(r"(\*\*|\*)", part))
        is_started, is_gap = True, False
    if is_gap:
        regex += r"(?:\..+)?" if is_started else ".*"
    return regex


def _explain(pattern: str, names: Sequence[str], absent: Absent | None) -> str:
    """Why the pattern means nothing and what to write instead."""
    lacking = _absent_names(names, absent)
    if absent is not None and (reason := absent(pattern)):
        return f"{pattern!r} does not exist: {reason}"
    if hits := _matching(pattern, list(lacking)):
        return f"{pattern!r} means only {hits[0]} and its like: {lacking[hits[0]]}"
    if _matching(f"{pattern}.**", names):
        return f"{pattern!r} is a module, not a value: write {pattern + '.**'!r} for all it holds"
    if hits := _matching(f"{pattern}.**", list(lacking)):
        return f"{pattern!r} holds no value here: {lacking[hits[0]]}"
    if wrong := _wrong_layer(pattern, names):
        return wrong
    everywhere = f"**.{pattern}"
    if hits := _matching(everywhere, names):
        meant = dict.fromkeys(hits[:1] if len(hits) == 1 else map(_template, hits))
        spelled = [everywhere] if "*" in pattern else list(meant)[:NUM_SUGGESTED]
        return f"{pattern!r} is the end of a name: write {' or '.join(map(repr, spelled))}"
    if hits := _matching(everywhere, list(lacking)):
        return f"{pattern!r} exists on no block: {lacking[hits[0]]}"
    if _matching(f"{everywhere}.**", names):
        return f"{pattern!r} is a module, not a value: write {everywhere + '.**'!r} for all it holds"
    templates = list(dict.fromkeys(map(_template, names)))
    pool = list(dict.fromkeys([*names, *templates]))
    near = difflib.get_close_matches(pattern, pool, NUM_SUGGESTED, 0.5)
    near = near or difflib.get_close_matches(pattern, templates, NUM_SUGGESTED, 0.0)
    said = f"{pattern!r} matches none of {len(names)} values"
    if set(pattern) & set("?[]{}"):
        said += "; only * and ** stand for other characters"
    return f"{said}; the nearest: {', '.join(near)}"


def _template(name: str) -> str:
    return _LAYER.sub("layers.*", name, count=1)


def _layers(names: Sequence[str]) -> list[int]:
    found = {int(hit[1]) for name in names if (hit := _LAYER.match(name))}
    return sorted(found)


def _wrong_layer(pattern: str, names: Sequence[str]) -> str | None:
    asked, layers = _LAYER.match(pattern), _layers(names)
    if asked is None or not layers or int(asked[1]) in layers:
        return None
    said = "names do not count blocks from the end" if asked[1][0] == "-" else "no such block"
    return f"{pattern!r}: {said}; write layers.{layers[0]} to layers.{layers[-1]}"


def _absent_names(names: Sequence[str], absent: Absent | None) -> dict[str, str]:
    """Full name -> reason for the standard values that some block of the model lacks."""
    if absent is None:
        return {}
    of_blocks = [value for value in VALUES.values() if "{i}" in value.module]
    every = [value.full_name(layer) for layer in _layers(names) for value in of_blocks]
    existing = set(names)
    reasons = {name: absent(name) for name in every if name not in existing}
    return {name: reason for name, reason in reasons.items() if reason}
