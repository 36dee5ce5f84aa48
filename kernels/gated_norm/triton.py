# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator"
"""KDA's output norm and gate as Triton kernels, forward and backward: one read of each input, one write of each result, fp32 between them.

A row (one head of one token) is summed within a group of sixteen lanes, so its bits depend on the row alone. The weight's gradient is summed in fp32 a
block of rows at a time, and the blocks in order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

__all__ = ["BACKWARD", "CANDIDATES", "DIM", "ROWS", "Backward", "backward", "forward"]

DIM = 128
ROWS = 16
"""Rows of a program of the forward, for every shape."""


class Backward(NamedTuple):
    """Rows of a tile; tiles of a program, whose weight gradient is one row of the partial sums; tiles in flight; warps."""

    rows: int
    tiles: int
    stages: int
    warps: int


BACKWARD = Backward(rows=16, tiles=8, stages=3, warps=4)
CANDIDATES = (BACKWARD, Backward(32, 8, 3, 4), Backward(16, 16, 3, 4), Backward(8, 16, 3, 2))
"""What runs, for every shape, and what the benchmark's sweep times beside it. Others sum the weight's gradient in another order: other bits of it."""

_WARPS = 4
_STRICT = {"enable_fp_fusion": False}


@triton.jit
def _forward(o, weight, gate, out, rows, eps, DIM: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DIM)
    at = row[:, None] * DIM + d[None, :]
    mask = (row < rows)[:, None]
    x = tl.load(o + at, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight + d).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)
    value = x * scale[:, None] * w[None, :] * (1.0 / (1.0 + tl.exp(-g)))
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _backward(o, weight, gate, grad, grad_o, grad_gate, grad_weight, rows, eps, DIM: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
              STAGES: tl.constexpr):
    """grad_weight [programs, DIM] fp32."""
    d = tl.arange(0, DIM)
    w = tl.load(weight + d).to(tl.float32)
    total = tl.zeros((ROWS, DIM), tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        row = (tl.program_id(0).to(tl.int64) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        at = row[:, None] * DIM + d[None, :]
        mask = (row < rows)[:, None]
        x = tl.load(o + at, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)[:, None]
        unit = x * scale
        gated = 1.0 / (1.0 + tl.exp(-g))
        after = dy * gated
        total = tl.fma(after, unit, total)
        tl.store(grad_gate + at, (dy * (unit * w[None, :]) * gated * (1.0 - gated)).to(grad_gate.dtype.element_ty), mask=mask)
        inner = after * w[None, :]
        dx = scale * (inner - unit * (tl.sum(inner * unit, axis=1) / DIM)[:, None])
        tl.store(grad_o + at, dx.to(grad_o.dtype.element_ty), mask=mask)
    tl.store(grad_weight + tl.program_id(0) * DIM + d, tl.sum(total, axis=0))


def forward(o: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float, rows_a_tile: int = ROWS) -> torch.Tensor:
    """As `reference.gated_norm` for a last axis of 128."""
    o, weight, gate = o.contiguous(), weight.contiguous(), gate.contiguous()
    out = torch.empty_like(gate)
    rows = gate.numel() // DIM
    if rows:
        _forward[(triton.cdiv(rows, rows_a_tile),)](o, weight, gate, out, rows, eps, DIM=DIM, ROWS=rows_a_tile, num_warps=_WARPS, **_STRICT)
    return out


def backward(
    o: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, grad: torch.Tensor, eps: float, built: Backward = BACKWARD
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the result's gradient: those of o, weight and gate, in their dtypes."""
    o, weight, gate, grad = o.contiguous(), weight.contiguous(), gate.contiguous(), grad.contiguous()
    grad_o, grad_gate = torch.empty_like(o), torch.empty_like(gate)
    rows = gate.numel() // DIM
    programs = triton.cdiv(rows, built.rows * built.tiles)
    parts = torch.empty(programs, DIM, dtype=torch.float32, device=o.device)
    if rows:
        _backward[(programs,)](o, weight, gate, grad, grad_o, grad_gate, parts, rows, eps, DIM=DIM, ROWS=built.rows, TILES=built.tiles, STAGES=built.stages,
                               num_warps=built.warps, **_STRICT)
    return grad_o, parts.sum(0).to(weight.dtype), grad_gate
