"""safetensors files without their data: headers, the index, and whether they agree.

A file is 8 bytes of header length (little endian), the header (JSON: name -> dtype, shape,
data_offsets), then the data without holes. Nothing here reads a byte beyond the headers.
"""

import json
import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from dsv4.convert.problems import CheckpointError, Problems

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# The limit that the safetensors library sets too.
MAX_HEADER_BYTES = 100_000_000
DTYPE_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
# Folders that hold something else: a pattern of file names, and what it says about the folder.
OTHER_FILES = (
    (r".*\.gguf", "GGUF files, which dsv4 does not read; use the safetensors release"),
    (
        r"model\d+-mp\d+\.safetensors",
        "rank files of DeepSeek's inference/convert.py; use the release they were made from",
    ),
    (r".*\.safetensors", f"shards but no {INDEX_NAME}; download the index too"),
    (
        r".*\.(bin|pt|pth)",
        "PyTorch pickles, which dsv4 does not read; save the model as safetensors",
    ),
)
_GIT_LFS = b"version https://git-lfs"


@dataclass(frozen=True)
class StoredTensor:
    """One entry of a shard's header; `begin` and `end` are bytes of the file."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Shard:
    file: str
    nbytes: int
    tensors: dict[str, StoredTensor]


def read_shards(folder: Path) -> tuple[list[Shard], Problems]:
    """Headers of every shard of the folder, and what is wrong with them or with the index.

    Raises CheckpointError where there is nothing to read: no index and no single file, or an index
    that is no JSON.
    """
    index = folder / INDEX_NAME
    single = folder / SINGLE_NAME
    problems = Problems()
    if not index.exists():
        if not single.exists():
            raise CheckpointError(f"{folder} has no {SINGLE_NAME} and no {INDEX_NAME}{_found_instead(folder)}")
        return _read_all(folder, [SINGLE_NAME], problems), problems
    weight_map = _weight_map(index)
    files = sorted(set(weight_map.values()))
    if single.exists() and SINGLE_NAME not in files:
        problems.add(
            "two checkpoints in one folder",
            f"{SINGLE_NAME} beside an {INDEX_NAME} that does not name it",
        )
    shards = _read_all(folder, files, problems)
    _compare(weight_map, shards, problems)
    return shards, problems


def read_header(folder: Path, file: str, problems: Problems) -> Shard | None:
    """The header of one file; None, and a problem, where it cannot be trusted."""
    path = folder / file
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = stream.read(8)
        if start == _GIT_LFS[:8]:
            problems.add("Git LFS pointers in place of files (run `git lfs pull`)", file)
            return None
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else None
        if length is None or length > MAX_HEADER_BYTES:
            problems.add("not a safetensors file", f"{file}: {size} bytes")
            return None
        if 8 + length > size:
            problems.add("truncated file", f"{file}: {size} bytes, but its header alone ends at {8 + length}")
            return None
        text = stream.read(length)
    try:
        entries = _parse(text)
        entries.pop("__metadata__", None)
        tensors = {name: _entry(name, file, 8 + length, entry) for name, entry in entries.items()}
    except (KeyError, TypeError, ValueError) as error:
        problems.add("unreadable header", f"{file}: {error}")
        return None
    shard = Shard(file, size, tensors)
    _check_extents(shard, 8 + length, problems)
    return shard


def _parse(text: bytes) -> dict:
    def unique(pairs: list[tuple[str, object]]) -> dict:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} stands in it twice")
        return found

    parsed = json.loads(text, object_pairs_hook=unique)
    if not isinstance(parsed, dict):
        raise ValueError("the header is not a JSON object")
    return parsed


def _entry(name: str, file: str, data_start: int, entry: dict) -> StoredTensor:
    dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in DTYPE_BITS:
        raise ValueError(f"{name} has the unknown dtype {dtype!r}")
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)):
        raise ValueError(f"{name} has shape {list(shape)} and offsets {[begin, end]}")
    if (end - begin) * 8 != math.prod(shape) * DTYPE_BITS[dtype]:
        raise ValueError(f"{name}, {dtype} {list(shape)}, takes the bytes {begin} to {end}")
    return StoredTensor(name, file, dtype, shape, data_start + begin, data_start + end)


def _check_extents(shard: Shard, data_start: int, problems: Problems) -> None:
    """The tensors follow each other without holes or overlaps and end where the file ends."""
    at = data_start
    for tensor in sorted(shard.tensors.values(), key=lambda t: (t.begin, t.end)):
        if tensor.begin != at:
            what = "overlaps the tensor before it" if tensor.begin < at else "leaves a hole before it"
            problems.add("data offsets that do not fit together", f"{shard.file}: {tensor.name} {what}")
        at = max(at, tensor.end)
    if at > shard.nbytes:
        problems.add("truncated file", f"{shard.file}: {shard.nbytes} bytes, but its tensors end at {at}")
    elif at < shard.nbytes:
        problems.add(
            "file longer than its tensors",
            f"{shard.file}: {shard.nbytes} bytes, tensors end at {at}",
        )


def _read_all(folder: Path, files: list[str], problems: Problems) -> list[Shard]:
    present = [file for file in files if (folder / file).is_file()]
    problems.add("missing shards", [file for file in files if file not in set(present)])
    shards = [read_header(folder, file, problems) for file in present]
    return [shard for shard in shards if shard is not None]


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        entries = list(weight_map.items())
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{index} is not an index with a weight_map: {error!r}; download it again") from error
    for name, file in entries:
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index} places {name} in {file!r}, which is not a file beside it")
    return weight_map


def _compare(weight_map: dict[str, str], shards: list[Shard], problems: Problems) -> None:
    read = {shard.file: shard.tensors for shard in shards}
    places: dict[str, list[str]] = {}
    for file, tensors in read.items():
        for name in tensors:
            places.setdefault(name, []).append(file)
    problems.add(
        "in the index, but not in the shard it names",
        [f"{name} ({file})" for name, file in weight_map.items() if file in read and name not in read[file]],
    )
    problems.add(
        "in a shard, but not in the index",
        [f"{name} ({files[0]})" for name, files in places.items() if name not in weight_map],
    )
    problems.add(
        "in two shards",
        [f"{name} ({', '.join(files)})" for name, files in places.items() if len(files) > 1],
    )


def _found_instead(folder: Path) -> str:
    files = sorted(path.name for path in folder.iterdir())
    for pattern, meaning in OTHER_FILES:
        matching = [file for file in files if re.fullmatch(pattern, file)]
        if matching:
            return f", but {matching[0]}: {meaning}"
    return "; pass the folder that holds the weights"
