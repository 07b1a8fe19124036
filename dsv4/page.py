"""One run as one HTML file, with a slider over blocks: no server, no network, nothing beside it.

The numbers stand in the file as JSON; patterns are int16 of 1/SCALE, base64. What is drawn from
them: dsv4/page_template.py.
Axes: c cell (a token, or several of a long prompt), N head, k slot.
"""

import base64
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4.activation_cache import ActivationCache
from dsv4.attribution import Attribution
from dsv4.cells import Cells, lens_top, names_of, printable, spell
from dsv4.config import CSA, HCA
from dsv4.kernels.numeric import topk_lowest
from dsv4.page_template import PAGE
from dsv4.reading import Reading
from dsv4.values import RESIDUAL_SET

SITES = ("attention", "mlp")
LEAVES = (
    *("input_ids", *RESIDUAL_SET, "attention_probabilities", "attention_sink_probability"),
    *("compressor_gates", "attention_norm_output", "attention_premix"),
    *("indexer_scores", "indexer_selection", "router_selection_scores"),
)
# Cells along an axis; bytes of patterns, beyond which heads are left out; entries and words listed.
MAX_CELLS, MAX_PATTERN_BYTES, MAX_ENTRIES, MAX_EXPERTS, NUM_BEST = 160, 8_000_000, 12, 16, 5
MAX_ENTRY_WORDS = 12
SCALE = 16384


def page_names(model) -> list[str]:
    """The values to capture for `page`. They hold dense patterns of every block: see
    `model.estimate`.
    """
    return names_of(model, LEAVES)


def page(cache: ActivationCache, path: str | Path, row: int = 0) -> dict[str, Any]:
    """Write the file, over one that is there.

    Args:
        cache: of `model.run_with_cache(ids, view.page_names(model))`; every token of the row in one
        call.
        row: the row shown.
    Returns:
        {"tokens": ..., "cells": ..., "blocks": ..., "heads": heads drawn}.
    Raises:
        ValueError: a value is missing (its name is said), a hook edited what the sums need, or row
        does not exist.
    """
    data = page_data(cache, row)
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    # Inside a script element only a tag could end it early.
    text = text.replace("<", "\\u003c")
    Path(path).write_text(PAGE.replace("@DATA@", text), encoding="utf-8")
    return {
        "tokens": data["tokens"],
        "cells": len(data["words"]),
        "blocks": len(data["blocks"]),
        "heads": data["heads"],
    }


@torch.no_grad()
def page_data(cache: ActivationCache, row: int = 0) -> dict[str, Any]:
    """What the page shows, as plain numbers and words."""
    read = Reading(cache)
    if not (read.has_rows and read.has_tokens):
        raise ValueError("the page needs a cache with its batch and token axes: run without pos=, and before remove_batch_dim()")
    read.require(["input_ids"], "page")
    model, cells = read.model, Cells.of(read, MAX_CELLS, row)
    answers = model.lm_head(cells.at(read["final_norm_output"])).softmax(-1).max(-1)
    ids = torch.zeros(read.positions.shape, dtype=torch.int64)
    ids[row, cells.last] = answers.indices.cpu()
    whole = cache.residual.logit_attribution(ids)
    split = cache.residual.logit_attribution(ids, unit="head")
    heads = min(model.num_heads, max(MAX_PATTERN_BYTES // (2 * len(cells) ** 2 * len(read.layers)) - 1, 0))
    best, tokens, _ = lens_top(cache, cells.last, NUM_BEST, row)
    return {
        "words": [printable(word) for word in cells.labels],
        "texts": cells.texts,
        "positions": [cells.positions[end - 1] for end in cells.ends],
        "tokens": len(cells.words),
        "note": cells.note,
        "answers": [[printable(w), number(p)] for w, p in zip(spell(model, answers.indices.tolist()), answers.values, strict=True)],
        "streams": model.streams,
        "heads": heads,
        "allHeads": model.num_heads,
        "experts": model.num_experts,
        "model": f"{model.num_layers} blocks, {model.streams} streams of {model.hidden_size}, "
        f"{model.num_heads} heads, {model.num_experts} experts ({model.top_k} per token)",
        "scale": SCALE,
        "blocks": [block_data(read, cells, i, heads, split) for i in read.layers],
        "lens": [
            [[[printable(w), number(p)] for w, p in zip(spell(model, t.tolist()), b, strict=True)] for t, b in zip(*layer, strict=True)]
            for layer in zip(tokens, best, strict=True)
        ],
        "attribution": {
            "labels": [" ".join(map(str, x)) if isinstance(x[0], str) else f"block {x[0]} {x[1]}" for x in whole.labels],
            "blocks": [read.layers.index(x[0]) if x[0] in read.layers else -1 for x in whole.labels],
            "values": numbers(whole.values[:, row][:, cells.last]),
            "total": numbers(whole.total[row, cells.last]),
        },
    }


def block_data(read: Reading, cells: Cells, layer: int, heads: int, split: Attribution) -> dict[str, Any]:
    model = read.model
    mixing = {
        site: {part: numbers(cells.at(read.of(f"{site}_{part}", layer))) for part in ("pre", "post", "comb")}
        | {"norm": numbers(cells.at(read.of(f"{site}_output", layer)).float().norm(dim=-1))}
        for site in SITES
    }
    pattern = read.cache.attention.token_pattern(layers=layer)[layer][cells.row]
    shown = torch.cat((pattern.mean(0, keepdim=True), pattern[:heads]))
    mass = read.cache.attention.mass_by_kind(layers=layer)[layer][cells.row]
    selection = read.of("expert_indices", layer)
    scoring = model.layers[layer].mlp.scoring
    margins = read.cache.moe.router_margin(layer)[layer] if scoring != "hash" else None
    weights, order = cells.at(read.of("expert_weights", layer)).sort(-1, descending=True)
    own = [i for i, label in enumerate(split.labels) if len(label) == 3 and label[:2] == (layer, "attention") and label[2] != "rest"]
    return {
        "layer": layer,
        "kind": {CSA: "CSA", HCA: "HCA"}.get(model.layer_types[layer], "sliding"),
        "router": "hash" if scoring == "hash" else "score",
        **mixing,
        "pattern": packed(cells.pool(shown)),
        "mass": numbers(cells.at(mass.mean(0).unsqueeze(0).expand(cells.row + 1, -1, -1))),
        "entries": entries_data(read, cells, layer),
        "expertIndices": cells.at(selection).gather(-1, order)[:, :MAX_EXPERTS].tolist(),
        "expertWeights": numbers(weights[:, :MAX_EXPERTS]),
        "margins": None if margins is None else numbers(cells.at(margins)),
        "headValues": numbers(split.values[own][:, cells.row][:, cells.last].T),
    }


def entries_data(read: Reading, cells: Cells, layer: int) -> list[dict[str, Any]] | None:
    """For each cell's last token: how many entries it could see and kept, and the most attended of
    those, as words.

    listed: [entry, words of its own window, indexer score or null, attention on it, mean over
    heads].
    """
    rate = read.model.config.rate(layer)
    if rate is None:
        return None
    mass = cells.at(read.of("attention_probabilities", layer).mean(1))[:, read.origin.token_keys :]
    is_csa = read.model.layer_types[layer] == CSA
    selection = cells.at(read.of("indexer_selection", layer)).tolist() if is_csa else None
    scores = cells.at(read.of("indexer_scores", layer)) if is_csa else None
    found = []
    for c, end in enumerate(cells.ends):
        closed = (cells.positions[end - 1] + 1) // rate
        kept = list(range(closed)) if selection is None else [e for e in selection[c] if e >= 0]
        seen = mass[c, kept]
        best = topk_lowest(seen, min(len(kept), MAX_ENTRIES))[1].tolist() if kept else []
        listed = [
            [
                kept[i],
                entry_words(cells, kept[i], rate),
                None if scores is None else number(scores[c, kept[i]]),
                number(seen[i]),
            ]
            for i in best
        ]
        found.append({"closed": closed, "kept": len(kept), "listed": listed})
    return found


def entry_words(cells: Cells, entry: int, rate: int) -> str:
    """The words of an entry's own window."""
    start = max(entry * rate - cells.positions[0], 0)
    end = max((entry + 1) * rate - cells.positions[0], 0)
    words = [printable(word) for word in cells.words[start:end]]
    if len(words) > MAX_ENTRY_WORDS:
        half = MAX_ENTRY_WORDS // 2
        words = [*words[:half], "...", *words[-half:]]
    return " ".join(words)


def packed(pattern: Tensor) -> str:
    fixed = pattern.mul(SCALE).round().clamp(-32768, 32767).to(torch.int16).cpu()
    return base64.b64encode(fixed.contiguous().numpy().astype("<i2").tobytes()).decode("ascii")


def number(x: Tensor | float) -> float | None:
    """Four digits; null where there is no number (a margin with all experts chosen, padding)."""
    x = float(x)
    return float(f"{x:.4g}") if abs(x) < float("inf") else None


def numbers(value: Tensor) -> Any:
    def rounded(x: Any) -> Any:
        return [rounded(y) for y in x] if isinstance(x, list) else number(x)

    return rounded(value.detach().float().tolist())
