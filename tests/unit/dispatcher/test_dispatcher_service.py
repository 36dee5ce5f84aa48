"""The dispatcher over a bus: each number once, nothing lost, whenever it dies and whoever else is dispatching."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from driftline.messages.bus import PubAck
from driftline.messages.errors import BrokerFull
from driftline.messages.memory import MemoryBus
from driftline.messages.subjects import Subjects
from driftline.messages.types import Admitted, Group, Message, Outcome, OutcomeEvent, RunFinished, Task
from driftline.services.config import Config
from driftline.services.dispatcher.service import DispatcherService
from driftline.services.runtime import run_topology

RUN = "trial"
SUBJECTS = Subjects(RUN)
WAIT_S = 10.0


class Counting:
    """A task source that counts, and fails on request."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def task(self, index: int, seed: int) -> Task:
        self.asked.append(index)
        return Task(id=f"{seed}-{index}", source="test", family="test", prompt=str(index))


class Crashing(MemoryBus):
    """Dies when the given publish is reached, as a process would: before or after the broker stored it."""

    def __init__(self) -> None:
        super().__init__()
        self.die_on: Callable[[str, Message], bool] = lambda subject, message: False
        self.full_for = 0

    async def publish(self, subject: str, message: Message, *, id: str, expect_last: int | None = None) -> PubAck:
        if self.die_on(subject, message):
            raise RuntimeError("killed")
        if self.full_for and subject == SUBJECTS.groups:
            self.full_for -= 1
            raise BrokerFull("maximum bytes exceeded", field="stream", value=subject)
        return await super().publish(subject, message, id=id, expect_last=expect_last)


def configuration(**run: object) -> Config:
    return Config.model_validate({"run": {"name": RUN, "max_lag": 1, "groups_per_step": 3, "group_size": 2, **run}})


@pytest.fixture
async def bus() -> AsyncIterator[Crashing]:
    bus = Crashing()
    await bus.declare(run_topology(configuration()))
    yield bus
    await bus.close()


@asynccontextmanager
async def running(service: DispatcherService) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(service.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def queued(bus: MemoryBus, count: int) -> list[Group]:
    """The next `count` groups of the work queue, acknowledged."""
    consumer = next(c for c in run_topology(configuration()).consumers if c.durable == "rollout")
    groups: list[Group] = []
    async with asyncio.timeout(WAIT_S):
        while len(groups) < count:
            for delivery in await bus.pull(consumer, batch=count - len(groups), timeout_s=0.5):
                assert isinstance(delivery.message, Group)
                groups.append(delivery.message)
                await delivery.ack()
    return groups


async def nothing_queued(bus: MemoryBus) -> bool:
    consumer = next(c for c in run_topology(configuration()).consumers if c.durable == "rollout")
    return not await bus.pull(consumer, batch=1, timeout_s=0.2)


async def end(bus: MemoryBus, group: Group, how: Outcome = Outcome.TRAINED) -> None:
    event = OutcomeEvent(run=RUN, group=group.group, outcome=how)
    await bus.publish(SUBJECTS.outcome(group.group), event, id=f"{RUN}/outcome/{group.group}", expect_last=0)


async def ledger_admissions(bus: MemoryBus, count: int) -> list[int]:
    found: list[int] = []
    async with asyncio.timeout(WAIT_S):
        async for stored in bus.follow(SUBJECTS.stream("LEDGER"), SUBJECTS.ledger):
            if isinstance(stored.message, Admitted):
                found.append(stored.message.group.index)
                if len(found) == count:
                    break
    return found


def service(bus: MemoryBus, config: Config | None = None) -> DispatcherService:
    return DispatcherService(bus, config or configuration(), Counting())


async def test_it_admits_the_bound_and_then_waits(bus: Crashing) -> None:
    """H29, S18 (docs/field_failures.md)."""
    async with running(service(bus)):
        groups = await queued(bus, 6)
        assert await nothing_queued(bus)
    assert [group.index for group in groups] == list(range(6))
    assert {group.members for group in groups} == {2}


@pytest.mark.parametrize("how", list(Outcome))
async def test_every_outcome_lets_the_next_group_in(bus: Crashing, how: Outcome) -> None:
    async with running(service(bus)):
        groups = await queued(bus, 6)
        await end(bus, groups[3], how)
        assert [group.index for group in await queued(bus, 1)] == [6]


async def test_a_group_is_in_the_ledger_before_it_is_in_the_queue(bus: Crashing) -> None:
    bus.die_on = lambda subject, message: subject == SUBJECTS.groups
    with pytest.raises(ExceptionGroup):
        await service(bus).run()
    assert await ledger_admissions(bus, 1) == [0]


@pytest.mark.parametrize("victim", range(6))
async def test_killed_between_ledger_and_queue_loses_no_group_and_repeats_none(bus: Crashing, victim: int) -> None:
    """L4, H4 (docs/field_failures.md)."""
    bus.die_on = lambda subject, message: isinstance(message, Group) and message.index == victim
    with pytest.raises(ExceptionGroup):
        await service(bus).run()
    bus.die_on = lambda subject, message: False
    async with running(service(bus)):
        groups = await queued(bus, 6)
        assert await nothing_queued(bus)
    assert [group.index for group in groups] == list(range(6))
    assert await ledger_admissions(bus, 6) == list(range(6))


async def test_restarted_in_the_middle_it_continues_at_the_next_number(bus: Crashing) -> None:
    """L5 (docs/field_failures.md)."""
    async with running(service(bus)):
        first = await queued(bus, 6)
        for group in first[:2]:
            await end(bus, group)
        first += await queued(bus, 2)
    async with running(service(bus)):
        assert await nothing_queued(bus)
        for group in first[2:5]:
            await end(bus, group)
        second = await queued(bus, 3)
    assert [group.index for group in first + second] == list(range(11))


async def test_killed_over_and_over_every_number_appears_once(bus: Crashing) -> None:
    """L5, L6 (docs/field_failures.md)."""
    seen: list[int] = []
    for crash_at in range(0, 30, 3):
        bus.die_on = lambda subject, message, at=crash_at: isinstance(message, Group) and message.index == at
        task = asyncio.create_task(service(bus).run())
        while not task.done() and len(seen) <= 30:
            consumer = next(c for c in run_topology(configuration()).consumers if c.durable == "rollout")
            for delivery in await bus.pull(consumer, batch=8, timeout_s=0.05):
                assert isinstance(delivery.message, Group)
                seen.append(delivery.message.index)
                await delivery.ack()
                await end(bus, delivery.message)
        with pytest.raises(ExceptionGroup):
            await task
    assert seen == list(range(27)), "a number was lost, repeated or reordered"


async def test_two_dispatchers_at_once_stay_within_the_bound(bus: Crashing) -> None:
    """H29, S2 (docs/field_failures.md)."""
    async with running(service(bus)), running(service(bus)):
        groups = await queued(bus, 6)
        assert await nothing_queued(bus)
        for group in groups:
            await end(bus, group)
        groups += await queued(bus, 6)
        assert await nothing_queued(bus)
    assert sorted(group.index for group in groups) == list(range(12))


async def test_what_another_admitted_during_a_publish_is_queued_before_the_next_is_admitted(bus: Crashing) -> None:
    """Two dispatchers die at the same time: at most the last group may be admitted and not queued, or it is never found."""
    def admitted(index: int) -> Admitted:
        group = Group(run=RUN, group=f"g{index:08d}", index=index, members=2, deadline_s=600.0,
                      task=Task(id=str(index), source="test", family="test", prompt=str(index)))
        return Admitted(run=RUN, group=group, at=0.0)

    await bus.publish(SUBJECTS.admitted("g00000000"), admitted(0), id="first", expect_last=0)
    dispatcher = service(bus)
    order: list[tuple[str, int]] = []

    async def publish(subject: str, message: Message, *, id: str, expect_last: int | None = None) -> PubAck:
        if subject == SUBJECTS.groups and not order:  # the other one gets number 1 while this one queues number 0
            await Crashing.publish(bus, SUBJECTS.admitted("g00000001"), admitted(1), id="other", expect_last=0)
            async with asyncio.timeout(WAIT_S):
                while dispatcher.state.cursor < 2:  # noqa: ASYNC110 - it tells nobody when it has folded an event
                    await asyncio.sleep(0.001)
        if isinstance(message, Group):
            order.append(("queued", message.index))
        elif isinstance(message, Admitted):
            order.append(("admitted", message.group.index))
        return await Crashing.publish(bus, subject, message, id=id, expect_last=expect_last)

    bus.publish = publish  # type: ignore[method-assign]
    async with running(dispatcher):
        await queued(bus, 4)
    assert order[:4] == [("queued", 0), ("queued", 1), ("admitted", 2), ("queued", 2)]


async def test_a_full_queue_makes_it_wait_and_drops_nothing(bus: Crashing) -> None:
    """H18, L9 (docs/field_failures.md)."""
    bus.full_for = 4
    async with running(service(bus)):
        assert [group.index for group in await queued(bus, 6)] == list(range(6))


async def test_a_queue_that_stays_full_is_an_error_that_says_so(bus: Crashing) -> None:
    """H18 (docs/field_failures.md)."""
    bus.full_for = 10_000
    config = Config.model_validate({"run": {"name": RUN}, "dispatcher": {"full_wait_s": 0.05}})
    with pytest.raises(ExceptionGroup) as caught:
        await service(bus, config).run()
    assert caught.group_contains(BrokerFull)


async def test_it_ends_when_the_run_is_finished(bus: Crashing) -> None:
    """H8, H33 (docs/field_failures.md)."""
    async with running(service(bus)) as task:
        await queued(bus, 6)
        await bus.publish(SUBJECTS.finished, RunFinished(run=RUN, version=3, reason="steps"), id=f"{RUN}/finished")
        async with asyncio.timeout(WAIT_S):
            await task


async def test_tasks_are_the_same_after_a_restart(bus: Crashing) -> None:
    """L5 (docs/field_failures.md)."""
    async with running(service(bus)):
        first = await queued(bus, 6)
    assert [group.task.id for group in first] == [f"0-{index}" for index in range(6)]


async def test_a_task_source_that_raises_ends_the_service_with_the_cause(bus: Crashing) -> None:
    """H20, H3 (docs/field_failures.md)."""
    class Broken:
        def task(self, index: int, seed: int) -> Task:
            raise ValueError("no such family")

    with pytest.raises(ExceptionGroup) as caught:
        await DispatcherService(bus, configuration(), Broken()).run()
    assert caught.group_contains(ValueError, match="no such family")
