"""What precision is kept: bfloat16 against transformers, what stays float32, float64 throughout,
two ways of one computation.

The truth of a bfloat16 model is the float32 run over the same bfloat16 weights, in which
transformers and we agree.
"""

import copy
import random
import statistics

import pytest
import torch
from torch import Tensor

from dsv4 import Dsv4
from dsv4.config import CSA, HASH_MOE, HCA, MOE, SLIDING
from dsv4.convert.names import Place, from_place
from dsv4.testing import (
    CHOICES,
    NEAR_TIE,
    as_sets,
    assert_close,
    assert_gradients_close,
    boundary_gap,
    fault_config,
    names_of,
    random_config,
    random_ids,
    relative_error,
    twin,
)

MODELS = 20
# Ratio of our error to transformers' own: median and 90th percentile over the models.
FREE = (1.0, 1.5)
FROZEN = (1.1, 1.1)
# Parts of a model that no cast takes below float32.
KEPT = (
    "attn_hc",
    "ffn_hc",
    "hc_head",
    "sinks",
    "position_bias",
    "e_score_correction_bias",
    "rotary",
)


def stays_float32(name: str) -> bool:
    return any(part in KEPT or part == "norm" or part.endswith(("_norm", "layernorm")) for part in name.split("."))


def deviation(logits: Tensor, truth: Tensor) -> float:
    """Mean absolute difference over mean absolute value: a flipped expert moves a few tokens, a
    lost digit all of them.
    """
    return ((logits.double() - truth.double()).abs().mean() / truth.double().abs().mean()).item()


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * len(values))]


def freeze_transformers(theirs, choices: dict[str, Tensor]) -> None:
    """Replace every choice of a transformers model: weights are made anew for the experts given."""
    for i, layer in enumerate(theirs.model.layers):
        gate, indices = layer.mlp.gate, choices[f"layers.{i}.mlp.expert_indices"].flatten(0, 1)

        def route(*args, scored=gate.forward, gate=gate, indices=indices):
            logits = scored(*args)[0]
            chosen = gate.score_fn(logits).gather(1, indices)
            return (
                logits,
                chosen / chosen.sum(-1, keepdim=True) * gate.routed_scaling_factor,
                indices,
            )

        gate.forward = route
        indexer = getattr(layer.self_attn.compressor, "indexer", None)
        if indexer is not None:
            selection = choices[f"layers.{i}.self_attn.compressor.indexer.indexer_selection"]
            indexer.forward = lambda *args, selection=selection: selection


def replace_by(choice: Tensor):
    return lambda value, hook: choice


@pytest.fixture(scope="module")
def ratios() -> dict[str, list[float]]:
    """{"free", "frozen"}: our deviation over transformers', of each random model."""
    found: dict[str, list[float]] = {"free": [], "frozen": []}
    for seed in range(MODELS):
        config = random_config(random.Random(seed))
        model = Dsv4.from_config(config, seed=seed, dtype=torch.bfloat16)
        wide, theirs = copy.deepcopy(model).float(), twin(model)
        ids = random_ids(config, 4, 100, seed)
        with torch.no_grad():
            truth, choices = wide.run_with_cache(ids, names_of(wide, ("expert_indices", "indexer_selection")))
            found["free"].append(deviation(model(ids), truth) / deviation(theirs(input_ids=ids).logits, truth))
            freeze_transformers(theirs, choices)
            ours = model.run_with_hooks(ids, [(name, replace_by(choices[name])) for name in choices])
            found["frozen"].append(deviation(ours, truth) / deviation(theirs(input_ids=ids).logits, truth))
    return found


@pytest.mark.parametrize(("kind", "limits"), [("free", FREE), ("frozen", FROZEN)])
def test_bfloat16_error_against_transformers(ratios, kind: str, limits: tuple[float, float]):
    median, high = statistics.median(ratios[kind]), percentile(ratios[kind], 0.9)
    assert median <= limits[0], f"median {median:.3f}: {ratios[kind]}"
    assert high <= limits[1], f"90th percentile {high:.3f}: {ratios[kind]}"


def test_frozen_choices_are_the_float32_runs(ratios):
    """The freezing itself: in float32, frozen and free agree in both models."""
    config = fault_config()
    model = Dsv4.from_config(config, seed=1)
    theirs, ids = twin(model), random_ids(config, 2, 40)
    with torch.no_grad():
        truth, choices = model.run_with_cache(ids, names_of(model, ("expert_indices", "indexer_selection")))
        freeze_transformers(theirs, choices)
        assert_close(theirs(input_ids=ids).logits, truth, "transformers")
        shifted = {name: (value + 1) % 8 if "expert" in name else value for name, value in choices.items()}
        freeze_transformers(theirs, shifted)
        assert relative_error(theirs(input_ids=ids).logits, truth) > 1e-2


def test_the_twin_holds_what_transformers_loads(tmp_path):
    """Saved by transformers and loaded in bfloat16: the same dtypes, hence the same float32 parts,
    and the same logits.
    """
    from transformers import DeepseekV4ForCausalLM

    model = Dsv4.from_config(fault_config(), seed=1, dtype=torch.bfloat16)
    theirs = twin(model)
    twin(copy.deepcopy(model).float()).save_pretrained(tmp_path)
    loaded = DeepseekV4ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, experts_implementation="eager").eval()
    ours, expected = (dict(m.named_parameters()) | dict(m.named_buffers()) for m in (theirs, loaded))
    assert {k: v.dtype for k, v in ours.items()} == {k: v.dtype for k, v in expected.items()}
    ids = random_ids(model.config, 2, 30)
    assert torch.equal(theirs(input_ids=ids).logits, loaded(input_ids=ids).logits)


# Casts.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_leave_the_float32_parts(dtype):
    """Fault 44: whichever way a narrow model was asked for, it is the same model."""
    config = fault_config()
    asked = Dsv4.from_config(config, seed=2, dtype=dtype)
    name = {torch.bfloat16: "bfloat16", torch.float16: "half"}[dtype]
    wide = Dsv4.from_config(config, seed=2)
    ids = random_ids(config, 2, 40)
    ways = [
        getattr(copy.deepcopy(wide), name)(),
        copy.deepcopy(wide).to(dtype),
        copy.deepcopy(wide).to("cpu", dtype),
        copy.deepcopy(wide).to(torch.empty(0, dtype=dtype)),
        copy.deepcopy(wide).double().to(dtype),
        copy.deepcopy(wide).to(dtype).to(dtype),
    ]
    for model in (asked, *ways):
        for key, tensor in model.state_dict(keep_vars=True).items():
            expected = torch.int64 if key.endswith("tid2eid") else torch.float32 if stays_float32(key) else dtype
            assert tensor.dtype == expected, key
            assert torch.equal(tensor, asked.state_dict()[key]), key
        assert model.rotary["main"].frequencies.dtype == torch.float32
        assert model.dtype == dtype
        assert torch.equal(model(ids), asked(ids))
    assert relative_error(asked(ids), wide(ids)) > 1e-4


def test_there_and_back():
    """Widened and narrowed again, a model is what it was; narrowed and widened, its float32 parts
    are.
    """
    config = fault_config()
    wide = Dsv4.from_config(config, seed=2)
    ids = random_ids(config, 2, 30)
    back = copy.deepcopy(wide).double().float()
    for key, tensor in wide.state_dict().items():
        assert torch.equal(back.state_dict()[key], tensor), key
    assert torch.equal(back(ids), wide(ids))
    rounded = copy.deepcopy(wide).bfloat16().float()
    for key, tensor in rounded.state_dict().items():
        assert tensor.dtype in (torch.float32, torch.int64)
        assert torch.equal(tensor, wide.state_dict()[key]) == (stays_float32(key) or key.endswith("tid2eid")), key


def test_a_model_with_gradients_is_cast_with_them():
    model = Dsv4.from_config(fault_config(), seed=2)
    ids = random_ids(model.config, 2, 30)
    model(ids).square().mean().backward()
    model.bfloat16()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.dtype == parameter.dtype, name
    model(ids).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert bool(model(ids).isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes_of_every_value(dtype):
    """values.md: f is float32 (float64 in a float64 model), m the model's, i int64. So is what
    flows, watched or not.
    """
    model = Dsv4.from_config(fault_config(), seed=3, dtype=dtype)
    ids = random_ids(model.config, 2, 30)
    logits, cache = model.run_with_cache(ids, "**")
    sensitive = torch.float64 if dtype == torch.float64 else torch.float32
    assert logits.dtype == model(ids).dtype == sensitive
    assert model(ids, stop_at_layer=2).dtype == dtype
    for name, value in cache.items():
        expected = {"f": sensitive, "m": dtype, "i": torch.int64}[model.hook_dict[name].dtype]
        assert value.dtype == expected, name
    assert len(cache) == len(model.hook_dict)


def test_float32_values_of_a_bfloat16_model_are_not_rounded():
    """Router, hyper-connections, pooling, indexer scores, attention scores and logits hold digits
    that bfloat16 has not.
    """
    model = Dsv4.from_config(fault_config(), seed=3, dtype=torch.bfloat16)
    _, cache = model.run_with_cache(random_ids(model.config, 2, 30), "**")
    for name, value in cache.items():
        if model.hook_dict[name].dtype == "f" and not name.endswith("attention_sink_logits"):
            finite = value[value.isfinite() & (value != 0) & (value != 1)]
            share = (finite == finite.bfloat16().float()).float().mean()
            assert share < 0.1, f"{name}: {share:.2f} of the values are bfloat16 numbers"


def test_hooks_change_no_dtype():
    """Faults 43 and 68: a float32 tensor, a Python number or an identity at a bfloat16 place."""
    model = Dsv4.from_config(fault_config(), seed=3, dtype=torch.bfloat16)
    ids = random_ids(model.config, 2, 30)
    plain, cache = model.run_with_cache(ids, "**")
    names = [name for name in model.hook_dict if name.endswith(("layer_output", "attention_output", "mlp_input", "attention_keys"))]
    for edit in (
        lambda x, hook: x.float(),
        lambda x, hook: x * 1.0,
        lambda x, hook: x * torch.ones(1),
    ):
        with model.hooks([(name, edit) for name in names]):
            logits, edited = model.run_with_cache(ids, "**")
        assert torch.equal(logits, plain)
        assert {name: value.dtype for name, value in edited.items()} == {name: value.dtype for name, value in cache.items()}
    out = model.run_with_hooks(ids, [(name, lambda x, hook: x.float()) for name in names])
    out.square().mean().backward()
    assert all(p.grad is None or p.grad.dtype == p.dtype for p in model.parameters())


def test_reading_everything_changes_no_bit_while_one_band_holds_every_token():
    """The spelled-out ways are then the same operations in the same order; in bfloat16 that keeps
    every choice.
    """
    for seed in range(8):
        for dtype in (torch.bfloat16, torch.float32):
            # Kept entries are gathered where there are many more than that.
            config = random_config(random.Random(seed), index_topk=5)
            model = Dsv4.from_config(config, seed=seed, dtype=dtype)
            ids = random_ids(config, 2, 50, seed)
            mask = torch.ones_like(ids)
            mask[1, : 7 * seed] = 0
            with torch.no_grad():
                plain, choices = model.run_with_cache(ids, names_of(model, CHOICES[:2]), attention_mask=mask)
                watched, everything = model.run_with_cache(ids, "**", max_bytes=None, attention_mask=mask)
            for name, value in choices.items():
                assert torch.equal(everything[name], value), f"seed {seed}: {name}"
            assert torch.equal(watched, plain), f"seed {seed}"


def test_reading_everything_of_a_long_row_in_bfloat16():
    """Identity 10, past one band: logits within twice the bfloat16 error, choices but for a few of
    thousands.
    """
    model = Dsv4.from_config(fault_config(), seed=1, dtype=torch.bfloat16)
    ids = random_ids(model.config, 2, 300)
    with torch.no_grad():
        plain, choices = model.run_with_cache(ids, names_of(model, CHOICES[:2]))
        watched, everything = model.run_with_cache(ids, "**", max_bytes=None)
        truth = copy.deepcopy(model).float()(ids)
    differing = sum(int((as_sets(everything[name]) != as_sets(value)).any(-1).sum()) for name, value in choices.items())
    assert differing <= 20
    assert deviation(watched, plain) <= 2 * deviation(plain, truth)


# Float64.


def test_float64_is_float64_throughout():
    """A step of 2^-40 in one weight moves the logits by about as much: nothing on the way is
    rounded to float32.
    """
    for seed in range(4):
        model = Dsv4.from_config(random_config(random.Random(seed)), seed=seed, dtype=torch.float64)
        assert {t.dtype for t in model.state_dict().values()} <= {torch.float64, torch.int64}
        ids = random_ids(model.config, 2, 40, seed)
        with torch.no_grad():
            logits = model(ids)
            watched, _ = model.run_with_cache(ids, "**")
            assert_close(watched, logits, "float64")
            steps = []
            for scale in (1.0, 2.0):
                moved = copy.deepcopy(model)
                moved.embed_tokens.weight.mul_(1 + scale * 2.0**-40 * torch.linspace(-1, 1, model.hidden_size).double())
                steps.append(moved(ids) - logits)
        # Twice the step, twice the difference: in float32 both would be noise of 1e-7.
        assert relative_error(steps[1], 2 * steps[0]) < 1e-2
        assert steps[0].abs().max() < 1e-8


def test_float32_is_as_good_as_float32_can_be():
    for seed in range(8):
        config = random_config(random.Random(seed))
        exact = Dsv4.from_config(config, seed=seed, dtype=torch.float64)
        ids = random_ids(config, 2, 40, seed)
        with torch.no_grad():
            truth, cache = exact.run_with_cache(ids, names_of(exact, CHOICES))
            gaps = [boundary_gap(value, config.num_experts_per_tok) for name, value in cache.items() if name.endswith("selection_scores")]
            gaps += [boundary_gap(value, config.index_topk) for name, value in cache.items() if name.endswith("indexer_scores")]
            if any(bool((gap < NEAR_TIE).any()) for gap in gaps):
                continue
            error = relative_error(Dsv4.from_config(config, seed=seed)(ids), truth)
        assert error <= 2e-5, f"seed {seed}: {error:.3g}"


# Two ways: fused while nobody listens, spelled out while everything is kept with its graph.


def value_and_gradients(model: Dsv4, logits: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    weight = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view(logits.shape)
    names, parameters = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad((logits * weight).sum(), parameters, allow_unused=True)
    return logits, dict(zip(names, grads, strict=True))


@pytest.mark.parametrize("seed", range(12))
def test_fused_and_spelled_out_agree_in_value_and_gradient(seed: int):
    draw = random.Random(200 + seed)
    config = random_config(draw)
    model = Dsv4.from_config(config, seed=seed, dtype=torch.float64 if seed % 3 == 0 else torch.float32)
    width = draw.choice((1, 5, 33, 70, 200))
    ids, mask = random_ids(config, 2, width, seed), torch.ones(2, width, dtype=torch.int64)
    mask[1, : draw.randint(0, width - 1)] = 0
    logits, grads = value_and_gradients(model, model(ids, attention_mask=mask))
    watched = model.run_with_cache(ids, "**", detach=False, max_bytes=None, attention_mask=mask)[0]
    spelled, spelled_grads = value_and_gradients(model, watched)
    exact = model.dtype == torch.float64
    assert_close(logits, spelled, "float64" if exact else "watched")
    assert_gradients_close(grads, spelled_grads, "float64 gradient" if exact else "watched gradient")


@pytest.mark.parametrize("block", [SLIDING, CSA, HCA])
@pytest.mark.parametrize("mlp", [HASH_MOE, MOE])
def test_gradients_are_those_of_small_steps(block: str, mlp: str):
    """Central differences of the whole model in float64, along a random direction of each
    parameter.
    """
    config = fault_config(
        layer_types=(block, SLIDING),
        mlp_layer_types=(mlp, MOE),
        num_hash_layers=int(mlp == HASH_MOE),
        swiglu_limit=0.4,
    )
    model = Dsv4.from_config(config, seed=5, dtype=torch.float64)
    ids = random_ids(config, 2, 21)
    weight = torch.linspace(-1, 1, config.vocab_size, dtype=torch.float64)
    names, parameters = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad((model(ids) @ weight).sum(), parameters, allow_unused=True)
    for name, parameter, grad in zip(names, parameters, grads, strict=True):
        if grad is None:
            continue
        direction, step = torch.randn_like(parameter), 1e-6
        with torch.no_grad():
            kept, sides = parameter.clone(), []
            for sign in (1, -1):
                parameter.copy_(kept + sign * step * direction)
                sides.append((model(ids) @ weight).sum().item())
            parameter.copy_(kept)
        slope, expected = (grad * direction).sum().item(), (sides[0] - sides[1]) / (2 * step)
        assert slope == pytest.approx(expected, rel=1e-5, abs=1e-5), name


def test_gradients_are_transformers():
    """Every parameter's, over the same loss; the indexer has none in either."""
    for seed in range(6):
        config = random_config(random.Random(400 + seed))
        model = Dsv4.from_config(config, seed=seed)
        theirs, ids = twin(model), random_ids(config, 2, 40, seed)
        weight = torch.linspace(-1, 1, config.vocab_size)
        names, parameters = zip(*model.named_parameters(), strict=True)
        counterparts = dict(theirs.named_parameters())
        results = []
        for logits, leaves in (
            (model(ids), parameters),
            (
                theirs(input_ids=ids).logits,
                [counterparts[from_place("transformers", Place(name))] for name in names],
            ),
        ):
            grads = torch.autograd.grad((logits @ weight).sum(), leaves, allow_unused=True)
            results.append(dict(zip(names, grads, strict=True)))
        assert_gradients_close(*results, "watched gradient")
