"""Attention residual, reference (arXiv:2603.15031; K3's rounding: everything fp32, one cast at the end).

`k_i = v_i rsqrt(mean v_i^2 + eps)`, `s_i = <k_i, norm * query>`, `p = softmax_i(s)`, `o = sum_i p_i v_i`. Norm on the keys only, values raw,
no 1/sqrt(d). A zero query gives the plain mean of the sources.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["attention_residual"]


def attention_residual(
    sources: Sequence[torch.Tensor], query: torch.Tensor, norm_weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Mix `sources` (each [..., D], oldest first) by content. query [D], norm_weight [D]; returns [..., D] in the sources' dtype.

    One source is returned unchanged: a softmax over one entry is 1.
    """
    if len(sources) == 1:
        return sources[0]
    dtype = sources[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    v = torch.stack([s.to(wide) for s in sources], dim=-2)
    direction = norm_weight.to(wide) * query.to(wide)
    scale = torch.rsqrt(v.square().mean(-1) + eps)
    score = (v @ direction) * scale
    p = torch.softmax(score, dim=-1)
    return (p.unsqueeze(-2) @ v).squeeze(-2).to(dtype)
