"""Writing: what comes back, what is refused, and what a folder holds at every moment."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

from dsv4.config import HASH_MOE, MOE, Dsv4Config
from dsv4.convert import names, open_checkpoint, write_checkpoint
from dsv4.convert.layout import layout
from dsv4.testing_checkpoints import Recipe, make_checkpoint

SIZES = {
    "num_hidden_layers": 4,
    "mlp_layer_types": (HASH_MOE, MOE, HASH_MOE, MOE),
    **{"hidden_size": 96, "moe_intermediate_size": 64, "n_routed_experts": 3},
}
CONFIG = Dsv4Config.tiny(**SIZES)
FORMS = ["official", "transformers", "hybrid"]


def random_state(dtype=torch.float32, exact_norms=False):
    state = {}
    for name, spec in layout(CONFIG).items():
        if spec.dtype is torch.int64:
            state[name] = torch.randint(CONFIG.n_routed_experts, spec.shape)
            continue
        tensor = torch.randn(spec.shape) * 0.2 + (1.0 if spec.is_norm else 0.0)
        if exact_norms and spec.is_norm:
            tensor = tensor.bfloat16().float()
        state[name] = tensor.to(spec.dtype or dtype)
    return state


def native_state(tmp_path, **recipe):
    made = make_checkpoint(tmp_path / "made", CONFIG, Recipe(**recipe))
    checkpoint = open_checkpoint(made.folder)
    return dict(checkpoint.tensors(dtype=torch.bfloat16, native=True)), checkpoint.config


def assert_same(read, expected):
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype, name
        whole = torch.uint8 if tensor.dtype.itemsize == 1 else tensor.dtype
        assert torch.equal(read[name].view(whole), tensor.view(whole)), name


def stored_dtypes(folder):
    return {n: t.dtype for shard in open_checkpoint(folder).shards for n, t in shard.tensors.items()}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_shard_bytes", [5_000_000_000, 20_000, 1])
def test_reading_back_gives_the_same_bits(tmp_path, form, dtype, max_shard_bytes):
    state = random_state(dtype)
    config = dataclasses.replace(CONFIG, torch_dtype=dtype)
    folder = write_checkpoint(state, config, tmp_path / "new", format=form, max_shard_bytes=max_shard_bytes)
    checkpoint = open_checkpoint(folder).check()
    assert checkpoint.scheme == form
    assert_same(dict(checkpoint.tensors(dtype=checkpoint.config.torch_dtype)), state)
    assert checkpoint.config == dataclasses.replace(config, num_nextn_predict_layers=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("experts", ["FP4", "FP8", "BF16"])
@pytest.mark.parametrize("scales", ["E8M0", "F32"])
def test_codes_are_written_bit_for_bit(tmp_path, form, experts, scales):
    state, config = native_state(tmp_path, experts=experts, scales=scales)
    folder = write_checkpoint(state, config, tmp_path / "new", format=form)
    checkpoint = open_checkpoint(folder).check()
    assert_same(dict(checkpoint.tensors(dtype=torch.bfloat16, native=True)), state)
    assert checkpoint.config.expert_dtype == (None if experts == "BF16" else experts.lower())
    assert checkpoint.config.quantization_config is not None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_decoded_when_a_dtype_is_asked_for(tmp_path, form, dtype):
    state, config = native_state(tmp_path)
    expected = dict(open_checkpoint(tmp_path / "made").tensors(dtype=dtype))
    folder = write_checkpoint(state, config, tmp_path / "new", format=form, dtype=dtype)
    checkpoint = open_checkpoint(folder).check()
    assert_same(dict(checkpoint.tensors(dtype=dtype)), expected)
    assert checkpoint.config.torch_dtype == dtype
    assert checkpoint.config.expert_dtype is None
    assert checkpoint.config.quantization_config is None
    assert set(checkpoint.formats.values()) == {"dense"}


def test_norms_are_bf16_only_where_that_is_exact(tmp_path):
    config = dataclasses.replace(CONFIG, torch_dtype=torch.bfloat16)
    for exact, expected in ((True, "BF16"), (False, "F32")):
        folder = write_checkpoint(random_state(torch.bfloat16, exact), config, tmp_path / expected)
        dtypes = stored_dtypes(folder)
        assert dtypes["layers.0.attn_norm.weight"] == expected
        assert dtypes["layers.0.hc_attn_fn"] == "F32"
        assert dtypes["layers.1.ffn.gate.weight"] == "BF16"


def test_the_official_formats(tmp_path):
    state = random_state()
    folder = write_checkpoint(state, CONFIG, tmp_path / "new", dtype="official")
    checkpoint = open_checkpoint(folder).check()
    by_official = {"FP8": "F8_E4M3", "FP4": "I8"}
    dtypes = stored_dtypes(folder)
    for name, spec in layout(CONFIG).items():
        pieces = checkpoint.sources[name].pieces
        assert {dtypes[piece.weight.name] for piece in pieces} == {by_official.get(spec.official, spec.official)}
    assert checkpoint.config.torch_dtype == torch.bfloat16
    raw = json.loads((folder / "config.json").read_text())
    assert raw["expert_dtype"] == "fp4"
    assert raw["quantization_config"]["weight_block_size"] == [128, 128]
    read = dict(checkpoint.tensors(dtype=torch.float32))
    for name, tensor in read.items():
        if tensor.is_floating_point():
            # FP4: half of the widest gap, 2 of 6; FP8 and BF16 are far inside.
            assert (tensor - state[name]).abs().max() <= state[name].abs().max() / 6 + 1e-6, name
    # Quantising what was quantised changes nothing.
    again = write_checkpoint(read, checkpoint.config, tmp_path / "again", dtype="official")
    assert_same(dict(open_checkpoint(again).tensors(dtype=torch.float32)), read)


def test_base_models_keep_fp8_experts(tmp_path):
    config = dataclasses.replace(CONFIG, expert_dtype="fp8")
    checkpoint = open_checkpoint(write_checkpoint(random_state(), config, tmp_path / "new", dtype="official"))
    assert checkpoint.check().formats["layers.0.mlp.experts"] == "fp8"
    assert checkpoint.config.expert_dtype == "fp8"


def test_one_block_per_shard_and_an_index(tmp_path):
    folder = write_checkpoint(random_state(), CONFIG, tmp_path / "new")
    files = sorted(file.name for file in folder.iterdir())
    assert files == [
        "config.json",
        *(f"model-{i:05d}-of-00006.safetensors" for i in range(1, 7)),
        "model.safetensors.index.json",
    ]
    weight_map = json.loads((folder / files[-1]).read_text())["weight_map"]
    assert weight_map["embed.weight"] == files[1]
    assert {file for name, file in weight_map.items() if name.startswith("layers.2.")} == {files[4]}
    assert {weight_map[name] for name in ("norm.weight", "head.weight", "hc_head_fn")} == {files[6]}


def test_one_file_where_it_fits(tmp_path):
    folder = write_checkpoint(random_state(), CONFIG, tmp_path / "new", format="transformers")
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_shards_stay_below_their_limit(tmp_path):
    folder = write_checkpoint(random_state(), CONFIG, tmp_path / "new", format="hybrid", max_shard_bytes=100_000)
    shards = open_checkpoint(folder).check().shards
    assert len(shards) > 3
    for shard in shards:
        payload = sum(tensor.nbytes for tensor in shard.tensors.values())
        assert payload <= 100_000 or len(shard.tensors) == 1
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for s in shards for t in s.tensors.values())


def test_tensors_of_whole_lines_lie_on_them(tmp_path):
    folder = write_checkpoint(random_state(), CONFIG, tmp_path / "new", format="transformers", dtype=torch.bfloat16)
    for shard in open_checkpoint(folder).shards:
        for tensor in shard.tensors.values():
            assert tensor.nbytes % 64 or tensor.begin % 64 == 0, tensor.name


@pytest.mark.parametrize("form", FORMS)
def test_any_order_and_any_iterable(tmp_path, form):
    state, config = native_state(tmp_path)
    pairs = [(name, state[name]) for name in sorted(state, key=lambda name: name[::-1])]
    if form == "transformers":
        pairs = [(n, t) for n, t in random_state(torch.bfloat16).items()][::-1]
        state = dict(pairs)
    folder = write_checkpoint(iter(pairs), config, tmp_path / "new", format=form)
    assert_same(dict(open_checkpoint(folder).check().tensors(dtype=torch.bfloat16, native=True)), state)


def test_views_and_parameters_are_written(tmp_path):
    state = random_state()
    name = "layers.0.self_attn.q_a_proj.weight"
    strided = torch.nn.Parameter(torch.randn(state[name].shape[::-1]).t())
    folder = write_checkpoint(state | {name: strided}, CONFIG, tmp_path / "new")
    read = dict(open_checkpoint(folder).tensors(dtype=torch.float32))
    assert torch.equal(read[name], strided.detach())


def test_extra_files_are_copied(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    folder = write_checkpoint(random_state(), CONFIG, tmp_path / "new", extra_files=[tmp_path / "tokenizer.json"])
    assert (folder / "tokenizer.json").read_text() == "{}"


def test_extra_files_cannot_replace_the_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileExistsError):
        write_checkpoint(random_state(), CONFIG, tmp_path / "new", extra_files=[tmp_path / "config.json"])
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


# What is refused; nothing is left under the target's name or beside it.


def refused(tmp_path, state, message, config=CONFIG, **options):
    with pytest.raises(ValueError, match=message):
        write_checkpoint(state, config, tmp_path / "sub" / "new", **options)
    assert list((tmp_path / "sub").iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm.weight": None}, r"1 tensors of the model are missing: norm\.weight"),
        ({"layers.0.mlp.experts.down_proj": None}, r"missing: layers\.0\.mlp\.experts\.down_proj"),
        (
            {"layers.9.attn_hc.fn": torch.ones(3)},
            r"layers\.9\.attn_hc\.fn is no tensor of this model",
        ),
        ({"model.norm.weight": torch.ones(3)}, "is no tensor of this model"),
        ({"norm.weight": torch.ones(3)}, r"norm\.weight has shape \[3\]; expected \[96\]"),
        ({"norm.weight": torch.ones(96, dtype=torch.float64)}, "is torch.float64"),
        (
            {"layers.0.mlp.router.tid2eid": torch.ones(64, 2)},
            "is torch.float32; a file holds it as one of torch.int64",
        ),
        (
            {"lm_head.weight": torch.ones(64, 96, dtype=torch.int8)},
            "codes and scales do not pair up",
        ),
    ],
)
def test_states_that_are_not_the_model(tmp_path, change, message):
    state = {name: tensor for name, tensor in (random_state() | change).items() if tensor is not None}
    refused(tmp_path, state, message)


@pytest.mark.parametrize("dropped", ["weight", "weight_scale_inv"])
def test_codes_and_scales_belong_together(tmp_path, dropped):
    state, config = native_state(tmp_path)
    del state[f"layers.1.self_attn.q_a_proj.{dropped}"]
    refused(tmp_path, state, "codes and scales do not pair up", config)


def test_scales_of_a_wrong_grid(tmp_path):
    state, config = native_state(tmp_path)
    name = "layers.1.self_attn.q_b_proj.weight_scale_inv"
    state[name] = state[name].view(torch.uint8).repeat(2, 1).view(torch.float8_e8m0fnu)
    refused(tmp_path, state, "expected float8_e8m0fnu or float32", config)


def test_a_tensor_given_twice(tmp_path):
    pairs = [*random_state().items(), ("norm.weight", torch.ones(96))]
    refused(tmp_path, pairs, r"norm\.weight is given twice")


def test_weights_that_cannot_be_quantised(tmp_path):
    state = random_state()
    state["layers.1.mlp.experts.down_proj"][1, 2, 3] = float("nan")
    refused(
        tmp_path,
        state,
        r"layers\.1\.mlp\.experts\.down_proj \(expert 1\) holds NaN",
        dtype="official",
    )
    config = dataclasses.replace(CONFIG, moe_intermediate_size=40)
    state = {n: torch.ones(s.shape, dtype=s.dtype or torch.float32) for n, s in layout(config).items()}
    refused(tmp_path, state, "whole blocks of 32", config, dtype="official")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "gguf"}, "format is 'gguf'"),
        ({"dtype": torch.int8}, "dtype is torch.int8"),
        ({"dtype": "bf16"}, "dtype is 'bf16'"),
        ({"max_shard_bytes": 0}, "max_shard_bytes is 0"),
    ],
)
def test_options_that_do_not_exist(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        write_checkpoint(random_state(), CONFIG, tmp_path / "new", **options)
    assert list(tmp_path.iterdir()) == []


# The folder.


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path):
    target = tmp_path / "new"
    target.mkdir()
    write_checkpoint(random_state(), CONFIG, target)
    before = {file.name: file.read_bytes() for file in target.iterdir()}
    with pytest.raises(FileExistsError, match="pass overwrite=True"):
        write_checkpoint(random_state(), CONFIG, target)
    assert before == {file.name: file.read_bytes() for file in target.iterdir()}
    state = random_state()
    write_checkpoint(state, CONFIG, target, overwrite=True, format="transformers")
    assert sorted(file.name for file in target.iterdir()) == ["config.json", "model.safetensors"]
    assert_same(dict(open_checkpoint(target).tensors(dtype=torch.float32)), state)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_only_a_checkpoint_is_overwritten(tmp_path):
    target = tmp_path / "home"
    target.mkdir()
    (target / "thesis.tex").write_text("chapter 1")
    with pytest.raises(FileExistsError, match="it is no checkpoint and is not replaced"):
        write_checkpoint(random_state(), CONFIG, target, overwrite=True)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(FileExistsError, match="is a file"):
        write_checkpoint(random_state(), CONFIG, file, overwrite=True)
    assert (target / "thesis.tex").read_text() == "chapter 1"


def test_a_link_keeps_pointing_to_the_folder(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk", target_is_directory=True)
    write_checkpoint(random_state(), CONFIG, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk" / "config.json").is_file()


def test_an_exception_while_writing_leaves_the_old(tmp_path):
    state = random_state()
    write_checkpoint(state, CONFIG, tmp_path / "new")

    def breaking():
        yield from list(random_state().items())[:40]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(breaking(), CONFIG, tmp_path / "new", overwrite=True)
    assert_same(dict(open_checkpoint(tmp_path / "new").check().tensors(dtype=torch.float32)), state)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


# Forks children that rewrite one folder over and over, each time with another value, and kills each
# at another moment.
KILLED = """
import os, signal, sys, time
import torch
from dsv4.config import Dsv4Config
from dsv4.convert import open_checkpoint, write_checkpoint
from dsv4.convert.layout import layout

torch.set_num_threads(1)
config = Dsv4Config.tiny(num_hidden_layers=4, n_routed_experts=3)
target = sys.argv[1]
for attempt in range(40):
    child = os.fork()
    while child == 0:
        for value in range(3):
            state = {
                name: torch.full(spec.shape, value).to(spec.dtype or torch.float32)
                for name, spec in layout(config).items()
            }
            write_checkpoint(state, config, target, overwrite=True)
    time.sleep(0.003 * attempt)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if not os.path.exists(target):
        print("nothing")
        continue
    read = dict(open_checkpoint(target).check().tensors(dtype=torch.float32))
    values = {value for tensor in read.values() for value in tensor.float().unique().tolist()}
    print("whole" if len(values) == 1 else f"mixed {values}")
"""


def test_a_killed_run_leaves_the_old_or_nothing(tmp_path):
    target = tmp_path / "target"
    run = subprocess.run(
        [sys.executable, "-c", KILLED, str(target)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = run.stdout.split("\n")[:-1]
    assert len(found) == 40
    assert set(found) <= {"whole", "nothing"}
    assert "whole" in found
    # Some were killed in the middle of it.
    assert [path for path in tmp_path.iterdir() if ".partial-" in path.name]


def test_names_of_blocks_do_not_mix(tmp_path):
    """Blocks 1 and 10 to 13 in files of their own, each with its own tensors."""
    config = Dsv4Config.tiny(num_hidden_layers=14, n_routed_experts=12)
    state = {n: torch.randn(s.shape).to(s.dtype or torch.float32) for n, s in layout(config).items()}
    state |= {n: torch.zeros(t.shape, dtype=torch.int64) for n, t in state.items() if n.endswith("tid2eid")}
    folder = write_checkpoint(state, config, tmp_path / "new")
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for name, file in weight_map.items():
        block = names.block_of(names.to_place("official", name).name)
        if block is not None:
            assert file == f"model-{block + 2:05d}-of-00016.safetensors"
    assert_same(dict(open_checkpoint(folder).check().tensors(dtype=torch.float32)), state)
