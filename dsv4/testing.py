"""What tests and benchmarks share: limits of error, random configs, a transformers model of the
same weights, choices that differ.

Every number that a test may not exceed stands in `LIMITS`. An error is the largest absolute
difference over the largest absolute expected value, unless the limit is absolute.
Axes: b batch, s token, k chosen, e candidate.
"""

import random
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.config import CSA, HASH_MOE, HCA, MOE, SLIDING, Dsv4Config
from dsv4.model import Dsv4


@dataclass(frozen=True)
class Limit:
    """Largest |difference| allowed: relative * largest |expected| + absolute."""

    relative: float = 0.0
    absolute: float = 0.0


LIMITS: Mapping[str, Limit] = {
    "equal": Limit(),
    # float32 logits and block values against transformers, of a padded row against the row alone
    "transformers": Limit(relative=2e-5),
    "row alone": Limit(relative=2e-5),
    # every other value of a call with a KV cache, of its largest value in the row alone
    "fed value": Limit(relative=1e-4),
    # a run in which everything is watched against the plain run
    "watched": Limit(relative=1e-5),
    "watched gradient": Limit(relative=1e-4),
    # values and gradients of a model spread over processes, whose sums have another order
    "spread": Limit(relative=1e-5),
    "spread gradient": Limit(relative=1e-4),
    # a patched run behind a prefix of the unpatched one, against all tokens
    "reused prefix": Limit(relative=1e-5),
    # root mean square of normed queries: eps over their mean square
    "queries": Limit(absolute=1e-4),
    # the same prefix computed in longer bands, at thousands of tokens
    "far prefix": Limit(relative=1e-5),
    # the same tokens in one call, in static steps or in a compiler's graph
    "steps": Limit(relative=1e-5),
    # float64 against an independent definition in float64
    "float64": Limit(relative=1e-12),
    "float64 gradient": Limit(relative=1e-10),
    # float32 of one op against its float64 definition
    "float32 op": Limit(relative=2e-6),
    "float32 op gradient": Limit(relative=1e-5),
    # one op in bfloat16 against its float64 definition over the same arguments: one rounding
    "bfloat16 rounding": Limit(relative=2**-8),
    # a sum in which every term was rounded, rounded itself
    "bfloat16 sum": Limit(relative=2**-7),
    # logits of a bfloat16 model computed two ways, each of which rounds in every block
    "bfloat16 way": Limit(relative=2**-6),
    # the same in device code, whose attention weights are rounded too (and whose interpreter cuts
    # the result off instead of rounding it)
    "bfloat16 device code": Limit(relative=2**-7),
    # its gradient, into which that output enters
    "bfloat16 device code gradient": Limit(relative=2**-6),
    # experts that round neurons and weighted slots by truncation, as the interpreter does
    "truncated experts": Limit(relative=2**-6),
    # their gradient, into which gate and up enter as they were cut off
    "truncated gradient": Limit(relative=2**-5),
    # products of E4M3 codes, where a number between two codes took the other one
    "codes": Limit(relative=2**-7),
    # the official code's float32 results
    "golden logits": Limit(absolute=1e-4),
    "golden streams": Limit(absolute=2e-4),
    "golden sublayers": Limit(absolute=1e-4),
    "golden entries": Limit(absolute=2e-5),
    "golden scores": Limit(absolute=2e-5),
    "golden weights": Limit(absolute=5e-6),
    "golden rotary": Limit(absolute=1e-6),
}
# Of the largest gradient of a model; see `assert_gradients_close`.
FAINT = 1e-3
# Two scores nearer than this, over the row's largest, may be ordered either way by two
# ways of computing them.
NEAR_TIE = 1e-5
# Of the rows that choose, this share may differ by a near tie.
NEAR_TIES_ALLOWED = 1e-4


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest |difference| over the largest |expected|; positions where both are the same infinity
    do not count.
    """
    actual, expected = actual.detach().double(), expected.detach().double()
    same_infinity = (actual == expected) & expected.isinf()
    difference = (actual - expected).masked_fill(same_infinity, 0.0).abs()
    if difference.numel() == 0:
        return 0.0
    size = expected.masked_fill(expected.isinf(), 0.0).abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return (difference.max() / size).item()


def assert_close(actual: Tensor, expected: Tensor, limit: str, what: str = "") -> None:
    """AssertionError unless shapes agree, nothing is NaN, infinities stand in the same places and
    the error is within LIMITS[limit].
    """
    assert actual.shape == expected.shape, f"{what}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    a, e = actual.detach().double(), expected.detach().double()
    assert not bool(e.isnan().any()), f"{what}: the expected value holds NaN"
    assert not bool(a.isnan().any()), f"{what}: {int(a.isnan().sum())} of {a.numel()} values are NaN"
    infinite = a.isinf() | e.isinf()
    assert torch.equal(a[infinite], e[infinite]), f"{what}: infinities stand elsewhere"
    a, e = a.masked_fill(infinite, 0.0), e.masked_fill(infinite, 0.0)
    if a.numel() == 0:
        return
    allowed = LIMITS[limit].relative * e.abs().max().item() + LIMITS[limit].absolute
    error = (a - e).abs().max().item()
    assert error <= allowed, f"{what}: error {error:.3g}, limit {allowed:.3g} ({limit})"


def assert_gradients_close(actual: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], limit: str) -> None:
    """The error of each parameter's gradient; None counts as zeros (no entry was closed, so
    nothing reached the compressor).

    A gradient that is zero by construction is rounding noise of the others': errors count against
    at least FAINT of the largest.
    """
    assert actual.keys() == expected.keys()
    largest = max((g.abs().max().item() for g in expected.values() if g is not None), default=0.0)
    for name, pair in ((name, (actual[name], expected[name])) for name in actual):
        one = next((g for g in pair if g is not None), torch.zeros(1))
        gradient, truth = (torch.zeros_like(one) if g is None else g for g in pair)
        error = (gradient - truth).abs().max().item()
        allowed = LIMITS[limit].relative * max(truth.abs().max().item(), FAINT * largest)
        assert error <= allowed, f"{name}: error {error:.3g}, limit {allowed:.3g} ({limit})"


# Configs and models.


def random_config(draw: random.Random, **fixed) -> Dsv4Config:
    """A small valid config with every size and constant drawn; `fixed` fields are kept.

    Index heads are at least 8: with few, all of a query's head scores are often zero, and zeros
    tie.
    """
    head_dim = draw.choice((8, 12, 16, 24, 32))
    rope = draw.choice([r for r in (2, 4, 6, 8, 16) if r <= head_dim])
    heads = draw.choice((1, 2, 3, 4, 6, 8))
    experts = draw.choice((1, 2, 4, 7, 8, 16))
    layers = draw.randint(1, 5)
    values = {
        "vocab_size": draw.choice((17, 64, 101)),
        "hidden_size": draw.choice((16, 24, 32, 50)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "qk_rope_head_dim": rope,
        "q_lora_rank": draw.choice((8, 12, 17)),
        "o_groups": draw.choice([g for g in range(1, heads + 1) if heads % g == 0]),
        "o_lora_rank": draw.choice((4, 8, 9)),
        "sliding_window": draw.choice((2, 3, 5, 8, 16, 31, 128)),
        "layer_types": draw.choices((SLIDING, CSA, HCA), weights=(2, 4, 3), k=layers),
        "mlp_layer_types": draw.choices((HASH_MOE, MOE), weights=(1, 2), k=layers),
        "compress_rates": {
            CSA: draw.choice((2, 3, 4, 4, 5, 8)),
            HCA: draw.choice((3, 6, 8, 16, 32)),
        },
        "index_n_heads": draw.choice((8, 12, 16)),
        "index_head_dim": rope + draw.choice((0, 2, 8)),
        "index_topk": draw.choice((1, 2, 3, 5, 8, 64)),
        "n_routed_experts": experts,
        "num_experts_per_tok": draw.randint(1, min(experts, 4)),
        "moe_intermediate_size": draw.choice((8, 16, 20)),
        "routed_scaling_factor": draw.choice((1.0, 1.5, 2.5)),
        "swiglu_limit": draw.choice((0.3, 1.0, 10.0)),
        "hc_mult": draw.choice((2, 3, 4)),
        "hc_sinkhorn_iters": draw.choice((1, 2, 3, 7, 20)),
        "hc_eps": draw.choice((1e-6, 1e-6, 1e-2)),
        "rms_norm_eps": draw.choice((1e-6, 1e-5)),
        "max_position_embeddings": 4096,
        "rope_parameters": {kind: random_rope(draw, theta) for kind, theta in (("main", 1e4), ("compress", 16e4))},
        "num_nextn_predict_layers": 0,
    }
    return Dsv4Config(**values | fixed)


def random_rope(draw: random.Random, theta: float) -> dict:
    """Plain rotary, or YaRN with a short original length so that its ramp is met."""
    if draw.random() < 0.4:
        return {"rope_type": "default", "rope_theta": theta}
    return {
        "rope_type": "yarn",
        "rope_theta": draw.choice((theta, 4e4)),
        "factor": draw.choice((2.0, 16.0)),
        "original_max_position_embeddings": draw.choice((16, 64, 512)),
        "beta_fast": draw.choice((32, 8)),
        "beta_slow": draw.choice((1, 2)),
        "attention_factor": draw.choice((1.0, 1.0, 1.3)),
    }


def fault_config(**overrides) -> Dsv4Config:
    """One block of each kind and a second CSA block, two of them hash: short inputs pass every
    boundary.
    """
    return Dsv4Config.tiny(**{"layer_types": (SLIDING, CSA, HCA, CSA), "num_hash_layers": 2} | overrides)


def random_ids(config: Dsv4Config, rows: int, tokens: int, seed: int = 0) -> Tensor:
    """[rows, tokens] int64, from a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.vocab_size, (rows, tokens), generator=generator, device="cpu")


def twin(model: Dsv4):
    """A transformers DeepseekV4ForCausalLM over the same tensors (shared, each in the dtype it has
    here), in eval mode.

    A bfloat16 model gives what transformers holds after loading in bfloat16: the same parameters
    are float32 in both.
    """
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
    from transformers.utils import logging

    from dsv4.convert.names import Place, from_place

    # It remarks on every YaRN factor that is not the ratio of the two lengths.
    logging.set_verbosity_error()
    config = DeepseekV4Config(**model.config.to_hf("transformers"))
    config._attn_implementation = config._experts_implementation = "eager"
    theirs = DeepseekV4ForCausalLM(config)
    tensors = {from_place("transformers", Place(name)): tensor for name, tensor in model.state_dict().items()}
    theirs.load_state_dict(tensors, strict=True, assign=True)
    return theirs.eval()


# Choices: experts and entries, whose scores may tie.


@contextmanager
def choices_of(theirs) -> Iterator[dict[str, Tensor]]:
    """Collects what a transformers model chooses: {our name: [b s k] int64} of every router and
    indexer that runs inside.
    """
    found: dict[str, Tensor] = {}
    handles = []

    def keep(name: str, pick):
        def hook(module, args, output):
            found[name] = pick(args, output).detach()

        return hook

    def per_token(args, output) -> Tensor:
        return output[2].view(*args[0].shape[:2], -1)

    for i, layer in enumerate(theirs.model.layers):
        handles.append(layer.mlp.gate.register_forward_hook(keep(f"layers.{i}.mlp.expert_indices", per_token)))
        indexer = getattr(layer.self_attn.compressor, "indexer", None)
        if indexer is not None:
            name = f"layers.{i}.self_attn.compressor.indexer.indexer_selection"
            handles.append(indexer.register_forward_hook(keep(name, lambda args, output: output)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


SCORES_OF = {"indexer_selection": "indexer_scores", "expert_indices": "router_selection_scores"}


def as_sets(chosen: Tensor) -> Tensor:
    """[... k] -> the same in ascending order, so that equal sets are equal tensors."""
    return chosen.sort(dim=-1).values


def boundary_gap(scores: Tensor, k: int) -> Tensor:
    """scores [... e] -> [...]: the last chosen score minus the first left out, over the row's
    largest finite |score|; inf if all fit.
    """
    finite = scores.masked_fill(scores.isinf(), 0.0)
    if scores.shape[-1] <= k:
        return torch.full(scores.shape[:-1], torch.inf)
    best = scores.double().sort(dim=-1, descending=True).values
    gap = (best[..., k - 1] - best[..., k]) / finite.abs().amax(-1).clamp(min=1e-30)
    return gap.nan_to_num(nan=torch.inf)


@dataclass(frozen=True)
class Agreement:
    """clean: [b s] bool, tokens that no differing choice can have touched; ties: rows, of `rows`,
    that chose differently by a near tie. Equal scores are not counted: transformers has no rule.
    """

    clean: Tensor
    ties: int
    rows: int


def agree(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> Agreement:
    """Compare the choices of two ways of running one model, block by block.

    Args:
        ours: expert_indices and indexer_selection of every block with the scores they were made
            from, as `run_with_cache` returns.
        theirs: the same choices, made the other way.
    Raises AssertionError where they differ and the scores are not near a tie. Later tokens and
    blocks may then differ as well: they are not compared, and not clean.
    """
    size = next(iter(theirs.values())).shape[:2]
    touched = torch.zeros(size, dtype=torch.bool)
    ties = rows = 0
    for name in (name for name in ours if name in theirs):
        differs = (as_sets(ours[name]) != as_sets(theirs[name])).any(-1) & ~touched
        rows += int((~touched).sum())
        if bool(differs.any()):
            leaf = name.rsplit(".", 1)[-1]
            scores = ours[name.replace(leaf, SCORES_OF[leaf])]
            gap = boundary_gap(scores, ours[name].shape[-1])[differs]
            assert bool((gap <= NEAR_TIE).all()), f"{name} differs in {len(gap)} rows that do not tie: gaps {gap.tolist()[:5]}"
            ties += int((gap > 0).sum())
        touched = (touched | differs).cummax(dim=1).values
    return Agreement(~touched, ties, rows)


CHOICES = ("expert_indices", "indexer_selection", *SCORES_OF.values())


def names_of(model: Dsv4, leaves: Collection[str]) -> list[str]:
    """The full names of every value of the model with one of these leaf names, in forward order."""
    return [name for name in model.hook_dict if name.rsplit(".", 1)[-1] in leaves]


@dataclass(frozen=True)
class Parity:
    """error: relative error of the logits of clean tokens; agreement: of the choices."""

    error: float
    agreement: Agreement


def parity(model: Dsv4, theirs, ids: Tensor) -> Parity:
    """One run of each over the same ids [b s], without padding."""
    with torch.no_grad(), choices_of(theirs) as chosen:
        expected = theirs(input_ids=ids, use_cache=False).logits
        logits = model(ids)
        _, cache = model.run_with_cache(ids, names_of(model, CHOICES), max_bytes=None)
    agreement = agree(cache, chosen)
    return Parity(relative_error(logits[agreement.clean], expected[agreement.clean]), agreement)
