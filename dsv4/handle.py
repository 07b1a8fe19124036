"""Hook functions on points: the handle that takes one away again, and in which form a function is called."""

import inspect
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn


class Handle:
    """What `add_hook` returns: `remove()` takes exactly this hook away (twice is harmless); usable as a context manager.

    Attributes:
        fired: calls so far. last_run: number of the last run that called it (a gradient hook: that recorded it).
    """

    def __init__(self, point, fn: Callable, direction: str):
        self.point, self.fn, self.direction = point, fn, direction
        self.fired = self.last_run = 0
        self._call = _calling_form(fn, point.name)

    def __call__(self, value: Tensor):
        self.fired += 1
        return self._call(value, self.point)

    def remove(self) -> None:
        self.point._remove(self)

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *exc) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"Handle({self.point.name!r}, {getattr(self.fn, '__name__', repr(self.fn))}, dir={self.direction!r})"


class Handles:
    """Several hooks added by one pattern; `remove()` takes them all away."""

    def __init__(self, handles: Sequence[Handle]):
        self.handles = list(handles)

    @property
    def fired(self) -> int:
        return sum(h.fired for h in self.handles)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def __iter__(self) -> Iterator[Handle]:
        return iter(self.handles)

    def __len__(self) -> int:
        return len(self.handles)

    def __enter__(self) -> "Handles":
        return self

    def __exit__(self, *exc) -> None:
        self.remove()


def _calling_form(fn: Callable, name: str) -> Callable:
    """fn as a function of (value, point): fn(value, hook=point), fn(value, point), or fn(value), by what it names."""
    try:
        signature = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn)
    except ValueError:
        # A builtin without a signature, such as torch.zeros_like.
        return lambda value, point: fn(value)
    kinds = {p.name: p.kind for p in signature.parameters.values()}
    names_hook = kinds.get("hook") in (
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds.values()
    places = [p for p in signature.parameters.values() if p.kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD]
    # A second place with a default is an option of the function's own, unless it is called hook.
    takes_two = inspect.Parameter.VAR_POSITIONAL in kinds.values() or sum(p.default is p.empty for p in places) == 2
    if (names_hook or takes_all) and _binds(signature, (None,), {"hook": None}):
        return lambda value, point: fn(value, hook=point)
    if takes_two and _binds(signature, (None, None), {}):
        return lambda value, point: fn(value, point)
    if _binds(signature, (None,), {}):
        return lambda value, point: fn(value)
    raise TypeError(f"hook at {name}: {fn} takes {signature}; expected fn(value, hook)")


def _binds(signature: inspect.Signature, args: tuple, kwargs: dict) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True
