"""What a model needs on given machines: layout, bytes by device, KV cache, bytes moved by a decoding step, and the time below which it
cannot stay. All of it is arithmetic over the config; nothing is measured.

Rules of the count:
- A step reads every weight of a block but its routed experts once, the experts that its tokens hit once each (expected number, all
  experts equally likely), the head, and of the KV cache the window, the index keys, the selected entries and all heavily compressed ones.
- What is not on the device crosses the link from the host, from disk both links; of offloaded experts a share that is hot copies does not.
- Blocks run one after another. Links work at the same time at best, so that the slowest bounds the step; streams cross between devices
  on top.
- As many processes over one mesh exchange what `dsv4.traffic` counts, for the experts of one block; that is no part of the step above.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from dsv4.call import OVERLAPPING, kept_projections
from dsv4.config import Dsv4Config
from dsv4.placement import DISK, FREE_SHARE, HOST, Placement, Room, Unit, arrange, as_bytes, official_bytes, size, units_of
from dsv4.traffic import ALL_TO_ALL, GATHER, Traffic, traffic

BFLOAT16, FLOAT32 = 2, 4


@dataclass(frozen=True)
class Rates:
    """Bytes a second: memory of a GPU, memory of the host, link from the host to a GPU, disk, link between GPUs."""

    hbm: int = 4_800_000_000_000
    host: int = 300_000_000_000
    pcie: int = 55_000_000_000
    disk: int = 7_000_000_000
    nvlink: int = 450_000_000_000


@dataclass(frozen=True)
class Step:
    """One decoding step of all rows: bytes over each link. resident: read in the memory of the device that computes."""

    resident: int
    pcie: int
    disk: int
    nvlink: int


@dataclass(frozen=True)
class Scale:
    """A worked plan. seconds: the bound of a step; by link, the time of each alone. exchanged: tokens of a forward -> bytes that each GPU's
    process sends for the experts of a block, where a mesh deals them out to all GPUs.
    """

    title: str
    placement: Placement
    rooms: tuple[Room, ...]
    rows: int
    tokens: int
    step: Step
    seconds: float
    by_link: Mapping[str, float]
    rates: Rates
    link_of: Mapping[str, str]
    exchanged: Mapping[int, Traffic]

    def lines(self) -> list[str]:
        plan, total = self.placement, sum(self.placement.cached.values())
        out = [self.title, "", "layout", *(f"  {line}" for line in plan.lines()), "", "memory"]
        table = [("", "weights", "KV cache", "in flight", "hot experts", "left of the room")]
        rooms = {room.device: room.nbytes for room in self.rooms}
        for place in dict.fromkeys([*rooms, *plan.held]):
            amounts = [amount.get(place, 0) for amount in (plan.held, plan.cached, plan.staging, plan.hot)]
            left = size(rooms[place] - sum(amounts)) if place in rooms else ""
            table.append((place, *map(size, amounts), left))
        out += ["  " + line for line in aligned(table)]
        each = total / (self.rows * self.tokens)
        out.append(f"  KV cache: {size(total)} for {self.rows:,} x {self.tokens:,} tokens ({each:,.0f} bytes a token, windows included)")
        out += ["", f"a decoding step of {self.rows:,} row{'s' if self.rows > 1 else ''} behind {self.tokens:,} tokens"]
        table = []
        for name, nbytes in asdict(self.step).items():
            if nbytes:
                rate = getattr(self.rates, self.link_of[name])
                table.append((LINKS[self.link_of[name]], size(nbytes), f"at {size(rate)}/s", f"{1000 * self.by_link[name]:.2f} ms"))
        out += ["  " + line for line in aligned(table)]
        out.append(f"  at least {1000 * self.seconds:.2f} ms a step, at most {self.rows / self.seconds:,.1f} tokens/s")
        if self.exchanged:
            out += ["", f"the experts of a block over {len(self.rooms)} processes (mesh=), sent by each in a forward"]
            table = [("", GATHER, ALL_TO_ALL, "taken")]
            for count, moved in self.exchanged.items():
                table.append((f"{count:,} token{'s' if count > 1 else ''}", size(moved.gather), size(moved.all_to_all), moved.form))
            out += ["  " + line for line in aligned(table)]
        return out

    def as_dict(self) -> dict:
        plan = self.placement
        return {
            "title": self.title,
            "at": dict(plan.at),
            "experts": plan.experts,
            "weights": plan.held,
            "kv_cache": plan.cached,
            "in_flight": dict(plan.staging),
            "hot_experts": dict(plan.hot),
            "step_bytes": asdict(self.step),
            "step_seconds": self.seconds,
            "tokens_per_second": self.rows / self.seconds,
            "expert_exchange_bytes": {str(count): {**asdict(moved), "form": moved.form} for count, moved in self.exchanged.items()},
        }


# What `dsv4 plan` is given, understood.


def plan_of(
    model: str, gpus: str, host: str, *, experts: str, weights: str, strategy: str, context: str, rows: int, rates: Mapping[str, str]
) -> Scale:
    """The body of `dsv4 plan`. Raises ValueError for a spelling that means nothing, and as `scale`."""
    rooms, tokens = gpu_bytes(gpus), token_count(context)
    config, nbytes, name = described(model, weights)
    held = f"{len(rooms)} x {size(rooms[0])}" if rooms else "no GPU"
    about = f"{name}, {config.num_hidden_layers} blocks, weights {weights}: {size(sum(nbytes.values()))}"
    return scale(
        config,
        nbytes,
        rooms,
        as_bytes(host, "--host"),
        title=f"{about}; {held}. Every figure is calculated.",
        experts=experts,
        strategy=strategy,
        rows=rows,
        tokens=tokens,
        rates=Rates(**{key: max(as_bytes(rate, f"--{key}-rate"), 1) for key, rate in rates.items()}),
    )


def described(model: str, weights: str) -> tuple[Dsv4Config, dict[str, int], str]:
    """(config, bytes of each tensor, what to call it) of a preset, or of a checkpoint by its headers."""
    presets = {"flash": ("DeepSeek-V4-Flash", Dsv4Config.flash), "pro": ("DeepSeek-V4-Pro", Dsv4Config.pro)}
    if model in presets:
        name, preset = presets[model]
        return preset(), official_bytes(preset(), weights), name
    import torch

    from dsv4.convert import open_checkpoint
    from dsv4.convert.hub import fetch_headers
    from dsv4.placed import loaded_bytes

    with fetch_headers(model) as folder:
        checkpoint = open_checkpoint(folder).check()
        blocks = checkpoint.config.num_hidden_layers
        return checkpoint.config, loaded_bytes(checkpoint, blocks, torch.bfloat16, weights == "native"), model


def gpu_bytes(text: str) -> list[int]:
    """ "8x141GB" -> eight of it; "141GB" is one, "0" none."""
    match = re.fullmatch(r"(?:(\d+)x)?(.+)", text.strip())
    if text.strip() == "0" or match is None:
        return []
    return [as_bytes(match[2], "--gpus")] * int(match[1] or 1)


def token_count(text: str) -> int:
    """ "8192", "128k" (131,072), "1M" (1,048,576)."""
    match = re.fullmatch(r"(\d+)([kKmM]?)", text.strip())
    if match is None or int(match[1]) < 1:
        raise ValueError(f"--context {text}: expected a number of tokens >= 1, like 8192, 128k or 1M")
    return int(match[1]) << {"": 0, "k": 10, "m": 20}[match[2].lower()]


LINKS = {
    "hbm": "read in device memory",
    "host": "read in host memory",
    "pcie": "from the host to the devices",
    "disk": "from disk",
    "nvlink": "between devices",
}


def scale(
    config: Dsv4Config,
    nbytes: Mapping[str, int],
    gpus: Sequence[int],
    host: int,
    *,
    title: str,
    experts: str = "resident",
    strategy: str = "balanced",
    rows: int = 1,
    tokens: int = 8192,
    rates: Rates = Rates(),
) -> Scale:
    """Work out a plan.

    Args:
        nbytes: bytes in memory of each tensor, by name. gpus, host: bytes of each GPU, of host memory; weights and KV cache get nine
        tenths of a GPU. tokens: of each row, held when the step is made.
    Raises:
        ValueError: as `dsv4.placement.arrange`.
    """
    units = units_of(nbytes, config.n_routed_experts)
    units = tuple(replace(u, kv=rows * kv_bytes(config, layer_of(u), tokens)) if layer_of(u) >= 0 else u for u in units)
    rooms = [Room(f"cuda:{i}", int(amount * FREE_SHARE)) for i, amount in enumerate(gpus)]
    plan = arrange(units, rooms, host, experts, strategy, config.num_experts_per_tok)
    step = step_bytes(config, plan, rows, tokens)
    link_of = {"resident": "hbm" if gpus else "host", "pcie": "pcie", "disk": "disk", "nvlink": "nvlink"}
    by_link = {name: amount / getattr(rates, link_of[name]) for name, amount in asdict(step).items()}
    seconds = max(by_link[name] for name in ("resident", "pcie", "disk")) + by_link["nvlink"]
    shown = tuple(rooms) or (Room(HOST, host),)
    exchanged = exchanges(config, len(gpus), (rows, tokens))
    return Scale(title, plan, shown, rows, tokens, step, seconds, by_link, rates, link_of, exchanged)


def exchanges(config: Dsv4Config, processes: int, counts: Sequence[int]) -> dict[int, Traffic]:
    """Tokens of a forward -> what `dsv4.traffic` counts, in bfloat16; nothing where experts cannot be dealt out to so many processes."""
    experts = config.n_routed_experts
    if processes < 2 or experts % processes:
        return {}
    return {count: traffic(count, config.num_experts_per_tok, config.hidden_size, processes, experts, BFLOAT16) for count in counts}


def layer_of(unit: Unit) -> int:
    return int(unit.name.split(".")[1]) if unit.name.startswith("layers.") else -1


def kv_bytes(config: Dsv4Config, layer: int, tokens: int) -> int:
    """Bytes of one row of a bfloat16 KVCache(rewind=0) of one block, without its spare columns."""
    kind, rate = config.layer_types[layer], config.rate(layer)
    keys = min(tokens, config.sliding_window - 1) * config.head_dim * BFLOAT16
    if rate is None:
        return keys
    overlap = kind == OVERLAPPING
    widths = [config.head_dim, *([config.index_head_dim] if overlap else [])]
    entries = tokens // rate * sum(widths) * BFLOAT16
    columns = sum(2 * (2 if overlap else 1) * width for width in widths)
    return keys + entries + min(tokens, kept_projections(rate, overlap)) * columns * FLOAT32


def kv_read(config: Dsv4Config, layer: int, tokens: int) -> int:
    """Bytes of it that one decoding step reads."""
    kind, rate = config.layer_types[layer], config.rate(layer)
    read = min(tokens, config.sliding_window - 1) * config.head_dim * BFLOAT16
    if rate is None:
        return read
    entries = tokens // rate
    if kind != OVERLAPPING:
        return read + entries * config.head_dim * BFLOAT16
    return read + (entries * config.index_head_dim + min(entries, config.index_topk) * config.head_dim) * BFLOAT16


def experts_hit(config: Dsv4Config, rows: int) -> float:
    """Expected number of experts of a block that `rows` tokens use, all equally likely."""
    total = config.n_routed_experts
    return total * (1 - (1 - config.num_experts_per_tok / total) ** rows)


def step_bytes(config: Dsv4Config, plan: Placement, rows: int, tokens: int) -> Step:
    resident = pcie = disk = nvlink = 0.0
    on_gpu = plan.main != HOST
    # Share of a device's offloaded experts that are there as hot copies.
    banks: dict[str, int] = {}
    for unit in plan.units:
        if unit.experts and plan.bank(unit.name) != "resident":
            banks[plan.runs_on(unit.name)] = banks.get(plan.runs_on(unit.name), 0) + unit.experts
    hot = {device: min(plan.hot.get(device, 0) / total, 1.0) for device, total in banks.items()}
    before = plan.main
    for unit in plan.units:
        layer, device = layer_of(unit), plan.runs_on(unit.name)
        rest = unit.rest if unit.name != "embed_tokens" else rows * config.hidden_size * BFLOAT16
        used = experts_hit(config, rows) * unit.expert
        resident += rest + used + (rows * kv_read(config, layer, tokens) if layer >= 0 else 0)
        places = {plan.at[unit.name]: rest}
        if unit.experts and plan.bank(unit.name) != "resident":
            place = plan.bank(unit.name)
            places[place] = places.get(place, 0) + used * (1 - hot[device])
        elif unit.experts:
            places[plan.at[unit.name]] += used
        disk += places.get(DISK, 0)
        pcie += (places.get(DISK, 0) + places.get(HOST, 0)) if on_gpu else 0
        if layer >= 0 or before != device:
            nvlink += rows * config.hc_mult * config.hidden_size * BFLOAT16 * (device != before)
            before = device
    return Step(round(resident), round(pcie), round(disk), round(nvlink))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    return [
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]
