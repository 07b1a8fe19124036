"""Spreading a model over the processes of a DeviceMesh, by the rows of `dsv4.parallel_plan`.

    mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("pp", "tp"))
    model = Dsv4.from_pretrained(folder, mesh=mesh)              # each process reads its part of the files
    model = parallelize(Dsv4.from_config(config), mesh)          # or cuts it out of a model in memory

Every process then runs the same script and gets the same tensors. A dimension of one process changes nothing.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dsv4.hooks import HookPoint
from dsv4.mesh_stage import MeshPoint, MeshStage, take_part
from dsv4.parallel_plan import CUTS, PARTS, Cut, Dims, check, splits, stage_of
from dsv4.pipeline import Pipe, StagedBlock, StagedBlocks, empty_out
from dsv4.sharded import split


@dataclass(frozen=True)
class Spread:
    """What this process holds of a model.

    Attributes:
        layers: its blocks. cuts: state-dict name -> the part held; whole tensors are not listed.
    """

    dims: Dims
    layers: tuple[int, ...]
    cuts: dict[str, Cut]


def parallelize(model, mesh: DeviceMesh):
    """Spread a model over a mesh, in place: what this process does not hold is dropped. Returns the model.

    Args:
        mesh: dimensions named "pp" (blocks), "ep" (experts), "tp" (all that is split within a block, the experts too), in that order,
            any of them left out. docs/parallel.md says what is split how.
    Raises:
        ValueError: a mesh whose sizes do not divide the model's, naming those that do; a model that is spread already.
    """
    spread(model, mesh)
    return model


def spread(model, mesh: DeviceMesh) -> Spread:
    """As `parallelize`; returns what this process holds. A model without memory (on the meta device) stays so, cut."""
    if model.spread is not None:
        raise ValueError("the model is spread over a mesh already; build it anew for another")
    dims = Dims.of(mesh)
    check(model, model.config, dims)
    layers = tuple(range(model.num_layers))
    cuts: dict[str, Cut] = {}
    if dims.world.size() > 1:
        _share_timeout(mesh, dims)
        _put_on_points(model, dims)
        if dims.pp is not None:
            layers = _deal_blocks(model, dims.pp)
        for part in splits(model, dims):
            cuts |= _cut(model, part.path, part.how, part.mesh)
    model.spread = Spread(dims, layers, cuts)
    return model.spread


def _cut(model, path: str, how: str, mesh: DeviceMesh) -> dict[str, Cut]:
    module = model.get_submodule(path)
    cuts, size, rank = {}, mesh.size(), mesh.get_local_rank()
    for leaf, axis in CUTS[how].items():
        whole = module._parameters.get(leaf)
        if whole is not None:
            step = whole.shape[axis] // size
            cuts[f"{path}.{leaf}"] = Cut(axis, rank * step, (rank + 1) * step)
            part = take_part(whole.detach(), axis, mesh)
            module._parameters[leaf] = nn.Parameter(part, requires_grad=whole.requires_grad)
    split(module, how, mesh)
    return cuts


def _put_on_points(model, dims: Dims) -> None:
    """Points and stage of the kind that knows of other processes."""
    stage = model.stage
    stage.__class__ = MeshStage
    stage.world, stage.pipe, stage.live, stage.ended_together = dims.world, None, set(), False
    for point in model.modules():
        if isinstance(point, HookPoint):
            point.__class__ = MeshPoint
            axis = PARTS.get(point.leaf) if dims.tp is not None else None
            point.parts = None if axis is None else point.axes.split().index(axis)
            point.shards, point.home = dims.tp, 0
            point._changed()


def _deal_blocks(model, mesh: DeviceMesh) -> tuple[int, ...]:
    pipe = model.stage.pipe = Pipe(mesh)
    model.layers.__class__ = StagedBlocks
    model.layers.pipe = pipe
    mine, per_stage = [], model.stage.world.size() // mesh.size()
    for i, block in enumerate(model.layers):
        block.__class__ = StagedBlock
        block.pipe, block.home = pipe, stage_of(i, model.num_layers, mesh.size())
        for point in block.modules():
            if isinstance(point, HookPoint):
                point.home = block.home * per_stage
        if block.home == pipe.own:
            mine.append(i)
        else:
            empty_out(block, f"block {i}, which stage {block.home} holds")
    return tuple(mine)


def _share_timeout(mesh: DeviceMesh, dims: Dims) -> None:
    """The timeout that init_process_group was given holds for the mesh's own groups too, which are made with the default."""
    options = getattr(dist.group.WORLD._get_backend(torch.device(mesh.device_type)), "options", None)
    for inner in (dims.world, dims.pp, dims.ep, dims.tp):
        # A backend without options is one that talks to nobody.
        if inner is not None and options is not None:
            dist.distributed_c10d._set_pg_timeout(options._timeout, inner.get_group())
