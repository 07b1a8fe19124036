"""The model as a module: rows and runs do not hear each other, copies and casts of state, defaults
of torch, sizes at their ends,
which gradients there are.
"""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dsv4 import Dsv4
from dsv4.config import CSA, HASH_MOE, HCA
from dsv4.testing import assert_close, fault_config, random_ids, relative_error

TOKENS = 24


@pytest.fixture(scope="module")
def model() -> Dsv4:
    return Dsv4.from_config(fault_config(), seed=21)


@pytest.fixture(scope="module")
def ids(model: Dsv4) -> Tensor:
    return random_ids(model.config, 3, TOKENS, 21)


# Rows are independent, runs leave nothing behind.


def test_rows_do_not_hear_each_other(model: Dsv4, ids: Tensor):
    logits = model(ids)
    for row in range(3):
        assert_close(logits[row][None], model(ids[row][None]), "watched")
    order = [2, 0, 1]
    assert_close(model(ids[order]), logits[order], "watched")
    other = ids.clone()
    other[1] = (other[1] + 9) % 64
    assert_close(model(other)[[0, 2]], logits[[0, 2]], "watched")


def test_runs_leave_nothing_behind(model: Dsv4, ids: Tensor):
    """Fault 31: A, B, A with other lengths, a run that raised half-way, training in between."""
    first = model(ids)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model(ids[:1, :3])
    model(ids[:2, :17])
    assert torch.equal(model(ids), first)

    def fail(value, hook):
        raise KeyError("on purpose")

    with pytest.raises(KeyError, match="on purpose"):
        model.run_with_hooks(ids, [("layers.2.mlp.expert_weights", fail)])
    assert torch.equal(model(ids), first)
    torch.autograd.grad(model(ids).sum(), model.embed_tokens.weight)
    model.train()
    assert torch.equal(model(ids), first)
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(ids), first)
    with torch.inference_mode():
        assert torch.equal(model(ids), first)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_training_after_a_first_run_in_inference_mode(ids: Tensor):
    """Fault 100: what is made at the first use must not be an inference tensor."""
    fresh = Dsv4.from_config(fault_config(), seed=3)
    with torch.inference_mode():
        fresh(ids)
        fresh.run_with_cache(ids, "**")
    fresh(ids).square().mean().backward()
    assert fresh.embed_tokens.weight.grad.abs().max() > 0


def test_copies_and_pickles(model: Dsv4, ids: Tensor):
    expected = model(ids)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ]
    loaded = Dsv4.from_config(model.config, seed=77)
    assert not torch.equal(loaded(ids), expected)
    loaded.load_state_dict(model.state_dict())
    assigned = Dsv4.from_config(model.config, seed=78)
    assigned.load_state_dict(model.state_dict(), assign=True)
    for other in (*copies, loaded, assigned):
        assert torch.equal(other(ids), expected)
        assert_close(other.run_with_cache(ids, "**")[0], expected, "watched")
    for other in copies:
        with torch.no_grad():
            other.embed_tokens.weight.zero_()
            other.layers[1].self_attn.sinks.zero_()
    assert torch.equal(model(ids), expected)


def test_a_copy_has_its_own_hooks(model: Dsv4, ids: Tensor):
    expected = model(ids)
    other = copy.deepcopy(model)
    other.add_hook("layers.1.layer_output", lambda x, hook: x * 0)
    assert torch.equal(model(ids), expected)
    assert not torch.equal(other(ids), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_default_dtype_changes_nothing(model: Dsv4, ids: Tensor, dtype):
    expected, watched = model(ids), model.run_with_cache(ids, "**")[0]
    torch.set_default_dtype(dtype)
    try:
        built = Dsv4.from_config(fault_config(), seed=21)
        results = [model(ids), built(ids), model.run_with_cache(ids, "**")[0]]
        padded = model(ids, attention_mask=torch.ones(3, TOKENS))
    finally:
        torch.set_default_dtype(torch.float32)
    assert {t.dtype for t in built.state_dict().values()} == {torch.float32, torch.int64}
    for result, other in zip((*results, padded), (expected, expected, watched, expected), strict=True):
        assert torch.equal(result, other)


def test_the_default_device_changes_nothing(model: Dsv4, ids: Tensor):
    expected, watched = model(ids), model.run_with_cache(ids, "**")[0]
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    padded = model(ids, attention_mask=mask)
    with torch.device("meta"):
        results = [model(ids), model(ids.tolist()), model.run_with_cache(ids, "**")[0]]
        masked = [
            model(ids, attention_mask=mask),
            model(ids.tolist(), attention_mask=mask.tolist()),
        ]
    for result, other in zip((*results, *masked), (expected, expected, watched, padded, padded), strict=True):
        assert torch.equal(result, other)


def test_the_global_seed_is_not_touched(ids: Tensor):
    state = torch.get_rng_state()
    built = Dsv4.from_config(fault_config(), seed=21)
    built(ids)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(built.lm_head.weight, Dsv4.from_config(fault_config(), seed=21).lm_head.weight)


# Ties.


def test_ties_go_to_the_lowest_number_watched_or_not(ids: Tensor):
    """Scores made equal by the weights, by a hook on the scores, and as 0.0 beside -0.0."""
    model = Dsv4.from_config(fault_config(), seed=6)
    moe, csa = [2, 3], [1, 3]
    with torch.no_grad():
        for i in moe:
            model.layers[i].mlp.router.weight.zero_()
            model.layers[i].mlp.router.e_score_correction_bias.zero_()
        for i in csa:
            model.layers[i].self_attn.compressor.indexer.scorer.weights_proj.weight.zero_()
    choices = ["**.expert_indices", "**.indexer_selection"]

    def tie(value: Tensor, hook) -> Tensor:
        equal = torch.zeros_like(value)
        equal[..., ::2] = -0.0
        return equal

    edits = [(name, tie) for name in ("**.router_selection_scores", "**.indexer_scores")]
    for hooks, names in (((), choices), ((), "**"), (edits, choices), (edits, "**")):
        with model.hooks(hooks):
            _, cache = model.run_with_cache(ids, names)
        for i in moe:
            chosen = cache[f"layers.{i}.mlp.expert_indices"]
            assert torch.equal(chosen, torch.tensor([0, 1]).expand_as(chosen))
        for i in csa:
            chosen = cache[f"layers.{i}.self_attn.compressor.indexer.indexer_selection"]
            for t in range(TOKENS):
                expected = [0, 1] if t >= 7 else [0, -1] if t >= 3 else [-1, -1]
                assert chosen[0, t].tolist() == expected


# Sizes at their ends.


EDGES = {
    "window 1": {"sliding_window": 1},
    "rates longer than the input": {"compress_rates": {CSA: 100, HCA: 100}},
    "rate 1": {"compress_rates": {CSA: 1, HCA: 1}},
    "every expert": {"num_experts_per_tok": 8},
    "one expert": {"n_routed_experts": 1, "num_experts_per_tok": 1},
    "a group for every head": {"o_groups": 4},
    "one head": {"num_attention_heads": 1, "o_groups": 1},
    "rotary over the whole head": {"head_dim": 8},
    "one stream": {"hc_mult": 1},
    "hash everywhere": {"mlp_layer_types": (HASH_MOE,) * 4, "num_hash_layers": 4},
    "widths of one": {"o_lora_rank": 1, "q_lora_rank": 1, "moe_intermediate_size": 1},
    "a hidden size of one": {"hidden_size": 1},
    "a vocabulary of one": {"vocab_size": 1},
}


@pytest.mark.parametrize("edge", EDGES)
def test_edges_run_watched_and_backwards(edge: str):
    model = Dsv4.from_config(fault_config(**EDGES[edge]), seed=8)
    ids = random_ids(model.config, 2, 21)
    logits, cache = model.run_with_cache(ids, "**")
    assert_close(logits, model(ids), "watched")
    for name, value in cache.items():
        assert not (value.is_floating_point() and bool(value.isnan().any())), name
    for gradient in torch.autograd.grad(model(ids).square().mean(), list(model.parameters()), allow_unused=True):
        assert gradient is None or bool(gradient.isfinite().all())


def test_three_thousand_tokens(model: Dsv4):
    """Far positions: a prefix is still the same, and padding still is none."""
    far = random_ids(model.config, 1, 3000, 5)
    with torch.no_grad():
        logits = model(far)
        assert bool(logits.isfinite().all())
        assert_close(model(far[:, :1500]), logits[:, :1500], "far prefix")


# Gradients.


def test_only_the_indexer_has_no_gradient(model: Dsv4, ids: Tensor):
    """Fault 52: six tensors of each CSA block, since the pick is not differentiable; with no entry
    yet, every compressor's too.
    """
    names = [name for name, _ in model.named_parameters()]

    def without(tokens: int) -> set[str]:
        grads = torch.autograd.grad(model(ids[:, :tokens]).square().mean(), list(model.parameters()), allow_unused=True)
        assert all(g is None or bool(g.isfinite().all()) for g in grads)
        return {name for name, g in zip(names, grads, strict=True) if g is None}

    indexer = {name for name in names if ".indexer." in name}
    assert len(indexer) == 6 * model.layer_types.count(CSA)
    assert without(TOKENS) == indexer
    assert without(3) == {name for name in names if ".compressor." in name}


def test_watching_everything_gives_the_indexer_no_gradient_either(model: Dsv4, ids: Tensor):
    out, _ = model.run_with_cache(ids, "**", detach=False)
    names = [name for name, _ in model.named_parameters()]
    grads = torch.autograd.grad(out.square().mean(), list(model.parameters()), allow_unused=True)
    assert {name for name, g in zip(names, grads, strict=True) if g is None} == {name for name in names if ".indexer." in name}


def test_no_value_holds_a_graph_where_none_is_wanted(model: Dsv4, ids: Tensor):
    with torch.no_grad():
        out, cache = model.run_with_cache(ids, "**", detach=False)
    assert not out.requires_grad
    assert not [name for name, value in cache.items() if value.requires_grad]


def test_second_derivatives():
    """Of the loss by the embeddings, and by the embeddings of a gradient of expert weights,
    against central differences.
    """
    model = Dsv4.from_config(fault_config(), seed=4, dtype=torch.float64)
    ids = random_ids(model.config, 2, TOKENS, 4)
    start, bank = model.embed_tokens(ids).detach(), model.layers[2].mlp.experts.gate_up_proj
    cotangents = torch.randn_like(start), torch.randn_like(bank)

    def slopes(embeddings: Tensor, create_graph: bool) -> Tensor:
        loss = model(ids, inputs_embeds=embeddings).square().mean()
        grads = torch.autograd.grad(loss, (embeddings, bank), create_graph=create_graph)
        return torch.stack([(g * c).sum() for g, c in zip(grads, cotangents, strict=True)])

    leaf, direction, step = start.clone().requires_grad_(), torch.randn_like(start), 1e-5
    for value in range(2):
        second = torch.autograd.grad(slopes(leaf, True)[value], leaf)[0]
        sides = [slopes((start + sign * step * direction).requires_grad_(), False)[value] for sign in (1, -1)]
        expected = (sides[0] - sides[1]) / (2 * step)
        assert (second * direction).sum().item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", ["self_attn.sinks", "self_attn.kv_proj.weight", "mlp.experts.down_proj"])
@pytest.mark.parametrize("tokens", [TOKENS, 530])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_transforms_of_torch_func(name: str, tokens: int, dtype: torch.dtype):
    model = Dsv4.from_config(fault_config(), seed=21).to(dtype)
    ids, name = random_ids(model.config, 1, tokens), f"layers.0.{name}"
    start = model.get_parameter(name)
    direction = torch.randn(start.shape, generator=torch.Generator().manual_seed(0)).to(start.dtype)

    def loss(x: Tensor) -> Tensor:
        return torch.func.functional_call(model, {name: x}, (ids,)).square().mean()

    expected = torch.autograd.grad(loss(start), start)[0]
    tight = 1e-4 if dtype == torch.float32 else 1e-10
    assert relative_error(torch.func.grad(loss)(start.detach()), expected) <= tight
    assert relative_error(torch.func.jvp(loss, (start.detach(),), (direction,))[1], (expected * direction).sum()) <= 10 * tight


def test_functional_calls_and_checkpointing(model: Dsv4, ids: Tensor):
    expected = model(ids)
    parameters = dict(model.named_parameters())
    assert torch.equal(torch.func.functional_call(model, parameters, (ids,)), expected)
    zeros = {"lm_head.weight": torch.zeros_like(model.lm_head.weight)}
    assert not torch.func.functional_call(model, zeros, (ids,)).any()
    assert torch.equal(model(ids), expected)
    embeddings = model.embed_tokens(ids).detach().requires_grad_()

    def run(x: Tensor) -> Tensor:
        return model(ids, inputs_embeds=x)

    grads = [
        torch.autograd.grad(logits.square().mean(), embeddings)[0]
        for logits in (run(embeddings), checkpoint(run, embeddings, use_reentrant=False))
    ]
    assert torch.equal(*grads)


def test_a_frozen_model_needs_no_graph(model: Dsv4, ids: Tensor):
    frozen = copy.deepcopy(model).requires_grad_(False)
    assert not frozen(ids).requires_grad
    assert torch.equal(frozen(ids), model(ids))


def test_weights_of_any_strides(model: Dsv4, ids: Tensor):
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data = parameter.data.transpose(0, -1).contiguous().transpose(0, -1)
    assert relative_error(other(ids), model(ids)) <= 1e-5


@pytest.mark.parametrize("size", [0.0, 1e-20, 1e6, 1e18])
def test_embeddings_of_any_size(model: Dsv4, ids: Tensor, size: float):
    embeddings = (size * model.embed_tokens(ids)).detach().requires_grad_()
    logits = model(ids, inputs_embeds=embeddings)
    assert bool(logits.isfinite().all())
    for gradient in torch.autograd.grad(logits.sum(), [embeddings, *model.parameters()], allow_unused=True):
        assert gradient is None or bool(gradient.isfinite().all())


def test_autocast_changes_no_value(model: Dsv4, ids: Tensor):
    logits, cache = model.run_with_cache(ids, "**")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under, watched = model.run_with_cache(ids, "**")
    assert torch.equal(logits, under)
    assert all(torch.equal(cache[name], watched[name]) for name in cache)
