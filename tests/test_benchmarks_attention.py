"""The attention benchmark walks its whole path without a device, at small sizes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def run(*command: str) -> list[str]:
    done = subprocess.run([sys.executable, *command], cwd=BENCHMARKS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_attention():
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    found = json.loads(run("attention.py", "--check")[-1])
    assert found["correct"]
    assert {x["name"].split()[-1] for x in found["times"]} == {"prefill", "decode", "gradient"}
    for row in found["times"]:
        # A text says why another way was not timed.
        others = {name: isinstance(time, float) for name, time in row["baselines"].items()}
        assert row["microseconds"] > 0
        assert others == dict.fromkeys(("torch", "transformers", "flex"), True) | (
            {"transformers": False, "flex": False} if "gradient" in row["name"] else {}
        )


def test_compiled():
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    title, *table = run("compiled.py", "--only", "decode, combine")
    assert title == "sm_90, head width 512"
    assert [row.count("|") for row in table[1:]] == [12, 12, 12]
    assert "| decode, combine | 4 |" in table[-1]
    *_, last = run("compiled.py", "--only", "linears of input, dense")
    name, *cells = (cell.strip() for cell in last.strip("|").split("|"))
    assert name == "linears of input, dense, 16 rows"
    under_way, issued = map(float, cells[-2:])
    assert under_way > 1
    assert 0 < issued < 1
