"""`selected_logprobs` by the kernels, with its gradients. Saved are the inputs and one number a row."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from driftline.kernels.logprob import triton as kernels

__all__ = ["SelectedLogprobs"]


class SelectedLogprobs(torch.autograd.Function):
    """hidden [N, D], weight [V, D], ids [N], inverse fp32 [N] (one over the temperatures) -> (logprob, entropy); the entropy has no gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, inverse: torch.Tensor, round_logits: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprob, entropy, normaliser = kernels.forward(hidden, weight, ids, inverse, round_logits=round_logits)
        ctx.save_for_backward(hidden, weight, ids, inverse, normaliser)
        ctx.round_logits = round_logits
        ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_logprob: torch.Tensor, to_entropy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        hidden, weight, ids, inverse, normaliser = ctx.saved_tensors
        d_hidden, d_weight = kernels.gradients(
            hidden, weight, ids, inverse, normaliser, to_logprob.contiguous(), to_hidden=ctx.needs_input_grad[0], to_weight=ctx.needs_input_grad[1],
            round_logits=ctx.round_logits,
        )
        return d_hidden, d_weight, None, None, None
