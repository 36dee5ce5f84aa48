"""The learner's pen: what it writes into the ledger, and how a group is kept from ending twice.

All that is said of one group's end goes to one subject, each by compare-and-set on what was there: `Taken` before a step, then
exactly one `OutcomeEvent`. So two learners that both believe to own the run cannot both end a group, and a batch whose groups are
taken cannot lose one of them before its version is published. What another has written first is returned, and is the truth. What the divergence watch says
is of no group, and ends nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import structlog

from driftline.messages.bus import Bus, Stored
from driftline.messages.errors import HeadConflict
from driftline.messages.subjects import Subjects
from driftline.messages.types import Divergence, Group, Message, OutcomeEvent, Retried, Taken
from driftline.services.publishing import publish_patiently

__all__ = ["LedgerPen"]

log = structlog.get_logger("learner")

PARALLEL = 64


class LedgerPen:
    def __init__(self, bus: Bus, run: str, *, full_wait_s: float) -> None:
        self._bus, self._run, self._full_wait_s = bus, run, full_wait_s
        self._subjects = Subjects(run)
        self._ledger = self._subjects.stream("LEDGER")
        self._last: dict[str, int] = {}
        self._parallel = asyncio.Semaphore(PARALLEL)
        self.epoch = 0

    def seen(self, stored: Stored) -> None:
        """Fold what the ledger holds: the sequence the next word on a group must follow."""
        if isinstance(stored.message, Taken):
            self._last[stored.message.group] = stored.seq
        elif isinstance(stored.message, OutcomeEvent):
            self._last.pop(stored.message.group, None)

    async def take(self, groups: Iterable[str], version: int) -> list[OutcomeEvent]:
        """Say that these groups make `version`. Returns the outcomes of those that have ended elsewhere: they must not be trained."""
        ended: list[OutcomeEvent] = []

        async def one(group: str) -> None:
            event = Taken(run=self._run, group=group, version=version, epoch=self.epoch, at=time.time())
            async with self._parallel:
                found = await self._write(group, event, f"{self._run}/taken/{group}/{version}/{self.epoch}")
            if isinstance(found, OutcomeEvent):
                ended.append(found)

        async with asyncio.TaskGroup() as tasks:
            for group in groups:
                tasks.create_task(one(group))
        return sorted(ended, key=lambda event: event.group)

    async def end(self, event: OutcomeEvent) -> OutcomeEvent:
        """Write an outcome; the one that is in the ledger, which is another's if that came first."""
        found = await self._write(event.group, event, f"{self._run}/outcome/{event.group}/{self.epoch}")
        self._last.pop(event.group, None)
        if isinstance(found, OutcomeEvent):
            log.info("outcome already in the ledger", group=event.group, outcome=found.outcome)
            return found
        return event

    async def retry(self, event: Retried) -> None:
        """Into the ledger, then into the queue; a crash in between is made good by `requeue`."""
        group = event.group
        await publish_patiently(self._bus, self._subjects.retried(group.group, group.attempt), event,
                                id=f"{self._run}/retried/{group.group}/{group.attempt}", wait_s=self._full_wait_s)
        await self.requeue(group)

    async def note(self, event: Divergence) -> None:
        """What the divergence watch said; a second time changes nothing."""
        await publish_patiently(self._bus, self._subjects.divergence(event.version, event.signal.value), event,
                                id=f"{self._run}/divergence/{event.version}/{event.signal.value}/{event.level.value}/{self.epoch}", wait_s=self._full_wait_s)

    async def requeue(self, group: Group) -> None:
        """Queue an attempt; a second time changes nothing."""
        await publish_patiently(self._bus, self._subjects.groups, group, id=f"{self._run}/group/{group.group}/{group.attempt}",
                                wait_s=self._full_wait_s)

    async def _write(self, group: str, event: Message, id: str) -> Message | None:
        """None when `event` is in the ledger now; otherwise the outcome that stands in its way."""
        subject = self._subjects.outcome(group)
        while True:
            try:
                ack = await publish_patiently(self._bus, subject, event, id=id, wait_s=self._full_wait_s,
                                              expect_last=self._last.get(group, 0))
                self._last[group] = max(ack.seq, self._last.get(group, 0))
                return None
            except HeadConflict:
                stored = await self._bus.last(self._ledger, subject)
                if stored is None or isinstance(stored.message, OutcomeEvent):
                    if stored is not None and stored.message == event:
                        return None
                    return None if stored is None else stored.message
                if isinstance(stored.message, Taken) and stored.message.epoch > self.epoch:
                    raise HeadConflict("a later learner has taken the group", field="group", value=group,
                                       remedy="let that one go on; start one learner for a run") from None
                self._last[group] = stored.seq
