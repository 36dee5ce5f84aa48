"""The products a head, as Triton's interpreter runs them on the CPU. Run by test_kernels_interpreted.py in a process of its own."""

from __future__ import annotations

import pytest
import torch
from dense_cases import dot_in_order

from driftline.kernels.linear.triton_heads import matmul_heads

torch.set_num_threads(1)
__all__ = ["dot_in_order"]
pytestmark = pytest.mark.usefixtures("dot_in_order")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 5, 3), (70, 100, 40), (64, 64, 64)])
def test_a_head_s_rows_meet_its_own_matrix_however_that_lies(rows: int, columns: int, depth: int, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 3, depth, generator=rng).to(dtype), torch.randn(3, columns, depth, generator=rng).to(dtype)
    want = torch.einsum("rhk,hnk->rhn", x.double(), weight.double())
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    for given in (weight, weight.mT.contiguous().mT):
        torch.testing.assert_close(matmul_heads(x, given).double(), want, rtol=bound, atol=bound)


def test_a_row_has_the_same_bits_alone() -> None:
    rng = torch.Generator().manual_seed(0)
    x, weight = torch.randn(70, 2, 40, generator=rng), torch.randn(2, 33, 40, generator=rng)
    assert torch.equal(matmul_heads(x[65:66], weight)[0], matmul_heads(x, weight)[65])
