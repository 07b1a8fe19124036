"""The benchmark of a block's kernels walks its whole path without a device, at small sizes."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
WORKS = (
    *(
        "hyper read",
        "hyper write",
        "hyper write+read",
        "router",
        "linears of input bf16",
        "linears of latent bf16",
        "linears of latent fp8",
    ),
    *("norm+rotary queries", "norm+rotary keys", "indexer bf16", "indexer fp8"),
)
KINDS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")


def run(*options: str) -> list[str]:
    done = subprocess.run([sys.executable, "blocks.py", *options], cwd=BENCHMARKS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_blocks():
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    *_, last = run("--check")
    found = json.loads(last)
    assert found["correct"]
    names = [row["name"] for row in found["times"]]
    prefill, decode = ("prefill 5", "decode 0k batch 2")
    expected = [f"small {work} {where}" for where in (prefill, decode) for work in WORKS]
    expected.insert(WORKS.index("indexer bf16"), f"small pool CSA {prefill}")
    at = expected.index(f"small indexer bf16 {decode}")
    expected[at:at] = [f"small step latent+key {decode}", f"small step queries {decode}"]
    assert names == expected
    for row in found["times"]:
        assert row["microseconds"] > 0
        assert row["torch_microseconds"] > 0

    assert [(row["work"], row["kind"]) for row in found["blocks"]] == [(w, KINDS[1]) for w in ("whole_block", "decode_step")]
    for row in found["blocks"]:
        whole = row["work"] == "whole_block"
        times = ("ours_milliseconds", "torch_milliseconds", "transformers_milliseconds", "least_milliseconds") if whole else ()
        times += () if whole else ("microseconds", "transformers_microseconds", "least_microseconds_of_block")
        assert all(row[time] > 0 for time in times)


def test_the_counter_counts_what_launches():
    """Views and empty tensors launch nothing; copies, gathers and what reads a number back do."""
    code = (
        "import torch, launches\n"
        "with torch.no_grad(), launches.Launches() as found:\n"
        "    x = torch.zeros(4, 6)\n"
        "    y = x.view(6, 4).t()[1:, None].expand(-1, 2, -1)\n"
        "    y.contiguous(), x.index_select(0, torch.tensor([1])), x[0, 0].item(), torch.empty_like(x), (x + 1).bfloat16()\n"
        "print(dict(found.count))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counted = ast.literal_eval(done.stdout.splitlines()[-1])
    assert counted == {"zeros": 1, "clone": 1, "index_select": 1, "_local_scalar_dense": 1, "add": 1, "_to_copy": 1}


def test_launches_of_a_decoding_step():
    """A step of fixed shape, of one block of each kind: at most as many as are stated, and none that reads anything back."""
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    *lines, last = run("--launches")
    found = json.loads(last)["launches"]
    most = dict(zip(KINDS, (18, 24, 18), strict=True))
    assert list(found) == list(most)
    for kind, line in zip(KINDS, lines, strict=True):
        assert f"{kind}: {sum(found[kind].values())} launches of {most[kind]} at most" in line
        assert sum(found[kind].values()) <= most[kind], line
        assert "_local_scalar_dense" not in found[kind]
