"""Pretended devices: tensors that say they are on `cpu:1`, `cpu:2`, ... and hold their numbers on the CPU.

    with pretended_devices():
        model = Dsv4.from_pretrained(folder, device_map={"": "cpu:1", "layers.1": "cpu:2"})
        logits = model(ids)                  # an operation that mixes devices raises, as it would on real ones

An operation over tensors of two devices raises RuntimeError; exceptions are those that PyTorch makes for real devices: copies from one
to another, numbers without axes from the CPU, and indices that lie on the CPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

CPU = torch.device("cpu")
# Operations that take tensors of several devices.
CROSSING = ("aten::_to_copy", "aten::copy_", "aten::copy")
INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index")
LAZY = {"aten::_conj": torch.conj_physical, "aten::_neg_view": torch.neg}


class Pretended(Tensor):
    """A tensor of `held` that says it is on `device`."""

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device):
        return Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=device
        )

    def __init__(self, held: Tensor, device: torch.device):
        self.held = held

    def tolist(self):
        return self.held.tolist()

    def untyped_storage(self):
        return self.held.untyped_storage()

    def __repr__(self) -> str:
        return f"Pretended({self.device}, {self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        return run(op, args, kwargs or {})


class PretendedDevices(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return run(op, args, kwargs or {})


class _FromData(TorchFunctionMode):
    """`torch.tensor` fills a tensor on the CPU and moves it where no dispatcher sees it."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (torch.tensor, torch.as_tensor) and is_pretended(torch.device(kwargs.get("device") or "cpu")):
            return function(*args, **kwargs | {"device": CPU}).to(kwargs["device"])
        return function(*args, **kwargs)


@contextmanager
def pretended_devices() -> Iterator[None]:
    with _FromData(), PretendedDevices():
        yield


def is_pretended(device: torch.device) -> bool:
    return device.type == "cpu" and device.index is not None


def run(op, args, kwargs):
    given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    name = op._schema.name
    asked = kwargs.get("device")
    found = {t.device for t in given if isinstance(t, Pretended) or t.dim() > 0}
    if name in INDEXING:
        found = {given[0].device} if isinstance(given[0], Pretended) else found
    if len(found) > 1 and name not in CROSSING:
        raise RuntimeError(f"{name}: tensors on {' and '.join(sorted(map(str, found)))}: {[(str(t.device), list(t.shape)) for t in given]}")
    if asked is not None:
        device = torch.device(asked)
        kwargs = {**kwargs, "device": CPU if is_pretended(device) else device}
    elif name == "aten::copy_":
        device = args[0].device
    else:
        device = next(iter(found), CPU)
    held_args, held_kwargs = tree_map_only(Pretended, lambda t: t.held, (args, kwargs))
    # Lazy conjugation and negation are resolved above this level, by marks that a pretended tensor does not carry.
    out = LAZY.get(name, op)(*held_args, **held_kwargs)
    originals = {id(t.held): t for t in given if isinstance(t, Pretended)}

    def wrap(t: Tensor) -> Tensor:
        if id(t) in originals:
            return originals[id(t)]
        return Pretended(t, device) if is_pretended(device) else t

    return tree_map_only(Tensor, wrap, out)
