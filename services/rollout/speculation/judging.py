"""REJECTION as a runner calls it: a window's logits and its rows' keys in, what stands out, with no read of the device."""

from __future__ import annotations

import torch

from driftline.services.rollout.randomness import device_uniforms
from driftline.services.rollout.speculation.rules import Purpose, Verdict, rejecting, stream

__all__ = ["judge"]


def judge(
    logits: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor,
    probs: torch.Tensor | None = None,
) -> Verdict:
    """`rejecting` with the draws of keys int64 [B] (a uint64's bits) at positions int64 [B] and behind: position j of the window has draw positions + j."""
    steps = tokens.shape[1]
    places = positions[:, None] + torch.arange(steps, device=positions.device)
    spread = keys[:, None].expand(-1, steps)
    draws = device_uniforms(spread.reshape(-1), places.reshape(-1)).view(-1, steps)
    acceptance = device_uniforms(stream(spread, Purpose.ACCEPTANCE).reshape(-1), places.reshape(-1)).view(-1, steps)
    return rejecting(logits, tokens, counts, temperatures, acceptance, draws, probs)
