"""HookPoint semantics: what a hook function may do at every point, in which order, and what is left behind."""

import copy
import functools
import pickle
import threading
import warnings
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from dsv4 import HookPoint
from dsv4.kernels import hyper_connection, norm_rotary
from dsv4.linear import Linear
from dsv4.norm import RMSNorm, UnweightedRMSNorm
from dsv4.testing import assert_close
from dsv4.testing_probes import (
    calls_counted,
    changed,
    leaf,
    names_of,
    padded_batch,
    spelled,
    watched_model,
    writable,
)

MODEL = watched_model()
IDS, MASK = padded_batch(MODEL.vocab_size)
REAL = MASK.bool()
LAYERS = [None, *range(MODEL.num_layers)]
ALIASES = ("attention_keys", "attention_values")
OUTPUT = "layers.4.self_attn.attention_output"
PLAIN = (Linear, RMSNorm, UnweightedRMSNorm)


def run(hooks=(), **more):
    return MODEL.run_with_hooks(IDS, list(hooks), attention_mask=MASK, **more)


@pytest.fixture(scope="module")
def plain():
    with torch.no_grad():
        return MODEL(IDS, attention_mask=MASK)


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    assert MODEL.list_hooks() == []
    assert not any(point.live for point in MODEL.hook_dict.values())
    assert spelled(MODEL) == []


def nothing(value, hook):
    return None


def in_place(write):
    """A hook function that writes and returns nothing."""

    def hook_function(value, hook):
        write(value)

    return hook_function


# At every point.


@pytest.mark.parametrize("layer", [None, 0, 4, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2, 3, 5))])
def test_writing_in_place_is_returning(layer):
    """At every point, with and without autograd, in inference mode, and through .data, which leaves no trace in the version."""
    modes = [torch.no_grad, torch.enable_grad, torch.inference_mode]
    for i, name in enumerate(n for n in names_of(MODEL, layer) if n in writable(MODEL)):
        if leaf(name) in ALIASES:
            continue

        def written(value, hook):
            value.copy_(changed(value.clone(), hook))

        def through_data(value, hook):
            value.data.copy_(changed(value.clone(), hook))

        with modes[i % 3]():
            returned = run([(name, changed)])
        with modes[(i + 1) % 3]():
            assert torch.equal(run([(name, written)]), returned), name
        with torch.no_grad():
            assert torch.equal(run([(name, through_data)]), returned), name


@pytest.mark.parametrize("layer", [1, 5])
def test_keys_and_values_are_one_tensor_until_one_is_replaced(layer, plain):
    keys, values = (f"layers.{layer}.self_attn.{name}" for name in ALIASES)
    seen = {}

    def double(value, hook):
        value.mul_(2)

    def look(value, hook):
        seen[hook.name] = value

    with torch.no_grad():
        _, before = MODEL.run_with_cache(IDS, [keys, values], attention_mask=MASK)
        assert torch.equal(before[keys], before[values])
        in_keys = run([(keys, double)])
        assert torch.equal(in_keys, run([(values, double)]))
        assert torch.equal(in_keys, run([(keys, lambda v, hook: 2 * v), (values, lambda v, hook: 2 * v)]))
        assert not torch.equal(in_keys, run([(keys, lambda v, hook: 2 * v)]))
        assert not torch.equal(in_keys, run([(values, lambda v, hook: 2 * v)]))
        run([(keys, look), (values, look)])
        assert seen[keys] is seen[values]
        with MODEL.hooks([(values, double)]):
            _, after = MODEL.run_with_cache(IDS, [keys, values], attention_mask=MASK)
        assert torch.equal(after[keys], 2 * before[keys])
        assert torch.equal(after[values], 2 * before[keys])
        # Once the keys are another tensor, values written in place are not seen in them.
        with MODEL.hooks([(keys, lambda v, hook: v + 0), (values, double)]):
            _, apart = MODEL.run_with_cache(IDS, [keys, values], attention_mask=MASK)
        assert torch.equal(apart[keys], before[keys])
        assert torch.equal(apart[values], 2 * before[keys])
        # Neither is a view of what they were made from.
        unrotated = f"layers.{layer}.self_attn.attention_keys_unrotated"
        with MODEL.hooks([(keys, double)]):
            _, cache = MODEL.run_with_cache(IDS, unrotated, attention_mask=MASK)
        _, plain_cache = MODEL.run_with_cache(IDS, unrotated, attention_mask=MASK)
        assert torch.equal(cache[unrotated], plain_cache[unrotated])


def test_gradients_of_keys_and_values_are_apart():
    keys, values = (f"layers.4.self_attn.{name}" for name in ALIASES)
    grads = {}

    def keep(grad, hook):
        grads[hook.name] = grad.clone()

    def halve(value, hook):
        value.mul_(0.5)

    for hooks in ([], [(values, halve)], [(keys, halve)]):
        logits = run(hooks, bwd_hooks=[([keys, values], keep)])
        logits[REAL].square().sum().backward()
        with MODEL.hooks(hooks):
            logits, cache = MODEL.run_with_cache(IDS, [keys, values], attention_mask=MASK, detach=False)
        expected = torch.autograd.grad(logits[REAL].square().sum(), [cache[keys], cache[values]])
        torch.testing.assert_close([grads[keys], grads[values]], list(expected))
        assert not torch.allclose(*expected)
    MODEL.zero_grad()


@pytest.mark.parametrize("layer", LAYERS)
def test_a_read_only_point_refuses(layer):
    def writes(value, hook):
        value.zero_()

    def writes_data(value, hook):
        value.data.fill_(7)

    def returns(value, hook):
        return value

    for name in names_of(MODEL, layer):
        if name in writable(MODEL):
            continue
        for fn in (writes, writes_data, returns, changed, torch.zeros_like):
            for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
                with mode(), pytest.raises(ValueError, match=f"{name} is read-only"):
                    run([(name, fn)])
        with torch.inference_mode():
            run([(name, nothing)])
        run([(name, nothing)])
        point = MODEL.hook_dict[name]
        theirs = point.register_forward_hook(lambda module, args, out: out + 1)
        with pytest.raises(ValueError, match="read-only"):
            MODEL(IDS, attention_mask=MASK)
        theirs.remove()


def test_every_point_tells_what_it_is():
    seen = []

    def look(value, hook):
        seen.append(hook.name)
        assert isinstance(hook, HookPoint)
        assert hook is MODEL.hook_dict[hook.name]
        assert MODEL.get_submodule(hook.name) is hook
        assert (hook.layout, hook.axes) == (
            MODEL.support()[hook.name].layout,
            MODEL.support()[hook.name].axes,
        )
        assert value.dim() == len(hook.axes.split())
        assert hook.step == 0
        assert hook.positions.tolist() == [list(range(19)), [-1] * 6 + list(range(13))]
        assert torch.equal(hook.valid, REAL)
        assert hook.description
        assert hook.layer == (int(hook.name.split(".")[1]) if hook.name.startswith("layers.") else None)

    run([("**", look)])
    # Each exactly once, in the order of hook_dict.
    assert seen == list(MODEL.hook_dict)
    assert MODEL.hook_dict["logits"].positions is None


def test_positions_of_the_logits_kept():
    found = {}

    def look(value, hook):
        found[hook.name] = hook.positions
        assert hook.positions.shape == value.shape[:2]

    run([(["readout", "lm_head_output", "logits"], look)], logits_to_keep=2)
    assert found["logits"].tolist() == [[17, 18], [11, 12]]
    assert found["readout"].shape == (2, 19)


# Order and composition.


def test_hooks_run_in_the_order_added_and_prepend_goes_first():
    point, order, seen = MODEL.layers[4].self_attn.attention_output, [], []

    def named(tag, fn):
        def hook_function(value, hook):
            order.append(tag)
            return fn(value)

        return hook_function

    handles = [
        point.add_hook(named("add", lambda v: v + 1)),
        point.add_hook(named("look", lambda v: seen.append(v.clone()))),
        point.add_hook(named("double", lambda v: v * 2)),
        point.add_hook(named("zero", lambda v: v * 0), prepend=True),
    ]
    _, cache = MODEL.run_with_cache(IDS, OUTPUT, attention_mask=MASK)
    assert order == ["zero", "add", "look", "double"]
    # None is "as received", and the capture comes last.
    assert torch.equal(seen[0], torch.ones_like(seen[0]))
    assert torch.equal(cache[OUTPUT], torch.full_like(seen[0], 2.0))
    for handle in handles:
        handle.remove()
    order.clear()
    with MODEL.hooks(
        [
            (OUTPUT, named("a", lambda v: v)),
            ("layers.*.self_attn.attention_output", named("b", lambda v: v)),
        ]
    ):
        handle = MODEL.add_hook(OUTPUT, named("c", lambda v: None), prepend=True)
        MODEL(IDS)
        handle.remove()
    assert order == [*"bbbb", *"cab", "b"]


def test_a_later_hook_that_writes_in_place_does_not_reach_the_tensor_returned_before():
    mine = torch.randn(2, 19, MODEL.hidden_size)
    before = mine.clone()
    expanded = torch.zeros(1, 1, MODEL.hidden_size).expand(2, 19, -1)
    with torch.no_grad():
        run([(OUTPUT, lambda v, hook: mine), (OUTPUT, in_place(lambda v: v.mul_(0)))])
        assert torch.equal(mine, before)
        run([(OUTPUT, lambda v, hook: expanded), (OUTPUT, in_place(lambda v: v[:, 0].add_(1)))])
        assert torch.equal(expanded, torch.zeros_like(expanded))


def test_weights_are_as_before_after_any_edit(plain):
    """Each edit three times with the same result, and nothing of the model has moved."""
    before = {k: v.clone() for k, v in MODEL.state_dict().items()}
    tables = {k: v.clone() for k, v in MODEL.named_buffers()}

    def wreck(value, hook):
        value.zero_()

    names = [n for n in writable(MODEL) if leaf(n) not in ("expert_indices", "indexer_selection")]
    with torch.no_grad():
        first = run([(names, wreck)])
        assert torch.equal(run([(names, wreck)]), first)
        assert torch.equal(run([(names, wreck)]), first)
        assert torch.equal(MODEL(IDS, attention_mask=MASK), plain)
    for key, value in MODEL.state_dict().items():
        assert torch.equal(value, before[key]), key
    for key, value in MODEL.named_buffers():
        assert torch.equal(value, tables[key]), key


def test_one_row_and_position_only():
    """Slots are [b, s, ...]: an edit lands where it is asked, and reaches no other row and no earlier position."""
    for name in ("expert_weights", "expert_outputs", "expert_neurons", "expert_indices"):

        def edit(value, hook):
            value[0, 5] = changed(value, hook)[0, 5]

        with torch.no_grad():
            logits = run([(f"layers.4.mlp.{name}", edit)])
            expected = run()
        assert torch.equal(logits[1], expected[1])
        assert torch.equal(logits[0, :5], expected[0, :5])
        assert not torch.equal(logits[0, 5], expected[0, 5])


def test_one_head_at_some_positions():
    name = "layers.1.self_attn.attention_head_outputs"
    positions = [7, 3, 7, -1]

    def zero(value, hook):
        value[0, positions, 2] = 0

    low_rank = "layers.1.self_attn.attention_low_rank_output"
    with torch.no_grad():
        _, before = MODEL.run_with_cache(IDS, [name, low_rank])
        with MODEL.hooks([(name, zero)]):
            _, after = MODEL.run_with_cache(IDS, [name, low_rank])
    touched = torch.zeros(2, 19, MODEL.num_heads, dtype=torch.bool)
    touched[0, positions, 2] = True
    assert torch.equal(after[name], before[name].masked_fill(touched.unsqueeze(-1), 0))
    moved = after[low_rank] != before[low_rank]
    # Two groups of two heads: head 2 enters the second.
    assert not moved[:, :, 0].any()
    assert moved[0, [3, 7, 18], 1].all()


# What is written where a choice is made, or where there is nothing.

SELECTION = "layers.1.self_attn.compressor.indexer.indexer_selection"
SCORES = "layers.1.self_attn.compressor.indexer.indexer_scores"


def test_a_written_selection_is_a_set():
    with torch.no_grad():
        expected, cache = MODEL.run_with_cache(IDS, SELECTION, attention_mask=MASK)
        chosen = cache[SELECTION]

        def written(selection):
            return run([(SELECTION, lambda v, hook: selection)])

        assert torch.equal(written(chosen.flip(-1)), expected)
        assert torch.equal(written(chosen.int()), expected)
        first = torch.stack((chosen[..., 0], torch.full_like(chosen[..., 0], -1)), dim=-1)
        only_first = written(first)
        assert torch.equal(written(first.flip(-1)), only_first)
        assert torch.equal(written(chosen[..., :1].expand(-1, -1, 2)), only_first)
        assert not torch.equal(only_first, expected)
        none = written(torch.full_like(chosen, -1))
        # A query without entries sees the window alone.
        with MODEL.hooks([(SELECTION, lambda v, hook: torch.full_like(v, -1))]):
            _, cache = MODEL.run_with_cache(IDS, "layers.1.self_attn.attention_probabilities", attention_mask=MASK)
        assert cache["attention_probabilities", 1][..., 19:].abs().max() == 0
        assert torch.equal(none, run([(SCORES, lambda v, hook: v - float("inf"))]))
        for entry, said in (
            (4, "numbered from 0"),
            (-2, r"\[0, 3, 0\] = -2"),
            (3, r"\[0, 3, 0\] = 3: that query may keep 1 of 4 entries"),
        ):
            wrong = chosen.clone()
            wrong[0, 3, 0] = entry
            with pytest.raises(ValueError, match=said):
                written(wrong)
        with pytest.raises(ValueError, match="returned shape"):
            written(chosen[..., :1])
        # What stands at padding says nothing.
        at_padding = chosen.masked_fill(~REAL.unsqueeze(-1), 99)
        assert torch.equal(written(at_padding)[REAL], expected[REAL])


def test_written_index_scores():
    with torch.no_grad():
        _, cache = MODEL.run_with_cache(IDS, [SCORES, SELECTION], attention_mask=MASK)
        scores = cache[SCORES]
        # The causal rule is applied again behind the point.
        open_all = run([(SCORES, lambda v, hook: v.masked_fill(v.isinf(), 1e9))])
        assert torch.equal(open_all, run())
        # Equal scores go to the lowest entry, -0.0 with 0.0.
        for tie in (torch.zeros_like(scores), -torch.zeros_like(scores)):
            with MODEL.hooks([(SCORES, lambda v, hook, tie=tie: tie)]):
                _, cache = MODEL.run_with_cache(IDS, SELECTION)
            assert cache[SELECTION][0, -1].tolist() == [0, 1]

        def not_a_number(value, hook):
            value[0, -1, 0] = float("nan")

        with pytest.raises(ValueError, match=f"{SCORES} holds NaN"):
            run([(SCORES, not_a_number)])

        def infinite(value, hook):
            value[0, -1, 2] = float("inf")

        with MODEL.hooks([(SCORES, infinite)]):
            _, cache = MODEL.run_with_cache(IDS, SELECTION)
        assert cache[SELECTION][0, -1, 0] == 2


@pytest.mark.parametrize("name", ["compressed_entries", "compressor_gates"])
def test_edits_where_a_row_closes_no_entry_are_ignored(name):
    """The second row closes one entry fewer; what is written there reaches nothing, whatever it is."""
    for layer in (1, 2):

        def spoil(value, hook):
            value[1, -1] = float("nan")

        with torch.no_grad():
            logits = run([(f"layers.{layer}.self_attn.compressor.{name}", spoil)])
            assert torch.equal(logits, run())


# What may be returned.


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda v: v[:, :-1], ValueError, r"returned shape \[2, 18, 32\]; expected \[2, 19, 32\] \[b s hidden\]"),
        (lambda v: v.unsqueeze(0), ValueError, r"returned shape \[1, 2, 19, 32\]"),
        (lambda v: v.to("meta"), ValueError, "on meta; the value is on cpu"),
        (lambda v: v.long(), TypeError, "dtype torch.int64; the value is torch.float32"),
        (lambda v: v.bool(), TypeError, "dtype torch.bool"),
        (lambda v: v.to(torch.complex64), TypeError, "dtype torch.complex64"),
        (lambda v: v.tolist(), TypeError, "returned list; expected a Tensor"),
        (lambda v: v.numpy(), TypeError, "returned ndarray"),
        (lambda v: 0.0, TypeError, "returned float"),
        (lambda v: (v,), TypeError, "returned tuple"),
        (in_place(lambda v: v.resize_(1, 1)), ValueError, r"resized the value in place from \[2, 19, 32\] to \[1, 1\]"),
    ],
)  # fmt: skip
def test_what_is_not_accepted(make, error, said, plain):
    with torch.no_grad():
        with pytest.raises(error, match=said) as caught:
            run([(OUTPUT, make)])
        assert OUTPUT in str(caught.value)
        assert torch.equal(MODEL(IDS, attention_mask=MASK), plain)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_floating_dtype_is_cast_back(dtype):
    for name in (
        OUTPUT,
        "layers.1.self_attn.attention_scores",
        "logits",
        "layers.0.mlp.expert_weights",
    ):
        with torch.no_grad():
            with MODEL.hooks([(name, lambda v, hook: v.to(dtype))]):
                logits, cache = MODEL.run_with_cache(IDS, name)
            assert cache[name].dtype == torch.float32
            assert torch.equal(logits, MODEL.run_with_hooks(IDS, [(name, lambda v, hook: v.to(dtype).float())]))


def test_integers_only_if_they_fit():
    name = "layers.4.mlp.expert_indices"
    with torch.no_grad():
        expected = run([(name, changed)])
        for dtype in (torch.int32, torch.int16, torch.uint8, torch.uint64):
            assert torch.equal(run([(name, lambda v, hook, to=dtype: changed(v, hook).to(to))]), expected)
        huge = torch.full((2, 19, 2), 2**64 - 1, dtype=torch.uint64)
        with pytest.raises(ValueError, match=r"torch.uint64 values that do not fit torch.int64"):
            run([(name, lambda v, hook: huge)])
        for dtype in (torch.float32, torch.bool):
            with pytest.raises(TypeError, match=f"returned dtype {dtype}; the value is torch.int64"):
                run([(name, lambda v, hook, to=dtype: v.to(to))])
        for wrong in (-1, MODEL.num_experts):
            with pytest.raises(ValueError, match=f"{name} was given expert {wrong}; expected 0 <= id < 8"):
                run([(name, lambda v, hook, wrong=wrong: torch.full_like(v, wrong))])


class Keyword:
    def __call__(self, value, *, hook):
        assert hook.name == OUTPUT
        return value * 0


class Sae(nn.Module):
    def forward(self, value):
        return value * 0


def with_option(value, factor=0.0):
    return value * factor


def with_arguments(*args):
    assert args[1].name == OUTPUT
    return args[0] * 0


def with_keywords(value, **keywords):
    assert keywords["hook"].name == OUTPUT
    return value * 0


def keyword_only(value, *, hook):
    return value * 0


def default_hook(value, hook=None):
    assert hook.name == OUTPUT
    return value * 0


def positional(value, point, /):
    assert point.name == OUTPUT
    return value * 0


FORMS = [
    *(Keyword(), Sae(), with_option, with_arguments, with_keywords, keyword_only, default_hook),
    *(positional, torch.zeros_like, lambda value: value * 0, lambda v, h: v * 0),
    *(functools.partial(with_option, factor=0.0), functools.partial(torch.mul, other=0)),
]


@pytest.mark.parametrize("fn", FORMS, ids=lambda fn: getattr(fn, "__name__", type(fn).__name__))
def test_forms_of_hook_functions(fn):
    with torch.no_grad():
        assert torch.equal(run([(OUTPUT, fn)]), run([(OUTPUT, lambda value, hook: torch.zeros_like(value))]))


def test_what_is_no_hook_function():
    for wrong in (None, 3, "zero", torch.zeros(1)):
        with pytest.raises(TypeError, match="expected a function"):
            MODEL.add_hook(OUTPUT, wrong)
    for wrong in (lambda: None, lambda a, b, c: None, lambda *, hook: None):
        with pytest.raises(TypeError, match=r"expected fn\(value, hook\)"):
            MODEL.add_hook(OUTPUT, wrong)
    with pytest.raises(ValueError, match='expected "fwd" or "bwd"'):
        MODEL.add_hook(OUTPUT, nothing, dir="forward")
    for pairs in ([OUTPUT], [(OUTPUT,)], [(OUTPUT, nothing, "fwd")], OUTPUT):
        with pytest.raises(TypeError, match="pairs"):
            run(pairs if isinstance(pairs, list) else [pairs])


# Gradients.


def test_gradient_hooks_see_replace_and_write():
    weights = torch.randn(2, 19, MODEL.vocab_size)
    name, seen = "layers.2.layer_output", []

    def gradients(hook_function):
        MODEL.zero_grad()
        logits = MODEL.run_with_hooks(IDS, bwd_hooks=[(name, hook_function)] if hook_function else [])
        (logits * weights).sum().backward()
        return {n: p.grad.clone() for n, p in MODEL.named_parameters() if p.grad is not None}

    plain = gradients(None)
    looked = gradients(lambda grad, hook: seen.append((hook.name, hook.positions.tolist(), grad.clone())))
    assert seen[0][:2] == (name, [list(range(19))] * 2)
    for key in plain:
        torch.testing.assert_close(looked[key], plain[key], rtol=1e-5, atol=1e-6)
    for zero in (
        lambda grad, hook: torch.zeros_like(grad),
        in_place(lambda grad: grad.mul_(0)),
        torch.zeros_like,
    ):
        stopped = gradients(zero)
        for key, value in stopped.items():
            early = key.startswith(("embed_tokens", "layers.0.", "layers.1.", "layers.2."))
            assert torch.equal(value, torch.zeros_like(value) if early else looked[key]), key
    doubled = gradients(lambda grad, hook: 2 * grad.double())
    torch.testing.assert_close(doubled["embed_tokens.weight"], 2 * looked["embed_tokens.weight"])
    MODEL.zero_grad()


def test_gradient_hooks_compose_in_order():
    order = []

    def named(tag, fn):
        def hook_function(grad, hook):
            order.append(tag)
            return fn(grad)

        return hook_function

    point = MODEL.layers[3].layer_mid
    handles = [
        point.add_hook(named("one", torch.ones_like), dir="bwd"),
        point.add_hook(named("look", lambda g: order.append(float(g.mean()))), dir="bwd"),
        point.add_hook(named("first", lambda g: g * 0), dir="bwd", prepend=True),
    ]
    MODEL(IDS).sum().backward()
    assert order == ["first", "one", "look", 1.0]
    for handle in handles:
        handle.remove()
    MODEL.zero_grad()


def test_gradient_hooks_belong_to_the_graphs_made_while_attached():
    fired = []

    def count(grad, hook):
        fired.append(hook.name)

    with MODEL.hooks(bwd_hooks=[("layers.1.layer_output", count)]):
        inside = MODEL(IDS)
        point = MODEL.layers[1].layer_output
        assert len(point._gradient_hooks) == 1
    inside.sum().backward()
    assert fired == ["layers.1.layer_output"]
    MODEL(IDS).sum().backward()
    assert len(fired) == 1
    # A hook added after the forward does not act on it.
    outside = MODEL(IDS)
    with MODEL.hooks(bwd_hooks=[("layers.1.layer_output", count)]):
        outside.sum().backward()
    assert len(fired) == 1
    for _ in range(20):
        with MODEL.hooks([(OUTPUT, nothing)], [("layers.1.layer_output", count)]):
            pass
    assert all(not point.handles() for point in MODEL.hook_dict.values())
    assert MODEL.stage.handles == {}
    MODEL.zero_grad()


def test_gradients_twice_over_one_forward():
    seen = []
    logits = MODEL.run_with_hooks(
        IDS,
        bwd_hooks=[("layers.*.layer_output", lambda g, hook: seen.append((hook.layer, g.clone())))],
    )
    loss = logits.square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    assert [layer for layer, _ in seen] == [5, 4, 3, 2, 1, 0] * 2
    for (_, first), (_, second) in zip(seen[:6], seen[6:], strict=True):
        assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    MODEL.zero_grad()


def test_integers_have_no_gradient():
    for name in (
        "layers.4.mlp.expert_indices",
        "layers.1.self_attn.compressor.indexer.indexer_selection",
        "input_ids",
    ):
        with pytest.raises(TypeError, match=f"{name} holds integers and has no gradient"):
            MODEL.add_hook(name, nothing, dir="bwd")
    # A pattern is attached at all of its points or at none.
    for attach in (
        lambda: MODEL.add_hook("layers.0.mlp.*", nothing, dir="bwd"),
        lambda: run(bwd_hooks=[("layers.0.mlp.*", nothing)]),
    ):
        with pytest.raises(TypeError, match="expert_indices"):
            attach()
        assert MODEL.list_hooks() == []


def test_gradients_without_a_parameter_that_requires_one():
    model = watched_model()
    model.requires_grad_(False)
    seen = {}
    logits = model.run_with_hooks(IDS, bwd_hooks=[("layers.3.layer_output", lambda g, hook: seen.update({hook.name: g}))])
    logits.sum().backward()
    expected = torch.autograd.grad(MODEL.run_with_cache(IDS, [])[0].sum(), MODEL.norm.weight)
    assert expected[0].abs().sum() > 0
    logits, cache = MODEL.run_with_cache(IDS, "layers.3.layer_output", detach=False)
    (want,) = torch.autograd.grad(logits.sum(), cache["layers.3.layer_output"])
    torch.testing.assert_close(seen["layers.3.layer_output"], want)


def test_gradient_reaches_what_a_hook_returns():
    vector = torch.zeros(MODEL.hidden_size, requires_grad=True)
    logits = run([("layers.2.layer_output", lambda v, hook: v + vector)])
    logits[REAL].sum().backward()
    assert vector.grad.abs().sum() > 0
    value = nn.Parameter(torch.randn(2, 19, MODEL.hidden_size))
    run([(OUTPUT, lambda v, hook: value)])[REAL].sum().backward()
    assert value.grad.abs().sum() > 0
    MODEL.zero_grad()


# Handles and cleanup.


def test_a_handle_removes_its_hook_and_no_other(plain):
    point, calls = MODEL.layers[4].self_attn.attention_output, []
    other = point.add_hook(lambda value, hook: calls.append("other"))
    same_function = [point.add_hook(torch.zeros_like) for _ in range(2)]
    same_function[0].remove()
    same_function[0].remove()
    assert MODEL.list_hooks(OUTPUT) == [other, same_function[1]]
    same_function[1].remove()
    with torch.no_grad():
        assert torch.equal(MODEL(IDS, attention_mask=MASK), plain)
    assert calls == ["other"]
    with point.add_hook(torch.zeros_like) as handle:
        assert MODEL.list_hooks() == [other, handle]
    other.remove()


def test_add_hook_by_pattern_list_and_reset(plain):
    handles = MODEL.add_hook("layers.*.mlp.mlp_output", nothing)
    assert len(handles) == len(MODEL.list_hooks()) == 6
    one = MODEL.add_hook("logits", nothing, dir="bwd")
    assert MODEL.list_hooks(dir="bwd") == [one]
    assert [h.point.name for h in MODEL.list_hooks("layers.1.**")] == ["layers.1.mlp.mlp_output"]
    assert "layers.1.mlp.mlp_output" in repr(MODEL.list_hooks("layers.1.**")[0])
    handles.remove()
    assert MODEL.list_hooks() == [one]
    theirs = MODEL.layers[0].layer_output.register_forward_hook(lambda *args: None)
    MODEL.add_hook("**.attention_output", torch.zeros_like)
    MODEL.reset_hooks()
    assert MODEL.list_hooks() == []
    assert MODEL.layers[0].layer_output.live
    theirs.remove()
    with torch.no_grad():
        assert torch.equal(MODEL(IDS, attention_mask=MASK), plain)


def test_nested_contexts_and_the_users_own_hooks_survive():
    calls = []
    own = MODEL.add_hook(OUTPUT, lambda v, hook: calls.append("own"))
    theirs = MODEL.layers[4].self_attn.attention_output.register_forward_hook(lambda *args: calls.append("torch"))
    on_module = MODEL.layers[4].register_forward_hook(lambda *args: calls.append("module"))

    def fires(*expected):
        calls.clear()
        MODEL(IDS)
        assert calls == list(expected)

    mine = ("own", "torch", "module")
    fires(*mine)
    with MODEL.hooks([(OUTPUT, lambda v, hook: calls.append("outer"))]):
        with MODEL.hooks([(OUTPUT, lambda v, hook: calls.append("inner"))]):
            fires("own", "outer", "inner", "torch", "module")
        fires("own", "outer", "torch", "module")
    fires(*mine)
    helpers = [
        lambda: MODEL.run_with_cache(IDS, "**"),
        lambda: run([(OUTPUT, nothing)]),
        lambda: MODEL.run_with_cache(IDS, OUTPUT, pos=-1),
        lambda: MODEL.logit_lens(IDS),
        lambda: MODEL.loss(IDS),
        lambda: MODEL.generate(IDS[:1], max_new_tokens=2),
        lambda: MODEL.estimate("**", 1, 5),
    ]
    for helper in helpers:
        helper()
        fires(*mine)
    with MODEL.steer(torch.zeros(MODEL.hidden_size), layers=1), MODEL.skip_layers([0]):
        pass
    fires(*mine)
    for handle in (own, theirs, on_module):
        handle.remove()


class StopError(Exception):
    pass


@pytest.mark.parametrize("error", [StopError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_whatever_a_hook_raises_nothing_is_left(error, plain):
    reached, own = [], MODEL.add_hook(OUTPUT, lambda v, hook: reached.append(hook.name))

    def stop(value, hook):
        raise error

    at = "layers.2.mlp.router_scores"
    bad = [
        lambda: run([(at, stop), (OUTPUT, torch.zeros_like)]),
        lambda: MODEL.generate(IDS[:1], max_new_tokens=2),
        lambda: MODEL.run_with_cache(IDS, "**"),
        lambda: MODEL.run_with_cache(IDS, OUTPUT, detach=False),
        lambda: MODEL.logit_lens(IDS),
    ]
    with pytest.raises(error):
        bad[0]()
    for call in bad[1:]:
        with pytest.raises(error), MODEL.hooks([(at, stop)], [("logits", nothing)]):
            call()
    with (
        pytest.raises(error),
        MODEL.steer(torch.zeros(MODEL.hidden_size), layers=1),
        MODEL.skip_layers([0]),
    ):
        raise error
    assert MODEL.list_hooks() == [own]
    assert MODEL.stage.captures == []
    assert MODEL.skipped == frozenset()
    assert reached == []
    own.remove()
    with torch.no_grad():
        assert torch.equal(MODEL(IDS, attention_mask=MASK), plain)


def test_values_before_a_stop_can_be_kept():
    kept = {}

    def keep(value, hook):
        kept[hook.name] = value.clone()
        if hook.layer == 2:
            raise StopError

    with pytest.raises(StopError):
        run([("layers.*.layer_output", keep)])
    assert list(kept) == [f"layers.{i}.layer_output" for i in range(3)]


def test_a_hook_may_remove_itself_or_others():
    calls = []

    def once(value, hook):
        calls.append(hook.name)
        for handle in handles:
            handle.remove()
        return torch.zeros_like(value)

    names = ["layers.1.self_attn.attention_scores", "layers.1.self_attn.attention_probabilities"]
    handles = [MODEL.add_hook(name, once) for name in names]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        MODEL(IDS)
    assert calls == names[:1]


# One run at a time.


def test_a_second_run_raises_wherever_it_comes_from(plain):
    errors = []

    def again(value, hook):
        attempts = [
            lambda: MODEL(IDS),
            lambda: MODEL.run_with_cache(IDS, "**"),
            lambda: run([(OUTPUT, torch.zeros_like)]),
            lambda: MODEL.generate(IDS[:1], max_new_tokens=1),
            lambda: MODEL.logit_lens(IDS),
        ]
        for attempt in attempts:
            with pytest.raises(RuntimeError, match="one run at a time per model") as caught:
                attempt()
            errors.append(str(caught.value))

    def in_thread(value, hook):
        thread = threading.Thread(target=again, args=(value, hook))
        thread.start()
        thread.join()

    with torch.no_grad():
        assert torch.equal(run([("layers.1.layer_output", again)]), plain)
        assert len(errors) == 5
        assert all("a hook of that run" in error for error in errors)
        # What the refused runs would have put on the points must not have touched the run in progress.
        assert torch.equal(run([("layers.1.layer_output", in_thread)]), plain)
    assert len(errors) == 10
    assert all("another thread" in error for error in errors[5:])
    # A refused run gives a KV cache back as it was.
    kv = MODEL.new_kv_cache(2)

    def with_cache(value, hook):
        with pytest.raises(RuntimeError, match="one run at a time"):
            MODEL(IDS, kv_cache=kv)

    with torch.no_grad():
        run([("layers.1.layer_output", with_cache)])
        MODEL(IDS, kv_cache=kv)
    assert kv.length.tolist() == [19, 19]


def test_runs_one_after_the_other_from_many_threads(plain):
    results = []

    def work():
        with torch.no_grad():
            results.append(MODEL(IDS, attention_mask=MASK))

    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert all(torch.equal(result, plain) for result in results)


def test_two_copies_do_not_share_their_points():
    with MODEL.hooks([("layers.1.layer_output", torch.zeros_like)]):
        other = copy.deepcopy(MODEL)
    assert len(other.list_hooks()) == 1
    other.reset_hooks()
    assert other.stage is not MODEL.stage
    inside = []

    def run_other(value, hook):
        inside.append(other(IDS, attention_mask=MASK))

    with torch.no_grad():
        expected = run([("layers.1.layer_output", run_other)])
        assert torch.equal(inside[0], expected)
        with other.hooks([(OUTPUT, torch.zeros_like)]):
            assert torch.equal(MODEL(IDS, attention_mask=MASK), expected)
            assert not torch.equal(other(IDS, attention_mask=MASK), expected)


# Hooks that never fire.


@pytest.mark.parametrize(
    ("name", "keywords", "why"),
    [
        ("layers.4.layer_output", {"stop_at_layer": 3}, "stop_at_layer=3"),
        ("logits", {"stop_at_layer": 6}, "stop_at_layer=6"),
        ("layers.3.layer_input", {"stop_at_layer": 3}, "stop_at_layer=3"),
    ],
)
def test_a_hook_that_never_fired_warns_with_its_name_and_why(name, keywords, why):
    with pytest.warns(UserWarning, match=f"the hook at {name} never fired in this run: {why}"):
        run([(name, nothing)], **keywords)
    handle = MODEL.add_hook(name, nothing)
    with pytest.warns(UserWarning, match=f"{name} never fired"):
        MODEL(IDS, **keywords)
    handle.remove()


def test_more_reasons_why_a_hook_did_not_fire():
    def warned(match):
        return pytest.warns(UserWarning, match=match)

    with (
        MODEL.skip_layers([1, 2]),
        warned(r"layers.2.layer_mid never fired in this run: skip_layers\(\[1, 2\]\)"),
    ):
        run([("layers.2.layer_mid", nothing)])
    streams = MODEL(IDS, stop_at_layer=2)
    with (
        warned("token_embeddings never fired in this run: start_at_layer=2"),
        MODEL.hooks([("token_embeddings", nothing)]),
    ):
        MODEL(streams, start_at_layer=2, input_ids=IDS)
    with (
        warned("layers.0.layer_output never fired in this run: start_at_layer=2"),
        MODEL.hooks([("layers.0.layer_output", nothing)]),
    ):
        MODEL(streams, start_at_layer=2, input_ids=IDS)
    streams = MODEL(IDS, stop_at_layer=3)
    with (
        warned("input_ids never fired in this run: the call was given no input_ids"),
        MODEL.hooks([("input_ids", nothing)]),
    ):
        MODEL(streams, start_at_layer=3)
    for mode in (torch.no_grad, torch.inference_mode):
        with (
            mode(),
            warned(f"the gradient hook at {OUTPUT} never fired in this run: no gradient was recorded"),
        ):
            run(bwd_hooks=[(OUTPUT, nothing)])


def test_a_hook_added_behind_the_run():
    def add(value, hook):
        handles.append(MODEL.add_hook("layers.0.layer_input", nothing))
        handles.append(MODEL.add_hook("layers.5.layer_input", nothing))

    handles = []
    with pytest.warns(
        UserWarning,
        match="the hook at layers.0.layer_input never fired .* added when the run had passed",
    ) as caught:
        run([("layers.2.layer_mid", add)])
    assert len(caught) == 1
    assert [handle.fired for handle in handles] == [0, 1]
    for handle in handles:
        handle.remove()


def test_hooks_that_fired_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run([("**", nothing)])
        with MODEL.hooks([("layers.5.**", nothing)]):
            pass


# Nobody listens.


def test_with_nobody_listening_no_point_is_called(plain):
    with torch.no_grad(), calls_counted(MODEL) as called:
        assert torch.equal(MODEL(IDS, attention_mask=MASK), plain)
        assert called == []
        MODEL.run_with_cache(IDS, "layers.2.layer_output", attention_mask=MASK)
        assert called == ["layers.2.layer_output"]
        called.clear()
        MODEL.generate(IDS[:1], max_new_tokens=2)
        assert called == []


def test_a_value_is_spelled_out_in_its_own_module_only():
    hidden = {
        "layers.1.attention_sinkhorn": "layers.1",
        "layers.4.self_attn.attention_probabilities": "layers.4.self_attn",
        "layers.4.self_attn.compressor.indexer.indexer_head_scores": "layers.4.self_attn.compressor.indexer",
        "layers.2.mlp.expert_neurons": "layers.2.mlp",
    }
    for name, module in hidden.items():
        with MODEL.hooks([(name, nothing)]):
            assert spelled(MODEL) == [module]
    free = [name for name, point in MODEL.hook_dict.items() if point.value.read == "free"]
    with MODEL.hooks([(free, nothing)]):
        assert spelled(MODEL) == []


def test_reading_what_is_free_leaves_the_fused_way(plain, monkeypatch):
    """Bit for bit, and with the fused operations."""
    free = [name for name, point in MODEL.hook_dict.items() if point.value.read == "free"]
    fused = []
    for layer in MODEL.layers:
        monkeypatch.setattr(layer.self_attn, "fused", counting(layer.self_attn.fused, fused))
        monkeypatch.setattr(layer.mlp, "fused_experts", counting(layer.mlp.fused_experts, fused))
    with torch.no_grad():
        logits, _ = MODEL.run_with_cache(IDS, free, attention_mask=MASK)
        assert torch.equal(logits, plain)
        assert len(fused) == 12
        fused.clear()
        MODEL.run_with_cache(
            IDS,
            ["layers.1.self_attn.attention_scores", "layers.3.mlp.expert_up"],
            attention_mask=MASK,
        )
        assert len(fused) == 10


def counting(function, calls):
    def counted(*args):
        calls.append(function)
        return function(*args)

    return counted


# PyTorch's own hooks, and modules.


def test_torch_hooks_on_points_act_like_ours(plain):
    point, name = (
        MODEL.layers[4].self_attn.attention_probabilities,
        "layers.4.self_attn.attention_probabilities",
    )
    with torch.no_grad():
        expected = run([(name, torch.zeros_like)])
        for register in (
            lambda: point.register_forward_hook(lambda module, args, out: torch.zeros_like(out)),
            lambda: point.register_forward_hook(lambda module, args, out: [out.zero_()][1:] or None),
            lambda: point.register_forward_pre_hook(lambda module, args: torch.zeros_like(args[0])),
            lambda: point.register_forward_hook(lambda module, args, kwargs, out: out * 0, with_kwargs=True, prepend=True),
        ):
            handle = register()
            assert torch.equal(MODEL(IDS, attention_mask=MASK), expected)
            handle.remove()
            assert torch.equal(MODEL(IDS, attention_mask=MASK), plain)
    for register in (point.register_full_backward_hook, point.register_full_backward_pre_hook):
        seen = []
        handle = register(lambda module, *grads, seen=seen: seen.append(grads[-1]))
        MODEL(IDS, attention_mask=MASK)[REAL].sum().backward()
        assert len(seen) == 1
        handle.remove()
    MODEL.zero_grad()


def test_torch_hooks_come_and_go_in_any_way(plain):
    """Copied with the model, cleared, or their dictionary replaced."""
    zero = [("layers.4.self_attn.attention_output", torch.zeros_like)]
    model, point = copy.deepcopy(MODEL), "layers.4.self_attn.attention_output"
    with torch.no_grad():
        expected = run(zero)
        model.get_submodule(point).register_forward_hook(zero_output)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(copied(IDS, attention_mask=MASK), expected)
            copied.get_submodule(point)._forward_hooks.clear()
            assert torch.equal(copied(IDS, attention_mask=MASK), plain)
            assert spelled(copied) == []
        assert torch.equal(model(IDS, attention_mask=MASK), expected)
        model.get_submodule(point)._forward_hooks = OrderedDict()
        assert torch.equal(model(IDS, attention_mask=MASK), plain)
        handle = model.get_submodule(point).register_forward_hook(zero_output)
        assert torch.equal(model(IDS, attention_mask=MASK), expected)
        handle.remove()
        assert torch.equal(model(IDS, attention_mask=MASK), plain)


def zero_output(module, args, out):
    return torch.zeros_like(out)


def test_sublayers_and_blocks_return_tensors():
    """A torch hook on a module has the effect of a hook on its value."""
    pairs = [
        (lambda layer: layer, "layer_output"),
        (lambda layer: layer.self_attn, "self_attn.attention_output"),
        (lambda layer: layer.mlp, "mlp.mlp_output"),
        (lambda layer: layer.input_layernorm, "attention_norm_output"),
        (lambda layer: layer.post_attention_layernorm, "mlp_norm_output"),
    ]
    for i, layer in enumerate(MODEL.layers):
        module, value = pairs[i % len(pairs)]
        handle = module(layer).register_forward_hook(lambda module, args, out: torch.zeros_like(out))
        with torch.no_grad():
            theirs = MODEL(IDS)
        handle.remove()
        with torch.no_grad():
            assert torch.equal(theirs, MODEL.run_with_hooks(IDS, [(f"layers.{i}.{value}", torch.zeros_like)]))


def test_points_have_no_state():
    point = MODEL.layers[0].layer_output
    assert list(point.parameters()) == list(point.buffers()) == []
    assert not any(key in name for name in MODEL.state_dict() for key in ("layer_output", "logits"))
    for path, module in MODEL.named_modules():
        if isinstance(module, HookPoint):
            assert module.name == path
            assert path in MODEL.hook_dict


def test_first_in_inference_mode_then_a_training_step():
    model = watched_model(seed=3)
    with torch.inference_mode():
        model.run_with_cache(IDS, "**")
        model.run_with_hooks(IDS, [(OUTPUT, torch.zeros_like)])
    model.run_with_cache(IDS, "**", detach=False)[0].sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_backward_after_in_place_edits_everywhere():
    names = [n for n in writable(MODEL) if MODEL.hook_dict[n].dtype != "i"]

    def scale(value, hook):
        value.mul_(1.01)

    MODEL.run_with_hooks(IDS, [(names, scale)]).sum().backward()
    grads = [p.grad for p in MODEL.parameters() if p.grad is not None]
    assert grads
    assert all(grad.isfinite().all() for grad in grads)
    MODEL.zero_grad()


@pytest.mark.parametrize("everywhere", [True, False])
def test_pytorchs_hooks_keep_what_modules_return(monkeypatch, everywhere: bool):
    """Norms are called for them, and nothing that they were handed is written over later; hooks of all modules and of each."""
    monkeypatch.setattr(norm_rotary, "CHUNK", 1)
    monkeypatch.setattr(hyper_connection, "CHUNK", 1)
    kept = []

    def keep(module, given, output):
        if isinstance(module, PLAIN):
            kept.append((module, output, output.clone()))

    modules = [m for m in MODEL.modules() if isinstance(m, PLAIN)]
    with torch.no_grad():
        plain = MODEL(IDS)
        handles = [register_module_forward_hook(keep)] if everywhere else [m.register_forward_hook(keep) for m in modules]
        watched = MODEL(IDS)
    for handle in handles:
        handle.remove()
    assert_close(watched, plain, "watched")
    assert all(torch.equal(output, then) for _, output, then in kept)
    seen = {module for module, _, _ in kept}
    assert {block.self_attn.q_b_norm for block in MODEL.layers} | {block.self_attn.kv_norm for block in MODEL.layers} <= seen
