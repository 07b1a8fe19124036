"""A whole block and a decoding step of one: their time against the sum of their parts' rooflines and against other ways of the same work.

Run by `python benchmarks/blocks.py`. The other ways: our plain torch, and transformers' eager forward of the block over the same tensors.
Nothing is timed before the results of all three are near each other.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from attention import device, graphed, median_seconds
from torch import Tensor

from dsv4 import Dsv4
from dsv4.config import CSA, HCA, MOE, SLIDING, Dsv4Config
from dsv4.testing import LIMITS, twin

KINDS = (SLIDING, CSA, HCA)
# The interpreter cuts off where a device rounds, which doubles the error.
LIMIT = "bfloat16 way" if device() == "cuda" else "truncated gradient"
# Tokens of a block, and tokens before a decoding step; behind them those of `--check`.
TOKENS, PAST = (8192, 37), (4096, 40)


def config_of(kind: str, is_check: bool) -> Dsv4Config:
    """One block of the kind."""
    config = replace(Dsv4Config.tiny(), compress_rates={CSA: 4, HCA: 8}) if is_check else Dsv4Config.flash()
    return replace(config, num_hidden_layers=1, layer_types=(kind,), mlp_layer_types=(MOE,), torch_dtype=torch.bfloat16)


def block_parts(config: Dsv4Config, kind: str, tokens: int, past: int = 0) -> dict[str, tuple[float, float]]:
    """(FLOPs, bytes) of each part of a block in bfloat16, every operand once."""
    t, h, n, d, heads = tokens, config.hidden_size, config.hc_mult, config.head_dim, config.num_attention_heads
    rate, series = config.compress_rates.get(kind, 0), 2 if kind == CSA else 1
    latent, low = config.q_lora_rank, config.o_groups * config.o_lora_rank
    inner, chosen = config.moe_intermediate_size, config.num_experts_per_tok
    hit = min(config.n_routed_experts, t * chosen)

    def linear(i: int, o: int, size: int = 2) -> tuple[float, float]:
        return 2.0 * t * i * o, 2.0 * (t * i + i * o) + size * t * o

    positions = range(past, past + t)
    closed = [(p + 1) // rate if rate else 0 for p in positions]
    kept = [min(c, config.index_topk) if kind == CSA else c for c in closed]
    keys = sum(min(p + 1, config.sliding_window) for p in positions) + sum(kept)
    held = min(keys, min(past, config.sliding_window) + t + (closed[-1] if t > 1 else kept[-1]))
    streams = 2.0 * t * n * h
    mixes = 4.0 * (2 + n) * n * n * h
    found = {
        "hyper read": (2.0 * t * n * h * 25, streams + mixes + 4 * t * h),
        "hyper write+read": (2.0 * t * n * h * 30, 2 * streams + mixes + 6 * t * h),
        "hyper write": (2.0 * t * n * h * 5, 2 * streams + 2 * t * h),
        "query latent": linear(h, latent),
        "queries": linear(latent, heads * d),
        "queries normed": (0.0, 4.0 * t * heads * d),
        "keys": linear(h, d),
        "attention": (4.0 * heads * d * keys, 4.0 * t * heads * d + 2.0 * d * held),
        "heads turned back": (0.0, 4.0 * t * heads * d),
        "output by group": (2.0 * t * heads * d * config.o_lora_rank, 2.0 * (t * (heads * d + low) + heads * d * config.o_lora_rank)),
        "output": linear(low, h),
        "router": linear(h, config.n_routed_experts, 4),
        "shared expert": (6.0 * t * h * inner, 2.0 * (2 * t * h + 3 * h * inner)),
        "experts": (6.0 * t * chosen * h * inner, 2.0 * (2 * t * h + 3 * hit * h * inner)),
    }
    if rate:
        found["compressor"] = linear(h, 2 * series * d, 4)
    if kind == CSA:
        width, index_heads = config.index_head_dim, config.index_n_heads
        found["indexer keys"] = linear(h, 4 * width, 4)
        found["indexer queries"] = linear(latent, index_heads * width)
        found["indexer"] = (2.0 * sum(closed) * index_heads * width, 8.0 * sum(closed) + 2.0 * width * closed[-1] + 8 * sum(kept))
    return found


def least_seconds(config: Dsv4Config, kind: str, tokens: int, past: int, flops: float, bandwidth: float) -> float:
    return sum(max(f / flops, b / bandwidth) for f, b in block_parts(config, kind, tokens, past).values())


def ours(model: Dsv4, streams: Tensor, ids: Tensor) -> Callable[[], Tensor]:
    return lambda: model(streams, input_ids=ids, start_at_layer=0, stop_at_layer=1)


def transformers_block(model: Dsv4, streams: Tensor, ids: Tensor) -> Callable[[], Tensor]:
    """Their block over our tensors, with the mask and the rotary that their model gives it."""
    with torch.device(device()):
        theirs = twin(model).model
    given: dict = {}
    hook = theirs.layers[0].register_forward_pre_hook(lambda module, args, kwargs: given.update(kwargs), with_kwargs=True)
    theirs(input_ids=ids, use_cache=False)
    hook.remove()
    return lambda: theirs.layers[0](streams, **given)


def check_near(got: Tensor, expected: Tensor, what: str) -> None:
    """AssertionError unless the middle token's is: where two experts or two entries tie to the last bits, either choice is right."""
    wide = expected.float()
    errors = (got.float() - wide).abs().flatten(2).amax(-1) / wide.abs().max()
    assert errors.median() <= LIMITS[LIMIT].relative, f"{what}: error {errors.median():.3g}"


@torch.no_grad()
def whole_block(kind: str, is_check: bool, flops: float, bandwidth: float) -> dict:
    """Milliseconds of a block's forward: ours, the other ways', and the sum of its parts' least times."""
    config, tokens = config_of(kind, is_check), TOKENS[is_check]
    model = Dsv4.from_config(config, dtype=torch.bfloat16, device=device(), kernels="triton")
    streams = torch.randn(1, tokens, config.hc_mult, config.hidden_size, device=device()).bfloat16()
    ids = torch.arange(tokens, device=device())[None] % config.vocab_size
    ways = {"ours": ours(model, streams, ids), "transformers": transformers_block(model, streams, ids)}
    result = ways["ours"]()
    check_near(result, ways["transformers"](), f"transformers' {kind}")
    found = {f"{name}_milliseconds": median_seconds(work, repeats=5) * 1e3 for name, work in ways.items()}
    model.use_kernels("torch")
    check_near(result, ways["ours"](), f"torch's {kind}")
    found["torch_milliseconds"] = median_seconds(ways["ours"], repeats=5) * 1e3
    least = least_seconds(config, kind, tokens, 0, flops, bandwidth) * 1e3
    return {"kind": kind, "tokens": tokens} | found | {"least_milliseconds": least, "over": found["ours_milliseconds"] / least}


@torch.no_grad()
def decode_step(kind: str, is_check: bool, flops: float, bandwidth: float) -> dict:
    """Microseconds of a decoding step of embedding, block and head: ours in one CUDA graph, and transformers' eager one."""
    from transformers import DynamicCache

    config, past = config_of(kind, is_check), PAST[is_check]
    model = Dsv4.from_config(config, dtype=torch.bfloat16, device=device(), kernels="triton")
    cache = model.new_kv_cache(1, 2 * past)
    ids = torch.arange(past + 1, device=device())[None] % config.vocab_size
    prompt, token = ids.split((past, 1), dim=1)
    model(prompt, kv_cache=cache, logits_to_keep=1)
    cache.fix(1)
    active = torch.ones(1, dtype=torch.bool, device=device())

    def step() -> Tensor:
        return model.forward_static(token, cache, active)

    with torch.device(device()):
        theirs = twin(model)
    # Grows by a token each time.
    held = DynamicCache(config=theirs.config)

    def their_step() -> Tensor:
        return theirs(input_ids=token, cache=held, use_cache=True).logits

    theirs(input_ids=prompt, cache=held, use_cache=True, logits_to_keep=1)
    check_near(step(), their_step(), f"a step of {kind}")
    seconds, other = median_seconds(graphed(step)), median_seconds(their_step, repeats=5)
    found = {"kind": kind, "microseconds": seconds * 1e6, "transformers_microseconds": other * 1e6}
    if device() == "cuda":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
        events = profile.key_averages()
        found["kernels_of_block_embedding_and_head"] = sum(e.count for e in events if e.device_type == torch.autograd.DeviceType.CUDA)
    return found | {"least_microseconds_of_block": least_seconds(config, kind, 1, past, flops, bandwidth) * 1e6}


def whole_blocks(is_check: bool, flops: float, bandwidth: float) -> Iterator[dict]:
    for kind in (CSA,) if is_check else KINDS:
        for work in (whole_block, decode_step):
            yield {"work": work.__name__} | work(kind, is_check, flops, bandwidth)
