# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator,override"
"""The attention kernels as one differentiable operator. Saved for the backward: the inputs, the output and a log-sum a query and head."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from driftline.kernels.mla_prefill.shapes import Sizes
from driftline.kernels.mla_prefill.triton_backward import backward
from driftline.kernels.mla_prefill.triton_forward import forward

__all__ = ["attention"]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, kv, k_shared, starts, starts_k, sizes: Sizes, scale: float, out_dtype: torch.dtype):
        q, kv, k_shared = q.contiguous(), kv.contiguous(), k_shared.contiguous()
        out, lse = forward(q, kv, k_shared, starts, starts_k, sizes, scale, out_dtype)
        ctx.save_for_backward(q, kv, k_shared, starts, starts_k, out, lse)
        ctx.sizes, ctx.scale = sizes, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, kv, k_shared, starts, starts_k, out, lse = ctx.saved_tensors
        gradients = backward(q, kv, k_shared, starts, starts_k, out, lse, grad.contiguous(), ctx.sizes, ctx.scale)
        return *gradients, None, None, None, None, None


def attention(
    q: torch.Tensor, kv: torch.Tensor, k_shared: torch.Tensor, starts: torch.Tensor, starts_k: torch.Tensor, sizes: Sizes, scale: float, out_dtype: torch.dtype
) -> torch.Tensor:
    """As the package's `mla_prefill`, of sizes that the kernels take, with the sequences' bounds."""
    out: torch.Tensor = _Attention.apply(q, kv, k_shared, starts, starts_k, sizes, scale, out_dtype)
    return out
