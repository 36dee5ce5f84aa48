"""What compiling for a GPU that is not there says of the kernels, on those of policy_delta; and that it can say no."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from driftline.kernels.offline import SHARED_LIMIT, compiling_for
from driftline.kernels.policy_delta import triton as kernels


@triton.jit
def _product(a, b, out, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


def test_a_kernel_of_ours_compiles_without_spills() -> None:
    spans = [torch.empty(1 << 20, dtype=torch.bfloat16)]
    with compiling_for(90) as compiled:
        kernels.fingerprint(spans)
    assert compiled
    for kernel in compiled:
        assert kernel.stack == 0, kernel
        assert 0 < kernel.registers <= 255
        assert kernel.shared <= SHARED_LIMIT
        assert kernel.count("LDG") > 0


def test_the_matrix_unit_of_hopper_is_seen_and_each_specialisation_is_listed_once() -> None:
    a, b, out = (torch.empty(128, 128, dtype=torch.bfloat16) for _ in range(3))
    with compiling_for(90) as compiled:
        for _ in range(2):
            _product[(1,)](a, b, out.float(), N=128, num_warps=4)
        _product[(1,)](a, b, out.float(), N=64, num_warps=4)
    assert [kernel.name for kernel in compiled] == ["_product", "_product"]
    assert all(kernel.count("HGMMA") > 0 for kernel in compiled)
    with compiling_for(80) as older:
        _product[(1,)](a, b, out.float(), N=128, num_warps=4)
    assert [k.count("HGMMA") for k in older] == [0]


def test_a_kernel_that_keeps_too_much_is_seen_to_spill_or_to_be_refused() -> None:
    a, b, out = (torch.empty(512, 512, dtype=torch.bfloat16) for _ in range(3))
    with compiling_for(90) as compiled, pytest.raises(triton.runtime.errors.OutOfResources):
        _product[(1,)](a, b, out.float(), N=512, num_warps=4)
    assert compiled == []
