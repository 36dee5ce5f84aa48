# mypy: disable-error-code="no-untyped-call"
"""The kernels' convolution under autograd: nothing is saved but the inputs, and the outputs are computed again."""

from __future__ import annotations

from typing import Any

import torch

from driftline.kernels.short_conv import triton

__all__ = ["ShortConv", "short_conv"]


class ShortConv(torch.autograd.Function):
    """`ShortConv.apply(x, weight, tail, lengths)`: as `reference.short_conv` for a width of 4 and at least one step."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, tail: torch.Tensor, lengths: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, weight, tail, lengths)
        ctx.set_materialize_grads(False)
        return triton.forward(x, weight, tail, lengths)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        x, weight, tail, lengths = ctx.saved_tensors
        grad, grad_new = grads
        if grad is None:
            grad_x, grad_weight, grad_tail = torch.zeros_like(x), torch.zeros_like(weight), torch.zeros_like(tail)
        else:
            grad_x, grad_weight, grad_tail = triton.backward(x, weight, tail, grad)
        if grad_new is not None:
            rows, steps, channels = x.shape
            end = torch.full((rows,), steps, device=x.device) if lengths is None else lengths.long()
            at = (end[:, None] + torch.arange(triton.WIDTH - 1, device=x.device))[..., None].expand(-1, -1, channels)
            placed = x.new_zeros(rows, steps + triton.WIDTH - 1, channels).scatter(1, at, grad_new)
            grad_tail = grad_tail + placed[:, : triton.WIDTH - 1].to(tail.dtype)
            grad_x = grad_x + placed[:, triton.WIDTH - 1 :]
        return grad_x, grad_weight, grad_tail, None


def short_conv(x: torch.Tensor, weight: torch.Tensor, tail: torch.Tensor, lengths: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference.short_conv`, by the kernels."""
    out: tuple[torch.Tensor, torch.Tensor] = ShortConv.apply(x, weight, tail, lengths)
    return out
