"""The learner service: forms batches, takes steps, commits versions. It alone writes outcomes, so a group can end only once.

The commit, in this order: the batch on record, its groups taken in the ledger, the step, policy bytes and manifest (which names the trajectories consumed and
the record), the head by compare-and-set, the outcomes, the acknowledgements. A learner that dies between any two resumes from the head: what the manifest names
is ended as trained and never trained again, the rest is delivered again. Optimizer state is written beside the training; what a crash cost of it is recomputed
from the record (`recovery`). One learner at a time (`ownership`); one that was replaced can neither move the head nor end a group that is being trained on.
A batch on which learner and rollout are too far apart (`watch`) is not trained on, and ends the run as failed at the version before it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import structlog
import torch

from driftline.messages.bus import Bus, Delivery
from driftline.messages.dead_letters import follow_dead, group_of
from driftline.messages.errors import DriftlineError, IntegrityError
from driftline.messages.recording import store_batch, store_version
from driftline.messages.subjects import Subjects
from driftline.messages.types import (
    Admitted,
    Divergence,
    DivergenceLevel,
    Graded,
    Outcome,
    OutcomeEvent,
    Retried,
    RunFinished,
)
from driftline.models.mlp import route_shape
from driftline.models.routes import RouteShape
from driftline.policy_store.blobs import BlobStore
from driftline.policy_store.digests import digest_state
from driftline.policy_store.manifest import Manifest
from driftline.policy_store.model_files import store_files
from driftline.policy_store.reader import PolicyReader
from driftline.policy_store.tensor import Layout
from driftline.policy_store.writer import PolicyWriter
from driftline.services.config import Config
from driftline.services.learner.assembler import Arrival, Assembler, Batch
from driftline.services.learner.checkpoints import Checkpointer, CheckpointFiles
from driftline.services.learner.determinism import compute_deterministically
from driftline.services.learner.handing_in import HandingIn
from driftline.services.learner.held import HeldMembers
from driftline.services.learner.ledger import LedgerPen
from driftline.services.learner.memory_plan import GIB, plan_of
from driftline.services.learner.numerics import numerics_facts
from driftline.services.learner.ownership import Ownership
from driftline.services.learner.probe import NumericsProbe
from driftline.services.learner.records import records_of
from driftline.services.learner.recovery import How, recover
from driftline.services.learner.route_replay import check_routes
from driftline.services.learner.start_files import start_files
from driftline.services.learner.trainer import StepReport, Trainer
from driftline.services.learner.watch import StepDrift, Watch, halted_because, rules_of, watch_values
from driftline.services.policy_model import build_model, compute_dtype, policy_torch_dtype
from driftline.services.publishing import pull_patiently
from driftline.services.runtime import run_topology
from driftline.services.telemetry import Reporter
from driftline.services.tensors import from_host, to_host

__all__ = ["LearnerService"]

log = structlog.get_logger("learner")

PULL_BATCH = 128
PULL_S = 1.0
# After RunFinished a dispatcher may still have one Admitted on the wire; what arrives in this time is cancelled too.
LATE_ADMISSION_S = 1.0
VERIFY_EVERY = 50
"""How many versions apart the changes that a device hands out are held to its weights; the first is."""


class LearnerService:
    def __init__(
        self, bus: Bus, blobs: BlobStore, config: Config, run_dir: Path, reporter: Reporter | None = None
    ) -> None:
        self._bus, self._config = bus, config
        self._run = config.run.name
        self._reporter = reporter or Reporter(bus, self._run, "learner")
        self._subjects = Subjects(self._run)
        self._ledger = self._subjects.stream("LEDGER")
        self._consumer = next(c for c in run_topology(config).consumers if c.durable == "learner")
        self._writer = PolicyWriter(
            bus, blobs, self._run, config.policy.full_every, full_share=config.policy.full_share, form=config.policy.delta_form)
        self._layouts: dict[str, Layout] = {}
        self._reader = PolicyReader(bus, blobs, self._run)
        self._files = CheckpointFiles(Path(config.learner.checkpoint_dir) if config.learner.checkpoint_dir else run_dir / "learner")
        self._checkpoints = Checkpointer(self._files, every=config.learner.checkpoint_every, bound=config.learner.max_recompute)
        self._owner = Ownership(bus, self._run, lease_s=config.learner.lease_s)
        self._pen = LedgerPen(bus, self._run, full_wait_s=config.dispatcher.full_wait_s)
        self._held = HeldMembers()
        self.assembler = Assembler(
            run=self._run, groups_per_step=config.run.groups_per_step, max_lag=config.run.max_lag,
            min_group_members=config.learner.min_group_members, started_at=time.time(), stale_policy=config.run.stale_policy,
            deadline_policy=config.run.deadline_policy, partial_min_members=config.run.partial_min_members,
            group_retries=config.run.group_retries,
        )
        self.head = -1
        self._digest = ""
        self._optimizer = "fresh"
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._starved = False
        self._waiting_at = -1
        self._seen = 0
        self._started_at: float | None = None
        self._bad_steps = 0
        self._failed_in_a_row = self._flat_in_a_row = 0
        self._poison: list[tuple[str, str]] = []
        self._probe: NumericsProbe | None = None
        self._rules = rules_of(config.watch)
        self._watch = Watch(self._run, self._rules)
        self._unsaid: list[Divergence] = []
        self._halted: Divergence | None = None
        self._routes: RouteShape | None = None

    async def run(self) -> None:
        """Train until `run.steps` versions exist or the time limit is over, then declare the run finished."""
        self._pen.epoch = await self._owner.claim()
        try:
            async with asyncio.TaskGroup() as tasks, self._held:
                helpers = [tasks.create_task(self._owner.keep(), name="ownership")]
                trainer = await self._resume()
                newest = await self._bus.last(self._ledger, self._subjects.ledger)
                helpers.append(tasks.create_task(self._follow_ledger(), name="ledger"))
                while self._seen < (newest.seq if newest else 0):
                    await self._wait(None)
                await self._recover()
                # No deadline counts from before now: recovery may have taken longer than one, with everything finished and waiting.
                self.assembler.started_at = time.time()
                helpers += [
                    tasks.create_task(self._receive(), name="receive"),
                    tasks.create_task(self._held.forget_lost(), name="lost leases"),
                    tasks.create_task(self._follow_dead(), name="dead letters"),
                ]
                end = await self._ended_before()
                if end is None:
                    end = await self._train(trainer)
                    # The epoch: a run that was reopened may end at the same version again, and must be heard.
                    id = f"{self._run}/finished/{end.version}/{self._pen.epoch}"
                    await self._bus.publish(self._subjects.finished, end, id=id)
                    await self._tell()
                await self._finish(end)
                await self._checkpoints.last(trainer, self.head, self._digest)
                for helper in helpers:
                    helper.cancel()
        finally:
            await self._checkpoints.close()
            await self._owner.release()

    async def _resume(self) -> Trainer:
        """The trainer at the newest head; version 0 is published here if there is none yet."""
        learner = self._config.learner
        compute_deterministically(learner.device)
        await asyncio.to_thread(self._plan)
        model = await asyncio.to_thread(build_model, self._config, device=learner.device, threads=learner.threads)
        trainer = Trainer(model, learner, dtype=policy_torch_dtype(self._config), count_flips=self._rules.count_flips)
        if learner.probe_members:
            self._probe = NumericsProbe(model, members=learner.probe_members, keep=self._config.run.max_lag + 1, replay=learner.router_replay,
                                        count_flips=self._rules.count_flips, dtype=trainer.dtype)
        if learner.router_replay:
            self._routes = route_shape(model)
        self._layouts = trainer.layouts()
        head = await self._writer.resume(fence=str(self._pen.epoch))
        if head is None:
            await self._publish_start(trainer)
            return trainer
        self.head, self._digest = head.version, head.digest
        manifest = await self._reader.load(head.link)
        weights = from_host(await self._writer.base())
        found = await recover(trainer, manifest, weights, self._bus, self._files)
        self._optimizer, self._checkpoints.durable = found.how.value, found.start
        await self._remember(head.version, trainer)
        log.log(30 if found.how in (How.FRESH, How.INEXACT) else 20, "resumed", version=head.version, optimizer=found.how,
                checkpoint=found.start, steps_recomputed=found.steps, **({"cause": found.cause} if found.cause else {}))
        await store_version(self._bus, manifest.recorded)
        return trainer

    def _plan(self) -> None:
        """What a step will need, on record; ConfigError before anything is allocated where the device has too little."""
        device = self._config.learner.device
        plan = plan_of(self._config, compute_dtype(self._config, device))
        log.info("memory planned", device=device, tokens=plan.load.tokens, gib={part.value: round(size / GIB, 3) for part, size in plan.parts.items() if size})
        if device.startswith("cuda"):
            plan.require(torch.cuda.mem_get_info(device)[1], device)

    async def _remember(self, version: int, trainer: Trainer) -> None:
        if self._probe is not None:
            await asyncio.to_thread(self._probe.remember_model, version, trainer.model)

    async def _follow_ledger(self) -> None:
        async with aclosing(self._bus.follow(self._ledger, self._subjects.ledger)) as events:  # type: ignore[type-var]
            async for stored in events:
                self._pen.seen(stored)
                match stored.message:
                    case Admitted() as admitted:
                        self._started_at = admitted.at if self._started_at is None else self._started_at
                        self.assembler.admit(admitted.group, admitted.at)
                    case Retried() as retried:
                        self.assembler.retried(retried)
                    case OutcomeEvent() as outcome:
                        self.assembler.ended(outcome)
                        await self._held.acknowledge(outcome.group)
                self._seen = stored.seq
                self._changed.set()

    async def _recover(self) -> None:
        """Outcomes that a crash kept from being written: the head's manifest says what was trained."""
        if self.head > 0:
            manifest: Manifest = await self._reader.manifest(self.head)
            await self._end(self.assembler.recover(manifest.consumed, self.head, now=time.time()))
        for group in self.assembler.retrying():
            await self._pen.requeue(group)

    async def _follow_dead(self) -> None:
        """Work that was given up as poison ends its group at once. What somebody sent into a group's subject and could not be read
        does not: the group's own members may still come."""
        limits = {c.durable: c.max_deliver for c in run_topology(self._config).consumers}
        budget = {"trajectories": limits["grader"], "graded": limits["learner"]}
        async with aclosing(follow_dead(self._bus, self._run)) as letters:
            async for letter in letters:
                group = group_of(letter)
                if group is not None and (letter.kind == "groups" or letter.deliveries > budget.get(letter.kind, letter.deliveries)):
                    self._poison.append((group, f"dead-lettered: {letter.reason}"))
                    self._changed.set()

    async def _ended_before(self) -> RunFinished | None:
        """The run was declared finished by a learner that may not have come to the end of its outcomes."""
        stored = await self._bus.last(self._subjects.stream("CONTROL"), self._subjects.finished)
        return stored.message if stored is not None and isinstance(stored.message, RunFinished) else None

    async def _receive(self) -> None:
        limit = self._config.learner.held_bytes
        while True:
            # Over the limit only what a waiting trainer lacks is taken, one at a time: the limit must not become a deadlock.
            over = self.assembler.held_bytes >= limit
            if over and not self._starved:
                self._room.clear()
                await self._room.wait()
                continue
            for delivery in await pull_patiently(self._bus, self._consumer, batch=1 if over else PULL_BATCH, timeout_s=PULL_S):
                await self._take(delivery)
            self._changed.set()

    async def _take(self, delivery: Delivery) -> None:
        graded = delivery.message
        if not isinstance(graded, Graded):
            await delivery.dead_letter(f"expected a graded trajectory, got {type(graded).__name__}")
            return
        try:
            if self._routes is not None:  # half a second for a long one, and leases are renewed meanwhile
                await asyncio.to_thread(check_routes, graded.trajectory, self._routes)
        except IntegrityError as error:  # it would fail every step it is in; its group cannot be complete without it
            self._poison.append((graded.trajectory.group, f"dead-lettered: {error}"))
            await delivery.dead_letter(str(error))
            return
        match self.assembler.arrive(graded):
            case Arrival.ACCEPTED | Arrival.DUPLICATE:
                # A duplicate may be the held message again: it is acknowledged with the first, when the group has ended.
                self._held.add(graded.trajectory.group, delivery)
            case Arrival.ALREADY_ENDED:
                await self._held.settle([delivery])
            case Arrival.UNKNOWN:
                await delivery.dead_letter("contradicts the group it names, or is of another run")

    async def _wait(self, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return
        self._changed.clear()

    async def _train(self, trainer: Trainer) -> RunFinished:
        run = self._config.run
        waiting_since = time.monotonic()
        while self.head < run.steps:
            now = time.time()
            if self._out_of_time(now):
                return self._finished(f"time limit of {run.time_limit_s:g} s reached")
            await self._settle(now)
            if run.max_failed_groups and self._failed_in_a_row >= run.max_failed_groups:
                return self._finished(f"{self._failed_in_a_row} groups in a row failed (run.max_failed_groups)", failed=True)
            if run.max_flat_groups and self._flat_in_a_row >= run.max_flat_groups:
                return self._finished(f"{self._flat_in_a_row} groups in a row had one reward for all their members: nothing is left to learn from (run.max_flat_groups)")
            batch = self.assembler.next_batch(self.head)
            if batch is None:
                self._say_what_for()
                await self._starve(self._patience(time.time()))
                continue
            waited = time.monotonic() - waiting_since
            await self._step(trainer, batch, waited)
            if self._halted is not None:
                return self._finished(halted_because(self._halted), failed=True)
            waiting_since = time.monotonic()
        return self._finished(f"{run.steps} versions produced")

    async def _settle(self, now: float) -> None:
        """Write every ending and every retry that is due."""
        poison, self._poison = self._poison, []
        failed = [self.assembler.fail(group, reason, head=self.head, now=now) for group, reason in poison]
        await self._end([event for event in failed if event is not None])
        for retry in self.assembler.retries(now):
            await self._pen.retry(retry)
            self.assembler.retried(retry)
            log.info("group queued again", group=retry.group.group, attempt=retry.group.attempt, members=retry.group.wanted)
        await self._end([*self.assembler.sweep(self.head, now=now), *self.assembler.expire(now, head=self.head)])

    def _finished(self, reason: str, *, failed: bool = False) -> RunFinished:
        return RunFinished(run=self._run, version=self.head, reason=reason, at=time.time(), failed=failed)

    def _say_what_for(self) -> None:
        """Once per step: a step that could be taken waits for groups it would make stale."""
        waiting = self.assembler.waiting_for(self.head)
        if waiting and self._waiting_at != self.head:
            self._waiting_at = self.head
            log.info("step waits for groups it would make stale", head=self.head, groups=waiting[:8], count=len(waiting))

    async def _starve(self, timeout_s: float | None) -> None:
        self._starved = True
        self._room.set()
        try:
            await self._wait(timeout_s)
        finally:
            self._starved = False

    def _patience(self, now: float) -> float | None:
        """How long nothing but an arrival can matter: until the next deadline or the end of the run's time."""
        ends = [self.assembler.next_deadline()]
        if self._config.run.time_limit_s and self._started_at is not None:
            ends.append(self._started_at + self._config.run.time_limit_s)
        due = [end for end in ends if end is not None]
        return max(0.0, min(due) - now) + 0.001 if due else None

    def _out_of_time(self, now: float) -> bool:
        limit = self._config.run.time_limit_s
        return bool(limit) and self._started_at is not None and now >= self._started_at + limit

    async def _step(self, trainer: Trainer, batch: Batch, waited: float) -> None:
        began = time.monotonic()
        version = batch.head + 1
        await self._checkpoints.before(trainer, batch.head, self._digest)
        elsewhere = await self._pen.take(batch.group_ids, version)
        if elsewhere:
            self.assembler.release(batch)
            for event in elsewhere:
                self.assembler.ended(event)
            return
        skipped = trainer.skipped
        async with self._writer.draft(self._layouts, version=version, learner_step=version) as draft:
            handing = HandingIn(draft)
            async with asyncio.TaskGroup() as tasks:
                recording = tasks.create_task(store_batch(self._bus, self._run, records_of(self._run, batch), version))
                tasks.create_task(handing.run())
                numerics = await asyncio.to_thread(self._probe.measure, batch) if self._probe is not None else None
                gate = self._watch.gate(version, numerics)
                report = await asyncio.to_thread(trainer.step, batch, handing.emit, allow=gate)
                handing.close()
            self._unsaid += gate.verdict.events
            if gate.verdict.halt is not None:  # its groups end with the run, which is said before the ledger hears why: no crash in between trains them
                draft.discard()
                self.assembler.release(batch)
                self._halted = gate.verdict.halt
                await self._reporter.report({**report.values, **watch_values(report.drift, numerics, self._watch.state), "halted": 1.0})  # of no version
                return
            await self._tell()
            if trainer.skipped > skipped:
                draft.discard()
                await self._refuse(batch, report)
                return
            self._bad_steps = 0
            stepped = time.monotonic()
            manifest = await draft.commit(
                consumed=batch.consumed, numerics=numerics_facts(self._config, self._optimizer), batch=recording.result())
        await self._published(manifest, trainer)
        await self._verify(manifest, trainer)
        publish_s = time.monotonic() - stepped
        await self._end(self.assembler.commit(batch, version, now=time.time()))
        await self._checkpoints.after(trainer, version, manifest.digest)
        await self._measure(report, numerics, manifest, version, waited, time.monotonic() - began, publish_s)

    async def _tell(self) -> None:
        """Log what the watch said, and write it into the ledger."""
        while self._unsaid:
            event = self._unsaid.pop(0)
            level = {DivergenceLevel.CLEARED: 20, DivergenceLevel.ALARM: 30, DivergenceLevel.HALT: 40}[event.level]
            log.log(level, "learner and rollout are too far apart" if level > 20 else "learner and rollout are close again", said=event.level.value,
                    signal=event.signal.value, version=event.version, value=event.value, limit=event.limit, tokens=event.tokens, in_a_row=event.steps)
            await self._pen.note(event)

    async def _refuse(self, batch: Batch, report: StepReport) -> None:
        """A gradient that is not finite changed nothing; its groups end as failed, so that they are not tried for ever."""
        self._bad_steps += 1
        log.error("step refused: the gradient is not finite", head=batch.head, groups=batch.group_ids, in_a_row=self._bad_steps)
        self.assembler.release(batch)
        events = [
            OutcomeEvent(run=self._run, group=entry.group.group, outcome=Outcome.FAILED, reason="the step's gradient was not finite",
                         version=batch.head + 1, members=0, at=time.time(),
                         arrived=tuple(sorted({*(m.trajectory.member for m in entry.members), *entry.excluded})))
            for entry in batch.groups
        ]
        for event in events:
            self.assembler.ended(event)
        await self._end(events)
        if self._bad_steps >= self._config.learner.max_bad_steps:
            raise DriftlineError(f"{self._bad_steps} steps in a row had a gradient that is not finite", field="grad_norm",
                                 value=report.values.get("grad_norm"), remedy="lower learner.lr, or inspect the rewards")

    async def _publish_start(self, trainer: Trainer) -> None:
        await store_files(self._bus, self._run, await asyncio.to_thread(start_files, self._config, self._layouts))
        tensors = await asyncio.to_thread(trainer.state)
        manifest = await self._writer.publish(
            to_host(tensors), version=0, learner_step=0, numerics=numerics_facts(self._config, self._optimizer))
        await self._published(manifest, trainer)

    async def _verify(self, manifest: Manifest, trainer: Trainer) -> None:
        """A device hands out changes only. Now and then they are held to the whole policy: readers check what they read against the
        manifest, and only here can it be seen that the manifest is of other weights than the learner's."""
        if not trainer.by_changes or manifest.version % VERIFY_EVERY != 1:
            return
        tensors = await asyncio.to_thread(trainer.state)
        if (found := await digest_state(await asyncio.to_thread(to_host, tensors))) != manifest.digest:
            raise IntegrityError(f"the learner's weights have digest {found}", field=f"digest of version {manifest.version}",
                                 value=manifest.digest, remedy="what changed was found wrongly on the device: do not use this run's policies")

    async def _published(self, manifest: Manifest, trainer: Trainer) -> None:
        """The head has moved: the word on record, and what the probe needs."""
        self.head, self._digest, self._optimizer = manifest.version, manifest.digest, "continued"
        await store_version(self._bus, manifest.recorded)
        await self._remember(manifest.version, trainer)

    async def _end(self, events: Sequence[OutcomeEvent]) -> None:
        """Write outcomes, then acknowledge what their groups held. Safe to repeat: the ledger keeps the first."""
        for event in events:
            await self._pen.end(event)
            match event.outcome:
                case Outcome.FAILED | Outcome.EXPIRED:
                    self._failed_in_a_row += 1
                case Outcome.ZERO_VARIANCE:
                    self._failed_in_a_row = 0
                    self._flat_in_a_row += 1
                case Outcome.TRAINED:
                    self._failed_in_a_row = self._flat_in_a_row = 0
            await self._held.acknowledge(event.group)
        if events:
            self._room.set()

    async def _measure(
        self, report: StepReport, numerics: StepDrift | None, manifest: Manifest, version: int, waited: float, step_s: float, publish_s: float
    ) -> None:
        stats = self._writer.stats
        assert stats is not None
        sizes = {
            "publish_bytes": float(stats.bytes_delta or stats.bytes_full), "policy_bytes": float(stats.bytes_raw),
            "full_bytes": float(stats.bytes_full), "changed_share": stats.changed_share, "encode_s": stats.encode_s,
            "upload_s": stats.upload_s,
        }
        same = None if numerics is None else numerics.drift.all
        same_weights = {} if same is None else {
            "k3_lag0": same.k3, "bitwise_equal": same.bitwise_equal, "max_abs_lag0": same.max_abs, "tokens_lag0": float(same.tokens),
        }
        values = {**report.values, **same_weights, **watch_values(report.drift, numerics, self._watch.state), **sizes, "wait_s": waited, "step_s": step_s, "publish_s": publish_s, "version": float(version),
                  "ready_groups": float(self.assembler.ready_groups), "held_bytes": float(self.assembler.held_bytes),
                  "checkpoint_lag": float(version - self._checkpoints.durable), "checkpoint_wait_s": self._checkpoints.waited_s}
        log.info("version published", version=version, reward=round(report.values["reward_train"], 4),
                 lag_max=report.values["lag_max"], k3_lag0=values.get("k3_lag0"), step_s=round(step_s, 3), wait_s=round(waited, 3))
        lengths = self.assembler.lengths
        series = {"lag_histogram": report.lag_histogram, "lengths_trained": _floats(lengths.trained), "lengths_otherwise": _floats(lengths.otherwise)}
        await self._reporter.report(values, series, step=version)

    async def _finish(self, end: RunFinished) -> None:
        """Everyone is told, so that nothing new is admitted: end what is still open."""
        log.info("run finished", version=end.version, reason=end.reason, failed=end.failed)
        until = time.monotonic() + LATE_ADMISSION_S
        while True:
            await self._end(self.assembler.cancel_all(end.reason, now=time.time(), head=self.head))
            left = until - time.monotonic()
            if left <= 0:
                break
            await self._wait(left)


def _floats(counts: Sequence[int]) -> tuple[float, ...]:
    return tuple(float(count) for count in counts)
