"""The points of a model that is spread over the processes of a mesh: whole tensors, one truth, one end.

Every process runs the same script. At a point that someone listens to, a value of which each process has a part is put together, the
hooks run on the whole on every process, and each goes on with its part. What the first process's hooks made of a value (of a
block on stages: the first that has the block) is what all go on with. A hook that raises on one process raises on all.
"""

import hashlib
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dsv4.collectives import enter, gather, part_of, scatter
from dsv4.hooks import HookPoint, same_bits
from dsv4.stage import Stage

T = TypeVar("T")
LEFT, REPLACED, RAISED = range(3)
# In place of any number: this process has raised before it came to exchange one.
GONE = -1


class AbsentWeightsError(ValueError):
    """Weights of a block were asked for on a stage that does not hold it."""


class MeshStage(Stage):
    """Attributes:
    world: all processes, in one dimension; what the first one draws counts.
    pipe: how streams pass from stage to stage (`dsv4.pipeline.Pipe`); None where every process has every block.
    live: names of the points that someone listens to.
    """

    world: DeviceMesh
    pipe: Any
    live: set[str]

    @property
    def is_first(self) -> bool:
        return self.world.get_local_rank() == 0

    is_many = True

    def begin(self, call, kv=None) -> None:
        super().begin(call, kv)
        if self.pipe is not None:
            self.pipe.reset()
        self._same_run(call)

    def together(self, do: Callable[[], T]) -> T:
        """do() on every process; where it raises on one, it raises on all."""
        result, failure = _attempt(do)
        self._end_if_any(self._exchange(LEFT if failure is None else RAISED), failure, "the run")
        return result

    def before_run(self, do: Callable[[], T]) -> T:
        """do(); where it raises on one process, the others learn it at what they exchange next."""
        result, failure = _attempt(do)
        if failure is not None:
            self._end_if_any(self._exchange(GONE), failure, "preparing a run")
        return result

    @contextmanager
    def running(self) -> Iterator[None]:
        with super().running():
            self.has_begun = self.ended_together = False
            try:
                yield
            except BaseException as error:
                if not self.has_begun and not self.ended_together:
                    self._end_if_any(self._exchange(GONE), error, "preparing a run")
                raise

    def drawn(self, x: Tensor) -> Tensor:
        """What the first process drew."""
        return self._from(0, x)

    def agreed(self, what: str, given: Tensor, change: Callable[[], tuple[Tensor, bool]], home: int) -> tuple[Tensor, bool]:
        """change() -> (value, whether it was replaced) on every process, the value then being that of process `home`.

        A process that lacks weights which change() asks for takes the value as it comes.
        """
        result, failure = _attempt(change)
        if isinstance(failure, AbsentWeightsError) and self.world.get_local_rank() != home:
            result, failure = (given, False), None
        flag = RAISED if failure is not None else REPLACED if result[1] else LEFT
        flags = self._exchange(flag)
        self._end_if_any(flags, failure, what)
        value = result[0]
        if flags[home] == LEFT:
            return (value if flag == LEFT else given), False
        truth = self._from(home, value)
        if same_bits(truth, value):
            return value, True
        # The graph is this process's, the numbers are those of `home`.
        return (truth + (value - value.detach()) if value.requires_grad else truth), True

    def _from(self, rank: int, x: Tensor) -> Tensor:
        x = x.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(x, group=self.world.get_group(), group_src=rank)
        return x

    def _exchange(self, number: int) -> list[int]:
        own = torch.tensor([number], dtype=torch.int64, device=self.world.device_type)
        every = [torch.empty_like(own) for _ in range(self.world.size())]
        dist.all_gather(every, own, group=self.world.get_group())
        numbers = torch.cat(every).tolist()
        if GONE in numbers and number != GONE:
            self._end_if_any(numbers, None, "preparing a run")
        return numbers

    def _end_if_any(self, flags: list[int], failure: BaseException | None, what: str) -> None:
        """Raise on every process when one has failed: its own error there, one that carries it elsewhere."""
        raised = [rank for rank, flag in enumerate(flags) if flag in (RAISED, GONE)]
        if not raised:
            return
        told: list[str | None] = [None] * len(flags)
        text = None if failure is None else "".join(traceback.format_exception(failure))
        dist.all_gather_object(told, text, group=self.world.get_group())
        self.ended_together = True
        if failure is not None:
            raise failure
        rank = dist.get_global_rank(self.world.get_group(), raised[0])
        raise RuntimeError(f"{what} raised on rank {rank}, which ends it on all:\n{told[raised[0]]}")

    def _same_run(self, call) -> None:
        """RuntimeError where processes were given different inputs, or listen to different values."""
        self.has_begun = True
        about = hashlib.blake2b(repr((call.host, sorted(self.live))).encode(), digest_size=7)
        for given in (call.input_ids, call.positions):
            if given is not None:
                about.update(given.cpu().numpy().tobytes())
        digests = self._exchange(int.from_bytes(about.digest(), "big"))
        if len(set(digests)) > 1:
            self.ended_together = True
            odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
            raise RuntimeError(
                f"the processes of the mesh do not make the same run: rank {odd[0]} has other tokens or masks, or listens to other values, "
                "than rank 0. Every process has to run the same script; ranks= of run_with_cache keeps a capture to one"
            )


class MeshPoint(HookPoint):
    """A HookPoint whose value is the whole one on every process.

    Attributes:
        parts: the axis along which each process of `shards` has a part; None where each has the whole.
        home: the process whose edits count: the first of the mesh, with blocks on stages the first that has the point's block.
    """

    parts: int | None
    shards: DeviceMesh | None
    home: int

    def __call__(self, x: Tensor) -> Tensor:
        whole = x if self.parts is None else gather(x, self.parts, self.shards)
        pipe = self.stage.pipe
        if pipe is None or not pipe.tells(self):
            y = self.pass_whole(whole)
        else:
            told = pipe.announce(self, whole)
            y = self.pass_whole(told)
            y = y if self.shared else pipe.joined(self, y)
            y = whole if y is told else y
        return x if y is whole else self._own_part(y, x)

    def pass_whole(self, x: Tensor) -> Tensor:
        """What a HookPoint does, on the whole value."""
        y = self._through_hooks(x) if self._hooks or self.foreign else x
        return y if self.shared else super().settle(y)

    def settle(self, y: Tensor) -> Tensor:
        """The end of a shared value: from here each process reads it for its own heads."""
        pipe = self.stage.pipe
        if pipe is None or not (self.live and pipe.tells(self)):
            y = super().settle(y)
        else:
            y = pipe.joined(self, super().settle(pipe.announce(self, y, settles=True)))
        return y if self.shards is None else enter(y, self.shards)

    def joins_graph(self) -> bool:
        """Whether what listens here may ask for gradients."""
        return bool(self._hooks or self._gradient_hooks or self.foreign or any(capture.keeps_graph for capture in self._captures))

    def _own_part(self, y: Tensor, x: Tensor) -> Tensor:
        if self.parts is None:
            return y
        y = scatter(y, self.parts, self.shards)
        return y if y.stride() == x.stride() else torch.empty_like(x).copy_(y)

    def _through_hooks(self, x: Tensor) -> Tensor:
        edited = self.stage.edited

        def change() -> tuple[Tensor, bool]:
            y = super(MeshPoint, self)._through_hooks(x)
            return y, self.name in edited

        before = self.name in edited
        edited.pop(self.name, None)
        y, is_replaced = self.stage.agreed(f"a hook at {self.name}", x, change, self.home)
        edited.pop(self.name, None)
        if is_replaced or before:
            edited[self.name] = None
        return y

    def _on_gradient(self, handles, run, grad: Tensor) -> Tensor:
        def change() -> tuple[Tensor, bool]:
            y = super(MeshPoint, self)._on_gradient(handles, run, grad)
            return y, not same_bits(y, grad)

        return self.stage.agreed(f"a gradient hook at {self.name}", grad, change, self.home)[0]

    def _changed(self) -> None:
        super()._changed()
        if self.live:
            self.stage.live.add(self.name)
        else:
            self.stage.live.discard(self.name)


def take_part(x: Tensor, axis: int, mesh: DeviceMesh) -> Tensor:
    """This process's part of a weight, in memory of its own."""
    return part_of(x, axis, mesh).clone(memory_format=torch.contiguous_format)


def _attempt(do: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """(what it returned, None), or (None, what it raised, to be raised once every process knows)."""
    try:
        return do(), None
    except BaseException as error:
        return None, error
