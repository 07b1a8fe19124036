"""Blocks dealt out to stages: the streams pass from stage to stage, the other values where someone listens.

Every process runs the model's loop over all blocks. Where it meets a block of its own stage, it computes; where it meets another's, it
keeps the streams it has, until they are handed over: from the stage that has them to all, at the first block of another stage and
behind the last block. What lies outside the blocks (embedding, readout, head) is on every stage.

While someone listens to a value of a block, its stage tells the others each value as it is made, so that hooks run and captures
are filled on every process.
"""

import traceback
from dataclasses import replace
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dsv4.block import Block, Blocks
from dsv4.collectives import deliver, enter
from dsv4.hooks import HookPoint
from dsv4.mesh_stage import AbsentWeightsError, MeshPoint, MeshStage
from dsv4.slots import EntrySlot, TokenSlot

VALUE, SETTLED, END, RAISED = range(4)


class Pipe:
    """Which stage has the streams, and the way between stages.

    Attributes:
        mesh: the processes that have the same part of each stage, by stage. holder: the stage whose streams are up to date, None when
        all are. told: the block whose values this stage is telling the others, or None.
    """

    def __init__(self, mesh: DeviceMesh):
        self.mesh, self.group, self.own = mesh, mesh.get_group(), mesh.get_local_rank()
        self.reset()

    def reset(self) -> None:
        self.holder: int | None = None
        self.told: Block | None = None

    def to_stage(self, stage: int, x: Tensor) -> Tensor:
        """The streams, for the first block of a stage to read."""
        if self.holder != stage:
            x = self._with_gradient(enter, self.to_all(x))
            self.holder = stage
        return x

    def to_all(self, x: Tensor) -> Tensor:
        if self.holder is not None:
            holder, self.holder = self.holder, None
            x = self._with_gradient(lambda x, mesh: deliver(x, holder, mesh), x)
        return x

    def _with_gradient(self, way, x: Tensor) -> Tensor:
        """A gradient comes back to all stages or to none, whichever of them holds what asks for it."""
        if torch.is_grad_enabled():
            asks = torch.tensor([int(x.requires_grad)], device=x.device)
            dist.all_reduce(asks, dist.ReduceOp.MAX, group=self.group)
            x = x.detach().requires_grad_() if bool(asks) and not x.requires_grad else x
        return way(x, self.mesh)

    # Values of a block.

    def tells(self, point: MeshPoint) -> bool:
        return self.told is not None and point.layer is not None

    def announce(self, point: MeshPoint, value: Tensor, settles: bool = False) -> Tensor:
        """Tell the other stages a value; returns what this one goes on with."""
        # A shared value is one tensor until it settles.
        joins = torch.is_grad_enabled() and point.joins_graph() and value.is_floating_point() and settles == point.shared
        asks = joins and value.requires_grad
        self._say((SETTLED if settles else VALUE, point.name, tuple(value.shape), value.dtype, joins, asks))
        if joins:
            return self._told(value, asks, self.own)
        dist.broadcast(value.detach().contiguous(), group=self.group, group_src=self.own)
        return value

    def _told(self, value: Tensor, asks: bool, holder: int) -> Tensor:
        """The value on every stage, behind all that were told before it.

        A gradient then asks every stage for the same exchanges in the same order, whichever values it is of: `thread`, a zero, leads
        from each value to the one before.
        """
        x = value + self.thread.to(value.dtype)
        x = x.detach().requires_grad_() if asks and not x.requires_grad else x
        return deliver(x, holder, self.mesh)

    def joined(self, point: MeshPoint, y: Tensor) -> Tensor:
        """What the hooks made of a value that was told, as it goes on: its gradient comes to every stage."""
        if torch.is_grad_enabled() and y.requires_grad and point.joins_graph():
            y = enter(y, self.mesh)
            self.thread = self.thread + _zero_of(y)
        return y

    def tell(self, block: "StagedBlock", x: Tensor, do) -> Tensor:
        """Run a block of this stage, telling its values."""
        stage: MeshStage = block.layer_input.stage
        x = self._with_gradient(lambda x, _: x, x)
        self.told, self.thread = block, _zero_of(x)
        try:
            out = do(x)
        except BaseException as error:
            if not stage.ended_together:
                self._say((RAISED, "".join(traceback.format_exception(error))))
            raise
        finally:
            self.told = None
        self._say((END,))
        return self._behind(out)

    def hear(self, block: "StagedBlock", x: Tensor) -> Tensor:
        """Take what another stage tells of its block."""
        device = torch.device(self.mesh.device_type)
        points = {point.name: point for point in block.every_point}
        x = self._with_gradient(lambda x, _: x, x)
        self.thread = _zero_of(x)
        while True:
            said = [None]
            dist.broadcast_object_list(said, group=self.group, group_src=block.home)
            what, *about = said[0]
            if what == END:
                return self._behind(x)
            if what == RAISED:
                raise RuntimeError(f"block {block.layer_input.layer} raised on stage {block.home}, which ends the run on all:\n{about[0]}")
            name, shape, dtype, joins, asks = about
            value, point = torch.zeros(shape, dtype=dtype, device=device), points[name]
            if joins:
                value = self._told(value, asks, block.home)
            else:
                dist.broadcast(value, group=self.group, group_src=block.home)
            if what == SETTLED:
                self.joined(point, HookPoint.settle(point, value))
            elif point.live:
                y = point.pass_whole(value)
                if joins:
                    self.joined(point, y)

    def _behind(self, x: Tensor) -> Tensor:
        return x + self.thread.to(x.dtype) if self.thread.requires_grad else x

    def _say(self, what: tuple) -> None:
        dist.broadcast_object_list([what], group=self.group, group_src=self.own)


class StagedBlock(Block):
    """A block of one stage. On the others it has its points and no weights.

    Attributes:
        home: the stage that holds it.
    """

    pipe: Pipe
    home: int

    def forward(self, x: Tensor, call, kv=None) -> Tensor:
        x = self.pipe.to_stage(self.home, x)
        is_told = any(point.live for point in self.every_point)
        if self.home == self.pipe.own:
            forward = super().forward
            return self.pipe.tell(self, x, lambda x: forward(x, call, kv)) if is_told else forward(x, call, kv)
        x = self.pipe.hear(self, x) if is_told else x
        if kv is not None:
            keep_nothing(kv, call)
        return x

    @property
    def every_point(self) -> list[MeshPoint]:
        if "_all_points" not in self.__dict__:
            object.__setattr__(self, "_all_points", [m for m in self.modules() if isinstance(m, MeshPoint)])
        return self._all_points


class StagedBlocks(Blocks):
    pipe: Pipe

    def leave(self, streams: Tensor) -> Tensor:
        return self.pipe.to_all(streams)


class Elsewhere:
    """A module whose weights another stage holds."""

    absent: frozenset[str]
    of: str

    def __getattr__(self, name: str):
        if name in self.__dict__.get("absent", ()):
            raise AbsentWeightsError(f'this needs {name} of {self.of}; use a mesh without "pp", or ask for the blocks of this stage only')
        return super().__getattr__(name)


@cache
def _elsewhere(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"{kind.__name__}Elsewhere", (Elsewhere, kind), {"__module__": __name__})


def empty_out(block: nn.Module, of: str) -> None:
    """Take a block's weights away; its points stay."""
    for part in block.modules():
        absent = frozenset((*part._parameters, *part._buffers))
        if absent:
            part._parameters.clear()
            part._buffers.clear()
            part.__class__, part.absent, part.of = _elsewhere(type(part)), absent, of


def _zero_of(x: Tensor) -> Tensor:
    """0.0 that depends on x, with a gradient of zeros."""
    return (
        x.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), 0.0).sum().float()
        if x.requires_grad
        else x.new_zeros((), dtype=torch.float32)
    )


def keep_nothing(kv, call) -> None:
    """What a KVCache keeps of a block that another stage holds: tapes of width 0."""
    slots = [kv.keys]
    for pool in (kv.compressor, kv.indexer):
        slots += [] if pool is None else [pool.projections, pool.entries]
    for slot in slots:
        _narrow(slot)
        if isinstance(slot, TokenSlot):
            slot.extend(torch.zeros(*call.valid.shape, 0, dtype=slot.dtype, device=call.valid.device), 0)
        else:
            windows = next(w for w in call.windows.values() if w.rate == slot.rate)
            slot.extend(torch.zeros(*windows.filled.shape, 0, dtype=slot.dtype, device=call.valid.device), windows)


def _narrow(slot: TokenSlot | EntrySlot) -> None:
    state = slot.cache.state
    tape = state.tapes[slot.number]
    slot.width = 0
    if tape.held.shape[2]:
        tapes = list(state.tapes)
        tapes[slot.number] = replace(tape, held=tape.held[..., :0], shared=None if tape.shared is None else tape.shared[..., :0])
        slot.cache.state = replace(state, tapes=tuple(tapes))
