"""A study of the indexer: which entries does a CSA block keep, does it need them, what if not?

A CSA block sees its window and the few compressed entries that the indexer scores best. On this
checkpoint an entry is made of four tokens, so entry i is statement i.
"""

import random

import torch

from dsv4 import Dsv4
from dsv4.config import CSA
from dsv4.demo import checkpoint_folder

torch.set_grad_enabled(False)
model = Dsv4.from_pretrained(checkpoint_folder())
layers = [i for i, kind in enumerate(model.layer_types) if kind == CSA]
draw = random.Random(0)
people = ["mira", "tom", "ana", "ben", "lia", "sam", "eva", "max", "ida", "leo", "zoe", "kai"]
things = [
    "key",
    "cup",
    "map",
    "lamp",
    "book",
    "rope",
    "coin",
    "drum",
    "kite",
    "ring",
    "vase",
    "bell",
]
documents = []
for _ in range(12):
    draw.shuffle(people)
    facts = [f"{who} has {what} ." for who, what in zip(people, things, strict=True)]
    draw.shuffle(facts)
    entry = draw.randrange(8)  # out of the window's reach
    who, _, what, _ = facts[entry].split()
    documents.append((" ".join(facts) + f" whose {what} ?", entry, model.to_single_token(who)))
ids = torch.cat([model.to_tokens(text) for text, _, _ in documents])
entries = torch.tensor([entry for _, entry, _ in documents])
answers = torch.tensor([answer for _, _, answer in documents])


def right(logits):
    return int((logits[:, -1].argmax(-1) == answers).sum())


names = [f"layers.{i}.self_attn.compressor.indexer.*" for i in layers]
logits, cache = model.run_with_cache(ids, names, pos=-1)
print(f"{len(documents)} questions, {right(logits)} right")

for layer in layers:
    at = f"layers.{layer}.self_attn.compressor.indexer"
    kept = (cache[f"{at}.indexer_selection"] == entries.unsqueeze(-1)).any(-1)
    scores = cache[f"{at}.indexer_scores"]  # [b, entries]
    own = scores.gather(1, entries.unsqueeze(-1))
    rank = (scores > own).sum(-1)
    print(f"block {layer}: keeps the fact's entry in {int(kept.sum())}, ranks {rank.tolist()}")
    # Which of the indexer's heads like it? Their scores are summed with these weights.
    weights = cache[f"{at}.indexer_head_weights"].unsqueeze(-1)
    weighted = cache[f"{at}.indexer_head_scores"] * weights
    shares = weighted.gather(-1, entries[:, None, None].expand(-1, weighted.shape[1], 1)).mean(0)
    print("         its score by head, mean:", " ".join(f"{x:.2f}" for x in shares.flatten()))


def without(entry_of_row):
    """A hook that takes one entry out of the last token's selection; -1 is an empty place."""

    def drop(selection, hook):
        edited = selection.clone()
        edited[:, -1] = edited[:, -1].masked_fill(edited[:, -1] == entry_of_row, -1)
        return edited

    return drop


for layer in layers:
    name = f"layers.{layer}.self_attn.compressor.indexer.indexer_selection"
    dropped = model.run_with_hooks(ids, [(name, without(entries.unsqueeze(-1)))])
    print(f"block {layer} without the fact's entry: {right(dropped)} right")

# The tokens themselves, unseen by the question in one block: their window keys are masked and the
# entries recomputed without them. Other blocks still see them.
text, entry, answer = documents[0]
last = len(model.to_tokens(text)[0]) - 1
for layer in layers:
    with model.knockout(layers=layer, queries=[last], keys=range(4 * entry, 4 * entry + 4)):
        probability = float(model(text)[0, -1].softmax(-1)[answer])
    print(f"block {layer}, tokens of entry {entry} knocked out: P(answer) = {probability:.4f}")

# Held: routing and selection stay those of the first document's clean run, whatever is edited.
_, clean = model.run_with_cache(text, [f"layers.{i}.**.indexer_selection" for i in layers])
with (
    model.freeze(clean, names="**.indexer_selection"),
    model.hooks([("token_embeddings", lambda value, hook: value + 0.1 * torch.randn_like(value))]),
):
    _, noisy = model.run_with_cache(text, "**.indexer_selection")
same = all(torch.equal(noisy[name], clean[name]) for name in clean)
print("selection under noise, frozen: the same" if same else "selection under noise: changed")
