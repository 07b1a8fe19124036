"""Switch one routed expert off, in one block, for every token that goes to it.

`expert_weights` holds the weight of each slot and `expert_indices` the expert of each slot, so the
slots of an expert are where the indices equal its number.
"""

import torch

from dsv4 import Dsv4
from dsv4.demo import checkpoint_folder

torch.set_grad_enabled(False)
model = Dsv4.from_pretrained(checkpoint_folder())
prompt = "mira has key . 2 2 makes 4 tom has cup . 1 3 makes 4 ana has map . 0 2 makes"
ids, layer = model.to_tokens(prompt), 0

logits, cache = model.run_with_cache(ids, ["layers.*.mlp.expert_indices"])
indices = cache["expert_indices", layer]  # [1, s, 2]
right = model.to_single_token("2")
print(f"{prompt} -> {model.to_string([int(logits[0, -1].argmax())])}")

for expert in range(model.num_experts):
    slots = indices == expert

    def ablate(weights, hook, slots=slots):
        return weights.masked_fill(slots, 0.0)

    ablated = model.run_with_hooks(ids, [(f"layers.{layer}.mlp.expert_weights", ablate)])
    probability = float(ablated[0, -1].softmax(-1)[right])
    tokens = int(slots.any(-1).sum())
    print(f"block {layer} without expert {expert} ({tokens:2} tokens): P(2) = {probability:.4f}")
