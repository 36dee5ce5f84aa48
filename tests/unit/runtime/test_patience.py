"""A broker that is away for a moment is waited for."""

from __future__ import annotations

import pytest

from driftline.messages import MemoryBroker, MemoryBus
from driftline.messages.subjects import Subjects, topology
from driftline.messages.types import RunFinished
from driftline.services.publishing import pull_patiently


async def test_a_pull_during_an_outage_is_empty_and_works_afterwards() -> None:
    broker = MemoryBroker()
    bus, made = MemoryBus(broker), topology("patience")
    await bus.declare(made)
    consumer = made.consumers[0]
    await bus.publish(Subjects("patience").groups, RunFinished(run="patience", version=1, reason="x"), id="a")
    broker.down = True
    assert await pull_patiently(bus, consumer, batch=1, timeout_s=0.05) == []
    broker.down = False
    [delivery] = await pull_patiently(bus, consumer, batch=1, timeout_s=5)
    assert delivery.deliveries >= 1
    await delivery.ack()


async def test_other_errors_are_not_swallowed() -> None:
    bus = MemoryBus()
    with pytest.raises(Exception, match=r"stream|declared"):
        await pull_patiently(bus, topology("nobody").consumers[0], batch=1, timeout_s=0.05)
