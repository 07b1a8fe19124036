"""Decoding after a long context: tokens per second and memory, ours and transformers' side by side.

    python benchmarks/decode.py [--contexts 256,1024,4096,16384,32768] [--rounds 5] [--steps 20]

One model for all (small_model.py), the same float32 tensors; ours eager and with its step compiled, theirs eager. First the logits
after a context are compared; without agreement nothing is timed. Then for every context a cache is filled once on each side
(transformers in chunks, since its prefill takes memory by the square of the length) and rounds of steps alternate between them; a
time is the median over all steps. Memory: bytes of the tensors that the caches hold, and by how much the process grew at most while
filling (in a process of its own). The last line is JSON.
"""

import argparse
import json
import statistics
import time

import psutil
import torch
from small_model import AGREEMENT, Compiled, Ours, Theirs, about, build, ids_of, in_a_process, peak, reset_peak

from dsv4 import Dsv4
from dsv4.testing import relative_error

CHECKED = 600
SIDES = (Ours, Compiled, Theirs)


def check(model: Dsv4) -> float:
    """The largest error of ours against theirs over a few steps after a context."""
    ids, logits = ids_of(model, CHECKED + 8), []
    for side in (kind(model) for kind in SIDES):
        side.fill(ids[:, :CHECKED], 8)
        steps = [side.step(ids[:, i : i + 1]) for i in range(CHECKED, CHECKED + 8)]
        logits.append(torch.cat(steps, dim=1))
    *ours, theirs = logits
    return max(relative_error(each, theirs) for each in ours)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", default="256,1024,4096,16384,32768")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results: dict = {**about(args.threads), "rounds": args.rounds, "steps": args.steps, "contexts": {}}
    with torch.no_grad():
        model = build()
        results["parameters"] = sum(p.numel() for p in model.parameters())
        results["error"] = check(model)
        print(f"logits of both after {CHECKED} tokens agree to {results['error']:.1e}")
        if not results["error"] <= AGREEMENT:
            raise SystemExit("they do not agree: nothing is timed")
        print(
            "context | ms a token: " + ", ".join(kind.name for kind in SIDES) + " | theirs over ours | cache MB | growth while filling, MB"
        )
        for context in map(int, args.contexts.split(",")):
            found = timed(model, context, args.rounds, args.steps)
            for name, side in found.items():
                side["growth_bytes"] = in_a_process(growth, name, context, args.threads)
                side["ratio"] = found[Theirs.name]["ms"] / side["ms"]
            results["contexts"][context] = found
            columns = [("ms", 1, "6.2f"), ("ratio", 1, "5.2f"), ("cache_bytes", 1e6, "6.1f"), ("growth_bytes", 1e6, "7.1f")]
            shown = (" ".join(format(side[key] / unit, form) for side in found.values()) for key, unit, form in columns)
            print(f"{context:>7} | " + " | ".join(shown), flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
