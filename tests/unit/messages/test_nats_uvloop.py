"""NatsBus on uvloop, the loop of every service: it raises RuntimeError where asyncio's own loop drops a write."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from messages_samples import small_topology

from driftline.messages import NatsBus, NatsServer

uvloop = pytest.importorskip("uvloop")


async def outage(store: Path) -> None:
    async with NatsServer(store) as server, await NatsBus.connect(server.url, name="uvloop") as bus:
        assert await bus.healthy()
        await server.kill()
        # The gap is between the loss of the socket and the client's first attempt to reconnect: ask all the way through it.
        assert not any([await bus.healthy(0.1) for _ in range(50)])
        await server.start()
        await bus.declare(small_topology("r"))  # waits for the broker
        assert await bus.healthy()


def test_a_killed_broker_is_unhealthy_not_an_error_and_heals(tmp_path: Path) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(outage(tmp_path / "nats"))
