"""RMSNorm in deterministic mode without the kernels: a row's squares are summed by one tree, in K3's rounding order otherwise."""

from __future__ import annotations

from functools import partial

import torch

from driftline.kernels.fixed.gradient import exactly
from driftline.kernels.fixed.sums import total
from driftline.kernels.rmsnorm import reference

__all__ = ["normalised", "rmsnorm"]


def normalised(wide: torch.Tensor, eps: float) -> torch.Tensor:
    """wide / sqrt(mean of its squares + eps) over the last axis, in its own dtype."""
    return wide * torch.rsqrt(total(wide.square())[..., None] / wide.shape[-1] + eps)


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `reference.rmsnorm`; each row's bits are its own."""
    out: torch.Tensor = exactly(partial(_forward, eps=eps), partial(reference.rmsnorm, eps=eps), x, weight)
    return out


def _forward(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    return normalised(wide, eps).to(x.dtype) * weight.to(x.dtype)
