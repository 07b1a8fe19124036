"""Pictures of one run, from its cache: matplotlib figures, and one HTML file.

    figure = view.token_pattern(cache, layer=3); figure.savefig("pattern.png")
    view.page(cache, "run.html")

matplotlib comes with the extra `demo` and is imported when a figure is asked for; the page needs
none.
Prompts with more tokens than a picture has room for are drawn in cells of several (dsv4/cells.py);
the title says so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy
import torch

from dsv4.activation_cache import ActivationCache
from dsv4.attribution import Attribution
from dsv4.cells import Cells, joined, lens_top, names_of, printable, spell
from dsv4.config import CSA
from dsv4.page import page as page
from dsv4.page import page_names as page_names
from dsv4.picture import MAX_COLOURS, draw_heat, label
from dsv4.reading import Reading
from dsv4.values import RESIDUAL_SET

NO_MATPLOTLIB = (
    "matplotlib is not installed, and the figures of dsv4.view are drawn with it: pip install matplotlib, or dsv4's extra `demo`"
)
# The most cells along an axis, those that get a label each, and the tokens of a lens table.
MAX_CELLS, MAX_LABELS, MAX_LENS_TOKENS = 160, 80, 20
POSITIVE, NEGATIVE = "#4c72b0", "#c44e52"
SITES = ("attention", "mlp")
MIXING = tuple(f"{site}_{part}" for site in SITES for part in ("pre", "post", "comb"))
LIMITS = {"pre": 1.0, "post": 2.0, "comb": 1.0}


@dataclass(frozen=True)
class Picture:
    """draw(cache, layer) -> Figure. leaves: last parts of the names it reads; of_layer: whether of
    its layer alone.
    """

    draw: Callable
    leaves: tuple[str, ...]
    of_layer: bool = False


def picture(name: str, cache: ActivationCache, layer: int | None = None):
    """One of PICTURES, drawn with what is usual for the rest. layer: where the picture is one
    block's.
    """
    if name not in PICTURES:
        raise ValueError(f"picture {name!r}: expected one of {', '.join(PICTURES)}")
    return PICTURES[name].draw(cache, layer)


def picture_names(model, name: str, layer: int | None = None) -> list[str]:
    """The values to capture for `picture(name, cache, layer)`."""
    chosen = PICTURES[name]
    layers = [usual_layer(model) if layer is None else layer] if chosen.of_layer else None
    return names_of(model, ("input_ids", *chosen.leaves), layers)


def usual_layer(model) -> int:
    """The first CSA block, else the first."""
    return next((i for i, kind in enumerate(model.layer_types) if kind == CSA), 0)


def require_matplotlib() -> None:
    """ValueError that names the extra where it is absent."""
    if find_spec("matplotlib") is None:
        raise ValueError(NO_MATPLOTLIB)


def new_figure(width: float, height: float):
    """Without pyplot there is no global state and no window system to choose."""
    require_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


# The pictures.


@torch.no_grad()
def token_pattern(cache: ActivationCache, layer: int, head: int | None = None, mode: str = "shares", row: int = 0):
    """Query by token, entries split into their tokens (`cache.attention.token_pattern`); head None
    is the mean over heads.

    Needs attention_probabilities and, on CSA and HCA blocks, compressor_gates and, unless
    mode="gates", attention_norm_output.
    """
    read = Reading(cache)
    heads = cache.attention.token_pattern(mode, layers=layer)[layer]
    # Every token is there, or token_pattern would have raised; the rows may have been dropped.
    heads = heads if read.has_rows else heads.unsqueeze(0)
    if head is not None and not 0 <= head < heads.shape[1]:
        raise ValueError(f"head={head}: expected 0 <= head < {heads.shape[1]}")
    cells = Cells.of(read, MAX_CELLS, row)
    pattern = cells.pool(heads[row].mean(0) if head is None else heads[row, head])
    size = min(max(4.0 + 0.13 * len(cells), 6), 16)
    figure = new_figure(size + 1, size)
    axes = figure.subplots()
    limit = float(pattern.abs().max().clamp(min=1e-6))
    from matplotlib.colors import FuncNorm

    # Roots, or the few large cells would be all that is seen.
    norm = FuncNorm(
        (lambda x: numpy.sign(x) * numpy.sqrt(abs(x)), lambda x: numpy.sign(x) * x**2),
        vmin=-limit,
        vmax=limit,
    )
    image = axes.imshow(pattern.tolist(), cmap="RdBu", norm=norm, interpolation="nearest")
    figure.colorbar(image, ax=axes, shrink=0.8)
    name_cells(axes.set_xticks, cells, rotation=90)
    name_cells(axes.set_yticks, cells)
    axes.set_xlabel("token seen")
    axes.set_ylabel("query")
    which = "mean over heads" if head is None else f"head {head}"
    kind = read.model.layer_types[layer].replace("_", " ")
    entries = "" if read.model.config.rate(layer) is None else f", entries split into tokens ({mode})"
    note = f"\n{cells.note}: summed over keys, mean over queries" if cells.note else ""
    axes.set_title(f"block {layer} ({kind}): attention by token, {which}{entries}{note}")
    return figure


@torch.no_grad()
def routing_map(cache: ActivationCache, row: int = 0):
    """By block and token: the expert with the largest weight. Needs expert_indices and
    expert_weights (the residual set).
    """
    read = Reading(cache)
    layers = [i for i in read.layers if i in read.holding("expert_indices")]
    read.require_layers(("expert_indices", "expert_weights"), layers or read.layers, "routing_map")
    cells = Cells.of(read, MAX_CELLS, row)
    chosen = []
    for i in layers:
        slots = cells.at(read.of("expert_weights", i)).argmax(-1, keepdim=True)
        chosen.append(cells.at(read.of("expert_indices", i)).gather(-1, slots).flatten().tolist())
    experts = read.model.num_experts
    figure = new_figure(min(max(4 + 0.2 * len(cells), 7), 22), min(max(2.5 + 0.3 * len(layers), 4), 16))
    axes = figure.subplots()
    is_few = experts <= MAX_COLOURS
    colours, count = ("Set3", MAX_COLOURS) if is_few else ("viridis", experts)
    image = axes.imshow(chosen, aspect="auto", cmap=colours, vmin=-0.5, vmax=count - 0.5, interpolation="nearest")
    if is_few and len(cells) <= MAX_LABELS:
        for i, line in enumerate(chosen):
            for j, expert in enumerate(line):
                axes.text(j, i, expert, ha="center", va="center", fontsize=8)
    else:
        figure.colorbar(image, ax=axes, label="expert")
    hashes = [" hash" if read.model.layers[i].mlp.scoring == "hash" else "" for i in layers]
    axes.set_yticks(range(len(layers)), [f"{i}{how}" for i, how in zip(layers, hashes, strict=True)])
    name_cells(axes.set_xticks, cells, rotation=90)
    axes.set_ylabel("block")
    note = f"\n{cells.note}: that of the cell's last token" if cells.note else ""
    axes.set_title(f"routing: the expert with the largest weight{note}")
    return figure


@torch.no_grad()
def stream_mixing(cache: ActivationCache, layer: int | None = None, pos: int = -1, row: int = 0):
    """What sublayers read of each stream (pre), write to each (post), and how streams are mixed
    (comb), at one token.

    layer None: pre, post and the diagonal of comb over all blocks; else the whole comb of that
    block too.
    Needs pre, post and comb (the residual set). pos counts the row's real tokens that were
    captured.
    """
    read = Reading(cache)
    layers = read.layers if layer is None else [layer]
    read.require_layers(MIXING, layers, "stream_mixing")
    column, word, position = one_token(read, pos, row)
    at = {(i, leaf): read.of(leaf, i)[row, column].float().cpu() for i in layers for leaf in MIXING}
    streams = len(at[layers[0], "attention_pre"])
    if layer is None:
        parts = {part: torch.stack([at[i, f"{site}_{part}"] for i in layers for site in SITES]) for part in ("pre", "post")}
        parts["comb"] = torch.stack([at[i, f"{site}_comb"].diagonal() for i in layers for site in SITES])
        figure = new_figure(min(max(5 + 0.25 * len(layers), 9), 24), 3 + 0.7 * streams)
        titles = {
            "pre": "read from each stream",
            "post": "written to each stream",
            "comb": "what each stream keeps of itself (diagonal of comb)",
        }
        columns = [f"{i}{site[0]}" for i in layers for site in SITES]
        step = max(len(columns) // 24, 1)
        for axes, (part, values) in zip(figure.subplots(3, 1), parts.items(), strict=True):
            draw_heat(axes, values.T, limit=LIMITS[part])
            axes.set_xticks(range(0, len(columns), step), columns[::step])
            axes.set_yticks(range(streams))
            axes.set_ylabel("stream")
            axes.set_title(titles[part])
        axes.set_xlabel("block; a = attention, m = mixture")
    else:
        figure = new_figure(11, 6)
        for line, site in zip(figure.subplots(2, 3), SITES, strict=True):
            for axes, part in zip(line, ("pre", "comb", "post"), strict=True):
                value = at[layer, f"{site}_{part}"]
                draw_heat(axes, value if part == "comb" else value.unsqueeze(-1), limit=LIMITS[part])
                axes.set_yticks(range(streams))
                axes.set_xticks(range(streams) if part == "comb" else [])
                axes.set_ylabel("stream before" if part == "comb" else "stream")
                axes.set_xlabel("stream after" if part == "comb" else "")
                axes.set_title(f"{site}_{part}")
    where = "all blocks" if layer is None else f"block {layer}"
    figure.suptitle(f"stream mixing, {where}, at {label(repr(word))} (position {position})")
    return figure


@torch.no_grad()
def lens_table(cache: ActivationCache, pos: int | None = None, k: int = 5, row: int = 0):
    """Every layer_output read as the next token (readout "head"): pos None is the best word by
    block and token (the last tokens of
    a long prompt, said in the title); an int the k best by block at that token. Needs the residual
    set, or layer_output.
    """
    read = Reading(cache)
    every = Cells.of(read, len(read.positions[0]), row)
    if pos is None:
        columns, words = every.columns[-MAX_LENS_TOKENS:], every.words[-MAX_LENS_TOKENS:]
        probabilities, ids, layers = lens_top(cache, columns, 1, row)
        best, tokens = probabilities[..., 0], ids[..., 0]
        heads = [label(printable(word), 12) for word in words]
        left = len(every.words) - len(words)
        title = "each block's streams read as the next token: the best one" + (
            f"\nlast {len(words)} of {len(every.words)} tokens" if left else ""
        )
    else:
        column, word, position = one_token(read, pos, row)
        probabilities, ids, layers = lens_top(cache, torch.tensor([column]), k, row)
        best, tokens = probabilities[:, 0], ids[:, 0]
        heads = [f"rank {i + 1}" for i in range(best.shape[-1])]
        after = f"{label(repr(word))} (position {position})"
        title = f"each block's streams read as the token after {after}"
    figure = new_figure(min(max(2 + 0.8 * len(heads), 7), 22), min(max(1.5 + 0.32 * len(layers), 3), 20))
    axes = figure.subplots()
    axes.imshow(best.tolist(), aspect="auto", cmap="Blues", vmin=0, vmax=1.3)
    for i in range(len(layers)):
        for j, word in enumerate(spell(read.model, tokens[i].tolist())):
            p = float(best[i, j])
            shown = label(printable(word), 12)
            text = shown if pos is None else f"{shown} {p:.3f}"
            axes.text(
                j,
                i,
                text,
                ha="center",
                va="center",
                fontsize=8,
                color="white" if p > 0.8 else "black",
            )
    axes.set_yticks(range(len(layers)), layers)
    axes.set_xticks(range(len(heads)), heads, rotation=0 if pos is not None else 60)
    axes.set_ylabel("block")
    axes.set_title(title)
    return figure


@torch.no_grad()
def attribution_bars(found: Attribution, k: int = 20, pos: int = -1, row: int = 0, title: str | None = None):
    """The k largest components of `cache.residual.logit_attribution(...)` at one token, and the sum
    of the others.

    title: in place of what the table of components says.
    """
    table = found.top(len(found.labels), row=row, pos=pos)
    rows = list(table)[:k]
    names, values = [r.name for r in rows], [r.value for r in rows]
    left = list(table)[k:]
    if left:
        names.append(f"{len(left)} others")
        values.append(sum(r.value for r in left))
    figure = new_figure(9, 1.5 + 0.3 * len(names))
    axes = figure.subplots()
    axes.barh(range(len(names)), values, color=[POSITIVE if v >= 0 else NEGATIVE for v in values])
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.axvline(0, color="black", linewidth=0.8)
    for i, value in enumerate(values):
        axes.annotate(
            f"{value:.4g}",
            (max(value, 0), i),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.margins(x=0.12)
    axes.set_title(label(table.title if title is None else title, 100))
    return figure


# Small pieces.


def one_token(read: Reading, pos: int, row: int) -> tuple[int, str, int]:
    """(captured column, word, position) of one of the row's real tokens."""
    every = Cells.of(read, len(read.positions[0]), row)
    tokens = len(every.words)
    if not -tokens <= pos < tokens:
        raise ValueError(f"pos={pos}: the row holds {tokens} real tokens")
    return int(every.columns[pos]), every.words[pos], every.positions[pos]


def name_cells(ticks: Callable, cells: Cells, **options) -> None:
    """Words at the axis: all of them, or evenly spaced ones."""
    step = -(-len(cells) // MAX_LABELS)
    places = range((len(cells) - 1) % step, len(cells), step)
    words: Sequence[str] = cells.labels
    ticks(places, [label(joined([words[i]]), 14) for i in places], fontsize=7, **options)


@torch.no_grad()
def _answer_bars(cache: ActivationCache, layer: int | None):
    """Of the most likely next token after the last one captured."""
    read = Reading(cache)
    read.require(["final_norm_output"], "attribution")
    column, word, position = one_token(read, -1, 0)
    logits = read.model.lm_head(read["final_norm_output"][0, column])
    answer = int(logits.argmax())
    said = f"logit of {spell(read.model, [answer])[0]!r} after {word!r} (position {position})"
    said = f"{said} = {float(logits[answer]):.4g}"
    return attribution_bars(cache.residual.logit_attribution(answer), title=f"{said}, final norm's scale frozen")


PICTURES = {
    "token_pattern": Picture(
        lambda cache, layer: token_pattern(cache, usual_layer(Reading(cache).model) if layer is None else layer),
        ("attention_probabilities", "compressor_gates", "attention_norm_output"),
        of_layer=True,
    ),
    "routing": Picture(lambda cache, layer: routing_map(cache), ("expert_indices", "expert_weights")),
    "streams": Picture(lambda cache, layer: stream_mixing(cache, layer), MIXING),
    "lens": Picture(lambda cache, layer: lens_table(cache), RESIDUAL_SET),
    "attribution": Picture(_answer_bars, RESIDUAL_SET),
}
