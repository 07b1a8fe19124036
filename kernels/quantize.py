"""The number formats of DeepSeek-V4 checkpoints: block-scaled FP8, packed FP4, E8M0 scales.

    FP8    w[r, c] = e4m3(code[r, c]) * scale[r // 128, c // 128]    last blocks may be ragged
    FP4    w[r, c] = e2m1(code[r, c]) * scale[r, c // 32]            two codes in a byte
    E8M0   scale = 2^(byte - 127)                                    byte 255 is NaN

The low nibble of a byte is the even column.

Decoding looks codes up in a table of values: 256 of them for FP8, 256 pairs for FP4. The product
with the scale is taken in float32 and rounded once to the dtype asked for, which loses nothing in
bfloat16 while the scale is a power of two. Encoding takes the smallest power of two that keeps a
block in range, then rounds to nearest, ties to even.
Axes: o output row, i input column, e stacked expert.
"""

import functools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

FP8_BLOCK = 128
FP4_BLOCK = 32
FP8_MAX = 448.0
FP4_MAX = 6.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Halfway points between neighbours of E2M1, and whether a tie goes up: to the even code.
E2M1_MIDPOINTS = (
    *((0.25, False), (0.75, True), (1.25, False), (1.75, True)),
    *((2.5, False), (3.5, True), (5.0, False)),
)
E8M0_BIAS = 127
E8M0_NAN = 255
# Elements decoded at a time. On a CPU the temporaries stay in the cache and below malloc's mmap
# threshold (FP8 is three times as fast as in steps of 2^22), on a GPU a step is enough to fill it.
CPU_CHUNK = 1 << 19
GPU_CHUNK = 1 << 26
# Torch's threads would share out each of these small steps and wait for each other at its end, on a
# busy machine for many times what it takes. A matrix of so many elements for each thread is cut into
# one part for each instead; a smaller one is decoded in steps too small to be shared out.
THREAD_SHARE = 1 << 20
SERIAL_CHUNK = (1 << 15) - 1
ONE_BYTE = (torch.uint8, torch.int8)


def e8m0_to_float32(scale: Tensor) -> Tensor:
    """Scale bytes (float8_e8m0fnu or uint8, any shape) -> 2^(byte - 127) in float32, NaN for 255.

    Built from bit patterns, so 2^-127, which float32 holds only as a subnormal, survives flushing.
    """
    if scale.dtype not in (torch.float8_e8m0fnu, torch.uint8):
        raise ValueError(f"scale bytes are {scale.dtype}; expected float8_e8m0fnu or uint8")
    index = scale.contiguous().view(torch.uint8).to(torch.int32)
    return _e8m0_table(scale.device).index_select(0, index.flatten()).view(scale.shape)


def fp8_scale_shape(shape: tuple[int, ...], row_parts: int = 1) -> tuple[int, ...]:
    """Shape of the 128x128 scales of a weight [.., o, i]; each of `row_parts` equal parts of o has
    a grid of its own."""
    *stack, rows, columns = shape
    return (
        *stack,
        row_parts * math.ceil(rows // row_parts / FP8_BLOCK),
        math.ceil(columns / FP8_BLOCK),
    )


def fp4_scale_shape(packed_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the 1x32 scales of a packed weight [.., o, i/2]."""
    *stack, rows, half = packed_shape
    return (*stack, rows, math.ceil(2 * half / FP4_BLOCK))


def dequantize_fp8(
    codes: Tensor,
    scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    *,
    row_parts: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """e4m3fn codes times their block scales.

    Args:
        codes: [o, i] or [e, o, i] float8_e4m3fn, or the same bytes as uint8 or int8.
        scale: [ceil(o/128), ceil(i/128)] (with e in front for a stack): float8_e8m0fnu, or float32
            as stored.
        dtype: of the result; the product is rounded to float32, then to this.
        row_parts: o holds this many matrices of o/row_parts rows, each with a block grid of its own
            (2 for stacked gate and up).
        out: optional tensor of the codes' shape that receives the result, of any dtype (it then
            decides).
    Returns:
        [o, i] or [e, o, i]. NaN codes and NaN scales give NaN.
    """
    if codes.dtype != torch.float8_e4m3fn and codes.dtype not in ONE_BYTE:
        raise ValueError(f"codes are {codes.dtype}; expected float8_e4m3fn, or its bytes as uint8 or int8")
    expected = fp8_scale_shape(tuple(codes.shape), row_parts)
    if codes.dim() not in (2, 3) or codes.shape[-2] % row_parts or tuple(scale.shape) != expected:
        raise ValueError(
            f"codes {list(codes.shape)} with scales {list(scale.shape)}; expected rank 2 or 3, "
            f"rows divisible by row_parts={row_parts}, and scales {list(expected)} "
            f"(blocks of {FP8_BLOCK} x {FP8_BLOCK})"
        )
    out = _result(codes.shape, dtype, codes.device, out)
    table = _fp8_table(codes.device, out.dtype if _is_exact(scale, out.dtype) else torch.float32)
    scale = _scale_values(scale, out.dtype)
    rows, columns = codes.shape[-2] // row_parts, codes.shape[-1]
    count = math.prod(codes.shape[:-2]) * row_parts
    codes_mats = codes.contiguous().view(torch.uint8).reshape(count, rows, columns)
    scale_mats = scale.reshape(count, scale.shape[-2] // row_parts, scale.shape[-1])
    out_mats = out.view(count, rows, columns)
    if codes.numel() == 0:
        return out

    def decode_rows(part: slice) -> None:
        """Of all matrices, as one tall one."""
        step, look_up = max(1, _chunk(codes.device) // columns), _LookUp(table)
        for mat in range(part.start // rows, -(-part.stop // rows)):
            first, last = max(0, part.start - mat * rows), min(rows, part.stop - mat * rows)
            scale_bi = scale_mats[mat].repeat_interleave(FP8_BLOCK, dim=-1)[:, :columns]
            for row in _steps(first, last, step, FP8_BLOCK):
                at = row.start // FP8_BLOCK
                scale_ri = scale_bi[at : at + 1]
                if row.stop > (at + 1) * FP8_BLOCK:
                    scale_ri = scale_bi[at : -(-row.stop // FP8_BLOCK)].repeat_interleave(FP8_BLOCK, dim=0)[: row.stop - row.start]
                look_up(codes_mats[mat, row], scale_ri, out_mats[mat, row])

    _share(decode_rows, count * rows, columns, codes.device)
    return out


def dequantize_fp4(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16, *, out: Tensor | None = None) -> Tensor:
    """Packed e2m1 codes times their 1x32 scales.

    Args:
        packed: [o, i/2] or [e, o, i/2] int8 or uint8, low nibble = even column.
        scale: [o, i/32] (with e in front for a stack) float8_e8m0fnu, or float32.
        dtype: of the result; bfloat16 and float32 hold every value exactly, subnormal results
            aside.
        out: optional contiguous tensor [o, i] or [e, o, i] that receives the result, of any dtype
            (it then decides).
    """
    if packed.dtype not in ONE_BYTE:
        raise ValueError(f"packed FP4 is {packed.dtype}; expected int8 or uint8")
    expected = fp4_scale_shape(tuple(packed.shape))
    columns = 2 * packed.shape[-1]
    if packed.dim() not in (2, 3) or columns % FP4_BLOCK or tuple(scale.shape) != expected:
        raise ValueError(
            f"packed {list(packed.shape)} with scales {list(scale.shape)}; expected rank 2 or 3, "
            f"columns in whole blocks of {FP4_BLOCK} ({FP4_BLOCK // 2} bytes), and scales "
            f"{list(expected)}"
        )
    out = _result((*packed.shape[:-1], columns), dtype, packed.device, out)
    pairs = _fp4_pairs(packed.device, out.dtype if _is_exact(scale, out.dtype) else torch.float32)
    flat = packed.contiguous().view(torch.uint8).reshape(-1, FP4_BLOCK // 2)
    scale_b1 = scale.contiguous().reshape(-1, 1)
    out_b32 = out.view(-1, FP4_BLOCK)

    def decode_blocks(part: slice) -> None:
        step, look_up = _chunk(packed.device) // FP4_BLOCK, _LookUp(pairs)
        pieces = (t.split(step) for t in (flat[part], _scale_values(scale_b1[part], out.dtype), out_b32[part]))
        for codes, scales, piece in zip(*pieces, strict=True):
            look_up(codes, scales, piece)

    _share(decode_blocks, len(flat), FP4_BLOCK, packed.device)
    return out


def unpack_fp4(packed: Tensor) -> Tensor:
    """[.., n] bytes -> [.., 2n] codes 0..15 as uint8, even columns from the low nibbles."""
    byte = packed.contiguous().view(torch.uint8)
    return torch.stack((byte & 0xF, byte >> 4), dim=-1).flatten(-2)


def pack_fp4(codes: Tensor) -> Tensor:
    """[.., 2n] codes 0..15 -> [.., n] int8, the inverse of unpack_fp4."""
    low, high = codes.to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return (low | (high << 4)).view(torch.int8)


def quantize_fp8(weight: Tensor, *, row_parts: int = 1) -> tuple[Tensor, Tensor]:
    """[.., o, i], finite -> (float8_e4m3fn of that shape, float8_e8m0fnu per block of 128 x 128).

    The scale is the smallest power of two with max |block| <= 448 * scale (1 for a block of zeros),
    and the values are divided by the rounded scale, never by the one before rounding. `row_parts`
    as in dequantize_fp8. Raises ValueError on NaN or infinity.
    """
    rows, columns = weight.shape[-2] // row_parts, weight.shape[-1]
    if weight.dim() not in (2, 3) or weight.shape[-2] % row_parts:
        raise ValueError(f"weight {list(weight.shape)}; expected rank 2 or 3 with rows divisible by {row_parts}")
    padding = (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK)
    mats = weight.reshape(math.prod(weight.shape[:-2]) * row_parts, rows, columns)
    codes = torch.empty(mats.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = []
    for mat_oi, codes_oi in zip(mats, codes, strict=True):
        padded = torch.nn.functional.pad(mat_oi.float(), padding)
        blocks = padded.unflatten(-1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))
        exponent = _scale_exponent(blocks.abs().amax((1, 3)), FP8_MAX)
        shrunk = blocks * power_of_two(-exponent)[:, None, :, None]
        codes_oi.copy_(shrunk.flatten(0, 1).flatten(1, 2)[:rows, :columns])
        scales.append(_e8m0_from_exponent(exponent))
    stacked = torch.stack([scale.view(torch.uint8) for scale in scales]).view(torch.float8_e8m0fnu)
    return codes.view(weight.shape), stacked.view(fp8_scale_shape(tuple(weight.shape), row_parts))


def quantize_fp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[.., o, i], finite, i a multiple of 32 -> (int8 [.., o, i/2], float8_e8m0fnu [.., o, i/32]).

    Scale and rounding as in quantize_fp8, with 6 in place of 448. Raises ValueError on NaN or
    infinity.
    """
    if weight.dim() not in (2, 3) or weight.shape[-1] % FP4_BLOCK:
        raise ValueError(f"weight {list(weight.shape)}; expected rank 2 or 3 and columns in whole blocks of {FP4_BLOCK}")
    blocks = weight.reshape(-1, FP4_BLOCK)
    packed = torch.empty((len(blocks), FP4_BLOCK // 2), dtype=torch.int8, device=weight.device)
    scale = torch.empty(len(blocks), dtype=torch.uint8, device=weight.device)
    step = _chunk(weight.device) // FP4_BLOCK
    for first in range(0, len(blocks), step):
        part = slice(first, first + step)
        chunk = blocks[part].float()
        exponent = _scale_exponent(chunk.abs().amax(-1), FP4_MAX)
        packed[part] = pack_fp4(_e2m1_codes(chunk * power_of_two(-exponent)[:, None]))
        scale[part] = _e8m0_from_exponent(exponent).view(torch.uint8)
    shape = (*weight.shape[:-1], weight.shape[-1] // 2)
    return packed.view(shape), scale.view(torch.float8_e8m0fnu).view(fp4_scale_shape(shape))


def has_nan_code(codes: Tensor) -> bool:
    """Whether float8_e4m3fn codes hold a NaN (0x7F or 0xFF), from two byte-wise maxima."""
    if codes.numel() == 0:
        return False
    return bool(codes.view(torch.int8).amax() == 0x7F) or bool(codes.view(torch.uint8).amax() == 0xFF)


def largest_scale(scale: Tensor) -> float:
    """The largest absolute multiplier among scales (0 if there are none), NaN if one is NaN."""
    if scale.numel() == 0:
        return 0.0
    if scale.dtype == torch.float32:
        return float(scale.abs().amax())
    byte = int(scale.view(torch.uint8).amax())
    return math.nan if byte == E8M0_NAN else 2.0 ** (byte - E8M0_BIAS)


def _chunk(device: torch.device) -> int:
    if device.type != "cpu":
        return GPU_CHUNK
    return CPU_CHUNK if torch.get_num_threads() == 1 else SERIAL_CHUNK


def _steps(first: int, last: int, step: int, block: int) -> list[slice]:
    """first ... last in steps that begin at blocks where they are longer than one, and stay inside one where they are shorter."""
    found = []
    while first < last:
        longest = (first + step) // block * block if step >= block else min(first + step, (first // block + 1) * block)
        found.append(slice(first, min(last, longest)))
        first = longest
    return found


def _share(work: Callable[[slice], None], rows: int, width: int, device: torch.device) -> None:
    """work(slice of rows) for all rows of so many elements; on a CPU in threads that share nothing, as many as torch uses."""
    own = torch.get_num_threads()
    threads = min(own, rows * width // THREAD_SHARE) if device.type == "cpu" else 1
    if threads <= 1:
        work(slice(0, rows))
        return
    inference = torch.is_inference_mode_enabled()

    def in_thread(part: slice) -> None:
        # Of this thread.
        torch.set_num_threads(1)
        with torch.inference_mode(inference), torch.no_grad():
            work(part)

    bounds = [rows * i // threads for i in range(threads + 1)]
    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(in_thread, map(slice, bounds[:-1], bounds[1:])))
    finally:
        # What a thread sets is also what threads begin with.
        torch.set_num_threads(own)


def _result(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, out: Tensor | None) -> Tensor:
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if tuple(out.shape) != tuple(shape) or not out.is_contiguous():
        raise ValueError(f"out is {list(out.shape)}; expected a contiguous tensor {list(shape)}")
    return out


def _is_exact(scale: Tensor, dtype: torch.dtype) -> bool:
    """Whether codes and scales fit `dtype`, so that it takes their product."""
    is_power = scale.dtype in (torch.float8_e8m0fnu, torch.uint8)
    if not is_power and scale.dtype != torch.float32:
        raise ValueError(f"scales are {scale.dtype}; expected float8_e8m0fnu, its bytes as uint8, or float32")
    return dtype in (torch.float32, torch.float64) or (is_power and dtype == torch.bfloat16)


def _scale_values(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The multipliers, in `dtype` where that is exact, else in float32."""
    values = scale if scale.dtype == torch.float32 else e8m0_to_float32(scale)
    return values.to(dtype) if _is_exact(scale, dtype) else values


class _LookUp:
    """out = values[codes] * scale, step by step in buffers of its own, which no other thread shares.

    table: the values (or pairs of them, packed in integers), and their dtype.
    """

    def __init__(self, table: tuple[Tensor, torch.dtype]):
        self.entries, self.dtype = table
        self.indices, self.found = self.entries.new_empty(0, dtype=torch.int32), self.entries.new_empty(0)

    def __call__(self, codes: Tensor, scale: Tensor, out: Tensor) -> None:
        size = codes.numel()
        if size > self.found.numel():
            self.indices = self.entries.new_empty(size, dtype=torch.int32)
            self.found = self.entries.new_empty(size)
        indices, found = self.indices[:size], self.found[:size]
        indices.view(codes.shape).copy_(codes)
        torch.index_select(self.entries, 0, indices, out=found)
        values = found.view(self.dtype).view(out.shape)
        if values.dtype == out.dtype:
            torch.mul(values, scale, out=out)
        else:
            out.copy_(values * scale)


@functools.cache
def _e8m0_table(device: torch.device) -> Tensor:
    # A float32 of exponent field b is 2^(b - 127); the field 0 is the subnormals, where 2^-127 is
    # the bit below.
    bits = torch.arange(256, dtype=torch.int32, device="cpu") << 23
    bits[0], bits[E8M0_NAN] = 1 << 22, 0x7FC00000
    return bits.view(torch.float32).to(device)


@functools.cache
def _fp8_table(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, torch.dtype]:
    values = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).to(dtype)
    return values.to(device), dtype


@functools.cache
def _fp4_pairs(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, torch.dtype]:
    byte = torch.arange(256, device="cpu")
    values = torch.tensor(E2M1, dtype=dtype, device="cpu")
    pairs = torch.stack((values[byte & 0xF], values[byte >> 4]), dim=-1)
    whole = {2: torch.int32, 4: torch.int64, 8: torch.complex128}[dtype.itemsize]
    return pairs.view(whole).flatten().to(device), dtype


def _scale_exponent(amax: Tensor, largest: float) -> Tensor:
    """The smallest k in [-127, 127] with amax <= largest * 2^k, int32; 0 where amax is 0."""
    if not bool(amax.isfinite().all()):
        raise ValueError("the weight holds NaN or infinity, which has no block scale; quantise finite weights")
    top, top_exponent = math.frexp(largest)
    mantissa, exponent = torch.frexp(amax)
    exponent = exponent.to(torch.int32) - top_exponent + (mantissa > top).to(torch.int32)
    return exponent.clamp(-E8M0_BIAS, E8M0_BIAS).masked_fill(amax == 0, 0)


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in float32, exactly, for exponents in [-127, 127]."""
    return e8m0_to_float32((exponent + E8M0_BIAS).to(torch.uint8))


def _e8m0_from_exponent(exponent: Tensor) -> Tensor:
    return (exponent + E8M0_BIAS).to(torch.uint8).view(torch.float8_e8m0fnu)


def _e2m1_codes(values: Tensor) -> Tensor:
    """|values| <= 6 -> codes 0..15 uint8, nearest, ties to the even code."""
    size = values.abs()
    codes = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for midpoint, tie_up in E2M1_MIDPOINTS:
        codes += size >= midpoint if tie_up else size > midpoint
    return codes | (torch.signbit(values).to(torch.uint8) << 3)
