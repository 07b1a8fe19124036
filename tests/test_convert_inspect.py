"""The report, and the released checkpoints at full size: headers with their true shapes over files
of holes."""

import json
import math
import os

import pytest
import torch

from dsv4.config import Dsv4Config
from dsv4.convert import inspect_checkpoint, open_checkpoint
from dsv4.convert.header import DTYPE_BITS, INDEX_NAME, StoredTensor
from dsv4.convert.plan import make_plan
from dsv4.testing_checkpoints import Recipe, make_checkpoint

VOCAB = 129280
ROPE = {
    "type": "yarn",
    **{"factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536},
}
QUANTISATION = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
FLASH = {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "compress_rope_theta": 160000,
    "expert_dtype": "fp4",
    "head_dim": 512,
    "hidden_size": 4096,
    "index_topk": 512,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_attention_heads": 64,
    "num_hash_layers": 3,
    "num_hidden_layers": 43,
    "num_nextn_predict_layers": 1,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "quantization_config": QUANTISATION,
    "rope_scaling": ROPE,
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB,
}
PRO = FLASH | {
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
    "hidden_size": 7168,
    "index_topk": 1024,
    "moe_intermediate_size": 3072,
    "n_routed_experts": 384,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "o_groups": 16,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5,
}
DSPARK = {
    "dspark_block_size": 5,
    "dspark_target_layer_ids": [40, 41, 42],
    "dspark_markov_rank": 256,
}
# config, draft, Markov rank -> tensors, payload bytes, stored elements: published totals of the
# released files.
RELEASED = {
    "Flash": (FLASH, "plain", 0, 69_187, 159_609_485_896, 158_069_433_298),
    "Flash-0731": (
        FLASH | DSPARK | {"compress_ratios": [*FLASH["compress_ratios"], 0, 0]},
        *("dspark", 256, 72_317, 166_878_536_440, 165_265_454_782),
    ),
    "Pro": (PRO, "plain", 0, 145_116, 864_704_792_696, 861_608_274_846),
    "Pro-0813": (
        PRO | DSPARK | {"compress_ratios": [*PRO["compress_ratios"], 0, 0], "dspark_markov_rank": 512},
        *("dspark", 512, 149_782, 892_727_580_904, None),
    ),
}


class Table(dict):
    """Official name -> (dtype, shape), as the tables of the released files have it."""

    def plain(self, name, dtype, *shape):
        self[name] = (dtype, shape)

    def fp8(self, name, rows, columns):
        self[f"{name}.weight"] = ("F8_E4M3", (rows, columns))
        self[f"{name}.scale"] = ("F8_E8M0", (rows // 128, columns // 128))

    def fp4(self, name, rows, columns):
        self[f"{name}.weight"] = ("I8", (rows, columns // 2))
        self[f"{name}.scale"] = ("F8_E8M0", (rows, columns // 32))


def block(table, prefix, config, ratio, is_hash):
    width, heads, rank = config["hidden_size"], config["num_attention_heads"], config["q_lora_rank"]
    neurons, experts, groups = (
        config["moe_intermediate_size"],
        config["n_routed_experts"],
        config["o_groups"],
    )
    table.plain(f"{prefix}.attn.attn_sink", "F32", heads)
    table.plain(f"{prefix}.attn.q_norm.weight", "BF16", rank)
    table.plain(f"{prefix}.attn.kv_norm.weight", "BF16", 512)
    table.fp8(f"{prefix}.attn.wq_a", rank, width)
    table.fp8(f"{prefix}.attn.wq_b", heads * 512, rank)
    table.fp8(f"{prefix}.attn.wkv", 512, width)
    table.fp8(f"{prefix}.attn.wo_a", groups * 1024, 4096)
    table.fp8(f"{prefix}.attn.wo_b", width, groups * 1024)
    for part in ("attn", "ffn"):
        table.plain(f"{prefix}.{part}_norm.weight", "BF16", width)
        table.plain(f"{prefix}.hc_{part}_fn", "F32", 24, 4 * width)
        table.plain(f"{prefix}.hc_{part}_base", "F32", 24)
        table.plain(f"{prefix}.hc_{part}_scale", "F32", 3)
    table.plain(f"{prefix}.ffn.gate.weight", "BF16", experts, width)
    if is_hash:
        table.plain(f"{prefix}.ffn.gate.tid2eid", "I64", VOCAB, 6)
    else:
        table.plain(f"{prefix}.ffn.gate.bias", "F32", experts)
    table.fp8(f"{prefix}.ffn.shared_experts.w1", neurons, width)
    table.fp8(f"{prefix}.ffn.shared_experts.w3", neurons, width)
    table.fp8(f"{prefix}.ffn.shared_experts.w2", width, neurons)
    for expert in range(experts):
        table.fp4(f"{prefix}.ffn.experts.{expert}.w1", neurons, width)
        table.fp4(f"{prefix}.ffn.experts.{expert}.w3", neurons, width)
        table.fp4(f"{prefix}.ffn.experts.{expert}.w2", width, neurons)
    for at, wide in {
        4: (("compressor", 512), ("indexer.compressor", 128)),
        128: (("compressor", 512),),
    }.get(ratio, ()):
        columns = 2 * wide if ratio == 4 else wide
        table.plain(f"{prefix}.attn.{at}.ape", "F32", ratio, columns)
        table.plain(f"{prefix}.attn.{at}.norm.weight", "BF16", wide)
        table.plain(f"{prefix}.attn.{at}.wkv.weight", "BF16", columns, width)
        table.plain(f"{prefix}.attn.{at}.wgate.weight", "BF16", columns, width)
    if ratio == 4:
        table.plain(f"{prefix}.attn.indexer.weights_proj.weight", "BF16", 64, width)
        table.fp8(f"{prefix}.attn.indexer.wq_b", 8192, rank)


def head(table, prefix, width):
    table.plain(f"{prefix}norm.weight", "BF16", width)
    table.plain(f"{prefix}hc_head_fn", "F32", 4, 4 * width)
    table.plain(f"{prefix}hc_head_base", "F32", 4)
    table.plain(f"{prefix}hc_head_scale", "F32", 1)


def released(config, draft, rank):
    """Every tensor of a released file."""
    table, width = Table(), config["hidden_size"]
    table.plain("embed.weight", "BF16", VOCAB, width)
    table.plain("head.weight", "BF16", VOCAB, width)
    head(table, "", width)
    for layer in range(config["num_hidden_layers"]):
        block(table, f"layers.{layer}", config, config["compress_ratios"][layer], layer < 3)
    for stage in range(1 if draft == "plain" else 3):
        block(table, f"mtp.{stage}", config, 0, False)
    if draft == "plain":
        head(table, "mtp.0.", width)
        for name in ("enorm", "hnorm"):
            table.plain(f"mtp.0.{name}.weight", "BF16", width)
        table.fp8("mtp.0.e_proj", width, width)
        table.fp8("mtp.0.h_proj", width, width)
    else:
        head(table, "mtp.2.", width)
        table.plain("mtp.0.main_norm.weight", "BF16", width)
        table.fp8("mtp.0.main_proj", width, 3 * width)
        table.plain("mtp.2.markov_head.markov_w1.weight", "BF16", VOCAB, rank)
        table.plain("mtp.2.markov_head.markov_w2.weight", "BF16", VOCAB, rank)
        table.plain("mtp.2.confidence_head.proj.weight", "BF16", 1, width + rank)
    return table


def nbytes(dtype, shape):
    return math.prod(shape) * DTYPE_BITS[dtype] // 8


def write_hollow(folder, table, config):
    """Headers and index as released; after each header a hole of the right length."""
    (folder / "config.json").write_text(json.dumps(config))
    shards = {}
    for name in table:
        parts = name.split(".")
        shards.setdefault(f"{parts[0]}.{parts[1]}" if parts[0] in ("layers", "mtp") else parts[0], []).append(name)
    weight_map = {}
    for number, found in enumerate(shards.values(), start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header, at = {}, 0
        for name in found:
            dtype, shape = table[name]
            size = nbytes(dtype, shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header).encode()
        (folder / file).write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(folder / file, 8 + len(text) + at)
        weight_map |= dict.fromkeys(found, file)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("which", list(RELEASED))
def test_released_files_fit_the_plan(which):
    config, draft, rank, tensors, payload, elements = RELEASED[which]
    table = released(config, draft, rank)
    assert len(table) == tensors
    assert sum(nbytes(*entry) for entry in table.values()) == payload
    if elements is not None:
        assert sum(math.prod(shape) for _, shape in table.values()) == elements
    stored = {name: StoredTensor(name, "file", dtype, shape, 0, nbytes(dtype, shape)) for name, (dtype, shape) in table.items()}
    plan = make_plan(Dsv4Config.from_hf(config), stored)
    assert plan.problems.by_kind == {}
    assert plan.scheme == "official"
    assert [len(found) for found in plan.extras.values()] == [sum(name.startswith("mtp.") for name in table)]
    pieces = [piece for source in plan.sources.values() for piece in source.pieces]
    used = [t.name for piece in pieces for t in (piece.weight, piece.scale) if t is not None]
    assert sorted(used) == sorted(name for name in table if not name.startswith("mtp."))


def test_flash_at_full_size(tmp_path):
    config, draft, rank, tensors, payload, _ = RELEASED["Flash"]
    table = released(config, draft, rank)
    write_hollow(tmp_path, table, config)
    report = inspect_checkpoint(tmp_path)
    assert (report.stored.tensors, report.stored.nbytes) == (tensors, payload)
    assert report.problems is None
    assert report.scheme == "official"
    assert report.draft == "plain MTP, 1 stage (not loaded)"
    assert report.skipped["mtp (draft layers)"].tensors == 1575
    assert report.loaded.tensors == tensors - 1575
    assert report.loaded.nbytes + report.skipped["mtp (draft layers)"].nbytes == payload
    assert report.dtypes["I64"].tensors == 3
    # 365 in the blocks and 10 of the draft; 66,048 of the main experts are weights and scales.
    assert report.dtypes["F8_E4M3"].tensors == 375
    assert report.dtypes["I8"].tensors == 66_048 // 2 + 256 * 3
    assert report.modules["mlp.experts"] == {"fp4": 43}
    assert sum(formats["fp8"] for formats in report.modules.values()) == 365
    assert [run[:2] for run in report.blocks[:3]] == [(0, 1), (2, 2), (3, 3)]
    # Two hash blocks of the window kind, one with CSA, then HCA and CSA in turn.
    assert len(report.blocks) == 42
    native, bf16, float32 = (report.memory[kind] for kind in ("native", "bfloat16", "float32"))
    assert native < bf16 < float32
    assert abs(native - report.loaded.nbytes) < 2**21
    assert 2 * report.parameters < bf16 < 2.01 * report.parameters
    text = str(report)
    assert "159.61 GB" in text
    assert "fp4 x 43" in text


def test_report_on_a_small_checkpoint(tmp_path):
    recipe = Recipe(draft="dspark", vision=True)
    config = Dsv4Config.tiny(num_hidden_layers=3, hidden_size=32, moe_intermediate_size=32)
    made = make_checkpoint(tmp_path, config, recipe)
    report = inspect_checkpoint(tmp_path)
    assert report.draft == "DSpark, 3 stages (not loaded)"
    assert report.num_files == 3
    assert report.file_bytes == sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert report.stored.nbytes == sum(tensor.nbytes for tensor in made.stored.values())
    assert report.memory["float32"] == sum(t.numel() * (8 if t.dtype == torch.int64 else 4) for t in made.expected.values())
    state = dict(open_checkpoint(tmp_path).tensors(dtype=torch.bfloat16))
    assert report.memory["bfloat16"] == sum(tensor.nbytes for tensor in state.values())
    native = dict(open_checkpoint(tmp_path).tensors(dtype=torch.bfloat16, native=True))
    assert report.memory["native"] == sum(tensor.nbytes for tensor in native.values())
    for line in (
        "official names",
        "skipped    vision tower: 5 tensors",
        "0-1      sliding_attention",
        "problems   none",
    ):
        assert line in str(report)


def test_problems_are_reported_not_raised(tmp_path):
    made = make_checkpoint(tmp_path, Dsv4Config.tiny(hidden_size=32, moe_intermediate_size=32), Recipe())
    file = sorted(tmp_path.glob("*.safetensors"))[0]
    file.unlink()
    report = inspect_checkpoint(tmp_path)
    assert "missing shards (1)" in report.problems
    assert file.name in str(report)
    assert report.stored.tensors < len(made.stored)


def test_no_weights_are_read(tmp_path):
    """Headers alone are enough: behind them the files are cut off."""
    make_checkpoint(tmp_path, Dsv4Config.tiny(hidden_size=32, moe_intermediate_size=32), Recipe())
    whole = inspect_checkpoint(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        length = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        size = file.stat().st_size
        os.truncate(file, length)
        os.truncate(file, size)
    assert str(inspect_checkpoint(tmp_path)) == str(whole)
