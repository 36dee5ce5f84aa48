"""What an audit says: the numbers of a run, and every id that is not accounted for.

Every number is a fold over the ledger and what else the broker holds; none is read from a counter. `Report.findings` is empty
exactly when nothing is missing, nothing doubled and nothing unfinished. Residue (deliveries of groups that have ended) is a
number and no finding: they are dropped by whoever pulls them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

__all__ = ["Bounds", "Finding", "FindingKind", "QueueContent", "Report", "TrajectoryCounts", "VersionCounts"]


class FindingKind(StrEnum):
    INDEX_MISSING = "index_missing"  # a number in 0..n-1 that no group was admitted with
    INDEX_TWICE = "index_twice"  # two groups were admitted with one number
    ADMITTED_TWICE = "admitted_twice"
    NEVER_ADMITTED = "never_admitted"  # an outcome, a retry or a step of a group that was not let in
    ENDED_TWICE = "ended_twice"
    UNFINISHED = "unfinished"  # the run is over and the group is not
    OUTCOME_DIFFERS = "outcome_differs"  # the outcome says trained, the version it names says otherwise
    CONSUMED_UNTRAINED = "consumed_untrained"  # a version names a trajectory whose group did not end as trained by it
    TRAINED_TWICE = "trained_twice"
    VERSION_GAP = "version_gap"
    TOO_STALE = "too_stale"
    OVER_ADMITTED = "over_admitted"  # more groups were in the loop than the staleness bound allows
    ADMISSION_DIFFERS = "admission_differs"  # the dispatcher's fold of the ledger counts otherwise than the audit's
    STRAY_DELIVERY = "stray_delivery"  # queued work of no admitted group
    STRAY_LETTER = "stray_letter"  # a dead letter of no admitted group
    UNREADABLE = "unreadable"  # a ledger event, or a queued group, that this build cannot decode


@dataclass(frozen=True)
class Finding:
    """One id that is not accounted for, and what is wrong with it in a sentence."""

    kind: FindingKind
    id: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.kind.value}  {self.id}: {self.sentence}"


@dataclass(frozen=True)
class Bounds:
    """The settings an audit can hold a run against: run.max_lag and run.groups_per_step."""

    max_lag: int
    groups_per_step: int


@dataclass(frozen=True)
class TrajectoryCounts:
    """Every trajectory id of every admitted group is in exactly one of these: `total` is their sum."""

    total: int
    trained: int
    untrained: Mapping[str, int]
    """Members that came and were not trained on, by the outcome of their group; `left_out` of one that was trained."""
    never_arrived: int
    in_flight: int


@dataclass(frozen=True)
class QueueContent:
    """Messages in a work queue: of open groups, of groups that have ended (residue), and of no admitted group."""

    in_flight: int = 0
    residue: int = 0
    stray: int = 0


@dataclass(frozen=True)
class VersionCounts:
    """`head` is -1 before the first. `unverified`: trained groups whose version left neither manifest nor record."""

    head: int
    manifests: int
    records: int
    unverified: int


@dataclass(frozen=True)
class Report:
    run: str
    finished: str | None
    """Why the run ended, or None while it goes on."""
    events: int
    cursor: int
    admitted: int
    open: int
    ended: int
    retries: int
    outcomes: Mapping[str, int]
    reasons: Mapping[str, Mapping[str, int]]
    peak_open: int
    capacity: int | None
    trajectories: TrajectoryCounts
    versions: VersionCounts
    queues: Mapping[str, QueueContent]
    dead_letters: Mapping[str, int]
    divergences: Mapping[str, int]
    """What the divergence watch said, by level and signal: no finding, for every id is accounted for whatever was said."""
    findings: tuple[Finding, ...]

    def document(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        return asdict(self)
