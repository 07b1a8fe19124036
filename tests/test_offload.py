"""Weights that stay on the host or in the checkpoint's files: the same numbers as a resident model, to the last bit."""

import copy
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv4 import Dsv4, Dsv4Config, lookahead
from dsv4.convert import CheckpointError
from dsv4.experts import Experts, Fp4Experts
from dsv4.hot import Hot
from dsv4.lookahead import TOKENS, likely
from dsv4.offload import LEAVES, DiskExperts, HostExperts, OffloadedExperts
from dsv4.testing import assert_close, random_ids, relative_error
from dsv4.testing_checkpoints import Recipe, make_checkpoint
from dsv4.testing_uses import USES, every_value, gradients, one_token_at_a_time, patching, unwatched

CONFIG = Dsv4Config.tiny(hidden_size=64, moe_intermediate_size=32, num_hidden_layers=4, num_hash_layers=2)
RECIPES = {
    "fp4": Recipe(),
    "fp8": Recipe(experts="FP8"),
    "fp8, float32 scales": Recipe(experts="FP8", scales="F32", scheme="hybrid"),
    "bf16": Recipe(linears="BF16", experts="BF16"),
    "f32": Recipe(linears="F32", experts="F32", norms="F32", num_shards=1),
    "stacked bf16": Recipe(scheme="transformers", linears="BF16", experts="BF16"),
    "stacked fp4": Recipe(scheme="transformers"),
}
PLACES = {
    "experts on the host": {"experts": "host"},
    "experts on disk": {"experts": "disk"},
    "all on disk": {"device_map": {"": "disk"}},
    "here and there": {"device_map": {"": "cpu", "layers.1": "disk", "layers.3": "disk", "lm_head": "disk", "embed_tokens": "disk"}},
}
# What the default run makes of each recipe at each place, and of each use; the slow run makes the rest.
USUAL_RECIPES = {
    "experts on the host": ("fp4", "fp8", "bf16", "f32", "stacked fp4"),
    "all on disk": ("fp4", "fp8, float32 scales", "f32", "stacked bf16"),
}
USUAL_USES = {
    "experts on the host": ("one_token_at_a_time", "generation", "gradient_hooks", "edits", "patching"),
    "here and there": tuple(use.__name__ for use in USES),
}


def unless(is_usual: bool) -> tuple:
    return () if is_usual else (pytest.mark.slow,)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(recipe):
        if recipe not in made:
            made[recipe] = make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "files", CONFIG, RECIPES[recipe]).folder
        return made[recipe]

    return folder


def flat(found):
    return [t for x in found for t in (flat(x) if isinstance(x, list | tuple) else [x])]


def assert_same(found, expected):
    found, expected = flat(found), flat(expected)
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        if isinstance(a, torch.Tensor):
            assert a.shape == b.shape
            assert torch.equal(a.nan_to_num(), b.nan_to_num()), i
        else:
            assert a == b


@pytest.mark.parametrize(
    ("recipe", "place"),
    [pytest.param(r, place, marks=unless(r in usual)) for place, usual in USUAL_RECIPES.items() for r in RECIPES],
)
def test_every_value_and_gradient_is_the_resident_model_s(folders, recipe, place):
    for weights in (None, "dequantized"):
        resident = Dsv4.from_pretrained(folders(recipe), weights=weights)
        placed = Dsv4.from_pretrained(folders(recipe), weights=weights, **PLACES[place])
        for use in (every_value, gradients):
            assert_same(use(placed), use(resident))


@pytest.mark.parametrize(
    ("use", "place"),
    [
        pytest.param(use, place, marks=unless(use.__name__ in usual), id=f"{use.__name__}-{place}")
        for place, usual in USUAL_USES.items()
        for use in USES
    ],
)
def test_every_use_gives_the_same(folders, use, place):
    resident = Dsv4.from_pretrained(folders("fp4"), dtype=torch.float32)
    placed = Dsv4.from_pretrained(folders("fp4"), dtype=torch.float32, **PLACES[place])
    found, expected = use(placed), use(resident)
    if use is not patching:
        assert_same(found, expected)
        return
    # Many rows at once: a matrix product over rows that lie elsewhere in memory may round otherwise.
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, "reused prefix")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_in_other_dtypes(folders, dtype):
    for recipe in ("fp4", "f32"):
        resident = Dsv4.from_pretrained(folders(recipe), dtype=dtype)
        placed = Dsv4.from_pretrained(folders(recipe), dtype=dtype, device_map={"": "disk"})
        assert placed.dtype == dtype
        assert_same(one_token_at_a_time(placed), one_token_at_a_time(resident))


@pytest.mark.parametrize("place", PLACES)
def test_a_single_token_through_compiled_code(folders, place):
    for recipe, how in (("f32", {}), ("fp4", {"weights": "dequantized", "dtype": torch.float32})):
        found, expected = (decoded(Dsv4.from_pretrained(folders(recipe), **how, **where)) for where in (PLACES[place], {}))
        assert_same(found, expected)


def decoded(model):
    ids, kv = random_ids(model.config, 1, 16, seed=3), model.new_kv_cache(1, 16)
    with torch.no_grad():
        return [model(part, kv_cache=kv) for part in (ids[:, :12], *ids[:, 12:].split(1, dim=1))]


def test_banks_say_where_they_are(folders):
    model = Dsv4.from_pretrained(folders("fp4"), device_map={"": "cpu", "layers.1": "disk"})
    assert [type(layer.mlp.experts) for layer in model.layers] == [Fp4Experts, DiskExperts, Fp4Experts, Fp4Experts]
    assert "on disk" in repr(model.layers[1].mlp.experts)
    model = Dsv4.from_pretrained(folders("fp4"), device_map={"": "cpu", "layers.1": "disk"}, experts="host")
    assert all(type(layer.mlp.experts) is HostExperts for layer in model.layers)
    assert all(isinstance(layer.mlp.experts, Experts) for layer in model.layers)


@pytest.mark.parametrize("recipe", ["fp4", "fp8", "bf16", "stacked fp4"])
@pytest.mark.parametrize("experts", ["host", "disk"])
def test_matrices_of_an_expert_belong_to_the_caller(folders, recipe, experts):
    resident, placed = Dsv4.from_pretrained(folders(recipe)), Dsv4.from_pretrained(folders(recipe), experts=experts)
    for ours, theirs in ((placed.layers[i].mlp.experts, resident.layers[i].mlp.experts) for i in (0, 3)):
        for dtype in (torch.float32, torch.bfloat16):
            for e in (0, 7):
                assert torch.equal(ours.gate_up_matrix(e, dtype), theirs.gate_up_matrix(e, dtype))
                # Written to without harm: neither the file nor the bank is it.
                ours.down_matrix(e, dtype).zero_()
                assert torch.equal(ours.down_matrix(e, dtype), theirs.down_matrix(e, dtype))
        stored, expected = ours.stored(torch.bfloat16), theirs.stored(torch.bfloat16)
        for a, b in ((stored.first, expected.first), (stored.second, expected.second)):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        if expected.first_scale is not None:
            assert torch.equal(stored.first_scale.view(torch.uint8), expected.first_scale.view(torch.uint8))
        with pytest.raises(IndexError, match="expert 8 of a bank of 8"):
            ours.gate_up_matrix(8, torch.float32)


@pytest.mark.parametrize("experts", ["host", "disk"])
def test_device_code_gets_the_experts_hit(folders, experts):
    """As a GPU runs it, with the definition in the place of the device code."""
    model = Dsv4.from_pretrained(folders("fp4"), experts=experts, dtype=torch.float32)
    bank = model.layers[2].mlp.experts
    x, weights = torch.randn(2, 9, 64), torch.rand(2, 9, 2)
    indices = torch.tensor([1, 6, 4]).expand(2, 3, 3).reshape(2, 9)[..., None] + torch.tensor([0, 1])
    expected = bank(x, indices, weights)
    hit = indices.unique()
    compact = bank.compact(hit.tolist(), x.dtype)
    assert compact.num_experts == len(hit) < bank.num_experts
    assert compact.first.shape[0] == compact.second_scale.shape[0] == len(hit)
    dense = Dsv4.from_pretrained(folders("fp4"), dtype=torch.float32).layers[2].mlp.experts
    assert torch.equal(expected, dense(x, indices, weights))


def test_second_derivatives_pass_through(folders):
    models = [Dsv4.from_pretrained(folders("fp4"), dtype=torch.float64, experts=e) for e in ("resident", "host", "disk")]
    x, weights = torch.randn(1, 7, 64, dtype=torch.float64), torch.rand(1, 7, 2, dtype=torch.float64)
    indices = torch.randint(0, 4, (1, 7, 1)) + torch.tensor([0, 3])

    def second(model):
        given = x.clone().requires_grad_()
        out = model.layers[3].mlp.experts(given, indices, weights)
        (first,) = torch.autograd.grad(out.square().sum(), given, create_graph=True)
        return torch.autograd.grad(first.square().sum(), given)[0]

    expected, *found = map(second, models)
    for each in found:
        assert_close(each, expected, "float64 gradient")


def test_forward_mode_derivatives(folders):
    bank = Dsv4.from_pretrained(folders("fp4"), dtype=torch.float64, experts="disk").layers[3].mlp.experts
    x, tangent, weights = (torch.randn(1, 5, n, dtype=torch.float64) for n in (64, 64, 2))
    indices = torch.tensor([0, 5]).expand(1, 5, 2)
    value, moved = torch.autograd.functional.jvp(lambda x: bank(x, indices, weights), x, tangent)
    step = 1e-6
    difference = (bank(x + step * tangent, indices, weights) - bank(x - step * tangent, indices, weights)) / (2 * step)
    assert torch.equal(value, bank(x, indices, weights))
    assert (moved - difference).abs().max() <= 1e-5 * difference.abs().max()


def test_no_graph_keeps_weights(folders):
    model = Dsv4.from_pretrained(folders("f32"), experts="disk")
    bank = model.layers[1].mlp.experts
    x = torch.randn(1, 4, 64, requires_grad=True)
    kept = []

    def pack(t):
        kept.append(t.nbytes)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        bank(x, torch.tensor([2, 5]).expand(1, 4, 2), torch.rand(1, 4, 2))
    assert max(kept) < bank.gate_up_matrix(0, torch.float32).nbytes


# What goes to files and comes from them.


@pytest.mark.parametrize("place", ["experts on the host", "here and there"])
@pytest.mark.parametrize("recipe", ["fp4", "fp8, float32 scales", "bf16", "stacked fp4"])
@pytest.mark.parametrize("weights", [None, "dequantized"])
def test_saving_loses_nothing(folders, tmp_path, recipe, place, weights):
    resident = Dsv4.from_pretrained(folders(recipe), weights=weights)
    placed = Dsv4.from_pretrained(folders(recipe), weights=weights, **PLACES[place])
    for name, model in (("resident", resident), ("placed", placed)):
        model.save_pretrained(tmp_path / name)
    files = {name: {f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in ("resident", "placed")}
    assert files["placed"].keys() == files["resident"].keys()
    again = Dsv4.from_pretrained(tmp_path / "placed", weights=weights)
    for name, tensor in resident.state_dict().items():
        assert torch.equal(again.state_dict()[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_saving_over_the_files_that_are_read(folders, tmp_path):
    resident = Dsv4.from_pretrained(folders("fp4"))
    resident.save_pretrained(tmp_path / "files")
    placed = Dsv4.from_pretrained(tmp_path / "files", device_map={"": "disk"})
    expected = every_value(placed)
    placed.save_pretrained(tmp_path / "files", overwrite=True)
    assert_same(every_value(placed), expected)
    assert_same(every_value(Dsv4.from_pretrained(tmp_path / "files")), expected)


def test_state_dict_is_whole_or_refused(folders):
    resident = Dsv4.from_pretrained(folders("fp4"))
    held = Dsv4.from_pretrained(folders("fp4"), experts="host").state_dict()
    assert held.keys() == resident.state_dict().keys()
    assert all(torch.equal(held[n].view(torch.uint8), t.view(torch.uint8)) for n, t in resident.state_dict().items())
    for place in ({"experts": "disk"}, {"device_map": {"": "cpu", "layers.2": "disk"}}):
        model = Dsv4.from_pretrained(folders("fp4"), **place)
        with pytest.raises(ValueError, match="stays in the checkpoint's files and has no tensors to hand out"):
            model.state_dict()
        with pytest.raises(ValueError, match="save_pretrained writes a model"):
            model.load_state_dict(resident.state_dict())


def test_moves_and_casts_are_refused(folders):
    for place in PLACES.values():
        model = Dsv4.from_pretrained(folders("fp4"), **place)
        for change in (lambda m: m.to("cpu"), lambda m: m.bfloat16(), lambda m: m.float(), lambda m: m.to("meta")):
            with pytest.raises(ValueError, match="weights are where device_map= or experts= put them"):
                change(model)
        with pytest.raises(ValueError, match='load it with weights="dequantized" instead'):
            model.dequantize()


def test_a_copy_of_the_model_is_one(folders):
    model = Dsv4.from_pretrained(folders("fp4"), device_map={"": "cpu", "layers.2": "disk"}, experts="host")
    other = copy.deepcopy(model)
    with other.steer(torch.ones(64), layers=[1]):
        assert not torch.equal(other(torch.arange(9)), model(torch.arange(9)))
    assert_same(every_value(other), every_value(model))


def test_damaged_files_are_told_when_they_are_read(tmp_path):
    made = make_checkpoint(tmp_path / "files", CONFIG, RECIPES["fp8"])
    for stored, code in (("layers.3.ffn.experts.5.w2.weight", 0x7F), ("layers.3.ffn.experts.5.w3.scale", 0xFF)):
        (file,) = [f for f in made.folder.glob("*.safetensors") if stored in load_file(f)]
        whole = load_file(file)
        broken = {**whole, stored: whole[stored].view(torch.uint8).clone().flatten().view(whole[stored].shape)}
        broken[stored].view(-1)[3 if code == 0x7F else 0] = code
        broken[stored] = broken[stored].view(whole[stored].dtype)
        save_file(broken, file)
        with pytest.raises(CheckpointError, match=stored):
            Dsv4.from_pretrained(made.folder)
        model = Dsv4.from_pretrained(made.folder, experts="disk")
        bank = model.layers[3].mlp.experts
        assert bank.down_matrix(4, torch.float32).isfinite().all()
        read = bank.down_matrix if ".w2." in stored else bank.gate_up_matrix
        with pytest.raises(CheckpointError, match=stored):
            read(5, torch.float32)
        save_file(whole, file)


# Copies on a device.


def test_hot_copies_stay_within_the_budget():
    hot = Hot(torch.device("cpu"), 3 * 40)
    home = {e: torch.full((10,), float(e)) for e in range(6)}
    asked = [0, 1, 2, 0, 3, 4, 0, 1]
    for e in asked:
        (got,) = hot.take(e, lambda e=e: [home[e]])
        assert torch.equal(got, home[e])
        assert got.data_ptr() != home[e].data_ptr()
        assert hot.nbytes <= hot.budget
    # 0 1 2 miss, 0 hits, 3 pushes out 1, 4 pushes out 2, 0 hits, 1 misses.
    assert (hot.taken, hot.missed, hot.moved) == (8, 6, 6 * 40)


def test_copies_made_ahead_are_taken():
    hot = Hot(torch.device("cpu"), 1000)
    calls = []

    def load(e):
        calls.append(e)
        return [torch.full((4,), float(e)), None]

    for e in (1, 2, 1):
        hot.ahead(e, lambda e=e: load(e))
    first, none = hot.take(2, lambda: load(2))
    assert first.tolist() == [2.0] * 4
    assert none is None
    hot.adopt()
    assert hot.take(1, lambda: load(1))[0].tolist() == [1.0] * 4
    assert sorted(calls) == [1, 2]
    # Without room nothing is kept, and what was asked for is handed out.
    small = Hot(torch.device("cpu"), 0)
    assert small.take(3, lambda: load(3))[0].tolist() == [3.0] * 4
    assert small.nbytes == 0


def test_what_a_copy_ahead_raises_is_raised_where_it_is_taken():
    hot = Hot(torch.device("cpu"), 1000)

    def fail():
        raise CheckpointError("damaged")

    hot.ahead("a", fail)
    with pytest.raises(CheckpointError, match="damaged"):
        hot.take("a", fail)


@pytest.mark.parametrize("budget", [0, 5_000, 1 << 20])
def test_banks_over_copies_give_the_same(folders, budget):
    """With copies as on a GPU, here in another part of the memory."""
    resident = Dsv4.from_pretrained(folders("fp4"), dtype=torch.float32)
    for experts in ("host", "disk"):
        model = Dsv4.from_pretrained(folders("fp4"), dtype=torch.float32, experts=experts)
        hot = Hot(torch.device("cpu"), budget)
        model.placed.hot[torch.device("cpu")] = hot
        for module in model.modules():
            if isinstance(module, OffloadedExperts):
                module.hot = hot
        for use in (every_value, gradients, one_token_at_a_time):
            assert_same(use(model), use(resident))
        assert 0 < hot.missed <= hot.taken
        assert (hot.missed < hot.taken) == (budget == 1 << 20)
        assert hot.nbytes <= budget


def test_hash_blocks_are_asked_for_before_they_run(folders, monkeypatch):
    model = Dsv4.from_pretrained(folders("fp4"), experts="disk")
    log = []
    for i, layer in enumerate(model.layers):
        bank = layer.mlp.experts
        monkeypatch.setattr(bank, "ahead", lambda leaf, expert, i=i, **more: log.append((i, expert)))
        layer.register_forward_pre_hook(lambda module, args, i=i: log.append(f"block {i}"))
    ids = torch.tensor([[3, 5, 7, 3]])
    model(ids)
    before = log[: log.index("block 1")]
    for i in (0, 1):
        table = model.layers[i].mlp.router.tid2eid
        wanted = set(table[ids].flatten().tolist())
        assert {e for entry in before if isinstance(entry, tuple) and entry[0] == i for e in [entry[1]]} == wanted


def copying(folder, budget, **more):
    """A model whose experts are copied as on a GPU, here in another part of the memory; the copies."""
    model, hot = Dsv4.from_pretrained(folder, experts="disk", **more), Hot(torch.device("cpu"), budget)
    for layer in model.layers:
        layer.mlp.experts.hot = hot
    return model, hot


def test_blocks_that_score_are_guessed_before_they_attend(folders, monkeypatch):
    model, _ = copying(folders("fp4"), 0)
    log = []
    for i, layer in enumerate(model.layers):
        bank, ahead = layer.mlp.experts, layer.mlp.experts.ahead

        def asked_for(leaf, expert, i=i, ahead=ahead, is_guess=False):
            if is_guess:
                log.append((i, leaf, expert))
            ahead(leaf, expert, is_guess=is_guess)

        monkeypatch.setattr(bank, "ahead", asked_for)
        layer.self_attn.register_forward_pre_hook(lambda module, args, i=i: log.append(f"attention {i}"))
    _, cache = model.run_with_cache(torch.tensor([[3, 5, 7, 3]]), ["layers.*.layer_input", "layers.*.mlp.expert_indices"])
    right = total = 0
    for i in (2, 3):
        chosen = likely(model.layers[i], cache["layer_input", i])
        assert chosen.shape == (4, 2)
        asked = log[log.index(f"attention {i - 1}") + 1 : log.index(f"attention {i}")]
        experts = set(chosen.flatten().tolist())
        assert {block for block, *_ in asked} == {i}
        assert {leaf for _, leaf, _ in asked} == set(LEAVES)
        assert {expert for *_, expert in asked} == experts
        right += len(experts & set(cache["expert_indices", i].flatten().tolist()))
        total += len(experts)
    assert {entry[0] for entry in log if isinstance(entry, tuple)} == {2, 3}
    assert (model.placed.lookahead.right, model.placed.lookahead.guessed) == (right, total)


def test_pages_are_not_guessed(folders):
    model = Dsv4.from_pretrained(folders("fp4"), experts="disk")
    model([[3, 5, 7, 3]])
    assert model.placed.lookahead.guessed == 0


def test_a_guess_is_the_router_s_choice_where_the_attention_adds_nothing(folders):
    model = Dsv4.from_pretrained(folders("fp4"), dtype=torch.float32)
    streams = torch.randn(1, 9, 4, 64)
    for block in model.layers[2:]:
        _, _, normed = block.read("mlp", streams)
        router = block.mlp.router
        assert torch.equal(likely(block, streams), router.choose(router.selection_scores(router.scores(router.logits(normed))))[0])
    assert likely(model.layers[2], torch.randn(2, 100, 4, 64)).shape[0] <= TOKENS


@pytest.mark.parametrize(
    ("wrong", "budget"), [(False, 0), (True, 5_000), *(pytest.param(*p, marks=pytest.mark.slow) for p in [(True, 0), (False, 5_000)])]
)
def test_a_guess_changes_no_number(folders, monkeypatch, budget, wrong):
    """Nor does a wrong one: experts that no token uses."""
    resident = Dsv4.from_pretrained(folders("fp4"), dtype=torch.float32)
    model, hot = copying(folders("fp4"), budget, dtype=torch.float32)
    if wrong:
        monkeypatch.setattr(lookahead, "likely", lambda block, streams: (likely(block, streams) + 1) % 8)
    for use in (every_value, gradients, unwatched, one_token_at_a_time):
        assert_same(use(model), use(resident))
    found = model.placed.lookahead
    found.guessed = found.right = 0
    for token in range(12):
        assert_same(model([[token]]), resident([[token]]))
    assert found.guessed == 12 * 2 * 2
    assert (found.right < found.guessed / 2) == wrong
    hot.adopt()
    assert hot.nbytes <= hot.budget


def test_a_guess_reaches_no_hook(folders):
    model, _ = copying(folders("fp4"), 0)
    calls = []
    block = model.layers[3]
    for module in block.modules():
        module.register_forward_hook(lambda *args: calls.append(args[0]))
    names = [name for name in model.hook_dict if name.startswith("layers.3.")]
    counts = []
    for guesses in (model.placed.lookahead, None):
        model.placed.lookahead = guesses
        calls.clear()
        with model.hooks([(name, lambda value, hook: calls.append(hook)) for name in names]):
            model([[3, 5, 7]])
        counts.append(list(map(id, calls)))
    assert counts[0] == counts[1]


def test_guesses_are_called_off():
    hot = Hot(torch.device("cpu"), 2 * 40)
    started, go = threading.Event(), threading.Event()

    def load(e):
        if e == "first":
            started.set()
            go.wait()
        if e == "damaged":
            raise CheckpointError("damaged")
        return [torch.full((10,), 1.0)]

    hot.take("kept", lambda: load("kept"))
    hot.take("also kept", lambda: load("also kept"))
    for e in ("first", "right", "wrong", "damaged"):
        hot.ahead(e, lambda e=e: load(e), is_guess=True)
    started.wait()
    # The first is under way, two have not begun, one is wanted.
    hot.settle({"right"})
    go.set()
    hot.take("right", lambda: load("right"))
    assert hot.moved == 3 * 40
    # Made and not wanted: there is no room, so that it goes and nothing else does.
    hot.settle(set())
    assert hot.moved == 4 * 40
    before = hot.missed
    for e in ("also kept", "right"):
        hot.take(e, lambda e=e: load(e))
    assert hot.missed == before
    hot.ahead("damaged", lambda: load("damaged"), is_guess=True)
    hot.adopt()
    hot.ahead("damaged", lambda: load("damaged"), is_guess=True)
    with pytest.raises(CheckpointError, match="damaged"):
        hot.take("damaged", lambda: load("damaged"))


@pytest.mark.parametrize("experts", ["host", "disk"])
@pytest.mark.parametrize("recipe", ["fp8", "fp8, float32 scales"])
def test_deployed_numerics_of_offloaded_banks(folders, recipe, experts):
    """Rows are rounded to E4M3 as in a resident bank, to the last bit; gradients take the rounding for the identity in both."""
    models = [Dsv4.from_pretrained(folders(recipe), dtype=torch.float32, experts=e) for e in ("resident", experts)]
    plain = unwatched(models[0])
    for model in models:
        for layer in model.layers:
            layer.mlp.experts.numerics = "deployed"
    found, expected = unwatched(models[1]), unwatched(models[0])
    assert_same(found, expected)
    assert relative_error(expected[0], plain[0]) > 1e-4
    x, weights, indices = torch.randn(2, 5, 64), torch.rand(2, 5, 2), torch.randint(0, 4, (2, 5, 1)) + torch.tensor([0, 4])
    valid = torch.ones(2, 5, dtype=torch.bool).index_fill(1, torch.tensor([0]), False)
    results = []
    for model in models:
        given = x.clone().requires_grad_()
        out = model.layers[3].mlp.experts(given, indices, weights, valid)
        results += [out, *torch.autograd.grad(out.square().sum(), given)]
    assert_same(results[2:], results[:2])


@pytest.mark.parametrize("recipe", ["fp4", "bf16"])
@pytest.mark.parametrize("experts", ["resident", "host", "disk"])
def test_deployed_numerics_are_for_fp8(folders, recipe, experts):
    model = Dsv4.from_pretrained(folders(recipe), experts=experts)
    model.layers[1].mlp.experts.numerics = "deployed"
    with pytest.raises(ValueError, match='numerics="deployed" is for fp8 experts, and these are'):
        model([[3, 5]])
    model.layers[1].mlp.experts.numerics = "served"
    with pytest.raises(ValueError, match="expected one of 'exact', 'deployed'"):
        model([[3, 5]])


@pytest.mark.gpu
def test_on_a_gpu(folders):
    resident = Dsv4.from_pretrained(folders("fp4"), device="cuda", kernels="torch")
    for place in ({"experts": "host"}, {"experts": "disk"}, {"device_map": {"": "cuda", "layers.1": "disk", "layers.3": "cpu"}}):
        where = {} if "device_map" in place else {"device": "cuda"}
        for budget in (0, 1 << 20):
            placed = Dsv4.from_pretrained(folders("fp4"), kernels="torch", hot_experts=budget, **place, **where)
            for use in (every_value, gradients, one_token_at_a_time):
                found, expected = use(placed), use(resident)
                for a, b in zip(flat(found), flat(expected), strict=True):
                    if isinstance(a, torch.Tensor) and a.is_floating_point():
                        assert_close(a.nan_to_num(), b.nan_to_num(), "bfloat16 way")
