"""The scheduler: whose turn it is, and which tokens of which prompt the next step computes. Pure state, no tensors, no clock.

Guarantees: work that was interrupted goes on before work that never began; then higher priorities first; between tenants, whoever was given the fewest tokens
so far; within a tenant, in order of arrival. Nobody is overtaken because it is large: the next in turn enters, or nobody does. A piece of a prompt ends at a
multiple of CHUNK tokens of its sequence, at a stop, or at the prompt's end. Every prompt being computed gets a piece as soon as the older ones have theirs.
What waits is bounded in bytes: `QueueFull` refuses what does not fit, and nothing that was taken in is dropped for it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from driftline.messages.errors import DriftlineError

__all__ = ["CHUNK", "Chunk", "QueueFull", "Scheduler", "Work", "common", "pieces"]

CHUNK = 64
"""Tokens: the pages' size, and where a recurrent state can be shared."""

OVERHEAD = 512
"""Bytes of a waiting piece of work beside its tokens."""


class QueueFull(DriftlineError):
    """Too many bytes wait: come again when some have been sampled."""


@dataclass(eq=False, kw_only=True)
class Work:
    """`tokens` to be computed for `members` rows that all go on after them. `done` of them are; a piece may not pass any of `stops`. `tenant` shares the engine
    with the others, `serial` is the order of arrival, given by the scheduler."""

    tokens: array[int]
    members: int = 1
    priority: int = 0
    tenant: str = ""
    extra_bytes: int = 0
    done: int = 0
    stops: list[int] = field(default_factory=list)
    serial: int = -1

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def limit(self) -> int:
        """Where the piece being computed must end at the latest."""
        return min((stop for stop in self.stops if self.done < stop < self.length), default=self.length)

    @property
    def nbytes(self) -> int:
        return OVERHEAD + self.tokens.itemsize * self.length + self.extra_bytes


W = TypeVar("W", bound=Work)


class Chunk(NamedTuple, Generic[W]):
    """Tokens `begin` to `end` of a work's."""

    work: W
    begin: int
    end: int


@dataclass
class _Tenant(Generic[W]):
    """`given`: tokens and rows it was let in with; a tenant that comes later starts where the others are."""

    given: int = 0
    queue: deque[W] = field(default_factory=deque)


class Scheduler(Generic[W]):
    """`queue_bytes`: of work that waits and never began."""

    def __init__(self, *, queue_bytes: int) -> None:
        self._room = queue_bytes
        self._serials = count()
        self._tenants: dict[tuple[int, str], _Tenant[W]] = {}
        self._interrupted: list[W] = []
        self.queued_bytes = 0
        self.members = 0
        self.interrupted_members = 0

    def __bool__(self) -> bool:
        return bool(self._interrupted or self._tenants)

    def __iter__(self) -> Iterator[W]:
        """Whatever waits, in no order that means anything."""
        yield from tuple(self._interrupted)
        for tenant in tuple(self._tenants.values()):
            yield from tuple(tenant.queue)

    def submit(self, work: W) -> None:
        """Raises QueueFull. One piece of work is let in whatever its size."""
        if self.queued_bytes and self.queued_bytes + work.nbytes > self._room:
            raise QueueFull(f"{self.queued_bytes} bytes wait, and this is {work.nbytes} more", field="rollout.queue_mb", value=self._room / 2**20,
                            remedy="submit it again when some have been sampled, or give the queue more")
        work.serial = next(self._serials)
        key = (-work.priority, work.tenant)
        tenant = self._tenants.get(key)
        if tenant is None:
            tenant = self._tenants[key] = _Tenant(self._least(work.priority))
        tenant.queue.append(work)
        self.queued_bytes += work.nbytes
        self.members += work.members

    def interrupt(self, work: W) -> None:
        """Work that had begun waits again, before all that has not."""
        if work.serial < 0:
            work.serial = next(self._serials)
        work.done, work.stops = 0, []
        self._interrupted.append(work)
        self._interrupted.sort(key=lambda w: w.serial)
        self.members += work.members
        self.interrupted_members += work.members

    def first(self) -> W | None:
        """Whose turn it is."""
        if self._interrupted:
            return self._interrupted[0]
        if not self._tenants:
            return None
        return self._tenants[self._turn()].queue[0]

    def take(self) -> W:
        """Takes `first` out. Raises IndexError when nothing waits."""
        if self._interrupted:
            work = self._interrupted.pop(0)
            self.interrupted_members -= work.members
        else:
            if not self._tenants:
                raise IndexError("nothing waits")
            key = self._turn()
            tenant = self._tenants[key]
            work = tenant.queue.popleft()
            tenant.given += work.length + work.members
            self.queued_bytes -= work.nbytes
            if not tenant.queue:
                del self._tenants[key]
        self.members -= work.members
        return work

    def drop(self, unwanted: Callable[[W], bool]) -> list[W]:
        """Takes out what is unwanted."""
        gone = [work for work in self if unwanted(work)]
        names = {id(work) for work in gone}
        self.interrupted_members -= sum(w.members for w in self._interrupted if id(w) in names)
        self._interrupted = [w for w in self._interrupted if id(w) not in names]
        for key, tenant in list(self._tenants.items()):
            self.queued_bytes -= sum(w.nbytes for w in tenant.queue if id(w) in names)
            tenant.queue = deque(w for w in tenant.queue if id(w) not in names)
            if not tenant.queue:
                del self._tenants[key]
        self.members -= sum(w.members for w in gone)
        return gone

    def _turn(self) -> tuple[int, str]:
        highest = min(key[0] for key in self._tenants)
        return min((key for key in self._tenants if key[0] == highest), key=lambda key: (self._tenants[key].given, self._tenants[key].queue[0].serial))

    def _least(self, priority: int) -> int:
        return min((t.given for key, t in self._tenants.items() if key[0] == -priority), default=0)


def pieces(works: Sequence[W], budget: int) -> list[Chunk[W]]:
    """What a step computes of `works`, in order of age, within about `budget` tokens: first up to a boundary for each while the budget lasts, and at least for
    the first; what is left is shared equally."""
    ends: list[int] = []
    for i, work in enumerate(works):
        end = min(work.limit, (work.done // CHUNK + 1) * CHUNK)
        if i and end - work.done > budget:
            break
        ends.append(end)
        budget -= end - work.done
    hungry = [i for i, end in enumerate(ends) if end < works[i].limit]
    while hungry and budget > 0:
        share = max(budget // len(hungry) // CHUNK, 1) * CHUNK
        for i in hungry:
            end = min(works[i].limit, ends[i] + share)
            if end - ends[i] > budget:
                end = ends[i] + budget // CHUNK * CHUNK
            budget -= end - ends[i]
            ends[i] = end
            if budget < CHUNK:
                break
        if budget < CHUNK:
            break
        hungry = [i for i in hungry if ends[i] < works[i].limit]
    return [Chunk(work, work.done, end) for work, end in zip(works, ends, strict=False)]


def common(a: array[int], b: array[int]) -> int:
    """Tokens that two sequences begin with alike."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return int(np.argmax(np.frombuffer(a, dtype=np.int32)[:n] != np.frombuffer(b, dtype=np.int32)[:n]))
