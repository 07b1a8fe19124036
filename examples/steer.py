"""Steering: add one vector to the residual streams.

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
