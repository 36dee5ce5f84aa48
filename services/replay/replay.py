"""Replaying a recording: every version made again from the recorded start and batches, and compared with the recorded digest.

Guarantees: nothing but the file, this code and the device decides what comes out. A version that differs is named with what the two
sides say about how they compute; the versions after it are not looked at, because they follow from it.

Two ways. `replay_learner` steps a fresh trainer. `replay_loop` gives the recorded, graded members to the real learner service through
a real broker, batch by batch, and looks at the ledger as well: every group must be trained exactly once, by its version.
"""

from __future__ import annotations

import asyncio
import re
import time
import tomllib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import torch

from driftline.messages.bus import Bus
from driftline.messages.errors import ConfigError, DriftlineError, IntegrityError
from driftline.messages.recording import RecordedGroup
from driftline.messages.subjects import Subjects
from driftline.messages.types import Admitted, Graded, Outcome, OutcomeEvent
from driftline.policy_store.blobs import JetStreamBlobs
from driftline.policy_store.checkpoint import write_checkpoint
from driftline.policy_store.location import JETSTREAM
from driftline.policy_store.reader import PolicyReader
from driftline.policy_store.tensor import State, state_digest
from driftline.services.config import Config, resolve
from driftline.services.learner.determinism import compute_deterministically
from driftline.services.learner.numerics import numerics_facts
from driftline.services.learner.records import batch_of
from driftline.services.learner.recovery import How
from driftline.services.learner.service import LearnerService
from driftline.services.learner.trainer import Trainer
from driftline.services.policy_model import build_model, policy_torch_dtype
from driftline.services.publishing import publish_patiently
from driftline.services.replay.comparison import Comparison, Difference, Mode, Span
from driftline.services.replay.reader import Recording
from driftline.services.tensors import from_host, to_host

__all__ = ["facts_here", "recorded_config", "replay_learner", "replay_loop", "span"]

Say = Callable[[str], None]

FULL_WAIT_S = 120.0
LATE_S = 10.0
CONTINUED = "continued"  # what a manifest says of an optimizer that took the step before this one
_ADAPTER = re.compile(r"\.lora_[AB]$")  # a checkpoint holds the base; the adapters come with the run's configuration


def span(recording: Recording, first: int | None, last: int | None) -> Span:
    """The versions to compare. Raises ConfigError when the recording does not hold them."""
    held = recording.versions
    start = recording.header.start_version
    chosen = Span(start if first is None else first, recording.last_version if last is None else last)
    if not start <= chosen.first <= chosen.last or chosen.last > recording.last_version:
        raise ConfigError(f"the recording holds versions {start} to {held.stop - 1}", field="--from, --to",
                          value=(chosen.first, chosen.last), remedy="name versions it holds, the smaller first")
    return chosen


def recorded_config(recording: Recording, folder: Path, last: int, device: str | None = None) -> Config:
    """The run's configuration, to be replayed up to version `last` from a checkpoint that is written into `folder`."""
    config = resolve(tomllib.loads(recording.header.config), origin=f"{recording.path}, recorded configuration")
    state = recording.start()
    base: State = {name: tensor for name, tensor in state.items() if not _ADAPTER.search(name)}
    init = write_checkpoint(folder, recording.header.start_version, base, {"format": "pt"}, {"config.json": recording.header.model.encode()})
    device = device or config.learner.device
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("this machine has no CUDA device", field="learner.device", value=device,
                          remedy="replay on the recorded kind of device; --device cpu computes the steps, with other last bits")
    return config.model_copy(update={
        "run": config.run.model_copy(update={"steps": max(1, last), "time_limit_s": 0.0, "dir": str(folder)}),
        "policy": config.policy.model_copy(update={"init": str(init), "store": JETSTREAM}),
        "learner": config.learner.model_copy(update={"device": device, "checkpoint_dir": ""}),
    })


def facts_here(config: Config) -> dict[str, str]:
    """How a learner of this configuration computes here, under the names its manifests use."""
    return numerics_facts(config, CONTINUED)


def differing(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What the two sides say otherwise. An optimizer restored or recomputed after a crash is the same as one that went on."""
    same = {CONTINUED, How.RESTORED.value, How.RECOMPUTED.value}
    recorded, here = ({k: CONTINUED if k == "optimizer" and v in same else v for k, v in facts.items()} for facts in (recorded, here))
    return {name: (recorded[name], here[name]) for name in recorded.keys() & here.keys() if recorded[name] != here[name]}


def replay_learner(
    recording: Recording, folder: Path, wanted: Span, *, device: str | None = None, say: Say = lambda _: None
) -> Comparison:
    """Step a fresh trainer through the recorded batches. `folder` is for temporary files."""
    config = recorded_config(recording, folder, wanted.last, device)
    facts = facts_here(config)
    trainer = fresh_trainer(recording, config)
    found = _Found(recording, wanted, Mode.LEARNER)
    header = recording.header
    if not found.see(header.start_version, header.start_digest, lambda: _digest(trainer), header.numerics, facts):
        return found.comparison()
    for step in recording.steps(wanted.last):
        skipped = trainer.skipped
        trainer.step(batch_of(recording.groups(step)))
        if trainer.skipped > skipped:
            found.problems.append(f"version {step.version}: the step was refused, its gradient is not finite")
            break
        if not found.see(step.version, step.facts.digest, lambda: _digest(trainer), step.facts.numerics, facts):
            break
        say(f"version {step.version} of {wanted.last}: {'equal' if step.version in wanted else 'computed'}")
    return found.comparison()


def fresh_trainer(recording: Recording, config: Config) -> Trainer:
    """A trainer that holds the recorded start and has taken no step. It computes as the learner service does, sum for sum."""
    compute_deterministically(config.learner.device)
    model = build_model(config, device=config.learner.device, threads=config.learner.threads)
    trainer = Trainer(model, config.learner, dtype=policy_torch_dtype(config))
    trainer.load_policy(from_host(recording.start()))
    return trainer


def _digest(trainer: Trainer) -> str:
    return state_digest(to_host(trainer.state()))


class _Found:
    """Versions seen so far, up to the first that differs."""

    def __init__(self, recording: Recording, wanted: Span, mode: Mode) -> None:
        self._recording, self._wanted, self._mode = recording, wanted, mode
        self._computed = self._compared = 0
        self._difference: Difference | None = None
        self.problems: list[str] = []

    def see(self, version: int, recorded: str, compute: Callable[[], str], numerics: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
        """False when the replay has its answer: the version differs."""
        self._computed += 1
        if version not in self._wanted:
            return True
        self._compared += 1
        here = compute()
        if here != recorded:
            self._difference = Difference(version, recorded, here, differing(numerics, facts))
        return here == recorded

    def comparison(self) -> Comparison:
        return Comparison(str(self._recording.path), self._recording.header.run, self._mode, self._wanted, self._computed, self._compared,
                          self._difference, tuple(self.problems))


async def replay_loop(
    bus: Bus, recording: Recording, config: Config, folder: Path, wanted: Span, *, wait_s: float = 600.0, say: Say = lambda _: None
) -> Comparison:
    """Give the recorded batches to the learner service on `bus`, whose streams are declared and empty.

    `config` is `recorded_config`'s, `folder` the learner's run folder, `wait_s` how long one version may take.
    """
    return await _Loop(bus, recording, config, wanted, wait_s, say).run(folder)


class _Loop:
    def __init__(self, bus: Bus, recording: Recording, config: Config, wanted: Span, wait_s: float, say: Say) -> None:
        self._bus, self._recording, self._config, self._wanted = bus, recording, config, wanted
        self._wait_s, self._say = wait_s, say
        self._run = recording.header.run
        self._subjects = Subjects(self._run)
        self._ledger = self._subjects.stream("LEDGER")
        self._reader = PolicyReader(bus, JetStreamBlobs(bus, self._run), self._run)
        self._found = _Found(recording, wanted, Mode.LOOP)
        self._outcomes: dict[str, list[OutcomeEvent]] = {}
        self._changed = asyncio.Event()

    async def run(self, folder: Path) -> Comparison:
        config = _feedable(self._config, self._recording, self._wanted.last)
        learner = LearnerService(self._bus, JetStreamBlobs(self._bus, self._run), config, folder)
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(self._follow(), name="ledger")
            serving = tasks.create_task(learner.run(), name="learner")
            try:
                alike = await self._start(serving) and await self._steps(serving)
                if alike and self._wanted.last > self._recording.header.start_version:
                    await self._ended(serving)
            finally:
                serving.cancel()
                following.cancel()
        return self._found.comparison()

    async def _start(self, serving: asyncio.Task[None]) -> bool:
        header = self._recording.header
        async with aclosing(self._reader.watch()) as heads:  # type: ignore[type-var]
            await self._beside(serving, anext(heads), f"version {header.start_version} is not published")
        return await self._see(header.start_version, header.start_digest, header.numerics)

    async def _steps(self, serving: asyncio.Task[None]) -> bool:
        for step in self._recording.steps(self._wanted.last):
            groups = self._recording.groups(step)
            await self._feed(groups)
            names = {group.group.group for group in groups}
            await self._beside(serving, self._all_ended(names), f"version {step.version} is not made")
            self._found.problems += [problem for group in groups for problem in self._judge(group)]
            if self._found.problems or not await self._see(step.version, step.facts.digest, step.facts.numerics):
                return False
            self._say(f"version {step.version} of {self._wanted.last}: {'equal' if step.version in self._wanted else 'computed'}")
        return True

    async def _all_ended(self, names: set[str]) -> None:
        while not names <= self._outcomes.keys():
            self._changed.clear()
            await self._changed.wait()

    async def _beside(self, serving: asyncio.Task[None], wanted: Awaitable[object], problem: str) -> None:
        """`wanted`, unless the learner fails or ends first, or the time is over."""
        waiting = asyncio.ensure_future(wanted)
        try:
            await asyncio.wait({waiting, serving}, timeout=self._wait_s, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done() and serving.done():
                serving.result()
                await asyncio.wait({waiting}, timeout=LATE_S)  # what it wrote last may still be on its way
            if not waiting.done():
                why = "and the learner has ended the run" if serving.done() else f"after {self._wait_s:g} s"
                raise DriftlineError(f"{problem}, {why}", field="replay", value=str(self._recording.path),
                                     remedy="a larger --wait, or --learner-only to see the step without the loop")
            waiting.result()
        finally:
            waiting.cancel()

    async def _ended(self, serving: asyncio.Task[None]) -> None:
        """The learner declares the run finished by itself; then the ledger holds one outcome per group and no other."""
        await asyncio.wait({serving}, timeout=self._wait_s)
        if not serving.done():
            raise DriftlineError(f"the learner does not end after {self._wait_s:g} s", field="replay", value=str(self._recording.path))
        newest = await self._bus.last(self._ledger, self._subjects.ledger)
        endings: Counter[str] = Counter()
        async with aclosing(self._bus.follow(self._ledger, self._subjects.ledger)) as events:  # type: ignore[type-var]
            async for stored in events:
                if isinstance(stored.message, OutcomeEvent):
                    endings[stored.message.group] += 1
                if newest is None or stored.seq >= newest.seq:
                    break
        self._found.problems += [f"group {name} ended {count} times" for name, count in sorted(endings.items()) if count != 1]

    def _judge(self, group: RecordedGroup) -> Iterator[str]:
        name, events = group.group.group, self._outcomes[group.group.group]
        if [(event.outcome, event.version) for event in events] != [(Outcome.TRAINED, group.version)]:
            got = ", ".join(f"{event.outcome} ({event.reason}) at version {event.version}" for event in events)
            yield f"group {name} was to be trained once, by version {group.version}: {got}"

    async def _see(self, version: int, recorded: str, numerics: Mapping[str, Any]) -> bool:
        manifest = await self._reader.manifest(version)
        return self._found.see(version, recorded, lambda: manifest.digest, numerics, manifest.numerics)

    async def _feed(self, groups: tuple[RecordedGroup, ...]) -> None:
        for entry in groups:
            # Admitted ahead of the clock: whatever the recorded deadline, it is not this replay's to miss.
            group, now = entry.group, time.time() + self._wait_s
            await publish_patiently(self._bus, self._subjects.admitted(group.group), Admitted(run=self._run, group=group, at=now),
                                    id=f"{self._run}/admitted/{group.group}", wait_s=FULL_WAIT_S, expect_last=0)
            for member in _members(entry):
                t = member.trajectory
                await publish_patiently(self._bus, self._subjects.graded(t.group), member, id=f"{self._run}/graded/{t.group}/{t.member}",
                                        wait_s=FULL_WAIT_S)

    async def _follow(self) -> None:
        events = self._bus.follow(self._ledger, f"{self._subjects.root}.ledger.outcome.>")
        async with aclosing(events) as stored_events:  # type: ignore[type-var]
            async for stored in stored_events:
                if isinstance(stored.message, OutcomeEvent):
                    self._outcomes.setdefault(stored.message.group, []).append(stored.message)
                    self._changed.set()


def _members(entry: RecordedGroup) -> Iterator[Graded]:
    """The recorded members, and in the place of each that was left out one that failed: the group must be complete, and its batch
    the recorded one."""
    recorded = {member.trajectory.member: member for member in entry.members}
    blank = entry.members[0].trajectory
    for number in range(entry.group.members):
        yield recorded.get(number) or Graded(
            run=blank.run, trajectory=blank.model_copy(update={"member": number}), reward=None, cause="left out when it was recorded",
        )


def _feedable(config: Config, recording: Recording, last: int) -> Config:
    """The recorded limits may say less than what was trained: a partial group is complete here, without its missing members."""
    sizes, smallest = set(), config.learner.min_group_members
    for step in recording.steps(last):
        groups = recording.groups(step)
        sizes.add(len(groups))
        smallest = min(smallest, *(len(group.members) for group in groups))
    if len(sizes) > 1:
        raise IntegrityError(f"batches of {sorted(sizes)} groups", field="groups per step", value=config.run.groups_per_step,
                             remedy="no one configuration makes them: use --learner-only")
    update: dict[str, Any] = {"learner": config.learner.model_copy(update={"min_group_members": smallest})}
    if sizes:
        update["run"] = config.run.model_copy(update={"groups_per_step": sizes.pop()})
    return config.model_copy(update=update)
