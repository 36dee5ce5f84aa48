"""KDA, the recurrence itself (arXiv:2510.26692): the definition every faster form is measured against.

State S [K, V] per head. For each token: `S <- diag(e^g) S; u = beta (v - S^T k); S <- S + k u^T; o = S^T (scale q)`.
"""

from __future__ import annotations

import torch

__all__ = ["bounded_gate", "kda_recurrent", "kda_step", "l2_normalise"]


def l2_normalise(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x / sqrt(sum x^2 + eps) over the last axis; eps inside the root, as K3 has it."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def bounded_gate(z: torch.Tensor, a_log: torch.Tensor, lower_bound: float = -5.0) -> torch.Tensor:
    """Log-decay g in (lower_bound, 0): `lower_bound * sigmoid(exp(A_log) z)`. z [..., H, K], a_log [H]; nats per token."""
    return lower_bound * torch.sigmoid(torch.exp(a_log)[:, None] * z)


def kda_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token. q, k, g [B, H, K] (q, k normalised; scale K^-0.5 applied here), v [B, H, V], beta [B, H], state [B, H, K, V].

    Returns o [B, H, V] and the new state.
    """
    state = state * torch.exp(g)[..., None]
    u = beta[..., None] * (v - (k[..., None, :] @ state).squeeze(-2))
    state = state + k[..., :, None] * u[..., None, :]
    out = ((q * q.shape[-1] ** -0.5)[..., None, :] @ state).squeeze(-2)
    return out, state


def kda_recurrent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token over q, k, g [B, T, H, K], v [B, T, H, V], beta [B, T, H]; returns o [B, T, H, V] and the final state."""
    outs = []
    for t in range(q.shape[1]):
        o, state = kda_step(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], state)
        outs.append(o)
    return torch.stack(outs, dim=1), state
