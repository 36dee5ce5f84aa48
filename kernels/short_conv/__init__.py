"""Causal depthwise convolution of width 4 with a carried tail: prefill and training, and decode on a pool. See docs/kernels/short_conv.md."""

from __future__ import annotations

import torch

from driftline.kernels.dispatch import runs_triton
from driftline.kernels.short_conv import reference
from driftline.kernels.short_conv.history import short_conv_decode, short_conv_replay

__all__ = ["short_conv", "short_conv_decode", "short_conv_replay"]


def short_conv(
    x: torch.Tensor, weight: torch.Tensor, tail: torch.Tensor, lengths: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [B, T, C], weight [C, W], tail [B, W-1, C] (raw inputs before x), lengths [B] real positions per row or None for all.

    Computed in at least fp32 and cast once. Returns silu(conv(x)) [B, T, C] and the new tail: the last W-1 raw inputs of each row's real positions.
    Differentiable in x, weight and tail. Raises ValueError.
    """
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[0] != x.shape[2] or tuple(tail.shape) != (x.shape[0], weight.shape[1] - 1, x.shape[2]):
        raise ValueError(f"x is {tuple(x.shape)}, weight {tuple(weight.shape)} and tail {tuple(tail.shape)}; give [B, T, C], [C, W] and [B, W-1, C]")
    if lengths is not None and tuple(lengths.shape) != (x.shape[0],):
        raise ValueError(f"lengths is {tuple(lengths.shape)}; give one number of real positions for each of the {x.shape[0]} rows")
    if runs_triton(x, weight, tail, lengths) and weight.shape[1] == 4 and x.dtype != torch.float64 and x.shape[1]:
        from driftline.kernels.short_conv import autograd

        return autograd.short_conv(x, weight, tail, lengths)
    return reference.short_conv(x, weight, tail, lengths)
