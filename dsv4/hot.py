"""What is lately used on one device of weights that live elsewhere: copies within a byte budget, made ahead where that is asked.

On a CUDA device copies go through two pinned buffers on a stream of their own, prepared by one background thread, so that they run
beside the computation; a copy is waited for on the stream that uses it. On the CPU the thread alone does that; on other devices a
copy is made when it is taken.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from dsv4.tape import writing

CPU = torch.device("cpu")
# Pinned buffers that take turns.
BUFFERS = 2

Load = Callable[[], Sequence[Tensor | None]]


class Lift:
    """Copies tensors of the host to a device."""

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers: list[Tensor | None] = [None] * BUFFERS
        self._events: list = [None] * BUFFERS
        self._turn = 0

    def __call__(self, tensors: Sequence[Tensor | None]) -> tuple[list[Tensor | None], object | None]:
        """(copies, what the stream that uses them has to wait for or None)."""
        with writing():
            if self._stream is None:
                return [None if t is None else _own(t, self.device) for t in tensors], None
            with torch.cuda.stream(self._stream):
                copies = [None if t is None else self._copy(t) for t in tensors]
                return copies, self._stream.record_event()

    def _copy(self, t: Tensor) -> Tensor:
        self._turn = (self._turn + 1) % BUFFERS
        buffer, event = self._buffers[self._turn], self._events[self._turn]
        if event is not None:
            event.synchronize()
        if buffer is None or buffer.numel() < t.nbytes:
            buffer = self._buffers[self._turn] = torch.empty(t.nbytes, dtype=torch.uint8, pin_memory=True)
        staged = buffer[: t.nbytes]
        staged.copy_(t.contiguous().view(-1).view(torch.uint8))
        copy = torch.empty(t.shape, dtype=t.dtype, device=self.device)
        copy.view(-1).view(torch.uint8).copy_(staged, non_blocking=True)
        self._events[self._turn] = self._stream.record_event()
        return copy


class Hot:
    """Copies on `device`, at most `budget` bytes of them beyond those in use; the least recently taken goes first.

    Attributes:
        taken, missed: copies asked for, and those that had to be made. moved: bytes copied. nbytes: bytes held.
    """

    def __init__(self, device: torch.device, budget: int):
        self.device, self.budget = device, budget
        self.taken = self.missed = self.moved = self.nbytes = 0
        self._lift = Lift(device)
        self._held: OrderedDict[Hashable, list[Tensor | None]] = OrderedDict()
        self._coming: dict[Hashable, Future] = {}
        # Of those that are coming, the ones that nobody may take.
        self._guesses: set[Hashable] = set()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="dsv4-hot") if device == CPU or device.type == "cuda" else None
        self._lock = threading.RLock()

    def __deepcopy__(self, memo) -> "Hot":
        return Hot(self.device, self.budget)

    def ahead(self, key: Hashable, load: Load, *, is_guess: bool = False) -> None:
        """Begin to copy unless it is there or coming. is_guess: `settle` may call it off."""
        with self._lock:
            if self._worker is not None and key not in self._held and key not in self._coming:
                self._coming[key] = self._worker.submit(lambda: self._lift(load()))
                if is_guess:
                    self._guesses.add(key)

    def take(self, key: Hashable, load: Load) -> list[Tensor | None]:
        """The copies. What a background copy raised is raised here."""
        with self._lock:
            self.taken += 1
            held = self._held.get(key)
            if held is not None:
                self._held.move_to_end(key)
                return held
            self.missed += 1
            self._guesses.discard(key)
            coming = self._coming.pop(key, None)
            if coming is None and self._worker is not None:
                coming = self._worker.submit(lambda: self._lift(load()))
        # Without the lock: others ask ahead while this one waits.
        found = self._lift(load()) if coming is None else coming.result()
        with self._lock:
            held = self._arrived(*found)
            self._keep(key, held)
            return held

    def settle(self, wanted: Set[Hashable]) -> None:
        """Guesses that are not wanted are called off; those already made may stay where there is room, and are the first to go."""
        with self._lock:
            for key in self._guesses - wanted:
                coming = self._coming[key]
                if coming.cancel() or coming.done():
                    self._end_guess(key)

    def adopt(self) -> None:
        """Take in what was copied ahead and never taken (a hook sent the tokens elsewhere)."""
        with self._lock:
            for key in list(self._coming):
                if key in self._guesses:
                    self._coming[key].cancel()
                    self._end_guess(key)
                else:
                    self._keep(key, self._arrived(*self._coming.pop(key).result()))

    def _end_guess(self, key: Hashable) -> None:
        self._guesses.discard(key)
        coming = self._coming.pop(key)
        # What a copy raised that nobody wanted is nobody's business.
        if not coming.cancelled() and coming.exception() is None:
            self._keep(key, self._arrived(*coming.result()), is_first_to_go=True)

    def _arrived(self, held: list[Tensor | None], event) -> list[Tensor | None]:
        if event is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(event)
            for t in held:
                if t is not None:
                    t.record_stream(stream)
        self.moved += _nbytes(held)
        self.nbytes += _nbytes(held)
        return held

    def _keep(self, key: Hashable, held: list[Tensor | None], *, is_first_to_go: bool = False) -> None:
        self.nbytes -= _nbytes(self._held.pop(key, []))
        self._held[key] = held
        if is_first_to_go:
            self._held.move_to_end(key, last=False)
        while self.nbytes > self.budget and self._held:
            self.nbytes -= _nbytes(self._held.popitem(last=False)[1])


def _own(t: Tensor, device: torch.device) -> Tensor:
    moved = t.to(device)
    return moved.clone() if moved is t else moved


def _nbytes(tensors: Sequence[Tensor | None]) -> int:
    return sum(t.nbytes for t in tensors if t is not None)
