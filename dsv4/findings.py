"""What `dsv4 demo` measures: one prompt on one checkpoint, looked at from several sides.

Everything here is the public API, so these functions are also examples of it.
"""

import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsv4.activation_cache import ActivationCache
from dsv4.config import CSA
from dsv4.lens import Lens
from dsv4.model import Dsv4

PROMPT = (
    "mira has key . tom has cup . ana has map . sky shows rain . sky shows rain . "
    "ben has lamp . sky shows sun . 2 2 makes 4 lia has drum . sky shows rain . sam has bell . "
    "say ba ko ti again ba ko ti eva has flag . whose lamp ?"
)
# For other checkpoints. The second is the contrast of the first.
OTHER_PROMPTS = ("The capital of France is", "The capital of Japan is")
NUM_IDS_WITHOUT_TOKENIZER = 24
QUESTION = re.compile(r"(.*\bwhose )(\w+)( \?)")
FACT = re.compile(r"\b\w+ has (\w+) \.")
# How many picks are dropped, one run each, and how many moved tokens are listed.
NUM_DROPS = 4
NUM_MOVED = 3

ROUTING = ["layers.*.mlp.expert_indices", "layers.*.mlp.expert_weights"]
STREAM_WEIGHTS = ("attention_pre", "attention_post", "mlp_pre", "mlp_post")
SELECTION = "layers.{}.self_attn.compressor.indexer.indexer_selection"
SCORES = "layers.{}.self_attn.compressor.indexer.indexer_scores"
PROBABILITIES = "layers.{}.self_attn.attention_probabilities"


@dataclass(frozen=True)
class Scene:
    """One prompt and its plain run.

    Attributes:
        ids: [1, s]; words: the token at each place.
        probabilities: [s, vocab] of the token that follows each place; answer: the most likely
            one after the last.
        routing: the experts of every token; last: other values at the last token.
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
        return spell(self.model, [token])[0]

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
    """An entry that a CSA block's indexer kept for the last token.

    mass: the attention on it, by head. dropped: the outcome without it; None where not tried.
    """

    layer: int
    entry: int
    words: str
    mass: list[float]
    dropped: Outcome | None = None


@dataclass(frozen=True)
class Ablation:
    """moved: (place, token after it in the plain run, its probability then, now), worst first."""

    layer: int
    expert: int
    num_tokens: int
    outcome: Outcome
    moved: list[tuple[int, str, float, float]]


@dataclass(frozen=True)
class Steering:
    """about: what the vector is; picked: what the first CSA block, `reader`, kept under it."""

    layer: int
    about: str
    outcome: Outcome
    reader: int | None
    picked: list[str]


@dataclass(frozen=True)
class Findings:
    scene: Scene
    picks: list[Pick]
    ablation: Ablation
    steering: Steering


def has_text(model: Dsv4) -> bool:
    return model.tokenizer.backend is not None


def spell(model: Dsv4, ids: list[int]) -> list[str]:
    """Each token as a word; its number where the checkpoint has no tokenizer."""
    return model.to_str_tokens(ids) if has_text(model) else [str(i) for i in ids]


def default_prompts(model: Dsv4, prompt: str | None, is_shipped: bool) -> tuple[str, str | None]:
    """(prompt, contrast): what is asked where the user gave none, and what to steer towards."""
    if not is_shipped and has_text(model):
        prompt = OTHER_PROMPTS[0] if prompt is None else prompt
        return prompt, OTHER_PROMPTS[1] if prompt == OTHER_PROMPTS[0] else None
    if not is_shipped:
        counted = (str(i % model.vocab_size) for i in range(NUM_IDS_WITHOUT_TOKENIZER))
        return " ".join(counted) if prompt is None else prompt, None
    prompt = PROMPT if prompt is None else prompt
    question = QUESTION.fullmatch(prompt)
    others = [x for x in FACT.findall(prompt) if question is not None and x != question[2]]
    return prompt, question[1] + others[0] + question[3] if others else None


def read_prompt(model: Dsv4, prompt: str, is_shipped: bool) -> Tensor:
    """Ids [1, s] on the model's device. ValueError for what the checkpoint cannot read."""
    words = prompt.split()
    if not words:
        raise ValueError("the prompt is empty; give at least one word")
    if not has_text(model):
        if not all(word.isdecimal() for word in words):
            raise ValueError(f"this checkpoint has no tokenizer.json: give token ids, as in '5 17 3'; got {prompt!r}")
        return torch.tensor([[int(word) for word in words]], device=model.device)
    if is_shipped:
        vocabulary = model.tokenizer.backend.get_vocab()
        unknown = [word for word in dict.fromkeys(words) if word not in vocabulary]
        if unknown:
            known = [w for w in sorted(vocabulary, key=vocabulary.get) if not w.startswith("<")]
            raise ValueError(f"the shipped checkpoint does not know {', '.join(map(repr, unknown))}; its words are: {' '.join(known)}")
    return model.to_tokens(prompt)


def look(model: Dsv4, ids: Tensor) -> Scene:
    """The plain run of ids [1, s]."""
    layers = range(model.num_layers)
    csa = [i for i in layers if model.layer_types[i] == CSA]
    names = [f"layers.{i}.{leaf}" for i in layers for leaf in STREAM_WEIGHTS]
    names += [PROBABILITIES.format(i) for i in layers]
    names += [form.format(i) for i in csa for form in (SELECTION, SCORES)]
    logits, routing = model.run_with_cache(ids, ROUTING)
    _, last = model.run_with_cache(ids, names, pos=-1)
    probabilities = logits[0].softmax(-1)
    answer = int(probabilities[-1].argmax())
    words = spell(model, ids[0].tolist())
    return Scene(model, ids, words, probabilities, answer, routing, last, model.logit_lens(ids))


def outcome(scene: Scene, logits: Tensor) -> Outcome:
    after = logits[0, -1].softmax(-1)
    best = int(after.argmax())
    return Outcome(scene.word(best), float(after[best]), float(after[scene.answer]))


def find_picks(scene: Scene) -> list[Pick]:
    """What each CSA block kept for the last token; the most attended are dropped, one at a time."""
    model, found = scene.model, []
    for layer in (i for i in range(model.num_layers) if model.layer_types[i] == CSA):
        kept = [e for e in scene.last[SELECTION.format(layer)][0].tolist() if e >= 0]
        # Keys are the tokens, then the entries.
        mass = scene.last[PROBABILITIES.format(layer)][0, :, scene.ids.shape[1] :]
        found += [Pick(layer, e, scene.entry(layer, e), mass[:, e].tolist()) for e in kept]
    attended = sorted(found, key=lambda pick: -max(pick.mass))[:NUM_DROPS]
    return [replace(p, dropped=without(scene, p)) if p in attended else p for p in found]


def without(scene: Scene, pick: Pick) -> Outcome:
    """The run in which the last token does not see the entry in that block."""

    def drop(selection: Tensor, hook) -> Tensor:
        edited = selection.clone()
        edited[:, -1] = edited[:, -1].masked_fill(edited[:, -1] == pick.entry, -1)
        return edited

    hooks = [(SELECTION.format(pick.layer), drop)]
    return outcome(scene, scene.model.run_with_hooks(scene.ids, hooks))


def ablate_expert(scene: Scene, layer: int = 0) -> Ablation:
    """Zero the weight of the expert that carries most of it over the prompt."""
    indices, weights = (
        scene.routing["expert_indices", layer],
        scene.routing["expert_weights", layer],
    )
    carried = weights.new_zeros(scene.model.num_experts)
    carried = carried.index_add(0, indices.flatten(), weights.flatten())
    expert = int(carried.argmax())

    def ablate(value: Tensor, hook) -> Tensor:
        return value.masked_fill(indices == expert, 0.0)

    hooks = [(f"layers.{layer}.mlp.expert_weights", ablate)]
    logits = scene.model.run_with_hooks(scene.ids, hooks)
    before, tokens = scene.probabilities.max(-1)
    after = logits[0].softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    worst = (after - before).argsort()[:NUM_MOVED].tolist()
    moved = [(i, scene.word(int(tokens[i])), float(before[i]), float(after[i])) for i in worst]
    hit = int((indices == expert).any(-1).sum())
    return Ablation(layer, expert, hit, outcome(scene, logits), moved)


def steer(scene: Scene, contrast: Tensor | None, about: str) -> Steering:
    """Add one vector to every stream of one block's output, at all positions.

    With a contrast [1, s]: what its last token's streams have and ours have not, before the first
    CSA block. Without: the head's direction from the answer to the second best, at the end.
    """
    model = scene.model
    csa = [i for i in range(model.num_layers) if model.layer_types[i] == CSA]
    if contrast is not None:
        layer = max((csa[0] if csa else model.num_layers // 2) - 1, 0)
        name = f"layers.{layer}.layer_output"
        runs = (model.run_with_cache(ids, name, pos=-1)[1] for ids in (contrast, scene.ids))
        there, here = (cache[name][0].mean(0) for cache in runs)
        vector, about = there - here, f"the last token of {about} minus the prompt's"
    else:
        layer = model.num_layers - 1
        answer, second = (int(i) for i in scene.probabilities[-1].topk(2).indices)
        rows = model.lm_head.whole_matrix(torch.float32)
        _, cache = model.run_with_cache(scene.ids, "readout", pos=-1)
        vector = rows[second] - rows[answer]
        vector = vector * cache["readout"].float().norm() / vector.norm()
        about = f"the head's row of {scene.word(second)!r} minus that of {scene.word(answer)!r}"
    reader = csa[0] if csa and csa[0] > layer else None
    with model.steer(vector, layers=layer):
        names = [] if reader is None else SELECTION.format(reader)
        logits, cache = model.run_with_cache(scene.ids, names, pos=-1)
    kept = [e for value in cache.values() for e in value[0].tolist() if e >= 0]
    picked = [scene.entry(reader, e) for e in kept]
    return Steering(layer, about, outcome(scene, logits), reader, picked)
