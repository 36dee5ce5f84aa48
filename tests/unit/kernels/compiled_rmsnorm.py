"""The RMSNorm kernels, compiled for Hopper at K3's widths: what they take and how wide their accesses are.
Run by test_kernels_interpreted.py in a process of its own."""

from __future__ import annotations

import pytest
import torch
from dense_sass import Instructions

from driftline.kernels.offline import SHARED_LIMIT, CompiledKernel, compiling_for
from driftline.kernels.rmsnorm import triton as kernels


def compiled(d: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, CompiledKernel]:
    x, weight = torch.empty(8192, d, dtype=dtype), torch.empty(d, dtype=dtype)
    with compiling_for(90) as found:
        kernels.forward(x, weight, 1e-5)
        kernels.backward(x, weight, x, 1e-5)
    return {kernel.name: kernel for kernel in found}


@pytest.mark.parametrize("d", [128, 512, 1536, 3584, 7168])
def test_rows_are_read_and_written_16_bytes_at_a_time_and_stay_in_registers(d: int) -> None:
    found = compiled(d)
    for kernel in found.values():
        assert kernel.stack == 0
        assert kernel.shared <= SHARED_LIMIT
    forward, backward = Instructions(found["_forward"]), Instructions(found["_backward"])
    shape = kernels.shape_for(d)
    loads = shape.rows * shape.block * 2 // 16 // (32 * shape.warps)
    assert forward.count("LDG.E.128") >= loads
    assert forward.count("STG.E.128") == forward.count("STG") == loads
    assert found["_forward"].registers <= 72, "or too few rows are on their way at once"
    each = shape.rows * shape.block * 2 // 16 // (32 * shape.back_warps)
    assert backward.count("LDGSTS") == 2 * each * shape.stages, "the next rows are on their way while one is summed up"
    assert backward.count("STG.E.128") >= each
    resident = 65_536 // (found["_backward"].registers * 32 * shape.back_warps)
    assert resident * 132 >= shape.programs, "all programs run at once"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_longest_rows_fit(dtype: torch.dtype) -> None:
    found = compiled(kernels.LONGEST, dtype)
    assert found["_forward"].stack == 0
    assert found["_backward"].stack <= 512
    assert found["_backward"].shared <= SHARED_LIMIT


def test_the_number_of_rows_compiles_nothing_anew() -> None:
    weight = torch.empty(7168, dtype=torch.bfloat16)
    with compiling_for(90) as found:
        for rows in (1, 7, 16, 64):
            kernels.forward(torch.empty(rows, 7168, dtype=torch.bfloat16), weight, 1e-5)
    assert len(found) == 1
