"""Repackagings that are not read are refused by name, and what is read is not taken for one of
them."""

import json

import pytest
import torch

from dsv4.config import Dsv4Config
from dsv4.convert import CheckpointError, open_checkpoint
from dsv4.testing_checkpoints import Recipe, make_checkpoint, write_files

ROUTED = "layers.0.ffn.experts.0.w1"
# What config.json says, a tensor of the file, and what the error calls it.
SIGNS = [
    ({"quant_algo": "MIXED_PRECISION", "quant_method": "fp8"}, None, "NVFP4"),
    ({"quant_method": "modelopt"}, None, "NVFP4"),
    ({}, f"{ROUTED}.weight_scale_2", "NVFP4"),
    ({"quant_method": "compressed-tensors"}, None, "compressed-tensors"),
    ({}, f"{ROUTED}.weight_packed", "compressed-tensors"),
    ({}, "model.layers.0.mlp.switch_mlp.gate_proj.scales", "MLX"),
    ({"quant_method": "quark"}, None, "Quark"),
    ({}, f"{ROUTED}.weight_offset", "Ascend"),
    ({"quant_method": "auto-round"}, None, "AutoRound"),
    ({}, f"{ROUTED}.qweight", "AutoRound, GPTQ or AWQ"),
    ({"quant_method": "gptq"}, None, "GPTQ"),
    ({"quant_method": "exl3"}, None, "ExLlama"),
    ({"quant_method": "bitsandbytes"}, None, "bitsandbytes"),
    ({"quant_method": "mxfp4"}, None, "MXFP4"),
    ({}, f"{ROUTED}.weight_scale", "scales that dsv4 does not know"),
    ({"quant_method": "something-new"}, None, "quant_method 'something-new'"),
]


@pytest.fixture
def made(tmp_path):
    return make_checkpoint(tmp_path, Dsv4Config.tiny(hidden_size=32, moe_intermediate_size=32), Recipe(num_shards=1))


@pytest.mark.parametrize(("quantisation", "name", "called"), SIGNS)
def test_each_is_named(made, quantisation, name, called):
    path = made.folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= quantisation
    path.write_text(json.dumps(config))
    if name is not None:
        write_files(made.folder, made.stored | {name: torch.ones(2)}, 1)
    with pytest.raises(CheckpointError, match=called) as error:
        open_checkpoint(made.folder)
    assert "dsv4 reads the official FP8 and FP4 files" in str(error.value)


def test_mlx_is_known_by_its_config(made):
    path = made.folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization": {"bits": 4, "group_size": 64}}))
    with pytest.raises(CheckpointError, match="MLX"):
        open_checkpoint(made.folder)


@pytest.mark.parametrize("scheme", ["official", "hybrid", "transformers"])
@pytest.mark.parametrize("experts", ["FP4", "FP8", "BF16"])
def test_what_is_read_is_not_refused(tmp_path, scheme, experts):
    recipe = Recipe(scheme=scheme, experts=experts, draft="plain", vision=True)
    config = Dsv4Config.tiny(num_hidden_layers=3, hidden_size=32, moe_intermediate_size=128)
    make_checkpoint(tmp_path, config, recipe)
    open_checkpoint(tmp_path).check()


def test_v41_is_refused_with_a_sentence(made):
    path = made.folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "deepseek_v41"}))
    with pytest.raises(ValueError, match="deepseek_v41"):
        open_checkpoint(made.folder)


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[]", "holds list")])
def test_a_config_that_is_none(made, text, message):
    (made.folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(made.folder)


def test_a_folder_without_config(made):
    (made.folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        open_checkpoint(made.folder)
    with pytest.raises(CheckpointError, match="is not a folder"):
        open_checkpoint(made.folder / "nowhere")
