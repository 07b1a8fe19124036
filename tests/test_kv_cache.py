"""KVCache: what it refuses, what survives an exception, what an edit leaves, what it holds."""

import copy
import gc
import threading
import weakref

import pytest
import torch

from dsv4 import Dsv4, Dsv4Config, KVCache
from dsv4.config import CSA, HCA, SLIDING
from dsv4.slots import SHARED_ENTRIES
from dsv4.tape import SPARE, SPARE_SHARE, Tape
from dsv4.testing import LIMITS, fault_config, random_ids, relative_error

LIMIT = LIMITS["row alone"].relative
TAPE_WITH_ROOM = Tape._with_room


@pytest.fixture(scope="module")
def model():
    return Dsv4.from_config(fault_config(), seed=3).requires_grad_(False)


@pytest.fixture(scope="module")
def ids(model):
    return random_ids(model.config, 3, 40, seed=4)


@pytest.fixture
def kv(model, ids):
    """Three rows of 11 tokens."""
    kv = model.new_kv_cache(3, 40)
    model(ids[:, :11], kv_cache=kv)
    return kv


def contents(kv):
    """All that is committed, copied."""
    held = []
    for slot, tape in zip(kv._slots, kv.state.tapes, strict=True):
        rate = getattr(slot, "rate", 1)
        ends = [n // rate for n in kv.state.length]
        held.append(tape.read(tape.lowest, max(ends) - min(tape.lowest)).clone())
    return kv.state.length, kv.state.floor, held


def assert_same(kv, before):
    now = contents(kv)
    assert now[:2] == before[:2]
    for a, b in zip(now[2], before[2], strict=True):
        assert torch.equal(a, b)


def assert_goes_on(model, kv, ids, start=11):
    logits = model(ids[:, start : start + 5], kv_cache=kv)
    assert relative_error(logits, model(ids[:, : start + 5])[:, start:]) <= LIMIT


# What it is made of.


@pytest.mark.parametrize(
    ("keywords", "name"),
    [
        (dict(batch_size=0), "batch_size=0"),
        (dict(batch_size=True), "batch_size=True"),
        (dict(max_length=0), "max_length=0"),
        (dict(max_length=2.5), "max_length=2.5"),
        (dict(rewind=-1), "rewind=-1"),
        (dict(rewind="all"), "rewind='all'"),
    ],
)
def test_sizes_are_checked(model, keywords, name):
    with pytest.raises(ValueError, match=name):
        KVCache(model.config, **keywords)


def test_built_by_hand_as_by_the_model(model, ids):
    by_hand = KVCache(model.config, 3, 40, device=model.device, dtype=model.dtype, rewind=0)
    made = model.new_kv_cache(3, 40, rewind=0)
    for kv in (by_hand, made):
        assert kv.batch_size == 3
        assert kv.length.dtype == torch.int64
        assert kv.length.device.type == "cpu"
        assert kv.length.tolist() == [0, 0, 0]
        assert kv.nbytes == 0
    assert torch.equal(model(ids, kv_cache=by_hand), model(ids, kv_cache=made))
    assert by_hand.nbytes == made.nbytes > 0
    assert "length=[40, 40, 40]" in repr(made)
    made.length.zero_()
    assert made.length.tolist() == [40, 40, 40]


def test_a_default_device_does_not_reach_it(model, ids):
    with torch.device("meta"):
        kv = model.new_kv_cache(3, 40)
    with torch.device("meta"):
        logits = model(ids, kv_cache=kv)
    assert logits.device.type == "cpu"
    assert not any(tape.held.is_meta for tape in kv.state.tapes)


# Refusals: nothing changes.


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: KVCache(m.config, 3, 13, dtype=m.dtype), "max_length=13"),
        (lambda m: m.new_kv_cache(2, 40), "2 rows, the input 3"),
        (lambda m: m.new_kv_cache(1, 40), "expand"),
        (lambda m: KVCache(m.config, 3, 40, dtype=torch.bfloat16), "dtype"),
        (lambda m: KVCache(m.config, 3, 40, device="meta", dtype=m.dtype), "device"),
        (lambda m: KVCache(fault_config(sliding_window=9), 3, 40), "config"),
        (lambda m: KVCache(fault_config(index_topk=3), 3, 40), "config"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused(model, ids, change, said):
    kv = change(model)
    before = kv.state
    fired = []
    with pytest.raises(ValueError, match=said):
        model.run_with_hooks(ids[:, :14], [("token_embeddings", lambda x, hook: fired.append(1))], kv_cache=kv)
    assert kv.state is before
    assert not fired
    assert not kv._in_use


def test_a_full_cache_is_refused_and_stays_usable(model, ids):
    kv = model.new_kv_cache(3, 12)
    model(ids[:, :11], kv_cache=kv)
    before = contents(kv)
    with pytest.raises(ValueError, match=r"row 0 .* holds 11 tokens; 2 more exceed max_length=12"):
        model(ids[:, 11:13], kv_cache=kv)
    # One row alone may be the one that is full.
    mask = torch.tensor([[0, 0], [1, 1], [0, 0]])
    with pytest.raises(ValueError, match="row 1"):
        model(ids[:, 11:13], attention_mask=mask, kv_cache=kv)
    assert_same(kv, before)
    logits = model(ids[:, 11:12], kv_cache=kv)
    assert relative_error(logits, model(ids[:, :12])[:, 11:]) <= LIMIT
    assert kv.length.tolist() == [12, 12, 12]


@pytest.mark.parametrize("keywords", [dict(stop_at_layer=2), dict(stop_at_layer=4)])
def test_stop_is_refused(model, ids, kv, keywords):
    before = contents(kv)
    for run in (model, model.run_with_cache, model.run_with_hooks):
        with pytest.raises(ValueError, match="stop_at_layer"):
            run(ids[:, :3], kv_cache=kv, **keywords)
    assert_same(kv, before)
    assert_goes_on(model, kv, ids)


@pytest.mark.parametrize("layer", [0, 2])
def test_start_is_refused(model, ids, kv, layer):
    before = contents(kv)
    streams = model(ids[:, :3], stop_at_layer=layer)
    with pytest.raises(ValueError, match="start_at_layer"):
        model(streams, start_at_layer=layer, input_ids=ids[:, :3], kv_cache=kv)
    assert_same(kv, before)


def test_skip_is_refused(model, ids, kv):
    before = contents(kv)
    with model.skip_layers([1]), pytest.raises(ValueError, match="skip_layers"):
        model(ids[:, :3], kv_cache=kv)
    assert_same(kv, before)
    assert_goes_on(model, kv, ids)


@pytest.mark.parametrize(
    "bad",
    [
        dict(input=torch.tensor([[64]] * 3)),
        dict(input=torch.zeros(3, 0, dtype=torch.int64)),
        dict(attention_mask=torch.tensor([[1, 0, 1]] * 3)),
        dict(attention_mask=torch.ones(3, 9)),
        dict(logits_to_keep=-1),
    ],
)
def test_bad_input_leaves_the_cache(model, ids, kv, bad):
    before = contents(kv)
    call = {"input": ids[:, :3], **bad}
    with pytest.raises(ValueError, match=r"\w"):
        model(call.pop("input"), kv_cache=kv, **call)
    assert_same(kv, before)
    assert_goes_on(model, kv, ids)


# Exceptions inside a forward.


class OutOfMemoryError(RuntimeError):
    pass


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OutOfMemoryError, SystemExit])
@pytest.mark.parametrize(
    "name",
    [
        "input_ids",
        "layers.0.self_attn.attention_keys_unrotated",
        "layers.1.self_attn.compressor.compressed_entries",
        "layers.1.self_attn.compressor.indexer.indexer_keys",
        "layers.3.layer_output",
        "logits",
    ],
)
@pytest.mark.parametrize("length", [1, 5, 29])
def test_a_hook_that_raises_leaves_the_cache(model, ids, kv, name, error, length):
    before, state = contents(kv), kv.state
    new = ids[:, 11 : 11 + length]

    def stop(value, hook):
        raise error

    with pytest.raises(error):
        model.run_with_hooks(new, [(name, stop)], kv_cache=kv)
    assert kv.state is state
    assert_same(kv, before)
    assert all(slot.pending is None for slot in kv._slots)
    assert_goes_on(model, kv, ids)
    assert all(slot.pending is None for slot in kv._slots)


@pytest.mark.parametrize("nth", [0, 1, 5, -1])
@pytest.mark.parametrize("length", [1, 9])
def test_an_exception_while_committing_leaves_the_cache(model, ids, kv, monkeypatch, nth, length):
    before, state = contents(kv), kv.state
    slot = kv._slots[nth]

    def fail(*args):
        raise OutOfMemoryError

    monkeypatch.setattr(slot, "advanced", fail)
    with pytest.raises(OutOfMemoryError):
        model(ids[:, 11 : 11 + length], kv_cache=kv)
    monkeypatch.undo()
    assert kv.state is state
    assert_same(kv, before)
    assert_goes_on(model, kv, ids)


@pytest.mark.parametrize("fails_at", range(14))
def test_an_allocation_that_fails_leaves_the_cache(model, ids, monkeypatch, fails_at):
    """Every tape grows, those of entries inside the forward, those of tokens at its end."""
    monkeypatch.setattr("dsv4.tape.SPARE", 0)
    monkeypatch.setattr("dsv4.tape.SPARE_SHARE", 10**9)
    kv = model.new_kv_cache(3, 40)
    model(ids[:, :11], kv_cache=kv)
    before, state, grown = contents(kv), kv.state, []

    def with_room(self, *args):
        if len(grown) == fails_at:
            raise OutOfMemoryError
        grown.append(self)
        return TAPE_WITH_ROOM(self, *args)

    monkeypatch.setattr(Tape, "_with_room", with_room)
    with pytest.raises(OutOfMemoryError):
        model(ids[:, 11:31], kv_cache=kv)
    monkeypatch.undo()
    assert len(kv.state.tapes) == 14
    assert kv.state is state
    assert_same(kv, before)
    assert_goes_on(model, kv, ids)


def test_a_run_inside_a_hook_is_refused_and_hurts_no_cache(model, ids, kv):
    other = model.new_kv_cache(3, 40)

    def run_again(value, hook):
        model(ids[:, :2], kv_cache=other)

    before = contents(kv)
    with pytest.raises(RuntimeError, match="already running"):
        model.run_with_hooks(ids[:, 11:13], [("layers.1.layer_output", run_again)], kv_cache=kv)
    assert_same(kv, before)
    assert_goes_on(model, kv, ids)
    model(ids[:, :11], kv_cache=other)
    assert_goes_on(model, other, ids)


def test_two_models_do_not_share_a_run_on_one_cache(model, ids, kv):
    twin = copy.deepcopy(model)
    before = contents(kv)

    def run_twin(value, hook):
        with pytest.raises(RuntimeError, match="in progress"):
            twin(ids[:, :2], kv_cache=kv)
        for change in (kv.reset, lambda: kv.truncate(3)):
            with pytest.raises(RuntimeError, match="in progress"):
                change()
        assert kv.clone().length.tolist() == [11, 11, 11]

    logits = model.run_with_hooks(ids[:, 11:16], [("layers.1.layer_output", run_twin)], kv_cache=kv)
    assert relative_error(logits, model(ids[:, :16])[:, 11:]) <= LIMIT
    kv.truncate(11)
    assert_same(kv, before)


def test_in_use_is_claimed_once(kv):
    with kv.in_use(), pytest.raises(RuntimeError, match="in progress"), kv.in_use():
        raise AssertionError("claimed twice")
    with kv.in_use():
        pass


def test_another_thread_cannot_take_a_cache_in_use(model, ids, kv):
    twin, errors = copy.deepcopy(model), []

    def elsewhere():
        with pytest.raises(RuntimeError, match="in progress"):
            twin(ids[:, :2], kv_cache=kv)
        errors.append("refused")

    def start(value, hook):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    model.run_with_hooks(ids[:, 11:16], [("layers.1.layer_output", start)], kv_cache=kv)
    assert errors == ["refused"]
    assert_goes_on(model, kv, ids, 16)


# Gradients and modes.


def test_gradients_stop_at_the_cache(ids):
    model = Dsv4.from_config(fault_config(), seed=3)
    kv = model.new_kv_cache(3, 40)
    first = model(ids[:, :11], kv_cache=kv)
    assert not any(tape.held.requires_grad for tape in kv.state.tapes)
    second = model(ids[:, 11:16], kv_cache=kv)
    grads = torch.autograd.grad(second.square().sum(), list(model.parameters()), allow_unused=True)
    # This call's keys and entries carry their gradient.
    named = dict(zip([n for n, _ in model.named_parameters()], grads, strict=True))
    for leaf in ("self_attn.kv_proj.weight", "self_attn.compressor.kv_proj.weight"):
        assert named[f"layers.1.{leaf}"].abs().sum() > 0
    # The first call's graph is its own: it can be gone.
    del first
    alone = torch.autograd.grad(
        model(ids[:, 11:16], kv_cache=_detached(model, ids)).square().sum(),
        model.layers[1].self_attn.kv_proj.weight,
    )[0]
    assert torch.equal(named["layers.1.self_attn.kv_proj.weight"], alone)


def _detached(model, ids):
    kv = model.new_kv_cache(3, 40)
    with torch.no_grad():
        model(ids[:, :11], kv_cache=kv)
    return kv


def test_a_backward_after_later_calls(ids):
    """Later calls write into the cache; graphs made before must not have kept a view of it."""
    model = Dsv4.from_config(fault_config(), seed=3)
    kv = model.new_kv_cache(3, 40)
    expected = []
    losses = []
    for start in (0, 11, 12, 16):
        end = {0: 11, 11: 12, 12: 16, 16: 17}[start]
        single = kv.clone()
        loss = model(ids[:, start:end], kv_cache=single).square().mean()
        expected.append(torch.autograd.grad(loss, model.layers[1].self_attn.sinks)[0])
        losses.append(model(ids[:, start:end], kv_cache=kv).square().mean())
    for loss, grad in zip(losses, expected, strict=True):
        found = torch.autograd.grad(loss, model.layers[1].self_attn.sinks)[0]
        assert relative_error(found, grad) <= 1e-5


@pytest.mark.parametrize("leaf", ["attention_query_latent", "attention_queries"])
def test_a_graph_that_starts_late_survives_later_calls(model, ids, leaf):
    """Frozen weights, one leaf behind the entries: they are saved without needing a gradient."""
    kv = model.new_kv_cache(3, 40)
    shift = torch.zeros(1, requires_grad=True)
    name = f"layers.3.self_attn.{leaf}"
    losses = []
    for start, end in ((0, 11), (11, 13), (13, 17), (17, 18)):
        logits = model.run_with_hooks(ids[:, start:end], [(name, lambda q, hook: q + shift)], kv_cache=kv)
        losses.append(logits.square().mean())
    grads = [torch.autograd.grad(loss, shift)[0] for loss in losses]
    assert all(torch.isfinite(grad).all() and grad.abs().sum() > 0 for grad in grads)


@pytest.mark.parametrize("order", ["gni", "ing", "nig", "ign"])
def test_modes_mix_on_one_cache(ids, order):
    model = Dsv4.from_config(fault_config(), seed=3)
    modes = {"g": torch.enable_grad, "n": torch.no_grad, "i": torch.inference_mode}
    kv, logits = model.new_kv_cache(3, 40, rewind=0), []
    for step, start in enumerate((0, 9, 11, 12, 13, 17, 24, 25, 26)):
        end = (9, 11, 12, 13, 17, 24, 25, 26, 40)[step]
        with modes[order[step % 3]]():
            logits.append(model(ids[:, start:end], kv_cache=kv))
        if order[step % 3] == "g":
            logits[-1].square().mean().backward()
        for tape in kv.state.tapes:
            assert not tape.held.requires_grad
            assert not tape.held.is_inference()
    with torch.no_grad():
        whole = model(ids)
    assert relative_error(torch.cat([x.detach() for x in logits], dim=1), whole) <= LIMIT


@pytest.mark.parametrize("copied", [lambda kv: kv.clone(), lambda kv: kv.select([0]), lambda kv: kv.expand(1)])
def test_a_copy_made_in_inference_mode_is_used_outside_it(ids, copied):
    model = Dsv4.from_config(fault_config(), seed=3)
    kv = model.new_kv_cache(1, 60)
    with torch.inference_mode():
        model(ids[:1, :11], kv_cache=kv)
        copy_ = copied(kv)
        kv.truncate(5)
        kv.reset()
    for start, end in ((11, 12), (12, 20), (20, 21)):
        logits = model(ids[:1, start:end], kv_cache=copy_)
        logits.square().mean().backward()
        assert relative_error(logits, model(ids[:1, :end])[:, start:]) <= LIMIT
    model(ids[:1, :9], kv_cache=kv)


def test_nothing_holds_on_to_a_graph(ids):
    model = Dsv4.from_config(fault_config(), seed=3)
    kv = model.new_kv_cache(3, 40)
    names = ["layers.1.self_attn.attention_keys_unrotated", "**.compressed_entries"]
    nodes = []
    for start in (0, 11):
        _, cache = model.run_with_cache(ids[:, start : start + 11], names, kv_cache=kv, detach=False)
        assert all(value.grad_fn is not None for value in cache.values())
        nodes += [weakref.ref(value) for value in cache.values()]
    del cache
    gc.collect()
    assert [node() for node in nodes] == [None] * len(nodes)


# Edits.

KEPT = (
    "layers.0.self_attn.attention_keys_unrotated",
    "layers.1.self_attn.attention_keys_unrotated",
    "layers.1.self_attn.compressor.compressor_gates",
    "layers.1.self_attn.compressor.compressed_entries",
    "layers.2.self_attn.compressor.compressed_entries",
    "layers.1.attention_norm_output",
    "layers.0.layer_output",
    "token_embeddings",
)
FOR_THIS_CALL = (
    "layers.0.self_attn.attention_keys",
    "layers.3.self_attn.attention_values",
    "layers.3.self_attn.attention_scores",
    "layers.3.self_attn.attention_probabilities",
    "layers.3.self_attn.attention_queries",
    "layers.3.self_attn.compressor.indexer.indexer_keys",
    "layers.3.self_attn.compressor.indexer.indexer_scores",
    "layers.3.self_attn.compressor.indexer.indexer_head_scores",
    "layers.3.mlp.expert_weights",
    "layers.3.layer_output",
    "logits",
)


def ramp(value):
    """Norms and the streams' mixing would undo a common factor."""
    return torch.linspace(0.4, 1.7, value.shape[-1])


def changed(value, hook):
    return value * ramp(value)


def changed_in_place(value, hook):
    value.mul_(ramp(value))


@pytest.mark.parametrize("edit", [changed, changed_in_place])
@pytest.mark.parametrize("name", KEPT)
def test_an_edit_of_what_is_kept_stays(model, ids, kv, name, edit):
    """A window that closes in the edited call: the entry made of edited values is seen later."""
    clean = kv.clone()
    with model.hooks([(name, edit)]):
        model(ids[:, 11:17], kv_cache=kv)
    model(ids[:, 11:17], kv_cache=clean)
    later, expected = (model(ids[:, 17:22], kv_cache=c) for c in (kv, clean))
    assert relative_error(later, expected) > 1e-3


@pytest.mark.parametrize("edit", [changed, changed_in_place])
@pytest.mark.parametrize("name", FOR_THIS_CALL)
def test_an_edit_of_what_is_not_kept_is_for_its_call(model, ids, kv, name, edit):
    """Only values of the last block whose effect reaches no later key, or keys of this call."""
    clean = kv.clone()
    edited = model.run_with_hooks(ids[:, 11:17], [(name, edit)], kv_cache=kv)
    expected = model(ids[:, 11:17], kv_cache=clean)
    if "indexer" not in name:
        assert relative_error(edited, expected) > 1e-3
    later, expected = (model(ids[:, 17:22], kv_cache=c) for c in (kv, clean))
    if name.startswith("layers.0"):
        # The later blocks' keys were made from what the edit changed; block 0's were not.
        keys = kv.state.tapes[0], clean.state.tapes[0]
        assert torch.equal(*(tape.read((11, 11, 11), 6) for tape in keys))
    else:
        assert torch.equal(later, expected)


def test_an_edit_of_an_entry_equals_the_same_edit_in_one_call(model, ids):
    name = "layers.1.self_attn.compressor.compressed_entries"

    def edit_entry_2(value, hook):
        # Which entries a call closes follows from the positions of its tokens.
        first = int(hook.positions[0, 0]) // 4
        value = value.clone()
        if 0 <= 2 - first < value.shape[1]:
            value[:, 2 - first] = 0.5
        return value

    whole = model.run_with_hooks(ids[:, :24], [(name, edit_entry_2)])
    kv, logits = model.new_kv_cache(3, 24, rewind=0), []
    with model.hooks([(name, edit_entry_2)]):
        for start, end in ((0, 4), (4, 8), (8, 12), (12, 20), (20, 24)):
            logits.append(model(ids[:, start:end], kv_cache=kv))
    assert relative_error(torch.cat(logits, dim=1), whole) <= LIMIT


def test_a_clean_run_on_a_clone_is_clean_after_edits_of_everything(model, ids, kv):
    clone, before = kv.clone(), contents(kv)
    expected = model(ids[:, 11:20], kv_cache=kv.clone())
    writable = [n for n, p in model.hook_dict.items() if not p.read_only and p.dtype != "i"]
    with model.hooks([(n, changed_in_place) for n in writable]):
        model(ids[:, 11:20], kv_cache=kv)
    assert torch.equal(model(ids[:, 11:20], kv_cache=clone), expected)
    kv.truncate(11)
    assert_same(kv, before)
    assert torch.equal(model(ids[:, 11:20], kv_cache=kv), expected)


def test_captured_values_are_no_views_of_the_cache(model, ids):
    """Also where storage is exactly full, so that a slice of it would be all of it."""
    for length in (16, 17, 40):
        kv = model.new_kv_cache(3, length)
        model(ids[:, :9], kv_cache=kv)
        _, cache = model.run_with_cache(ids[:, 9:16], "**", kv_cache=kv)
        storages = {tape.held.untyped_storage().data_ptr() for tape in kv.state.tapes}
        copies = {name: value.clone() for name, value in cache.items()}
        for name, value in cache.items():
            assert value.untyped_storage().data_ptr() not in storages or not value.numel(), name
            if value.is_floating_point():
                value.mul_(3.0)
        kv.truncate(9)
        logits = model(ids[:, 9:16], kv_cache=kv)
        assert relative_error(logits, model(ids[:, :16])[:, 9:]) <= LIMIT
        kv.truncate(5)
        model(ids[:, 20:31], kv_cache=kv)
        for name, value in cache.items():
            expected = copies[name] * 3.0 if value.is_floating_point() else copies[name]
            assert torch.equal(value, expected), name


def test_captured_values_outlive_later_steps(model, ids):
    kv, taken = model.new_kv_cache(3, 40, rewind=0), []
    for start in range(8):
        new = ids[:, 4 * start : 4 * start + 4]
        _, cache = model.run_with_cache(new, "**", kv_cache=kv)
        taken.append((cache, {name: value.clone() for name, value in cache.items()}))
    kv.reset()
    model(ids, kv_cache=kv)
    for cache, copies in taken:
        for name, value in cache.items():
            assert torch.equal(value, copies[name]), name


# Cutting, copying.


def test_truncate_takes_an_int_or_a_length_for_each_row(model, ids, kv):
    kv.truncate(torch.tensor([11, 4, 0]))
    assert kv.length.tolist() == [11, 4, 0]
    kv.truncate(7)
    assert kv.length.tolist() == [7, 4, 0]
    kv.truncate(torch.tensor(5))
    assert kv.length.tolist() == [5, 4, 0]
    kv.truncate((2, 4, 0))
    assert kv.length.tolist() == [2, 4, 0]


@pytest.mark.parametrize(
    ("n", "error", "said"),
    [
        ([5, 5], ValueError, "2 lengths for 3 rows"),
        ([5, 5, 12], ValueError, "row 2 holds 11 tokens and cannot be cut to 12"),
        (-1, ValueError, "cut to -1"),
        ([5, -2, 5], ValueError, "row 1"),
        (True, TypeError, "ints"),
        (5.0, TypeError, "ints|iterable"),
        ([5.0, 5, 5], TypeError, "ints"),
        (torch.tensor([True, True, False]), TypeError, "ints"),
    ],
)
def test_truncate_checks_before_it_cuts(kv, n, error, said):
    with pytest.raises(error, match=said):
        kv.truncate(n)
    assert kv.length.tolist() == [11, 11, 11]


@pytest.mark.parametrize("rewind", [0, 1, 5])
def test_rewind_is_how_far_back_a_row_goes(model, ids, rewind):
    kv = model.new_kv_cache(3, 60, rewind=rewind)
    model(ids, kv_cache=kv)
    for wrong in (39 - rewind, [40, 39 - rewind, 40], 0):
        with pytest.raises(ValueError, match=f"rewind={rewind} it goes back to {40 - rewind}"):
            kv.truncate(wrong)
    assert kv.length.tolist() == [40, 40, 40]
    kv.truncate([40 - rewind, 40, 40 - rewind])
    logits = model(ids[:, :5], kv_cache=kv)
    for r, length in enumerate((40 - rewind, 40, 40 - rewind)):
        whole = model(torch.cat((ids[r, :length], ids[r, :5])))
        assert relative_error(logits[r], whole[0, length:]) <= LIMIT


@pytest.mark.parametrize("rewind", [1, 5])
def test_what_was_dropped_does_not_come_back(model, ids, rewind):
    """Cut as far as it goes and fed one token: the way back is that token, not rewind again."""
    kv = model.new_kv_cache(3, 60, rewind=rewind)
    model(ids, kv_cache=kv)
    kv.truncate(40 - rewind)
    model(ids[:, :1], kv_cache=kv)
    with pytest.raises(ValueError, match=f"goes back to {40 - rewind}"):
        kv.truncate(39 - rewind)
    kv.truncate(40 - rewind)
    logits = model(ids[:, 40 - rewind :], kv_cache=kv)
    assert relative_error(logits, model(ids)[:, 40 - rewind :]) <= LIMIT


def test_entries_of_a_longer_past_do_not_show(model, ids, kv):
    """A row that was cut has fewer entries than its neighbours: what it had is zero again."""
    kv.truncate([11, 3, 0])
    _, cache = model.run_with_cache(ids[:, :2], "layers.1.self_attn.**", kv_cache=kv)
    keys = cache["indexer_keys", 1]
    assert keys.shape[1] == 3
    assert [int(row.abs().sum(-1).bool().sum()) for row in keys] == [3, 1, 0]
    entries = cache["attention_keys", 1][:, 0, -3:]
    assert [int(row.abs().sum(-1).bool().sum()) for row in entries] == [3, 1, 0]


def test_select_and_expand_check_their_rows(kv):
    for wrong in ([3], [-1], [0, 5]):
        with pytest.raises(IndexError, match="a cache of 3 rows"):
            kv.select(wrong)
    for wrong in ([], 1):
        with pytest.raises(ValueError, match="expected a list of rows"):
            kv.select(wrong)
    with pytest.raises(TypeError, match="ints"):
        kv.select(torch.tensor([True, False, True]))
    with pytest.raises(ValueError, match=r"use select\(\[rows"):
        kv.expand(2)
    for wrong in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="expected an int"):
            kv.select([0]).expand(wrong)


def test_rows_selected_in_another_order_and_repeated(model, ids, kv):
    for rows in ([2, 0, 1], [2, 0], [0, 0, 1, 1, 2, 2], torch.tensor([1])):
        chosen = [int(r) for r in rows]
        logits = model(ids[chosen][:, 11:], kv_cache=kv.select(rows))
        assert relative_error(logits, model(ids[chosen])[:, 11:]) <= LIMIT
    assert_goes_on(model, kv, ids)


@pytest.mark.parametrize("rewind", [None, 0, 6])
def test_expanded_rows_share_the_prefix_and_part_where_they_differ(model, ids, rewind):
    row = model.new_kv_cache(1, 60, rewind=rewind)
    model(ids[:1, :34], kv_cache=row)
    before = contents(row)
    many = row.expand(8)
    suffixes = random_ids(model.config, 8, 9, seed=7)
    prefix = ids[:1, :34].expand(8, -1)
    logits = [model(suffixes[:, i : i + 3], kv_cache=many) for i in (0, 3, 6)]
    whole = model(torch.cat((prefix, suffixes), dim=1))
    assert relative_error(torch.cat(logits, dim=1), whole[:, 34:]) <= LIMIT
    assert_same(row, before)
    # Back into the prefix, each row to another place, as far as rewind goes.
    back = [max(0 if rewind is None else 43 - rewind, n) for n in range(30, 38)]
    many.truncate(back)
    again = random_ids(model.config, 8, 5, seed=8)
    logits = model(again, kv_cache=many)
    for r, length in enumerate(back):
        kept = torch.cat((prefix[r], suffixes[r]))[:length]
        assert relative_error(logits[r], model(torch.cat((kept, again[r])))[0, length:]) <= LIMIT
    assert_same(row, before)


def test_expanded_rows_part_inside_the_prefix_and_from_their_source(model, ids):
    """Cut before anything was fed, each row elsewhere; the source is cut and overwritten too."""
    row = model.new_kv_cache(1, 60)
    model(ids[:1, :34], kv_cache=row)
    many, back = row.expand(4), [33, 30, 20, 4]
    row.truncate(3)
    model(ids[1:2, :37], kv_cache=row)
    many.truncate(back)
    suffixes = random_ids(model.config, 4, 9, seed=7)
    logits = model(suffixes, kv_cache=many)
    for r, length in enumerate(back):
        whole = model(torch.cat((ids[0, :length], suffixes[r])))
        assert relative_error(logits[r], whole[0, length:]) <= LIMIT


def test_expand_keeps_one_copy_of_the_prefix():
    config = fault_config()
    model = Dsv4.from_config(config, seed=0).requires_grad_(False)
    row = model.new_kv_cache(1, 4096)
    model(random_ids(config, 1, 3000, seed=1), kv_cache=row, logits_to_keep=1)
    one, many = row.nbytes, row.expand(16)
    assert many.nbytes <= 1.1 * one
    model(random_ids(config, 16, 5, seed=2), kv_cache=many)
    assert many.nbytes <= 1.5 * one
    # Copies of the expanded cache share it as well, and count it each.
    assert many.clone().nbytes <= 1.5 * one


def test_what_was_shared_is_let_go_when_no_row_goes_back_to_it(model):
    row = model.new_kv_cache(1, 400, rewind=60)
    model(random_ids(model.config, 1, 150, seed=1), kv_cache=row)
    many = row.expand(3)

    def shared():
        slots = zip(many._slots, many.state.tapes, strict=True)
        return [tape.shared is not None for slot, tape in slots if not hasattr(slot, "rate")]

    assert all(shared())
    for step in range(4):
        model(random_ids(model.config, 3, 60, seed=step), kv_cache=many)
    assert not any(shared())


def test_a_long_prefix_has_its_entries_copied(monkeypatch, model, ids):
    monkeypatch.setattr("dsv4.slots.SHARED_ENTRIES", 4 * 16)
    assert SHARED_ENTRIES > 4 * 16
    for length, shares in ((16, True), (17, False)):
        row = model.new_kv_cache(1, 60)
        model(ids[:1, :length], kv_cache=row)
        many = row.expand(4)
        entries = many.layers[1].compressor.entries
        assert (many.state.tapes[entries.number].shared is not None) == shares
        logits = model(ids[:1, length:].expand(4, -1), kv_cache=many)
        assert relative_error(logits[3], model(ids[:1])[0, length:]) <= LIMIT


def test_a_copy_and_its_source_do_not_see_each_other(model, ids, kv):
    copies = [kv.clone(), copy.deepcopy(kv), kv.select([0, 1, 2])]
    before = [contents(c) for c in copies]
    kv.truncate(4)
    model(ids[:, 20:35], kv_cache=kv)
    for other, old in zip(copies, before, strict=True):
        assert_same(other, old)
    state = contents(kv)
    for other in copies:
        assert_goes_on(model, other, ids)
    assert_same(kv, state)


def test_reset_and_used_again(model, ids):
    """What an earlier sequence left is not seen, also when the new one is shorter."""
    kv = model.new_kv_cache(3, 40, rewind=0)
    for prompt in (40, 3, 17, 1):
        kv.reset()
        assert kv.length.tolist() == [0, 0, 0]
        assert kv.nbytes == 0
        logits = [model(ids[:, :prompt], kv_cache=kv)]
        logits += [model(ids[:, i : i + 1], kv_cache=kv) for i in range(prompt, min(prompt + 9, 40))]
        whole = torch.cat(logits, dim=1)
        assert relative_error(whole, model(ids[:, : whole.shape[1]])) <= LIMIT


# What it holds.


def test_nbytes_is_what_the_tensors_take(model, ids):
    for rewind in (None, 0, 7):
        kv = model.new_kv_cache(3, 40, rewind=rewind)
        for start in range(0, 40, 8):
            model(ids[:, start : start + 8], kv_cache=kv)
            storages = {t.held.untyped_storage() for t in kv.state.tapes}
            assert kv.nbytes == sum(storage.nbytes() for storage in storages)


def entry_bytes(kv):
    slots = zip(kv._slots, kv.state.tapes, strict=True)
    return sum(tape.nbytes for slot, tape in slots if hasattr(slot, "rate"))


def test_without_rewind_only_entries_grow(model):
    ids = random_ids(model.config, 2, 1500, seed=5)
    kv, rest = model.new_kv_cache(2, 1500, rewind=0), []
    at = 0
    for step in [300, *[1] * 60, 400, *[7] * 40, 200]:
        model(ids[:, at : at + step], kv_cache=kv, logits_to_keep=1)
        at += step
        rest.append(kv.nbytes - entry_bytes(kv))
    window = model.config.sliding_window - 1
    assert max(rest) <= (window + SPARE) / window * rest[0] * 2
    assert rest[-1] <= max(rest[:10])
    entries = 2 * at * (16 + 8) * 4 / 4 * 2 + 2 * at * 16 * 4 / 8
    assert entry_bytes(kv) <= (1 + 1 / SPARE_SHARE) * entries + 2 * 5 * SPARE * 16 * 4


def test_storage_never_exceeds_max_length(model):
    kv = model.new_kv_cache(1, 41)
    ids = random_ids(model.config, 1, 41, seed=5)
    for i in range(41):
        model(ids[:, i : i + 1], kv_cache=kv)
    for slot, tape in zip(kv._slots, kv.state.tapes, strict=True):
        assert tape.held.shape[1] <= 41 // getattr(slot, "rate", 1)


def test_bytes_on_flash_are_those_of_the_docstring():
    """From the widths that a cache of Flash lays out, and from the tensors of a few tokens."""
    config = Dsv4Config.flash()
    kv = KVCache(config)
    assert [config.layer_types.count(kind) for kind in (CSA, HCA, SLIDING)] == [21, 20, 2]
    entries = tokens = constant = 0
    for slot in kv._slots:
        size = slot.width * torch.empty(0, dtype=slot.dtype).element_size()
        if hasattr(slot, "rate"):
            entries += size / slot.rate
        else:
            tokens += size
            constant += size * slot.keep
    said = KVCache.__doc__.replace("\n", " ")
    for number in (f"{entries:,.0f} per token", f"{tokens:,} for each", f"{entries + tokens:,.0f}"):
        assert number in said, number
    assert f"{constant / 1e6:.1f} MB" in said
    assert (entries, tokens) == (6880, 340992)


@pytest.mark.parametrize("rewind", [None, 0, 9])
def test_flash_layout_holds_what_was_computed(rewind):
    """A narrow model with Flash's blocks: bytes per token and row as the widths say."""
    narrow = dict(hidden_size=8, q_lora_rank=8, num_attention_heads=8, o_lora_rank=4)
    narrow |= dict(moe_intermediate_size=4, n_routed_experts=6, vocab_size=32)
    narrow |= dict(index_n_heads=8, num_hidden_layers=6, torch_dtype=torch.float32)
    config = Dsv4Config.flash(**narrow)
    model = Dsv4.from_config(config, seed=0).requires_grad_(False)
    kv = model.new_kv_cache(1, 65536, rewind=rewind)
    model(random_ids(config, 1, 700, seed=0), kv_cache=kv, logits_to_keep=1)
    expected = 0
    for slot in kv._slots:
        size = slot.width * 4
        tokens = 700 if rewind is None else min(700, getattr(slot, "keep", 0) + rewind)
        held = 700 // slot.rate if hasattr(slot, "rate") else tokens
        expected += size * (held + max(SPARE, held // SPARE_SHARE))
    assert kv.nbytes == expected
