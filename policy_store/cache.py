"""A cache before a blob store: what was read once is not read from the origin again while it is kept, and is never taken on trust.

Guarantees: `get` returns verified bytes or raises as the origin does; concurrent `get`s of one blob are one read of the origin, which ends when
nobody waits for it any more and not before; what is kept never exceeds `max_bytes` (the least recently used goes first); a local
copy that is damaged or gone is dropped and read again. A local store that fails costs its copies, never a read.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass

import structlog

from driftline.messages.blobs import BlobRef
from driftline.messages.errors import DriftlineError, IntegrityError
from driftline.policy_store.blobs import BlobStore, StoredBlob

__all__ = ["CacheCounts", "CachedBlobs"]

log = structlog.get_logger("policy")


@dataclass
class CacheCounts:
    """`hit_bytes` came from the local store, `missed_bytes` from the origin; a read that others joined counts once."""

    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    missed_bytes: int = 0
    damaged: int = 0
    evicted: int = 0


class _Flight:
    """One read of the origin, and how many wait for it."""

    def __init__(self, task: asyncio.Task[bytes]) -> None:
        self.task, self.waiters = task, 0


class CachedBlobs:
    """`origin` seen through `local`, which is this cache's alone and holds copies and nothing else: any of them may be deleted at any time.

    What `local` has from an earlier life is found again before the first use, so a reader that was interrupted goes on with what it had.
    """

    def __init__(self, origin: BlobStore, local: BlobStore, *, max_bytes: int) -> None:
        self.counts = CacheCounts()
        self._origin, self._local, self._max_bytes = origin, local, max_bytes
        self._kept: OrderedDict[str, BlobRef] = OrderedDict()
        self._kept_bytes = 0
        self._writing: dict[str, int] = {}
        self._flights: dict[BlobRef, _Flight] = {}
        self._seeding = asyncio.Lock()
        self._seeded = False

    @property
    def kept_bytes(self) -> int:
        return self._kept_bytes

    async def put(self, data: bytes) -> BlobRef:
        """Durable in the origin on return; a copy is kept."""
        ref = await self._origin.put(data)
        await self._keep(ref, data)
        return ref

    async def get(self, ref: BlobRef) -> bytes:
        data = await self.held(ref)
        return data if data is not None else await self._join(ref)

    async def held(self, ref: BlobRef) -> bytes | None:
        """The local copy, verified, or None; the origin is not asked."""
        await self._seed()
        try:
            data = await self._local.get(ref)
        except (DriftlineError, OSError) as error:
            if ref.digest in self._kept:
                self.counts.damaged += 1
                log.warning("local copy dropped", blob=ref.digest, cause=str(error))
                await self._drop(ref)
            return None
        self.counts.hits += 1
        self.counts.hit_bytes += len(data)
        if ref.digest in self._kept:
            self._kept.move_to_end(ref.digest)
        return data

    async def has(self, ref: BlobRef) -> bool:
        """Whether the origin has it: a copy of ours keeps nothing alive."""
        return await self._origin.has(ref)

    async def delete(self, ref: BlobRef) -> None:
        await self._drop(ref)
        await self._origin.delete(ref)

    def list(self) -> AsyncIterator[StoredBlob]:
        """What the origin has."""
        return self._origin.list()

    async def _join(self, ref: BlobRef) -> bytes:
        flight = self._flights.get(ref)
        if flight is None:
            flight = self._flights[ref] = _Flight(asyncio.create_task(self._read(ref), name=f"blob {ref.digest}"))
            flight.task.add_done_callback(lambda _: self._land(ref, flight))
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if flight.waiters == 0 and not flight.task.done():
                self._land(ref, flight)  # who asks from now on starts anew
                flight.task.cancel()
                await asyncio.wait([flight.task])

    def _land(self, ref: BlobRef, flight: _Flight) -> None:
        if self._flights.get(ref) is flight:
            del self._flights[ref]
        if flight.task.done() and not flight.task.cancelled():
            flight.task.exception()  # if everyone who waited was cancelled, nobody else looks at it

    async def _read(self, ref: BlobRef) -> bytes:
        if ref.digest in self._kept:  # it landed while we looked for the copy
            data = await self.held(ref)
            if data is not None:
                return data
        data = await self._origin.get(ref)
        self.counts.misses += 1
        self.counts.missed_bytes += len(data)
        await self._keep(ref, data)
        return data

    async def _seed(self) -> None:
        """Count what an earlier life left, the oldest first."""
        if self._seeded:
            return
        async with self._seeding:
            if self._seeded:
                return
            try:
                found = [blob async for blob in self._local.list()]
            except (DriftlineError, OSError) as error:
                log.warning("local copies not listed", cause=str(error))
                found = []
            for blob in sorted(found, key=lambda blob: blob.stored_at or 0.0):
                self._count(blob.ref)
            self._seeded = True
            await self._make_room(0)

    async def _keep(self, ref: BlobRef, data: bytes) -> None:
        await self._seed()
        if ref.digest in self._writing or not await self._make_room(ref.size):
            return
        self._writing[ref.digest] = ref.size
        try:
            stored = await self._local.put(data)
        except (DriftlineError, OSError) as error:
            log.warning("no local copy kept", blob=ref.digest, cause=str(error))
            return
        finally:
            del self._writing[ref.digest]
        if stored.digest != ref.digest:
            await self._local.delete(stored)
            raise IntegrityError(f"the origin gave bytes of digest {stored.digest}", field="blob", value=ref.digest)
        self._count(ref)

    async def _make_room(self, size: int) -> bool:
        """Whether `size` bytes more may be kept now, the oldest copies having made way."""
        if size > self._max_bytes:
            return False
        while self._kept and self._kept_bytes + sum(self._writing.values()) + size > self._max_bytes:
            self.counts.evicted += 1
            await self._drop(next(iter(self._kept.values())))
        return self._kept_bytes + sum(self._writing.values()) + size <= self._max_bytes

    def _count(self, ref: BlobRef) -> None:
        self._forget(ref.digest)
        self._kept[ref.digest] = ref
        self._kept_bytes += ref.size

    def _forget(self, digest: str) -> None:
        known = self._kept.pop(digest, None)
        self._kept_bytes -= known.size if known is not None else 0

    async def _drop(self, ref: BlobRef) -> None:
        self._forget(ref.digest)
        try:
            await self._local.delete(ref)
        except (DriftlineError, OSError) as error:
            log.warning("local copy not deleted", blob=ref.digest, cause=str(error))
