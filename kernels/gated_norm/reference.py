"""The norm and gate behind KDA, in K3's rounding order: normalise in fp32, cast, multiply by the weight, multiply by the gate's cast sigmoid."""

from __future__ import annotations

import torch

from driftline.kernels.rmsnorm.reference import rmsnorm

__all__ = ["gated_norm"]


def gated_norm(o: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float) -> torch.Tensor:
    return rmsnorm(o.to(gate.dtype), weight, eps) * torch.sigmoid(gate)
