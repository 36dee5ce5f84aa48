"""The SiTU-GLU kernels through the compiler for Hopper, at K3's shapes: wide accesses, no spills."""

from __future__ import annotations

import pytest
import torch

from driftline.kernels.offline import compiling_for
from driftline.kernels.situ_glu import triton as kernels


@pytest.mark.parametrize("width", [6144, 33792], ids=["shared", "dense"])
def test_both_directions_read_and_write_sixteen_bytes_at_a_time(width: int) -> None:
    gate, up = (torch.empty(8192, width, dtype=torch.bfloat16) for _ in range(2))
    with compiling_for(90) as compiled:
        kernels.forward(gate, up, 4.0, 25.0)
        kernels.backward(gate, up, gate, 4.0, 25.0)
    assert [kernel.name for kernel in compiled] == ["_forward", "_backward"]
    for kernel, reads, writes in zip(compiled, (4, 6), (2, 4), strict=True):
        assert kernel.stack == 0
        assert kernel.registers <= 128
        assert kernel.count(r"LDG\.E\.128") == reads
        assert kernel.count(r"STG\.E\.128") == writes


def test_halves_of_a_fused_projection_are_wide_too() -> None:
    fused = torch.empty(8192, 12_288, dtype=torch.bfloat16)
    with compiling_for(90) as compiled:
        kernels.forward(fused[:, :6144], fused[:, 6144:], 4.0, 25.0)
    assert compiled[0].count(r"LDG\.E\.128") == 4
