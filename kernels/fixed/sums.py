"""Sums in one tree: halves are added to halves, so that the order is settled by the length of the axis and by nothing else. On every device, in any mode."""

from __future__ import annotations

import torch

from driftline.kernels.fixed.pointwise import exp

__all__ = ["softmax", "total"]


def total(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """The sum of x over one axis, which is dropped; of x's dtype, every partial sum rounded to it. Differentiable."""
    size = x.shape[dim]
    if size == 0:
        return x.sum(dim)
    while size > 1:
        half = 1 << (size - 1).bit_length() - 1
        low, high = x.narrow(dim, 0, half), x.narrow(dim, half, size - half)
        both = low.narrow(dim, 0, size - half) + high
        x = both if size == 2 * half else torch.cat([both, low.narrow(dim, size - half, 2 * half - size)], dim)
        size = half
    return x.squeeze(dim)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """exp(x - max) / sum over the last axis, in x's dtype."""
    e = exp(x - x.amax(-1, keepdim=True))
    return e / total(e)[..., None]
