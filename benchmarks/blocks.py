"""The kernels of a block around attention and experts: tests first, then times beside what the device can do at most.

    python benchmarks/blocks.py [--only TEXT] [--check] [--launches]

Hyper-connections, the router, maps of a few tokens, norm and rotary, pooled entries and the indexer at the published models' sizes; a
whole block of each kind at 8192 tokens, and a decoding step in one CUDA graph, against the sum of its parts' rooflines and against
transformers' eager forward (whole_block.py). Without a CUDA device the tests run in Triton's interpreter and nothing is timed; `--check`
walks the whole path at small sizes there, without the tests; `--launches` counts what a decoding step launches (launches.py). A red test,
or a result that differs from the definition, prints no time. The roofline is measured in the same run: a large copy and a large product.
Times are medians with a cold L2, of decoding inside a CUDA graph. The baseline is the same op in plain torch. The last line is JSON; on a
CUDA device the table is also kept in benchmarks/results/.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from attention import device, graphed, median_seconds, roofline
from launches import block_launches, report
from torch import Tensor
from whole_block import LIMIT, whole_blocks

from dsv4.kernels import few_linears, hyper_connection, index_scores, norm_rotary, pooling, router, step_rows
from dsv4.kernels.backend import available
from dsv4.kernels.quantize import quantize_fp8
from dsv4.testing import assert_close

ROOT = Path(__file__).resolve().parents[1]
TESTS = [ROOT / "tests" / f"test_kernels_{name}.py" for name in ("block_triton", "few_linears", "router", "step")]
# The definition holds what the kernels do not; beyond this many tokens it is not timed.
TORCH_TOKENS = 8192


@dataclass(frozen=True)
class Sizes:
    """A model's, as far as these ops see them."""

    name: str
    hidden: int
    heads: int
    kept: int
    latent: int
    streams: int = 4
    width: int = 512
    turned: int = 64
    index_heads: int = 64
    index_width: int = 128
    iters: int = 20
    experts: int = 256
    chosen: int = 6


FLASH = Sizes("flash", hidden=4096, heads=64, kept=512, latent=1024)
PRO = Sizes("pro", hidden=7168, heads=128, kept=1024, latent=1536, experts=384)
SMALL = Sizes(*("small", 40, 3, 4, 24), width=16, turned=8, index_heads=8, index_width=16, iters=2, experts=12, chosen=3)


@dataclass(frozen=True)
class Work:
    """One call: `fused` and `plain` make the same; `flops` and `bytes` count every argument and result once."""

    name: str
    fused: Callable[[], object]
    plain: Callable[[], object]
    flops: float
    bytes: float


@dataclass(frozen=True)
class Timed:
    name: str
    microseconds: float
    tflops: float
    gigabytes_per_second: float
    roofline_fraction: float
    torch_microseconds: float | None


def draw(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*sizes, device=device(), dtype=torch.float32).to(dtype)


def nbytes(*given) -> int:
    lists = (list, tuple)
    return sum(t.nbytes if isinstance(t, Tensor) else nbytes(*t) if isinstance(t, lists) else 0 for t in given)


def work(name: str, op: Callable, definition: Callable, given: tuple, flops: float) -> Work:
    """Bytes of what is given and of what comes back."""
    return Work(name, lambda: op(*given), lambda: definition(*given), flops, nbytes(*given, op(*given)))


def hyper(sizes: Sizes, batch: int, tokens: int) -> Iterator[Work]:
    n, h, t = sizes.streams, sizes.hidden, batch * tokens
    mixes = (2 + n) * n
    x, out = draw(batch, tokens, n, h), draw(batch, tokens, h)
    fn = draw(mixes, n * h, dtype=torch.float32) * (n * h) ** -0.5
    read = (fn, *(draw(k, dtype=torch.float32) for k in (3, mixes, h)), sizes.iters, 1e-6, 1e-6, 1e-6)
    _, post, comb, *_ = hyper_connection.fused_read(x, *read)
    reads, writes = 2.0 * t * n * h * (mixes + 1), 2.0 * t * n * h * (n + 1)
    yield work("hyper read", hyper_connection.fused_read, hyper_connection.read_definition, (x, *read), reads)
    yield work("hyper write", hyper_connection.fused_write, hyper_connection.write_back, (x, comb, post, out), writes)
    both = (x, comb, post, out, *read)
    yield work("hyper write+read", hyper_connection.fused_write_read, hyper_connection.write_read_definition, both, reads + writes)


def rows(sizes: Sizes, batch: int, tokens: int) -> Iterator[Work]:
    angles = draw(batch, tokens, sizes.turned // 2, dtype=torch.float32)
    turn = (angles.cos(), angles.sin())
    valid = torch.ones(batch, tokens, dtype=torch.bool, device=device())
    weight = draw(sizes.width, dtype=torch.float32)
    op, definition = norm_rotary.fused_norm_rotary, norm_rotary.norm_rotary_definition
    for name, heads, weighted in (("queries", sizes.heads, None), ("keys", 1, weight)):
        x = draw(batch, tokens, heads, sizes.width)
        yield work(f"norm+rotary {name}", op, definition, (x, weighted, *turn, valid, 1e-6, True, False), 5.0 * x.numel())


def linears(sizes: Sizes, batch: int, tokens: int) -> Iterator[Work]:
    """What a CSA block's attention maps its input to, and its latent, each as one launch."""
    if batch * tokens > few_linears.MAX_TOKENS:
        return
    d, index = sizes.width, sizes.index_width
    of_input = (sizes.latent, d, 2 * d, 2 * d, 2 * index, 2 * index, sizes.index_heads)
    of_latent = (sizes.heads * d, sizes.index_heads * index)
    kinds = {
        "input": (sizes.hidden, of_input, [1, 1, 2, 2, 1], [False, False, True, True, True], None),
        "latent": (sizes.latent, of_latent, [1, 1], [False, False], draw(sizes.latent, dtype=torch.float32)),
    }
    for name, (width, heights, beside, wide, norm) in kinds.items():
        x = draw(batch * tokens, width)
        weights = [draw(o, width) * width**-0.5 for o in heights]
        held = {"bf16": (weights, [None] * len(weights))}
        # Whatever stands for scales asks about codes.
        if name == "latent" and few_linears.refusal("triton", x.device, x.dtype, len(x), weights, scales=weights) is None:
            held["fp8"] = tuple(map(list, zip(*(quantize_fp8(w.float()) for w in weights), strict=True)))
        for form, (matrices, scales) in held.items():
            given = (x, norm, matrices, scales, beside, wide, 1e-6)
            flops = 2.0 * len(x) * width * sum(heights)
            yield work(f"linears of {name} {form}", few_linears.few_linears, few_linears.few_linears_definition, given, flops)


def steps(sizes: Sizes, batch: int, past: int) -> Iterator[Work]:
    """Norm and rotary of what a step of one token projects; the ring is written, too."""
    d, index, angles = sizes.width, sizes.index_width, draw(batch, 1, sizes.turned // 2, dtype=torch.float32)
    turn, before = (angles.cos(), angles.sin()), torch.full((batch,), past, device=device())
    weights = draw(sizes.latent, dtype=torch.float32), draw(d, dtype=torch.float32)
    latent, key, ring = draw(batch, 1, sizes.latent), draw(batch, 1, d), draw(batch, 8, d)
    given = (latent, key, ring, *weights, *turn, before, before + 1, 1e-6, 1e-6)
    found = work(
        "step latent+key", step_rows.latent_and_key, step_rows.latent_and_key_definition, given, 5.0 * (latent.numel() + key.numel())
    )
    # Of the ring one column is written.
    yield replace(found, bytes=found.bytes - ring.nbytes + key.nbytes)
    queries, of_index = draw(batch, 1, sizes.heads, d), draw(batch, 1, sizes.index_heads, index)
    given, numbers = (queries, of_index, *turn, 1e-6), queries.numel() + of_index.numel()
    yield work("step queries", step_rows.turned_queries, step_rows.turned_queries_definition, given, 5.0 * numbers)


def routes(sizes: Sizes, batch: int, tokens: int) -> Iterator[Work]:
    t, experts = batch * tokens, sizes.experts
    if t > router.FEW_TOKENS:
        return
    x, weight = draw(t, sizes.hidden), draw(experts, sizes.hidden) * sizes.hidden**-0.5
    given = (x, weight, draw(experts, dtype=torch.float32), None, None, None, sizes.chosen, 1.5)
    yield work("router", router.fused_router, router.router_definition, given, 2.0 * t * experts * sizes.hidden)


def pools(sizes: Sizes, batch: int, tokens: int) -> Iterator[Work]:
    for kind, rate, series in (("CSA", 4, 2), ("HCA", 128, 1)):
        entries, d = tokens // rate, sizes.width
        if entries == 0:
            continue
        slots = torch.arange(-rate * (series - 1), rate, device=device())
        index = (torch.arange(entries, device=device()).unsqueeze(1) * rate + slots).expand(batch, -1, -1).contiguous()
        angles = draw(batch, entries, sizes.turned // 2, dtype=torch.float32)
        given = (
            *(draw(batch, tokens, 2 * series * d, dtype=torch.float32), draw(rate, series * d, dtype=torch.float32)),
            *(draw(d, dtype=torch.float32), angles.cos(), angles.sin(), index.clamp(min=0), index >= 0),
            *(torch.ones(batch, entries, dtype=torch.bool, device=device()), 1e-6, torch.bfloat16),
        )
        yield work(f"pool {kind}", pooling.fused_pool, pooling.pool_definition, given, 8.0 * batch * tokens * series * d)


def indexer(sizes: Sizes, batch: int, tokens: int, past: int = 0) -> Iterator[Work]:
    entries, h, d = (past + tokens) // 4, sizes.index_heads, sizes.index_width
    if entries == 0:
        return
    queries, keys, weights = draw(batch, tokens, h, d), draw(batch, entries, d), draw(batch, tokens, h, dtype=torch.float32)
    positions = torch.arange(past, past + tokens, device=device()).expand(batch, -1).contiguous()
    codes, scale = keys.to(torch.float8_e4m3fn), torch.ones(batch, entries, device=device())
    pairs = batch * sum(min((p + 1) // 4, entries) for p in range(past, past + tokens))
    for name, held, scales in (("bf16", keys, None), ("fp8", codes, scale)):
        given = (queries, held, scales, weights, positions, 4, sizes.kept, past)
        plain = held if scales is None else held.to(torch.bfloat16)

        def choose(plain=plain) -> Tensor:
            return index_scores.select_by_index(queries, plain, weights, positions, 4, sizes.kept, past)

        found = work(f"indexer {name}", index_scores.fused_select, lambda *_: None, given, 2.0 * pairs * h * d)
        # Scores come and go once: they are not held, but they are read to choose from.
        yield replace(found, plain=choose, bytes=found.bytes + 8 * pairs)


def works(sizes: Sizes, batch: int, tokens: int, past: int) -> Iterator[Work]:
    if past == 0 or past < 1 << 14:
        yield from hyper(sizes, batch, tokens)
        yield from routes(sizes, batch, tokens)
        yield from linears(sizes, batch, tokens)
        yield from rows(sizes, batch, tokens)
    if past == 0:
        yield from pools(sizes, batch, tokens)
    else:
        yield from steps(sizes, batch, past)
    yield from indexer(sizes, batch, tokens, past)


# Rows, tokens of each, tokens before them.
PREFILL = [(1, k << 10, 0) for k in (1, 8, 64)]
DECODE = [(batch, 1, (k << 10) - 1) for k in (8, 64) for batch in (1, 16, 32, 128)]


def check_result(one: Work) -> None:
    """An op against its definition in plain torch, over the same bfloat16 arguments."""
    pair = [(out,) if isinstance(out, Tensor) else out for out in (one.fused(), one.plain())]
    for got, expected in zip(*pair, strict=True):
        if got.dtype in (torch.int32, torch.int64):
            wrong = (got.sort(-1).values != expected.sort(-1).values).any(-1).float().mean().item()
            assert wrong <= 0.01, f"{one.name}: {wrong:.2%} of the selections differ"
        else:
            assert_close(got, expected, LIMIT, one.name)


def measure(one: Work, name: str, flops: float, bandwidth: float, is_decode: bool, compares: bool) -> Timed:
    with torch.no_grad():
        seconds = median_seconds(graphed(one.fused) if is_decode else one.fused)
        plain = median_seconds(one.plain, repeats=3) * 1e6 if compares else None
    return Timed(
        name,
        microseconds=seconds * 1e6,
        tflops=one.flops / seconds / 1e12,
        gigabytes_per_second=one.bytes / seconds / 1e9,
        roofline_fraction=max(one.flops / flops, one.bytes / bandwidth) / seconds,
        torch_microseconds=plain,
    )


def tests_pass(is_native: bool) -> bool:
    chosen = ["-m", "gpu"] if is_native else ["-k", "test_numbers or test_selection or test_rows or test_pools"]
    pytest = Path(sys.executable).with_name("pytest")
    return subprocess.run([pytest, *TESTS, "-q", *chosen], cwd=ROOT).returncode == 0


def line(row: Timed) -> str:
    plain = "" if row.torch_microseconds is None else f"{row.torch_microseconds:.0f}"
    speed = f"{row.microseconds:10.1f} {row.tflops:8.1f} {row.gigabytes_per_second:6.0f} {row.roofline_fraction:8.2f}"
    return f"{row.name:44s} {speed} {plain:>10s}"


def keep(lines: list[str], name: str) -> None:
    """One file per device and day."""
    today = datetime.date.today()
    title = name.lower().replace(" ", "_").replace("/", "_")
    text = "\n".join((f"# Kernels of a block, {name}, {today}", "", "`python benchmarks/blocks.py`", "", "```text", *lines, "```", ""))
    (ROOT / "benchmarks" / "results" / f"blocks_{title}_{today}.md").write_text(text)


def timed(is_check: bool, only: str, flops: float, bandwidth: float) -> Iterator[Timed]:
    models = (SMALL,) if is_check else (FLASH, PRO)
    shapes = [(1, 5, 0), (2, 1, 20)] if is_check else PREFILL + DECODE
    for sizes in models:
        for batch, tokens, past in shapes:
            where = f"decode {(past + 1) >> 10}k batch {batch}" if past else f"prefill {tokens}" if is_check else f"prefill {tokens >> 10}k"
            compares = tokens * batch <= TORCH_TOKENS
            torch.manual_seed(0)
            with torch.no_grad():
                for one in works(sizes, batch, tokens, past):
                    name = f"{sizes.name} {one.name} {where}"
                    if only in name:
                        if compares:
                            check_result(one)
                        yield measure(one, name, flops, bandwidth, bool(past), compares)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names that hold this text")
    parser.add_argument("--check", action="store_true", help="every step at small sizes; its times mean nothing")
    parser.add_argument("--launches", action="store_true", help="what a decoding step launches, counted in the interpreter")
    args = parser.parse_args()
    if (args.check or args.launches) and device() == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        # Triton decides when it is imported: once more, from the start.
        os.execve(sys.executable, [sys.executable, __file__, *sys.argv[1:]], os.environ | {"TRITON_INTERPRET": "1"})
    if args.launches:
        found = block_launches()
        print("\n".join(report(found)))
        print(json.dumps({"launches": {kind: dict(count) for kind, count in found.items()}}))
        return 0
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
    lines.append(f"{'work':44s} {'us':>10s} {'TFLOP/s':>8s} {'GB/s':>6s} {'roofline':>8s} {'torch us':>10s}")
    print("\n".join(lines))
    times = []
    for row in timed(args.check, args.only, flops, bandwidth):
        times.append(asdict(row))
        lines.append(line(row))
        print(lines[-1], flush=True)
    found = {
        "correct": True,
        "device": name,
        "torch": torch.__version__,
        "product_flops": flops,
        "copy_bytes_per_second": bandwidth,
        "times": times,
    }
    if not args.only:
        found["blocks"] = []
        for whole in whole_blocks(args.check, flops, bandwidth):
            found["blocks"].append(whole)
            lines.append(", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in whole.items()))
            print(lines[-1], flush=True)
        if device() == "cuda" and not args.check:
            keep(lines, name)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
