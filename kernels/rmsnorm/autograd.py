"""RMSNorm by the kernels, with its gradients. Saved are the inputs and nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from driftline.kernels.rmsnorm import triton as kernels

__all__ = ["RmsNorm"]


class RmsNorm(torch.autograd.Function):
    """x [N, D], its rows contiguous, weight [D]. Gradients are made in fp32 and rounded once; to the weight, of the rounded normalised rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return kernels.forward(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        dy = dy if dy.stride(-1) == 1 else dy.contiguous()
        dx, dweight = kernels.backward(x, weight, dy, ctx.eps, to_weight=ctx.needs_input_grad[1])
        return dx, dweight, None
