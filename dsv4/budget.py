"""What a capture will take, before anything runs."""

from collections.abc import Iterable

import psutil
import torch

from dsv4 import values
from dsv4.capture import Pos, count
from dsv4.config import Dsv4Config
from dsv4.stage import BEHIND_KEEP
from dsv4.values import VALUES

# Share of the free memory that a capture may take unless max_bytes says otherwise.
MEMORY_SHARE = 0.5
# An error lists so many values by name, and the rest by what they are.
LISTED = 64
# What stands in the names of values inside a spliced module.
SPLICED = ".splice."


def sizes(
    config: Dsv4Config,
    names: Iterable[str],
    dtype: torch.dtype,
    batch: int,
    seq: int,
    *,
    pos: Pos = None,
    past: int = 0,
    keep: int | None = None,
) -> dict[str, int]:
    """{full name: bytes} of captures. pos: as in `as_pos`. past: tokens in a KV cache. keep: logits_to_keep.

    Values inside spliced modules are left out: their sizes are known when they come.
    """
    lengths: dict[int | None, dict[str, int]] = {}
    found = {}
    for name in (name for name in names if SPLICED not in name):
        value = VALUES[name.rsplit(".", 1)[-1]]
        layer = int(name.split(".")[1]) if value.module else None
        if layer not in lengths:
            lengths[layer] = values.sizes(config, layer, batch, seq, past)
        held = keep if keep is not None and value.name in BEHIND_KEEP else seq
        found[name] = values.nbytes(value, {**lengths[layer], "s": count(pos, held)}, dtype)
    return found


def default_limit(device: torch.device) -> int | None:
    """Bytes a capture that stays on `device` may take; None where nothing is stored."""
    if device.type == "meta":
        return None
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return int(free * MEMORY_SHARE)


def check(found: dict[str, int], limit: int) -> None:
    """ValueError with the bytes of every name when they exceed the limit."""
    total = sum(found.values())
    if total <= limit:
        return
    ordered = sorted(found.items(), key=lambda item: -item[1])
    lines = [_line(size, name) for name, size in ordered[:LISTED]]
    rest: dict[str, list[int]] = {}
    for name, size in ordered[LISTED:]:
        rest.setdefault(_everywhere(name), []).append(size)
    lines += [_line(sum(each), f"{pattern} ({len(each)} more)") for pattern, each in rest.items()]
    raise ValueError(
        f"capturing {len(found)} values would take {_human(total)} ({total} bytes); max_bytes is {_human(limit)} ({limit} bytes). Name "
        "fewer, keep fewer tokens (pos=), stream to disk (to=) or raise max_bytes:\n" + "\n".join(lines)
    )


def _everywhere(name: str) -> str:
    parts = name.split(".")
    return ".".join(["layers.*", *parts[2:]]) if parts[0] == "layers" else name


def _line(size: int, name: str) -> str:
    return f"  {_human(size):>12}  {name}"


def _human(size: int) -> str:
    amount, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.1f} {unit}" if unit != "B" else f"{size} B"
