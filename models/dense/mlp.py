"""The feed-forward of a dense decoder: `W_down (silu(W_gate x) * W_up x)`, each of its steps rounded to the model's dtype as the public models round it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from driftline.models.dense.config import DenseConfig
from driftline.models.linear import Linear

__all__ = ["Mlp", "silu", "silu_glu"]


def silu(x: torch.Tensor) -> torch.Tensor:
    """`x sigmoid(x)` in at least fp32, rounded once to x's dtype; an element's bits do not depend on its place."""
    if x.device.type != "cpu":
        return nn.functional.silu(x)
    # torch's own silu takes another exponential in the tail of a CPU array than in its vector loop; these steps are alike at every place.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide / (1 + torch.exp(-wide))).to(x.dtype)


class _SiluGlu(torch.autograd.Function):
    """Keeps its two inputs for the backward pass and computes the rest again, which is cheaper than holding it."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return silu(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), grad * silu(gate)


def silu_glu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of one shape and dtype, each of the two steps rounded to it. Differentiable once."""
    out: torch.Tensor = _SiluGlu.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


class Mlp(nn.Module):
    def __init__(self, config: DenseConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(width, inner, bias=config.mlp_bias)
        self.up_proj = Linear(width, inner, bias=config.mlp_bias)
        self.down_proj = Linear(inner, width, bias=config.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., D] -> [..., D]."""
        out: torch.Tensor = self.down_proj(silu_glu(self.gate_proj(x), self.up_proj(x)))
        return out
