# mypy: disable-error-code="no-untyped-call"
"""The kernels' gated norm under autograd: nothing is saved but the inputs."""

from __future__ import annotations

from typing import Any

import torch

from driftline.kernels.gated_norm import triton

__all__ = ["GatedNorm", "gated_norm"]


class GatedNorm(torch.autograd.Function):
    """`GatedNorm.apply(o, weight, gate, eps)`: as `reference.gated_norm` for a last axis of 128."""

    @staticmethod
    def forward(ctx: Any, o: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(o, weight, gate)
        ctx.eps = eps
        return triton.forward(o, weight, gate, eps)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        o, weight, gate = ctx.saved_tensors
        return *triton.backward(o, weight, gate, grads[0], ctx.eps), None


def gated_norm(o: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float) -> torch.Tensor:
    """As `reference.gated_norm`, by the kernels."""
    out: torch.Tensor = GatedNorm.apply(o, weight, gate, eps)
    return out
