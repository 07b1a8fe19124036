"""Attribution patching at 2000 tokens: where is the fact that answers the question?

Two prompts differ in one word, 1000 tokens before the question. One backward estimates, for every
token and every value asked for, what putting the other prompt's value there would do. A sweep then
measures the places that the estimate found, one run each.
"""

import torch

from dsv4 import Dsv4
from dsv4.demo import checkpoint_folder

torch.manual_seed(0)
model = Dsv4.from_pretrained(checkpoint_folder(), dtype=torch.float32)
weather = [f"sky shows {w} ." for w in ("rain", "sun", "snow", "wind")]
statements = [weather[i] for i in torch.randint(4, (511,)).tolist()]
statements[256] = "tom has cup ."
clean = " ".join(statements) + " whose cup ?"
corrupt = clean.replace("tom has cup", "ben has cup")
tom, ben = model.to_single_token("tom"), model.to_single_token("ben")


def metric(logits):
    """One number; with logits_to_keep=1 the logits are those of the last token."""
    return logits[0, -1, tom] - logits[0, -1, ben]


names = ["layers.*.layer_output", "layers.*.self_attn.attention_output"]
estimates = model.attribution_patch(clean, corrupt, metric, names, logits_to_keep=1)
print(f"{len(model.to_tokens(clean)[0])} tokens")
print(f"tom - ben: {estimates.base:.2f}, with the other fact {estimates.other:.2f}")

# A value keeps its axes without the widths: layer_output is left with row, token, stream.
for layer in range(model.num_layers):
    by_token = estimates[f"layers.{layer}.layer_output"][0].sum(-1)
    best = by_token.abs().topk(2).indices.tolist()
    shown = ", ".join(f"token {i}: {by_token[i]:.2f}" for i in best)
    print(f"streams after block {layer}: {shown}")
written = {i: estimates[f"layers.{i}.self_attn.attention_output"].sum().item() for i in range(model.num_layers)}
reader = min(written, key=written.get)
print(f"the attention that brings it: block {reader}, estimate {written[reader]:.2f}")

# What is really so: runs in place of the estimate. They enter at the patched block.
last = len(model.to_tokens(clean)[0]) - 1
found = model.patch_sweep(
    clean,
    corrupt,
    metric,
    {"name": "layer_output", "layers": [0, 1, 2], "pos": [1024, last]},
    logits_to_keep=1,
    progress=False,
)
print(found.top(3))
