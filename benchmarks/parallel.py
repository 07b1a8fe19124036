"""A model spread over processes: what the mesh costs where it has one process, and gloo on a CPU with 1, 2 and 4.

    OMP_NUM_THREADS=1 python benchmarks/parallel.py [--pairs 200] [--tokens 256]

First both models' logits are compared; without agreement nothing is timed. Overhead: one process, the plain model and one given a mesh of
one process, in turn, forward of --tokens tokens and decoding steps; the ratio of each pair's CPU time, its median with a 95 % bootstrap
interval. Scaling: one thread for each process, all of them on this machine: a check that nothing is far off, and no figure of speed.
Experts: the mixture of one block in both forms (docs/parallel.md), whatever the rule would take, with the bytes that it counts.
The last line is JSON.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dsv4 import Dsv4, Dsv4Config
from dsv4.config import CSA, HCA, SLIDING
from dsv4.parallel import parallelize
from dsv4.testing import relative_error

AGREEMENT = 1e-5
RESAMPLED = 2000


def config() -> Dsv4Config:
    return Dsv4Config.tiny(
        vocab_size=2048,
        hidden_size=256,
        layer_types=(SLIDING, CSA, HCA, CSA),
        num_attention_heads=8,
        head_dim=64,
        qk_rope_head_dim=16,
        q_lora_rank=64,
        o_groups=4,
        o_lora_rank=64,
        index_n_heads=8,
        index_head_dim=32,
        index_topk=64,
        sliding_window=128,
        n_routed_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=128,
    )


def build(mesh=None) -> Dsv4:
    model = Dsv4.from_config(config(), seed=0).requires_grad_(False)
    return model if mesh is None else parallelize(model, mesh)


def ids_of(tokens: int) -> torch.Tensor:
    return torch.randint(config().vocab_size, (1, tokens), generator=torch.Generator().manual_seed(tokens))


def seconds(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    begun = clock()
    run()
    return clock() - begun


def steps_of(model: Dsv4, tokens: int) -> Callable[[], object]:
    cache = model.new_kv_cache(1, 4 * tokens, rewind=0)
    model(ids_of(tokens), kv_cache=cache, logits_to_keep=1)
    start = cache.clone()
    held = [cache]

    def step():
        if int(held[0].length[0]) >= 2 * tokens:
            held[0] = start.clone()
        return model(ids_of(1), kv_cache=held[0], logits_to_keep=1)

    return step


def ratio(plain: Callable, meshed: Callable, pairs: int) -> dict:
    """Times in turn, each pair in a random order."""
    draw = random.Random(0)
    ratios = []
    for _ in range(3):
        plain(), meshed()
    for _ in range(pairs):
        both = {}
        for name, run in draw.sample([("plain", plain), ("mesh", meshed)], 2):
            both[name] = seconds(run, time.process_time)
        ratios.append(both["mesh"] / both["plain"])
    medians = sorted(statistics.median(draw.choices(ratios, k=pairs)) for _ in range(RESAMPLED))
    low, high = (medians[int(RESAMPLED * share)] for share in (0.025, 0.975))
    return {"ratio": round(statistics.median(ratios), 4), "low": round(low, 4), "high": round(high, 4), "pairs": pairs}


@torch.no_grad()
def overhead(tokens: int, pairs: int) -> dict:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    plain, meshed, ids = build(), build(mesh), ids_of(tokens)
    # The very same weights, so that where they lie in memory is no difference.
    meshed.load_state_dict(plain.state_dict(), assign=True)
    error = relative_error(meshed(ids), plain(ids))
    assert error == 0.0, f"logits differ by {error:.2g}; nothing is timed"
    found = {"forward": ratio(lambda: plain(ids), lambda: meshed(ids), pairs)}
    found["decode"] = ratio(steps_of(plain, tokens), steps_of(meshed, tokens), pairs)
    return found


@torch.no_grad()
def worker(tokens: int, rounds: int) -> None:
    """One process of a group: prints its medians."""
    size = dist.get_world_size()
    model, ids = build(init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))), ids_of(tokens)
    error = relative_error(model(ids), build()(ids))
    assert error <= AGREEMENT, f"logits differ by {error:.2g}; nothing is timed"
    step = steps_of(model, tokens)
    for _ in range(3):
        step()
    forward = statistics.median(seconds(lambda: model(ids)) for _ in range(rounds))
    decode = statistics.median(seconds(step) for _ in range(rounds))
    found = {"processes": size, "forward_ms": round(forward * 1e3, 2), "decode_ms": round(decode * 1e3, 2)}
    found |= {"bytes": sum(p.nbytes for p in model.parameters())} | (experts(model, tokens, rounds) if size > 1 else {})
    if dist.get_rank() == 0:
        print(json.dumps(found))


def experts(model: Dsv4, tokens: int, rounds: int) -> dict:
    """Both forms of one mixture: milliseconds, and the bytes that the rule counts for each."""
    bank, draw = model.layers[0].mlp.experts, torch.Generator().manual_seed(0)
    x, weights = torch.randn(1, tokens, model.hidden_size, generator=draw), torch.rand(1, tokens, model.top_k, generator=draw)
    indices = torch.rand(1, tokens, model.num_experts, generator=draw).topk(model.top_k).indices
    gather, rows = (lambda: bank.gathered(x, indices, weights, None)), (lambda: bank.sent(x, indices, weights, None))
    error = relative_error(rows(), gather())
    assert error <= AGREEMENT, f"the two forms differ by {error:.2g}; nothing is timed"
    medians = {name: statistics.median(seconds(run) for _ in range(rounds)) for name, run in (("gather", gather), ("rows", rows))}
    moved = bank.traffic(x, indices)
    return {
        **{f"experts_{name}_ms": round(median * 1e3, 2) for name, median in medians.items()},
        **{"experts_gather_bytes": moved.gather, "experts_rows_bytes": moved.all_to_all, "taken": moved.form},
    }


def scaling(size: int, tokens: int, rounds: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(size), "MEETING": str(Path(folder) / "meeting")}
        command = [sys.executable, __file__, "--worker", "--tokens", str(tokens), "--rounds", str(rounds)]
        group = [subprocess.Popen(command, env=env | {"RANK": str(r)}, stdout=subprocess.PIPE, text=True) for r in range(size)]
        printed = [process.communicate()[0] for process in group]
    assert all(process.returncode == 0 for process in group)
    return json.loads(printed[0].strip().splitlines()[-1])


def meet(meeting: str, rank: int, size: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=timedelta(minutes=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.worker:
        meet(os.environ["MEETING"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        worker(args.tokens, args.rounds)
        dist.destroy_process_group()
        return
    found = {"torch": torch.__version__, "machine": platform.machine(), "cores": os.cpu_count(), "tokens": args.tokens}
    with tempfile.TemporaryDirectory() as folder:
        meet(str(Path(folder) / "meeting"), 0, 1)
        found["overhead"] = overhead(args.tokens, args.pairs)
        dist.destroy_process_group()
    for what, numbers in found["overhead"].items():
        print(f"{what}: mesh of one process over no mesh {numbers['ratio']:.3f} [{numbers['low']:.3f}, {numbers['high']:.3f}]")
    found["scaling"] = [scaling(size, args.tokens, args.rounds) for size in (1, 2, 4)]
    for row in found["scaling"]:
        print(
            f"{row['processes']} processes: forward {row['forward_ms']} ms, step {row['decode_ms']} ms, {row['bytes'] / 2**20:.1f} MiB each"
        )
    for row in found["scaling"][1:]:
        print(
            f"{row['processes']} processes, experts of {args.tokens} tokens: gathered {row['experts_gather_ms']} ms "
            f"({row['experts_gather_bytes']:,} B), rows sent {row['experts_rows_ms']} ms ({row['experts_rows_bytes']:,} B)"
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
