"""The grader: takes trajectories, gives each its reward, passes it on.

Guarantees: a trajectory is acknowledged only after its `Graded` is stored, under a content id that makes a second time harmless,
so a grader may die at any moment and nothing is lost or counted twice; its lease is held while it waits and while it is graded; at most
`max_in_flight` are held at once; a reward that fails makes a failed member with its cause and nothing else; a member that an engine
gave up is passed on without a reward. A member whose group has ended is acknowledged without grading, at once, also in the middle of it.
Failures of rewards and failures of the machinery have budgets of their own: the first raise an alarm and never end the service, the
second end it when nothing works any more, and cost no member. It ends when the run is finished and the queue is empty.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import structlog

from driftline.environments.sandbox.box import AUTO, Level
from driftline.messages.bus import Bus, Delivery
from driftline.messages.errors import BrokerFull, BrokerUnavailable
from driftline.messages.leases import lease
from driftline.messages.subjects import ConsumerSpec, Subjects, topology
from driftline.messages.types import Finish, Graded, OutcomeEvent, Trajectory
from driftline.services.grader.budget import Budget
from driftline.services.grader.ended import EndedGroups, GroupEnded
from driftline.services.grader.pool import GraderPool, WorkersFailing
from driftline.services.grader.wire import Failure, Verdict
from driftline.services.runtime import finished
from driftline.services.telemetry import Reporter

__all__ = ["Counts", "GraderService", "aborted", "graded", "grader_consumer"]

log = structlog.get_logger("grader")

PULL_S = 1.0
REPORT_S = 2.0
RETRY_S = 1.0
# Longer than a pull, so that an ending grader is not handed back what it just gave away.
GIVE_BACK_S = 5.0
_FULL_FIRST_S, _FULL_LONGEST_S = 0.05, 2.0


@dataclass
class Counts:
    """What has happened so far. `failed` is the rewards' doing; everything under `infrastructure` is ours."""

    graded: int = 0
    aborted: int = 0
    ended: int = 0
    failed: Counter[Failure] = field(default_factory=Counter)
    infrastructure: Counter[str] = field(default_factory=Counter)
    reward_sum: float = 0.0
    grade_s_sum: float = 0.0

    def add(self, verdict: Verdict) -> None:
        self.grade_s_sum += verdict.seconds
        if verdict.reward is None:
            assert verdict.failure is not None
            self.failed[verdict.failure] += 1
        else:
            self.graded += 1
            self.reward_sum += verdict.reward


class GraderService:
    def __init__(
        self,
        bus: Bus,
        run: str,
        scorer_spec: Sequence[str],
        *,
        workers: int = 1,
        deadline_s: float = 5.0,
        memory_mb: int = 1024,
        max_in_flight: int = 256,
        reporter: Reporter | None = None,
        consumer: ConsumerSpec | None = None,
        sandbox: str = AUTO,
        hidden: Sequence[str] = (),
        budget: Budget | None = None,
    ) -> None:
        self._bus, self._run = bus, run
        self._subjects = Subjects(run)
        self._consumer = consumer or grader_consumer(run)
        self._max_in_flight = max_in_flight
        self._reporter = reporter or Reporter(bus, run, "grader")
        self._pool = GraderPool(
            scorer_spec, workers=workers, deadline_s=deadline_s, memory_mb=memory_mb, sandbox=sandbox, hidden=hidden
        )
        self._ended = EndedGroups()
        # An outage of the broker fails everything in hand at once: that is one failure of many members, and must not end the service.
        self.budget = budget or Budget(infrastructure_in_a_row=4 * max_in_flight)
        self._in_flight: set[asyncio.Task[None]] = set()
        self._finished = asyncio.Event()
        self._draining = asyncio.Event()
        self.counts = Counts()

    def drain(self) -> None:
        """Take no more work; `run` returns when what is in hand is done."""
        self._draining.set()

    async def run(self) -> None:
        async with self._pool, asyncio.TaskGroup() as tasks:
            log.info("rewards run in a sandbox", sandbox=self._pool.sandbox.level.value)
            watchers = [
                tasks.create_task(self._follow_outcomes(), name="outcomes"),
                tasks.create_task(self._watch_end(), name="end of run"),
                tasks.create_task(self._report_regularly(), name="report"),
            ]
            await self._take_until_done(tasks)
            for watcher in watchers:
                watcher.cancel()
        await self._report()
        log.info("grader done", **self._values())

    async def _take_until_done(self, tasks: asyncio.TaskGroup) -> None:
        while not self._draining.is_set():
            free = self._max_in_flight - len(self._in_flight)
            if free <= 0:
                await asyncio.wait(self._in_flight, return_when=asyncio.FIRST_COMPLETED)
                continue
            finished = self._finished.is_set()  # before the pull: what it finds then is all there will be
            deliveries = await self._pull(free)
            if not deliveries and finished:
                break
            for delivery in deliveries:
                task = tasks.create_task(self._grade(delivery), name=delivery.subject)
                self._in_flight.add(task)
                task.add_done_callback(self._in_flight.discard)
        if self._in_flight:
            await asyncio.wait(self._in_flight)

    async def _pull(self, batch: int) -> list[Delivery]:
        try:
            return await self._bus.pull(self._consumer, batch=batch, timeout_s=PULL_S)
        except BrokerUnavailable as error:
            # The runtime ends the service when the broker stays away; until then the next pull may succeed.
            self._infrastructure("pull_failed", str(error))
            log.warning("pull failed", cause=str(error))
            await self._pause(RETRY_S)
            return []

    async def _grade(self, delivery: Delivery) -> None:
        """One delivery to its end. What goes wrong with the broker leaves it unacknowledged: it comes again."""
        if delivery.deliveries > 1:
            self.counts.infrastructure["redelivered"] += 1
        try:
            async with lease(delivery):
                await self._grade_leased(delivery)
        except BrokerUnavailable as error:
            log.warning("trajectory will be delivered again", subject=delivery.subject, cause=str(error))
            self._infrastructure("broker_unavailable", str(error))

    async def _grade_leased(self, delivery: Delivery) -> None:
        trajectory = delivery.message
        if not isinstance(trajectory, Trajectory):
            self.counts.infrastructure["dead_lettered"] += 1
            await delivery.dead_letter(f"expected a trajectory, got {trajectory.schema_name}")
            return
        if trajectory.finish is Finish.ABORT:
            await self._pass_on(delivery, aborted(trajectory), None)
            return
        try:
            verdict = await self._ended.unless_ended(trajectory.group, self._pool.grade(trajectory.task, trajectory.text))
        except GroupEnded:
            self.counts.ended += 1
            await delivery.ack()
            return
        except WorkersFailing:  # not the member's fault: another grader, or this one started again, has it at once
            self.counts.infrastructure["workers_failing"] += 1
            await delivery.nak()
            raise
        if verdict.failure is not None:
            log.warning("reward failed", id=trajectory.id, failure=verdict.failure.value, cause=verdict.cause)
        await self._pass_on(delivery, graded(trajectory, verdict), verdict)

    async def _pass_on(self, delivery: Delivery, message: Graded, verdict: Verdict | None) -> None:
        """Store the member, then acknowledge it. No verdict: it was not graded, because it was given up while it was sampled."""
        try:
            ack = await self._publish(message)
        except BrokerFull:  # only while ending: nobody makes room any more
            self.counts.infrastructure["given_back"] += 1
            await delivery.nak(GIVE_BACK_S)
            return
        if not ack:
            self.counts.infrastructure["duplicate"] += 1
        elif verdict is None:
            self.counts.aborted += 1
        else:
            self._count(verdict)
        await delivery.ack()
        self.budget.worked()

    def _count(self, verdict: Verdict) -> None:
        self.counts.add(verdict)
        if (alarm := self.budget.data(verdict)) is not None:
            log.error("many rewards fail", rate=round(alarm.rate, 3), of=alarm.of, kind=alarm.kind.value, cause=alarm.cause,
                      remedy="look at the task source's reward; training goes on with the members that have one")

    def _infrastructure(self, kind: str, cause: str) -> None:
        self.counts.infrastructure[kind] += 1
        self.budget.infrastructure(cause)

    async def _publish(self, message: Graded) -> bool:
        """Store it; False when it already was. A full stream is back-pressure: wait with the lease held."""
        trajectory = message.trajectory
        subject = self._subjects.graded(trajectory.group)
        content_id = f"{self._run}/graded/{trajectory.group}/{trajectory.member}"
        delay = _FULL_FIRST_S
        while True:
            try:
                return not (await self._bus.publish(subject, message, id=content_id)).duplicate
            except BrokerFull:
                if self._finished.is_set() or self._draining.is_set():
                    raise
                self.counts.infrastructure["stream_full"] += 1
                await self._pause(delay)
                delay = min(2 * delay, _FULL_LONGEST_S)

    async def _pause(self, seconds: float) -> None:
        """Before a retry: nothing announces that there is room again. Ends early when the service is to end."""
        ends = [asyncio.ensure_future(event.wait()) for event in (self._finished, self._draining)]
        try:
            await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()

    async def _watch_end(self) -> None:
        end = await finished(self._bus, self._run)
        log.info("run finished", version=end.version, reason=end.reason)
        self._finished.set()

    async def _follow_outcomes(self) -> None:
        events = self._bus.follow(self._subjects.stream("LEDGER"), f"{self._subjects.root}.ledger.outcome.>")
        async with aclosing(events) as stored_events:  # type: ignore[type-var]
            async for stored in stored_events:
                if isinstance(stored.message, OutcomeEvent):
                    self._ended.add(stored.message.group)

    async def _report_regularly(self) -> None:
        while True:
            await self._report()
            await asyncio.sleep(REPORT_S)

    async def _report(self) -> None:
        await self._reporter.report(self._values())

    def _values(self) -> dict[str, float]:
        counts = self.counts
        done = counts.graded + counts.failed.total()
        return {
            "graded": counts.graded,
            "failed": counts.failed.total(),
            "aborted": counts.aborted,
            "ended": counts.ended,
            **{f"failed_{failure.value}": counts.failed[failure] for failure in Failure},
            "infrastructure": counts.infrastructure.total(),
            **{f"infrastructure_{kind}": number for kind, number in counts.infrastructure.items()},
            "reward_mean": counts.reward_sum / max(1, counts.graded),
            "grade_s_mean": counts.grade_s_sum / max(1, done),
            "in_flight": len(self._in_flight),
            "workers_replaced": self._pool.replaced,
            "data_failure_rate": self.budget.data_failure_rate,
            "data_alarm": float(self.budget.alarmed),
            **{f"sandbox_{level.value}": float(level is self._pool.sandbox.level) for level in Level},
        }


def graded(trajectory: Trajectory, verdict: Verdict) -> Graded:
    """The message a verdict becomes."""
    cause = "" if verdict.failure is None else f"{verdict.failure.value}: {verdict.cause}"
    return Graded(
        run=trajectory.run,
        trajectory=trajectory,
        reward=verdict.reward,
        components=verdict.components,
        cause=cause,
        grade_s=verdict.seconds,
    )


def aborted(trajectory: Trajectory) -> Graded:
    """What becomes of a member that its engine gave up: its tokens, no reward, and the reason."""
    sampled = int(trajectory.action_mask.sum())
    cause = f"aborted: given up by {trajectory.engine or 'its engine'} after {sampled} tokens, the oldest of version {trajectory.oldest_version}"
    return Graded(run=trajectory.run, trajectory=trajectory, reward=None, cause=cause)


def grader_consumer(run: str) -> ConsumerSpec:
    return next(consumer for consumer in topology(run).consumers if consumer.durable == "grader")
