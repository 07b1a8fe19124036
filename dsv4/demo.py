"""`dsv4 demo`: one prompt on one checkpoint, told in lines and one picture. What is measured: dsv4/findings.py.

The shipped checkpoint is a trained DeepSeek-V4 of 2 million parameters in the official on-disk format. It reads a little language of
statements of four words; its CSA blocks make one entry of four tokens, so that entry i is statement i.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from dsv4 import picture, values
from dsv4.config import CSA
from dsv4.findings import STREAM_WEIGHTS, Findings, Outcome, Scene, ablate_expert, contrast_of, look, picks, read_prompt, steer
from dsv4.model import Dsv4

OUT = "dsv4_demo.png"
WIDTH = 100
SHOWN = 3
KIND = {"sliding_attention": "sliding", CSA: "CSA", "heavily_compressed_attention": "HCA"}


def checkpoint_folder() -> Path:
    """The folder of the checkpoint that comes with the package."""
    return Path(__file__).with_name("demo_checkpoint")


def run(
    prompt: str | None = None,
    *,
    model: str | None = None,
    contrast: str | None = None,
    device: str | None = None,
    out: str = OUT,
    write: Callable[[str], None] = print,
) -> Findings:
    """Measure, write lines as they come, save the picture.

    Args:
        prompt: text, or token ids where the checkpoint has no tokenizer. model: folder or hub id; None is the shipped checkpoint.
        contrast: a prompt; the streams at its last token minus those at the prompt's are what the steering adds.
        out: file of the picture.
    Raises:
        ValueError for a prompt that the model cannot read, FileNotFoundError for an `out` without a folder, what loading raises.
    """
    if not Path(out).absolute().parent.is_dir():
        raise FileNotFoundError(f"--out {out}: there is no folder {Path(out).absolute().parent}")
    shipped = model is None
    loaded = Dsv4.from_pretrained(checkpoint_folder() if shipped else model, device=device)
    with torch.no_grad():
        ids, words, text = read_prompt(loaded, prompt, shipped)
        scene = look(loaded, ids.to(loaded.device), words)
        for section in (answer_lines, value_lines, block_lines, lens_lines):
            write("\n".join(section(scene)) + "\n")
        findings = Findings(scene, picks(scene), ablate_expert(scene), steer(scene, contrast_of(text, contrast, shipped)))
    for section in (pick_lines, ablation_lines, steering_lines):
        write("\n".join(section(findings)) + "\n")
    write(picture.save(findings, out))
    return findings


def answer_lines(scene: Scene) -> list[str]:
    model, config = scene.model, scene.model.config
    best = scene.probabilities[-1].topk(min(SHOWN, model.vocab_size))
    first, *rest = [f"{scene.word(int(i))!r} {float(p):.4f}" for p, i in zip(*best, strict=True)]
    return [
        f"MODEL   {model.num_layers} blocks, {model.streams} streams of {model.hidden_size}, {model.num_heads} heads, "
        f"{model.num_experts} experts + {config.n_shared_experts} shared, {model.top_k} per token, {model.vocab_size} words",
        *wrapped("PROMPT  ", scene.words),
        *([] if model.tokenizer.backend is not None else ["        no tokenizer.json: tokens are shown as their ids"]),
        f"ANSWER  {first}, then {', '.join(rest)}",
    ]


def wrapped(label: str, words: list[str]) -> list[str]:
    """Words in lines of WIDTH."""
    lines = [label]
    for word in words:
        shown = word if word.isprintable() and word.strip() == word else repr(word)
        if len(lines[-1]) + len(shown) > WIDTH:
            lines.append(" " * len(label))
        lines[-1] += shown + " "
    return [line.rstrip() for line in lines]


def value_lines(scene: Scene) -> list[str]:
    """support() of the block that has most to show, with the sizes of this run."""
    model = scene.model
    order = {kind: i for i, kind in enumerate((CSA, "heavily_compressed_attention"))}
    layer = min(range(model.num_layers), key=lambda i: (order.get(model.layer_types[i], len(order)), i))
    sizes = values.sizes(model.config, layer, *scene.ids.shape)
    lines = [
        f"VALUES  of the model and of block {layer} ({model.layer_types[layer]}, {model.config.mlp_layer_types[layer]}): "
        f"each can be read by name",
        "        free: the fast way has it; mat: the block is spelled out while it is listened to; -: read-only",
        f"  {'':<30}{'layout':<17}{'axes':<24}{'in this run':<18}{'read':<6}edit",
    ]
    module = None
    for row in model.support(layer):
        owner, _, leaf = row.name.rpartition(".")
        if owner != module:
            module = owner
            lines.append(f"  {owner or 'model'}")
        if row.available:
            shape = " x ".join(str(sizes[axis]) for axis in row.axes.split())
            lines.append(f"    {leaf:<28}{row.layout:<17}{row.axes:<24}{shape:<18}{row.read:<6}{row.edit}")
        else:
            lines.append(f"    {leaf:<28}{row.reason}")
    if model.layer_types[layer] != CSA:
        lines.append("  this checkpoint has no compressed_sparse_attention block: no indexer values")
    return lines


def block_lines(scene: Scene) -> list[str]:
    """Routing and stream weights of every block at the last token."""
    model, last = scene.model, f"{scene.words[-1]!r}"
    lines = [f"ROUTING of {last}: expert x weight, best first", "  block  attention  experts"]
    for i in range(model.num_layers):
        chosen = zip(scene.routing["expert_indices", i][0, -1].tolist(), scene.routing["expert_weights", i][0, -1].tolist(), strict=True)
        slots = ", ".join(f"{expert} x {weight:.2f}" for expert, weight in sorted(chosen, key=lambda slot: -slot[1]))
        how = "by the token's id (hash)" if model.layers[i].mlp.scoring == "hash" else ""
        lines.append(f"  {i:>5}  {KIND[model.layer_types[i]]:<9}  {slots:<30} {how}".rstrip())
    wide = 5 * model.streams + 2
    lines += ["", f"STREAMS at {last}: how much of each stream a sublayer reads, and how much of its output each stream gets"]
    lines.append("  block  " + "".join(f"{head:<{wide}}" for head in ("attention reads", "attention writes", "mixture reads", "mixture writes")))
    for i in range(model.num_layers):
        sites = (scene.last[leaf, i][0].tolist() for leaf in STREAM_WEIGHTS)
        lines.append(f"  {i:>5}  " + "".join(f"{' '.join(f'{w:.2f}' for w in site):<{wide}}" for site in sites).rstrip())
    return lines


def lens_lines(scene: Scene) -> list[str]:
    tops = zip(scene.lens.layers, *scene.lens.top(SHOWN), strict=True)
    lines = ["LENS    each block's streams read through hc_head, norm and head at the last token"]
    for layer, probabilities, tokens in tops:
        best = zip(tokens[0].flatten().tolist(), probabilities[0].flatten().tolist(), strict=True)
        lines.append(f"  {layer:>5}  " + "  ".join(f"{scene.word(token)!r:<10} {p:.3f}  " for token, p in best).rstrip())
    return lines


def told(scene: Scene, result: Outcome) -> str:
    answer = f"P({scene.word(scene.answer)!r}) {float(scene.probabilities[-1, scene.answer]):.4f} -> {result.answer_probability:.4f}"
    return answer if result.best == scene.word(scene.answer) else f"{answer}, answer {result.best!r} {result.best_probability:.4f}"


def pick_lines(findings: Findings) -> list[str]:
    scene, config = findings.scene, findings.scene.model.config
    lines = [f"INDEXER entries that each CSA block kept for {scene.words[-1]!r}; each dropped by an edit of indexer_selection"]
    if CSA not in config.layer_types:
        return [*lines, "  no compressed_sparse_attention block in this checkpoint: nothing to pick"]
    if not findings.picks:
        return [*lines, f"  no entry is closed yet: {len(scene.words)} tokens, one entry for {config.compress_rates[CSA]}"]
    for pick in findings.picks:
        if pick.dropped is not None:
            lines.append(f"  block {pick.layer}  entry {pick.entry:>3} {pick.words!r:<24} attention up to {max(pick.mass):.2f}  without it: {told(scene, pick.dropped)}")
    more = sum(pick.dropped is None for pick in findings.picks)
    return [*lines, f"  and {more} more, attended less"] if more else lines


def ablation_lines(findings: Findings) -> list[str]:
    scene, found = findings.scene, findings.ablation
    lines = [
        f"EXPERT  {found.expert} of block {found.layer} ablated (weight 0 at its {found.tokens} of {len(scene.words)} tokens): {told(scene, found.outcome)}",
        "  the next tokens of the prompt that it changed most:",
    ]
    for place, word, before, after in found.moved:
        context = " ".join(scene.words[max(place - 3, 0) : place + 1])
        lines.append(f"    {context!r:<24} -> {word!r:<10} {before:.3f} -> {after:.3f}")
    return lines


def steering_lines(findings: Findings) -> list[str]:
    scene, found = findings.scene, findings.steering
    lines = [f"STEER   the streams leaving block {found.layer} by {found.about}:", f"  {told(scene, found.outcome)}"]
    if found.picked:
        lines.append(f"  the indexer of the first CSA block now keeps {', '.join(map(repr, found.picked[:SHOWN]))}")
    return lines
