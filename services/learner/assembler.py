"""The assembler: which groups are complete, which may be trained on, and how each one ends.

Guarantees: an admitted group ends at most once, whatever arrives how often and in which order. No batch holds a member whose
oldest token is more than `max_lag` versions behind the head it is trained from; that is judged where the batch is formed, on the
oldest token, so time in a queue counts. The order of arrival decides nothing: groups are taken oldest first and a batch is
ordered by id. What arrives before its Admitted event is held; what arrives twice is ignored, and of two different samples of one
member the first wins. A group whose rewards are all equal never enters a batch and ends when it is complete.

Under `StalePolicy.WAIT` no batch is formed that would make an open group stale (see feasibility.py): long samples are waited for,
not selected against. A group that stays incomplete ends, goes on without its missing members or is queued again at its deadline, as
`DeadlinePolicy` says, so waiting always ends.

The lag of a member at head v, from which v + 1 is made, is v minus the version of its oldest sampled token; lag 0 is on-policy.

A state machine without clock, I/O or torch: time comes in as an argument, what must be written to the ledger goes out as
`OutcomeEvent`s and `Retried`s. Endings are decided here before they are written, so a crash in between repeats the decision from
redelivered members; what is already in the ledger is folded in with `admit`, `retried` and `ended`, in the ledger's order, and groups
named by a manifest with `recover`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from driftline.messages.errors import DriftlineError
from driftline.messages.types import Graded, Group, Outcome, OutcomeEvent, Retried, Trajectory
from driftline.services.config import DeadlinePolicy, StalePolicy
from driftline.services.learner.feasibility import held_back_by
from driftline.services.learner.lengths import Lengths
from driftline.services.learner.open_group import Member, OpenGroup, State, fits

__all__ = ["Arrival", "Assembler", "AssemblyError", "Batch", "BatchGroup"]


class AssemblyError(DriftlineError):
    """The caller broke the order of calls: a batch committed twice, or for a version it was not formed for."""


class Arrival(StrEnum):
    """What became of a member. Only ACCEPTED is held.

    DUPLICATE may be the very message that is held, delivered again: acknowledging it would let go of the only durable copy, so it
    is acknowledged with the first, when its group has ended. ALREADY_ENDED and UNKNOWN are done with.
    """

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"  # held already: the same again or another sample of it (the first wins), or its group goes on without it
    UNKNOWN = "unknown"  # of another run, or it contradicts its group's size, index or task
    ALREADY_ENDED = "already_ended"


@dataclass(frozen=True)
class BatchGroup:
    """One group in a batch: its usable members in order of member, and the members left out: they failed or did not come in time."""

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


class Assembler:
    """Fold events in with `admit`, `retried`, `arrive` and `ended`; take endings out with `sweep`, `expire` and `fail`, and what is to
    be queued again with `retries`; form a batch with `next_batch`, and end it with `commit` or give it back with `release`. `head` is
    always the newest version there is.

    >>> assembler = Assembler(run="demo", groups_per_step=16, max_lag=2)
    >>> assembler.next_batch(head=0) is None
    True
    """

    def __init__(
        self, *, run: str, groups_per_step: int, max_lag: int, min_group_members: int = 2, started_at: float = 0.0,
        stale_policy: StalePolicy = StalePolicy.WAIT, deadline_policy: DeadlinePolicy = DeadlinePolicy.FAIL_GROUP,
        partial_min_members: int = 2, group_retries: int = 1,
    ) -> None:
        """`started_at`: no deadline counts from before it, so a learner that was away longer than a group's deadline does not
        expire what was finished and is about to be delivered again."""
        if groups_per_step < 1 or max_lag < 0 or min_group_members < 1 or partial_min_members < 1 or group_retries < 0:
            raise AssemblyError("needs groups_per_step, min_group_members and partial_min_members >= 1, max_lag and group_retries >= 0",
                                field="limits", value=(groups_per_step, min_group_members, partial_min_members, max_lag, group_retries))
        self.run, self.groups_per_step, self.max_lag = run, groups_per_step, max_lag
        self.min_group_members, self.started_at, self.stale_policy = min_group_members, started_at, stale_policy
        self.deadline_policy, self.group_retries = deadline_policy, group_retries
        self.partial_members = max(partial_min_members, min_group_members)
        self.lengths = Lengths()
        self._open: dict[str, OpenGroup] = {}
        self._ended: dict[str, Outcome] = {}
        self._taken: dict[str, Batch] = {}
        self._held_bytes = 0
        self._floor = 0
        self._failed_in_a_row = 0
        self._counted: set[str] = set()

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
        return sum(name not in self._taken and self._state(entry) is State.READY for name, entry in self._open.items())

    @property
    def failed_in_a_row(self) -> int:
        """Groups that failed or expired since the last one that was trained or had equal rewards, as the ledger has it."""
        return self._failed_in_a_row

    def outcome(self, group: str) -> Outcome | None:
        return self._ended.get(group)

    def next_deadline(self) -> float | None:
        """When `expire` or `retries` will next have something to say, on the clock of `admit`."""
        return min((entry.deadline(self.started_at) for _, entry in self._unsettled()), default=None)

    def admit(self, group: Group, at: float) -> bool:
        """Fold an Admitted event; false if it changes nothing. Held members that contradict the group are let go."""
        if group.run != self.run or group.group in self._ended:
            return False
        entry = self._open.get(group.group, OpenGroup())
        if entry.group is not None:
            return False
        fitting = {k: m for k, m in entry.members.items() if fits(m.graded.trajectory, group)}
        # What the ledger says was trained before it was admitted: its engine had that version, or a newer one.
        admitted = replace(entry, group=group, admitted_at=at, floor=self._floor, members=fitting)
        self._held_bytes -= entry.size - admitted.size
        self._open[group.group] = admitted
        return True

    def retried(self, event: Retried) -> bool:
        """Fold a Retried event: the group's deadline counts from it. False if it changes nothing."""
        group = event.group
        entry = self._open.get(group.group, OpenGroup())
        if group.run != self.run or group.group in self._ended or group.attempt <= entry.attempt:
            return False
        self._open[group.group] = replace(entry, retry=event, again=entry.again or frozenset(group.to_sample))
        return True

    def arrive(self, graded: Graded) -> Arrival:
        trajectory = graded.trajectory
        name, member = trajectory.group, trajectory.member
        if graded.run != self.run or trajectory.run != self.run:
            return Arrival.UNKNOWN
        if name in self._ended:
            return Arrival.ALREADY_ENDED
        entry = self._open.get(name, OpenGroup())
        if entry.group is not None and not fits(trajectory, entry.group):
            return Arrival.UNKNOWN
        if member in entry.members or entry.cut:
            return Arrival.DUPLICATE
        held = Member.of(graded)
        self._open[name] = replace(entry, members={**entry.members, member: held})
        self._held_bytes += held.size
        return Arrival.ACCEPTED

    def ended(self, event: OutcomeEvent) -> None:
        """Fold an outcome that is already in the ledger. Our own, read back, ends nothing again; it still counts as what the
        ledger says happened before the events after it."""
        if event.run != self.run:
            return
        if event.outcome is Outcome.TRAINED:
            self._floor = max(self._floor, event.version)
        if event.group not in self._counted:
            self._counted.add(event.group)
            match event.outcome:
                case Outcome.FAILED | Outcome.EXPIRED:
                    self._failed_in_a_row += 1
                case Outcome.TRAINED | Outcome.ZERO_VARIANCE:
                    self._failed_in_a_row = 0
        if event.group not in self._ended:
            self._forget(event.group, event.outcome)

    def recover(self, consumed: Iterable[str], version: int, *, now: float) -> list[OutcomeEvent]:
        """After a crash between manifest and outcomes: end as trained the groups whose trajectories version `version` consumed
        and that have no outcome yet. `consumed` is the manifest's list of trajectory ids."""
        trained: dict[str, list[int]] = {}
        for trajectory_id in consumed:
            run, group, member = trajectory_id.split("/")
            if run == self.run:
                trained.setdefault(group, []).append(int(member))
        events = []
        for name in sorted(trained):
            if name not in self._ended:
                members = tuple(sorted(trained[name]))
                held = self._open.get(name, OpenGroup()).members
                self._forget(name, Outcome.TRAINED)
                events.append(OutcomeEvent(
                    run=self.run, group=name, outcome=Outcome.TRAINED, version=version, reason="named by the manifest",
                    members=len(members), at=now, arrived=tuple(sorted({*members, *held})), trained=members,
                ))
        return events

    def sweep(self, head: int, *, now: float) -> list[OutcomeEvent]:
        """End what can no longer be trained on: groups that failed, cannot get enough members or have equal rewards, and groups with
        a member beyond the bound, complete or not. Call after arrivals and after every new head."""
        judged = [(name, self._verdict(self._open[name], head)) for name in self._idle()]
        return [self._end(name, *verdict, head, now) for name, verdict in judged if verdict is not None]

    def expire(self, now: float, *, head: int = -1) -> list[OutcomeEvent]:
        """End the groups that are not complete by their deadline. A complete one waits for its batch; its limit is its lag.

        Under TRAIN_PARTIAL a group with enough usable members goes on without the missing ones instead, and under RETRY it is
        `retries` that has it, until its attempts are used up. By default neither: who finishes first is no fair sample of a group.
        """
        events = []
        for name, entry in self._unsettled():
            if entry.deadline(self.started_at) > now or self._may_retry(entry):
                continue
            if self.deadline_policy is DeadlinePolicy.TRAIN_PARTIAL and len(entry.usable) >= self.partial_members:
                self._open[name] = replace(entry, cut=True)
                verdict = self._verdict(self._open[name], head)
            else:
                verdict = Outcome.EXPIRED, _why_expired(entry)
            if verdict is not None:
                events.append(self._end(name, *verdict, head, now))
        return events

    def retries(self, now: float) -> list[Retried]:
        """The groups to be queued again, with their missing members. They are named until `retried` folds what the ledger keeps."""
        return [
            Retried(run=self.run, at=now, group=group.model_copy(update={"attempt": entry.attempt + 1, "wanted": entry.missing}))
            for _, entry in self._unsettled()
            if (group := entry.group) is not None and self._may_retry(entry) and entry.deadline(self.started_at) <= now
        ]

    def retrying(self) -> tuple[Group, ...]:
        """What the newest attempt of each group that was queued again asks for: a learner that died before queueing it does so now."""
        return tuple(entry.retry.group for _, entry in self._unsettled() if entry.retry is not None)

    def fail(self, group: str, reason: str, *, head: int, now: float) -> OutcomeEvent | None:
        """End an open group as failed: its work is poison. None if it has ended or is being trained, which nothing ends. One whose
        Admitted event is not seen yet is ended by the `sweep` after it."""
        if group in self._ended or group in self._taken:
            return None
        entry = self._open.get(group, OpenGroup())
        self._open[group] = replace(entry, failure=reason)
        return None if entry.group is None else self._end(group, Outcome.FAILED, reason, head, now)

    def next_batch(self, head: int) -> Batch | None:
        """The next batch to train from `head`, or None while there are too few groups or `waiting_for` names one. Its groups are
        taken until `commit` or `release`: nothing else ends them meanwhile."""
        names = self._oldest_ready(head)
        if len(names) < self.groups_per_step or self._held_back_by(names, head):
            return None
        batch = Batch(head, tuple(self._batch_group(name) for name in sorted(names)))
        self._taken.update(dict.fromkeys(names, batch))
        return batch

    def waiting_for(self, head: int) -> tuple[str, ...]:
        """The incomplete groups that a step with enough groups is held back for, because it would make one of them stale."""
        names = self._oldest_ready(head)
        return self._held_back_by(names, head) if len(names) == self.groups_per_step else ()

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
                members=len(entry.members), reward_mean=math.fsum(rewards) / len(rewards), at=now, reason=_why_without(self._open[name]),
                arrived=self._open[name].arrived, trained=tuple(m.trajectory.member for m in entry.members),
            ))
            self._forget(name, Outcome.TRAINED)
        return events

    def release(self, batch: Batch) -> None:
        """Give a batch back untrained; its groups may be taken again or swept, but for those that ended elsewhere meanwhile."""
        taken = [name for name in batch.group_ids if self._taken.get(name) is batch]
        if not taken:
            self._check_taken(batch)
        for name in taken:
            del self._taken[name]

    def cancel_all(self, reason: str, *, now: float, head: int = -1) -> list[OutcomeEvent]:
        """End every admitted group that has not ended, those of a batch in training too. May be called again, after Admitted
        events that came late: it returns only what is new."""
        self._taken.clear()
        return [self._end(name, Outcome.CANCELLED, reason, head, now) for name in self.open_groups]

    def _idle(self) -> list[str]:
        return [name for name in self.open_groups if name not in self._taken]

    def _unsettled(self) -> list[tuple[str, OpenGroup]]:
        """Who has a deadline: admitted, and still waiting for members."""
        return [(name, self._open[name]) for name in self._idle() if not self._open[name].settled]

    def _state(self, entry: OpenGroup) -> State:
        return entry.state(self.min_group_members)

    def _may_retry(self, entry: OpenGroup) -> bool:
        return self.deadline_policy is DeadlinePolicy.RETRY and entry.attempt < self.group_retries

    def _verdict(self, entry: OpenGroup, head: int) -> tuple[Outcome, str] | None:
        """How a group has to end, if it has to."""
        if entry.failure:
            return Outcome.FAILED, entry.failure
        if entry.oldest_aborted is not None and head - entry.oldest_aborted > self.max_lag:
            return Outcome.STALE, f"aborted: {self._why_stale(entry.oldest_aborted, head)}"
        match self._state(entry):
            case State.FAILED:
                return Outcome.FAILED, _why_failed(entry)
            case State.ZERO_VARIANCE:
                return Outcome.ZERO_VARIANCE, "all rewards are equal" + (f", {_why_without(entry)}" if entry.missing else "")
            case State.WAITING | State.READY if entry.oldest_version is not None and head - entry.oldest_version > self.max_lag:
                return Outcome.STALE, self._why_stale(entry.oldest_version, head)
        return None

    def _why_stale(self, oldest: int, head: int) -> str:
        return f"oldest token is of version {oldest}, lag {head - oldest} exceeds {self.max_lag}"

    def _trainable(self, entry: OpenGroup, head: int) -> bool:
        oldest = entry.oldest_version
        if self._state(entry) is not State.READY or oldest is None:
            return False
        # A version newer than the head is another learner's or a head not yet seen here: such a group has to wait.
        return head - oldest <= self.max_lag and entry.newest_version <= head

    def _oldest_ready(self, head: int) -> list[str]:
        """The groups of the next batch, as far as there are enough."""
        eligible = []
        for name in self._idle():
            entry = self._open[name]
            if self._trainable(entry, head):
                assert entry.group is not None
                eligible.append((entry.last_head(head, self.max_lag), entry.group.index, name))
        return [name for _, _, name in sorted(eligible)[: self.groups_per_step]]

    def _held_back_by(self, batch: list[str], head: int) -> tuple[str, ...]:
        if self.stale_policy is StalePolicy.DROP:
            return ()
        last_heads = {
            name: entry.last_head(head, self.max_lag) for name in self._idle()
            if self._state(entry := self._open[name]) is State.WAITING or self._trainable(entry, head)
        }
        return held_back_by(last_heads, batch, head, self.groups_per_step)

    def _check_taken(self, batch: Batch) -> None:
        for name in batch.group_ids:
            if self._taken.get(name) is not batch:
                raise AssemblyError("the batch is not the one being trained: it was committed, released or cancelled",
                                    field="batch", value=name)

    def _batch_group(self, name: str) -> BatchGroup:
        entry = self._open[name]
        assert entry.group is not None
        return BatchGroup(entry.group, tuple(m.graded for m in entry.usable), entry.excluded)

    def _end(self, name: str, outcome: Outcome, reason: str, head: int, now: float) -> OutcomeEvent:
        entry = self._open[name]
        oldest, rewards = entry.oldest_version, entry.rewards
        self._forget(name, outcome)
        return OutcomeEvent(
            run=self.run, group=name, outcome=outcome, reason=reason, version=head + 1 if head >= 0 else -1,
            lag=head - oldest if oldest is not None and head >= 0 else -1, members=len(entry.members),
            reward_mean=math.fsum(rewards) / len(rewards) if rewards else None, at=now, arrived=entry.arrived,
        )

    def _forget(self, name: str, outcome: Outcome) -> None:
        entry = self._open.pop(name, None)
        if entry is not None:
            self._held_bytes -= entry.size
            self.lengths.count(outcome, (m.graded.trajectory for m in entry.members.values()))
        self._taken.pop(name, None)
        self._ended[name] = outcome


def _why_failed(entry: OpenGroup) -> str:
    causes = []
    for member in entry.arrived:
        graded = entry.members[member].graded
        if entry.members[member].reward is None:
            causes.append(f"member {member}: {graded.cause or graded.trajectory.finish}")
    return f"{len(causes)} of {len(entry.members)} members failed; " + "; ".join(causes[:3])


def _why_expired(entry: OpenGroup) -> str:
    assert entry.group is not None
    tries = f" in attempt {entry.attempt + 1}" if entry.attempt else ""
    return f"{len(entry.missing)} of {entry.group.members} members missing after {entry.group.deadline_s:g} s{tries}: {list(entry.missing)}"


def _why_without(entry: OpenGroup) -> str:
    failed = [k for k in entry.arrived if entry.members[k].reward is None]
    parts = [f"without failed members {failed}"] if failed else []
    parts += [f"without missing members {list(entry.missing)}"] if entry.missing else []
    return ", ".join(parts)
