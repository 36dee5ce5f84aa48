"""KDA from raw inputs in plain torch, by chunks: what runs where the kernels do not, and what its gradient is made of in deterministic mode too."""

from __future__ import annotations

from itertools import pairwise

import torch

from driftline.kernels.kda.chunk import kda_chunk
from driftline.kernels.kda.reference import bounded_gate, kda_step, l2_normalise

__all__ = ["kda_composed"]


def kda_composed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    z: torch.Tensor,
    beta: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float = -5.0,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in torch, in fp32 or wider throughout; the state is in that dtype. One token takes the recurrence itself. Reads cu_seqlens on the host."""
    wide = torch.promote_types(q.dtype, torch.float32)
    heads, width = q.shape[2:]
    qn, kn, vw = l2_normalise(q.to(wide)), l2_normalise(k.to(wide)), v.to(wide)
    g = bounded_gate((z.to(wide).flatten(2) + dt_bias.to(wide)).view(z.shape), a_log.to(wide), lower_bound)
    b = torch.sigmoid(beta.to(wide))
    count = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    state = q.new_zeros(count, heads, width, v.shape[-1], dtype=wide) if initial_state is None else initial_state.to(wide)
    if cu_seqlens is None:
        if q.shape[1] == 1:
            step, final = kda_step(qn[:, 0], kn[:, 0], vw[:, 0], g[:, 0], b[:, 0], state)
            return step[:, None].to(v.dtype), final
        o, final = kda_chunk(qn, kn, vw, g, b, state) if q.shape[1] else (vw, state)
        return o.to(v.dtype), final
    bounds = cu_seqlens.tolist()
    outs, states = [], []
    for n, (start, stop) in enumerate(pairwise(bounds)):
        o, final = vw[:, start:stop], state[n : n + 1]
        if stop > start:
            at = slice(start, stop)
            o, final = kda_chunk(qn[:, at], kn[:, at], vw[:, at], g[:, at], b[:, at], final)
        outs.append(o)
        states.append(final)
    return torch.cat(outs, 1).to(v.dtype), torch.cat(states)
