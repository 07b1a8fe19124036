"""transformers as the other side: we read what it writes, it reads what we write, and the logits
are the same."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dsv4.config import HASH_MOE, MOE, Dsv4Config
from dsv4.convert import names, open_checkpoint, write_checkpoint
from dsv4.convert.names import Place
from dsv4.testing_checkpoints import Recipe, make_checkpoint

GOLDEN = Path(__file__).parent / "golden"
SIZES = {"num_hidden_layers": 4, "mlp_layer_types": (HASH_MOE, MOE, HASH_MOE, MOE)}
# transformers reads quantised matrices rightly only if their blocks are whole or there is one.
WHOLE = {
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "q_lora_rank": 128,
    "head_dim": 64,
    "o_lora_rank": 64,
}


@pytest.fixture(autouse=True)
def _quantised_files_on_a_cpu(monkeypatch):
    """transformers asks for accelerate before it decodes FP8, and does not use it for that."""
    monkeypatch.setattr("transformers.quantizers.quantizer_finegrained_fp8.is_accelerate_available", lambda: True)


def random_hf(tmp_path, dtype=torch.float32, **overrides):
    """A transformers model in which every parameter and buffer is random."""
    folder = tmp_path / "config"
    folder.mkdir()
    config = Dsv4Config.tiny(**(SIZES | overrides))
    (folder / "config.json").write_text(json.dumps(config.to_hf("transformers")))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("tid2eid"):
                tensor.copy_(torch.stack([torch.randperm(config.n_routed_experts)[:2] for _ in tensor]))
            elif "norm.weight" in name:
                tensor.normal_(1.0, 0.2)
            else:
                tensor.normal_(0.0, 0.25)
    return model


def ours(hf_model):
    """Its tensors by our names."""
    return {names.to_place("transformers", name).name: tensor for name, tensor in hf_model.state_dict().items()}


def assert_same(read, expected):
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype, name
        assert torch.equal(read[name], tensor), name


def logits(folder_or_model, ids, dtype=torch.float32):
    model = folder_or_model
    if not isinstance(model, torch.nn.Module):
        model = AutoModelForCausalLM.from_pretrained(folder_or_model, dtype=dtype).eval()
    with torch.no_grad():
        return model(input_ids=ids).logits


def some_ids(length=20):
    return torch.randint(64, (2, length))


@pytest.mark.parametrize("original", [True, False], ids=["hybrid", "transformers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard_size", ["5GB", "60KB"])
def test_we_read_what_it_writes(tmp_path, original, dtype, shard_size):
    model = random_hf(tmp_path, dtype)
    model.save_pretrained(tmp_path / "saved", save_original_format=original, max_shard_size=shard_size)
    checkpoint = open_checkpoint(tmp_path / "saved").check()
    assert checkpoint.scheme == ("hybrid" if original else "transformers")
    assert (len(checkpoint.shards) > 2) == (shard_size == "60KB")
    assert_same(dict(checkpoint.tensors(dtype=dtype)), ours(model))
    assert checkpoint.config.torch_dtype == dtype


def test_fourteen_layers(tmp_path):
    model = random_hf(
        tmp_path,
        num_hidden_layers=14,
        mlp_layer_types=(HASH_MOE,) * 2 + (MOE,) * 12,
        n_routed_experts=11,
    )
    model.save_pretrained(tmp_path / "saved", max_shard_size="400KB")
    checkpoint = open_checkpoint(tmp_path / "saved").check()
    assert_same(dict(checkpoint.tensors(dtype=torch.float32)), ours(model))


@pytest.mark.parametrize("form", ["official", "transformers", "hybrid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_reads_what_we_write(tmp_path, form, dtype):
    model = random_hf(tmp_path, dtype)
    ids = some_ids()
    config = Dsv4Config.from_hf(model.config.to_dict(), strict=False)
    write_checkpoint(ours(model), config, tmp_path / "written", format=form)
    assert_same(dict(open_checkpoint(tmp_path / "written").check().tensors(dtype=dtype)), ours(model))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "written", dtype=dtype).eval()
    assert_same(ours(again), ours(model))
    assert torch.equal(logits(again, ids), logits(model, ids))
    # Without a word about the dtype it comes back as it was.
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "written").dtype == dtype


@pytest.mark.parametrize("form", ["official", "transformers"])
@pytest.mark.parametrize(
    "recipe",
    [Recipe(), Recipe(experts="FP8"), Recipe(experts="BF16"), Recipe(scales="F32")],
    ids=str,
)
def test_decoded_values_are_the_same(tmp_path, form, recipe):
    """Quantised files: as we read them, as it reads them, and again after we wrote them."""
    make_checkpoint(tmp_path / "made", Dsv4Config.tiny(**(SIZES | WHOLE)), recipe)
    checkpoint = open_checkpoint(tmp_path / "made").check()
    state = dict(checkpoint.tensors(dtype=torch.bfloat16, native=True))
    write_checkpoint(state, checkpoint.config, tmp_path / "written", format=form)
    # Beside FP8 it leaves plain BF16 experts in BF16, whatever it is asked for.
    for dtype in (torch.bfloat16,) if recipe.experts == "BF16" else (torch.bfloat16, torch.float32):
        values = dict(checkpoint.tensors(dtype=dtype))
        for folder in ("made", "written"):
            model = AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=dtype)
            assert_same(ours(model), values)
            assert_same(dict(open_checkpoint(tmp_path / folder).check().tensors(dtype=dtype)), values)


@pytest.mark.parametrize("form", ["official", "transformers"])
def test_quantising_to_the_official_formats(tmp_path, form):
    model = random_hf(tmp_path, **WHOLE)
    config = Dsv4Config.from_hf(model.config.to_dict(), strict=False)
    write_checkpoint(ours(model), config, tmp_path / "written", format=form, dtype="official")
    checkpoint = open_checkpoint(tmp_path / "written").check()
    formats = checkpoint.formats
    assert formats["layers.1.mlp.experts"] == "fp4"
    assert formats["layers.1.self_attn.o_a_proj"] == "fp8"
    assert formats["layers.2.self_attn.compressor.kv_proj"] == "dense"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "written", dtype=torch.float32)
    assert_same(ours(again), dict(checkpoint.tensors(dtype=torch.float32)))


@pytest.mark.parametrize("original", [True, False], ids=["hybrid", "transformers"])
def test_quantised_models_that_it_keeps_quantised(tmp_path, monkeypatch, original):
    """On a machine with a GPU transformers keeps the codes and writes them under its own names."""
    made = make_checkpoint(tmp_path / "made", Dsv4Config.tiny(**(SIZES | WHOLE)), Recipe())
    with monkeypatch.context() as gpu:
        gpu.setattr("torch.cuda.is_available", lambda: True)
        gpu.setattr("torch.cuda.get_device_capability", lambda *device: (9, 0))
        model = AutoModelForCausalLM.from_pretrained(made.folder, dtype=torch.bfloat16)
        model.save_pretrained(tmp_path / "saved", save_original_format=original)
    checkpoint = open_checkpoint(tmp_path / "saved").check()
    assert checkpoint.formats["layers.0.mlp.experts"] == "fp4"
    for name, tensor in checkpoint.tensors(dtype=torch.float32):
        assert torch.equal(tensor.double(), made.expected[name].double()), name
    place = Place("layers.0.self_attn.q_a_proj.weight_scale_inv")
    assert names.from_place(checkpoint.scheme, place) in checkpoint.shards[0].tensors


@pytest.mark.parametrize("name", ["a1_exact", "a2_exact_hca8", "a3_exact_clamp", "b1_fp8_fp4", "b2_fp8_only"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_golden_checkpoints(name, dtype):
    """Files that neither of the two wrote: both read the same bits from them."""
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / name, dtype=dtype)
    checkpoint = open_checkpoint(GOLDEN / name).check()
    assert_same(dict(checkpoint.tensors(dtype=dtype)), ours(model))
