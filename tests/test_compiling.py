"""The step of fixed shape against the full forward, and what torch.compile makes of the model."""

import copy
import pickle
import random
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4 import Dsv4
from dsv4.config import CSA, HCA, SLIDING
from dsv4.testing import LIMITS, assert_close, assert_gradients_close, fault_config, random_config, random_ids, relative_error

# A reading of a number, or a size that depends on one.
SYNCS = ("_local_scalar_dense", "nonzero", "masked_select", "unique")
MOST_GRAPHS = 6
# Tracing takes a second and more for each block: where the kind of block does not matter, one of the kind that has every part; where
# what a step looks back over does, those that have entries.
ONE_BLOCK = {"layer_types": (CSA,), "num_hash_layers": 0}
WITH_ENTRIES = {"layer_types": (CSA, HCA), "num_hash_layers": 0}


def of_blocks(few: dict):
    """The slow run takes every kind."""
    return pytest.mark.parametrize("blocks", [pytest.param(few, id="few"), pytest.param({}, id="every kind", marks=pytest.mark.slow)])


def config_of(**overrides):
    given = {"layer_types": (SLIDING, CSA, HCA), "num_hash_layers": 1, "compress_rates": {CSA: 4, HCA: 8}}
    given |= {"sliding_window": 6, "index_topk": 3, "hc_sinkhorn_iters": 3}
    return fault_config(**given | overrides)


@pytest.fixture(scope="module")
def model():
    return Dsv4.from_config(config_of(), seed=3).requires_grad_(False)


@pytest.fixture(scope="module")
def ids(model):
    return random_ids(model.config, 2, 60, seed=1)


@pytest.fixture(scope="module")
def full(model, ids):
    return model(ids)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        torch._dynamo.reset()
        yield


def steps(model, ids, kv, start: int, stop: int, width: int = 1) -> torch.Tensor:
    return torch.cat([model.forward_static(ids[:, i : i + width], kv) for i in range(start, stop, width)], dim=1)


@pytest.mark.parametrize("rewind", [None, 0, 3])
@pytest.mark.parametrize("prefill", [0, 1, 13, 40])
def test_static_steps_are_the_full_forward(model, ids, full, prefill, rewind):
    kv = model.new_kv_cache(2, 60, rewind=rewind)
    if prefill:
        model(ids[:, :prefill], kv_cache=kv)
    assert_close(steps(model, ids, kv, prefill, 60), full[:, prefill:], "steps")
    assert kv.length.tolist() == [60, 60]


def test_static_steps_of_one_row(model, ids, full):
    """Whose windows still open are not among what is chosen from."""
    kv = model.new_kv_cache(1, 60)
    model(ids[:1, :13], kv_cache=kv)
    assert_close(steps(model, ids[:1], kv, 13, 30), full[:1, 13:30], "steps")


@pytest.mark.parametrize("rewind", [None, 0, 3])
def test_a_cache_goes_to_and_fro_between_its_forms(model, ids, full, rewind):
    kv = model.new_kv_cache(2, 60, rewind=rewind)
    got = [model(ids[:, :9], kv_cache=kv), steps(model, ids, kv, 9, 21), model(ids[:, 21:33], kv_cache=kv)]
    got += [steps(model, ids, kv, 33, 41, width=4), model(ids[:, 41:42], kv_cache=kv), steps(model, ids, kv, 42, 60, width=3)]
    assert_close(torch.cat(got, dim=1), full, "steps")
    back = 60 - (3 if rewind == 3 else 0 if rewind == 0 else 47)
    kv.truncate(back)
    assert kv.length.tolist() == [back, back]
    if back < 60:
        assert_close(steps(model, ids, kv, back, 60), full[:, back:], "steps")


def test_rows_are_selected_cloned_and_expanded_from_the_fixed_form(model, ids, full):
    kv = model.new_kv_cache(2, 60)
    steps(model, ids, kv, 0, 30)
    swapped, copy = kv.select([1, 0]), kv.clone()
    assert_close(steps(model, ids.flip(0), swapped, 30, 40), full.flip(0)[:, 30:40], "steps")
    assert_close(model(ids[:, 30:40], kv_cache=copy), full[:, 30:40], "steps")
    shared = copy.select([1]).expand(3)
    assert_close(steps(model, ids[1:].repeat(3, 1), shared, 40, 50), full[1:, 40:50].repeat(3, 1, 1), "steps")
    assert_close(steps(model, ids, kv, 30, 40), full[:, 30:40], "steps")


def test_rows_of_unequal_length_and_rows_that_rest(model, ids, full):
    kv = model.new_kv_cache(2, 60, rewind=0)
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[1, 13:] = 0
    model(ids[:, :20], attention_mask=mask, kv_cache=kv)
    lengths = [20, 13]
    for i in range(30):
        active = torch.tensor([i % 3 != 1, i % 5 != 2])
        token = torch.stack([ids[r, n] for r, n in enumerate(lengths)]).unsqueeze(1)
        logits = model.forward_static(token, kv, active)
        for r in (0, 1):
            if active[r]:
                assert_close(logits[r, 0], full[r, lengths[r]], "steps")
                lengths[r] += 1
        if i % 7 == 6:
            # The host did not count along.
            assert kv.length.tolist() == lengths
    assert_close(model(ids[:, 45:50], kv_cache=_filled(model, ids, 45)), full[:, 45:50], "steps")


def _filled(model, ids, n):
    kv = model.new_kv_cache(2, 60)
    model(ids[:, :n], kv_cache=kv)
    kv.fix()
    return kv


@pytest.mark.parametrize("seed", range(12))
def test_static_steps_of_random_models(seed):
    draw = random.Random(seed)
    config = random_config(draw)
    model = Dsv4.from_config(config, seed=seed).requires_grad_(False)
    tokens = draw.choice((24, 50, 90))
    ids, width = random_ids(config, 2, tokens, seed=seed), draw.choice((1, 1, 2, 5))
    kv = model.new_kv_cache(2, tokens + draw.choice((0, 1, 30)), rewind=draw.choice((None, 0, 2)))
    start = tokens % width + width * draw.randint(0, 4)
    if start:
        model(ids[:, :start], kv_cache=kv)
    whole = model(ids)
    assert relative_error(steps(model, ids, kv, start, tokens, width), whole[:, start:]) <= LIMITS["steps"].relative


class Ops(TorchDispatchMode):
    """What runs, and how large it is."""

    def __init__(self):
        super().__init__()
        self.seen: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        shapes = [tuple(t.shape) for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, torch.Tensor)]
        self.seen.append((str(func), shapes))
        return out


@pytest.mark.parametrize("width", [1, 3])
def test_a_static_step_reads_nothing_back_and_has_one_shape(model, ids, width):
    kv = model.new_kv_cache(2, 60)
    model.forward_static(ids[:, :width], kv)
    runs = []
    for start in (5, 6, 7, 8, 31):
        kv.truncate(0)
        model(ids[:, :start], kv_cache=kv)
        kv.fix(width)
        with Ops() as ops:
            model.forward_static(ids[:, start : start + width], kv)
        assert not [name for name, _ in ops.seen if any(sync in name for sync in SYNCS)]
        runs.append(ops.seen)
    assert len(runs[0]) > 100
    assert all(run == runs[0] for run in runs)


def test_where_things_stand_in_rings_is_computed_once_for_all_blocks():
    counts = []
    for times in (1, 3):
        model = Dsv4.from_config(config_of(layer_types=(SLIDING, CSA, HCA) * times), seed=3)
        ids, kv = random_ids(model.config, 2, 9), model.new_kv_cache(2, 20)
        model(ids[:, :8], kv_cache=kv)
        kv.fix()
        with Ops() as ops:
            model.forward_static(ids[:, 8:], kv)
        counts.append(Counter(name for name, _ in ops.seen))
    assert counts[0]["aten.remainder.Scalar"] == counts[1]["aten.remainder.Scalar"] > 0


def test_a_static_step_is_refused_while_someone_listens(model, ids):
    kv = model.new_kv_cache(2, 60)
    model(ids[:, :5], kv_cache=kv)
    with model.hooks([("layers.1.layer_output", lambda value, hook: None)]), pytest.raises(RuntimeError, match="calls no probe point"):
        model.forward_static(ids[:, 5:6], kv)
    # nnsight's way to listen tells nobody.
    attention = model.layers[1].self_attn
    for module in (attention, attention.attention_scores):
        module.__dict__["forward"] = module.forward
    with pytest.raises(RuntimeError, match="calls no probe point"):
        model.forward_static(ids[:, 5:6], kv)
    for module in (attention, attention.attention_scores):
        del module.__dict__["forward"]
    assert kv.length.tolist() == [5, 5]
    model.forward_static(ids[:, 5:6], kv)


def test_a_full_cache_is_an_error(model, ids):
    kv = model.new_kv_cache(2, 8)
    steps(model, ids, kv, 0, 8)
    with pytest.raises(ValueError, match="max_length=8"):
        model.forward_static(ids[:, 8:9], kv)
    assert kv.length.tolist() == [8, 8]


# torch.compile. The backend that runs the graph as it was traced finds breaks and shapes; inductor's numbers are in the slow tests.


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.fixture
def counters():
    torch._dynamo.utils.counters.clear()
    return torch._dynamo.utils.counters


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_whole_model_in_a_graph_for_every_length(model, counters, backend):
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for n in (40, 50, 21, 130, 77, 600):
        ids = random_ids(model.config, 2, n, seed=n)
        assert_close(compiled(ids), model(ids), "steps")
    mask = torch.ones(2, 50, dtype=torch.int64)
    mask[0, :9] = mask[1, 30:] = 0
    ids, real = random_ids(model.config, 2, 50), mask.bool()
    assert_close(compiled(ids, attention_mask=mask)[real], model(ids, attention_mask=mask)[real], "steps")
    assert graphs() <= MOST_GRAPHS
    assert not counters["graph_break"]


def test_a_compiled_model_is_refused_while_someone_listens(ids):
    model = Dsv4.from_config(config_of(**ONE_BLOCK), seed=3).requires_grad_(False)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    expected = compiled(ids)
    with model.hooks([("layers.0.layer_output", lambda value, hook: value + 1)]):
        with pytest.raises(Exception, match="calls no probe point"):
            compiled(ids)
        assert relative_error(model(ids), expected) > 0.01
    assert torch.equal(compiled(ids), expected)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_static_step_in_one_graph(model, ids, full, counters, backend):
    step = torch.compile(model.forward_static, fullgraph=True, backend=backend)
    kv = model.new_kv_cache(2, 60)
    with pytest.raises(Exception, match=r"kv\.fix\(\)"):
        step(ids[:, :1], kv)
    model(ids[:, :10], kv_cache=kv)
    kv.fix()
    before = graphs()
    got = torch.cat([step(ids[:, i : i + 1], kv) for i in range(10, 40)], dim=1)
    assert_close(got, full[:, 10:40], "steps")
    assert graphs() - before == 1
    assert kv.length.tolist() == [40, 40]
    assert_close(model(ids[:, 40:], kv_cache=kv), full[:, 40:], "steps")


@of_blocks(WITH_ENTRIES)
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_decoding_generates_the_same(counters, monkeypatch, backend, blocks):
    model = Dsv4.from_config(config_of(**blocks), seed=3).requires_grad_(False)
    monkeypatch.setattr("dsv4.fixed_cache.LEAST_SPAN", 16)
    prompts = [random_ids(model.config, 1, n, seed=n)[0].tolist() for n in (3, 9, 5)]
    expected = model.generate(prompts, 40, eos_token_id=None)
    probe = model.generate(prompts, 20, eos_token_id=None, names="layers.1.layer_output")[1]
    model.compile_decode(backend=backend)
    assert torch.equal(model.generate(prompts, 40, eos_token_id=None), expected)
    # 2 spans: 16 and 64 tokens.
    assert 2 <= graphs() <= MOST_GRAPHS
    # While someone listens a step runs as before.
    again = model.generate(prompts, 20, eos_token_id=None, names="layers.1.layer_output")[1]
    assert_close(again["layers.1.layer_output"], probe["layers.1.layer_output"], "steps")
    # What a step depends on is told to it.
    model.double()
    assert torch.equal(model.generate(prompts, 5, eos_token_id=None), expected[:, : expected.shape[1] - 35])


def test_a_compiled_step_runs_no_block_of_python(model, ids, full):
    calls = Counter()
    kv = model.new_kv_cache(2, 60)
    model(ids[:, :10], kv_cache=kv)
    try:
        model.compile_decode(backend="eager")
        model(ids[:, 10:11], kv_cache=kv)
        handle = model.layers[0].self_attn.attention_output.add_hook(lambda value, hook: calls.update(["hook"]))
        model(ids[:, 11:12], kv_cache=kv)
        handle.remove()
        assert calls["hook"] == 1
        assert_close(model(ids[:, 12:13], kv_cache=kv), full[:, 12:13], "steps")
    finally:
        model._compiled_step = None


def test_a_model_compiled_with_breaks_is_refused_too(ids):
    model = Dsv4.from_config(config_of(**ONE_BLOCK), seed=3).requires_grad_(False)
    compiled = torch.compile(model, backend="eager")
    expected = compiled(ids)
    with model.hooks([("layers.0.layer_output", lambda value, hook: value * 2)]), pytest.raises(RuntimeError, match="calls no probe point"):
        compiled(ids)
    assert torch.equal(compiled(ids), expected)


def test_the_whole_model_in_a_graph_with_gradients():
    # From 512 tokens on attention computes again what a graph would keep.
    model = Dsv4.from_config(config_of(), seed=3).double()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids = random_ids(model.config, 1, 530)
    found = []
    with torch.enable_grad():
        for run in (model, compiled):
            run(ids).square().sum().backward()
            found.append({name: p.grad for name, p in model.named_parameters()})
            model.zero_grad()
    assert_gradients_close(found[1], found[0], "float64 gradient")


def test_a_compiled_model_takes_one_row_and_embeddings_of_another_dtype(ids):
    # Routed by its ids.
    model = Dsv4.from_config(config_of(layer_types=(CSA,)), seed=3).requires_grad_(False)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    mask = torch.ones(60, dtype=torch.int64)
    mask[:7] = 0
    assert_close(compiled(ids[0], attention_mask=mask)[:, 7:], model(ids[0], attention_mask=mask)[:, 7:], "steps")
    embeddings = torch.randn(2, 60, model.hidden_size, generator=torch.Generator().manual_seed(1)).double()
    given = {"inputs_embeds": embeddings, "input_ids": ids}
    assert_close(compiled(**given), model(**given), "steps")
    with pytest.raises(Exception, match="give the ids once"):
        compiled(ids, input_ids=ids)


def test_a_static_step_records_no_gradient(model, ids, full):
    kv = model.new_kv_cache(2, 60)
    learned = copy.deepcopy(model).requires_grad_()
    with torch.enable_grad():
        logits = steps(learned, ids, kv, 0, 12)
    assert not logits.requires_grad
    assert_close(logits, full[:, :12], "steps")


# What a compiled step belongs to: its model, as it is.


def decoded(model, rows: int = 2, tokens: int = 30, capacity: int = 40) -> float:
    """The error of compiled steps against the full forward."""
    ids, kv = random_ids(model.config, rows, tokens, seed=7), model.new_kv_cache(rows, capacity)
    model(ids[:, : tokens - 4], kv_cache=kv)
    got = torch.cat([model(ids[:, i : i + 1], kv_cache=kv) for i in range(tokens - 4, tokens)], dim=1)
    return relative_error(got, model(ids)[:, tokens - 4 :])


def compiled_model(**overrides):
    return Dsv4.from_config(config_of(**overrides), seed=3).requires_grad_(False).compile_decode(backend="eager")


def test_models_of_one_shape_do_not_share_a_step(counters):
    for model in (compiled_model(**ONE_BLOCK), compiled_model(**ONE_BLOCK, routed_scaling_factor=7.5, rms_norm_eps=1e-2)):
        assert decoded(model) <= LIMITS["steps"].relative
    assert graphs() == 2


@of_blocks(ONE_BLOCK)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])
def test_a_copy_compiles_steps_of_its_own(counters, copied, blocks):
    model = compiled_model(**blocks)
    decoded(model)
    other = copied(model)
    for p in other.parameters():
        p.mul_(1.3)
    assert decoded(other) <= LIMITS["steps"].relative
    assert decoded(model) <= LIMITS["steps"].relative
    assert graphs() == 2
    calls = Counter()
    other.layers[0].mlp.register_forward_hook(lambda *given: calls.update(["hook"]))
    decoded(other)
    assert calls["hook"] == 6


@torch._dynamo.config.patch(recompile_limit=2)
def test_more_sizes_than_torch_compile_keeps(counters):
    model = compiled_model(**ONE_BLOCK)
    for rows in (1, 2, 3):
        assert decoded(model, rows, 6) <= LIMITS["steps"].relative
    # Beside the cache of one row above, which goes all the way back.
    for rewind in (0, 1):
        model(random_ids(model.config, 1, 1), kv_cache=model.new_kv_cache(1, 40, rewind=rewind))
    before = graphs()
    for n in (3, 4, 5, 6):
        model.generate(random_ids(model.config, 1, n)[0].tolist(), 3, eos_token_id=None)
    # The caches of `generate` have few capacities.
    assert graphs() - before == 1


@of_blocks(ONE_BLOCK)
@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
def test_a_cache_is_fed_in_every_mode(first, blocks):
    model = compiled_model(**blocks)
    ids = random_ids(model.config, 2, 30, seed=2)
    kv, got = model.new_kv_cache(2, 30), []
    for i, mode in enumerate((first, torch.inference_mode, torch.no_grad, torch.enable_grad) * 5):
        with mode():
            got.append(model(ids[:, i : i + 1], kv_cache=kv).detach().clone())
    assert_close(torch.cat(got, dim=1), model(ids)[:, :20], "steps")


def test_replaced_modules_and_global_hooks_are_seen():
    model = compiled_model(layer_types=(SLIDING, CSA))
    assert decoded(model) <= LIMITS["steps"].relative
    model.lm_head = torch.nn.Sequential(model.lm_head, torch.nn.Linear(model.vocab_size, 9).requires_grad_(False))
    assert decoded(model) <= LIMITS["steps"].relative
    model.layers[1].mlp.shared_experts = copy.deepcopy(model.layers[0].mlp.shared_experts)
    assert decoded(model) <= LIMITS["steps"].relative
    last = model.layers[1].self_attn.o_b_proj
    last.forward = lambda x: torch.nn.functional.linear(x, last.weight) * 1.5
    assert decoded(model) <= LIMITS["steps"].relative
    del last.forward
    assert decoded(model) <= LIMITS["steps"].relative
    calls = Counter()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda m, *given: calls.update([m is model.lm_head]))
    try:
        decoded(model)
    finally:
        handle.remove()
    assert calls[True] == 6


@of_blocks(WITH_ENTRIES)
def test_a_static_step_after_compiled_ones_looks_back_over_all(monkeypatch, ids, blocks):
    monkeypatch.setattr("dsv4.fixed_cache.LEAST_SPAN", 8)
    model = compiled_model(**blocks)
    kv = model.new_kv_cache(2, 64)
    model(ids[:, :10], kv_cache=kv)
    model(ids[:, 10:11], kv_cache=kv)
    assert_close(steps(model, ids, kv, 11, 60), model(ids)[:, 11:], "steps")
