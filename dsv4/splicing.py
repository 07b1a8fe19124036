"""Splicing: a module of the user's own, such as an SAE or a transcoder, put in place at a value.

    y = module(x)              with the error term     y = value + (module(x) - module(x) unedited)

x is the value itself, or another value before it. With the error term the run is, to the last bit,
the one without the module, until something inside the module is edited; gradients pass through the
module alone.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from dsv4.budget import SPLICED
from dsv4.capture import Last
from dsv4.hooks import HookPoint
from dsv4.kernels.numeric import wide
from dsv4.stage import Stage


class Splicing:
    """Mixed into the model."""

    @contextmanager
    def splice(
        self,
        name: str | tuple[str, str],
        module: Callable[[Tensor], Tensor],
        use_error_term: bool = True,
    ) -> Iterator[list[str]]:
        """Replace a value by what `module` makes of it, in every run made inside.

        Args:
            name: the value, or (value read, value replaced) with the first before the second: a
                transcoder has ("layers.3.mlp_input", "layers.3.mlp.mlp_output").
            module: takes the value read, cast to the dtype of the module's parameters, and returns
                a tensor of the shape of the value replaced.
            use_error_term: add what the module, with no hook inside it, gets wrong.
        Yields:
            The names under which the module's own HookPoints are values of the model while it is
            spliced in: `<value replaced>.splice.<path in the module>`. They are read, edited and
            differentiated like any other; the module declares their axes, HookPoint("b s latents").
        """
        read, written = self._spliced_pair(name)
        points = {
            f"{written}{SPLICED}{path}": point
            for path, point in (module.named_modules() if isinstance(module, nn.Module) else ())
            if isinstance(point, HookPoint)
        }
        taken = [point.name for point in points.values() if point.name]
        if taken:
            raise ValueError(
                f"splice: the module is spliced in already, as {taken[0]}; its values have one name each: splice a copy.deepcopy of it"
            )
        put = _Splice(read, written, module, list(points.values()), use_error_term)
        with ExitStack() as stack:
            if read != written:
                stack.enter_context(put.source.of(self.hook_dict[read]))
            stack.enter_context(self._with_points(points, written))
            stack.enter_context(self.hooks([(written, put)]))
            yield list(points)

    def _spliced_pair(self, name) -> tuple[str, str]:
        pair = name if isinstance(name, tuple | list) else (name, name)
        if len(pair) != 2:
            raise ValueError(f"splice: got {name!r}, expected a name or (name read, name replaced)")
        found = []
        for part in pair:
            meant = self.match_names(part)
            if len(meant) != 1:
                raise ValueError(
                    f"splice: {part!r} means {len(meant)} values, expected one; nest several splices, each with a module of its own"
                )
            point = self.hook_dict[meant[0]]
            if point.dtype == "i" or (part is pair[1] and point.read_only):
                what = "holds integers" if point.dtype == "i" else "is read-only"
                raise ValueError(f"splice: {point.name} {what}; splice at a floating value")
            found.append(point.name)
        order = list(self.hook_dict)
        if order.index(found[0]) > order.index(found[1]):
            raise ValueError(f"splice: {found[0]} comes after {found[1]} in a forward; expected (value read, value replaced) in that order")
        return found[0], found[1]

    @contextmanager
    def _with_points(self, points: dict[str, HookPoint], after: str) -> Iterator[None]:
        """Make the points values of the model, in the order of the forward behind `after`."""
        for name, point in points.items():
            point.name = name
            object.__setattr__(point, "stage", self.stage)
        ordered = {}
        for name, point in self.hook_dict.items():
            ordered[name] = point
            if name == after:
                ordered |= points
        object.__setattr__(self, "_hook_dict", ordered)
        try:
            yield
        finally:
            for name, point in points.items():
                for handle in point.handles():
                    handle.remove()
                del self._hook_dict[name]
                point.name = ""
                object.__setattr__(point, "stage", Stage())


class _Splice:
    """The hook function at the value replaced."""

    def __init__(self, read: str, written: str, module, points: list[HookPoint], with_error: bool):
        self.read, self.written, self.module = read, written, module
        self.points, self.with_error = points, with_error
        self.source = _Source()
        parameters = module.parameters() if isinstance(module, nn.Module) else ()
        self.dtype = next((p.dtype for p in parameters if p.is_floating_point()), None)

    def __call__(self, value: Tensor, hook: HookPoint) -> Tensor:
        x = value if self.read == self.written else self.source.take(self.read, hook)
        made = self._run(x, value)
        if not self.with_error:
            return made
        clean = self._unedited(x, value, made)
        # Exactly the value where nothing inside is edited.
        return wide(value).detach() + (wide(made) - wide(clean).detach())

    def _run(self, x: Tensor, value: Tensor) -> Tensor:
        made = self.module(x if self.dtype is None else x.to(self.dtype))
        if not isinstance(made, Tensor) or made.shape != value.shape:
            got = list(made.shape) if isinstance(made, Tensor) else type(made).__name__
            raise ValueError(f"the module spliced in at {self.written} returned {got}; expected a tensor {list(value.shape)}")
        return made

    def _unedited(self, x: Tensor, value: Tensor, made: Tensor) -> Tensor:
        if not any(p.foreign or p._hooks for p in self.points):
            return made
        with torch.no_grad(), ExitStack() as stack:
            for point in self.points:
                stack.enter_context(_muted(point))
            return self._run(x, value)


@contextmanager
def _muted(point: HookPoint) -> Iterator[None]:
    """Nobody of ours listens at the point."""
    kept = point._hooks, point._gradient_hooks, point._captures
    point._hooks, point._gradient_hooks, point._captures = [], [], []
    try:
        yield
    finally:
        point._hooks, point._gradient_hooks, point._captures = kept


class _Source(Last):
    """The value read, of the run in progress."""

    def __init__(self):
        super().__init__()
        self.run = 0

    def __call__(self, point: HookPoint, value: Tensor) -> None:
        self.value, self.run = value, point.stage.runs

    def take(self, name: str, hook: HookPoint) -> Tensor:
        value, self.value = self.value, None
        if value is None or self.run != hook.stage.runs:
            raise ValueError(f"the module spliced in at {hook.name} reads {name}, which this run did not compute: start before it")
        return value
