"""Which device holds which block, from sizes alone: nothing here touches a tensor or asks the machine.

    units = units_of(official_bytes(config, "native"))
    plan = arrange(units, [Room("cuda:0", 141_000_000_000)], host=10**12, experts="resident")

Whole blocks go to the GPUs, then to host memory, then stay on disk. A block that is not on a GPU is brought there for its forward, to
the main device, which also has the embedding and the head; without GPUs the main device is the CPU.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dsv4.config import Dsv4Config
from dsv4.convert.layout import Spec, layout
from dsv4.kernels.quantize import fp4_scale_shape, fp8_scale_shape

HOST, DISK = "cpu", "disk"
EXPERTS = ("resident", "host", "disk")
STRATEGIES = ("auto", "balanced")
# What stands beside the blocks, all of it used on the main device.
OUTSIDE = ("embed_tokens", "hc_head", "norm", "lm_head")
BANK = "mlp.experts."
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
# Share of a device's free memory that weights may take unless the user says otherwise; activations need the rest.
FREE_SHARE = 0.9
# Blocks in flight to a device: the one that runs and the next.
IN_FLIGHT = 2


@dataclass(frozen=True)
class Unit:
    """What is placed as a whole: a block, or a module beside the blocks.

    Attributes:
        rest: bytes without its routed experts. experts, expert: bytes of all of these, and of one. kv: bytes of a KV cache, which are
        where the block is used.
    """

    name: str
    rest: int
    experts: int = 0
    expert: int = 0
    kv: int = 0

    @property
    def nbytes(self) -> int:
        return self.rest + self.experts


@dataclass(frozen=True)
class Room:
    """A device that computes, and the bytes of weights it may hold."""

    device: str
    nbytes: int


@dataclass(frozen=True)
class Placement:
    """Attributes:
    at: unit -> where its weights are ("cpu", "disk", or a device's name). main: where what is not on a device is used.
    experts: as asked for. staging: device -> bytes kept free there for blocks and experts in flight. hot: device -> bytes of copies
    of experts that may stay there.
    """

    units: tuple[Unit, ...]
    at: Mapping[str, str]
    main: str
    experts: str
    staging: Mapping[str, int]
    hot: Mapping[str, int]

    def runs_on(self, unit: str) -> str:
        """The device on which a unit is used."""
        return self.main if self.at[unit] in (HOST, DISK) else self.at[unit]

    def bank(self, unit: str) -> str:
        """Where a block's experts are: "resident" beside the rest on its device, "cpu" or "disk"."""
        asked = {"host": HOST, "disk": DISK}.get(self.experts)
        return asked or ("resident" if self.is_resident(unit) else self.at[unit])

    def is_resident(self, unit: str) -> bool:
        """Whether the unit's own tensors are where they are used."""
        return self.at[unit] == self.runs_on(unit)

    @property
    def held(self) -> dict[str, int]:
        """Bytes of weights by place, devices first."""
        found: dict[str, int] = {}
        for unit in self.units:
            found[self.at[unit.name]] = found.get(self.at[unit.name], 0) + unit.rest
            if unit.experts:
                bank = self.bank(unit.name)
                place = self.at[unit.name] if bank == "resident" else bank
                found[place] = found.get(place, 0) + unit.experts
        return dict(sorted(found.items(), key=lambda item: (item[0] == DISK, item[0] == HOST)))

    @property
    def cached(self) -> dict[str, int]:
        """Bytes of the KV cache by device."""
        found: dict[str, int] = {}
        for unit in self.units:
            found[self.runs_on(unit.name)] = found.get(self.runs_on(unit.name), 0) + unit.kv
        return found

    @property
    def is_plain(self) -> bool:
        """Whether everything is on the main device."""
        return set(self.held) == {self.main}

    def lines(self) -> list[str]:
        """A line for each place: what is there, and its bytes."""
        banks = {unit.name: self.bank(unit.name) for unit in self.units if unit.experts}
        found = []
        for place, nbytes in self.held.items():
            named = [unit.name for unit in self.units if self.at[unit.name] == place]
            whole = [n for n in named if banks.get(n, "resident") in ("resident", place)]
            parts = [
                short(whole),
                _but(short([n for n in named if n not in whole]), "without experts"),
                _but(short([n for n in banks if banks[n] == place and self.at[n] != place]), "experts only"),
            ]
            extra = "".join(
                f", {size(amount[place])} for {what}"
                for amount, what in ((self.staging, "blocks in flight"), (self.hot, "hot experts"))
                if amount.get(place)
            )
            found.append(f"{place}: {'; '.join(p for p in parts if p)}: {size(nbytes)}{extra}")
        return found


def _but(names: str, what: str) -> str:
    return f"{names} ({what})" if names else ""


def short(names: Sequence[str]) -> str:
    """layers.0, layers.1, layers.2, norm -> layers 0-2, norm."""
    words: list[str] = []
    first = last = None
    for name in [*names, ""]:
        number = int(name.split(".")[1]) if name.startswith("layers.") else None
        if number is not None and last is not None and number == last + 1:
            last = number
            continue
        if first is not None:
            words.append(f"layers {first}-{last}" if last > first else f"layer {first}")
        first = last = number
        if number is None and name:
            words.append(name)
    return ", ".join(words)


def size(nbytes: int) -> str:
    """Bytes in powers of ten: 159.61 GB."""
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} B"


def as_bytes(given, what: str) -> int:
    """An int, or a string such as "80GB" or "80GiB" -> bytes. ValueError for anything else, or for a negative number."""
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B)\s*", given, re.IGNORECASE) if isinstance(given, str) else None
    if match is None:
        raise ValueError(f'{what}={given!r}: expected bytes, as an int >= 0 or like "80GB" (powers of ten) or "80GiB"')
    return int(float(match[1]) * UNITS[match[2].upper()])


def refuse_without_files(given: Mapping[str, object]) -> None:
    """ValueError for the arguments that place a checkpoint's weights, where there is none; TypeError for any other."""
    for name, value in given.items():
        if name not in ("device_map", "max_memory", "experts", "hot_experts", "layers"):
            raise TypeError(f"from_config has no argument {name!r}")
        raise ValueError(
            f"{name}={value!r}: a model made from a config has no files whose weights could be placed; write it with save_pretrained and "
            f"load that folder with from_pretrained(folder, {name}=...)"
        )


def prefix(config: Dsv4Config, layers: int | Sequence[int] | None) -> Dsv4Config:
    """The config of the first blocks: layers is their number, range(0, n) or a list of the same, or None for all.

    ValueError for anything else: what a later block reads is made by those before it.
    """
    total = config.num_hidden_layers
    if layers is None:
        return config
    is_number = isinstance(layers, int) and not isinstance(layers, bool)
    wanted = list(range(layers)) if is_number else list(layers) if isinstance(layers, Sequence) and not isinstance(layers, str) else []
    if not 1 <= len(wanted) <= total or wanted != list(range(len(wanted))):
        raise ValueError(
            f"layers={layers!r}: expected range(0, n) with 1 <= n <= {total}, blocks from the first on, since each reads the streams of "
            "those before it; of a run, start_at_layer= and stop_at_layer= choose any part"
        )
    return replace(
        config,
        num_hidden_layers=len(wanted),
        layer_types=config.layer_types[: len(wanted)],
        mlp_layer_types=config.mlp_layer_types[: len(wanted)],
    )


# Sizes.


def official_bytes(config: Dsv4Config, weights: str) -> dict[str, int]:
    """Bytes in memory of every tensor of the released files, by our name: weights "native" (codes and scales) or "bf16"."""
    return {name: _nbytes(config, spec, weights) for name, spec in layout(config).items()}


def _nbytes(config: Dsv4Config, spec: Spec, weights: str) -> int:
    if weights == "native" and spec.official in ("FP8", "FP4"):
        columns = spec.shape[-1]
        if spec.official == "FP4" and config.expert_dtype != "fp8":
            packed = (*spec.shape[:-1], columns // 2)
            return math.prod(packed) + math.prod(fp4_scale_shape(packed))
        # Gate and up have a grid of scales each; both are whole blocks in the released files.
        return math.prod(spec.shape) + math.prod(fp8_scale_shape(spec.shape))
    return math.prod(spec.shape) * (spec.dtype or torch.bfloat16).itemsize


def units_of(nbytes: Mapping[str, int], num_experts: int) -> tuple[Unit, ...]:
    """Tensor sizes by name -> what is placed, in forward order."""
    rest: dict[str, int] = {}
    experts: dict[str, int] = {}
    for name, amount in nbytes.items():
        parts = name.split(".")
        unit = ".".join(parts[:2]) if parts[0] == "layers" else parts[0]
        into = experts if BANK in name else rest
        into[unit] = into.get(unit, 0) + amount
    order = ["embed_tokens", *(u for u in rest if u.startswith("layers.")), "hc_head", "norm", "lm_head"]
    return tuple(Unit(u, rest[u], experts.get(u, 0), experts.get(u, 0) // num_experts) for u in order)


# Placing.


def arrange(units: Sequence[Unit], gpus: Sequence[Room], host: int, experts: str, strategy: str = "auto", top_k: int = 1) -> Placement:
    """Place the units by size: GPUs in order, then the host up to `host` bytes, then disk.

    strategy "auto" fills a GPU before it goes on to the next; "balanced" gives each about the same.

    Raises:
        ValueError: the main device cannot hold the embedding and the head and what is in flight; the host cannot hold the experts that
            experts="host" puts there.
    """
    main = gpus[0].device if gpus else HOST
    blocks = [unit for unit in units if unit.name not in OUTSIDE]
    head = sum(unit.nbytes for unit in units if unit.name in OUTSIDE)
    banks = sum(unit.experts for unit in blocks)
    if experts == "host":
        if banks > host:
            raise ValueError(
                f'experts="host" needs {size(banks)} of host memory for the experts of {len(blocks)} blocks, max_memory gives it '
                f'{size(host)}; give it more, or use experts="disk"'
            )
        host -= banks
    on_gpu = {unit.name: unit.kv + (unit.nbytes if experts == "resident" else unit.rest) for unit in blocks}
    rooms = list(gpus) or [Room(HOST, host)]
    moves = experts != "resident" and bool(gpus)
    # Experts in flight: those of one token, twice.
    flight = IN_FLIGHT * top_k * max(unit.expert for unit in blocks) if moves else 0
    _fits(head + flight, rooms[0], "embed_tokens, hc_head, norm and lm_head" + (" and the experts in flight" if flight else ""))
    left = [room.nbytes - flight for room in rooms]
    left[0] -= head
    at = dict.fromkeys(OUTSIDE, main)
    placed = _evenly(on_gpu, left, head) if strategy == "balanced" else _fill(on_gpu, left)
    staging = {room.device: flight for room in rooms if flight}
    # Blocks that are brought over are all used on the main device, which needs room for two of them and for their KV caches.
    largest = max(unit.rest for unit in blocks) + (0 if flight else top_k * max(unit.expert for unit in blocks))
    reserve = 0
    while brought := [unit for unit in blocks if unit.name not in placed]:
        needed = sum(unit.kv for unit in brought) + (IN_FLIGHT * largest if gpus else 0)
        if needed <= reserve:
            break
        _fits(head + flight + needed, rooms[0], "embedding, head and the blocks in flight")
        left[0], reserve = left[0] - (needed - reserve), needed
        placed = _fill(on_gpu, left)
    if brought and gpus:
        staging[main] = flight + IN_FLIGHT * largest
    at |= {name: rooms[number].device for name, number in placed.items()}
    for unit in blocks:
        if unit.name not in at:
            amount = on_gpu[unit.name] - unit.kv
            fits = bool(gpus) and amount <= host
            host -= amount if fits else 0
            at[unit.name] = HOST if fits else DISK
    return finish(units, at, main, experts, staging, rooms if gpus else ())


def finish(units, at: Mapping[str, str], main: str, experts: str, staging: Mapping[str, int], rooms: Iterable[Room]) -> Placement:
    """The placement, with half of what is left on each device for hot experts."""
    plan = Placement(tuple(units), dict(at), main, experts, dict(staging), {})
    uses = {plan.runs_on(unit.name) for unit in units if unit.experts and plan.bank(unit.name) != "resident"}
    free = {
        room.device: room.nbytes - sum(amount.get(room.device, 0) for amount in (plan.held, plan.staging, plan.cached)) for room in rooms
    }
    hot = {device: max(amount // 2, 0) for device, amount in free.items() if device in uses}
    return Placement(plan.units, plan.at, main, experts, plan.staging, hot)


def _fill(amounts: Mapping[str, int], left: Sequence[int]) -> dict[str, int]:
    """Block -> number of the room it is in: in order, on to the next room when one is full; what fits in none is left out."""
    placed, room, free = {}, 0, list(left)
    for name, amount in amounts.items():
        while room < len(free) and amount > free[room]:
            room += 1
        if room == len(free):
            break
        free[room] -= amount
        placed[name] = room
    return placed


def _evenly(amounts: Mapping[str, int], left: Sequence[int], head: int) -> dict[str, int]:
    """As `_fill`, with each block in the room where its middle falls if all rooms were equal parts of the whole; the first has `head`
    already. Where that is too much for a room, as `_fill`.
    """
    part = (sum(amounts.values()) + head) / len(left)
    placed, before, used = {}, head, [0] * len(left)
    for name, amount in amounts.items():
        placed[name] = min(int((before + amount / 2) // part), len(left) - 1)
        used[placed[name]] += amount
        before += amount
    return placed if all(u <= room for u, room in zip(used, left, strict=True)) else _fill(amounts, left)


def _fits(amount: int, room: Room, what: str) -> None:
    if amount > room.nbytes:
        raise ValueError(
            f"max_memory: {room.device} may hold {size(room.nbytes)}, and {what} alone take {size(amount)} ({amount} bytes) there; give it "
            'more, load with weights="native" or fewer layers=, or name the places yourself in device_map={...: "disk"}'
        )


def explicit(units: Sequence[Unit], named: Mapping[str, str], experts: str) -> Placement:
    """A placement as a map names it: unit, "layers" (all blocks) or "" (all) -> "cpu", "disk" or a device; the longest name wins.

    Raises:
        ValueError: a name that is no unit, units that the map misses, an embedding and head on two devices.
    """
    known = [unit.name for unit in units]
    for name in named:
        if name not in known and name not in ("", "layers"):
            raise ValueError(_unknown(name, known))
    at, missed = {}, []
    for name in known:
        keys = [key for key in (name, "layers" if name.startswith("layers.") else name, "") if key in named]
        if keys:
            at[name] = named[keys[0]]
        else:
            missed.append(name)
    if missed:
        raise ValueError(f'device_map misses {short(missed)}; name each, or all blocks as "layers", or everything else as ""')
    devices = list(dict.fromkeys(place for place in at.values() if place not in (HOST, DISK)))
    outside = list(dict.fromkeys(at[name] for name in OUTSIDE if at[name] not in (HOST, DISK)))
    if len(outside) > 1:
        raise ValueError(
            f"device_map puts embed_tokens, hc_head, norm and lm_head on {' and '.join(outside)}; expected one device for the four (logits "
            "come out where ids go in); the blocks may lie anywhere"
        )
    return finish(units, at, (outside or devices or [HOST])[0], experts, {}, ())


def _unknown(name: str, known: Sequence[str]) -> str:
    last = known[-4].partition(".")[2] if len(known) > len(OUTSIDE) else "?"
    units = f'{", ".join(OUTSIDE)}, layers.0 to layers.{last}, "layers" (all blocks) and "" (the rest)'
    bare = name.removeprefix("model.")
    if bare in known:
        return f"device_map: unknown module {name!r}; did you mean {bare!r}? Expected {units}"
    if bare.startswith("layers.") and ".".join(bare.split(".")[:2]) in known:
        whole = ".".join(bare.split(".")[:2])
        return f"device_map: {name!r} is part of a block; blocks are placed whole: name {whole!r}, and place experts with experts="
    return f"device_map: unknown module {name!r}; expected {units}"
