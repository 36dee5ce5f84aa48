"""Groups that have ended, from the ledger, and the gradings that are given up because of it.

Guarantees: once a group's outcome has been seen, a grading of it that runs is cancelled at once, whatever its reward does, and none is begun.
The last `REMEMBERED` groups are kept: a member that comes later than that is graded, and ignored by the learner.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable
from typing import TypeVar

__all__ = ["EndedGroups", "GroupEnded"]

REMEMBERED = 65536
T = TypeVar("T")


class GroupEnded(Exception):
    """The group of this member has its outcome: nobody waits for the reward."""


class EndedGroups:
    def __init__(self) -> None:
        self._ended: dict[str, None] = {}
        self._running: defaultdict[str, set[asyncio.Future[object]]] = defaultdict(set)

    def __contains__(self, group: str) -> bool:
        return group in self._ended

    def add(self, group: str) -> None:
        self._ended[group] = None
        if len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]
        for grading in self._running.get(group, ()):
            grading.cancel()

    async def unless_ended(self, group: str, grading: Awaitable[T]) -> T:
        """What `grading` returns. Raises GroupEnded as soon as the group has ended; our own cancellation passes through."""
        task: asyncio.Future[T] = asyncio.ensure_future(grading)
        running = self._running[group]
        running.add(task)  # type: ignore[arg-type]
        if group in self._ended:
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if group in self._ended and current is not None and not current.cancelling():
                raise GroupEnded(group) from None
            raise
        finally:
            running.discard(task)
            if not running:
                self._running.pop(group, None)
