"""The rollout service between the group queue and the trajectory queue, over a bus in memory."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from loop_cases import (
    WAIT_S,
    eventually,
    finish,
    groups_of,
    publish_version,
    queue,
    running,
    sampled,
    tiny,
)
from rollout_cases import CONFIG, RUN, Gate, is_idle, stored, versions

from driftline.messages.errors import BrokerFull
from driftline.messages.memory import MemoryBus
from driftline.messages.subjects import Subjects
from driftline.messages.types import Outcome, OutcomeEvent
from driftline.policy_store.blobs import MemoryBlobs
from driftline.services.config import Config
from driftline.services.rollout import service as rollout_service
from driftline.services.rollout.service import RolloutService
from driftline.services.runtime import run_topology


@pytest.fixture
async def bus(memory_bus: MemoryBus) -> MemoryBus:
    await memory_bus.declare(run_topology(CONFIG))
    return memory_bus


async def test_all_members_are_stored_then_the_group_is_acknowledged(bus: MemoryBus, blobs: MemoryBlobs) -> None:
    groups = groups_of(CONFIG, range(3))
    await queue(bus, groups)
    async with running(RolloutService(bus, blobs, CONFIG)) as task:
        found = await stored(bus, 12)
        await eventually(lambda: is_idle(bus))
        await finish(bus, RUN, 3)
        await task
    want = sampled(groups)
    assert [(t.group, t.member) for t in found] == [(t.group, t.member) for t in want]
    assert [t.tokens.tolist() for t in found] == [t.tokens.tolist() for t in want]
    assert all(versions(t) == {0} for t in found)


async def test_a_group_queued_after_a_version_is_sampled_by_it(bus: MemoryBus, blobs: MemoryBlobs) -> None:
    """H27, S13 (docs/field_failures.md)."""
    async with running(RolloutService(bus, blobs, CONFIG)):
        for version in range(5):
            if version:
                await publish_version(bus, blobs, RUN, version)
            await queue(bus, groups_of(CONFIG, range(2 * version, 2 * version + 2)))
            assert {v for t in await stored(bus, 8) for v in versions(t)} == {version}


@pytest.mark.parametrize("policy_update", ["in_flight", "drain", "interrupt"])
async def test_a_group_taken_during_a_step_waits_for_the_version_that_came_before_it(
    bus: MemoryBus, blobs: MemoryBlobs, gate: Gate, policy_update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S7 (docs/field_failures.md)."""
    monkeypatch.setattr(rollout_service, "SLICE_S", WAIT_S)  # the slice goes on after the gate, to the end of what the engine has
    config = tiny("rolling", rollout={"policy_update": policy_update})
    early, late = groups_of(config, range(2))
    gate.close()
    async with running(RolloutService(bus, blobs, config)) as task:
        await queue(bus, [early])
        await gate.entered()
        await publish_version(bus, blobs, RUN, 1)
        await queue(bus, [late])
        consumer = next(c for c in run_topology(config).consumers if c.durable == "rollout")

        async def both_taken() -> bool:
            return (await bus.depth(consumer)).ack_pending == 2

        await eventually(both_taken)
        gate.open()
        found = await stored(bus, 8)
        await finish(bus, RUN, 3)
        await task
    assert all(versions(t) == {1} for t in found if t.group == late.group)
    assert all(0 in versions(t) for t in found if t.group == early.group)
    if policy_update == "drain":
        assert all(versions(t) == {0} for t in found if t.group == early.group)


async def test_a_group_delivered_twice_is_stored_once(bus: MemoryBus, blobs: MemoryBlobs) -> None:
    """L8 (docs/field_failures.md)."""
    groups = groups_of(CONFIG, range(1))
    async with running(RolloutService(bus, blobs, CONFIG)):
        await queue(bus, groups)
        await stored(bus, 4)
        await queue(bus, groups, suffix="again")
        await eventually(lambda: is_idle(bus))
    subjects = Subjects(RUN)
    assert bus.broker.stream(subjects.stream("TRAJECTORIES")).last_seq == 4


async def test_a_group_of_a_service_that_was_cancelled_is_sampled_by_the_next(bus: MemoryBus, blobs: MemoryBlobs, gate: Gate) -> None:
    """L12, H19 (docs/field_failures.md)."""
    groups = groups_of(CONFIG, range(1))
    await queue(bus, groups)
    gate.close()
    first = RolloutService(bus, blobs, CONFIG, "0")
    async with running(first) as task:
        await gate.entered()
        task.cancel()
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await task
    async with running(RolloutService(bus, blobs, CONFIG, "1")):
        await eventually(lambda: is_idle(bus))
        found = await stored(bus, 4)
    assert [t.tokens.tolist() for t in found] == [t.tokens.tolist() for t in sampled(groups)]


async def test_draining_stores_what_is_in_hand_and_leaves_the_rest(bus: MemoryBus, blobs: MemoryBlobs, gate: Gate) -> None:
    """H33 (docs/field_failures.md)."""
    gate.close()
    service = RolloutService(bus, blobs, CONFIG)
    async with running(service) as task:
        await queue(bus, groups_of(CONFIG, range(1)))
        await gate.entered()
        service.drain()
        gate.open()
        await task
    assert len(await stored(bus, 4)) == 4
    assert await is_idle(bus)


async def test_a_drained_service_without_a_policy_returns(bus: MemoryBus) -> None:
    service = RolloutService(bus, MemoryBlobs(), CONFIG)
    async with running(service) as task:
        await eventually(lambda: service._starting is not None)
        service.drain()
        await task


async def test_a_finished_run_ends_a_service_that_waits_for_a_policy(bus: MemoryBus) -> None:
    """H8, S13 (docs/field_failures.md)."""
    async with running(RolloutService(bus, MemoryBlobs(), CONFIG)) as task:
        await finish(bus, RUN, 0)
        await task


async def test_a_group_that_ended_elsewhere_is_not_sampled_on(bus: MemoryBus, blobs: MemoryBlobs, gate: Gate) -> None:
    """H4 (docs/field_failures.md)."""
    group = groups_of(CONFIG, range(1))[0]
    gate.close()
    service = RolloutService(bus, blobs, CONFIG)
    async with running(service):
        await queue(bus, [group])
        await gate.entered()
        event = OutcomeEvent(run=RUN, group=group.group, outcome=Outcome.EXPIRED)
        await bus.publish(Subjects(RUN).outcome(group.group), event, id="ended", expect_last=0)
        await eventually(lambda: bool(service._ended))
        gate.open()
        await eventually(lambda: is_idle(bus))
    assert bus.broker.stream(Subjects(RUN).stream("TRAJECTORIES")).last_seq == 0


class Counting(MemoryBus):
    refused = 0

    async def publish(self, *args: Any, **more: Any) -> Any:
        try:
            return await super().publish(*args, **more)
        except BrokerFull:
            self.refused += 1
            raise


async def test_a_full_broker_makes_it_wait_and_nothing_is_lost() -> None:
    """L9, L10 (docs/field_failures.md)."""
    config: Config = CONFIG
    topology = run_topology(config)
    name = Subjects(RUN).stream("TRAJECTORIES")
    small = tuple(replace(s, max_msgs=3) if s.name == name else s for s in topology.streams)
    async with Counting() as bus:
        await bus.declare(replace(topology, streams=small))
        blobs = MemoryBlobs()
        await publish_version(bus, blobs, RUN, 0)
        groups = groups_of(config, range(2))
        await queue(bus, groups)
        async with running(RolloutService(bus, blobs, config)):
            await eventually(lambda: bus.refused > 0)
            assert not await is_idle(bus)
            found = await stored(bus, 8)
            await eventually(lambda: is_idle(bus))
    assert [(t.group, t.member) for t in found] == [(g.group, m) for g in groups for m in range(4)]
