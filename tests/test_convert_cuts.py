"""Reading a part of a tensor: bit for bit the part of the whole, and nothing else is looked at."""

import itertools

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv4.config import CSA, HASH_MOE, HCA, MOE, SLIDING, Dsv4Config
from dsv4.convert import open_checkpoint
from dsv4.convert.problems import CheckpointError
from dsv4.testing_checkpoints import Recipe, make_checkpoint

CONFIG = Dsv4Config.tiny(
    layer_types=[SLIDING, CSA, HCA], mlp_layer_types=[HASH_MOE, MOE, MOE], hidden_size=192, moe_intermediate_size=384, o_lora_rank=160
)
EXPERTS = "layers.1.mlp.experts.gate_up_proj"
DOWN = "layers.1.mlp.shared_experts.down_proj.weight"
GATE = "layers.1.mlp.shared_experts.gate_proj.weight"
ROWS = "embed_tokens.weight"
FORMATS = [("FP8", "FP4", "official"), ("FP8", "FP8", "transformers"), ("BF16", "BF16", "transformers"), ("F32", "F32", "official")]


def read(folder, **more):
    return dict(open_checkpoint(folder).tensors(dtype=torch.float32, **more))


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize(("linears", "experts", "scheme"), FORMATS)
@pytest.mark.parametrize("native", [True, False])
def test_a_part_is_the_part_of_the_whole(tmp_path, linears, experts, scheme, native):
    make_checkpoint(tmp_path, CONFIG, Recipe(linears=linears, experts=experts, scheme=scheme))
    whole = read(tmp_path, native=native)
    blocks = [(0, 128), (128, 256), (256, 384)]
    for expert, block, row in itertools.product([(0, 3), (5, 8)], blocks, [(0, 7), (40, 64)]):
        cuts = {EXPERTS: (0, *expert), GATE: (0, *block), DOWN: (1, *block), ROWS: (0, *row)}
        parts = read(tmp_path, native=native, cuts=cuts)
        assert list(parts) == list(whole) or set(parts) == set(whole)
        for name, tensor in whole.items():
            axis, begin, end = cuts.get(name.removesuffix("_scale_inv"), (0, 0, tensor.shape[0]))
            if name.endswith("weight_scale_inv") and name.removesuffix("_scale_inv") in cuts:
                begin, end = begin // 128, end // 128
            assert torch.equal(bits(parts[name]), bits(tensor.narrow(axis, begin, end - begin))), name


def test_decoded_codes_are_cut_anywhere(tmp_path):
    make_checkpoint(tmp_path, CONFIG, Recipe())
    whole = read(tmp_path)
    for begin, end in ((0, 5), (100, 130), (127, 129), (200, 384), (383, 384)):
        parts = read(tmp_path, cuts={DOWN: (1, begin, end), GATE: (0, begin, end)})
        assert torch.equal(parts[DOWN], whole[DOWN][:, begin:end])
        assert torch.equal(parts[GATE], whole[GATE][begin:end])


def test_what_lies_outside_is_not_read(tmp_path):
    """A code that is NaN is found where it is read, and nowhere else."""
    make_checkpoint(tmp_path, CONFIG, Recipe(num_shards=1, scheme="transformers", experts="FP8"))
    (file,) = tmp_path.glob("*.safetensors")
    stored = load_file(file)
    for name, tensor in stored.items():
        if name.endswith("layers.1.mlp.experts.gate_up_proj") or name.endswith("layers.1.mlp.shared_experts.gate_proj.weight"):
            tensor[-1].view(torch.uint8)[..., -1] = 0x7F
    save_file(stored, file, metadata={"format": "pt"})
    for cuts in ({EXPERTS: (0, 0, 7), GATE: (0, 0, 256)},):
        assert read(tmp_path, native=True, cuts=cuts)
    for cuts in ({EXPERTS: (0, 0, 8), GATE: (0, 0, 256)}, {EXPERTS: (0, 0, 7), GATE: (0, 256, 384)}):
        with pytest.raises(CheckpointError, match="0x7F"):
            read(tmp_path, native=True, cuts=cuts)


def test_bytes_are_those_of_the_part(tmp_path):
    make_checkpoint(tmp_path, CONFIG, Recipe())
    checkpoint, cuts = open_checkpoint(tmp_path), {EXPERTS: (0, 2, 4), DOWN: (1, 0, 128)}
    seen = []
    for _ in checkpoint.tensors(dtype=torch.float32, cuts=cuts, progress=lambda done, total: seen.append((done, total))):
        pass
    assert seen[-1][0] == seen[-1][1] == checkpoint.nbytes(wanted=lambda name: True, cuts=cuts)
    pieces = {name: sum(piece.nbytes for piece in source.pieces) for name, source in checkpoint.sources.items()}
    saved = pieces[EXPERTS] * 3 // 4 + pieces[DOWN] * 2 // 3
    assert sum(pieces.values()) - seen[-1][1] == pytest.approx(saved, abs=2)
