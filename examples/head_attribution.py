"""Direct logit attribution, down to heads, what they looked at, and paths between them.

The residual has four streams that are mixed before every write, so outputs cannot be added as they
are. `cache.residual` gives each output the weight with which it arrives in the logits; the terms
then sum to the logit difference. The derivation is in docs/residual.md.
"""

import torch

from dsv4 import Dsv4
from dsv4.demo import checkpoint_folder

torch.set_grad_enabled(False)
model = Dsv4.from_pretrained(checkpoint_folder(), dtype=torch.float32)
prompt = "mira has key . tom has cup . ana has map . ben has lamp . whose cup ?"
words = model.to_str_tokens(prompt)

# Whole sublayers need what run_with_cache captures by default; heads need the premix too.
names = [
    *("token_embeddings", "readout_weights", "final_norm_output"),
    *("**.attention_pre", "**.attention_post", "**.attention_comb", "**.attention_output"),
    *("**.mlp_pre", "**.mlp_post", "**.mlp_comb", "**.mlp_output"),
    *("**.attention_premix", "**.attention_probabilities", "**.attention_values"),
    *("**.compressor_gates", "**.attention_norm_output"),
]
logits, cache = model.run_with_cache(prompt, names)
tom, ben = model.to_single_token("tom"), model.to_single_token("ben")
difference = logits[0, -1, tom] - logits[0, -1, ben]

whole = cache.residual.logit_attribution("tom", against="ben")
print(f"tom - ben: {difference:.4f}; the terms sum to {whole.values[:, 0, -1].sum():.4f}")
print(whole.top(4))

split = cache.residual.logit_attribution("tom", against="ben", unit="head")
print(split.top(4))

# What arrives is not what was written: the weight of each output at the last token.
gamma = cache.residual.write_coefficients()[0, -1]
print("weight of block 2's attention in the logits:", f"{gamma[1 + 2 * 2]:.2f}")

# What the block's attention wrote towards the answer, by the token it came from. The direction is
# that of the logit difference, carried back through the final norm and the streams.
rows = model.lm_head.weight
direction = (rows[tom] - rows[ben]) * model.norm.weight * whole.scale[0, -1] * gamma[1 + 2 * 2]
paths = cache.attention.value_paths(direction, layers=2, by="token")[2][0, :, -1]  # [head, token]
for place in paths.sum(0).topk(3).indices.tolist():
    by_head = " ".join(f"{x:6.2f}" for x in paths[:, place].tolist())
    print(f"from {words[place]!r} (token {place}), by head: {by_head}")
print(f"all paths: {paths.sum():.4f}; block 2's attention: {whole[2, 'attention'][0, -1]:.4f}")
