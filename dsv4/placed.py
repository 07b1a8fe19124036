"""A placement applied to a model: which tensors are loaded and where to, which are read where they are used, and what happens at the
borders between blocks. Forward knows of none of it: banks and streamed modules stand in the places of resident ones, and a block on
another device gets its arguments moved by a hook of its own.
"""

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial

import psutil
import torch
from torch import Tensor, nn

from dsv4.call import Call
from dsv4.convert.pages import Pages
from dsv4.convert.plan import Source
from dsv4.convert.reader import Checkpoint
from dsv4.experts import Experts
from dsv4.hot import Hot
from dsv4.lookahead import Lookahead, can_guess
from dsv4.offload import LEAVES, DiskExperts, HostExperts, OffloadedExperts
from dsv4.placement import (
    BANK,
    DISK,
    EXPERTS,
    FREE_SHARE,
    HOST,
    STRATEGIES,
    Placement,
    Room,
    Unit,
    arrange,
    as_bytes,
    explicit,
    finish,
    units_of,
)
from dsv4.router import HashRouter
from dsv4.shelves import BankPages, Read, Shelf, Streamed, differentiable, host_read, page_reads, stream

# Experts of a hash block that are asked for from the ids, at most; 0.3 ms of a PCIe 5 link each in V4-Flash.
HASH_AHEAD = 64


class Placed:
    """A model's placement: `main` device, `devices` of the blocks, `hot` copies by device, `lookahead` (None: nothing is guessed)."""

    def __init__(self, placement: Placement, checkpoint: Checkpoint, dtype: torch.dtype, native: bool, budget: int | None):
        self.placement, self.checkpoint, self.dtype, self.native = placement, checkpoint, dtype, native
        self.main = torch.device(placement.main)
        blocks = [unit.name for unit in placement.units if unit.name.startswith("layers.")]
        self.devices = tuple(torch.device(placement.runs_on(name)) for name in blocks)
        self.pages = Pages(checkpoint)
        offloading = {placement.runs_on(u.name) for u in placement.units if self._offloads(u)} - {HOST}
        if budget is not None and not offloading:
            raise ValueError(
                f"hot_experts={budget}: nothing is copied in this placement (on the CPU the pages of the files are the cache); leave it out"
            )
        given = {device: placement.hot.get(device, 0) if budget is None else budget for device in offloading}
        self.hot = {torch.device(device): Hot(torch.device(device), budget) for device, budget in given.items()}
        self.shelves: dict[str, Shelf] = {}
        self.lookahead: Lookahead | None = Lookahead()
        self._calls: dict[torch.device, Call] = {}
        self._call = lambda: None

    def _offloads(self, unit: Unit) -> bool:
        return not self.placement.is_resident(unit.name) or bool(unit.experts and self.placement.bank(unit.name) != "resident")

    # Loading.

    def place(self, name: str) -> str:
        """Where the loader puts the tensor of a name; "disk" leaves it in the files."""
        unit = unit_of(name)
        if BANK in name and self.placement.bank(unit) != "resident":
            return self.placement.bank(unit)
        return self.placement.at[unit]

    def reads(self, name: str) -> bool:
        return self.place(name) != DISK

    def apply(self, model: nn.Module) -> None:
        """After what is to be loaded has been loaded: put banks and shelves in place, and the hooks."""
        sources = self.checkpoint.sources
        for path, module in list(model.named_modules()):
            held = [leaf for leaf in (*module._parameters, *module._buffers) if f"{path}.{leaf}" in sources]
            if not held:
                continue
            unit = unit_of(path)
            if isinstance(module, Experts):
                if self.placement.bank(unit) != "resident":
                    model.set_submodule(path, self._bank(path, module, unit))
            elif not self.placement.is_resident(unit):
                stream(module, path, self._reads_of(path, module, held), self._shelf(unit))
        self._hook(model)
        model.placed = self

    def _bank(self, path: str, module: Experts, unit: str) -> OffloadedExperts:
        device = torch.device(self.placement.runs_on(unit))
        hot = self.hot.get(device)
        if self.placement.bank(unit) == HOST:
            return HostExperts(module, device, hot, None)
        sources = {leaf: self.checkpoint.sources[f"{path}.{leaf}"] for leaf in LEAVES}
        kept = self.native and self.checkpoint.formats[path] != "dense"
        return DiskExperts(module, device, hot, None if kept else self.dtype, BankPages(self.pages, sources))

    def _shelf(self, unit: str) -> Shelf:
        if unit not in self.shelves:
            device = torch.device(self.placement.runs_on(unit))
            self.shelves[unit] = Shelf(device, self.hot.get(device))
        return self.shelves[unit]

    def _reads_of(self, path: str, module: nn.Module, held: list[str]) -> Mapping[str, Read]:
        found: dict[str, Read] = {}
        for leaf in held:
            source = self.checkpoint.sources[f"{path}.{leaf}"]
            if self.place(source.name) == DISK:
                found |= page_reads(self.pages, source, self.dtype, native=self.native)
                continue
            for name in (leaf, f"{leaf}_scale_inv"):
                tensor = module._parameters.get(name, module._buffers.get(name))
                if tensor is not None:
                    found[name] = host_read(tensor.detach())
        return found

    # Running.

    def _hook(self, model: nn.Module) -> None:
        ordered = [f"layers.{i}" for i in range(len(self.devices))]
        streamed = [name for name in ordered if name in self.shelves]
        after = dict(zip(streamed, streamed[1:] + streamed[:1], strict=True)) if len(streamed) > 1 else {}
        crosses = any(device != self.main for device in self.devices)
        for block in model.layers:
            if isinstance(block.mlp.experts, OffloadedExperts):
                block.mlp.experts.lookahead = self.lookahead
        for i, name in enumerate(ordered):
            if self.shelves or self.hot or crosses or self._hash_banks(model):
                shelf, following = self.shelves.get(name), self.shelves.get(after.get(name, ""))
                block = model.get_submodule(name)
                block.register_forward_pre_hook(partial(self._enter, model, self.devices[i], shelf, following))
                block.register_forward_hook(partial(self._leave, model, shelf), always_call=True)
        for name in self.shelves.keys() - set(ordered):
            shelf, module = self.shelves[name], model.get_submodule(name)
            module.register_forward_pre_hook(lambda module, args, shelf=shelf: shelf.open())
            module.register_forward_hook(lambda module, args, out, shelf=shelf: shelf.close(), always_call=True)

    def _enter(self, model, device: torch.device, shelf: Shelf | None, following: Shelf | None, block, args):
        call = next((arg for arg in args if isinstance(arg, Call)), None)
        if call is not None and self._call() is not call:
            self._call, self._calls = weakref.ref(call), {}
            self._begin(model, call)
        if shelf is not None:
            shelf.open()
        if following is not None:
            following.ahead()
        # Hooks at the block's points ask the stage where their tokens are.
        if model.stage.call is call and call is not None:
            model.stage.call = self._on(call, device)
        moved = [self._on(arg, device) if isinstance(arg, Call) else arg.to(device) if isinstance(arg, Tensor) else arg for arg in args]
        if self.lookahead is not None and can_guess(block):
            self.lookahead.guess(block, next(arg for arg in moved if isinstance(arg, Tensor)))
        # Where no weight of a block requires a gradient the graph begins at its input, so that its values have gradients.
        return tuple(differentiable(arg) if shelf is not None and isinstance(arg, Tensor) else arg for arg in moved)

    def _leave(self, model, shelf: Shelf | None, block, args, out) -> None:
        if shelf is not None:
            shelf.close()
        call = self._call()
        if call is not None and any(model.stage.call is copy for copy in self._calls.values()):
            model.stage.call = call

    def _on(self, call: Call, device: torch.device) -> Call:
        """The call on a device, moved once a forward."""
        if device == self.main:
            return call
        if device not in self._calls:
            self._calls[device] = moved(call, device)
        return self._calls[device]

    def _begin(self, model, call: Call) -> None:
        """A forward begins: its ids say which experts the hash blocks will use."""
        for hot in self.hot.values():
            hot.adopt()
        if call.input_ids is None:
            return
        for bank, router in self._hash_banks(model):
            table = router.tid2eid
            experts = table[call.input_ids[call.valid].to(table.device)].unique()[:HASH_AHEAD].tolist()
            for expert in experts:
                for leaf in LEAVES:
                    bank.ahead(leaf, expert)

    def _hash_banks(self, model) -> list[tuple[OffloadedExperts, HashRouter]]:
        blocks = [block.mlp for block in model.layers if isinstance(block.mlp.experts, OffloadedExperts)]
        return [(mlp.experts, mlp.router) for mlp in blocks if isinstance(mlp.router, HashRouter)]

    # Saving.

    @staticmethod
    def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the state_dict by name, those of one module at a time, wherever they are."""
        for path, module in model.named_modules():
            if isinstance(module, DiskExperts):
                for leaf in LEAVES:
                    yield from bank_tensors(f"{path}.{leaf}", module, leaf)
                continue
            if isinstance(module, Streamed):
                yield from ((name, module.shelf.reads[name].read()) for name in module.shelved.values())
            for leaf, tensor in {**module._parameters, **module._buffers}.items():
                if tensor is not None and leaf not in module._non_persistent_buffers_set:
                    yield f"{path}.{leaf}", tensor.detach()


def unit_of(path: str) -> str:
    parts = path.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


def moved(value, device: torch.device):
    """Every tensor of a dataclass, mapping or tuple on `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if is_dataclass(value):
        return replace(value, **{field.name: moved(getattr(value, field.name), device) for field in fields(value) if field.init})
    if isinstance(value, Mapping):
        return {key: moved(item, device) for key, item in value.items()}
    return tuple(moved(item, device) for item in value) if type(value) is tuple else value


def bank_tensors(name: str, bank: DiskExperts, leaf: str) -> Iterator[tuple[str, Tensor]]:
    """One stack of a bank on disk by name, with its scales where it has any; in memory of its own."""
    if bank.form == "dense":
        yield name, torch.stack([bank.matrix(leaf, e, bank.kept_dtype) for e in range(bank.num_experts)]).cpu()
        return
    stored = bank.compact(range(bank.num_experts), torch.float32)
    codes, scale = (stored.first, stored.first_scale) if leaf == LEAVES[0] else (stored.second, stored.second_scale)
    yield name, codes.cpu()
    yield f"{name}_scale_inv", scale.cpu()


# From what a user asks for to a placement.


def decide(
    checkpoint: Checkpoint, layers: int, dtype, native: bool, *, device, device_map, max_memory, experts, hot_experts
) -> Placed | None:
    """The placement of the first `layers` blocks; None where everything is resident on one device and nothing else was asked for.

    Raises:
        ValueError: arguments that contradict each other, unknown devices or modules, memory that is too small.
    """
    if experts not in EXPERTS:
        raise ValueError(f"experts={experts!r}: expected one of {', '.join(map(repr, EXPERTS))}")
    if device is not None and device_map is not None:
        raise ValueError(f"device={device!r} and device_map={device_map!r}: give one of them")
    if max_memory is not None and device_map not in STRATEGIES:
        raise ValueError(f'max_memory={max_memory!r} is for device_map="auto" or "balanced", got device_map={device_map!r}')
    if device_map is None and experts == "resident":
        if hot_experts is not None:
            raise ValueError(f'hot_experts={hot_experts!r} is for experts="host" or "disk", or for a device_map that leaves blocks there')
        return None
    budget = None if hot_experts is None else as_bytes(hot_experts, "hot_experts")
    units = units_of(loaded_bytes(checkpoint, layers, dtype, native), checkpoint.config.n_routed_experts)
    if isinstance(device_map, str):
        if device_map not in STRATEGIES:
            raise ValueError(
                f'device_map={device_map!r}: expected "auto", "balanced", or a map {{module: device}}; one device for all is '
                f"device={device_map!r}"
            )
        gpus, host = rooms(max_memory)
        placement = arrange(units, gpus, host, experts, device_map, checkpoint.config.num_experts_per_tok)
    else:
        named = {"": "cpu" if device is None else device} if device_map is None else device_map
        if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in named):
            raise ValueError(f'device_map={device_map!r}: expected "auto", "balanced", or a map of module names to devices')
        named = {name: place_name(given) for name, given in named.items()}
        if device_map is None and named[""] == DISK:
            raise ValueError('device="disk": expected a device that computes; blocks stay in the files with device_map={"": "disk"}')
        placement = explicit(units, named, experts)
        used = {placement.runs_on(unit.name) for unit in units}
        placement = finish(units, placement.at, placement.main, experts, {}, [Room(d, free_bytes(d)) for d in sorted(used - {HOST})])
    kinds = {torch.device(placement.runs_on(unit.name)).type for unit in units}
    if len(kinds) > 1:
        raise ValueError(f"device_map computes on {' and '.join(sorted(kinds))}; expected devices of one kind")
    placed = Placed(placement, checkpoint, dtype, native, budget)
    return None if placement.is_plain and placement.main == HOST and experts == "resident" else placed


def loaded_bytes(checkpoint: Checkpoint, layers: int, dtype: torch.dtype, native: bool) -> dict[str, int]:
    """Bytes of each tensor as it is loaded, by name, of the first `layers` blocks."""
    return {source.name: _bytes(source, dtype, native) for source in checkpoint.sources.values() if layer_of(source.name) < layers}


def layer_of(name: str) -> int:
    """The block of a tensor; -1 beside the blocks."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "layers" else -1


def _bytes(source: Source, dtype: torch.dtype, native: bool) -> int:
    if native and source.format != "dense":
        return sum(piece.nbytes for piece in source.pieces)
    return torch.Size(source.spec.shape).numel() * (source.spec.dtype or dtype).itemsize


def rooms(max_memory: Mapping | None) -> tuple[list[Room], int]:
    """(GPUs with the bytes of weights each may hold, bytes of host memory), from the machine where max_memory does not say."""
    names = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if max_memory is None:
        return [Room(name, free_bytes(name)) for name in names], free_bytes(HOST)
    given = {}
    for key, amount in max_memory.items():
        name = f"cuda:{key}" if isinstance(key, int) and not isinstance(key, bool) else str(key)
        if name not in (*names, HOST):
            raise ValueError(f"max_memory names {key!r}; this machine has {', '.join((*names, HOST))}")
        given[name] = as_bytes(amount, f"max_memory[{key!r}]")
    return [Room(name, given[name]) for name in names if name in given], given.get(HOST, free_bytes(HOST))


def free_bytes(device: str) -> int:
    """What weights may take there by default."""
    free = psutil.virtual_memory().available if torch.device(device).type != "cuda" else torch.cuda.mem_get_info(device)[0]
    return int(free * FREE_SHARE)


def place_name(given) -> str:
    """A device as the maps name it: "cpu", "disk", "cuda:0". ValueError for one that is not there."""
    if given == DISK:
        return DISK
    spelled = f"cuda:{given}" if isinstance(given, int) and not isinstance(given, bool) else given
    try:
        found = torch.empty(0, device=spelled).device
    # An unknown name is a RuntimeError, another type a TypeError; a torch without CUDA asserts.
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(
            f'unknown device {given!r} ({str(error).splitlines()[0]}); expected "cpu", "disk" or a device of this machine'
        ) from error
    return str(found)
