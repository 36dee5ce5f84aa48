"""KDA by chunks of 16 (the WY form): the same function as the recurrence, with matrix products inside a chunk.

With G the inclusive cumulative sum of g inside a chunk:
    Aqk[i,j] = scale sum_k q_i k_j e^(G_i - G_j)   (i >= j)      Akk[i,j] = beta_i sum_k k_i k_j e^(G_i - G_j)   (i > j)
    T = (I + Akk)^-1,  W = T (beta k e^G),  U = T (beta v),  V' = U - W S,  O = scale (q e^G) S + Aqk V',
    S <- e^(G_C) S + (k e^(G_C - G))^T V'.

Why 16: the gate is bounded below by -5 nats a token, so a chunk spans at most 80 nats and both factors e^(G_i) and e^(-G_j) stay inside fp32's
range with the chunk's *start* as the anchor. A later anchor would let a prefix's rounding depend on its continuation. The triangular system is
solved by substitution: Neumann doubling loses everything on repeated keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["CHUNK", "kda_chunk"]

CHUNK = 16


def kda_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k, g [B, T, H, K] (q, k normalised, g log-decay >= -5), v [B, T, H, V], beta [B, T, H], state [B, H, K, V], all fp32 or fp64.

    Returns o [B, T, H, V] and the final state. A position with g = 0 and beta = 0 leaves the state as it was.
    """
    batch, steps, heads, width = q.shape
    pad = -steps % CHUNK
    if pad:
        q, k, v, g = (F.pad(x, (0, 0, 0, 0, 0, pad)) for x in (q, k, v, g))
        beta = F.pad(beta, (0, 0, 0, pad))
    n = (steps + pad) // CHUNK

    def split(x: torch.Tensor) -> torch.Tensor:
        return x.view(batch, n, CHUNK, heads, -1).permute(0, 3, 1, 2, 4)

    q, k, v, g = split(q), split(k), split(v), split(g)
    b = beta.view(batch, n, CHUNK, heads).permute(0, 3, 1, 2)[..., None]
    cum = g.cumsum(-2)
    grow, decay = torch.exp(cum), torch.exp(-cum)
    k_grow, k_decay = k * grow, k * decay
    q_grow = q * (grow * width**-0.5)
    a_qk = (q_grow @ k_decay.mT).tril()
    a_kk = ((b * k_grow) @ k_decay.mT).tril(-1)
    eye = torch.eye(CHUNK, dtype=q.dtype, device=q.device)
    solved = torch.linalg.solve_triangular(eye + a_kk, torch.cat([b * k_grow, b * v], -1), upper=False, unitriangular=True)
    w, u = solved[..., :width], solved[..., width:]
    last = cum[..., -1:, :]
    k_tail, shrink = k * torch.exp(last - cum), torch.exp(last).mT
    outs = []
    for i in range(n):
        inner = u[:, :, i] - w[:, :, i] @ state
        outs.append(q_grow[:, :, i] @ state + a_qk[:, :, i] @ inner)
        state = shrink[:, :, i] * state + k_tail[:, :, i].mT @ inner
    out = torch.stack(outs, 2).permute(0, 2, 3, 1, 4).reshape(batch, steps + pad, heads, -1)
    return out[:, :steps], state
