"""Activation patching: which block carries what was asked?

Two prompts differ in one word. The streams of one run's last token are put into the other run,
block by block. From TransformerLens: `run_with_hooks(fwd_hooks=...)` works here as well.
"""

import torch

from dsv4 import Dsv4
from dsv4.demo import checkpoint_folder

torch.set_grad_enabled(False)
model = Dsv4.from_pretrained(checkpoint_folder())
facts = "mira has key . tom has cup . ana has map . ben has lamp . "
clean, corrupt = facts + "whose cup ?", facts + "whose lamp ?"
tom = model.to_single_token("tom")


def probability(logits):
    return float(logits[0, -1].softmax(-1)[tom])


clean_logits, clean_cache = model.run_with_cache(clean, "layers.*.layer_output")
print(f"clean   P(tom) = {probability(clean_logits):.4f}")
print(f"corrupt P(tom) = {probability(model(corrupt)):.4f}")


def patch_last_token(streams, hook):
    """A tensor that is returned replaces the value; here only the last token's streams differ."""
    patched = streams.clone()
    patched[:, -1] = clean_cache[hook.name][:, -1]
    return patched


for layer in range(model.num_layers):
    logits = model.run_with_hooks(corrupt, [(f"layers.{layer}.layer_output", patch_last_token)])
    print(f"last token's streams after block {layer}: P(tom) = {probability(logits):.4f}")


# The same with integers: make block 2 keep the entry `tom has cup .` and no other.
def keep_entry_1(selection, hook):
    edited = selection.clone()
    edited[:, -1] = -1
    edited[:, -1, 0] = 1
    return edited


name = "layers.2.self_attn.compressor.indexer.indexer_selection"
logits = model.run_with_hooks(corrupt, [(name, keep_entry_1)])
print(f"block 2 sees only entry 1: P(tom) = {probability(logits):.4f}")


# All of it at once: every block and every one of the last tokens, one run each, entered where the
# patch is. "denoise" puts values of the first prompt into the run of the second.
def metric(logits):
    return logits[0, -1].log_softmax(-1)[tom]


over = {"name": "layer_output", "pos": [-3, -2, -1]}
sweep = model.patch_sweep(clean, corrupt, metric, over, direction="denoise", progress=False)
print(sweep.top(3))
