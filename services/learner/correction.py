"""Behaviour correction: how much a token counts when the policy that sampled it is not quite the one the step starts from.

With r = exp(prox - behave), where `prox` are the log-probabilities recomputed at the start of the step and `behave` the recorded
ones: truncated importance sampling weighs a token by min(r, cap), IcePop drops tokens with r outside [low, high]. Guarantees:
weights carry no gradient and use the frozen proximal policy, never the current one (staleness would count twice); bounds are
inclusive and bound r itself, not its inverse; a sequence-level ratio is the geometric mean over action tokens, because the
product of thousands of tiny drifts is not one; an action token without a finite behaviour log-probability is dropped and
counted, never read as on-policy. What is dropped here leaves the loss only: neither the sequence ratio nor a denominator moves.

If `prox` is set to `behave` (no recomputation) there is nothing to correct: do not call this.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from driftline.messages.errors import ConfigError
from driftline.services.learner.segments import flatten, masked, require_precise

__all__ = ["Correction", "CorrectionConfig", "Level", "correct"]


class Level(StrEnum):
    TOKEN = "token"
    SEQUENCE = "sequence"


@dataclass(frozen=True)
class CorrectionConfig:
    """`tis_cap` caps the weight; `icepop` = (low, high) keeps r within it. `weigh` false keeps IcePop's mask without weights.

    With neither set, nothing is weighed and only tokens without a behaviour log-probability are dropped.
    """

    tis_cap: float | None = None
    icepop: tuple[float, float] | None = None
    level: Level = Level.TOKEN
    weigh: bool = True
    log_ratio_clamp: float = 20.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "level", Level(self.level))
        if self.tis_cap is not None and not self.tis_cap > 0:
            raise ConfigError("every weight would be zero", field="tis_cap", value=self.tis_cap, remedy="2 to 5 is usual")
        if self.icepop is not None and not 0 <= self.icepop[0] < self.icepop[1]:
            raise ConfigError("masks every token", field="icepop", value=self.icepop,
                              remedy="give (low, high) with 0 <= low < high; (0.5, 5.0) is the published example")
        if not 0 < self.log_ratio_clamp <= 80:
            raise ConfigError("exp overflows float32 above 88", field="log_ratio_clamp", value=self.log_ratio_clamp,
                              remedy="use a value in (0, 80]; 20 is usual")


@dataclass(frozen=True)
class Correction:
    """For `objective.loss`: `keep` is its token_keep, `weight` its token_weight (None: all one). `ratio` is r, one off the mask.

    `missing` counts action tokens without a finite behaviour log-probability (a 0-d tensor, so nothing waits for the device).
    """

    keep: Tensor
    weight: Tensor | None
    ratio: Tensor
    missing: Tensor


def correct(
    config: CorrectionConfig, *, logp_prox: Tensor, logp_behave: Tensor, mask: Tensor, seq_id: Tensor | None = None
) -> Correction:
    """Tensors are [B, T], or [N] with `seq_id` (needed for the sequence level only). float32 or float64."""
    require_precise(logp_prox=logp_prox, logp_behave=logp_behave)
    prox, behave = logp_prox.detach(), logp_behave.detach()
    present = mask & torch.isfinite(behave)
    usable = present & torch.isfinite(prox)
    log_ratio = masked(prox, usable) - masked(behave, usable)
    if config.level is Level.SEQUENCE:
        segments = flatten(prox.shape, mask, seq_id, None)
        counts = segments.sums(usable.reshape(-1).to(torch.float64)).clamp_min(1.0)
        mean = segments.sums(log_ratio.reshape(-1).to(torch.float64)) / counts
        log_ratio = masked(segments.spread(mean).to(prox.dtype).reshape(prox.shape), usable)
    ratio = log_ratio.clamp(-config.log_ratio_clamp, config.log_ratio_clamp).exp()
    keep = usable
    if config.icepop is not None:
        keep = keep & (ratio >= config.icepop[0]) & (ratio <= config.icepop[1])
    weight = None
    if config.weigh and (config.tis_cap is not None or config.icepop is not None):
        weight = masked(ratio if config.tis_cap is None else ratio.clamp_max(config.tis_cap), keep)
    return Correction(keep, weight, ratio, (mask & ~present).sum())
