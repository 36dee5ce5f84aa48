"""Two budgets: what the rewards and the data cost, and what the machinery costs.

Guarantees: failures of rewards never end the service; their rate over the last `window` gradings is known at any moment, and an alarm is
raised once when it crosses `alarm_at`, and once more only after it has fallen below half of that. Failures of the machinery end the
service when more than `infrastructure_in_a_row` came with nothing that worked in between. Pure rules.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from driftline.messages.errors import DriftlineError
from driftline.services.grader.wire import Failure, Verdict

__all__ = ["Alarm", "Budget", "InfrastructureFailing"]


class InfrastructureFailing(DriftlineError):
    """The machinery around the rewards fails again and again: the grader ends, what it holds is delivered again."""


@dataclass(frozen=True)
class Alarm:
    """Too many members fail. `kind` is the most frequent failure, `cause` the latest one."""

    rate: float
    of: int
    kind: Failure
    cause: str


@dataclass
class Budget:
    """`data` after every grading, `worked` after every trajectory passed on, `infrastructure` after every failure of ours."""

    infrastructure_in_a_row: int
    window: int = 256
    alarm_at: float = 0.5
    least: int = 32
    in_a_row: int = field(default=0, init=False)
    alarmed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._recent: deque[Failure | None] = deque(maxlen=self.window)

    @property
    def data_failure_rate(self) -> float:
        return sum(failure is not None for failure in self._recent) / max(1, len(self._recent))

    def data(self, verdict: Verdict) -> Alarm | None:
        """Count a verdict; an alarm when the rate crosses the level with it."""
        self._recent.append(verdict.failure)
        rate = self.data_failure_rate
        if self.alarmed:
            self.alarmed = rate >= self.alarm_at / 2
            return None
        if len(self._recent) < self.least or rate < self.alarm_at:
            return None
        self.alarmed = True
        kind = Counter(failure for failure in self._recent if failure is not None).most_common(1)[0][0]
        return Alarm(rate, len(self._recent), kind, verdict.cause)

    def worked(self) -> None:
        self.in_a_row = 0

    def infrastructure(self, cause: str) -> None:
        """Raises InfrastructureFailing beyond the bound."""
        self.in_a_row += 1
        if self.in_a_row > self.infrastructure_in_a_row:
            raise InfrastructureFailing(
                f"{self.in_a_row} failures of the machinery in a row, the last: {cause}",
                field="infrastructure",
                value=self.in_a_row,
                remedy="look at the broker and at this machine; what was in hand is delivered again",
            )
