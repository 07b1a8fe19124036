"""What the points of one model share about the run in progress: who runs, which tokens, which part of the model.

A run is one forward. One at a time: the points are the model's, so a second run would feed the first one's hooks.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")
_CLAIM = threading.Lock()

BEFORE_BLOCKS = ("input_ids", "attention_mask", "token_embeddings")
# Points behind logits_to_keep: their token axis holds the kept columns only.
BEHIND_KEEP = ("lm_head_output", "logits")

# What a hook is called, and why a run that reached its point did not call it.
UNREACHED = {
    "fwd": ("hook", "it was added when the run had passed"),
    "bwd": ("gradient hook", "no gradient was recorded there (no_grad or inference_mode)"),
}


@dataclass(frozen=True)
class Span:
    """Which part of the model a run goes through.

    Attributes:
        start, stop: start_at_layer and stop_at_layer as given. skipped: layers left out. has_ids: token ids were given.
    """

    start: int | None = None
    stop: int | None = None
    skipped: frozenset[int] = frozenset()
    has_ids: bool = True

    def missing(self, name: str, layer: int | None) -> str | None:
        """Why a run over this span does not reach a value; None when it does."""
        if name == "input_ids":
            return None if self.has_ids else "the call was given no input_ids"
        if self.start is not None and (name == "token_embeddings" or (layer is not None and layer < self.start)):
            return f"start_at_layer={self.start}"
        if self.stop is not None and name not in BEFORE_BLOCKS and (layer is None or layer >= self.stop):
            return f"stop_at_layer={self.stop}"
        return f"skip_layers({sorted(self.skipped)})" if layer in self.skipped else None


class Stage:
    """Attributes:
    call: the Call in progress, None outside a run; kv: its KVCache or None. step: decoding step. runs: how many runs were begun.
    captures: told of each call before its first value. handles: hooks attached now, in the order added.
    kept: [b n] columns that logits_to_keep left, None when it left all.
    edited: names of the values that the run in progress, or the last one, had replaced or written into, in order.
    """

    def __init__(self):
        self.call = self.kv = None
        self.kept: Tensor | None = None
        self.step = 0
        self.runs = 0
        self.captures: list = []
        self.handles: dict = {}
        self.edited: dict[str, None] = {}
        self._owner: int | None = None
        self._reserved = 0
        self._running = False

    @contextmanager
    def reserve(self) -> Iterator[None]:
        """Hold the model for this thread while something is put on its points for a run; RuntimeError when a run is in progress."""
        self._claim(running=False)
        try:
            yield
        finally:
            with _CLAIM:
                self._reserved -= 1
                self._free()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Claim the model for one run; RuntimeError when one is in progress (another thread's, or the one whose hook asks)."""
        self._claim(running=True)
        self.runs += 1
        self.edited = {}
        try:
            yield
        finally:
            self.call = self.kv = self.kept = None
            with _CLAIM:
                self._running = False
                self._free()

    def begin(self, call, kv=None) -> None:
        """The call's positions are known: captures fix their columns."""
        self.call, self.kv, self.kept = call, kv, None
        for capture in self.captures:
            capture.begin(call)

    def warn_unreached(self, span: Span) -> None:
        """One warning for each hook that the run just made did not reach."""
        for handle in [h for h in self.handles if h.last_run != self.runs]:
            name, layer = handle.point.name, handle.point.layer
            kind, otherwise = UNREACHED[handle.direction]
            why = span.missing(name, layer) or otherwise
            # The caller's line lies above this function, forward and the two frames of Module.__call__.
            warnings.warn(f"the {kind} at {name} never fired in this run: {why}", UserWarning, stacklevel=5)

    # Of one process; `dsv4.mesh_stage` says the same for those of a mesh.

    is_first, is_many = True, False

    def together(self, do: Callable[[], T]) -> T:
        """do(), which raises on every process when it raises on one."""
        return do()

    def before_run(self, do: Callable[[], T]) -> T:
        """do(), which comes before a run is made; where it raises, the other processes are told that there will be none."""
        return do()

    def drawn(self, x: Tensor) -> Tensor:
        """What was drawn at random, the same on every process."""
        return x

    @contextmanager
    def replay(self, call, kept: Tensor | None, step: int) -> Iterator[None]:
        """Show a finished run's call again, for gradient hooks."""
        before = self.call, self.kept, self.step
        self.call, self.kept, self.step = call, kept, step
        try:
            yield
        finally:
            self.call, self.kept, self.step = before

    def columns(self, name: str) -> Tensor | None:
        """[b n] columns of the call that a value's token axis holds; None when it holds all."""
        return self.kept if name in BEHIND_KEEP else None

    def _claim(self, running: bool) -> None:
        me = threading.get_ident()
        with _CLAIM:
            if self._running or self._owner not in (None, me):
                where = "a hook of that run" if self._owner == me else "another thread"
                raise RuntimeError(
                    f"the model is already running (asked again from {where}): one run at a time per model; wait for it, or give a "
                    "second model the same weights (load_state_dict with assign=True)"
                )
            self._owner = me
            if running:
                self._running = True
            else:
                self._reserved += 1

    def _free(self) -> None:
        if not self._running and not self._reserved:
            self._owner = None
