"""Weights that a module does not hold: its tensors are read where they are used, from the host's memory or the checkpoint's files.

    stream(module, reads, shelf)     # module.weight goes on working, and belongs to the shelf

A shelf serves one block (or one module beside the blocks). While it is open, which is for the length of that forward, it keeps what
it brought; outside, every look at a tensor reads it again. Tensors given out collect no gradient and may be the very pages of a file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from dsv4.convert.pages import Pages
from dsv4.convert.plan import Source
from dsv4.hot import Hot
from dsv4.offload import Part, aligned, refuse_state

DISK, HOST = "disk", "cpu"


@dataclass(frozen=True)
class Read:
    """One tensor of a module: how it is read, and the pieces of the files behind it."""

    read: Callable[[], Tensor]
    where: str
    ahead: Callable[[], None] | None = None


class Shelf:
    """The tensors of one block that are read where they are used, as they are needed on `device`."""

    def __init__(self, device: torch.device, hot: Hot | None):
        self.device, self.hot = device, hot
        self.reads: dict[str, Read] = {}
        self._brought: dict[str, Tensor] = {}
        self._is_open = False

    def get(self, name: str) -> Tensor:
        if name in self._brought:
            return self._given(self._brought[name])
        read = self.reads[name].read
        value = aligned(read()) if self.hot is None else self.hot.take((id(self), name), lambda: [read()])[0]
        if self._is_open:
            self._brought[name] = value
        return self._given(value)

    def _given(self, value: Tensor) -> Tensor:
        """Vectors take part in gradients, at no cost: a sink is a value of the attention, and has one."""
        return differentiable(value) if value.dim() == 1 and value.is_floating_point() else value

    def open(self) -> None:
        self._is_open = True

    def close(self) -> None:
        self._is_open = False
        self._brought.clear()

    def ahead(self) -> None:
        """This block is next."""
        for name, tensor in self.reads.items():
            if self.hot is not None:
                self.hot.ahead((id(self), name), lambda read=tensor.read: [read()])
            elif tensor.ahead is not None:
                tensor.ahead()


class Streamed:
    """Mixed into the class of a module whose tensors a shelf has."""

    def __getattr__(self, name: str):
        shelved = self.__dict__.get("shelved", {})
        return self.shelf.get(shelved[name]) if name in shelved else super().__getattr__(name)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        for leaf, name in self.shelved.items():
            read = self.shelf.reads[name]
            if read.where == DISK:
                raise refuse_state(prefix)
            destination[prefix + leaf] = read.read()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        raise refuse_state(prefix)

    def _apply(self, fn, recurse=True):
        # Its tensors are not the module's to move.
        return self


class StreamedEmbedding(Streamed):
    """Rows are looked up where the table lies; only they are brought over."""

    def forward(self, ids: Tensor) -> Tensor:
        table = self.shelf.reads[self.shelved["weight"]].read()
        return differentiable(nn.functional.embedding(ids.to(table.device), table).to(ids.device))


def differentiable(x: Tensor) -> Tensor:
    """A graph begins at x where gradients are recorded and none has begun."""
    records = torch.is_grad_enabled() and not x.requires_grad and not x.is_inference()
    return x.detach().requires_grad_() if records else x


def stream(module: nn.Module, path: str, reads: Mapping[str, Read], shelf: Shelf) -> None:
    """Give the tensors of a module to the shelf. reads: attribute -> how it is read."""
    mixin = StreamedEmbedding if isinstance(module, nn.Embedding) else Streamed
    for leaf in reads:
        (module._buffers if leaf in module._buffers else module._parameters).pop(leaf)
    shelf.reads |= {f"{path}.{leaf}": read for leaf, read in reads.items()}
    kind = type(module)
    module.__class__ = type(kind.__name__, (mixin, kind), {})
    object.__setattr__(module, "shelf", shelf)
    object.__setattr__(module, "shelved", {leaf: f"{path}.{leaf}" for leaf in reads})


def page_reads(pages: Pages, source: Source, dtype: torch.dtype, *, native: bool) -> dict[str, Read]:
    """attribute -> Read, for one tensor of the files and its scales where they are kept as stored."""
    leaf = source.name.rpartition(".")[2]
    ahead = partial(pages.ahead, source.pieces)
    if native and source.format != "dense":
        both = (partial(_code, pages, source, i) for i in range(2))
        return {name: Read(read, DISK, ahead) for name, read in zip((leaf, f"{leaf}_scale_inv"), both, strict=True)}
    return {leaf: Read(partial(pages.values, source, dtype), DISK, ahead)}


def host_read(tensor: Tensor) -> Read:
    return Read(partial(_same, tensor), HOST)


def _code(pages: Pages, source: Source, i: int) -> Tensor:
    return pages.codes(source)[i]


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class BankPages:
    """The home of a `DiskExperts`. sources: leaf -> where its matrices are."""

    pages: Pages
    sources: Mapping[str, Source]

    def parts(self, leaf: str, expert: int) -> list[Part]:
        return self.pages.expert(self.sources[leaf], expert)

    def ahead(self, leaf: str, expert: int) -> None:
        self.pages.expert_ahead(self.sources[leaf], expert)

    def check(self, leaf: str, expert: int, parts: list[Part], decoded: Tensor) -> None:
        self.pages.check_decoded(self.sources[leaf], expert, parts, decoded)
