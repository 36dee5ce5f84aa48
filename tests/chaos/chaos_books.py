"""The books of a run: every group admitted, every outcome, every trajectory that a version was made from.

Guarantees: nothing is believed that a service said about itself in passing. The ledger is read from the broker as it is stored; manifests are kept
as they are published, because old versions are collected while the run goes on. `faults` recomputes the invariants: a group is admitted once
and ends once, a trajectory is consumed by at most one version and only of a group that ended as trained by that version, and what an
outcome says was trained is what the manifest names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

from driftline.messages.bus import Bus
from driftline.messages.subjects import Subjects
from driftline.messages.types import Admitted, Outcome, OutcomeEvent
from driftline.policy_store.manifest import Manifest, PolicyHead

__all__ = ["Books", "follow_policy", "read_ledger"]


@dataclass
class Books:
    admitted: list[Admitted] = field(default_factory=list)
    ended: list[OutcomeEvent] = field(default_factory=list)
    heads: dict[int, PolicyHead] = field(default_factory=dict)
    manifests: dict[str, Manifest] = field(default_factory=dict)  # by seal
    rewritten: list[str] = field(default_factory=list)

    @property
    def head(self) -> int:
        return max(self.heads, default=-1)

    @property
    def ids(self) -> list[str]:
        """Every trajectory id there is, by the groups admitted."""
        return [f"{a.group.run}/{a.group.group}/{k}" for a in self.admitted for k in range(a.group.members)]

    def outcomes(self) -> dict[str, int]:
        return dict(sorted(Counter(event.outcome.value for event in self.ended).items()))

    def see_head(self, head: PolicyHead) -> None:
        known = self.heads.setdefault(head.version, head)
        if known != head:
            self.rewritten.append(f"head {head.version} was {known.manifest} and became {head.manifest}")

    def consumed(self) -> dict[int, tuple[str, ...]]:
        """By version, of the manifests that a head named."""
        return {v: tuple(self.manifests[h.manifest].consumed) for v, h in sorted(self.heads.items()) if h.manifest in self.manifests}

    def lost(self) -> list[str]:
        """Trajectory ids whose group has no outcome."""
        ended = {event.group for event in self.ended}
        return [name for name in self.ids if name.split("/")[1] not in ended]

    def doubled(self) -> list[str]:
        """Trajectory ids that ended or were trained on more than once."""
        ends, starts = Counter(event.group for event in self.ended), Counter(a.group.group for a in self.admitted)
        twice = {name for name in set(self.ids) if max(ends[name.split("/")[1]], starts[name.split("/")[1]]) > 1}
        uses = Counter(name for names in self.consumed().values() for name in names)
        return sorted(twice | {name for name, count in uses.items() if count > 1})

    def faults(self, steps: int) -> list[str]:
        """What is wrong, as sentences; empty when nothing is."""
        found = [*self.rewritten]
        found += [f"lost: {name} has no outcome" for name in self.lost()]
        found += [f"doubled: {name}" for name in self.doubled()]
        missing = [v for v in range(steps + 1) if v not in self.heads or self.heads[v].manifest not in self.manifests]
        if missing or self.head > steps:
            found.append(f"versions: wanted 0 to {steps}, {missing} were not seen, the head is {self.head}")
        consumed = self.consumed()
        known = set(self.ids)
        used = [name for names in consumed.values() for name in names]
        found += [f"version {v} names {n}, which was never admitted" for v, names in consumed.items() for n in names if n not in known]
        outcomes = {event.group: event for event in self.ended}
        found += [f"an outcome for {name}, which was never admitted" for name in outcomes.keys() - {a.group.group for a in self.admitted}]
        for version, names in consumed.items():
            found += _disagreements(version, names, outcomes)
        with_members = {name.split("/")[1] for name in used}
        found += [f"{event.group} ended as trained, but no version names it" for event in self.ended
                  if event.outcome is Outcome.TRAINED and event.group not in with_members]
        return found


def _disagreements(version: int, consumed: Iterable[str], outcomes: Mapping[str, OutcomeEvent]) -> list[str]:
    groups: dict[str, list[int]] = {}
    for name in consumed:
        _, group, member = name.split("/")
        groups.setdefault(group, []).append(int(member))
    found = []
    for group, members in groups.items():
        event = outcomes.get(group)
        if event is None:
            continue  # already counted as lost
        if event.outcome is not Outcome.TRAINED or event.version != version:
            found.append(f"version {version} was made from {group}, which ended as {event.outcome} for version {event.version}")
        elif event.members != len(members) or (event.trained and sorted(event.trained) != sorted(members)):
            found.append(f"version {version} names members {members} of {group}, its outcome {event.trained or event.members}")
    return found


async def follow_policy(bus: Bus, run: str, books: Books, on_head: object = None) -> None:
    """Every head and manifest as it is stored; until cancelled."""
    subjects = Subjects(run)
    async with aclosing(bus.follow(subjects.stream("POLICY"), f"{subjects.root}.policy.>")) as events:  # type: ignore[type-var]
        async for stored in events:
            match stored.message:
                case PolicyHead() as head:
                    books.see_head(head)
                    if callable(on_head):
                        on_head(head.version)
                case Manifest() as manifest:
                    books.manifests[manifest.seal] = manifest


async def read_ledger(bus: Bus, run: str, books: Books) -> None:
    """All that is in the ledger now."""
    subjects = Subjects(run)
    newest = await bus.last(subjects.stream("LEDGER"), subjects.ledger)
    if newest is None:
        return
    books.admitted.clear()
    books.ended.clear()
    async with aclosing(bus.follow(subjects.stream("LEDGER"), subjects.ledger)) as events:  # type: ignore[type-var]
        async for stored in events:
            match stored.message:
                case Admitted() as event:
                    books.admitted.append(event)
                case OutcomeEvent() as event:
                    books.ended.append(event)
            if stored.seq >= newest.seq:
                return
