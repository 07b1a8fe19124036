"""How fast checkpoints are read, beside safetensors alone and beside the bare decoding loop.

    python benchmarks/checkpoint_reading.py [--gigabytes 0.5] [--rounds 7]

Writes a random two-block checkpoint of each format, then times in turn, over files in the page
cache:

    kept      every tensor as stored           against safe_open, get_tensor, clone
    decoded   everything to BF16 or float32    against safe_open, get_tensor, dequantize_*

Each round makes one run of both; ratios are medians over the rounds, of the wall clock and of the
CPU time of the process (all threads), which other processes disturb less. What is decoded is
compared once, bit for bit. The last line is JSON.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from dsv4.config import CSA, HASH_MOE, MOE, SLIDING, Dsv4Config
from dsv4.convert import Checkpoint, names, open_checkpoint
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
    files = {
        shard.file: safe_open(checkpoint.folder / shard.file, framework="pt")
        for shard in checkpoint.shards
    }
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


def seconds(run: Callable[[], object]) -> tuple[float, float]:
    """(wall clock, CPU time)."""
    wall, cpu = time.perf_counter(), time.process_time()
    kept = run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    del kept
    return wall, cpu


def compare(
    theirs: Callable[[], object], ours: Callable[[], object], rounds: int
) -> dict[str, float]:
    pairs = [(seconds(theirs), seconds(ours)) for _ in range(rounds + 1)][1:]
    return {
        "theirs_s": round(statistics.median(theirs[0] for theirs, _ in pairs), 4),
        "ours_s": round(statistics.median(ours[0] for _, ours in pairs), 4),
        "wall_ratio": round(statistics.median(ours[0] / theirs[0] for theirs, ours in pairs), 3),
        "cpu_ratio": round(statistics.median(ours[1] / theirs[1] for theirs, ours in pairs), 3),
    }


def check(checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    """A number for what is not right would be worthless."""
    parts = dict(checkpoint.parts(dtype=dtype))
    bare = iter(bare_loop(checkpoint, dtype))
    for source in checkpoint.sources.values():
        for piece in source.pieces:
            assert torch.equal(parts[piece.place], next(bare)), names.from_place(
                "official", piece.place
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=0.5, help="size of each checkpoint")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", help="where to write; default: a temporary folder")
    options = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        for title, recipe in RECIPES.items():
            folder = Path(temporary) / title.replace(" ", "_")
            make_checkpoint(folder, config_of(recipe, options.gigabytes), recipe)
            checkpoint = open_checkpoint(folder).check()
            runs = {
                f"{title}, kept": (
                    lambda c=checkpoint: with_safetensors(c),
                    lambda c=checkpoint: list(c.tensors(dtype=None, native=True)),
                )
            }
            for dtype in (torch.bfloat16, torch.float32) if recipe.is_quantised else ():
                check(checkpoint, dtype)
                runs[f"{title}, decoded to {str(dtype).removeprefix('torch.')}"] = (
                    lambda c=checkpoint, d=dtype: bare_loop(c, d),
                    lambda c=checkpoint, d=dtype: list(c.tensors(dtype=d)),
                )
            for name, (theirs, ours) in runs.items():
                results[name] = compare(theirs, ours, options.rounds)
                print(f"{name:<45} {results[name]}", flush=True)
    print(
        json.dumps(
            {"threads": torch.get_num_threads(), "torch": torch.__version__, "results": results}
        )
    )


if __name__ == "__main__":
    main()
