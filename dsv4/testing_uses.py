"""What one does with a model, each as a function of it that returns numbers: a model whose weights are elsewhere has to give the same."""

import torch

from dsv4.testing import random_ids


def ids_of(model):
    return random_ids(model.config, 2, 21, seed=3)


def ragged(model):
    mask = torch.ones(2, 21, dtype=torch.int64)
    mask[1, :5] = 0
    return ids_of(model), mask


def every_value(model):
    ids, mask = ragged(model)
    with torch.no_grad():
        logits, cache = model.run_with_cache(ids, "**", attention_mask=mask)
    return [logits, *cache.values()]


def unwatched(model):
    ids, mask = ragged(model)
    with torch.no_grad():
        return [model(ids, attention_mask=mask), model(ids, logits_to_keep=1), model(ids, stop_at_layer=2)]


def one_token_at_a_time(model):
    ids, mask = ragged(model)
    kv = model.new_kv_cache(2, 32)
    with torch.no_grad():
        out = [model(ids[:, :12], attention_mask=mask[:, :12], kv_cache=kv)]
        out += [model(ids[:, i : i + 1], kv_cache=kv) for i in range(12, 21)]
    copy = kv.select([1, 0])
    with torch.no_grad():
        out.append(model(ids[:, :3].flip(0), kv_cache=copy))
    return out


def generation(model):
    out, cache = model.generate(ids_of(model), 6, names=["layers.*.layer_output", "layers.*.self_attn.attention_scores"], align=True)
    texts = model.generate([[3, 5, 7], [9]], 4, temperature=0.8, seed=1, repetition_penalty=1.1)
    return [out, texts, *cache.values()]


def gradients(model):
    """Of every activation that has one."""
    ids, mask = ragged(model)
    _, cache = model.run_with_cache(ids, "**", attention_mask=mask, detach=False)
    watched = {n: v for n, v in cache.items() if v.requires_grad}
    score = cache["logits"].logsumexp(-1).sum()
    found = torch.autograd.grad(score, list(watched.values()), allow_unused=True)
    return [list(watched), *(torch.zeros(()) if g is None else g for g in found)]


def gradient_hooks(model):
    seen = {}
    ids = ids_of(model)

    def keep(grad, hook):
        seen[hook.name] = grad.clone()
        return grad * 0.5

    names = ["layers.*.layer_output", "layers.*.mlp.expert_weights", "layers.*.mlp.mlp_output"]
    with model.hooks(bwd_hooks=[(name, keep) for name in names]):
        model(ids).logsumexp(-1).sum().backward()
    return [seen[name] for name in sorted(seen)]


def edits(model):
    ids, mask = ragged(model)

    def shift(value, hook):
        return value + 0.25 * (hook.positions >= 2).view(*value.shape[:2], *[1] * (value.dim() - 2)).to(value.dtype)

    def other_experts(value, hook):
        return (value + hook.step + 1) % model.num_experts

    hooks = [
        ("layers.*.layer_output", shift),
        ("layers.*.mlp.expert_outputs", lambda value, hook: value * 0.5),
        ("layers.*.mlp.expert_indices", other_experts),
        ("layers.*.mlp.expert_neurons", lambda value, hook: value * 0.75),
        ("layers.*.self_attn.attention_head_outputs", lambda value, hook: value * hook.valid.unsqueeze(-1).unsqueeze(-1)),
    ]
    with torch.no_grad():
        return [model.run_with_hooks(ids, hooks=[pair], attention_mask=mask) for pair in hooks]


def interventions(model):
    ids = ids_of(model)
    out = []
    vector = torch.linspace(-1, 1, model.hidden_size).to(model.dtype)
    with torch.no_grad():
        for streams in ("all", "post", 1):
            with model.steer(vector, layers=[0, 2], scale=0.5, streams=streams, norm="read"):
                out.append(model(ids))
        with model.skip_layers([1]):
            out.append(model(ids))
        streams = model(ids, stop_at_layer=3)
        out += [model(streams, start_at_layer=3, input_ids=ids), model.loss(ids), model.loss(ids, per_token=True)]
        out += [model.project_on_vocab(streams), model.project_on_vocab(streams[..., 0, :])]
        for readout in ("head", "mean", "each", "final_pre"):
            out.append(model.logit_lens(ids, readout=readout, pos=None).logits)
    return out


def ablations(model):
    ids = ids_of(model)
    out = []
    with torch.no_grad():
        _, cache = model.run_with_cache(ids, "**")
        for mode in ("zero", "mean", "resample"):
            with model.ablate("layers.*.self_attn.attention_output", mode, source=None if mode == "zero" else cache):
                out.append(model(ids))
        with model.ablate("layers.1.self_attn.attention_head_outputs", heads=[1, 2], pos=[3, -1]):
            out.append(model(ids))
        for mode in ("zero", "renorm", "mean"):
            with model.ablate_experts({1: [0, 3], 3: 2}, mode, source=cache if mode == "mean" else None):
                out.append(model(ids))
        with model.ablate_experts({3: 2}, "reroute"):
            out.append(model(ids))
        with model.freeze(cache):
            out.append(model(ids.flip(0)))
        for channels in (("window", "entries", "indexer"), ("window",)):
            with model.knockout([0, 1, 2, 3], queries=[-1, 9], keys=[1, 2, 3], channels=channels):
                out.append(model(ids))
        with model.knockout([1, 2], queries=None, keys=[1], heads=[0]):
            out.append(model(ids))
        with model.splice("layers.2.mlp.mlp_output", lambda x: x * 0.5, use_error_term=False):
            out.append(model(ids))
    return out


def algebra(model):
    ids, mask = ragged(model)
    with torch.no_grad():
        _, cache = model.run_with_cache(ids, "**", attention_mask=mask)
    residual = cache.residual
    out = [residual.write_coefficients(), residual.read_matrix(), residual.decompose().values, residual.accumulated().values]
    out += [residual.stream_mean().values, residual.stream_mean(exact=False).values, residual.streams("layers.2.layer_mid")]
    for unit in ("sublayer", "head", "expert", "slot", "neuron"):
        found = residual.logit_attribution(5, 7, unit=unit)
        out += [found.values, found.total]
    return [*out, cache.stack("attention_output"), cache["layer_output", 2]]


def attention(model):
    ids = ids_of(model)
    with torch.no_grad():
        _, cache = model.run_with_cache(ids, "**")
    found = cache.attention
    out = [*found.sink_mass().values(), *found.token_pattern().values(), *(found.head_results(i) for i in range(model.num_layers))]
    out += [*found.value_paths().values(), *found.value_paths(torch.ones(model.hidden_size)).values()]
    out += [getattr(mass, name) for mass in found.mass_by_kind().values() for name in ("window", "entries", "sink") if hasattr(mass, name)]
    moe = cache.moe
    for each in (moe.usage(), moe.load(), moe.entropy(), moe.coactivation(), moe.router_margin([2, 3])):
        out += list(each.values())
    return out


def patching(model):
    clean, corrupt = ids_of(model), ids_of(model).roll(1, 0)
    corrupt[:, :4] = clean[:, :4]

    def metric(logits):
        return (logits[:, -1, 3] - logits[:, -1, 5]).sum()

    found = model.attribution_patch(clean, corrupt, metric, ["layers.*.layer_output", "layers.*.mlp.mlp_output"])
    out = [found[name] for name in sorted(found)]
    for over in ({"name": "layer_output", "pos": [4, -1]}, {"name": "attention_head_outputs", "layers": [1], "heads": "each"}):
        out.append(model.patch_sweep(clean, corrupt, metric, over, progress=False).metric)
    senders, receivers = ["layers.0.self_attn.attention_output", "layers.1.mlp.mlp_output"], ["layers.3.mlp_collapsed", "readout"]
    return [*out, model.path_patch(clean, corrupt, senders, receivers, metric).metric]


USES = (
    every_value,
    unwatched,
    one_token_at_a_time,
    generation,
    gradients,
    gradient_hooks,
    edits,
    interventions,
    ablations,
    algebra,
    attention,
    patching,
)
