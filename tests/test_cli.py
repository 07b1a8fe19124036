"""The command `dsv4`: what it prints, exit codes, and one line for each error."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dsv4 import cli
from dsv4.demo import checkpoint_folder
from dsv4.values import VALUES

SHIPPED = str(checkpoint_folder())
README = Path(__file__).resolve().parents[1] / "README.md"


def test_version_and_help(capsys):
    for arguments, text in (["--version"], r"dsv4 \d+\.\d+"), (["--help"], "demo"):
        with pytest.raises(SystemExit) as stopped:
            cli.main(arguments)
        assert stopped.value.code == 0
        assert re.search(text, capsys.readouterr().out)


@pytest.mark.parametrize(
    "arguments", [[], ["nonsense"], ["convert", "one"], ["support", "--layer", "x"]]
)
def test_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert "usage: dsv4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "no/such/folder"], "no folder 'no/such/folder'"),
        (["demo", "--model", "no/such/folder"], "no folder 'no/such/folder'"),
        (["demo", "whose zeppelin ?"], "does not know 'zeppelin'"),
        (["demo", "--out", "no/such/picture.png"], "there is no folder"),
        (["demo", "--device", "nonsense"], "--device nonsense: "),
        (["support", "--layer", "6"], "layer 6: expected 0 <= layer < 6"),
        (["convert", SHIPPED, "unused", "--to", "nonsense"], "'nonsense'; expected one of bf16"),
    ],
)
def test_an_error_is_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    *before, last = capsys.readouterr().err.splitlines()
    assert last.startswith("dsv4: ")
    assert message in last
    # Loading says in a line what it loads; nothing else stands before the error.
    assert all(line.startswith(SHIPPED) for line in before)
    assert list(tmp_path.iterdir()) == []


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch):
    def fail(arguments):
        raise TypeError("a fault")

    monkeypatch.setattr(cli, "run_values", fail)
    with pytest.raises(TypeError, match="a fault"):
        cli.main(["values"])


def test_interrupted(monkeypatch, capsys):
    def stop(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run_values", stop)
    assert cli.main(["values"]) == 130
    assert capsys.readouterr().err == "dsv4: interrupted\n"


def test_demo_without_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["demo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "ANSWER   'ben'" in "\n".join(lines)
    assert lines[-1].startswith("PICTURE  none: matplotlib is not installed")
    assert list(tmp_path.iterdir()) == []


def test_inspect(capsys):
    assert cli.main(["inspect", SHIPPED]) == 0
    out = capsys.readouterr().out
    assert out.startswith(SHIPPED)
    assert "official names" in out
    assert "2,049,057 parameters" in out


def stored(folder):
    """Tensor's name -> (dtype, shape, bytes)."""
    found = {}
    for path in Path(folder).glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
            found[name] = (tensor.dtype, tensor.shape, data)
    return found


def test_convert_keeps_codes(tmp_path, capsys):
    """Codes survive a conversion to their own format bit for bit: the shipped files come back."""
    target = tmp_path / "copy"
    assert cli.main(["convert", SHIPPED, str(target), "--to", "official"]) == 0
    assert str(target) in capsys.readouterr().out
    assert {path.name for path in target.iterdir()} == {
        path.name for path in Path(SHIPPED).iterdir()
    }
    assert stored(target) == stored(SHIPPED)


def test_convert_refuses_and_overwrites(tmp_path, capsys):
    target = str(tmp_path / "target")
    assert cli.main(["convert", SHIPPED, target, "--to", "transformers", "--dtype", "float32"]) == 0
    assert cli.main(["inspect", target]) == 0
    assert "F8_E4M3" not in capsys.readouterr().out
    assert cli.main(["convert", SHIPPED, target]) == 2
    said = capsys.readouterr().err
    assert "is not empty" in said
    assert "--overwrite" in said
    assert cli.main(["convert", SHIPPED, target, "--overwrite"]) == 0
    assert cli.main(["inspect", target]) == 0
    assert "official names" in capsys.readouterr().out


def test_values(capsys):
    assert cli.main(["values"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 1 + len(VALUES)
    for value, row in zip(VALUES.values(), rows[1:], strict=True):
        assert row.split()[0].rpartition(".")[2] == value.name
        assert row.endswith(value.meaning)


def test_short_values_are_in_the_readme(capsys):
    assert cli.main(["values", "--short"]) == 0
    out = capsys.readouterr().out
    names = [word for line in out.splitlines() for word in line.split() if word in VALUES]
    assert sorted(names) == sorted(VALUES)
    assert f"```text\n{out}```" in README.read_text()


def test_support(capsys):
    assert cli.main(["support"]) == 0
    assert "layers.*.mlp.expert_weights" in capsys.readouterr().out
    assert cli.main(["support", "--model", SHIPPED, "--layer", "0"]) == 0
    row = next(x for x in capsys.readouterr().out.splitlines() if "indexer_scores" in x)
    assert "a sliding_attention block has no indexer" in row


def run_module(*arguments, **options):
    command = [sys.executable, "-P", "-m", "dsv4", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def test_as_a_module():
    wrong = run_module("inspect", "no/such/folder")
    assert wrong.returncode == 2
    assert wrong.stderr.count("\n") == 1
    assert run_module("--version").stdout.startswith("dsv4 ")


def test_a_reader_that_stops_is_no_error():
    command = f"{sys.executable} -P -m dsv4 values | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert done.stdout.startswith("name ")
    assert done.stderr == ""
