"""The assembler: which groups are complete, which may be trained on, and how each one ends.

Guarantees: an admitted group ends at most once, whatever arrives how often and in which order. No batch holds a member whose
oldest token is more than `max_lag` versions behind the head it is trained from; that is judged where the batch is formed, on the
oldest token, so time in a queue counts. The order of arrival decides nothing: groups are taken oldest first and a batch is
ordered by id. What arrives before its Admitted event is held; what arrives twice is ignored, and of two different samples of one
member the first wins. A group whose rewards are all equal never enters a batch and ends when it is complete.

The lag of a member at head v, from which v + 1 is made, is v minus the version of its oldest sampled token; lag 0 is on-policy.

A state machine without clock, I/O or torch: time comes in as an argument, what must be written to the ledger goes out as
`OutcomeEvent`s. Endings are decided here before they are written, so a crash in between repeats the decision from redelivered
members; `OutcomeEvent`s already in the ledger are folded in with `ended`, and groups named by a manifest with `recover`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Self

from driftline.messages.errors import DriftlineError
from driftline.messages.types import Finish, Graded, Group, Outcome, OutcomeEvent, Trajectory
from driftline.services.learner.advantage import is_zero_variance

__all__ = ["Arrival", "Assembler", "AssemblyError", "Batch", "BatchGroup"]

OVERHEAD_BYTES = 1024  # of a held member beyond its arrays and texts: the objects themselves


class AssemblyError(DriftlineError):
    """The caller broke the order of calls: a batch committed twice, or for a version it was not formed for."""


class Arrival(StrEnum):
    """What became of a member. Only ACCEPTED is held.

    DUPLICATE may be the very message that is held, delivered again: acknowledging it would let go of the only durable copy, so it
    is acknowledged with the first, when its group has ended. ALREADY_ENDED and UNKNOWN are done with.
    """

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"  # this member is already held: the same again, or another sample of it (the first wins)
    UNKNOWN = "unknown"  # of another run, or it contradicts its group's size, index or task
    ALREADY_ENDED = "already_ended"


@dataclass(frozen=True)
class BatchGroup:
    """One group in a batch: its usable members in order of member, and the members left out because they failed."""

    group: Group
    members: tuple[Graded, ...]
    excluded: tuple[int, ...]

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(m.reward for m in self.members if m.reward is not None)

    @property
    def oldest_version(self) -> int:
        return min(m.trajectory.oldest_version for m in self.members)


@dataclass(frozen=True)
class Batch:
    """Groups in order of id, to be trained from version `head`; committing it makes `head + 1`."""

    head: int
    groups: tuple[BatchGroup, ...]

    @property
    def group_ids(self) -> tuple[str, ...]:
        return tuple(g.group.group for g in self.groups)

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """In order of (group id, member)."""
        return tuple(m.trajectory for g in self.groups for m in g.members)

    @property
    def consumed(self) -> list[str]:
        """Trajectory ids, for the manifest."""
        return [t.id for t in self.trajectories]

    @property
    def lag(self) -> int:
        return max(self.head - g.oldest_version for g in self.groups)


class _State(StrEnum):
    WAITING = "waiting"
    READY = "ready"
    FAILED = "failed"
    ZERO_VARIANCE = "zero_variance"


@dataclass(frozen=True)
class _Member:
    """A held member, with what the rules ask about it computed once."""

    graded: Graded
    reward: float | None  # None: not usable
    oldest: int
    newest: int
    size: int

    @classmethod
    def of(cls, graded: Graded) -> Self:
        trajectory = graded.trajectory
        reward = None if trajectory.finish is Finish.ABORT else graded.reward
        return cls(graded, reward, trajectory.oldest_version, int(trajectory.versions.max()), held_size(graded))


@dataclass(frozen=True)
class _Open:
    """A group that has not ended. `group` is None until its Admitted event is seen."""

    group: Group | None = None
    deadline: float = 0.0
    members: Mapping[int, _Member] = field(default_factory=dict)

    @property
    def usable(self) -> tuple[_Member, ...]:
        return tuple(self.members[k] for k in sorted(self.members) if self.members[k].reward is not None)

    @property
    def rewards(self) -> list[float]:
        return [m.reward for m in self.usable if m.reward is not None]

    @property
    def size(self) -> int:
        return sum(m.size for m in self.members.values())

    @property
    def complete(self) -> bool:
        return self.group is not None and len(self.members) == self.group.members

    def oldest_version(self) -> int | None:
        return min((m.oldest for m in self.usable), default=None)

    def newest_version(self) -> int:
        return max(m.newest for m in self.usable)

    def state(self, min_members: int) -> _State:
        if not self.complete:
            return _State.WAITING
        rewards = self.rewards
        if len(rewards) < min_members:
            return _State.FAILED
        return _State.ZERO_VARIANCE if is_zero_variance(rewards) else _State.READY


def held_size(graded: Graded) -> int:
    """About how many bytes holding a member costs."""
    t = graded.trajectory
    arrays = [t.tokens, t.action_mask, t.logprobs, t.versions] + ([] if t.routes is None else [t.routes])
    return OVERHEAD_BYTES + sum(a.nbytes for a in arrays) + len(t.text) + len(t.task.prompt) + len(t.task.answer or "")


class Assembler:
    """Fold events in with `admit`, `arrive` and `ended`; take endings out with `sweep` and `expire`; form a batch with
    `next_batch`, and end it with `commit` or give it back with `release`. `head` is always the newest version there is.

    >>> assembler = Assembler(run="demo", groups_per_step=16, max_lag=2)
    >>> assembler.next_batch(head=0) is None
    True
    """

    def __init__(
        self, *, run: str, groups_per_step: int, max_lag: int, min_group_members: int = 2, started_at: float = 0.0
    ) -> None:
        """`started_at`: no deadline counts from before it, so a learner that was away longer than a group's deadline does not
        expire what was finished and is about to be delivered again."""
        if groups_per_step < 1 or max_lag < 0 or min_group_members < 1:
            raise AssemblyError("needs groups_per_step >= 1, max_lag >= 0, min_group_members >= 1", field="limits",
                                value=(groups_per_step, max_lag, min_group_members))
        self.run, self.groups_per_step, self.max_lag = run, groups_per_step, max_lag
        self.min_group_members, self.started_at = min_group_members, started_at
        self._open: dict[str, _Open] = {}
        self._ended: dict[str, Outcome] = {}
        self._taken: dict[str, Batch] = {}
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """What the held members cost, those of a batch in training included."""
        return self._held_bytes

    @property
    def held_members(self) -> int:
        return sum(len(entry.members) for entry in self._open.values())

    @property
    def open_groups(self) -> tuple[str, ...]:
        """Admitted and not ended, in order of id."""
        return tuple(sorted(name for name, entry in self._open.items() if entry.group is not None))

    @property
    def ready_groups(self) -> int:
        """Complete and worth training on, whatever their lag; those of a batch in training are not counted."""
        return sum(name not in self._taken and entry.state(self.min_group_members) is _State.READY
                   for name, entry in self._open.items())

    def outcome(self, group: str) -> Outcome | None:
        return self._ended.get(group)

    def next_deadline(self) -> float | None:
        """When `expire` will next have something to say, on the clock of `admit`."""
        return min((e.deadline for n, e in self._open.items() if self._can_expire(n, e)), default=None)

    def admit(self, group: Group, at: float) -> bool:
        """Fold an Admitted event; false if it changes nothing. Held members that contradict the group are let go."""
        if group.run != self.run or group.group in self._ended:
            return False
        entry = self._open.get(group.group, _Open())
        if entry.group is not None:
            return False
        fitting = {k: m for k, m in entry.members.items() if _fits(m.graded.trajectory, group)}
        admitted = _Open(group, max(at, self.started_at) + group.deadline_s, fitting)
        self._held_bytes -= entry.size - admitted.size
        self._open[group.group] = admitted
        return True

    def arrive(self, graded: Graded) -> Arrival:
        trajectory = graded.trajectory
        name, member = trajectory.group, trajectory.member
        if graded.run != self.run or trajectory.run != self.run:
            return Arrival.UNKNOWN
        if name in self._ended:
            return Arrival.ALREADY_ENDED
        entry = self._open.get(name, _Open())
        if entry.group is not None and not _fits(trajectory, entry.group):
            return Arrival.UNKNOWN
        if member in entry.members:
            return Arrival.DUPLICATE
        held = _Member.of(graded)
        self._open[name] = replace(entry, members={**entry.members, member: held})
        self._held_bytes += held.size
        return Arrival.ACCEPTED

    def ended(self, event: OutcomeEvent) -> None:
        """Fold an outcome that is already in the ledger. Our own, read back, changes nothing."""
        if event.run == self.run and event.group not in self._ended:
            self._forget(event.group, event.outcome)

    def recover(self, consumed: Iterable[str], version: int, *, now: float) -> list[OutcomeEvent]:
        """After a crash between manifest and outcomes: end as trained the groups whose trajectories version `version` consumed
        and that have no outcome yet. `consumed` is the manifest's list of trajectory ids."""
        members: dict[str, int] = {}
        for trajectory_id in consumed:
            run, group, _ = trajectory_id.split("/")
            if run == self.run:
                members[group] = members.get(group, 0) + 1
        events = []
        for name in sorted(members):
            if name not in self._ended:
                self._forget(name, Outcome.TRAINED)
                events.append(OutcomeEvent(run=self.run, group=name, outcome=Outcome.TRAINED, version=version,
                                           reason="named by the manifest", members=members[name], at=now))
        return events

    def sweep(self, head: int, *, now: float) -> list[OutcomeEvent]:
        """End what can no longer be trained on: complete groups that failed or have equal rewards, and groups with a usable
        member beyond the bound, complete or not. Call after arrivals and after every new head."""
        events = []
        for name in self._idle():
            entry = self._open[name]
            oldest = entry.oldest_version()
            match entry.state(self.min_group_members):
                case _State.FAILED:
                    events.append(self._end(name, Outcome.FAILED, _why_failed(entry), head, now))
                case _State.ZERO_VARIANCE:
                    events.append(self._end(name, Outcome.ZERO_VARIANCE, "all rewards are equal", head, now))
                case _State.WAITING | _State.READY if oldest is not None and head - oldest > self.max_lag:
                    why = f"oldest token is of version {oldest}, lag {head - oldest} exceeds {self.max_lag}"
                    events.append(self._end(name, Outcome.STALE, why, head, now))
        return events

    def expire(self, now: float, *, head: int = -1) -> list[OutcomeEvent]:
        """End the groups that are not complete by their deadline. A complete one waits for its batch; its limit is its lag.

        A partly complete group is not trained on: whoever finishes first is not a fair sample of the group.
        """
        events = []
        for name in self._idle():
            entry = self._open[name]
            if self._can_expire(name, entry) and entry.deadline <= now:
                assert entry.group is not None
                missing = entry.group.members - len(entry.members)
                why = f"{missing} of {entry.group.members} members missing after {entry.group.deadline_s:g} s"
                events.append(self._end(name, Outcome.EXPIRED, why, head, now))
        return events

    def next_batch(self, head: int) -> Batch | None:
        """The next batch to train from `head`, or None while there are too few groups. Its groups are taken until `commit` or
        `release`: nothing else ends them meanwhile."""
        eligible = []
        for name in self._idle():
            entry = self._open[name]
            if entry.state(self.min_group_members) is not _State.READY:
                continue
            oldest, group = entry.oldest_version(), entry.group
            assert oldest is not None
            assert group is not None
            # A version newer than the head is another learner's or a head not yet seen here: such a group has to wait.
            if head - oldest <= self.max_lag and entry.newest_version() <= head:
                eligible.append((oldest, group.index, name))
        if len(eligible) < self.groups_per_step:
            return None
        names = sorted(name for _, _, name in sorted(eligible)[: self.groups_per_step])
        batch = Batch(head, tuple(self._batch_group(name) for name in names))
        self._taken.update(dict.fromkeys(names, batch))
        return batch

    def commit(self, batch: Batch, version: int, *, now: float) -> list[OutcomeEvent]:
        """End the batch's groups as trained, after version `version` is durable. The events are in order of group id."""
        self._check_taken(batch)
        if version != batch.head + 1:
            raise AssemblyError(f"the batch was formed to make version {batch.head + 1}", field="version", value=version)
        events = []
        for entry in batch.groups:
            name, rewards = entry.group.group, entry.rewards
            events.append(OutcomeEvent(
                run=self.run, group=name, outcome=Outcome.TRAINED, version=version, lag=batch.head - entry.oldest_version,
                members=len(entry.members), reward_mean=math.fsum(rewards) / len(rewards), at=now,
                reason=f"without failed members {list(entry.excluded)}" if entry.excluded else "",
            ))
            self._forget(name, Outcome.TRAINED)
        return events

    def release(self, batch: Batch) -> None:
        """Give a batch back untrained; its groups may be taken again or swept."""
        self._check_taken(batch)
        for name in batch.group_ids:
            del self._taken[name]

    def cancel_all(self, reason: str, *, now: float, head: int = -1) -> list[OutcomeEvent]:
        """End every admitted group that has not ended, those of a batch in training too. May be called again, after Admitted
        events that came late: it returns only what is new."""
        self._taken.clear()
        return [self._end(name, Outcome.CANCELLED, reason, head, now) for name in self.open_groups]

    def _idle(self) -> list[str]:
        return [name for name in self.open_groups if name not in self._taken]

    def _can_expire(self, name: str, entry: _Open) -> bool:
        return entry.group is not None and name not in self._taken and not entry.complete

    def _check_taken(self, batch: Batch) -> None:
        for name in batch.group_ids:
            if self._taken.get(name) is not batch:
                raise AssemblyError("the batch is not the one being trained: it was committed, released or cancelled",
                                    field="batch", value=name)

    def _batch_group(self, name: str) -> BatchGroup:
        entry = self._open[name]
        assert entry.group is not None
        usable = entry.usable
        excluded = tuple(k for k in sorted(entry.members) if entry.members[k].reward is None)
        return BatchGroup(entry.group, tuple(m.graded for m in usable), excluded)

    def _end(self, name: str, outcome: Outcome, reason: str, head: int, now: float) -> OutcomeEvent:
        entry = self._open[name]
        oldest = entry.oldest_version()
        rewards = entry.rewards
        self._forget(name, outcome)
        return OutcomeEvent(
            run=self.run, group=name, outcome=outcome, reason=reason, version=head + 1 if head >= 0 else -1,
            lag=head - oldest if oldest is not None and head >= 0 else -1, members=len(entry.members),
            reward_mean=math.fsum(rewards) / len(rewards) if rewards else None, at=now,
        )

    def _forget(self, name: str, outcome: Outcome) -> None:
        entry = self._open.pop(name, None)
        if entry is not None:
            self._held_bytes -= entry.size
        self._taken.pop(name, None)
        self._ended[name] = outcome


def _fits(trajectory: Trajectory, group: Group) -> bool:
    return trajectory.members == group.members and trajectory.index == group.index and trajectory.task.id == group.task.id


def _why_failed(entry: _Open) -> str:
    causes = []
    for member in sorted(entry.members):
        graded = entry.members[member].graded
        if entry.members[member].reward is None:
            causes.append(f"member {member}: {graded.cause or graded.trajectory.finish}")
    return f"{len(causes)} of {len(entry.members)} members failed; " + "; ".join(causes[:3])
