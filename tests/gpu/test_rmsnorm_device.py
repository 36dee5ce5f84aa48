"""RMSNorm on a CUDA device: K3's rounding, the same bits for a row in any batch, every time; and that each check can say no."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from dense_device_cases import (
    batch_invariant,
    captured,
    drawn,
    prefix_stable,
    relative_error,
    repeats_alike,
    written,
)

from driftline.kernels.rmsnorm import reference, rmsnorm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WIDTHS = (128, 512, 1536, 3584, 7168)
ROUNDED_TWICE = 3e-3
"""Relative error of results that are rounded to 8 bits twice: 2^-9 sqrt(2 / 3), and something over."""
ROUNDED_ONCE = 2e-3


def weight_of(d: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (1 + drawn(d, dtype=torch.float32, scale=0.3, seed=5)).to(dtype)


@pytest.mark.parametrize("d", [*WIDTHS, 100, 9000])
def test_it_is_the_reference_but_for_the_order_of_the_sum(d: int) -> None:
    x, weight = drawn(2000, d), weight_of(d)
    out, wanted = rmsnorm(x, weight, 1e-5), reference.rmsnorm(x, weight, 1e-5)
    assert relative_error(out, reference.rmsnorm(x.double(), weight.double(), 1e-5)) < ROUNDED_TWICE
    assert (out != wanted).float().mean() < 0.01
    once = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5) * weight.float()).bfloat16()
    assert (out != once).float().mean() > 0.2, "the other rounding would be seen"
    assert written(lambda: [rmsnorm(x, weight, 1e-5)])


@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_are_those_of_the_formula(d: int, dtype: torch.dtype) -> None:
    """To the weight, of the normalised rows as they were rounded, which is why its bound is not closer."""
    x, weight, dy = drawn(3001, d, dtype=dtype), weight_of(d, dtype), drawn(3001, d, dtype=dtype, seed=2)
    x.requires_grad_()
    weight.requires_grad_()

    def both() -> Sequence[torch.Tensor]:
        return torch.autograd.grad(rmsnorm(x, weight, 1e-5), (x, weight), dy)

    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    bound = ROUNDED_ONCE if dtype == torch.bfloat16 else 1e-5
    for ours, theirs in zip(both(), torch.autograd.grad(reference.rmsnorm(*wide, 1e-5), wide, dy.double()), strict=True):
        assert relative_error(ours, theirs) < 2 * bound
    assert relative_error(both()[0] * (1 + 4 * bound), both()[0]) > 2 * bound, "and this is what that would miss"
    assert written(both)


@pytest.mark.parametrize("d", WIDTHS)
def test_a_row_has_the_same_bits_in_any_batch_and_a_sum_that_knows_the_batch_would_be_seen(d: int) -> None:
    x, weight, dy = drawn(600, d, dtype=torch.float32), weight_of(d, torch.float32), drawn(600, d, dtype=torch.float32, seed=2)

    def both(rows: torch.Tensor, up: torch.Tensor) -> Sequence[torch.Tensor]:
        rows = rows.detach().requires_grad_()
        out = rmsnorm(rows, weight, 1e-5)
        return [out.detach(), *torch.autograd.grad(out, rows, up)]

    assert batch_invariant(both, x, dy)
    assert prefix_stable(both, x, dy)

    def otherwise(rows: torch.Tensor, up: torch.Tensor) -> Sequence[torch.Tensor]:
        return both(rows, up * (1 + 2**-20 * (rows.shape[0] > 64)))

    assert not batch_invariant(otherwise, x, dy)
    assert not prefix_stable(lambda rows, up: both(rows - rows.mean(0), up), x, dy)


def test_a_thousand_repeats_have_one_result_and_another_order_would_be_seen() -> None:
    x, weight, dy = drawn(700, 7168), weight_of(7168).requires_grad_(), drawn(700, 7168, seed=2)
    x.requires_grad_()
    assert repeats_alike(lambda: torch.autograd.grad(rmsnorm(x, weight, 1e-5), (x, weight), dy), 1000)
    fine = torch.nn.Parameter(weight.detach().float())
    turn = iter(range(10))

    def shuffled() -> Sequence[torch.Tensor]:
        order = torch.arange(700, device="cuda") if next(turn) != 7 else torch.arange(700, device="cuda").flip(0)
        return torch.autograd.grad(rmsnorm(x[order], fine, 1e-5), fine, dy[order])

    assert not repeats_alike(shuffled, 10), "the weight's gradient is summed in the order of the rows"


def test_rows_that_lie_apart_are_normalised_where_they_are() -> None:
    whole = drawn(300, 576)
    assert torch.equal(rmsnorm(whole[:, :512], weight_of(512), 1e-6), rmsnorm(whole[:, :512].contiguous(), weight_of(512), 1e-6))
    heads = drawn(50, 12, 128)
    assert torch.equal(rmsnorm(heads, weight_of(128), 1e-5).view(-1, 128), rmsnorm(heads.view(-1, 128), weight_of(128), 1e-5))


def test_it_can_be_captured_and_replayed_on_other_values() -> None:
    x, weight = drawn(64, 7168), weight_of(7168)
    replay = captured(lambda: [rmsnorm(x, weight, 1e-5)])
    x.copy_(drawn(64, 7168, seed=9))
    (out,) = replay()
    assert torch.equal(out, rmsnorm(x, weight, 1e-5))
