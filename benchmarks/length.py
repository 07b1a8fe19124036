"""One forward against its length: time and memory, ours and transformers' side by side, and the chart of the README.

    python benchmarks/length.py [--lengths 64,256,1024,4096,8192,16384,32768,65536] [--theirs 8192] [--chart docs/length.png]

One model for both (small_model.py), the same float32 tensors, logits of the last position. First the logits of both are compared;
without agreement nothing is timed. Forwards of the two alternate, a time is the median of the repeats, and short lengths are repeated
more often. transformers is left out beyond `--theirs` tokens (8 times the memory for every doubling ends soon). Memory: by how much a
process of its own grows at most in one forward. The last line is JSON.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import psutil
import torch
from small_model import AGREEMENT, Ours, Theirs, about, build, ids_of, in_a_process, peak, reset_peak

from dsv4 import Dsv4

CHECKED = 500
SIDES = (Ours, Theirs)
# Repeats by the seconds that one takes.
REPEATS = ((0.2, 40), (2.0, 9), (20.0, 3), (float("inf"), 1))


def check(model: Dsv4) -> float:
    """The middle of the errors over positions: where two scores tie to the last bits, either choice is right and later logits differ."""
    ids = ids_of(model, CHECKED)
    ours, theirs = model(ids)[0].double(), Theirs(model).model(ids, use_cache=False).logits[0].double()
    return ((ours - theirs).abs().amax(-1).median() / theirs.abs().max()).item()


def timed(sides: list, length: int) -> dict[str, list[float]]:
    """Seconds of each repeat, sides in turn."""
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    ids = ids_of(sides[0].model, length)

    def once(side) -> float:
        start = time.perf_counter()
        side.forward(ids)
        return time.perf_counter() - start

    longest = max(once(side) for side in sides)
    for _ in range(next(count for limit, count in REPEATS if longest < limit)):
        for side in sides:
            seconds[side.name].append(once(side))
    return seconds


def growth(kind: str, length: int, threads: int, pipe) -> None:
    """In a process of its own: by how much it grows at most in one forward."""
    torch.set_num_threads(threads)
    with torch.no_grad():
        model = build()
        side = next(k for k in SIDES if k.name == kind)(model)
        side.forward(ids_of(model, 64))
        ids = ids_of(model, length)
        reset_peak()
        before = psutil.Process().memory_info().rss
        side.forward(ids)
        pipe.send(peak() - before)


def chart(results: dict, path: Path) -> None:
    """Time and memory against length, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    units = (("seconds", 1, "seconds a forward"), ("growth_bytes", 2**20, "MiB beyond the weights"))
    for axis, (key, unit, title) in zip(axes, units, strict=True):
        for kind, colour in zip(SIDES, ("tab:blue", "tab:orange"), strict=True):
            found = {int(n): row[kind.name][key] / unit for n, row in results["lengths"].items() if kind.name in row}
            # Less than a MiB is what the allocator had at hand.
            found = {n: value for n, value in found.items() if key == "seconds" or value >= 1}
            axis.plot(list(found), list(found.values()), "o-", color=colour, label=kind.name)
        axis.set(xscale="log", yscale="log", xlabel="tokens", title=title)
        axis.set_xticks([int(n) for n in results["lengths"]], list(results["lengths"]), rotation=45, minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(f"12.5M parameters, float32, {results['threads']} CPU thread(s), last-position logits")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="64,256,1024,4096,8192,16384,32768,65536")
    parser.add_argument("--theirs", type=int, default=8192, help="transformers up to this length")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--chart", type=Path, help="where to write the PNG")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results: dict = {**about(args.threads), "lengths": {}}
    with torch.no_grad():
        model = build()
        results["parameters"] = sum(p.numel() for p in model.parameters())
        results["error"] = check(model)
        print(f"logits of both over {CHECKED} tokens agree to {results['error']:.1e}")
        if not results["error"] <= AGREEMENT:
            raise SystemExit("they do not agree: nothing is timed")
        print("tokens | seconds: dsv4, transformers, theirs over ours | growth MB: dsv4, transformers, theirs over ours")
        for length in map(int, args.lengths.split(",")):
            sides = [kind(model) for kind in SIDES if kind is Ours or length <= args.theirs]
            seconds = timed(sides, length)
            row = {
                side.name: {
                    "seconds": statistics.median(seconds[side.name]),
                    "repeats": len(seconds[side.name]),
                    "growth_bytes": in_a_process(growth, side.name, length, args.threads),
                }
                for side in sides
            }
            if len(sides) > 1:
                pairs = zip(seconds[Theirs.name], seconds[Ours.name], strict=True)
                row["ratio"] = statistics.median(theirs / ours for theirs, ours in pairs)
                row["memory_ratio"] = row[Theirs.name]["growth_bytes"] / max(row[Ours.name]["growth_bytes"], 1)
            results["lengths"][str(length)] = row
            print(_line(length, row), flush=True)
    if args.chart:
        chart(results, args.chart)
    print(json.dumps(results))


def _line(length: int, row: dict) -> str:
    parts = [f"{length:>6}"]
    for key, unit, ratio in (("seconds", 1, "ratio"), ("growth_bytes", 1e6, "memory_ratio")):
        shown = [f"{row[kind.name][key] / unit:9.3f}" if kind.name in row else " " * 9 for kind in SIDES]
        parts.append(" ".join(shown) + (f" {row[ratio]:6.2f}x" if ratio in row else ""))
    return " | ".join(parts)


if __name__ == "__main__":
    main()
