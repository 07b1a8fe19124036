"""From one checkpoint to another: every source to every target, streamed."""

import pytest
import torch

from dsv4.config import HASH_MOE, MOE, Dsv4Config
from dsv4.convert import convert_checkpoint, open_checkpoint
from dsv4.convert.recipe import TARGETS
from dsv4.testing_checkpoints import Recipe, make_checkpoint

CONFIG = Dsv4Config.tiny(
    num_hidden_layers=4,
    mlp_layer_types=(HASH_MOE, MOE, HASH_MOE, MOE),
    hidden_size=96,
    moe_intermediate_size=128,
    n_routed_experts=3,
)
SOURCES = [
    Recipe(draft="plain", vision=True),
    Recipe(scales="F32", experts="FP8"),
    Recipe(linears="F32", experts="F32", norms="F32", num_shards=1),
    Recipe(scheme="hybrid", num_shards=1),
    Recipe(scheme="transformers", linears="BF16", experts="BF16"),
    Recipe(scheme="transformers"),
]


def values(folder, dtype):
    return dict(open_checkpoint(folder).check().tensors(dtype=dtype))


def assert_same(read, expected):
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(read[name], tensor), name


@pytest.mark.parametrize("recipe", SOURCES, ids=str)
@pytest.mark.parametrize("to", ["bf16", "fp32", "transformers", "hybrid"])
def test_decoding(tmp_path, recipe, to):
    made = make_checkpoint(tmp_path / "made", CONFIG, recipe)
    dtype = torch.float32 if to == "fp32" else torch.bfloat16
    folder = convert_checkpoint(made.folder, tmp_path / "new", to=to)
    checkpoint = open_checkpoint(folder).check()
    assert checkpoint.scheme == TARGETS[to][0]
    assert checkpoint.config.torch_dtype == dtype
    assert set(checkpoint.formats.values()) == {"dense"}
    assert checkpoint.extras == {}
    assert_same(values(folder, dtype), values(made.folder, dtype))


@pytest.mark.parametrize("recipe", SOURCES, ids=str)
@pytest.mark.parametrize("to", list(TARGETS))
def test_keeping_everything_as_stored(tmp_path, recipe, to):
    made = make_checkpoint(tmp_path / "made", CONFIG, recipe)
    folder = convert_checkpoint(made.folder, tmp_path / "new", to=to, dtype="stored")
    source, target = open_checkpoint(made.folder), open_checkpoint(folder).check()
    quantised = source.formats["layers.0.mlp.experts"] != "dense"
    assert target.scheme == ("hybrid" if to == "transformers" and quantised else TARGETS[to][0])
    assert source.formats == target.formats
    mine, theirs = (dict(c.tensors(dtype=None, native=True)) for c in (target, source))
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        whole = torch.uint8 if tensor.dtype.itemsize == 1 else tensor.dtype
        assert mine[name].dtype == tensor.dtype
        assert torch.equal(mine[name].view(whole), tensor.view(whole)), name


@pytest.mark.parametrize("recipe", SOURCES, ids=str)
def test_to_the_official_formats(tmp_path, recipe):
    made = make_checkpoint(tmp_path / "made", CONFIG, recipe)
    folder = convert_checkpoint(made.folder, tmp_path / "new", to="official")
    checkpoint = open_checkpoint(folder).check()
    kept = open_checkpoint(made.folder).formats
    assert checkpoint.formats["layers.1.mlp.experts"] == ("fp8" if recipe.experts == "FP8" else "fp4")
    assert checkpoint.formats["layers.1.self_attn.o_a_proj"] == "fp8"
    expected, read = values(made.folder, torch.float32), values(folder, torch.float32)
    for name, tensor in expected.items():
        module = name.rpartition(".")[0]
        if kept.get(module, "dense") != "dense":
            # What was in codes keeps them.
            assert torch.equal(read[name], tensor), name


def test_companions_go_along(tmp_path):
    made = make_checkpoint(tmp_path / "made", CONFIG, Recipe())
    (made.folder / "tokenizer.json").write_text("{}")
    (made.folder / "notes.txt").write_text("mine")
    folder = convert_checkpoint(made.folder, tmp_path / "new")
    assert (folder / "tokenizer.json").is_file()
    assert not (folder / "notes.txt").exists()


def test_in_place(tmp_path):
    made = make_checkpoint(tmp_path / "made", CONFIG, Recipe())
    expected = values(made.folder, torch.bfloat16)
    with pytest.raises(FileExistsError, match="overwrite"):
        convert_checkpoint(made.folder, made.folder)
    convert_checkpoint(made.folder, made.folder, overwrite=True)
    assert_same(values(made.folder, torch.bfloat16), expected)


def test_a_source_inside_the_target_is_not_deleted(tmp_path):
    outer = make_checkpoint(tmp_path / "outer", CONFIG, Recipe())
    inner = make_checkpoint(tmp_path / "outer" / "inner", CONFIG, Recipe(), seed=1)
    with pytest.raises(ValueError, match="lies inside"):
        convert_checkpoint(inner.folder, outer.folder, overwrite=True)
    assert (inner.folder / "config.json").is_file()


def test_unknown_targets(tmp_path):
    with pytest.raises(ValueError, match="to is 'int4'; expected one of bf16, fp32, official"):
        convert_checkpoint(tmp_path, tmp_path / "new", to="int4")


def test_progress(tmp_path):
    made = make_checkpoint(tmp_path / "made", CONFIG, Recipe())
    calls = []
    convert_checkpoint(made.folder, tmp_path / "new", progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] == sum(tensor.nbytes for tensor in made.stored.values())


def anonymous_bytes():
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("to", ["bf16", "official", "hybrid"])
def test_memory_while_converting(tmp_path, to):
    config = Dsv4Config.tiny(
        num_hidden_layers=3,
        **{"hidden_size": 512, "moe_intermediate_size": 512, "n_routed_experts": 24},
    )
    recipe = Recipe(experts="BF16" if to == "official" else "FP4", num_shards=4)
    folder = make_checkpoint(tmp_path / "made", config, recipe).folder
    before = anonymous_bytes()
    peaks = []
    convert_checkpoint(
        folder,
        tmp_path / "new",
        to=to,
        max_shard_bytes=4_000_000,
        progress=lambda done, total: peaks.append(anonymous_bytes()),
    )
    written = sum(file.stat().st_size for file in (tmp_path / "new").glob("*.safetensors"))
    assert written > 20_000_000
    # A shard, and 10 MB for one tensor on its way and what Python and torch allocate.
    assert max(peaks) - before <= 14_000_000
