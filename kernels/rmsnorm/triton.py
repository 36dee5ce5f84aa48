# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""RMSNorm as kernels: a row is read once, by one program, and summed up by one tree that only the row's length decides.

Forward, bytes an element of two bytes: 4. Backward: 6, and the partial sums of the weight's gradient: a fixed number of programs takes the rows in
contiguous blocks and adds them up in order in its registers; `_total` adds the programs' sums in order. Nothing is kept from the forward pass: the
root is made again from the row, which has to be read anyway. Multiplications and additions are never contracted, so that the bits are those of the text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

__all__ = ["LONGEST", "SHAPES", "Shape", "backward", "forward", "shape_for"]


@dataclass(frozen=True)
class Shape:
    """Rows of up to `block` elements. Forward, a program takes `rows` of them by `warps` warps. Backward, at most `programs` programs share all rows, each
    `rows` at a step by `back_warps` warps with `stages` - 1 steps on their way: as many as the multiprocessors hold at once by registers, so that none
    waits for a turn. Their partial sums are [programs, D] fp32."""

    block: int
    rows: int
    warps: int
    back_warps: int
    programs: int
    stages: int = 3


SHAPES = (
    Shape(128, 32, warps=4, back_warps=4, programs=264),
    Shape(512, 8, warps=4, back_warps=4, programs=264),
    Shape(1024, 4, warps=4, back_warps=4, programs=264),
    Shape(2048, 2, warps=4, back_warps=4, programs=396),
    Shape(4096, 1, warps=4, back_warps=8, programs=264, stages=4),
    Shape(8192, 1, warps=8, back_warps=8, programs=132, stages=4),
    Shape(16384, 1, warps=16, back_warps=16, programs=132, stages=2),
)
"""The pinned configurations: a row takes the first that holds it. A sweep of `benchmarks/kernels/rmsnorm.py` times others."""

LONGEST = SHAPES[-1].block

_TOTAL_COLUMNS, _TOTAL_ROWS = 16, 128


@triton.jit(do_not_specialize=["rows"])
def _forward(x, weight, out, rows, stride, eps, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < D)[None, :]
    wide = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=column < D, other=0.0).to(x.dtype.element_ty)
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(wide * wide, axis=1) / D + eps))
    normal = (wide * scale[:, None]).to(x.dtype.element_ty)
    # The product of two numbers of 8 or 11 bits is exact in fp32, so this rounds once, as a multiplication in their own dtype does.
    product = normal.to(tl.float32) * factor.to(tl.float32)[None, :]
    tl.store(out + row[:, None] * D + column[None, :], product.to(x.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "each"])
def _backward(x, weight, dy, dx, partial, rows, each, stride, dy_stride, eps, TO_WEIGHT: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
              BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Rows [p each, (p + 1) each) of program p, ROWS at a step. With r = 1 / root and n = x r: dx = r (g - n mean(g n)) of g = dy weight."""
    first = tl.program_id(0).to(tl.int64) * each
    last = tl.minimum(first + each, rows)
    column = tl.arange(0, BLOCK)
    factor = tl.load(weight + column, mask=column < D, other=0.0).to(x.dtype.element_ty).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        inside = (row < last)[:, None] & (column < D)[None, :]
        wide = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        up = tl.load(dy + row[:, None] * dy_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(wide * wide, axis=1) / D + eps))
        normal = wide * scale[:, None]
        if TO_WEIGHT:
            total += up * normal.to(x.dtype.element_ty).to(tl.float32)
        g = up * factor[None, :]
        along = tl.sum(g * normal, axis=1) / D
        tl.store(dx + row[:, None] * D + column[None, :], (scale[:, None] * (g - normal * along[:, None])).to(x.dtype.element_ty), mask=inside)
    if TO_WEIGHT:
        tl.store(partial + tl.program_id(0).to(tl.int64) * D + column, tl.sum(total, axis=0), mask=column < D)


@triton.jit(do_not_specialize=["programs"])
def _total(partial, out, programs, D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)
        total += tl.load(partial + row[:, None] * D + column[None, :], mask=(row < programs)[:, None] & (column < D)[None, :], other=0.0)
    tl.store(out + column, tl.sum(total, axis=0).to(out.dtype.element_ty), mask=column < D)


def shape_for(d: int) -> Shape:
    """The configuration for rows of d elements, at most LONGEST."""
    return next(shape for shape in SHAPES if d <= shape.block)


def forward(x: torch.Tensor, weight: torch.Tensor, eps: float, *, shape: Shape | None = None) -> torch.Tensor:
    """x [N, D], its rows contiguous and any stride apart, weight [D] -> [N, D]. `shape`: other than the pinned one, for a benchmark."""
    rows, d = x.shape
    out = torch.empty(rows, d, dtype=x.dtype, device=x.device)
    if rows:
        shape = shape or shape_for(d)
        _forward[(triton.cdiv(rows, shape.rows),)](x, weight, out, rows, x.stride(0), eps, D=d, ROWS=shape.rows, BLOCK=shape.block, num_warps=shape.warps,
                                                   enable_fp_fusion=False)
    return out


def backward(x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, eps: float, *, to_weight: bool = True,
             shape: Shape | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(dx [N, D] in x's dtype, dweight [D] in weight's or None). dy [N, D] in x's dtype, its rows contiguous and any stride apart."""
    rows, d = x.shape
    dx = torch.empty(rows, d, dtype=x.dtype, device=x.device)
    if not rows:
        return dx, torch.zeros_like(weight) if to_weight else None
    shape = shape or shape_for(d)
    each = triton.cdiv(triton.cdiv(rows, shape.programs), shape.rows) * shape.rows
    programs = triton.cdiv(rows, each)
    partial = torch.empty(programs if to_weight else 0, d, dtype=torch.float32, device=x.device)
    _backward[(programs,)](x, weight, dy, dx, partial, rows, each, x.stride(0), dy.stride(0), eps, TO_WEIGHT=to_weight, D=d, ROWS=shape.rows,
                           BLOCK=shape.block, STAGES=shape.stages, num_warps=shape.back_warps, enable_fp_fusion=False)
    if not to_weight:
        return dx, None
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    _total[(triton.cdiv(d, _TOTAL_COLUMNS),)](partial, dweight, programs, D=d, COLUMNS=_TOTAL_COLUMNS, ROWS=_TOTAL_ROWS, num_warps=4, enable_fp_fusion=False)
    return dx, dweight
