"""The policy-store service verifies every version, mirrors it, collects, and ends with the run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
from policy_cases import Policy, copy_of, publish_chain, same

from driftline.messages.bus import Bus
from driftline.messages.errors import IntegrityError
from driftline.messages.memory import MemoryBus
from driftline.messages.subjects import Subjects
from driftline.messages.types import RunFinished
from driftline.policy_store import BlobStore, MemoryBlobs, PolicyReader, PolicyWriter
from driftline.policy_store.checkpoint import WEIGHTS, checkpoints, latest
from driftline.policy_store.pins import find
from driftline.services.policy_store.service import PolicyStoreService


class Recorded:
    def __init__(self) -> None:
        self.rows: list[Mapping[str, float]] = []
        self.changed = asyncio.Condition()

    async def report(self, values: Mapping[str, float], *, step: int = -1) -> None:
        async with self.changed:
            self.rows.append(values)
            self.changed.notify_all()

    async def until(self, version: int) -> None:
        async with asyncio.timeout(30), self.changed:
            await self.changed.wait_for(lambda: bool(self.rows) and self.rows[-1]["version"] >= version)


async def finish(bus: Bus, run: str, version: int) -> None:
    await bus.publish(Subjects(run).finished, RunFinished(run=run, version=version, reason="done"), id=f"{run}/finished")


async def test_it_verifies_mirrors_and_collects_while_the_run_goes_on_and_ends_with_it(
    bus: Bus, blobs: BlobStore, fresh_run: str, tmp_path: Path
) -> None:
    policy, reports, start = Policy(elements=3_000), Recorded(), {}
    service = PolicyStoreService(
        bus, blobs, fresh_run, keep_versions=3, mirror_dir=tmp_path / "mirror", mirror_beside={"config.json": b"{}"},
        reporter=reports,
    )
    writer = PolicyWriter(bus, blobs, fresh_run, 2)
    await writer.resume()
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(service.run())
        for version in range(9):
            await writer.publish(policy.step(), version=version, learner_step=version)
            start = copy_of(policy.state) if version == 0 else start
            await reports.until(version)
        await finish(bus, fresh_run, 8)
    assert service.verified_version == 8
    assert service.verified_count == 9
    assert sorted(checkpoints(tmp_path / "mirror")) == [7, 8]
    newest = latest(tmp_path / "mirror")
    assert newest is not None
    assert (newest / "config.json").exists()
    assert (newest / WEIGHTS).stat().st_size > policy.state["layers.0.weight"].data.size
    assert service.collected_versions >= 4
    assert same(await PolicyReader(bus, blobs, fresh_run).materialise(8), policy.state)
    reader = PolicyReader(bus, blobs, fresh_run)
    with pytest.raises(IntegrityError):
        await reader.manifest(1)
    # Version 0 is pinned: a recording starts from it however long the run was.
    assert same(await reader.materialise_manifest(await find(bus, reader, 0)), start)


async def test_it_reports_on_the_metrics_stream(quick_bus: MemoryBus, fresh_run: str) -> None:
    blobs = MemoryBlobs()
    await publish_chain(quick_bus, blobs, fresh_run, Policy(elements=3_000), 3)
    await finish(quick_bus, fresh_run, 2)
    async with asyncio.timeout(30):
        await PolicyStoreService(quick_bus, blobs, fresh_run, keep_versions=0).run()
    subjects = Subjects(fresh_run)
    stored = await quick_bus.last(subjects.stream("METRICS"), subjects.metrics("policy-store"))
    assert stored is not None
    values = stored.message.values  # type: ignore[attr-defined]
    assert values["version"] == 2
    assert values["collected_versions"] == 0
    assert 0 < values["bytes_delta"] < values["bytes_raw"]


async def test_a_full_that_nobody_reads_is_verified_too(quick_bus: MemoryBus, fresh_run: str) -> None:
    blobs = MemoryBlobs()
    writer, _ = await publish_chain(quick_bus, blobs, fresh_run, policy := Policy(elements=3_000), 2, full_every=2)
    reports = Recorded()
    service = PolicyStoreService(quick_bus, blobs, fresh_run, keep_versions=0, reporter=reports)
    task = asyncio.create_task(service.run())
    await reports.until(1)

    put = blobs.put

    async def damaging(data: bytes) -> object:
        ref = await put(data)
        if data[4] == 1:  # a pack of a full
            blobs.blobs[ref.digest] = data[:-1] + bytes([data[-1] ^ 1])
        return ref

    blobs.put = damaging  # type: ignore[method-assign, assignment]
    await writer.publish(policy.step(), version=2, learner_step=2)
    async with asyncio.timeout(30):
        with pytest.raises(ExceptionGroup) as caught:
            await task
    assert caught.group_contains(IntegrityError, match="digest")
    assert service.verified_version == 1


async def test_a_finished_run_of_no_version_ends_at_once(quick_bus: MemoryBus, fresh_run: str) -> None:
    await finish(quick_bus, fresh_run, -1)
    async with asyncio.timeout(30):
        await PolicyStoreService(quick_bus, MemoryBlobs(), fresh_run).run()


async def test_cancellation_ends_it_cleanly(quick_bus: MemoryBus, fresh_run: str) -> None:
    blobs, reports = MemoryBlobs(), Recorded()
    await publish_chain(quick_bus, blobs, fresh_run, Policy(elements=3_000), 2)
    task = asyncio.create_task(PolicyStoreService(quick_bus, blobs, fresh_run, reporter=reports).run())
    await reports.until(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
