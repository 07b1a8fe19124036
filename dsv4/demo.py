"""`dsv4 demo`: one prompt on one checkpoint, told in lines and one picture.

The shipped checkpoint is a trained DeepSeek-V4 of 2 million parameters in the official on-disk
format. It reads a little language of statements of four words; its CSA blocks make one entry of
four tokens, so that entry i is statement i. What is measured: dsv4/findings.py.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from dsv4 import picture, values
from dsv4.config import CSA, HCA
from dsv4.findings import PROMPT as PROMPT
from dsv4.findings import (
    STREAM_WEIGHTS,
    Findings,
    Outcome,
    Scene,
    ablate_expert,
    default_prompts,
    find_picks,
    has_text,
    look,
    read_prompt,
    steer,
)
from dsv4.model import Dsv4

OUT = "dsv4_demo.png"
WIDTH = 100
NUM_BEST = 3
SHORT = {"sliding_attention": "sliding", CSA: "CSA", HCA: "HCA"}


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
        prompt: text; token ids where the checkpoint has no tokenizer.
        model: folder or hub id; None is the shipped checkpoint.
        contrast: another prompt; the steering adds the streams at its last token minus ours.
        out: file of the picture.
    Raises:
        ValueError for a prompt that the checkpoint cannot read, FileNotFoundError where the folder
        of `out` does not exist, and what `Dsv4.from_pretrained` raises.
    """
    if not Path(out).absolute().parent.is_dir():
        raise FileNotFoundError(f"--out {out}: there is no folder {Path(out).absolute().parent}")
    is_shipped = model is None
    loaded = Dsv4.from_pretrained(checkpoint_folder() if is_shipped else model, device=device)
    prompt, usual = default_prompts(loaded, prompt, is_shipped)
    contrast = usual if contrast is None else contrast
    with torch.no_grad():
        ids = read_prompt(loaded, prompt, is_shipped)
        towards = None if contrast is None else read_prompt(loaded, contrast, is_shipped)
        scene = look(loaded, ids)
        for section in (answer_lines, value_lines, block_lines, lens_lines):
            write("\n".join(section(scene)) + "\n")
        steering = steer(scene, towards, shortened(contrast or ""))
        findings = Findings(scene, find_picks(scene), ablate_expert(scene), steering)
    for section in (pick_lines, ablation_lines, steering_lines):
        write("\n".join(section(findings)) + "\n")
    write(picture.save(findings, out))
    return findings


def shortened(text: str) -> str:
    words = text.split()
    return repr(text if len(words) <= 6 else "... " + " ".join(words[-3:]))


def answer_lines(scene: Scene) -> list[str]:
    model, config = scene.model, scene.model.config
    best = scene.probabilities[-1].topk(min(NUM_BEST, model.vocab_size))
    first, *rest = [f"{scene.word(int(i))!r} {p:.4f}" for p, i in zip(*best, strict=True)]
    return [
        f"MODEL    {model.num_layers} blocks, {model.streams} streams of {model.hidden_size}, "
        f"{model.num_heads} heads, {model.num_experts} experts ({model.top_k} per token) + "
        f"{config.n_shared_experts} shared, vocabulary of {model.vocab_size}",
        *wrapped("PROMPT   ", scene.words),
        *([] if has_text(model) else ["         no tokenizer.json: tokens are shown as their ids"]),
        f"ANSWER   {first}, then {', '.join(rest)}",
    ]


def wrapped(label: str, words: list[str]) -> list[str]:
    """Words in lines of WIDTH."""
    lines = [label]
    for word in words:
        shown = word.strip(" ") if word.isprintable() and word.strip() else repr(word)
        if len(lines[-1]) + len(shown) > WIDTH:
            lines.append(" " * len(label))
        lines[-1] += shown + " "
    return [line.rstrip() for line in lines]


def value_lines(scene: Scene) -> list[str]:
    """support() of the block that has most to show, with the sizes of this run."""
    model = scene.model
    layer = next((i for kind in (CSA, HCA) for i, own in enumerate(model.layer_types) if own == kind), 0)
    sizes = values.sizes(model.config, layer, *scene.ids.shape)
    lines = [
        f"VALUES   of the model and of block {layer} ({SHORT[model.layer_types[layer]]}, {model.config.mlp_layer_types[layer]}), by name",
        "         free: the fast way has it; mat: costs the spelled-out way; -: read-only",
        f"    {'':<28}{'layout':<16}{'axes':<25}{'in this run':<15}{'read':<6}edit",
    ]
    module, absent = None, {}
    for row in model.support(layer):
        owner, _, leaf = row.name.rpartition(".")
        if not row.available:
            absent.setdefault(row.reason.partition(";")[0], []).append(leaf)
            continue
        if owner != module:
            module = owner
            lines.append(f"  {owner or 'model'}")
        shape = " ".join(str(sizes[axis]) for axis in row.axes.split())
        cost = f"{row.read:<6}{row.edit}"
        lines.append(f"    {leaf:<28}{row.layout:<16}{row.axes:<25}{shape:<15}{cost}")
    for reason, leaves in absent.items():
        lines += [f"  absent: {reason}", *wrapped("    ", leaves)]
    return lines


def block_lines(scene: Scene) -> list[str]:
    """Routing and stream weights of every block at the last token."""
    model, last = scene.model, repr(scene.words[-1])
    lines = [f"ROUTING  of {last}: expert x weight", "  block  attention  experts"]
    for i in range(model.num_layers):
        indices, weights = scene.routing["expert_indices", i], scene.routing["expert_weights", i]
        slots = zip(indices[0, -1].tolist(), weights[0, -1].tolist(), strict=True)
        best = sorted(slots, key=lambda slot: -slot[1])
        shown = ", ".join(f"{expert} x {weight:.2f}" for expert, weight in best)
        how = "(hash: by the token's id)" if model.layers[i].mlp.scoring == "hash" else ""
        lines.append(f"  {i:>5}  {SHORT[model.layer_types[i]]:<9}  {shown}  {how}".rstrip())
    lines += [
        "",
        f"STREAMS  at {last}: how much of each a sublayer reads, how much of its output each gets",
    ]
    column = max(5 * model.streams + 2, 18)
    heads = ("attention reads", "attention writes", "mixture reads", "mixture writes")
    lines.append("  block  " + "".join(f"{head:<{column}}" for head in heads).rstrip())
    for i in range(model.num_layers):
        sites = [" ".join(f"{w:.2f}" for w in scene.last[leaf, i][0]) for leaf in STREAM_WEIGHTS]
        lines.append(f"  {i:>5}  " + "".join(f"{site:<{column}}" for site in sites).rstrip())
    return lines


def lens_lines(scene: Scene) -> list[str]:
    lines = ["LENS     the last token's streams leaving each block, read through hc_head, norm and head"]
    for layer, probabilities, tokens in zip(scene.lens.layers, *scene.lens.top(NUM_BEST), strict=True):
        best = zip(tokens.flatten().tolist(), probabilities.flatten().tolist(), strict=True)
        shown = "   ".join(f"{scene.word(token)!r:<8} {p:.3f}" for token, p in best)
        lines.append(f"  {layer:>5}  {shown}")
    return lines


def told(scene: Scene, result: Outcome) -> str:
    before = float(scene.probabilities[-1, scene.answer])
    change = f"{before:.4f} -> {result.answer_probability:.4f}"
    is_same = result.best == scene.word(scene.answer)
    return change if is_same else f"{change}, says {result.best!r} {result.best_probability:.4f}"


def pick_lines(findings: Findings) -> list[str]:
    scene, config = findings.scene, findings.scene.model.config
    answer = repr(scene.word(scene.answer))
    title = f"INDEXER  what CSA blocks kept for {scene.words[-1]!r}"
    if CSA not in config.layer_types:
        return [
            title,
            "  this checkpoint has no compressed_sparse_attention block: there is no indexer",
        ]
    if not findings.picks:
        rate, num_tokens = config.compress_rates[CSA], len(scene.words)
        return [
            title,
            f"  nothing: one entry closes with every {rate}th token, here are {num_tokens}",
        ]
    lines = [
        f"{title}, and P({answer}) without it (an edit of indexer_selection)",
        f"  block  entry  {'words':<28}best head's attention   P({answer})",
    ]
    for pick in findings.picks:
        if pick.dropped is not None:
            words = f"{pick.words!r:<28}{max(pick.mass):<24.2f}"
            lines.append(f"  {pick.layer:>5}  {pick.entry:>5}  {words}{told(scene, pick.dropped)}")
    more = sum(pick.dropped is None for pick in findings.picks)
    return [*lines, f"  and {more} more, attended less, not tried"] if more else lines


def ablation_lines(findings: Findings) -> list[str]:
    scene, found = findings.scene, findings.ablation
    lines = [
        f"EXPERT   {found.expert} of block {found.layer} switched off (weight 0 at {found.num_tokens} of {len(scene.words)} tokens)",
        f"  P({scene.word(scene.answer)!r}) {told(scene, found.outcome)}",
        "  the next tokens that it cost most:",
    ]
    for place, word, before, after in found.moved:
        context = " ".join(w.strip() for w in scene.words[max(place - 2, 0) : place + 1])
        lines.append(f"    {f'{context!r} -> {word!r}':<34} {before:.4f} -> {after:.4f}")
    return lines


def steering_lines(findings: Findings) -> list[str]:
    scene, found = findings.scene, findings.steering
    lines = [
        f"STEER    the streams leaving block {found.layer}, by {found.about}",
        f"  P({scene.word(scene.answer)!r}) {told(scene, found.outcome)}",
    ]
    if found.picked:
        kept = ", ".join(map(repr, found.picked[:NUM_BEST]))
        lines.append(f"  block {found.reader}'s indexer now keeps {kept}")
    return lines
