"""A thousand versions: the thousandth costs what the hundredth did, and what is stored does not grow with their number."""

from __future__ import annotations

from collections import Counter

from policy_cases import same
from policy_counting import CountedBus
from policy_life import FULL_EVERY, KEEP, Life

from driftline.messages.memory import MemoryBus
from driftline.messages.nats_bus import NatsBus
from driftline.messages.subjects import Subjects, topology
from driftline.policy_store import JetStreamBlobs, MemoryBlobs, PolicyReader

MIB = 1024 * 1024


def assert_constant(early: Counter[str], late: Counter[str], slack: float) -> None:
    """Nothing is asked for more often, or in more bytes, by more than `slack` of what it was."""
    for what in early | late:
        assert late[what] <= early[what] * (1 + slack) + 2, f"{what}: {early[what]} early, {late[what]} late"


def assert_bounded(early: dict[str, tuple[int, int]], late: dict[str, tuple[int, int]]) -> None:
    for kind in early | late:
        count, nbytes = early.get(kind, (0, 0))
        later_count, later_nbytes = late.get(kind, (0, 0))
        assert later_count <= count + FULL_EVERY, f"{kind}: {count} early, {later_count} late"
        assert later_nbytes <= 1.25 * nbytes + 4096, f"{kind}: {nbytes} bytes early, {later_nbytes} late"


async def kept_and_whole(life: Life) -> None:
    """Each version that must be kept is read back as it was published."""
    reader = PolicyReader(life.bus, life.blobs, life.run)
    for version in range(life.version - KEEP + 1, life.version + 1):
        assert same(await reader.materialise(version), life.states[version])


async def test_the_thousandth_version_costs_what_the_hundredth_did_and_disk_is_bounded(fresh_run: str) -> None:
    """Compared are two stretches of 256 versions, so that what happens every so many versions happens as often in both."""
    async with MemoryBus() as bus:
        await bus.declare(topology(fresh_run, queue_bytes=16 * MIB, blob_bytes=64 * MIB))
        life = Life(bus, MemoryBlobs(), fresh_run)
        async with life.going():
            await life.publish(128)
            writer_early, service_early = await life.publish(256)
            stored_early = await life.stored()
            await life.publish(384)
            writer_late, service_late = await life.publish(256)
        assert life.version == 1023
        assert writer_early["publish"] == writer_late["publish"] == 2 * 256, "a manifest and a head for each version"
        assert_constant(writer_early, writer_late, 0.02)
        assert_constant(service_early, service_late, 0.05)
        assert_bounded(stored_early, await life.stored())
        assert life.reports.values["known_versions"] <= KEEP + 2 * FULL_EVERY + 2
        await kept_and_whole(life)


async def test_on_a_real_broker_nothing_in_the_streams_grows_with_the_number_of_versions(nats_url: str, fresh_run: str) -> None:
    async with await NatsBus.connect(nats_url, name="many-versions") as bus:
        await bus.declare(topology(fresh_run, queue_bytes=16 * MIB, blob_bytes=64 * MIB))
        life = Life(bus, JetStreamBlobs(bus, fresh_run), fresh_run)
        async with life.going():
            await life.publish(32)
            writer_early, service_early = await life.publish(48)
            stored_early = await life.stored()
            await life.publish(24)
            writer_late, service_late = await life.publish(48)
        assert_constant(writer_early, writer_late, 0.02)
        assert_constant(service_early, service_late, 0.1)
        assert_bounded(stored_early, await life.stored())
        await kept_and_whole(life)


async def test_who_comes_after_many_versions_reads_as_little_as_who_came_early(fresh_run: str) -> None:
    """The wake-ups of a reader are the heads in the stream: a thousand of them would be read again by every engine that starts."""
    async with MemoryBus() as bus:
        await bus.declare(topology(fresh_run, queue_bytes=16 * MIB, blob_bytes=64 * MIB))
        life = Life(bus, MemoryBlobs(), fresh_run)
        counts = []
        async with life.going():
            for count in (96, 320):
                await life.publish(count)
                mine = CountedBus(bus)
                async for head in PolicyReader(mine, life.blobs, fresh_run).watch():
                    assert head.version == life.version
                    break
                async for stored in mine.follow(Subjects(fresh_run).stream("POLICY"), f"{Subjects(fresh_run).root}.policy.>"):
                    if stored.subject == Subjects(fresh_run).head and stored.message.version == life.version:  # type: ignore[attr-defined]
                        break
                counts.append(mine.calls)
        assert_constant(counts[0], counts[1], 0.1)
