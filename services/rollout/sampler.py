"""Sampling by inverse distribution function: one uniform draw picks one token of the full support.

The reported log-probability is that of the distribution sampled from. The running sum is in fp64, so a token of probability 1e-9 keeps its chance.
"""

from __future__ import annotations

import numpy as np
import torch

from driftline.models.logprob import scaled_log_softmax

__all__ = ["greedy", "sample"]


def sample(logits: torch.Tensor, temperature: torch.Tensor | float, draws: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [N, V], draws float64 [N] in [0, 1). Returns tokens int64 [N] and their log-probabilities fp32 [N]."""
    logp = scaled_log_softmax(logits, temperature)
    running = logp.double().exp().cumsum(-1)
    point = torch.from_numpy(draws).to(running.device)[:, None] * running[:, -1:]
    # right=True: a token of probability zero spans nothing and is never picked.
    tokens = torch.searchsorted(running, point, right=True).squeeze(-1).clamp_max(logits.shape[-1] - 1)
    return tokens, logp.gather(-1, tokens[:, None]).squeeze(-1).float()


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The most probable token of each row, int64 [N]."""
    return logits.argmax(-1)
