"""Two blocks with V4-Flash's true shapes: write random codes (about 9 GB), inspect, load with experts kept packed, run 16 tokens.

    python benchmarks/flash_blocks.py [--folder DIR] [--keep] [--threads 2]

Each stage runs in a process of its own, so that its peak memory is its own. `anon` is memory that belongs to the process alone
(RssAnon, sampled every 20 ms); `rss` counts the mapped pages of the checkpoint too. The last line is JSON.
"""

import argparse
import json
import multiprocessing
import platform
import shutil
import tempfile
import time
from pathlib import Path

import torch

from dsv4.testing_large import Peak, two_blocks, write_random

TOKENS = 16


def write(folder: str) -> dict:
    start = time.perf_counter()
    size = write_random(two_blocks(), folder)
    return {"write_s": time.perf_counter() - start, "bytes": size}


def look(folder: str) -> dict:
    from dsv4.convert.inspect import inspect_checkpoint

    start = time.perf_counter()
    report = str(inspect_checkpoint(Path(folder)))
    print(report)
    return {"inspect_s": time.perf_counter() - start}


def run(folder: str, threads: int) -> dict:
    from dsv4.model import Dsv4

    torch.set_num_threads(threads)
    with Peak() as loading:
        start = time.perf_counter()
        model = Dsv4.from_pretrained(folder, progress=False)
        load_s = time.perf_counter() - start
    ids = torch.randint(0, model.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    with Peak() as running, torch.no_grad():
        start = time.perf_counter()
        logits = model(ids)
        first_s = time.perf_counter() - start
        start = time.perf_counter()
        model(ids)
        second_s = time.perf_counter() - start
    assert bool(logits.isfinite().all())
    held = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    return {
        "load_s": load_s,
        "model_bytes": held,
        "load_anon": loading.anon,
        "run_s": first_s,
        "run_again_s": second_s,
        "run_anon": running.anon,
        "run_rss": running.rss,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="where the checkpoint goes (default: a temporary folder)")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint there, and reuse it when it is there")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    folder = Path(args.folder or tempfile.mkdtemp(prefix="flash_blocks_"))
    result = {"device": platform.processor() or platform.machine(), "threads": args.threads, "torch": torch.__version__, "tokens": TOKENS}
    context = multiprocessing.get_context("spawn")
    stages = [look, run] if args.keep and (folder / "config.json").exists() else [write, look, run]
    try:
        for stage in stages:
            with context.Pool(1) as pool:
                result |= pool.apply(stage, (str(folder), args.threads) if stage is run else (str(folder),))
    finally:
        if not args.keep:
            shutil.rmtree(folder)
    for key, value in result.items():
        print(f"{key:14s} {value / 2**30:.2f} GiB" if key.endswith(("bytes", "anon", "rss")) else f"{key:14s} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
