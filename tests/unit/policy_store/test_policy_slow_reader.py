"""Readers that hang, die, fall far behind or hold on: the writer never notices, collection goes on, and each of them finds its way back."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
from policy_cases import copy_of, same
from policy_counting import CountedBlobs, CountedBus, StallingBlobs
from policy_life import FULL_EVERY, KEEP, Life
from policy_wide import Wide, tiny_packs

from driftline.messages.errors import IntegrityError
from driftline.messages.memory import MemoryBus
from driftline.messages.nats_bus import NatsBus
from driftline.messages.subjects import topology
from driftline.policy_store import JetStreamBlobs, MemoryBlobs, PolicyReader
from driftline.policy_store.pins import held, pin, pins

MIB = 1024 * 1024
BEFORE, AFTER = 10, 40


@pytest.fixture(autouse=True)
def _tiny_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_packs(monkeypatch)


@asynccontextmanager
async def living(run: str) -> AsyncIterator[Life]:
    async with MemoryBus() as bus:
        await bus.declare(topology(run, queue_bytes=16 * MIB, blob_bytes=64 * MIB))
        life = Life(bus, MemoryBlobs(), run, Wide())
        async with life.going():
            await life.publish(BEFORE)
            yield life


@asynccontextmanager
async def hanging_in_a_pack(life: Life) -> AsyncIterator[None]:
    """One that reads a version whose third pack does not come until the version has long been collected."""
    blobs = StallingBlobs(life.blobs, "get", 3)
    reader = PolicyReader(life.bus, blobs, life.run)
    reading = asyncio.create_task(reader.materialise(life.version))
    await blobs.reached.wait()
    yield
    assert not reading.done()
    blobs.go.set()
    with pytest.raises(IntegrityError, match="collected"):
        await reading
    assert same(await reader.materialise(life.version), life.states[life.version])


@asynccontextmanager
async def hanging_in_an_update(life: Life) -> AsyncIterator[None]:
    """One that applies a delta in place, and is stuck half-way: what it comes back with is the version it was asked for, or nothing."""
    blobs = StallingBlobs(life.blobs, "get", 3)
    reader = PolicyReader(life.bus, blobs, life.run)
    state = copy_of(life.states[life.version - 1])
    updating = asyncio.create_task(reader.advance(state, life.version - 1, life.version))
    await blobs.reached.wait()
    yield
    blobs.go.set()
    with pytest.raises(IntegrityError, match="collected"):
        await updating
    assert state == {}
    assert same(await reader.materialise(life.version), life.states[life.version])


@asynccontextmanager
async def dying_in_a_download(life: Life) -> AsyncIterator[None]:
    """One that is killed in the middle; another life of it starts from nothing."""
    blobs = StallingBlobs(life.blobs, "get", 3)
    dying = asyncio.create_task(PolicyReader(life.bus, blobs, life.run).materialise(life.version))
    await blobs.reached.wait()
    dying.cancel()
    await asyncio.wait([dying])
    yield
    assert same(await PolicyReader(life.bus, life.blobs, life.run).materialise(life.version), life.states[life.version])


@asynccontextmanager
async def falling_behind(life: Life) -> AsyncIterator[None]:
    """One that does nothing for all those versions, and then wants the newest."""
    reader, since = PolicyReader(life.bus, life.blobs, life.run), life.version
    state = await reader.materialise(since)
    yield
    assert same(await reader.advance(state, since, life.version), life.states[life.version])




WORK = ("publish", "purge", "blob put", "bytes put", "blob get", "bytes get", "blob delete", "bytes delete")


def work(counts: Counter[str]) -> dict[str, int]:
    """What is done for versions. The head, and what nothing names, are also looked for every so many seconds."""
    return {what: counts[what] for what in WORK}


@pytest.mark.parametrize("trouble", [hanging_in_a_pack, hanging_in_an_update, dying_in_a_download, falling_behind])
async def test_a_reader_in_trouble_costs_the_writer_and_collection_nothing(
    fresh_run: str, trouble: Callable[[Life], AbstractAsyncContextManager[None]]
) -> None:
    """Beside a run of the same weights without it: the same calls and bytes of the writer and of the service, the same things left."""
    async with living(f"{fresh_run}-alone") as life:
        writer_alone, service_alone = await life.publish(AFTER)
        stored_alone, collected_alone = await life.stored(), life.service.collected_versions
    async with living(fresh_run) as life, asyncio.timeout(60), trouble(life):
        writer, service = await life.publish(AFTER)
        stored = await life.stored()
        assert life.service.collected_versions == collected_alone
    assert writer == writer_alone
    assert work(service) == work(service_alone)
    assert {kind: count for kind, (count, _) in stored.items()} == {kind: count for kind, (count, _) in stored_alone.items()}


async def test_a_lease_keeps_its_version_and_what_makes_it_and_nothing_else(fresh_run: str) -> None:
    async with living(f"{fresh_run}-alone") as life:
        writer_alone, _ = await life.publish(AFTER)
        known_alone = life.reports.values["known_versions"]
    async with living(fresh_run) as life, asyncio.timeout(60):
        reader, version = PolicyReader(life.bus, life.blobs, life.run), life.version
        wanted = life.states[version]
        async with held(life.bus, reader, version, "slow") as manifest:
            writer, _ = await life.publish(AFTER)
            kept = life.reports.values["known_versions"] - known_alone
            assert 1 <= kept <= FULL_EVERY, "the version and the deltas before it, back to its full"
            assert same(await PolicyReader(life.bus, life.blobs, life.run).materialise_manifest(manifest), wanted)
        await life.publish(FULL_EVERY)
        assert life.reports.values["known_versions"] <= KEEP + 2 * FULL_EVERY
        with pytest.raises(IntegrityError, match="collected"):
            await PolicyReader(life.bus, life.blobs, life.run).materialise_manifest(manifest)
    assert writer == writer_alone


async def test_the_lease_of_a_reader_that_died_stops_nothing_after_it_has_lapsed(fresh_run: str) -> None:
    async with living(fresh_run) as life, asyncio.timeout(60):
        reader, version = PolicyReader(life.bus, life.blobs, life.run), life.version
        link = await pin(life.bus, reader, version, "died", for_s=-3600.0)
        await life.publish(AFTER)
        assert [one.owner for one in await pins(life.bus, life.run)] == ["start"]
        with pytest.raises(IntegrityError, match="collected"):
            await PolicyReader(life.bus, life.blobs, life.run).load(link)


async def test_a_reader_two_hundred_versions_behind_reads_no_more_than_one_that_is_thirty_behind(fresh_run: str) -> None:
    asked = []
    for behind in (30, 200):
        async with living(f"{fresh_run}-{behind}") as life, asyncio.timeout(60):
            bus, blobs = CountedBus(life.bus), CountedBlobs(life.blobs)
            reader, since = PolicyReader(bus, blobs, life.run), life.version
            state = copy_of(life.states[since])
            await life.publish(behind - behind % FULL_EVERY)
            assert same(await reader.advance(state, since, life.version), life.states[life.version])
            asked.append((bus.calls["last"], blobs.calls["get"], blobs.moved["get"]))
    (calls, gets, nbytes), (calls_far, gets_far, nbytes_far) = asked
    assert calls_far <= calls + 2 * FULL_EVERY
    assert gets_far <= gets
    assert nbytes_far <= 1.1 * nbytes


FOLLOWER = """
import asyncio, sys
from contextlib import aclosing
from driftline.messages.nats_bus import NatsBus
from driftline.policy_store import JetStreamBlobs, PolicyReader

async def main(url, run):
    async with await NatsBus.connect(url, name="follower") as bus:
        reader, state, at = PolicyReader(bus, JetStreamBlobs(bus, run), run), {}, -1
        async with aclosing(reader.watch()) as heads:
            async for head in heads:
                state = await reader.advance(state, at, head.version) if state else await reader.materialise(head.version)
                at = head.version
                print("followed to", at, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


async def followed(output: asyncio.StreamReader) -> int:
    """The next version it says; a log line may come between."""
    while not (line := await output.readline()).startswith(b"followed to "):
        assert line, "the follower ended"
    return int(line.split()[-1])


async def test_a_process_that_is_stopped_and_goes_on_much_later_follows_to_the_newest(nats_url: str, fresh_run: str) -> None:
    """On a real broker, its connection open all the while."""
    async with await NatsBus.connect(nats_url, name="slow-reader") as bus:
        await bus.declare(topology(fresh_run, queue_bytes=16 * MIB, blob_bytes=64 * MIB))
        life = Life(bus, JetStreamBlobs(bus, fresh_run), fresh_run, Wide(tensors=3))
        async with life.going(), asyncio.timeout(90):
            await life.publish(4 * FULL_EVERY)
            alone, _ = await life.publish(2 * FULL_EVERY)
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", FOLLOWER, nats_url, fresh_run, stdout=asyncio.subprocess.PIPE)
            assert process.stdout is not None
            try:
                assert await followed(process.stdout) == life.version
                process.send_signal(signal.SIGSTOP)
                beside, _ = await life.publish(2 * FULL_EVERY)
                assert {what: beside[what] for what in ("publish", "blob put", "last")} == {
                    what: alone[what] for what in ("publish", "blob put", "last")}
                process.send_signal(signal.SIGCONT)
                while await followed(process.stdout) != life.version:
                    pass
            finally:
                process.kill()
                await process.wait()
