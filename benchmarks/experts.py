"""Routed experts: their tests first, then times beside what the device can do at most.

    python benchmarks/experts.py [--only TEXT] [--results FOLDER] [--check]

With a CUDA device: Flash and Pro shapes at 1 to 64k tokens, uniform and Zipf-like routing, weights
in bfloat16, FP8 (also with activations as FP8 codes) and FP4. Baselines over the same bfloat16
weights: torch's grouped product on sorted rows, a loop over the experts that are hit, and
transformers' implementations; over codes: our torch way, which decodes the experts that are hit.
Times are medians with a cold L2; the roofline is measured in the same run.
Without one: the torch way beside the same baselines at the sizes of a small model, CPU time,
repeats interleaved. A red test prints no time; the last line is JSON, which --results also writes
to experts_DEVICE.json. --check compares all ways at small sizes, here, and times nothing.
"""

import argparse
import json
import re
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
from dsv4.kernels.grouped_experts import Stored, grouped_experts, refusal, swiglu
from dsv4.kernels.grouped_linear import decode
from dsv4.kernels.numeric import wide
from dsv4.kernels.quantize import fp4_scale_shape, fp8_scale_shape
from dsv4.kernels.routing import sort_by_expert
from dsv4.testing import relative_error

TESTS = [Path(__file__).resolve().parents[1] / "tests" / f"test_kernels_grouped_experts{suffix}.py" for suffix in ("", "_triton")]
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
# A repeat is of at least so many tokens, in several calls.
CPU_TOKENS_AT_LEAST = 64
CHECKED_TOKENS = (1, 7, 40)
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


def grouped(x: Tensor, indices: Tensor, weights: Tensor, bank: Stored) -> Tensor:
    """Sorted rows, torch.nn.functional.grouped_mm twice, a sum over each token's slots."""
    order, ends = sort_by_expert(indices, bank.num_experts)
    rows = x.index_select(0, order // indices.shape[1])
    gate, up = torch.nn.functional.grouped_mm(rows, bank.first.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    out = torch.nn.functional.grouped_mm(swiglu(gate, up, LIMIT), bank.second.transpose(1, 2), offs=ends)
    slots = torch.empty_like(out).index_copy_(0, order, out).unflatten(0, indices.shape)
    return (slots.float() * weights.unsqueeze(-1)).sum(1)


def loop(x: Tensor, indices: Tensor, weights: Tensor, bank: Stored) -> Tensor:
    """Expert by expert, those that are hit."""
    total = torch.zeros_like(wide(x))
    for e in indices.unique().tolist():
        token, slot = (indices == e).nonzero(as_tuple=True)
        gate, up = torch.nn.functional.linear(x[token], bank.first[e]).chunk(2, dim=-1)
        out = torch.nn.functional.linear(swiglu(gate, up, LIMIT), bank.second[e])
        total.index_add_(0, token, wide(out) * weights[token, slot].unsqueeze(-1))
    return total


def baselines(model: Model, bank: Stored, x: Tensor, slots: tuple[Tensor, Tensor]) -> dict[str, Callable]:
    """Over a dense bank."""
    ways = {"grouped_mm": lambda: grouped(x, *slots, bank), "loop": lambda: loop(x, *slots, bank)}
    for way, experts in theirs(model, bank).items():
        if fits(way, bank, slots[0]):
            ways[way] = lambda experts=experts: experts(x, *slots)
    return ways


def fits(way: str, bank: Stored, indices: Tensor) -> bool:
    copied = indices.numel() * bank.first[0].numel() * bank.first.element_size()
    return not way.endswith("batched_mm") or copied <= BATCHED_BYTES


def tests_pass(is_native: bool) -> bool:
    chosen = ["-m", "gpu"] if is_native else []
    pytest = Path(sys.executable).with_name("pytest")
    return subprocess.run([pytest, *TESTS, "-q", *chosen], cwd=TESTS[0].parents[1]).returncode == 0


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
    ways["torch"] = lambda: grouped_experts(x, *slots, bank, LIMIT)
    if form == "dense":
        ways |= baselines(model, bank, x, slots)
    agree({way: work() for way, work in ways.items()}, x.dtype)
    if form == "fp8" and refusal("triton", x.device, x.dtype, form, "deployed") is None:
        # Other numbers by design; a tensor core multiplies E4M3 twice as fast.
        ways["triton fp8 x fp8"] = lambda: grouped_experts(x, *slots, bank, LIMIT, "triton", numerics="deployed")
    hit = slots[0].unique().numel()
    flops = 6 * model.hidden * model.inner * slots[0].numel()
    weights = 3 * model.hidden * model.inner * hit * BYTES_PER_WEIGHT[form]
    # Activations in bfloat16, their sums in float32, each once.
    moved = weights + tokens * model.hidden * (2 + 4)
    rows = []
    for way, work in ways.items():
        least = max(flops / flops_limit / (2 if way == "triton fp8 x fp8" else 1), moved / bandwidth)
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
    """Median milliseconds of CPU time, repeats interleaved so that a noisy neighbour hits all."""
    bank = draw_bank(SMALL, "dense", "cpu", torch.float32)
    rows = []
    for tokens in CPU_TOKENS:
        name = f"{SMALL.name} float32 uniform {tokens}"
        if only not in name:
            continue
        x = torch.randn(tokens, SMALL.hidden)
        slots = route(SMALL, tokens, "uniform", "cpu")
        ways = {"ours": lambda x=x, slots=slots: grouped_experts(x, *slots, bank, LIMIT)} | baselines(SMALL, bank, x, slots)
        agree({way: work() for way, work in ways.items()}, x.dtype)
        calls = -(-CPU_TOKENS_AT_LEAST // tokens)
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(CPU_REPEATS):
            for way, work in ways.items():
                start = time.process_time()
                for _ in range(calls):
                    work()
                times[way].append((time.process_time() - start) / calls)
        medians = {way: 1e3 * statistics.median(found) for way, found in times.items()}
        best = min((way for way in ways if way.startswith("transformers")), key=medians.get)
        ratio = statistics.median(a / b for a, b in zip(times[best], times["ours"], strict=True))
        rows.append({"name": name, "ms": medians, "best_of_theirs": best, "best_of_theirs_over_ours": ratio})
        shown = "  ".join(f"{way} {ms:.3f} ms" for way, ms in medians.items())
        print(f"{name:28s} {shown}  best of theirs / ours {ratio:.2f}", flush=True)
    return rows


@torch.no_grad()
def check() -> None:
    """All ways that run here against the loop in float64; ValueError where one differs."""
    for form in FORMS:
        bank = draw_bank(SMALL, form, "cpu", torch.float32)
        exact = [bank.first, bank.second]
        if form != "dense":
            exact = [
                torch.stack([decode(c, s, torch.float64, parts) for c, s in zip(codes, scales, strict=True)])
                for codes, scales, parts in ((bank.first, bank.first_scale, 2), (bank.second, bank.second_scale, 1))
            ]
        exact = Stored(exact[0].double(), None, exact[1].double(), None)
        for tokens in CHECKED_TOKENS:
            for routing in ROUTINGS:
                x, slots = torch.randn(tokens, SMALL.hidden), route(SMALL, tokens, routing, "cpu")
                outputs = {"float64 loop": loop(x.double(), slots[0], slots[1].double(), exact)}
                outputs["ours"] = grouped_experts(x, *slots, bank, LIMIT)
                if form == "dense":
                    outputs |= {way: work() for way, work in baselines(SMALL, bank, x, slots).items()}
                agree(outputs, x.dtype)
                print(f"{SMALL.name} {form} {routing} {tokens}: {', '.join(outputs)} agree")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--results", type=Path, help="folder that the JSON is written to as well")
    parser.add_argument("--check", action="store_true", help="compare all ways at small sizes on the CPU, and time nothing")
    args = parser.parse_args(arguments)
    torch.manual_seed(SEED)
    if args.check:
        check()
        print(json.dumps({"correct": True}))
        return 0
    is_native = torch.cuda.is_available() and available("triton", "cuda") is None
    if not tests_pass(is_native):
        print(json.dumps({"correct": False, "times": []}))
        return 1
    result = {"correct": True, "torch": torch.__version__}
    if is_native:
        result |= {
            "device": torch.cuda.get_device_name(),
            "times": [asdict(row) for row in on_device(args.only)],
        }
    else:
        result |= {"device": "cpu", "threads": torch.get_num_threads(), "times": on_cpu(args.only)}
    print(json.dumps(result))
    if args.results is not None:
        name = re.sub(r"\W+", "_", result["device"]).lower()
        (args.results / f"experts_{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
