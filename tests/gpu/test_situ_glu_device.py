"""SiTU-GLU on a CUDA device: the kernels against float64, and through autograd."""

from __future__ import annotations

import pytest
import torch

from driftline.kernels.situ_glu import reference, situ_glu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("shape", [(33, 6144), (3, 5, 700), (1,)])
def test_values_and_gradients_are_float64s_to_a_rounding(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    random = torch.Generator("cuda").manual_seed(0)
    gate, up, grad = ((scale * torch.randn(shape, device="cuda", generator=random)).to(dtype) for scale in (6, 40, 1))
    gate.requires_grad_()
    up.requires_grad_()
    out = situ_glu(gate, up)
    found = torch.autograd.grad(out, (gate, up), grad)
    wide = [t.detach().double().requires_grad_() for t in (gate, up)]
    right = reference.situ_glu(*wide)
    wanted = torch.autograd.grad(right, wide, grad.double())
    for mine, exact, floor in zip((out, *found), (right, *wanted), (1e-7, 3e-5, 3e-5), strict=True):
        assert mine.dtype == dtype
        assert ((mine.double() - exact).abs() <= ROUNDING[dtype] * exact.abs() + floor).all()
    wrong = situ_glu(up.detach(), gate.detach())
    assert not ((wrong.double() - right).abs() <= ROUNDING[dtype] * right.abs() + 1e-7).all(), "swapped halves would be seen"


def test_halves_of_one_projection_and_any_batch_give_the_same_bits() -> None:
    fused = torch.randn(512, 12_288, device="cuda").bfloat16()
    whole = situ_glu(fused[:, :6144], fused[:, 6144:])
    assert torch.equal(whole, situ_glu(fused[:, :6144].contiguous(), fused[:, 6144:].contiguous()))
    for count in (1, 2, 7, 64):
        assert torch.equal(situ_glu(fused[-count:, :6144], fused[-count:, 6144:]), whole[-count:])
    differs = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        differs |= (situ_glu(fused[:8, :6144], fused[:8, 6144:]) != whole[:8]).any()
    assert not differs.item()
