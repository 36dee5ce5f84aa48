"""The slow network passes everything on, in order; the echo makes duplicates that the broker takes for new messages."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from chaos_echo import Echo
from chaos_proxy import DelayingProxy
from chaos_schedule import Plane
from loop_cases import eventually, groups_of, queue, tiny

from driftline.messages.errors import BrokerUnavailable
from driftline.messages.nats_bus import NatsBus
from driftline.messages.server import NatsServer
from driftline.messages.subjects import Subjects
from driftline.messages.types import Group
from driftline.services.runtime import run_topology

WAIT_S = 120.0


async def numbers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends back what it hears."""
    while data := await reader.read(4096):
        writer.write(data)
        await writer.drain()
    writer.close()


async def test_bytes_arrive_unchanged_and_in_order() -> None:
    sent = bytes(range(256)) * 2000
    async with asyncio.timeout(WAIT_S), await asyncio.start_server(numbers, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with DelayingProxy("127.0.0.1", port, seed=1) as proxy:
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)

            async def say() -> None:
                for start in range(0, len(sent), 10_000):
                    writer.write(sent[start : start + 10_000])
                    await writer.drain()

            heard, _ = await asyncio.gather(reader.readexactly(len(sent)), say())
            assert heard == sent
            assert proxy.connections == 1
            writer.close()


async def test_a_client_that_is_cut_off_hears_nothing_and_is_heard_late(tmp_path: Path) -> None:
    config, subjects = tiny("network"), Subjects("network")
    group = groups_of(config, [0])[0]
    stream = subjects.stream("GROUPS")
    async with (
        asyncio.timeout(WAIT_S), NatsServer(tmp_path) as server, DelayingProxy(server.host, server.port, seed=1) as proxy,
        await NatsBus.connect(server.url, name="outside") as outside, await NatsBus.connect(proxy.url, name="far") as far,
    ):
        await outside.declare(run_topology(config))
        async with proxy.cut_off("far"):
            assert not await far.healthy(0.5)
            late = asyncio.create_task(queue(far, [group]))
            await asyncio.sleep(0.2)
            assert await outside.last(stream, subjects.groups) is None
        await late
        stored = await outside.last(stream, subjects.groups)
        assert stored is not None
        assert stored.message == group


async def test_a_broker_behind_it_that_is_away_closes_the_connection(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    async with asyncio.timeout(WAIT_S), server, DelayingProxy(server.host, server.port, seed=1) as proxy:
        await server.kill()
        with pytest.raises(BrokerUnavailable):
            await NatsBus.connect(proxy.url, name="early", connect_timeout_s=0.5)
        await server.start()
        async with await NatsBus.connect(proxy.url, name="later") as bus:
            assert await bus.healthy()


async def test_an_echo_is_a_message_of_its_own_with_the_same_bytes(nats_url: str, nats_bus: NatsBus, fresh_run: str) -> None:
    config = tiny(fresh_run)
    subjects = Subjects(fresh_run)
    await nats_bus.declare(run_topology(config))
    async with asyncio.timeout(WAIT_S), Echo(nats_url, fresh_run, seed=1) as echo:
        await queue(nats_bus, groups_of(config, range(3)))
        await eventually(lambda: echo.heard(Plane.GROUPS) == 3)
        assert await echo.again(nats_bus, Plane.GROUPS, 4) == 4
        assert await echo.again(nats_bus, Plane.GRADED, 4) == 0
        stored = await nats_bus.read(subjects.stream("GROUPS"), subjects.groups)
        assert len(stored) == 7
        assert {raw.data for raw in stored[3:]} <= {raw.data for raw in stored[:3]}
        consumer = next(c for c in run_topology(config).consumers if c.durable == "rollout")
        deliveries = await nats_bus.pull(consumer, batch=7, timeout_s=5.0)
        assert all(isinstance(delivery.message, Group) for delivery in deliveries)
        assert echo.heard(Plane.GROUPS) == 3  # its own are not heard again
