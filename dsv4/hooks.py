"""Probe points: named identity modules at which a value can be read, replaced and differentiated through.

A module that owns points derives from `Probed`. It declares each point in `__init__`, in forward order, with its axes, and applies
it inline through `self.tap`:

    self.router_scores = HookPoint("b s experts")
    scores = self.tap.router_scores(sqrt_softplus(logits))

`tap.<name>` is the point itself while something listens there and a plain identity function otherwise, so that an unwatched
forward calls no point at all. `Probed.spelled_out` tells whether a point that the module's fused way hides is listened to.
"""

import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from dsv4.values import VALUES, Value

_CLAIM = threading.Lock()


def _same(x):
    return x


class Stage:
    """What the points of one model share about the run in progress: the call's positions, the decoding step, who runs."""

    def __init__(self):
        self.call = None
        self.step = 0
        self.thread: int | None = None
        self.runs = 0
        self.captures: list = []
        self.last_span: str | None = None

    def enter(self) -> None:
        """Claim the model for one run; RuntimeError when a run is in progress (another thread's, or one inside a hook)."""
        with _CLAIM:
            if self.thread is not None:
                where = "a hook of that run" if self.thread == threading.get_ident() else "another thread"
                raise RuntimeError(
                    f"the model is already running (asked again from {where}): one run at a time per model; "
                    "wait for it, or use a second model that shares the weights (copy.copy of the state dict)"
                )
            self.thread = threading.get_ident()
            self.runs += 1

    def begin(self, call, span: str | None) -> None:
        """The call's positions are known: captures fix their columns; `span` says what the run leaves out, if anything."""
        self.call, self.last_span = call, span
        for capture in self.captures:
            capture.begin(call)

    def leave(self) -> None:
        self.thread = None
        self.call = None


class Handle:
    """What `add_hook` returns: `remove()` takes exactly this hook away (twice is harmless); usable as a context manager."""

    def __init__(self, point: "HookPoint", fn: Callable, direction: str):
        self.point, self.fn, self.direction = point, fn, direction
        self.fired = 0
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


class HookPoint(nn.Module):
    """A named place in the forward pass: an identity module whose path from the model is its name.

    Args:
        axes: the value's axes, space-separated (letters of spec/values, e.g. "b s n hidden").
        private: the tensor handed in belongs to the call alone, so that a hook may write into it without a copy being made first
            (attention_keys and attention_values, which are one tensor).

    What the point returns is what the model uses next. Hooks run in the order added, captures after them.
    Fields a hook function reads: name, layout, axes, dtype, layer, step, positions, description.
    """

    def __init__(self, axes: str, *, private: bool = False):
        super().__init__()
        self.axes = axes
        self.private = private
        self.name = ""
        self._hooks: list[Handle] = []
        self._gradient_hooks: list[Handle] = []
        self._captures: list[Callable[[HookPoint, Tensor], None]] = []
        self._forward_hooks = _Watched(self)
        self._forward_pre_hooks = _Watched(self)
        self._backward_hooks = _Watched(self)
        object.__setattr__(self, "owner", None)
        object.__setattr__(self, "stage", None)
        self.value: Value | None = None

    # What a hook function may ask.

    @property
    def layout(self) -> str:
        return self.value.layout if self.value else ""

    @property
    def description(self) -> str:
        return self.value.meaning if self.value else ""

    @property
    def dtype(self) -> str:
        """"f" float32 always, "m" the model's dtype, "i" int64."""
        return self.value.dtype if self.value else "m"

    @property
    def read_only(self) -> bool:
        return self.value is not None and self.value.edit == "-"

    @property
    def layer(self) -> int | None:
        parts = self.name.split(".")
        return int(parts[1]) if parts[0] == "layers" else None

    @property
    def step(self) -> int:
        """0 in a plain forward and in generate's prefill, then 1, 2, ... for each decoding step."""
        return self.stage.step if self.stage else 0

    @property
    def positions(self) -> Tensor | None:
        """[b, s] int64: position of each token of the call, from the row's first real token; -1 at padding. None outside a run."""
        return self.stage.call.positions if self.stage and self.stage.call is not None else None

    @property
    def valid(self) -> Tensor | None:
        """[b, s] bool: True at real tokens. None outside a run."""
        return self.stage.call.valid if self.stage and self.stage.call is not None else None

    # Listening.

    def add_hook(self, fn: Callable, *, dir: str = "fwd", prepend: bool = False) -> Handle:
        """Attach `fn(value, hook)`: a returned Tensor replaces the value, None leaves it, writing in place counts too.

        dir="bwd" attaches `fn(grad, hook)` to the value's gradient instead (TypeError on integer values). It belongs to the graph
        of each forward run while it is attached and fires when that graph is differentiated. The hook stays until
        `handle.remove()` or `model.reset_hooks()`.
        """
        if dir not in ("fwd", "bwd"):
            raise ValueError(f'dir={dir!r} at {self.name}: expected "fwd" or "bwd"')
        if dir == "bwd" and self.dtype == "i":
            raise TypeError(f"{self.name} holds integers and has no gradient; hook a floating value instead")
        if not callable(fn):
            raise TypeError(f"hook at {self.name}: expected a function fn(value, hook), got {type(fn).__name__}")
        handle = Handle(self, fn, dir)
        hooks = self._hooks if dir == "fwd" else self._gradient_hooks
        hooks.insert(0 if prepend else len(hooks), handle)
        self._changed()
        return handle

    def handles(self) -> list[Handle]:
        return [*self._hooks, *self._gradient_hooks]

    def attach_capture(self, capture: Callable[["HookPoint", Tensor], None]) -> None:
        """Call `capture(point, value)` after all hooks; `capture.keeps_graph` tells that it needs the autograd graph."""
        self._captures.append(capture)
        self._changed()

    def detach_capture(self, capture: Callable) -> None:
        if capture in self._captures:
            self._captures.remove(capture)
        self._changed()

    def _remove(self, handle: Handle) -> None:
        for hooks in (self._hooks, self._gradient_hooks):
            if handle in hooks:
                hooks.remove(handle)
        self._changed()

    @property
    def foreign(self) -> bool:
        """Something other than our own hooks listens: PyTorch's module hooks, or a forward set on the instance (nnsight)."""
        return bool(self._forward_hooks or self._forward_pre_hooks or self._backward_hooks) or "forward" in self.__dict__

    @property
    def edited(self) -> bool:
        return bool(self._hooks or self._gradient_hooks) or self.foreign or any(c.keeps_graph for c in self._captures)

    @property
    def live(self) -> bool:
        return bool(self._captures) or self.edited

    def _changed(self) -> None:
        if self.owner is not None:
            self.owner.refresh()

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "forward":
            self._changed()

    def __delattr__(self, name):
        super().__delattr__(name)
        if name == "forward":
            self._changed()

    def bind(self, owner: "Probed", leaf: str) -> None:
        object.__setattr__(self, "owner", owner)
        self.value = VALUES.get(leaf)
        if self.value is not None and self.value.axes != self.axes:
            raise AssertionError(f"{leaf} declares axes {self.axes!r}; dsv4/values.py says {self.value.axes!r}")

    # The value passes.

    def __call__(self, x: Tensor) -> Tensor:
        given = x
        if (self._hooks or self.foreign) and not self.private:
            given = x.clone()
        before = _version(given)
        y = super().__call__(given)
        if y is given:
            y = given if self.private or before is None or _version(given) != before else x
            if y.shape != x.shape:
                raise ValueError(f"hook at {self.name} resized the value in place from {tuple(x.shape)} to {tuple(y.shape)}")
        else:
            y = self._accept(y, x)
        if self.read_only and y is not x:
            raise ValueError(f"{self.name} is read-only: a hook there may look but not return a tensor or write into it")
        if self._gradient_hooks and y.requires_grad:
            # A node of its own: the gradient of what comes after this point, not of every use of the tensor.
            y = y.view_as(y)
            y.register_hook(self._on_gradient)
        for capture in self._captures:
            capture(self, y)
        return y

    def forward(self, x: Tensor) -> Tensor:
        for handle in list(self._hooks):
            before = _version(x)
            returned = handle(x)
            if returned is None or returned is x:
                if self.read_only and (returned is x or _version(x) != before):
                    raise ValueError(f"{self.name} is read-only: a hook there may look but not return a tensor or write into it")
            elif self.read_only:
                raise ValueError(f"{self.name} is read-only: a hook there may look but not return a tensor or write into it")
            else:
                x = self._accept(returned, x)
        return x

    def _on_gradient(self, grad: Tensor) -> Tensor:
        for handle in list(self._gradient_hooks):
            grad = grad.clone()
            returned = handle(grad)
            if returned is not None:
                grad = self._accept(returned, grad)
        return grad

    def _accept(self, new, old: Tensor) -> Tensor:
        """Check a tensor that replaces the value and bring it to the value's dtype."""
        if not isinstance(new, Tensor):
            raise TypeError(f"hook at {self.name} returned {type(new).__name__}; expected a Tensor [{self.axes}] or None")
        if new.shape != old.shape:
            raise ValueError(
                f"hook at {self.name} returned shape {list(new.shape)}; expected {list(old.shape)} [{self.axes}]"
            )
        if new.device != old.device:
            raise ValueError(
                f"hook at {self.name} returned a tensor on {new.device}; the value is on {old.device}: move it with .to(value.device)"
            )
        if new.dtype == old.dtype:
            return new
        if old.is_floating_point() and new.is_floating_point():
            return new.to(old.dtype)
        integers = not old.is_floating_point() and not new.is_floating_point()
        if integers and not new.is_complex() and new.dtype != torch.bool:
            cast = new.to(old.dtype)
            if not torch.equal(cast.to(new.dtype), new) or bool(((cast < 0) & (new > 0)).any()):
                raise ValueError(f"hook at {self.name} returned {new.dtype} values that do not fit {old.dtype}")
            return cast
        raise TypeError(f"hook at {self.name} returned dtype {new.dtype}; the value is {old.dtype}")

    def extra_repr(self) -> str:
        return f"{self.layout} [{self.axes}]" if self.layout else f"[{self.axes}]"


class Probed(nn.Module):
    """A module that owns HookPoints. `tap.<name>(x)` applies one; `spelled_out` asks for the way that shows every value."""

    def __init__(self):
        super().__init__()
        self.tap = SimpleNamespace()
        self.spelled_out = False
        self._instrumented = False

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if isinstance(value, HookPoint):
            value.bind(self, name)
            setattr(self.tap, name, _same)

    def points(self) -> Iterator[tuple[str, HookPoint]]:
        """(leaf name, point) of the points this module owns itself, in the order of declaration."""
        return ((name, child) for name, child in self._modules.items() if isinstance(child, HookPoint))

    def refresh(self) -> None:
        """Recompute `tap` and `spelled_out` from who listens now."""
        spelled_out = False
        for name, point in self.points():
            live = point.live
            setattr(self.tap, name, point if live else _same)
            if live and point.value is not None:
                hidden = point.value.read == "mat" or (point.value.edit == "mat" and point.edited)
                spelled_out = spelled_out or hidden
        self.spelled_out = spelled_out

    def notice(self) -> None:
        """Called before each run: a forward set on the instance by writing into `__dict__` (nnsight) tells nobody."""
        if ("forward" in self.__dict__) != self._instrumented:
            self._instrumented = "forward" in self.__dict__
            self.refresh()


class _Watched(OrderedDict):
    """PyTorch's hook dictionaries, telling the point when one comes or goes."""

    def __init__(self, point: HookPoint | None = None):
        super().__init__()
        self.point = point

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        if self.point is not None:
            self.point._changed()

    def __delitem__(self, key):
        super().__delitem__(key)
        if self.point is not None:
            self.point._changed()

    def __reduce__(self):
        return _Watched, (), self.__dict__, None, iter(self.items())


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


def _calling_form(fn: Callable, name: str) -> Callable:
    """fn as a function of (value, point): `fn(value, hook=point)`, else two positional arguments, else the value alone."""
    try:
        signature = inspect.signature(fn)
    except ValueError:
        return lambda value, point: fn(value)
    for bind, call in (
        (lambda: signature.bind(None, hook=None), lambda value, point: fn(value, hook=point)),
        (lambda: signature.bind(None, None), lambda value, point: fn(value, point)),
        (lambda: signature.bind(None), lambda value, point: fn(value)),
    ):
        try:
            bind()
        except TypeError:
            continue
        return call
    raise TypeError(f"hook at {name}: {fn} takes {signature}; expected fn(value, hook)")
