"""The grader between two queues: nothing lost, nothing twice, one failure at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from driftline.environments.source import load_source
from driftline.messages.bus import Bus, Delivery
from driftline.messages.errors import BrokerFull, BrokerUnavailable
from driftline.messages.memory import MemoryBus
from driftline.messages.subjects import ConsumerSpec, Subjects, topology
from driftline.messages.types import Finish, Graded, Group, Metrics, RunFinished, Task, Trajectory
from driftline.services.grader.service import GraderService, grader_consumer
from driftline.services.grader.wire import Failure

SCRIPT = """
import time
def tasks(index, rng):
    return f"q{rng.random()}", "ok"
def reward(prompt, answer, completion):
    if completion == "raise": raise KeyError("on purpose")
    if completion.startswith("sleep"): time.sleep(float(completion[5:]))
    return float(completion == answer)
"""


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "scripted.py").write_text(SCRIPT)
    return f"python:{tmp_path / 'scripted.py'}"


@pytest.fixture(params=["memory_bus", "nats_bus"])
def bus(request: pytest.FixtureRequest) -> Bus:
    found: Bus = request.getfixturevalue(request.param)
    return found


class Faulty:
    """A bus whose calls can be made to fail; the rest is the bus's own."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.before_publish: Callable[[str], None] = lambda subject: None
        self.wrap_delivery: Callable[[Delivery], Any] = lambda delivery: delivery
        self.largest_batch = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def publish(self, subject: str, message: Any, **more: Any) -> Any:
        self.before_publish(subject)
        return await self._bus.publish(subject, message, **more)

    async def pull(self, consumer: ConsumerSpec, *, batch: int, timeout_s: float) -> list[Any]:
        self.largest_batch = max(self.largest_batch, batch)
        return [self.wrap_delivery(d) for d in await self._bus.pull(consumer, batch=batch, timeout_s=timeout_s)]


def trajectory(run: str, task: Task, text: str, member: int, group: str = "g0", members: int = 64) -> Trajectory:
    return Trajectory(
        run=run, group=group, member=member, members=members, index=0, task=task, prompt_tokens=1, finish=Finish.STOP, text=text,
        tokens=np.array([256, 1], np.int32), action_mask=np.array([False, True]),
        logprobs=np.array([0, -1], np.float32), versions=np.array([-1, 0], np.int32),
    )  # fmt: skip


async def publish(bus: Bus, run: str, spec: str, texts: list[str]) -> list[Trajectory]:
    task = load_source(spec).task(0, 0)
    sent = [trajectory(run, task, text, member) for member, text in enumerate(texts)]
    for item in sent:
        await bus.publish(Subjects(run).trajectory(item.group), item, id=f"{run}/trajectory/{item.group}/{item.member}")
    return sent


async def finish(bus: Bus, run: str) -> None:
    await bus.publish(Subjects(run).finished, RunFinished(run=run, version=1, reason="test"), id=f"{run}/finished")


async def graded_of(bus: Bus, run: str) -> dict[int, Graded]:
    consumer = next(c for c in topology(run).consumers if c.durable == "learner")
    found: dict[int, Graded] = {}
    while deliveries := await bus.pull(consumer, batch=100, timeout_s=0.2):
        for delivery in deliveries:
            assert isinstance(delivery.message, Graded)
            assert delivery.message.trajectory.member not in found
            found[delivery.message.trajectory.member] = delivery.message
            await delivery.ack()
    return found


@asynccontextmanager
async def running(service: GraderService) -> AsyncIterator[asyncio.Task[None]]:
    async with asyncio.timeout(60):
        task = asyncio.create_task(service.run())
        try:
            yield task
            await task
        finally:
            task.cancel()
            await asyncio.wait({task})


async def test_every_trajectory_is_graded_once_and_the_run_ends_with_an_empty_queue(bus: Bus, fresh_run: str, spec: str) -> None:
    await bus.declare(topology(fresh_run))
    sent = await publish(bus, fresh_run, spec, ["ok", "wrong", "raise", "sleep9", "ok"])
    await finish(bus, fresh_run)
    service = GraderService(bus, fresh_run, [spec], workers=2, deadline_s=1.0)
    async with running(service):
        pass
    graded = await graded_of(bus, fresh_run)
    assert [graded[member].reward for member in range(5)] == [1.0, 0.0, None, None, 1.0]
    assert "raised: KeyError: 'on purpose' at scripted.py" in graded[2].cause
    assert graded[3].cause.startswith("deadline:")
    assert all(np.array_equal(graded[t.member].trajectory.tokens, t.tokens) for t in sent)
    assert tuple(await bus.depth(grader_consumer(fresh_run)))[:2] == (0, 0)
    assert service.counts.graded == 3
    assert service.counts.failed == {Failure.RAISED: 1, Failure.DEADLINE: 1}
    assert not service.counts.infrastructure
    last = await bus.last(Subjects(fresh_run).stream("METRICS"), Subjects(fresh_run).metrics("grader"))
    assert last is not None
    assert isinstance(last.message, Metrics)
    assert last.message.values["graded"] == 3
    assert last.message.values["failed_raised"] == 1


async def test_a_lost_ack_grades_again_and_publishes_once(memory_bus: MemoryBus, fresh_run: str, spec: str) -> None:
    """L1, L8 (docs/field_failures.md)."""
    await memory_bus.declare(topology(fresh_run))
    faulty = Faulty(memory_bus)
    acks = 0

    class LosesFirstAck:
        def __init__(self, delivery: Delivery) -> None:
            self._delivery = delivery

        def __getattr__(self, name: str) -> Any:
            return getattr(self._delivery, name)

        async def ack(self) -> None:
            nonlocal acks
            acks += 1
            if acks == 1:
                raise BrokerUnavailable("no answer")
            await self._delivery.ack()
            await finish(memory_bus, fresh_run)

    faulty.wrap_delivery = LosesFirstAck
    await publish(memory_bus, fresh_run, spec, ["ok"])
    service = GraderService(faulty, fresh_run, [spec], consumer=replace(grader_consumer(fresh_run), ack_wait_s=0.3))
    async with running(service):
        pass
    assert (await graded_of(memory_bus, fresh_run))[0].reward == 1.0
    assert acks == 2
    assert service.counts.graded == 1
    assert service.counts.infrastructure == {"broker_unavailable": 1, "redelivered": 1, "duplicate": 1}


async def test_a_slow_reward_keeps_its_lease_and_is_delivered_once(memory_bus: MemoryBus, fresh_run: str, spec: str) -> None:
    """L8 (docs/field_failures.md)."""
    await memory_bus.declare(topology(fresh_run))
    await publish(memory_bus, fresh_run, spec, ["sleep1", "sleep1"])
    await finish(memory_bus, fresh_run)
    short = replace(grader_consumer(fresh_run), ack_wait_s=0.6)
    service = GraderService(memory_bus, fresh_run, [spec], workers=1, deadline_s=30.0, consumer=short)
    async with running(service):
        pass
    assert service.counts.graded == 2
    assert not service.counts.infrastructure


async def test_a_full_stream_is_waited_for_and_loses_nothing(memory_bus: MemoryBus, fresh_run: str, spec: str) -> None:
    """L9 (docs/field_failures.md)."""
    await memory_bus.declare(topology(fresh_run))
    faulty = Faulty(memory_bus)
    refusals = 0
    room = asyncio.Event()

    def refuse(subject: str) -> None:
        nonlocal refusals
        if ".graded." in subject:
            refusals += 1
            if refusals <= 3:
                raise BrokerFull("full", field="stream", value=subject)
            room.set()

    faulty.before_publish = refuse
    await publish(memory_bus, fresh_run, spec, ["ok"])
    service = GraderService(faulty, fresh_run, [spec])
    async with running(service):
        await room.wait()
        await finish(memory_bus, fresh_run)
    assert (await graded_of(memory_bus, fresh_run))[0].reward == 1.0
    assert service.counts.infrastructure == {"stream_full": 3}


@pytest.mark.parametrize("ends", ["drained", "finished"])
async def test_a_stream_that_stays_full_does_not_keep_the_grader_alive(
    memory_bus: MemoryBus, fresh_run: str, spec: str, ends: str
) -> None:
    """H18 (docs/field_failures.md)."""
    await memory_bus.declare(topology(fresh_run))
    faulty = Faulty(memory_bus)
    refused = asyncio.Event()

    def refuse(subject: str) -> None:
        if ".graded." in subject:
            refused.set()
            raise BrokerFull("full", field="stream", value=subject)

    faulty.before_publish = refuse
    await publish(memory_bus, fresh_run, spec, ["ok"])
    service = GraderService(faulty, fresh_run, [spec])
    async with running(service):
        await refused.wait()
        if ends == "drained":
            service.drain()
        else:
            await finish(memory_bus, fresh_run)
    assert service.counts.infrastructure["given_back"] == 1
    assert service.counts.graded == 0
    assert sum((await memory_bus.depth(grader_consumer(fresh_run)))[:2]) == 1


async def test_something_that_is_no_trajectory_is_dead_lettered_and_the_rest_goes_on(
    memory_bus: MemoryBus, fresh_run: str, spec: str
) -> None:
    """L20 (docs/field_failures.md)."""
    await memory_bus.declare(topology(fresh_run))
    group = Group(run=fresh_run, group="g0", index=0, task=load_source(spec).task(0, 0), members=1)
    await memory_bus.publish(Subjects(fresh_run).trajectory("g0"), group, id="wrong")
    await publish(memory_bus, fresh_run, spec, ["ok"])
    await finish(memory_bus, fresh_run)
    service = GraderService(memory_bus, fresh_run, [spec])
    async with running(service):
        pass
    assert len(await graded_of(memory_bus, fresh_run)) == 1
    dead = await memory_bus.read(Subjects(fresh_run).stream("DEAD"), f"{Subjects(fresh_run).root}.dead.>")
    assert len(dead) == 1
    assert "expected a trajectory, got group" in str(dead[0])


async def test_no_more_than_max_in_flight_are_held(memory_bus: MemoryBus, fresh_run: str, spec: str) -> None:
    """H29 (docs/field_failures.md)."""
    await memory_bus.declare(topology(fresh_run))
    faulty = Faulty(memory_bus)
    held = 0
    most = 0

    class Counted:
        def __init__(self, delivery: Delivery) -> None:
            nonlocal held, most
            self._delivery = delivery
            held += 1
            most = max(most, held)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._delivery, name)

        async def ack(self) -> None:
            nonlocal held
            held -= 1
            await self._delivery.ack()

    faulty.wrap_delivery = Counted
    await publish(memory_bus, fresh_run, spec, ["ok"] * 20)
    await finish(memory_bus, fresh_run)
    service = GraderService(faulty, fresh_run, [spec], max_in_flight=3)
    async with running(service):
        pass
    assert service.counts.graded == 20
    assert faulty.largest_batch == 3
    assert most == 3


async def test_draining_finishes_what_is_in_hand_and_leaves_the_rest(memory_bus: MemoryBus, fresh_run: str, spec: str) -> None:
    """H33 (docs/field_failures.md)."""
    await memory_bus.declare(topology(fresh_run))
    faulty = Faulty(memory_bus)
    await publish(memory_bus, fresh_run, spec, ["ok", "ok", "ok"])
    service = GraderService(faulty, fresh_run, [spec], max_in_flight=1)

    def drain_on_delivery(delivery: Delivery) -> Delivery:
        service.drain()
        return delivery

    faulty.wrap_delivery = drain_on_delivery
    async with running(service):
        pass
    assert service.counts.graded == 1
    assert tuple(await memory_bus.depth(grader_consumer(fresh_run)))[:2] == (2, 0)
