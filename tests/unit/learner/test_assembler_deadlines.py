"""What happens to a group that is not complete at its deadline, to one whose work is poison, and what its outcome says."""

from __future__ import annotations

from typing import Any

import pytest
from test_assembler import RUN, assembler, filled, graded, group, outcomes, take

from driftline.messages.types import Finish, Graded, Group, Outcome, OutcomeEvent, Retried
from driftline.services.config import DeadlinePolicy
from driftline.services.learner.assembler import Arrival, Assembler, AssemblyError

MEMBERS = 4


def started(members: dict[int, float | None], *, policy: DeadlinePolicy, deadline_s: float = 10.0, **limits: Any) -> Assembler:
    """One admitted group of four, of which `members` have arrived."""
    made = assembler(deadline_policy=policy, **limits)
    made.admit(group(0, members=MEMBERS, deadline_s=deadline_s), at=0.0)
    for member, reward in members.items():
        made.arrive(graded(0, member, reward, members=MEMBERS))
    return made


def partial(members: dict[int, float | None], **limits: Any) -> Assembler:
    return started(members, policy=DeadlinePolicy.TRAIN_PARTIAL, **limits)


def retrying(members: dict[int, float | None], **limits: Any) -> Assembler:
    return started(members, policy=DeadlinePolicy.RETRY, **limits)


def test_a_partial_group_is_trained_on_what_arrived_and_says_what_did_not() -> None:
    """L14, H1 (docs/field_failures.md)."""
    made = partial({0: 0.0, 3: 1.0})
    assert made.expire(9.9, head=0) == []
    assert made.next_batch(0) is None
    assert made.expire(10.0, head=0) == []
    assert made.next_deadline() is None
    batch = take(made)
    assert batch.consumed == ["r/g00000000/0", "r/g00000000/3"]
    assert batch.groups[0].excluded == (1, 2)
    [event] = made.commit(batch, 1, now=11.0)
    assert (event.outcome, event.members, event.arrived, event.trained) == (Outcome.TRAINED, 2, (0, 3), (0, 3))
    assert event.reason == "without missing members [1, 2]"


def test_a_member_that_comes_after_the_cut_is_kept_for_its_groups_end_and_changes_nothing() -> None:
    made = partial({0: 0.0, 3: 1.0})
    made.expire(10.0, head=0)
    held = made.held_bytes
    assert made.arrive(graded(0, 1, 0.5, members=MEMBERS)) is Arrival.DUPLICATE
    assert made.held_bytes == held
    batch = take(made)
    assert batch.consumed == ["r/g00000000/0", "r/g00000000/3"]
    made.commit(batch, 1, now=11.0)
    assert made.arrive(graded(0, 2, 0.5, members=MEMBERS)) is Arrival.ALREADY_ENDED


def test_a_partial_group_whose_rewards_are_equal_ends_at_its_deadline() -> None:
    made = partial({0: 1.0, 3: 1.0})
    [event] = made.expire(10.0, head=0)
    assert event.outcome is Outcome.ZERO_VARIANCE
    assert "[1, 2]" in event.reason
    assert made.held_bytes == 0


@pytest.mark.parametrize(("members", "limits"), [
    ({0: 0.0}, {}),
    ({0: 0.0, 1: None}, {}),
    ({0: 0.0, 1: 1.0}, {"partial_min_members": 3}),
    ({0: 0.0, 1: 1.0}, {"partial_min_members": 1, "min_group_members": 3}),
    ({}, {"partial_min_members": 1}),
])
def test_a_partial_group_with_too_few_members_expires(members: dict[int, float | None], limits: dict[str, int]) -> None:
    made = partial(members, **limits)
    [event] = made.expire(10.0, head=0)
    assert (event.outcome, event.arrived) == (Outcome.EXPIRED, tuple(members))
    assert str([k for k in range(MEMBERS) if k not in members]) in event.reason


def test_a_partial_group_counts_its_failed_members_as_arrived() -> None:
    made = partial({0: 0.0, 1: None, 2: 1.0})
    made.expire(10.0, head=0)
    [event] = made.commit(take(made), 1, now=0.0)
    assert (event.arrived, event.trained) == ((0, 1, 2), (0, 2))
    assert event.reason == "without failed members [1], without missing members [3]"


def test_by_default_a_partly_complete_group_expires() -> None:
    made = started({0: 0.0, 1: 1.0, 2: 0.5}, policy=DeadlinePolicy.FAIL_GROUP)
    assert made.retries(10.0) == []
    [event] = made.expire(10.0, head=0)
    assert (event.outcome, event.arrived, event.trained) == (Outcome.EXPIRED, (0, 1, 2), ())
    assert event.reason == "1 of 4 members missing after 10 s: [3]"


def test_a_retried_group_is_queued_again_with_its_missing_members_and_a_deadline_from_then() -> None:
    """H19 (docs/field_failures.md)."""
    made = retrying({0: 0.0, 2: 1.0})
    assert made.retries(9.9) == []
    [event] = made.retries(12.0)
    assert event.group.model_dump() == {**group(0, members=MEMBERS, deadline_s=10.0).model_dump(), "attempt": 1, "wanted": (1, 3)}
    assert event.group.to_sample == (1, 3)
    assert made.expire(12.0, head=0) == []
    assert made.retrying() == ()
    assert made.retried(event)
    assert made.next_deadline() == 22.0
    assert made.retries(21.9) == made.expire(21.9, head=0) == []
    assert made.retrying() == (event.group,)


def test_a_group_whose_attempts_are_used_up_expires() -> None:
    made = retrying({0: 0.0}, group_retries=2)
    now = 0.0
    for attempt in (1, 2):
        now += 10.0
        [event] = made.retries(now)
        assert event.group.attempt == attempt
        made.retried(event)
    now += 10.0
    assert made.retries(now) == []
    [ended] = made.expire(now, head=0)
    assert ended.outcome is Outcome.EXPIRED
    assert ended.reason == "3 of 4 members missing after 10 s in attempt 3: [1, 2, 3]"


def test_a_retried_group_that_completes_is_trained_whole() -> None:
    made = retrying({0: 0.0})
    [event] = made.retries(10.0)
    made.retried(event)
    for member in (1, 2, 3):
        assert made.arrive(graded(0, member, float(member), members=MEMBERS)) is Arrival.ACCEPTED
    assert made.retries(99.0) == made.expire(99.0, head=0) == []
    assert made.retrying() == ()
    batch = take(made)
    assert batch.groups[0].group.attempt == 0  # a batch is the same whether its group was tried once or twice
    assert len(batch.consumed) == MEMBERS


def test_without_retries_a_group_expires_at_once() -> None:
    made = retrying({0: 0.0}, group_retries=0)
    assert made.retries(10.0) == []
    assert outcomes(made.expire(10.0)) == {"g00000000": Outcome.EXPIRED}


def retry(attempt: int, at: float, run: str = RUN) -> Retried:
    return Retried(run=run, at=at, group=group(0, members=MEMBERS, deadline_s=10.0, run=run).model_copy(
        update={"attempt": attempt, "wanted": (1,)}))


def test_retries_fold_in_any_order_and_again() -> None:
    events: list[Group | Retried] = [group(0, members=MEMBERS, deadline_s=10.0), retry(1, 20.0), retry(2, 40.0)]
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2, 2, 1), (2, 0, 1)):
        made = assembler(deadline_policy=DeadlinePolicy.RETRY, group_retries=2)
        for i in order:
            event = events[i]
            if isinstance(event, Retried):
                made.retried(event)
            else:
                made.admit(event, at=0.0)
        assert made.next_deadline() == 50.0
        assert made.retries(50.0) == []


def test_a_retry_of_another_run_or_of_an_ended_group_changes_nothing() -> None:
    made = retrying({})
    assert not made.retried(retry(1, 20.0, run="other"))
    made.ended(OutcomeEvent(run=RUN, group="g00000000", outcome=Outcome.EXPIRED))
    assert not made.retried(retry(1, 20.0))
    assert made.next_deadline() is None


def test_a_learner_that_was_away_gives_a_retried_group_its_time_again() -> None:
    made = retrying({}, started_at=1000.0)
    made.retried(retry(1, 20.0))
    assert made.next_deadline() == 1010.0


# Poison.


def test_a_group_whose_work_is_poison_ends_as_failed_once() -> None:
    made = started({0: 0.0}, policy=DeadlinePolicy.FAIL_GROUP)
    event = made.fail("g00000000", "dead-lettered: the prompt has no tokens", head=3, now=7.0)
    assert event is not None
    assert (event.outcome, event.version, event.at, event.arrived) == (Outcome.FAILED, 4, 7.0, (0,))
    assert event.reason == "dead-lettered: the prompt has no tokens"
    assert made.fail("g00000000", "again", head=3, now=8.0) is None
    assert made.open_groups == ()
    assert made.held_bytes == 0


def test_poison_known_before_its_admission_ends_the_group_after_it() -> None:
    made = assembler()
    assert made.fail("g00000000", "poison", head=0, now=0.0) is None
    assert made.sweep(0, now=0.0) == []
    made.admit(group(0), at=0.0)
    [event] = made.sweep(0, now=0.0)
    assert (event.outcome, event.reason) == (Outcome.FAILED, "poison")


def test_poison_does_not_end_a_group_that_is_being_trained() -> None:
    made = filled([0])
    batch = take(made)
    assert made.fail("g00000000", "poison", head=0, now=0.0) is None
    assert outcomes(made.commit(batch, 1, now=0.0)) == {"g00000000": Outcome.TRAINED}


def test_failures_in_a_row_are_counted_as_the_ledger_has_them() -> None:
    made = assembler()
    counts = []
    for index, outcome in enumerate([Outcome.FAILED, Outcome.EXPIRED, Outcome.STALE, Outcome.CANCELLED, Outcome.FAILED,
                                     Outcome.ZERO_VARIANCE, Outcome.EXPIRED, Outcome.TRAINED, Outcome.FAILED]):
        event = OutcomeEvent(run=RUN, group=f"g{index:08d}", outcome=outcome, version=1)
        made.ended(event)
        made.ended(event)
        counts.append(made.failed_in_a_row)
    assert counts == [1, 2, 2, 2, 3, 0, 1, 0, 1]


def test_an_own_failure_counts_when_the_ledger_has_it() -> None:
    made = started({}, policy=DeadlinePolicy.FAIL_GROUP)
    [event] = made.expire(10.0)
    assert made.failed_in_a_row == 0
    made.ended(event)
    made.ended(event.model_copy(update={"run": "other", "group": "g00000009"}))
    assert made.failed_in_a_row == 1


# What an outcome says of the members.


def test_every_outcome_names_the_members_that_came_and_those_trained_on() -> None:
    made = assembler(groups_per_step=1, max_lag=0)
    for index in range(4):
        made.admit(group(index, members=3), at=0.0)
    arrivals: list[Graded] = [graded(0, 2, 1.0, members=3), graded(0, 0, 0.0, members=3), graded(0, 1, None, members=3)]
    arrivals += [graded(1, m, 1.0, members=3) for m in (2, 1, 0)]
    arrivals += [graded(2, 2, 0.0, members=3)]
    for one in arrivals:
        made.arrive(one)
    events = made.sweep(0, now=0.0)
    batch = take(made)
    events += made.commit(batch, 1, now=0.0)
    events += made.sweep(1, now=0.0) + made.cancel_all("end", now=0.0)
    assert {(e.group[-1], e.outcome, e.arrived, e.trained) for e in events} == {
        ("0", Outcome.TRAINED, (0, 1, 2), (0, 2)), ("1", Outcome.ZERO_VARIANCE, (0, 1, 2), ()), ("2", Outcome.STALE, (2,), ()),
        ("3", Outcome.CANCELLED, (), ()),
    }


def test_what_a_manifest_named_is_in_the_recovered_outcome() -> None:
    made = assembler()
    made.admit(group(0, members=MEMBERS), at=0.0)
    made.arrive(graded(0, 1, None, members=MEMBERS))
    [event] = made.recover(["r/g00000000/3", "r/g00000000/0"], 4, now=0.0)
    assert (event.trained, event.arrived) == ((0, 3), (0, 1, 3))


def test_lengths_are_counted_by_how_their_group_ended() -> None:
    made = assembler(max_lag=0)
    for index, lengths in enumerate([(1, 5), (7, 8)]):
        made.admit(group(index), at=0.0)
        for member, length in enumerate(lengths):
            made.arrive(graded(index, member, float(member), [0] * length))
    made.commit(take(made), 1, now=0.0)
    made.sweep(1, now=0.0)
    assert made.lengths.trained == (1, 0, 1)
    assert made.lengths.otherwise == made.lengths.of(Outcome.STALE) == (0, 0, 1, 1)
    assert made.lengths.of(Outcome.FAILED) == ()


def test_an_aborted_member_is_no_usable_one_of_a_partial_group() -> None:
    made = partial({0: 0.0})
    made.arrive(graded(0, 1, 1.0, members=MEMBERS, finish=Finish.ABORT))
    assert outcomes(made.expire(10.0, head=0)) == {"g00000000": Outcome.EXPIRED}


@pytest.mark.parametrize("change", [{"partial_min_members": 0}, {"group_retries": -1}])
def test_deadline_limits_that_cannot_work_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(AssemblyError):
        Assembler(**{"run": RUN, "groups_per_step": 1, "max_lag": 1, **change})  # type: ignore[arg-type]
