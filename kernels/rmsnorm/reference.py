"""RMSNorm as the K3 release rounds it: normalise in fp32, cast to the input dtype, then multiply by the weight.

Multiplying in fp32 and casting once differs by one bf16 ulp on about half of the elements, so the order is part of the contract.
"""

from __future__ import annotations

import torch

__all__ = ["rmsnorm"]


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis. x [..., D], weight [D]; the result has x's dtype."""
    wide = x if x.dtype == torch.float64 else x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight.to(x.dtype)
