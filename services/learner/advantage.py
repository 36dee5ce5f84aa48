"""Advantages of one group, from its raw rewards, in float64.

Guarantees: a group whose rewards are all equal has advantage exactly zero. That is decided by `max == min` on the raw rewards,
never by a computed deviation: eight rewards of 0.7 have a float32 deviation above zero, and dividing by it is a full-size
gradient out of nothing. A group of fewer than two rewards has advantage zero, not its raw reward. A missing or non-finite reward
drops that member from baseline and loss, and is counted. No torch here: the assembler asks the same question.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Estimator", "GroupAdvantage", "group_advantages", "is_zero_variance"]


class Estimator(StrEnum):
    """MEAN: r - mean. STD: that over (unbiased std + eps). RLOO: r minus the mean of the others. MAXRL: (r - mean) / mean,
    zero if the mean is not positive."""

    MEAN = "mean"
    STD = "std"
    RLOO = "rloo"
    MAXRL = "maxrl"


@dataclass(frozen=True)
class GroupAdvantage:
    """One entry per member: `advantages` (zero where dropped) and `kept`. `mean` is over the kept rewards, None without any."""

    advantages: tuple[float, ...]
    kept: tuple[bool, ...]
    mean: float | None
    zero_variance: bool

    @property
    def dropped(self) -> int:
        return self.kept.count(False)


def _usable(reward: float | None) -> bool:
    return reward is not None and math.isfinite(reward)


def is_zero_variance(rewards: Sequence[float | None]) -> bool:
    """Whether the usable rewards say nothing about which member was better."""
    usable = [float(r) for r in rewards if r is not None and math.isfinite(r)]
    return len(usable) < 2 or max(usable) == min(usable)


def group_advantages(
    rewards: Sequence[float | None], estimator: Estimator = Estimator.MEAN, *, eps: float = 1e-6
) -> GroupAdvantage:
    """Advantages of a group. `rewards` are the task's own, before any shaping; None or NaN is a member without one."""
    kept = tuple(_usable(r) for r in rewards)
    usable = [float(r) for r in rewards if r is not None and math.isfinite(r)]
    mean = math.fsum(usable) / len(usable) if usable else None
    if mean is None or is_zero_variance(usable):
        return GroupAdvantage((0.0,) * len(kept), kept, mean, True)
    count = len(usable)
    match estimator:
        case Estimator.MEAN:
            scale = 1.0
        case Estimator.STD:
            # Centred: sqrt(E[r^2] - E[r]^2) cancels to noise.
            scale = 1.0 / (math.sqrt(math.fsum((r - mean) ** 2 for r in usable) / (count - 1)) + eps)
        case Estimator.RLOO:
            scale = count / (count - 1)
        case Estimator.MAXRL:
            scale = 1.0 / mean if mean > 0 else 0.0
    values = iter([(r - mean) * scale for r in usable])
    return GroupAdvantage(tuple(next(values) if keep else 0.0 for keep in kept), kept, mean, False)
