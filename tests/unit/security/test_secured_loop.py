"""A whole run in which every service has its own role's credentials and no more: the permissions suffice."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch
from loop_cases import WAIT_S, tiny
from security_cases import RUN, guarded

from driftline.messages.bus import Bus
from driftline.messages.subjects import Subjects, topology
from driftline.messages.types import RunFinished
from driftline.policy_store.blobs import JetStreamBlobs
from driftline.policy_store.inspect import verify
from driftline.policy_store.reader import PolicyReader
from driftline.services.config import Config
from driftline.services.runtime import Context, Service, connect, prepare
from driftline.services.security.permissions import Role
from driftline.services.telemetry import Reporter
from driftline.services.watch.collector import Collector
from driftline.services.watch.picture import Picture
from driftline.services.wiring import SERVICES


async def built(name: str, bus: Bus, config: Config, folder: Path) -> Service:
    made = SERVICES[name](Context(bus, config, "", folder, Reporter(bus, config.run.name, name)))
    return await made if asyncio.iscoroutine(made) else made  # type: ignore[return-value]


async def test_every_service_with_its_own_credentials_reaches_the_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    async with guarded(tmp_path) as broker, AsyncExitStack() as stack:
        section = {"url": broker.url, "credentials": str(broker.folder()), "provision": False}
        config = tiny(RUN, broker=section, run={"steps": 2, "groups_per_step": 2, "group_size": 4, "max_lag": 1})
        services = []
        for name in SERVICES:
            bus = await connect(config, name)
            stack.push_async_callback(bus.close)
            await prepare(bus, config, name)
            services.append((await built(name, bus, config, tmp_path / "run")).run())
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
            for service in services:
                tasks.create_task(service)
        observer = await stack.enter_async_context(broker.bus(Role.OBSERVER))
        subjects = Subjects(RUN)
        end = await observer.last(subjects.stream("CONTROL"), subjects.finished)
        assert end is not None
        assert isinstance(end.message, RunFinished)
        assert end.message.version == 2
        picture = Picture(RUN, 2)
        collector = Collector(observer, picture)
        reading = asyncio.create_task(collector.run())
        await collector.catch_up(30.0)
        reading.cancel()
        await asyncio.wait({reading})
        assert picture.version == 2
        assert picture.dead_letters == 0
        depths = [await observer.depth(consumer) for consumer in topology(RUN).consumers]
        assert sum(depth.pending for depth in depths) == 0
        recorder = await stack.enter_async_context(broker.bus(Role.RECORDER))
        report = await verify(PolicyReader(recorder, JetStreamBlobs(recorder, RUN), RUN), 2)
        assert report.intact
    assert "denied" not in capfd.readouterr().err.lower()
