"""KDA's output norm and gate in deterministic mode without the kernels: in fp32 throughout, a row's squares summed by one tree, one cast at the end."""

from __future__ import annotations

from functools import partial

import torch

from driftline.kernels.fixed.gradient import exactly
from driftline.kernels.fixed.pointwise import sigmoid
from driftline.kernels.gated_norm import reference
from driftline.kernels.rmsnorm.exact import normalised

__all__ = ["gated_norm"]


def gated_norm(o: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float) -> torch.Tensor:
    """As `reference.gated_norm`; each row's bits are its own."""
    out: torch.Tensor = exactly(partial(_forward, eps=eps), partial(reference.gated_norm, eps=eps), o, weight, gate)
    return out


def _forward(o: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, *, eps: float) -> torch.Tensor:
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (normalised(o.to(wide), eps) * weight.to(wide) * sigmoid(gate.to(wide))).to(gate.dtype)
