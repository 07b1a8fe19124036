"""Reading: every format in every naming scheme, the model that comes out, and what is refused."""

import json
import shutil

import pytest
import torch

from dsv4.config import HASH_MOE, MOE, Dsv4Config
from dsv4.convert import CheckpointError, names, open_checkpoint
from dsv4.convert.header import SINGLE_NAME
from dsv4.convert.layout import layout
from dsv4.testing_checkpoints import Recipe, make_checkpoint, write_files

E8M0 = torch.float8_e8m0fnu
# No dimension of a linear map is a whole number of 128s, FP4's blocks of 32 are whole.
SIZES = {"hidden_size": 160, "moe_intermediate_size": 96, "q_lora_rank": 144, "head_dim": 48}
# Whole blocks, as transformers' stacked FP8 needs them.
WHOLE = {"hidden_size": 128, "moe_intermediate_size": 128}
RECIPES = [
    Recipe(),
    Recipe(draft="plain"),
    Recipe(scales="F32", experts="FP8", draft="plain"),
    Recipe(scales="F32", experts="FP4", num_shards=1),
    Recipe(experts="FP8", draft="dspark"),
    Recipe(linears="BF16", experts="BF16", num_shards=5),
    Recipe(linears="F32", experts="F32", norms="F32", num_shards=1),
    Recipe(linears="FP8", experts="BF16", num_shards=2),
    Recipe(draft="dspark", vision=True),
    Recipe(scheme="hybrid"),
    Recipe(scheme="hybrid", experts="FP8", scales="F32", norms="F32"),
    Recipe(scheme="hybrid", linears="F32", experts="F32", norms="F32", num_shards=1),
    Recipe(scheme="transformers"),
    Recipe(scheme="transformers", experts="FP8", scales="F32"),
    Recipe(scheme="transformers", linears="BF16", experts="BF16", norms="F32", num_shards=1),
]


def config_for(recipe, **overrides):
    sizes = WHOLE if recipe.scheme == "transformers" else SIZES
    return Dsv4Config.tiny(**{"num_hidden_layers": 4, "n_routed_experts": 3, **sizes, **overrides})


def same_bits(a, b):
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    return torch.equal(a.contiguous().view(whole), b.contiguous().view(whole))


@pytest.fixture
def made(tmp_path):
    """A checkpoint in the official formats, to damage."""
    return make_checkpoint(tmp_path / "made", config_for(Recipe()), Recipe(draft="plain"))


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


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values(tmp_path, recipe, dtype):
    made = make_checkpoint(tmp_path, config_for(recipe), recipe)
    checkpoint = open_checkpoint(tmp_path).check()
    assert checkpoint.scheme == recipe.scheme
    read = dict(checkpoint.tensors(dtype=dtype))
    specs = layout(checkpoint.config)
    assert read.keys() == specs.keys() == made.expected.keys()
    for name, expected in made.expected.items():
        wanted = specs[name].dtype or dtype
        # The product of code and scale is rounded to float32 first.
        assert same_bits(read[name], expected.float().to(wanted) if expected.is_floating_point() else expected), name


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r.is_quantised], ids=str)
def test_native_tensors_are_the_stored_bits(tmp_path, recipe):
    made = make_checkpoint(tmp_path, config_for(recipe), recipe)
    checkpoint = open_checkpoint(tmp_path).check()
    read = dict(checkpoint.tensors(dtype=torch.bfloat16, native=True))
    assert set(layout(checkpoint.config)) <= read.keys()
    matched = 0
    for name, stored in made.stored.items():
        place = names.to_place(recipe.scheme, name)
        if place is None or place.name not in read or place.name.endswith(names.HASH_BLOCK_EXTRA):
            continue
        mine = read[place.name]
        if place.expert is not None:
            mine = mine[place.expert]
            mine = mine if place.half is None else mine.chunk(2)[place.half]
        if stored.dtype.itemsize == 1 or names.weight_of_scale(place.name) is not None:
            assert same_bits(mine, stored), name
            matched += 1
    assert matched == sum(2 * len(s.pieces) for s in checkpoint.sources.values() if s.format != "dense")


def test_formats_name_every_linear_map_and_bank(tmp_path):
    make_checkpoint(tmp_path, config_for(Recipe()), Recipe())
    formats = open_checkpoint(tmp_path).formats
    assert formats["layers.0.mlp.experts"] == "fp4"
    assert formats["layers.0.self_attn.o_a_proj"] == "fp8"
    assert formats["layers.2.self_attn.compressor.indexer.q_b_proj"] == "fp8"
    assert formats["layers.2.self_attn.compressor.kv_proj"] == "dense"
    assert "layers.0.mlp.router" not in formats
    assert "norm" not in formats


def test_some_modules_native(tmp_path):
    make_checkpoint(tmp_path, config_for(Recipe()), Recipe())
    checkpoint = open_checkpoint(tmp_path)
    read = dict(checkpoint.tensors(dtype=torch.float32, native=lambda module: module == "layers.1.mlp.experts"))
    scales = {name for name in read if names.weight_of_scale(name) is not None}
    assert scales == {
        "layers.1.mlp.experts.gate_up_proj_scale_inv",
        "layers.1.mlp.experts.down_proj_scale_inv",
    }
    assert read["layers.1.mlp.experts.gate_up_proj"].dtype == torch.int8
    assert read["layers.2.mlp.experts.gate_up_proj"].dtype == torch.float32


def test_some_layers(made):
    read = {name for name, _ in open_checkpoint(made.folder).tensors(dtype=torch.float32, layers=[1, 3])}
    blocks = {names.block_of(name) for name in read}
    assert blocks == {None, 1, 3}
    assert {name for name in made.expected if names.block_of(name) in blocks} == read


def test_tensors_own_their_memory(made):
    read = dict(open_checkpoint(made.folder).tensors(dtype=torch.float32))
    shutil.rmtree(made.folder)
    for name, tensor in read.items():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
        tensor += 1


def test_progress_ends_at_the_total(made):
    calls = []
    checkpoint = open_checkpoint(made.folder)
    for _ in checkpoint.tensors(dtype=torch.float32, progress=lambda done, total: calls.append((done, total))):
        pass
    total = sum(t.nbytes for n, t in made.stored.items() if not n.startswith("mtp."))
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_parts_are_the_stored_tensors_one_by_one(made):
    checkpoint = open_checkpoint(made.folder)
    seen = {names.from_place("official", place) for place, _ in checkpoint.parts(dtype=None, native=True)}
    assert seen == {name for name in made.stored if not name.startswith("mtp.")}


def test_order_is_that_of_the_file(tmp_path):
    make_checkpoint(tmp_path, config_for(Recipe()), Recipe(num_shards=1))
    places = [place for place, _ in open_checkpoint(tmp_path).parts(dtype=torch.float32)]
    text = (tmp_path / SINGLE_NAME).read_bytes()
    header = json.loads(text[8 : 8 + int.from_bytes(text[:8], "little")])
    begins = [header[names.from_place("official", place)]["data_offsets"][0] for place in places]
    assert begins == sorted(begins)


def test_scale_bytes_stored_as_uint8(made):
    stored = {n: t.view(torch.uint8) if t.dtype == E8M0 else t for n, t in made.stored.items()}
    checkpoint = open_checkpoint(rewrite(made, stored)).check()
    for name, tensor in checkpoint.tensors(dtype=torch.float32):
        assert torch.equal(tensor.double(), made.expected[name].double()), name
    native = dict(checkpoint.tensors(dtype=torch.float32, native=True))
    assert native["layers.0.self_attn.q_a_proj.weight_scale_inv"].dtype == E8M0


def test_hash_table_stored_as_int32(made):
    stored = {n: t.int() if t.dtype == torch.int64 else t for n, t in made.stored.items()}
    read = dict(open_checkpoint(rewrite(made, stored)).tensors(dtype=torch.bfloat16))
    assert read["layers.0.mlp.router.tid2eid"].dtype == torch.int64
    assert torch.equal(read["layers.0.mlp.router.tid2eid"], made.expected["layers.0.mlp.router.tid2eid"])


def test_fourteen_layers_and_twelve_experts(tmp_path):
    recipe = Recipe(linears="BF16", experts="BF16", num_shards=3)
    config = config_for(recipe, num_hidden_layers=14, n_routed_experts=12, hidden_size=32, moe_intermediate_size=8)
    made = make_checkpoint(tmp_path, config, recipe)
    for name, tensor in open_checkpoint(tmp_path).tensors(dtype=torch.float32):
        assert torch.equal(tensor.double(), made.expected[name].double()), name


def test_extras_are_counted_and_skipped(tmp_path):
    recipe = Recipe(draft="dspark", vision=True)
    make_checkpoint(tmp_path, config_for(recipe, mlp_layer_types=(HASH_MOE, MOE, HASH_MOE, MOE)), recipe)
    checkpoint = open_checkpoint(tmp_path).check()
    counts = {label: len(found) for label, found in checkpoint.extras.items()}
    assert counts == {
        "mtp (draft layers)": 11,
        "vision tower": 5,
        "image tokens": 4,
        "router bias for image tokens": 4,
        "router bias of hash blocks (image tokens only)": 2,
    }
    assert "skipped 11 of mtp" in checkpoint.summary()
    assert "layers.0.mlp.router.e_score_correction_bias" not in dict(checkpoint.tensors(dtype=torch.float32))


# Damage that only the data show.


def data_fault(folder, **options):
    checkpoint = open_checkpoint(folder).check()
    with pytest.raises(CheckpointError) as error:
        list(checkpoint.tensors(dtype=torch.float32, **options))
    return str(error.value)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_nan_weight_codes(made, native, byte):
    name = "layers.2.attn.wkv.weight"
    codes = made.stored[name].view(torch.uint8).clone()
    codes[-1, -1] = byte
    folder = rewrite(made, made.stored | {name: codes.view(torch.float8_e4m3fn)})
    assert f"{name} holds the FP8 code" in data_fault(folder, native=native)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("name", ["layers.2.attn.wkv.scale", "layers.1.ffn.experts.1.w2.scale"])
def test_nan_scales(made, native, name):
    scale = made.stored[name].view(torch.uint8).clone()
    scale[-1, -1] = 255
    folder = rewrite(made, made.stored | {name: scale.view(E8M0)})
    assert f"{name}: a scale is the E8M0 byte 255" in data_fault(folder, native=native)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_not_finite(tmp_path, value):
    recipe = Recipe(scales="F32")
    made = make_checkpoint(tmp_path / "made", config_for(recipe), recipe)
    name = "layers.2.attn.wkv.scale"
    scale = made.stored[name].clone()
    scale[0, 0] = value
    assert f"{name}: a scale is not finite" in data_fault(rewrite(made, made.stored | {name: scale}))


@pytest.mark.parametrize("bad", [-1, 3, 2**40])
def test_hash_ids_out_of_range(made, bad):
    name = "layers.1.ffn.gate.tid2eid"
    ids = made.stored[name].clone()
    ids[5, 1] = bad
    text = data_fault(rewrite(made, made.stored | {name: ids}))
    assert f"{name} holds expert ids from" in text
    assert "expected 0 to 2" in text


def test_values_beyond_the_dtype(made):
    name = "layers.2.attn.wkv.scale"
    scale = torch.full_like(made.stored[name].view(torch.uint8), 254).view(E8M0)
    assert "has values beyond 3.403e+38" in data_fault(rewrite(made, made.stored | {name: scale}))


def test_float16_holds_them_or_says_so(tmp_path):
    recipe = Recipe(linears="BF16", experts="BF16", num_shards=1)
    made = make_checkpoint(tmp_path / "made", config_for(recipe), recipe)
    read = dict(open_checkpoint(made.folder).tensors(dtype=torch.float16))
    assert torch.equal(read["lm_head.weight"], made.expected["lm_head.weight"].half())
    large = made.stored["head.weight"].clone()
    large[0, 0] = 70000.0
    folder = rewrite(made, made.stored | {"head.weight": large}, 1)
    with pytest.raises(CheckpointError, match=r"head\.weight has values beyond 6\.55e"):
        list(open_checkpoint(folder).tensors(dtype=torch.float16))


def test_smallest_scales_are_not_lost(made):
    name = "layers.1.ffn.experts.0.w1.scale"
    scale = torch.zeros_like(made.stored[name].view(torch.uint8)).view(E8M0)
    read = dict(open_checkpoint(rewrite(made, made.stored | {name: scale})).tensors(dtype=torch.bfloat16))
    gate = read["layers.1.mlp.experts.gate_up_proj"][0, :96]
    assert gate.abs().max().item() == 6 * 2.0**-127


def test_a_dtype_that_is_no_floating_one(made):
    with pytest.raises(ValueError, match=r"dtype is torch\.int8"):
        next(open_checkpoint(made.folder).tensors(dtype=torch.int8))


# Memory.


def anonymous_bytes():
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("native", [True, False])
def test_memory_while_reading(tmp_path, native):
    recipe = Recipe(num_shards=4)
    sizes = {
        "hidden_size": 512,
        "moe_intermediate_size": 512,
        "n_routed_experts": 24,
        "vocab_size": 4096,
    }
    made = make_checkpoint(tmp_path, config_for(recipe, num_hidden_layers=3, **sizes), recipe)
    largest = max(tensor.nbytes for tensor in made.stored.values())
    del made
    checkpoint = open_checkpoint(tmp_path).check()
    peaks = [anonymous_bytes()]
    before = peaks[0]
    model = {}
    for name, tensor in checkpoint.tensors(
        dtype=torch.bfloat16,
        native=native,
        progress=lambda done, total: peaks.append(anonymous_bytes()),
    ):
        model[name] = tensor
    needed = sum(tensor.nbytes for tensor in model.values())
    assert needed > 2**24
    # 6 MB for what Python and torch allocate on the way.
    assert max(peaks) - before <= needed + largest + 6 * 2**20


def test_files_are_untouched(made):
    before = {file.name: file.read_bytes() for file in made.folder.iterdir()}
    list(open_checkpoint(made.folder).check().tensors(dtype=torch.float32))
    assert before == {file.name: file.read_bytes() for file in made.folder.iterdir()}
