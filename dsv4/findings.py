"""What `dsv4 demo` measures: one prompt on one checkpoint, looked at from several sides. Everything here is the public API."""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.activation_cache import ActivationCache
from dsv4.config import CSA
from dsv4.lens import Lens
from dsv4.model import Dsv4

PROMPT = (
    "mira has key . tom has cup . ana has map . sky shows rain . sky shows rain . ben has lamp . sky shows sun . "
    "2 2 makes 4 lia has drum . sky shows rain . sam has bell . say ba ko ti again ba ko ti eva has flag . whose key ?"
)
# For other checkpoints: the difference of the two is what the steering adds.
OTHER_PROMPT, OTHER_CONTRAST = "The capital of France is", "The capital of Japan is"
IDS_WITHOUT_TOKENIZER = 24
QUESTION = re.compile(r"(.*\bwhose )(\w+)( \?)")
FACT = re.compile(r"\b\w+ has (\w+) \.")
# Runs that drop an entry, the most attended first: a large model has thousands of picks.
DROPS = 4
SHOWN = 3

ROUTING = ["layers.*.mlp.expert_indices", "layers.*.mlp.expert_weights"]
STREAM_WEIGHTS = ("attention_pre", "attention_post", "mlp_pre", "mlp_post")
SELECTION = "layers.{}.self_attn.compressor.indexer.indexer_selection"
SCORES = "layers.{}.self_attn.compressor.indexer.indexer_scores"
PROBABILITIES = "layers.{}.self_attn.attention_probabilities"


@dataclass(frozen=True)
class Scene:
    """One prompt and its plain run.

    Attributes:
        ids: [1, s]. words: the token at each place. probabilities: [s, vocab] of the next token.
        answer: the most likely token after the prompt. routing: every token's experts. last: values at the last token.
    """

    model: Dsv4
    ids: Tensor
    words: list[str]
    probabilities: Tensor
    answer: int
    routing: ActivationCache
    last: ActivationCache
    lens: Lens

    def word(self, token: int) -> str:
        return str(token) if self.model.tokenizer.backend is None else self.model.to_string([token])

    def entry(self, layer: int, number: int) -> str:
        """The words of a compressed entry's own window."""
        rate = self.model.config.rate(layer)
        return " ".join(w.strip() for w in self.words[number * rate : (number + 1) * rate])


@dataclass(frozen=True)
class Outcome:
    """What a run with an edit says after the prompt."""

    best: str
    best_probability: float
    answer_probability: float


@dataclass(frozen=True)
class Pick:
    """An entry that a CSA block's indexer kept for the last token. mass: attention on it, by head. dropped: the answer without it."""

    layer: int
    entry: int
    words: str
    score: float
    mass: list[float]
    dropped: Outcome | None = None


@dataclass(frozen=True)
class Ablation:
    """moved: (place, next token in the plain run, its probability before, after), the largest fall first."""

    layer: int
    expert: int
    tokens: int
    outcome: Outcome
    moved: list[tuple[int, str, float, float]]


@dataclass(frozen=True)
class Steering:
    """picked: what the first CSA block's indexer kept under the steering, as words."""

    layer: int
    about: str
    outcome: Outcome
    picked: list[str]


@dataclass(frozen=True)
class Findings:
    scene: Scene
    picks: list[Pick]
    ablation: Ablation
    steering: Steering


def read_prompt(model: Dsv4, prompt: str | None, shipped: bool) -> tuple[Tensor, list[str], str | None]:
    """(ids [1, s], words, the prompt as text or None where the checkpoint has no tokenizer). ValueError for words it does not know."""
    if model.tokenizer.backend is None:
        if prompt is not None and not all(w.isdecimal() for w in prompt.split()):
            raise ValueError(f"this checkpoint has no tokenizer.json, so the prompt must be token ids, e.g. '5 17 3'; got {prompt!r}")
        ids = [i % model.vocab_size for i in range(IDS_WITHOUT_TOKENIZER)] if prompt is None else [int(w) for w in prompt.split()]
        if not ids:
            raise ValueError("the prompt is empty; give token ids, e.g. '5 17 3'")
        return torch.tensor([ids]), [str(i) for i in ids], None
    text = prompt if prompt is not None else PROMPT if shipped else OTHER_PROMPT
    if shipped:
        vocabulary = model.tokenizer.backend.get_vocab()
        unknown = [w for w in dict.fromkeys(text.split()) if w not in vocabulary]
        if unknown:
            known = " ".join(w for w in sorted(vocabulary, key=vocabulary.get) if not w.startswith("<"))
            raise ValueError(f"the shipped checkpoint does not know {', '.join(map(repr, unknown))}; its words are: {known}")
    ids = model.to_tokens(text)
    if ids.shape[1] == 0:
        raise ValueError("the prompt has no tokens; give at least one word")
    return ids, model.to_str_tokens(ids), text


def contrast_of(text: str | None, contrast: str | None, shipped: bool) -> str | None:
    """The prompt whose difference steers: the one given, a question for another fact of the document, or None."""
    if contrast is not None or text is None:
        return contrast
    if not shipped:
        return OTHER_CONTRAST if text == OTHER_PROMPT else None
    question = QUESTION.fullmatch(text)
    others = [thing for thing in FACT.findall(text) if question is not None and thing != question[2]]
    return question[1] + others[0] + question[3] if others else None


def look(model: Dsv4, ids: Tensor, words: list[str]) -> Scene:
    """The plain run."""
    layers = range(model.num_layers)
    csa = [i for i in layers if model.layer_types[i] == CSA]
    names = [f"layers.{i}.{leaf}" for i in layers for leaf in STREAM_WEIGHTS]
    names += [PROBABILITIES.format(i) for i in layers] + [form.format(i) for i in csa for form in (SELECTION, SCORES)]
    logits, routing = model.run_with_cache(ids, ROUTING)
    _, last = model.run_with_cache(ids, names, pos=-1)
    probabilities = logits[0].softmax(-1)
    answer = int(probabilities[-1].argmax())
    return Scene(model, ids, words, probabilities, answer, routing, last, model.logit_lens(ids))


def outcome(scene: Scene, logits: Tensor) -> Outcome:
    after = logits[0, -1].softmax(-1)
    best = int(after.argmax())
    return Outcome(scene.word(best), float(after[best]), float(after[scene.answer]))


def picks(scene: Scene) -> list[Pick]:
    """What each CSA block's indexer kept for the last token, and the answer once the most attended are dropped, one at a time."""
    found = []
    for layer in (i for i in range(scene.model.num_layers) if scene.model.layer_types[i] == CSA):
        kept = [e for e in scene.last[SELECTION.format(layer)][0].tolist() if e >= 0]
        # Keys are the tokens, then the entries.
        mass = scene.last[PROBABILITIES.format(layer)][0, :, scene.ids.shape[1] :]
        scores = scene.last[SCORES.format(layer)][0]
        found += [Pick(layer, e, scene.entry(layer, e), float(scores[e]), mass[:, e].tolist()) for e in kept]
    attended = sorted(found, key=lambda pick: -max(pick.mass))[:DROPS]
    return [with_drop(scene, pick) if pick in attended else pick for pick in found]


def with_drop(scene: Scene, pick: Pick) -> Pick:
    def drop(selection: Tensor, hook) -> Tensor:
        at_last = selection[:, -1:]
        return torch.cat((selection[:, :-1], at_last.masked_fill(at_last == pick.entry, -1)), dim=1)

    logits = scene.model.run_with_hooks(scene.ids, [(SELECTION.format(pick.layer), drop)])
    return Pick(pick.layer, pick.entry, pick.words, pick.score, pick.mass, outcome(scene, logits))


def ablate_expert(scene: Scene, layer: int = 0) -> Ablation:
    """Zero the routing weight of the expert that carries most of it over the prompt."""
    indices, weights = scene.routing["expert_indices", layer], scene.routing["expert_weights", layer]
    carried = torch.zeros(scene.model.num_experts).index_add(0, indices.flatten().cpu(), weights.flatten().cpu())
    expert = int(carried.argmax())

    def ablate(value: Tensor, hook) -> Tensor:
        return value.masked_fill(indices == expert, 0.0)

    logits = scene.model.run_with_hooks(scene.ids, [(f"layers.{layer}.mlp.expert_weights", ablate)])
    before = scene.probabilities.max(-1)
    after = logits[0].softmax(-1).gather(-1, before.indices.unsqueeze(-1)).squeeze(-1)
    order = (after - before.values).argsort()[:SHOWN].tolist()
    moved = [(i, scene.word(int(before.indices[i])), float(before.values[i]), float(after[i])) for i in order]
    return Ablation(layer, expert, int((indices == expert).sum()), outcome(scene, logits), moved)


def steer(scene: Scene, contrast: str | None) -> Steering:
    """Add one vector to every stream of one block's output, at all positions."""
    model = scene.model
    csa = [i for i in range(model.num_layers) if model.layer_types[i] == CSA]
    if contrast is not None:
        layer = max((csa[0] if csa else model.num_layers // 2) - 1, 0)
        name = f"layers.{layer}.layer_output"
        ends = [model.run_with_cache(run, name, pos=-1)[1][name][0].mean(0) for run in (contrast, scene.ids)]
        vector, about = ends[0] - ends[1], f"the last token of {contrast_words(contrast)} minus that of the prompt"
    else:
        layer = model.num_layers - 1
        second = int(scene.probabilities[-1].topk(2).indices[-1])
        rows = model.lm_head.matrix(torch.float32)
        vector, about = rows[second] - rows[scene.answer], f"the head's row of {scene.word(second)!r} minus that of the answer"
        size = model.run_with_cache(scene.ids, "readout", pos=-1)[1]["readout"].float().norm()
        vector = vector * size / vector.norm()
    names = [SELECTION.format(csa[0])] if csa else []
    with model.steer(vector, layers=layer):
        logits, cache = model.run_with_cache(scene.ids, names, pos=-1)
    picked = [scene.entry(csa[0], e) for name in names for e in cache[name][0].tolist() if e >= 0]
    return Steering(layer, about, outcome(scene, logits), picked)


def contrast_words(contrast: str) -> str:
    """Its end, short enough for a line."""
    words = contrast.split()
    return repr(contrast if len(words) <= 6 else "... " + " ".join(words[-3:]))
