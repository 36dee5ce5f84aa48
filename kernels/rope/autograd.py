# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,untyped-decorator,override"
"""The rotation as one differentiable operator: its gradient is the rotation back. Saved for it: the tables, which are not copied."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from driftline.kernels.rope.triton import rotated

__all__ = ["rotate"]


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, interleaved: bool):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return rotated(x, cos, sin, interleaved, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return rotated(grad, cos, sin, ctx.interleaved, back=True), None, None, None


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """As the package's `rotate`."""
    out: torch.Tensor = _Rotate.apply(x, cos, sin, interleaved)
    return out
