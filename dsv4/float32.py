"""Modules whose parameters stay float32 whatever dtype the model is cast to."""

import torch
from torch import nn


class Float32(nn.Module):
    """`.to(dtype)`, `.bfloat16()` and `.half()` leave this module's own tensors (and their gradients) float32; `.double()` widens them."""

    FLOAT32: tuple[str, ...] | None = None
    """Names of the parameters and buffers kept; None keeps all of the module's own."""

    def keeps(self, leaf: str) -> bool:
        """Whether the parameter or buffer of that name is one of them."""
        return self.FLOAT32 is None or leaf in self.FLOAT32

    def _apply(self, fn, recurse=True):
        own = {**self._parameters, **self._buffers}
        wide = [t for name, t in own.items() if t is not None and self.keeps(name)]
        grads = [t.grad for t in wide if isinstance(t, nn.Parameter) and t.grad is not None]
        kept = {id(t) for t in (*wide, *grads)}

        def keep_wide(t: torch.Tensor) -> torch.Tensor:
            moved = fn(t)
            if id(t) in kept and moved.is_floating_point() and moved.dtype.itemsize < torch.float32.itemsize:
                return t.to(moved.device, torch.float32)
            return moved

        if recurse:
            for module in self.children():
                module._apply(fn)
        return super()._apply(keep_wide, recurse=False)
