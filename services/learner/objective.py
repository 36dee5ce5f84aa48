"""The policy loss: what one optimizer step minimises, as a pure function of log-probabilities.

Guarantees: micro-batches add up. The denominators are those of the global batch before any masking, so the losses and gradients
of a batch's parts sum to the loss and gradient of the whole, however it is split, padded, packed or ordered (at a sequence's
boundary). Positions off the mask change nothing, whatever they hold. Masks (`token_keep`) act on the loss only: the sequence
ratio is a property of the pair of policies and is taken over all action tokens. A sequence without action tokens contributes
zero. Log-ratios are clamped before `exp`, and beyond the clamp the gradient is zero, so no ratio overflows.

A clipped objective with ratio r and advantage A is `max(-rA, -clip(r)A)`, and for A < 0 at most `-cA` (dual clip): without that
cap one sequence with a large ratio and A < 0 owns the whole step. Two-sided clipping with `delta` is the same function.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Self

import structlog
import torch
from torch import Tensor

from driftline.messages.errors import ConfigError
from driftline.services.config import Objective
from driftline.services.learner.segments import LossInputError, Segments, flatten, masked, require_precise

__all__ = ["Aggregation", "Denominators", "LossOutput", "Objective", "ObjectiveConfig", "Tally", "loss"]

DUAL_CLIP = 3.0
CLIPPED = frozenset({Objective.GSPO, Objective.GRPO, Objective.PPO})
# One token of ratio 100 moves a sequence ratio by 4.7 % in 100 tokens and by 0.05 % in 10,000: GSPO's published bounds suit
# answers of thousands of tokens and clip nearly everything below a few hundred.
SHORT_SEQUENCE = 200.0
TIGHT_CLIP = 1e-2


class Aggregation(StrEnum):
    """How token losses become one number. Sequences without action tokens count nowhere."""

    SEQ_MEAN_TOKEN_MEAN = "seq_mean_token_mean"
    TOKEN_MEAN = "token_mean"
    SEQ_MEAN_TOKEN_SUM = "seq_mean_token_sum"
    TOKEN_SUM = "token_sum"


_DEFAULT_AGGREGATION: Mapping[Objective, Aggregation] = MappingProxyType({
    Objective.GSPO: Aggregation.SEQ_MEAN_TOKEN_MEAN,
    Objective.GRPO: Aggregation.SEQ_MEAN_TOKEN_MEAN,
    Objective.PPO: Aggregation.TOKEN_MEAN,
    Objective.CISPO: Aggregation.TOKEN_MEAN,
    Objective.IMPORTANCE_SAMPLING: Aggregation.TOKEN_MEAN,
    Objective.CROSS_ENTROPY: Aggregation.TOKEN_MEAN,
})


@dataclass(frozen=True)
class ObjectiveConfig:
    """Which loss, and its bounds.

    `eps_low` and `eps_high` bound the ratio to [1 - eps_low, 1 + eps_high]; `clip_low_threshold` and `clip_high_threshold`
    replace them by absolute ratios, as tinker names them (0.8 means 0.8). `cispo_low` and `cispo_high` are CISPO's own absolute
    bounds. `dual_clip` caps the loss of a negative advantage at that many times its size (None: no cap); `delta` is the same
    bound under INTELLECT-2's name. `aggregation` None means the objective's usual one.
    """

    name: Objective = Objective.GSPO
    eps_low: float = 3e-4
    eps_high: float = 4e-4
    dual_clip: float | None = DUAL_CLIP
    delta: float | None = None
    clip_low_threshold: float | None = None
    clip_high_threshold: float | None = None
    cispo_low: float = 0.0
    cispo_high: float = 4.0
    log_ratio_clamp: float = 20.0
    aggregation: Aggregation | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", Objective(self.name))
        if self.aggregation is not None:
            object.__setattr__(self, "aggregation", Aggregation(self.aggregation))
        low, high = self.bounds
        if self.name is Objective.CISPO:
            if not 0 <= low < high:
                raise ConfigError("the bounds hold no ratio", field="cispo bounds", value=(low, high),
                                  remedy="give 0 <= low < high, as absolute ratios")
        elif not 0 <= low <= 1 <= high:
            raise ConfigError("the clip range must contain the ratio 1", field="clip bounds", value=(low, high),
                              remedy="eps_low and eps_high are distances from 1; thresholds are absolute ratios")
        if self.delta is not None and self.dual_clip not in (None, DUAL_CLIP, self.delta):
            raise ConfigError("two names of one bound disagree", field="delta", value=(self.delta, self.dual_clip),
                              remedy="set dual_clip or delta, not both")
        if self.name in CLIPPED and self.cap is not None and self.cap < high:
            raise ConfigError(f"the cap for negative advantages is below the upper clip bound {high:g}",
                              field="dual_clip", value=self.cap, remedy="use a larger one; 3 is usual")
        if not 0 < self.log_ratio_clamp <= 80:
            raise ConfigError("exp overflows float32 above 88", field="log_ratio_clamp", value=self.log_ratio_clamp,
                              remedy="use a value in (0, 80]; 20 is usual")

    @property
    def bounds(self) -> tuple[float, float]:
        """The absolute ratios the objective clips to."""
        if self.name is Objective.CISPO:
            low, high = self.cispo_low, self.cispo_high
        else:
            low, high = 1 - self.eps_low, 1 + self.eps_high
        return (low if self.clip_low_threshold is None else self.clip_low_threshold,
                high if self.clip_high_threshold is None else self.clip_high_threshold)

    @property
    def cap(self) -> float | None:
        return self.dual_clip if self.delta is None else self.delta

    @property
    def reduction(self) -> Aggregation:
        return _DEFAULT_AGGREGATION[self.name] if self.aggregation is None else self.aggregation


@dataclass(frozen=True)
class Denominators:
    """What a global batch's sums are divided by: sequences with at least one action token, and action tokens."""

    sequences: int
    action_tokens: int

    @classmethod
    def of(cls, mask: Tensor, seq_id: Tensor | None = None) -> Self:
        """Count a whole batch: `mask` [B, T], or [N] with `seq_id` [N]."""
        lengths = flatten(mask.shape, mask, seq_id, None).lengths()
        return cls(int((lengths > 0).sum()), int(lengths.sum()))

    def __add__(self, other: Denominators) -> Denominators:
        return Denominators(self.sequences + other.sequences, self.action_tokens + other.action_tokens)


@dataclass(frozen=True)
class Tally:
    """What one call counted, as sums: add the tallies of the micro-batches, then ask for the metrics once.

    A unit is what carries one ratio: a sequence for GSPO, an action token otherwise. All sums are one float64 vector, so asking
    for the metrics waits for the device once.
    """

    sums: Tensor

    FIELDS = ("action_tokens", "sequences", "clip_high", "clip_low", "dual_clip", "kept", "units", "ratio", "ratio_squared",
              "dropped", "new_non_finite")

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.sums + other.sums)

    def metrics(self) -> dict[str, float]:
        """clip_high, clip_low, dual_clip, masked: fractions of action tokens. ess: in (0, 1], of the units.
        dropped and new_non_finite: counts of action tokens without a usable proximal or new log-probability."""
        total = dict(zip(self.FIELDS, self.sums.tolist(), strict=True))
        tokens, units = max(total["action_tokens"], 1.0), max(total["units"], 1.0)
        squared = total["ratio_squared"]
        return {
            "clip_high": total["clip_high"] / tokens,
            "clip_low": total["clip_low"] / tokens,
            "clip": (total["clip_high"] + total["clip_low"]) / tokens,
            "dual_clip": total["dual_clip"] / tokens,
            "masked": 1.0 - total["kept"] / tokens if total["action_tokens"] else 0.0,
            "ratio_mean": total["ratio"] / units,
            "ess": total["ratio"] ** 2 / (units * squared) if squared > 0 else 0.0,
            "length_mean": total["action_tokens"] / max(total["sequences"], 1.0),
            "sequences": total["sequences"],
            "action_tokens": total["action_tokens"],
            "dropped": total["dropped"],
            "new_non_finite": total["new_non_finite"],
        }


@dataclass(frozen=True)
class LossOutput:
    """`loss` is a scalar to call `backward` on; micro-batches' losses add up to the batch's."""

    loss: Tensor
    tally: Tally

    @property
    def metrics(self) -> dict[str, float]:
        return self.tally.metrics()


def loss(
    config: ObjectiveConfig,
    *,
    logp_new: Tensor,
    logp_prox: Tensor | None,
    mask: Tensor,
    advantages: Tensor | None,
    denominators: Denominators,
    token_keep: Tensor | None = None,
    token_weight: Tensor | None = None,
    seq_id: Tensor | None = None,
) -> LossOutput:
    """The loss of a batch, or of a part of it, in the precision of `logp_new` (float32 or float64).

    Padded: token tensors are [B, T] and `advantages` [B]. Packed: token tensors are [N], `seq_id` [N] names each token's
    sequence, `advantages` [S]. A sequence must lie whole in one call. `mask` is true at action tokens. `token_keep` false drops
    a token from the loss; `token_weight` multiplies its loss and carries no gradient. Cross entropy needs no `logp_prox`, and
    its `advantages`, if given, weigh sequences.

        >>> half = torch.tensor([[-0.7, -0.7]])
        >>> out = loss(ObjectiveConfig(), logp_new=half, logp_prox=half, mask=half < 0, advantages=torch.tensor([1.0]),
        ...            denominators=Denominators(1, 2))
    """
    if logp_prox is None and config.name is not Objective.CROSS_ENTROPY:
        raise LossInputError(f"{config.name} compares two policies", field="logp_prox", value=None)
    if advantages is None and config.name is not Objective.CROSS_ENTROPY:
        raise LossInputError(f"{config.name} needs one advantage per sequence", field="advantages", value=None)
    require_precise(logp_new=logp_new, logp_prox=logp_prox, token_weight=token_weight)
    if token_keep is not None and (token_keep.dtype != torch.bool or token_keep.shape != logp_new.shape):
        raise LossInputError(f"expected bool {tuple(logp_new.shape)}", field="token_keep",
                             value=f"{token_keep.dtype} {tuple(token_keep.shape)}")
    if advantages is not None and (advantages.ndim != 1 or not advantages.is_floating_point()):
        raise LossInputError("expected one floating-point number per sequence", field="advantages",
                             value=f"{advantages.dtype} {tuple(advantages.shape)}")
    segments = flatten(logp_new.shape, mask, seq_id, None if advantages is None else len(advantages))
    if config.name is Objective.GSPO and min(1 - config.bounds[0], config.bounds[1] - 1) < TIGHT_CLIP:
        _warn_if_short(denominators)

    new, prox = logp_new.reshape(-1), (logp_new.detach() if logp_prox is None else logp_prox.detach()).reshape(-1)
    active = segments.mask
    usable = active if logp_prox is None else active & torch.isfinite(prox)
    kept = usable if token_keep is None else usable & token_keep.reshape(-1)
    new, prox = masked(new, usable), masked(prox, usable)
    weight = torch.ones_like(new) if advantages is None else segments.spread(advantages.detach().to(new.dtype))
    weight = masked(weight, active)

    ratio = _ratio(config, new, prox, usable, segments)
    token_loss, high, low, capped = _token_loss(config, new, ratio, weight)
    if token_weight is not None:
        token_loss = token_loss * masked(token_weight.detach().reshape(-1), kept)
    value = _aggregate(config.reduction, masked(token_loss, kept), segments, denominators)
    tally = _tally(config, segments, active, usable, kept, ratio.detach(), logp_new.detach().reshape(-1), high, low, capped)
    return LossOutput(value, tally)


def _ratio(config: ObjectiveConfig, new: Tensor, prox: Tensor, usable: Tensor, segments: Segments) -> Tensor:
    """The importance ratio at each token, [N]. Clamped before exp; beyond the clamp it has no gradient."""
    log_ratio = new - prox
    if config.name is Objective.GSPO:
        # GSPO-token: the value of the sequence's mean log-ratio, the gradient of the token. The bracket is exactly zero and comes
        # first: added the other way round, the mean is rounded away against the log-probability.
        counts = segments.sums(usable.to(torch.float64)).clamp_min(1.0)
        mean = segments.sums(log_ratio.detach().to(torch.float64)) / counts
        log_ratio = (new - new.detach()) + segments.spread(mean).to(new.dtype)
    return log_ratio.clamp(-config.log_ratio_clamp, config.log_ratio_clamp).exp()


def _token_loss(
    config: ObjectiveConfig, new: Tensor, ratio: Tensor, advantage: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss at each token, and where it was clipped above, clipped below, and capped. All [N]."""
    nowhere = torch.zeros_like(ratio, dtype=torch.bool)
    low, high = config.bounds
    match config.name:
        case Objective.CROSS_ENTROPY:
            return -new * advantage, nowhere, nowhere, nowhere
        case Objective.IMPORTANCE_SAMPLING:
            return -ratio * advantage, nowhere, nowhere, nowhere
        case Objective.CISPO:
            fixed = ratio.detach()
            return -fixed.clamp(low, high) * advantage * new, fixed > high, fixed < low, nowhere
        case Objective.GSPO | Objective.GRPO | Objective.PPO:
            plain, clipped = -ratio * advantage, -ratio.clamp(low, high) * advantage
            worse = clipped > plain
            value = torch.where(worse, clipped, plain)
            capped = nowhere
            if config.cap is not None:
                cap = -config.cap * advantage
                capped = (advantage < 0) & (value > cap)
                value = torch.where(capped, cap, value)
            return value, worse & (advantage > 0), worse & (advantage < 0), capped


def _aggregate(how: Aggregation, values: Tensor, segments: Segments, denominators: Denominators) -> Tensor:
    per_sequence = segments.sums(values)
    if how is Aggregation.SEQ_MEAN_TOKEN_MEAN:
        per_sequence = per_sequence / segments.lengths().clamp_min(1).to(values.dtype)
    total = per_sequence.sum()
    match how:
        case Aggregation.SEQ_MEAN_TOKEN_MEAN | Aggregation.SEQ_MEAN_TOKEN_SUM:
            return total / max(denominators.sequences, 1)
        case Aggregation.TOKEN_MEAN:
            return total / max(denominators.action_tokens, 1)
        case Aggregation.TOKEN_SUM:
            return total


def _tally(
    config: ObjectiveConfig, segments: Segments, active: Tensor, usable: Tensor, kept: Tensor, ratio: Tensor, new: Tensor,
    high: Tensor, low: Tensor, capped: Tensor,
) -> Tally:
    precise = masked(ratio.to(torch.float64), usable)
    lengths = segments.lengths()
    if config.name is Objective.GSPO:  # one ratio per sequence: the mean of equal numbers
        counts = segments.sums(usable.to(torch.float64))
        units, precise = counts > 0, segments.sums(precise) / counts.clamp_min(1.0)
    else:
        units = usable
    parts = (active, lengths > 0, high & active, low & active, capped & active, kept, units, precise, precise.square(),
             active & ~usable, active & ~torch.isfinite(new))
    return Tally(torch.stack([part.sum(dtype=torch.float64) for part in parts]))


def _warn_if_short(denominators: Denominators) -> None:
    mean = denominators.action_tokens / max(denominators.sequences, 1)
    if 0 < mean < SHORT_SEQUENCE:
        _warn_short_once()


@functools.cache
def _warn_short_once() -> None:
    structlog.get_logger(__name__).warning(
        "gspo_clip_tight_for_short_sequences", mean_action_tokens_below=SHORT_SEQUENCE, eps_below=TIGHT_CLIP,
        remedy="raise learner.eps_low and eps_high (0.2 is usual for short answers), or watch the clip fraction",
    )
