"""Routed experts: their tests first, then times beside what the device can do at most.

    python benchmarks/experts.py [--only TEXT]

With a CUDA device: Flash and Pro shapes at 1 to 64k tokens, uniform and Zipf-like routing, weights
in bfloat16, FP8 and FP4, beside torch's grouped product and transformers' implementations over
bfloat16 weights. Times are medians with a cold L2; the roofline is measured in the same run.
Without one: the torch way beside transformers' implementations at the sizes of a small model,
medians of interleaved repeats. A red test prints no time; the last line is JSON.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from attention import median_seconds, roofline
from torch import Tensor

from dsv4.kernels.backend import available
from dsv4.kernels.grouped_experts import Stored, grouped_experts, refusal
from dsv4.kernels.quantize import fp4_scale_shape, fp8_scale_shape
from dsv4.testing import relative_error

TESTS = Path(__file__).resolve().parents[1] / "tests" / "test_kernels_grouped_experts_triton.py"
LIMIT = 10.0
TOKENS = (1, 32, 128, 1024, 8192, 65536)
ROUTINGS = ("uniform", "zipf")
FORMS = ("fp4", "fp8", "dense")
BYTES_PER_WEIGHT = {"dense": 2.0, "fp8": 1.0, "fp4": 0.5 + 1 / 32}
SEED = 0
# Scale bytes that keep weights near 1/64.
SCALE_BYTES = (116, 120)
# transformers' batched way copies a matrix for every slot; bytes that it may copy.
BATCHED_BYTES = 1 << 30
CPU_TOKENS = (1, 64, 256, 1024, 4096)
CPU_REPEATS = 15
# Of the largest value: two ways of summing in this dtype.
AGREE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    inner: int
    experts: int
    top_k: int


FLASH = Model("flash", 4096, 2048, 256, 6)
PRO = Model("pro", 7168, 3072, 384, 6)
SMALL = Model("small", 256, 128, 16, 4)


@dataclass(frozen=True)
class Timed:
    name: str
    way: str
    microseconds: float
    tflops: float
    gigabytes_per_second: float
    roofline_fraction: float


def route(model: Model, tokens: int, routing: str, device: str) -> tuple[Tensor, Tensor]:
    """Distinct experts of each token, expert r of a random order with weight 1 or 1 / (r + 1)."""
    share = torch.ones(model.experts, device=device)
    if routing == "zipf":
        share = 1 / (1 + torch.randperm(model.experts, device=device)).float()
    indices = torch.multinomial(share.expand(tokens, -1), model.top_k)
    return indices, torch.rand(tokens, model.top_k, device=device)


def draw_bank(model: Model, form: str, device: str, dtype: torch.dtype) -> Stored:
    first = (model.experts, 2 * model.inner, model.hidden)
    second = (model.experts, model.hidden, model.inner)
    if form == "dense":
        scaled = [torch.randn(s, device=device, dtype=dtype).mul_(1 / 64) for s in (first, second)]
        return Stored(scaled[0], None, scaled[1], None)

    def codes(shape: tuple[int, ...], parts: int) -> tuple[Tensor, Tensor]:
        if form == "fp4":
            shape = (*shape[:2], shape[2] // 2)
        grid = fp4_scale_shape(shape) if form == "fp4" else fp8_scale_shape(shape, parts)
        scale = torch.randint(*SCALE_BYTES, grid, device=device, dtype=torch.uint8)
        # 0x00 to 0x7E: no code of a NaN.
        stored = torch.randint(0, 256 if form == "fp4" else 0x40, shape, device=device, dtype=torch.uint8)
        kind = torch.int8 if form == "fp4" else torch.float8_e4m3fn
        return stored.view(kind), scale.view(torch.float8_e8m0fnu)

    return Stored(*codes(first, 2), *codes(second, 1))


def theirs(model: Model, bank: Stored) -> dict[str, Callable]:
    """transformers' implementations over a dense bank."""
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

    ways = {}
    for name in ("eager", "batched_mm", "grouped_mm"):
        config = DeepseekV4Config(
            hidden_size=model.hidden,
            intermediate_size=model.inner,
            moe_intermediate_size=model.inner,
            num_local_experts=model.experts,
            n_routed_experts=model.experts,
            num_experts_per_tok=model.top_k,
            swiglu_limit=LIMIT,
        )
        config._experts_implementation = name
        with torch.device("meta"):
            experts = DeepseekV4Experts(config)
        experts.gate_up_proj = torch.nn.Parameter(bank.first, requires_grad=False)
        experts.down_proj = torch.nn.Parameter(bank.second, requires_grad=False)
        ways[f"transformers {name}"] = experts
    return ways


def fits(way: str, bank: Stored, indices: Tensor) -> bool:
    copied = indices.numel() * bank.first[0].numel() * bank.first.element_size()
    return not way.endswith("batched_mm") or copied <= BATCHED_BYTES


def tests_pass(is_native: bool) -> bool:
    chosen = ["-m", "gpu"] if is_native else []
    pytest = Path(sys.executable).with_name("pytest")
    return subprocess.run([pytest, TESTS, "-q", *chosen], cwd=TESTS.parents[1]).returncode == 0


def agree(outputs: dict[str, Tensor], dtype: torch.dtype) -> None:
    first, *rest = outputs.items()
    for name, out in rest:
        error = relative_error(out, first[1])
        if not error <= AGREE[dtype]:
            raise ValueError(f"{name} differs from {first[0]} by {error:.3g} of the largest value")


def on_device(only: str) -> list[Timed]:
    flops_limit, bandwidth = roofline()
    print(f"product {flops_limit / 1e12:.0f} TFLOP/s, copy {bandwidth / 1e9:.0f} GB/s")
    rows = []
    for model in (FLASH, PRO):
        for form in FORMS:
            if refusal("triton", torch.device("cuda"), torch.bfloat16, form) is not None:
                continue
            bank = draw_bank(model, form, "cuda", torch.bfloat16)
            for tokens in TOKENS:
                for routing in ROUTINGS:
                    name = f"{model.name} {form} {routing} {tokens}"
                    if only in name:
                        rows += measure(name, model, form, bank, tokens, routing, flops_limit, bandwidth)
            del bank
            torch.cuda.empty_cache()
    return rows


@torch.no_grad()
def measure(
    name: str,
    model: Model,
    form: str,
    bank: Stored,
    tokens: int,
    routing: str,
    flops_limit: float,
    bandwidth: float,
) -> list[Timed]:
    x = torch.randn(tokens, model.hidden, device="cuda", dtype=torch.bfloat16)
    slots = route(model, tokens, routing, "cuda")
    ways = {"triton": lambda: grouped_experts(x, *slots, bank, LIMIT, "triton")}
    if form == "dense":
        # Ours over torch.nn.functional.grouped_mm.
        ways["torch"] = lambda: grouped_experts(x, *slots, bank, LIMIT)
        for way, experts in theirs(model, bank).items():
            if fits(way, bank, slots[0]):
                ways[way] = lambda experts=experts: experts(x, *slots)
    agree({way: work() for way, work in ways.items()}, x.dtype)
    hit = slots[0].unique().numel()
    flops = 6 * model.hidden * model.inner * slots[0].numel()
    weights = 3 * model.hidden * model.inner * hit * BYTES_PER_WEIGHT[form]
    # Activations in bfloat16, their sums in float32, each once.
    moved = weights + tokens * model.hidden * (2 + 4)
    least = max(flops / flops_limit, moved / bandwidth)
    rows = []
    for way, work in ways.items():
        seconds = median_seconds(work)
        rows.append(
            Timed(
                name,
                way,
                seconds * 1e6,
                flops / seconds / 1e12,
                moved / seconds / 1e9,
                least / seconds,
            )
        )
        print(
            f"{name:32s} {way:24s} {seconds * 1e6:10.1f} us {rows[-1].tflops:7.1f} TFLOP/s "
            f"{rows[-1].gigabytes_per_second:6.0f} GB/s {least / seconds:5.2f} of the roofline",
            flush=True,
        )
    return rows


@torch.no_grad()
def on_cpu(only: str) -> list[dict]:
    """Median milliseconds of each way, repeats interleaved so that a noisy neighbour hits all."""
    bank = draw_bank(SMALL, "dense", "cpu", torch.float32)
    rows = []
    for tokens in CPU_TOKENS:
        name = f"{SMALL.name} float32 uniform {tokens}"
        if only not in name:
            continue
        x = torch.randn(tokens, SMALL.hidden)
        slots = route(SMALL, tokens, "uniform", "cpu")
        ways = {"ours": lambda x=x, slots=slots: grouped_experts(x, *slots, bank, LIMIT)}
        for way, experts in theirs(SMALL, bank).items():
            if fits(way, bank, slots[0]):
                ways[way] = lambda experts=experts, x=x, slots=slots: experts(x, *slots)
        agree({way: work() for way, work in ways.items()}, x.dtype)
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(CPU_REPEATS):
            for way, work in ways.items():
                start = time.perf_counter()
                work()
                times[way].append(time.perf_counter() - start)
        medians = {way: 1e3 * statistics.median(found) for way, found in times.items()}
        best = min(ms for way, ms in medians.items() if way != "ours")
        rows.append({"name": name, "ms": medians, "best_of_theirs_over_ours": best / medians["ours"]})
        shown = "  ".join(f"{way} {ms:.2f} ms" for way, ms in medians.items())
        print(f"{name:28s} {shown}  best of theirs / ours {best / medians['ours']:.2f}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    only = parser.parse_args().only
    is_native = torch.cuda.is_available() and available("triton", "cuda") is None
    if not tests_pass(is_native):
        print(json.dumps({"correct": False, "times": []}))
        return 1
    torch.manual_seed(SEED)
    result = {"correct": True, "torch": torch.__version__}
    if is_native:
        result |= {
            "device": torch.cuda.get_device_name(),
            "times": [asdict(row) for row in on_device(only)],
        }
    else:
        result |= {"device": "cpu", "threads": torch.get_num_threads(), "times": on_cpu(only)}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
