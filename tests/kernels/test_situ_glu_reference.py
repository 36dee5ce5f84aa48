"""SiTU-GLU: formula, bound, closed-form gradient."""

from __future__ import annotations

import math

import torch

from driftline.kernels.situ_glu import situ_glu

torch.set_num_threads(1)


def test_formula() -> None:
    gate, up = torch.tensor([1.5], dtype=torch.float64), torch.tensor([-7.0], dtype=torch.float64)
    want = 4 * math.tanh(1.5 / 4) / (1 + math.exp(-1.5)) * 25 * math.tanh(-7 / 25)
    assert math.isclose(situ_glu(gate, up).item(), want, rel_tol=1e-14)


def test_bounded_by_the_product_of_the_betas_whatever_comes_in() -> None:
    gate, up = torch.meshgrid(torch.tensor([-1e30, -1e4, 0.0, 1e4, 1e30]), torch.tensor([-1e30, -30.0, 30.0, 1e30]), indexing="ij")
    out = situ_glu(gate, up)
    assert torch.isfinite(out).all()
    assert out.abs().max() == 100
    assert situ_glu(gate, up, 2.0, 3.0).abs().max() == 6


def test_half_precision_is_computed_wide_and_cast_once() -> None:
    rng = torch.Generator().manual_seed(0)
    gate, up = torch.randn(1000, generator=rng).bfloat16(), 10 * torch.randn(1000, generator=rng).bfloat16()
    assert torch.equal(situ_glu(gate, up), situ_glu(gate.float(), up.float()).bfloat16())


def test_gradient_is_the_closed_form() -> None:
    rng = torch.Generator().manual_seed(0)
    gate, up, grad = (scale * torch.randn(200, generator=rng, dtype=torch.float64) for scale in (6, 40, 1))
    gate.requires_grad_()
    up.requires_grad_()
    situ_glu(gate, up).backward(grad)
    g, u = gate.detach(), up.detach()
    tg, s, tu = torch.tanh(g / 4), torch.sigmoid(g), torch.tanh(u / 25)
    torch.testing.assert_close(gate.grad, ((1 - tg**2) * s + 4 * tg * s * (1 - s)) * 25 * tu * grad, rtol=0, atol=1e-12)
    torch.testing.assert_close(up.grad, (1 - tu**2) * 4 * tg * s * grad, rtol=0, atol=1e-12)
