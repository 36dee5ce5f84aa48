"""Rollout engines with the relay on, as they are built from a run file, over a real broker: one reads the store, the other reads from it."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_cases import eventually, finish, groups_of, queue, running, tiny
from rollout_cases import publish_shifted, stored, versions

from driftline.messages.errors import ConfigError
from driftline.messages.memory import MemoryBus
from driftline.messages.nats_bus import NatsBus
from driftline.messages.subjects import Subjects
from driftline.messages.types import RelayPeer
from driftline.policy_store.blobs import JetStreamBlobs, MemoryBlobs
from driftline.policy_store.reader import PolicyReader
from driftline.services.config import Config
from driftline.services.rollout.relay import RelayedRollout, peer_name, relay_of
from driftline.services.rollout.service import RolloutService
from driftline.services.runtime import Context, run_topology
from driftline.services.telemetry import Reporter
from driftline.services.wiring import SERVICES


@pytest.fixture
async def bus(nats_bus: NatsBus, config: Config) -> NatsBus:
    await nats_bus.declare(run_topology(config))
    return nats_bus


@pytest.fixture
def config(fresh_run: str) -> Config:
    return tiny(fresh_run, relay={"enabled": True})


class Kept(Reporter):
    """The last report instead of a message."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}

    async def report(self, values: Mapping[str, float], series: Mapping[str, Sequence[float]] | None = None, *, step: int = -1) -> None:
        self.last = dict(values)


def built(bus: NatsBus, config: Config, instance: str, reporter: Reporter | None = None) -> RelayedRollout:
    service = SERVICES["rollout"](Context(bus, config, instance, Path(), reporter or Kept()))
    assert isinstance(service, RelayedRollout)
    return service


async def test_two_engines_follow_a_run_and_each_version_is_read_from_the_store_once(bus: NatsBus, config: Config) -> None:
    run, blobs = config.run.name, JetStreamBlobs(bus, config.run.name)
    await publish_shifted(bus, blobs, run, 0)
    reports = [Kept(), Kept()]
    engines = [built(bus, config, str(i), report) for i, report in enumerate(reports)]
    ups = [engine.relay.upstream.counts for engine in engines]
    async with AsyncExitStack() as stack:
        tasks = [await stack.enter_async_context(running(engine)) for engine in engines]
        await eventually(lambda: all(report.last.get("peers") == 1 and report.last["version"] == 0 for report in reports))
        from_store, from_peers = sum(up.origin_bytes for up in ups), sum(up.bytes for up in ups)
        for version in (1, 2):
            await publish_shifted(bus, blobs, run, version)
            await eventually(lambda at=version: all(report.last["version"] == at for report in reports))  # type: ignore[misc]
        reader = PolicyReader(bus, blobs, run)
        needed = sum([delta.nbytes for version in (1, 2) if (delta := (await reader.manifest(version)).delta) is not None])
        assert sum(up.origin_bytes for up in ups) - from_store == needed > 0
        assert sum(up.bytes for up in ups) - from_peers == needed
        await queue(bus, groups_of(config, range(4)))
        found = await stored(bus, 16, config)
        await finish(bus, run, 2)
        for task in tasks:
            await task
    assert {v for trajectory in found for v in versions(trajectory)} == {2}
    assert sum(up.hits for up in ups) > 0
    for report in reports:
        assert {"relay_hits", "relay_served_bytes", "origin_bytes", "peers", "tokens_sampled"} <= report.last.keys()
    last = [await bus.last(Subjects(run).stream("CONTROL"), Subjects(run).relay(engine.relay.peers.me)) for engine in engines]
    assert all(said is not None and isinstance(said.message, RelayPeer) and said.message.leaving for said in last)


async def test_an_engine_that_is_drained_before_there_is_a_version_ends_with_its_relay(bus: NatsBus, config: Config) -> None:
    engine = built(bus, config, "0")
    async with running(engine) as task:
        await eventually(lambda: engine.relay.upstream._client.ready)
        await eventually(lambda: engine.service._starting is not None)
        engine.drain()
        await task


async def test_an_engine_that_cannot_listen_ends_with_the_cause(bus: NatsBus, config: Config) -> None:
    first = built(bus, config, "0")
    async with running(first):
        await eventually(lambda: first.relay.server._runner is not None)
        taken = config.model_copy(update={"relay": config.relay.model_copy(update={"port": first.relay.server.port})})
        with pytest.raises(BaseExceptionGroup) as failure:
            await built(bus, taken, "x").run()
        assert failure.group_contains(ConfigError, match=r"relay\.port")


async def test_without_the_setting_the_store_is_read_directly(bus: NatsBus, fresh_run: str) -> None:
    service = SERVICES["rollout"](Context(bus, tiny(fresh_run), "0", Path(), Kept()))
    assert isinstance(service, RolloutService)


def test_a_fixed_port_is_one_for_each_engine_of_a_machine(memory_bus: MemoryBus) -> None:
    def port(first: int, instance: str) -> int:
        config = tiny("r", relay={"enabled": True, "port": first})
        return relay_of(memory_bus, MemoryBlobs(), config, instance)._settings.port

    assert [port(7000, instance) for instance in ("0", "3", "gpu-a")] == [7000, 7003, 7000]
    assert port(0, "3") == 0


def test_an_engine_that_listens_everywhere_is_called_by_its_machine_s_name_unless_told_otherwise(memory_bus: MemoryBus) -> None:
    def address(**section: str) -> str:
        config = tiny("r", relay={"enabled": True, **section})
        return relay_of(memory_bus, MemoryBlobs(), config, "0")._settings.address

    assert [address(host=host) for host in ("0.0.0.0", "::", "10.0.0.7")] == [socket.gethostname()] * 2 + ["10.0.0.7"]
    assert address(host="0.0.0.0", advertise="gpu-7.example") == "gpu-7.example"


@given(st.text(max_size=300), st.text(max_size=40))
def test_an_engine_s_name_fits_a_subject_whatever_its_machine_is_called(host: str, instance: str) -> None:
    name = peer_name(host, instance)
    RelayPeer(run="r", peer=name, host="h", port=1, token="0" * 32, beat=1, at=0.0)
    assert name.endswith(re.sub(r"[^A-Za-z0-9_-]", "-", instance)[:20])
