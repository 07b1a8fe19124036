"""ActivationCache: a mapping that can be stacked, moved, saved and read back."""

import json
import os
import struct
from collections.abc import Mapping

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv4 import ActivationCache
from dsv4.activation_cache import StreamWriter
from dsv4.testing_probes import padded_batch, watched_model

MODEL = watched_model()
IDS, MASK = padded_batch(MODEL.vocab_size)


@pytest.fixture(scope="module")
def cache():
    with torch.no_grad():
        return MODEL.run_with_cache(IDS, "**", attention_mask=MASK)[1]


def test_it_is_a_mapping_in_forward_order(cache):
    assert isinstance(cache, Mapping)
    assert list(cache) == list(cache.keys()) == cache.names == list(MODEL.hook_dict)
    assert len(cache) == len(MODEL.hook_dict)
    assert "logits" in cache
    assert "layer_output" not in cache
    assert cache.get("nothing") is None
    assert all(isinstance(value, torch.Tensor) for value in cache.values())
    assert cache.axes["layers.1.self_attn.attention_scores"] == "b N s k"
    assert cache.positions.tolist() == [list(range(19)), [-1] * 6 + list(range(13))]
    assert "layers.3.layer_mid  [b s n hidden]" in repr(cache)


def test_by_leaf_and_layer(cache):
    assert cache["layer_output", 3] is cache["layers.3.layer_output"]
    assert cache["expert_weights", 4] is cache["layers.4.mlp.expert_weights"]
    assert cache["mlp.expert_weights", 4] is cache["layers.4.mlp.expert_weights"]
    assert cache["indexer_scores", 1] is cache["layers.1.self_attn.compressor.indexer.indexer_scores"]
    assert cache["layer_output", -1] is cache["layers.5.layer_output"]
    assert ("layer_output", 3) in cache
    assert ("layer_output", 6) not in cache
    assert ("indexer_scores", 0) not in cache


def test_layers_count_from_the_models_last_not_from_the_last_captured():
    with torch.no_grad():
        _, some = MODEL.run_with_cache(IDS, ["layers.1.layer_output", "layers.2.layer_output"])
    assert ("layer_output", -4) in some
    assert some["layer_output", -4] is some["layers.2.layer_output"]
    with pytest.raises(KeyError, match=r"'layers.5.layer_output' is not in this cache"):
        some["layer_output", -1]
    with pytest.raises(KeyError, match="does not know how many layers"):
        ActivationCache(dict(some), some.axes)["layer_output", -1]


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("layer_output", KeyError, r"cache\[\"layer_output\", layer\]"),
        ("layers.3.layer_outputs", KeyError, "did you mean layers.3.layer_output"),
        ("zzz", KeyError, "it was not captured"),
        (("indexer_scores", 0), KeyError, "'layers.0.indexer_scores' is not in this cache"),
        (("layer_output", "3"), TypeError, "expected a full name, or"),
        (("layer_output", True), TypeError, "expected a full name, or"),
        (("layer_output",), TypeError, "expected a full name, or"),
    ],
)
def test_what_is_not_there(cache, name, error, said):
    with pytest.raises(error) as caught:
        cache[name]
    assert said.replace("\\", "") in str(caught.value).replace("\\", "")


def test_stack(cache):
    stacked = cache.stack("layer_output")
    assert stacked.shape == (6, 2, 19, 4, 32)
    assert torch.equal(stacked[3], cache["layer_output", 3])
    assert cache.stack("mlp.expert_weights").shape == (6, 2, 19, 2)
    # Only the layers that have it, in order.
    assert torch.equal(cache.stack("router_selection_scores")[1], cache["router_selection_scores", 4])
    with pytest.raises(ValueError, match="differs in shape between layers"):
        cache.stack("attention_scores")
    for wrong in ("logits", "output", "nothing"):
        with pytest.raises(KeyError, match=f"no layer's '{wrong}'"):
            cache.stack(wrong)


def test_to_is_another_cache(cache):
    moved = cache.to("meta")
    assert {v.device.type for v in moved.values()} == {moved.positions.device.type} == {"meta"}
    assert {v.device.type for v in cache.values()} == {cache.positions.device.type} == {"cpu"}
    assert moved.axes == cache.axes
    assert ("layer_output", -1) in moved
    with pytest.raises(RuntimeError):
        cache.to("cuda:99" if torch.cuda.is_available() else "nowhere")
    assert {v.device.type for v in cache.values()} == {"cpu"}


def test_remove_batch_dim(cache):
    with pytest.raises(ValueError, match="input_ids holds 2 rows"):
        cache.remove_batch_dim()
    with torch.no_grad():
        logits, one = MODEL.run_with_cache(IDS[0], "**")
    flat = one.remove_batch_dim()
    for name, value in flat.items():
        assert torch.equal(value, one[name][0]), name
        assert flat.axes[name].split() == MODEL.hook_dict[name].axes.split()[1:]
    assert flat.positions.tolist() == list(range(19))
    assert flat.stack("layer_output").shape == (6, 19, 4, 32)
    assert ("layer_output", -1) in flat
    with torch.no_grad():
        torch.testing.assert_close(MODEL.project_on_vocab(flat["layer_output", 5], readout="head"), logits[0])
    assert flat.remove_batch_dim().axes == flat.axes
    _, last = MODEL.run_with_cache(IDS[0], "layers.*.layer_output", pos=-1)
    assert last.remove_batch_dim()["layer_output", 0].shape == (4, 32)


def test_save_and_load(cache, tmp_path):
    path = tmp_path / "cache.safetensors"
    cache.save(path)
    loaded = ActivationCache.load(path)
    assert loaded.names == cache.names
    assert loaded.axes == cache.axes
    assert torch.equal(loaded.positions, cache.positions)
    for name, value in cache.items():
        assert torch.equal(loaded[name], value), name
        assert loaded[name].dtype == value.dtype
    assert torch.equal(loaded["layer_output", -1], cache["layer_output", 5])
    assert torch.equal(loaded.stack("layer_output"), cache.stack("layer_output"))
    assert loaded.to("cpu").names == cache.names
    with pytest.raises(FileExistsError, match="never overwritten"):
        cache.save(path)
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["again", "cache.safetensors"]
    assert set(load_file(path)) == {*cache.names, "dsv4.positions"}


def test_values_are_read_when_asked_for(cache, tmp_path):
    path = tmp_path / "cache"
    cache.save(path)
    loaded = ActivationCache.load(path)
    assert loaded["logits"] is not loaded["logits"]
    # A value of its own: written into, the file is as before.
    loaded["logits"].zero_()
    assert torch.equal(loaded["logits"], cache["logits"])
    assert "logits" in loaded
    assert "nothing" not in loaded
    with pytest.raises(KeyError, match="did you mean"):
        loaded["logit"]


def test_save_without_positions_and_with_empty_values(tmp_path):
    values = {
        "logits": torch.randn(1, 2, 3),
        "layers.1.self_attn.compressor.compressed_entries": torch.zeros(1, 0, 4, dtype=torch.bfloat16),
    }
    axes = {"logits": "b s vocab", "layers.1.self_attn.compressor.compressed_entries": "b e_new D"}
    ActivationCache(values, axes).save(tmp_path / "x")
    loaded = ActivationCache.load(tmp_path / "x")
    assert loaded.positions is None
    assert loaded.num_layers is None
    assert loaded["compressed_entries", 1].shape == (1, 0, 4)
    assert loaded["compressed_entries", 1].dtype == torch.bfloat16
    ActivationCache({}, {}).save(tmp_path / "empty")
    assert len(ActivationCache.load(tmp_path / "empty")) == 0


def test_views_and_strides_are_saved_as_they_look(tmp_path):
    value = torch.arange(12.0).view(3, 4).t()[1:]
    ActivationCache({"logits": value}, {"logits": "b vocab"}).save(tmp_path / "x")
    assert torch.equal(ActivationCache.load(tmp_path / "x")["logits"], value)


def test_another_file_is_no_cache(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "x")
    with pytest.raises(ValueError, match="is not a saved ActivationCache"):
        ActivationCache.load(tmp_path / "x")
    with pytest.raises(FileNotFoundError):
        ActivationCache.load(tmp_path / "nothing")


def test_a_writer_that_is_left_by_an_error_leaves_nothing(tmp_path):
    def fail():
        with StreamWriter(tmp_path / "x", {"logits": "b s vocab"}) as writer:
            writer.write("logits", torch.zeros(1, 2, 3))
            assert len(os.listdir(tmp_path)) == 1
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert os.listdir(tmp_path) == []


def test_the_header_has_room_for_very_long_names(tmp_path):
    names = [f"layers.{i}." + "\u00e9" * 200 for i in range(50)]
    values = {n: torch.zeros(1, 1, 1, 1, 1, 1, dtype=torch.int64) for n in names}
    ActivationCache(values, dict.fromkeys(names, "b s a b c d")).save(tmp_path / "x")
    assert ActivationCache.load(tmp_path / "x").names == names
    with (tmp_path / "x").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        assert length % 8 == 0
        assert set(json.loads(file.read(length))) == {"__metadata__", *names}


def test_lists_of_steps():
    """Values of a generation whose key axis grows are one tensor per step."""
    _, cache = MODEL.generate(
        IDS[:1],
        max_new_tokens=3,
        names=["layers.1.self_attn.attention_keys", "layers.1.layer_output"],
        eos_token_id=None,
    )
    keys = cache["attention_keys", 1]
    assert isinstance(keys, list)
    assert [k.device.type for k in cache.to("meta")["attention_keys", 1]] == ["meta"] * 3
    assert [k.dim() for k in cache.remove_batch_dim()["attention_keys", 1]] == [3] * 3
    assert cache.remove_batch_dim().axes["layers.1.self_attn.attention_keys"] == "1 k D"
    with pytest.raises(ValueError, match="list of steps"):
        cache.save("nowhere")
    with pytest.raises(ValueError, match="list of steps"):
        cache.stack("attention_keys")
