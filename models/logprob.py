"""Log-probabilities of sampled tokens: one definition for rollout and learner, so that the two can be compared at all.

Logits are divided by the sampling temperature before the softmax (never the log-probabilities after it), in fp32, over the full vocabulary.
"""

from __future__ import annotations

import torch

from driftline.kernels.logprob import exact
from driftline.kernels.mode import deterministic

__all__ = ["scaled_log_softmax", "token_logprobs"]


def scaled_log_softmax(logits: torch.Tensor, temperature: torch.Tensor | float) -> torch.Tensor:
    """log softmax(logits / temperature) over the last axis, at least fp32. logits [N, V]; temperature a number or [N]."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if isinstance(temperature, torch.Tensor):
        wide = wide / temperature.to(wide.dtype)[:, None]
    elif temperature != 1.0:
        wide = wide / temperature
    return torch.log_softmax(wide, dim=-1)


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor | float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probability of each token, entropy of each distribution), both [N] in nats. logits [N, V], tokens [N] int64. In deterministic mode a row's bits are
    its own."""
    if deterministic():
        return exact.of_logits(logits, tokens, temperature)
    logp = scaled_log_softmax(logits, temperature)
    picked = logp.gather(-1, tokens[:, None]).squeeze(-1)
    with torch.no_grad():
        entropy = torch.special.entr(logp.exp()).sum(-1)  # -p log p, and 0 where p is 0
    return picked, entropy
