"""KDA decode token by token, the definition: what the kernels are measured against, and what runs where there are none.

All three functions are `kda_step` on the state of a slot, so a window that is folded later is, bit for bit, the window decoded.
"""

from __future__ import annotations

import torch

from driftline.kernels.kda.reference import bounded_gate, kda_step, l2_normalise
from driftline.kernels.kda_decode.window import Window

__all__ = ["fold", "kda_decode", "replay_decode"]


def _steps(
    q: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor,
    lower_bound: float, state: torch.Tensor,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """One row: k, z [n, H, K], v [n, H, V], beta [n, H], raw; state [H, K, V]. The outputs (none without q) and the state after n tokens."""
    wide = state.dtype
    heads, dim = k.shape[1], k.shape[2]
    g = bounded_gate(z.to(wide) + dt_bias.to(wide).view(heads, dim), a_log.to(wide), lower_bound)
    key, gain = l2_normalise(k.to(wide)), torch.sigmoid(beta.to(wide))
    query = l2_normalise(q.to(wide)) if q is not None else key
    outs, state = [], state[None]
    for t in range(k.shape[0]):
        o, state = kda_step(query[t : t + 1], key[t : t + 1], v[t : t + 1].to(wide), g[t : t + 1], gain[t : t + 1], state)
        outs.append(o[0])
    return outs if q is not None else [], state[0]


def kda_decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor,
    pool: torch.Tensor, slots: torch.Tensor, lower_bound: float,
) -> torch.Tensor:
    out = torch.zeros_like(v)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            one = slice(row, row + 1)
            outs, pool[slot] = _steps(q[one], k[one], v[one], z[one], beta[one], a_log, dt_bias, lower_bound, pool[slot])
            out[row] = outs[0].to(v.dtype)
    return out


def fold(
    a_log: torch.Tensor, dt_bias: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, window: Window, accepted: torch.Tensor, lower_bound: float
) -> None:
    for slot, count in zip(slots.tolist(), accepted.tolist(), strict=True):
        if slot >= 0:
            n = min(max(count, 0), window.capacity)
            held = (window.k[slot, :n], window.v[slot, :n], window.z[slot, :n], window.beta[slot, :n])
            _, pool[slot] = _steps(None, *held, a_log, dt_bias, lower_bound, pool[slot])


def replay_decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor,
    pool: torch.Tensor, slots: torch.Tensor, window: Window, accepted: torch.Tensor, lower_bound: float,
) -> torch.Tensor:
    fold(a_log, dt_bias, pool, slots, window, accepted, lower_bound)
    out = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            outs, _ = _steps(q[row], k[row], v[row], z[row], beta[row], a_log, dt_bias, lower_bound, pool[slot])
            out[row] = torch.stack(outs).to(v.dtype)
            for held, new in ((window.k, k), (window.v, v), (window.z, z), (window.beta, beta)):
                held[slot, : new.shape[1]] = new[row]
    return out
