"""The benchmark of a block's kernels walks its whole path without a device, at small sizes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
WORKS = (
    *("hyper read", "hyper write", "hyper write+read", "norm+rotary queries", "norm+rotary keys"),
    *("indexer bf16", "indexer fp8"),
)


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
    expected.insert(5, f"small pool CSA {prefill}")
    assert names == expected
    for row in found["times"]:
        assert row["microseconds"] > 0
        assert row["torch_microseconds"] > 0


@pytest.mark.slow
def test_launches_of_a_decoding_step():
    """Of the kernels measured here; what is left around them is torch's."""
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    found = json.loads(run("--launches")[-1])["launches"]
    for kind, (norms, pools, choices) in {
        "sliding_attention": (4, 0, 0),
        "compressed_sparse_attention": (5, 2, 1),
        "heavily_compressed_attention": (4, 1, 0),
    }.items():
        count = found[kind]
        assert (count["project_kernel"], count["finish_kernel"], count["write_kernel"]) == (2, 2, 1)
        assert (count["norm_rotary_kernel"], count.get("pool_kernel", 0)) == (norms, pools)
        assert (count.get("score_kernel", 0), count.get("select_kernel", 0)) == (choices, choices)
