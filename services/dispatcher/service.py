"""The dispatcher: owns the task cursor and lets a group into the loop when the ledger shows a place for it.

Guarantees: a group's number is used once, even by two dispatchers at a time; `Admitted` is in the ledger before the group
is in the work queue; a group admitted by a dispatcher that died before queueing it is queued by the next one; a full
broker makes it wait, never drop. It stops when the run is finished and for no other reason.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import structlog

from driftline.messages.bus import Bus, PubAck
from driftline.messages.errors import HeadConflict
from driftline.messages.subjects import Subjects
from driftline.messages.types import Admitted, Group, Message, OutcomeEvent, Task
from driftline.services.config import Config
from driftline.services.dispatcher.admission import AdmissionState, capacity, fold, group_id
from driftline.services.publishing import publish_patiently
from driftline.services.runtime import finished
from driftline.services.telemetry import Reporter

__all__ = ["DispatcherService", "Tasks"]

log = structlog.get_logger("dispatcher")


class Tasks(Protocol):
    """Where training tasks come from: the same index and seed give the same task, for ever."""

    def task(self, index: int, seed: int) -> Task: ...


class DispatcherService:
    def __init__(self, bus: Bus, config: Config, tasks: Tasks, reporter: Reporter | None = None) -> None:
        self._bus, self._config, self._tasks = bus, config, tasks
        self._reporter = reporter or Reporter(bus, config.run.name, "dispatcher")
        self._subjects = Subjects(config.run.name)
        self._ledger = self._subjects.stream("LEDGER")
        self.state = AdmissionState()
        self._changed = asyncio.Event()
        self._seen = 0
        self._queued: set[str] = set()
        self._unsettled_from = 0

    async def run(self) -> None:
        newest = await self._bus.last(self._ledger, self._subjects.ledger)
        async with asyncio.TaskGroup() as tasks:
            workers = [
                tasks.create_task(self._follow(), name="ledger"),
                tasks.create_task(self._admit(newest.seq if newest else 0), name="admit"),
                tasks.create_task(self._report(), name="report"),
            ]
            end = await finished(self._bus, self._config.run.name)
            log.info("run finished", version=end.version, reason=end.reason, admitted=self.state.admitted)
            for worker in workers:
                worker.cancel()

    async def _follow(self) -> None:
        async for stored in self._bus.follow(self._ledger, self._subjects.ledger):
            if isinstance(stored.message, (Admitted, OutcomeEvent)):
                self.state = fold(self.state, (stored.message,))
            self._seen = stored.seq
            self._changed.set()

    async def _admit(self, newest: int) -> None:
        while self._seen < newest:
            await self._change()
        # Whoever admits number k has queued every one below it, so only the last may be admitted and not queued.
        self._unsettled_from = max(0, self.state.cursor - 1)
        log.info("ledger read", cursor=self.state.cursor, in_flight=len(self.state.open))
        run = self._config.run
        while True:
            await self._queue_unsettled()
            if capacity(self.state, run.max_lag, run.groups_per_step) <= 0 or not await self._admit_next():
                await self._change()

    async def _change(self) -> None:
        """Wait for the ledger to move. Nothing else can free a place, so a silent ledger is only worth a warning."""
        try:
            async with asyncio.timeout(self._config.run.group_deadline_s):
                await self._changed.wait()
        except TimeoutError:
            log.warning("no group ended", waited_s=self._config.run.group_deadline_s, in_flight=len(self.state.open),
                        remedy="look at the learner's log: it ends groups")
        self._changed.clear()

    async def _queue_unsettled(self) -> None:
        """Queue what is in the ledger but maybe not in the queue; the content id makes a second time harmless.

        On return every number below the cursor is queued. The ledger moves during a publish (another dispatcher admits),
        so it is read again after each one, and the caller takes its number before it awaits anything.
        """
        self._queued &= self.state.open.keys()
        while (group := self._unqueued()) is not None:
            await self._queue(group)

    def _unqueued(self) -> Group | None:
        """The oldest admitted group that is not known to be queued."""
        return next((group for group in self.state.open.values()
                     if group.index >= self._unsettled_from and group.group not in self._queued), None)

    async def _admit_next(self) -> bool:
        """Admit the group at the cursor. False when another dispatcher did: its event is on the way."""
        group = await asyncio.to_thread(self._group, self.state.cursor)
        event = Admitted(run=group.run, group=group, at=time.time())
        try:
            ack = await self._publish(self._subjects.admitted(group.group), event,
                                      f"{group.run}/admitted/{group.group}", expect_last=0)
        except HeadConflict:
            return False
        if ack.duplicate:
            return False
        self.state = fold(self.state, (event,))
        await self._queue(group)
        return True

    async def _queue(self, group: Group) -> None:
        await self._publish(self._subjects.groups, group, f"{group.run}/group/{group.group}")
        self._queued.add(group.group)

    def _group(self, index: int) -> Group:
        run = self._config.run
        return Group(
            run=run.name, group=group_id(index), index=index, task=self._tasks.task(index, run.seed),
            members=run.group_size, sampling=self._config.sampling.message(), seed=run.seed,
            deadline_s=run.group_deadline_s,
        )

    async def _publish(self, subject: str, message: Message, id: str, *, expect_last: int | None = None) -> PubAck:
        """Publish, waiting for a full stream to drain: back-pressure belongs here, where nothing is leased yet."""
        wait_s = self._config.dispatcher.full_wait_s
        return await publish_patiently(self._bus, subject, message, id=id, wait_s=wait_s, expect_last=expect_last)

    async def _report(self) -> None:
        while True:
            await self._reporter.report({"admitted": self.state.admitted, "in_flight": len(self.state.open)})
            await asyncio.sleep(1.0)
