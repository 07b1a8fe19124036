"""Where the model meets checkpoints and transformers: building without memory, filling from files, saving, comparing."""

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from dsv4.attention import SlidingAttention
from dsv4.compressor import EntryPool
from dsv4.config import Dsv4Config
from dsv4.experts import Experts, Fp4Experts, Fp8Experts, StoredExperts
from dsv4.float32 import Float32
from dsv4.generate import read_generation_config
from dsv4.hyper_connection import HyperConnection
from dsv4.indexer import Indexer
from dsv4.kernels import (
    block_scaled_linear,
    grouped_experts,
    hyper_connection,
    index_scores,
    norm_rotary,
    pooling,
    router,
    sparse_attention,
)
from dsv4.kernels.backend import BACKENDS, available
from dsv4.linear import BlockDiagonalLinear, Fp8BlockDiagonalLinear, Fp8Linear, Linear
from dsv4.moe import SharedExpert
from dsv4.norm import RMSNorm, UnweightedRMSNorm
from dsv4.rope import Rotary
from dsv4.router import Router
from dsv4.table import Table
from dsv4.text import Tokenizer

# What computes by one of several backends, and for each module of the kind what says why a backend cannot: fn(backend, device, dtype),
# or None where there is only one way.
REFUSALS = (
    (SlidingAttention, lambda m: partial(sparse_attention.refusal, width=m.width)),
    (Experts, lambda m: partial(grouped_experts.refusal, form=m.form, numerics=m.numerics)),
    (Fp8Linear, lambda m: partial(block_scaled_linear.refusal, numerics=m.numerics)),
    (SharedExpert, lambda m: None if m.form is None else partial(block_scaled_linear.refusal, form=m.form)),
    (Router, lambda m: partial(router.refusal, experts=m.out_features, top_k=m.top_k)),
    (HyperConnection, lambda m: partial(hyper_connection.refusal, streams=m.streams, hidden=m.fn.shape[1] // m.streams)),
    (RMSNorm, lambda m: partial(norm_rotary.refusal, width=m.weight.shape[0])),
    # As wide as a head, which the attention asks about.
    (UnweightedRMSNorm, lambda m: partial(norm_rotary.refusal, width=0)),
    (Indexer, lambda m: partial(_index_refusal, module=m)),
    (EntryPool, lambda m: partial(pooling.refusal, width=m.width)),
)
WEIGHTS = ("native", "dequantized")
# Loads above this many bytes show a bar.
LONG_LOAD = 1 << 30


def load(
    cls,
    repo_or_path,
    *,
    dtype,
    device,
    weights,
    kernels,
    numerics,
    mtp,
    strict_config,
    progress,
    layers,
    placing,
    mesh,
    hub: dict[str, Any],
):
    """The body of `Dsv4.from_pretrained`."""
    from dsv4.convert import open_checkpoint
    from dsv4.convert.hub import fetch
    from dsv4.placed import decide, layer_of
    from dsv4.placement import prefix

    _supported(weights, numerics, mtp)
    if mesh is not None:
        device = _device_of(mesh, device, placing)
    if placing["device_map"] is None:
        _kernels_run(kernels, device)
    folder = fetch(repo_or_path, **hub)
    checkpoint = open_checkpoint(folder, strict_config=strict_config).check()
    config: Dsv4Config = checkpoint.config
    stored = {name: form for name, form in checkpoint.formats.items() if form != "dense"}
    native = weights == "native" or (weights is None and bool(stored))
    dtype = dtype or config.torch_dtype
    config = replace(prefix(config, layers), torch_dtype=dtype)
    placed = decide(checkpoint, config.num_hidden_layers, dtype, native, device=device, **placing)
    with torch.device("meta"):
        model = cls(config)
        for name, form in stored.items() if native else ():
            if layer_of(name) < config.num_hidden_layers:
                keep_stored(model, name, form)
    spread = None if mesh is None else _spread(model, mesh)
    device = device if placed is None else placed.main
    use_kernels(model, kernels, device, dtype)
    if model.stage.is_first:
        print(f"{repo_or_path}: {checkpoint.summary()}; weights {'native' if native else 'dequantized'}, {dtype}", file=sys.stderr)
    if config.num_hidden_layers < checkpoint.config.num_hidden_layers:
        print(
            f"blocks 0 to {config.num_hidden_layers - 1} of {checkpoint.config.num_hidden_layers}: logits read the streams that leave the "
            "last of them, and are not the model's",
            file=sys.stderr,
        )
    for line in [] if placed is None else placed.placement.lines():
        print(f"  {line}", file=sys.stderr)

    def reads(name: str) -> bool:
        layer = layer_of(name)
        if layer >= config.num_hidden_layers or (spread is not None and layer >= 0 and layer not in spread.layers):
            return False
        return placed is None or placed.reads(name)

    cuts = {} if spread is None else spread.cuts
    total = checkpoint.nbytes(wanted=reads, cuts=cuts)
    show = total > LONG_LOAD if progress is None else progress

    def fill() -> None:
        with tqdm(total=total, unit="B", unit_scale=True, desc="loading", disable=not (show and model.stage.is_first)) as bar:
            show_read = lambda done, _: bar.update(done - bar.n)  # noqa: E731
            for name, tensor in checkpoint.tensors(dtype=dtype, native=native, wanted=reads, cuts=cuts, progress=show_read):
                where = device if placed is None else placed.place(name)
                put(model, name, tensor if where is None else tensor.to(where))

    model.stage.together(fill)
    for module in model.modules():
        if isinstance(module, Rotary):
            module.reset(device)
    if placed is not None:
        placed.apply(model)
    left = [name for name, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    assert not left, f"the checkpoint plan left {left[:10]} unfilled"
    model.tokenizer = Tokenizer.from_folder(folder, config)
    model.generation_config = read_generation_config(folder)
    return model


def use_kernels(model, kernels: str, device: str | torch.device | None, dtype: torch.dtype) -> None:
    """Choose what computes the fused ways of a model that is to live on `device` (None is the CPU) in `dtype`.

    "auto" is Triton on CUDA devices where it can run, else torch. A value listened to moves its block to the spelled-out way whatever
    is chosen here.

    Raises:
        ValueError: an unknown choice, or "triton" where it cannot run, with the reason.
    """
    _kernels_run(kernels, device)
    device = torch.device("cpu" if device is None else device)
    for module in model.modules():
        # Another stage of a mesh may hold its weights (dsv4.pipeline).
        is_held = not module.__dict__.get("absent")
        refuses = next((ask(module) for kind, ask in REFUSALS if is_held and isinstance(module, kind)), None)
        if refuses is None:
            continue
        # On the CPU it could only be the interpreter, which is for tests: "auto" does not ask there.
        asks = kernels == "triton" or (kernels == "auto" and device.type == "cuda")
        reason = refuses("triton", device, dtype) if asks else None
        if kernels == "triton" and reason is not None:
            raise _cannot_run(reason)
        module.backend = "triton" if asks and reason is None else "torch"
    model.kernels = kernels
    model._revision += 1


def _spread(model, mesh):
    # Not at the top: torch's distributed tensors take a second and 70 MB to import.
    from dsv4.parallel import spread

    return spread(model, mesh)


def _device_of(mesh, device, placing: dict[str, Any]) -> torch.device:
    """Where this process of a mesh computes; ValueError for arguments that say otherwise."""
    if placing["device_map"] is not None or placing["experts"] != "resident":
        raise ValueError("mesh= spreads the weights over processes and keeps them on their devices: leave device_map= and experts= out")
    found = torch.device(mesh.device_type, torch.cuda.current_device() if mesh.device_type == "cuda" else None)
    if device is not None and torch.device(device).type != found.type:
        raise ValueError(f"device={device!r} with a mesh of {mesh.device_type}: leave device= out")
    return found


def _index_refusal(backend: str, device: torch.device, dtype: torch.dtype, module: Indexer) -> str | None:
    """An indexer pools and chooses."""
    reason = pooling.refusal(backend, device, dtype, module.width)
    return reason or index_scores.refusal(backend, device, dtype, module.heads, module.width, module.top_k)


def _kernels_run(kernels: str, device: str | torch.device | None) -> None:
    """ValueError for an unknown choice, and for "triton" on a device where it never runs."""
    if kernels not in ("auto", *BACKENDS):
        raise ValueError(f'kernels={kernels!r}: expected "auto", "torch" or "triton"')
    reason = available(kernels, "cpu" if device is None else device) if kernels == "triton" else None
    if reason is not None:
        raise _cannot_run(reason)


def _cannot_run(reason: str) -> ValueError:
    return ValueError(f'kernels="triton": {reason}; use kernels="auto" or kernels="torch"')


def _supported(weights, numerics: str, mtp: bool) -> None:
    if weights is not None and weights not in WEIGHTS:
        raise ValueError(f"weights={weights!r}: expected one of {', '.join(WEIGHTS)}, or None")
    if numerics not in ("exact", "deployed"):
        raise ValueError(f'numerics={numerics!r}: expected "exact" or "deployed"')
    if numerics == "deployed":
        raise NotImplementedError('numerics="deployed" (activation quantisation as served) has not landed; use "exact"')
    if mtp:
        raise NotImplementedError("mtp=True: the multi-token-prediction blocks have not landed; their tensors are listed and skipped")


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds the tensor of a state-dict name, and its attribute."""
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def put(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Give the model a tensor without copying it; floating parameters require grad, stored codes and buffers do not."""
    owner, leaf = owner_of(model, name)
    if leaf in owner._buffers:
        owner._buffers[leaf] = tensor
        return
    trains = owner._parameters[leaf].requires_grad
    owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=trains)


def keep_stored(model: nn.Module, name: str, form: str) -> None:
    """Replace a dense module by the one that holds its weight as stored."""
    dense = model.get_submodule(name)
    if isinstance(dense, Experts):
        kept: nn.Module = {"fp8": Fp8Experts, "fp4": Fp4Experts}[form](model.config)
    elif isinstance(dense, BlockDiagonalLinear):
        kept = Fp8BlockDiagonalLinear(dense.in_features * dense.groups, dense.out_features // dense.groups, dense.groups)
    elif type(dense) is Linear:
        kept = Fp8Linear(dense.in_features, dense.out_features)
    else:
        raise ValueError(f"{name} is stored as {form}; {type(dense).__name__} has no form that keeps it: load with weights='dequantized'")
    model.set_submodule(name, kept)


def dequantize(model):
    """The body of `Dsv4.dequantize`."""
    if model.is_spread:
        raise ValueError('dequantize: each process holds a part of this model; load it with weights="dequantized" instead')
    if model.placed is not None:
        raise ValueError('dequantize: weights of this model stay on the host or on disk; load it with weights="dequantized" instead')
    for name, module in list(model.named_modules()):
        if isinstance(module, StoredExperts | Fp8Linear):
            model.set_submodule(name, module.dequantized(model.dtype))
    model._revision += 1
    return model


def save(model, folder: str | Path, *, format: str, overwrite: bool) -> None:
    """The body of `Dsv4.save_pretrained`."""
    from dsv4.convert.writer import write_checkpoint

    if model.is_spread:
        raise ValueError("save_pretrained: each process holds a part of this model; save it from one process that loaded all of it")
    state = model.state_dict() if model.placed is None else model.placed.tensors(model)
    write_checkpoint(state, model.config, folder, format=format, overwrite=overwrite, extra_files=model.tokenizer.files)


def from_transformers(cls, hf_model):
    """The body of `Dsv4.from_transformers`."""
    from dsv4.convert.names import Place, from_place

    config = Dsv4Config.from_hf(hf_model.config.to_dict(), strict=False)
    theirs = hf_model.state_dict(keep_vars=True)
    with torch.device("meta"):
        model = cls(config)
    missing = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        source = from_place("transformers", Place(name))
        if source not in theirs:
            missing.append(f"{name} ({source})")
            continue
        found = theirs[source]
        if found.shape != tensor.shape:
            raise ValueError(f"{source} has shape {list(found.shape)}; {name} needs {list(tensor.shape)}")
        owner, leaf = owner_of(model, name)
        if isinstance(owner, Float32) and owner.keeps(leaf) and found.dtype.itemsize < torch.float32.itemsize:
            found = found.detach().float()
        put(model, name, found.detach() if leaf in owner._buffers else found)
    if missing:
        raise ValueError(f"the transformers model lacks {len(missing)} tensors: {missing[:10]}")
    for module in model.modules():
        if isinstance(module, Rotary):
            module.reset(model.device)
    model.config = replace(config, torch_dtype=model.dtype)
    use_kernels(model, "auto", model.device, model.dtype)
    return model


@dataclass(frozen=True)
class Compared:
    """One value's error against transformers: largest absolute difference, and that over the largest absolute value."""

    name: str
    max_abs: float
    relative: float
    shape: tuple[int, ...]


def compare(model, hf_model, input, **run) -> Table:
    """The body of `Dsv4.compare`: both models on the same ids, every module output that both have."""
    theirs: dict[str, Tensor] = {}
    handles = []

    def keep(name, pick):
        def hook(module, args, output):
            theirs[name] = pick(output).detach()

        return hook

    first = lambda out: out[0] if isinstance(out, tuple) else out  # noqa: E731
    body = hf_model.model
    for i, layer in enumerate(body.layers):
        at = f"layers.{i}"
        handles += [
            layer.register_forward_hook(keep(f"{at}.layer_output", first)),
            layer.self_attn.register_forward_hook(keep(f"{at}.self_attn.attention_output", first)),
            layer.mlp.register_forward_hook(keep(f"{at}.mlp.mlp_output", first)),
            layer.mlp.shared_experts.register_forward_hook(keep(f"{at}.mlp.shared_expert_output", first)),
            layer.mlp.gate.register_forward_hook(keep(f"{at}.mlp.router_logits", first)),
            layer.input_layernorm.register_forward_hook(keep(f"{at}.attention_norm_output", first)),
            layer.post_attention_layernorm.register_forward_hook(keep(f"{at}.mlp_norm_output", first)),
            layer.attn_hc.register_forward_hook(keep(f"{at}.attention_post", first)),
            layer.attn_hc.register_forward_hook(keep(f"{at}.attention_comb", lambda out: out[1])),
            layer.ffn_hc.register_forward_hook(keep(f"{at}.mlp_post", first)),
            layer.ffn_hc.register_forward_hook(keep(f"{at}.mlp_comb", lambda out: out[1])),
        ]
    handles.append(body.norm.register_forward_hook(keep("final_norm_output", first)))
    try:
        with torch.no_grad():
            if isinstance(input, str | list | tuple) and not torch.is_tensor(input):
                input = model.to_tokens(input) if isinstance(input, str) or isinstance(input[0], str) else torch.tensor(input)
            ids = input.unsqueeze(0) if input.dim() == 1 else input
            theirs["logits"] = hf_model(input_ids=ids.to(hf_model.device), use_cache=False, **run).logits
    finally:
        for handle in handles:
            handle.remove()
    names = [n for n in model.hook_dict if n in theirs]
    with torch.no_grad():
        _, ours = model.run_with_cache(ids, names, max_bytes=None, **run)
    rows = []
    for name in names:
        a = ours[name].float()
        b = theirs[name].to(a.device).float().reshape(a.shape)
        error = (a - b).abs().max().item()
        rows.append(Compared(name, error, error / max(b.abs().max().item(), 1e-30), tuple(a.shape)))
    return Table(rows, title="error against transformers")
