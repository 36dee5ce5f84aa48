"""The SiTU-GLU kernels, as Triton's interpreter runs them, against the reference in float64. Run by test_kernels_interpreted.py in a process of its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.kernels.situ_glu import _SituGlu, reference
from driftline.kernels.situ_glu import triton as kernels

torch.set_num_threads(1)

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""The largest relative error of one element: a rounding of the dtype (the interpreter cuts to bfloat16 where a device rounds), or a few of fp32's."""


def halves(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    gate, up, grad = (scale * torch.randn(shape, generator=random) for scale in (6, 40, 1))
    return gate.to(dtype), up.to(dtype), grad.to(dtype)


def wide(gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor, *betas: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g, u = gate.double().requires_grad_(), up.double().requires_grad_()
    out = reference.situ_glu(g, u, *betas)
    return out.detach(), *torch.autograd.grad(out, (g, u), grad.double())


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float, floor: float = 1e-7) -> bool:
    return bool(((found.double() - wanted).abs() <= tolerance * wanted.abs() + floor).all())


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("betas", [(4.0, 25.0), (2.5, 3.0)])
def test_values_and_gradients_are_the_references_to_a_rounding(dtype: torch.dtype, betas: tuple[float, float]) -> None:
    gate, up, grad = halves((5, 700), dtype)
    out, d_gate, d_up = wide(gate, up, grad, *betas)
    found = kernels.forward(gate, up, *betas)
    assert found.dtype == dtype
    assert close(found, out, ROUNDING[dtype])
    # a derivative by the gate is a sum that passes through zero: its error is that of its terms
    for mine, exact in zip(kernels.backward(gate, up, grad, *betas), (d_gate, d_up), strict=True):
        assert mine.dtype == dtype
        assert close(mine, exact, ROUNDING[dtype], floor=3e-5)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=2))
def test_any_finite_pair_is_bounded_and_right(pair: list[float]) -> None:
    gate, up = torch.tensor(pair[:1]), torch.tensor(pair[1:])
    out = kernels.forward(gate, up, 4.0, 25.0)
    assert out.abs().item() <= 100
    assert close(out, reference.situ_glu(gate.double(), up.double()), 2e-6, floor=1e-30)
    assert all(torch.isfinite(d).all() for d in kernels.backward(gate, up, torch.ones(1), 4.0, 25.0))


def test_around_zero_nothing_cancels() -> None:
    """The largest relative error over seven decades around where the series ends; a tanh made of (1 - e) alone fails this."""
    size = torch.logspace(-6, 1, 20_000, dtype=torch.float64).float()
    out = kernels.forward(torch.full_like(size, 3.0), size, 4.0, 25.0)
    assert close(out, reference.situ_glu(torch.full_like(size, 3.0).double(), size.double()), 1.5e-6, floor=0)


def test_halves_of_a_fused_projection_are_read_where_they_are() -> None:
    gate, up, grad = halves((3, 4, 70), torch.float32)
    fused = torch.cat([gate, up], -1)
    left, right = fused[..., :70], fused[..., 70:]
    assert torch.equal(kernels.forward(left, right, 4.0, 25.0), kernels.forward(gate, up, 4.0, 25.0))
    for one, other in zip(kernels.backward(left, right, grad, 4.0, 25.0), kernels.backward(gate, up, grad, 4.0, 25.0), strict=True):
        assert torch.equal(one, other)
    turned = gate.mT.contiguous().mT
    assert torch.equal(kernels.forward(turned, up, 4.0, 25.0), kernels.forward(gate, up, 4.0, 25.0))


def test_an_element_has_its_bits_whatever_is_beside_it() -> None:
    gate, up, _ = halves((9, 512), torch.bfloat16)
    whole = kernels.forward(gate, up, 4.0, 25.0)
    assert all(torch.equal(kernels.forward(gate[i], up[i], 4.0, 25.0), whole[i]) for i in range(9))


def test_nothing_is_nothing() -> None:
    none = torch.empty(0, 8)
    assert kernels.forward(none, none, 4.0, 25.0).shape == (0, 8)
    assert kernels.backward(none, none, none, 4.0, 25.0)[0].shape == (0, 8)


def test_the_op_on_a_device_carries_these_gradients() -> None:
    gate, up, grad = halves((3, 40), torch.float32)
    leaves = (gate.requires_grad_(), up.requires_grad_())
    found = torch.autograd.grad(_SituGlu.apply(gate, up, 4.0, 25.0), leaves, grad)
    for mine, exact in zip(found, wide(gate.detach(), up.detach(), grad, 4.0, 25.0)[1:], strict=True):
        assert close(mine, exact, 2e-6, floor=3e-5)
