"""What run_with_cache keeps: which positions, where, as copies; streaming; memory."""

import gc
import json
import os
import weakref
from pathlib import Path

import numpy
import pytest
import torch
from safetensors import safe_open

from dsv4 import ActivationCache
from dsv4.testing import assert_close
from dsv4.testing_probes import leaf, padded_batch, watched_model, writable

MODEL = watched_model()
IDS, MASK = padded_batch(MODEL.vocab_size)
NAMES = list(MODEL.hook_dict)


def capture(names="**", **keywords):
    with torch.no_grad():
        return MODEL.run_with_cache(IDS, names, attention_mask=MASK, **keywords)


@pytest.fixture(scope="module")
def everything():
    return capture()[1]


def token_axis(name):
    axes = MODEL.hook_dict[name].axes.split()
    return axes.index("s") if "s" in axes else None


# Positions.

COLUMNS = {  # pos -> columns of the two rows: a full one of 19, one of 13 behind 6 columns of padding
    -1: ([18], [18]),
    0: ([0], [6]),
    12: ([12], [18]),
    -13: ([6], [6]),
    numpy.int64(3): ([3], [9]),
    torch.tensor(3): ([3], [9]),
    (3, 5, 3): ([3, 5, 3], [9, 11, 9]),
    (-1, 0): ([18, 0], [18, 6]),
    range(2): ([0, 1], [6, 7]),
    (): ([], []),
}


@pytest.mark.parametrize("pos", COLUMNS, ids=str)
def test_positions_count_real_tokens_of_each_row(pos, everything):
    columns = torch.tensor(COLUMNS[pos]).long()
    given = list(pos) if isinstance(pos, tuple) else pos
    logits, cache = capture(pos=given)
    assert list(cache) == NAMES
    assert torch.equal(cache.positions, everything.positions.gather(1, columns))
    for name, value in cache.items():
        axis = token_axis(name)
        if axis is None:
            assert torch.equal(value, everything[name]), name
            continue
        rows = [everything[name][b].index_select(axis - 1, columns[b]) for b in range(2)]
        expected = torch.stack(rows)
        drops = not isinstance(pos, tuple | range)
        assert torch.equal(value, expected.squeeze(axis) if drops else expected), name
        assert ("s" in cache.axes[name].split()) != drops
        assert value.is_contiguous()
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size()
    assert logits.shape == (2, 19, 64)


@pytest.mark.parametrize(
    ("pos", "rows"),
    [
        (slice(-3, None), ([16, 17, 18], [16, 17, 18])),
        (slice(2, 7), ([2, 3, 4, 5, 6], [8, 9, 10, 11, 12])),
        (slice(0, 12, 5), ([0, 5, 10], [6, 11, 16])),
        (slice(4, 0, -2), ([4, 2], [10, 8])),
        (slice(3, 3), ([], [])),
        (torch.tensor([[0, 18], [12, -1]]), ([0, 18], [18, 18])),
        (torch.tensor([1, -2], dtype=torch.int32), ([1, 17], [7, 17])),
        (numpy.array([[1], [2]]), ([1], [8])),
    ],
    ids=str,
)
def test_slices_and_positions_per_row(pos, rows, everything):
    names = [
        "layers.1.layer_output",
        "layers.1.self_attn.attention_queries",
        "layers.1.self_attn.attention_probabilities",
        "layers.4.mlp.router_logits",
    ]
    _, cache = capture(names, pos=pos)
    for name in names:
        axis = token_axis(name)
        expected = torch.stack([everything[name][b].index_select(axis - 1, torch.tensor(rows[b]).long()) for b in range(2)])
        assert torch.equal(cache[name], expected), name


def test_the_whole_slice_keeps_padding_too(everything):
    _, cache = capture("layers.1.layer_output", pos=slice(None))
    assert torch.equal(cache["layer_output", 1], everything["layer_output", 1])
    assert torch.equal(cache.positions, everything.positions)


@pytest.mark.parametrize(
    ("pos", "error", "said"),
    [
        (13, IndexError, "pos 13 is outside row 1, which has 13 real tokens"),
        (-14, IndexError, "pos -14 is outside row 1"),
        ([0, 19], IndexError, "pos 19 is outside row 0"),
        (slice(None, 15), ValueError, r"keeps \[15, 13\] tokens of rows with \[19, 13\]"),
        (
            torch.zeros(3, 2, dtype=torch.int64),
            ValueError,
            r"pos has shape \[3, 2\]; expected \[n\] or \[2, n\]",
        ),
        (torch.zeros(1, 1, 1, dtype=torch.int64), TypeError, r"shape \[1, 1, 1\]"),
        (True, TypeError, "expected an int, a slice"),
        (1.0, TypeError, "expected an int, a slice"),
        ("last", TypeError, "expected an int, a slice"),
        ([1.5], TypeError, "torch.float32"),
        (torch.ones(19, dtype=torch.bool), TypeError, "torch.bool"),
    ],
    ids=str,
)
def test_wrong_positions(pos, error, said):
    with pytest.raises(error, match=said):
        capture("logits", pos=pos)
    assert MODEL.stage.captures == []


def test_positions_with_logits_to_keep(everything):
    names = ["final_norm_output", "lm_head_output", "logits", "next_token_probs"]
    logits, cache = capture(names, logits_to_keep=3, pos=[-1, -3])
    assert logits.shape == (2, 3, 64)
    torch.testing.assert_close(cache["logits"], everything["logits"][:, [18, 16]])
    assert torch.equal(cache["final_norm_output"], everything["final_norm_output"][:, [18, 16]])
    torch.testing.assert_close(cache["next_token_probs"], everything["next_token_probs"])
    _, cache = capture(names, logits_to_keep=1, pos=12 - 13)
    torch.testing.assert_close(cache["logits"], everything["logits"][:, 18])
    with pytest.raises(IndexError, match="logits_to_keep=3 leaves out"):
        capture("logits", logits_to_keep=3, pos=0)


def test_positions_while_decoding(everything):
    kv = MODEL.new_kv_cache(2)
    name = "layers.1.layer_output"
    with torch.no_grad():
        MODEL(IDS[:, :10], attention_mask=MASK[:, :10], kv_cache=kv)
        _, cache = MODEL.run_with_cache(IDS[:, 10:], name, attention_mask=MASK[:, 10:], kv_cache=kv, pos=[0, -1])
    assert cache.positions.tolist() == [[10, 18], [4, 12]]
    torch.testing.assert_close(cache[name], everything[name][:, [10, 18]], rtol=1e-4, atol=1e-4)


# Where to.


def test_captures_go_to_the_device_asked_and_the_model_stays():
    before = {n: p.device for n, p in MODEL.named_parameters()}
    for pos in (None, -1):
        _, cache = capture(device="meta", pos=pos)
        assert list(cache) == NAMES
        assert all(value.device.type == "meta" for value in cache.values())
        assert cache.positions.device.type == "meta"
    _, cache = capture(device="cpu")
    assert all(value.device.type == "cpu" for value in cache.values())
    assert {n: p.device for n, p in MODEL.named_parameters()} == before
    assert all(value.device.type == "meta" for value in cache.to("meta").values())
    assert all(value.device.type == "cpu" for value in cache.values())


def test_the_default_device_decides_nothing():
    names = ["layers.1.**", "logits", "next_token_probs"]
    expected, cache = capture(names)
    torch.set_default_device("meta")
    try:
        logits, other = capture(names)
        listed = MODEL(IDS.tolist(), attention_mask=MASK.tolist())
        ragged = MODEL([[1, 2, 3], [4]])
        _, last = capture(names, pos=[-1])
        loss = MODEL.loss(IDS[0].tolist())
        with MODEL.steer([0.0] * 32, layers=1):
            MODEL(IDS)
    finally:
        torch.set_default_device(None)
    assert torch.equal(logits, expected)
    assert torch.equal(listed, expected)
    assert {x.device.type for x in (ragged, loss, last["logits"], *other.values())} == {"cpu"}
    assert all(torch.equal(other[name], cache[name]) for name in cache)


# Copies.


def test_captures_are_dense_and_nobody_elses(everything):
    """No memory shared with weights, inputs, results or one another."""
    weights = {t.untyped_storage().data_ptr() for t in [*MODEL.parameters(), *MODEL.buffers()]}
    logits, cache = capture()
    taken = {
        logits.untyped_storage().data_ptr(),
        IDS.untyped_storage().data_ptr(),
        MASK.untyped_storage().data_ptr(),
    }
    for name, value in cache.items():
        assert value.is_contiguous(), name
        assert not value.requires_grad, name
        if value.numel() == 0:
            continue
        place = value.untyped_storage().data_ptr()
        assert place not in weights, name
        assert place not in taken, name
        taken.add(place)
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size(), name


@pytest.mark.parametrize("seq", [1, 2])
def test_tiny_values_are_no_views_of_weights_either(seq):
    """One head, one row, one token: an expanded parameter is then the parameter's own memory."""
    model = watched_model(num_attention_heads=2, o_groups=2, hc_mult=1)
    ids = IDS[:1, :seq].clone()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        logits, cache = model.run_with_cache(ids, "**")
        for value in cache.values():
            value.zero_() if value.dtype.is_floating_point else value.fill_(1)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(ids, IDS[:1, :seq])
    with torch.no_grad():
        assert_close(model(ids), logits, "watched")


def test_captures_are_what_hooks_saw_and_stay_so():
    seen = {}

    def keep(value, hook):
        seen[hook.name] = value.clone()

    def wreck(module, args, out):
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            out.mul_(0.5)

    with torch.no_grad():
        logits = MODEL.run_with_hooks(IDS, [("**", keep)])
        result, cache = MODEL.run_with_cache(IDS, "**")
        assert torch.equal(logits, result)
        # Later runs, decoding, modules that write into what they return, the result written into.
        kv = MODEL.new_kv_cache(2)
        MODEL(IDS, kv_cache=kv)
        for _ in range(5):
            MODEL(IDS[:, :1], kv_cache=kv)
        result.zero_()
        assert all(torch.equal(cache[name], seen[name]) for name in NAMES)
        handles = [m.register_forward_hook(wreck) for m in (*MODEL.layers, MODEL.norm, MODEL.lm_head)]
        MODEL.run_with_hooks(IDS, [("**", keep)])
        _, cache = MODEL.run_with_cache(IDS, "**")
        for handle in handles:
            handle.remove()
        assert all(torch.equal(cache[name], seen[name]) for name in NAMES)


def test_earlier_captures_do_not_feel_later_edits(everything):
    """An edit anywhere leaves every value before it as it was."""

    def wreck(value, hook):
        value.zero_()

    for name in NAMES[7::11]:
        if name not in writable(MODEL):
            continue
        with MODEL.hooks([(name, wreck)]):
            _, cache = capture()
        for earlier in NAMES[: NAMES.index(name)]:
            if {leaf(name), leaf(earlier)} != {"attention_keys", "attention_values"}:
                assert torch.equal(cache[earlier], everything[earlier]), (name, earlier)


def test_writing_into_a_cache_of_decoding_leaves_the_kv_cache():
    kv, other = MODEL.new_kv_cache(2), MODEL.new_kv_cache(2)
    with torch.no_grad():
        _, cache = MODEL.run_with_cache(IDS[:, :9], "**", kv_cache=kv)
        MODEL(IDS[:, :9], kv_cache=other)
        for value in cache.values():
            value.fill_(1)
        assert torch.equal(MODEL(IDS[:, 9:], kv_cache=kv), MODEL(IDS[:, 9:], kv_cache=other))


def test_values_of_a_run_in_inference_mode_can_be_trained_on():
    with torch.inference_mode():
        _, cache = MODEL.run_with_cache(IDS, "**")
        _, last = MODEL.run_with_cache(IDS, "**", pos=-1)
    assert not any(value.is_inference() for value in (*cache.values(), *last.values()))
    weight = torch.randn(32, requires_grad=True)
    (cache["layer_output", 3] * weight).sum().backward()
    name = "layers.3.layer_output"
    MODEL.run_with_hooks(IDS, [(name, lambda v, hook: cache[name])]).sum().backward()
    MODEL.zero_grad()


def test_detach_false_keeps_the_graph():
    logits, cache = MODEL.run_with_cache(IDS, "**", attention_mask=MASK, detach=False)
    assert logits is cache["logits"]
    names = [n for n in NAMES if MODEL.hook_dict[n].dtype != "i"]
    grads = torch.autograd.grad(logits.square().sum(), [cache[n] for n in names], allow_unused=True, retain_graph=True)
    without = {leaf(n) for n, g in zip(names, grads, strict=True) if g is None}
    # What decides, and what nothing reads: no gradient comes back to it.
    indexer = {n for n in map(leaf, NAMES) if n.startswith("indexer_")} - {"indexer_selection"}
    assert without == indexer | {
        "router_selection_scores",
        "attention_sink_probability",
        "next_token_probs",
    }
    assert all(g.isfinite().all() for g in grads if g is not None)
    assert all(cache[n].is_contiguous() for n in NAMES)
    assert all(cache[n].requires_grad for n in names)
    # They depend on the weights all the same.
    loss = sum(cache[n].masked_fill(cache[n].isinf(), 0).square().sum() for n in names)
    loss.backward()
    assert [n for n, p in MODEL.named_parameters() if p.grad is None] == []
    MODEL.zero_grad()


def test_hooked_gradients_are_those_of_kept_values():
    names = [n for n in NAMES if MODEL.hook_dict[n].dtype != "i"]
    seen = {}
    logits = MODEL.run_with_hooks(IDS, bwd_hooks=[(names, lambda g, hook: seen.update({hook.name: g}))])
    logits.square().sum().backward()
    logits, cache = MODEL.run_with_cache(IDS, names, detach=False)
    grads = torch.autograd.grad(logits.square().sum(), [cache[n] for n in names], allow_unused=True)
    expected = {n: g for n, g in zip(names, grads, strict=True) if g is not None}
    assert set(seen) == set(expected)
    for name, grad in expected.items():
        assert (seen[name] - grad).abs().max() <= 1e-4 * grad.abs().max(), name
    MODEL.zero_grad()


@pytest.mark.parametrize("layers", [(None, 4), pytest.param((0, 1, 2, 3, 5), marks=pytest.mark.slow)])
def test_gradients_are_the_slopes(layers):
    """In float64: the gradient at each point against the difference of two runs with the value moved."""
    model = watched_model(torch.float64)
    weights = torch.randn(2, 19, 64, dtype=torch.float64) * MASK.unsqueeze(-1)
    names = [n for n in writable(model) if model.hook_dict[n].layer in layers and model.hook_dict[n].dtype != "i"]

    def score(logits):
        return (logits * weights).sum()

    logits, cache = model.run_with_cache(IDS, names, attention_mask=MASK, detach=False)
    grads = torch.autograd.grad(score(logits), [cache[n] for n in names], allow_unused=True)
    for name, grad in zip(names, grads, strict=True):
        if grad is None:
            continue
        value = cache[name].detach()
        step = torch.randn_like(value).masked_fill(value.isinf(), 0) * 1e-6
        with torch.no_grad():
            up, down = (
                score(model.run_with_hooks(IDS, [(name, lambda v, hook, moved=moved: moved)], attention_mask=MASK))
                for moved in (value + step, value - step)
            )
        slope, expected = float(up - down) / 2e-6, float((grad * step).sum()) / 1e-6
        assert abs(slope - expected) <= 1e-4 * max(abs(expected), 1e-2), name


# To disk.


def test_streaming_to_a_file(tmp_path, everything):
    path = tmp_path / "sub" / "acts.safetensors"
    _, cache = capture(to=path)
    assert isinstance(cache, ActivationCache)
    assert list(cache) == NAMES
    assert os.listdir(path.parent) == ["acts.safetensors"]
    for name in NAMES:
        assert torch.equal(cache[name], everything[name]), name
        assert cache[name].dtype == everything[name].dtype
    assert torch.equal(cache.positions, everything.positions)
    assert cache.axes == everything.axes
    # Any reader of safetensors sees names as keys, and layouts in the metadata.
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == {*NAMES, "dsv4.positions"}
        about = json.loads(file.metadata()["dsv4"])
    assert about["layouts"]["layers.1.layer_output"] == "Streams"
    assert about["axes"]["layers.1.layer_output"] == "b s n hidden"
    assert set(about["layouts"]) == set(NAMES)
    with pytest.raises(FileExistsError, match="never overwritten"):
        capture(to=path)
    with pytest.raises(FileExistsError, match="never overwritten"):
        capture(to=str(path.parent))
    assert (path.stat().st_mode & 0o777) == (0o666 & ~current_umask())


def current_umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_streaming_slices_moves_and_bfloat16(tmp_path):
    model = watched_model(torch.bfloat16)
    with torch.no_grad():
        _, expected = model.run_with_cache(IDS, "**", pos=-1)
        _, cache = model.run_with_cache(IDS, "**", pos=-1, to=tmp_path / "a")
    assert all(torch.equal(cache[n], expected[n]) for n in NAMES)
    assert cache.axes == expected.axes
    with torch.no_grad():
        _, cache = model.run_with_cache(IDS[:, :2], "**", to=tmp_path / "b")
    assert cache["compressed_entries", 1].shape == (2, 0, 16)
    with pytest.raises(ValueError, match="cannot keep their graph"):
        MODEL.run_with_cache(IDS, to=tmp_path / "c", detach=False)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_crash_leaves_no_file(tmp_path, error):
    def crash(value, hook):
        raise error("stop")

    with pytest.raises(error), MODEL.hooks([("layers.3.layer_output", crash)]):
        capture(to=tmp_path / "acts")
    with pytest.raises(ValueError, match="outside the vocabulary"):
        MODEL.run_with_cache(IDS + 64, to=tmp_path / "acts")
    with pytest.raises(KeyError):
        MODEL.run_with_cache(IDS, "nothing", to=tmp_path / "acts")
    assert os.listdir(tmp_path) == []


def test_a_file_that_appears_meanwhile_is_not_overwritten(tmp_path):
    path = tmp_path / "acts"

    def appear(value, hook):
        path.write_text("mine")

    with pytest.raises(FileExistsError), MODEL.hooks([("logits", appear)]):
        capture("logits", to=path)
    assert path.read_text() == "mine"
    assert os.listdir(tmp_path) == ["acts"]


def test_streaming_holds_one_value_at_a_time(tmp_path, monkeypatch):
    """Each value is dead by the time the next block has been captured."""
    from dsv4.activation_cache import StreamWriter

    alive, most = [], []
    write = StreamWriter.write

    def watched(self, name, value):
        alive.append(weakref.ref(value))
        most.append(sum(ref() is not None for ref in alive))
        write(self, name, value)

    monkeypatch.setattr(StreamWriter, "write", watched)
    capture(to=tmp_path / "acts")
    # The positions are written too.
    assert len(alive) == len(NAMES) + 1
    assert max(most) == 1


# Memory.


@pytest.mark.parametrize("grad", [False, True])
def test_fifty_runs_leave_what_one_leaves(grad):
    """Dropped values die at once, without the garbage collector."""

    def tensors():
        return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())

    gc.collect()
    gc.disable()
    counts = []
    try:
        for i in range(50):
            with torch.set_grad_enabled(grad):
                names = ["layers.*.layer_output", "layers.1.self_attn.attention_keys"]
                logits, cache = MODEL.run_with_cache(IDS[:, :4], names, detach=not (grad and i % 2))
                refs = [weakref.ref(value) for value in cache.values()]
                del logits, cache
            assert [ref() for ref in refs] == [None] * 7
            if i % 7 == 1:
                counts.append(tensors())
    finally:
        gc.enable()
    assert max(counts) == counts[0]


def test_nothing_lives_on_after_an_exception():
    refs = []

    def stop(value, hook):
        refs.append(weakref.ref(value))
        raise KeyboardInterrupt

    def attempt():
        with MODEL.hooks([("layers.2.layer_output", stop)]):
            MODEL.run_with_cache(IDS, "**")

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            attempt()
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3
    assert not any(point.live for point in MODEL.hook_dict.values())


def test_a_sliced_capture_holds_its_own_bytes_only():
    _, cache = capture("layers.*.layer_output", pos=-1)
    for value in cache.values():
        assert value.untyped_storage().nbytes() == 2 * 4 * 32 * 4


def test_nothing_is_captured_where_nothing_is_asked():
    logits, cache = capture([])
    assert len(cache) == 0
    assert cache.names == []
    assert torch.equal(logits, MODEL(IDS, attention_mask=MASK))


@pytest.mark.parametrize("seq", [1, 2, 3, 4, 7, 8, 9])
def test_prompts_without_entries(seq):
    """Zero entries are an empty tensor, not a missing one."""
    with torch.no_grad():
        logits, cache = MODEL.run_with_cache(IDS[:1, :seq], "**")
        torch.testing.assert_close(logits, MODEL(IDS[:1, :seq]), rtol=1e-5, atol=1e-5)
    assert list(cache) == NAMES
    for layer, rate in ((1, 4), (2, 8)):
        assert cache["compressed_entries", layer].shape == (1, seq // rate, 16)
        assert cache["attention_keys", layer].shape == (1, 1, seq + seq // rate, 16)
    assert cache["indexer_selection", 1].shape == (1, seq, min(2, seq // 4))


def test_all_padding_rows_are_finite_and_a_position_in_one_is_refused():
    mask = MASK.clone()
    mask[0] = 0
    with torch.no_grad():
        logits, cache = MODEL.run_with_cache(IDS, "**", attention_mask=mask)
        assert logits.isfinite().all()
        for name, value in cache.items():
            assert not value.isnan().any(), name
        with pytest.raises(IndexError, match="row 0, which has 0 real tokens"):
            MODEL.run_with_cache(IDS, "logits", attention_mask=mask, pos=-1)


def test_the_cache_folder_of_a_path_object(tmp_path: Path):
    capture("logits", to=tmp_path / "x.safetensors")
    loaded = ActivationCache.load(tmp_path / "x.safetensors")
    assert torch.equal(loaded["logits"], capture("logits")[1]["logits"])
