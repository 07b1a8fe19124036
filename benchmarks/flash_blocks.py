"""Two blocks with V4-Flash's true shapes: write random codes (about 9 GB), inspect, load with experts kept packed, run 16 tokens.

    python benchmarks/flash_blocks.py [--folder DIR] [--keep] [--threads 2]

Each stage runs in a process of its own, so that its peak memory is its own. `anon` is memory that belongs to the process alone
(RssAnon, sampled every 20 ms); `rss` counts the mapped pages of the checkpoint too. The last line is JSON.
"""

import argparse
import json
import multiprocessing
import platform
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dsv4.config import CSA, HASH_MOE, HCA, MOE, Dsv4Config

TOKENS = 16
# Bytes of finite E4M3 codes, and exponents of scales that keep weights near 1/64.
FINITE = [b for b in range(256) if b & 0x7F != 0x7F]
SCALE_BYTES = (114, 118)
FP8_LINEARS = ("q_a_proj", "q_b_proj", "kv_proj", "o_a_proj", "o_b_proj", "gate_proj", "up_proj", "down_proj")
# The poolings' projections are stored in bfloat16.
POOLING = re.compile(r"compressor\.(indexer\.)?(kv|gate)_proj")


def two_blocks() -> Dsv4Config:
    """Flash cut to a CSA block that routes by hash and an HCA block that routes by score."""
    return replace(
        Dsv4Config.flash(),
        num_hidden_layers=2,
        layer_types=(CSA, HCA),
        mlp_layer_types=(HASH_MOE, MOE),
        num_nextn_predict_layers=0,
        mtp_compress_ratios=(),
    )


def random_state(config: Dsv4Config) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the official format under our names, one at a time."""
    from dsv4.linear import Linear
    from dsv4.model import Dsv4
    from dsv4.pretrained import keep_stored

    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        model = Dsv4(config)
    for name, module in list(model.named_modules()):
        if name.endswith("mlp.experts"):
            keep_stored(model, name, "fp4")
        elif isinstance(module, Linear) and name.endswith(FP8_LINEARS) and not POOLING.search(name):
            keep_stored(model, name, "fp8")
    for name, t in model.state_dict().items():
        if t.dtype == torch.float8_e8m0fnu:
            value = torch.randint(*SCALE_BYTES, t.shape, dtype=torch.uint8, generator=generator).view(t.dtype)
        elif t.dtype == torch.float8_e4m3fn:
            value = torch.tensor(FINITE, dtype=torch.uint8)[torch.randint(len(FINITE), t.shape, generator=generator)].view(t.dtype)
        elif t.dtype == torch.int8:
            value = torch.randint(-128, 128, t.shape, dtype=torch.int8, generator=generator)
        elif t.dtype == torch.int64:
            value = torch.rand(t.shape[0], config.n_routed_experts, generator=generator).argsort(-1)[:, : t.shape[1]]
        else:
            value = torch.randn(t.shape, generator=generator) * t.shape[-1] ** -0.5
            value = 1 + value if "norm" in name else value
            value = value.to(torch.float32 if _is_float32(name) else torch.bfloat16)
        yield name, value


def _is_float32(name: str) -> bool:
    return any(part in name for part in ("_hc.", "hc_head.", "sinks", "position_bias", "correction_bias"))


class Peak:
    """Peak RssAnon and VmRSS of this process in bytes, while the context is open."""

    def __enter__(self):
        self.anon = self.rss = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc):
        self._stop.set()
        self._thread.join()

    def _watch(self):
        while not self._stop.is_set():
            status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
            self.anon = max(self.anon, int(status["RssAnon"].split()[0]) * 1024)
            self.rss = max(self.rss, int(status["VmRSS"].split()[0]) * 1024)
            time.sleep(0.02)


def write(folder: str) -> dict:
    from dsv4.convert.writer import write_checkpoint

    config = two_blocks()
    start = time.perf_counter()
    write_checkpoint(random_state(config), config, folder, format="official", overwrite=True)
    size = sum(f.stat().st_size for f in Path(folder).iterdir())
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
