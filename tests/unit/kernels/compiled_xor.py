"""What the XOR kernels take of a Hopper GPU: wide accesses, no spills, at every configuration and width."""

from __future__ import annotations

import pytest
import torch

from driftline.kernels.offline import SHARED_LIMIT, compiling_for
from driftline.kernels.policy_delta import triton_xor


@pytest.mark.parametrize("configuration", triton_xor.CONFIGURATIONS)
def test_every_configuration_reads_and_writes_16_bytes_an_access(configuration: triton_xor.Configuration) -> None:
    base, new = (torch.empty(1 << 22, dtype=torch.bfloat16) for _ in range(2))
    with compiling_for(90) as compiled:
        triton_xor.xor(base, new, block=4096, configuration=configuration)
        triton_xor.Xor([base], [new], block=4096, configuration=configuration).run()
    assert len(compiled) == 2
    assert triton_xor.DEFAULT in triton_xor.CONFIGURATIONS
    for kernel in compiled:
        threads = 32 * kernel.warps
        assert (kernel.stack, kernel.shared <= SHARED_LIMIT) == (0, True), kernel
        assert kernel.registers <= 64, "at least half the threads that a multiprocessor has room for"
        sass = kernel.sass()
        wide = configuration.words // threads // 4
        assert sass.count("LDG.E.EF.128") + sass.count("LDG.E.128") >= 2 * wide, kernel
        assert sass.count("STG.E.128") >= wide, kernel


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float32])
@pytest.mark.parametrize("block", [256, 65_536])
def test_other_widths_and_blocks_compile_without_spills(dtype: torch.dtype, block: int) -> None:
    base, new = (torch.empty(1 << 22, dtype=dtype) for _ in range(2))
    with compiling_for(90) as compiled:
        triton_xor.xor(base, new, block=block)
    assert [(kernel.stack <= 8, kernel.count("STL")) for kernel in compiled] == [(True, 0)]
    assert "LDG.E.EF.128" in compiled[0].sass() or "LDG.E.128" in compiled[0].sass()


def test_a_span_of_more_elements_than_31_bits_is_one_launch_with_wide_accesses() -> None:
    """Positions in the span are 64-bit then; those in a tile are not."""
    span = torch.empty(2**31 + 1, dtype=torch.uint8)
    with compiling_for(90) as compiled:
        triton_xor.xor(span, span, block=4096)
    [kernel] = compiled
    assert kernel.grid == (2**31 // (4 * triton_xor.DEFAULT.words) + 1,)
    assert (kernel.stack, kernel.registers <= 64) == (0, True)
    assert "LDG.E.EF.128" in kernel.sass() or "LDG.E.128" in kernel.sass()
