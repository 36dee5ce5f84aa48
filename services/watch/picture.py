"""The picture of a run: everything a person is shown, as a fold over what the services already publish.

Guarantees: a message seen twice changes nothing (steps, evaluations and versions are keyed, outcomes are one per group), so the
picture is the same whether it was watched from the start or attached to later. No I/O here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from driftline.messages.bus import Depth
from driftline.messages.types import (
    Admitted,
    Divergence,
    DivergenceLevel,
    EvalResult,
    Message,
    Metrics,
    Outcome,
    OutcomeEvent,
    RunFinished,
)
from driftline.policy_store.manifest import Manifest, PolicyHead

__all__ = ["Picture", "Step"]


@dataclass(frozen=True)
class Step:
    """One optimizer step as the learner reported it."""

    version: int
    at: float
    values: Mapping[str, float]
    lag_histogram: tuple[float, ...] = ()

    def get(self, key: str) -> float | None:
        value = self.values.get(key)
        return value if value is not None and math.isfinite(value) else None


@dataclass
class _Total:
    """A counter that restarts from zero with its process, added up over the restarts."""

    before: float = 0.0
    now: float = 0.0

    def see(self, value: float) -> None:
        if value < self.now:
            self.before += self.now
        self.now = value

    @property
    def value(self) -> float:
        return self.before + self.now


@dataclass
class Picture:
    run: str
    steps_wanted: int = 0
    version: int = -1
    steps: dict[int, Step] = field(default_factory=dict)
    evals: dict[int, EvalResult] = field(default_factory=dict)
    open: set[str] = field(default_factory=set)
    admitted: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    drops: Counter[str] = field(default_factory=Counter)
    max_lag_seen: int = 0
    depths: dict[str, Depth] = field(default_factory=dict)
    restarts: Counter[str] = field(default_factory=Counter)
    dead_letters: int = 0
    policy_bytes: dict[int, tuple[int, int]] = field(default_factory=dict)
    finished: RunFinished | None = None
    divergences: dict[tuple[int, str, str], Divergence] = field(default_factory=dict)
    """What the divergence watch said, by version, signal and level."""
    _sampled: dict[str, _Total] = field(default_factory=dict)
    _rates: dict[str, float] = field(default_factory=dict)
    _ended: set[str] = field(default_factory=set)

    def see(self, message: Message) -> None:
        match message:
            case Metrics(service="learner") if message.step >= 0:
                self._see_step(message)
            case Metrics(service="rollout"):
                total = self._sampled.setdefault(message.instance, _Total())
                total.see(message.values.get("tokens_sampled", total.now))
                self._rates[message.instance] = message.values.get("tokens_per_s", 0.0)
            case Metrics(service="supervisor"):
                self.restarts = Counter({
                    key.removeprefix("restarts."): int(value)
                    for key, value in message.values.items() if key.startswith("restarts.")
                })
            case Admitted(group=group):
                self.admitted = max(self.admitted, group.index + 1)
                if group.group not in self._ended:
                    self.open.add(group.group)
            case OutcomeEvent() if message.group not in self._ended:
                self._see_outcome(message)
            case EvalResult():
                self.evals[message.version] = message
            case PolicyHead():
                self.version = max(self.version, message.version)
            case Manifest():
                full, delta = message.full, message.delta
                self.policy_bytes[message.version] = (full.nbytes if full else 0, delta.nbytes if delta else 0)
            case RunFinished():
                self.finished = message
            case Divergence():
                self.divergences[message.version, message.signal.value, message.level.value] = message

    def _see_step(self, message: Metrics) -> None:
        version = int(message.values.get("version", message.step))
        histogram = tuple(message.series.get("lag_histogram", ()))
        self.steps[version] = Step(version, message.at, message.values, histogram)
        self.max_lag_seen = max(self.max_lag_seen, int(self.steps[version].get("lag_max") or 0))
        self.version = max(self.version, version)

    def _see_outcome(self, event: OutcomeEvent) -> None:
        self._ended.add(event.group)
        self.open.discard(event.group)
        self.outcomes[event.outcome] += 1
        if event.outcome is Outcome.TRAINED:
            self.max_lag_seen = max(self.max_lag_seen, event.lag)
        else:
            self.drops[f"{event.outcome.value}: {event.reason}" if event.reason else event.outcome.value] += 1

    @property
    def ordered(self) -> list[Step]:
        return [self.steps[version] for version in sorted(self.steps)]

    @property
    def evaluations(self) -> list[EvalResult]:
        return [self.evals[version] for version in sorted(self.evals)]

    @property
    def alarms(self) -> int:
        """How often an alarm was raised."""
        return sum(event.level is DivergenceLevel.ALARM for event in self.divergences.values())

    @property
    def alarmed(self) -> tuple[str, ...]:
        """The signals whose alarm is raised now: its last word was no end of it."""
        last: dict[str, Divergence] = {}
        for _, event in sorted(self.divergences.items(), key=lambda item: item[0][0]):
            last[event.signal.value] = event
        return tuple(sorted(name for name, event in last.items() if event.level is not DivergenceLevel.CLEARED))

    @property
    def tokens_sampled(self) -> int:
        return int(sum(total.value for total in self._sampled.values()))

    @property
    def tokens_per_s(self) -> float:
        return sum(self._rates.values())

    @property
    def engines(self) -> int:
        return len(self._sampled)

    def eta_s(self, now: float) -> float | None:
        """Time to the last step at the pace of the newest ten, or None before there is a pace."""
        recent = self.ordered[-10:]
        left = self.steps_wanted - max(self.version, 0)
        if len(recent) < 2 or left <= 0 or self.finished:
            return None
        pace = (recent[-1].at - recent[0].at) / (len(recent) - 1)
        return max(0.0, left * pace - max(0.0, now - recent[-1].at))
