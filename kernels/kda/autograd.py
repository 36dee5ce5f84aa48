"""KDA with a gradient: the forward keeps nothing but its raw inputs, the backward computes everything again from them, by chunks.

At K3's shapes the inputs are 1.26 KB a token and head; nothing else of the forward outlives it. So the forward is free to be the recurrence itself, which it
is in deterministic mode: the bits of decoding.
"""

from __future__ import annotations

from typing import Any

import torch

from driftline.kernels.kda.forward import forward
from driftline.kernels.kda.operator import kernel_inputs
from driftline.kernels.mode import deterministic

__all__ = ["KimiDeltaAttention", "kda_by_kernels"]


class KimiDeltaAttention(torch.autograd.Function):
    """kda over the kernels: gradients to every tensor argument but cu_seqlens, in the arguments' dtypes."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor,
        lower_bound: float, initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(q, k, v, z, beta, a_log, dt_bias, initial_state, cu_seqlens)
        ctx.lower_bound = lower_bound
        ctx.set_materialize_grads(False)
        return _forward(q, k, v, z, beta, a_log, dt_bias, lower_bound, initial_state, cu_seqlens)

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor | None, dfinal_state: torch.Tensor | None) -> tuple[Any, ...]:
        from driftline.kernels.kda.backward import kda_backward

        q, k, v, z, beta, a_log, dt_bias, initial_state, cu_seqlens = ctx.saved_tensors
        do = torch.zeros_like(v) if do is None else do
        dq, dk, dv, dz, dbeta, da_log, ddt_bias, dinitial = kda_backward(
            q, k, v, z, beta, a_log, dt_bias, ctx.lower_bound, initial_state, cu_seqlens, do, dfinal_state)
        return dq, dk, dv, dz, dbeta, da_log, ddt_bias, None, None if initial_state is None else dinitial, None


def kda_by_kernels(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor,
    lower_bound: float, initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """kda for tensors that the kernels take, with a gradient when one of them asks for it."""
    given = (q, k, v, z, beta, a_log, dt_bias, initial_state)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
        o, final = KimiDeltaAttention.apply(  # type: ignore[no-untyped-call]
            q, k, v, z, beta, a_log, dt_bias, lower_bound, initial_state, cu_seqlens)
        return o, final
    return _forward(q, k, v, z, beta, a_log, dt_bias, lower_bound, initial_state, cu_seqlens)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, z: torch.Tensor, beta: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor,
    lower_bound: float, initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if deterministic():
        from driftline.kernels.kda_decode.sequence import kda_sequence

        return kda_sequence(q, k, v, z, beta, a_log, dt_bias, lower_bound, initial_state, cu_seqlens)
    return forward(kernel_inputs(q, k, v, z, beta, a_log, dt_bias, lower_bound, initial_state), cu_seqlens)
