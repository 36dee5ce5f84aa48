"""RMSNorm: the formula, and the rounding order that K3's numbers depend on."""

from __future__ import annotations

import pytest
import torch

from driftline.kernels.rmsnorm import rmsnorm

torch.set_num_threads(1)


def test_formula_in_double_precision() -> None:
    x = torch.randn(4, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight = torch.linspace(0.5, 2, 12, dtype=torch.float64)
    want = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(rmsnorm(x, weight, 1e-5), want, rtol=0, atol=1e-14)


def test_bfloat16_is_normalised_in_single_then_cast_then_multiplied() -> None:
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(64, 128, generator=rng).bfloat16()
    weight = (1 + 0.3 * torch.randn(128, generator=rng)).bfloat16()
    out = rmsnorm(x, weight, 1e-5)
    normal = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, normal.bfloat16() * weight)
    one_cast = (normal * weight.float()).bfloat16()
    differing = (out != one_cast).float().mean()
    assert 0.2 < differing < 0.8, "the two orders must differ, or this test pins nothing"
    assert ((out.float() - one_cast.float()).abs() <= 2.0**-7 * one_cast.float().abs()).all()


def test_the_sum_of_squares_of_a_large_bfloat16_row_does_not_overflow_to_zero() -> None:
    x = torch.full((1, 8), 3e18).bfloat16()
    torch.testing.assert_close(rmsnorm(x, torch.ones(8).bfloat16(), 1e-5), torch.ones(1, 8).bfloat16())


def test_epsilon_matters_for_small_rows() -> None:
    x = torch.full((1, 8), 1e-3)
    weight = torch.ones(8)
    torch.testing.assert_close(rmsnorm(x, weight, 1e-5)[0, 0], torch.tensor(1e-3 / 1.1e-5**0.5))
    torch.testing.assert_close(rmsnorm(x, weight, 1e-6)[0, 0], torch.tensor(1e-3 / 2e-6**0.5))


@pytest.mark.parametrize(
    ("x", "weight", "eps", "what"),
    [
        (torch.zeros(3, 8), torch.ones(7), 1e-5, r"weight has shape \(7,\)"),
        (torch.zeros(3, 8), torch.ones(1, 8), 1e-5, r"weight must be \[D\]"),
        (torch.zeros(3, 0), torch.ones(0), 1e-5, "not 0"),
        (torch.zeros(3, 8).int(), torch.ones(8), 1e-5, "x is torch.int32"),
        (torch.zeros(3, 8), torch.ones(8), -1e-5, "eps is -1e-05"),
    ],
)
def test_what_does_not_go_together_is_refused(x: torch.Tensor, weight: torch.Tensor, eps: float, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        rmsnorm(x, weight, eps)
