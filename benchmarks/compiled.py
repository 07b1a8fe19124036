"""What the kernels need of a device that is not here: each tile of the launch tables, compiled.

    python benchmarks/compiled.py [--arch sm_90] [--only TEXT]

Prints registers of a thread, bytes that spill, shared memory of a program, tensor-core instructions (each as often as the code names it),
how many programs fit a multiprocessor, and of one step of the loop the bytes read from memory and the operations per byte. Of a kernel
that is to run at the speed of memory two more, calculated: the bytes under way on a multiprocessor while a step waits, as a share of what
memory needs to be busy (its speed times its latency), and the issue slots that the step's instructions take of those there are at that
speed. Memory's speed is in reach where the first is 1 or more and the second is below 1; one over the second is the share that issue alone
leaves. No device is needed, and nothing is timed. REGISTRY names the kernels: a title and a function that gives their specs for an
architecture.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from dsv4.testing_kernels import Resources, resources

CAPABILITY = {"sm_80": 80, "sm_90": 90, "sm_100": 100}
# Bytes of shared memory of a multiprocessor, and what a program takes beside its own; registers; threads.
SHARED, SHARED_EACH = {"sm_80": 164 << 10, "sm_90": 228 << 10, "sm_100": 228 << 10}, 1 << 10
REGISTERS, THREADS, REGISTERS_OF_WARP = 65536, 2048, 256
PRODUCTS = ("wgmma.mma_async", "mma.sync", "tcgen05.mma")
# Published bytes per second of memory, multiprocessors, clocks per second (A100 80 GB, H200, B200); seconds that a read takes, assumed.
MEMORY = {"sm_80": (2.04e12, 108, 1.41e9), "sm_90": (4.8e12, 132, 1.755e9), "sm_100": (8.0e12, 148, 1.85e9)}
LATENCY = 700e-9
# Instructions that a multiprocessor issues in a clock, each for a warp.
ISSUED = 4
WIDTH = 512


@dataclass(frozen=True)
class Spec:
    """One kernel at one tile.

    Attributes:
        types: argument -> Triton's name of its type; aligned: integers that are multiples of 16.
        options: constants, num_warps and compiler options, as at the launch.
        step_bytes, step_operations: read from memory and computed by one program in one step of its loop (0: not counted).
        step_written: bytes that it writes in one step.
        ahead: steps that are read before they are needed (0: a kernel that is not to run at the speed of memory).
        programs: of a launch on each multiprocessor, where it has fewer than fit.
    """

    name: str
    kernel: object
    types: Mapping[str, str]
    options: Mapping
    aligned: tuple[str, ...] = ()
    step_bytes: int = 0
    step_operations: int = 0
    ahead: int = 0
    programs: float = math.inf
    step_written: int = 0


def typed(kernel, pointers: Mapping[str, str], rest: str = "*bf16", floats: tuple[str, ...] = ("scale",)) -> dict[str, str]:
    """Triton's type of each argument: the first of `pointers` whose word the name of a pointer holds, else `rest`; numbers are integers."""
    found = {}
    for name in kernel.arg_names:
        pointer = next((kind for word, kind in pointers.items() if word in name), rest)
        found[name] = pointer if name.endswith("_ptr") else "fp32" if name in floats else "i32"
    return found


def attention(arch: str) -> Iterator[Spec]:
    from dsv4.kernels import _decode_attention_triton as split
    from dsv4.kernels import _packed_attention_triton as packed
    from dsv4.kernels import _sparse_attention_gradient_triton as gradient
    from dsv4.kernels import _sparse_attention_triton as single

    pointers = {"position": "*i64", "selection": "*i64"}
    pointers |= dict.fromkeys(("sink", "lse", "mixed", "largest", "total", "whole", "pull", "token_grad", "entry_grad"), "*fp32")
    strides = ("query_b", "query_s", "query_n", "token_b", "token_k", "entry_b", "entry_e", "grad_b", "grad_s", "grad_n")

    def spec(name: str, kernel, launch, options: dict, products: int = 2, more_bytes: int = 0) -> Spec:
        named = f"{name}, {launch.heads} x {launch.keys}"
        read, computed = 2 * WIDTH * launch.keys + more_bytes, 2 * products * launch.heads * launch.keys * WIDTH
        return Spec(named, kernel, typed(kernel, pointers), options, strides, read, computed)

    for chosen, kind in ((True, "selected"), (False, "dense")):
        index = 8 * chosen
        for launch in single.FORWARD[arch]:
            options = single.options(launch, WIDTH, chosen)
            yield spec(f"prefill, {kind}", single.forward_kernel, launch, options, more_bytes=launch.keys * (8 + index))
        for launch in dict.fromkeys((*split.NARROW[arch], *split.WIDE[arch])):
            for is_split, shares in ((True, "shares"), (False, "whole")):
                options = split.split_options(launch, WIDTH, chosen, is_split)
                yield spec(f"decode, {kind}, {shares}", split.split_kernel, launch, options, more_bytes=launch.keys * (8 + index))
        for launch in gradient.BACKWARD[arch]:
            # The keys' gradient is added to memory in float32, which reads it.
            for of_keys, of, products, added in ((False, "queries", 3, 0), (True, "keys", 4, 4 * WIDTH)):
                options = single.options(launch, WIDTH, chosen) | {"OF_KEYS": of_keys}
                more_bytes = launch.keys * (8 + index + added)
                yield spec(f"gradient of {of}, {kind}", gradient.backward_kernel, launch, options, products, more_bytes)
    launch = packed.PACKED[arch]
    for heads in (16, 8):
        options = packed.packed_options(launch, WIDTH, heads)
        yield spec(f"prefill, dense, {heads} heads of {launch.heads // heads} tokens", packed.packed_kernel, launch, options)
    kernel = split.combine_kernel
    options = split.combine_options(WIDTH)
    read = 4 * options["BLOCK_S"] * options["BLOCK_D"]
    yield Spec("decode, combine", kernel, typed(kernel, pointers), options, (), read, read // 2)


def block(arch: str) -> Iterator[Spec]:
    from compiled_block import specs

    return specs(arch)


REGISTRY: list[tuple[str, Callable[[str], Iterator[Spec]]]] = [("attention", attention), ("block", block)]


def programs_per_processor(found: Resources, warps: int, arch: str) -> int:
    """How many run at a time, by registers, shared memory and threads; tensor memory holds 512 columns."""
    of_warp = math.ceil(found.registers * 32 / REGISTERS_OF_WARP) * REGISTERS_OF_WARP
    limits = [REGISTERS // (of_warp * warps), SHARED[arch] // (found.shared + SHARED_EACH), THREADS // (32 * warps)]
    if found.tensor_memory:
        limits.append(512 // found.tensor_memory)
    return min(limits)


def at_the_speed_of_memory(spec: Spec, found: Resources, arch: str) -> tuple[float, float]:
    """(bytes under way on a multiprocessor over what keeps memory busy, issue slots taken over those there are at that speed)."""
    speed, processors, clocks = MEMORY[arch]
    warps = spec.options["num_warps"]
    under_way = min(spec.programs, programs_per_processor(found, warps, arch)) * spec.ahead * spec.step_bytes
    of_step = (spec.step_bytes + spec.step_written) / (speed / processors / clocks)
    return under_way / (speed / processors * LATENCY), found.looped * warps / ISSUED / of_step


def row(spec: Spec, found: Resources, arch: str) -> str:
    warps = spec.options.get("num_warps", 4)
    products = ", ".join(f"{found.instructions[name]} {name.split('.')[0]}" for name in PRODUCTS if found.instructions[name]) or "none"
    cells = [spec.name, warps, found.registers, found.stack, f"{found.shared / 1024:.1f}", products]
    cells.append(programs_per_processor(found, warps, arch))
    cells += [f"{spec.step_bytes / 1024:.1f}", f"{spec.step_operations / spec.step_bytes:.3g}"] if spec.step_bytes else ["", ""]
    cells += [f"{x:.2f}" for x in at_the_speed_of_memory(spec, found, arch)] if spec.ahead else ["", ""]
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="sm_90", choices=CAPABILITY)
    parser.add_argument("--only", default="", help="kernels whose title or name holds this text")
    args = parser.parse_args()
    names = (
        "kernel, tile",
        "warps",
        "registers",
        "spilled B",
        "shared KB",
        "products",
        "programs per SM",
        "KB per step",
        "operations per byte",
        "under way / needed",
        "issue slots",
    )
    print(f"{args.arch}, head width {WIDTH}\n")
    print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
    for title, specs in REGISTRY:
        for spec in specs(args.arch):
            if args.only in f"{title} {spec.name}":
                found = resources(spec.kernel, spec.types, spec.options, CAPABILITY[args.arch], aligned=spec.aligned)
                print(row(spec, found, args.arch), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
