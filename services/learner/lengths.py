"""How long the samples are that were trained on, and those that ended otherwise: a histogram by powers of two for each outcome.

A loop that selects against long samples shows it here. Pure counting, in memory: a restart begins at zero.
"""

from __future__ import annotations

from collections.abc import Iterable

from driftline.messages.types import Outcome, Trajectory

__all__ = ["Lengths"]


class Lengths:
    """`of(outcome)[i]` counts the completions of 2**i to 2**(i + 1) - 1 action tokens whose groups ended so."""

    def __init__(self) -> None:
        self._counts: dict[Outcome, list[int]] = {}

    def count(self, outcome: Outcome, trajectories: Iterable[Trajectory]) -> None:
        bins = self._counts.setdefault(outcome, [])
        for trajectory in trajectories:
            at = int(trajectory.action_mask.sum()).bit_length() - 1
            bins += [0] * (at + 1 - len(bins))
            bins[at] += 1

    def of(self, *outcomes: Outcome) -> tuple[int, ...]:
        """Over all the given outcomes together."""
        chosen = [self._counts.get(outcome, []) for outcome in outcomes]
        width = max(map(len, chosen), default=0)
        return tuple(sum(bins[i] for bins in chosen if i < len(bins)) for i in range(width))

    @property
    def trained(self) -> tuple[int, ...]:
        return self.of(Outcome.TRAINED)

    @property
    def otherwise(self) -> tuple[int, ...]:
        """What ended without being trained on, for whatever reason."""
        return self.of(*(outcome for outcome in Outcome if outcome is not Outcome.TRAINED))
