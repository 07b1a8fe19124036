"""The RMS norm, the partial interleaved rotary against complex numbers, and the rotary tables."""

import math

import pytest
import torch

from dsv4.kernels import norm_rotary as op
from dsv4.kernels.norm_rotary import rms_norm, rotate, rotate_back
from dsv4.rope import Rotary, frequencies
from dsv4.testing import assert_close

YARN = {
    "rope_type": "yarn",
    "rope_theta": 160000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}


@pytest.mark.parametrize("width", [1, 5, 64])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms_norm(width: int, eps: float):
    x, weight = (
        torch.randn(2, 3, width, dtype=torch.float64),
        torch.randn(width, dtype=torch.float64),
    )
    for w in (weight, None):
        got = rms_norm(x, w, eps)
        for index in ((0, 0), (1, 2)):
            row = x[index].tolist()
            scale = 1 / math.sqrt(sum(v * v for v in row) / width + eps)
            expected = [v * scale * (1.0 if w is None else w[i].item()) for i, v in enumerate(row)]
            assert_close(got[index], torch.tensor(expected, dtype=torch.float64), "float64")


def test_rms_norm_of_zeros_and_of_large_numbers():
    x = torch.stack((torch.zeros(8), torch.full((8,), 1e18))).requires_grad_()
    y = rms_norm(x, torch.ones(8), 1e-6)
    assert_close(y, torch.stack((torch.zeros(8), torch.ones(8))), "float32 op")
    y.sum().backward()
    assert bool(x.grad.isfinite().all())


def test_rms_norm_rounds_once():
    x, weight = torch.randn(50, 64).bfloat16(), 1 + 0.2 * torch.randn(64)
    assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm(x.float(), weight, 1e-6).bfloat16())
    assert torch.equal(rms_norm(x, None, 1e-6), rms_norm(x.float(), None, 1e-6).bfloat16())


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Adjacent pairs of the last channels as complex numbers, times e^(i angle)."""
    r = 2 * angles.shape[-1]
    pairs = torch.view_as_complex(x[..., -r:].unflatten(-1, (-1, 2)).clone(memory_format=torch.contiguous_format))
    rotated = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    return torch.cat((x[..., :-r], rotated), dim=-1)


@pytest.mark.parametrize(("width", "r"), [(2, 2), (16, 8), (13, 4), (8, 8), (64, 2)])
def test_rotate(width: int, r: int):
    x, angles = (
        torch.randn(2, 5, 3, width, dtype=torch.float64),
        torch.randn(2, 5, 1, r // 2, dtype=torch.float64),
    )
    got = rotate(x, angles.cos(), angles.sin())
    assert_close(got, turned(x, angles), "float64")
    assert torch.equal(got[..., : width - r], x[..., : width - r])
    assert_close(rotate_back(got, angles.cos(), angles.sin()), x, "float64")
    assert_close(got.norm(dim=-1), x.norm(dim=-1), "float64")


@pytest.mark.parametrize(("width", "r"), [(13, 4), (5, 4), (8, 8), (9, 0)])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 2, 1), (2, 3, 2)])
def test_rotate_rows_that_begin_anywhere(shape, width: int, r: int):
    memory = torch.randn(torch.Size(shape).numel() * width + 1)
    angles = torch.randn(*shape[:2], 1, r // 2)
    for x in (memory[:-1].view(*shape, width), memory[1:].view(*shape, width)):
        got = rotate(x, angles.cos(), angles.sin())
        assert_close(got, turned(x.clone().double(), angles.double()) if r else x, "float32 op")


@pytest.mark.parametrize(("channel", "moved"), [(0, [0]), (7, [7]), (8, [8, 9]), (9, [8, 9]), (14, [14, 15])])
def test_pairs_are_neighbours_at_the_end(channel: int, moved: list[int]):
    """Reported fault: half-split pairs, or the leading channels."""
    x = torch.zeros(16)
    x[channel] = 1.0
    cos, sin = Rotary(8, {"rope_theta": 1e4})(torch.tensor(1))
    assert rotate(x, cos, sin).nonzero().flatten().tolist() == moved


def test_scores_depend_on_the_distance_alone():
    rotary = Rotary(8, YARN).double()
    q, k = torch.randn(16, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
    scores = [rotate(q, *rotary(torch.tensor(p + 5))) @ rotate(k, *rotary(torch.tensor(p))) for p in (0, 1, 77, 3000)]
    assert_close(torch.stack(scores), scores[0].expand(4), "float64")


def test_rotate_in_bfloat16_rounds_once():
    x, angles = torch.randn(4, 16).bfloat16(), torch.randn(4, 4)
    assert torch.equal(
        rotate(x, angles.cos(), angles.sin()),
        rotate(x.float(), angles.cos(), angles.sin()).bfloat16(),
    )


# Tables.


@pytest.mark.parametrize("theta", [1e4, 4e4, 16e4])
def test_plain_frequencies(theta: float):
    expected = [theta ** (-2 * i / 16) for i in range(8)]
    assert frequencies(16, {"rope_theta": theta}).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("original", [16, 64, 4096, 65536])
@pytest.mark.parametrize("factor", [2.0, 16.0])
def test_yarn_frequencies(original: int, factor: float):
    """High frequencies stay, low ones are divided by the factor, and the ramp between is linear in
    the channel.
    """
    width, theta = 64, 160000.0
    got = frequencies(width, YARN | {"factor": factor, "original_max_position_embeddings": original}).tolist()

    def channel(turns: float) -> float:
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(channel(32)), 0), min(math.ceil(channel(1)), width - 1)
    for i, frequency in enumerate(got):
        plain = theta ** (-2 * i / width)
        share = min(max((i - low) / max(high - low, 0.001), 0.0), 1.0)
        assert frequency == pytest.approx(plain * ((1 - share) + share / factor), rel=2e-6)
    assert got[-1] == pytest.approx(theta ** (-2 * 31 / width) / factor, rel=1e-5)


@pytest.mark.parametrize("position", [0, 7, 23, 3000, 1_000_000])
def test_no_magnitude_of_yarn_but_the_configs(position: int):
    """Reported fault: cos and sin times 0.1 ln(16) + 1."""
    for factor, rope in (
        (1.0, YARN),
        (1.0, YARN | {"attention_factor": None}),
        (1.3, YARN | {"attention_factor": 1.3}),
    ):
        cos, sin = Rotary(16, rope)(torch.tensor(position))
        assert_close(cos.square() + sin.square(), torch.full((8,), factor**2), "float32 op")


def test_tables_stay_float32_in_a_bfloat16_model():
    rotary = Rotary(16, YARN)
    cast = Rotary(16, YARN).bfloat16()
    positions = torch.arange(3000, 3020)
    for value, other in zip(cast(positions), rotary(positions), strict=True):
        assert value.dtype == torch.float32
        assert torch.equal(value, other)


@pytest.mark.parametrize("shape", [(1, 1, 6), (2, 5, 3, 6), (1, 1, 1, 6), (0, 4, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk", [1, 13, 1 << 18])
def test_without_a_gradient_it_is_the_same(monkeypatch, shape, dtype, chunk: int):
    """One row, stretches of rows, pairs turned in place; what was given is not written to."""
    monkeypatch.setattr(op, "CHUNK", chunk)
    x, weight = torch.randn(shape).to(dtype), torch.randn(6, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    angles = torch.randn(*shape[:-1], 2, dtype=weight.dtype)
    given, limit = x.clone(), "float64" if dtype == torch.float64 else "float32 op"
    for w in (weight, None):
        with torch.enable_grad():
            recorded = x.clone().requires_grad_()
            expected = rms_norm(recorded, w, 1e-6)
            turned = rotate(expected, angles.cos(), angles.sin())
        with torch.no_grad():
            assert_close(rms_norm(x, w, 1e-6), expected, limit)
            assert_close(rotate(rms_norm(x, w, 1e-6), angles.cos(), angles.sin()), turned, limit)
            both = op.norm_and_rotate(x, w, angles.cos(), angles.sin(), 1e-6)
            assert_close(both, rotate(rms_norm(x, w, 1e-6), angles.cos(), angles.sin()), "equal")
    assert torch.equal(x, given)


@pytest.mark.parametrize("row", [[0.0, 0.0], [1e30, 1.0], [float("nan"), 1.0], [float("inf"), 1.0]])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_one_row_of_extremes_is_as_in_torch(row: list[float], eps: float):
    x = torch.tensor([row])
    with torch.no_grad():
        found = rms_norm(x, None, eps)
    with torch.enable_grad():
        expected = rms_norm(x.requires_grad_(), None, eps).detach()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
