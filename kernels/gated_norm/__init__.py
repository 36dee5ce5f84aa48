"""The output norm and gate of KDA: each head normalised by itself, then gated. See docs/kernels/gated_norm.md."""

from __future__ import annotations

import torch

from driftline.kernels.dispatch import runs_triton
from driftline.kernels.gated_norm import exact, reference
from driftline.kernels.mode import deterministic

__all__ = ["gated_norm"]


def gated_norm(o: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float) -> torch.Tensor:
    """`o / sqrt(mean(o^2) + eps) * weight * sigmoid(gate)` over the last axis, in fp32 with one cast at the end, as the release's fused norm has it. o [..., D] of
    any float dtype, gate [..., D], weight [D]; returns [..., D] in gate's dtype. Differentiable. Raises ValueError."""
    if o.shape != gate.shape or tuple(weight.shape) != tuple(o.shape[-1:]):
        raise ValueError(f"o is {tuple(o.shape)}, gate {tuple(gate.shape)} and weight {tuple(weight.shape)}; give o and gate [..., D] and weight [D]")
    if runs_triton(o, weight, gate) and o.shape[-1] == 128 and gate.dtype in (torch.bfloat16, torch.float16, torch.float32) and o.dtype != torch.float64:
        from driftline.kernels.gated_norm import autograd

        return autograd.gated_norm(o, weight, gate, eps)
    return exact.gated_norm(o, weight, gate, eps) if deterministic() else reference.gated_norm(o, weight, gate, eps)
