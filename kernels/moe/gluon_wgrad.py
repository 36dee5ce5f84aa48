# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator,attr-defined,assignment"
"""Gradients of bfloat16 expert weights in Gluon, for Hopper: what `triton_wgrad` computes, of rows that lie in sorted order on both sides.

One program owns 256 x 128 of one expert's gradient and walks all of the expert's rows with one fp32 accumulator. The copy engine brings 64 rows at a time; rows
of the last step that belong to the next expert become zero in shared memory on both sides, whatever they hold.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from driftline.kernels.moe.gluon_operands import fetch, wait_for_all
from driftline.kernels.moe.plan import Plan

__all__ = ["STAGES", "weight_gradient"]

STAGES = 4
"""Steps of 64 rows in shared memory."""

_LEFT = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
_RIGHT = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))


@gluon.jit
def _only(tile, rest, COLS: gl.constexpr, LAYOUT: gl.constexpr):
    """Rows from `rest` on become zero."""
    row = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    there = (row < rest)[:, None] & (gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT)) >= 0)[None, :]
    tile.store(gl.where(there, tile.load(LAYOUT), 0.0))


@gluon.jit
def _ask(left, right, left_s, right_s, full, stage, row, m, n, there):
    bar = full.index(stage)
    mbarrier.expect(bar, 64 * 768, pred=there)
    fetch(left, [row, m], bar, left_s.index(stage), pred=there)
    fetch(right, [row, n], bar, right_s.index(stage), pred=there)


@gluon.jit
def _weight_gradient(left, right, out, starts, left_cols, right_cols, ADD: gl.constexpr, STAGES: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 128, 16])
    across = right_cols // 128
    tiles = left_cols // 256 * across
    expert = gl.program_id(0) // tiles
    which = gl.program_id(0) % tiles
    m = which // across * 256
    n = which % across * 128
    first = gl.load(starts + expert)
    count = gl.load(starts + expert + 1) - first
    left_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 256], left.layout)
    right_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], right.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    # at least one step, of zeros; the compiler must know, or it lets every product wait for the one before
    steps = gl.maximum((count + 63) // 64, 1)
    gl.assume(steps > 0)
    for i in gl.static_range(STAGES - 1):
        _ask(left, right, left_s, right_s, full, i, first + 64 * i, m, n, i < steps)
    total = gl.zeros((256, 128), gl.float32, LAYOUT)
    stage = 0
    phase = 0
    for step in range(steps):
        mbarrier.wait(full.index(stage), phase)
        a = left_s.index(stage)
        b = right_s.index(stage)
        rest = count - 64 * step
        if rest < 64:
            _only(a, rest, 256, _LEFT)
            _only(b, rest, 128, _RIGHT)
            fence_async_shared()
            wait_for_all()
        total = warpgroup_mma(a.permute((1, 0)), b, total, is_async=True)
        total = warpgroup_mma_wait(1, deps=[total])
        # every warp's product of the step before is done, so its stage may be filled again
        wait_for_all()
        ahead = step + STAGES - 1
        _ask(left, right, left_s, right_s, full, (stage + STAGES - 1) % STAGES, first + 64 * ahead, m, n, ahead < steps)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    total = warpgroup_mma_wait(0, deps=[total])
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(full.index(i))
    row = m + gl.arange(0, 256, gl.SliceLayout(1, _RIGHT))
    col = n + gl.arange(0, 128, gl.SliceLayout(0, _RIGHT))
    to = out + (expert.to(gl.int64) * left_cols + row)[:, None] * right_cols + col[None, :]
    if ADD:
        value = gl.load(to).to(gl.float32) + gl.convert_layout(total, _RIGHT)
        gl.store(to, value.to(gl.bfloat16))
    else:
        gl.store(to, gl.convert_layout(total.to(gl.bfloat16), _RIGHT))


def weight_gradient(left: torch.Tensor, right: torch.Tensor, table: Plan, out: torch.Tensor, *, add: bool) -> None:
    """out [E, M, N] = (or, with `add`, +=, rounded to bfloat16) the sum over each expert's rows of left[r] right[r]^T; left [N * k, M] and right [N * k, N] in
    sorted order, M a multiple of 256 and N of 128."""
    experts, left_cols, right_cols = out.shape
    layout = gl.NVMMASharedLayout(128, 16, 2)
    a, b = TensorDescriptor.from_tensor(left, [64, 256], layout), TensorDescriptor.from_tensor(right, [64, 128], layout)
    _weight_gradient[(experts * (left_cols // 256) * (right_cols // 128),)](a, b, out, table.starts, left_cols, right_cols, ADD=add, STAGES=STAGES, num_warps=8,
                                                                            enable_fp_fusion=True)
