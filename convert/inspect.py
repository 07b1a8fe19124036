"""What a checkpoint folder holds, from config.json and headers: what `dsv4 inspect` prints."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from dsv4.config import Dsv4Config
from dsv4.convert import names
from dsv4.convert.header import StoredTensor
from dsv4.convert.layout import BUFFERS
from dsv4.convert.names import Scheme
from dsv4.convert.plan import Format, Source
from dsv4.convert.reader import Checkpoint, open_checkpoint

# By which tensor the two kinds of draft layers under the one name mtp.0 are told apart.
DRAFT_KINDS = (("e_proj.weight", "plain MTP"), ("main_proj.weight", "DSpark"))
_DRAFT = re.compile(r"(?:model\.)?mtp\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Amount:
    """A number of tensors and the bytes they take in the files."""

    tensors: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.tensors:,} tensors, {size(self.nbytes)}"


@dataclass(frozen=True)
class Report:
    """The findings; `str` lays them out.

    Attributes:
        file_bytes: of the shards, headers included; `stored` counts the tensors alone.
        dtypes: by stored dtype.
        modules: how many linear maps and expert banks of each name are stored in which format.
        blocks: runs of equal blocks, as (first, last, attention, mlp).
        memory: bytes of the model in memory, codes kept ("native") or decoded.
        offloaded: of "native" and "bfloat16", bytes without the routed experts, of these, and of those that one token uses in all blocks.
        problems: what `Checkpoint.check` raises.
    """

    folder: Path
    config: Dsv4Config
    scheme: Scheme
    num_files: int
    file_bytes: int
    stored: Amount
    dtypes: dict[str, Amount]
    loaded: Amount
    skipped: dict[str, Amount]
    draft: str | None
    modules: dict[str, Counter[Format]]
    blocks: list[tuple[int, int, str, str]]
    parameters: int
    memory: dict[str, int]
    offloaded: dict[str, tuple[int, int, int]]
    problems: str | None

    def __str__(self) -> str:
        lines = [
            f"{self.folder}",
            f"  files      {self.num_files} ({size(self.file_bytes)}), {self.scheme} names",
            f"  tensors    {self.stored}",
            *(f"    {dtype:<8} {amount}" for dtype, amount in self.dtypes.items()),
            f"  loaded     {self.loaded}; {self.parameters:,} parameters",
            *(f"  skipped    {label}: {amount}" for label, amount in self.skipped.items()),
        ]
        if self.draft is not None:
            lines.append(f"  draft      {self.draft}")
        lines.append(f"  blocks     {self.config.num_hidden_layers}")
        for first, last, attention, mlp in self.blocks:
            span = f"{first}" if first == last else f"{first}-{last}"
            lines.append(f"    {span:<8} {attention}, {mlp}")
        lines.append("  formats")
        for module, formats in self.modules.items():
            counts = ", ".join(f"{form} x {count}" for form, count in formats.items())
            lines.append(f"    {module:<40} {counts}")
        memory = ", ".join(f"{kind} {size(nbytes)}" for kind, nbytes in self.memory.items())
        lines.append(f"  memory     {memory}")
        for kind, (rest, experts, token) in self.offloaded.items():
            lines.append(f"  offloaded  {kind} {size(rest)}, experts elsewhere {size(experts)} ({size(token)} used by a token)")
        lines.append(f"  problems   {self.problems or 'none'}")
        return "\n".join(lines)


def inspect_checkpoint(folder: str | Path, *, strict_config: bool = False) -> Report:
    """Read config.json and headers and report; reads no weights.

    Faults of the files are in the report's `problems`, not raised. Raises CheckpointError where
    there is nothing to report on (`open_checkpoint`).
    """
    checkpoint = open_checkpoint(folder, strict_config=strict_config)
    stored = [tensor for shard in checkpoint.shards for tensor in shard.tensors.values()]
    by_name = {tensor.name: tensor for tensor in stored}
    skipped = {label: _amount(by_name[name] for name in found) for label, found in checkpoint.extras.items()}
    sources = checkpoint.sources.values()
    pieces = [piece for source in sources for piece in source.pieces]
    loaded = _amount(t for piece in pieces for t in (piece.weight, piece.scale) if t is not None)
    return Report(
        folder=checkpoint.folder,
        config=checkpoint.config,
        scheme=checkpoint.scheme,
        num_files=len(checkpoint.shards),
        file_bytes=sum(shard.nbytes for shard in checkpoint.shards),
        stored=_amount(stored),
        dtypes=_by_dtype(stored),
        loaded=loaded,
        skipped=skipped,
        draft=_draft(by_name),
        modules=_modules(checkpoint),
        blocks=_blocks(checkpoint.config),
        parameters=sum(_numel(s) for s in sources if not s.name.endswith(BUFFERS)),
        memory={
            "native": sum(_native_bytes(source) for source in sources),
            "bfloat16": sum(_dense_bytes(source, torch.bfloat16) for source in sources),
            "float32": sum(_dense_bytes(source, torch.float32) for source in sources),
        },
        offloaded={
            kind: _offloaded(checkpoint, {source.name: count(source) for source in sources})
            for kind, count in (("native", _native_bytes), ("bfloat16", partial(_dense_bytes, dtype=torch.bfloat16)))
        },
        problems=str(checkpoint.problems.error(folder)) if checkpoint.problems else None,
    )


def size(nbytes: int) -> str:
    """Bytes for people: 159.61 GB (powers of ten)."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} bytes"


def _amount(tensors: Iterable[StoredTensor]) -> Amount:
    nbytes = [tensor.nbytes for tensor in tensors]
    return Amount(len(nbytes), sum(nbytes))


def _by_dtype(stored: list[StoredTensor]) -> dict[str, Amount]:
    dtypes = sorted({tensor.dtype for tensor in stored})
    return {dtype: _amount(t for t in stored if t.dtype == dtype) for dtype in dtypes}


def _draft(stored: Iterable[str]) -> str | None:
    """Kind and number of the draft stages; config.json says 1 stage where files have three."""
    found = [match for name in stored if (match := _DRAFT.fullmatch(name))]
    if not found:
        return None
    stages = len({match[1] for match in found})
    leaves = {match[2] for match in found}
    kind = next((kind for leaf, kind in DRAFT_KINDS if leaf in leaves), "unknown kind")
    return f"{kind}, {stages} {'stage' if stages == 1 else 'stages'} (not loaded)"


def _modules(checkpoint: Checkpoint) -> dict[str, Counter[Format]]:
    modules: dict[str, Counter[Format]] = {}
    for module, form in checkpoint.formats.items():
        modules.setdefault(names.without_block(module).removeprefix("layers.{layer}."), Counter())[form] += 1
    return modules


def _blocks(config: Dsv4Config) -> list[tuple[int, int, str, str]]:
    runs: list[tuple[int, int, str, str]] = []
    for layer, (attention, mlp) in enumerate(zip(config.layer_types, config.mlp_layer_types, strict=True)):
        rate = config.rate(layer)
        kind = attention if rate is None else f"{attention} (1 entry per {rate} tokens)"
        if runs and runs[-1][2:] == (kind, mlp):
            runs[-1] = (runs[-1][0], layer, kind, mlp)
        else:
            runs.append((layer, layer, kind, mlp))
    return runs


def _numel(source: Source) -> int:
    return torch.Size(source.spec.shape).numel()


def _dense_bytes(source: Source, dtype: torch.dtype) -> int:
    return _numel(source) * (source.spec.dtype or dtype).itemsize


def _offloaded(checkpoint: Checkpoint, nbytes: dict[str, int]) -> tuple[int, int, int]:
    config = checkpoint.config
    experts = sum(amount for name, amount in nbytes.items() if checkpoint.sources[name].spec.is_experts)
    return sum(nbytes.values()) - experts, experts, experts * config.num_experts_per_tok // config.n_routed_experts


def _native_bytes(source: Source) -> int:
    """Codes and scales as stored; anything else as the model holds it in bfloat16."""
    if source.format == "dense":
        return _dense_bytes(source, torch.bfloat16)
    return sum(piece.nbytes for piece in source.pieces)
