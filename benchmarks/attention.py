"""Sparse attention of prefill, decoding and gradients: tests first, then times beside what the device can do at most.

    python benchmarks/attention.py [--only TEXT] [--check]

Without a CUDA device the tests run in Triton's interpreter and nothing is timed; `--check` walks the whole path at small sizes there,
without the tests. A red test, or a result that differs from the definition, prints no time. The roofline is measured in the same run:
a large copy and a large product. Times are medians with a cold L2, of decoding inside a CUDA graph. Baselines on the same work: plain
torch, transformers' eager attention (every key, masked) and FlexAttention (which has no selection that skips keys, and gets sinks from
its log-sum-exp). The last line is JSON; on a CUDA device the table is also kept in benchmarks/results/.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from dsv4.kernels.backend import available
from dsv4.kernels.decode_attention import decode_attention, decode_attention_reference
from dsv4.kernels.reach import Reach, visible_entries, visible_tokens
from dsv4.kernels.sparse_attention import sparse_attention, sparse_attention_reference
from dsv4.testing import assert_close

ROOT = Path(__file__).resolve().parents[1]
TESTS = [ROOT / "tests" / f"test_kernels_{name}.py" for name in ("sparse_attention_triton", "decode_attention")]
# More than any L2 holds.
FLUSH = 512 << 20
REPEATS = 20
# The torch way holds what it gathers; beyond this many queries it takes long and proves nothing.
TORCH_QUERIES = 8192
# Bytes that a baseline may hold at a time: scores of every query and key, copies of keys for every head.
HELD = 64 << 30
# Scores that are compared with the definition.
COMPARED = 1 << 28


@dataclass(frozen=True)
class Shape:
    """A call with the sizes of a published model.

    Attributes:
        kind: "prefill", "decode" (a ring of keys, entries with room for 64 tokens more) or "gradient" (of prefill).
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
    kind: str = "prefill"
    width: int = 512
    window: int = 128

    def arguments(self, device: str) -> dict:
        b, s, length, width = self.batch, self.queries, self.past + self.queries, self.width
        earlier = min(self.past, self.window - 1)
        places = torch.arange(self.past - earlier, length, device=device).repeat(b, 1)
        positions = places[:, earlier:].contiguous()
        entries = length // self.rate if self.rate else 0
        if self.kind == "decode" and self.rate:
            entries += 64 // self.rate + 1

        def draw(*sizes: int) -> Tensor:
            return torch.randn(*sizes, device=device, dtype=torch.bfloat16)

        found = {
            "queries": draw(b, s, self.heads, width),
            "tokens": draw(b, earlier + s, width),
            "entries": draw(b, entries, width) if entries else None,
            "sinks": torch.zeros(self.heads, device=device),
            "selection": self.selection(positions) if self.kept and entries else None,
            "scale": width**-0.5,
        }
        if self.kind != "decode":
            return found | {"reach": Reach(self.window, positions, places, 0, self.rate)}
        return found | {"query_positions": positions, "token_positions": places, "window": self.window, "rate": max(self.rate, 1)}

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
            total += min(p + 1, self.window) + (min(closed, self.kept) if self.kept else closed)
        return total * self.batch

    def flops(self) -> int:
        """Two products of the forward; five of the gradient: scores again, weights', queries', keys' twice."""
        return (10 if self.kind == "gradient" else 4) * self.heads * self.width * self.keys()

    def bytes(self) -> int:
        """Every argument and result once; at most what the queries see of the keys."""
        queries = self.batch * self.queries
        length = self.past + self.queries
        rows = min(self.past, self.window - 1) + self.queries + (length // self.rate if self.rate else 0)
        seen = min(self.batch * rows, self.keys())
        per_head, per_key = (4, 3) if self.kind == "gradient" else (2, 1)
        return 2 * self.width * (per_head * queries * self.heads + per_key * seen) + 8 * queries * self.kept

    def candidates(self) -> int:
        """Scores of a way that computes all of them and masks."""
        rows = min(self.past, self.window - 1) + self.queries + ((self.past + self.queries) // self.rate if self.rate else 0)
        return self.batch * self.queries * self.heads * rows


@dataclass(frozen=True)
class Timed:
    """baselines: microseconds, or the reason for which there are none."""

    name: str
    microseconds: float
    tflops: float
    gigabytes_per_second: float
    roofline_fraction: float
    baselines: dict[str, float | str]


def shapes() -> list[Shape]:
    found = []
    for model, heads, kept in (("flash", 64, 512), ("pro", 128, 1024)):
        kinds = {"window": (0, 0), "csa": (kept, 4), "hca": (0, 128)}
        for kind, (t, rate) in kinds.items():
            for k in (1, 8, 64):
                found.append(Shape(f"{model} {kind} prefill {k}k", heads, k << 10, kept=t, rate=rate))
            found.append(Shape(f"{model} {kind} gradient 8k", heads, 8192, kept=t, rate=rate, kind="gradient"))
            for k in (8, 64):
                for batch in (1, 32, 128):
                    name = f"{model} {kind} decode {k}k batch {batch}"
                    found.append(Shape(name, heads, 1, (k << 10) - 1, batch, t, rate, "decode"))
        # The shapes of a published benchmark: 4096 queries against k thousand entries; two queries a row.
        for k in (8, 16, 32, 64):
            found.append(Shape(f"{model} csa 4096 queries {k}k entries", heads, 4096, 4 * (k << 10) - 4096, kept=kept, rate=4))
        for batch in (2, 64, 128, 256):
            found.append(Shape(f"{model} csa decode 2 queries batch {batch}", heads, 2, 65534, batch, kept, 4, "decode"))
    # What is left of flash's heads on one of 4 or 8 devices.
    for heads in (16, 8):
        for kind, (t, rate) in {"window": (0, 0), "csa": (512, 4), "hca": (0, 128)}.items():
            found.append(Shape(f"{heads} heads {kind} prefill 8k", heads, 8192, kept=t, rate=rate))
            found.append(Shape(f"{heads} heads {kind} decode 64k batch 32", heads, 1, 65535, 32, t, rate, "decode"))
    return found


def small_shapes() -> list[Shape]:
    """One of each kind, for `--check`."""
    whole = Shape("", 4, 5, past=20, batch=2, kept=3, rate=2, width=32, window=8)
    return [
        replace(whole, name="small csa prefill"),
        replace(whole, name="small window prefill", kept=0, rate=0, past=0),
        replace(whole, name="small hca gradient", kept=0, rate=4, kind="gradient"),
        replace(whole, name="small hca decode", kept=0, rate=4, kind="decode", queries=1),
    ]


def tests_pass(is_native: bool) -> bool:
    chosen = ["-m", "gpu"] if is_native else ["-k", "test_numbers"]
    pytest = Path(sys.executable).with_name("pytest")
    return subprocess.run([pytest, *TESTS, "-q", *chosen], cwd=ROOT).returncode == 0


@cache
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def median_seconds(work: Callable[[], object], repeats: int = REPEATS) -> float:
    if device() == "cpu":
        return _seconds(work)
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


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def graphed(work: Callable[[], object]) -> Callable[[], object]:
    """The same work as one launch."""
    if device() == "cpu":
        return work
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def roofline(size: int = 8192, copied: int = 2 << 30) -> tuple[float, float]:
    """(FLOP/s of a large bfloat16 product, bytes/s of a large copy) of this device."""
    a = torch.randn(size, size, device=device(), dtype=torch.bfloat16)
    product = 2 * size**3 / median_seconds(lambda: a @ a)
    source = torch.empty(copied, dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    return product, 2 * source.numel() / median_seconds(lambda: target.copy_(source))


def ours(shape: Shape, arguments: dict, backend: str) -> Callable[[], Tensor]:
    """The work that is timed; of a gradient, what follows a forward that was run before."""
    if shape.kind == "decode":
        return lambda: decode_attention(**arguments, backend=backend)[0]
    if shape.kind == "prefill":
        return lambda: sparse_attention(**arguments, backend=backend)
    given = arguments | {k: v.detach().requires_grad_() for k, v in arguments.items() if isinstance(v, Tensor) and v.is_floating_point()}
    with torch.enable_grad():
        out = sparse_attention(**given, backend=backend)
    leaves = [v for v in given.values() if isinstance(v, Tensor) and v.requires_grad]
    grad = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)[0]


def check_result(shape: Shape, arguments: dict) -> None:
    """AssertionError unless the result is the definition's, where its scores fit."""
    if shape.kind == "gradient" or shape.candidates() > COMPARED:
        return
    wide = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in arguments.items()}
    define = decode_attention_reference if shape.kind == "decode" else sparse_attention_reference
    expected = define(**wide)
    expected = expected[0] if shape.kind == "decode" else expected
    assert_close(ours(shape, arguments, "triton")(), expected, "bfloat16 device code", shape.name)


@dataclass(frozen=True)
class Every:
    """All keys of a call behind one another, and which of them each query sees: what ways without a window or a selection take."""

    keys: Tensor
    query_positions: Tensor
    token_positions: Tensor
    seen: Tensor

    @classmethod
    def of(cls, arguments: dict) -> "Every":
        entries, reach = arguments["entries"], arguments.get("reach")
        if reach is None:
            reach = Reach(arguments["window"], arguments["query_positions"], arguments["token_positions"], 0, arguments["rate"])
        keys, seen = arguments["tokens"], visible_tokens(reach.query_positions, reach.token_positions, reach.window)
        if entries is not None:
            keys = torch.cat((keys, entries), dim=1)
            closed = visible_entries(reach.query_positions, reach.rate, entries.shape[1], arguments["selection"])
            seen = torch.cat((seen, closed), dim=-1)
        return cls(keys, reach.query_positions, reach.token_positions, seen)


def transformers_way(arguments: dict) -> Callable[[], Tensor]:
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import eager_attention_forward

    every, queries = Every.of(arguments), arguments["queries"]
    heads = SimpleNamespace(num_key_value_groups=queries.shape[2], sinks=arguments["sinks"].to(queries.dtype), training=False)
    mask = torch.zeros_like(every.seen, dtype=queries.dtype).masked_fill(~every.seen, torch.finfo(queries.dtype).min).unsqueeze(1)
    given = queries.transpose(1, 2), every.keys.unsqueeze(1), every.keys.unsqueeze(1)
    return lambda: eager_attention_forward(heads, *given, mask, arguments["scale"])[0]


def flex_way(arguments: dict) -> Callable[[], Tensor]:
    """Blocks in which nobody sees anything are skipped; the sink scales the result by what its softmax leaves."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    every, queries = Every.of(arguments), arguments["queries"]
    seen, sinks = every.seen, arguments["sinks"]
    b, s, k = seen.shape
    mask = create_block_mask(lambda b, h, q, j: seen[b, q, j], b, None, s, k, device=seen.device)
    attend = torch.compile(flex_attention, dynamic=False) if device() == "cuda" else flex_attention
    rows, keys = queries.transpose(1, 2), every.keys.unsqueeze(1)

    def work() -> Tensor:
        more = {"block_mask": mask, "scale": arguments["scale"], "enable_gqa": True, "return_aux": AuxRequest(lse=True)}
        out, aux = attend(rows, keys, keys, **more)
        left = torch.sigmoid(aux.lse - sinks[:, None]).unsqueeze(-1)
        return (out * left).to(out.dtype).transpose(1, 2)

    return work


def baselines(shape: Shape, arguments: dict) -> dict[str, float | str]:
    """Microseconds of each other way, once its result is near ours."""
    found: dict[str, float | str] = {}
    ways = {"torch": lambda given: ours(shape, given, "torch"), "transformers": transformers_way, "flex": flex_way}
    # Scores in bfloat16 four times over, and each key for every head twice; a mask.
    scores = shape.candidates()
    held = {"torch": 0, "transformers": 8 * scores + 4 * shape.width * scores // shape.queries, "flex": scores // shape.heads}
    for name, way in ways.items():
        if shape.kind == "gradient" and name != "torch":
            found[name] = "forward only"
        elif shape.queries > TORCH_QUERIES or held[name] > HELD:
            found[name] = "too large"
        else:
            found[name] = timed_baseline(way, arguments, None if shape.kind == "gradient" else ours(shape, arguments, "triton")())
    return found


def timed_baseline(way: Callable, arguments: dict, expected: Tensor | None) -> float | str:
    try:
        work = way(arguments)
        result = work()
        if expected is not None:
            assert_close(result, expected, "bfloat16 way")
        return median_seconds(work, repeats=3) * 1e6
    except Exception as error:  # Of a library that is not ours: the reason stands in the table.
        return f"{type(error).__name__}: {error}".splitlines()[0][:100]


def measure(shape: Shape, flops: float, bandwidth: float) -> Timed:
    arguments = shape.arguments(device())
    with torch.no_grad():
        check_result(shape, arguments)
        work = ours(shape, arguments, "triton")
        seconds = median_seconds(graphed(work) if shape.kind == "decode" else work)
        others = baselines(shape, arguments)
    return Timed(
        shape.name,
        microseconds=seconds * 1e6,
        tflops=shape.flops() / seconds / 1e12,
        gigabytes_per_second=shape.bytes() / seconds / 1e9,
        roofline_fraction=max(shape.flops() / flops, shape.bytes() / bandwidth) / seconds,
        baselines=others,
    )


def line(row: Timed) -> str:
    others = " ".join(f"{x if isinstance(x, str) else round(x)!s:>12.12s}" for x in row.baselines.values())
    speed = f"{row.microseconds:10.1f} {row.tflops:8.1f} {row.gigabytes_per_second:6.0f} {row.roofline_fraction:8.2f}"
    return f"{row.name:42s} {speed} {others}"


def keep(lines: list[str], name: str, folder: Path) -> None:
    """One file per device and day."""
    today = datetime.date.today()
    title = name.lower().replace(" ", "_").replace("/", "_")
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    command = "python benchmarks/attention.py"
    text = "\n".join((f"# Attention kernels, {name}, {today}", "", f"`{command}`, {versions}", "", "```text", *lines, "```", ""))
    (folder / f"attention_{title}_{today}.md").write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="shapes whose name holds this text")
    parser.add_argument("--check", action="store_true", help="every step at small sizes; its times mean nothing")
    args = parser.parse_args()
    if args.check and device() == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        # Triton decides when it is imported, which may have happened.
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"TRITON_INTERPRET": "1"})
    reason = available("triton", device())
    if not args.check and not tests_pass(is_native=device() == "cuda"):
        print(json.dumps({"correct": False, "times": []}))
        return 1
    if reason is not None:
        print(f"{reason}: tested in Triton's interpreter, nothing timed")
        print(json.dumps({"correct": True, "reason": reason, "times": []}))
        return 0
    flops, bandwidth = roofline(256, 1 << 20) if args.check else roofline()
    name = torch.cuda.get_device_name() if device() == "cuda" else "Triton's interpreter"
    lines = [f"{name}: product {flops / 1e12:.3g} TFLOP/s, copy {bandwidth / 1e9:.3g} GB/s"]
    lines.append(
        f"{'shape':42s} {'us':>10s} {'TFLOP/s':>8s} {'GB/s':>6s} {'roofline':>8s} {'torch us':>12s} {'transformers':>12s} {'flex us':>12s}"
    )
    print("\n".join(lines))
    times = []
    for shape in small_shapes() if args.check else shapes():
        if args.only in shape.name:
            row = measure(shape, flops, bandwidth)
            times.append(asdict(row))
            lines.append(line(row))
            print(lines[-1], flush=True)
    if device() == "cuda" and not args.check and not args.only:
        keep(lines, name, ROOT / "benchmarks" / "results")
    rates = {"product_flops": flops, "copy_bytes_per_second": bandwidth}
    print(json.dumps({"correct": True, "device": name, "torch": torch.__version__, **rates, "times": times}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
