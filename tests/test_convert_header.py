"""Headers and index: every way in which files can be incomplete is an error with a name in it."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv4.convert.header import INDEX_NAME, SINGLE_NAME, read_shards
from dsv4.convert.problems import SHOWN, CheckpointError, Problems

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.arange(4, dtype=torch.int64),
    "c": torch.zeros(3, 5, dtype=torch.int8),
    "d": torch.zeros(0, 4),
    "e": torch.tensor(2.0, dtype=torch.bfloat16),
}


def header_of(file):
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_header(file, header, data):
    text = json.dumps(header) if isinstance(header, dict) else header
    file.write_bytes(struct.pack("<Q", len(text)) + text.encode() + data)


def problems_of(folder):
    problems = read_shards(folder)[1]
    assert problems
    return str(problems.error(folder))


@pytest.fixture
def single(tmp_path):
    save_file(TENSORS, tmp_path / SINGLE_NAME, metadata={"format": "pt"})
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    files = {
        "model-00001-of-00002.safetensors": ["a", "b"],
        "model-00002-of-00002.safetensors": ["c", "d", "e"],
    }
    for file, names in files.items():
        save_file({name: TENSORS[name] for name in names}, tmp_path / file)
    write_index(tmp_path, {name: file for file, names in files.items() for name in names})
    return tmp_path


def write_index(folder, weight_map):
    text = json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map})
    (folder / INDEX_NAME).write_text(text)


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_a_good_folder(kind, request):
    folder = request.getfixturevalue(kind)
    shards, problems = read_shards(folder)
    assert not problems
    found = {name: tensor for shard in shards for name, tensor in shard.tensors.items()}
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].shape == tuple(tensor.shape)
        assert found[name].nbytes == tensor.nbytes
        raw = (folder / found[name].file).read_bytes()[found[name].begin : found[name].end]
        expected = b"" if tensor.numel() == 0 else tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert raw == expected


@pytest.mark.parametrize("cut", [1, 8, 30])
def test_a_truncated_file(single, cut):
    file = single / SINGLE_NAME
    file.write_bytes(file.read_bytes()[:-cut])
    assert "truncated file (1):\n    model.safetensors: " in problems_of(single)


def test_a_file_cut_inside_its_header(single):
    file = single / SINGLE_NAME
    file.write_bytes(file.read_bytes()[:40])
    assert "its header alone ends at" in problems_of(single)


@pytest.mark.parametrize("content", [b"", b"1234", b"<html>not found</html>" * 10])
def test_something_else_under_the_name(single, content):
    (single / SINGLE_NAME).write_bytes(content)
    assert "not a safetensors file" in problems_of(single)


def test_a_git_lfs_pointer(single):
    (single / SINGLE_NAME).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 10\n")
    assert "git lfs pull" in problems_of(single)


def test_a_file_longer_than_its_tensors(single):
    with (single / SINGLE_NAME).open("ab") as stream:
        stream.write(b"\0" * 5)
    assert "file longer than its tensors" in problems_of(single)


@pytest.mark.parametrize(("shift", "text"), [(-4, "overlaps the tensor before it"), (4, "leaves a hole before it")])
def test_offsets_that_do_not_fit_together(single, shift, text):
    header, data = header_of(single / SINGLE_NAME)
    for name in ("a", "c", "e"):
        header[name]["data_offsets"] = [at + shift for at in header[name]["data_offsets"]]
    write_header(single / SINGLE_NAME, header, data)
    assert text in problems_of(single)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dtype": "F42"}, "unknown dtype 'F42'"),
        ({"shape": [2, 4]}, "F32 [2, 4], takes the bytes"),
        ({"shape": [-2, -3]}, "has shape [-2, -3]"),
        ({"shape": None}, "model.safetensors"),
        ({"data_offsets": [0]}, "model.safetensors"),
    ],
)
def test_entries_that_contradict_themselves(single, change, text):
    header, data = header_of(single / SINGLE_NAME)
    header["a"] |= change
    write_header(single / SINGLE_NAME, header, data)
    found = problems_of(single)
    assert "unreadable header (1)" in found
    assert text in found


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 3}', "\x00" * 16])
def test_headers_that_are_none(single, text):
    write_header(single / SINGLE_NAME, text, b"")
    assert "unreadable header (1)" in problems_of(single)


def test_a_name_that_stands_twice(single):
    entry = '"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    write_header(single / SINGLE_NAME, f"{{{entry}, {entry}}}", b"\0" * 4)
    assert "'a' stands in it twice" in problems_of(single)


def test_a_missing_shard(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    assert "missing shards (1):\n    model-00002-of-00002.safetensors" in problems_of(sharded)


def test_index_and_shards_disagree_both_ways(sharded):
    file = sharded / "model-00001-of-00002.safetensors"
    tensors = load_file(file)
    save_file({"b": tensors["b"], "x": tensors["a"]}, file)
    text = problems_of(sharded)
    assert "in the index, but not in the shard it names (1):\n    a (model-00001-of-00002.safetensors)" in text
    assert "in a shard, but not in the index (1):\n    x (model-00001-of-00002.safetensors)" in text


def test_index_that_names_another_shard(sharded):
    index = json.loads((sharded / INDEX_NAME).read_text())["weight_map"]
    index["a"] = "model-00002-of-00002.safetensors"
    write_index(sharded, index)
    assert "in the index, but not in the shard it names (1)" in problems_of(sharded)


def test_a_tensor_in_two_shards(sharded):
    file = sharded / "model-00002-of-00002.safetensors"
    save_file(load_file(file) | {"a": TENSORS["a"]}, file)
    assert "in two shards (1):\n    a (model-00001" in problems_of(sharded)


def test_two_checkpoints_in_one_folder(sharded):
    save_file(TENSORS, sharded / SINGLE_NAME)
    assert "two checkpoints in one folder" in problems_of(sharded)


@pytest.mark.parametrize("file", ["../elsewhere.safetensors", "/etc/passwd", "sub/a.safetensors", 3])
def test_an_index_that_points_elsewhere(sharded, file):
    write_index(sharded, {"a": file})
    with pytest.raises(CheckpointError, match="not a file beside it"):
        read_shards(sharded)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"weight_map": 3}'])
def test_an_index_that_is_none(sharded, text):
    (sharded / INDEX_NAME).write_text(text)
    with pytest.raises(CheckpointError, match="not an index with a weight_map"):
        read_shards(sharded)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("model-Q4_K_M.gguf", "GGUF"),
        ("model0-mp8.safetensors", "inference/convert.py"),
        ("model-00001-of-00046.safetensors", "shards but no model.safetensors.index.json"),
        ("pytorch_model.bin", "pickles"),
        ("README.md", "pass the folder that holds the weights"),
    ],
)
def test_folders_without_a_checkpoint(tmp_path, file, text):
    (tmp_path / file).write_bytes(b"")
    with pytest.raises(CheckpointError, match=text):
        read_shards(tmp_path)


def test_errors_show_the_first_ten_and_a_count():
    problems = Problems()
    problems.add("missing", [f"name{i}" for i in range(SHOWN + 3)])
    text = str(problems.error("somewhere"))
    assert "missing (13):" in text
    assert "name9" in text
    assert "name10" not in text
    assert "and 3 more" in text
