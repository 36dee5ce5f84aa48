"""The promises that rest on the broker's own rules (compare-and-set, de-duplication), against a real one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from driftline.messages.nats_bus import NatsBus
from driftline.messages.server import NatsServer
from driftline.messages.subjects import Subjects
from driftline.messages.types import Group, Outcome, OutcomeEvent, Task
from driftline.services.config import Config
from driftline.services.dispatcher.service import DispatcherService
from driftline.services.runtime import run_topology

CONFIG = Config.model_validate({"run": {"name": "trial", "max_lag": 1, "groups_per_step": 4, "group_size": 2}})
WAIT_S = 60.0


class Numbers:
    def task(self, index: int, seed: int) -> Task:
        return Task(id=str(index), source="test", family="test", prompt=str(index))


@contextlib.asynccontextmanager
async def dispatching(url: str) -> AsyncIterator[None]:
    async with await NatsBus.connect(url, name="dispatcher") as bus:
        task = asyncio.create_task(DispatcherService(bus, CONFIG, Numbers()).run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def work(bus: NatsBus, until: int, seen: list[int]) -> None:
    """Do what the rest of the loop does: take groups and end them, and never see more in flight than the bound."""
    subjects = Subjects("trial")
    consumer = next(c for c in run_topology(CONFIG).consumers if c.durable == "rollout")
    async with asyncio.timeout(WAIT_S):
        while len(seen) < until:
            deliveries = await bus.pull(consumer, batch=16, timeout_s=1.0)
            assert len(deliveries) <= CONFIG.max_in_flight_groups
            for delivery in deliveries:
                group = delivery.message
                assert isinstance(group, Group)
                seen.append(group.index)
                await delivery.ack()
                event = OutcomeEvent(run="trial", group=group.group, outcome=Outcome.TRAINED)
                await bus.publish(subjects.outcome(group.group), event, id=f"o{group.index}", expect_last=0)


async def test_two_dispatchers_and_restarts_use_every_number_once(tmp_path: Path) -> None:
    """L5, L16 (docs/field_failures.md)."""
    seen: list[int] = []
    async with NatsServer(tmp_path) as server, await NatsBus.connect(server.url, name="worker") as bus:
        await bus.declare(run_topology(CONFIG))
        for life in range(4):
            async with dispatching(server.url), dispatching(server.url):
                await work(bus, 30 * (life + 1), seen)
        async with dispatching(server.url):
            await work(bus, len(seen) + 10, seen)
    assert sorted(seen) == list(range(len(seen)))
