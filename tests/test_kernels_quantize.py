"""dsv4.kernels.quantize against the definitions of the formats, element by element."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dsv4.kernels import quantize
from dsv4.testing_checkpoints import fp4_values, fp8_values, scale_values

E8M0 = torch.float8_e8m0fnu
FP8 = torch.float8_e4m3fn
# byte -> value, from the table of the format
FP8_BYTES = {0x00: 0.0, 0x01: 2.0**-9, 0x38: 1.0, 0x7E: 448.0, 0x80: -0.0, 0xB8: -1.0, 0xFE: -448.0}
SCALE_BYTES = {0: 2.0**-127, 1: 2.0**-126, 120: 0.0078125, 127: 1.0, 130: 8.0, 254: 2.0**127}


def bits(tensor):
    """Comparable bit for bit: -0.0 and 0.0 differ, NaN equals itself."""
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize])


def random_codes(*shape):
    byte = torch.randint(256, shape, dtype=torch.uint8)
    byte[byte % 128 == 127] = 0
    return byte.view(FP8)


def random_scale(*shape, low=110, high=140):
    return torch.randint(low, high, shape, dtype=torch.uint8).view(E8M0)


@pytest.fixture
def flushing():
    """Subnormal results become zero, as some libraries set it for the whole process."""
    assert torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", [E8M0, torch.uint8])
def test_scale_bytes_are_exponents(dtype):
    scale = torch.tensor(list(SCALE_BYTES), dtype=torch.uint8).view(dtype)
    assert quantize.e8m0_to_float32(scale).tolist() == list(SCALE_BYTES.values())
    assert quantize.e8m0_to_float32(torch.tensor([[255]], dtype=torch.uint8).view(dtype)).isnan().all()


def test_smallest_scale_survives_flushing(flushing):
    scale = torch.zeros(1, dtype=torch.uint8).view(E8M0)
    assert bits(quantize.e8m0_to_float32(scale)).item() == 1 << 22


@pytest.mark.parametrize("stored", [FP8, torch.uint8, torch.int8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_fp8_bytes_are_not_integers(stored, dtype):
    codes = torch.tensor([list(FP8_BYTES)], dtype=torch.uint8).view(stored)
    one = torch.full((1, 1), 127, dtype=torch.uint8).view(E8M0)
    expected = torch.tensor([list(FP8_BYTES.values())], dtype=dtype)
    assert torch.equal(bits(quantize.dequantize_fp8(codes, one, dtype)), bits(expected))


def test_fp8_nan_codes_and_nan_scales_stay_nan():
    codes = torch.tensor([[0x7F, 0xFF, 0x38]], dtype=torch.uint8).view(FP8)
    one = torch.full((1, 1), 127, dtype=torch.uint8)
    assert quantize.dequantize_fp8(codes, one.view(E8M0)).isnan().tolist() == [[True, True, False]]
    assert quantize.dequantize_fp8(codes, (one + 128).view(E8M0)).isnan().all()


@pytest.mark.parametrize("shape", [(130, 200), (128, 128), (1, 1), (257, 384), (64, 3), (0, 5), (700, 900)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scales", ["e8m0", "float32"])
def test_fp8_with_ragged_last_blocks(shape, dtype, scales):
    codes = random_codes(*shape)
    grid = (math.ceil(shape[0] / 128), math.ceil(shape[1] / 128))
    scale = random_scale(*grid) if scales == "e8m0" else torch.rand(grid) + 0.1
    # One rounding to float32, then one to the result's dtype.
    expected = fp8_values(codes, scale).float().to(dtype)
    assert torch.equal(bits(quantize.dequantize_fp8(codes, scale, dtype)), bits(expected))


def test_fp8_stack_with_a_grid_for_each_half():
    codes = random_codes(3, 2 * 130, 200)
    scale = random_scale(3, 2 * 2, 2)
    decoded = quantize.dequantize_fp8(codes, scale, torch.float32, row_parts=2)
    for e in range(3):
        for half in range(2):
            rows = slice(130 * half, 130 * (half + 1))
            expected = fp8_values(codes[e, rows], scale[e, 2 * half : 2 * half + 2])
            assert torch.equal(decoded[e, rows].double(), expected)


def test_fp4_low_nibble_is_the_even_column():
    packed = torch.tensor([[0x21] * 16], dtype=torch.int8)
    one = torch.full((1, 1), 127, dtype=torch.uint8).view(E8M0)
    assert quantize.dequantize_fp4(packed, one, torch.float32).tolist() == [[0.5, 1.0] * 16]


@pytest.mark.parametrize("shape", [(7, 32), (1, 64), (130, 96), (4, 5, 64), (0, 32), (600, 1024)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_fp4_every_byte_and_scale(shape, dtype):
    packed = torch.randint(-128, 128, (*shape[:-1], shape[-1] // 2), dtype=torch.int8)
    scale = random_scale(*shape[:-1], shape[-1] // 32, low=1, high=250)
    flat = fp4_values(packed.reshape(-1, packed.shape[-1]), scale.reshape(-1, scale.shape[-1]))
    decoded = quantize.dequantize_fp4(packed, scale, dtype)
    # Exact in each dtype: at most two significant bits.
    assert torch.equal(bits(decoded), bits(flat.reshape(shape).to(dtype)))
    assert torch.equal(decoded.double(), flat.reshape(shape))


def test_fp4_packing_goes_there_and_back():
    packed = torch.arange(-128, 128, dtype=torch.int8).view(8, 32)
    assert torch.equal(quantize.pack_fp4(quantize.unpack_fp4(packed)), packed)


def test_decoding_into_a_slice():
    packed = torch.randint(-128, 128, (6, 16), dtype=torch.int8)
    scale = random_scale(6, 1)
    room = torch.zeros(3, 6, 32)
    quantize.dequantize_fp4(packed, scale, out=room[1])
    assert torch.equal(room[1].double(), fp4_values(packed, scale))
    assert not room[0].any()
    assert not room[2].any()


@pytest.mark.parametrize(
    ("codes", "scale", "message"),
    [
        ((130, 200), (1, 2), r"scales \[1, 2\]; expected"),
        ((130, 200), (2, 1), r"blocks of 128 x 128"),
        ((2, 130, 200), (2, 2), r"expected rank 2 or 3"),
    ],
)
def test_fp8_scales_of_a_wrong_shape_are_refused(codes, scale, message):
    with pytest.raises(ValueError, match=message):
        quantize.dequantize_fp8(random_codes(*codes), random_scale(*scale))


def test_wrong_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"scales are torch\.int64"):
        quantize.dequantize_fp8(random_codes(8, 8), torch.ones(1, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"codes are torch\.bfloat16"):
        quantize.dequantize_fp8(torch.zeros(8, 8, dtype=torch.bfloat16), random_scale(1, 1))
    with pytest.raises(ValueError, match=r"packed FP4 is torch\.float8_e4m3fn"):
        quantize.dequantize_fp4(random_codes(8, 16), random_scale(8, 1))
    with pytest.raises(ValueError, match=r"whole blocks of 32"):
        quantize.dequantize_fp4(torch.zeros(8, 12, dtype=torch.int8), random_scale(8, 1))


@pytest.mark.parametrize("shape", [(130, 200), (256, 128), (3, 5), (2, 130, 200)])
def test_fp8_error_is_half_a_step(shape):
    weight = torch.randn(shape) * torch.rand(shape[-1]).mul(20).sub(10).exp2()
    codes, scale = quantize.quantize_fp8(weight)
    assert scale.dtype == E8M0
    decoded = quantize.dequantize_fp8(codes, scale, torch.float64)
    # Half the distance between neighbours: 2^-4 of the value's binade; the subnormal step is 2^-9
    # of the scale.
    binade = torch.frexp(weight.double()).exponent - 1
    steps = scale_values(scale)[..., torch.arange(shape[-2]) // 128, :][..., torch.arange(shape[-1]) // 128]
    allowed = torch.maximum(torch.exp2(binade.double()) / 16, steps * 2.0**-10)
    assert bool(((decoded - weight).abs() <= allowed).all())


@pytest.mark.parametrize("quantise", ["fp8", "fp4"])
def test_scale_is_the_smallest_power_of_two_that_fits(quantise):
    largest = {"fp8": 448.0, "fp4": 6.0}[quantise]
    encode = {"fp8": quantize.quantize_fp8, "fp4": quantize.quantize_fp4}[quantise]
    for top in (
        largest,
        largest * 1.0001,
        largest * 1.5,
        largest / 2,
        largest * 2.0**-40,
        largest * 2.0**90,
    ):
        weight = torch.zeros(1, 32)
        weight[0, 3] = -top
        scale = scale_values(encode(weight)[1]).item()
        assert abs(weight[0, 3].item()) <= largest * scale
        assert abs(weight[0, 3].item()) > largest * scale / 2


def test_a_block_that_needs_the_next_scale_loses_no_factor_of_two():
    weight = torch.full((128, 128), 1.5 * 448 * 2.0**-5)
    decoded = quantize.dequantize_fp8(*quantize.quantize_fp8(weight), torch.float32)
    assert bool(((decoded / weight - 1).abs() <= 1 / 16).all())


@pytest.mark.parametrize("encode", [quantize.quantize_fp8, quantize.quantize_fp4])
def test_a_block_of_zeros(encode):
    codes, scale = encode(torch.zeros(2, 64))
    assert not codes.view(torch.uint8).any()
    assert scale_values(scale).unique().tolist() == [1.0]


@pytest.mark.parametrize("encode", [quantize.quantize_fp8, quantize.quantize_fp4])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weights_without_a_scale_are_refused(encode, bad):
    weight = torch.zeros(2, 64)
    weight[1, 7] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        encode(weight)


def test_fp4_rounds_to_nearest_ties_to_even():
    # 6 in the block fixes the scale at 1. Expected codes: nearest value, ties to the even code.
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    rounded = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    near = [0.2501, 0.7499, 1.2501, 1.7499, 2.501, 3.499, 5.001]
    nearest = [0.5, 0.5, 1.5, 1.5, 3.0, 3.0, 6.0]
    weight = torch.tensor([[6.0, *ties, *near, *(-t for t in ties), *(-t for t in near), -6.0, 0.0, -0.0]])
    expected = torch.tensor([[6.0, *rounded, *nearest, *(-t for t in rounded), *(-t for t in nearest), -6.0, 0.0, -0.0]])
    decoded = quantize.dequantize_fp4(*quantize.quantize_fp4(weight), torch.float32)
    assert torch.equal(bits(decoded), bits(expected))


def test_what_was_decoded_is_encoded_without_loss():
    """Whatever scales a file has, the smallest ones that fit hold its values too."""
    packed = torch.randint(-128, 128, (64, 64), dtype=torch.int8)
    values = quantize.dequantize_fp4(packed, random_scale(64, 4), torch.float32)
    assert torch.equal(quantize.dequantize_fp4(*quantize.quantize_fp4(values), torch.float32), values)
    codes = random_codes(3, 130, 200)
    values = quantize.dequantize_fp8(codes, random_scale(3, 2, 2), torch.float32)
    assert torch.equal(quantize.dequantize_fp8(*quantize.quantize_fp8(values), torch.float32), values)


def test_fp8_halves_are_encoded_by_themselves():
    weight = torch.randn(2, 2 * 130, 64)
    weight[:, 130:] *= 2.0**20
    codes, scale = quantize.quantize_fp8(weight, row_parts=2)
    for half in range(2):
        rows = slice(130 * half, 130 * (half + 1))
        alone = quantize.quantize_fp8(weight[:, rows])
        assert torch.equal(bits(codes[:, rows]), bits(alone[0]))
        assert torch.equal(bits(scale[:, 2 * half : 2 * half + 2]), bits(alone[1]))


def test_nan_codes_are_found():
    codes = random_codes(4, 40)
    assert not quantize.has_nan_code(codes)
    for byte in (0x7F, 0xFF):
        bad = codes.view(torch.uint8).clone()
        bad[2, 17] = byte
        assert quantize.has_nan_code(bad.view(FP8))


def test_largest_scale():
    assert quantize.largest_scale(torch.tensor([[120, 130, 0]], dtype=torch.uint8).view(E8M0)) == 8.0
    assert quantize.largest_scale(torch.tensor([0], dtype=torch.uint8)) == 2.0**-127
    assert quantize.largest_scale(torch.tensor([[0.5, -3.0]])) == 3.0
    assert quantize.largest_scale(torch.empty(0, 3)) == 0.0
    nan = (torch.tensor([127, 255], dtype=torch.uint8).view(E8M0), torch.tensor([1.0, math.nan]))
    assert all(math.isnan(quantize.largest_scale(scale)) for scale in nan)
    assert quantize.largest_scale(torch.tensor([1.0, -math.inf])) == math.inf


def test_golden_vectors():
    golden = load_file(Path(__file__).parent / "golden" / "kernels.safetensors")
    packed, scale = golden["fp4_gemm.w"], golden["fp4_gemm.w_scale"]
    expected = golden["fp4_gemm.w_dequantised"]
    assert torch.equal(quantize.dequantize_fp4(packed, scale, torch.float32), expected)
    ties = golden["fp4_ties.x"]
    rounded = quantize.dequantize_fp4(*quantize.quantize_fp4(ties))
    assert torch.equal(bits(rounded), bits(golden["fp4_ties.y"]))
    ties = golden["fp8_ties.x"]
    rounded = quantize.dequantize_fp8(*quantize.quantize_fp8(ties))
    assert torch.equal(rounded, golden["fp8_ties.y"])


def test_tables_live_where_the_codes_are():
    """Whatever device is the default when a table is first needed."""
    tables = (quantize._fp4_pairs, quantize._fp8_table, quantize._e8m0_table)
    codes, packed = random_codes(4, 32), torch.zeros(4, 16, dtype=torch.int8)
    fp8_scale, fp4_scale = random_scale(1, 1), random_scale(4, 1)
    for table in tables:
        table.cache_clear()
    with torch.device("meta"):
        decoded = quantize.dequantize_fp8(codes, fp8_scale)
        unpacked = quantize.dequantize_fp4(packed, fp4_scale)
    assert torch.equal(decoded.double(), fp8_values(codes, fp8_scale).bfloat16().double())
    assert not unpacked.any()


@pytest.mark.parametrize("form", ["fp8", "fp4"])
@pytest.mark.parametrize("inference", [False, True])
def test_decoding_in_threads_is_decoding(form, inference):
    """A matrix large enough to be cut in two, inside a block too; and the number of threads is what it was."""
    threads = torch.get_num_threads()
    weight = torch.randn(1057, 2048)
    stored = quantize.quantize_fp8(weight) if form == "fp8" else quantize.quantize_fp4(weight)
    decode = quantize.dequantize_fp8 if form == "fp8" else quantize.dequantize_fp4
    expected = decode(*stored)
    torch.set_num_threads(2)
    try:
        with torch.inference_mode(inference):
            assert torch.equal(decode(*stored), expected)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
