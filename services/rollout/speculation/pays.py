"""Whether drafting pays, from what its steps gave and took: on while steps for which the drafter is asked give more tokens a second than those for which it is
not, off by itself when they do not.

A pure fold over (rows, tokens gained, seconds) that it is handed: no clock, no randomness. A step for which the drafter was asked and had nothing is one of its steps:
asking took time. Both kinds are tried again now and then, since acceptance moves with the text and the policy, and cost with the batch; batches of other sizes are
judged apart, by powers of two. A step that took many times its kind's median, because it compiled a kernel or captured a graph, does not count.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from driftline.messages.errors import ConfigError

__all__ = ["Pays"]

_KEPT = 32
"""Steps of a kind that are remembered."""

_ENOUGH = 3
"""Steps of a kind before it is judged."""

_ONCE = 8.0
"""Medians that a step takes at most if it is to count: windows cost a few plain steps, compiling hundreds."""


@dataclass
class _Kind:
    """Recent steps: tokens a row gained and seconds, of each."""

    steps: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def rate(self) -> float | None:
        """Tokens a row a second, over all of them: those with drafts and those without cost differently. None before there are enough, or where time is not told."""
        if len(self.steps) < _ENOUGH:
            return None
        most = _ONCE * statistics.median(seconds for _, seconds in self.steps)
        counted = [(gained, seconds) for gained, seconds in self.steps if seconds <= most]
        took = sum(seconds for _, seconds in counted)
        return sum(gained for gained, _ in counted) / took if took > 0 else None


@dataclass
class _Batch:
    """Of one size of batch. `steps`: counted towards the next trial."""

    drafted: _Kind = field(default_factory=_Kind)
    plain: _Kind = field(default_factory=_Kind)
    steps: int = 0
    on: bool = True


class Pays:
    """`every`: steps between trials of the other kind, of `trial` steps each. ConfigError when a trial is not shorter than that."""

    def __init__(self, *, every: int = 128, trial: int = 4) -> None:
        if not 1 <= trial < every:
            raise ConfigError("a trial lasts longer than what it is a trial in", field="speculation trials", value=f"{trial} steps every {every}", remedy="1 <= trial < every")
        self._every, self._trial = every, trial
        self._batches: dict[int, _Batch] = {}

    def wants(self, rows: int) -> bool:
        """Whether the next step of `rows` rows should be drafted for."""
        batch = self._of(rows)
        if len(batch.drafted.steps) < _ENOUGH:
            return True
        if len(batch.plain.steps) < _ENOUGH:
            return False
        trying = batch.steps % self._every < self._trial
        return batch.on != trying

    def stepped(self, rows: int, gained: int, seconds: float, *, drafted: bool) -> None:
        """A step of `rows` rows gave `gained` tokens in `seconds`. `drafted`: the drafter was asked."""
        batch = self._of(rows)
        kind = batch.drafted if drafted else batch.plain
        kind.steps.append((gained / rows, seconds))
        batch.steps += 1
        with_drafts, without = batch.drafted.rate(), batch.plain.rate()
        if with_drafts is not None and without is not None:
            batch.on = with_drafts > without

    def on(self, rows: int) -> bool:
        """What it thinks of batches of this size, trials apart."""
        return self._of(rows).on

    def _of(self, rows: int) -> _Batch:
        return self._batches.setdefault(max(rows, 1).bit_length(), _Batch())
