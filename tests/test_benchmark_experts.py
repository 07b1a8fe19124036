"""The experts' benchmark: what it would time agrees, on the CPU."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("benchmark_of_experts", FOLDER / "experts.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_all_ways_agree(benchmark, capsys):
    assert benchmark.main(["--check"]) == 0
    *shown, last = capsys.readouterr().out.splitlines()
    assert json.loads(last) == {"correct": True}
    assert len(shown) == len(benchmark.FORMS) * len(benchmark.CHECKED_TOKENS) * len(benchmark.ROUTINGS)
    assert "grouped_mm, loop, transformers eager, transformers batched_mm, transformers grouped_mm" in shown[-1]


def test_a_way_that_differs_is_no_result(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark, "grouped", lambda x, *rest: x)
    with pytest.raises(ValueError, match="grouped_mm differs from float64 loop by"):
        benchmark.main(["--check"])


def test_a_red_test_prints_no_time(benchmark, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "tests_pass", lambda is_native: False)
    assert benchmark.main([]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"correct": False, "times": []}


def test_a_small_run_writes_its_results(benchmark, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(benchmark, "tests_pass", lambda is_native: True)
    monkeypatch.setattr(benchmark, "CPU_REPEATS", 1)
    monkeypatch.setattr(benchmark.torch.cuda, "is_available", lambda: False)
    assert benchmark.main(["--only", "uniform 1", "--results", str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((tmp_path / "experts_cpu.json").read_text()) == printed
    assert {"ours", "loop", "grouped_mm", "transformers eager"} <= printed["times"][0]["ms"].keys()
