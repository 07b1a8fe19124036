"""Gated pooling of a compression window: one entry out of `slots` tokens, with a softmax over the slots for every channel.

    gates = softmax over slots(gate + bias)          entry = sum over slots of gates * kv

Slots that hold no token have gate logit -inf and weight 0; an entry with no slot at all is zero. Axes: b batch, e entry, m slot, d channel.

`fused_pool` goes on to the norm and the rotary in one pass: a registered op (`dsv4::pool_entries`) over device code that is imported when
it is first asked for. `pool_step` (`dsv4::pool_step`) does a decoding step's part of it over a ring of projections, in place, without a
gradient.
"""

import torch
from torch import Tensor

from dsv4.kernels import recompute
from dsv4.kernels.backend import available
from dsv4.kernels.norm_rotary import rms_norm, rotate
from dsv4.kernels.numeric import wide
from dsv4.kernels.step_rows import write_ring

# What the device code takes: an entry stands in the registers of one program.
DEVICE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_WIDTH = 512


def pool_gates(logits: Tensor, present: Tensor) -> Tensor:
    """logits [b e m d], present [b e m] bool -> gates [b e m d] float32, summing to one over m (all zero where nothing is present)."""
    hidden = ~present.unsqueeze(-1)
    any_present = present.any(-1)[..., None, None]
    logits = wide(logits).masked_fill(hidden, float("-inf")).masked_fill(~any_present, 0.0)
    return torch.softmax(logits, dim=-2).masked_fill(hidden, 0.0)


def pool(kv: Tensor, gates: Tensor) -> Tensor:
    """kv [b e m d], gates [b e m d] -> [b e d] float32."""
    return (wide(kv) * gates).sum(-2)


def slots_of(projected: Tensor, index: Tensor, series: int) -> Tensor:
    """projected [b t series * d], index [b e m] -> [b e m d]: each slot's token, seen through the series that the slot uses."""
    rows = torch.arange(projected.shape[0], device=projected.device)[:, None, None]
    halves = zip(projected.chunk(series, dim=-1), index.chunk(series, dim=-1), strict=True)
    return torch.cat([half[rows, columns] for half, columns in halves], dim=2)


def pool_definition(
    projected: Tensor,
    bias: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    present: Tensor,
    filled: Tensor,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """What `fused_pool` computes, in plain torch."""
    series = bias.shape[1] // weight.shape[0]
    kv, gate = (slots_of(part, index, series) for part in projected.chunk(2, dim=-1))
    gates = pool_gates(gate + torch.cat(bias.chunk(series, dim=-1)), present)
    entries = rotate(rms_norm(pool(kv, gates).to(dtype), weight, eps), cos, sin)
    return entries.masked_fill(~filled.unsqueeze(-1), 0.0)


def refusal(backend: str, device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """None where `backend` makes entries of this dtype and width on this device, else the reason it does not."""
    reason = available(backend, device)
    if reason is not None or backend == "torch":
        return reason
    if dtype not in DEVICE_DTYPES:
        return f"its entries are {', '.join(map(str, DEVICE_DTYPES))}, got {dtype}"
    return None if width <= MAX_WIDTH and width % 2 == 0 else f"its entries are even and at most {MAX_WIDTH} wide, got {width}"


@torch.library.custom_op("dsv4::pool_entries", mutates_args=())
def fused_pool(
    projected: Tensor,
    bias: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    present: Tensor,
    filled: Tensor,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Entries of windows, pooled, rounded, normed and turned.

    Args:
        projected: [b t 2 c d] float32, c series of kv beside c series of gate logits. bias: [rate, c d] float32. weight: [d] float32.
        cos, sin: [b e turned / 2] float32.
        index: [b e m] int64, column of each slot's token; m = c rate, slots of one series after those of the other.
        present: [b e m] bool, whether a slot holds a token. filled: [b e] bool, whether there is an entry; else zeros.
    Returns:
        [b e d] of `dtype`.
    Raises:
        ValueError: shapes or dtypes that do not fit, or a device on which it cannot run.
    """
    _check(projected, bias, weight, cos, sin, index, present, filled, dtype)
    from dsv4.kernels import _pooling_triton as device_code

    return device_code.run(projected, bias, weight, cos, sin, index, present, filled, eps, dtype)


@fused_pool.register_fake
def _(projected, bias, weight, cos, sin, index, present, filled, eps, dtype):
    return projected.new_empty(*index.shape[:2], weight.shape[0], dtype=dtype)


def pool_step_definition(
    projected: Tensor,
    ring: Tensor,
    entries: Tensor,
    bias: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    past: Tensor,
    after: Tensor,
    eps: float,
) -> None:
    """What `pool_step` does, in plain torch."""
    write_ring(ring, projected, past, after)
    (rate, columns), width = bias.shape, weight.shape[0]
    number = (past // rate).unsqueeze(1) + torch.arange(cos.shape[1], device=past.device)
    closes = ((number + 1) * rate <= after.unsqueeze(1)) & (number < entries.shape[1])
    place = number.unsqueeze(-1) * rate + torch.arange(rate - columns // width * rate, rate, device=past.device)
    present = closes.unsqueeze(-1) & (place >= 0)
    made = pool_definition(ring, bias, weight, cos, sin, place.clamp(min=0) % ring.shape[1], present, closes, eps, entries.dtype)
    rows = torch.arange(len(ring), device=past.device).unsqueeze(1)
    number = number.where(closes, 0)
    # A window that the step leaves open keeps what its column held.
    for e in range(cos.shape[1]):
        at = rows[:, 0], number[:, e]
        entries[at] = torch.where(closes[:, e, None], made[:, e], entries[at])


@torch.library.custom_op("dsv4::pool_step", mutates_args=("ring", "entries"))
def pool_step(
    projected: Tensor,
    ring: Tensor,
    entries: Tensor,
    bias: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    past: Tensor,
    after: Tensor,
    eps: float,
) -> None:
    """Keep a step's projections, and make the entries of the windows that it closes.

    Args:
        projected: [b s 2 c d] float32, c series of kv beside c series of gate logits. ring: [b R 2 c d] float32, written in place: token p
            in column p mod R; R >= s + (c rate - 1), or no row is longer than R.
        entries: [b E d], written in place where a window closes that has a column. bias: [rate, c d] float32. weight: [d] float32.
        cos, sin: [b e turned / 2] float32 at the first tokens of the windows past // rate ..., as many as s tokens can touch.
        past, after: [b] int64 tokens of each row before and after the step; a row takes after - past of its s tokens, the first ones.
    Raises:
        ValueError: shapes or dtypes that do not fit, or a device on which it cannot run.
    """
    _check_step(projected, ring, entries, bias, weight, cos, sin, past, after)
    from dsv4.kernels import _pooling_triton as device_code

    device_code.step(projected, ring, entries, bias, weight, cos, sin, past, after, eps)


@pool_step.register_fake
def _(projected, ring, entries, bias, weight, cos, sin, past, after, eps):
    return None


def _check(projected, bias, weight, cos, sin, index, present, filled, dtype: torch.dtype) -> None:
    (b, e, m), (d,), (rate, columns) = index.shape, weight.shape, bias.shape
    reason = refusal("triton", projected.device, dtype, d)
    if reason is not None:
        raise ValueError(f'backend="triton": {reason}; use backend="torch" (of a model: model.use_kernels("torch"))')
    half = cos.shape[-1]
    expected = {
        "projected": (projected, (b, projected.shape[1], 2 * columns), torch.float32),
        "bias": (bias, (rate, m // rate * d), torch.float32),
        "weight": (weight, (d,), torch.float32),
        "cos": (cos, (b, e, half), torch.float32),
        "sin": (sin, (b, e, half), torch.float32),
        "index": (index, (b, e, m // rate * rate), torch.int64),
        "present": (present, (b, e, m), torch.bool),
        "filled": (filled, (b, e), torch.bool),
    }
    for name, (t, shape, kind) in expected.items():
        if t.shape != shape or t.dtype != kind:
            raise ValueError(f"{name} {list(t.shape)} {t.dtype} for {e} entries of {d} from {m} slots; expected {list(shape)} {kind}")
    if 2 * half > d:
        raise ValueError(f"cos and sin turn {2 * half} channels of {d}: expected no more than there are")


def _check_step(projected, ring, entries, bias, weight, cos, sin, past, after) -> None:
    (b, s, _), (d,), (rate, columns) = projected.shape, weight.shape, bias.shape
    reason = refusal("triton", projected.device, entries.dtype, d)
    if reason is not None:
        raise ValueError(f'backend="triton": {reason}; use backend="torch" (of a model: model.use_kernels("torch"))')
    new, half = 1 + (s + rate - 2) // rate, cos.shape[-1]
    expected = {
        "projected": (projected, (b, s, 2 * columns), torch.float32),
        "ring": (ring, (b, max(ring.shape[1], s), 2 * columns), torch.float32),
        "entries": (entries, (b, entries.shape[1], d), entries.dtype),
        "bias": (bias, (rate, columns // d * d), torch.float32),
        "weight": (weight, (d,), torch.float32),
        "cos": (cos, (b, new, half), torch.float32),
        "sin": (sin, (b, new, half), torch.float32),
        "past": (past, (b,), torch.int64),
        "after": (after, (b,), torch.int64),
    }
    for name, (t, shape, kind) in expected.items():
        if t.shape != shape or t.dtype != kind:
            raise ValueError(
                f"{name} {list(t.shape)} {t.dtype} for {s} tokens in windows of {rate}, entries of {d}; expected {list(shape)} {kind}"
            )
    if ring.stride(-1) != 1 or entries.stride(-1) != 1:
        raise ValueError(f"ring and entries with strides {ring.stride()} and {entries.stride()}; expected dense rows")
    if 2 * half > d:
        raise ValueError(f"cos and sin turn {2 * half} channels of {d}: expected no more than there are")


recompute.register(fused_pool, pool_definition, tensors=8)
