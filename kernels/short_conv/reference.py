"""Causal depthwise short convolution followed by SiLU, with the tail of the previous call as left context.

The tail makes prefill in pieces, decode and a full forward the same function: each output sees exactly the `width - 1` inputs before it.
"""

from __future__ import annotations

import torch

from driftline.kernels.fixed.pointwise import silu

__all__ = ["short_conv"]


def short_conv(
    x: torch.Tensor, weight: torch.Tensor, tail: torch.Tensor, lengths: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [B, T, C], weight [C, W], tail [B, W-1, C] (raw inputs before x), lengths [B] real positions per row or None for all.

    Computed in at least fp32 and cast once. Returns silu(conv(x)) [B, T, C] and the new tail: the last W-1 raw inputs of each row's real positions.
    """
    width, steps = weight.shape[1], x.shape[1]
    padded = torch.cat([tail.to(x.dtype), x], dim=1)
    wide = torch.promote_types(x.dtype, torch.float32)
    raw, w = padded.to(wide), weight.to(wide)
    out = raw[:, :steps] * w[:, 0]
    for i in range(1, width):
        out = out + raw[:, i : i + steps] * w[:, i]
    if lengths is None:
        new_tail = padded[:, steps:]
    else:
        rows = lengths[:, None] + torch.arange(width - 1, device=x.device)
        new_tail = torch.gather(padded, 1, rows[..., None].expand(-1, -1, x.shape[2]))
    return silu(out).to(x.dtype), new_tail
