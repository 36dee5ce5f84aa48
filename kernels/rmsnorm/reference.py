"""RMSNorm as the K3 release rounds it: normalise in fp32, cast to the input dtype, then multiply by the weight.

Multiplying in fp32 and casting once differs by one bf16 ulp on about half of the elements, so the order is part of the contract.
"""

from __future__ import annotations

import torch

__all__ = ["checked", "rmsnorm"]


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis. x [..., D], weight [D]; the result has x's dtype."""
    wide = x if x.dtype == torch.float64 else x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight.to(x.dtype)


def checked(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Raise ValueError unless these go together."""
    if x.dim() < 1 or x.shape[-1] == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(f"weight has shape {tuple(weight.shape)} and x {tuple(x.shape)}; weight must be [D] for an x of [..., D], and D not 0")
    if not (x.is_floating_point() and weight.is_floating_point()):
        raise ValueError(f"x is {x.dtype} and weight {weight.dtype}; give both in floating point")
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps is {eps}; it is added to a mean of squares and must be at least 0 and finite")
    if x.device != weight.device:
        raise ValueError(f"x is on {x.device} and weight on {weight.device}; put them on one device")
