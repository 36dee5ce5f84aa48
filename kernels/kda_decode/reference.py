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
    """One row: k, z [n, H, K], v [n, H, V], beta [n, H], raw; state [H, K, V]. The outputs (none without q) and the state after n tokens.

    Everything a token needs is computed for it alone: vectorised exponentials on a CPU give an element other bits in a tensor of another length."""
    wide = state.dtype
    rate, bias = a_log.to(wide), dt_bias.to(wide).view(k.shape[1:])
    outs, state = [], state[None]
    for t in range(k.shape[0]):
        one = slice(t, t + 1)
        key, g = l2_normalise(k[one].to(wide)), bounded_gate(z[one].to(wide) + bias, rate, lower_bound)
        query = key if q is None else l2_normalise(q[one].to(wide))
        o, state = kda_step(query, key, v[one].to(wide), g, torch.sigmoid(beta[one].to(wide)), state)
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
