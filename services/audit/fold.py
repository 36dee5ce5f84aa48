"""The fold: a run's whole history into one report, without I/O.

Feed everything the broker has, in any order between the kinds and in ledger order within the ledger; `report` then says where every
id went. What is kept per group is a few numbers, so a history of any length is folded page by page. While the run goes on an open
group is in flight; a version newer than `settled` may name groups whose outcomes are still being written. Both are findings once
the run is finished.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from driftline.messages.types import Admitted, Divergence, Message, Outcome, OutcomeEvent, Retried, Taken
from driftline.services.audit.report import (
    Bounds,
    Finding,
    FindingKind,
    QueueContent,
    Report,
    TrajectoryCounts,
    VersionCounts,
)
from driftline.services.dispatcher.admission import AdmissionState, capacity, fold

__all__ = ["Accounts", "Consumed"]

REASONS_KEPT: Final = 64
OTHER: Final = "other reasons"
LEFT_OUT: Final = "left_out"  # came too, and was not usable: its group was trained without it
_NUMBER = re.compile(r"\d+(\.\d+)?")


class Consumed(NamedTuple):
    """What a version was trained on: trajectory ids `run/group/member`. `recorded`: its manifest was collected, its record says so."""

    version: int
    trajectories: Sequence[str]
    recorded: bool = False


class _Ending(NamedTuple):
    outcome: Outcome
    version: int
    lag: int
    arrived: tuple[int, ...]
    trained: tuple[int, ...]


@dataclass(slots=True)
class _Group:
    index: int = -1
    members: int = 0
    admitted: int = 0
    retries: int = 0
    taken: int = 0
    endings: list[_Ending] = field(default_factory=list)
    consumed: list[tuple[int, int]] = field(default_factory=list)
    """(version, member), as the versions name them."""

    @property
    def open(self) -> bool:
        return self.admitted > 0 and not self.endings


class Accounts:
    """Accumulates a run. `bounds` are the settings to hold it against, where they are known."""

    def __init__(self, run: str, bounds: Bounds | None = None) -> None:
        self._run, self._bounds = run, bounds
        self._groups: dict[str, _Group] = defaultdict(_Group)
        self._by_index: dict[int, str] = {}
        self._state = AdmissionState()
        self._events = self._peak = 0
        self._open: set[str] = set()
        self._versions: dict[int, bool] = {}
        self._reasons: dict[str, Counter[str]] = defaultdict(Counter)
        self._queued: dict[str, Counter[str | None]] = defaultdict(Counter)
        self._letters: Counter[str] = Counter()
        self._divergences: Counter[str] = Counter()
        self._letter_groups: dict[str, int] = {}
        self._found: list[Finding] = []

    def ledger(self, events: Iterable[Message]) -> None:
        """The next events of the ledger."""
        page = list(events)
        self._events += len(page)
        for event in page:
            match event:
                case Admitted():
                    self._admit(event)
                case Retried(group=group):
                    self._groups[group.group].retries += 1
                case OutcomeEvent():
                    self._end(event)
                case Taken(group=name):
                    self._groups[name].taken += 1
                case Divergence(level=level, signal=signal):
                    self._divergences[f"{level.value} {signal.value}"] += 1
                case _:
                    self._find(FindingKind.UNREADABLE, f"event {self._events}", f"{event.schema_name} is not a ledger event")
        self._state = fold(self._state, (event for event in page if isinstance(event, (Admitted, OutcomeEvent))))

    def unreadable(self, where: str, why: str) -> None:
        """A ledger event that cannot be decoded: what it said is not known."""
        self._events += 1
        self._find(FindingKind.UNREADABLE, where, why)

    def version(self, consumed: Consumed) -> None:
        """A version in the head's lineage, by its manifest or by what was recorded of it."""
        self._versions[consumed.version] = consumed.recorded
        for id in consumed.trajectories:
            run, _, rest = id.partition("/")
            name, _, member = rest.rpartition("/")
            if run != self._run or not name or not member.isdecimal():
                self._find(FindingKind.CONSUMED_UNTRAINED, id, f"version {consumed.version} names it; no trajectory of this run is called so")
            else:
                self._groups[name].consumed.append((consumed.version, int(member)))

    def queued(self, plane: str, group: str | None, where: str) -> None:
        """A message in a work queue, of `group` (None: it cannot be told)."""
        self._queued[plane][group] += 1
        if group is None:
            self._find(FindingKind.UNREADABLE, where, f"a message in {plane} names no group")

    def letter(self, seq: int, kind: str, group: str | None) -> None:
        """A dead letter."""
        self._letters[kind] += 1
        if group is not None:
            self._letter_groups.setdefault(group, seq)

    def report(self, *, head: int = -1, settled: int | None = None, finished: str | None = None) -> Report:
        """`head` is the newest version, `settled` the newest whose outcomes must be written (None: all but the head's)."""
        over = finished is not None
        firm = head if over else head - 1 if settled is None else settled
        findings = sorted(
            [*self._found, *self._indices(), *self._judged(head, firm, over), *self._gaps(head), *self._admission(), *self._strays()],
            key=lambda finding: (list(FindingKind).index(finding.kind), finding.id),
        )
        admitted = [group for group in self._groups.values() if group.admitted]
        still = [group for group in admitted if not group.endings]
        ended = [group for group in admitted if group.endings]
        return Report(
            run=self._run, finished=finished, events=self._events, cursor=max(self._by_index, default=-1) + 1,
            admitted=len(admitted), open=len(still), ended=len(ended), retries=sum(group.retries for group in admitted),
            outcomes=dict(sorted(Counter(group.endings[0].outcome.value for group in ended).items())),
            reasons={kind: dict(counts.most_common()) for kind, counts in sorted(self._reasons.items())},
            peak_open=self._peak,
            capacity=capacity(self._state, self._bounds.max_lag, self._bounds.groups_per_step) if self._bounds else None,
            trajectories=_trajectories(still, ended),
            versions=VersionCounts(
                head, sum(not recorded for recorded in self._versions.values()), sum(self._versions.values()),
                sum(group.endings[0].outcome is Outcome.TRAINED and not self._knows(group.endings[0].version, head) for group in ended),
            ),
            queues={plane: self._content(names) for plane, names in self._queued.items()},
            dead_letters=dict(sorted(self._letters.items())), divergences=dict(sorted(self._divergences.items())), findings=tuple(findings),
        )

    def _admit(self, event: Admitted) -> None:
        name, index = event.group.group, event.group.index
        group = self._groups[name]
        group.admitted += 1
        if group.admitted > 1:
            self._find(FindingKind.ADMITTED_TWICE, name, f"admitted as number {group.index} and again as number {index}")
            return
        group.index, group.members = index, event.group.members
        other = self._by_index.setdefault(index, name)
        if other != name:
            self._find(FindingKind.INDEX_TWICE, name, f"has number {index}, and so has {other}")
        if not group.endings:
            self._open.add(name)
        self._peak = max(self._peak, len(self._open))
        if self._bounds and len(self._open) > (self._bounds.max_lag + 1) * self._bounds.groups_per_step:
            self._find(FindingKind.OVER_ADMITTED, name, f"was let in as the {len(self._open)}th open group; the bound is "
                       f"({self._bounds.max_lag} + 1) * {self._bounds.groups_per_step}")

    def _end(self, event: OutcomeEvent) -> None:
        group = self._groups[event.group]
        group.endings.append(_Ending(event.outcome, event.version, event.lag, event.arrived, event.trained))
        self._open.discard(event.group)
        if len(group.endings) > 1:
            first = group.endings[0]
            self._find(FindingKind.ENDED_TWICE, event.group, f"ended as {first.outcome.value} and again as {event.outcome.value}")
            return
        counts = self._reasons[event.outcome.value]
        reason = _NUMBER.sub("N", event.reason) or "-"
        counts[reason if reason in counts or len(counts) < REASONS_KEPT else OTHER] += 1

    def _find(self, kind: FindingKind, id: str, sentence: str) -> None:
        self._found.append(Finding(kind, id, sentence))

    def _knows(self, version: int, head: int) -> bool:
        """Whether what a version says can be compared. One that is not the head's past never was."""
        return version in self._versions or not 0 < version <= head

    def _indices(self) -> Iterator[Finding]:
        expected = 0
        for index in sorted(self._by_index):
            if index > expected:
                id = str(expected) if index == expected + 1 else f"{expected}-{index - 1}"
                yield Finding(FindingKind.INDEX_MISSING, id, f"no group was admitted with this number, and {index} was")
            expected = index + 1

    def _judged(self, head: int, firm: int, over: bool) -> Iterator[Finding]:
        for name, group in self._groups.items():
            if not group.admitted and (group.endings or group.retries or group.taken):
                what = "an outcome" if group.endings else "a retry" if group.retries else "a step"
                yield Finding(FindingKind.NEVER_ADMITTED, name, f"has {what} and no admission")
            if over and group.open:
                after = f"version {group.taken} was being trained on it; " if group.taken else ""
                yield Finding(FindingKind.UNFINISHED, name, f"{after}admitted as number {group.index}, never ended, and the run is over")
            if group.endings:
                yield from self._ending(name, group, group.endings[0], head)
            yield from self._named(name, group, firm)

    def _ending(self, name: str, group: _Group, ending: _Ending, head: int) -> Iterator[Finding]:
        """An outcome held against the version it names."""
        trained = set(ending.trained)
        if len(trained) != len(ending.trained) or any(not 0 <= member < max(group.members, 1) for member in trained if group.admitted):
            yield Finding(FindingKind.OUTCOME_DIFFERS, name, f"trained {list(ending.trained)}: not members of a group of {group.members}")
        if ending.outcome is not Outcome.TRAINED:
            if trained:
                yield Finding(FindingKind.OUTCOME_DIFFERS, name, f"ended as {ending.outcome.value} and yet trained {sorted(trained)}")
            return
        if not 0 < ending.version <= head:
            yield Finding(FindingKind.OUTCOME_DIFFERS, name, f"trained by version {ending.version}, and the head is at {head}")
        elif ending.version in self._versions:
            named = {member for version, member in group.consumed if version == ending.version}
            if named != trained:
                yield Finding(FindingKind.OUTCOME_DIFFERS, name, f"trained {sorted(trained)} by its outcome, "
                              f"{sorted(named)} by version {ending.version}")
        if self._bounds and ending.lag > self._bounds.max_lag:
            yield Finding(FindingKind.TOO_STALE, name, f"trained at lag {ending.lag}; run.max_lag is {self._bounds.max_lag}")

    def _named(self, name: str, group: _Group, firm: int) -> Iterator[Finding]:
        """What versions say of a group, held against its outcome."""
        first: dict[int, int] = {}
        for version, member in sorted(group.consumed):
            id = f"{self._run}/{name}/{member}"
            if member in first:
                yield Finding(FindingKind.TRAINED_TWICE, id, f"version {first[member]} was trained on it, and version {version} again")
            first.setdefault(member, version)
            if not group.admitted:
                yield Finding(FindingKind.CONSUMED_UNTRAINED, id, f"version {version} was trained on it, and its group was never admitted")
            elif not group.endings:
                if version <= firm:
                    yield Finding(FindingKind.CONSUMED_UNTRAINED, id, f"version {version} was trained on it, and its group has no outcome")
            elif (ending := group.endings[0]).outcome is not Outcome.TRAINED:
                yield Finding(FindingKind.CONSUMED_UNTRAINED, id, f"version {version} was trained on it, and its group ended as {ending.outcome.value}")
            elif ending.version != version:
                yield Finding(FindingKind.CONSUMED_UNTRAINED, id, f"version {version} was trained on it, its outcome says version {ending.version}")

    def _gaps(self, head: int) -> Iterator[Finding]:
        known = {ending.version for group in self._groups.values() for ending in group.endings if ending.outcome is Outcome.TRAINED}
        for version in range(1, head + 1):
            if version not in known and version not in self._versions:
                yield Finding(FindingKind.VERSION_GAP, str(version), "left no manifest, no record and no outcome")

    def _admission(self) -> Iterator[Finding]:
        """The dispatcher decides on its own fold: had it drifted, capacity would be lost or given twice."""
        ours = {name for name, group in self._groups.items() if group.open}
        theirs = set(self._state.open)
        for name in sorted(ours ^ theirs):
            side = "open for the dispatcher and ended here" if name in theirs else "open here and not counted by the dispatcher"
            yield Finding(FindingKind.ADMISSION_DIFFERS, name, side)

    def _strays(self) -> Iterator[Finding]:
        for plane, names in self._queued.items():
            for name, count in names.items():
                if name is not None and not self._admitted(name):
                    yield Finding(FindingKind.STRAY_DELIVERY, name, f"{count} messages in {plane}, and it was never admitted")
        for name, seq in self._letter_groups.items():
            if not self._admitted(name):
                yield Finding(FindingKind.STRAY_LETTER, name, f"dead letter {seq} is of this group, and it was never admitted")

    def _admitted(self, name: str) -> bool:
        return name in self._groups and self._groups[name].admitted > 0

    def _content(self, names: Counter[str | None]) -> QueueContent:
        open_, ended = 0, 0
        for name, count in names.items():
            if name is not None and self._admitted(name):
                open_, ended = (open_ + count, ended) if self._groups[name].open else (open_, ended + count)
        return QueueContent(open_, ended, names.total() - open_ - ended)


def _trajectories(still: Sequence[_Group], ended: Sequence[_Group]) -> TrajectoryCounts:
    trained = never = 0
    untrained: Counter[str] = Counter()
    for group in ended:
        ending = group.endings[0]
        own = set(range(group.members))
        used = own & set(ending.trained)
        came = (own & set(ending.arrived)) - used
        trained += len(used)
        untrained[LEFT_OUT if ending.outcome is Outcome.TRAINED else ending.outcome.value] += len(came)
        never += group.members - len(used) - len(came)
    in_flight = sum(group.members for group in still)
    total = sum(group.members for group in (*still, *ended))
    return TrajectoryCounts(total, trained, {kind: count for kind, count in sorted(untrained.items()) if count}, never, in_flight)
