"""`grouped_linear` by the kernels, with its gradients: to rows by the products of the expert MLP's backward, to weights one sum a group in the order of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from driftline.kernels.grouped_linear import triton as kernels
from driftline.kernels.moe.plan import Plan
from driftline.kernels.mxfp4.weights import ExpertWeight

__all__ = ["GroupedLinear"]


class GroupedLinear(torch.autograd.Function):
    """x bfloat16 [P, K] sorted; weight of `kind` as its tensors. dx [P, K] = dy W and, for a tensor, dW [G, N, K] = dy^T x over the group's rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: Plan, kind: type, values: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        ctx.rows, ctx.kind = rows, kind
        ctx.save_for_backward(x, values, *(() if scale is None else (scale,)))
        return kernels.product(x.contiguous(), rows, _weight(kind, values, scale))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, values, *scale = ctx.saved_tensors
        dy = dy.to(x.dtype).contiguous()
        dx = kernels.transposed(dy, ctx.rows, _weight(ctx.kind, values, *scale)) if ctx.needs_input_grad[0] else None
        dw = kernels.weight_gradient(dy, x.contiguous(), ctx.rows, values) if ctx.needs_input_grad[3] else None
        return dx, None, None, dw, None


def _weight(kind: type, values: torch.Tensor, scale: torch.Tensor | None = None) -> ExpertWeight:
    weight: ExpertWeight = values if scale is None else kind(values, scale)
    return weight
