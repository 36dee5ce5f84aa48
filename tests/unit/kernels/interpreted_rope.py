"""The rotation's kernel, as Triton's interpreter runs it on the CPU: the reference's operations, so the reference's bits."""

from __future__ import annotations

import pytest
import torch

from driftline.kernels.rope import autograd, reference, triton

torch.set_num_threads(1)


def drawn(shape: tuple[int, ...], half: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    angle = torch.rand(*shape[:-2], half, generator=random) * 100
    return torch.randn(*shape, generator=random).to(dtype), angle.cos(), angle.sin()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("shape", "half"), [((2, 3, 4, 16), 8), ((100, 3, 64), 32), ((2, 5, 2, 48), 24), ((7, 2, 40), 6), ((1, 1, 1, 2), 1)])
def test_it_gives_the_bits_of_the_reference_whatever_the_heads_and_the_part_that_is_turned(shape: tuple[int, ...], half: int, interleaved: bool) -> None:
    x, cos, sin = drawn(shape, half)
    found = triton.rotated(x, cos, sin, interleaved, back=False)
    assert torch.equal(found, reference.rotate(x, cos, sin, interleaved))
    assert not torch.equal(found, reference.rotate(x, cos, sin, not interleaved)) or half == 1


@pytest.mark.parametrize("interleaved", [False, True])
def test_its_gradient_is_the_references(interleaved: bool) -> None:
    x, cos, sin = drawn((2, 3, 4, 40), 16)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    autograd.rotate(ours, cos, sin, interleaved).backward(grad)
    reference.rotate(theirs, cos, sin, interleaved).backward(grad)
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad)


def test_half_precision_is_rounded_once() -> None:
    x, cos, sin = drawn((30, 2, 32), 16, torch.float16)
    assert torch.equal(triton.rotated(x, cos, sin, False, back=False), reference.rotate(x.float(), cos, sin, False).half())


def test_no_rows_give_no_rows() -> None:
    assert triton.rotated(*drawn((0, 2, 32), 16), False, back=False).shape == (0, 2, 32)
