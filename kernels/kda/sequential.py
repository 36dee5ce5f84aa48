"""KDA in deterministic mode without the kernels: the recurrence, token after token, whether there is one token or there are many.

Everything a token needs is elementwise, a sum over its channels by one tree, or an exponential by whole vectors, so its bits are those of its own inputs
and of the state before it: sequences beside it, padding and the piece it is prefilled in leave no trace. The gradient is that of the chunks.
"""

from __future__ import annotations

from functools import partial

import torch

from driftline.kernels.fixed.gradient import exactly
from driftline.kernels.fixed.pointwise import exp, sigmoid
from driftline.kernels.fixed.sums import total
from driftline.kernels.kda.composed import kda_composed

__all__ = ["kda_sequential"]

_EPS = 1e-6


def kda_sequential(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor,
    lower_bound: float = -5.0, initial_state: torch.Tensor | None = None, cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kda_composed`, in fp32 or wider."""
    forward = partial(_forward, lower_bound=lower_bound, cu_seqlens=cu_seqlens)

    def chunks(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor,
        initial_state: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return kda_composed(q, k, v, z, beta, a_log, dt_bias, lower_bound, initial_state, cu_seqlens)

    found: tuple[torch.Tensor, torch.Tensor] = exactly(forward, chunks, q, k, v, z, beta, a_log, dt_bias, initial_state)
    return found


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(total(x.square())[..., None] + _EPS)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor,
    initial_state: torch.Tensor | None, *, lower_bound: float, cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    heads, width = q.shape[2:]
    query, key, value = _unit(q.to(wide)) * width**-0.5, _unit(k.to(wide)), v.to(wide)
    gate = exp(a_log.to(wide))[:, None] * (z.to(wide) + dt_bias.to(wide).view(heads, width))
    decay = exp(lower_bound * sigmoid(gate))
    b = sigmoid(beta.to(wide))
    place = None
    if cu_seqlens is not None:
        place = _Packing(cu_seqlens, q.shape[1])
        query, key, value, b = (place.apart(x, 0.0) for x in (query, key, value, b))
        decay = place.apart(decay, 1.0)
    batch, steps = b.shape[:2]
    state = query.new_zeros(batch, heads, width, v.shape[-1]) if initial_state is None else initial_state.to(wide)
    out = torch.empty_like(value)
    for t in range(steps):
        state = state * decay[:, t, :, :, None]
        column = key[:, t, :, :, None]
        u = b[:, t, :, None] * (value[:, t] - total(column * state, -2))
        state = state + column * u[:, :, None, :]
        out[:, t] = total(query[:, t, :, :, None] * state, -2)
    if place is not None:
        out = place.together(out)
    return out.to(v.dtype), state if steps else state.clone()


class _Packing:
    """Sequences [1, T, ...] behind one another, and the same [N, longest, ...] beside one another. Reads their bounds on the host."""

    def __init__(self, bounds: torch.Tensor, tokens: int) -> None:
        lengths = bounds.diff()
        self.count, self.longest, self.tokens = lengths.numel(), int(lengths.max()) if lengths.numel() else 0, tokens
        self.sequence = torch.repeat_interleave(torch.arange(self.count, device=bounds.device), lengths)
        self.offset = torch.arange(self.sequence.numel(), device=bounds.device) - bounds.long()[self.sequence]

    def apart(self, x: torch.Tensor, fill: float) -> torch.Tensor:
        padded = x.new_full((self.count, self.longest, *x.shape[2:]), fill)
        padded[self.sequence, self.offset] = x[0, : self.sequence.numel()]
        return padded

    def together(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_zeros(1, self.tokens, *x.shape[2:])
        out[0, : self.sequence.numel()] = x[self.sequence, self.offset]
        return out
