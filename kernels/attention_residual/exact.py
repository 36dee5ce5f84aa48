"""The attention residual in deterministic mode without the kernels: a token's sums go by one tree over its columns, and over its sources in order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from driftline.kernels.fixed.sums import softmax, total
from driftline.kernels.rmsnorm.exact import rmsnorm

__all__ = ["aggregate", "attention_residual"]


def attention_residual(sources: Sequence[torch.Tensor], query: torch.Tensor, norm_weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `reference.attention_residual`; each token's bits are its own. Differentiable."""
    if len(sources) == 1:
        return sources[0]
    dtype = sources[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    direction = norm_weight.to(wide) * query.to(wide)
    rows = [s.to(wide) for s in sources]
    score = torch.stack([total(v * direction) * torch.rsqrt(total(v.square()) / v.shape[-1] + eps) for v in rows], -1)
    p = softmax(score)
    mixed = rows[0] * p[..., :1]
    for i, v in enumerate(rows[1:], 1):
        mixed = mixed + v * p[..., i : i + 1]
    return mixed.to(dtype)


def aggregate(
    rows: Sequence[torch.Tensor], prefix: torch.Tensor, delta: torch.Tensor | None, query: torch.Tensor, norm_weight: torch.Tensor, eps: float,
    output_weight: torch.Tensor | None, output_eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference.aggregate`."""
    moved = prefix if delta is None else prefix + delta
    mixed = attention_residual([*rows, moved], query, norm_weight, eps)
    return mixed if output_weight is None else rmsnorm(mixed, output_weight, output_eps), moved
