"""How fast checkpoints are read, beside safetensors alone and beside the bare decoding loop.

    python benchmarks/checkpoint_reading.py [--gigabytes 0.6] [--rounds 5] [--folder DIR]

Writes a random two-block checkpoint of each format, with experts of Flash's size, then times over
files in the page cache:

    kept      every tensor as stored           against safe_open, get_tensor, clone
    decoded   everything to BF16 or float32    against safe_open, get_tensor, dequantize_*

Every run is a process of its own, as a load is: in a second run of one process, memory that the
first gave back makes whatever asks for small tensors twice as fast. A round is one run of each;
ratios are medians over the rounds, of the wall clock and of the CPU time of the process, which
other processes disturb less. What is decoded is compared bit for bit. The last line is JSON.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from dsv4.config import CSA, HASH_MOE, MOE, SLIDING, Dsv4Config
from dsv4.convert import Checkpoint, open_checkpoint
from dsv4.kernels.quantize import dequantize_fp4, dequantize_fp8
from dsv4.testing_checkpoints import Recipe, make_checkpoint

RECIPES = {
    "bf16": Recipe(linears="BF16", experts="BF16", num_shards=2),
    "f32": Recipe(linears="F32", experts="F32", norms="F32", num_shards=2),
    "fp8+fp4": Recipe(num_shards=2),
    "fp8, float32 scales": Recipe(experts="FP8", scales="F32", num_shards=2),
}
EXPERT_BYTES = {"BF16": 2.0, "F32": 4.0, "FP8": 1.0, "FP4": 0.53}


def config_of(recipe: Recipe, gigabytes: float) -> Dsv4Config:
    hidden, neurons = 4096, 2048
    expert = 3 * hidden * neurons * EXPERT_BYTES[recipe.experts]
    return Dsv4Config.tiny(
        num_hidden_layers=2,
        layer_types=(SLIDING, CSA),
        mlp_layer_types=(HASH_MOE, MOE),
        n_routed_experts=max(2, round(gigabytes * 1e9 / 2 / expert)),
        **{"hidden_size": hidden, "moe_intermediate_size": neurons, "vocab_size": 8192},
        **{"q_lora_rank": 512, "head_dim": 256, "o_lora_rank": 512},
    )


def with_safetensors(checkpoint: Checkpoint) -> list[Tensor]:
    out = []
    for shard in checkpoint.shards:
        with safe_open(checkpoint.folder / shard.file, framework="pt") as file:
            out += [file.get_tensor(name).clone() for name in file.keys()]  # noqa: SIM118
    return out


def bare_loop(checkpoint: Checkpoint, dtype: torch.dtype) -> list[Tensor]:
    files = {shard.file: safe_open(checkpoint.folder / shard.file, framework="pt") for shard in checkpoint.shards}
    decoders = {"fp4": dequantize_fp4, "fp8": dequantize_fp8}
    out = []
    for source in checkpoint.sources.values():
        for piece in source.pieces:
            weight = files[piece.weight.file].get_tensor(piece.weight.name)
            if piece.scale is None:
                out.append(weight.to(source.spec.dtype or dtype, copy=True))
            else:
                scale = files[piece.scale.file].get_tensor(piece.scale.name)
                out.append(decoders[source.format](weight, scale, dtype))
    return out


def check(checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    """A number for what is not right would be worthless."""
    parts = dict(checkpoint.parts(dtype=dtype))
    bare = iter(bare_loop(checkpoint, dtype))
    for source in checkpoint.sources.values():
        for piece in source.pieces:
            assert torch.equal(parts[piece.place], next(bare)), piece.weight.name


# What is timed: ours and theirs, by name and dtype.
RUNS: dict[str, Callable[[Checkpoint, torch.dtype | None], object]] = {
    "safetensors": lambda checkpoint, dtype: with_safetensors(checkpoint),
    "kept": lambda checkpoint, dtype: list(checkpoint.tensors(dtype=dtype, native=True)),
    "bare loop": lambda checkpoint, dtype: bare_loop(checkpoint, dtype),
    "decoded": lambda checkpoint, dtype: list(checkpoint.tensors(dtype=dtype)),
}


def time_one(name: str, folder: str, dtype: torch.dtype | None) -> None:
    """Print wall clock and CPU time of one run in this process."""
    checkpoint = open_checkpoint(folder).check()
    wall, cpu = time.perf_counter(), time.process_time()
    kept = RUNS[name](checkpoint, dtype)
    print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]))
    del kept


def in_a_process(name: str, folder: Path, dtype: str) -> tuple[float, float]:
    command = [sys.executable, __file__, "--one", name, str(folder), dtype]
    wall, cpu = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return wall, cpu


def compare(theirs: str, ours: str, folder: Path, dtype: str, rounds: int) -> dict[str, float]:
    pairs = [(in_a_process(theirs, folder, dtype), in_a_process(ours, folder, dtype)) for _ in range(rounds)]
    return {
        "theirs_s": round(statistics.median(their[0] for their, _ in pairs), 3),
        "ours_s": round(statistics.median(our[0] for _, our in pairs), 3),
        "wall_ratio": round(statistics.median(our[0] / their[0] for their, our in pairs), 3),
        "cpu_ratio": round(statistics.median(our[1] / their[1] for their, our in pairs), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.6, help="size of each checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to write; default: a temporary folder")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        name, folder, dtype = options.one
        time_one(name, folder, None if dtype == "stored" else getattr(torch, dtype))
        return
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        for title, recipe in RECIPES.items():
            folder = Path(temporary) / title.replace(" ", "_")
            make_checkpoint(folder, config_of(recipe, options.gigabytes), recipe)
            comparisons = [("safetensors", "kept", "stored")]
            if recipe.is_quantised:
                check(open_checkpoint(folder), torch.bfloat16)
                comparisons += [("bare loop", "decoded", d) for d in ("bfloat16", "float32")]
            for theirs, ours, dtype in comparisons:
                name = f"{title}, {ours}, {dtype}"
                results[name] = compare(theirs, ours, folder, dtype, options.rounds)
                print(f"{name:<40} {results[name]}", flush=True)
    about = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    print(json.dumps(about | {"results": results}))


if __name__ == "__main__":
    main()
