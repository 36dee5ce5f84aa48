"""`linear` by the kernels, with its gradients: two more products of the same kind, each element of which is again one sum in one order."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from driftline.kernels.linear.triton import matmul

__all__ = ["Linear"]


class Linear(torch.autograd.Function):
    """x [M, K], weight [N, K]. dx [M, K] = dy W and dW [N, K] = dy^T x, the sum over M from the first row to the last; both in fp32, rounded once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return matmul(x, weight, x.new_empty(x.shape[0], weight.shape[0], dtype=out_dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        dy = dy.to(x.dtype)
        dx = matmul(dy, weight, torch.empty_like(x, memory_format=torch.contiguous_format), b_rows=False) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            dw = matmul(dy, x, torch.empty_like(weight, memory_format=torch.contiguous_format), a_rows=False, b_rows=False)
        return dx, dw, None
