"""What the decode kernels take of a Hopper GPU at K3's widths, in every configuration."""

from __future__ import annotations

import pytest
import torch
from machine_code import product_loop, spills

from driftline.kernels.mla_decode import triton
from driftline.kernels.mla_decode.shapes import SCALE, checked
from driftline.kernels.offline import SHARED_LIMIT, compiling_for


@pytest.mark.parametrize("configuration", triton.CONFIGURATIONS)
def test_both_kernels_fit_and_each_product_is_computed_once(configuration: triton.Configuration) -> None:
    q, pages = torch.empty(64, 1, 96, 576, dtype=torch.bfloat16), torch.empty(8192, 64, 576, dtype=torch.bfloat16)
    table, lengths = torch.empty(64, 128, dtype=torch.int32), torch.empty(64, dtype=torch.int32)
    with compiling_for(90) as compiled:
        triton.decode(q, pages, table, lengths, checked(q, pages, table, lengths, 512, None), SCALE, torch.float32, configuration)
    part, combine = compiled
    assert (combine.stack, part.stack <= 256) == (0, True), "what spills, does so before and after the loop"
    assert max(part.shared, combine.shared) <= SHARED_LIMIT
    loop = product_loop(part)
    assert spills(loop) == 0
    assert sum("HGMMA.64x256x16" in line for line in loop) == configuration.tile // 16, "sums of 64 pairs, 256 of the latent by each half of the program"
    assert sum(f"HGMMA.64x{configuration.tile // 2}x16" in line for line in loop) == 576 // 16, "each half has half of the keys"
    assert sum("LDGSTS.E.BYPASS.128" in line for line in loop) >= configuration.tile * 576 * 2 // 16 // 256, "copied 16 bytes at a time, past the registers"


def test_a_window_of_queries_is_no_other_kernel() -> None:
    pages, lengths = torch.empty(8192, 64, 576, dtype=torch.bfloat16), torch.empty(64, dtype=torch.int32)
    table = torch.empty(64, 128, dtype=torch.int32)
    with compiling_for(90) as compiled:
        for window in (1, 2, 5):
            q = torch.empty(64, window, 96, 576, dtype=torch.bfloat16)
            triton.decode(q, pages, table, lengths, checked(q, pages, table, lengths, 512, None), SCALE, torch.float32, triton.CONFIGURATIONS[1])
    assert [kernel.name for kernel in compiled] == ["_part", "_combine"]
