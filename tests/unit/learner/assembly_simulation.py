"""The loop in virtual time around a real assembler: a ledger, an admission window, engines that need random times, and a learner.

Only what the staleness rule may rely on is kept: the window is counted from the ledger, the head moves before the outcomes are written,
a group is sampled by the head at the time an engine takes it, after its admission. Everything else is random.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from driftline.messages.types import (
    Admitted,
    Finish,
    Graded,
    Group,
    Outcome,
    OutcomeEvent,
    Retried,
    Task,
    Trajectory,
)
from driftline.services.config import DeadlinePolicy, StalePolicy
from driftline.services.learner.assembler import Assembler, Batch

RUN = "sim"


@dataclass(frozen=True)
class World:
    groups_per_step: int = 2
    max_lag: int = 1
    members: int = 2
    engines: int = 0  # how many groups are sampled at a time; 0: all of them
    tail: float = 1.0  # Pareto exponent of a sample's time: smaller is heavier
    equal: float = 0.0  # chance that a group's rewards are all equal
    failing: float = 0.0  # chance that a member's grading fails
    lost: float = 0.0  # chance that a member never comes
    step_s: float = 0.5
    deadline_s: float = 1e9
    stale_policy: StalePolicy = StalePolicy.WAIT
    deadline_policy: DeadlinePolicy = DeadlinePolicy.FAIL_GROUP
    group_retries: int = 1


@dataclass
class Simulation:
    world: World
    random: Random
    now: float = 0.0
    head: int = 0
    ledger: list[Admitted | OutcomeEvent | Retried] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    held_back: int = 0

    def __post_init__(self) -> None:
        self.assembler = self._fresh()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._queue: list[Group] = []
        self._sampling = 0
        self._seen = 0
        self._cursor = 0
        self._open: set[str] = set()
        self._batch: Batch | None = None
        self._sent: set[tuple[str, int]] = set()

    @property
    def outcomes(self) -> list[OutcomeEvent]:
        return [event for event in self.ledger if isinstance(event, OutcomeEvent)]

    def count(self, outcome: Outcome) -> int:
        return sum(event.outcome is outcome for event in self.outcomes)

    def run(self, steps: int, limit: int = 20_000) -> None:
        """Until `steps` versions exist. An AssertionError where nothing can happen any more."""
        self._admit()
        for _ in range(limit):
            self._learn()
            if self.head >= steps:
                return
            deadline = self.assembler.next_deadline() if self._batch is None else None
            if self._events and (deadline is None or self._events[0][0] < deadline):
                self.now, _, happen = heapq.heappop(self._events)
                happen()
            else:
                assert deadline is not None, "deadlock: nothing is on its way and nothing has a deadline"
                self.now = max(self.now, deadline)
        raise AssertionError(f"{limit} events made only {self.head} versions")

    def restart(self) -> None:
        """A learner that died without having written anything of a batch it holds: a new one folds the ledger and receives again."""
        held = [member.graded for entry in self.assembler._open.values() for member in entry.members.values()]
        self._batch = None
        self.assembler = self._fresh()
        self._seen = 0
        self._fold()
        for graded in held:
            self._later(self.random.random() * 0.3, partial(self._receive, graded))

    def _fresh(self) -> Assembler:
        world = self.world
        return Assembler(
            run=RUN, groups_per_step=world.groups_per_step, max_lag=world.max_lag, stale_policy=world.stale_policy,
            deadline_policy=world.deadline_policy, group_retries=world.group_retries,
        )

    def _later(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), happen))

    def _write(self, *events: Admitted | OutcomeEvent | Retried) -> None:
        """Each event is in the ledger before the next, and the dispatcher may act in between."""
        for event in events:
            self.ledger.append(event)
            if isinstance(event, OutcomeEvent):
                assert event.group in self._open, f"{event.group} ended twice"
                self._open.discard(event.group)
                if self.random.random() < 0.7:
                    self._admit()
        self._admit()

    def _admit(self) -> None:
        world = self.world
        while len(self._open) < (world.max_lag + 1) * world.groups_per_step:
            index, self._cursor = self._cursor, self._cursor + 1
            group = Group(run=RUN, group=f"g{index:08d}", index=index, members=world.members, deadline_s=world.deadline_s,
                          task=Task(id=f"t{index}", source="s", family="f", prompt="p"))
            self._open.add(group.group)
            self.ledger.append(Admitted(run=RUN, group=group, at=self.now))
            self._enqueue(group)

    def _enqueue(self, group: Group) -> None:
        self._queue.append(group)
        self._later(self.random.random() * 0.01, self._take)

    def _take(self) -> None:
        while self._queue and not (self.world.engines and self._sampling >= self.world.engines):
            self._sample(self._queue.pop(0))

    def _sample(self, group: Group) -> None:
        self._sampling += 1
        version, random, world = self.head, self.random, self.world
        equal = random.random() < world.equal
        longest = 0.0
        for member in group.to_sample:
            took = 0.2 * random.paretovariate(world.tail)
            longest = max(longest, took)
            if random.random() >= world.lost:
                reward = None if random.random() < world.failing else 0.5 if equal else float(member % 2)
                self._later(took, partial(self._deliver, group, member, version, reward))
        self._later(longest, self._freed)

    def _freed(self) -> None:
        self._sampling -= 1
        self._take()

    def _deliver(self, group: Group, member: int, version: int, reward: float | None) -> None:
        if (group.group, member) in self._sent:  # its content id is stored already
            return
        self._sent.add((group.group, member))
        trajectory = Trajectory(
            run=RUN, group=group.group, member=member, members=group.members, index=group.index, task=group.task, prompt_tokens=1,
            tokens=[1, 5, 5], action_mask=[False, True, True], logprobs=[0.0, -1.0, -1.0],  # type: ignore[arg-type]
            versions=[-1, version, self.head], finish=Finish.STOP,  # type: ignore[arg-type]
        )
        self._receive(Graded(run=RUN, trajectory=trajectory, reward=reward, cause="" if reward is not None else "raised"))

    def _receive(self, graded: Graded) -> None:
        self.assembler.arrive(graded)

    def _fold(self) -> None:
        for event in self.ledger[self._seen:]:
            match event:
                case Admitted():
                    self.assembler.admit(event.group, event.at)
                case Retried():
                    self.assembler.retried(event)
                case OutcomeEvent():
                    self.assembler.ended(event)
        self._seen = len(self.ledger)

    def _learn(self) -> None:
        """One turn of the learner: fold, end, queue again, and form a batch if none is in training."""
        self._fold()
        if self._batch is not None:
            return
        self._write(*self.assembler.sweep(self.head, now=self.now), *self.assembler.expire(self.now, head=self.head))
        retries = self.assembler.retries(self.now)
        self._write(*retries)
        for event in retries:
            self._enqueue(event.group)
        self._fold()
        batch = self.assembler.next_batch(self.head)
        if batch is None:
            self.held_back += bool(self.assembler.waiting_for(self.head))
            return
        assert batch.lag <= self.world.max_lag
        self._batch = batch
        self._later(self.world.step_s * self.random.random(), lambda: self._commit(batch))

    def _commit(self, batch: Batch) -> None:
        if self._batch is not batch:  # the learner that formed it died
            return
        self._batch = None
        self.batches.append(batch)
        self.head += 1
        self._write(*self.assembler.commit(batch, self.head, now=self.now))
