"""The step of fixed shape, and compiling: `forward_static`, `compile_decode`, and the forward that torch.compile traces.

A step runs the same blocks as every forward; only its Call and its cache differ (`call.plan_step`, `fixed_cache`). Axes: b row, s token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.modules import module as torch_module

from dsv4.call import plan_step, plan_whole
from dsv4.fixed_cache import LEAST_SPAN, FixedCache
from dsv4.hooks import HookPoint
from dsv4.inputs import Inputs
from dsv4.kv_cache import KVCache


def _guards_kept(guards) -> list[bool]:
    """Those on what a step is given. Of the model's modules none: there are thousands, and what may change is told to the step."""
    return [not (guard.orig_guard.source.is_unspecialized_nn_module() or guard.is_global) for guard in guards]


@dataclass(frozen=True)
class CompiledStep:
    """What `compile_decode` was asked for, and a compiled function for each form of a step that has run. A copy of it has compiled nothing.

    torch.compile keeps its graphs at the code object, at most a few, and models share it: each function has a code object of its own.
    """

    backend: str
    options: dict[str, Any]
    made: dict[tuple, Callable] = field(default_factory=dict, compare=False)

    def __call__(self, model, ids: Tensor, fixed: FixedCache, active: Tensor) -> Tensor:
        form = model._form
        rings = (fixed.layers[0].keys.buffer.shape[1], *fixed.columns.values())
        key = (form, *ids.shape, fixed.capacity, fixed.span, rings, torch.is_inference_mode_enabled())
        if key not in self.made:
            code = Compiling._step.__code__.replace(co_name=f"step_{id(self)}_{len(self.made)}")
            step = FunctionType(code, Compiling._step.__globals__, code.co_name, Compiling._step.__defaults__)
            self.made[key] = torch.compile(step, backend=self.backend, fullgraph=True, dynamic=False, options=self.options)
        return self.made[key](model, ids, fixed, active, form)

    def __reduce__(self):
        return CompiledStep, (self.backend, self.options)


class Compiling:
    """Mixed into the model."""

    # What runs a decoding step while nobody listens; None runs it as any other call.
    _compiled_step: CompiledStep | None = None
    # Goes up when modules or their kernels are replaced.
    _revision = 0
    # The revision they were taken at, PyTorch's hooks of all modules, and what children each module had.
    _modules_seen: tuple[int, list, list] = (-1, [], [])

    def forward_static(self, ids: Tensor, kv: KVCache, active: Tensor | None = None) -> Tensor:
        """One step with fixed shapes: nothing is read back from the device and no size depends on what the cache holds, so that it
        can be compiled (fullgraph) or held in a CUDA graph. It records no gradient, and nothing is checked but the capacity, and that only
        while active is None in every step; `model(...)` is the checked way.

        Args:
            ids: [b s] int64, all of them tokens. kv: it is brought into its fixed form by the first call (`kv.fix(s)` does it before a
                capture); its counts move on the device.
            active: [b] bool; a row that is not active stays as it was. None: all are.
        Returns:
            logits [b s vocab] float32.
        Raises:
            RuntimeError: something listens (points are not called here). ValueError: the cache is full.
        """
        if self.placed is not None or self.is_spread:
            raise ValueError("forward_static: weights that move or are spread need the host; call model(ids, kv_cache=kv)")
        if not torch.compiler.is_compiling():
            self.notice_listeners()
        if self._is_listened_to:
            raise RuntimeError(
                "forward_static calls no probe point, and something listens to one: remove it (model.reset_hooks(), or leave the `with`), "
                "or call model(ids, kv_cache=kv)"
            )
        fixed = kv.fix(ids.shape[1]) if not torch.compiler.is_compiling() else kv.fixed
        if fixed is None:
            raise RuntimeError("a compiled forward_static needs the cache in its fixed form: call kv.fix() first")
        counted = active is None and not torch.compiler.is_compiling() and fixed.host is not None
        if counted:
            kv.check_room([ids.shape[1]] * len(ids))
        # What is written in place would keep this step's own tokens out of its gradient.
        with torch.no_grad():
            logits = self._step(ids, fixed, torch.ones_like(ids[:, 0], dtype=torch.bool) if active is None else active)
        fixed.host = tuple(n + ids.shape[1] for n in fixed.host) if counted else None
        return logits

    def _step(self, ids: Tensor, fixed: FixedCache, active: Tensor, form: str = "") -> Tensor:
        """The pure part: tensors in, logits out, buffers written in place. form: `self._form`, which a compiled step is compiled for."""
        call = plan_step(self.config, self.rotary, ids, active, fixed)
        with torch.autocast(ids.device.type, enabled=False):
            logits = self.run(call, None, 0, None, None, fixed)
        fixed.length.copy_(call.lengths)
        return logits

    @property
    def _form(self) -> str:
        """What a compiled step depends on beside its arguments: another text is another step."""
        return f"{self.dtype} {self.device} {self._revision}"

    @property
    def _is_listened_to(self) -> bool:
        """Whether a hook or a capture is attached to any point."""
        return any(module.live for module in self.probed)

    @property
    def _is_unwatched(self) -> bool:
        """Whether nobody would see that this call runs another way: no gradient, no listener, no module with a hook or its own forward."""
        if torch.is_grad_enabled() or self._is_listened_to or torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return False
        revision, hooks, children = self._modules_seen
        is_replaced = any(now != then for _, now, then in children)
        if is_replaced or revision != self._revision:
            self._revision += is_replaced
            # A point tells itself when someone listens.
            modules = [m for m in self.modules() if not isinstance(m, HookPoint)]
            hooks = [held for m in modules for held in (m._forward_hooks, m._forward_pre_hooks)]
            children = [(m, m._modules, dict(m._modules)) for m in modules]
            object.__setattr__(self, "_modules_seen", (self._revision, hooks, children))
        return not (any(hooks) or any("forward" in m.__dict__ for m, _, _ in children))

    def _capacity_for(self, tokens: int) -> int:
        """max_length of a cache that is built for so many tokens of a row: a compiled step is made for each, so there are few of them."""
        return tokens if self._compiled_step is None else max(LEAST_SPAN, 1 << (tokens - 1).bit_length())

    def compile_decode(self, backend: str = "inductor", **options) -> Self:
        """Compile the decoding step: from now on a call with one token for each row and a kv_cache, and with it every step of `generate`,
        runs compiled while nobody listens and no gradient is recorded. Any other call runs as before.

        The first step compiles, and so does the first for another number of rows, another max_length of the cache (`generate` builds
        its caches for a power of two tokens), the first that passes one of at most 5 lengths (parts of max_length), and the first after
        the model was moved, cast, dequantized or given other kernels or modules. What a layer's own attributes say (eps, limits) is
        read when it compiles. A copy of the model compiles its own steps.

        Args:
            backend, options: for torch.compile. On a CPU inductor's cpp_wrapper is on unless given.
        """
        if self.placed is not None or self.is_spread:
            raise ValueError(
                "compile_decode: the step is compiled over weights that stay on one device; load the model without a placement"
            )
        if backend == "inductor":
            options = {"cpp_wrapper": self.device.type == "cpu", **options}
        options = {"guard_filter_fn": _guards_kept, **options}
        object.__setattr__(self, "_compiled_step", CompiledStep(backend, options))
        return self

    def _runs_compiled(self, inputs: Inputs, kv: KVCache | None) -> bool:
        """Whether this call is a decoding step for what `compile_decode` made."""
        is_step = self._compiled_step is not None and kv is not None and inputs.size[1] == 1 and inputs.hidden is None
        return is_step and self._is_unwatched

    def _decode(self, ids: Tensor, active: Tensor, counts: Sequence[int], kv: KVCache) -> Tensor:
        """[b 1 vocab]: one compiled step; counts: tokens that each row advances by, 0 or 1."""
        fixed = kv.in_fixed_form(1)
        fixed.choose_span(1)
        try:
            logits = self._compiled_step(self, ids, fixed, active)
        finally:
            # The span is this step's.
            fixed.span = fixed.capacity
        fixed.advance(counts)
        return logits

    def _traced(self, given, *, attention_mask, input_ids, inputs_embeds, kv_cache, logits_to_keep, start_at_layer, stop_at_layer):
        """`forward` as torch.compile sees it: the same values, without the checks that read numbers back."""
        if self._is_listened_to:
            # Under fullgraph=True the break is the error; else the sentence is raised when the graph is left.
            torch._dynamo.graph_break(
                "a compiled model calls no probe point, and something listens to one: remove it (model.reset_hooks(), or leave the "
                "`with`), or call the model itself instead of what torch.compile returned"
            )
            raise RuntimeError("a compiled model calls no probe point, and something listens to one: remove it, or call the model itself")
        if kv_cache is not None or start_at_layer is not None or self.skipped:
            raise ValueError("a compiled model runs whole rows from layer 0; compile decoding with model.compile_decode()")
        if given is not None and input_ids is not None:
            raise ValueError("give the ids once: as the first argument or as input_ids")
        ids = given if input_ids is None else input_ids
        if not isinstance(ids if inputs_embeds is None else inputs_embeds, Tensor):
            raise TypeError("a compiled model takes tensors: ids [b, s] or inputs_embeds")
        ids = ids.unsqueeze(0) if ids is not None and ids.dim() == 1 else ids
        shape = (ids if inputs_embeds is None else inputs_embeds).shape[:2]
        every = torch.ones(shape, dtype=torch.bool, device=self.device)
        valid = every if attention_mask is None else attention_mask.bool().view(shape)
        inputs_embeds = None if inputs_embeds is None else inputs_embeds.to(self.dtype)
        call = plan_whole(self.config, self.rotary, ids, valid)
        keep = None if not logits_to_keep else min(logits_to_keep, shape[1])
        return self.run(call, inputs_embeds, 0, stop_at_layer, keep, None)
