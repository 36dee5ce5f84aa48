"""A group that has not ended: its members so far, and what the rules ask about it. Pure: every change is a new value, so what was
asked once is kept.

Guarantees: what it answers depends on what is held, never on the order it came in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Self

from driftline.messages.types import Finish, Graded, Group, Retried, Trajectory
from driftline.services.learner.advantage import is_zero_variance

__all__ = ["Member", "OpenGroup", "State", "fits", "held_size"]

OVERHEAD_BYTES = 1024  # of a held member beyond its arrays and texts: the objects themselves


class State(StrEnum):
    WAITING = "waiting"
    READY = "ready"
    FAILED = "failed"
    ZERO_VARIANCE = "zero_variance"


@dataclass(frozen=True)
class Member:
    """A held member, with what the rules ask about it computed once."""

    graded: Graded
    reward: float | None  # None: not usable
    aborted: bool
    oldest: int
    newest: int
    size: int

    @classmethod
    def of(cls, graded: Graded) -> Self:
        trajectory = graded.trajectory
        aborted = trajectory.finish is Finish.ABORT
        return cls(graded, None if aborted else graded.reward, aborted, trajectory.oldest_version, int(trajectory.versions.max()), held_size(graded))


@dataclass(frozen=True)
class OpenGroup:
    """`group` is None until its Admitted event is seen. `floor` bounds the version of its tokens from below. `retry` is its newest
    Retried event, `again` the members that were missing at its first. `cut`: its deadline has passed and it goes on with the members
    it has. `failure`: why it is to end as failed."""

    group: Group | None = None
    admitted_at: float = 0.0
    floor: int = 0
    members: Mapping[int, Member] = field(default_factory=dict)
    retry: Retried | None = None
    again: frozenset[int] = frozenset()
    cut: bool = False
    failure: str = ""

    @cached_property
    def usable(self) -> tuple[Member, ...]:
        return tuple(self.members[k] for k in sorted(self.members) if self.members[k].reward is not None)

    @property
    def rewards(self) -> list[float]:
        return [m.reward for m in self.usable if m.reward is not None]

    @property
    def arrived(self) -> tuple[int, ...]:
        return tuple(sorted(self.members))

    @property
    def missing(self) -> tuple[int, ...]:
        return () if self.group is None else tuple(k for k in range(self.group.members) if k not in self.members)

    @property
    def excluded(self) -> tuple[int, ...]:
        """The members that are not trained on: they failed, or did not come."""
        if self.group is None:
            return ()
        return tuple(k for k in range(self.group.members) if k not in self.members or self.members[k].reward is None)

    @property
    def attempt(self) -> int:
        return 0 if self.retry is None else self.retry.group.attempt

    @property
    def size(self) -> int:
        return sum(m.size for m in self.members.values())

    @property
    def settled(self) -> bool:
        """No member is waited for."""
        return self.group is not None and (self.cut or len(self.members) == self.group.members)

    def deadline(self, started_at: float) -> float:
        assert self.group is not None
        asked_at = self.admitted_at if self.retry is None else self.retry.at
        return max(asked_at, started_at) + self.group.deadline_s

    @cached_property
    def oldest_version(self) -> int | None:
        """What the bound is judged on. An aborted member counts: an engine gave it up because it was too old."""
        return min((m.oldest for m in self.members.values() if m.reward is not None or m.aborted), default=None)

    @cached_property
    def oldest_aborted(self) -> int | None:
        return min((m.oldest for m in self.members.values() if m.aborted), default=None)

    @cached_property
    def newest_version(self) -> int:
        return max(m.newest for m in self.usable)

    def last_head(self, head: int, max_lag: int) -> int:
        """The newest head it can be trained from, as far as is known at `head`.

        The members of a group enter an engine together, so the first that come say when the others began. Without them, and while an
        older sample of a group that was queued again may be on its way, there is only the floor: an estimate from below, on which no
        group is given up.
        """
        if self.settled and self.oldest_version is not None:
            return self.oldest_version + max_lag
        oldest = min([m.oldest for m in self.members.values()], default=self.floor)
        if any(k not in self.again for k in self.members):
            return oldest + max_lag
        return max(head, min(oldest, self.floor) + max_lag)

    @cached_property
    def _equal(self) -> bool:
        return is_zero_variance(self.rewards)

    def state(self, min_members: int) -> State:
        if self.group is None:
            return State.WAITING
        expected = len(self.usable) + (0 if self.settled else self.group.members - len(self.members))
        if expected < min_members:
            return State.FAILED  # whatever still comes
        if not self.settled:
            return State.WAITING
        return State.ZERO_VARIANCE if self._equal else State.READY


def fits(trajectory: Trajectory, group: Group) -> bool:
    return trajectory.members == group.members and trajectory.index == group.index and trajectory.task.id == group.task.id


def held_size(graded: Graded) -> int:
    """About how many bytes holding a member costs."""
    t = graded.trajectory
    arrays = [t.tokens, t.action_mask, t.logprobs, t.versions] + ([] if t.routes is None else [t.routes])
    texts = (t.text, t.task.prompt, t.task.answer or "", graded.cause)
    return OVERHEAD_BYTES + sum(a.nbytes for a in arrays) + sum(len(text) for text in texts)
