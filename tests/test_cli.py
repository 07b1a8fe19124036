"""The command `dsv4`: what it prints, exit codes, and one line for each error."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dsv4 import ActivationCache, Dsv4, cli, view
from dsv4.attribution import UNITS
from dsv4.commands import UNIT_VALUES
from dsv4.demo import checkpoint_folder
from dsv4.lens import READOUTS
from dsv4.testing_probes import every_kind
from dsv4.values import RESIDUAL_SET, VALUES

SHIPPED = str(checkpoint_folder())
README = Path(__file__).resolve().parents[1] / "README.md"


def test_version_and_help(capsys):
    for arguments, text in (["--version"], r"dsv4 \d+\.\d+"), (["--help"], "demo"):
        with pytest.raises(SystemExit) as stopped:
            cli.main(arguments)
        assert stopped.value.code == 0
        assert re.search(text, capsys.readouterr().out)


@pytest.fixture(autouse=True)
def _gradients_stay_on():
    """The commands turn gradients off for the process, which is theirs when run as programs."""
    is_on = torch.is_grad_enabled()
    yield
    torch.set_grad_enabled(is_on)


@pytest.mark.parametrize(
    "arguments",
    [
        *([], ["nonsense"], ["convert", "one"], ["support", "--layer", "x"]),
        *(
            ["cache"],
            ["lens", "--readout", "x"],
            ["lens", "--top", "0"],
            ["view", "--picture", "x"],
        ),
        ["attribute", "--unit", "x"],
    ],
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
        (["lens", "whose zeppelin ?"], "does not know 'zeppelin'"),
        (["lens", "--model", "no/such/folder"], "no folder 'no/such/folder'"),
        (["lens", "--device", "nonsense"], "--device nonsense: "),
        (["lens", "whose key ?", "--pos", "-4"], "--pos -4: the prompt has 3 tokens"),
        (["attribute", "--token", "zeppelin"], "zeppelin"),
        (["attribute", "--unit", "slot", "--unit", "expert"], "split the same sublayer"),
        (["route", "--layer", "6"], "--layer 6: expected 0 <= layer < 6"),
        (["route", "whose key ?", "--pos", "3"], "--pos 3: the prompt has 3 tokens"),
        (["cache", "--out", "no/such/x.safetensors"], "there is no folder"),
        (["cache", "--out", "x.safetensors", "--names", "layers.*.nonsense"], "layers.*.nonsense"),
        (["cache", "--out", "x.safetensors", "--names", "layers.0.**.indexer_scores"], "indexer"),
        (["view", "--out", "no/such/run.html"], "there is no folder"),
        (["view", "--out", "run.png"], "--picture one of token_pattern"),
        (["view", "--out", "run.html", "--picture", "lens"], "--out lens.png"),
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
    assert {path.name for path in target.iterdir()} == {path.name for path in Path(SHIPPED).iterdir()}
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


# The commands that look at one prompt.

QUESTION = "mira has key . tom has cup . ana has map . ben has lamp . whose cup ?"


def told(capsys, *arguments):
    assert cli.main(arguments) == 0
    return capsys.readouterr().out


def as_json(capsys, *arguments):
    out = told(capsys, *arguments, "--json")
    assert out.count("\n") == 1
    return json.loads(out)


@pytest.fixture(scope="module")
def shipped():
    return Dsv4.from_pretrained(SHIPPED, dtype=torch.float32)


def test_choices_are_those_of_the_library():
    assert cli.READOUTS == READOUTS
    assert tuple(UNIT_VALUES) == cli.UNITS
    assert {"sublayer", *(unit for units in UNITS.values() for unit in units)} == set(cli.UNITS)
    assert tuple(view.PICTURES) == cli.PICTURES


@pytest.mark.parametrize("readout", cli.READOUTS)
def test_lens(readout, shipped, capsys):
    options = (QUESTION, "--readout", readout, "--top", "2", "--dtype", "float32", "--pos", "-2")
    with torch.no_grad():
        lens = shipped.logit_lens(QUESTION, readout, pos=-2)
    found = as_json(capsys, "lens", *options)
    assert (found["readout"], found["position"], found["token"]) == (readout, 17, "cup")
    probabilities, ids = lens.top(2)
    for i, layer in enumerate(found["layers"]):
        best = layer["top"] if readout == "each" else [layer["top"]]
        for j, row in enumerate(best):
            assert [x["id"] for x in row] == ids[i].flatten(0, -2)[j].tolist()
            want = probabilities[i].flatten(0, -2)[j].tolist()
            assert [x["probability"] for x in row] == pytest.approx(want, rel=1e-5)
    lines = told(capsys, "lens", *options).splitlines()
    assert len(lines) == 1 + 6 * (4 if readout == "each" else 1)
    assert "'cup' (position 17)" in lines[0]


def test_attribute(shipped, capsys):
    names = [name for name in shipped.hook_dict if name.rsplit(".", 1)[-1] in RESIDUAL_SET]
    with torch.no_grad():
        _, cache = shipped.run_with_cache(QUESTION, [*names, "**.attention_premix"])
    want = cache.residual.logit_attribution("tom", against="ben", unit="head")
    options = (QUESTION, "--against", "ben", "--unit", "head", "--dtype", "float32")
    found = as_json(capsys, "attribute", *options)
    assert found["total"] == pytest.approx(float(want.total[0, -1]), rel=1e-5)
    terms = {term["name"]: term["value"] for term in found["terms"]}
    assert len(terms) == len(want.labels)
    assert sum(terms.values()) == pytest.approx(found["total"], rel=1e-4)
    head = float(want[2, "attention", 1][0, -1])
    assert terms["layer 2 attention 1"] == pytest.approx(head, rel=1e-4)
    out = told(capsys, "attribute", *options, "--top", "3")
    assert "logit of 'tom' (the model's answer) minus that of 'ben' after '?' (position 18)" in out
    assert "scale frozen" in out
    assert f"{len(terms) - 3} more" in out


@pytest.mark.parametrize("unit", cli.UNITS)
def test_attribute_captures_what_a_unit_needs(unit, capsys):
    found = as_json(capsys, "attribute", QUESTION, "--unit", unit, "--token", "ben")
    assert found["what"] == "logit of 'ben'"
    assert sum(t["value"] for t in found["terms"]) == pytest.approx(found["total"], abs=1e-3)


def test_route(shipped, capsys):
    with torch.no_grad():
        _, cache = shipped.run_with_cache(QUESTION, "**.mlp.*")
    found = as_json(capsys, "route", QUESTION, "--dtype", "float32")
    for row in found["layers"]:
        i = row["layer"]
        assert row["usage"] == cache.moe.usage()[i].tolist()
        assert row["expert_indices"] == cache["expert_indices", i][0].tolist()
        assert (row["router"] == "hash") == (row["router_margin"] is None) == (i < 2)
    one = as_json(capsys, "route", QUESTION, "--layer", "3", "--dtype", "float32")
    assert one["layers"] == [found["layers"][3]]
    lines = told(capsys, "route", QUESTION, "--pos", "4").splitlines()
    assert "'tom' (position 4)" in lines[1]
    assert len(lines) == 2 + 6


def test_cache(shipped, capsys, tmp_path):
    file = str(tmp_path / "run.safetensors")
    names = ["layers.2.layer_output", "layers.*.mlp.expert_indices"]
    options = (QUESTION, "--out", file, "--dtype", "float32", "--names", *names)
    found = as_json(capsys, "cache", *options)
    with torch.no_grad():
        _, cache = shipped.run_with_cache(QUESTION, names)
    loaded = ActivationCache.load(file)
    assert loaded.names == [value["name"] for value in found["values"]] == cache.names
    assert set(load_file(file)) >= set(cache.names)
    for value in found["values"]:
        name = value["name"]
        assert torch.equal(loaded[name], cache[name])
        assert (value["shape"], value["axes"]) == (list(cache[name].shape), cache.axes[name])
    assert cli.main(["cache", *options]) == 2
    assert "exists" in capsys.readouterr().err
    (tmp_path / "run.safetensors").unlink()
    assert "wrote" in told(capsys, "cache", QUESTION, "--out", file, "--pos", "-1")
    assert ActivationCache.load(file)["mlp_output", 3].shape == (1, 128)


def test_compare(capsys):
    pytest.importorskip("transformers", reason="compare runs transformers' model")
    found = as_json(capsys, "compare", QUESTION)
    values = {row["name"]: row["relative"] for row in found["values"]}
    assert {"logits", "final_norm_output", "layers.5.layer_output"} <= set(values)
    assert max(values.values()) == found["largest_relative"] < 2e-5
    assert found["dequantised"] is True
    assert "largest relative error" in told(capsys, "compare", QUESTION).splitlines()[-1]


def test_compare_without_transformers(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert cli.main(["compare", QUESTION]) == 2
    assert "transformers is not installed" in capsys.readouterr().err


def test_view(capsys, tmp_path):
    file = tmp_path / "run.html"
    found = as_json(capsys, "view", QUESTION, "--out", str(file))
    assert found["bytes"] == file.stat().st_size
    assert (found["tokens"], found["blocks"], found["answer"]["token"]) == (19, 6, "tom")
    assert "open it in a browser" in told(capsys, "view", QUESTION, "--out", str(file))


@pytest.mark.parametrize("picture", cli.PICTURES)
def test_view_picture(picture, capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    file = tmp_path / "picture.png"
    told(capsys, "view", QUESTION, "--picture", picture, "--out", str(file), "--layer", "3")
    assert file.read_bytes().startswith(b"\x89PNG")


def test_view_without_matplotlib(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["view", QUESTION, "--out", str(tmp_path / "run.html")]) == 0
    capsys.readouterr()
    assert cli.main(["view", "--picture", "lens", "--out", str(tmp_path / "lens.png")]) == 2
    assert "extra `demo`" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run.html"]


def test_a_checkpoint_without_tokenizer(capsys, tmp_path):
    """Ids in place of words, everywhere."""
    Dsv4.from_config(every_kind(), seed=0).save_pretrained(tmp_path / "model")
    common = ("5 17 3 9 11 2 8 4 1 7", "--model", str(tmp_path / "model"))
    assert as_json(capsys, "lens", *common)["token"] == "7"
    answer = as_json(capsys, "attribute", *common, "--token", "12")
    assert answer["what"] == "logit of '12'"
    assert as_json(capsys, "route", *common)["tokens"][:3] == ["5", "17", "3"]
    view_of = as_json(capsys, "view", *common, "--out", str(tmp_path / "run.html"))
    assert view_of["tokens"] == 10


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
