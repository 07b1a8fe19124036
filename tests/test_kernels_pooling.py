"""Gated pooling against loops over single numbers, with slots and entries missing."""

import math

import pytest
import torch

from dsv4.kernels.pooling import pool, pool_gates
from dsv4.testing import assert_close


@pytest.mark.parametrize(("entries", "slots", "width"), [(1, 1, 1), (3, 8, 5), (2, 3, 16), (0, 4, 6)])
def test_against_single_numbers(entries: int, slots: int, width: int):
    logits = 3 * torch.randn(2, entries, slots, width, dtype=torch.float64)
    kv = torch.randn(2, entries, slots, width, dtype=torch.float64)
    present = torch.rand(2, entries, slots) < 0.6
    gates = pool_gates(logits, present)
    pooled = pool(kv, gates)
    assert gates.shape == kv.shape
    assert pooled.shape == (2, entries, width)
    for b in range(2):
        for e in range(entries):
            for d in range(width):
                weights = [math.exp(v) if p else 0.0 for v, p in zip(logits[b, e, :, d].tolist(), present[b, e].tolist(), strict=True)]
                total = sum(weights) or 1.0
                for gate, weight in zip(gates[b, e, :, d].tolist(), weights, strict=True):
                    assert gate == pytest.approx(weight / total, rel=1e-12)
                expected = sum(w / total * v for w, v in zip(weights, kv[b, e, :, d].tolist(), strict=True))
                assert pooled[b, e, d].item() == pytest.approx(expected, rel=1e-10, abs=1e-12)


def test_gates_sum_to_one_or_to_nothing():
    present = torch.tensor([[[True, True, False], [False, True, False], [False, False, False]]])
    gates = pool_gates(torch.randn(1, 3, 3, 7), present)
    assert_close(gates.sum(-2), torch.tensor([1.0, 1.0, 0.0])[None, :, None].expand(1, 3, 7), "float32 op")
    assert bool((gates.masked_select(~present.unsqueeze(-1)) == 0).all())


def test_logits_of_any_size_give_finite_values_and_gradients():
    present = torch.tensor([[[True, False], [True, True], [False, False]]])
    for size in (0.0, 1e4, 1e30):
        logits = (torch.randn(1, 3, 2, 4) * size).requires_grad_()
        kv = torch.randn(1, 3, 2, 4, requires_grad=True)
        out = pool(kv, pool_gates(logits, present))
        grads = torch.autograd.grad(out.sum(), (logits, kv))
        for value in (out, *grads):
            assert bool(value.isfinite().all())
        assert torch.equal(out[:, 2], torch.zeros(1, 4))


def test_gradients_numerically():
    present = torch.tensor([[[True, True, False], [True, False, True]]])
    logits = torch.randn(1, 2, 3, 2, dtype=torch.float64, requires_grad=True)
    kv = torch.randn(1, 2, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: pool(a, pool_gates(b, present)), (kv, logits))


def test_float32_out_of_bfloat16():
    logits, kv = torch.randn(2, 3, 4, 5).bfloat16(), torch.randn(2, 3, 4, 5).bfloat16()
    present = torch.ones(2, 3, 4, dtype=torch.bool)
    gates = pool_gates(logits, present)
    assert gates.dtype == torch.float32
    assert torch.equal(gates, pool_gates(logits.float(), present))
    assert torch.equal(pool(kv, gates), pool(kv.float(), gates))
