"""The assembler, one behaviour at a time."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from driftline.messages.types import Finish, Graded, Group, Outcome, OutcomeEvent, Task, Trajectory
from driftline.services.learner.assembler import Arrival, Assembler, AssemblyError, Batch

RUN = "r"


def group(index: int, members: int = 2, deadline_s: float = 100.0, run: str = RUN) -> Group:
    task = Task(id=f"t{index}", source="s", family="f", prompt="p")
    return Group(run=run, group=f"g{index:08d}", index=index, task=task, members=members, deadline_s=deadline_s)


def graded(
    index: int, member: int, reward: float | None, versions: list[int] | None = None, *, members: int = 2, token: int = 5,
    **trajectory: Any,
) -> Graded:
    versions = [0] if versions is None else versions
    n = len(versions)
    made = Trajectory(**{
        "run": RUN, "group": f"g{index:08d}", "member": member, "members": members, "index": index,
        "task": group(index).task, "prompt_tokens": 1, "tokens": [1] + [token] * n, "action_mask": [False] + [True] * n,
        "logprobs": [0.0] + [-1.0] * n, "versions": [-1, *versions], "finish": Finish.STOP, **trajectory,
    })
    return Graded(run=made.run, trajectory=made, reward=reward, cause="" if reward is not None else "the reward raised")


def assembler(groups_per_step: int = 1, max_lag: int = 2, **kwargs: Any) -> Assembler:
    return Assembler(run=RUN, groups_per_step=groups_per_step, max_lag=max_lag, **kwargs)


def filled(indices: list[int], *, versions: list[int] | None = None, **kwargs: Any) -> Assembler:
    made = assembler(**kwargs)
    for index in indices:
        made.admit(group(index), at=0.0)
        for member in range(2):
            assert made.arrive(graded(index, member, float(member), versions)) is Arrival.ACCEPTED
    return made


def take(made: Assembler, head: int = 0) -> Batch:
    batch = made.next_batch(head)
    assert batch is not None
    return batch


def outcomes(events: list[OutcomeEvent]) -> dict[str, Outcome]:
    return {e.group: e.outcome for e in events}


def test_a_batch_is_ordered_by_id_and_member_whatever_arrives_first() -> None:
    made = assembler(groups_per_step=2)
    for index, member in [(1, 1), (0, 1), (1, 0), (0, 0)]:
        made.admit(group(index), at=0.0)
        made.arrive(graded(index, member, float(member)))
    batch = take(made)
    assert batch.group_ids == ("g00000000", "g00000001")
    assert batch.consumed == ["r/g00000000/0", "r/g00000000/1", "r/g00000001/0", "r/g00000001/1"]
    assert batch.groups[0].rewards == (0.0, 1.0)


def test_no_batch_before_enough_groups_are_complete() -> None:
    made = filled([0], groups_per_step=2)
    made.admit(group(1), at=0.0)
    made.arrive(graded(1, 0, 1.0))
    assert made.next_batch(0) is None
    made.arrive(graded(1, 1, 0.0))
    assert made.next_batch(0) is not None


def test_the_oldest_groups_are_trained_first() -> None:
    made = assembler()
    for index, version in [(0, 2), (1, 1), (2, 1)]:
        made.admit(group(index), at=0.0)
        for member in range(2):
            made.arrive(graded(index, member, float(member), [version]))
    order = []
    for head in (2, 3, 4):
        batch = take(made, head)
        order.append(batch.group_ids[0])
        made.commit(batch, head + 1, now=0.0)
    assert order == ["g00000001", "g00000002", "g00000000"]


@pytest.mark.parametrize(("versions", "head", "max_lag", "allowed"), [
    ([4], 4, 0, True),
    ([3, 4], 4, 0, False),  # lag 0 and one update in the middle of the rollout
    ([2, 4, 6], 5 + 1, 4, True),
    ([2, 4, 6], 7, 3, False),  # judged by the oldest token: by the last one it would pass
    ([0, 1, 2, 3, 4, 5], 5, 2, False),  # a long rollout across five updates
    ([98], 100, 2, True),  # a learner resumed at 100 bounds nothing by counting from zero
    ([97], 100, 2, False),
])
def test_the_bound_is_strict_and_judged_on_the_oldest_token(
    versions: list[int], head: int, max_lag: int, allowed: bool
) -> None:
    """S1, S10 (docs/field_failures.md)."""
    made = filled([0], versions=versions, max_lag=max_lag)
    batch = made.next_batch(head)
    assert (batch is not None) == allowed
    if batch is not None:
        assert batch.lag == head - min(versions) <= max_lag
        made.release(batch)
    assert outcomes(made.sweep(head, now=0.0)) == ({} if allowed else {"g00000000": Outcome.STALE})


def test_one_old_member_makes_its_group_stale() -> None:
    """S1, S10 (docs/field_failures.md)."""
    made = assembler(max_lag=1)
    made.admit(group(0), at=0.0)
    made.arrive(graded(0, 0, 0.0, [5]))
    made.arrive(graded(0, 1, 1.0, [3, 5]))
    assert made.next_batch(5) is None
    [event] = made.sweep(5, now=9.0)
    assert (event.outcome, event.lag, event.version, event.at) == (Outcome.STALE, 2, 6, 9.0)


def test_a_group_fresh_when_complete_goes_stale_waiting_in_the_queue() -> None:
    """S8, S17 (docs/field_failures.md)."""
    made = filled([0], groups_per_step=2, max_lag=2)
    for head in range(3):
        assert made.sweep(head, now=0.0) == []
    assert outcomes(made.sweep(3, now=0.0)) == {"g00000000": Outcome.STALE}
    assert made.held_bytes == 0


def test_a_group_is_stale_before_its_last_member_arrives() -> None:
    made = assembler(max_lag=0)
    made.admit(group(0), at=0.0)
    made.arrive(graded(0, 0, 0.0, [0]))
    assert outcomes(made.sweep(1, now=0.0)) == {"g00000000": Outcome.STALE}
    assert made.arrive(graded(0, 1, 1.0, [1])) is Arrival.ALREADY_ENDED


def test_an_old_member_that_failed_does_not_make_its_group_stale() -> None:
    made = assembler(max_lag=0)
    made.admit(group(0, members=3), at=0.0)
    made.arrive(graded(0, 0, None, [0], members=3))
    for member in (1, 2):
        made.arrive(graded(0, member, float(member), [5], members=3))
    assert made.sweep(5, now=0.0) == []
    batch = take(made, 5)
    assert batch.groups[0].excluded == (0,)
    [event] = made.commit(batch, 6, now=0.0)
    assert (event.members, event.reward_mean, event.lag) == (2, 1.5, 0)
    assert "[0]" in event.reason


def test_a_group_from_a_head_not_seen_here_waits() -> None:
    made = filled([0], versions=[3])
    assert made.next_batch(2) is None
    assert made.sweep(2, now=0.0) == []
    assert made.next_batch(3) is not None


@pytest.mark.parametrize("reward", [0.0, 0.7, 0.1])
def test_equal_rewards_end_at_once_and_never_enter_a_batch(reward: float) -> None:
    """H17 (docs/field_failures.md)."""
    made = assembler()
    made.admit(group(0, members=3), at=0.0)
    for member in range(3):
        assert made.sweep(0, now=0.0) == []
        made.arrive(graded(0, member, reward, members=3))
    assert made.next_batch(0) is None
    [event] = made.sweep(0, now=0.0)
    assert (event.outcome, event.members) == (Outcome.ZERO_VARIANCE, 3)
    assert event.reward_mean == pytest.approx(reward)


def test_an_aborted_member_counts_as_failed() -> None:
    """H25, L17 (docs/field_failures.md)."""
    made = assembler()
    made.admit(group(0), at=0.0)
    made.arrive(graded(0, 0, 1.0))
    made.arrive(graded(0, 1, 0.0, finish=Finish.ABORT))
    [event] = made.sweep(0, now=0.0)
    assert event.outcome is Outcome.FAILED
    assert "member 1: abort" in event.reason


def test_too_few_gradings_fail_the_group_with_their_cause() -> None:
    """H25 (docs/field_failures.md)."""
    made = assembler()
    made.admit(group(0), at=0.0)
    made.arrive(graded(0, 0, None))
    made.arrive(graded(0, 1, 1.0))
    [event] = made.sweep(0, now=0.0)
    assert event.outcome is Outcome.FAILED
    assert "the reward raised" in event.reason


def test_members_before_their_admission_are_held() -> None:
    made = assembler()
    for member in range(2):
        assert made.arrive(graded(0, member, float(member))) is Arrival.ACCEPTED
    assert made.next_batch(0) is None
    assert made.sweep(99, now=0.0) == made.expire(1e9) == made.cancel_all("end", now=0.0) == []  # not in the ledger yet
    assert made.held_bytes > 0
    assert made.admit(group(0), at=0.0)
    assert take(made).consumed == ["r/g00000000/0", "r/g00000000/1"]


def test_a_held_member_that_contradicts_its_group_is_let_go_at_admission() -> None:
    """L20 (docs/field_failures.md)."""
    made = assembler()
    made.arrive(graded(0, 3, 1.0, members=4))
    made.admit(group(0, members=2), at=0.0)
    assert made.held_bytes == made.held_members == 0


@pytest.mark.parametrize("change", [
    {"members": 4}, {"run": "other"}, {"index": 7}, {"task": group(9).task},
])
def test_a_member_of_no_group_of_ours_is_unknown(change: dict[str, Any]) -> None:
    made = assembler()
    made.admit(group(0), at=0.0)
    stranger = graded(0, 0, 1.0)
    odd = Graded(run=change.get("run", RUN), reward=1.0,
                 trajectory=Trajectory.model_validate({**dict(stranger.trajectory), **change}))
    assert made.arrive(odd) is Arrival.UNKNOWN
    assert made.held_bytes == 0


def test_of_two_samples_of_one_member_the_first_wins() -> None:
    """L8 (docs/field_failures.md)."""
    made = assembler()
    made.admit(group(0), at=0.0)
    first = graded(0, 0, 1.0, token=5)
    made.arrive(first)
    held = made.held_bytes
    assert made.arrive(first) is Arrival.DUPLICATE
    assert made.arrive(graded(0, 0, 0.25, token=6)) is Arrival.DUPLICATE
    assert made.held_bytes == held
    made.arrive(graded(0, 1, 0.0))
    assert take(made).groups[0].members[0] is first


def test_a_straggler_ends_its_group_at_the_deadline() -> None:
    """H1 (docs/field_failures.md)."""
    made = assembler()
    made.admit(group(0, members=8, deadline_s=10.0), at=5.0)
    for member in range(8):
        if member != 5:
            made.arrive(graded(0, member, float(member), members=8))
    assert made.next_deadline() == 15.0
    assert made.expire(14.9) == []
    [event] = made.expire(15.0)
    assert (event.outcome, event.members) == (Outcome.EXPIRED, 7)
    assert "1 of 8" in event.reason
    assert made.next_deadline() is None
    assert made.arrive(graded(0, 5, 1.0, members=8)) is Arrival.ALREADY_ENDED


def test_a_complete_group_does_not_expire() -> None:
    made = filled([0], groups_per_step=2)
    assert made.next_deadline() is None
    assert made.expire(1e9) == []


def test_a_learner_that_was_away_does_not_expire_what_it_is_about_to_receive() -> None:
    """L4 (docs/field_failures.md)."""
    made = assembler(started_at=1000.0)
    made.admit(group(0, deadline_s=10.0), at=5.0)
    assert made.expire(1000.0) == []
    assert made.next_deadline() == 1010.0


def test_nothing_ends_a_group_that_is_being_trained() -> None:
    made = filled([0], max_lag=0)
    batch = take(made)
    assert made.next_batch(0) is None
    assert made.ready_groups == 0
    assert made.sweep(5, now=0.0) == made.expire(1e9) == []
    assert outcomes(made.commit(batch, 1, now=0.0)) == {"g00000000": Outcome.TRAINED}
    assert made.held_bytes == 0


def test_a_released_batch_can_be_taken_again_or_swept() -> None:
    made = filled([0], max_lag=0)
    made.release(take(made))
    batch = take(made)
    made.release(batch)
    assert outcomes(made.sweep(1, now=0.0)) == {"g00000000": Outcome.STALE}
    with pytest.raises(AssemblyError):
        made.commit(batch, 1, now=0.0)


def test_a_batch_is_committed_once_and_for_the_version_it_was_formed_for() -> None:
    made = filled([0])
    batch = take(made)
    with pytest.raises(AssemblyError, match="version 1"):
        made.commit(batch, 2, now=0.0)
    made.commit(batch, 1, now=0.0)
    with pytest.raises(AssemblyError):
        made.commit(batch, 1, now=0.0)


def test_outcomes_in_the_ledger_are_final() -> None:
    made = assembler()
    made.arrive(graded(0, 0, 1.0))
    made.ended(OutcomeEvent(run=RUN, group="g00000000", outcome=Outcome.TRAINED, version=1))
    assert made.held_bytes == 0
    assert not made.admit(group(0), at=0.0)
    assert made.arrive(graded(0, 1, 0.0)) is Arrival.ALREADY_ENDED
    assert made.outcome("g00000000") is Outcome.TRAINED
    made.ended(OutcomeEvent(run=RUN, group="g00000000", outcome=Outcome.STALE))
    assert made.outcome("g00000000") is Outcome.TRAINED


def test_what_a_manifest_names_is_never_trained_on_again() -> None:
    """L1: Killed between manifest and outcomes: the groups are admitted, have no outcome, and their members come again."""
    made = filled([0, 1])
    made.ended(OutcomeEvent(run=RUN, group="g00000001", outcome=Outcome.TRAINED, version=4))
    named = [f"r/g{i:08d}/{m}" for i in (1, 0) for m in (0, 1)]
    [event] = made.recover(named, 4, now=0.0)
    assert (event.group, event.outcome, event.version, event.members) == ("g00000000", Outcome.TRAINED, 4, 2)
    assert made.recover(named, 4, now=0.0) == []
    assert made.arrive(graded(0, 0, 1.0)) is Arrival.ALREADY_ENDED
    assert made.next_batch(4) is None


def test_cancelling_ends_everything_admitted_also_what_comes_late() -> None:
    made = filled([0, 1], groups_per_step=1)
    batch = take(made)
    assert outcomes(made.cancel_all("run finished", now=0.0)) == {f"g{i:08d}": Outcome.CANCELLED for i in (0, 1)}
    with pytest.raises(AssemblyError):
        made.commit(batch, 1, now=0.0)
    made.admit(group(2), at=0.0)
    assert outcomes(made.cancel_all("run finished", now=0.0)) == {"g00000002": Outcome.CANCELLED}
    assert made.held_bytes == 0


def test_held_bytes_follow_the_arrays() -> None:
    small, large = assembler(), assembler()
    small.arrive(graded(0, 0, 1.0, [0]))
    large.arrive(graded(0, 0, 1.0, [0] * 1001))
    assert large.held_bytes - small.held_bytes == 1000 * (4 + 1 + 4 + 4)


def test_no_torch_is_needed() -> None:
    code = "import sys, driftline.services.learner.assembler; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("change", [{"groups_per_step": 0}, {"max_lag": -1}, {"min_group_members": 0}])
def test_limits_that_cannot_work_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(AssemblyError):
        Assembler(**{"run": RUN, "groups_per_step": 1, "max_lag": 1, **change})
