"""Engines come and go while the run goes on: nothing is configured, nothing is lost, nothing is stored twice. With a real broker."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from loop_cases import WAIT_S, eventually, groups_of, publish_version, queue, tiny
from rollout_cases import is_idle, killed, rollout_consumer, topology_with

from driftline.messages.nats_bus import NatsBus
from driftline.messages.types import Trajectory
from driftline.policy_store.blobs import JetStreamBlobs
from driftline.services.rollout.engine import Engine
from driftline.services.rollout.service import RolloutService


class Members:
    """Every member that comes out, acknowledged as it comes, by the engine that sampled it."""

    def __init__(self) -> None:
        self.ids: Counter[str] = Counter()
        self.by_engine: Counter[str] = Counter()

    async def collect(self, bus: NatsBus, config: Any) -> None:
        grader = next(c for c in topology_with(rollout_consumer(config), config).consumers if c.durable == "grader")
        while True:
            for delivery in await bus.pull(grader, batch=64, timeout_s=1.0):
                assert isinstance(delivery.message, Trajectory)
                self.ids[delivery.message.id] += 1
                self.by_engine[delivery.message.engine] += 1
                await delivery.ack()


@asynccontextmanager
async def collecting(bus: NatsBus, config: Any) -> AsyncIterator[Members]:
    members = Members()
    task = asyncio.create_task(members.collect(bus, config))
    try:
        yield members
    finally:
        task.cancel()
        await asyncio.wait({task})
    assert task.cancelled(), task.exception()


async def test_engines_join_drain_and_die_and_every_group_is_stored_exactly_once(
    nats_url: str, fresh_run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H23, H28, L12, L4: one engine is there before the first version, one joins late and is drained, one joins later still, and the
    first is killed in the middle and gives nothing back."""
    config = tiny(fresh_run, rollout={"engines": 3, "max_batch": 8})
    consumer = rollout_consumer(config, ack_wait_s=2.0)
    real = Engine.step

    def unhurried(engine: Engine) -> list[Trajectory]:
        time.sleep(0.01)  # so that one engine cannot take all there is before another is up
        return real(engine)

    monkeypatch.setattr(Engine, "step", unhurried)
    async with AsyncExitStack() as stack:
        async def connection(name: str) -> NatsBus:
            return await stack.enter_async_context(await NatsBus.connect(nats_url, name=name))

        bus = await connection("test")
        await bus.declare(topology_with(consumer, config))
        blobs = JetStreamBlobs(bus, fresh_run)
        tasks: list[asyncio.Task[None]] = []

        async def engine(number: int) -> tuple[RolloutService, asyncio.Task[None]]:
            own = await connection(f"rollout-{number}")
            service = RolloutService(own, JetStreamBlobs(own, fresh_run), config, str(number), consumer=consumer)
            tasks.append(asyncio.create_task(service.run()))
            return service, tasks[-1]

        indices = itertools.count()
        queued = 0

        async def feed_until(true: Callable[[], bool]) -> None:
            """Work keeps coming, two groups at a time, until it is so."""
            nonlocal queued
            while not true():
                assert not any(task.done() and not task.cancelled() and task.exception() for task in tasks)
                await queue(bus, groups_of(config, itertools.islice(indices, 2)))
                queued += 2
                await asyncio.sleep(0.02)

        try:
            async with asyncio.timeout(WAIT_S), collecting(bus, config) as members:
                first, first_task = await engine(0)
                await eventually(lambda: first._starting is not None)
                assert first._engine is None, "there is no version, nor any message in any stream"
                await publish_version(bus, blobs, fresh_run, 0)
                await feed_until(lambda: members.by_engine["rollout-0"] > 0)

                second, second_task = await engine(1)
                await feed_until(lambda: members.by_engine["rollout-1"] > 0)
                await feed_until(lambda: len(second._hand) > 0)
                second.drain()
                await second_task

                _, third_task = await engine(2)
                await feed_until(lambda: members.by_engine["rollout-2"] > 0)
                await feed_until(lambda: len(first._hand) > 0)
                held = len(first._hand)
                await killed(first, first_task, monkeypatch)
                assert held > 0

                await eventually(lambda: len(members.ids) == queued * 4)
                await eventually(lambda: is_idle(bus, config))
                assert not third_task.done()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        assert set(members.ids.values()) == {1}
        assert len(members.ids) == queued * 4
        assert set(members.by_engine) == {"rollout-0", "rollout-1", "rollout-2"}
        assert (await bus.depth(consumer)).redelivered == 0, "nothing is left that anyone would have to take again"
        assert await bus.last(f"DL-{fresh_run}-DEAD", f"dl.v1.{fresh_run}.dead.>") is None
