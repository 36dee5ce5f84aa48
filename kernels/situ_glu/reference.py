"""SiTU-GLU: `b1 tanh(g/b1) sigmoid(g) * b2 tanh(u/b2)` in fp32, so |out| <= b1 b2 (K3: 4 x 25). Source: K3 report, section 2."""

from __future__ import annotations

import torch

from driftline.kernels.fixed.pointwise import sigmoid, tanh

__all__ = ["situ_glu"]


def situ_glu(gate: torch.Tensor, up: torch.Tensor, beta: float = 4.0, linear_beta: float = 25.0) -> torch.Tensor:
    """gate, up [..., I] of one dtype; the result has that dtype, computed in at least fp32."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    g, u = gate.to(wide), up.to(wide)
    out = (beta * tanh(g / beta)) * sigmoid(g) * (linear_beta * tanh(u / linear_beta))
    return out.to(gate.dtype)
