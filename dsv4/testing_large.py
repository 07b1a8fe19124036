"""Large random checkpoints in the released format, written tensor by tensor, and runs of them under a limit of memory."""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dsv4.config import CSA, HASH_MOE, HCA, MOE, Dsv4Config
from dsv4.convert.writer import write_checkpoint
from dsv4.linear import Linear
from dsv4.model import Dsv4
from dsv4.pretrained import keep_stored

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


def small_two_blocks() -> Dsv4Config:
    """The same kinds of block with a model of about 230 MB, nearly all of it experts."""
    sizes = {"vocab_size": 2048, "hidden_size": 1024, "moe_intermediate_size": 256, "num_attention_heads": 16, "head_dim": 128}
    return replace(two_blocks(), **sizes, q_lora_rank=256, o_lora_rank=128)


def narrow_blocks() -> Dsv4Config:
    """Flash's 43 blocks, narrow: about 230 MB, nearly all of it experts."""
    sizes = {"vocab_size": 1024, "hidden_size": 256, "moe_intermediate_size": 128, "num_attention_heads": 8, "head_dim": 64}
    return replace(
        Dsv4Config.flash(),
        **sizes,
        q_lora_rank=128,
        o_lora_rank=64,
        index_n_heads=8,
        index_head_dim=64,
        n_routed_experts=96,
        num_nextn_predict_layers=0,
        mtp_compress_ratios=(),
    )


def write_random(config: Dsv4Config, folder: str | Path) -> int:
    """Write a checkpoint with every tensor random; returns its bytes."""
    write_checkpoint(random_state(config), config, folder, format="official", overwrite=True)
    return sum(file.stat().st_size for file in Path(folder).iterdir())


def random_state(config: Dsv4Config) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the official format under our names, one at a time."""
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


# Run in a process of its own: the limit counts from what the imports have taken.
LIMITED = """
import hashlib, json, re, resource, sys
from pathlib import Path
import torch
import torch._dynamo  # as the first call of a registered op would
from dsv4.model import Dsv4

given = json.loads(sys.argv[1])
torch.set_num_threads(1)
ids = torch.tensor(given["ids"])
torch.mm(torch.ones(64, 64), torch.ones(64, 64))
own = int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
limit = own + given["allowance"]
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
model = Dsv4.from_pretrained(given["folder"], progress=False, **given["place"])
with torch.no_grad():
    logits = model(ids)
    out = model.generate(ids, given["new"])
if given["gradient"]:
    model(ids).logsumexp(-1).sum().backward()
digest = hashlib.sha256(logits.contiguous().numpy().tobytes()).hexdigest()
print(json.dumps({"digest": digest, "generated": out.tolist(), "own": own, "limit": limit}))
"""


def run_limited(folder: str | Path, allowance: int, place: dict, ids: list[list[int]], new: int = 2, gradient: bool = False):
    """A run whose own memory may grow by `allowance` bytes after the imports: (what it printed as a dict, or None; its stderr)."""
    given = {"folder": str(folder), "allowance": allowance, "place": place, "ids": ids, "new": new, "gradient": gradient}
    command = [sys.executable, "-c", LIMITED, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None, done.stderr
