"""One step on the device: the model over new tokens, and a token drawn behind each of them. Nothing in it looks at a value on the host.

A window's every position is drawn with the draw that plain decoding would take there, so a draft stands exactly as far as it agrees with what was drawn; a `Rule`
that judges otherwise is called instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from driftline.models.causal_lm import CausalLM
from driftline.services.rollout.randomness import device_uniforms
from driftline.services.rollout.runner.staging import Inputs
from driftline.services.rollout.sampler import draw

__all__ = ["Forward", "Greedy", "Outputs", "Rule", "Taps", "drawn", "step"]


CHANCES = 2**25
"""Of a vocabulary and rows at a time: their running sums are fp64, and 1,024 positions of K3's would hold 1.3 GB in each of several tensors."""


class Computed(Protocol):
    """What a forward gives: hidden [B, T, D] and routes int64 [B, T, layers, k]."""

    @property
    def hidden(self) -> torch.Tensor: ...

    @property
    def routes(self) -> torch.Tensor: ...


Forward = Callable[[Inputs], Computed]
"""The model over a step's tokens, whose rows and states it leaves in the pool."""

Rule = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor, torch.Tensor]
]
"""Which drafts stand: (logits [B, T, V], tokens [B, T], counts [B], temperatures [B], keys [B], positions [B], probs) -> (tokens int64 [B, T], log-probabilities fp32
[B, T], accepted int32 [B])."""


Taps = Callable[[], torch.Tensor]
"""What a drafter is given of the last forward's hidden states, [B, T, ...]; taken once after each."""


class Greedy(NamedTuple):
    """Which rows take their likeliest token, as the host knows it: those with a temperature of 0, every one, or (neither) none."""

    some: bool
    every: bool


class Outputs(NamedTuple):
    """tokens int64 [B, T], logprobs fp32 [B, T], routes int16 [B, T, layers, k], hidden [B, T, D], accepted int32 [B] of a rule, taps [B, T, ...] of a drafter's."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    routes: torch.Tensor
    hidden: torch.Tensor
    accepted: torch.Tensor | None
    taps: torch.Tensor | None


def step(model: CausalLM, forward: Forward, inputs: Inputs, greedy: Greedy, rule: Rule | None, taps: Taps | None = None) -> Outputs:
    """Advance the rows by their tokens and draw behind them."""
    computed = forward(inputs)
    tapped = None if taps is None else taps()
    hidden, routes = computed.hidden, computed.routes.to(torch.int16)
    rows, window = inputs.tokens.shape
    if rule is not None and window > 1:
        logits = model.logits(hidden)
        tokens, logprobs, accepted = rule(logits, inputs.tokens, inputs.counts, inputs.temperatures, inputs.keys, inputs.positions, inputs.probs)
        return Outputs(tokens, logprobs.float(), routes, hidden, accepted.to(torch.int32), tapped)
    positions = inputs.positions[:, None] + torch.arange(window, device=hidden.device)
    draws = device_uniforms(inputs.keys[:, None], positions).flatten()
    temperatures = inputs.temperatures[:, None].expand(-1, window).flatten()
    tokens, logprobs = drawn(model, hidden.flatten(0, 1), temperatures, draws, greedy)
    return Outputs(tokens.view(rows, window), logprobs.view(rows, window), routes, hidden, None, tapped)


def drawn(model: CausalLM, hidden: torch.Tensor, temperatures: torch.Tensor, draws: torch.Tensor, greedy: Greedy) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [N, D], temperatures fp32 [N], draws float64 [N]: tokens int64 [N] and their log-probabilities fp32 [N]."""
    rows = max(1, CHANCES // model.lm_head.weight.shape[0])
    each = zip(torch.split(hidden, rows), torch.split(temperatures, rows), torch.split(draws, rows), strict=True)
    parts = [_drawn(model, h, t, d, greedy) for h, t, d in each]
    return parts[0] if len(parts) == 1 else (torch.cat([tokens for tokens, _ in parts]), torch.cat([logprobs for _, logprobs in parts]))


def _drawn(model: CausalLM, hidden: torch.Tensor, temperatures: torch.Tensor, draws: torch.Tensor, greedy: Greedy) -> tuple[torch.Tensor, torch.Tensor]:
    if not greedy.some and not greedy.every:
        return draw(model, hidden, temperatures, draws)
    likeliest = temperatures <= 0
    temperatures = torch.where(likeliest, 1.0, temperatures)
    first = draw(model, hidden, temperatures, None)
    if greedy.every:
        return first
    second = draw(model, hidden, temperatures, draws)
    return torch.where(likeliest, first[0], second[0]), torch.where(likeliest, first[1], second[1])
