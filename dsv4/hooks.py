"""Probe points: named identity modules at which a value can be read, replaced and differentiated through.

A module that owns points derives from `Probed`. It declares each point in `__init__`, in forward order, with its axes, and applies
it inline through `self.tap`:

    self.router_scores = HookPoint("b s experts")
    scores = self.tap.router_scores(sqrt_softplus(logits))

`tap.<name>` is the point itself while something listens there and a plain identity function otherwise, so that an unwatched
forward calls no point at all. `Probed.listened` names the points listened to that the module's fused way hides.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from dsv4.handle import Handle
from dsv4.stage import Stage
from dsv4.values import VALUES, Value

# Where nn.Module keeps the hooks that PyTorch's own functions register.
THEIR_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _same(x):
    return x


def is_watched(module: nn.Module) -> bool:
    """Whether PyTorch's own hooks, those of all modules among them, or a forward set on the instance, look at a module that is no point:
    a fused way then calls it, and what it returned is not written over.
    """
    return has_hooks(module) or any(getattr(torch_module, f"_global{name}") for name in THEIR_HOOKS)


def has_hooks(module: nn.Module) -> bool:
    """The same without the hooks of all modules."""
    return any(module.__dict__[name] for name in THEIR_HOOKS) or "forward" in module.__dict__


class HookPoint(nn.Module):
    """A named place in the forward pass: an identity module whose path from the model is its name.

    Args:
        axes: the value's axes, space-separated (letters of dsv4/values.py, e.g. "b s n hidden").
        shared: the same tensor passes another point too, and what is written in place here is to be seen there (attention_keys and
            attention_values). The module calls `settle` once both have been passed.

    What the point returns is what the model uses next. Hooks run in the order added, captures after them.
    Fields a hook function reads: name, layout, axes, dtype, layer, step, positions, valid, description.
    """

    def __init__(self, axes: str, *, shared: bool = False):
        super().__init__()
        self.axes = axes
        self.shared = shared
        self.name = self.leaf = ""
        self.value: Value | None = None
        self._hooks: list[Handle] = []
        self._gradient_hooks: list[Handle] = []
        self._captures: list[Callable[[HookPoint, Tensor], None]] = []
        for name in THEIR_HOOKS:
            setattr(self, name, _Watched(self))
        object.__setattr__(self, "owner", None)
        object.__setattr__(self, "stage", Stage())

    # What a hook function may ask.

    @property
    def layout(self) -> str:
        return self.value.layout if self.value else ""

    @property
    def description(self) -> str:
        return self.value.meaning if self.value else ""

    @property
    def dtype(self) -> str:
        """ "f" float32 always, "m" the model's dtype, "i" int64."""
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
        return self.stage.step

    @property
    def positions(self) -> Tensor | None:
        """[b, s] int64: position of each token the value holds, from the row's first real token; -1 at padding. None outside a run."""
        return self._of_tokens("positions")

    @property
    def valid(self) -> Tensor | None:
        """[b, s] bool: True at real tokens. None outside a run."""
        return self._of_tokens("valid")

    def _of_tokens(self, what: str) -> Tensor | None:
        call, kept = self.stage.call, self.stage.columns(self.name)
        if call is None:
            return None
        every = getattr(call, what)
        return every if kept is None else every.gather(1, kept)

    # Listening.

    def add_hook(self, fn: Callable, *, dir: str = "fwd", prepend: bool = False) -> Handle:
        """Attach `fn(value, hook)`: a returned Tensor replaces the value, None leaves it, writing in place counts too.

        dir="bwd" attaches `fn(grad, hook)` to the value's gradient instead (TypeError on integer values). It belongs to the graph
        of each run made while it is attached and fires when that graph is differentiated, also after it has been removed. The hook
        stays until `handle.remove()` or `model.reset_hooks()`.
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
        self.stage.handles[handle] = None
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
        self.stage.handles.pop(handle, None)
        for hooks in (self._hooks, self._gradient_hooks):
            if handle in hooks:
                hooks.remove(handle)
                self._changed()

    @property
    def foreign(self) -> bool:
        """Something other than our own hooks listens: PyTorch's module hooks, or a forward set on the instance (nnsight)."""
        return has_hooks(self)

    @property
    def live(self) -> bool:
        return bool(self._captures or self._hooks or self._gradient_hooks) or self.foreign

    @property
    def can_edit(self) -> bool:
        """Whether something attached may give another value than it was handed; captures do not."""
        return bool(self._hooks) or self.foreign

    def _changed(self) -> None:
        # While a copy of the model is being made there is no owner yet.
        owner = self.__dict__.get("owner")
        if owner is not None:
            owner.update(self.leaf, self)

    def __setattr__(self, name, value):
        if name in THEIR_HOOKS and not isinstance(value, _Watched):
            value = _Watched(self, value)
        super().__setattr__(name, value)
        if name == "forward" or name in THEIR_HOOKS:
            self._changed()

    def __delattr__(self, name):
        super().__delattr__(name)
        if name == "forward":
            self._changed()

    def bind(self, owner: "Probed", leaf: str) -> None:
        object.__setattr__(self, "owner", owner)
        self.leaf, self.value = leaf, VALUES.get(leaf)
        if self.value is not None and self.value.axes != self.axes:
            raise AssertionError(f"{leaf} declares axes {self.axes!r}; dsv4/values.py says {self.value.axes!r}")

    # The value passes.

    def __call__(self, x: Tensor) -> Tensor:
        x = x if _is_dense(x) else x.contiguous()
        y = self._through_hooks(x) if self._hooks or self.foreign else x
        return y if self.shared else self.settle(y)

    def _through_hooks(self, x: Tensor) -> Tensor:
        given = x if self.shared else x.clone()
        seen = x.clone() if self.shared else x
        y = super().__call__(given)
        if given.shape != x.shape:
            raise ValueError(f"hook at {self.name} resized the value in place from {list(x.shape)} to {list(given.shape)}")
        if self.read_only:
            if y is not given or not same_bits(given, x):
                raise self._is_read_only()
            return x
        # By its bits: a write through .data or numpy moves no version counter.
        if y is not given or not same_bits(given, seen):
            self.stage.edited[self.name] = None
        return y if y is given else self._accept(y, x)

    def settle(self, y: Tensor) -> Tensor:
        """What comes after all hooks: the gradient's hooks and the captures."""
        if self._gradient_hooks and torch.is_grad_enabled() and not y.is_inference():
            y = self._recorded(y)
        if self._captures:
            if any(capture.keeps_graph for capture in self._captures):
                # The tensor kept is the one that is used next, dense and nobody else's.
                y = y.clone(memory_format=torch.contiguous_format)
            for capture in tuple(self._captures):
                capture(self, y)
        return y

    def forward(self, x: Tensor) -> Tensor:
        for handle in tuple(self._hooks):
            seen = x.clone() if self.read_only else None
            handle.last_run = self.stage.runs
            returned = handle(x)
            if self.read_only and (returned is not None or not same_bits(x, seen)):
                raise self._is_read_only()
            if returned is not None and returned is not x:
                accepted = self._accept(returned, x)
                # The tensor is the user's: a later hook that writes in place must not reach it.
                x = accepted.clone() if accepted is returned else accepted
        return x

    def _recorded(self, y: Tensor) -> Tensor:
        # A node of its own: the gradient of what comes after this point, not of every use of the tensor. Where nothing before it
        # requires a gradient (frozen weights), the graph begins here.
        y = y.view_as(y) if y.requires_grad else y.detach().requires_grad_()
        handles = tuple(self._gradient_hooks)
        for handle in handles:
            handle.last_run = self.stage.runs
        y.register_hook(partial(self._on_gradient, handles, (self.stage.call, self.stage.kept, self.stage.step)))
        return y

    def _on_gradient(self, handles: tuple[Handle, ...], run: tuple, grad: Tensor) -> Tensor:
        with self.stage.replay(*run):
            for handle in handles:
                grad = grad.clone()
                returned = handle(grad)
                if returned is not None:
                    grad = self._accept(returned, grad)
        return grad

    def _is_read_only(self) -> ValueError:
        return ValueError(f"{self.name} is read-only: a hook there may look, but not return a tensor or write into the one it is handed")

    def _accept(self, new, old: Tensor) -> Tensor:
        """Check a tensor that replaces `old` and bring it to its dtype and strides (so that the same kernels run on it)."""
        if not isinstance(new, Tensor):
            raise TypeError(f"hook at {self.name} returned {type(new).__name__}; expected a Tensor [{self.axes}] or None")
        if new.shape != old.shape:
            raise ValueError(f"hook at {self.name} returned shape {list(new.shape)}; expected {list(old.shape)} [{self.axes}]")
        if new.device != old.device:
            raise ValueError(
                f"hook at {self.name} returned a tensor on {new.device}; the value is on {old.device}: move it with .to(value.device)"
            )
        if new.dtype != old.dtype:
            new = self._cast(new, old.dtype)
        return new if new.stride() == old.stride() else torch.empty_like(old).copy_(new)

    def _cast(self, new: Tensor, dtype: torch.dtype) -> Tensor:
        if new.is_floating_point() and dtype.is_floating_point:
            return new.to(dtype)
        integers = not new.is_floating_point() and not new.is_complex() and new.dtype != torch.bool
        if not integers or dtype.is_floating_point:
            raise TypeError(f"hook at {self.name} returned dtype {new.dtype}; the value is {dtype}")
        cast = new.to(dtype)
        if not torch.equal(cast.to(new.dtype), new) or (not new.dtype.is_signed and bool((cast < 0).any())):
            raise ValueError(f"hook at {self.name} returned {new.dtype} values that do not fit {dtype}")
        return cast

    def extra_repr(self) -> str:
        if self.value is None:
            return f"[{self.axes}]"
        cost = "read-only" if self.read_only else f"read {self.value.read}, edit {self.value.edit}"
        return f"{self.layout} [{self.axes}] {cost}: {self.description}"


class Probed(nn.Module):
    """A module that owns HookPoints. `tap.<name>(x)` applies one.

    Attributes:
        live: names of the points that someone listens to.
        listened: names of the points, of those its fused way hides ("mat" in dsv4/values.py), that someone listens to.
        spelled_out: whether there are any: take the way that shows every value.

    A fused way that has a tensor in hand may not leave the fused way for an edit of it: a value replaced by itself then gives the very
    numbers of a run that reads it.
    """

    def __init__(self):
        super().__init__()
        self.tap = SimpleNamespace()
        self.live: frozenset[str] = frozenset()
        self.listened: frozenset[str] = frozenset()
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

    def update(self, name: str, point: HookPoint) -> None:
        """Bring `tap` and `listened` up to who listens at one point now."""
        live = point.live
        setattr(self.tap, name, point if live else _same)
        self.live = self.live | {name} if live else self.live - {name}
        hidden = live and point.value is not None and point.value.read == "mat"
        self.listened = self.listened | {name} if hidden else self.listened - {name}
        self.spelled_out = bool(self.listened)

    def notice(self) -> None:
        """Called before each run: a forward set on the instance by writing into `__dict__` (nnsight) tells nobody."""
        if ("forward" in self.__dict__) != self._instrumented:
            self._instrumented = "forward" in self.__dict__
            for name, point in self.points():
                self.update(name, point)


class _Watched(OrderedDict):
    """PyTorch's hook dictionaries, telling the point when one comes or goes."""

    def __init__(self, point: HookPoint | None = None, items=()):
        super().__init__()
        self.point = None
        self.update(items)
        self.point = point

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        if self.point is not None:
            self.point._changed()

    def __delitem__(self, key):
        super().__delitem__(key)
        if self.point is not None:
            self.point._changed()

    def clear(self):
        super().clear()
        if self.point is not None:
            self.point._changed()

    def __reduce__(self):
        return _Watched, (), self.__dict__, None, iter(self.items())


def _is_dense(x: Tensor) -> bool:
    """Whether every element has its own place and no place is left over, in whatever order of axes."""
    return x.is_contiguous() or torch.empty_like(x, device="meta").stride() == x.stride()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit: NaN equals itself, 0.0 is not -0.0."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
