"""Which implementations of an op there are, and why one cannot run somewhere."""

from importlib.util import find_spec

import torch

BACKENDS = ("torch", "triton")


def available(backend: str, device: str | torch.device) -> str | None:
    """None where `backend` runs on tensors of `device`, else the reason it does not.

    Raises:
        ValueError: an unknown backend.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: expected one of {', '.join(map(repr, BACKENDS))}")
    if backend == "torch":
        return None
    if find_spec("triton") is None:
        return "triton is not installed"
    # Not at the top: the ops have to import without Triton.
    from dsv4.kernels import _device_triton

    return _device_triton.refusal(torch.device(device))
