"""The feed-forward of a dense decoder: `W_down (silu(W_gate x) * W_up x)`, each of its steps rounded to the model's dtype as the public models round it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from driftline.models.dense.config import DenseConfig
from driftline.models.linear import Linear

__all__ = ["Mlp", "silu"]


class _Silu(torch.autograd.Function):
    """`x / (1 + e^-x)` of steps that torch computes alike at every place of a CPU tensor; its own silu takes another exponential in the tail of an array."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x / (1 + torch.exp(-x))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grads[0], x)  # type: ignore[no-any-return]


def silu(x: torch.Tensor) -> torch.Tensor:
    """`x sigmoid(x)` in at least fp32, rounded once to x's dtype; an element's bits do not depend on its place. Differentiable once."""
    if x.device.type != "cpu":
        return nn.functional.silu(x)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    out: torch.Tensor = _Silu.apply(wide)  # type: ignore[no-untyped-call]
    return out.to(x.dtype)


class Mlp(nn.Module):
    def __init__(self, config: DenseConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(width, inner, bias=config.mlp_bias)
        self.up_proj = Linear(width, inner, bias=config.mlp_bias)
        self.down_proj = Linear(inner, width, bias=config.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., D] -> [..., D]."""
        out: torch.Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return out
