"""Steering: add one vector to the residual streams, in one run and while text is generated.

There are four streams. `model.steer` adds the vector to each of them; since the columns of the
mixing matrices sum to one, later blocks carry it on unchanged.
"""

import torch

from dsv4 import Dsv4
from dsv4.demo import checkpoint_folder

torch.set_grad_enabled(False)
model = Dsv4.from_pretrained(checkpoint_folder())
facts = "mira has key . tom has cup . ana has map . ben has lamp . eva has flag . "
layer, name = 1, "layers.1.layer_output"


def show(title, logits):
    best = logits[0, -1].softmax(-1).topk(2)
    pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    print(title, ", ".join(f"{model.to_string([i])} {p:.3f}" for p, i in pairs))


# What the question for the cup has and the question for the lamp has not, where it ends.
_, cup = model.run_with_cache(facts + "whose cup ?", name, pos=-1)
_, lamp = model.run_with_cache(facts + "whose lamp ?", name, pos=-1)
vector = (cup[name] - lamp[name])[0].mean(0)  # [hidden], the mean over streams

show("plain:         ", model(facts + "whose lamp ?"))
for scale in (0.5, 1.0, 2.0):
    with model.steer(vector, layers=layer, scale=scale):
        show(f"cup - lamp x {scale}:", model(facts + "whose lamp ?"))


# The same by hand: any value can be edited so.
def add(streams, hook):
    return streams + vector


with model.hooks([(name, add)]):
    show("by hand:       ", model(facts + "whose lamp ?"))


# While generating: contexts act in every step. At all positions the vector changes each answer that
# follows; `pos` says where, counted in the whole row.
question = facts + "whose lamp ?"
tokens = model.to_tokens(question)
end = tokens.shape[1] - 1


def generated(ids):
    return model.to_string(ids[0, tokens.shape[1] :].tolist())


print("generated, plain:  ", generated(model.generate(tokens, max_new_tokens=5)))
with model.steer(vector, layers=layer):
    print("generated, steered:", generated(model.generate(tokens, max_new_tokens=5)))
with model.steer(vector, layers=layer, pos=end):
    ids, steps = model.generate(tokens, max_new_tokens=5, names="layers.*.mlp.expert_indices")
    print("steered at `?` only:", generated(ids))
# Captures of a generation cover the prompt and every token that was fed.
print("experts of block 5, token by token:", steps["expert_indices", 5][0, end:, 0].tolist())
# One stream in place of all, and the size taken as what the next block reads.
with model.steer(vector, layers=layer, streams=0, norm="read"):
    show("stream 0 alone:", model(question))
