"""The ways between a whole value, the same on every process of a group, and the parts that each process holds of it.

    enter    whole -> read by every process for its part       backward: the parts' gradients are added up
    reduce   a summand on each process -> their sum            backward: the gradient as it is
    gather   parts along an axis -> the whole                  backward: each process takes its part
    scatter  the whole -> each process's part                  backward: parts are gathered
    deliver  what one process has -> the whole                 backward: to that process
    cut      the whole -> each process's slice                 backward: slices are joined
    join     slices -> the whole                               backward: each process takes its slice
    send     rows for each process -> the rows from each       backward: gradients go back where the rows came from

Parts are of equal size; slices are runs of rows, the last ones shorter or empty.
A whole value has a whole gradient, equal on every process: that of a loss which each process computes for itself. So nothing is scaled
by the number of processes. All but `send` is DTensor's redistribution over a DeviceMesh of one dimension. Gradients of gradients are
refused.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.functional import pad

from dsv4.kernels.numeric import wide
from dsv4.traffic import slice_size


def enter(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """A whole value, about to be read by every process for its own part."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return _once(_as(x, mesh, Replicate()).to_local(grad_placements=[Partial()]))


def reduce(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of what the processes hold; added up in float32 and rounded once."""
    if x.numel() == 0:
        return x
    return _to(_as(wide(x), mesh, Partial()), Replicate()).to(x.dtype)


def gather(x: Tensor, axis: int, mesh: DeviceMesh) -> Tensor:
    """Parts of equal size, in the order of the processes -> the whole."""
    axis = axis % x.dim()
    if x.numel() == 0:
        return torch.cat([x] * mesh.size(), dim=axis)
    return _to(_as(x.contiguous(), mesh, Shard(axis)), Replicate())


def scatter(x: Tensor, axis: int, mesh: DeviceMesh) -> Tensor:
    """The whole -> this process's part."""
    axis = axis % x.dim()
    if x.numel() == 0:
        return part_of(x, axis, mesh)
    return _to(_as(x, mesh, Replicate()), Shard(axis))


def deliver(x: Tensor, holder: int, mesh: DeviceMesh) -> Tensor:
    """The whole value that one process has -> every process; the others give a tensor of its shape."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        x = x.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(x, group=mesh.get_group(), group_src=holder)
        return x
    mine = x if mesh.get_local_rank() == holder else x.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), 0.0)
    return _to(_as(mine, mesh, Partial()), Replicate())


def cut(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The whole [n ...] -> this process's slice of its rows."""
    size = slice_size(len(x), mesh.size())
    first = min(mesh.get_local_rank() * size, len(x))
    if torch.is_grad_enabled() and x.requires_grad:
        return scatter(_padded(x, size * mesh.size()), 0, mesh)[: min(size, len(x) - first)]
    return x[first : first + size]


def join(x: Tensor, rows: int, mesh: DeviceMesh) -> Tensor:
    """Slices, as `cut` makes them -> the whole [rows ...]."""
    return gather(_padded(x, slice_size(rows, mesh.size())), 0, mesh)[:rows]


def send(x: Tensor, there: list[int], here: list[int], mesh: DeviceMesh) -> Tensor:
    """Rows [n ...] in the order of the processes they go to, there[r] of them to process r -> rows in the order of those they come from,
    here[r] from process r.

    A process that has no rows to send, or gets none, takes part.
    """
    return _once(wait_tensor(all_to_all_single_autograd(x.contiguous(), here, there, mesh)))


def send_counts(counts: Tensor, mesh: DeviceMesh) -> Tensor:
    """[processes ...] int64, row r for process r -> row r from process r."""
    return wait_tensor(all_to_all_single(counts.contiguous(), None, None, mesh))


def part_of(x: Tensor, axis: int, mesh: DeviceMesh) -> Tensor:
    """This process's part of a tensor, as a view; no gradient passes between processes."""
    size = x.shape[axis] // mesh.size()
    return x.narrow(axis, mesh.get_local_rank() * size, size)


def embedding(ids: Tensor, rows: Tensor, mesh: DeviceMesh) -> Tensor:
    """ids [...] -> [... width], of a table whose rows [vocab / processes, width] are dealt out in order."""
    found = torch.nn.functional.embedding(_as(ids, mesh, Replicate()), _as(rows, mesh, Shard(0)))
    return _to(found, Replicate())


def _padded(x: Tensor, rows: int) -> Tensor:
    return x if len(x) == rows else pad(x, (0, 0) * (x.dim() - 1) + (0, rows - len(x)))


def _as(x: Tensor, mesh: DeviceMesh, placement) -> DTensor:
    return DTensor.from_local(x, mesh, [placement], run_check=False)


def _to(x: DTensor, placement) -> Tensor:
    return _once(x.redistribute(placements=[placement]).to_local())


def _once(x: Tensor) -> Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        x.register_hook(_refuse_twice)
    return x


def _refuse_twice(grad: Tensor) -> None:
    # The way back is written for gradients that are values, not for those that are differentiated again.
    if torch.is_grad_enabled():
        raise ValueError("gradients of gradients (create_graph=True) do not pass between processes; use a model on one process")
