"""The product's kernels, as Triton's interpreter runs them on the CPU, against float64. Run by test_kernels_interpreted.py in a process of its own.

Results of two bytes are fp16 here, because the interpreter cuts where it should round to bfloat16; operands are both."""

from __future__ import annotations

import pytest
import torch
from dense_cases import dot_in_order
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from driftline.kernels.linear.autograd import Linear
from driftline.kernels.linear.tiles import HALF, Tile
from driftline.kernels.linear.triton import matmul

torch.set_num_threads(1)
__all__ = ["dot_in_order"]
pytestmark = pytest.mark.usefixtures("dot_in_order")
SMALL = Tile(16, 32, 16, warps=4, stages=2)


def drawn(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def poisoned(rows: int, columns: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.full((rows, columns), float("nan"), dtype=dtype)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(1, 70), columns=st.integers(1, 70), depth=st.integers(1, 70), a_rows=st.booleans(), b_rows=st.booleans(), seed=st.integers(0, 99))
def test_any_shape_of_either_layout_is_the_product(rows: int, columns: int, depth: int, a_rows: bool, b_rows: bool, seed: int) -> None:
    a, b = drawn(rows, depth, seed=seed), drawn(columns, depth, seed=seed + 1)
    out = matmul(a if a_rows else a.t().contiguous(), b if b_rows else b.t().contiguous(), poisoned(rows, columns, torch.float32), a_rows=a_rows, b_rows=b_rows,
                 tile=SMALL)
    torch.testing.assert_close(out, (a.double() @ b.double().t()).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_result_is_rounded_once(dtype: torch.dtype) -> None:
    a, b = drawn(20, 40, dtype=dtype), drawn(24, 40, dtype=dtype, seed=1)
    wide = matmul(a, b, poisoned(20, 24, torch.float32), tile=SMALL)
    for out in (torch.float32, torch.float16):
        assert torch.equal(matmul(a, b, poisoned(20, 24, out), tile=SMALL), wide.to(out))
    bound = 40 * 2**-24 * (a.double().abs() @ b.double().abs().t())
    assert bool(((wide.double() - a.double() @ b.double().t()).abs() <= bound).all()), "fp32 operands must not be cut short"


@pytest.mark.parametrize("pieces", [[16, 96], [96, 16], [48, 32, 32], [112]])
def test_a_sum_in_pieces_is_the_sum_bit_for_bit(pieces: list[int]) -> None:
    a, b = drawn(20, 112), drawn(24, 112, seed=1)
    whole = matmul(a, b, poisoned(20, 24, torch.float32), tile=SMALL)
    parts = poisoned(20, 24, torch.float32)
    for i, (x, w) in enumerate(zip(a.split(pieces, 1), b.split(pieces, 1), strict=True)):
        matmul(x, w, parts, accumulate=i > 0, tile=SMALL)
    assert torch.equal(parts, whole)


def test_the_pinned_tiles_give_the_same_bits_at_any_edge() -> None:
    a, b = drawn(131, 72, dtype=torch.bfloat16), drawn(264, 72, dtype=torch.bfloat16, seed=1)
    outs = [matmul(a, b, poisoned(131, 264, torch.float32), tile=tile) for tile in HALF]
    assert all(torch.equal(out, outs[0]) for out in outs)
    torch.testing.assert_close(outs[0], (a.double() @ b.double().t()).float(), rtol=1e-5, atol=1e-5)


def test_a_row_has_the_same_bits_alone_in_any_batch_and_anywhere_in_it() -> None:
    a, b = drawn(70, 72), drawn(40, 72, seed=1)
    whole = matmul(a, b, poisoned(70, 40))
    for rows in (slice(0, 1), slice(5, 7), slice(3, 67), slice(69, 70)):
        assert torch.equal(matmul(a[rows], b, poisoned(rows.stop - rows.start, 40)), whole[rows])


def test_rows_that_the_copy_engine_cannot_take_are_copied() -> None:
    whole = drawn(30, 41)
    odd, part, one, spread = whole[:, 1:34], whole[2:, :40], whole[:1, 3:11], whole.t()[3:8, :24]
    for x in (odd, part, one, spread, drawn(5, 8)[:1].expand(4, 8)):
        w = drawn(9, x.shape[1], seed=3)
        torch.testing.assert_close(matmul(x, w, poisoned(x.shape[0], 9, torch.float32), tile=SMALL), x.float() @ w.float().t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 3, 31, 32, 33])
def test_few_rows_beside_memory_of_anything_are_those_rows_products(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile that is half empty is read whole, of memory that nobody wrote: here of NaNs."""
    a, b = drawn(rows, 41), drawn(40, 41, seed=1)
    wanted = (a.double() @ b.double().t()).float()
    tile = Tile(64, 32, 16, warps=4, stages=2)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *shape, **options: torch.full(shape, float("nan"), dtype=self.dtype))
    torch.testing.assert_close(matmul(a, b, poisoned(rows, 40, torch.float32), tile=tile), wanted, rtol=1e-4, atol=1e-4)


def test_nothing_beside_the_output_is_written() -> None:
    whole = poisoned(40, 64)
    matmul(drawn(20, 24), drawn(24, 24, seed=1), whole[5:25, 8:32], tile=SMALL)
    assert not bool(whole[5:25, 8:32].isnan().any())
    whole[5:25, 8:32] = float("nan")
    assert bool(whole.isnan().all())


def test_the_gradients_are_those_of_torch() -> None:
    x, w, dy = drawn(33, 24, dtype=torch.float32), drawn(17, 24, dtype=torch.float32, seed=1), drawn(33, 17, dtype=torch.float32, seed=2)
    x.requires_grad_()
    w.requires_grad_()
    out = Linear.apply(x, w, torch.float32)
    wanted = torch.autograd.grad(torch.nn.functional.linear(x.double(), w.double()), (x, w), dy.double())
    found = torch.autograd.grad(out, (x, w), dy)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-5, atol=1e-5)
    frozen = w.detach()
    (only,) = torch.autograd.grad(Linear.apply(x, frozen, torch.float32), x, dy)
    assert torch.equal(only, found[0])


def test_no_rows_and_nothing_to_sum_over() -> None:
    assert matmul(drawn(0, 8), drawn(4, 8), poisoned(0, 4), tile=SMALL).shape == (0, 4)
    assert matmul(drawn(0, 3), drawn(0, 4), poisoned(3, 4), a_rows=False, b_rows=False).eq(0).all()
