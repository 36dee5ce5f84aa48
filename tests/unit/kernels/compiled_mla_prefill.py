"""What the attention kernels take of a Hopper GPU at K3's widths, in every configuration."""

from __future__ import annotations

import pytest
import torch
from machine_code import product_loop, spills

from driftline.kernels.mla_prefill import triton_backward, triton_forward
from driftline.kernels.mla_prefill.shapes import SCALE, Sizes
from driftline.kernels.offline import SHARED_LIMIT, CompiledKernel, compiling_for

ROWS, HEADS = 8192, 96
SIZES = Sizes(ROWS, ROWS, HEADS, 128, 64, 128)


def inputs() -> tuple[torch.Tensor, ...]:
    widths = (HEADS, 192), (HEADS, 256), (64,)
    starts = torch.tensor([0, ROWS], dtype=torch.int32)
    return *(torch.empty(ROWS, *width, dtype=torch.bfloat16) for width in widths), starts, starts


def check(kernel: CompiledKernel, *products: tuple[str, int]) -> None:
    assert kernel.shared <= SHARED_LIMIT
    assert kernel.stack <= 48, kernel
    loop = product_loop(kernel)
    assert spills(loop) <= 8, "a few words of addresses at most, in some configurations and compilers"
    for instruction, count in products:
        assert sum(instruction in line for line in loop) == count, (kernel, instruction)
    assert any("LDGSTS.E.BYPASS.128" in line for line in loop), "the next tile is copied 16 bytes at a time, past the registers"


@pytest.mark.parametrize("configuration", triton_forward.CONFIGURATIONS)
def test_the_forward_fits_and_uses_the_matrix_unit(configuration: triton_forward.Configuration) -> None:
    with compiling_for(90) as compiled:
        triton_forward.forward(*inputs(), SIZES, SCALE, torch.float32, configuration)
    [kernel] = compiled
    scores, values = 192 // 16, configuration.keys // 16
    same = configuration.keys == 128
    check(kernel, ("HGMMA.64x128x16", scores + values if same else values), *(() if same else (("HGMMA.64x64x16", scores),)))
    assert kernel.stack == 0 or configuration != triton_forward.DEFAULT


@pytest.mark.parametrize("which", range(3))
def test_the_backward_fits_and_uses_the_matrix_unit(which: int) -> None:
    of_queries, of_keys = triton_backward.QUERIES[which], triton_backward.KEYS[which]
    out, lse = torch.empty(ROWS, HEADS, 128), triton_forward.row_numbers(SIZES, inputs()[-1])
    with compiling_for(90) as compiled:
        triton_backward.backward(*inputs(), out, lse, out, SIZES, SCALE, of_queries, of_keys)
    kernels = {kernel.name: kernel for kernel in compiled}
    assert sorted(kernels) == ["_keys", "_prepare", "_queries", "_shared"]
    assert (kernels["_prepare"].stack, kernels["_shared"].stack) == (0, 0)
    check(kernels["_keys"], (f"HGMMA.64x{of_keys.queries}x16", (192 + 128) // 16), ("HGMMA.64x128x16", 2 * of_keys.queries // 16))
    check(kernels["_queries"], ("HGMMA.64x128x16", of_queries.keys // 16))
    assert sum("HGMMA" in line for line in product_loop(kernels["_queries"])) == (192 + 128) // 16 + 2 * of_queries.keys // 16
