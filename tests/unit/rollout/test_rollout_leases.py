"""A lease that is lost stops the work of its group, unless it comes again; whatever the broker forgets, nothing is published twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from engine_cases import completion
from loop_cases import eventually, groups_of, queue, running, sampled
from rollout_cases import (
    CONFIG,
    RUN,
    Gate,
    Tapped,
    Wrapped,
    depth,
    is_idle,
    names,
    rollout_consumer,
    stored,
    topology_with,
)

from driftline.messages.bus import Delivery
from driftline.messages.errors import BrokerUnavailable, LeaseLost
from driftline.messages.memory import MemoryBus
from driftline.messages.subjects import ConsumerSpec, Subjects
from driftline.policy_store.blobs import MemoryBlobs
from driftline.services.rollout.service import RolloutService

SHORT = rollout_consumer(ack_wait_s=0.5, max_deliver=1000)


@pytest.fixture
async def bus(memory_bus: MemoryBus) -> MemoryBus:
    await memory_bus.declare(topology_with(SHORT))
    return memory_bus


class Pulls(Tapped):
    """Receives `limit` pulls' worth of deliveries, then nothing more; the first delivery of a message cannot be renewed."""

    def __init__(self, bus: MemoryBus, limit: int) -> None:
        super().__init__(bus)
        self.left, self.calls = limit, Counter[str]()
        self.wrap_delivery = self.without_renewal

    def without_renewal(self, delivery: Delivery) -> Any:
        def fail(call: str) -> None:
            if call == "renew" and delivery.deliveries == 1:
                raise BrokerUnavailable("no answer")

        return Wrapped(delivery, self.calls, fail)

    async def pull(self, consumer: ConsumerSpec, *, batch: int, timeout_s: float) -> list[Any]:
        if self.left == 0:
            await asyncio.Event().wait()  # the network is gone for it, for ever
        found = await super().pull(consumer, batch=batch, timeout_s=timeout_s)
        self.left -= bool(found)
        return found


def trajectories(bus: MemoryBus) -> int:
    return bus.broker.stream(Subjects(RUN).stream("TRAJECTORIES")).last_seq


async def test_a_group_lost_to_another_engine_is_not_sampled_on(bus: MemoryBus, blobs: MemoryBlobs, gate: Gate) -> None:
    """H19, L12, W15: the first engine stops the group without a word, the other one's are the members that count, and both go on working."""
    lost, later = groups_of(CONFIG, range(2))
    cut = Pulls(bus, limit=1)
    first = RolloutService(cut, blobs, CONFIG, "0", consumer=SHORT)
    gate.close()
    await queue(bus, [lost])
    async with running(first) as task:
        await gate.entered()
        await eventually(lambda: first.counts.leases_lost == 1)
        assert first._engine is not None
        sampled_then = first._engine.tokens_sampled
        async with running(RolloutService(bus, blobs, CONFIG, "1", consumer=SHORT)):
            await eventually(lambda: trajectories(bus) == 4)
            gate.open()
            await eventually(lambda: len(first._hand) == 0)
            assert first._engine.idle
            await queue(bus, [later])
            found = await stored(bus, 8)
            await eventually(lambda: is_idle(bus))
        assert not task.done()
    assert {t.engine for t in found} == {"rollout-1"}
    assert names(found) == names(sampled([lost, later]))
    assert trajectories(bus) == 8
    assert first._engine.tokens_sampled == sampled_then, "not a token after the loss"
    assert cut.calls["ack"] == cut.calls["nak"] == 0, "a lease that is lost is not ours to end"


async def test_a_group_that_comes_again_to_the_engine_that_lost_it_is_sampled_on(bus: MemoryBus, blobs: MemoryBlobs, gate: Gate) -> None:
    group = groups_of(CONFIG, [0])
    tapped = Pulls(bus, limit=1000)
    service = RolloutService(tapped, blobs, CONFIG, consumer=SHORT)
    gate.close()
    await queue(bus, group)
    async with running(service):
        await gate.entered()

        async def redelivered() -> bool:
            return (await depth(bus)).redelivered == 1

        await eventually(redelivered)
        await eventually(lambda: [d.deliveries > 1 for d in service._hand.deliveries] == [True])
        gate.open()
        found = await stored(bus, 4)
        await eventually(lambda: is_idle(bus))
    want = sampled(group)
    assert [completion(t) for t in found] == [completion(t) for t in want]
    assert trajectories(bus) == 4
    assert service._engine is not None
    assert service._engine.tokens_sampled == sum(len(completion(t)) for t in want), "nothing was begun again"


async def test_a_lease_lost_while_members_are_being_stored_stalls_nothing(bus: MemoryBus, blobs: MemoryBlobs) -> None:
    """The publish hangs longer than the lease lives; the members are stored by then or not, and are stored once in the end."""
    group = groups_of(CONFIG, [0])
    tapped = Pulls(bus, limit=1000)
    go = asyncio.Event()

    async def hang(subject: str) -> None:
        if ".trajectories." in subject:
            await go.wait()

    tapped.before_publish = hang
    await queue(bus, group)
    service = RolloutService(tapped, blobs, CONFIG, consumer=SHORT)
    async with running(service):
        async def redelivered() -> bool:
            return (await depth(bus)).redelivered == 1

        await eventually(redelivered)
        go.set()
        found = await stored(bus, 4)
        await eventually(lambda: is_idle(bus))
    assert names(found) == names(sampled(group))
    assert trajectories(bus) == 4


@pytest.mark.parametrize("error", [LeaseLost("not confirmed"), BrokerUnavailable("no answer")], ids=lambda e: type(e).__name__)
async def test_an_acknowledgement_that_is_not_confirmed_is_repeated_by_a_redelivery(bus: MemoryBus, blobs: MemoryBlobs, error: Exception) -> None:
    """L1, L8, L12: the work is done again to the same ids, and the same bytes."""
    group = groups_of(CONFIG, [0])
    tapped, calls = Tapped(bus), Counter[str]()

    def fail(call: str) -> None:
        if call == "ack" and calls["ack"] == 1:
            raise error

    tapped.wrap_delivery = lambda delivery: Wrapped(delivery, calls, fail)
    await queue(bus, group)
    async with running(RolloutService(tapped, blobs, CONFIG, consumer=SHORT)):
        found = await stored(bus, 4)
        await eventually(lambda: is_idle(bus))
    assert calls["ack"] == 2
    assert trajectories(bus) == 4
    assert names(found) == names(sampled(group))


async def test_a_broker_that_is_away_for_a_while_costs_no_member_and_no_service(bus: MemoryBus, blobs: MemoryBlobs, gate: Gate) -> None:
    """Members finish while nothing can be stored, acknowledged, pulled or looked up; all of it is done when the broker is back."""
    groups = groups_of(CONFIG, range(3))
    tapped = Tapped(bus)
    refused = 0

    async def watch(subject: str) -> None:
        nonlocal refused
        refused += bus.broker.down and ".trajectories." in subject

    tapped.before_publish = watch
    service = RolloutService(tapped, blobs, CONFIG, consumer=SHORT)
    gate.close()
    await queue(bus, groups[:2])
    async with running(service) as task:
        await gate.entered()
        bus.broker.down = True
        gate.open()
        await eventually(lambda: refused >= 5)
        bus.broker.down = False
        await queue(bus, groups[2:])
        found = await stored(bus, 12)
        await eventually(lambda: is_idle(bus))
        assert not task.done()
    assert names(found) == names(sampled(groups))
    assert trajectories(bus) == 12
