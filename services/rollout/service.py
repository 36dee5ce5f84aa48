"""The rollout service: groups in, trajectories out, the newest policy under it.

Guarantees: a group is acknowledged only after every member is stored; a group taken from the queue is sampled by the version that was the head when it was
taken, or a newer one (so work admitted because a version came out is not sampled by the one before it); it samples only with weights whose digest is the
manifest's; a full broker makes it wait. Members have content ids: a group sampled twice is stored once.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

import structlog

from driftline.messages import Leases
from driftline.messages.bus import Bus, Delivery
from driftline.messages.errors import BrokerUnavailable, DriftlineError
from driftline.messages.subjects import ConsumerSpec, Subjects
from driftline.messages.types import Group, OutcomeEvent, Trajectory
from driftline.policy_store.blobs import BlobStore
from driftline.policy_store.manifest import PolicyHead
from driftline.policy_store.reader import PolicyReader
from driftline.policy_store.tensor import State
from driftline.services.config import Config, PolicyUpdate
from driftline.services.policy_model import build_model
from driftline.services.publishing import publish_patiently, pull_patiently
from driftline.services.rollout.engine import Engine
from driftline.services.runtime import finished, run_topology
from driftline.services.telemetry import Reporter
from driftline.services.tensors import from_host

__all__ = ["RolloutService"]

log = structlog.get_logger("rollout")

SLICE_S = 0.05
PULL_S = 1.0
REPORT_S = 1.0


class RolloutService:
    def __init__(
        self, bus: Bus, blobs: BlobStore, config: Config, instance: str = "0", reporter: Reporter | None = None
    ) -> None:
        self._bus, self._config, self.instance = bus, config, instance
        self._reporter = reporter or Reporter(bus, config.run.name, "rollout", instance)
        self._subjects = Subjects(config.run.name)
        self._consumer = _consumer(config)
        self._reader = PolicyReader(bus, blobs, config.run.name)
        self._state: State = {}
        self._engine: Engine | None = None
        self._head: PolicyHead | None = None
        self._leases = Leases()
        self._held: dict[str, Delivery] = {}
        self._left: dict[str, int] = {}
        self._taken: list[Group] = []
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._ended: set[str] = set()
        self._draining = False
        self._starting: asyncio.Task[None] | None = None
        self.updates = 0
        self.update_s = 0.0

    def drain(self) -> None:
        """Take no more groups; `run` returns when those in hand are stored."""
        self._draining = True
        if self._engine is None and self._starting is not None:
            self._starting.cancel()  # nothing is in hand, and the first version may never come
        self._wake.set()
        self._room.set()

    async def run(self) -> None:
        """Serve until the run is finished or drained."""
        rollout = self._config.rollout
        try:
            async with asyncio.TaskGroup() as tasks, self._leases:
                end = tasks.create_task(finished(self._bus, self._config.run.name), name="end")
                self._starting = work = tasks.create_task(self._work(rollout.max_batch), name="work")
                await asyncio.wait({end, work}, return_when=asyncio.FIRST_COMPLETED)
                if end.done() and not end.cancelled() and end.exception() is None:
                    log.info("run finished", version=end.result().version, reason=end.result().reason)
                end.cancel()
                work.cancel()
        finally:  # also when it fails: another engine can have its groups at once
            await self._give_back()

    async def _work(self, max_batch: int) -> None:
        model = await asyncio.to_thread(build_model, self._config, device=self._config.rollout.device, threads=self._config.rollout.threads)
        head = await self._first_head()
        self._state = await self._reader.materialise_manifest(await self._reader.load(head.link))
        engine = Engine(model, version=head.version, max_batch=max_batch, name=f"rollout-{self.instance}",
                        record_routes=self._config.learner.router_replay)
        await asyncio.to_thread(engine.load, head.version, from_host(self._state))
        self._engine, self._head = engine, head
        log.info("engine ready", version=head.version, digest=head.digest)
        async with asyncio.TaskGroup() as tasks:
            helpers = [
                tasks.create_task(self._follow_head(), name="head"),
                tasks.create_task(self._follow_outcomes(), name="outcomes"),
                tasks.create_task(self._pull(engine), name="pull"),
                tasks.create_task(self._report(engine), name="report"),
            ]
            await self._compute(engine)
            for helper in helpers:
                helper.cancel()

    async def _first_head(self) -> PolicyHead:
        async with aclosing(self._reader.watch()) as heads:  # type: ignore[type-var]
            async for head in heads:
                return head
        raise BrokerUnavailable("the policy head is no longer followed", field="run", value=self._config.run.name)

    async def _follow_head(self) -> None:
        async with aclosing(self._reader.watch()) as heads:  # type: ignore[type-var]
            async for head in heads:
                self._offer(head)

    def _offer(self, head: PolicyHead) -> None:
        if self._head is None or head.version > self._head.version:
            self._head = head
            self._wake.set()

    async def _follow_outcomes(self) -> None:
        """A group that ended elsewhere (expired, stale, cancelled) is not worth another token."""
        last = await self._bus.last(self._subjects.stream("LEDGER"), self._subjects.ledger)
        start = last.seq + 1 if last else 1
        events = self._bus.follow(self._subjects.stream("LEDGER"), f"{self._subjects.root}.ledger.outcome.>", start=start)
        async with aclosing(events) as stored_events:  # type: ignore[type-var]
            async for stored in stored_events:
                if isinstance(stored.message, OutcomeEvent) and stored.message.group in self._held:
                    self._ended.add(stored.message.group)
                    self._wake.set()

    async def _pull(self, engine: Engine) -> None:
        """Keep about one batch waiting behind the running one, so that an engine never idles and never hoards."""
        group_size = self._config.run.group_size
        while not self._draining:
            room = engine.max_batch + group_size - engine.active - engine.waiting - sum(group.members for group in self._taken)
            if room < group_size:
                self._room.clear()
                await self._room.wait()
                continue
            for delivery in await pull_patiently(self._bus, self._consumer, batch=max(1, room // group_size), timeout_s=PULL_S):
                await self._take(delivery)
        self._wake.set()

    async def _take(self, delivery: Delivery) -> None:
        group = delivery.message
        if not isinstance(group, Group):
            await delivery.dead_letter(f"expected a group, got {type(group).__name__}")
            return
        self._leases.add(delivery)
        again = self._held.get(group.group)
        self._held[group.group] = delivery
        if again is not None:  # our lease had lapsed and we are still sampling it: the newer delivery is the one to acknowledge
            self._leases.discard(again)
            return
        head = await self._reader.head()
        if head is not None:
            self._offer(head)
        self._left[group.group] = group.members
        self._taken.append(group)
        self._wake.set()

    async def _compute(self, engine: Engine) -> None:
        storing: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._cancel_ended(engine)
                await self._update(engine)
                self._submit_taken(engine)
                if engine.idle:
                    if storing is not None:
                        await storing
                        storing = None
                    if self._draining and not self._held:
                        return
                    self._room.set()
                    self._wake.clear()
                    if not (self._taken or self._ended or self._behind(engine)):
                        await self._wake.wait()
                    continue
                done = await asyncio.to_thread(self._slice, engine)
                self._room.set()
                if storing is not None:
                    await storing  # at most one batch of results is ahead of the broker
                    storing = None
                if done:
                    storing = tasks.create_task(self._store(done), name="store")

    def _slice(self, engine: Engine) -> list[Trajectory]:
        """Steps for about SLICE_S, in a worker thread: the loop stays free for leases and heads."""
        until, done = time.monotonic() + SLICE_S, []
        while not engine.idle and time.monotonic() < until:
            done += engine.step()
        return done

    async def _cancel_ended(self, engine: Engine) -> None:
        for name in list(self._ended):
            self._ended.discard(name)
            if name in self._held:
                self._taken = [group for group in self._taken if group.group != name]
                engine.cancel(name)
                await self._release(name)

    def _submit_taken(self, engine: Engine) -> None:
        """Only between two slices, and only with the newest head applied: a head that came during a slice or an update would
        otherwise be missed, and an engine that drains would never be empty."""
        if not self._behind(engine):
            for group in self._taken:
                engine.submit(group)
            self._taken.clear()

    def _behind(self, engine: Engine) -> bool:
        return self._head is not None and self._head.version > engine.version

    async def _update(self, engine: Engine) -> None:
        """Apply the newest head between two slices, as the run's policy_update says."""
        how = self._config.rollout.policy_update
        if not self._behind(engine) or (how is PolicyUpdate.DRAIN and engine.active):
            return
        head = self._head
        assert head is not None
        began = time.monotonic()
        self._state = await self._reader.advance(self._state, engine.version, head.version)
        await asyncio.to_thread(
            engine.load, head.version, from_host(self._state), recompute=how is PolicyUpdate.INTERRUPT
        )
        self.updates += 1
        self.update_s = time.monotonic() - began
        log.info("policy applied", version=head.version, active=engine.active, seconds=round(self.update_s, 3))

    async def _store(self, done: list[Trajectory]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for trajectory in done:
                tasks.create_task(self._store_one(trajectory))
        for name in {t.group for t in done}:
            if self._left.get(name) == 0:
                await self._release(name)

    async def _store_one(self, trajectory: Trajectory) -> None:
        await publish_patiently(
            self._bus, self._subjects.trajectory(trajectory.group), trajectory,
            id=f"{trajectory.run}/trajectory/{trajectory.group}/{trajectory.member}", wait_s=self._config.dispatcher.full_wait_s,
        )
        if trajectory.group in self._left:
            self._left[trajectory.group] -= 1

    async def _release(self, name: str) -> None:
        """Everything of this group is stored, or no longer wanted: acknowledge it."""
        self._left.pop(name, None)
        delivery = self._held.pop(name, None)
        if delivery is None:
            return
        self._leases.discard(delivery)
        try:
            await delivery.ack()
        except BrokerUnavailable as error:  # it will be delivered again and sampled to the same stored ids
            log.warning("group not acknowledged", group=name, cause=str(error))

    async def _give_back(self) -> None:
        for name, delivery in list(self._held.items()):
            self._leases.discard(delivery)
            try:
                await delivery.nak()
            except DriftlineError as error:
                log.warning("group not given back", group=name, cause=str(error))
        self._held.clear()

    async def _report(self, engine: Engine) -> None:
        before, at = engine.tokens_sampled, time.monotonic()
        while True:
            await asyncio.sleep(REPORT_S)
            now = time.monotonic()
            rate = (engine.tokens_sampled - before) / (now - at)
            before, at = engine.tokens_sampled, now
            await self._reporter.report({
                "tokens_sampled": engine.tokens_sampled, "tokens_per_s": rate, "active": engine.active, "waiting": engine.waiting,
                "version": engine.version, "updates": self.updates, "update_s": self.update_s, "prompt_tokens": engine.prompt_tokens,
                "groups_held": len(self._held),
            })


def _consumer(config: Config) -> ConsumerSpec:
    return next(c for c in run_topology(config).consumers if c.durable == "rollout")
