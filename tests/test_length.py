"""Memory against length, in processes of their own: what a graph of gradients keeps, and what a forward holds at most."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
# Bytes beyond the model that the process grows by at most.
PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
import psutil, torch
from small_model import build, ids_of, peak, reset_peak

torch.set_num_threads(1)
kind, tokens = sys.argv[2], int(sys.argv[3])
model = build().requires_grad_(False)
with torch.no_grad():
    model(ids_of(model, 64))
ids = ids_of(model, tokens)
reset_peak()
before = psutil.Process().memory_info().rss
if kind == "forward":
    with torch.no_grad():
        model(ids, logits_to_keep=1)
else:
    names = ["**.layer_output", "**.attention_output", "**.mlp_output"]
    embedded = model.embed_tokens(ids).detach().requires_grad_()
    run = dict(input_ids=ids, inputs_embeds=embedded, logits_to_keep=1, detach=False)
    logits, cache = model.run_with_cache(names=names, **run)
    grads = torch.autograd.grad(logits[0, -1, 7], list(cache.values()))
    assert all(grad.abs().sum() > 0 for grad in grads[:-2])
print(json.dumps(peak() - before))
"""


def growth(kind: str, tokens: int) -> int:
    command = [sys.executable, "-c", PROGRAM, str(BENCHMARKS), kind, str(tokens)]
    # The allocator gives back what is freed at once: the peak is what is held, not what lies about.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout.splitlines()[-1])


@pytest.mark.parametrize(("tokens", "most"), [(1024, 0.5e9), pytest.param(8192, 4e9, marks=pytest.mark.slow)])
def test_gradients_through_every_block_keep_no_patterns(tokens, most):
    """Every block's outputs captured with their graph, and a logit differentiated with respect to all of them."""
    assert growth("gradients", tokens) <= most


@pytest.mark.parametrize(("tokens", "most"), [(4096, 0.3e9), pytest.param(65536, 3e9, marks=pytest.mark.slow)])
def test_a_forward_grows_with_the_length(tokens, most):
    assert growth("forward", tokens) <= most


FAULTS = """
import resource
import torch
from dsv4 import Dsv4, Dsv4Config

torch.set_num_threads(1)
model = Dsv4.from_config(Dsv4Config.tiny(hidden_size=256), seed=0)
ids = torch.arange(256).remainder(model.vocab_size).unsqueeze(0)

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    model.run_with_cache(ids, "**.layer_output")
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with torch.no_grad():
    print(sorted(faults() for _ in range(12))[4])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the allocator that returns memory is glibc's")
def test_captures_come_from_memory_that_was_freed():
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run([sys.executable, "-c", FAULTS], env=kept | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True)
    # Each value is 256 pages.
    assert int(done.stdout) < 256
