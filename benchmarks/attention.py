"""Sparse attention: its tests first, then times beside what the device can do at most.

    python benchmarks/attention.py [--only TEXT]

Without a CUDA device the tests run in Triton's interpreter and nothing is timed. A red test prints
no time. The roofline is measured in the same run: a large copy and a large product. Times are
medians with a cold L2; the last line is JSON.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from dsv4.kernels.backend import available
from dsv4.kernels.sparse_attention import Reach, sparse_attention

TESTS = Path(__file__).resolve().parents[1] / "tests" / "test_kernels_sparse_attention_triton.py"
WIDTH, WINDOW = 512, 128
# More than any L2 holds.
FLUSH = 512 << 20
REPEATS = 20
# The torch way holds what it gathers; beyond this many queries it takes long and proves nothing.
TORCH_QUERIES = 8192


@dataclass(frozen=True)
class Shape:
    """A call with the sizes of a published model.

    Attributes:
        batch rows of `queries` tokens after `past` ones; kept: entries selected, 0 for all that are
        closed; rate: tokens of an entry, 0 for the window alone.
    """

    name: str
    heads: int
    queries: int
    past: int = 0
    batch: int = 1
    kept: int = 0
    rate: int = 0

    def arguments(self, device: str) -> dict:
        b, s, length = self.batch, self.queries, self.past + self.queries
        earlier = min(self.past, WINDOW - 1)
        places = torch.arange(self.past - earlier, length, device=device).expand(b, -1)
        positions = places[:, earlier:]
        entries = length // self.rate if self.rate else 0

        def draw(*sizes: int) -> Tensor:
            return torch.randn(*sizes, device=device, dtype=torch.bfloat16)

        return {
            "queries": draw(b, s, self.heads, WIDTH),
            "tokens": draw(b, earlier + s, WIDTH),
            "entries": draw(b, entries, WIDTH) if entries else None,
            "sinks": torch.zeros(self.heads, device=device),
            "reach": Reach(WINDOW, positions, places, 0, self.rate),
            "selection": self.selection(positions) if self.kept and entries else None,
            "scale": WIDTH**-0.5,
        }

    def selection(self, positions: Tensor) -> Tensor:
        """[b s t]: entries spread over all closed ones from a random start, each at most once."""
        closed = ((positions + 1) // self.rate).unsqueeze(-1)
        slot = torch.arange(self.kept, device=positions.device)
        spread = torch.where(closed > self.kept, slot * closed // self.kept, slot)
        start = (torch.rand(*positions.shape, 1, device=positions.device) * closed).long()
        chosen = (spread + start) % closed.clamp(min=1)
        return chosen.masked_fill(slot >= closed, -1)

    def keys(self) -> int:
        """Keys seen, summed over the queries of all rows."""
        total = 0
        for p in range(self.past, self.past + self.queries):
            closed = (p + 1) // self.rate if self.rate else 0
            total += min(p + 1, WINDOW) + (min(closed, self.kept) if self.kept else closed)
        return total * self.batch

    def flops(self) -> int:
        return 4 * self.heads * WIDTH * self.keys()

    def bytes(self) -> int:
        """Every argument and result once; at most what the queries see of the keys."""
        queries = self.batch * self.queries
        length = self.past + self.queries
        rows = min(self.past, WINDOW - 1) + self.queries + (length // self.rate if self.rate else 0)
        seen = min(self.batch * rows, self.keys())
        selection = 8 * queries * self.kept
        return 2 * WIDTH * (2 * queries * self.heads + seen) + selection


@dataclass(frozen=True)
class Timed:
    name: str
    microseconds: float
    tflops: float
    gigabytes_per_second: float
    roofline_fraction: float
    torch_microseconds: float | None


def shapes() -> list[Shape]:
    found = []
    for model, heads, kept in (("flash", 64, 512), ("pro", 128, 1024)):
        kinds = {"window": (0, 0), "csa": (kept, 4), "hca": (0, 128)}
        for kind, (t, rate) in kinds.items():
            for k in (1, 8, 64):
                name = f"{model} {kind} prefill {k}k"
                found.append(Shape(name, heads, k << 10, kept=t, rate=rate))
            for k in (8, 64):
                for batch in (1, 32, 128):
                    name = f"{model} {kind} decode {k}k batch {batch}"
                    past = (k << 10) - 1
                    found.append(Shape(name, heads, 1, past, batch, kept=t, rate=rate))
        for k in (8, 16, 32, 64):
            # 4096 queries against k thousand entries: a published benchmark's shape.
            past = 4 * (k << 10) - 4096
            name = f"{model} csa 4096 queries {k}k entries"
            found.append(Shape(name, heads, 4096, past, kept=kept, rate=4))
    return found


def tests_pass(is_native: bool) -> bool:
    chosen = ["-m", "gpu"] if is_native else ["-k", "test_numbers"]
    pytest = Path(sys.executable).with_name("pytest")
    return subprocess.run([pytest, TESTS, "-q", *chosen], cwd=TESTS.parents[1]).returncode == 0


def median_seconds(work: Callable[[], object], repeats: int = REPEATS) -> float:
    flush = torch.empty(FLUSH, dtype=torch.uint8, device="cuda")
    work()
    times = []
    for _ in range(repeats):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def roofline() -> tuple[float, float]:
    """(FLOP/s of a large bfloat16 product, bytes/s of a large copy) of this device."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = 2 * 8192**3 / median_seconds(lambda: a @ a)
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return product, 2 * source.numel() / median_seconds(lambda: target.copy_(source))


def measure(shape: Shape, flops: float, bandwidth: float) -> Timed:
    arguments = shape.arguments("cuda")
    with torch.no_grad():
        seconds = median_seconds(lambda: sparse_attention(**arguments, backend="triton"))
        baseline = None
        if shape.queries <= TORCH_QUERIES:
            baseline = median_seconds(lambda: sparse_attention(**arguments), repeats=3) * 1e6
    least = max(shape.flops() / flops, shape.bytes() / bandwidth)
    return Timed(
        shape.name,
        microseconds=seconds * 1e6,
        tflops=shape.flops() / seconds / 1e12,
        gigabytes_per_second=shape.bytes() / seconds / 1e9,
        roofline_fraction=least / seconds,
        torch_microseconds=baseline,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="shapes whose name holds this text")
    only = parser.parse_args().only
    reason = available("triton", "cuda") if torch.cuda.is_available() else "no CUDA device"
    if not tests_pass(is_native=reason is None):
        print(json.dumps({"correct": False, "times": []}))
        return 1
    if reason is not None:
        print(f"{reason}: tested in Triton's interpreter, nothing timed")
        print(json.dumps({"correct": True, "reason": reason, "times": []}))
        return 0
    flops, bandwidth = roofline()
    device = torch.cuda.get_device_name()
    print(f"{device}: product {flops / 1e12:.0f} TFLOP/s, copy {bandwidth / 1e9:.0f} GB/s")
    print(f"{'shape':36s} {'us':>10s} {'TFLOP/s':>8s} {'GB/s':>6s} {'roofline':>8s} {'torch us':>10s}")
    times = []
    for shape in shapes():
        if only not in shape.name:
            continue
        row = measure(shape, flops, bandwidth)
        times.append(asdict(row))
        slow = "" if row.torch_microseconds is None else f"{row.torch_microseconds:.0f}"
        print(
            f"{row.name:36s} {row.microseconds:10.1f} {row.tflops:8.1f} "
            f"{row.gigabytes_per_second:6.0f} {row.roofline_fraction:8.2f} {slow:>10s}",
            flush=True,
        )
    print(
        json.dumps(
            {
                "correct": True,
                "device": device,
                "torch": torch.__version__,
                "product_flops": flops,
                "copy_bytes_per_second": bandwidth,
                "times": times,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
