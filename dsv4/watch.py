"""The verbs of watching: hooks by name, runs with hooks, runs that return their values, what there is to see and what it costs."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import psutil
import torch
from torch import Tensor

from dsv4 import values
from dsv4.activation_cache import ActivationCache, StreamWriter
from dsv4.capture import Capture, Pos, count
from dsv4.hooks import Handle, HookPoint
from dsv4.inputs import resolve
from dsv4.names import match
from dsv4.table import Table
from dsv4.values import VALUES

AUTO = "auto"
# Share of the free memory that a capture may take unless max_bytes says otherwise.
MEMORY_SHARE = 0.5
RUN_KEYWORDS = (
    *("attention_mask", "input_ids", "inputs_embeds", "kv_cache", "logits_to_keep"),
    *("start_at_layer", "stop_at_layer"),
)


@dataclass(frozen=True)
class Support:
    """One row of `support()`. `read` and `edit`: "free", "mat" (the block is spelled out while it is listened to) or "-" (read-only)."""

    name: str
    layout: str
    axes: str
    dtype: str
    read: str
    edit: str
    available: bool
    reason: str | None


class Watching:
    """Mixed into the model."""

    @property
    def hook_dict(self) -> dict[str, HookPoint]:
        """{name: HookPoint} in forward order."""
        if "_hook_dict" not in self.__dict__:
            points = {m.name: m for m in self.modules() if isinstance(m, HookPoint)}
            object.__setattr__(self, "_hook_dict", {n: points[n] for n in values.all_names(self.config)})
        return dict(self._hook_dict)

    def match_names(self, names) -> list[str]:
        """The full names that a name, glob, list or predicate means, in forward order; KeyError when it means none."""
        return match(names, list(self.hook_dict), absent=self.why_absent)

    def why_absent(self, name: str) -> str | None:
        """Why a value does not exist on the block that `name` names; None when it exists or is no value at all."""
        return values.absent_reason(self.config, name)

    def add_hook(self, name, fn, *, dir: str = "fwd", prepend: bool = False) -> "Handle | Handles":
        """Attach `fn(value, hook)` at every point that `name` means, until the handle is removed or `reset_hooks()`."""
        handles = [self.hook_dict[n].add_hook(fn, dir=dir, prepend=prepend) for n in self.match_names(name)]
        return handles[0] if len(handles) == 1 else Handles(handles)

    def list_hooks(self, names=None, dir: str | None = None) -> list[Handle]:
        """The hooks attached now, in forward order."""
        chosen = self.hook_dict if names is None else self.match_names(names)
        found = [h for n in chosen for h in self.hook_dict[n].handles()]
        return [h for h in found if dir is None or h.direction == dir]

    def reset_hooks(self) -> None:
        """Remove every hook added through this library (PyTorch's own module hooks stay)."""
        for handle in self.list_hooks():
            handle.remove()

    @contextmanager
    def hooks(self, hooks: Sequence = (), bwd_hooks: Sequence = (), *, fwd_hooks: Sequence | None = None) -> Iterator[list[Handle]]:
        """Hooks for the length of a `with`: lists of (name, fn). Exactly these are removed on any exit.

        A gradient hook belongs to the graph of the runs made inside and fires when that graph is differentiated, also after leaving.
        A hook that no run inside reached warns with its name and why.
        """
        handles: list[Handle] = []
        runs = self.stage.runs
        try:
            for direction, pairs in (("fwd", _one(hooks, fwd_hooks, "hooks", "fwd_hooks")), ("bwd", bwd_hooks)):
                for name, fn in _pairs(pairs):
                    handles += [self.hook_dict[n].add_hook(fn, dir=direction) for n in self.match_names(name)]
            yield handles
            if self.stage.runs > runs:
                self._warn_unfired(handles)
        finally:
            for handle in handles:
                handle.remove()

    def run_with_hooks(self, input=None, hooks: Sequence = (), bwd_hooks: Sequence = (), *, fwd_hooks=None, **run) -> Tensor:
        """One run with hooks [(name, fn)]; takes the keywords of calling the model."""
        _known(run)
        with self.hooks(hooks, bwd_hooks, fwd_hooks=fwd_hooks):
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
        Returns:
            (logits or streams, ActivationCache).
        """
        _known(run)
        names = _one(names, names_filter, "names", "names_filter")
        reached = self._reached(run)
        if names is None:
            chosen = [n for n in reached if n.rsplit(".", 1)[-1] in values.RESIDUAL_SET]
        else:
            matched = self.match_names(names)
            chosen = [n for n in matched if n in reached]
            missed = [n for n in matched if n not in reached]
            exact = {names} if isinstance(names, str) else {n for n in names if isinstance(n, str)} if not callable(names) else set()
            if missed and (not chosen or exact & set(missed)):
                raise KeyError(f"this run never reaches {missed[:10]}: {self.why_unreached(run)}")
        if to is not None and not detach:
            raise ValueError("to= writes values to disk and cannot keep their graph: drop detach=False or to=")
        self._check_budget(input, chosen, run, pos, device, to, max_bytes)
        points = self.hook_dict
        axes = {n: _kept_axes(points[n].axes, pos) for n in chosen}
        if to is None:
            held: dict[str, Tensor] = {}
            out, positions = self._capture(Capture(held.__setitem__, pos=pos, device=device, detach=detach), chosen, input, run)
            return out, ActivationCache({n: held[n] for n in chosen if n in held}, axes, positions)
        with StreamWriter(to, axes) as writer:
            out, writer.positions = self._capture(Capture(writer.write, pos=pos, detach=True), chosen, input, run)
        return out, ActivationCache.load(to)

    def _capture(self, capture: Capture, names: list[str], input, run) -> tuple[Tensor, Tensor | None]:
        points = [self.hook_dict[n] for n in names]
        self.stage.captures.append(capture)
        try:
            for point in points:
                point.attach_capture(capture)
            out = self(input, **run)
            capture.finish()
            positions = capture.positions
            return out, positions if positions is None or capture.device is None else positions.to(capture.device)
        finally:
            for point in points:
                point.detach_capture(capture)
            self.stage.captures.remove(capture)

    def estimate(self, names=None, batch: int = 1, seq: int = 1, *, pos: Pos = None, past: int = 0) -> dict[str, int]:
        """Bytes that capturing `names` takes: {name: bytes, ..., "total": bytes}. `past`: tokens already in a KV cache."""
        if names is None:
            chosen = [n for n in self.hook_dict if n.rsplit(".", 1)[-1] in values.RESIDUAL_SET]
        else:
            chosen = self.match_names(names)
        kept = count(pos, seq)
        sizes = {}
        for name in chosen:
            value, layer = VALUES[name.rsplit(".", 1)[-1]], self.hook_dict[name].layer
            axes = values.sizes(self.config, layer, batch, seq, past)
            full = values.nbytes(value, axes, self.dtype)
            sizes[name] = full * kept // seq if "s" in value.axes.split() else full
        return {**sizes, "total": sum(sizes.values())}

    def support(self, layer: int | None = None) -> Table:
        """Every value with its layout, cost and availability: for the whole model (rows `layers.*....`), or for one layer."""
        if layer is not None and not 0 <= layer < self.num_layers:
            raise ValueError(f"layer {layer}: expected 0 <= layer < {self.num_layers}")
        rows = []
        for value in VALUES.values():
            if not value.module:
                rows.append(_row(value, value.name, None))
            elif layer is not None:
                rows.append(self._layer_row(value, layer))
            else:
                reasons = [self.why_absent(value.full_name(i)) for i in range(self.num_layers)]
                missing = all(reasons)
                reason = reasons[0] if missing else _where(reasons)
                rows.append(replace(_row(value, value.full_name('*'), reason), available=not missing))
        return Table(rows, title="values of the model" if layer is None else f"values of layer {layer}", find=self._find_row)

    def _layer_row(self, value: "values.Value", layer: int) -> Support:
        name = value.full_name(layer)
        return _row(value, name, self.why_absent(name))

    def _find_row(self, name: str) -> Support | None:
        parts = name.split(".")
        value = VALUES.get(parts[-1])
        if value is None:
            return None
        if len(parts) > 2 and parts[1].isdigit() and int(parts[1]) < self.num_layers:
            row = self._layer_row(value, int(parts[1]))
            return row if row.name == name else None
        if len(parts) == 1:
            return self.support()[value.full_name('*') if value.module else value.name]
        return None

    # What a run reaches.

    def _reached(self, run: dict) -> list[str]:
        start, stop = run.get("start_at_layer") or 0, run.get("stop_at_layer")
        last = self.num_layers if stop is None else stop
        ran = {i for i in range(start, last) if i not in self.skipped}
        head = {v.name for v in VALUES.values() if not v.module} - {"input_ids", "attention_mask", "token_embeddings"}
        names = []
        for name, point in self.hook_dict.items():
            layer = point.layer
            if layer is not None:
                reached = layer in ran
            elif name == "token_embeddings":
                reached = start == 0 and run.get("start_at_layer") is None
            else:
                reached = stop is None or name not in head
            if reached:
                names.append(name)
        return names

    def why_unreached(self, run: dict) -> str | None:
        """What makes a run with these keywords leave values out; None when it reaches all."""
        given = [f"{k}={run[k]}" for k in ("start_at_layer", "stop_at_layer") if run.get(k) is not None]
        return ", ".join([*given, *([f"skip_layers({sorted(self.skipped)})"] if self.skipped else [])]) or None

    def _warn_unfired(self, handles: list[Handle]) -> None:
        for handle in handles:
            if handle.direction == "fwd" and not handle.fired:
                why = self.stage.last_span or "no run reached it"
                warnings.warn(f"the hook at {handle.point.name} never fired: {why}", UserWarning, stacklevel=4)

    def _check_budget(self, input, names, run, pos, device, to, max_bytes) -> None:
        if max_bytes is None or not names or to is not None:
            return
        if max_bytes == AUTO:
            limit = int(_free_bytes(torch.device(device) if device is not None else self.device) * MEMORY_SHARE)
        else:
            limit = max_bytes
        kv = run.get("kv_cache")
        past = None if kv is None else kv.length.tolist()
        keys = ("input_ids", "inputs_embeds", "attention_mask", "start_at_layer")
        inputs = resolve(self, input, past=past, **{k: run[k] for k in keys if k in run})
        sizes = self.estimate(names, *inputs.size, pos=pos, past=0 if past is None else max(past))
        if sizes["total"] > limit:
            largest = sorted(((b, n) for n, b in sizes.items() if n != "total"), reverse=True)
            lines = [f"  {b / 2**20:12.1f} MiB  {n}" for b, n in largest[:40]]
            more = f"\n  ... and {len(largest) - 40} smaller" if len(largest) > 40 else ""
            raise ValueError(
                f"capturing {len(names)} values would take {sizes['total'] / 2**20:.1f} MiB; max_bytes is {limit / 2**20:.1f} MiB. "
                f"Name fewer, keep fewer tokens (pos=), stream to disk (to=) or raise max_bytes:\n" + "\n".join(lines) + more
            )


class Handles:
    """Several hooks added by one pattern; `remove()` takes them all away."""

    def __init__(self, handles: list[Handle]):
        self.handles = handles

    @property
    def fired(self) -> int:
        return sum(h.fired for h in self.handles)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def __iter__(self) -> Iterator[Handle]:
        return iter(self.handles)

    def __len__(self) -> int:
        return len(self.handles)

    def __enter__(self) -> "Handles":
        return self

    def __exit__(self, *exc) -> None:
        self.remove()


def _known(run: dict) -> None:
    unknown = [k for k in run if k not in RUN_KEYWORDS]
    if unknown:
        raise TypeError(f"unknown keyword {unknown[0]!r}; a run takes {', '.join(RUN_KEYWORDS)}")


def _one(value, alias, name: str, other: str):
    if alias is not None and value is not None and len(value if hasattr(value, "__len__") else [0]):
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


def _row(value: "values.Value", name: str, reason: str | None) -> Support:
    return Support(name, value.layout, value.axes, value.dtype, value.read, value.edit, reason is None, reason)


def _where(reasons: list[str | None]) -> str | None:
    missing = [i for i, r in enumerate(reasons) if r]
    return f"not on layers {', '.join(map(str, missing))}" if missing else None


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
