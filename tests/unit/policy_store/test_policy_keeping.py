"""The policy-store service at work: shortcuts while it follows, collection after a grace, orphans, restarts, and what goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from policy_cases import Policy, copy_of, cut_after, publish_chain, same

from driftline.messages.bus import Bus
from driftline.messages.errors import BrokerFull, IntegrityError
from driftline.messages.memory import MemoryBus
from driftline.messages.subjects import Subjects
from driftline.messages.types import Metrics
from driftline.policy_store import BlobRef, Manifest, MemoryBlobs, PolicyReader, PolicyWriter, State
from driftline.policy_store.collect import Retention
from driftline.policy_store.manifest import manifest_subject
from driftline.policy_store.pins import condemn, condemned, pin, unpin
from driftline.policy_store.shortcuts import load_shortcut
from driftline.policy_store.squash import squash
from driftline.services.policy_store.followers import SILENT_S, Followers, Lag
from driftline.services.policy_store.keeping import Keeping
from driftline.services.policy_store.service import PolicyStoreService


async def eventually(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110 - counts of the code under test: nothing announces them
            await asyncio.sleep(0.005)


class Reports:
    def __init__(self) -> None:
        self.values: Mapping[str, float] = {"version": -1}
        self.changed = asyncio.Condition()

    async def report(self, values: Mapping[str, float], *, step: int = -1) -> None:
        async with self.changed:
            self.values = values
            self.changed.notify_all()

    async def until(self, version: int) -> None:
        async with asyncio.timeout(30), self.changed:
            await self.changed.wait_for(lambda: self.values["version"] >= version)


class Run:
    """A writer and a service, one version at a time."""

    def __init__(self, bus: Bus, blobs: MemoryBlobs, run: str, full_every: int = 4, **service: Any) -> None:
        self.bus, self.blobs, self.run, self.policy = bus, blobs, run, Policy(elements=3_000)
        self.writer, self.reports = PolicyWriter(bus, blobs, run, full_every, full_share=100.0), Reports()
        self.states: list[State] = []
        self._options = service

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[PolicyStoreService]:
        self.service = PolicyStoreService(self.bus, self.blobs, self.run, reporter=self.reports, **self._options)
        task = asyncio.create_task(self.service.run())
        try:
            yield self.service
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def publish(self, count: int) -> None:
        for _ in range(count):
            version = len(self.states)
            self.states.append(self.policy.step())
            await self.writer.publish(self.states[version], version=version, learner_step=version)
            await self.reports.until(version)

    def reader(self) -> PolicyReader:
        return PolicyReader(self.bus, self.blobs, self.run)


async def test_shortcuts_are_stored_while_it_follows_and_go_with_their_versions(bus: Bus, fresh_run: str) -> None:
    run = Run(bus, MemoryBlobs(), fresh_run, keep_versions=8, keep_start=False)
    await run.writer.resume()
    async with run.serving() as service:
        await run.publish(25)
        reader = run.reader()
        path = await reader._between(await reader.manifest(24), 17)
        assert str(path) == "delta 18 + shortcut 18-20 + shortcut 20-24"
        for start in (17, 18, 20, 23):
            assert same(await reader.advance(copy_of(run.states[start]), start, 24, fallback=False), run.states[24])
        assert service.shortcuts_stored >= 20
        assert service.collected_versions >= 12
        assert run.reports.values["collected_shortcuts"] > 0
        stored = await bus.subjects(Subjects(fresh_run).stream("POLICY"), f"{Subjects(fresh_run).root}.policy.shortcut.>")
        assert all(int(subject.split(".")[-1]) >= 12 for subject in stored), "none is left whose base is gone"
    named = {pack.digest for version in range(16, 25) for pack in (await reader.manifest(version)).packs}
    for version in range(16, 25):
        named |= {pack.digest for made in await reader.shortcuts((await reader.manifest(version)).link) for pack in made.encoding.packs}
    assert set(run.blobs.blobs) == named, "nothing is stored that nothing names"


async def test_a_store_that_starts_late_makes_the_spans_that_begin_after_it(quick_bus: MemoryBus, fresh_run: str) -> None:
    run = Run(quick_bus, MemoryBlobs(), fresh_run, keep_versions=0)
    await run.writer.resume()
    async with run.serving():
        await run.publish(4)
    async with run.serving():
        await run.reports.until(3)
        await run.publish(9)
    reader, found = run.reader(), {}
    for version in range(13):
        found[version] = [made.base.version for made in await reader.shortcuts((await reader.manifest(version)).link) if made.base]
    assert found[4] == [], "its first half was seen by the one before"
    assert found[6] == [4]
    assert found[8] == [4, 6]
    assert found[12] == [8, 10]


async def test_what_is_not_needed_goes_after_the_grace_and_without_another_version(quick_bus: MemoryBus, fresh_run: str) -> None:
    run = Run(quick_bus, MemoryBlobs(), fresh_run, keep_versions=1, keep_start=False, grace_s=3600.0)
    await run.writer.resume()
    async with run.serving() as service:
        await run.publish(4)
        assert same(await run.reader().materialise(0), run.states[0]), "a reader that has just begun is not cut off"
        await run.publish(1)
        assert service.collected_versions == 0
        service._keeping._grace.seconds = 0.05
        service._keeping._moved.set()
        await eventually(lambda: service.collected_versions == 4)
        assert await condemned(quick_bus, fresh_run) == ()
    with pytest.raises(IntegrityError, match="collected"):
        await run.reader().materialise(0)
    assert same(await run.reader().materialise(4), run.states[4])


def keeping(run: Run, **options: Any) -> Keeping:
    return Keeping(run.bus, run.blobs, run.reader(), Retention(2), **options)


async def learned(run: Run, keeper: Keeping) -> Keeping:
    """A keeper that has read the whole stream."""
    task = asyncio.create_task(keeper.learn())
    last = await run.bus.last(Subjects(run.run).stream("POLICY"), f"{Subjects(run.run).root}.policy.manifest.>")
    assert last is not None
    assert isinstance(last.message, Manifest)
    newest = last.message.seal
    await eventually(lambda: newest in keeper.known)
    task.cancel()
    await asyncio.wait([task])
    return keeper


async def test_blobs_of_a_publish_that_crashed_go_once_the_head_has_passed_it(quick_bus: MemoryBus, fresh_run: str) -> None:
    run = Run(quick_bus, MemoryBlobs(), fresh_run)
    writer, _ = await publish_chain(quick_bus, run.blobs, fresh_run, run.policy, 3)
    lost = await run.blobs.put(b"DLP1, of version 3 before the crash")
    keeper = await learned(run, keeping(run, orphan_age_s=0.0))
    assert await keeper.sweep()
    assert await keeper.sweep()
    assert await run.blobs.has(lost), "version 3 may still come to name it"
    await writer.publish(run.policy.step(), version=3, learner_step=3)
    assert not await keeper.sweep(), "a manifest is stored that it has not seen: it cannot judge"
    await learned(run, keeper)
    assert await keeper.sweep()
    assert not await run.blobs.has(lost)
    assert keeper.counts.orphans == 1
    for version in range(4):
        assert (await run.reader().materialise(version)).keys() == run.policy.state.keys()


async def test_a_collection_that_was_cut_off_is_finished_by_the_next_process(quick_bus: MemoryBus, fresh_run: str) -> None:
    run = Run(quick_bus, MemoryBlobs(), fresh_run)
    await publish_chain(quick_bus, run.blobs, fresh_run, run.policy, 9, full_every=2)
    reader = run.reader()
    half, kept = await reader.manifest(1), await reader.manifest(7)
    assert await condemn(quick_bus, fresh_run, [half.link, kept.link], [])
    await run.blobs.delete(half.packs[0].ref)
    keeper = await learned(run, keeping(run, grace_s=1e6))
    head = await reader.head()
    assert head is not None
    await keeper.collect(head)
    assert keeper.counts.collected_versions == 1, "only what was begun: the rest waits for its grace"
    assert half.seal not in keeper.known
    assert await condemned(quick_bus, fresh_run) == ()
    await pin(quick_bus, reader, 7, "someone")


async def test_a_pin_on_a_version_that_is_gone_stops_nothing(quick_bus: MemoryBus, fresh_run: str) -> None:
    run = Run(quick_bus, MemoryBlobs(), fresh_run)
    await publish_chain(quick_bus, run.blobs, fresh_run, run.policy, 9, full_every=2)
    reader = run.reader()
    link = await pin(quick_bus, reader, 1, "died before it learnt")
    await quick_bus.purge(Subjects(fresh_run).stream("POLICY"), manifest_subject(fresh_run, link))
    keeper = await learned(run, keeping(run))
    head = await reader.head()
    assert head is not None
    await keeper.collect(head)
    assert keeper.blocked == ""
    assert sorted(version.link.version for version in keeper.known.values()) == [6, 7, 8]


async def test_a_version_pinned_for_good_gets_a_full_and_its_chain_goes(quick_bus: MemoryBus, fresh_run: str) -> None:
    run = Run(quick_bus, MemoryBlobs(), fresh_run, full_every=100)
    states: list[State] = []
    await run.writer.resume()
    for version in range(30):
        states.append(run.policy.step(0.5))
        await run.writer.publish(states[version], version=version, learner_step=version)
    reader = run.reader()
    await pin(quick_bus, reader, 14, "someone")
    keeper = await learned(run, Keeping(quick_bus, run.blobs, reader, Retention(2)))
    head = await reader.head()
    assert head is not None
    await keeper.collect(head)
    assert keeper.counts.rebased == 0, "the head's own chain goes through all of them"
    await keeper_full(run, states)
    await learned(run, keeper)
    head = await reader.head()
    assert head is not None
    for _ in range(4):
        await keeper.collect(head)
    assert keeper.counts.rebased == 1
    assert sorted(version.link.version for version in keeper.known.values()) == [14, 30, 31]
    manifest = await run.reader().load((await reader.manifest_from(head.link, 31)).link)
    assert same(await run.reader().materialise_manifest(manifest), states[31])
    fresh = run.reader()
    held = next(version.link for version in keeper.known.values() if version.link.version == 14)
    assert same(await fresh.materialise_manifest(await fresh.load(held)), states[14])
    assert str(await fresh.reachable(held)) == "rebase 14"
    await unpin(quick_bus, fresh_run, 14, "someone")
    await keeper.collect(head)
    assert sorted(version.link.version for version in keeper.known.values()) == [30, 31]
    assert keeper.chords == {}


async def keeper_full(run: Run, states: list[State]) -> None:
    """A version with a full, and one after it: the head's chain no longer needs what is before."""
    writer = PolicyWriter(run.bus, run.blobs, run.run, 1)
    await writer.resume()
    for version in (30, 31):
        states.append(run.policy.step(0.5))
        await writer.publish(states[version], version=version, learner_step=version)


async def test_pins_that_cannot_be_read_stop_collection_and_nothing_else(quick_bus: MemoryBus, fresh_run: str) -> None:
    run = Run(quick_bus, MemoryBlobs(), fresh_run, keep_versions=1, keep_start=False)
    await run.writer.resume()
    await quick_bus.publish_bytes(f"{Subjects(fresh_run).root}.policy.pins", b"\x00 garbage", id="garbage")
    async with run.serving() as service:
        await run.publish(9)
        assert service.collected_versions == 0
        assert "pins" in service._keeping.blocked
        await quick_bus.purge(Subjects(fresh_run).stream("POLICY"), f"{Subjects(fresh_run).root}.policy.pins")
        await run.publish(1)
        assert service.collected_versions > 0


async def test_a_store_that_is_full_costs_the_shortcut_and_not_the_version(quick_bus: MemoryBus, fresh_run: str) -> None:
    class Full(MemoryBlobs):
        async def put(self, data: bytes) -> BlobRef:
            if data[4] >= 2:  # the pack of a shortcut
                raise BrokerFull("no room", field="stream", value="BLOB")
            return await super().put(data)

    run = Run(quick_bus, Full(), fresh_run, keep_versions=0)
    await run.writer.resume()
    async with run.serving() as service:
        await run.publish(5)
        assert (service.verified_count, service.shortcuts_stored) == (5, 0)


async def test_a_damaged_delta_ends_the_spans_over_it_and_no_other(quick_bus: MemoryBus, fresh_run: str) -> None:
    blobs = MemoryBlobs()
    run = Run(quick_bus, blobs, fresh_run, full_every=4, keep_versions=0)
    await run.writer.resume()
    put, deltas = blobs.put, []

    async def damaging(data: bytes) -> BlobRef:
        ref = await put(data)
        if data[4] == 0:
            deltas.append(ref.digest)
            if len(deltas) == 4:  # of version 4, which has a full
                blobs.blobs[ref.digest] = data[:-1]
        return ref

    blobs.put = damaging  # type: ignore[method-assign]
    async with run.serving() as service:
        await run.publish(9)
        assert service.verified_count == 9
    reader = run.reader()
    for base, version, there in ((0, 2, True), (2, 4, False), (0, 4, False), (4, 6, True), (4, 8, True), (0, 8, False)):
        made = await load_shortcut(quick_bus, fresh_run, (await reader.manifest(version)).link, base)
        assert (made is not None) == there
        if made is not None:
            assert same(await reader.advance(copy_of(run.states[base]), base, version, fallback=False), run.states[version])


def test_readers_behind_are_those_who_spoke_lately_and_have_an_older_version(quick_bus: MemoryBus) -> None:
    followers = Followers(quick_bus, "r")
    assert followers.lag(5, now=0.0) == Lag(0, 0, 0)
    for instance, version, at in (("0", 5, 100.0), ("1", 3, 100.0), ("2", 0, 100.0 - SILENT_S - 1), ("3", 4, 90.0)):
        followers.see(Metrics(run="r", service="rollout", instance=instance, at=at, values={"version": version}))
    followers.see(Metrics(run="r", service="rollout", instance="4", at=100.0, values={"active": 1.0}))
    assert followers.lag(5, now=100.0) == Lag(3, 2, 2)
    assert followers.lag(4, now=100.0) == Lag(3, 1, 1), "one that is ahead of what was seen is not behind"


async def test_the_readers_of_the_run_are_in_the_report(quick_bus: MemoryBus, fresh_run: str) -> None:
    run = Run(quick_bus, MemoryBlobs(), fresh_run, keep_versions=0)
    await run.writer.resume()
    subject = Subjects(fresh_run).metrics("rollout")
    async with run.serving() as service:
        await run.publish(3)
        said = Metrics(run=fresh_run, service="rollout", instance="0", at=1e12, values={"version": 1})
        await quick_bus.publish(subject, said, id="said")
        await eventually(lambda: service._followers.lag(2).readers == 1)
        await run.publish(1)
    assert (run.reports.values["readers"], run.reports.values["readers_behind"], run.reports.values["readers_lag_max"]) == (1, 1, 2)


async def test_a_collection_cut_off_at_any_point_takes_nothing_that_stays_and_is_finished_later(quick_bus: MemoryBus, fresh_run: str) -> None:
    class Yielding(MemoryBlobs):
        async def delete(self, ref: BlobRef) -> None:
            await asyncio.sleep(0)
            await super().delete(ref)

    run = Run(quick_bus, Yielding(), fresh_run)
    _, states = await publish_chain(quick_bus, run.blobs, fresh_run, run.policy, 24, full_every=4)
    reader = run.reader()
    for base, version in ((8, 12), (12, 14), (16, 20), (20, 22)):
        assert await squash(quick_bus, run.blobs, reader, await reader.manifest(version), base) is not None
    head = await reader.head()
    assert head is not None
    held = await pin(quick_bus, reader, 5, "someone")
    cut = 0
    for turns in range(200):
        keeper = await learned(run, keeping(run))
        task, finished = await cut_after(turns, keeper.collect(head))
        cut += task.cancelled()
        for version in (22, 23):
            assert same(await run.reader().materialise(version), states[version])
        assert same(await run.reader().materialise_manifest(await run.reader().load(held)), states[5])
        if finished and {version.link.version for version in keeper.known.values()} == {4, 5, 20, 21, 22, 23}:
            break
    assert cut > 5
    assert await condemned(quick_bus, fresh_run) == ()
    named = {blob.digest for item in (*keeper.known.values(), *keeper.chords.values()) for blob in item.blobs}
    assert set(run.blobs.blobs) == named
