"""REJECTION as a runner calls it: a window's logits and its rows' keys in, what stands out, with no read of the device."""

from __future__ import annotations

import torch

from driftline.services.rollout.randomness import device_uniforms
from driftline.services.rollout.speculation.rules import Purpose, Verdict, rejecting, stream

__all__ = ["judge"]

_COLD = 1e-6
"""A temperature at which only the likeliest token has any probability."""


def judge(
    logits: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor,
    probs: torch.Tensor | None = None,
) -> Verdict:
    """`rejecting` with the draws of keys int64 [B] (a uint64's bits) at positions int64 [B] and behind: position j of the window has draw positions + j. A row whose
    temperature is 0 takes the likeliest tokens, with their log-probabilities at temperature 1."""
    steps = tokens.shape[1]
    places = positions[:, None] + torch.arange(steps, device=positions.device)
    spread = keys[:, None].expand(-1, steps)
    draws = device_uniforms(spread.reshape(-1), places.reshape(-1)).view(-1, steps)
    acceptance = device_uniforms(stream(spread, Purpose.ACCEPTANCE).reshape(-1), places.reshape(-1)).view(-1, steps)
    likeliest = temperatures <= 0
    verdict = rejecting(logits, tokens, counts, torch.where(likeliest, _COLD, temperatures), acceptance, draws, probs)
    wide = logits.float()
    at_one = wide.gather(2, verdict.tokens[..., None]).squeeze(2) - wide.logsumexp(2)
    return verdict._replace(logprobs=torch.where(likeliest[:, None], at_one, verdict.logprobs))
