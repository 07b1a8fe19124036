"""The commands that look at one prompt: dsv4 lens, attribute, route, cache, compare, view.

Each makes one result, a dict of plain numbers and words; --json prints it, else it is told in
lines.
"""

import argparse
import json
import math
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4.demo import checkpoint_folder
from dsv4.findings import default_prompts, read_prompt, spell
from dsv4.model import Dsv4
from dsv4.values import RESIDUAL_SET

# What a unit of attribution needs beside the residual set; slots are named by their expert.
UNIT_VALUES = {
    "sublayer": (),
    "head": ("layers.*.self_attn.attention_premix",),
    "expert": ("layers.*.mlp.expert_outputs", "layers.*.mlp.shared_expert_output"),
    "slot": ("layers.*.mlp.expert_outputs", "layers.*.mlp.shared_expert_output"),
    "neuron": ("layers.*.mlp.expert_neurons", "layers.*.mlp.mlp_neurons"),
}
ROUTING_VALUES = ("expert_indices", "expert_weights")
NO_TRANSFORMERS = (
    "transformers is not installed, and compare runs its model on the same checkpoint: pip install transformers, or dsv4's extra `test`"
)
MAX_SHOWN = 4


def run_lens(arguments: argparse.Namespace) -> None:
    model, ids = opened(arguments)
    lens = model.logit_lens(ids, arguments.readout, pos=arguments.pos)
    probabilities, tokens = lens.top(arguments.top)
    position = int(lens.positions[0, 0])
    layers = []
    for at, layer in enumerate(lens.layers):
        rows = zip(probabilities[at].flatten(0, -2), tokens[at].flatten(0, -2), strict=True)
        top = [listed(model, *row) for row in rows]
        layers.append({"layer": layer, "top": top if arguments.readout == "each" else top[0]})
    words = spell(model, ids[0].tolist())
    about = {"readout": arguments.readout, "position": position, "token": words[position]}

    def told() -> list[str]:
        lines = [f'every layer_output read as the token after {words[position]!r} (position {position}), readout "{arguments.readout}"']
        for row in layers:
            is_each = arguments.readout == "each"
            for stream, best in enumerate(row["top"] if is_each else [row["top"]]):
                name = f"{row['layer']:>5}" + (f" stream {stream}" if is_each else "")
                shown = "  ".join(f"{x['token']!r} {x['probability']:.4f}" for x in best)
                lines.append(f"{name}  {shown}")
        return lines

    write(arguments, {**about, "tokens": words, "layers": layers}, told)


def run_attribute(arguments: argparse.Namespace) -> None:
    model, ids = opened(arguments)
    units = list(dict.fromkeys(arguments.unit or ["sublayer"]))
    extra = [name for unit in units for name in UNIT_VALUES[unit]]
    logits, cache = residual_run(model, ids, extra, arguments.pos)
    position = int(cache.positions[0, 0])
    token, answered = arguments.token, arguments.token is None
    token = int(logits[0, position].argmax()) if answered else as_token(model, token)
    against = None if arguments.against is None else as_token(model, arguments.against)
    found = cache.residual.logit_attribution(token, against, unit=units)
    table = found.top(len(found.labels))
    words = spell(model, ids[0].tolist())
    named = [spell(model, [i])[0] for i in (token, against) if i is not None]
    what = f"logit of {named[0]!r}" + (" (the model's answer)" if answered else "")
    what += f" minus that of {named[1]!r}" if len(named) > 1 else ""
    result = {
        "what": what,
        "position": position,
        "token": words[position],
        "tokens": words,
        "total": float(found.total),
        "sum_of_absolute_terms": float(found.values.abs().sum()),
        "norm_scale": float(found.scale),
        "terms": [{"name": r.name, "value": r.value, "share": r.share} for r in table],
    }

    def told() -> list[str]:
        where = f"after {words[position]!r} (position {position})"
        lines = [f"{what} {where}: {result['total']:.4f}, the final norm's scale frozen"]
        shown = result["terms"][: arguments.top]
        width = max(len(term["name"]) for term in shown)
        lines += [f"  {t['name']:<{width}}  {t['value']:>9.4f}  {t['share']:>7.1%}" for t in shown]
        left = len(result["terms"]) - len(shown)
        rest = sum(term["value"] for term in result["terms"][len(shown) :])
        return [*lines, *([f"  {f'{left} more':<{width}}  {rest:>9.4f}"] if left else [])]

    write(arguments, result, told)


def run_route(arguments: argparse.Namespace) -> None:
    model, ids = opened(arguments)
    layers = blocks(model, arguments.layer)
    scored = [i for i in layers if model.layers[i].mlp.scoring != "hash"]
    names = [f"layers.{i}.mlp.{leaf}" for i in layers for leaf in ROUTING_VALUES]
    names += [f"layers.{i}.mlp.router_selection_scores" for i in scored]
    _, cache = model.run_with_cache(ids, names)
    routing = cache.moe
    usage, load, entropy = routing.usage(), routing.load(), routing.entropy("load")
    margin = routing.router_margin(scored) if scored else {}
    words = spell(model, ids[0].tolist())
    position = range(len(words))[arguments.pos]
    rows = []
    for i in layers:
        rows.append(
            {
                "layer": i,
                "router": "hash" if i not in scored else "score",
                "usage": usage[i].tolist(),
                "load": load[i].tolist(),
                "entropy_of_load": float(entropy[i]),
                "expert_indices": cache["expert_indices", i][0].tolist(),
                "expert_weights": cache["expert_weights", i][0].tolist(),
                "router_margin": margin[i][0].tolist() if i in margin else None,
            }
        )

    def told() -> list[str]:
        most = math.log(model.num_experts)
        lines = [
            f"{len(words)} tokens, {model.top_k} of {model.num_experts} experts each; entropy of "
            f"the load in nats (even: {most:.2f}); margin: last chosen score minus first left "
            "out, mean",
            f"block  router  entropy  margin  experts of {words[position]!r} (position {position}); of the prompt, by load",
        ]
        for row in rows:
            slots = zip(row["expert_indices"][position], row["expert_weights"][position], strict=True)
            chosen = sorted(slots, key=lambda slot: -slot[1])
            own = " ".join(f"{e} x {w:.2f}" for e, w in chosen[:MAX_SHOWN])
            best = sorted(range(len(row["load"])), key=lambda e: -row["load"][e])[:MAX_SHOWN]
            total = sum(row["load"]) or 1.0
            loads = " ".join(f"{e} {row['load'][e] / total:.0%}" for e in best)
            margins = row["router_margin"]
            gap = "      -" if margins is None else f"{sum(margins) / len(margins):>7.3f}"
            lines.append(f"{row['layer']:>5}  {row['router']:<6}  {row['entropy_of_load']:>7.2f} {gap}  {own}; {loads}")
        return lines

    about = {"tokens": words, "position": position, "num_experts": model.num_experts}
    write(arguments, {**about, "layers": rows}, told)


def run_cache(arguments: argparse.Namespace) -> None:
    if Path(arguments.out).exists():
        raise FileExistsError(f"--out {arguments.out} exists; saved activations are not overwritten")
    check_folder(arguments.out)
    model, ids = opened(arguments)
    options = {"pos": arguments.pos, "to": arguments.out}
    try:
        _, cache = model.run_with_cache(ids, arguments.names, **options)
    except KeyError as error:
        raise ValueError(f"--names: {error.args[0]}") from error
    values = []
    for name in cache:
        value = cache[name]
        about = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        nbytes = value.numel() * value.element_size()
        values.append({"name": name, "axes": cache.axes[name], **about, "bytes": nbytes})
    total = sum(value["bytes"] for value in values)
    result = {
        "file": arguments.out,
        "tokens": spell(model, ids[0].tolist()),
        "positions": cache.positions[0].tolist(),
        "bytes": total,
        "values": values,
    }

    def told() -> list[str]:
        width = max((len(value["name"]) for value in values), default=0)
        lines = [f"{v['name']:<{width}}  [{v['axes']}]  {v['shape']}  {v['dtype']}  {v['bytes']:,} bytes" for v in values]
        return [
            *lines,
            f"wrote {arguments.out}: {len(values)} values, {total:,} bytes; read it with ActivationCache.load or safetensors",
        ]

    write(arguments, result, told)


def run_compare(arguments: argparse.Namespace) -> None:
    if find_spec("transformers") is None:
        raise ValueError(NO_TRANSFORMERS)
    from dsv4.convert import convert_checkpoint
    from dsv4.convert.hub import fetch

    arguments.dtype = arguments.dtype or "float32"
    dtype = getattr(torch, arguments.dtype)
    model, ids = opened(arguments)
    folder = fetch(arguments.model or checkpoint_folder())
    quantised = any(hasattr(module, "dequantized") for module in model.modules())
    with tempfile.TemporaryDirectory(prefix="dsv4-compare-") as scratch:
        if quantised:
            # transformers decodes FP8 and FP4 on some machines only, and to bfloat16.
            target = Path(scratch) / "dequantised"
            folder = convert_checkpoint(folder, target, to="transformers", dtype=dtype)
        theirs = transformers_model(folder, dtype, model.device)
        table = model.compare(theirs, ids)
    rows = [{"name": r.name, "max_abs": r.max_abs, "relative": r.relative, "shape": list(r.shape)} for r in table]
    result = {
        "tokens": spell(model, ids[0].tolist()),
        "dtype": arguments.dtype,
        "dequantised": quantised,
        "largest_relative": max(row["relative"] for row in rows),
        "values": rows,
    }

    def told() -> list[str]:
        how = "weights dequantised for transformers" if quantised else "as transformers reads it"
        last = f"largest relative error {result['largest_relative']:.3g} ({arguments.dtype}, {how})"
        return [*str(table).splitlines(), last]

    write(arguments, result, told)


def run_view(arguments: argparse.Namespace) -> None:
    check_folder(arguments.out)
    from dsv4 import view

    is_page = Path(arguments.out).suffix.lower() in (".html", ".htm")
    if is_page and arguments.picture:
        raise ValueError(f"--picture {arguments.picture} is a figure: give --out a picture's ending, as in --out {arguments.picture}.png")
    if not is_page and not arguments.picture:
        raise ValueError(
            f"--out {arguments.out}: expected run.html, or a picture's ending with --picture one of {', '.join(view.PICTURES)}"
        )
    if not is_page:
        view.require_matplotlib()
    model, ids = opened(arguments)
    layer = None if arguments.layer is None else blocks(model, arguments.layer)[0]
    if is_page:
        logits, cache = model.run_with_cache(ids, view.page_names(model))
        about = view.page(cache, arguments.out)
    else:
        names = view.picture_names(model, arguments.picture, layer)
        logits, cache = model.run_with_cache(ids, names)
        figure = view.picture(arguments.picture, cache, layer=layer)
        figure.savefig(arguments.out, dpi=110)
        about = {"picture": arguments.picture}
    answer = listed(model, *logits[0, -1].softmax(-1).topk(1))[0]
    size = Path(arguments.out).stat().st_size
    result = {"file": arguments.out, "bytes": size, **about, "answer": answer}
    said = f"wrote {arguments.out} ({size:,} bytes)"
    said += ": open it in a browser, it needs nothing else" if is_page else ""
    write(arguments, result, lambda: [said])


# What they share.


def opened(arguments: argparse.Namespace) -> tuple[Dsv4, Tensor]:
    """The model and the prompt's ids [1, s]. Turns gradients off: no command here needs one."""
    torch.set_grad_enabled(False)
    is_shipped = arguments.model is None
    dtype = None if arguments.dtype is None else getattr(torch, arguments.dtype)
    source = checkpoint_folder() if is_shipped else arguments.model
    model = Dsv4.from_pretrained(source, device=arguments.device, dtype=dtype)
    prompt, _ = default_prompts(model, arguments.prompt, is_shipped)
    ids = read_prompt(model, prompt, is_shipped)
    pos, tokens = getattr(arguments, "pos", None), ids.shape[1]
    if pos is not None and not -tokens <= pos < tokens:
        raise ValueError(f"--pos {pos}: the prompt has {tokens} tokens")
    return model, ids


def write(arguments: argparse.Namespace, result: dict[str, Any], told) -> None:
    """The result as one line of JSON, or told in lines."""
    print(json.dumps(finite(result)) if arguments.json else "\n".join(told()))


def finite(value: Any) -> Any:
    """JSON knows no infinity: null in its place."""
    if isinstance(value, dict):
        return {key: finite(x) for key, x in value.items()}
    if isinstance(value, list):
        return [finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def listed(model: Dsv4, probabilities: Tensor, tokens: Tensor) -> list[dict[str, Any]]:
    pairs = zip(probabilities.tolist(), tokens.tolist(), strict=True)
    return [{"token": spell(model, [i])[0], "id": i, "probability": p} for p, i in pairs]


def residual_run(model: Dsv4, ids: Tensor, extra, pos: int | None = None):
    """(logits, cache) of the residual set and `extra`."""
    names = [name for name in model.hook_dict if name.rsplit(".", 1)[-1] in RESIDUAL_SET]
    return model.run_with_cache(ids, [*names, *extra], pos=pos)


def as_token(model: Dsv4, word: str) -> int:
    """A word that is one token, or an id."""
    if word.isdecimal() and not model.tokenizer.is_present:
        return int(word)
    return model.to_single_token(word)


def blocks(model: Dsv4, layer: int | None) -> list[int]:
    if layer is None:
        return list(range(model.num_layers))
    if not 0 <= layer < model.num_layers:
        raise ValueError(f"--layer {layer}: expected 0 <= layer < {model.num_layers}")
    return [layer]


def check_folder(path: str) -> None:
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(f"--out {path}: there is no folder {folder}")


def transformers_model(folder: Path, dtype: torch.dtype, device: torch.device):
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    options = {"dtype": dtype, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval().to(device)
