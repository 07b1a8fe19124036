"""What all device code shares: whether Triton runs here, on which architecture, how rows lie."""

from functools import cache

import torch
import triton
from torch import Tensor

# Compute capability -> the name launch tables use. Each has tiles of its own; others are refused.
ARCHITECTURES = {(8, 0): "sm_80", (9, 0): "sm_90", (10, 0): "sm_100"}
INTERPRETER = "interpreter"
# As the decorators of this process saw it: changing the variable later changes nothing.
INTERPRETED = triton.knobs.runtime.interpret
# Of a device that the interpreter stands for: few, so that small cases are shared among programs and larger ones are not.
INTERPRETED_PROCESSORS = 12
# Rows that start at multiples of so many bytes are read in vectors.
ALIGNMENT = 16


def refusal(device: torch.device) -> str | None:
    """None where Triton runs on tensors of `device`, else the reason it does not."""
    if INTERPRETED:
        return None
    if device.type != "cuda":
        return (
            f"Triton needs a CUDA device, and this is {device} (for tests, "
            "TRITON_INTERPRET=1 set before the start runs kernels on CPU tensors)"
        )
    if torch.version.hip:
        return "its tiles are chosen for NVIDIA's devices, and this is a build of torch for AMD's"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES.values())
        found = f"sm_{capability[0]}{capability[1]}"
        return f"{device} is {found}; there are tiles for {known}"
    return None


@cache
def architecture(device: torch.device) -> str:
    """The name under which launch tables list a device that is not refused."""
    return INTERPRETER if INTERPRETED else ARCHITECTURES[torch.cuda.get_device_capability(device)]


@cache
def processors(device: torch.device) -> int:
    """How many programs of a full tile run at a time."""
    if INTERPRETED:
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def aligned_rows(x: Tensor) -> Tensor:
    """x, or a copy unless its last axis is dense and its rows start at multiples of ALIGNMENT bytes
    (in a dense tensor, the first row: rows of fewer bytes are read one by one).
    """
    steps = [x.stride(i) * x.element_size() for i in range(x.dim() - 1)]
    dense = x.stride(-1) == 1 and all(step % ALIGNMENT == 0 for step in steps)
    if x.data_ptr() % ALIGNMENT == 0 and (dense or x.is_contiguous()):
        return x
    return x.clone(memory_format=torch.contiguous_format)
