"""Groups that are queued again for the members still missing: only those are sampled, and every delivery is acknowledged in its time."""

from __future__ import annotations

import pytest
from engine_cases import completion
from loop_cases import eventually, groups_of, running, sampled
from rollout_cases import CONFIG, RUN, Gate, depth, is_idle, names, stored

from driftline.messages.memory import MemoryBus
from driftline.messages.subjects import Subjects
from driftline.messages.types import Group
from driftline.policy_store.blobs import MemoryBlobs
from driftline.services.rollout.service import RolloutService
from driftline.services.runtime import run_topology

GROUP = groups_of(CONFIG, [0])[0]
WHOLE = {t.member: completion(t) for t in sampled([GROUP])}


@pytest.fixture
async def bus(memory_bus: MemoryBus) -> MemoryBus:
    await memory_bus.declare(run_topology(CONFIG))
    return memory_bus


def retry(attempt: int, *wanted: int) -> Group:
    return GROUP.model_copy(update={"attempt": attempt, "wanted": wanted})


async def queue(bus: MemoryBus, group: Group) -> None:
    attempt = f"/{group.attempt}" if group.attempt else ""
    await bus.publish(Subjects(RUN).groups, group, id=f"{RUN}/group/{group.group}{attempt}")


def trajectories(bus: MemoryBus) -> int:
    return bus.broker.stream(Subjects(RUN).stream("TRAJECTORIES")).last_seq


async def test_a_retry_samples_the_missing_members_and_no_others(bus: MemoryBus, blobs: MemoryBlobs) -> None:
    """H1, L14: what a first attempt would have sampled, whoever samples it and when."""
    service = RolloutService(bus, blobs, CONFIG)
    await queue(bus, retry(1, 3, 1))
    async with running(service):
        found = await stored(bus, 2)
        await eventually(lambda: is_idle(bus))
    assert names(found) == [(GROUP.group, 1), (GROUP.group, 3)]
    assert {t.member: completion(t) for t in found} == {m: WHOLE[m] for m in (1, 3)}
    assert all(t.members == 4 for t in found)
    assert service._engine is not None
    assert service._engine.tokens_sampled == sum(len(WHOLE[m]) for m in (1, 3))


@pytest.mark.parametrize("order", [(GROUP, retry(1, 2)), (retry(1, 2), GROUP), (retry(1, 0, 2), retry(2, 2)), (GROUP, GROUP)])
async def test_two_attempts_in_hand_are_both_acknowledged_and_sampled_once(
    bus: MemoryBus, blobs: MemoryBlobs, gate: Gate, order: tuple[Group, Group]
) -> None:
    """L8, H19: the second delivery comes while the first is being sampled. Neither is lost, no member is sampled twice."""
    first, second = order
    service = RolloutService(bus, blobs, CONFIG)
    gate.close()
    wanted = sorted(set(first.to_sample) | set(second.to_sample))
    async with running(service):
        await queue(bus, first)
        await gate.entered()
        if first == second:
            await bus.publish(Subjects(RUN).groups, second, id="the same message under another id")
        else:
            await queue(bus, second)

        async def both_taken() -> bool:
            return (await depth(bus)).ack_pending == 2

        await eventually(both_taken)
        if first != second:
            await eventually(lambda: len(service._hand.deliveries) == 2)
        gate.open()
        found = await stored(bus, len(wanted))
        if first != second:
            await eventually(lambda: is_idle(bus))
        assert service._engine is not None
        assert service._engine.tokens_sampled == sum(len(WHOLE[m]) for m in wanted)
    assert names(found) == [(GROUP.group, m) for m in wanted]
    assert {t.member: completion(t) for t in found} == {m: WHOLE[m] for m in wanted}
    assert trajectories(bus) == len(wanted)


async def test_members_that_another_engine_stored_first_are_duplicates_and_the_retry_ends(bus: MemoryBus, blobs: MemoryBlobs) -> None:
    for member in sampled([GROUP])[:2]:
        await bus.publish(Subjects(RUN).trajectory(member.group), member, id=f"{RUN}/trajectory/{member.group}/{member.member}")
    await queue(bus, retry(1, 0, 1, 2))
    async with running(RolloutService(bus, blobs, CONFIG)):
        await eventually(lambda: is_idle(bus))
    assert trajectories(bus) == 3
    assert names(await stored(bus, 3)) == [(GROUP.group, m) for m in range(3)]
