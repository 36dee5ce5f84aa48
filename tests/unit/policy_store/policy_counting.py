"""A bus and a blob store that count what is asked of them, so that a test can say "constant" without a clock."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

from driftline.messages.bus import Bus, PubAck, Stored
from driftline.messages.dead_letters import Raw
from driftline.policy_store import BlobRef, BlobStore


class CountedBus:
    """One caller's view of a bus: `calls` by method, `followed` messages among them, and `sent` bytes of blob chunks."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.calls: Counter[str] = Counter()
        self.sent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def publish(self, subject: str, message: Any, *, id: str, expect_last: int | None = None) -> PubAck:
        self.calls["publish"] += 1
        return await self._bus.publish(subject, message, id=id, expect_last=expect_last)

    async def publish_bytes(self, subject: str, data: bytes, *, id: str) -> PubAck:
        ack = await self._bus.publish_bytes(subject, data, id=id)
        self.calls["publish_bytes"] += 1
        self.sent += len(data)
        return ack

    async def get_bytes(self, stream: str, subject: str) -> bytes | None:
        self.calls["get_bytes"] += 1
        return await self._bus.get_bytes(stream, subject)

    async def last(self, stream: str, subject: str) -> Stored | None:
        self.calls["last"] += 1
        return await self._bus.last(stream, subject)

    async def read(self, stream: str, subject: str, *, start: int = 1, limit: int = 1000) -> list[Raw]:
        found = await self._bus.read(stream, subject, start=start, limit=limit)
        self.calls["read"] += 1 + len(found)
        return found

    async def subjects(self, stream: str, filter: str) -> Mapping[str, int]:
        self.calls["subjects"] += 1
        return await self._bus.subjects(stream, filter)

    async def purge(self, stream: str, subject: str) -> None:
        self.calls["purge"] += 1
        await self._bus.purge(stream, subject)

    async def follow(self, stream: str, subject: str, *, start: int = 1) -> AsyncIterator[Stored]:
        async for stored in self._bus.follow(stream, subject, start=start):
            self.calls["followed"] += 1
            yield stored


class CountedBlobs:
    """`calls` by method and `moved` bytes by method; `asked` names every digest that was asked for, in order."""

    def __init__(self, blobs: BlobStore) -> None:
        self.inner = blobs
        self.calls: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()
        self.asked: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def put(self, data: bytes) -> BlobRef:
        ref = await self.inner.put(data)
        self._count("put", ref)
        return ref

    async def get(self, ref: BlobRef) -> bytes:
        self._count("get", ref)
        return await self.inner.get(ref)

    async def has(self, ref: BlobRef) -> bool:
        self._count("has", ref)
        return await self.inner.has(ref)

    async def delete(self, ref: BlobRef) -> None:
        self._count("delete", ref)
        await self.inner.delete(ref)

    def _count(self, what: str, ref: BlobRef) -> None:
        self.calls[what] += 1
        self.moved[what] += ref.size
        self.asked.append((what, ref.digest))


class StallingBlobs(CountedBlobs):
    """Call number `at` (from 1) of `what` sets `reached`; it and all later ones wait for `go`: for ever, unless the test says so."""

    def __init__(self, blobs: BlobStore, what: str, at: int) -> None:
        super().__init__(blobs)
        self._what, self._at = what, at
        self.stalled = 0
        self.reached, self.go = asyncio.Event(), asyncio.Event()

    async def put(self, data: bytes) -> BlobRef:
        await self._stall("put")
        return await super().put(data)

    async def get(self, ref: BlobRef) -> bytes:
        await self._stall("get")
        return await super().get(ref)

    async def _stall(self, what: str) -> None:
        if what != self._what:
            return
        self._at -= 1
        if self._at == 0:
            self.reached.set()
        if self._at <= 0:
            self.stalled += not self.go.is_set()
            await self.go.wait()
