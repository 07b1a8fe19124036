"""What tests and benchmarks of device code share: arguments, a process with Triton's interpreter,
and what a kernel compiled for a device that is not here would need of it.

Axes: b batch, s query column, w earlier column, N head, D head width, e entry, t selected entry.
"""

import importlib.util
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch

from dsv4.kernels.sparse_attention import Reach


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """Sizes of one call of `sparse_attention`.

    Attributes:
        rows: (tokens before the call, padding at the left, real tokens) of each row.
        columns: s; the rest of a row is padding at the right.
        entries: e, 0 for none; kept: t, or None for all closed entries.
    """

    rows: tuple[tuple[int, int, int], ...]
    columns: int
    window: int
    entries: int = 0
    kept: int | None = None
    rate: int = 1
    heads: int = 3
    width: int = 16
    dtype: torch.dtype = torch.float32

    def arguments(self, device: str = "cpu") -> dict:
        """Random ones, the same on every device; a fifth of the selection is -1, and what is not
        closed yet is selected too.
        """
        earlier = max(min(past, self.window - 1) for past, _, _ in self.rows)
        query, places = [], []
        for past, start, count in self.rows:
            before = [past - i if past >= i else -1 for i in range(earlier, 0, -1)]
            new = [*range(past, past + count)]
            new = [-1] * start + new + [-1] * (self.columns - start - count)
            query.append(new)
            places.append(before + new)
        gap = max((start for past, start, _ in self.rows if past), default=0)
        b, s = len(self.rows), self.columns
        sizes = {"tokens": earlier + s, "entries": self.entries}
        rows = {name: torch.randn(b, n, self.width).to(self.dtype) for name, n in sizes.items()}
        selection = None
        if self.kept is not None:
            selection = torch.rand(b, s, self.entries).argsort(-1)[..., : self.kept]
            selection = selection.masked_fill(torch.rand(selection.shape) < 0.2, -1).to(device)
        positions = torch.tensor(query).to(device), torch.tensor(places).to(device)
        return {
            "queries": torch.randn(b, s, self.heads, self.width).to(self.dtype).to(device),
            "tokens": rows["tokens"].to(device),
            "entries": rows["entries"].to(device) if self.entries else None,
            "sinks": torch.randn(self.heads).to(device),
            "reach": Reach(self.window, *positions, gap, self.rate),
            "selection": selection,
            "scale": self.width**-0.5,
        }


@contextmanager
def interpreter(module: ModuleType) -> Iterator[Callable]:
    """`run(function, *arguments)` calls a function of `module` in a process whose Triton interprets
    kernels on CPU tensors; fresh memory there is NaN.

    A process of its own, because Triton decides when it is imported.
    """
    context = multiprocessing.get_context("spawn")
    place = (module.__name__, module.__file__)
    with ProcessPoolExecutor(1, context, initializer=_prepare, initargs=place) as pool:
        with patch.dict(os.environ, TRITON_INTERPRET="1"):
            pool.submit(int).result()
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def _prepare(name: str, file: str) -> None:
    torch.set_num_threads(1)
    torch.empty = partial(_poisoned, torch.empty)
    # Functions arrive by the module's name, and pytest's has parents that no folder stands for.
    parents = name.split(".")[:-1]
    for i in range(len(parents)):
        sys.modules[".".join(parents[: i + 1])] = ModuleType(parents[i])
    spec = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


def _poisoned(empty: Callable, *sizes, **options) -> torch.Tensor:
    """Fresh memory is often zero, so that a forgotten write would pass by luck."""
    out = empty(*sizes, **options)
    return out.fill_(torch.nan) if out.is_floating_point() else out


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes, and how often its PTX names an instruction.

    Attributes:
        registers, stack: of a thread; a stack (bytes) is where registers spill to.
        shared: bytes of a program. tensor_memory: columns of a program.
        complaints: the assembler's, by code: C7510 and its neighbours say that products which could
            overlap wait for each other.
        arrives: whether programs count themselves, and the last one finds what the others stored.
        looped: instructions of the innermost loop that reads most, without one of the whole kernel.
    """

    registers: int
    stack: int
    shared: int
    tensor_memory: int
    instructions: Mapping[str, int]
    complaints: tuple[str, ...]
    arrives: bool
    looped: int


# Instructions counted: products on tensor cores, and copies that a program does not wait for (of 16 bytes: cg, of 4 to 16: ca).
COUNTED = ("wgmma.mma_async", "mma.sync", "tcgen05.mma", "cp.async.c", "cp.async.cg", "cp.async.ca")


def resources(kernel, types: Mapping[str, str | tuple[str, ...]], options: Mapping, capability: int, aligned: tuple[str, ...]) -> Resources:
    """Compile for a CUDA capability (90 for sm_90) that need not be here.

    Args:
        types: argument -> Triton's name of its type, of a tuple one for each member. aligned: integers that are multiples of 16.
        options: constants of the kernel, num_warps and compiler options, as at the launch.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    constants = {name: value for name, value in options.items() if name in names}
    rest = {name: value for name, value in options.items() if name not in names}
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    hints = {}
    for i, name in enumerate(names):
        is_tuple = isinstance(signature[name], tuple)
        for j, kind in enumerate(signature[name] if is_tuple else (signature[name],)):
            if kind.startswith("*") or name in aligned:
                hints[(i, j) if is_tuple else (i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, hints)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=rest)
    ptx = compiled.asm["ptx"]
    used = dict(re.findall(r"(REG|STACK):(\d+)", _printed(compiled.asm["cubin"], "-res-usage")))
    return Resources(
        registers=int(used["REG"]),
        stack=int(used["STACK"]),
        shared=compiled.metadata.shared,
        tensor_memory=getattr(compiled.metadata, "tmem_size", None) or 0,
        instructions={name: ptx.count(name) for name in COUNTED},
        complaints=_complaints(ptx),
        arrives=_arrives(ptx),
        looped=_looped(compiled.asm["cubin"]),
    )


def _arrives(ptx: str) -> bool:
    """One addition that releases and acquires for the whole device, behind a barrier that comes after all stores and before one that
    comes before all loads. Stores and loads before the first are the program's own; AssertionError where a barrier is missing.
    """
    arrival = "atom.global.gpu.acq_rel.add"
    if arrival not in ptx:
        # Sums of floats, which no one waits for, take any order.
        assert not re.search(r"\batom\.\S*\.[usb]32", ptx)
        return False
    before, after = ptx.split(arrival)
    moves = re.compile(r"bar\.sync|st\.global|ld\.global|cp\.async\.c")
    assert moves.findall(before)[-1] == "bar.sync"
    assert moves.findall(after)[0] == "bar.sync"
    # What others stored does not come from this processor's cache.
    assert "ld.global.cg" in after
    return True


def _complaints(ptx: str) -> tuple[str, ...]:
    import triton

    target = re.search(r"\.target\s+(\w+)", ptx)[1]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        # The one that knows every architecture.
        tool = triton.knobs.nvidia.ptxas_blackwell.path
        command = [tool, "-v", f"--gpu-name={target}", source, "-o", Path(folder) / "kernel.cubin"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return tuple(re.findall(r"\((C\d+)\)", printed))


def _looped(cubin: bytes) -> int:
    code = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", _printed(cubin, "-sass"))
    place = {int(at, 16): i for i, (at, _) in enumerate(code)}
    jumps = [(i, re.search(r"\bBRA\b.*?0x([0-9a-f]+)", instruction)) for i, (_, instruction) in enumerate(code)]
    # Jumps back; one to itself ends the code.
    loops = [(place[int(to[1], 16)], i) for i, to in jumps if to and place.get(int(to[1], 16), i) < i]
    inner = [loop for loop in loops if not any(other != loop and loop[0] <= other[0] and other[1] <= loop[1] for other in loops)]
    width = re.compile(r"\bLDG(?:STS)?\.\S*?(?:\.(64|128))?(?=\s)")

    def read(loop: tuple[int, int]) -> int:
        return sum(int(found[1] or 32) for _, text in code[loop[0] : loop[1] + 1] if (found := width.search(text)))

    best = max(inner, key=read, default=None)
    return len(code) if best is None or read(best) == 0 else best[1] - best[0] + 1


def _printed(cubin: bytes, option: str) -> str:
    """What the binary says of itself, by the tool that Triton brings."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "kernel.cubin"
        place.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, option, place]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
