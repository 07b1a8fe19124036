"""A sparse autoencoder in place of a value: train, splice, read its latents, switch them off.

It stands at block 2's attention_output, which brings the answer, and is trained on what questions
get there. With the error term the run is the model's own until a latent is edited.
"""

import random

import torch
from torch import nn

from dsv4 import Dsv4, HookPoint
from dsv4.demo import checkpoint_folder

torch.manual_seed(0)
model = Dsv4.from_pretrained(checkpoint_folder(), dtype=torch.float32)
name = "layers.2.self_attn.attention_output"
draw = random.Random(0)
people = ["mira", "tom", "ana", "ben", "lia", "sam", "eva", "max"]
things = ["key", "cup", "map", "lamp", "book", "rope", "coin", "drum"]


def document():
    draw.shuffle(people)
    facts = [f"{who} has {what} ." for who, what in zip(people, things, strict=True)]
    return " ".join(facts) + f" whose {draw.choice(things)} ?"


class Sae(nn.Module):
    """Keeps the k largest latents. Its own point is a value of the model while spliced in."""

    def __init__(self, width, latents, k):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(width, latents), nn.Linear(latents, width)
        self.decoder.weight.data = self.encoder.weight.data.T.clone()
        self.k = k
        self.latents = HookPoint("b s latents")

    def forward(self, x):
        raw = self.encoder(x - self.decoder.bias).relu()
        best = raw.topk(self.k, dim=-1)
        return self.decoder(self.latents(torch.zeros_like(raw).scatter(-1, *best[::-1])))


with torch.no_grad():
    ids = torch.cat([model.to_tokens(document()) for _ in range(256)])
    data = model.run_with_cache(ids, name, pos=-1)[1][name]  # [256, hidden]: what `?` is given
scale = data.norm(dim=-1).mean()
sae = Sae(model.hidden_size, 64, k=4)
optimizer = torch.optim.Adam(sae.parameters(), lr=3e-3)
for _ in range(400):
    batch = data[torch.randint(len(data), (64,))] / scale
    loss = (sae(batch.unsqueeze(0)) - batch).square().sum(-1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
# Trained on values of norm one: the scale goes into the weights.
with torch.no_grad():
    sae.encoder.bias.mul_(scale)
    sae.decoder.bias.mul_(scale)
print(f"unexplained: {loss.item():.3f} of the square")

prompt = "mira has key . tom has cup . ana has map . ben has lamp . whose cup ?"
tom, ben = model.to_single_token("tom"), model.to_single_token("ben")


def told(title, logits):
    after = logits[0, -1].softmax(-1)
    print(f"{title}: {model.to_string([int(after.argmax())])}, P(tom) = {after[tom]:.4f}")


with torch.no_grad():
    told("plain", model(prompt))
    with model.splice(name, sae, use_error_term=False):
        told("the SAE alone", model(prompt))

with model.splice(name, sae) as points:
    latents = points[0]
    print("its values:", latents)
    logits, cache = model.run_with_cache(prompt, latents, detach=False)
    told("with the error term", logits)
    # Gradients go through the SAE: how much each latent counts for tom against ben.
    score = logits[0, -1, tom] - logits[0, -1, ben]
    (gradient,) = torch.autograd.grad(score, cache[latents])
    effect = (cache[latents] * gradient)[0, -1].detach()
    active = cache[latents][0, -1].nonzero().flatten().tolist()
    print("active at '?':", ", ".join(f"{i} ({effect[i]:+.2f})" for i in active))

    for latent in sorted(active, key=lambda i: -effect[i].item())[:2]:

        def off(value, hook, latent=latent):
            edited = value.clone()
            edited[..., latent] = 0
            return edited

        with torch.no_grad():
            told(f"latent {latent} off", model.run_with_hooks(prompt, [(latents, off)]))
