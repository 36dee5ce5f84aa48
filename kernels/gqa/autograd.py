# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator,override"
"""The attention kernels as one differentiable operator. Saved for the backward: the inputs, the output and a log-sum a query and head."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from driftline.kernels.gqa.layout import Layout, Sizes
from driftline.kernels.gqa.triton_backward import backward
from driftline.kernels.gqa.triton_forward import decode, decodes, forward

__all__ = ["attention"]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, keys, values, layout: Layout, sizes: Sizes, scale: float, out_dtype: torch.dtype):
        q, keys, values = q.contiguous(), keys.contiguous(), values.contiguous()
        out, lse = forward(q, keys, values, layout, sizes, scale, out_dtype)
        ctx.save_for_backward(q, keys, values, out, lse)
        ctx.layout, ctx.sizes, ctx.scale = layout, sizes, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, keys, values, out, lse = ctx.saved_tensors
        return *backward(q, keys, values, ctx.layout, out, lse, grad.contiguous(), ctx.sizes, ctx.scale), None, None, None, None


def attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout, sizes: Sizes, scale: float, out_dtype: torch.dtype,
) -> torch.Tensor:
    """As the package's `attention`, of sizes that the kernels take."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, keys, values)):
        out: torch.Tensor = _Attention.apply(q, keys, values, layout, sizes, scale, out_dtype)
        return out
    q, keys, values = q.contiguous(), keys.contiguous(), values.contiguous()
    if decodes(layout, sizes):
        return decode(q, keys, values, layout, sizes, scale, out_dtype)
    return forward(q, keys, values, layout, sizes, scale, out_dtype)[0]
