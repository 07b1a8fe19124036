"""Which block is where: by size, by a map, a prefix of the blocks; and that nothing mixes devices."""

import re

import pytest
import torch

from dsv4 import Dsv4, Dsv4Config, KVCache
from dsv4.placement import Room, arrange, as_bytes, explicit, official_bytes, prefix, short, units_of
from dsv4.testing import assert_close
from dsv4.testing_checkpoints import Recipe, make_checkpoint
from dsv4.testing_devices import pretended_devices
from dsv4.testing_uses import USES, edits, every_value, generation, gradients

CONFIG = Dsv4Config.tiny(hidden_size=64, moe_intermediate_size=32, num_hidden_layers=4, num_hash_layers=2)
FLASH, PRO = Dsv4Config.flash(), Dsv4Config.pro()
GB = 10**9


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "files", CONFIG, Recipe()).folder


def units(config, weights="native"):
    return units_of(official_bytes(config, weights), config.n_routed_experts)


def gpus(count, nbytes=141 * GB):
    return [Room(f"cuda:{i}", nbytes) for i in range(count)]


# By size.


@pytest.mark.parametrize(("config", "payload", "draft"), [(FLASH, 159_609_485_896, 1), (PRO, 864_704_792_696, 1)])
def test_sizes_are_those_of_the_released_files(config, payload, draft):
    """The index counts norms in bfloat16, which the model holds in float32, and one draft stage of about a block's size."""
    total = sum(unit.nbytes for unit in units(config))
    one = max(unit.nbytes for unit in units(config))
    assert payload - 1.03 * one < total < payload - 0.97 * one + 0.001 * payload


@pytest.mark.parametrize("strategy", ["auto", "balanced"])
@pytest.mark.parametrize("experts", ["resident", "host", "disk"])
@pytest.mark.parametrize("config", [FLASH, PRO, CONFIG], ids=["flash", "pro", "tiny"])
def test_every_device_keeps_within_its_room(config, experts, strategy):
    sizes = units(config)
    total, head = sum(unit.nbytes for unit in sizes), sum(unit.nbytes for unit in sizes if "layers" not in unit.name)
    largest = max(unit.nbytes for unit in sizes)
    for count in (0, 1, 2, 3, 8):
        for share in (0.2, 0.6, 1.0, 1.7):
            room = int(head + 4 * largest + share * total / max(count, 1))
            host = int(1.1 * total) if experts == "host" else int(head + largest + total * share / 2)
            plan = arrange(sizes, gpus(count, room), host, experts, strategy, config.num_experts_per_tok)
            held = plan.held
            assert sum(held.values()) == total
            for device, nbytes in held.items():
                limit = {"cpu": host, "disk": total}.get(device, room)
                assert nbytes + plan.staging.get(device, 0) + plan.hot.get(device, 0) <= limit, (device, plan)
            # Blocks in order, devices first, then the host, then disk.
            order = [plan.at[unit.name] for unit in sizes if "layers" in unit.name]
            rank = {**{f"cuda:{i}": i for i in range(count)}, "cpu": count, "disk": count + 1}
            assert [rank[place] for place in order] == sorted(rank[place] for place in order)


def test_balanced_is_about_even_and_auto_fills():
    sizes = units(PRO)
    balanced, auto = (arrange(sizes, gpus(8), 0, "resident", strategy) for strategy in ("balanced", "auto"))
    held = list(balanced.held.values())
    assert len(held) == 8
    assert max(held) - min(held) < 1.1 * max(unit.nbytes for unit in sizes)
    assert min(auto.held.values()) < 30 * GB
    assert list(auto.held.values())[1] > 135 * GB


def test_what_does_not_fit_is_told():
    with pytest.raises(
        ValueError, match=r"max_memory: cuda:0 may hold 1\.00 GB, and embed_tokens, hc_head, norm and lm_head alone take 2\.12 GB"
    ):
        arrange(units(FLASH), gpus(1, GB), 0, "resident")
    with pytest.raises(ValueError, match=r"cuda:0 may hold 2\.20 GB, and embedding, head and the blocks in flight alone take 2\.6\d GB"):
        arrange(units(FLASH), gpus(1, 22 * GB // 10), 0, "resident", top_k=6)
    with pytest.raises(ValueError, match=r"max_memory: cpu may hold 5 B"):
        arrange(units(FLASH), [], 5, "resident")
    with pytest.raises(
        ValueError, match=r'experts="host" needs 147\.17 GB of host memory for the experts of 43 blocks, max_memory gives it 64\.00'
    ):
        arrange(units(FLASH), gpus(1), 64 * GB, "host")


def test_bytes_are_read():
    assert [as_bytes(x, "m") for x in (5, "5B", "141GB", "1.5 TB", "80GiB", "2kb")] == [5, 5, 141 * GB, 15 * 10**11, 80 * 2**30, 2000]
    for wrong in ("80", "GB", -1, True, 1.5, None, "80 G"):
        with pytest.raises(ValueError, match=r"m=.*expected bytes"):
            as_bytes(wrong, "m")


def test_runs_of_blocks_are_short():
    assert short(["embed_tokens", "layers.0", "layers.1", "layers.2", "norm", "layers.5"]) == "embed_tokens, layers 0-2, norm, layer 5"


# By a map.


def test_the_longest_name_wins():
    plan = explicit(units(CONFIG), {"": "cpu", "layers": "disk", "layers.2": "cuda:1", "lm_head": "cuda:1"}, "resident")
    assert plan.main == "cuda:1"
    assert plan.at["layers.2"] == "cuda:1"
    assert plan.at["layers.1"] == "disk"
    assert plan.at["embed_tokens"] == "cpu"
    assert plan.runs_on("layers.1") == plan.runs_on("embed_tokens") == "cuda:1"
    assert plan.bank("layers.2") == "resident"
    assert plan.bank("layers.1") == "disk"


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (
            {"": "cpu", "layers.9": "disk"},
            r"unknown module 'layers\.9'; expected embed_tokens, hc_head, norm, lm_head, layers\.0 to layers\.3",
        ),
        ({"": "cpu", "model.layers.1": "disk"}, r"unknown module 'model\.layers\.1'; did you mean 'layers\.1'\?"),
        ({"": "cpu", "layers.1.mlp": "disk"}, r"'layers\.1\.mlp' is part of a block; blocks are placed whole: name 'layers\.1'"),
        (
            {"layers.0": "cpu", "layers.2": "cpu", "norm": "cpu"},
            "device_map misses embed_tokens, layer 1, layer 3, hc_head, lm_head; name each",
        ),
        ({}, "device_map misses embed_tokens, layers 0-3, hc_head, norm, lm_head"),
    ],
)
def test_wrong_maps_are_told(folder, named, said):
    with pytest.raises(ValueError, match=said):
        Dsv4.from_pretrained(folder, device_map=named)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"device_map": {"": "gpu9"}}, "unknown device 'gpu9'"),
        ({"device_map": {"": 0.5}}, "unknown device 0.5"),
        ({"device_map": "fast"}, 'device_map=\'fast\': expected "auto", "balanced", or a map'),
        ({"device_map": "cpu"}, "one device for all is device='cpu'"),
        ({"device_map": ["cpu"]}, r"device_map=\['cpu'\]: expected"),
        ({"device_map": "auto", "device": "cpu"}, "give one of them"),
        ({"max_memory": {"cpu": "5GB"}}, 'is for device_map="auto" or "balanced"'),
        ({"device_map": "auto", "max_memory": {"cpu": 1000}}, r"max_memory: cpu may hold 1\.00 kB, and embed_tokens"),
        ({"device_map": "auto", "max_memory": {"cpu": "much"}}, r"max_memory\['cpu'\]='much': expected bytes"),
        ({"device_map": "auto", "max_memory": {"tpu": "5GB"}}, "max_memory names 'tpu'; this machine has"),
        ({"device_map": "auto", "max_memory": {"cpu": "30kB"}, "experts": "host"}, 'experts="host" needs 104.45 kB'),
        ({"experts": "cpu"}, "experts='cpu': expected one of 'resident', 'host', 'disk'"),
        ({"device": "disk", "experts": "disk"}, 'stay in the files with device_map={"": "disk"}'),
        ({"hot_experts": "5GB"}, "is for experts="),
        ({"hot_experts": "5GB", "experts": "disk"}, "nothing is copied in this placement"),
        ({"hot_experts": "many", "experts": "disk"}, "hot_experts='many': expected bytes"),
    ],
)
def test_wrong_arguments_are_told(folder, asked, said):
    if torch.cuda.is_available() and "max_memory" in asked:
        pytest.skip("the sizes said are those of a machine without a GPU")
    with pytest.raises(ValueError, match=said):
        Dsv4.from_pretrained(folder, **asked)


def test_a_gpu_that_is_not_there(folder):
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="unknown device 'cuda:0'"):
            Dsv4.from_pretrained(folder, device_map={"": "cuda:0"})
    count = torch.cuda.device_count()
    with pytest.raises(ValueError, match=f"max_memory names {count}; this machine has"):
        Dsv4.from_pretrained(folder, device_map="auto", max_memory={count: "5GB"})


def test_a_model_not_from_files_has_no_experts_on_disk():
    for asked in ({"experts": "disk"}, {"device_map": {"": "disk"}}, {"layers": range(2)}):
        with pytest.raises(
            ValueError, match="a model made from a config has no files whose weights could be placed; write it with save_pre"
        ):
            Dsv4.from_config(CONFIG, **asked)
    with pytest.raises(TypeError, match="from_config has no argument 'sed'"):
        Dsv4.from_config(CONFIG, sed=3)


def test_auto_without_a_gpu_is_the_plain_model_where_it_fits(folder, capsys):
    if torch.cuda.is_available():
        pytest.skip("for a machine without a GPU")
    for device_map in ("auto", "balanced"):
        model = Dsv4.from_pretrained(folder, device_map=device_map)
        assert model.placed is None
        assert all(p.requires_grad or not p.is_floating_point() or p.itemsize == 1 for p in model.parameters())
    assert "disk" not in capsys.readouterr().err
    whole = sum(t.nbytes for t in model.state_dict().values())
    small = Dsv4.from_pretrained(folder, device_map="auto", max_memory={"cpu": int(0.7 * whole)})
    said = capsys.readouterr().err
    assert re.search(r"cpu: embed_tokens, layers? 0.*, hc_head, norm, lm_head: [\d.]+ kB", said)
    assert re.search(r"disk: layers? [\d-]+: [\d.]+ kB", said)
    assert torch.equal(small(torch.arange(20)), model(torch.arange(20)))


def test_sizes_printed_are_the_bytes_held(folder, capsys):
    for weights in ("native", "dequantized"):
        model = Dsv4.from_pretrained(folder, weights=weights, device_map={"": "cpu", "layers.1": "disk"}, experts="host")
        whole = Dsv4.from_pretrained(folder, weights=weights)
        said = dict(re.findall(r"  (cpu|disk): .*: ([\d.]+) kB", capsys.readouterr().err))
        held = sum(t.nbytes for t in [*model.parameters(), *model.buffers()]) - sum(r.frequencies.nbytes for r in model.rotary.values())
        assert float(said["cpu"]) == round(held / 1000, 2)
        assert float(said["cpu"]) + float(said["disk"]) == pytest.approx(
            sum(t.nbytes for t in whole.state_dict().values()) / 1000, abs=0.02
        )


# A prefix of the blocks.


@pytest.mark.parametrize("layers", [range(3), range(0, 3), [0, 1, 2], 3])
def test_a_prefix_runs_as_the_whole_model_does(folder, layers, capsys):
    whole, part = Dsv4.from_pretrained(folder), Dsv4.from_pretrained(folder, layers=layers)
    assert "blocks 0 to 2 of 4: logits read the streams that leave the last of them" in capsys.readouterr().err
    assert part.num_layers == part.config.num_hidden_layers == len(part.layers) == 3
    assert part.config.layer_types == whole.config.layer_types[:3]
    assert part.config.mlp_layer_types == whole.config.mlp_layer_types[:3]
    ids = torch.arange(22)
    with torch.no_grad():
        assert torch.equal(part(ids, stop_at_layer=3), whole(ids, stop_at_layer=3))
        assert torch.equal(part(ids), whole.project_on_vocab(whole(ids, stop_at_layer=3)))
        _, ours = part.run_with_cache(ids, "layers.**")
        _, theirs = whole.run_with_cache(ids, "layers.**")
    assert set(ours) == {name for name in theirs if not name.startswith("layers.3.")}
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert part.generate(ids, 2).shape == (1, 24)


def test_a_prefix_is_read_alone_and_saved_whole(folder, tmp_path):
    part = Dsv4.from_pretrained(folder, layers=range(2), device_map={"": "cpu", "layers.1": "disk"})
    part.save_pretrained(tmp_path / "part")
    again = Dsv4.from_pretrained(tmp_path / "part")
    assert again.num_layers == 2
    assert torch.equal(again(torch.arange(9)), part(torch.arange(9)))


@pytest.mark.parametrize("layers", [range(1, 3), range(0), range(5), range(0, 4, 2), [0, 2], [1, 0], 0, -1, True, "2", 2.0, [0.0, 1.5]])
def test_other_ranges_are_refused(layers):
    with pytest.raises(ValueError, match=r"layers=.*: expected range\(0, n\) with 1 <= n <= 4"):
        prefix(CONFIG, layers)


# Several devices, pretended: an operation over two of them raises.


SPREAD = {
    "blocks on two devices, on the host and on disk": {
        "device_map": {"": "cpu:1", "layers.1": "cpu:2", "layers.2": "disk", "layers.3": "cpu", "norm": "disk"}
    },
    "blocks on two devices, experts on disk": {"device_map": {"": "cpu:1", "layers.1": "cpu:2", "layers.2": "cpu:2"}, "experts": "disk"},
}


@pytest.mark.parametrize(
    ("use", "place"),
    [
        *((use, "blocks on two devices, on the host and on disk") for use in USES),
        *((use, "blocks on two devices, experts on disk") for use in (every_value, gradients, generation)),
    ],
)
def test_no_use_mixes_devices(folder, use, place):
    expected = use(Dsv4.from_pretrained(folder, dtype=torch.float32))
    with pretended_devices():
        model = Dsv4.from_pretrained(folder, dtype=torch.float32, hot_experts=40_000, **SPREAD[place])
        found = use(model)
        for a, b in zip(flat(found), flat(expected), strict=True):
            if isinstance(b, torch.Tensor):
                # Pretended tensors do not take the CPU's own short cuts.
                assert_close(a.detach().cpu().nan_to_num(), b.detach().nan_to_num(), "watched gradient")
            else:
                assert a == b


def flat(found):
    return [t for x in found for t in (flat(x) if isinstance(x, list | tuple) else [x])]


def test_values_come_out_on_their_block_s_device(folder):
    with pretended_devices(), torch.no_grad():
        model = Dsv4.from_pretrained(folder, device_map=SPREAD["blocks on two devices, on the host and on disk"]["device_map"])
        assert str(model.device) == "cpu:1"
        logits, cache = model.run_with_cache(torch.arange(13), "**")
        assert str(logits.device) == "cpu:1"
        for name, value in cache.items():
            assert str(value.device) == ("cpu:2" if name.startswith("layers.1.") else "cpu:1"), name
        _, moved = model.run_with_cache(torch.arange(13), "**", device="cpu", pos=[2, -1])
        assert {str(value.device) for value in moved.values()} == {"cpu"}
        kv = model.new_kv_cache(1, 32)
        assert [str(device) for device in kv.devices] == ["cpu:1", "cpu:2", "cpu:1", "cpu:1"]
        model(torch.arange(13), kv_cache=kv)
        assert str(model(torch.arange(13), stop_at_layer=2).device) == "cpu:2"
        with pytest.raises(ValueError, match=r"the KV cache has device cpu, the model cpu:1; build it with model\.new_kv_cache"):
            model(torch.arange(13), kv_cache=KVCache(model.config, 1, 32))
        with pytest.raises(ValueError, match="returned a tensor on cpu:1; the value is on cpu:2"):
            model.run_with_hooks(torch.arange(5), hooks=[("layers.1.mlp_input", lambda value, hook: value.to("cpu:1"))])


def test_head_and_embedding_share_a_device(folder):
    with pretended_devices(), pytest.raises(ValueError, match=r"norm and lm_head on cpu:1 and cpu:2; expected one device for the four"):
        Dsv4.from_pretrained(folder, device_map={"": "cpu:1", "lm_head": "cpu:2"})


@pytest.mark.gpu
def test_on_gpus(folder):
    resident = Dsv4.from_pretrained(folder, device="cuda", kernels="torch")
    for device_map in ("auto", "balanced"):
        placed = Dsv4.from_pretrained(folder, device_map=device_map, kernels="torch")
        for use in (every_value, edits, generation):
            for a, b in zip(flat(use(placed)), flat(use(resident)), strict=True):
                assert_close(a.cpu().nan_to_num(), b.cpu().nan_to_num(), "bfloat16 way")
