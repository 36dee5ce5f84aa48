"""Rotary position embedding in plain torch: differentiable, computed in fp32 (fp64 of fp64), every step of it one rounded operation."""

from __future__ import annotations

import torch

__all__ = ["rotate"]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    half = cos.shape[-1]
    c, s = cos.to(wide)[..., None, :], sin.to(wide)[..., None, :]
    turned = x[..., : 2 * half].to(wide)
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    pair = first * c - second * s, second * c + first * s
    out = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat([out.to(x.dtype), x[..., 2 * half :]], dim=-1)
