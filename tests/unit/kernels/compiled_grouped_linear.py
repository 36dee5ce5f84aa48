"""`grouped_linear` through the compiler for Hopper, at the shapes of adapters beside K3's experts: rank 64, 896 experts, 8,192 tokens of 3,584, 16 a token."""

from __future__ import annotations

import pytest
import torch

from driftline.kernels.grouped_linear import groups_of
from driftline.kernels.grouped_linear import triton as kernels
from driftline.kernels.mxfp4.weights import ExpertWeight, Mxfp4Weight
from driftline.kernels.offline import SHARED_LIMIT, CompiledKernel, compiling_for

EXPERTS, TOKENS, TOP, LATENT, INNER, RANK = 896, 8192, 16, 3584, 3072, 64
HELD = 32
"""Experts whose weights are there: nothing that is compiled depends on it."""
ROWS = groups_of(torch.zeros(TOKENS, TOP, dtype=torch.int32), EXPERTS)


def half(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def packed(size_out: int, size_in: int) -> Mxfp4Weight:
    return Mxfp4Weight(torch.empty(HELD, size_out, size_in // 2, dtype=torch.uint8), torch.empty(HELD, size_out, size_in // 32, dtype=torch.uint8))


A = half(HELD, RANK, LATENT)
CASES: dict[str, ExpertWeight] = {
    "A": A, "B": half(HELD, INNER, RANK), "B of rank 16": half(HELD, INNER, 16), "packed": packed(INNER, LATENT),
}


def compiled(weight: ExpertWeight) -> list[CompiledKernel]:
    _, size_out, size_in = weight.shape
    x, dy = half(TOKENS * TOP, size_in), half(TOKENS * TOP, size_out)
    with compiling_for(90) as found:
        kernels.product(x, ROWS, weight)
        kernels.transposed(dy, ROWS, weight)
        if weight is A:
            kernels.weight_gradient(dy, x, ROWS, A)
    return found


@pytest.mark.parametrize("name", list(CASES))
def test_every_product_fits_and_runs_on_the_matrix_unit_without_spills(name: str) -> None:
    found = compiled(CASES[name])
    assert [kernel.name for kernel in found][:2] == ["_grouped_product", "_d_hidden"]
    for kernel in found:
        assert kernel.shared <= SHARED_LIMIT, kernel
        assert kernel.stack == 0, kernel
        assert kernel.count("HGMMA") + kernel.count("HMMA") > 0, kernel
