"""Blocks dealt out to stages: the streams pass from stage to stage, the other values where someone listens.

Every process runs the model's loop over all blocks. Where it meets a block of its own stage, it computes; where it meets another's, it
keeps the streams it has, until they are handed over: from the stage that has them to all, at the first block of another stage and
behind the last block. What lies outside the blocks (embedding, readout, head) is on every stage.

While someone listens to a value of a block, its stage tells the others each value as it is made, so that hooks run and captures
are filled on every process.
"""

import traceback

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dsv4.block import Block, Blocks
from dsv4.collectives import deliver, enter
from dsv4.hooks import HookPoint, Probed
from dsv4.mesh_stage import MeshPoint, MeshStage
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

    def announce(self, point: HookPoint, value: Tensor, settles: bool = False) -> None:
        """Tell the other stages a value, if it is of the block that is being told."""
        if self.told is not None and point.layer is not None:
            self._say((SETTLED if settles else VALUE, point.name, tuple(value.shape), value.dtype))
            dist.broadcast(value.detach().contiguous(), group=self.group, group_src=self.own)

    def tell(self, block: "StagedBlock", do) -> Tensor:
        """Run a block of this stage, telling its values."""
        stage: MeshStage = block.layer_input.stage
        self.told = block
        try:
            out = do()
        except BaseException as error:
            if not stage.ended_together:
                self._say((RAISED, "".join(traceback.format_exception(error))))
            raise
        finally:
            self.told = None
        self._say((END,))
        return out

    def hear(self, block: "StagedBlock") -> None:
        """Take what another stage tells of its block."""
        device = self.mesh.device_type
        points = {point.name: point for point in block.modules() if isinstance(point, MeshPoint)}
        while True:
            said = [None]
            dist.broadcast_object_list(said, group=self.group, group_src=block.home)
            what, *about = said[0]
            if what == END:
                return
            if what == RAISED:
                raise RuntimeError(f"block {block.layer_input.layer} raised on stage {block.home}, which ends the run on all:\n{about[0]}")
            name, shape, dtype = about
            value = torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(value, group=self.group, group_src=block.home)
            point = points[name]
            if what == SETTLED:
                HookPoint.settle(point, value)
            elif point.live:
                point.pass_whole(value)

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
        is_told = any(point.live for point in self._points)
        if self.home == self.pipe.own:
            return self.pipe.tell(self, lambda: Block.forward(self, x, call, kv)) if is_told else super().forward(x, call, kv)
        if is_told:
            self.pipe.hear(self)
        if kv is not None:
            keep_nothing(kv, call)
        return x

    @property
    def _points(self) -> list[HookPoint]:
        if "_all_points" not in self.__dict__:
            object.__setattr__(self, "_all_points", [m for m in self.modules() if isinstance(m, HookPoint)])
        return self._all_points


class StagedBlocks(Blocks):
    pipe: Pipe

    def leave(self, streams: Tensor) -> Tensor:
        return self.pipe.to_all(streams)


def empty_out(module: nn.Module) -> None:
    """Take a block's weights away; its points stay."""
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name in held:
                held[name] = None


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
    from dataclasses import replace

    state = slot.cache.state
    tape = state.tapes[slot.number]
    slot.width = 0
    if tape.held.shape[2]:
        tapes = list(state.tapes)
        tapes[slot.number] = replace(tape, held=tape.held[..., :0], shared=None if tape.shared is None else tape.shared[..., :0])
        slot.cache.state = replace(state, tapes=tuple(tapes))


def probes(model: nn.Module) -> list[Probed]:
    return [module for module in model.modules() if isinstance(module, Probed)]
