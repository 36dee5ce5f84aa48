"""The rollout service: groups in, trajectories out, the newest policy under it.

Guarantees: a group is acknowledged only after every member it asks for is stored; a group taken from the queue is sampled by the version that was the
head when it was taken, or a newer one (so work admitted because a version came out is not sampled by the one before it); it samples only with
weights whose digest is the manifest's; a group with a token too old to be trained from the newest head is given up at once, what there is of it
stored as aborted; a group whose lease was lost is let go; a group that makes the engine fail is found, tried again and dead-lettered, and costs no
other group; a full broker makes it wait. Members have content ids: a group sampled twice is stored once.

Memory: at most `max_batch` members and one group more are taken ahead of the engine, and one slice's results, cut at `AHEAD_BYTES`, ahead of the broker.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import asdict, dataclass

import structlog

from driftline.messages import Leases
from driftline.messages.bus import Bus, Delivery
from driftline.messages.errors import BrokerUnavailable, DriftlineError, PayloadTooLarge
from driftline.messages.subjects import ConsumerSpec, Subjects
from driftline.messages.types import Group, OutcomeEvent, Trajectory
from driftline.models.causal_lm import CausalLM
from driftline.models.tokenizers.loading import load_tokenizer
from driftline.policy_store.blobs import BlobStore
from driftline.policy_store.reader import PolicyReader
from driftline.services.config import Config, EngineKind, PolicyUpdate
from driftline.services.policy_model import build_model
from driftline.services.publishing import publish_patiently, pull_patiently
from driftline.services.rollout.engine import Engine, QueueFull
from driftline.services.rollout.external import ExternalEngine, FileWeights, open_engine
from driftline.services.rollout.hand import Hand
from driftline.services.rollout.quarantine import Quarantine, is_infrastructure
from driftline.services.rollout.starting_engine import engine_of
from driftline.services.rollout.updates import Updates
from driftline.services.rollout.weights import EngineWeights, Staged, WeightCounts, parameters_of
from driftline.services.runtime import finished, run_topology
from driftline.services.starting import starting_place
from driftline.services.telemetry import Reporter
from driftline.services.tensors import from_host

__all__ = ["Counts", "RolloutService"]

log = structlog.get_logger("rollout")

AnyEngine = Engine | ExternalEngine
AnyWeights = EngineWeights | FileWeights

SLICE_S = 0.05
PULL_S = 1.0
REPORT_S = 1.0
RETRY_S = 0.5
AHEAD_BYTES = 64 * 1024 * 1024


@dataclass
class Counts:
    """What has happened so far. `data_failures` are a group's doing, `infrastructure_failures` the machine's."""

    updates: int = 0
    groups_given_up: int = 0
    members_aborted: int = 0
    leases_lost: int = 0
    data_failures: int = 0
    groups_condemned: int = 0
    infrastructure_failures: int = 0


@dataclass
class UpdateSeconds:
    """Of the newest update: `fetch_s` until the mirror is the version, verified; `apply_s` until the engine is; `pause_s` of that the engine stood
    still; `update_s` from the first to the last."""

    fetch_s: float = 0.0
    apply_s: float = 0.0
    pause_s: float = 0.0
    update_s: float = 0.0


class RolloutService:
    def __init__(
        self, bus: Bus, blobs: BlobStore, config: Config, instance: str = "0", reporter: Reporter | None = None,
        *, consumer: ConsumerSpec | None = None, reader: PolicyReader | None = None,
    ) -> None:
        self._bus, self._config, self.instance = bus, config, instance
        self._reporter = reporter or Reporter(bus, config.run.name, "rollout", instance)
        self._subjects = Subjects(config.run.name)
        self._consumer = consumer or _consumer(config)
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._policy = Updates(reader or PolicyReader(bus, blobs, config.run.name), outage_s=config.broker.lost_after_s, newer=self._heard,
                               advance_s=config.rollout.advance_s, read_s=config.rollout.read_s)
        self._quarantine = Quarantine(config.rollout.data_failures)
        self._leases = Leases()
        self._hand = Hand()
        self._arriving: list[Delivery] = []
        self._ended: set[str] = set()
        self._storing: asyncio.Task[None] | None = None
        self._storing_bytes = 0
        self._judged = -1
        self._reported = (0, time.monotonic())
        self._draining = False
        self._starting: asyncio.Task[None] | None = None
        self._engine: AnyEngine | None = None
        self._newer, self._prepared = asyncio.Event(), asyncio.Event()
        self._ready: Staged | None = None
        self.counts, self.carried, self.seconds = Counts(), WeightCounts(), UpdateSeconds()

    def drain(self) -> None:
        """Take no more groups; `run` returns when those in hand are stored."""
        self._draining = True
        if self._engine is None and self._starting is not None:
            self._starting.cancel()  # nothing is in hand, and the first version may never come
        self._wake.set()
        self._room.set()

    async def run(self) -> None:
        """Serve until the run is finished or drained."""
        try:
            async with asyncio.TaskGroup() as tasks, self._leases:
                end = tasks.create_task(finished(self._bus, self._config.run.name), name="end")
                self._starting = work = tasks.create_task(self._work(), name="work")
                await asyncio.wait({end, work}, return_when=asyncio.FIRST_COMPLETED)
                if end.done() and not end.cancelled() and end.exception() is None:
                    log.info("run finished", version=end.result().version, reason=end.result().reason)
                end.cancel()
                work.cancel()
        finally:  # also when it fails: another engine can have its groups at once
            await self._give_back()

    async def _work(self) -> None:
        rollout, policy = self._config.rollout, self._policy
        own = rollout.engine is EngineKind.DRIFTLINE
        model = await asyncio.to_thread(build_model, self._config, device=rollout.device, threads=rollout.threads) if own else None
        await policy.first()
        engine, weights = await asyncio.to_thread(self._opened, model)
        try:
            await asyncio.to_thread(engine.load, policy.version, from_host(policy.state))
            self._engine = engine
            log.info("engine ready", version=policy.version)
            async with asyncio.TaskGroup() as tasks:
                helpers = [
                    tasks.create_task(policy.follow(), name="head"),
                    tasks.create_task(self._carry(engine, weights), name="carry"),
                    tasks.create_task(self._follow_outcomes(), name="outcomes"),
                    tasks.create_task(self._follow_losses(), name="losses"),
                    tasks.create_task(self._pull(engine), name="pull"),
                    tasks.create_task(self._report_regularly(engine), name="report"),
                ]
                await self._compute(engine, weights)
                for helper in helpers:
                    helper.cancel()
        finally:
            if isinstance(engine, ExternalEngine):
                await asyncio.to_thread(engine.close)

    def _opened(self, model: CausalLM | None) -> tuple[AnyEngine, AnyWeights]:
        """An engine that has no version yet, and who carries weights over to it. Without a model of this process: another system's server."""
        name, tokenizer = f"rollout-{self.instance}", load_tokenizer(starting_place(self._config))
        if model is None:
            return open_engine(self._config, tokenizer=tokenizer, name=name), FileWeights()
        engine = engine_of(self._config, model, version=self._policy.version, name=name, tokenizer=tokenizer)
        return engine, EngineWeights(parameters_of(model), counts=self.carried)

    async def _follow_outcomes(self) -> None:
        """A group that ended elsewhere (expired, stale, cancelled) is not worth another token."""
        last = await self._bus.last(self._subjects.stream("LEDGER"), self._subjects.ledger)
        start = last.seq + 1 if last else 1
        events = self._bus.follow(self._subjects.stream("LEDGER"), f"{self._subjects.root}.ledger.outcome.>", start=start)
        async with aclosing(events) as stored_events:  # type: ignore[type-var]
            async for stored in stored_events:
                if isinstance(stored.message, OutcomeEvent) and stored.message.group in self._hand:
                    self._ended.add(stored.message.group)
                    self._wake.set()

    async def _follow_losses(self) -> None:
        """A group that someone else may be sampling by now is not ours to go on with, unless it comes to us again."""
        while True:
            lost = await self._leases.take_lost()
            self.counts.leases_lost += len(lost)
            self._arriving = [delivery for delivery in self._arriving if delivery not in lost]
            self._hand.lose(lost)
            self._wake.set()

    async def _pull(self, engine: AnyEngine) -> None:
        """Keep about one batch waiting behind the running one, so that an engine never idles and never hoards."""
        size = self._config.run.group_size
        while not self._draining:
            ahead = engine.max_batch + size
            room = min(ahead - self._hand.unfinished, 2 * ahead - self._hand.unstored)
            if room < size:
                self._room.clear()
                await self._room.wait()
                continue
            await self._take(await pull_patiently(self._bus, self._consumer, batch=max(1, room // size), timeout_s=PULL_S))
        self._wake.set()

    async def _take(self, deliveries: list[Delivery]) -> None:
        if not deliveries:
            return
        for delivery in deliveries:
            self._leases.add(delivery)
        self._arriving = list(deliveries)
        await self._policy.look()  # before any of them may be begun
        while self._arriving:
            delivery = self._arriving.pop(0)
            group = delivery.message
            if not isinstance(group, Group):
                await self._condemn([delivery], f"expected a group, got {type(group).__name__}")
                continue
            replaced = self._hand.add(delivery, group)
            if replaced is not None:  # our lease had lapsed and we are still sampling it: the newer delivery is the one to acknowledge
                self._leases.discard(replaced)
            await self._settle(group.group)  # a retry may ask only for what is stored already
        self._wake.set()

    async def _compute(self, engine: AnyEngine, weights: AnyWeights) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._let_go(engine)
                await self._hand_over(tasks, self._give_up_overdue(engine))
                await self._update(engine, weights)
                await self._begin(engine)
                if not engine.idle:
                    done, error = await asyncio.to_thread(self._slice, engine)
                    await self._hand_over(tasks, done)
                    if error is not None:
                        await self._recover(engine, error)
                    continue
                await self._stored()
                if self._draining and not self._hand and not self._arriving:
                    return
                self._room.set()
                self._wake.clear()
                if not (self._hand.ready() or self._hand.orphans() or self._ended or self._policy.behind(engine.version)):
                    await self._wake.wait()

    def _slice(self, engine: AnyEngine) -> tuple[list[Trajectory], Exception | None]:
        """Steps for about SLICE_S, in a worker thread: the loop stays free for leases and heads. What finished before a step failed is kept."""
        until, done, size = time.monotonic() + SLICE_S, list[Trajectory](), 0
        try:
            while not engine.idle and time.monotonic() < until and size < AHEAD_BYTES:
                step = engine.step()
                size += sum(map(_bytes, step))
                done += step
        except Exception as error:  # judged by `_recover`, which raises what is not a group's doing
            return done, error
        return done, None

    async def _let_go(self, engine: AnyEngine) -> None:
        """Stop the groups that ended elsewhere, and those that are no longer ours."""
        for name in list(self._ended):
            self._ended.discard(name)
            engine.cancel(name)
            await self._acknowledge(name, self._drop(name))
        for name in self._hand.orphans():
            engine.cancel(name)
            self._drop(name)

    def _give_up_overdue(self, engine: AnyEngine) -> list[Trajectory]:
        """At a new head v: a group with a token older than v - max_lag can be trained from no head any more. One stale member makes the group
        stale. Before the version is applied, so that nothing is spent on it."""
        head = self._policy.head
        assert head is not None
        if head.version == self._judged:
            return []
        self._judged = head.version
        aborted: list[Trajectory] = []
        for name in engine.overdue(head.version - self._config.run.max_lag):
            members = engine.give_up(name)
            aborted += members
            self._hand.give_up(name)
            self.counts.groups_given_up += 1
            self.counts.members_aborted += len(members)
            log.info("group given up", group=name, head=head.version, members=len(members), oldest=min(t.oldest_version for t in members))
        return aborted

    def _heard(self) -> None:
        self._newer.set()
        self._wake.set()

    async def _carry(self, engine: AnyEngine, weights: AnyWeights) -> None:
        """Make the mirror the newest version and lay ready what the engine lacks of it, while the engine serves the older one. Not before
        the last was applied: until then the mirror is what it is applied from."""
        while True:
            self._newer.clear()
            if self._ready is not None or not self._policy.behind(engine.version):
                await self._newer.wait()
                continue
            began = time.monotonic()
            await self._policy.move(weights)
            moved = time.monotonic()
            staged = await asyncio.to_thread(weights.stage, self._policy.state)
            self.seconds.fetch_s, self.seconds.apply_s = moved - began, time.monotonic() - moved
            self._ready = staged
            self._prepared.set()

    async def _update(self, engine: AnyEngine, weights: AnyWeights) -> None:
        """Apply the newest head between two slices, once it lies ready and as the run's policy_update says."""
        if not self._policy.behind(engine.version):
            return
        if not engine.active:
            await self._prepared.wait()  # there is nothing to go on with
        how = self._config.rollout.policy_update
        if self._ready is None or (how is PolicyUpdate.DRAIN and engine.active):
            return
        began, staged, seconds = time.monotonic(), self._ready, self.seconds
        await asyncio.to_thread(self._swap, engine, weights, staged)
        if how is PolicyUpdate.INTERRUPT:
            try:
                await asyncio.to_thread(engine.recompute)
            except Exception as error:  # as in a step
                await self._recover(engine, error)
        self.counts.updates += 1
        seconds.pause_s = time.monotonic() - began
        seconds.apply_s += seconds.pause_s
        seconds.update_s = seconds.fetch_s + seconds.apply_s
        self._ready = None
        self._prepared.clear()
        self._newer.set()
        log.info("policy applied", version=engine.version, active=engine.active, changed=staged.changed,
                 **{name: round(value, 4) for name, value in asdict(seconds).items()})

    def _swap(self, engine: AnyEngine, weights: AnyWeights, staged: Staged) -> None:
        """In a worker thread, the engine standing still. What fails midway is made good from the mirror, or the service ends: never a mixture."""
        version, state = self._policy.version, self._policy.state
        if not staged.reload:
            try:
                engine.adopt(version, lambda: weights.apply(staged))
            except Exception as error:
                log.error("update failed midway, loading everything", version=version, cause=_cause(error), exc_info=error)
            else:
                return
        self.carried.reloads += 1
        engine.load(version, from_host(state))

    async def _begin(self, engine: AnyEngine) -> None:
        """Only between two slices, and only with the newest head applied: a head that came during a slice or an update would
        otherwise be missed, and an engine that drains would never be empty."""
        if self._policy.behind(engine.version):
            return
        for name in self._quarantine.admit(self._hand.ready(), engine_idle=engine.idle):
            members = self._hand.begin(name)
            try:
                engine.submit(self._hand.group(name), members)
            except QueueFull as error:  # it is tried again when something has been sampled
                self._hand.recall(name)
                log.warning("the engine's queue is full", group=name, cause=str(error))
                return
            except Exception as error:  # nothing entered the engine: the failure is this group's, and no other's
                self._hand.recall(name)
                await self._raise_infrastructure(engine, error)
                await self._failed(name, self._quarantine.blame(name), error)

    async def _recover(self, engine: AnyEngine, error: Exception) -> None:
        """After a failed step: the engine starts again with the groups it had, one by one, until the one to blame is known."""
        engine.forget()
        suspects = self._hand.recall()
        await self._raise_infrastructure(engine, error)
        log.warning("a step failed", cause=_cause(error), groups=suspects, exc_info=error)
        condemned = self._quarantine.failed(suspects)
        await self._failed(suspects[0] if len(suspects) == 1 else None, condemned is not None, error)

    async def _raise_infrastructure(self, engine: AnyEngine, error: Exception) -> None:
        """What the machine did ends the service with its cause; its groups are given back and it is started again."""
        if is_infrastructure(error):
            self.counts.infrastructure_failures += 1
            await self._report(engine)
            raise error

    async def _failed(self, name: str | None, condemned: bool, error: Exception) -> None:
        """A data failure, with the group it is blamed on, if that is known."""
        self.counts.data_failures += 1
        if name is not None and condemned:
            tries = self._config.rollout.data_failures
            self.counts.groups_condemned += 1
            log.error("group dead-lettered", group=name, tries=tries, cause=_cause(error))
            await self._condemn(self._drop(name), f"data failure, tried {tries} times: {_cause(error)}")

    async def _hand_over(self, tasks: asyncio.TaskGroup, done: list[Trajectory]) -> None:
        """Store a slice's results beside the next slice; the results before them first, so that no more than these wait for the broker."""
        for trajectory in done:
            self._hand.finish(trajectory.group, trajectory.member)
        self._room.set()
        if self._storing is not None and (done or self._storing.done()):
            await self._stored()
        if done:
            self._storing_bytes = sum(map(_bytes, done))
            self._storing = tasks.create_task(self._store(done), name="store")

    async def _stored(self) -> None:
        storing, self._storing = self._storing, None
        if storing is not None:
            await storing
            self._storing_bytes = 0

    async def _store(self, done: list[Trajectory]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for trajectory in done:
                tasks.create_task(self._store_one(trajectory))
        for name in {t.group for t in done}:
            await self._settle(name)

    async def _store_one(self, trajectory: Trajectory) -> None:
        content_id = f"{trajectory.run}/trajectory/{trajectory.group}/{trajectory.member}"
        until = time.monotonic() + self._config.broker.lost_after_s
        while True:
            try:
                await publish_patiently(self._bus, self._subjects.trajectory(trajectory.group), trajectory, id=content_id,
                                        wait_s=self._config.dispatcher.full_wait_s)
            except BrokerUnavailable as error:  # the id makes it safe to try again, whatever came of the first attempt
                if time.monotonic() > until:
                    raise
                log.warning("broker does not answer, storing again", id=trajectory.id, cause=str(error))
                await asyncio.sleep(RETRY_S)
                continue
            except PayloadTooLarge as error:  # and so would it be the next time
                self.counts.data_failures += 1
                await self._condemn(self._hand.disown(trajectory.group), f"data failure, member {trajectory.member}: {_cause(error)}")
                return
            self._hand.store(trajectory.group, trajectory.member)
            return

    async def _settle(self, name: str) -> None:
        """Acknowledge the deliveries of a group that have all they ask for."""
        await self._acknowledge(name, self._hand.settle(name))
        if name not in self._hand:
            self._quarantine.forget(name)
        self._room.set()

    async def _acknowledge(self, name: str, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            self._leases.discard(delivery)
            try:
                await delivery.ack()
            except BrokerUnavailable as error:  # it will be delivered again and sampled to the same stored ids
                log.warning("group not acknowledged", group=name, cause=str(error))

    async def _condemn(self, deliveries: list[Delivery], reason: str) -> None:
        for delivery in deliveries:
            self._leases.discard(delivery)
            try:
                await delivery.dead_letter(reason)
            except BrokerUnavailable as error:  # it comes again, and fails again
                log.warning("not dead-lettered", subject=delivery.subject, cause=str(error))

    def _drop(self, name: str) -> list[Delivery]:
        self._quarantine.forget(name)
        return self._hand.drop(name)

    async def _give_back(self) -> None:
        for delivery in (*self._arriving, *self._hand.deliveries):
            self._leases.discard(delivery)
            try:
                await delivery.nak()
            except DriftlineError as error:
                log.warning("group not given back", subject=delivery.subject, cause=str(error))
        self._arriving, self._hand = [], Hand()

    async def _report_regularly(self, engine: AnyEngine) -> None:
        self._reported = (engine.tokens_sampled, time.monotonic())
        while True:
            await asyncio.sleep(REPORT_S)
            await self._report(engine)

    async def _report(self, engine: AnyEngine) -> None:
        (before, at), now = self._reported, time.monotonic()
        self._reported = (engine.tokens_sampled, now)
        await self._reporter.report({
            "tokens_sampled": engine.tokens_sampled, "tokens_per_s": (engine.tokens_sampled - before) / max(now - at, 1e-9),
            "active": engine.active, "waiting": engine.waiting, "version": engine.version, **asdict(self.seconds),
            "prompt_tokens": engine.prompt_tokens, "groups_held": len(self._hand), "members_unstored": self._hand.unstored,
            "storing_bytes": self._storing_bytes, "updates_given_up": self._policy.given_up, **asdict(self.counts), **{f"weights_{name}": n for name, n in asdict(self.carried).items()},
            **(engine.numbers() if isinstance(engine, Engine) else {}),
        })


def _bytes(trajectory: Trajectory) -> int:
    routes = 0 if trajectory.routes is None else trajectory.routes.nbytes
    return trajectory.tokens.nbytes + trajectory.action_mask.nbytes + trajectory.logprobs.nbytes + trajectory.versions.nbytes + routes


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _consumer(config: Config) -> ConsumerSpec:
    return next(c for c in run_topology(config).consumers if c.durable == "rollout")
