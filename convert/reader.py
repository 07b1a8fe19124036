"""A checkpoint folder, opened by its headers, checked, and read tensor by tensor.

    checkpoint = open_checkpoint(folder)         # config.json, index, headers; no data
    checkpoint.check()                           # one error with everything that does not fit
    for name, tensor in checkpoint.tensors(dtype=torch.bfloat16, native=True): ...

Data are read through the page cache (mmap), in file order, one stored tensor at a time, into memory
that belongs to the tensor that is yielded: at no time is there more than what was yielded, the
stacks being filled and one stored tensor.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor

from dsv4.config import Dsv4Config
from dsv4.convert import names
from dsv4.convert.cuts import Cut, cut_piece, cut_source, nbytes_read, part_of
from dsv4.convert.header import Shard, read_shards
from dsv4.convert.layout import INT64
from dsv4.convert.mapped import Mapped
from dsv4.convert.names import Place, Scheme
from dsv4.convert.packaging import refuse_packagings
from dsv4.convert.plan import (
    Format,
    Piece,
    Plan,
    Source,
    make_plan,
    module_of,
    part_shape,
    scale_place,
    stored_dtype,
)
from dsv4.convert.problems import CheckpointError, Problems
from dsv4.convert.tensors import (
    as_scale,
    check_codes,
    check_ids,
    check_range,
    check_scale,
    decode,
    slice_of,
)
from dsv4.kernels.quantize import fp4_scale_shape, fp8_scale_shape

CONFIG_NAME = "config.json"
# Shards mapped at a time: what was read of the others is mapped no more.
FILES_OPEN = 4
TARGET_DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)

Native = bool | Callable[[str], bool]
Progress = Callable[[int, int], None]
Cuts = Mapping[str, Cut]
NOTHING_CUT: Cuts = MappingProxyType({})


@dataclass(frozen=True)
class Checkpoint:
    """One folder: what it holds and how the model is made from it. Made by `open_checkpoint`.

    Attributes:
        scheme: naming scheme of the files.
        sources: our state_dict name -> how it is made; scales are not listed.
        formats: our module name -> "dense", "fp8" or "fp4", for linear maps and expert banks.
        extras: known tensors that are skipped, by group.
        problems: everything that does not fit; `check` raises it.
    """

    folder: Path
    config: Dsv4Config = field(repr=False)
    shards: tuple[Shard, ...] = field(repr=False)
    plan: Plan = field(repr=False)
    problems: Problems

    @property
    def scheme(self) -> Scheme:
        return self.plan.scheme

    @property
    def sources(self) -> dict[str, Source]:
        return self.plan.sources

    @property
    def formats(self) -> dict[str, Format]:
        return self.plan.formats

    @property
    def extras(self) -> dict[str, list[str]]:
        return self.plan.extras

    def check(self) -> Self:
        """Itself if all fits. Raises CheckpointError that lists every fault of the headers."""
        if self.problems:
            raise self.problems.error(self.folder)
        return self

    def summary(self) -> str:
        """One line: naming, formats, and what is skipped."""
        counts = Counter(self.formats.values())
        formats = ", ".join(f"{counts[f]} modules {f}" for f in ("dense", "fp8", "fp4") if counts[f])
        skipped = ", ".join(f"{len(found)} of {label}" for label, found in self.extras.items())
        return f"{self.scheme} names; {formats}" + (f"; skipped {skipped}" if skipped else "")

    def tensors(
        self,
        *,
        dtype: torch.dtype | None,
        native: Native = False,
        layers: Collection[int] | None = None,
        wanted: Callable[[str], bool] | None = None,
        cuts: Cuts | None = None,
        progress: Progress | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (state_dict name, tensor), in file order; the tensors own their memory.

        Args:
            dtype: of what the model computes in; parameters that are float32 in memory stay
                float32, tid2eid int64. None: as each tensor is stored, bfloat16 for what is
                dequantised.
            native: which modules keep FP8 and FP4 codes as stored: all, none, or a predicate of our
                module name (the keys of `formats`). A kept module yields its codes and, after them,
                `..._scale_inv`, bit for bit.
            layers: only these blocks, and all that is outside the blocks.
            wanted: only the tensors of these names (the keys of `sources`).
            cuts: of these names only the part [begin, end) along an axis, (axis, begin, end); nothing else of them is read. A stack is
                cut along its experts, a kept FP8 matrix at borders of its scale blocks.
            progress: called with (bytes read, bytes to read) after every stored tensor.
        Raises:
            CheckpointError: `check` fails, or the data hold a NaN code or scale, or an expert id
                that does not exist.
        """
        filling: dict[str, list[Tensor]] = {}
        left: dict[str, int] = {}
        for read in self._read(dtype, native, layers, progress, wanted, cuts or {}):
            name = read.source.name
            if name not in filling:
                filling[name] = read.empty(read.source.spec.shape)
                left[name] = len(read.source.pieces)
            read.fill([slice_of(tensor, read.piece.place) for tensor in filling[name]])
            left[name] -= 1
            if left[name] == 0:
                yield from zip((name, names.scale_of(name)), filling.pop(name), strict=False)

    def nbytes(self, *, wanted: Callable[[str], bool], cuts: Cuts = NOTHING_CUT) -> int:
        """Bytes that `tensors` reads."""
        sources = [cut_source(source, cuts.get(source.name)) for source in self.sources.values() if wanted(source.name)]
        return sum(nbytes_read(piece, cuts.get(source.name)) for source in sources for piece in source.pieces)

    def parts(
        self,
        *,
        dtype: torch.dtype | None,
        native: Native = False,
        layers: Collection[int] | None = None,
        progress: Progress | None = None,
    ) -> Iterator[tuple[Place, Tensor]]:
        """As `tensors`, but experts one by one as the files keep them: one is held at a time."""
        for read in self._read(dtype, native, layers, progress):
            place = read.piece.place
            tensors = read.empty(part_shape(read.source.spec, place))
            read.fill(tensors)
            yield from zip((place, scale_place(place)), tensors, strict=False)

    def _read(
        self,
        dtype: torch.dtype | None,
        native: Native,
        layers: Collection[int] | None,
        progress: Progress | None,
        wanted: Callable[[str], bool] | None = None,
        cuts: Cuts = NOTHING_CUT,
    ) -> Iterator["_Read"]:
        """Every stored tensor that is wanted, with its scale, in file order, its data checked."""
        self.check()
        if dtype is not None and dtype not in TARGET_DTYPES:
            expected = ", ".join(str(allowed) for allowed in TARGET_DTYPES)
            raise ValueError(f"dtype is {dtype}; expected one of {expected}")
        keep = native if callable(native) else lambda module: native
        kept = {module for module, found in self.formats.items() if found != "dense" and keep(module)}
        steps = [
            (piece, source)
            for source in self.sources.values()
            if layers is None or (block := names.block_of(source.name)) is None or block in layers
            if wanted is None or wanted(source.name)
            for source in [cut_source(source, cuts.get(source.name))]
            for piece in source.pieces
        ]
        becomes = {
            source.name: (
                source.spec.dtype or dtype or stored_dtype(source),
                module_of(source.name) in kept,
            )
            for source in self.sources.values()
        }
        steps.sort(key=lambda step: (step[0].weight.file, step[0].weight.begin))
        files = Mapped(self.folder, FILES_OPEN)
        done, total = 0, sum(nbytes_read(piece, cuts.get(source.name)) for piece, source in steps)
        for piece, source in steps:
            weight = files.view(piece.weight)
            scale = None if piece.scale is None else as_scale(files.view(piece.scale))
            weight, scale, inner = cut_piece(piece, weight, scale, source.format, cuts.get(source.name))
            if source.spec.dtype is INT64:
                check_ids(piece.weight.name, weight, self.config.n_routed_experts)
            check_codes(piece.weight.name, weight)
            largest = None if scale is None else check_scale(piece.scale.name, scale)
            yield _Read(source, piece, weight, scale, largest, *becomes[source.name], inner)
            done += nbytes_read(piece, cuts.get(source.name))
            if progress is not None:
                progress(done, total)


@dataclass(frozen=True)
class _Read:
    """One stored tensor as views of the file, to become values of `dtype` unless it is kept."""

    source: Source
    piece: Piece
    weight: Tensor
    scale: Tensor | None
    largest_scale: float | None
    dtype: torch.dtype
    is_kept: bool
    # Of the decoded tensor the part wanted, where scale blocks reach beyond it.
    inner: Cut | None = None

    def empty(self, shape: tuple[int, ...]) -> list[Tensor]:
        """Room for a tensor of that logical shape: [values], or [codes, scales] if it is kept."""
        if not self.is_kept:
            return [torch.empty(shape, dtype=self.dtype)]
        if self.source.format == "fp4":
            shape = (*shape[:-1], shape[-1] // 2)
            scale_shape = fp4_scale_shape(shape)
        else:
            # A single expert's part [o, i] is one half already.
            scale_shape = fp8_scale_shape(shape, self.source.row_parts if len(shape) == 3 else 1)
        codes = torch.empty(shape, dtype=self.weight.dtype)
        return [codes, torch.empty(scale_shape, dtype=self.scale.dtype)]

    def fill(self, out: list[Tensor]) -> None:
        if self.is_kept:
            out[0].copy_(self.weight)
            out[1].copy_(self.scale)
        elif self.scale is None:
            out[0].copy_(self.weight)
        elif self.inner is None:
            decode(self.weight, self.scale, self.source.format, self.dtype, out=out[0])
        else:
            out[0].copy_(part_of(decode(self.weight, self.scale, self.source.format, self.dtype), self.inner))
        if not self.is_kept and self.dtype is not INT64:
            check_range(self.piece.weight.name, self.weight, self.largest_scale, out[0])


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_NAME
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; pass the folder that holds {CONFIG_NAME} and the weights")
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {CONFIG_NAME}; pass the folder that holds it and the weights")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}); download it again") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds {type(raw).__name__}, expected an object; download it again")
    return raw


def open_checkpoint(folder: str | Path, *, strict_config: bool = True) -> Checkpoint:
    """Read config.json, the index and every shard's header; no tensor data.

    Raises CheckpointError where there is nothing to read or the files are a repackaging that dsv4
    does not read, and what Dsv4Config.from_hf raises. Everything else that is wrong waits in
    `problems` for `check`.
    """
    folder = Path(folder).expanduser()
    raw = _read_config(folder)
    shards, problems = read_shards(folder)
    stored = {name: tensor for shard in shards for name, tensor in shard.tensors.items()}
    refuse_packagings(folder, raw, stored, {tensor.dtype for tensor in stored.values()})
    config = Dsv4Config.from_hf(raw, strict=strict_config)
    plan = make_plan(config, stored)
    problems.extend(plan.problems)
    return Checkpoint(folder, config, tuple(shards), plan, problems)
