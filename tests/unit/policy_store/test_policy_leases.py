"""Leases and pins against a collector: whichever is stored first is seen by the other."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

import pytest
from policy_cases import Policy, publish_chain, same

from driftline.messages.bus import Bus
from driftline.messages.errors import IntegrityError
from driftline.messages.memory import MemoryBus
from driftline.messages.subjects import Subjects
from driftline.policy_store import MemoryBlobs, PolicyReader
from driftline.policy_store.collect import collect, plan, survey
from driftline.policy_store.pins import (
    LEASE_SLACK_S,
    Pin,
    Pins,
    condemn,
    condemned,
    held,
    pin,
    pins,
    release,
)
from driftline.policy_store.reader import VersionCollected


@pytest.fixture
async def reader(bus: Bus, fresh_run: str) -> PolicyReader:
    blobs = MemoryBlobs()
    await publish_chain(bus, blobs, fresh_run, Policy(elements=100), 6, full_every=2)
    return PolicyReader(bus, blobs, fresh_run)


async def test_a_lease_is_there_while_the_block_reads_and_gone_after_it(bus: Bus, reader: PolicyReader, fresh_run: str) -> None:
    async with held(bus, reader, 3, "joiner") as manifest:
        assert manifest.version == 3
        (lease,) = await pins(bus, fresh_run)
        assert (lease.link, lease.owner) == (manifest.link, "joiner")
        assert lease.until is not None
    assert await pins(bus, fresh_run) == ()


async def test_a_lease_is_renewed_before_it_lapses_and_given_up_on_failure(bus: Bus, reader: PolicyReader, fresh_run: str) -> None:
    subjects, ends = Subjects(fresh_run), []

    async def read_and_fail() -> None:
        history = bus.follow(subjects.stream("POLICY"), f"{subjects.root}.policy.pins")
        async with asyncio.timeout(30), aclosing(history) as changes, held(bus, reader, 3, "joiner", lease_s=0.03):  # type: ignore[type-var]
            async for stored in changes:
                assert isinstance(stored.message, Pins)
                ends.append(stored.message.pins[0].until)
                if len(ends) == 3:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await read_and_fail()
    assert ends == sorted(set(ends)), "each renewal lasts longer"
    assert await pins(bus, fresh_run) == ()


def test_a_lapsed_lease_counts_for_nothing_and_only_after_the_slack() -> None:
    lease = Pin.model_validate({"link": {"version": 1, "seal": "0" * 32}, "owner": "x", "at": 0.0, "until": 100.0})
    assert not lease.lapsed(100.0 + LEASE_SLACK_S)
    assert lease.lapsed(100.1 + LEASE_SLACK_S)
    assert not lease.model_copy(update={"until": None}).lapsed(1e12)


async def test_lapsed_leases_are_ignored_and_taken_off_by_the_collector(bus: Bus, reader: PolicyReader, fresh_run: str) -> None:
    await pin(bus, reader, 0, "dead", for_s=-LEASE_SLACK_S - 1)
    link = await pin(bus, reader, 3, "alive", for_s=60)
    assert [p.owner for p in await pins(bus, fresh_run)] == ["alive"]
    assert await condemn(bus, fresh_run, [(await reader.manifest(0)).link], [link])
    assert [p.owner for p in await pins(bus, fresh_run)] == ["alive"]


async def test_a_pin_that_comes_between_plan_and_deletion_stops_the_deletion(bus: Bus, reader: PolicyReader, fresh_run: str) -> None:
    head = await reader.head()
    assert head is not None
    chosen = plan(await survey(bus, reader), head.link, 1)
    assert [v.link.version for v in chosen.delete] == [0, 1, 2, 3]
    await pin(bus, reader, 1, "late")
    gone = await collect(bus, reader._blobs, fresh_run, chosen.delete, pinned=[])
    assert gone.refused
    assert gone.versions == gone.blobs == 0
    assert await condemned(bus, fresh_run) == ()
    fresh = PolicyReader(bus, reader._blobs, fresh_run)
    assert same(await fresh.materialise(1), await reader.materialise(1))


async def test_a_version_that_is_going_cannot_be_pinned_nor_what_is_made_from_it(bus: Bus, reader: PolicyReader, fresh_run: str) -> None:
    going = [(await reader.manifest(version)).link for version in (0, 2)]
    assert await condemn(bus, fresh_run, going, [])
    for version in (0, 1, 2, 3):
        with pytest.raises(VersionCollected):
            await pin(bus, reader, version, "late")
    assert await pins(bus, fresh_run) == ()
    await pin(bus, reader, 4, "fine")
    await release(bus, fresh_run, going)
    assert await condemned(bus, fresh_run) == ()
    await pin(bus, reader, 1, "now")


async def test_a_collector_and_many_joiners_at_once_leave_every_joiner_with_its_version_or_a_refusal(bus: Bus, reader: PolicyReader, fresh_run: str) -> None:
    """The race itself: pins and deletions interleave as they come."""
    head = await reader.head()
    assert head is not None
    kept: list[int] = []

    async def join(version: int) -> None:
        mine = PolicyReader(bus, reader._blobs, fresh_run)
        try:
            await pin(bus, mine, version, f"joiner-{version}")
        except IntegrityError:
            return
        kept.append(version)

    async def tidy() -> None:
        for _ in range(4):
            known = await survey(bus, PolicyReader(bus, reader._blobs, fresh_run))
            links = [held.link for held in await pins(bus, fresh_run)]
            await collect(bus, reader._blobs, fresh_run, plan(known, head.link, 1, links).delete, pinned=links)

    await asyncio.gather(tidy(), *(join(version) for version in (0, 1, 2, 3)))
    fresh = PolicyReader(bus, reader._blobs, fresh_run)
    for held_pin in await pins(bus, fresh_run):
        manifest = await fresh.load(held_pin.link)
        assert (await fresh.materialise_manifest(manifest)).keys() == (await reader.materialise(5)).keys()
    assert sorted(kept) == sorted(held_pin.link.version for held_pin in await pins(bus, fresh_run))


async def test_joiners_that_start_together_all_get_their_lease(bus: Bus, reader: PolicyReader, fresh_run: str) -> None:
    async def join(n: int) -> None:
        async with held(bus, PolicyReader(bus, reader._blobs, fresh_run), 4, f"engine-{n}"):
            pass

    async with asyncio.timeout(60):
        await asyncio.gather(*(join(n) for n in range(24)))
    assert await pins(bus, fresh_run) == ()


async def test_a_lease_outlives_an_outage_shorter_than_itself(quick_bus: MemoryBus, quick_blobs: MemoryBlobs, fresh_run: str) -> None:
    await publish_chain(quick_bus, quick_blobs, fresh_run, Policy(elements=100), 2)
    reader = PolicyReader(quick_bus, quick_blobs, fresh_run)
    async with held(quick_bus, reader, 1, "joiner", lease_s=0.03):
        quick_bus.broker.down = True
        await asyncio.sleep(0.05)  # a renewal falls into it
        quick_bus.broker.down = False
        (lease,) = await pins(quick_bus, fresh_run)
        assert not lease.lapsed(time.time())
        quick_bus.broker.down = True
    quick_bus.broker.down = False
    assert len(await pins(quick_bus, fresh_run)) == 1, "left to lapse: the block was not failed for it"
