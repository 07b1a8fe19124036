"""The verbs of watching: hooks by name, runs with hooks, runs that return their values, what there is to see and what it costs."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import Tensor

from dsv4 import budget, values
from dsv4.activation_cache import ActivationCache, StreamWriter
from dsv4.capture import Capture, Pos, as_pos
from dsv4.handle import Handle, Handles
from dsv4.hooks import HookPoint
from dsv4.inputs import Inputs, resolve
from dsv4.names import match
from dsv4.origin import Origin
from dsv4.stage import Span
from dsv4.support import support
from dsv4.table import Table

AUTO = "auto"
RANKS = ("all", "first")
INPUT_KEYWORDS = ("attention_mask", "input_ids", "inputs_embeds", "start_at_layer", "stop_at_layer")
RUN_KEYWORDS = (*INPUT_KEYWORDS, "kv_cache", "logits_to_keep")


class Watching:
    """Mixed into the model."""

    @property
    def hook_dict(self) -> Mapping[str, HookPoint]:
        """{name: HookPoint} in forward order."""
        if "_hook_dict" not in self.__dict__:
            points = {m.name: m for m in self.modules() if isinstance(m, HookPoint)}
            object.__setattr__(self, "_hook_dict", {n: points[n] for n in values.all_names(self.config)})
        return MappingProxyType(self._hook_dict)

    def match_names(self, names) -> list[str]:
        """The full names that a name, glob, list or predicate means, in forward order; KeyError when it means none."""
        points = self.hook_dict
        # Exact names, of which there may be thousands, need no search.
        exact = [names] if isinstance(names, str) else names if isinstance(names, list | tuple | set | frozenset) else []
        if exact and all(isinstance(n, str) and n in points for n in exact):
            chosen = set(exact)
            return list(chosen) if len(chosen) == 1 else [n for n in points if n in chosen]
        return match(names, list(points), absent=self.why_absent)

    def why_absent(self, name: str) -> str | None:
        """Why a value does not exist on the block that `name` names; None when it exists or is no value at all."""
        return values.absent_reason(self.config, name)

    # Hooks.

    def add_hook(self, name, fn, *, dir: str = "fwd", prepend: bool = False) -> Handle | Handles:
        """Attach `fn(value, hook)` at every point that `name` means, until the handle is removed or `reset_hooks()`."""
        handles = self._attach([(name, fn)], dir, prepend)
        return handles[0] if len(handles) == 1 else Handles(handles)

    def list_hooks(self, names=None, dir: str | None = None) -> list[Handle]:
        """The hooks attached now, in forward order."""
        points = self.hook_dict
        chosen = points if names is None else self.match_names(names)
        found = [h for n in chosen for h in points[n].handles()]
        return [h for h in found if dir is None or h.direction == dir]

    def reset_hooks(self) -> None:
        """Remove every hook added through this library (PyTorch's own module hooks stay)."""
        for handle in self.list_hooks():
            handle.remove()

    @contextmanager
    def hooks(
        self, hooks: Sequence | None = None, bwd_hooks: Sequence = (), *, fwd_hooks: Sequence | None = None
    ) -> Iterator[list[Handle]]:
        """Hooks for the length of a `with`: lists of (name, fn). Exactly these are removed on any exit.

        A gradient hook belongs to the graph of the runs made inside and fires when that graph is differentiated, also after leaving.
        """
        handles = self._attach(_one(hooks, fwd_hooks, "hooks", "fwd_hooks") or (), "fwd")
        try:
            handles += self._attach(bwd_hooks, "bwd")
            yield handles
        finally:
            for handle in handles:
                handle.remove()

    def _attach(self, pairs, direction: str, prepend: bool = False) -> list[Handle]:
        """All or none."""
        points, handles = self.hook_dict, []
        try:
            for name, fn in _pairs(pairs):
                for n in self.match_names(name):
                    handles.append(points[n].add_hook(fn, dir=direction, prepend=prepend))
        except BaseException:
            for handle in handles:
                handle.remove()
            raise
        return handles

    # Runs.

    def run_with_hooks(self, input=None, hooks: Sequence | None = None, bwd_hooks: Sequence = (), *, fwd_hooks=None, **run) -> Tensor:
        """One run with hooks [(name, fn)]; takes the keywords of calling the model."""
        _known(run)
        with self.stage.reserve(), self.hooks(hooks, bwd_hooks, fwd_hooks=fwd_hooks):
            return self(input, **run)

    def run_with_cache(
        self,
        input=None,
        names=None,
        *,
        names_filter=None,
        pos: Pos = None,
        device=None,
        to=None,
        detach: bool = True,
        max_bytes: int | str | None = AUTO,
        ranks: str = "all",
        **run,
    ) -> tuple[Tensor, ActivationCache]:
        """One run and its values.

        Args:
            input: as for calling the model; its keywords too (attention_mask, kv_cache, stop_at_layer, ...).
            names: name, glob, list or predicate; None is the residual set, "**" everything, [] nothing.
            pos: tokens kept, counted on each row's real tokens: an int drops the axis, a slice, list or [b, n] tensor keeps it.
            device: where the values go as they are captured. to: a new safetensors file they are streamed to; the cache reads it lazily.
            detach: False keeps the autograd graph.
            max_bytes: more than this is refused before anything runs, with the bytes of every name; default half of the free memory,
                None for no limit.
            ranks: on a mesh, which processes get the values: "all", or "first", which leaves the others an empty cache. to= needs "first".
        Returns:
            (logits or streams, ActivationCache).
        """
        _known(run)
        if to is not None and not detach:
            raise ValueError("to= writes values to disk and cannot keep their graph: drop detach=False or to=")
        if ranks not in RANKS:
            raise ValueError(f'ranks={ranks!r}: expected "all" or "first"')
        if to is not None and ranks == "all" and self.stage.is_many:
            raise ValueError('to= writes one file, and the processes of a mesh would all write it: pass ranks="first"')
        keeps = ranks == "all" or self.stage.is_first
        pos = as_pos(pos)
        with self.stage.reserve():
            inputs = self._resolve(input, run)
            span = Span(run.get("start_at_layer"), run.get("stop_at_layer"), self.skipped, inputs.ids is not None)
            chosen = self._reached(_one(names, names_filter, "names", "names_filter"), span)
            if to is None and max_bytes is not None:
                self.stage.together(lambda: keeps and self._check_budget(chosen, inputs, run, pos, device, max_bytes))
            axes = {n: _kept_axes(self.hook_dict[n].axes, pos) for n in chosen}
            if to is not None and not keeps:
                # The process that keeps them may find that the file exists.
                self.stage.together(lambda: None)
            if to is None or not keeps:
                held: dict[str, Tensor] = {}
                store = held.__setitem__ if keeps else _drop
                capture = Capture(store, pos=pos, device=device, detach=detach)
                out, origin = self._capture(capture, chosen, input, run)
                values = {n: held[n] for n in chosen if keeps}
                return out, ActivationCache(values, axes, capture.positions, self.num_layers, origin, self)
            with self.stage.together(lambda: StreamWriter(to, axes, self.num_layers, self.hook_dict)) as writer:
                capture = Capture(writer.write, pos=pos)
                out, writer.origin = self._capture(capture, chosen, input, run)
                writer.positions = capture.positions
            return out, ActivationCache.load(to, "cpu" if device is None else device).with_model(self)

    def _capture(self, capture: Capture, names: list[str], input, run: dict) -> tuple[Tensor, Origin]:
        points = [self.hook_dict[n] for n in names]
        self.stage.captures.append(capture)
        try:
            for point in points:
                point.attach_capture(capture)
            out = self(input, **run)
            start, stop = run.get("start_at_layer"), run.get("stop_at_layer")
            return out, Origin(tuple(self.stage.edited), tuple(sorted(self.skipped)), start, stop, capture.token_keys)
        finally:
            for point in points:
                point.detach_capture(capture)
            self.stage.captures.remove(capture)

    def _resolve(self, input, run: dict) -> Inputs:
        """The checks of a run, before it runs."""
        kv = run.get("kv_cache")
        self._check_span(run.get("start_at_layer"), run.get("stop_at_layer"))
        return resolve(self, input, past=None if kv is None else kv.length.tolist(), **{k: run[k] for k in INPUT_KEYWORDS if k in run})

    def _reached(self, names, span: Span) -> list[str]:
        """The values that `names` means and the run reaches; KeyError when one of the patterns means only values it leaves out."""
        points = self.hook_dict
        # A run from end to end reaches every value.
        missing = {} if span == Span() else {n: why for n, point in points.items() if (why := span.missing(n, point.layer))}
        if names is None:
            return [n for n in points if n not in missing and n.rsplit(".", 1)[-1] in values.RESIDUAL_SET]
        meant = self.match_names(names)
        if missing:
            for pattern in names if isinstance(names, list | tuple | set | frozenset) else [names]:
                one = self.match_names(pattern)
                if all(n in missing for n in one):
                    more = f" and {len(one) - 1} more" if len(one) > 1 else ""
                    raise KeyError(f"this run does not reach {one[0]}{more}: {missing[one[0]]}")
        return [n for n in meant if n not in missing]

    # What there is and what it costs.

    def estimate(self, names=None, batch: int = 1, seq: int = 1, *, pos: Pos = None, past: int = 0) -> dict[str, int]:
        """Bytes that capturing `names` takes: {name: bytes, ..., "total": bytes}. `past`: tokens already in a KV cache."""
        found = budget.sizes(self.config, self._reached(names, Span()), self.dtype, batch, seq, pos=as_pos(pos), past=past)
        return {**found, "total": sum(found.values())}

    def support(self, layer: int | None = None) -> Table:
        """Every value with its layout, cost and availability: for the whole model (rows `layers.*....`), or for one layer."""
        return support(self.config, layer)

    def _check_budget(self, names: list[str], inputs: Inputs, run: dict, pos: Pos, device, max_bytes) -> None:
        limit = budget.default_limit(torch.device(device or self.device)) if max_bytes == AUTO else max_bytes
        if limit is None:
            return
        kv, keep = run.get("kv_cache"), run.get("logits_to_keep") or None
        past = 0 if kv is None else max(kv.length.tolist())
        budget.check(budget.sizes(self.config, names, self.dtype, *inputs.size, pos=pos, past=past, keep=keep), limit)


def _drop(name: str, value: Tensor) -> None:
    """What a process does with a value that another one keeps."""


def _known(run: dict) -> None:
    unknown = [k for k in run if k not in RUN_KEYWORDS]
    if unknown:
        raise TypeError(f"unknown keyword {unknown[0]!r}; a run takes {', '.join(RUN_KEYWORDS)}")


def _one(value, alias, name: str, other: str):
    if alias is not None and value is not None:
        raise TypeError(f"{other} is another spelling of {name}: give one of them")
    return value if alias is None else alias


def _pairs(pairs) -> list[tuple]:
    if isinstance(pairs, tuple) and len(pairs) == 2 and callable(pairs[1]) and not isinstance(pairs[0], tuple):
        pairs = [pairs]
    checked = []
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"hooks are pairs (name, fn), got {pair!r}")
        checked.append(tuple(pair))
    return checked


def _kept_axes(axes: str, pos: Pos) -> str:
    return " ".join(a for a in axes.split() if not (a == "s" and isinstance(pos, int)))
