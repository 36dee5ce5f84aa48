"""The norm and gate behind KDA as the K3 release rounds them: norm, weight and sigmoid in fp32, one cast at the end.

The release takes flash-linear-attention's fused norm here, and not its own RMSNorm, which rounds before it multiplies by the weight.
"""

from __future__ import annotations

import torch

__all__ = ["gated_norm"]


def gated_norm(o: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float) -> torch.Tensor:
    """`o / sqrt(mean(o^2) + eps) * weight * sigmoid(gate)` over the last axis, in fp32 (fp64 for a gate in it), in gate's dtype."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    x = o.to(wide)
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(wide)
    return (normed * torch.sigmoid(gate.to(wide))).to(gate.dtype)
