"""Blobs that are damaged, and leases that are lost."""

from __future__ import annotations

import asyncio
import os

import pytest
from messages_samples import group, note, small_topology

from driftline.messages import (
    BlobRef,
    BrokerUnavailable,
    Bus,
    IntegrityError,
    LeaseLost,
    Leases,
    MemoryBroker,
    MemoryBus,
    Subjects,
    delete_blob,
    get_blob,
    has_blob,
    lease,
    put_blob,
)
from driftline.messages.blobs import CHUNK_BYTES


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES + 7])
async def test_a_blob_comes_back_exactly(bus: Bus, fresh_run: str, size: int) -> None:
    await bus.declare(small_topology(fresh_run))
    data = os.urandom(size)
    ref = await put_blob(bus, fresh_run, memoryview(data))
    assert ref.size == size
    assert ref.chunks == -(-size // CHUNK_BYTES)
    assert await get_blob(bus, fresh_run, ref) == data
    assert await has_blob(bus, fresh_run, ref)


async def test_a_blob_deleted_and_put_again_is_there(bus: Bus, fresh_run: str) -> None:
    """Within the duplicate window the broker remembers the ids of chunks it no longer has."""
    await bus.declare(small_topology(fresh_run))
    data = os.urandom(3 * CHUNK_BYTES)
    ref = await put_blob(bus, fresh_run, data)
    await delete_blob(bus, fresh_run, ref)
    assert not await has_blob(bus, fresh_run, ref)
    assert await put_blob(bus, fresh_run, data) == ref
    assert await get_blob(bus, fresh_run, ref) == data


async def test_putting_a_blob_twice_stores_it_once(bus: Bus, fresh_run: str) -> None:
    made = small_topology(fresh_run)
    await bus.declare(made)
    data = os.urandom(2 * CHUNK_BYTES)
    assert await put_blob(bus, fresh_run, data) == await put_blob(bus, fresh_run, data)
    chunks = await bus.read(made.stream("BLOB"), f"{Subjects(fresh_run).root}.blob.>")  # type: ignore[attr-defined]
    assert len(chunks) == 2


async def test_a_missing_chunk_is_named(bus: Bus, fresh_run: str) -> None:
    made = small_topology(fresh_run)
    await bus.declare(made)
    ref = await put_blob(bus, fresh_run, os.urandom(3 * CHUNK_BYTES))
    await bus.purge(made.stream("BLOB"), Subjects(fresh_run).chunk("blob", ref.digest, 1))
    with pytest.raises(IntegrityError, match="chunk 1 of 3 is missing"):
        await get_blob(bus, fresh_run, ref)
    assert not await has_blob(bus, fresh_run, ref)


async def test_other_bytes_under_the_digest_are_refused(memory_bus: MemoryBus) -> None:
    await memory_bus.declare(small_topology("r"))
    ref = await put_blob(memory_bus, "r", b"a" * 100)
    await memory_bus.publish_bytes(Subjects("r").chunk("blob", ref.digest, 0), b"b" * 100, id="forged")
    with pytest.raises(IntegrityError, match="another digest"):
        await get_blob(memory_bus, "r", ref)


@pytest.mark.parametrize("ref", [BlobRef("0" * 32, 10, 2), BlobRef("0" * 32, -1, 0), BlobRef("0" * 32, 1 << 60, 1 << 41)])
async def test_a_reference_that_cannot_be_is_refused_before_memory_is_taken(memory_bus: MemoryBus, ref: BlobRef) -> None:
    with pytest.raises(IntegrityError, match="disagree"):
        await get_blob(memory_bus, "r", ref)


async def test_an_outage_during_a_put_is_one_plain_error() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    await bus.declare(small_topology("r"))
    broker.down = True
    with pytest.raises(BrokerUnavailable):
        await put_blob(bus, "r", os.urandom(4 * CHUNK_BYTES))


async def test_a_lost_lease_stops_the_work() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    made = small_topology("r", ack_wait_s=0.15)
    await bus.declare(made)
    await bus.publish(f"{Subjects('r').root}.work.a", group("r"), id="a")
    [delivery] = await bus.pull(made.consumers[0], batch=1, timeout_s=1)

    async def work() -> None:
        async with lease(delivery):
            broker.down = True
            await asyncio.Event().wait()

    with pytest.raises(LeaseLost):
        await work()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_cancelled_body_stays_cancelled_and_its_own_error_passes() -> None:
    bus = MemoryBus()
    made = small_topology("r")
    await bus.declare(made)
    await bus.publish(f"{Subjects('r').root}.work.a", group("r"), id="a")
    [delivery] = await bus.pull(made.consumers[0], batch=1, timeout_s=1)

    async def work() -> None:
        async with lease(delivery):
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(ZeroDivisionError):
        async with lease(delivery):
            raise ZeroDivisionError


async def test_many_leases_are_kept_by_one_task_until_discarded(bus: Bus, fresh_run: str) -> None:
    made = small_topology(fresh_run, ack_wait_s=0.6)
    await bus.declare(made)
    root = Subjects(fresh_run).root
    for i in range(20):
        await bus.publish(f"{root}.work.a", note(fresh_run, str(i)), id=str(i))
    deliveries = await bus.pull(made.consumers[0], batch=20, timeout_s=5)
    assert len(deliveries) == 20
    async with Leases() as held:
        for delivery in deliveries:
            held.add(delivery)
        assert await bus.pull(made.consumers[0], batch=20, timeout_s=1.5) == []
        for delivery in deliveries[:5]:
            held.discard(delivery)
            assert delivery not in held
        again = [await bus.pull(made.consumers[0], batch=1, timeout_s=5) for _ in range(5)]
        assert all(d.deliveries == 2 for [d] in again)
        assert len(held) == 15
        assert held.lost == []


async def test_leases_that_are_lost_leave_the_set() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    made = small_topology("r", ack_wait_s=0.1)
    await bus.declare(made)
    await bus.publish(f"{Subjects('r').root}.work.a", group("r"), id="a")
    [delivery] = await bus.pull(made.consumers[0], batch=1, timeout_s=1)
    async with asyncio.timeout(5), Leases() as held:
        held.add(delivery)
        broker.down = True
        assert await held.take_lost() == [delivery]
        assert len(held) == 0
