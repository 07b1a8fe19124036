"""Random weights for models built from a config: every parameter non-trivial, so that no fault hides behind a zero.

| parameter | distribution |
|---|---|
| matrices | normal, std fan_in^-1/2 |
| norm weights | 1 + 0.2 normal |
| hyper-connection fn, base, scale | normal std fan_in^-1/2, normal std 0.5, 1 + 0.2 normal |
| sinks, position_bias | normal |
| correction bias | 0.3 normal |
| hash table | each row distinct experts, uniform |
"""

import torch
from torch import Tensor, nn


def fill(model: nn.Module, seed: int) -> None:
    """Overwrite every parameter and table of the model from a generator of its own; the global seed is not touched."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.startswith("rotary."):
                continue
            tensor.copy_(_draw(name, tensor, model.config.n_routed_experts, generator))


def _draw(name: str, tensor: Tensor, experts: int, generator: torch.Generator) -> Tensor:
    if name.endswith("tid2eid"):
        order = torch.rand(tensor.shape[0], experts, generator=generator, dtype=torch.float32, device="cpu").argsort(-1)
        return order[:, : tensor.shape[1]]
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32, device="cpu")
    leaf = name.rsplit(".", 1)[-1]
    if "norm" in name or leaf in ("scale", "hc_scale"):
        return 1 + 0.2 * noise
    if leaf in ("base", "hc_base"):
        return 0.5 * noise
    if leaf == "e_score_correction_bias":
        return 0.3 * noise
    if leaf in ("sinks", "position_bias"):
        return noise
    if name == "embed_tokens.weight":
        return noise
    return noise * tensor.shape[-1] ** -0.5
