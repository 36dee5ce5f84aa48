"""Patience with a blob store: every call has a deadline, and what may pass by itself is tried again, with growing pauses.

An attempt says by `StoreUnavailable` that it is worth another. Nothing else is tried again: credentials that are refused or bytes
that are damaged stay so. After the deadline the caller gets StoreUnavailable with the last reason, never a wait without end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import chain, repeat
from typing import TypeVar

import structlog

from driftline.messages.errors import StoreUnavailable

__all__ = ["DEADLINE_S", "patiently", "within"]

log = structlog.get_logger("blobs")

DEADLINE_S = 60.0
PAUSES_S = (0.1, 0.3, 1.0, 3.0, 5.0)
"""Between attempts; the last one is repeated until the deadline."""

T = TypeVar("T")


@asynccontextmanager
async def within(deadline_s: float, *, store: str, blob: str) -> AsyncIterator[None]:
    """StoreUnavailable, naming both, when the block takes longer than `deadline_s`."""
    try:
        async with asyncio.timeout(deadline_s):
            yield
    except TimeoutError as error:
        raise StoreUnavailable(f"no answer from {store} within {deadline_s:g} s", field="blob", value=blob,
                               remedy="is the store reachable from here, and not overloaded?") from error


async def patiently(attempt: Callable[[], Awaitable[T]], *, store: str, blob: str, deadline_s: float = DEADLINE_S) -> T:
    """What `attempt` returns, tried again after StoreUnavailable for at most `deadline_s`; raises what else it raises."""
    last: StoreUnavailable | None = None
    pauses = chain(PAUSES_S, repeat(PAUSES_S[-1]))
    try:
        async with asyncio.timeout(deadline_s):
            while True:
                try:
                    return await attempt()
                except StoreUnavailable as error:
                    last = error
                pause = next(pauses)
                log.warning("blob store does not answer, trying again", store=store, blob=blob, cause=last.problem, pause_s=pause)
                await asyncio.sleep(pause)
    except TimeoutError as late:
        problem = last.problem if last is not None else f"no answer from {store}"
        remedy = last.remedy if last is not None else "is the store reachable from here, and not overloaded?"
        raise StoreUnavailable(f"{problem}; given up after {deadline_s:g} s", field="blob", value=blob, remedy=remedy) from late
