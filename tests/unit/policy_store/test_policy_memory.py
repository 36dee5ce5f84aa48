"""What is held beside the weights is bounded by what is in flight, however large the policy is and however slow the store."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from policy_counting import StallingBlobs

from driftline.messages.memory import MemoryBus
from driftline.messages.types import Message
from driftline.policy_store import (
    BlobRef,
    HostTensor,
    MemoryBlobs,
    PolicyReader,
    PolicyWriter,
    applying,
    packing,
)
from driftline.policy_store.tensor import Layout
from driftline.policy_store.workers import shared_workers

TENSOR = 4096
TENSORS = 400
ROOM = 16 * TENSOR
PACK = 4 * TENSOR
LINGERING = shared_workers().threads
"""A thread lets go of what it worked on a moment after the result is known."""

STALL_S = 0.3
"""How long something that must not go on is watched. Too short a time can only hide a fault, never make one."""

LAYOUTS = {f"layers.{number:03d}": Layout("bfloat16", (TENSOR // 2,)) for number in range(TENSORS)}


@pytest.fixture(autouse=True)
def _small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "ROOM_BYTES", ROOM)
    monkeypatch.setattr(packing, "PACK_BYTES", PACK)


class Made:
    """Tensors made when their turn comes, of bytes that do not compress; knows which of them anyone still has."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(5)
        self._alive: list[weakref.ref[np.ndarray]] = []
        self.most_alive = 0
        self.count = 0

    def __iter__(self) -> Iterator[tuple[str, HostTensor]]:
        for name, layout in LAYOUTS.items():
            data = self._rng.integers(0, 256, layout.nbytes, np.uint8)
            self._alive = [*(one for one in self._alive if one() is not None), weakref.ref(data)]
            self.count += 1
            self.most_alive = max(self.most_alive, len(self._alive))
            yield name, HostTensor(layout.dtype, layout.shape, data)
            del data


async def hand_in(writer: PolicyWriter, version: int, made: Made) -> Message:
    async with writer.draft(LAYOUTS, version=version, learner_step=version) as draft:
        for name, tensor in made:
            await draft.put(name, tensor)
            del tensor
        return await draft.commit()


async def stalled(task: asyncio.Task[object], blobs: StallingBlobs) -> None:
    """The task has come to the store, and does not get by it."""
    reached = asyncio.create_task(blobs.reached.wait())
    await asyncio.wait([task, reached], return_when=asyncio.FIRST_COMPLETED, timeout=30)
    if not reached.done():
        reached.cancel()
        task.cancel()
        await task
    await asyncio.wait([task], timeout=STALL_S)
    assert not task.done()


def most_accepted(encodings: int) -> int:
    """Bytes: waiting, being encoded, and for each encoding packs on their way and one that waits to be."""
    return 2 * ROOM + encodings * (packing.PUTS_IN_FLIGHT + 1) * (PACK + TENSOR)


@pytest.mark.parametrize("version", [0, 1])
async def test_a_store_that_takes_nothing_makes_the_draft_wait_after_a_few_packs(
    quick_bus: MemoryBus, fresh_run: str, version: int
) -> None:
    """Version 0 has a full, version 1 a delta and, being due, a full."""
    inner = MemoryBlobs()
    writer = PolicyWriter(quick_bus, inner, fresh_run, 1)
    await writer.resume()
    for earlier in range(version):
        await hand_in(writer, earlier, Made())
    writer._blobs = blobs = StallingBlobs(inner, "put", 1)
    made = Made()
    handing = asyncio.create_task(hand_in(writer, version, made))
    await stalled(handing, blobs)
    bound = most_accepted(1 + version)
    assert made.count * TENSOR <= bound + TENSOR, "and the one that is being put"
    assert made.count < TENSORS / 2, "the bound is far below the whole"
    assert blobs.stalled <= (1 + version) * packing.PUTS_IN_FLIGHT

    blobs.go.set()
    async with asyncio.timeout(60):
        await handing
    assert made.count == TENSORS
    most = 2 * ROOM + (2 + LINGERING) * TENSOR
    assert made.most_alive * TENSOR <= most, "what waits, what is encoded, the one being put and the one being made"


class Whole(bytearray):
    """Bytes of a pack that a weak reference can watch."""


class WatchedBlobs(MemoryBlobs):
    """Knows how many packs that it gave out are still held by anyone."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: list[weakref.ref[Whole]] = []
        self.most_alive = self.given = 0

    async def get(self, ref: BlobRef) -> bytes:
        data = Whole(await super().get(ref))
        self.given += 1
        self._alive = [one for one in self._alive if one() is not None] + [weakref.ref(data)]
        self.most_alive = max(self.most_alive, len(self._alive))
        return data  # type: ignore[return-value]


async def test_a_reader_asks_for_a_few_packs_and_for_more_only_when_those_are_applied(quick_bus: MemoryBus, fresh_run: str) -> None:
    inner = WatchedBlobs()
    writer = PolicyWriter(quick_bus, inner, fresh_run, 1)
    await writer.resume()
    for version in (0, 1):
        await hand_in(writer, version, Made())
    blobs = StallingBlobs(inner, "get", 1)
    reading = asyncio.create_task(PolicyReader(quick_bus, blobs, fresh_run).materialise(1))
    await stalled(reading, blobs)
    assert blobs.stalled == applying.PACKS_IN_FLIGHT
    blobs.go.set()
    async with asyncio.timeout(60):
        await reading
    assert inner.given >= TENSORS * TENSOR // (PACK + TENSOR)
    assert inner.most_alive <= applying.PACKS_IN_FLIGHT + 1 + LINGERING, "and one whose last view is just going"
