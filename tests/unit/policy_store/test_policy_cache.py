"""The cache before a blob store: one read for many, never more than its bound, nothing unverified."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from relay_cases import CountingBlobs, ref_of, until

from driftline.messages.blobs import BlobRef
from driftline.messages.errors import BrokerUnavailable, IntegrityError
from driftline.policy_store import BlobStore, DirectoryBlobs, MemoryBlobs
from driftline.policy_store.cache import CachedBlobs

KIB = 1024


def cached(origin: BlobStore, local: BlobStore | None = None, max_bytes: int = 100 * KIB) -> CachedBlobs:
    return CachedBlobs(origin, local or MemoryBlobs(), max_bytes=max_bytes)


async def test_a_second_read_does_not_reach_the_origin() -> None:
    origin = CountingBlobs()
    ref = await origin.put(b"pack" * 100)
    blobs = cached(origin)
    assert [await blobs.get(ref) for _ in range(3)] == [b"pack" * 100] * 3
    assert (origin.reads[ref.digest], blobs.counts.hits, blobs.counts.misses) == (1, 2, 1)
    assert (blobs.counts.hit_bytes, blobs.counts.missed_bytes, blobs.kept_bytes) == (800, 400, 400)


async def test_what_is_put_is_in_the_origin_and_kept() -> None:
    origin = CountingBlobs()
    blobs = cached(origin)
    ref = await blobs.put(b"mine")
    assert origin.blobs[ref.digest] == b"mine"
    assert await blobs.get(ref) == b"mine"
    assert not origin.reads


async def test_readers_of_one_blob_share_one_read_of_the_origin() -> None:
    origin = CountingBlobs()
    ref = await origin.put(b"shared")
    origin.open.clear()
    blobs = cached(origin)
    readers = [asyncio.create_task(blobs.get(ref)) for _ in range(20)]
    await until(lambda: origin.reads[ref.digest] > 0, "nobody asked the origin")
    origin.open.set()
    assert await asyncio.gather(*readers) == [b"shared"] * 20
    assert origin.reads[ref.digest] == 1


async def test_a_cancelled_reader_takes_nothing_from_the_others() -> None:
    origin = CountingBlobs()
    ref = await origin.put(b"shared")
    origin.open.clear()
    blobs = cached(origin)
    first, second = (asyncio.create_task(blobs.get(ref)) for _ in range(2))
    await until(lambda: origin.reads[ref.digest] > 0, "nobody asked the origin")
    first.cancel()
    await asyncio.wait([first])
    origin.open.set()
    assert await second == b"shared"
    assert first.cancelled()
    assert origin.reads[ref.digest] == 1


async def test_a_read_that_nobody_waits_for_ends_and_the_next_one_starts_anew() -> None:
    ended = asyncio.Event()

    class Slow(CountingBlobs):
        async def get(self, ref: BlobRef) -> bytes:
            try:
                return await super().get(ref)
            except asyncio.CancelledError:
                ended.set()
                raise

    origin = Slow()
    ref = await origin.put(b"late")
    origin.open.clear()
    blobs = cached(origin)
    readers = [asyncio.create_task(blobs.get(ref)) for _ in range(3)]
    await until(lambda: origin.reads[ref.digest] > 0, "nobody asked the origin")
    for reader in readers:
        reader.cancel()
    await asyncio.wait(readers)
    assert ended.is_set()
    origin.open.set()
    assert await blobs.get(ref) == b"late"


async def test_a_failure_reaches_everyone_who_waited_and_is_not_remembered() -> None:
    origin = CountingBlobs()
    ref = await origin.put(b"back soon")
    origin.open.clear()
    origin.down = True
    blobs = cached(origin)
    readers = [asyncio.create_task(blobs.get(ref)) for _ in range(3)]
    await until(lambda: origin.reads[ref.digest] > 0, "nobody asked the origin")
    origin.open.set()
    assert all(isinstance(found, BrokerUnavailable) for found in await asyncio.gather(*readers, return_exceptions=True))
    origin.down = False
    assert await blobs.get(ref) == b"back soon"


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"\0" + data[1:], lambda data: b""])
async def test_a_damaged_copy_is_dropped_and_read_again(damage: object) -> None:
    origin, local = CountingBlobs(), MemoryBlobs()
    ref = await origin.put(b"good bytes")
    blobs = cached(origin, local)
    await blobs.get(ref)
    local.blobs[ref.digest] = damage(local.blobs[ref.digest])  # type: ignore[operator]
    assert await blobs.get(ref) == b"good bytes"
    assert local.blobs[ref.digest] == b"good bytes"
    assert (origin.reads[ref.digest], blobs.counts.damaged) == (2, 1)


async def test_an_origin_that_gives_other_bytes_is_not_believed() -> None:
    class Liar(CountingBlobs):
        async def get(self, ref: BlobRef) -> bytes:
            return b"no such pack"

    local = MemoryBlobs()
    with pytest.raises(IntegrityError):
        await cached(Liar(), local).get(ref_of(b"pack"))
    assert not local.blobs


async def test_the_least_recently_used_goes_first() -> None:
    origin, local = CountingBlobs(), MemoryBlobs()
    a, b, c = [await origin.put(bytes([i]) * 40) for i in range(3)]
    blobs = cached(origin, local, max_bytes=100)
    await blobs.get(a)
    await blobs.get(b)
    await blobs.get(a)
    await blobs.get(c)
    assert set(local.blobs) == {a.digest, c.digest}
    assert (blobs.kept_bytes, blobs.counts.evicted) == (80, 1)


async def test_a_blob_larger_than_the_cache_passes_through() -> None:
    origin, local = CountingBlobs(), MemoryBlobs()
    small, large = await origin.put(b"small"), await origin.put(bytes(200))
    blobs = cached(origin, local, max_bytes=100)
    await blobs.get(small)
    assert await blobs.get(large) == bytes(200)
    assert set(local.blobs) == {small.digest}


async def test_a_full_disk_costs_the_copy_and_not_the_read() -> None:
    class Full(MemoryBlobs):
        async def put(self, data: bytes) -> BlobRef:
            raise OSError(28, "No space left on device")

    origin = CountingBlobs()
    ref = await origin.put(b"pack")
    blobs = cached(origin, Full())
    assert [await blobs.get(ref), await blobs.get(ref)] == [b"pack"] * 2
    assert blobs.kept_bytes == 0


async def test_an_interrupted_reader_goes_on_with_what_an_earlier_life_left(tmp_path: Path) -> None:
    origin = CountingBlobs()
    refs = [await origin.put(bytes([i]) * 50) for i in range(4)]
    before = cached(origin, DirectoryBlobs(tmp_path))
    for ref in refs[:2]:
        await before.get(ref)
    after = cached(origin, DirectoryBlobs(tmp_path), max_bytes=120)
    for ref in refs[:2]:
        await after.get(ref)
    assert sum(origin.reads.values()) == 2
    for ref in refs[2:]:
        await after.get(ref)
    assert after.kept_bytes == 100
    assert [blob.size async for blob in DirectoryBlobs(tmp_path).list()] == [50, 50]


async def test_whether_a_blob_is_stored_is_the_origin_s_to_say() -> None:
    origin = CountingBlobs()
    blobs = cached(origin)
    ref = await blobs.put(b"collected")
    await origin.delete(ref)
    assert not await blobs.has(ref)
    assert [blob async for blob in blobs.list()] == []


async def test_deleting_forgets_the_copy_too() -> None:
    origin, local = CountingBlobs(), MemoryBlobs()
    blobs = cached(origin, local)
    ref = await blobs.put(b"gone")
    await blobs.delete(ref)
    assert (origin.blobs, local.blobs, blobs.kept_bytes) == ({}, {}, 0)


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["get", "put", "damage", "delete"])), max_size=60), st.integers(0, 300))
@settings(max_examples=60, deadline=None)
def test_whatever_happens_bytes_are_right_and_the_bound_holds(steps: list[tuple[int, str]], bound: int) -> None:
    async def play() -> None:
        contents = [bytes([i]) * (10 * i + 1) for i in range(10)]
        origin, local = MemoryBlobs(), MemoryBlobs()
        for content in contents:
            await origin.put(content)
        blobs = CachedBlobs(origin, local, max_bytes=bound)
        for which, step in steps:
            content = contents[which]
            ref = ref_of(content)
            match step:
                case "get":
                    assert await blobs.get(ref) == content
                case "put":
                    assert (await blobs.put(content)).digest == ref.digest
                case "damage" if ref.digest in local.blobs:
                    local.blobs[ref.digest] = b"x" * ref.size
                case "delete":
                    await blobs.delete(ref)
                    await origin.put(content)
            assert blobs.kept_bytes == sum(map(len, local.blobs.values())) <= bound

    asyncio.run(play())


async def test_many_reads_at_once_stay_within_the_bound() -> None:
    origin, most = CountingBlobs(), 0
    refs = [await origin.put(bytes([i]) * 30) for i in range(20)]

    class Watched(MemoryBlobs):
        async def put(self, data: bytes) -> BlobRef:
            nonlocal most
            await asyncio.sleep(0)
            ref = await super().put(data)
            most = max(most, sum(map(len, self.blobs.values())))
            return ref

    blobs = cached(origin, Watched(), max_bytes=100)
    found = await asyncio.gather(*(blobs.get(ref) for ref in refs for _ in range(2)))
    assert found == [bytes([i]) * 30 for i in range(20) for _ in range(2)]
    assert 0 < most <= 100
