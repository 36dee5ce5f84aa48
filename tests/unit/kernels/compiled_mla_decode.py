"""What the decode kernels take of a Hopper GPU at K3's widths, for each part that the benchmark times."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import torch
from machine_code import product_loop, spills

from driftline.kernels.mla_decode import triton
from driftline.kernels.mla_decode.shapes import SCALE, checked
from driftline.kernels.offline import SHARED_LIMIT, CompiledKernel, compiling_for


def compiled(windows: tuple[int, ...] = (1,), page: int = 64, part: int = triton.PART) -> list[CompiledKernel]:
    pages, lengths = torch.empty(2**19 // page, page, 576, dtype=torch.bfloat16), torch.empty(64, dtype=torch.int32)
    table = torch.empty(64, 8192 // page, dtype=torch.int32)
    with compiling_for(90) as found:
        for window in windows:
            q = torch.empty(64, window, 96, 576, dtype=torch.bfloat16)
            triton.decode(q, pages, table, lengths, checked(q, pages, table, lengths, 512, None), SCALE, torch.float32, part)
    return found


@pytest.mark.parametrize("page", [64, 16])
@pytest.mark.parametrize("part", triton.PARTS)
def test_both_kernels_fit_and_each_product_is_computed_once(part: int, page: int) -> None:
    each, combine = compiled(page=page, part=part)
    assert (combine.stack, each.stack <= 256) == (0, True), "what spills, does so before and after the loop"
    assert max(each.shared, combine.shared) <= SHARED_LIMIT
    loop = product_loop(each)
    assert spills(loop) <= (0 if version("triton").startswith("3.6") else 32), "later compilers keep some addresses of the copies in local memory"
    assert sum("HGMMA.64x256x16" in line for line in loop) == triton.TILE // 16, "sums of 64 pairs, 256 of the latent by each half of the program"
    assert sum(f"HGMMA.64x{triton.TILE // 2}x16" in line for line in loop) == 576 // 16, "each half has half of the keys"
    assert sum("LDGSTS.E.BYPASS.128" in line for line in loop) == triton.TILE * 576 * 2 // 16 // 256, "copied 16 bytes at a time, past the registers"


def test_the_next_scores_are_under_way_before_anything_is_waited_for() -> None:
    """Products are issued in one run, 4 of the sums and 36 of the scores; then the sums are waited for, and only behind the next copy the scores."""
    loop = product_loop(compiled()[0])
    products = [i for i, line in enumerate(loop) if "HGMMA" in line]
    waits = [i for i, line in enumerate(loop) if "WARPGROUP.DEPBAR" in line]
    copies = [i for i, line in enumerate(loop) if "LDGSTS" in line]
    assert len(products) == 40
    assert len(waits) == 2
    assert products[-1] < waits[0] < copies[0] < copies[-1] < waits[1]


def test_a_window_of_queries_is_no_other_kernel() -> None:
    assert [kernel.name for kernel in compiled((1, 2, 5))] == ["_part", "_combine"]
