"""The assembler under any sequence of events, against a model that only remembers what was said."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from driftline.messages.types import Finish, Graded, Group, Outcome, OutcomeEvent, Retried, Task, Trajectory
from driftline.services.config import DeadlinePolicy, StalePolicy
from driftline.services.learner.assembler import Arrival, Assembler, Batch

RUN, MEMBERS, GROUPS = "r", 3, 8


def group(index: int) -> Group:
    task = Task(id=f"t{index}", source="s", family="f", prompt="p")
    return Group(run=RUN, group=f"g{index:08d}", index=index, task=task, members=MEMBERS, deadline_s=10.0)


def graded(index: int, member: int, reward: float | None, oldest: int, newest: int, finish: Finish = Finish.STOP) -> Graded:
    made = Trajectory(
        run=RUN, group=f"g{index:08d}", member=member, members=MEMBERS, index=index, task=group(index).task, prompt_tokens=1,
        tokens=[1, 5, 5], action_mask=[False, True, True], logprobs=[0.0, -1.0, -1.0],  # type: ignore[arg-type]
        versions=[-1, newest, oldest], finish=finish,  # type: ignore[arg-type]
    )
    return Graded(run=RUN, trajectory=made, reward=reward, cause="" if reward is not None else "failed")


class AnySequence(RuleBasedStateMachine):
    """Admissions, arrivals (again and again, re-sampled too), versions, deadlines, crashes, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.now, self.max_lag = 0, 0.0, 1
        self.stale_policy, self.deadline_policy = StalePolicy.WAIT, DeadlinePolicy.FAIL_GROUP
        self.made = self.fresh()
        self.batch: Batch | None = None
        self.retried: list[Retried] = []
        self.ledger: list[OutcomeEvent] = []
        self.manifests: dict[int, list[str]] = {}
        self.admitted: set[int] = set()
        self.stream: dict[tuple[int, int], list[Graded]] = {}

    def fresh(self) -> Assembler:
        return Assembler(run=RUN, groups_per_step=2, max_lag=self.max_lag, stale_policy=self.stale_policy,
                         deadline_policy=self.deadline_policy, group_retries=2)

    @initialize(stale=st.sampled_from(list(StalePolicy)), deadline=st.sampled_from(list(DeadlinePolicy)))
    def choose(self, stale: StalePolicy, deadline: DeadlinePolicy) -> None:
        self.stale_policy, self.deadline_policy = stale, deadline
        self.made = self.fresh()

    @rule(index=st.integers(0, GROUPS - 1))
    def admit(self, index: int) -> None:
        self.made.admit(group(index), at=self.now)
        self.admitted.add(index)

    @rule(index=st.integers(0, GROUPS - 1), member=st.integers(0, MEMBERS - 1), age=st.integers(0, 3), span=st.integers(0, 2),
          reward=st.sampled_from([0.0, 0.7, 1.0, None]), finish=st.sampled_from([Finish.STOP, Finish.LENGTH, Finish.ABORT]))
    def arrive(self, index: int, member: int, age: int, span: int, reward: float | None, finish: Finish) -> None:
        newest = max(0, self.head - age)
        one = graded(index, member, reward, max(0, newest - span), newest, finish)
        self.stream.setdefault((index, member), []).append(one)
        before = self.made.held_bytes
        arrival = self.made.arrive(one)
        assert arrival is not Arrival.UNKNOWN
        assert (self.made.held_bytes > before) == (arrival is Arrival.ACCEPTED)
        assert (arrival is Arrival.ALREADY_ENDED) == (self.made.outcome(group(index).group) is not None)

    @precondition(lambda self: self.stream)
    @rule(data=st.data())
    def deliver_again(self, data: Any) -> None:
        key = data.draw(st.sampled_from(sorted(self.stream)))
        before = self.made.held_bytes
        assert self.made.arrive(self.stream[key][0]) in (Arrival.DUPLICATE, Arrival.ALREADY_ENDED)
        assert self.made.held_bytes == before

    @rule()
    def sweep(self) -> None:
        self.ledger += self.made.sweep(self.head, now=self.now)

    @rule(seconds=st.floats(0, 6))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.ledger += self.made.expire(self.now, head=self.head)
        for event in self.made.retries(self.now):
            assert event.group.wanted
            assert event.group.attempt <= 2
            assert self.made.retried(event)
            self.retried.append(event)
        due = self.made.next_deadline()
        assert due is None or due > self.now  # otherwise the learner would turn without rest

    @precondition(lambda self: self.ledger)
    @rule(data=st.data())
    def read_back(self, data: Any) -> None:
        event = data.draw(st.sampled_from(self.ledger))
        before = (self.made.open_groups, self.made.held_bytes)
        self.made.ended(event)
        assert (self.made.open_groups, self.made.held_bytes) == before

    @rule(index=st.integers(0, GROUPS - 1))
    def fail(self, index: int) -> None:
        event = self.made.fail(group(index).group, "poison", head=self.head, now=self.now)
        self.ledger += [] if event is None else [event]

    @precondition(lambda self: self.batch is None)
    @rule()
    def form(self) -> None:
        held_back = self.made.waiting_for(self.head)
        assert set(held_back) <= set(self.made.open_groups)
        self.batch = self.made.next_batch(self.head)
        if self.batch is None:
            return
        assert held_back == ()
        ids = [(t.group, t.member) for t in self.batch.trajectories]
        assert ids == sorted(ids)
        assert len(self.batch.groups) == 2
        for entry in self.batch.groups:
            assert sorted([m.trajectory.member for m in entry.members] + list(entry.excluded)) == list(range(MEMBERS))
            assert max(entry.rewards) > min(entry.rewards)
        for trajectory in self.batch.trajectories:
            assert self.head - int(trajectory.versions[1:].min()) <= self.max_lag

    @precondition(lambda self: self.batch is not None)
    @rule()
    def release(self) -> None:
        assert self.batch is not None
        self.made.release(self.batch)
        self.batch = None

    @precondition(lambda self: self.batch is not None)
    @rule()
    def commit(self) -> None:
        assert self.batch is not None
        self.head += 1
        self.manifests[self.head] = self.batch.consumed
        self.ledger += self.made.commit(self.batch, self.head, now=self.now)
        self.batch = None

    @precondition(lambda self: self.batch is not None)
    @rule(published=st.booleans())
    def crash(self, published: bool) -> None:
        """Before the manifest, or between the manifest and the outcomes; everything unfinished is delivered again."""
        assert self.batch is not None
        if published:
            self.head += 1
            self.manifests[self.head] = self.batch.consumed
        self.batch, self.made = None, self.fresh()
        for event in self.ledger:
            self.made.ended(event)
        for version, consumed in self.manifests.items():
            self.ledger += self.made.recover(consumed, version, now=self.now)
        for copies in self.stream.values():
            for one in copies:
                self.made.arrive(one)
        for event in self.retried:
            self.made.retried(event)
        for index in self.admitted:
            self.made.admit(group(index), at=self.now)

    @invariant()
    def every_group_ends_at_most_once(self) -> None:
        assert max(Counter(e.group for e in self.ledger).values(), default=0) <= 1

    @invariant()
    def trained_members_are_those_of_the_manifests(self) -> None:
        said = {f"{RUN}/{e.group}/{m}" for e in self.ledger for m in e.trained}
        consumed = {name for names in self.manifests.values() for name in names}
        assert said <= consumed
        assert all(set(e.trained) <= set(e.arrived) and bool(e.trained) == (e.outcome is Outcome.TRAINED) for e in self.ledger)

    @invariant()
    def nothing_is_trained_on_twice(self) -> None:
        consumed = [name for names in self.manifests.values() for name in names]
        assert len(consumed) == len(set(consumed))

    def teardown(self) -> None:
        self.ledger += self.made.cancel_all("end", now=self.now)
        ended = {e.group for e in self.ledger}
        assert ended == {group(i).group for i in self.admitted}
        trained = {e.group for e in self.ledger if e.outcome is Outcome.TRAINED}
        assert trained == {name.split("/")[1] for names in self.manifests.values() for name in names}
        assert sum(len(e.trained) for e in self.ledger) == sum(map(len, self.manifests.values()))
        self.every_group_ends_at_most_once()
        held = [k for k in self.stream if group(k[0]).group not in ended]
        assert self.made.held_members == len(held)
        assert (self.made.held_bytes == 0) == (not held)


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@st.composite
def streams(draw: st.DrawFn) -> list[Graded]:
    rewards = st.sampled_from([0.0, 0.5, 1.0, None])
    return [graded(i, m, draw(rewards), draw(st.integers(0, 1)), 1) for i in range(4) for m in range(MEMBERS)]


def run_through(events: list[Group | Graded]) -> tuple[list[list[str]], dict[str, Outcome]]:
    """Every batch from head 1 on, after all events are in, and how each group ended."""
    made, batches, ended = Assembler(run=RUN, groups_per_step=1, max_lag=2), [], {}
    for event in events:
        if isinstance(event, Group):
            made.admit(event, at=0.0)
        else:
            made.arrive(event)
    head = 1
    while True:
        ended.update({e.group: e.outcome for e in made.sweep(head, now=0.0)})
        batch = made.next_batch(head)
        if batch is None:
            return batches, ended
        head += 1
        batches.append(batch.consumed)
        ended.update({e.group: e.outcome for e in made.commit(batch, head, now=0.0)})


@given(streams(), st.randoms(use_true_random=False), st.data())
@settings(max_examples=60, deadline=None)
def test_neither_order_nor_repetition_of_arrivals_changes_a_batch(stream: list[Graded], random: Any, data: Any) -> None:
    """L1, L8 (docs/field_failures.md)."""
    ordered: list[Group | Graded] = [*(group(i) for i in range(4)), *stream]
    again = data.draw(st.lists(st.sampled_from(range(len(ordered))), max_size=8))
    shuffled = ordered + [ordered[i] for i in again]
    random.shuffle(shuffled)
    assert run_through(shuffled) == run_through(ordered)
