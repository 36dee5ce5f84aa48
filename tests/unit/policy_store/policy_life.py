"""A run of many versions: a writer and a policy-store service at work, what each asks of the bus and the blobs counted apart."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from policy_cases import Policy
from policy_counting import CountedBlobs, CountedBus

from driftline.messages.bus import Bus
from driftline.messages.subjects import Subjects
from driftline.policy_store import BlobStore, MemoryBlobs, PolicyWriter, State
from driftline.services.policy_store.service import PolicyStoreService

FULL_EVERY = 8
KEEP = 12


class Reports:
    """Says when the service is through with a version."""

    def __init__(self) -> None:
        self.values: Mapping[str, float] = {"version": -1}
        self._changed = asyncio.Condition()

    async def report(self, values: Mapping[str, float], *, step: int = -1) -> None:
        async with self._changed:
            self.values = values
            self._changed.notify_all()

    async def until(self, version: int) -> None:
        async with asyncio.timeout(30), self._changed:
            await self._changed.wait_for(lambda: self.values["version"] >= version)


@dataclass
class Life:
    """A run of many versions, its writer and its service counted apart."""

    bus: Bus
    blobs: BlobStore
    run: str
    policy: Policy = field(default_factory=lambda: Policy(elements=400))
    states: dict[int, State] = field(default_factory=dict)
    version: int = -1

    def __post_init__(self) -> None:
        self.writer_bus, self.writer_blobs = CountedBus(self.bus), CountedBlobs(self.blobs)
        self.service_bus, self.service_blobs = CountedBus(self.bus), CountedBlobs(self.blobs)
        self.reports = Reports()
        self.writer = PolicyWriter(self.writer_bus, self.writer_blobs, self.run, FULL_EVERY, full_share=100.0)
        self.service = PolicyStoreService(self.service_bus, self.service_blobs, self.run, keep_versions=KEEP, reporter=self.reports)

    @asynccontextmanager
    async def going(self) -> AsyncIterator[None]:
        await self.writer.resume()
        task = asyncio.create_task(self.service.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def publish(self, count: int) -> tuple[Counter[str], Counter[str]]:
        """What `count` versions ask of the bus and the blobs: by the writer, by the service."""
        before = self._counts()
        for _ in range(count):
            self.version += 1
            state = self.policy.step(0.05)
            await self.writer.publish(state, version=self.version, learner_step=self.version, consumed=[f"g{self.version}"])
            self.states[self.version] = state
            self.states.pop(self.version - 4 * KEEP, None)
            await self.reports.until(self.version)  # a service that skips a version does less
        writer, service = (now - then for now, then in zip(self._counts(), before, strict=True))
        return writer, service

    def _counts(self) -> tuple[Counter[str], Counter[str]]:
        return (total(self.writer_bus, self.writer_blobs), total(self.service_bus, self.service_blobs))

    async def stored(self) -> dict[str, tuple[int, int]]:
        """Messages and bytes in the policy and blob streams, by kind."""
        subjects = Subjects(self.run)
        found: Counter[str] = Counter()
        nbytes: Counter[str] = Counter()
        for plane, pattern in (("POLICY", "policy.>"), ("BLOB", "blob.>")):
            for raw in await self.bus.read(subjects.stream(plane), f"{subjects.root}.{pattern}", limit=10_000):
                kind = ".".join(raw.subject.removeprefix(f"{subjects.root}.").split(".")[:2 if plane == "POLICY" else 1])
                found[kind] += 1
                nbytes[kind] += len(raw.data)
        if isinstance(self.blobs, MemoryBlobs):
            found["blob"], nbytes["blob"] = len(self.blobs.blobs), sum(map(len, self.blobs.blobs.values()))
        return {kind: (found[kind], nbytes[kind]) for kind in found}


def total(bus: CountedBus, blobs: CountedBlobs) -> Counter[str]:
    return bus.calls + Counter({f"blob {name}": count for name, count in blobs.calls.items()}) + Counter(
        {f"bytes {name}": count for name, count in blobs.moved.items()})
