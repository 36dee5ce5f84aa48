"""The RMSNorm kernels, as Triton's interpreter runs them on the CPU, against the reference. Run by test_kernels_interpreted.py in a process of its own.

Rows of two bytes an element are fp16 here, because the interpreter cuts where it should round to bfloat16."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.kernels.rmsnorm import triton as kernels
from driftline.kernels.rmsnorm.autograd import RmsNorm
from driftline.kernels.rmsnorm.reference import rmsnorm

torch.set_num_threads(1)


def drawn(rows: int, d: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    spread = torch.exp(torch.randn(rows, 1, generator=random))
    return ((spread * torch.randn(rows, d, generator=random)).to(dtype), (1 + 0.3 * torch.randn(d, generator=random)).to(dtype),
            torch.randn(rows, d, generator=random).to(dtype))


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 70), d=st.integers(1, 300), seed=st.integers(0, 99))
def test_any_shape_is_normalised_cast_and_then_multiplied(rows: int, d: int, seed: int) -> None:
    """Equal to the reference but where the order of the sum moves the root by a last place and a rounding with it."""
    x, weight, _ = drawn(rows, d, seed=seed)
    out, wanted = kernels.forward(x, weight, 1e-5), rmsnorm(x, weight, 1e-5)
    assert out.dtype == x.dtype
    differing = (out != wanted).float().mean()
    assert differing < 0.02
    assert bool(((out.float() - wanted.float()).abs() <= 2**-9 * wanted.float().abs() + 2**-24).all())


def test_the_cast_comes_before_the_weight() -> None:
    x, weight, _ = drawn(64, 256)
    normal = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    once = (normal * weight.float()).half()
    out = kernels.forward(x, weight, 1e-5)
    assert (out != once).float().mean() > 0.2, "the two orders differ on a good part of the elements"
    assert (out != normal.half() * weight).float().mean() < 0.01


@pytest.mark.parametrize("d", [128, 512, 1536, 3584, 7168, 9000])
def test_every_pinned_shape_takes_its_rows(d: int) -> None:
    x, weight, dy = drawn(5, d, torch.float32)
    wide = [t.double().requires_grad_() for t in (x, weight)]
    wanted = rmsnorm(*wide, 1e-5)
    torch.testing.assert_close(kernels.forward(x, weight, 1e-5), wanted.detach().float(), rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(wanted, wide, dy.double())
    for ours, theirs in zip(kernels.backward(x, weight, dy, 1e-5), gradients, strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-4, atol=1e-4)


@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 90), d=st.integers(1, 200), programs=st.integers(1, 9), seed=st.integers(0, 99))
def test_the_gradients_are_those_of_the_reference_however_many_programs_share_the_rows(rows: int, d: int, programs: int, seed: int) -> None:
    x, weight, dy = drawn(rows, d, torch.float32, seed)
    shape = kernels.Shape(256, 4, warps=4, back_warps=4, programs=programs)
    wide = [t.double().requires_grad_() for t in (x, weight)]
    gradients = torch.autograd.grad(rmsnorm(*wide, 1e-5), wide, dy.double())
    for ours, theirs in zip(kernels.backward(x, weight, dy, 1e-5, shape=shape), gradients, strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=2e-4, atol=2e-4)


def test_a_row_has_the_same_bits_alone_in_any_batch_and_anywhere_in_it() -> None:
    x, weight, dy = drawn(75, 200)
    whole, (dx, _) = kernels.forward(x, weight, 1e-5), kernels.backward(x, weight, dy, 1e-5)
    for rows in (slice(0, 1), slice(5, 7), slice(3, 67), slice(74, 75)):
        assert torch.equal(kernels.forward(x[rows], weight, 1e-5), whole[rows])
        assert torch.equal(kernels.backward(x[rows], weight, dy[rows], 1e-5, to_weight=False)[0], dx[rows])


def test_rows_may_lie_apart_and_nothing_else_is_read_or_written() -> None:
    whole = torch.full((12, 80), float("nan"))
    x, weight, dy = drawn(12, 48, torch.float32)
    whole[:, 16:64] = x
    apart = whole[:, 16:64]
    assert torch.equal(kernels.forward(apart, weight, 1e-5), kernels.forward(x, weight, 1e-5))
    for ours, theirs in zip(kernels.backward(apart, weight, dy, 1e-5), kernels.backward(x, weight, dy, 1e-5), strict=True):
        assert torch.equal(ours, theirs)


def test_a_weight_of_another_dtype_is_rounded_to_the_rows() -> None:
    x, weight, dy = drawn(9, 48)
    fine = weight.float() * 1.0001
    assert torch.equal(kernels.forward(x, fine, 1e-5), kernels.forward(x, fine.half(), 1e-5))
    dweight = kernels.backward(x, fine, dy, 1e-5)[1]
    assert dweight is not None
    assert dweight.dtype == torch.float32
    torch.testing.assert_close(dweight.half(), kernels.backward(x, fine.half(), dy, 1e-5)[1], rtol=1e-2, atol=1e-3)


def test_the_autograd_function_asks_only_for_what_is_needed() -> None:
    x, weight, dy = drawn(9, 48, torch.float32)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(RmsNorm.apply(x, weight, 1e-5), x, dy)
    assert torch.equal(dx, kernels.backward(x, weight, dy, 1e-5)[0])
    expanded = torch.ones(()).expand(9, 48)
    torch.testing.assert_close(torch.autograd.grad(RmsNorm.apply(x, weight, 1e-5), x, expanded)[0], kernels.backward(x, weight, torch.ones(9, 48), 1e-5)[0])


def test_no_rows() -> None:
    x, weight, dy = drawn(0, 48)
    assert kernels.forward(x, weight, 1e-5).shape == (0, 48)
    dx, dweight = kernels.backward(x, weight, dy, 1e-5)
    assert dx.shape == (0, 48)
    assert dweight is not None
    assert not bool(dweight.any())
