"""Read values of a run, by name.

From TransformerLens: `run_with_cache` is the same verb; a name is the path of a module.
From nnterp: the names are those of its page; one call returns the tensors, no trace to open.
"""

import torch

from dsv4 import Dsv4
from dsv4.demo import checkpoint_folder

model = Dsv4.from_pretrained(checkpoint_folder())
prompt = "mira has key . tom has cup . ana has map . ben has lamp . whose cup ?"
words = model.to_str_tokens(prompt)

# What there is. `print(model)` shows the same inside the module tree.
for row in model.support(layer=2):
    if row.layout == "Residual":
        print(f"{row.name:40} [{row.axes}]")

# `*` stands for one part of a name, `**` for any number of parts.
names = ["layers.*.layer_output", "layers.*.mlp.expert_indices", "layers.2.**.indexer_selection"]
with torch.no_grad():
    logits, cache = model.run_with_cache(prompt, names=names)

print(cache["layers.3.layer_output"].shape)  # [1, 19, 4, 128]: batch, token, stream, hidden
print(cache["layer_output", 3].shape)  # the same tensor, by leaf name and layer
print(cache.stack("layer_output").shape)  # [6, 1, 19, 4, 128]: every layer

answer = model.to_string([int(logits[0, -1].argmax())])
print(f"{prompt} -> {answer}")

# Block 2 keeps 2 of the 4 closed entries for each query; entry i is made of tokens 4i to 4i + 3.
for entry in cache["indexer_selection", 2][0, -1].tolist():
    print(f"kept for {words[-1]!r}: entry {entry}, {' '.join(words[4 * entry : 4 * entry + 4])!r}")

# `pos` keeps some tokens only; an int drops the token axis.
with torch.no_grad():
    _, cache = model.run_with_cache(prompt, "layers.*.self_attn.attention_probabilities", pos=-1)
pattern = cache["layers.2.self_attn.attention_probabilities"]
print(pattern.shape)  # [1, 4, 23]: batch, head, key; 19 tokens, then 4 entries
print(f"head 0 gives {pattern[0, 0, len(words) + 1]:.2f} of its attention to entry 1")
