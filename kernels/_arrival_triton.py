"""One launch in place of two: the last program to arrive goes on with what the others left in memory.

Programs count themselves in an int32 that is zero before a launch and is left zero by it, so that neither a stream of launches nor a
CUDA graph that is replayed ever has to clear it. Nobody waits for anybody, so that any number of programs may be in flight; whoever adds
up partial sums adds them in the order of the programs that made them, whatever order they arrived in.
"""

from threading import Lock

import torch
import triton
import triton.language as tl
from torch import Tensor

# Counters of one stream, and those that are held for all of a device.
OF_STREAM, OF_DEVICE = 64, 1 << 16


@triton.jit
def is_last(counter_ptr, programs):
    """Whether this program is the last of `programs` to come here; it then finds in memory all that any of them stored before.

    The barrier puts the stores of every thread before the addition, which releases them and acquires those of the programs that
    added before, at the device's scope; the sum reaches the other threads over a barrier, which puts their loads behind it.
    """
    tl.debug_barrier()
    before = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    last = before == programs - 1
    if last:
        tl.store(counter_ptr, 0)
    tl.debug_barrier()
    return last


class _Counters:
    """The counters of one device. `of_stream`: by the stream's handle."""

    def __init__(self, device: torch.device):
        self.held = torch.zeros(OF_DEVICE, dtype=torch.int32, device=device)
        self.used, self.lock = 0, Lock()
        self.of_stream: dict[int, Tensor] = {}
        if device.type == "cuda":
            # Other streams do not wait for the one that has cleared them.
            torch.cuda.current_stream(device).synchronize()

    def take(self, size: int) -> Tensor:
        """Counters that no other launch has; where there are none left, cleared by a launch of their own."""
        with self.lock:
            begin, self.used = self.used, self.used + size
        return self.held[begin : begin + size] if begin + size <= OF_DEVICE else torch.zeros_like(self.held[:size])


_of_device: dict[torch.device, _Counters] = {}


def counters(device: torch.device, size: int) -> Tensor:
    """`size` (at most OF_STREAM) int32 zeros for the next launch on the current stream, which has to leave them zero.

    Launches of one stream come one after another and share theirs. Each launch that a CUDA graph holds has counters of its own, since
    two graphs may be replayed at once; where the graph's capture is the first use of a device, the graph clears them itself.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _of_device[device].take(size) if device in _of_device else torch.zeros(size, dtype=torch.int32, device=device)
    if device not in _of_device:
        _of_device[device] = _Counters(device)
    held = _of_device[device]
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    if stream not in held.of_stream:
        held.of_stream[stream] = held.take(OF_STREAM)
    return held.of_stream[stream][:size]
