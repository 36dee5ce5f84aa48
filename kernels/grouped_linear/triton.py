# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""The products of `grouped_linear` on a GPU: one program makes one tile of the rows of one group, over K from its start to its end in one fp32 accumulator.

What a tile holds beside a row does not reach the row's bits: no order depends on it, no sum is split, and what lies outside of the operands is zero. Weights are
read in the form they are stored in (`moe.triton_tiles`). The transposed product and the weights' gradients are those of the expert MLP's backward.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from driftline.kernels.moe import triton_backward, triton_wgrad
from driftline.kernels.moe.plan import Plan
from driftline.kernels.moe.triton_backward import Blocks
from driftline.kernels.moe.triton_tiles import INTERPRETED, form, row_pointers, stored, tile
from driftline.kernels.mxfp4.weights import ExpertWeight

__all__ = ["NARROW", "WIDE", "blocks_for", "product", "transposed", "weight_gradient"]

WIDE = Blocks(64, 128, 64, 4, 3)
NARROW = Blocks(64, 64, 64, 4, 3)
"""Rows, columns and depth of a tile, warps, stages. NARROW for at most 64 columns, as of an adapter's rank: half of a wide tile would lie outside."""


def blocks_for(columns: int) -> Blocks:
    """By the columns of the output alone: a bank's padded ranks take the tile that an adapter's own rank takes, both up to 64 or both above, and either tile
    gives the same bits."""
    return NARROW if columns <= NARROW.cols else WIDE


@triton.jit
def _grouped_product(x, values, scale, out, tile_group, tile_start, starts, width, columns, FORM: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
                     COLS: tl.constexpr, DEPTH: tl.constexpr):
    """out [rows, columns]: x [rows, width] times the transposed matrix of the row's group."""
    blocks = tl.cdiv(columns, COLS)
    which = tl.program_id(0) // blocks
    group = tl.load(tile_group + which)
    if group < 0:
        return
    row = tl.load(tile_start + which) + tl.arange(0, ROWS)
    there = row < tl.load(starts + group + 1)
    col = tl.program_id(0) % blocks * COLS + tl.arange(0, COLS)
    of_values, of_scale = row_pointers(values, scale, group.to(tl.int64) * columns + col, width, FORM)
    of_rows = x + row.to(tl.int64)[:, None] * width
    k = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for begin in range(0, width, DEPTH):
        if EVEN:
            a = tl.load(of_rows + (begin + k)[None, :], mask=there[:, None], other=0)
        else:
            a = tl.load(of_rows + (begin + k)[None, :], mask=there[:, None] & (begin + k < width)[None, :], other=0)
        b = tile(of_values, of_scale, col < columns, begin, width, COLS, DEPTH, FORM, EVEN, False)
        if INTERPRETED:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, tl.trans(b), total)
    tl.store(out + row.to(tl.int64)[:, None] * columns + col[None, :], total.to(tl.bfloat16), mask=there[:, None] & (col < columns)[None, :])


def product(x: torch.Tensor, rows: Plan, weight: ExpertWeight) -> torch.Tensor:
    """x bfloat16 [P, K] contiguous, in the plan's order, weight [G, N, K]: bfloat16 [P, N], zero where a row has no group."""
    _, columns, width = weight.shape
    out = x.new_zeros(x.shape[0], columns)
    blocks = blocks_for(columns)
    values, scale = stored(weight)
    if rows.tile_expert.numel() and columns:
        _grouped_product[(rows.tile_expert.numel() * triton.cdiv(columns, blocks.cols),)](
            x, values, scale, out, rows.tile_expert, rows.tile_start, rows.starts, width, columns, FORM=int(form(weight)),
            EVEN=width % blocks.depth == 0 and columns % blocks.cols == 0, ROWS=blocks.rows, COLS=blocks.cols, DEPTH=blocks.depth, num_warps=blocks.warps,
            num_stages=blocks.stages, enable_fp_fusion=True)
    return out


def transposed(dy: torch.Tensor, rows: Plan, weight: ExpertWeight) -> torch.Tensor:
    """dy bfloat16 [P, N] contiguous, in the plan's order, weight [G, N, K]: bfloat16 [P, K], zero where a row has no group."""
    width = weight.shape[2]
    out = dy.new_zeros(dy.shape[0], width)
    if rows.tile_expert.numel() and width:
        in_place = rows._replace(pairs=torch.arange(dy.shape[0], dtype=torch.int32, device=dy.device))  # the rows are sorted already
        triton_backward.d_hidden(dy, weight, in_place, 1, out, blocks_for(width))
    return out


def weight_gradient(dy: torch.Tensor, x: torch.Tensor, rows: Plan, like: torch.Tensor) -> torch.Tensor:
    """dy [P, N], x [P, K], both sorted: [G, N, K] in the dtype of `like`, zero for a group without rows."""
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    if out.numel():
        triton_wgrad.weight_gradient(triton_wgrad.Side(dy, False), triton_wgrad.Side(x, False), rows, 1, out, add=False)
    return out
