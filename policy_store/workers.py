"""Workers: the few threads where numpy and zstd run, both of which release the interpreter lock, off the event loop.

A `map` that returns, fails or is cancelled has no thread left at work: buffers a caller handed in are never written to
afterwards. `bounded` does the same for coroutines; both raise the first failure as it is, not in a group.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

__all__ = ["Workers", "bounded", "shared_workers"]

T = TypeVar("T")
R = TypeVar("R")


class Workers:
    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or min(8, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="policy")

    async def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """`function` of each item, in order."""
        futures: list[Future[R]] = [self._pool.submit(function, item) for item in items]
        try:
            return list(await asyncio.gather(*(asyncio.wrap_future(future) for future in futures)))
        except BaseException:  # a cancellation too: it passes on once the threads are quiet
            for future in futures:
                future.cancel()
            await asyncio.shield(asyncio.to_thread(wait, futures))
            raise

    async def run(self, function: Callable[[T], R], item: T) -> R:
        return (await self.map(function, [item]))[0]

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


@cache
def shared_workers() -> Workers:
    """One pool per process: readers and writers in one process share the cores, not multiply them."""
    return Workers()


async def bounded(function: Callable[[T], Awaitable[R]], items: Iterable[T], limit: int) -> list[R]:
    """`function` of each item, at most `limit` at once, in order; the first failure cancels the rest and is raised."""
    slots = asyncio.Semaphore(limit)

    async def one(item: T) -> R:
        async with slots:
            return await function(item)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(item)) for item in items]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return [task.result() for task in tasks]
