"""Attention residual, reference (arXiv:2603.15031; K3's rounding: everything fp32, one cast at the end).

`k_i = v_i rsqrt(mean v_i^2 + eps)`, `s_i = <k_i, norm * query>`, `p = softmax_i(s)`, `o = sum_i p_i v_i`. Norm on the keys only, values raw,
no 1/sqrt(d). A zero query gives the plain mean of the sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from driftline.kernels.rmsnorm.reference import rmsnorm

__all__ = ["Gradients", "aggregate", "aggregate_backward", "attention_residual"]


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


def aggregate(
    rows: Sequence[torch.Tensor], prefix: torch.Tensor, delta: torch.Tensor | None, query: torch.Tensor, norm_weight: torch.Tensor, eps: float,
    output_weight: torch.Tensor | None, output_eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(mixed, moved): moved = prefix + delta, added in the prefix's dtype; mixed = the attention residual of `rows` and moved, and, where there is an output
    weight, its RMSNorm in K3's rounding order. All [..., D]; differentiable."""
    moved = prefix if delta is None else prefix + delta
    mixed = attention_residual([*rows, moved], query, norm_weight, eps)
    return mixed if output_weight is None else rmsnorm(mixed, output_weight, output_eps), moved


class Gradients(NamedTuple):
    """sources [N, L, D] (the prefix last), query [D], norm [D], output [D] or None: in fp32, or fp64 for fp64 inputs."""

    sources: torch.Tensor
    query: torch.Tensor
    norm: torch.Tensor
    output: torch.Tensor | None


def aggregate_backward(
    rows: Sequence[torch.Tensor], moved: torch.Tensor, gradient: torch.Tensor, dmoved: torch.Tensor | None, query: torch.Tensor, norm_weight: torch.Tensor,
    eps: float, output_weight: torch.Tensor | None, output_eps: float,
) -> Gradients:
    """The closed form of `aggregate`'s gradient, in fp32 or wider, from nothing but its inputs. Each source, gradient and dmoved [N, D]; dmoved is the
    gradient that comes to moved from elsewhere. Roundings on the way pass gradients as if they were not there."""
    dtype = moved.dtype
    wide = torch.promote_types(dtype, torch.float32)
    v = torch.stack([s.to(wide) for s in (*rows, moved)], dim=1)
    q, w, do = query.to(wide), norm_weight.to(wide), gradient.to(wide)
    n = w * q
    r = torch.rsqrt(v.square().mean(-1) + eps)
    t = v @ n
    p = torch.softmax(r * t, dim=-1)
    dweight = None
    if output_weight is not None:
        o = torch.einsum("nl,nld->nd", p, v).to(dtype).to(wide)
        scale = torch.rsqrt(o.square().mean(-1, keepdim=True) + output_eps)
        dweight = (do * (o * scale).to(dtype).to(wide)).sum(0)
        pulled = do * output_weight.to(dtype).to(wide)
        do = scale * pulled - o * scale.pow(3) * (o * pulled).mean(-1, keepdim=True)
    along = torch.einsum("nld,nd->nl", v, do)
    ds = p * (along - (p * along).sum(-1, keepdim=True))
    turn = ds * r
    dv = p[..., None] * do[:, None] + turn[..., None] * n - (turn * t * r.square() / v.shape[-1])[..., None] * v
    if dmoved is not None:
        dv[:, -1] += dmoved.to(wide)
    dn = torch.einsum("nl,nld->d", turn, v)
    return Gradients(dv, dn * w, dn * q, dweight)
