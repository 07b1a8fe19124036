"""Decoding after a long context: tokens per second and memory, ours and transformers' side by side.

    python benchmarks/decode.py [--contexts 256,1024,4096,16384,32768] [--rounds 5] [--steps 20]

One model for both: hidden 256, 6 blocks with rates 0, 0, 4, 128, 4, 128, 12.5M parameters, the same
float32 tensors. First the logits of both after a context are compared; without agreement nothing is
timed. Then for every context a cache is filled once on each side (transformers in chunks, since its
prefill takes memory by the square of the length) and rounds of steps alternate between them; a time
is the median over all steps. Memory: bytes of the tensors that the caches hold, and by how much the
process grew at most while filling (in a process of its own). The last line is JSON.
"""

import argparse
import json
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
import transformers
from torch import Tensor

from dsv4 import Dsv4, Dsv4Config
from dsv4.config import CSA, HCA, SLIDING
from dsv4.testing import relative_error, twin

CHUNK = 1024
CHECKED = 600
AGREEMENT = 2e-5


def build() -> Dsv4:
    config = Dsv4Config.tiny(
        vocab_size=2048,
        hidden_size=256,
        layer_types=(SLIDING, SLIDING, CSA, HCA, CSA, HCA),
        compress_rates={CSA: 4, HCA: 128},
        num_attention_heads=8,
        head_dim=64,
        qk_rope_head_dim=16,
        q_lora_rank=64,
        o_groups=2,
        o_lora_rank=64,
        index_n_heads=8,
        index_head_dim=32,
        index_topk=64,
        sliding_window=128,
        n_routed_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=128,
        max_position_embeddings=131072,
    )
    return Dsv4.from_config(config, seed=0).requires_grad_(False)


def ids_of(model: Dsv4, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(model.vocab_size, (1, tokens), generator=generator)


class Ours:
    name = "dsv4"

    def __init__(self, model: Dsv4):
        self.model = model

    def fill(self, ids: Tensor, room: int) -> None:
        self.cache = self.model.new_kv_cache(1, ids.shape[1] + room, rewind=0)
        for part in ids.split(CHUNK, dim=1):
            self.model(part, kv_cache=self.cache, logits_to_keep=1)

    def step(self, token: Tensor) -> Tensor:
        return self.model(token, kv_cache=self.cache, logits_to_keep=1)

    def cache_bytes(self) -> int:
        return self.cache.nbytes


class Theirs:
    name = "transformers"

    def __init__(self, model: Dsv4):
        self.model = twin(model)

    def fill(self, ids: Tensor, room: int) -> None:
        self.cache = transformers.DynamicCache(config=self.model.config)
        for part in ids.split(CHUNK, dim=1):
            self.model(part, cache=self.cache, use_cache=True, logits_to_keep=1)

    def step(self, token: Tensor) -> Tensor:
        out = self.model(token, cache=self.cache, use_cache=True, logits_to_keep=1)
        return out.logits

    def cache_bytes(self) -> int:
        found = {}
        pending = list(self.cache.layers)
        while pending:
            value = pending.pop()
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
            elif isinstance(value, dict):
                pending += value.values()
            elif isinstance(value, list | tuple):
                pending += value
            elif hasattr(value, "__dict__"):
                pending += vars(value).values()
        return sum(found.values())


SIDES = (Ours, Theirs)


def check(model: Dsv4) -> float:
    """The largest error between the two over a few steps after a context."""
    ids, logits = ids_of(model, CHECKED + 8), []
    for side in (kind(model) for kind in SIDES):
        side.fill(ids[:, :CHECKED], 8)
        steps = [side.step(ids[:, i : i + 1]) for i in range(CHECKED, CHECKED + 8)]
        logits.append(torch.cat(steps, dim=1))
    return relative_error(*logits)


def timed(model: Dsv4, context: int, rounds: int, steps: int) -> dict:
    """Median seconds of a step and cache bytes of each side."""
    ids, room = ids_of(model, context), (rounds + 1) * steps
    sides = [kind(model) for kind in SIDES]
    for side in sides:
        side.fill(ids, room)
    token, seconds = ids[:, :1], {side.name: [] for side in sides}
    for i in range(rounds + 1):
        for side in sides:
            for _ in range(steps):
                start = time.perf_counter()
                side.step(token)
                if i:
                    seconds[side.name].append(time.perf_counter() - start)
    return {
        side.name: {
            "ms": 1e3 * statistics.median(seconds[side.name]),
            "tokens_per_s": 1 / statistics.median(seconds[side.name]),
            "cache_bytes": side.cache_bytes(),
        }
        for side in sides
    }


def growth(kind: str, context: int, threads: int, pipe) -> None:
    """In a process of its own: by how much it grows at most while a cache is filled."""
    torch.set_num_threads(threads)
    with torch.no_grad():
        model = build()
        side = next(k for k in SIDES if k.name == kind)(model)
        side.fill(ids_of(model, 64), 1)
        reset_peak()
        before = psutil.Process().memory_info().rss
        side.fill(ids_of(model, context), 1)
        pipe.send(peak() - before)


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def in_a_process(work: Callable, *args) -> int:
    here, there = multiprocessing.get_context("spawn").Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=work, args=(*args, there))
    process.start()
    there.close()
    grown = here.recv()
    process.join()
    return grown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", default="256,1024,4096,16384,32768")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results: dict = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "threads": args.threads,
        "rounds": args.rounds,
        "steps": args.steps,
        "contexts": {},
    }
    with torch.no_grad():
        model = build()
        results["parameters"] = sum(p.numel() for p in model.parameters())
        results["error"] = check(model)
        print(f"logits of both after {CHECKED} tokens agree to {results['error']:.1e}")
        if not results["error"] <= AGREEMENT:
            raise SystemExit("they do not agree: nothing is timed")
        print("context | ms a token: dsv4, transformers, ratio | cache MB | growth while filling, MB")
        for context in map(int, args.contexts.split(",")):
            found = timed(model, context, args.rounds, args.steps)
            for name, side in found.items():
                side["growth_bytes"] = in_a_process(growth, name, context, args.threads)
            ours, theirs = (found[kind.name] for kind in SIDES)
            found["ratio"] = theirs["ms"] / ours["ms"]
            results["contexts"][context] = found
            print(
                f"{context:>7} | {ours['ms']:6.2f} {theirs['ms']:6.2f} {found['ratio']:5.2f}x | "
                + " ".join(f"{side['cache_bytes'] / 1e6:6.1f}" for side in (ours, theirs))
                + " | "
                + " ".join(f"{side['growth_bytes'] / 1e6:7.1f}" for side in (ours, theirs)),
                flush=True,
            )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
