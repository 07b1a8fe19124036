"""The plan: what does not fit is refused by name, before any data are read."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv4.config import Dsv4Config
from dsv4.convert import CheckpointError, open_checkpoint
from dsv4.convert.header import INDEX_NAME
from dsv4.testing_checkpoints import Recipe, make_checkpoint, write_files

# No dimension of a linear map is a whole number of 128s, FP4's blocks of 32 are whole.
SIZES = {
    **{"num_hidden_layers": 4, "n_routed_experts": 3, "hidden_size": 160},
    **{"moe_intermediate_size": 96, "q_lora_rank": 144, "head_dim": 48},
}
CONFIG = Dsv4Config.tiny(**SIZES)


@pytest.fixture
def made(tmp_path):
    """A checkpoint in the official formats, to damage."""
    return make_checkpoint(tmp_path / "made", CONFIG, Recipe(draft="plain"))


def rewrite(made, stored, num_shards=3):
    for file in made.folder.glob("model*"):
        file.unlink()
    write_files(made.folder, stored, num_shards)
    return made.folder


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


def fault(folder):
    checkpoint = open_checkpoint(folder)
    with pytest.raises(CheckpointError) as error:
        checkpoint.check()
    with pytest.raises(CheckpointError):
        next(checkpoint.tensors(dtype=torch.float32))
    return str(error.value)


def without(stored, *dropped):
    return {name: tensor for name, tensor in stored.items() if name not in dropped}


@pytest.mark.parametrize(
    "name",
    [
        "embed.weight",
        "norm.weight",
        "hc_head_scale",
        "layers.2.attn.kv_norm.weight",
        "layers.2.attn.compressor.norm.weight",
        "layers.0.ffn.gate.tid2eid",
        "layers.3.ffn.gate.bias",
        "layers.3.attn.attn_sink",
    ],
)
def test_a_missing_tensor(made, name):
    text = fault(rewrite(made, without(made.stored, name)))
    assert "missing tensors (1):" in text
    assert name in text


def test_a_missing_quantised_weight_leaves_its_scale_alone(made):
    text = fault(rewrite(made, without(made.stored, "layers.1.ffn.experts.2.w3.weight")))
    assert "missing tensors (1):\n    layers.1.ffn.experts.2.w3.weight" in text
    assert "scales without a weight (1):\n    layers.1.ffn.experts.2.w3.scale" in text


@pytest.mark.parametrize(
    "scale",
    [
        "layers.1.attn.wq_a.scale",
        "layers.2.attn.indexer.wq_b.scale",
        "layers.1.ffn.experts.2.w3.scale",
    ],
)
def test_a_weight_without_its_scale(made, scale):
    text = fault(rewrite(made, without(made.stored, scale)))
    assert "quantised weights without a scale (1)" in text
    assert scale.replace(".scale", ".weight") in text


def test_many_faults_are_counted_and_the_first_ten_named(made):
    dropped = [name for name in made.stored if name.endswith(".w1.weight") and name.startswith("layers.")]
    text = fault(rewrite(made, without(made.stored, *dropped)))
    assert f"missing tensors ({len(dropped)}):" in text
    assert f"... and {len(dropped) - 10} more" in text


@pytest.mark.parametrize(
    "name",
    [
        "layers.4.attn_norm.weight",
        "layers.0.attn.compressor.norm.weight",
        "layers.0.ffn.experts.3.w1.weight",
        "layers.0.attn.wq_a.bias",
        "norm.scale",
        "lm_head.weight",
        "layers.3.ffn.gate.tid2eid",
        "hc_head.fn",
        "layers.2.attn.compressor.wkv.weight_scale_2x",
    ],
)
def test_an_unexpected_tensor(made, name):
    text = fault(rewrite(made, made.stored | {name: torch.ones(4)}))
    assert f"unexpected tensors (1):\n    {name}" in text


def test_a_name_of_another_scheme_is_not_taken(made):
    stored = without(made.stored, "norm.weight") | {"model.norm.weight": made.stored["norm.weight"]}
    text = fault(rewrite(made, stored))
    assert "missing tensors (1):\n    norm.weight" in text
    assert "unexpected tensors (1):\n    model.norm.weight" in text


def test_a_bias_on_a_hash_block_without_its_table(made):
    """Only beside the table is it the vision file's extra; alone it is a block of another kind."""
    stored = without(made.stored, "layers.0.ffn.gate.tid2eid") | {"layers.0.ffn.gate.bias": torch.ones(3)}
    text = fault(rewrite(made, stored))
    assert "missing tensors (1):\n    layers.0.ffn.gate.tid2eid" in text


@pytest.mark.parametrize(
    "name",
    [
        "head.weight",
        "layers.0.attn.wo_a.weight",
        "layers.1.hc_attn_fn",
        "layers.2.attn.compressor.ape",
        "layers.0.ffn.gate.tid2eid",
        "layers.1.ffn.experts.0.w2.weight",
        "layers.1.ffn.experts.0.w2.scale",
        "layers.0.attn.wo_a.scale",
    ],
)
def test_a_wrong_shape(made, name):
    tensor = made.stored[name]
    wider = torch.zeros((*tensor.shape[:-1], tensor.shape[-1] + 1)).to(tensor.dtype)
    text = fault(rewrite(made, made.stored | {name: wider}))
    assert f"wrong shape (1):\n    {name}: {list(wider.shape)}, expected {list(tensor.shape)}" in text


def test_a_grouped_projection_of_full_width(made):
    """wo_a is grouped: its second dimension is heads * head_dim / groups."""
    rows, columns = made.stored["layers.0.attn.wo_a.weight"].shape
    wide = torch.zeros(rows, 2 * columns).to(torch.float8_e4m3fn)
    assert "wrong shape" in fault(rewrite(made, made.stored | {"layers.0.attn.wo_a.weight": wide}))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("norm.weight", torch.float8_e4m3fn),
        ("norm.weight", torch.int8),
        ("embed.weight", torch.uint8),
        ("layers.0.ffn.gate.weight", torch.int64),
        ("layers.0.ffn.gate.tid2eid", torch.float32),
        ("layers.0.ffn.gate.tid2eid", torch.uint8),
        ("layers.0.attn.wq_a.weight", torch.int8),
        ("layers.0.attn.wq_a.weight", torch.float8_e5m2),
        ("layers.0.attn.wq_a.scale", torch.bfloat16),
        ("layers.0.attn.wq_a.scale", torch.int8),
        ("layers.1.ffn.experts.0.w1.scale", torch.float32),
        ("layers.1.ffn.experts.0.w1.weight", torch.uint8),
    ],
)
def test_a_wrong_dtype(made, name, dtype):
    stored = made.stored | {name: torch.ones(made.stored[name].shape).to(dtype)}
    text = fault(rewrite(made, stored))
    assert "wrong dtype (1):" in text
    assert f"    {name}: " in text


def test_a_scale_of_a_weight_that_is_not_quantised(made):
    weight = torch.ones(made.stored["layers.0.attn.wq_a.weight"].shape, dtype=torch.bfloat16)
    text = fault(rewrite(made, made.stored | {"layers.0.attn.wq_a.weight": weight}))
    assert "scales of a weight that is not quantised (1):\n    layers.0.attn.wq_a.scale" in text


def test_a_quantised_compressor_needs_a_scale_and_then_reads(made):
    """Reports on Flash-Base differ about these; the header of the weight decides."""
    name = "layers.2.attn.compressor.wkv"
    codes = torch.randn(made.stored[f"{name}.weight"].shape).to(torch.float8_e4m3fn)
    stored = made.stored | {f"{name}.weight": codes}
    assert "quantised weights without a scale (1)" in fault(rewrite(made, stored))
    scale = torch.full((1, 2), 2.0)
    checkpoint = open_checkpoint(rewrite(made, stored | {f"{name}.scale": scale})).check()
    read = dict(checkpoint.tensors(dtype=torch.float32, layers=[2]))
    assert torch.equal(read["layers.2.self_attn.compressor.kv_proj.weight"], 2 * codes.float())


def test_experts_of_mixed_formats(made):
    stored = without(made.stored, "layers.1.ffn.experts.0.w2.scale")
    stored["layers.1.ffn.experts.0.w2.weight"] = torch.ones(160, 96, dtype=torch.bfloat16)
    text = fault(rewrite(made, stored))
    assert "experts of one block in different formats (1):" in text
    assert "layers.1.mlp.experts.down_proj: BF16, I8" in text


def test_a_stacked_grid_that_can_be_read_in_two_ways(tmp_path):
    recipe = Recipe(scheme="transformers", experts="FP8")
    make_checkpoint(tmp_path, CONFIG, recipe)
    assert "stacked gate and up whose halves are no whole blocks" in fault(tmp_path)


# config.json against the headers.


@pytest.mark.parametrize(
    ("experts", "declared", "is_fine"),
    [
        ("FP4", "fp4", True),
        ("FP4", "absent", True),
        ("FP4", "fp8", False),
        ("FP8", "fp8", True),
        ("FP8", "absent", True),
        ("FP8", "fp4", False),
        ("BF16", "fp4", True),
        ("BF16", "fp8", True),
        ("BF16", "absent", True),
    ],
)
def test_expert_dtype_against_the_headers(tmp_path, experts, declared, is_fine):
    recipe = Recipe(experts=experts, linears="BF16" if experts == "BF16" else "FP8")
    made = make_checkpoint(tmp_path, CONFIG, recipe)
    edit_config(tmp_path, expert_dtype=declared)
    if not is_fine:
        assert f"expert_dtype is '{declared}', but the experts of 4 blocks are stored as" in fault(tmp_path)
        return
    read = dict(open_checkpoint(tmp_path).check().tensors(dtype=torch.float32))
    name = "layers.1.mlp.experts.down_proj"
    assert torch.equal(read[name].double(), made.expected[name])


def test_another_block_size_is_refused(made):
    config = json.loads((made.folder / "config.json").read_text())
    quantisation = config["quantization_config"] | {"weight_block_size": [32, 32]}
    edit_config(made.folder, quantization_config=quantisation)
    assert "weight_block_size is [32, 32], read are 128 x 128" in fault(made.folder)


def test_another_fp8_format_is_refused(made):
    config = json.loads((made.folder / "config.json").read_text())
    edit_config(made.folder, quantization_config=config["quantization_config"] | {"fmt": "e5m2"})
    assert "fmt is 'e5m2'" in fault(made.folder)


def test_config_with_another_number_of_experts_or_layers(made):
    edit_config(made.folder, n_routed_experts=4)
    text = fault(made.folder)
    assert "layers.0.ffn.experts.3.w1.weight" in text
    assert "wrong shape" in text


def test_a_file_renamed_in_the_index_only(made):
    index = json.loads((made.folder / INDEX_NAME).read_text())
    moved = next(iter(index["weight_map"]))
    file = made.folder / index["weight_map"][moved]
    tensors = without(load_file(file), moved)
    save_file(tensors, file)
    assert f"in the index, but not in the shard it names (1):\n    {moved}" in fault(made.folder)


def test_configs_agree(made):
    checkpoint = open_checkpoint(made.folder)
    assert checkpoint.config == dataclasses.replace(
        CONFIG,
        torch_dtype=torch.bfloat16,
        expert_dtype="fp4",
        quantization_config=checkpoint.config.quantization_config,
    )
