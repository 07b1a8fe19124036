"""An expert ablation study: which experts does a task need, and what does taking one out mean?

There are several ways to take a routed expert out. "zero" leaves its weight missing, "renorm" gives
it to the others, "reroute" lets the next best take the slot, "mean" keeps its average output. A
hash block has no next best: its experts are a table of the token's id.
"""

import torch

from dsv4 import Dsv4
from dsv4.demo import checkpoint_folder

torch.set_grad_enabled(False)
model = Dsv4.from_pretrained(checkpoint_folder())
prompt = "mira has key . 2 2 makes 4 tom has cup . 1 3 makes 4 ana has map . 0 2 makes"
ids, layer = model.to_tokens(prompt), 0

logits, cache = model.run_with_cache(ids)
indices = cache["expert_indices", layer]  # [1, s, 2]
right = model.to_single_token("2")
print(f"{prompt} -> {model.to_string([int(logits[0, -1].argmax())])}")
print(cache.moe.usage())


def probability(logits):
    return float(logits[0, -1].softmax(-1)[right])


# By hand: the slots of an expert are where expert_indices holds its number.
for expert in range(model.num_experts):
    slots = indices == expert

    def ablate(weights, hook, slots=slots):
        return weights.masked_fill(slots, 0.0)

    ablated = model.run_with_hooks(ids, [(f"layers.{layer}.mlp.expert_weights", ablate)])
    tokens, left = int(slots.any(-1).sum()), probability(ablated)
    print(f"block {layer} without expert {expert} ({tokens:2} tokens): P(2) = {left:.4f}")

# Over tasks, by block: what is left of the right answers' probability without each expert.
tasks = {
    "sum": [("3 1 makes", "4"), ("0 2 makes", "2"), ("4 4 makes", "8"), ("2 3 makes", "5")],
    "recall": [
        ("tom has cup . ana has map . whose cup ?", "tom"),
        ("ben has key . whose key ?", "ben"),
    ],
    "copy": [("say ba ko ti again ba", "ko"), ("say no me lu again no me", "lu")],
}
for task, questions in tasks.items():
    for block in (0, 3):
        worst = {}
        for expert in range(model.num_experts):
            with model.ablate_experts({block: expert}):
                left = [float(model(text)[0, -1].softmax(-1)[model.to_single_token(answer)]) for text, answer in questions]
            worst[expert] = sum(left) / len(left)
        expert = min(worst, key=worst.get)
        print(f"{task:6} block {block}: worst without expert {expert}, P = {worst[expert]:.2f}")

# The ways of taking out. Block 0 is a hash block: "reroute" has to be told who takes the slots. On
# score blocks it is the next best by score.
_, outputs = model.run_with_cache(ids, f"layers.{layer}.mlp.expert_*")
needed = 0
options = {"zero": {}, "renorm": {}, "reroute": {"replacement": 6}, "mean": {"source": outputs}}
for mode, more in options.items():
    with model.ablate_experts({layer: needed}, mode=mode, **more):
        left = probability(model(ids))
    print(f"block {layer} without expert {needed}, {mode}: P(2) = {left:.4f}")
