# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Gradients of bfloat16 expert weights: for each expert the product of its rows on both sides, summed over the rows in their order.

    dW1[e] = sum_r dg[r] z[token r]^T,   dW3[e] = sum_r du[r] z[token r]^T,   dW2[e] = sum_r dy[token r] (gate h)[r]^T

One program owns a tile of one expert's gradient and walks all of the expert's rows with one fp32 accumulator: no atomics, no splitting of the sum, and an
expert without rows gets zeros. The tables of all experts are written whole, 59 GB for K3's 896 in bfloat16: at K3's 146 rows an expert it is the writing
that takes the time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from driftline.kernels.moe.plan import Plan
from driftline.kernels.moe.triton_tiles import INTERPRETED

__all__ = ["PINNED", "Side", "WeightBlocks", "weight_gradient"]


class WeightBlocks(NamedTuple):
    """left and right columns of a tile, rows of a step, warps, stages."""

    left: int
    right: int
    depth: int
    warps: int
    stages: int


PINNED = WeightBlocks(128, 128, 64, 4, 4)
"""For any shape: two programs fit a multiprocessor, so that one loads while the other writes."""

class Side(NamedTuple):
    """One factor: rows [N * k, C] in sorted order, or, gathered, [N, C] read at each row's token."""

    rows: torch.Tensor
    gathered: bool


@triton.jit
def _weight_gradient(left, right, out, pairs, starts, left_cols, right_cols, TOP: tl.constexpr, LEFT_GATHERED: tl.constexpr, RIGHT_GATHERED: tl.constexpr,
                     ADD: tl.constexpr, EVEN: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, DEPTH: tl.constexpr):
    across = tl.cdiv(right_cols, RIGHT)
    tiles = tl.cdiv(left_cols, LEFT) * across
    expert = tl.program_id(0) // tiles
    which = tl.program_id(0) % tiles
    m = which // across * LEFT + tl.arange(0, LEFT)
    n = which % across * RIGHT + tl.arange(0, RIGHT)
    first, last = tl.load(starts + expert), tl.load(starts + expert + 1)
    k = tl.arange(0, DEPTH)
    total = tl.zeros((LEFT, RIGHT), tl.float32)
    for begin in range(first, last, DEPTH):
        row = begin + k
        there = row < last
        from_left = row.to(tl.int64)
        from_right = from_left
        if LEFT_GATHERED or RIGHT_GATHERED:
            token = (tl.load(pairs + row, mask=there, other=0) // TOP).to(tl.int64)
            if LEFT_GATHERED:
                from_left = token
            if RIGHT_GATHERED:
                from_right = token
        if EVEN:
            a = tl.load(left + from_left[:, None] * left_cols + m[None, :], mask=there[:, None], other=0)
            b = tl.load(right + from_right[:, None] * right_cols + n[None, :], mask=there[:, None], other=0)
        else:
            a = tl.load(left + from_left[:, None] * left_cols + m[None, :], mask=there[:, None] & (m < left_cols)[None, :], other=0)
            b = tl.load(right + from_right[:, None] * right_cols + n[None, :], mask=there[:, None] & (n < right_cols)[None, :], other=0)
        if INTERPRETED:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(tl.trans(a), b, total)
    to = out + (expert.to(tl.int64) * left_cols + m[:, None]) * right_cols + n[None, :]
    mask = (m < left_cols)[:, None] & (n < right_cols)[None, :]
    if ADD:
        total += tl.load(to, mask=mask, other=0).to(tl.float32)
    tl.store(to, total.to(out.dtype.element_ty), mask=mask)


def weight_gradient(left: Side, right: Side, table: Plan, top_k: int, out: torch.Tensor, *, add: bool, blocks: WeightBlocks = PINNED) -> None:
    """out [E, left columns, right columns] = (or, with `add`, +=, rounded to out's dtype) the sum over each expert's rows of left[r] right[r]^T."""
    experts, left_cols, right_cols = out.shape
    even = left_cols % blocks.left == 0 and right_cols % blocks.right == 0
    grid = (experts * triton.cdiv(left_cols, blocks.left) * triton.cdiv(right_cols, blocks.right),)
    _weight_gradient[grid](left.rows, right.rows, out, table.pairs, table.starts, left_cols, right_cols, TOP=top_k, LEFT_GATHERED=left.gathered,
                           RIGHT_GATHERED=right.gathered, ADD=add, EVEN=even, LEFT=blocks.left, RIGHT=blocks.right, DEPTH=blocks.depth,
                           num_warps=blocks.warps, num_stages=blocks.stages, enable_fp_fusion=True)
