"""Waiting instead of dropping: no group of a run with the admission window ends stale, and nothing waits for ever."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from assembly_simulation import Simulation, World
from hypothesis import given, settings
from test_assembler import RUN, assembler, graded, group, outcomes

from driftline.messages.types import Finish, Outcome, OutcomeEvent
from driftline.services.config import DeadlinePolicy, StalePolicy
from driftline.services.learner.assembler import Assembler

STEPS = 9


@st.composite
def worlds(draw: st.DrawFn) -> World:
    return World(
        groups_per_step=draw(st.integers(1, 4)), max_lag=draw(st.integers(0, 3)), engines=draw(st.sampled_from([0, 1, 2, 5])),
        tail=draw(st.sampled_from([0.4, 0.8, 1.5, 4.0])), equal=draw(st.sampled_from([0.0, 0.2, 0.5])),
        failing=draw(st.sampled_from([0.0, 0.1, 0.4])), step_s=draw(st.sampled_from([0.0, 0.2, 3.0])),
    )


SEEDS = st.integers(0, 2**32)


@given(worlds(), SEEDS)
@settings(max_examples=30, deadline=None)
def test_who_waits_never_drops_a_group_and_never_stops(world: World, seed: int) -> None:
    """S17, S15 (docs/field_failures.md)."""
    simulation = Simulation(world, Random(seed))
    simulation.run(STEPS)
    assert simulation.count(Outcome.STALE) == 0
    assert all(batch.lag <= world.max_lag for batch in simulation.batches)


@given(worlds(), SEEDS)
@settings(max_examples=30, deadline=None)
def test_who_drops_never_exceeds_the_bound_and_never_waits_for_it(world: World, seed: int) -> None:
    simulation = Simulation(replace(world, stale_policy=StalePolicy.DROP), Random(seed))
    simulation.run(STEPS)
    assert simulation.held_back == 0
    assert all(batch.lag <= world.max_lag for batch in simulation.batches)


@given(worlds(), SEEDS, st.sampled_from(list(DeadlinePolicy)), st.sampled_from([0.0, 0.2]), st.sampled_from([0.8, 3.0]))
@settings(max_examples=30, deadline=None)
def test_waiting_ends_at_the_deadline_of_members_that_never_come(
    world: World, seed: int, policy: DeadlinePolicy, lost: float, deadline_s: float
) -> None:
    """Here a retried group may have an older sample still on its way, and no engine is told when a group has ended."""
    world = replace(world, lost=lost, deadline_s=deadline_s, deadline_policy=policy, engines=0, members=3, tail=1.5, failing=0.1, equal=0.1)
    simulation = Simulation(world, Random(seed))
    simulation.run(STEPS)
    assert simulation.count(Outcome.STALE) == 0


@given(worlds(), SEEDS, st.integers(1, 7))
@settings(max_examples=30, deadline=None)
def test_a_learner_that_restarts_keeps_every_group_in_time(world: World, seed: int, at: int) -> None:
    """H6 (docs/field_failures.md)."""
    simulation = Simulation(world, Random(seed))
    for stop in (at, at + 1):
        simulation.run(stop)
        simulation.restart()
    simulation.run(STEPS)
    assert simulation.count(Outcome.STALE) == 0


def test_a_heavy_tail_makes_who_drops_lose_the_long_samples_that_who_waits_trains_on() -> None:
    """S15 (docs/field_failures.md)."""
    world = World(groups_per_step=4, max_lag=1, tail=0.8, step_s=0.1)
    waits, drops = Simulation(world, Random(5)), Simulation(replace(world, stale_policy=StalePolicy.DROP), Random(5))
    for simulation in (waits, drops):
        simulation.run(60)
    assert waits.count(Outcome.STALE) == 0 < waits.held_back
    assert drops.count(Outcome.STALE) > 20


@pytest.mark.parametrize("policy", list(StalePolicy))
def test_a_synchronous_run_trains_whole_windows(policy: StalePolicy) -> None:
    """H35 (docs/field_failures.md)."""
    simulation = Simulation(World(groups_per_step=3, max_lag=0, tail=0.6, equal=0.3, stale_policy=policy), Random(3))
    simulation.run(20)
    assert all(batch.lag == 0 for batch in simulation.batches)
    assert simulation.count(Outcome.STALE) == 0


@given(worlds(), SEEDS)
@settings(max_examples=30, deadline=None)
def test_a_bound_lowered_between_two_starts_costs_groups_but_never_stops_the_run(world: World, seed: int) -> None:
    simulation = Simulation(replace(world, max_lag=3), Random(seed))
    simulation.run(3)
    simulation.world = replace(world, max_lag=0)
    simulation.restart()
    simulation.run(STEPS)
    assert all(batch.lag == 0 for batch in simulation.batches[3:])


# One group at a time.


def trained(index: int, version: int) -> OutcomeEvent:
    return OutcomeEvent(run=RUN, group=f"g{index:08d}", outcome=Outcome.TRAINED, version=version)


def arrive(made: Assembler, index: int, versions: list[int], members: int = 2, **more: Any) -> None:
    for member in range(members):
        made.arrive(graded(index, member, float(member % 2), versions, members=members, **more))


def test_a_step_waits_for_the_group_it_would_make_stale_and_takes_it_first() -> None:
    made = assembler(max_lag=1)
    for index in range(2):
        made.admit(group(index), at=0.0)
    arrive(made, 1, [1])
    assert made.next_batch(1) is None  # group 0 may be of version 0 and must be trained from head 1
    assert made.waiting_for(1) == ("g00000000",)
    arrive(made, 0, [0])
    assert made.waiting_for(1) == ()
    batch = made.next_batch(1)
    assert batch is not None
    assert batch.group_ids == ("g00000000",)


def test_a_member_that_came_says_when_its_group_was_begun() -> None:
    made = assembler(max_lag=1)
    for index in range(2):
        made.admit(group(index), at=0.0)
    arrive(made, 1, [1])
    assert made.next_batch(1) is None
    made.arrive(graded(0, 0, None, [1]))  # also one that failed
    assert made.next_batch(1) is not None


def test_of_a_retried_group_an_older_sample_may_be_on_its_way_unless_a_member_came_before() -> None:
    for came_before in (True, False):
        made = assembler(max_lag=1, deadline_policy=DeadlinePolicy.RETRY)
        for index in range(2):
            made.admit(group(index, members=3, deadline_s=10.0), at=0.0)
        arrive(made, 1, [1], members=3)
        if came_before:
            made.arrive(graded(0, 0, 1.0, [1], members=3))
        for event in made.retries(10.0):
            made.retried(event)
        made.arrive(graded(0, 1, 1.0, [1], members=3))
        assert made.waiting_for(1) == (() if came_before else ("g00000000",))


def test_the_floor_is_what_the_ledger_has_trained_before_the_admission_also_by_groups_that_ended_here() -> None:
    made = assembler(max_lag=1)
    made.admit(group(0), at=0.0)
    arrive(made, 0, [0])
    batch = made.next_batch(0)
    assert batch is not None
    [event] = made.commit(batch, 1, now=0.0)
    made.admit(group(1), at=0.0)  # in the ledger before the outcome: its engine may still have had version 0
    made.ended(event)
    made.admit(group(2), at=0.0)
    arrive(made, 2, [1])
    assert made.next_batch(1) is None
    assert made.waiting_for(1) == ("g00000001",)
    arrive(made, 1, [0])
    batch = made.next_batch(1)
    assert batch is not None
    assert batch.group_ids == ("g00000001",)


def test_a_group_admitted_after_our_own_version_is_in_the_ledger_is_not_older_than_it() -> None:
    made = assembler(max_lag=1)
    made.admit(group(0), at=0.0)
    arrive(made, 0, [0])
    batch = made.next_batch(0)
    assert batch is not None
    for event in made.commit(batch, 1, now=0.0):
        made.ended(event)
    for index in (1, 2):
        made.admit(group(index), at=0.0)
    arrive(made, 2, [1])
    assert made.waiting_for(1) == ()
    assert made.next_batch(1) is not None


def test_no_group_is_given_up_on_its_floor_alone() -> None:
    """After a restart nothing has been delivered again yet: what was sampled late by the ledger's measure may still be in time."""
    made = assembler(max_lag=1)
    for index in range(2):
        made.admit(group(index), at=0.0)
    arrive(made, 1, [5])
    assert made.next_batch(5) is None
    assert made.waiting_for(5) == ("g00000000",)
    made.arrive(graded(0, 0, 1.0, [5]))
    assert made.next_batch(5) is not None


def test_a_restart_folds_the_same_floors() -> None:
    events = [group(0), trained(0, 1), group(1), trained(9, 2), group(2)]
    made = assembler(max_lag=1)
    for event in events:
        if isinstance(event, OutcomeEvent):
            made.ended(event)
        else:
            made.admit(event, at=0.0)
    arrive(made, 2, [2])
    assert made.next_batch(2) is None
    assert made.waiting_for(2) == ("g00000001",)  # of version 1 or newer: head 2 is its last


def test_an_outcome_read_again_lowers_no_floor() -> None:
    made = assembler(max_lag=1)
    for version in (1, 2, 1):
        made.ended(trained(version, version))
    for index in (3, 4):
        made.admit(group(index), at=0.0)
    arrive(made, 4, [2])
    assert made.waiting_for(2) == ()


def test_who_drops_takes_what_is_complete() -> None:
    made = assembler(max_lag=1, stale_policy=StalePolicy.DROP)
    for index in range(2):
        made.admit(group(index), at=0.0)
    arrive(made, 1, [1])
    assert made.waiting_for(1) == ()
    assert made.next_batch(1) is not None


def test_a_straggler_is_waited_for_until_its_deadline() -> None:
    """H1 (docs/field_failures.md)."""
    made = assembler(max_lag=1)
    for index in range(2):
        made.admit(group(index, deadline_s=10.0), at=0.0)
    arrive(made, 1, [1])
    assert made.next_batch(1) is None
    assert made.next_deadline() == 10.0
    assert outcomes(made.expire(10.0, head=1)) == {"g00000000": Outcome.EXPIRED}
    assert made.next_batch(1) is not None


@pytest.mark.parametrize("doomed", [(0.5, 0.5), (None, 1.0)])
def test_a_complete_group_that_will_not_be_trained_is_not_waited_for(doomed: tuple[float | None, float]) -> None:
    made = assembler(max_lag=1)
    for index in range(2):
        made.admit(group(index), at=0.0)
    arrive(made, 1, [1])
    for member, reward in enumerate(doomed):
        made.arrive(graded(0, member, reward))
    assert made.next_batch(1) is not None


def test_more_groups_due_than_a_step_holds_train_the_oldest_and_end_the_rest() -> None:
    made = assembler(max_lag=0)
    for index in range(3):
        made.admit(group(index), at=0.0)
    arrive(made, 1, [0])
    batch = made.next_batch(0)  # two of the three are lost whatever is waited for
    assert batch is not None
    made.commit(batch, 1, now=0.0)
    arrive(made, 0, [0])
    assert outcomes(made.sweep(1, now=0.0)) == {"g00000000": Outcome.STALE}


def test_a_group_given_up_as_too_old_ends_stale_before_its_other_members_come() -> None:
    made = assembler(max_lag=1)
    made.admit(group(0, members=4), at=0.0)
    made.arrive(graded(0, 0, None, [1, 3], members=4, finish=Finish.ABORT))
    assert made.sweep(2, now=0.0) == []
    [event] = made.sweep(3, now=0.0)
    assert (event.outcome, event.lag, event.arrived, event.trained) == (Outcome.STALE, 2, (0,), ())
    assert "aborted" in event.reason
    assert "version 1" in event.reason


def test_a_group_that_cannot_get_enough_members_ends_at_once() -> None:
    made = assembler()
    made.admit(group(0, members=3), at=0.0)
    made.arrive(graded(0, 2, None, members=3, finish=Finish.ABORT))
    assert made.sweep(0, now=0.0) == []
    made.arrive(graded(0, 0, None, members=3))
    [event] = made.sweep(0, now=0.0)
    assert (event.outcome, event.arrived) == (Outcome.FAILED, (0, 2))
    assert "member 2: abort" in event.reason or "member 2: the reward raised" in event.reason


def test_an_aborted_member_within_the_bound_is_left_out() -> None:
    made = assembler(max_lag=1)
    made.admit(group(0, members=3), at=0.0)
    made.arrive(graded(0, 2, None, members=3, finish=Finish.ABORT))
    for member in range(2):
        made.arrive(graded(0, member, float(member), members=3))
    batch = made.next_batch(1)
    assert batch is not None
    assert batch.groups[0].excluded == (2,)
