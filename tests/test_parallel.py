"""A model spread over processes against one process: every value, edits, gradients, files, generation, errors."""

import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dsv4 import Dsv4, Dsv4Config, collectives, mesh_stage, sharded
from dsv4.config import CSA, HASH_MOE, HCA, MOE, SLIDING
from dsv4.convert.layout import layout
from dsv4.parallel import parallelize
from dsv4.parallel_plan import CUTS, PARTS, PLAN
from dsv4.pretrained import keep_stored
from dsv4.testing import agree, assert_close, assert_gradients_close, random_config
from dsv4.testing_checkpoints import Recipe, make_checkpoint
from dsv4.testing_parallel import Group, run_group
from dsv4.testing_probes import changed, leaf, padded_batch, writable
from dsv4.traffic import ALL_TO_ALL, GATHER, Traffic
from dsv4.values import VALUES

FILE = Path(__file__)
# name -> sizes and names of the mesh
MESHES = {
    "tp2": ((2,), ("tp",)),
    "ep2": ((2,), ("ep",)),
    "pp2": ((2,), ("pp",)),
    "tp4": ((4,), ("tp",)),
    "ep4": ((4,), ("ep",)),
    "pp2tp2": ((2, 2), ("pp", "tp")),
    "ep2tp2": ((2, 2), ("ep", "tp")),
}
# Behind the name of a mesh: every mixture sends rows to and fro, as large ones do, however small it is.
SENT = "-sent"
SPREAD = "spread"
RANDOM_MODELS = 8
# In a process of a group: the mesh of the check that runs.
USED: list[str] = []


def run(item: str) -> None:
    """One check, "mesh:check", in a process of a group."""
    mesh, name = item.split(":")
    USED.append(mesh)
    with pytest.MonkeyPatch.context() as patch:
        if mesh.endswith(SENT):
            patch.setattr(sharded, "traffic", lambda *sizes: Traffic(gather=1 << 60, all_to_all=0))
        globals()[name]()


def config(**overrides) -> Dsv4Config:
    """Every kind of attention, each with a kind of routing, and sizes that four processes divide."""
    kinds = {"layer_types": [SLIDING, CSA, HCA, CSA], "mlp_layer_types": [HASH_MOE, MOE, HASH_MOE, HASH_MOE]}
    return Dsv4Config.tiny(**{**kinds, "o_groups": 4, "hc_sinkhorn_iters": 4, **overrides})


@dataclass
class Case:
    """One model whole and spread, with a batch of a full and a padded row."""

    mesh: DeviceMesh
    whole: Dsv4
    spread: Dsv4
    ids: torch.Tensor
    mask: torch.Tensor

    @property
    def real(self):
        return self.mask.bool()

    @property
    def has_stages(self) -> bool:
        return "pp" in self.mesh.mesh_dim_names


@functools.cache
def mesh_of(name: str) -> DeviceMesh:
    sizes, names = MESHES[name.removesuffix(SENT)]
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def case() -> Case:
    return case_of(USED[-1])


@functools.cache
def case_of(name: str) -> Case:
    mesh = mesh_of(name.removesuffix(SENT))
    spread = parallelize(Dsv4.from_config(config(), seed=0), mesh)
    whole = Dsv4.from_config(config(), seed=0)
    ids, mask = padded_batch(whole.vocab_size)
    return Case(mesh, whole, spread, ids, mask)


def both(run):
    """run(model) of the whole and of the spread model."""
    return run(case().whole), run(case().spread)


def compare(run, what: str = "") -> None:
    expected, actual = both(run)
    assert_close(actual, expected, SPREAD, what)


def logits(model, hooks=(), **more):
    here = case()
    return model.run_with_hooks(here.ids, list(hooks), attention_mask=here.mask, **more)[here.real]


def edit(value, hook):
    """Another value that every later one feels; where a Sinkhorn iteration follows, one that it does not magnify."""
    if leaf(hook.name).endswith("comb_start"):
        generator = torch.Generator().manual_seed(sum(map(ord, hook.name)))
        return value * (0.8 + 0.4 * torch.rand(value.shape, generator=generator))
    return changed(value, hook)


def expect(kind: type[BaseException], words: str, do) -> None:
    with pytest.raises(kind, match=words):
        do()


def on_every_rank(x: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x.contiguous())
    return found


# Checks: run in every process of a group.


@torch.no_grad()
def check_values():
    """Every value, whole, on every rank; nothing but rounding differs from one process."""
    here = case()
    compare(logits)
    (expected, wanted), (actual, found) = both(lambda m: m.run_with_cache(here.ids, "**", attention_mask=here.mask, max_bytes=None))
    assert_close(actual, expected, SPREAD)
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        if value.is_floating_point():
            assert_close(found[name], value, SPREAD, name)
        else:
            assert torch.equal(found[name], value), name
        if value.numel():
            assert all(torch.equal(found[name].view(torch.uint8), other) for other in on_every_rank(found[name].view(torch.uint8))), name


@torch.no_grad()
def check_gathered_while_listened():
    """Nothing is put together in a run that nobody watches, and one value where one is watched."""
    model, put_together = case().spread, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh_stage, "gather", lambda *args: put_together.append(1) or collectives.gather(*args))
        logits(model)
        assert put_together == []
        logits(model, [("layers.1.mlp.mlp_output", lambda value, hook: None)])
        assert put_together == []
        logits(model, [("layers.1.mlp.mlp_neurons", lambda value, hook: None)])
    is_there = 1 in model.spread.layers and model.spread.dims.tp is not None
    assert len(put_together) == is_there


@torch.no_grad()
def check_which_form():
    """Few tokens are gathered and many send rows; a mixture whose inner values someone listens to gathers, and that one alone."""
    model, sends = case().spread, []
    if model.spread.dims.ep is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded, "send", lambda *args: sends.append(args[1:3]) or collectives.send(*args))
        held, ranks = len(model.spread.layers), model.layers[model.spread.layers[0]].mlp.experts.shards.size()
        is_there = 1 in model.spread.layers
        logits(model)
        assert len(sends) == (2 * held if USED[-1].endswith(SENT) else 0)
        assert all(len(there) == len(here) == ranks for there, here in sends)
        sends.clear()
        logits(model, [("layers.1.mlp.expert_outputs", lambda value, hook: None)])
        assert len(sends) == (2 * (held - is_there) if USED[-1].endswith(SENT) else 0)
        sends.clear()
        # What else there is of a mixture is whole on every rank in both forms.
        names = [f"layers.*.mlp.{name}" for name in ("router_scores", "expert_indices", "expert_weights", "routed_output", "mlp_output")]
        (_, wanted), (_, found) = both(lambda m: m.run_with_cache(case().ids, names, attention_mask=case().mask))
        assert len(sends) == (2 * held if USED[-1].endswith(SENT) else 0)
    for name, value in wanted.items():
        assert_close(found[name].double(), value.double(), SPREAD, name)
        assert all(torch.equal(found[name], other) for other in on_every_rank(found[name])), name
    assert torch.equal(logits(model), logits(model))


def banks(**sizes):
    """The experts of a block that this rank's stage has: all of them, and this rank's."""
    wide = config(num_hidden_layers=2, layer_types=[SLIDING] * 2, mlp_layer_types=[MOE] * 2, **sizes)
    whole, spread = Dsv4.from_config(wide, seed=0), parallelize(Dsv4.from_config(wide, seed=0), case().mesh)
    return [model.layers[spread.spread.layers[0]].mlp.experts for model in (whole, spread)]


def mixed(bank, x, indices, weights, valid=None):
    """Output, and gradients of activations, routing weights and this rank's experts."""
    bank.zero_grad(set_to_none=True)
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out = bank(x, indices, weights, valid)
    (out * torch.linspace(-1.0, 1.0, out.numel()).view(out.shape)).sum().backward()
    return out.detach(), x.grad, weights.grad, *(p.grad for p in bank.parameters())


def mixtures_agree(whole, own, *given):
    expected, actual = mixed(whole, *given), mixed(own, *given)
    for one, other in zip(actual[:3], expected[:3], strict=True):
        assert_close(one, other, "spread gradient")
    for one, other in zip(actual[3:], expected[3:], strict=True):
        part = other[own.first : own.first + own.share]
        assert_close(one, part, "spread gradient") if part.abs().max() > 0 else torch.testing.assert_close(one, part)


def check_mixtures_of_any_size():
    """Fewer tokens than ranks, tokens that do not divide, every token to one rank, ranks of padding; gradients too."""
    if case().spread.spread.dims.ep is None:
        return
    whole, own = banks()
    draw = torch.Generator().manual_seed(0)
    for tokens in (1, 2, 3, 5, 13):
        x, weights = torch.randn(1, tokens, whole.width, generator=draw), torch.rand(1, tokens, 2, generator=draw)
        spread_out = torch.stack([torch.randperm(8, generator=draw)[:2] for _ in range(tokens)]).view(1, tokens, 2)
        some, first, none = torch.rand(1, tokens, generator=draw) < 0.6, torch.arange(tokens).view(1, -1) < 1, torch.zeros(1, tokens) > 0
        for indices in (spread_out, torch.tensor([0, 1]).expand(1, tokens, 2), torch.full((1, tokens, 2), 7)):
            for valid in (None, some, first, none):
                mixtures_agree(whole, own, x, indices.contiguous(), weights, valid)


@torch.no_grad()
def check_mixture_by_size():
    """Nothing forced: the rule itself, above and below its border, in a mixture of one slot."""
    if case().spread.spread.dims.ep is None or USED[-1].endswith(SENT):
        return
    whole, own = banks(hidden_size=1024, num_experts_per_tok=1, n_routed_experts=4)
    forms = {}
    for tokens in (1, 64, 2304):
        x, weights = torch.randn(1, tokens, 1024, generator=torch.Generator().manual_seed(0)), torch.ones(1, tokens, 1)
        indices = torch.arange(tokens).view(1, tokens, 1) % 4
        forms[tokens] = own.traffic(x, indices).form
        sends = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sharded, "send", lambda *args, sends=sends: sends.append(1) or collectives.send(*args))
            assert_close(own(x, indices, weights), whole(x, indices, weights), SPREAD)
        assert len(sends) == {GATHER: 0, ALL_TO_ALL: 2}[forms[tokens]]
    # Four ranks save bytes; two do not, in float32.
    assert forms == {1: GATHER, 64: GATHER, 2304: ALL_TO_ALL if own.shards.size() == 4 else GATHER}


@torch.no_grad()
def check_each_value_alone():
    """A value listened to alone: the fused way everywhere else."""
    here = case()
    for name in [n for n in here.whole.hook_dict if here.whole.hook_dict[n].layer in (None, 1)]:
        (_, wanted), (_, found) = both(lambda m, name=name: m.run_with_cache(here.ids, name, attention_mask=here.mask, pos=-1))
        assert_close(found[name].double(), wanted[name].double(), SPREAD, name)


def edited(names):
    for name in names:
        compare(lambda m, name=name: logits(m, [(name, edit)]), name)


@torch.no_grad()
def check_edits():
    here = case()
    edited(n for n in writable(here.whole) if here.whole.hook_dict[n].layer in (None, 1))


@torch.no_grad()
def edits_of_mixtures():
    here = case()
    edited(n for n in writable(here.whole) if here.whole.hook_dict[n].layer == 1 and ".mlp." in n)


@torch.no_grad()
def check_all_edits():
    edited(writable(case().whole))


@torch.no_grad()
def check_edits_in_place():
    def write(value, hook):
        value.copy_(edit(value.clone(), hook))

    for name in ("attention_values", "attention_keys", "attention_scores", "attention_head_results", "attention_premix"):
        compare(lambda m, name=name: logits(m, [(f"layers.1.self_attn.{name}", write)]), name)


@torch.no_grad()
def check_replaced_by_itself():
    """Bit for bit what a run is that reads the same point."""
    model = case().spread
    for name in [n for n in writable(model) if model.hook_dict[n].layer == 1]:
        read = logits(model, [(name, lambda value, hook: None)])
        assert torch.equal(read, logits(model, [(name, lambda value, hook: value.clone())])), name


def loss(model, **more):
    here = case()
    return model(attention_mask=here.mask, **more).logsumexp(-1)[here.real].square().sum()


def check_gradients():
    """Of the embeddings given, and of every parameter: a rank's part is that part of the whole gradient."""
    here = case()

    def run(model):
        model.zero_grad(set_to_none=True)
        given = here.whole.embed_tokens.weight.detach()[here.ids].requires_grad_()
        loss(model, inputs_embeds=given, input_ids=here.ids).backward()
        return given.grad, {name: p.grad for name, p in model.named_parameters()}

    (expected, whole), (actual, parts) = both(run)
    assert_close(actual, expected, SPREAD)
    cuts = here.spread.spread.cuts
    named = {name: g if name not in cuts else None if g is None else cut(g, cuts[name]) for name, g in whole.items() if name in parts}
    largest = {"largest": max(whole.values(), key=lambda g: -1 if g is None else g.abs().max())}
    assert_gradients_close(parts | largest, named | largest, "spread gradient")


def cut(tensor, part):
    return tensor.narrow(part.axis, part.begin, part.end - part.begin)


def check_gradients_of_values():
    """Of every value in the graph, whole on every rank."""
    here = case()
    names = [n for n, point in here.whole.hook_dict.items() if point.dtype != "i"]
    # All at once, and a few at a time: the exchanges of a gradient are then others.
    for some in (names, names[7:9], names[60:61], [names[20], names[90]]):
        gradients_agree(some)


def gradients_agree(names):
    here = case()

    def run(model):
        out, cache = model.run_with_cache(here.ids, names, attention_mask=here.mask, max_bytes=None, detach=False)
        total = out.logsumexp(-1)[here.real].square().sum()
        values = [cache[n] for n in names]
        return dict(zip(names, torch.autograd.grad(total, values, allow_unused=True), strict=True))

    expected, actual = both(run)
    assert_gradients_close(actual, expected, "spread gradient")


def check_gradient_hooks():
    here = case()
    seen = {}

    def run(model):
        given = here.whole.embed_tokens.weight.detach()[here.ids].requires_grad_()

        def halve(grad, hook):
            seen.setdefault(hook.name, []).append(grad.clone())
            return grad * 0.5

        names = ["layers.1.self_attn.attention_head_outputs", "layers.1.mlp.mlp_neurons", "layers.2.layer_input"]
        with model.hooks(bwd_hooks=[(n, halve) for n in names]):
            loss(model, inputs_embeds=given, input_ids=here.ids).backward()
        return given.grad

    compare(run)
    for name, (expected, actual) in seen.items():
        assert_close(actual, expected, "spread gradient", name)


def check_gradients_of_gradients():
    """Refused on every rank; the graph without them is not."""
    here = case()
    given = here.whole.embed_tokens.weight.detach()[here.ids].requires_grad_()
    total = loss(here.spread, inputs_embeds=given, input_ids=here.ids)
    expect(ValueError, "gradients of gradients", lambda: torch.autograd.grad(total, given, create_graph=True))
    torch.autograd.grad(loss(here.spread, inputs_embeds=given, input_ids=here.ids), given)


def check_gradients_through_hooks():
    """Of a vector that hooks add, on every rank; nothing else requires one, and everything does."""
    here = case()
    names = [f"layers.{i}.{name}" for i in range(4) for name in ("layer_mid", "self_attn.attention_head_outputs", "mlp.mlp_neurons")]

    def run(model):
        sizes = {"layer_mid": 32, "attention_head_outputs": 16, "mlp_neurons": 16}
        vectors = {n: torch.linspace(0.0, 1.0, sizes[leaf(n)]).requires_grad_() for n in names}
        hooks = [(n, lambda value, hook: value + vectors[hook.name]) for n in names]
        model.run_with_hooks(here.ids, hooks, attention_mask=here.mask).logsumexp(-1)[here.real].square().sum().backward()
        return {n: v.grad for n, v in vectors.items()}

    for requires in (True, False):
        for model in (here.whole, here.spread):
            model.requires_grad_(requires)
        expected, actual = both(run)
        assert_gradients_close(actual, expected, "spread gradient")
    for model in (here.whole, here.spread):
        model.requires_grad_(True)
        model.zero_grad(set_to_none=True)


@torch.no_grad()
def check_shapes_of_input():
    """Ragged rows, right padding, one token, one row, spans of blocks, logits_to_keep."""
    here = case()
    streams = both(lambda m: m(here.ids, attention_mask=here.mask, stop_at_layer=3))
    assert_close(streams[1][here.real], streams[0][here.real], SPREAD)
    runs = (
        lambda m: m([[1, 2, 3], [4, 5], list(range(20))]),
        lambda m: m(here.ids.flip(1), attention_mask=here.mask.flip(1))[here.real.flip(1)],
        lambda m: m([[7]]),
        lambda m: m(here.ids, attention_mask=here.mask, logits_to_keep=2),
        lambda m: m(streams[0], start_at_layer=3, input_ids=here.ids, attention_mask=here.mask)[here.real],
        lambda m: m(here.ids, stop_at_layer=0),
        lambda m: m.project_on_vocab(streams[0]),
    )
    for run in runs:
        compare(run)
    for skipped in ([1], [3], [0, 1], [2, 3]):

        def without(model, skipped=skipped):
            with model.skip_layers(skipped):
                return logits(model)

        compare(without, f"skip {skipped}")


@torch.no_grad()
def check_cache():
    """Fed in pieces, cut back, its rows chosen and multiplied, and all values behind a cache."""
    here = case()
    ids = here.ids[:1]

    def run(model):
        kv = model.new_kv_cache(1, 64)
        first = model(ids[:, :11], kv_cache=kv)
        steps = [model(ids[:, i : i + 1], kv_cache=kv) for i in range(11, 15)]
        kv.truncate(12)
        kv = kv.expand(3).select([0, 2])
        out, cache = model.run_with_cache(ids[:, 12:].repeat(2, 1), "**", kv_cache=kv, max_bytes=None)
        values = [v.double().flatten() for v in cache.values()]
        kv.reset()
        again = model(ids.repeat(2, 1), kv_cache=kv)
        return [torch.cat([first, *steps], 1), out, again], dict(zip(cache, values, strict=True))

    (expected, wanted), (actual, found) = both(run)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, SPREAD)
    for name, value in wanted.items():
        assert_close(found[name], value, SPREAD, name)


def check_generate():
    """Greedy, sampled with a seed, and sampled without one: then the first rank's draws are everyone's."""
    here = case()
    for more in ({}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.7, "top_p": 0.9, "seed": [4, 5], "repetition_penalty": 1.2}):
        expected, actual = both(lambda m, more=more: m.generate(here.ids, 5, attention_mask=here.mask, eos_token_id=None, **more))
        assert torch.equal(actual, expected), more
    torch.manual_seed(dist.get_rank())
    drawn = here.spread.generate(here.ids, 6, attention_mask=here.mask, temperature=2.0, eos_token_id=None)
    assert all(torch.equal(drawn, other) for other in on_every_rank(drawn))
    names = ["layers.1.self_attn.attention_scores", "layers.*.mlp.expert_neurons", "layers.2.layer_output", "logits"]
    hooks = [("layers.1.mlp.expert_weights", lambda value, hook: value * 0.5)]

    def run(model):
        with model.hooks(hooks):
            return model.generate(here.ids, 5, attention_mask=here.mask, names=names, align=True, eos_token_id=None)

    (expected, wanted), (actual, found) = both(run)
    assert torch.equal(actual, expected)
    for name, value in wanted.items():
        assert_close(found[name], value, SPREAD, name)


@torch.no_grad()
def check_random_models():
    """Other sizes, kinds of block, rotary tables and constants; a whole run, a watched one, and one fed token by token."""
    draw = random.Random(0)
    for seed in range(RANDOM_MODELS):
        heads = draw.choice((4, 8))
        sizes = {"num_attention_heads": heads, "o_groups": draw.choice((4, heads)), "n_routed_experts": draw.choice((4, 8, 16))}
        sizes |= {"index_n_heads": draw.choice((8, 12, 16)), "moe_intermediate_size": draw.choice((8, 16, 20)), "num_experts_per_tok": 3}
        kinds = {"layer_types": draw.sample((SLIDING, CSA, HCA), 3), "mlp_layer_types": draw.choices((HASH_MOE, MOE), k=3)}
        drawn = random_config(draw, **sizes, **kinds, vocab_size=64, num_hidden_layers=3)
        whole = Dsv4.from_config(drawn, seed=seed)
        spread = parallelize(Dsv4.from_config(drawn, seed=seed), case().mesh)
        ids, mask = padded_batch(64, draw.choice((3, 17, 40)), 2)
        real = mask.bool()
        (expected, wanted), (actual, found) = (m.run_with_cache(ids, "**", attention_mask=mask, max_bytes=None) for m in (whole, spread))
        plain = spread(ids, attention_mask=mask)
        kv = spread.new_kv_cache(1, 64)
        fed = torch.cat([spread(ids[:1, i : i + 1], kv_cache=kv) for i in range(ids.shape[1])], dim=1)
        agreement = agree(wanted, {name: value for name, value in found.items() if leaf(name) in ("expert_indices", "indexer_selection")})
        if agreement.ties:
            continue
        for run in (actual, plain):
            assert_close(run[real], expected[real], SPREAD, f"model {seed}")
        assert_close(fed[0], expected[0], "row alone", f"model {seed}")
        for name, value in wanted.items():
            assert_close(found[name].double(), value.double(), SPREAD, f"model {seed} {name}")


@torch.no_grad()
def check_first_rank_decides():
    """A hook that is not the same on every rank: what the first rank (of a stage's block the first of the stage) made of the value is
    what all go on with.
    """
    model = case().spread

    def noise(value, hook):
        return value + torch.randn(value.shape, generator=torch.Generator().manual_seed(dist.get_rank()))

    def noise_of_first(value, hook):
        return value + torch.randn(value.shape, generator=torch.Generator().manual_seed(hook.home))

    def not_on_first(value, hook):
        return value + 1 if dist.get_rank() != hook.home else None

    def only_on_first(value, hook):
        return None if dist.get_rank() != hook.home else value + 1

    for name in ("layers.1.self_attn.attention_premix", "layers.2.mlp.mlp_output", "layers.0.mlp.mlp_neurons", "readout"):
        assert torch.equal(logits(model, [(name, noise)]), logits(model, [(name, noise_of_first)])), name
        assert torch.equal(logits(model, [(name, not_on_first)]), logits(model, [(name, lambda value, hook: None)])), name
        assert torch.equal(logits(model, [(name, only_on_first)]), logits(model, [(name, lambda value, hook: value + 1)])), name


def check_nnsight():
    """On models of its own: it leaves a forward on their modules."""
    from nnsight import NNsight

    here = case()
    whole, spread = Dsv4.from_config(config(), seed=0), parallelize(Dsv4.from_config(config(), seed=0), here.mesh)
    found = []
    for model in (NNsight(whole), NNsight(spread)):
        with torch.no_grad(), model.trace(here.ids):
            heads = model.layers[1].self_attn.attention_head_outputs.output.save()
            model.layers[2].mlp.mlp_neurons.output = model.layers[2].mlp.mlp_neurons.output * 0.5
            out = model.logits.output.save()
        found.append((heads, out))
    for expected, actual in zip(*found, strict=True):
        assert_close(actual, expected, SPREAD)


@torch.no_grad()
def check_ranks_of_captures():
    here = case()
    names = ["layers.1.self_attn.attention_probabilities", "logits"]
    out, cache = here.spread.run_with_cache(here.ids, names, ranks="first")
    assert list(cache) == (names if dist.get_rank() == 0 else [])
    assert_close(out, here.whole(here.ids), SPREAD)
    expect(ValueError, 'ranks="first"', lambda: here.spread.run_with_cache(here.ids, names, to="values.safetensors"))
    _, cache = here.spread.run_with_cache(here.ids, names, ranks="first", to="values.safetensors")
    assert list(cache) == (names if dist.get_rank() == 0 else [])
    dist.barrier()
    kind = FileExistsError if dist.get_rank() == 0 else RuntimeError
    expect(kind, "exists", lambda: here.spread.run_with_cache(here.ids, names, ranks="first", to="values.safetensors"))
    dist.barrier()
    Path("values.safetensors").unlink(missing_ok=True)
    compare(logits)


@torch.no_grad()
def check_hook_that_raises():
    """On one rank, at a value in parts and at a whole one: an error on all, which carries it; the next run works."""
    model, last = case().spread, dist.get_world_size() - 1

    def breaks(value, hook):
        if dist.get_rank() == last:
            raise KeyError("the hook's own trouble")

    for name in ("layers.1.self_attn.attention_scores", "layers.2.layer_output", "layers.3.mlp.expert_outputs", "token_embeddings"):
        kind, words = (KeyError, "own trouble") if dist.get_rank() == last else (RuntimeError, f"(?s)rank {last}.*in breaks.*own trouble")
        expect(kind, words, lambda name=name: logits(model, [(name, breaks)]))
        compare(logits)


def check_hook_on_gradients_that_raises():
    here = case()

    def breaks(grad, hook):
        if dist.get_rank() == 1:
            raise KeyError("the hook's own trouble")

    with here.spread.hooks(bwd_hooks=[("layers.2.self_attn.attention_premix", breaks)]):
        total = loss(here.spread, input_ids=here.ids)
    kind = KeyError if dist.get_rank() == 1 else RuntimeError
    expect(kind, "own trouble", total.backward)
    here.spread.zero_grad(set_to_none=True)


@torch.no_grad()
def check_runs_that_differ():
    """Other tokens, or a hook on one rank only: said at once, on every rank."""
    here = case()
    ids = here.ids + (1 if dist.get_rank() == 1 else 0)
    expect(RuntimeError, "rank 1 has other tokens", lambda: here.spread(ids % here.whole.vocab_size))
    hooks = [("layers.1.layer_output", edit)] if dist.get_rank() == 1 else []
    expect(RuntimeError, "listens to other values", lambda: here.spread.run_with_hooks(here.ids, hooks))
    compare(logits)


@torch.no_grad()
def check_analyses():
    """Those that read weights ask every rank for its part."""
    here = case()

    needs_weights = ("head", "neuron")

    def attributed(model, names=("sublayer", "expert", "slot", *needs_weights)):
        _, cache = model.run_with_cache(here.ids, [n for n in model.hook_dict if leaf(n) != "attention_head_results"], max_bytes=None)
        units = [cache.residual.logit_attribution(3, unit=unit) for unit in names]
        if names[-1] not in needs_weights:
            return torch.cat([unit.values.flatten() for unit in units])
        _, premix = model.run_with_cache(here.ids, "**.attention_premix")
        return torch.cat([*(unit.values.flatten() for unit in units), premix.attention.head_results(1).flatten()])

    def ablated(model):
        with model.ablate_experts({1: [3, 5]}, mode="renorm"), model.knockout([1, 2], [9, 10], [2, 3]):
            return logits(model)

    def estimated(model):
        clean, corrupt = here.ids[:1], (here.ids[:1] + 1) % model.vocab_size
        names = ["layers.*.self_attn.attention_head_outputs", "layers.*.mlp.mlp_output"]
        found = model.attribution_patch(clean, corrupt, lambda logits: logits[:, -1, 3].sum(), names)
        return torch.cat([value.flatten() for value in found.values()])

    compare(ablated)
    compare(lambda m: m.logit_lens(here.ids).logits)
    with torch.enable_grad():
        expected, actual = both(estimated)
    assert_close(actual, expected, "spread gradient")
    if here.has_stages:
        compare(lambda m: attributed(m, ("sublayer", "expert", "slot")))
        for unit in needs_weights:
            expect(ValueError, r"which stage \d holds; use a mesh without", lambda unit=unit: attributed(here.spread, (unit,)))
    else:
        compare(attributed)


def check_what_is_refused():
    here = case()
    model = here.spread
    expect(ValueError, "already", lambda: parallelize(model, here.mesh))
    expect(ValueError, "weights=.dequantized", model.dequantize)
    expect(ValueError, "save_pretrained", lambda: model.save_pretrained("nowhere"))
    expect(ValueError, "compile_decode", model.compile_decode)
    expect(ValueError, "forward_static", lambda: model.forward_static(here.ids, model.new_kv_cache(2, 64)))


def check_precision():
    """bfloat16: the logits are as far from float32 as one process's, to a factor of two."""
    here = case()
    whole, spread = Dsv4.from_config(config(), seed=0).bfloat16(), parallelize(Dsv4.from_config(config(), seed=0), here.mesh).bfloat16()
    with torch.no_grad():
        exact = here.whole(here.ids)
        error = [(m(here.ids) - exact).abs().median() for m in (whole, spread)]
    assert error[1] <= 2 * error[0], error


@functools.cache
def stored(linears: str, experts: str, scheme: str) -> tuple[Path, Dsv4Config]:
    """A checkpoint that every rank of the group reads, with sizes whose parts are whole scale blocks."""
    sizes = {"hidden_size": 64, "head_dim": 64, "num_attention_heads": 8, "q_lora_rank": 32, "o_lora_rank": 128, "o_groups": 4}
    sizes |= {"index_n_heads": 8, "index_head_dim": 64, "moe_intermediate_size": 512, "num_hidden_layers": 3}
    wide = config(**sizes, layer_types=[SLIDING, CSA, HCA], mlp_layer_types=[HASH_MOE, MOE, MOE])
    folder = Path(f"{linears}-{experts}-{scheme}")
    if dist.get_rank() == 0 and not folder.exists():
        make_checkpoint(folder, wide, Recipe(scheme=scheme, linears=linears, experts=experts))
    dist.barrier()
    return folder, wide


FORMATS = (("FP8", "FP4", "official"), ("FP8", "FP8", "transformers"), ("BF16", "BF16", "official"))


def check_files():
    """In the formats of the released files."""
    load_files(FORMATS[:1])


def files_as_stored():
    load_files(FORMATS[:1], ("native",))


def check_other_files():
    load_files(FORMATS[1:])


@torch.no_grad()
def load_files(every, kinds=("native", "dequantized")):
    """Each rank loads its part, kept as stored or decoded, and computes what a process with all of it does."""
    here = case()
    for formats in every:
        folder, wide = stored(*formats)
        for weights in kinds:
            load = functools.partial(Dsv4.from_pretrained, folder, weights=weights, dtype=torch.float32)
            models = load(), load(mesh=here.mesh)
            state = models[0].state_dict()
            cuts = models[1].spread.cuts
            for name, part in models[1].state_dict().items():
                expected = cut(state[name], cuts[name]) if name in cuts else state[name]
                assert part.dtype == expected.dtype
                assert torch.equal(bits(part), bits(expected)), name
            ids, mask = padded_batch(wide.vocab_size, 14)
            (expected, wanted), (actual, found) = (m.run_with_cache(ids, "**", attention_mask=mask, max_bytes=None) for m in models)
            assert_close(actual[mask.bool()], expected[mask.bool()], SPREAD, f"{formats} {weights}")
            for name, value in wanted.items():
                assert_close(found[name].double(), value.double(), SPREAD, f"{formats} {weights} {name}")
            assert_close(models[1](ids, attention_mask=mask)[mask.bool()], expected[mask.bool()], SPREAD)
            generated = [m.generate(ids, 4, attention_mask=mask, eos_token_id=None) for m in models]
            assert torch.equal(*generated)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def check_gradients_through_codes():
    """Codes take none; what is given and what is float32 does."""
    here = case()
    folder, wide = stored(*FORMATS[0])
    ids, mask = padded_batch(wide.vocab_size, 14)
    found = []
    for model in (Dsv4.from_pretrained(folder, dtype=torch.float32), Dsv4.from_pretrained(folder, dtype=torch.float32, mesh=here.mesh)):
        given = torch.randn(*ids.shape, wide.hidden_size, generator=torch.Generator().manual_seed(0)).requires_grad_()
        out = model(inputs_embeds=given, input_ids=ids, attention_mask=mask)
        out.logsumexp(-1)[mask.bool()].square().sum().backward()
        found.append(given.grad)
    assert_close(found[1], found[0], "spread gradient")


def check_illegal_sizes():
    """Said before anything is read, on every rank."""
    if case().mesh.mesh_dim_names != ("pp",):
        expect(ValueError, "do not divide 3 routed experts; legal sizes for this model are 1, 3", lambda: split_over(n_routed_experts=3))
    if "tp" in case().mesh.mesh_dim_names:
        expect(ValueError, "do not divide 1 output groups; legal", lambda: split_over(o_groups=1))


def split_over(**overrides):
    return parallelize(Dsv4.from_config(config(**overrides)), case().mesh)


# Not in CHECKS: these end the group.


def ends_by_a_hook():
    """An error that nobody catches, on one rank."""

    def breaks(value, hook):
        if dist.get_rank() == 1:
            raise KeyError("the hook's own trouble")

    logits(case().spread, [("layers.1.mlp.mlp_neurons", breaks)])


def ends_by_a_kill():
    """A rank that is killed in the middle of a run."""

    def dies(value, hook):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    logits(case().spread, [("layers.1.mlp.mlp_neurons", dies)])


def ends_by_a_kill_among_rows():
    """A rank that is killed when the others have sent it rows and wait for theirs."""
    sends = []

    def dies(*args):
        sends.append(1)
        if dist.get_rank() == 1 and len(sends) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return collectives.send(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded, "send", dies)
        logits(case().spread)


def ends_by_a_rank_that_waits():
    """A rank that does not come: the others wait as long as the group was told to, whatever the mesh."""

    def waits(value, hook):
        if dist.get_rank() == 1:
            time.sleep(3 * SHORT)

    logits(case().spread, [("layers.1.mlp.mlp_neurons", waits)])


CHECKS = [name for name in globals() if name.startswith("check_")]
SLOW = ("check_all_edits", "check_each_value_alone", "check_other_files", "check_random_models", "check_replaced_by_itself")
FEW = ("check_values", "check_edits_in_place", "check_gradients", "check_cache", "check_hook_that_raises", "check_runs_that_differ")
WITH_ROWS = (*FEW, "check_which_form", "edits_of_mixtures", "check_gradients_of_values", "check_gradients_through_codes", "check_generate")
# What the default run makes, by group: its name begins with the number of processes. The slow run makes every check on every mesh, of
# which edits_of_mixtures and files_as_stored are parts. The last item ends the group.
USUAL = {
    "2": (
        *(f"tp2:{name}" for name in CHECKS if name not in SLOW),
        *(f"{mesh}:{name}" for mesh in ("ep2", "pp2") for name in ("check_values", "check_gradients")),
        "tp2:ends_by_a_kill",
    ),
    "2, rows sent": (
        *(f"ep2{SENT}:{name}" for name in (*WITH_ROWS, "check_mixtures_of_any_size")),
        f"tp2{SENT}:files_as_stored",
        f"ep2{SENT}:ends_by_a_kill_among_rows",
    ),
    "4": (
        *(f"pp2tp2:{name}" for name in (*FEW, "files_as_stored")),
        *("tp4:check_values", "tp4:check_gradients", "ep2tp2:check_values"),
        *(f"ep4{SENT}:{name}" for name in ("check_which_form", "check_gradients")),
        *("ep4:check_mixture_by_size", f"ep2tp2{SENT}:check_which_form", f"pp2tp2{SENT}:check_which_form", f"pp2tp2{SENT}:check_gradients"),
        "pp2tp2:ends_by_a_hook",
    ),
}
# Seconds that a group waits whose rank does not come, and after which its processes must have ended.
SHORT, GIVEN_UP = 8, 60


def processes_of(mesh: str) -> int:
    return torch.Size(MESHES[mesh.removesuffix(SENT)][0]).numel()


@pytest.fixture(scope="session")
def group(tmp_path_factory):
    """A group that made the items of USUAL, by its name; started once."""

    @functools.cache
    def of(name: str) -> Group:
        return run_group(FILE, int(name[0]), USUAL[name], tmp_path_factory.mktemp(f"group{name[0]}"))

    return of


@pytest.mark.parametrize(("name", "item"), [(name, item) for name, items in USUAL.items() for item in items[:-1]])
def test_as_one_process(group, name, item):
    said = group(name).results[item]
    assert said == [None] * int(name[0]), "\n".join(filter(None, said))


@pytest.mark.parametrize("name", ["2", "2, rows sent"])
def test_a_killed_process_ends_the_others(group, name):
    killed = group(name)
    assert killed.codes == [1, -signal.SIGKILL], killed.printed
    assert killed.results[USUAL[name][-1]][0].startswith("Traceback")


def test_a_hook_that_raises_ends_every_process(group):
    ended = group("4")
    assert ended.codes == [1] * 4
    said = ended.results["pp2tp2:ends_by_a_hook"]
    assert all("the hook's own trouble" in text and "in breaks" in text for text in said)
    for rank, text in enumerate(said):
        last = text.strip().splitlines()
        assert (
            any(line.startswith("KeyError") for line in last) if rank == 1 else "RuntimeError: a hook at layers.1.mlp.mlp_neurons" in text
        )


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [*MESHES, *(f"{mesh}{SENT}" for mesh in MESHES if mesh != "pp2")])
def test_as_one_process_in_full(tmp_path, mesh):
    for item, said in run_group(FILE, processes_of(mesh), [f"{mesh}:{name}" for name in CHECKS], tmp_path).results.items():
        assert said == [None] * processes_of(mesh), f"{item}:\n" + "\n".join(filter(None, said))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp2", "pp2tp2"])
@pytest.mark.parametrize("how", ["ends_by_a_hook", "ends_by_a_kill", "ends_by_a_rank_that_waits"])
def test_a_lost_process_ends_all(tmp_path, mesh, how):
    """The timeout of init_process_group holds for the mesh's own groups, whose default is half an hour."""
    ended = run_group(FILE, processes_of(mesh), [f"{mesh}:{how}"], tmp_path, patience=SHORT, limit=GIVEN_UP)
    assert 0 not in ended.codes, ended.printed
    if how == "ends_by_a_rank_that_waits":
        assert "imed out" in ended.results[f"{mesh}:{how}"][0]
    else:
        assert ended.codes[1] == (1 if how == "ends_by_a_hook" else -signal.SIGKILL)


# In one process.


@pytest.fixture
def fake_world():
    """A process group of that many processes of which only this one exists: for what is decided without talking."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def of(size: int, rank: int = 0):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)

    yield of
    dist.destroy_process_group()


def test_one_process_is_no_mesh(tmp_path):
    """Bit for bit; the modules are the plain ones."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "tp"))
    folder = tmp_path / "checkpoint"
    make_checkpoint(folder, config(hidden_size=64, moe_intermediate_size=64), Recipe())
    plain, meshed = Dsv4.from_pretrained(folder), Dsv4.from_pretrained(folder, mesh=mesh)
    dist.destroy_process_group()
    assert [type(m) for m in meshed.modules()] == [type(m) for m in plain.modules()]
    ids, mask = padded_batch(plain.vocab_size)
    assert torch.equal(meshed(ids, attention_mask=mask), plain(ids, attention_mask=mask))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(meshed.parameters(), plain.parameters(), strict=True))
    assert torch.equal(meshed.generate(ids, 4, seed=1, temperature=1.0), plain.generate(ids, 4, seed=1, temperature=1.0))


@pytest.mark.parametrize(
    ("sizes", "names", "words"),
    [
        (
            (3,),
            ("tp",),
            r'3 processes over "tp" do not divide 4 attention heads, 4 output groups, .*; legal sizes for this model are 1, 2, 4$',
        ),
        ((16,), ("ep",), r'16 processes over "ep" do not divide 8 routed experts; legal sizes for this model are 1, 2, 4, 8$'),
        ((4, 4), ("ep", "tp"), r'16 processes over "ep" do not divide 8 routed experts'),
        ((5,), ("pp",), r'5 stages over "pp" for 4 blocks; legal sizes for this model are 1 to 4'),
        ((2, 2), ("tp", "pp"), r"mesh dimensions are \('tp', 'pp'\); expected names of .*in that order"),
        ((2,), ("dp",), r"expected names of \('pp', 'ep', 'tp'\)"),
        ((2,), None, "has no names"),
    ],
)
def test_illegal_meshes(fake_world, sizes, names, words):
    fake_world(torch.Size(sizes).numel())
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    with pytest.raises(ValueError, match=words):
        parallelize(Dsv4.from_config(config()), mesh)


def test_parts_of_codes_are_whole_scale_blocks(fake_world, tmp_path):
    """384 neurons are 3 blocks of 128: two processes would cut one; decoded, they may."""
    fake_world(2)
    make_checkpoint(tmp_path, config(hidden_size=64, moe_intermediate_size=384, o_lora_rank=64, head_dim=64, index_head_dim=32), Recipe())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with pytest.raises(ValueError, match=r"384 neurons of the shared expert \(1 x FP8, in blocks of 128\); legal sizes .* are 1$"):
        Dsv4.from_pretrained(tmp_path, mesh=mesh)
    part = Dsv4.from_pretrained(tmp_path, mesh=mesh, weights="dequantized")
    whole = Dsv4.from_pretrained(tmp_path, weights="dequantized").state_dict()
    for name, tensor in part.state_dict().items():
        expected = cut(whole[name], part.spread.cuts[name]) if name in part.spread.cuts else whole[name]
        assert torch.equal(tensor, expected), name


def test_arguments_that_contradict_a_mesh(fake_world, tmp_path):
    fake_world(2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    make_checkpoint(tmp_path, config(), Recipe(linears="BF16", experts="BF16"))
    for more, words in (
        ({"device_map": "auto"}, "leave device_map="),
        ({"experts": "host"}, "leave device_map="),
        ({"device": "cuda"}, "cpu"),
    ):
        with pytest.raises(ValueError, match=words):
            Dsv4.from_pretrained(tmp_path, mesh=mesh, **more)


def test_the_plan_names_what_exists():
    """Every rule meets a module, every tensor that is cut exists, every value in parts has its axis."""
    model = Dsv4.from_config(config())
    paths = dict(model.named_modules())
    for rule in PLAN:
        found = [path for path in paths if matches(path, rule.pattern)]
        assert found, rule
        assert all(set(CUTS[rule.how]) <= {"weight_scale_inv", *dict(paths[path].named_parameters())} | SCALES for path in found)
    for name, axis in PARTS.items():
        assert axis in VALUES[name].axes.split(), name


SCALES = {"gate_up_proj_scale_inv", "down_proj_scale_inv"}


def matches(path: str, pattern: str) -> bool:
    words = zip(path.split("."), pattern.split("."), strict=False)
    return path.count(".") == pattern.count(".") and all(a == b or b == "*" for a, b in words)


DOCS = Path(__file__).parents[1] / "docs" / "parallel.md"
# A line of the page's script -> what runs it on this machine.
ON_A_CPU = {
    'dist.init_process_group("nccl")': 'dist.init_process_group("gloo")',
    "torch.cuda.set_device(dist.get_node_local_rank())": "torch.set_num_threads(1)",
    'mesh = init_device_mesh("cuda", (8,)': 'mesh = init_device_mesh("cpu", (2,)',
    '"deepseek-ai/DeepSeek-V4-Flash"': '"checkpoint"',
    'model.to_tokens("The capital of France is")': "torch.tensor([[1, 2, 3, 4, 5, 6]])",
    "layers.20.": "layers.1.",
    "model.to_string(ids[0])": "ids[0].tolist()",
}


def torchrun(script: str, folder: Path) -> subprocess.CompletedProcess:
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    return subprocess.run(
        command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=GIVEN_UP * 3
    )


@pytest.mark.slow
def test_the_script_of_the_docs(tmp_path):
    script = re.search(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)[1]
    for line, local in ON_A_CPU.items():
        assert line in script
        script = script.replace(line, local)
    make_checkpoint(tmp_path / "checkpoint", config(), Recipe(linears="BF16", experts="BF16"))
    ran = torchrun(script, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "layers.1.self_attn.attention_probabilities  [b N s k]" in ran.stdout
    assert re.search(r"\[1, 2, 3, 4, 5, 6(, \d+){8}\]", ran.stdout)


@pytest.mark.slow
def test_torchrun_ends_with_every_process(tmp_path):
    """An error on one rank, and none of the processes is left."""
    script = """
import os
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from dsv4 import Dsv4, Dsv4Config, collectives, mesh_stage
from dsv4.convert.layout import layout
from dsv4.parallel import parallelize

torch.set_num_threads(1)
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
Path(f"pid{dist.get_rank()}").write_text(str(os.getpid()))
model = parallelize(Dsv4.from_config(Dsv4Config.tiny()), mesh)


def breaks(value, hook):
    if dist.get_rank() == 1:
        raise KeyError("the hook's own trouble")


model.run_with_hooks([[1, 2, 3]], [("layers.1.mlp.mlp_output", breaks)])
"""
    ran = torchrun(script, tmp_path)
    assert ran.returncode != 0
    assert 'KeyError: "the hook\'s own trouble"' in ran.stderr
    assert "raised on rank 1, which ends it on all" in ran.stderr
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid{rank}").read_text()), 0)


def weights_held(model_config: Dsv4Config, sizes: tuple[int, ...], names: tuple[str, ...], rank: int, fake_world) -> int:
    """Bytes of one process, of a checkpoint in the released formats."""
    fake_world(torch.Size(sizes).numel(), rank)
    with torch.device("meta"):
        model = Dsv4(model_config)
        for name, spec in layout(model_config).items():
            if spec.official in ("FP8", "FP4"):
                module = name.rpartition(".")[0]
                if name.endswith(("weight", "gate_up_proj")):
                    keep_stored(model, module, spec.official.lower())
    parallelize(model.bfloat16(), init_device_mesh("cpu", sizes, mesh_dim_names=names))
    return sum(t.nbytes for t in [*model.parameters(), *model.buffers()])


# `(sizes)` of `names` | processes | Flash | Pro
ROWS = re.findall(r"^\| `\((.*?)\)` of `(.*?)` \| (\d+) \| ([\d.]+) GB \| ([\d.]+) GB \|$", DOCS.read_text(), re.MULTILINE)


@pytest.mark.parametrize("row", [ROWS[1], *(pytest.param(row, marks=pytest.mark.slow) for row in (ROWS[0], *ROWS[2:]))])
def test_the_table_of_bytes(fake_world, row):
    sizes, names = tuple(int(n) for n in row[0].split(",") if n), tuple(row[1].split(", "))
    processes = torch.Size(sizes).numel()
    assert int(row[2]) == processes
    stages = sizes[0] if names[0] == "pp" else 1
    for preset, said in ((Dsv4Config.flash(), row[3]), (Dsv4Config.pro(), row[4])):
        firsts = [stage * processes // stages for stage in range(stages)]
        most = max(weights_held(preset, sizes, names, rank, fake_world) for rank in firsts)
        assert f"{most / 1e9:.1f}" == said


@pytest.mark.slow
def test_the_benchmark_runs():
    command = [sys.executable, str(DOCS.parents[1] / "benchmarks" / "parallel.py"), "--pairs", "3", "--tokens", "16", "--rounds", "2"]
    ran = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout.strip().splitlines()[-1])
    assert set(found["overhead"]) == {"forward", "decode"}
    assert [row["processes"] for row in found["scaling"]] == [1, 2, 4]
    assert all(row["experts_gather_ms"] > 0 and row["experts_rows_ms"] > 0 for row in found["scaling"][1:])
