"""Log-probabilities in deterministic mode without the kernels: logits by rows in blocks, a row's exponentials summed by one tree."""

from __future__ import annotations

from functools import partial

import torch

from driftline.kernels.fixed.gradient import exactly
from driftline.kernels.fixed.pointwise import exp, log
from driftline.kernels.fixed.sums import total
from driftline.kernels.linear import exact as products
from driftline.kernels.logprob import reference

__all__ = ["of_logits", "selected_logprobs"]


def of_logits(logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor | float) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probability of each row's token, entropy of its distribution), [N], of logits [N, V] / temperature. As exact and as differentiable as its parts,
    which the log-probability is; the entropy has no gradient."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scale = temperature.to(wide.dtype) if isinstance(temperature, torch.Tensor) else torch.full_like(wide[:, 0], temperature)
    scaled = wide / scale[:, None]
    below = scaled - scaled.detach().amax(-1, keepdim=True)
    e = exp(below)
    summed = total(e)
    normaliser = log(summed)
    with torch.no_grad():
        entropy = normaliser - total(torch.where(e > 0, e * below, 0.0)) / summed
    return below.gather(-1, ids.long()[:, None]).squeeze(-1) - normaliser, entropy


def selected_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor | float = 1.0, *, round_logits: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference.selected_logprobs`; each row's bits are its own. ids outside of [0, V) raise ValueError here too."""
    reference.checked_ids(ids, weight.shape[0])
    scales = temperature if isinstance(temperature, torch.Tensor) else hidden.new_full((hidden.shape[0],), temperature)
    form, gradient = partial(_forward, round_logits=round_logits), partial(_gradient, round_logits=round_logits)
    found: tuple[torch.Tensor, torch.Tensor] = exactly(form, gradient, hidden, weight, ids, scales.detach())
    return found[0], found[1].detach()


def _forward(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor, *, round_logits: bool) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return of_logits(products.linear(hidden, weight, None if round_logits else wide), ids, scales)


def _gradient(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor, *, round_logits: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.selected_logprobs(hidden, weight, ids, scales, round_logits=round_logits)
