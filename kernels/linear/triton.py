# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""Matrix products whose elements do not know what they are computed beside: no split of K, no order that a shape could change.

One program makes one tile of the output (see `tiles`), goes through K from 0 to its end in one fp32 accumulator, and rounds once. Operands come by the
bulk copy engine into a pipeline in shared memory, which also fills what lies outside of them with zeros, so edges and any K take the same instructions.
With `accumulate` the accumulator starts as what the output holds: a product over one long K is then bit for bit the same in any pieces of it that are
multiples of 16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from driftline.kernels.linear.tiles import Tile, tile_for

__all__ = ["described", "matmul", "product", "swizzled"]

_GROUP = 8
"""Rows of tiles that run side by side before the next columns: their operands then meet in L2."""


@triton.jit
def swizzled(tile, rows, columns, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """The first row and the first column of a tile, in an order in which neighbours share operands."""
    tiles_n = tl.cdiv(columns, BN)
    band = tile // (GROUP * tiles_n)
    height = tl.minimum(tl.cdiv(rows, BM) - band * GROUP, GROUP)
    inside = tile - band * (GROUP * tiles_n)
    return (band * GROUP + inside % height) * BM, inside // height * BN


@triton.jit
def product(a, b, acc, row, column, depth, A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):
    """acc [BM, BN] fp32 plus A[row:, :] B[column:, :]^T over all of K, in order. A_ROWS: A lies as [M, K], else as [K, M]; B_ROWS: B as [N, K], else [K, N]."""
    # Without it the compiler sees a path past the loop, on which the accumulator is set, and waits after every matrix instruction (the assembler's C7515).
    tl.assume(depth > 0)
    for k in range(0, depth, BK):
        if A_ROWS:
            left = a.load([row, k])
        else:
            left = a.load([k, row]).T
        if B_ROWS:
            right = b.load([column, k]).T
        else:
            right = b.load([k, column])
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["rows", "depth"])
def _matmul(a, b, out, rows, columns, depth, stride, A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, ACCUMULATE: tl.constexpr, BM: tl.constexpr,
            BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr):
    row, column = swizzled(tl.program_id(0), rows, columns, BM, BN, GROUP)
    r = row + tl.arange(0, BM)
    c = column + tl.arange(0, BN)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    if ACCUMULATE:
        acc = tl.load(out + r.to(tl.int64)[:, None] * stride + c[None, :], mask=inside, other=0.0)
    else:
        acc = tl.zeros((BM, BN), tl.float32)
    acc = product(a, b, acc, row, column, depth, A_ROWS, B_ROWS, BK, PRECISION)
    tl.store(out + r.to(tl.int64)[:, None] * stride + c[None, :], acc.to(out.dtype.element_ty), mask=inside)


def described(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A matrix for the copy engine, in boxes of this size. It needs rows that are contiguous and 16 bytes apart and aligned; another is copied first."""
    height, width = matrix.shape
    unit = 16 // matrix.element_size()
    if matrix.stride(1) != 1 or matrix.stride(0) < width or matrix.stride(0) % unit or matrix.data_ptr() % 16:
        matrix = matrix.new_empty(height, -(-width // unit) * unit)[:, :width].copy_(matrix)
    return TensorDescriptor(matrix, [height, width], [matrix.stride(0), 1], [rows, columns])


def _spread(matrix: torch.Tensor, rows: int) -> torch.Tensor:
    """The same rows in a matrix of `rows`, whose others hold anything: no row of a product sees another, and those are not stored. Of a few rows alone all
    programs ask the same few lines of L2 at the same time, which costs more than reading a whole tile of them."""
    whole = matrix.new_empty(rows, -(-matrix.shape[1] // 8) * 8)[:, : matrix.shape[1]]
    whole[: matrix.shape[0]].copy_(matrix)
    return whole


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, a_rows: bool = True, b_rows: bool = True, accumulate: bool = False,
           tile: Tile | None = None) -> torch.Tensor:
    """out [M, N] = A B^T, or, with `accumulate` (out in fp32 then), out + A B^T. a [M, K], or [K, M] without `a_rows`; b [N, K], or [K, N] without
    `b_rows`; both bf16, fp16 or fp32, one dtype. `out` has contiguous rows. `tile`: other than the shape's own, for a benchmark."""
    rows, depth = a.shape if a_rows else a.shape[::-1]
    columns = out.shape[1]
    if rows == 0 or columns == 0:
        return out
    if depth == 0:
        return out if accumulate else out.zero_()
    tile = tile or tile_for(rows, columns, a.dtype)
    if a_rows and 2 * rows <= tile.rows:
        a = _spread(a, tile.rows)
    boxes = described(a, *((tile.rows, tile.depth) if a_rows else (tile.depth, tile.rows)))
    others = described(b, *((tile.columns, tile.depth) if b_rows else (tile.depth, tile.columns)))
    _matmul[(tile.count(rows, columns),)](
        boxes, others, out, rows, columns, depth, out.stride(0), A_ROWS=a_rows, B_ROWS=b_rows, ACCUMULATE=accumulate, BM=tile.rows, BN=tile.columns,
        BK=tile.depth, PRECISION="ieee" if a.dtype == torch.float32 else "tf32", GROUP=_GROUP, num_warps=tile.warps, num_stages=tile.stages,
        enable_fp_fusion=True,
    )
    return out
