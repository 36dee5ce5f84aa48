# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""A product a head in one launch: one tile for every shape, K in order from 0 in one fp32 accumulator, so an element's bits are its row's and column's."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["matmul_heads"]

_TILE = (64, 64)
_DEPTH = {2: 64, 4: 16}
"""Of K at a step, by the bytes of an element."""


@triton.jit(do_not_specialize=["rows", "x_row"])
def _product(x, weight, out, rows, columns, depth, x_row, x_head, x_one, w_head, w_row, w_one, heads, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
             PRECISION: tl.constexpr):
    head = tl.program_id(2).to(tl.int64)
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    wide = r.to(tl.int64)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, depth, BK):
        d = k + tl.arange(0, BK)
        left = tl.load(x + wide[:, None] * x_row + head * x_head + d[None, :] * x_one, mask=(r < rows)[:, None] & (d < depth)[None, :], other=0.0)
        right = tl.load(weight + head * w_head + c[None, :] * w_row + d[:, None] * w_one, mask=(c < columns)[None, :] & (d < depth)[:, None], other=0.0)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
    at = (wide[:, None] * heads + head) * columns + c[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=(r < rows)[:, None] & (c < columns)[None, :])


def matmul_heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [R, H, K], weight [H, N, K], bf16, fp16 or fp32, any strides -> [R, H, N] contiguous."""
    rows, heads, depth = x.shape
    columns = weight.shape[1]
    out = x.new_empty(rows, heads, columns)
    if out.numel() == 0 or depth == 0:
        return out.zero_()
    (high, wide), step = _TILE, _DEPTH[x.element_size()]
    _product[(triton.cdiv(rows, high), triton.cdiv(columns, wide), heads)](
        x, weight, out, rows, columns, depth, *x.stride(), *weight.stride(), heads, BM=high, BN=wide, BK=step,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=4, num_stages=3, enable_fp_fusion=True)
    return out
