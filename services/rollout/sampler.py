"""Sampling by inverse distribution function: one uniform draw picks one token of the full support.

The reported log-probability is that of the distribution sampled from. In FAST the running sum is in fp64, so a token of probability 1e-9 keeps its chance.
In deterministic mode the log-probability comes from the model's own `logprobs`, the function that the learner calls, and the running sum is of integers,
which no order of additions changes: a row's token is its own whatever is sampled beside it.
"""

from __future__ import annotations

import numpy as np
import torch

from driftline.kernels.fixed.pointwise import exp
from driftline.kernels.mode import deterministic
from driftline.models.causal_lm import CausalLM
from driftline.models.logprob import scaled_log_softmax

__all__ = ["choose", "draw", "greedy", "sample"]

_UNITS = 44
"""Bits of a weight: the likeliest token has 2^44, and 2^18 tokens of the same chance still add up within 63."""


def draw(model: CausalLM, hidden: torch.Tensor, temperature: torch.Tensor, draws: np.ndarray | torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [N, D] of the last positions, temperature [N], draws float64 [N] in [0, 1), on the host or the device, or None for the likeliest token. Returns tokens int64 [N] and their
    log-probabilities fp32 [N]."""
    logits = model.logits(hidden)
    if deterministic():
        tokens = greedy(logits) if draws is None else choose(logits, temperature, draws)
        return tokens, model.logprobs(hidden, tokens, temperature)[0].float()
    if draws is not None:
        return sample(logits, temperature, draws)
    tokens = greedy(logits)
    return tokens, torch.log_softmax(logits.float() / temperature[:, None], -1).gather(-1, tokens[:, None]).squeeze(-1)


def sample(logits: torch.Tensor, temperature: torch.Tensor | float, draws: np.ndarray | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [N, V], draws float64 [N] in [0, 1). Returns tokens int64 [N] and their log-probabilities fp32 [N]."""
    logp = scaled_log_softmax(logits, temperature)
    running = logp.double().exp().cumsum(-1)
    point = _on(running.device, draws)[:, None] * running[:, -1:]
    # right=True: a token of probability zero spans nothing and is never picked.
    tokens = torch.searchsorted(running, point, right=True).squeeze(-1).clamp_max(logits.shape[-1] - 1)
    return tokens, logp.gather(-1, tokens[:, None]).squeeze(-1).float()


def choose(logits: torch.Tensor, temperature: torch.Tensor, draws: np.ndarray | torch.Tensor) -> torch.Tensor:
    """The token int64 [N] of each draw, from logits [N, V] and temperature [N]: weights exp((logit - largest) / temperature) in units of 2^-44, rounded down, and
    their exact running sum. A token less likely than 2^-44 of the likeliest is not drawn. At most 2^18 tokens."""
    below = (logits - logits.amax(-1, keepdim=True)).double() / temperature.double()[:, None]
    running = (exp(below) * 2.0**_UNITS).long().cumsum(-1)
    point = (_on(running.device, draws) * running[:, -1].double()).long()
    point = torch.minimum(point, running[:, -1] - 1)[:, None]
    return torch.searchsorted(running, point, right=True).squeeze(-1)


def _on(device: torch.device, draws: np.ndarray | torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(draws).to(device) if isinstance(draws, np.ndarray) else draws


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The most probable token of each row, int64 [N]."""
    return logits.argmax(-1)
