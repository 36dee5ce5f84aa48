"""Log-probabilities of given tokens straight from the last hidden states: [N, V] logits are never held, forward or backward. See docs/kernels/logprob.md.

A row's numbers depend on that row alone, so the learner's pass and a rollout's give one answer for one row however they are batched.
"""

from __future__ import annotations

import torch

from driftline.kernels.dispatch import runs_triton
from driftline.kernels.logprob import exact, reference
from driftline.kernels.mode import deterministic

__all__ = ["selected_logprobs"]


def selected_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor | float = 1.0, *, round_logits: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probability of each row's token, entropy of each row's distribution), fp32 [N] in nats (fp64 for fp64), of softmax(hidden weight^T / temperature).

    hidden [N, D] and weight [V, D] of one dtype (bf16, fp16, fp32 or, by the reference, fp64), ids int32 or int64 [N], temperature a positive number or
    [N]. Logits stay fp32 between the product and the softmax; `round_logits` rounds them to the dtype first, which is what a model holds that writes its
    logits. Differentiable once, to hidden and weight, through the log-probability; the entropy has no gradient.

    By the kernels where all are on a CUDA device, else by the reference. Raises ValueError for arguments that do not go together, and for an id outside of
    the vocabulary where the reference runs; on a device, where nobody waits to look, such an id's log-probability is NaN.
    """
    reference.checked(hidden, weight, ids, temperature)
    scales = temperature if isinstance(temperature, torch.Tensor) else None
    if hidden.dtype == torch.float64 or not runs_triton(hidden, weight, ids, scales):
        if deterministic():
            return exact.selected_logprobs(hidden, weight, ids, temperature, round_logits=round_logits)
        return reference.selected_logprobs(hidden, weight, ids, temperature, round_logits=round_logits)
    from driftline.kernels.logprob.autograd import SelectedLogprobs

    inverse = _inverse(temperature, hidden)
    logprob, entropy = SelectedLogprobs.apply(hidden, weight, ids.contiguous(), inverse, round_logits)  # type: ignore[no-untyped-call]
    return logprob, entropy


def _inverse(temperature: torch.Tensor | float, hidden: torch.Tensor) -> torch.Tensor:
    if isinstance(temperature, torch.Tensor):
        return temperature.detach().to(torch.float32).reciprocal()
    return torch.full((hidden.shape[0],), temperature, dtype=torch.float32, device=hidden.device).reciprocal()
