"""What the benchmarks on a CPU share: one model of 12.5M parameters for both libraries, and memory of a process of its own.

Hidden 256, 6 blocks with rates 0, 0, 4, 128, 4, 128, 8 heads of 64, 16 experts top 4.
"""

import multiprocessing
import platform
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import Tensor

from dsv4 import Dsv4, Dsv4Config
from dsv4.config import CSA, HCA, SLIDING
from dsv4.testing import twin

CHUNK = 1024
# Of two float32 results.
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

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the last position."""
        return self.model(ids, logits_to_keep=1)

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

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids, use_cache=False, logits_to_keep=1).logits

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


class Compiled(Ours):
    name = "dsv4 compiled"

    def __init__(self, model: Dsv4):
        # A model of its own over the same tensors: the other one's steps stay as they are.
        own = build()
        own.load_state_dict(model.state_dict(), assign=True)
        super().__init__(own.requires_grad_(False).compile_decode())


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


def about(threads: int) -> dict:
    """What a result was measured on."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "threads": threads,
    }
