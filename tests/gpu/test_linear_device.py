"""The product on a CUDA device: exact enough, the same bits from every tile, for a row in any batch, every time; and that each check can say no."""

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

from driftline.kernels.linear import linear

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

K = 7168
ROUNDED_ONCE = 2e-3
"""Relative error of results that are rounded to 8 bits: 2^-9 / sqrt(3) where all rounding errors are as likely, and something over."""
SUMMED = 1e-4
"""Of an fp32 sum of 7,168 products on the matrix units, which cut what they add to the largest of it."""
IN_FULL = 2e-5
"""Of the same in fp32 throughout. TF32 operands would give 3e-4."""


@pytest.mark.parametrize("shape", [(512, 7168), (8192, 576), (65, 1536), (1, 3584), (130, 100)])
def test_it_is_the_product(shape: tuple[int, int]) -> None:
    rows, columns = shape
    x, weight = drawn(rows, K), drawn(columns, K, scale=K**-0.5, seed=1)
    wanted = x.double() @ weight.double().t()
    error = relative_error(linear(x, weight), wanted)
    assert error < ROUNDED_ONCE
    assert error < 1.05 * relative_error(torch.nn.functional.linear(x, weight), wanted)
    assert relative_error(linear(x, weight, out_dtype=torch.float32), wanted) < SUMMED
    assert written(lambda: [linear(x, weight)])


def test_fp32_is_multiplied_in_full_and_tf32_would_be_seen() -> None:
    x, weight = drawn(300, K, dtype=torch.float32), drawn(896, K, dtype=torch.float32, seed=1)
    wanted = x.double() @ weight.double().t()
    assert relative_error(linear(x, weight), wanted) < IN_FULL

    def cut(t: torch.Tensor) -> torch.Tensor:
        return (t.view(torch.int32) & -8192).view(torch.float32)

    assert relative_error(linear(cut(x), cut(weight)), wanted) > IN_FULL


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_are_the_products_they_should_be(dtype: torch.dtype) -> None:
    rows, columns, depth = (2048, 3584, 7168) if dtype == torch.bfloat16 else (300, 200, 500)
    x, weight, dy = drawn(rows, depth, dtype=dtype), drawn(columns, depth, scale=depth**-0.5, dtype=dtype, seed=1), drawn(rows, columns, dtype=dtype, seed=2)
    x.requires_grad_()
    weight.requires_grad_()

    def both() -> Sequence[torch.Tensor]:
        return torch.autograd.grad(linear(x, weight), (x, weight), dy)

    bound = ROUNDED_ONCE if dtype == torch.bfloat16 else IN_FULL
    dx, dweight = both()
    assert relative_error(dx, dy.double() @ weight.detach().double()) < bound
    assert relative_error(dweight, dy.double().t() @ x.detach().double()) < bound
    assert written(both)


@pytest.mark.parametrize(("a_rows", "b_rows"), [(True, True), (True, False), (False, False)])
def test_every_tile_gives_the_same_bits(a_rows: bool, b_rows: bool) -> None:
    """What the choice of a tile by the number of rows rests on."""
    from driftline.kernels.linear.tiles import HALF
    from driftline.kernels.linear.triton import matmul

    for rows, columns in ((200, 840), (512, 576)):
        a, b = drawn(rows, K), drawn(columns, K, seed=1)
        a, b = a if a_rows else a.t().contiguous(), b if b_rows else b.t().contiguous()
        outs = [matmul(a, b, drawn(rows, columns, dtype=torch.float32), a_rows=a_rows, b_rows=b_rows, tile=tile) for tile in HALF]
        assert [torch.equal(out, outs[0]) for out in outs] == [True] * len(HALF)


def test_a_sum_in_pieces_is_the_sum_bit_for_bit() -> None:
    from driftline.kernels.linear.triton import matmul

    a, b = drawn(300, K), drawn(520, K, seed=1)
    whole = matmul(a, b, drawn(300, 520, dtype=torch.float32))
    for size in (64, 1024, 2064):
        parts = drawn(300, 520, dtype=torch.float32)
        for start in range(0, K, size):
            matmul(a[:, start : start + size], b[:, start : start + size], parts, accumulate=start > 0)
        assert torch.equal(parts, whole), size
    backwards = drawn(300, 520, dtype=torch.float32)
    for start in reversed(range(0, K, 1024)):
        matmul(a[:, start : start + 1024], b[:, start : start + 1024], backwards, accumulate=start < K - 1024)
    assert not torch.equal(backwards, whole), "another order is another sum, or this test pins nothing"


@pytest.mark.parametrize("columns", [576, 7168])
def test_a_row_has_the_same_bits_in_any_batch_and_a_split_sum_would_be_seen(columns: int) -> None:
    weight = drawn(columns, K, scale=K**-0.5, seed=1)
    x = drawn(600, K)
    assert batch_invariant(lambda rows: [linear(rows, weight, out_dtype=torch.float32)], x)
    assert batch_invariant(lambda rows: [linear(rows, weight)], x)
    assert prefix_stable(lambda rows: [linear(rows, weight)], x)

    def split(rows: torch.Tensor) -> Sequence[torch.Tensor]:
        if rows.shape[0] > 64:
            return [linear(rows, weight, out_dtype=torch.float32)]
        halves = [linear(rows[:, part], weight[:, part], out_dtype=torch.float32) for part in (slice(0, K // 2), slice(K // 2, K))]
        return [halves[0] + halves[1]]

    assert not batch_invariant(split, x)
    assert not prefix_stable(lambda rows: [linear(rows - rows.mean(0), weight)], x)


def test_a_thousand_repeats_have_one_result_and_another_order_would_be_seen() -> None:
    x, weight = drawn(64, K), drawn(1536, K, seed=1)
    assert repeats_alike(lambda: [linear(x, weight, out_dtype=torch.float32)], 1000)
    turn = iter(range(10))
    flipped = x.flip(1), weight.flip(1)
    assert not repeats_alike(lambda: [linear(*(flipped if next(turn) == 7 else (x, weight)), out_dtype=torch.float32)], 10)


def test_it_can_be_captured_and_replayed_on_other_values() -> None:
    x, weight = drawn(64, K), drawn(576, K, seed=1)
    replay = captured(lambda: [linear(x, weight)])
    x.copy_(drawn(64, K, seed=9))
    (out,) = replay()
    assert torch.equal(out, linear(x, weight))


def test_a_last_row_that_is_not_written_is_seen() -> None:
    from driftline.kernels.linear.triton import matmul

    x, weight = drawn(64, K), drawn(576, K, seed=1)

    def forgetful() -> Sequence[torch.Tensor]:
        out = x.new_empty(64, 576)
        matmul(x[:63], weight, out[:63])
        return [out]

    assert not written(forgetful)
