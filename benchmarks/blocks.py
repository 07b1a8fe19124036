"""The kernels of a block around attention and experts: tests first, then times beside what the device can do at most.

    python benchmarks/blocks.py [--only TEXT] [--check] [--launches]

Hyper-connections, norm and rotary, pooled entries and the indexer at the published models' sizes; a whole block at 8192 tokens against the
sum of its parts' rooflines; a decoding step in one CUDA graph. Without a CUDA device the tests run in Triton's interpreter and nothing is
timed; `--check` walks the whole path at small sizes there, without the tests; `--launches` counts what a decoding step launches. A red
test, or a result that differs from the definition, prints no time. The roofline is measured in the same run: a large copy and a large
product. Times are medians with a cold L2, of decoding inside a CUDA graph. The baseline is the same op in plain torch. The last line is
JSON; on a CUDA device the table is also kept in benchmarks/results/.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest.mock import patch

import torch
from attention import device, graphed, median_seconds, roofline
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from dsv4.config import CSA, HCA, MOE, SLIDING, Dsv4Config
from dsv4.kernels import hyper_connection, index_scores, norm_rotary, pooling
from dsv4.kernels.backend import available
from dsv4.testing import assert_close

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests" / "test_kernels_block_triton.py"
# The definition holds what the kernels do not; beyond this many tokens it is not timed.
TORCH_TOKENS = 8192
WINDOW = 128


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


FLASH = Sizes("flash", hidden=4096, heads=64, kept=512, latent=1024)
PRO = Sizes("pro", hidden=7168, heads=128, kept=1024, latent=1536)
SMALL = Sizes("small", hidden=40, heads=3, kept=4, latent=24, width=16, turned=8, index_heads=8, index_width=16, iters=2)


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


def nbytes(*tensors) -> int:
    return sum(t.nbytes for t in tensors if isinstance(t, Tensor))


def work(name: str, op: Callable, definition: Callable, given: tuple, flops: float) -> Work:
    """Bytes of what is given and of what comes back."""
    out = op(*given)
    outs = out if isinstance(out, tuple) else (out,)
    return Work(name, lambda: op(*given), lambda: definition(*given), flops, nbytes(*given, *outs))


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
        yield from rows(sizes, batch, tokens)
    if past == 0:
        yield from pools(sizes, batch, tokens)
    yield from indexer(sizes, batch, tokens, past)


# Rows, tokens of each, tokens before them.
PREFILL = [(1, k << 10, 0) for k in (1, 8, 64)]
DECODE = [(batch, 1, (k << 10) - 1) for k in (8, 64) for batch in (1, 32, 128)]


def check_results(sizes: Sizes, batch: int, tokens: int, past: int) -> None:
    """Every op against its definition in plain torch, over the same bfloat16 arguments."""
    for one in works(sizes, batch, tokens, past):
        pair = [out if isinstance(out, tuple) else (out,) for out in (one.fused(), one.plain())]
        for got, expected in zip(*pair, strict=True):
            if got.dtype == torch.int64:
                wrong = (got.sort(-1).values != expected.sort(-1).values).any(-1).float().mean().item()
                assert wrong <= 0.01, f"{one.name}: {wrong:.2%} of the selections differ"
            else:
                assert_close(got, expected, "bfloat16 way", one.name)


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


# A decoding step, by what it launches.


class Launches(TorchDispatchMode):
    """Counts ops that launch a kernel, those inside this package's ops among them; views and empty tensors launch none."""

    QUIET = (
        *("empty", "view", "reshape", "expand", "as_strided", "slice", "select", "transpose", "permute", "squeeze", "split", "chunk"),
        *("unbind", "detach", "alias", "unfold", "lift", "_local_scalar", "is_", "narrow"),
    )

    def __init__(self):
        super().__init__()
        self.count: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name in OPDEFS:
            # The op's own function, whose tensor ops come here too.
            with self:
                return OPDEFS[name]._init_fn(*args, **(kwargs or {}))
        name = name.split("::")[1]
        out = func(*args, **(kwargs or {}))
        is_quiet = name == "t" or any(word in name for word in self.QUIET)
        if "copy" in name or not is_quiet:
            self.count[name] += 1
        return out


@contextmanager
def triton_launches(count: Counter) -> Iterator[None]:
    """Counts kernels that Triton's interpreter is asked for."""
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__

    def counted(self, *args, **kwargs):
        count[self.fn.__name__] += 1
        # What the interpreter does with tensors is no launch.
        with _disable_current_modes():
            return run(self, *args, **kwargs)

    with patch.object(GridExecutor, "__call__", counted):
        yield


def step_launches(kinds: tuple[str, ...]) -> Counter:
    """What one decoding step of fixed shape launches in a small bfloat16 model."""
    from dsv4 import Dsv4

    rates = {CSA: 4, HCA: 8}
    config = replace(
        Dsv4Config.tiny(),
        num_hidden_layers=len(kinds),
        layer_types=kinds,
        mlp_layer_types=(MOE,) * len(kinds),
        compress_rates=rates,
        index_topk=2,
        torch_dtype=torch.bfloat16,
    )
    model = Dsv4.from_config(config, dtype=torch.bfloat16, kernels="triton", device=device())
    cache = model.new_kv_cache(1, 64)
    ids = torch.arange(17, device=device())[None] % config.vocab_size
    with torch.no_grad():
        model(ids, kv_cache=cache)
        model.forward_static(ids[:, :1], cache)
        with Launches() as launches, triton_launches(launches.count):
            model.forward_static(ids[:, :1], cache)
    return launches.count


def block_launches() -> dict[str, Counter]:
    """By kind of block: two blocks' launches less one block's."""
    return {kind: step_launches((kind, kind)) - step_launches((kind,)) for kind in (SLIDING, CSA, HCA)}


# A whole block.


def block_parts(sizes: Sizes, tokens: int) -> dict[str, tuple[float, float]]:
    """(FLOPs, bytes) of each part of a CSA block of V4-Flash in bfloat16, every operand once."""
    t, h, n, d, heads = tokens, sizes.hidden, sizes.streams, sizes.width, sizes.heads

    def linear(i: int, o: int, size: int = 2) -> tuple[float, float]:
        return 2.0 * t * i * o, size * (t * (i + o) + i * o)

    keys = sum(min(p + 1, WINDOW) + min((p + 1) // 4, sizes.kept) for p in range(t))
    pairs = sum((p + 1) // 4 for p in range(t))
    inner, experts, chosen = 2048, 256, 6
    streams = 2.0 * t * n * h
    return {
        "hyper read": (2.0 * t * n * h * 25, streams + 4 * t * h),
        "hyper write+read": (2.0 * t * n * h * 30, 2 * streams + 6 * t * h),
        "hyper write": (2.0 * t * n * h * 5, 2 * streams + 2 * t * h),
        "query latent": linear(h, sizes.latent),
        "queries": linear(sizes.latent, heads * d),
        "queries normed": (0.0, 4.0 * t * heads * d),
        "keys": linear(h, d),
        "compressor": (4.0 * t * h * 2 * d + 0.0, 4.0 * t * (h + 4 * d) + 8.0 * h * d),
        "indexer keys": linear(h, 4 * sizes.index_width),
        "indexer queries": linear(sizes.latent, sizes.index_heads * sizes.index_width),
        "indexer": (2.0 * pairs * sizes.index_heads * sizes.index_width, 8.0 * pairs + 8 * t * sizes.kept),
        "attention": (4.0 * heads * d * keys, 4.0 * t * heads * d),
        "heads turned back": (0.0, 4.0 * t * heads * d),
        "output by group": (2.0 * t * heads * d * 1024, 2.0 * t * (heads * d + 8 * 1024)),
        "output": linear(8 * 1024, h),
        "shared expert": (6.0 * t * h * inner, 2.0 * (2 * t * h + 3 * h * inner)),
        "experts": (6.0 * t * chosen * h * inner, 2.0 * (2 * t * h + 3 * min(experts, t * chosen) * h * inner)),
    }


def whole_block(tokens: int, flops: float, bandwidth: float) -> dict:
    """A CSA block of V4-Flash: its time, and the sum of its parts' least times."""
    from dsv4 import Dsv4

    config = replace(Dsv4Config.flash(), num_hidden_layers=1, layer_types=(CSA,), mlp_layer_types=(MOE,))
    model = Dsv4.from_config(config, dtype=torch.bfloat16, device="cuda", kernels="triton")
    streams = draw(1, tokens, config.hc_mult, config.hidden_size)
    ids = torch.zeros(1, tokens, dtype=torch.int64, device="cuda")
    with torch.no_grad():
        seconds = median_seconds(lambda: model(streams, input_ids=ids, start_at_layer=0, stop_at_layer=1))
    least = {name: max(f / flops, b / bandwidth) for name, (f, b) in block_parts(FLASH, tokens).items()}
    return {
        "tokens": tokens,
        "milliseconds": seconds * 1e3,
        "least_milliseconds": sum(least.values()) * 1e3,
        "over": seconds / sum(least.values()),
    }


def decode_step() -> dict:
    """A decoding step of one CSA block of V4-Flash in one CUDA graph: its time and the kernels that it launches."""
    from dsv4 import Dsv4

    config = replace(Dsv4Config.flash(), num_hidden_layers=1, layer_types=(CSA,), mlp_layer_types=(MOE,))
    model = Dsv4.from_config(config, dtype=torch.bfloat16, device="cuda", kernels="triton")
    cache = model.new_kv_cache(1, 8192)
    ids = torch.zeros(1, 1, dtype=torch.int64, device="cuda")
    with torch.no_grad():
        model(ids.expand(1, 4096), kv_cache=cache)
        cache.fix(1)
        active = torch.ones(1, dtype=torch.bool, device="cuda")
        seconds = median_seconds(graphed(lambda: model.forward_static(ids, cache, active)))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            model.forward_static(ids, cache, active)
    kernels = sum(event.count for event in profile.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA)
    return {"microseconds": seconds * 1e6, "kernels_of_block_embedding_and_head": kernels}


def tests_pass(is_native: bool) -> bool:
    chosen = ["-m", "gpu"] if is_native else ["-k", "test_numbers or test_selection"]
    pytest = Path(sys.executable).with_name("pytest")
    return subprocess.run([pytest, TESTS, "-q", *chosen], cwd=ROOT).returncode == 0


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
            if only not in f"{sizes.name} {where}" and not any(only in word for word in ("hyper", "norm+rotary", "pool", "indexer")):
                continue
            with torch.no_grad():
                if tokens * batch <= TORCH_TOKENS:
                    check_results(sizes, batch, tokens, past)
                for one in works(sizes, batch, tokens, past):
                    name = f"{sizes.name} {one.name} {where}"
                    if only in name:
                        yield measure(one, name, flops, bandwidth, bool(past), tokens * batch <= TORCH_TOKENS)


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
        for kind, count in found.items():
            print(f"{kind}: {count.total()} launches: " + ", ".join(f"{n} {name}" for name, n in count.most_common()))
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
    if device() == "cuda" and not args.check and not args.only:
        found |= {"block": whole_block(8192, flops, bandwidth), "decode_step": decode_step()}
        lines += [f"{part}: {found[part]}" for part in ("block", "decode_step")]
        print("\n".join(lines[-2:]))
        keep(lines, name)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
