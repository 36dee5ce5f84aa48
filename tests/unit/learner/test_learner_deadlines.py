"""Stragglers, poison and the ways a run ends, as the learner service acts on them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_cases import RUN, SUBJECTS, learner, ledger, settled
from loop_cases import (
    admit,
    alternating,
    beside,
    eventually,
    grade,
    groups_of,
    head_at,
    outcomes,
    queue,
    running,
    sampled,
    tiny,
    with_reward,
)

from driftline.messages.memory import MemoryBus
from driftline.messages.subjects import topology
from driftline.messages.types import Group, Outcome, OutcomeEvent, Retried, RunFinished
from driftline.policy_store.blobs import MemoryBlobs
from driftline.services.config import Config
from driftline.services.learner import service as learner_service
from driftline.services.runtime import run_topology

torch.set_num_threads(1)


@pytest.fixture
async def bus(memory_bus: MemoryBus) -> MemoryBus:
    await memory_bus.declare(run_topology(tiny(RUN)))
    return memory_bus


@pytest.fixture
def blobs() -> MemoryBlobs:
    return MemoryBlobs()


def policy(name: str, **more: object) -> Config:
    return tiny(RUN, run={"group_deadline_s": 1.0, "deadline_policy": name, **more}, grader={"deadline_s": 0.1}, learner={"probe_members": 0})


async def straggling(bus: MemoryBus, config: Config) -> list[Group]:
    """Two groups of four, of which the last member of the second never comes."""
    groups = groups_of(config, (0, 1))
    await grade(bus, alternating(sampled(groups))[:7])
    await admit(bus, groups)  # the deadline counts from here
    return groups


async def finished(bus: MemoryBus) -> RunFinished:
    stored = await bus.last(SUBJECTS.stream("CONTROL"), SUBJECTS.finished)
    assert stored is not None
    assert isinstance(stored.message, RunFinished)
    return stored.message


async def test_a_straggler_fails_its_group_and_no_other(bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    """H1, H19: member 3 of 4 never completes; its group ends by deadline with a reason, the other goes on."""
    config = policy("fail_group")
    async with running(learner(bus, blobs, tmp_path, config)) as task:
        groups = await straggling(bus, config)
        (event,) = await beside(task, outcomes(bus, RUN, 1))
        assert (event.group, event.outcome, event.arrived, event.trained) == (groups[1].group, Outcome.EXPIRED, (0, 1, 2), ())
        assert not task.done()


async def test_time_spent_recovering_is_not_held_against_the_groups(
    bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H6: everything was finished while the learner was away longer than a group's deadline."""
    config = policy("fail_group")
    groups = groups_of(config, (0, 1))
    await grade(bus, alternating(sampled(groups)))
    await admit(bus, groups)
    real = learner_service.recover
    service = learner(bus, blobs, tmp_path, config)
    async with running(service) as task:
        await beside(task, head_at(bus, blobs, RUN, 1))
    later = groups_of(config, (2, 3))
    await grade(bus, alternating(sampled(later, version=1)))
    await admit(bus, later)

    async def slow(*args: Any) -> Any:
        await asyncio.sleep(1.2)
        return await real(*args)

    monkeypatch.setattr(learner_service, "recover", slow)
    async with running(learner(bus, blobs, tmp_path, config)) as task:
        await beside(task, head_at(bus, blobs, RUN, 2))


async def test_a_straggler_is_left_behind_where_partial_groups_are_trained(bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    """H1, L14: what arrived is trained on, which member did not is in the ledger."""
    config = policy("train_partial", partial_min_members=3)
    async with running(learner(bus, blobs, tmp_path, config)) as task:
        groups = await straggling(bus, config)
        await beside(task, head_at(bus, blobs, RUN, 1))
        events = {e.group: e for e in await beside(task, outcomes(bus, RUN, 2))}
        await grade(bus, alternating(sampled([groups[1]]))[3:])  # too late: acknowledged, and nothing else
        await settled(bus)
    assert [e.outcome for e in events.values()] == [Outcome.TRAINED] * 2
    assert (events[groups[1].group].trained, events[groups[0].group].trained) == ((0, 1, 2), (0, 1, 2, 3))
    assert "3" in events[groups[1].group].reason


async def test_a_straggler_is_asked_for_again_and_then_given_up(bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    """H19: a lost completion is asked for again by name; who does not answer that either is given up."""
    config = policy("retry", group_retries=1)
    consumer = next(c for c in topology(RUN).consumers if c.durable == "rollout")
    async with running(learner(bus, blobs, tmp_path, config)) as task:
        groups = await straggling(bus, config)
        await eventually(lambda: bus.broker.stream(SUBJECTS.stream("GROUPS")).last_seq == 1)
        (again,) = await bus.pull(consumer, batch=4, timeout_s=5)
        assert isinstance(again.message, Group)
        assert (again.message.group, again.message.attempt, again.message.to_sample) == (groups[1].group, 1, (3,))
        (event,) = await beside(task, outcomes(bus, RUN, 1))
    assert (event.group, event.outcome) == (groups[1].group, Outcome.EXPIRED)
    assert [r.group.attempt for r in await ledger(bus, Retried)] == [1]


async def test_a_retry_that_is_answered_completes_its_group(bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    config = policy("retry", group_retries=16)
    async with running(learner(bus, blobs, tmp_path, config)) as task:
        groups = await straggling(bus, config)
        await eventually(lambda: bus.broker.stream(SUBJECTS.stream("GROUPS")).last_seq >= 1)
        await grade(bus, alternating(sampled([groups[1]]))[3:])
        await beside(task, head_at(bus, blobs, RUN, 1))
        events = await beside(task, outcomes(bus, RUN, 2))
    assert [(e.outcome, e.trained) for e in events] == [(Outcome.TRAINED, (0, 1, 2, 3))] * 2


async def test_a_retry_whose_learner_died_before_it_was_queued_is_queued_by_the_next(
    bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path
) -> None:
    config = policy("retry", group_deadline_s=60.0, group_retries=1)
    (group,) = groups_of(config, [0])
    await admit(bus, [group])
    event = Retried(run=RUN, group=group.model_copy(update={"attempt": 1, "wanted": (2,)}), at=0.0)
    await bus.publish(SUBJECTS.retried(group.group, 1), event, id="retried")
    async with running(learner(bus, blobs, tmp_path, config)) as task:
        await beside(task, eventually(lambda: bus.broker.stream(SUBJECTS.stream("GROUPS")).last_seq == 1))


async def test_poison_ends_its_group_at_once_with_the_cause(bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    """H25: work that nobody can do is an ending, not a wait for the deadline."""
    config = tiny(RUN, learner={"probe_members": 0})
    consumer = next(c for c in topology(RUN).consumers if c.durable == "rollout")
    groups = groups_of(config, (0, 1))
    await admit(bus, groups)
    await queue(bus, groups)
    first, _ = await bus.pull(consumer, batch=2, timeout_s=5)
    async with running(learner(bus, blobs, tmp_path, config)) as task:
        await first.dead_letter("sampling raised IndexError")
        (event,) = await beside(task, outcomes(bus, RUN, 1))
        assert not task.done()
    assert isinstance(first.message, Group)
    assert (event.group, event.outcome) == (first.message.group, Outcome.FAILED)
    assert "IndexError" in event.reason


async def test_an_unreadable_message_in_a_groups_subject_does_not_end_the_group(
    bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path
) -> None:
    config = tiny(RUN, learner={"probe_members": 0})
    groups = groups_of(config, (0, 1))
    async with running(learner(bus, blobs, tmp_path, config)) as task:
        await bus.publish_bytes(SUBJECTS.graded(groups[0].group), b"not a message", id="odd")
        await eventually(lambda: bus.broker.stream(SUBJECTS.stream("DEAD")).last_seq == 1)
        await admit(bus, groups)
        await grade(bus, alternating(sampled(groups)))
        events = await beside(task, outcomes(bus, RUN, 2))
    assert [e.outcome for e in events] == [Outcome.TRAINED] * 2


async def test_groups_that_fail_without_end_end_the_run_as_failed(bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    """H3, H25: a reward that always fails must not keep a run busy for ever."""
    config = tiny(RUN, run={"max_failed_groups": 3}, learner={"probe_members": 0})
    groups = groups_of(config, range(4))
    await admit(bus, groups)
    await grade(bus, [with_reward(t, None) for t in sampled(groups[:3])])
    async with running(learner(bus, blobs, tmp_path, config)) as task:
        await task
    end = await finished(bus)
    assert (end.failed, end.version) == (True, 0)
    assert "3 groups in a row failed" in end.reason
    ends = {e.group: e.outcome for e in await ledger(bus, OutcomeEvent)}
    assert ends == {**{g.group: Outcome.FAILED for g in groups[:3]}, groups[3].group: Outcome.CANCELLED}


async def test_a_group_with_equal_rewards_breaks_the_row_of_failures(bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    config = tiny(RUN, run={"max_failed_groups": 2}, learner={"probe_members": 0})
    groups = groups_of(config, range(3))
    async with running(learner(bus, blobs, tmp_path, config)) as task:
        for group, reward in zip(groups, (None, 1.0, None), strict=True):
            await admit(bus, [group])
            await grade(bus, [with_reward(t, reward) for t in sampled([group])])
            await beside(task, outcomes(bus, RUN, group.index + 1))
        assert not task.done()


async def test_groups_without_a_difference_end_the_run_when_nothing_else_comes(bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    """A policy that has collapsed onto one answer is sampled for ever otherwise: no step is due."""
    config = tiny(RUN, run={"max_flat_groups": 3, "steps": 5}, learner={"probe_members": 0})
    per_step = config.run.groups_per_step
    varied = groups_of(config, range(2, 2 + per_step))
    flat = [*groups_of(config, range(2)), *groups_of(config, range(2 + per_step, 5 + per_step))]
    async with running(learner(bus, blobs, tmp_path, config)) as task:
        for part, reward in ((flat[:2], 1.0), (varied, None), (flat[2:4], 1.0)):  # two, then a step, then two: never three in a row
            before = len(await ledger(bus, OutcomeEvent))
            await admit(bus, part)
            members = sampled(part)
            await grade(bus, alternating(members) if reward is None else [with_reward(t, reward) for t in members])
            await beside(task, outcomes(bus, RUN, before + len(part)))
        assert not task.done()
        await admit(bus, flat[4:])
        await grade(bus, [with_reward(t, 0.0) for t in sampled(flat[4:])])
        await task
    end = await finished(bus)
    assert (end.failed, end.version) == (False, 1)
    assert "3 groups in a row had one reward" in end.reason


async def test_a_learner_killed_after_the_end_leaves_its_last_outcomes_to_the_next(
    bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path
) -> None:
    """L4, H8: RunFinished is there, the outcomes of what was still open are not."""
    config = tiny(RUN, run={"steps": 5}, learner={"probe_members": 0})
    await admit(bus, groups_of(config, range(3)))
    await bus.publish(SUBJECTS.finished, RunFinished(run=RUN, version=0, reason="time limit"), id="end")
    async with running(learner(bus, blobs, tmp_path, config)) as task:
        await task
    assert [(e.outcome, e.reason) for e in await ledger(bus, OutcomeEvent)] == [(Outcome.CANCELLED, "time limit")] * 3
    assert (await finished(bus)).reason == "time limit"


async def test_a_run_that_is_reopened_and_ends_at_the_same_version_is_declared_finished_again(
    bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path
) -> None:
    """H7: the broker remembers the id of the first end; the second must not be taken for its retry."""
    config = tiny(RUN, run={"time_limit_s": 1.0}, learner={"probe_members": 0})
    await admit(bus, groups_of(config, [0]), at=1.0)
    for _ in range(2):
        async with running(learner(bus, blobs, tmp_path, config)) as task:
            await task
        assert (await finished(bus)).version == 0
        await bus.purge(SUBJECTS.stream("CONTROL"), SUBJECTS.finished)
