"""Progress of what takes long: bars on stderr where a person looks at it, nothing at all where nobody does.

A `Meter` counts bytes from any thread and is how work in a thread hears that it is to stop: after `stop` its next count raises.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from driftline.policy_store.blobs import BlobRef, BlobStore, StoredBlob

__all__ = ["Meter", "MeteredBlobs", "Stopped", "in_thread"]

T = TypeVar("T")


class Stopped(Exception):
    """Whoever waited for this work was cancelled."""


class Meter:
    def __init__(self) -> None:
        self.total = 0
        """Bytes counted in all stages."""
        self._stopped = threading.Event()
        self._bars: Progress | None = None
        self._task: TaskID | None = None

    @contextmanager
    def stage(self, what: str, nbytes: int | None = None) -> Iterator[None]:
        """A bar for as long as the block runs, when stderr is a terminal. `nbytes`: how many there will be."""
        if not sys.stderr.isatty():
            yield
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bars:
            self._bars, self._task = bars, bars.add_task(what, total=nbytes)
            try:
                yield
            finally:
                self._bars = self._task = None

    def add(self, nbytes: int) -> None:
        if self._stopped.is_set():
            raise Stopped
        self.total += nbytes
        bars, task = self._bars, self._task
        if bars is not None and task is not None:
            bars.advance(task, nbytes)

    def stop(self) -> None:
        self._stopped.set()


async def in_thread(meter: Meter, work: Callable[[], T]) -> T:
    """`work` in a thread. When this is cancelled the thread is stopped at its next count and waited for: it writes nothing afterwards."""
    job = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        meter.stop()
        await asyncio.wait([job])
        if not job.cancelled():
            job.exception()  # retrieved: it was stopped
        raise


class MeteredBlobs:
    """A blob store whose traffic a meter counts."""

    def __init__(self, blobs: BlobStore, meter: Meter) -> None:
        self._blobs, self._meter = blobs, meter

    async def put(self, data: bytes) -> BlobRef:
        ref = await self._blobs.put(data)
        self._meter.add(len(data))
        return ref

    async def get(self, ref: BlobRef) -> bytes:
        data = await self._blobs.get(ref)
        self._meter.add(len(data))
        return data

    async def has(self, ref: BlobRef) -> bool:
        return await self._blobs.has(ref)

    async def delete(self, ref: BlobRef) -> None:
        await self._blobs.delete(ref)

    async def list(self) -> AsyncIterator[StoredBlob]:
        async for stored in self._blobs.list():
            yield stored
