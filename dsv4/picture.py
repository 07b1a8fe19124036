"""One picture of what the demo found. matplotlib comes with the extra `demo`."""

from importlib.util import find_spec

import torch
from torch import Tensor

from dsv4.config import CSA
from dsv4.findings import PROBABILITIES, SCORES, SELECTION, STREAM_WEIGHTS, Findings, Scene

NOT_INSTALLED = "PICTURE  none: matplotlib is not installed; `pip install matplotlib` or dsv4's extra `demo`"
STRONG, FAINT, EDITED = "#c44e52", "#b8c4d6", "#4c72b0"
# Long prompts are shown by their end, many entries by the best of them.
MAX_TOKENS, MAX_ENTRIES, MAX_HEADS, MAX_WORDS, MAX_LABEL = 72, 18, 16, 5, 24
# The most blocks whose heads stand side by side, and the most columns that carry numbers.
MAX_PATTERNS, MAX_NUMBERED = 2, 16
# The largest count of experts that get a colour each.
MAX_COLOURS = 12


def save(findings: Findings, path: str) -> str:
    """Draw and save (the file's ending is the format); returns the line to print."""
    if find_spec("matplotlib") is None:
        return NOT_INSTALLED
    # Without pyplot there is no global state and no window system to choose.
    from matplotlib.figure import Figure

    scene = findings.scene
    figure = Figure(figsize=(16, 12), layout="constrained")
    rows = figure.subfigures(3, 1, height_ratios=(5, 4, 4))
    scores, attention, edits = rows[0].subplots(1, 3)
    draw_scores(scores, scene)
    draw_attention(attention, scene)
    draw_edits(edits, findings)
    lens, read, written = rows[1].subplots(1, 3)
    draw_lens(lens, scene)
    draw_streams(read, scene, "pre")
    draw_streams(written, scene, "post")
    draw_routing(rows[2].subplots(), scene)
    end = label(" ".join(word.strip() for word in scene.words[-12:]), 80)
    answer = label(f"{scene.word(scene.answer)!r}  {scene.probabilities[-1, scene.answer]:.4f}")
    figure.suptitle(f"... {end}   ->   {answer}", fontsize=15)
    figure.savefig(path, dpi=100)
    return f"PICTURE  {path}"


def csa_layers(scene: Scene) -> list[int]:
    """The CSA blocks that had an entry to keep."""
    layers = [i for i in range(scene.model.num_layers) if scene.model.layer_types[i] == CSA]
    return [i for i in layers if scene.last[SCORES.format(i)].shape[-1]]


def shown_entries(scene: Scene, layer: int) -> list[int]:
    """The entries with a score, in order; of many the best."""
    scores = scene.last[SCORES.format(layer)][0]
    closed = int(scores.isfinite().sum())
    return sorted(scores.topk(min(closed, MAX_ENTRIES)).indices.tolist())


def label(text: str, size: int = MAX_LABEL) -> str:
    """Fit for an axis: short, printable, and `$` starts no formula."""
    text = text if text.isprintable() else repr(text)
    text = text if len(text) <= size else text[: size - 3] + "..."
    return text.replace("$", r"\$")


def draw_scores(axes, scene: Scene) -> None:
    layers = csa_layers(scene)
    if not layers:
        axes.set_title("indexer")
        axes.text(0.5, 0.5, "no CSA block with a closed entry", ha="center", va="center")
        axes.set_axis_off()
        return
    layer = layers[0]
    entries = shown_entries(scene, layer)
    kept = set(scene.last[SELECTION.format(layer)][0].tolist())
    scores = scene.last[SCORES.format(layer)][0, entries].tolist()
    axes.barh(range(len(entries)), scores, color=[STRONG if e in kept else FAINT for e in entries])
    axes.set_yticks(range(len(entries)), [f"{label(scene.entry(layer, e))}  {e}" for e in entries])
    axes.set_ylim(len(entries) - 0.5, -0.5)
    axes.set_xlabel("indexer_scores at the last token; red = kept")
    axes.set_title(f"block {layer}: the indexer's choice of entries")


def draw_attention(axes, scene: Scene) -> None:
    """Rows are the entries of the panel beside it, columns the heads of the first CSA blocks."""
    layers = csa_layers(scene)[:MAX_PATTERNS]
    if not layers:
        draw_window(axes, scene)
        return
    entries, tokens = shown_entries(scene, layers[0]), scene.ids.shape[1]
    heads = min(scene.model.num_heads, MAX_HEADS)
    patterns = [scene.last[PROBABILITIES.format(i)][0, :heads, tokens:] for i in layers]
    draw_heat(axes, torch.cat(patterns)[:, entries].T, limit=1.0)
    axes.set_xticks(range(len(layers) * heads), [*range(heads)] * len(layers))
    axes.set_yticks(range(len(entries)), entries)
    for i in range(1, len(layers)):
        axes.axvline(i * heads - 0.5, color="white", linewidth=4)
    axes.set_xlabel("      |      ".join(f"heads of block {i}" for i in layers))
    axes.set_title("attention on these entries at the last token")


def draw_window(axes, scene: Scene) -> None:
    """Without CSA entries: block 0's attention on its window."""
    tokens = scene.ids.shape[1]
    shown = range(max(tokens - scene.model.config.sliding_window, tokens - MAX_ENTRIES, 0), tokens)
    pattern = scene.last[PROBABILITIES.format(0)][0, :MAX_HEADS, shown.start : shown.stop]
    draw_heat(axes, pattern.T, limit=1.0)
    axes.set_yticks(range(len(shown)), [label(scene.words[i]) for i in shown])
    axes.set_xticks(range(len(pattern)))
    axes.set_xlabel("head")
    axes.set_title("block 0: attention on the window at the last token")


def draw_edits(axes, findings: Findings) -> None:
    scene, ablation, steering = findings.scene, findings.ablation, findings.steering
    answer = scene.word(scene.answer)
    edits = [(f"block {pick.layer} without entry {pick.entry}", pick.dropped) for pick in findings.picks if pick.dropped is not None]
    edits.append((f"block {ablation.layer} without expert {ablation.expert}", ablation.outcome))
    edits.append((f"block {steering.layer} steered", steering.outcome))
    plain = float(scene.probabilities[-1, scene.answer])
    lengths = [plain, *(edit.answer_probability for _, edit in edits)]
    axes.barh(range(len(lengths)), lengths, color=[STRONG, *[EDITED] * len(edits)])
    axes.set_yticks(range(len(lengths)), ["plain run", *(name for name, _ in edits)])
    said = ["", *("" if edit.best == answer else f"  {edit.best!r}" for _, edit in edits)]
    for i, (length, best) in enumerate(zip(lengths, said, strict=True)):
        inside = length > 0.5
        place = {"x": length - 0.02, "ha": "right", "color": "white"} if inside else {"x": length + 0.02}
        axes.text(y=i, s=label(f"{length:.4f}{best}"), va="center", **place)
    axes.set_xlim(0, 1)
    axes.set_ylim(len(lengths) - 0.5, -0.5)
    axes.set_title(f"P({label(repr(answer))}) under edits, and what is said instead")


def draw_lens(axes, scene: Scene) -> None:
    layers = scene.lens.layers
    probabilities = scene.lens.logits.softmax(-1).flatten(0, -2)
    best = probabilities.max(0).values.topk(min(MAX_WORDS, probabilities.shape[-1])).indices
    others = [token for token in best.tolist() if token != scene.answer]
    for token in [scene.answer, *others][:MAX_WORDS]:
        width = 3 if token == scene.answer else 1
        line = probabilities[:, token].tolist()
        axes.plot(layers, line, marker="o", linewidth=width, label=label(repr(scene.word(token))))
    axes.set_xticks(layers[:: max(len(layers) // 12, 1)])
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel("block")
    axes.set_title("each block's streams read as the next token")
    axes.legend(fontsize=8)


def draw_streams(axes, scene: Scene, kind: str) -> None:
    """Columns are the sublayers in order, rows the streams."""
    leaves = [leaf for leaf in STREAM_WEIGHTS if leaf.endswith(kind)]
    layers = range(scene.model.num_layers)
    weights = torch.stack([scene.last[leaf, i][0] for i in layers for leaf in leaves]).T
    draw_heat(axes, weights, limit={"pre": 1.0, "post": 2.0}[kind])
    columns = [f"{i}{site}" for i in layers for site in "am"]
    step = max(len(columns) // 12, 1)
    axes.set_xticks(range(0, len(columns), step), columns[::step])
    axes.set_yticks(range(len(weights)))
    axes.set_ylabel("stream")
    axes.set_xlabel("block; a = attention, m = mixture")
    said = {
        "pre": "how much a sublayer reads of each stream",
        "post": "how much it writes to each stream",
    }
    axes.set_title(said[kind])


def draw_routing(axes, scene: Scene) -> None:
    first, model = max(len(scene.words) - MAX_TOKENS, 0), scene.model
    layers = range(model.num_layers)
    slots = [scene.routing["expert_weights", i][0, first:].argmax(-1, keepdim=True) for i in layers]
    chosen = torch.cat([scene.routing["expert_indices", i][0, first:].gather(-1, slots[i]) for i in layers], dim=-1).T.tolist()
    is_few = model.num_experts <= MAX_COLOURS
    colours = ("Set3", MAX_COLOURS) if is_few else ("viridis", model.num_experts)
    image = axes.imshow(chosen, aspect="auto", cmap=colours[0], vmin=-0.5, vmax=colours[1] - 0.5)
    if is_few:
        for i, row in enumerate(chosen):
            for j, expert in enumerate(row):
                axes.text(j, i, expert, ha="center", va="center", fontsize=8)
    else:
        axes.figure.colorbar(image, ax=axes, label="expert")
    kinds = [" hash" if model.layers[i].mlp.scoring == "hash" else "" for i in layers]
    step = max(len(kinds) // 12, 1)
    axes.set_yticks(layers[::step], [f"{i}{kinds[i]}" for i in layers[::step]])
    words = [label(word) for word in scene.words[first:]]
    axes.set_xticks(range(len(words)), words, rotation=90, fontsize=9)
    axes.set_ylabel("block")
    axes.set_title("routing: the expert with the largest weight at every token")


def draw_heat(axes, cells: Tensor, *, limit: float) -> None:
    rows = cells.float().tolist()
    axes.imshow(rows, aspect="auto", cmap="Blues", vmin=0, vmax=limit)
    if cells.shape[1] <= MAX_NUMBERED:
        for i, row in enumerate(rows):
            for j, x in enumerate(row):
                number = f"{x:.2f}" if x >= 0.005 else ""
                shade = "white" if x > 0.6 * limit else "black"
                axes.text(j, i, number, ha="center", va="center", fontsize=8, color=shade)
