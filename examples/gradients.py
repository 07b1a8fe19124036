"""Gradients of an answer with respect to values inside the model.

The checkpoint's FP8 and FP4 weights take no gradient; every floating value of the forward does.
"""

import torch

from dsv4 import Dsv4
from dsv4.demo import checkpoint_folder

model = Dsv4.from_pretrained(checkpoint_folder(), dtype=torch.float32)
prompt = "mira has key . tom has cup . ana has map . ben has lamp . whose cup ?"
words = model.to_str_tokens(prompt)
tom, ben = model.to_single_token("tom"), model.to_single_token("ben")

# `detach=False` keeps the graph of the captured values.
name = "layers.2.attention_norm_output"
logits, cache = model.run_with_cache(prompt, name, detach=False)
score = logits[0, -1, tom] - logits[0, -1, ben]
(gradient,) = torch.autograd.grad(score, cache[name])

# Which tokens does block 2's attention read for the answer? The entry of `tom has cup .` is made
# of tokens 4 to 7, the question is asked at the last one.
size = gradient[0].norm(dim=-1)
for place in size.argsort(descending=True)[:6].tolist():
    print(f"{words[place]!r:7} token {place:2}: |gradient| = {size[place]:.3f}")


# A gradient hook sees the gradient of a value as it flows back, and may replace it.
def show(gradient, hook):
    print(f"{hook.name}: |gradient| = {gradient[0, -1].norm():.3f} at the last token")


hooks = [(f"layers.{layer}.layer_output", show) for layer in range(model.num_layers)]
with model.hooks(bwd_hooks=hooks):
    logits = model(prompt)
    (logits[0, -1, tom] - logits[0, -1, ben]).backward()
