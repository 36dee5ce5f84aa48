"""Does the loop train on the lengths it samples? Waiting for long samples against dropping them.

The real dispatcher, the real bus (in memory) and the real assembler run a loop whose engines are scripted: a sample takes time in proportion
to its length, lengths have a heavy tail, and 15 % of the groups have equal rewards, whatever their length. A group enters an engine when all its members
fit, tokens are stamped with the head at the time they are sampled, and a group that ended is given up, as the real engine does it. Time is
virtual: an event loop whose clock jumps to the next timer, so every figure but the wall time is the same on any machine. The learner is scripted too (a
step takes a fixed time and there are no weights); it does with the assembler what the service does.

    python benchmarks/length_bias.py [--device cpu-2core] [--groups 800]

Compared are the first `groups` groups: the lengths of all their members, known from the script, with the lengths of those trained on, as histograms by powers of two. `ours`
is `run.stale_policy = "wait"`, `peer` is `"drop"`; `bound` is what the groups with equal rewards alone would leave.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import logging
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from driftline.messages import Leases
from driftline.messages.bus import Bus, Delivery
from driftline.messages.memory import MemoryBus
from driftline.messages.subjects import Subjects
from driftline.messages.types import (
    Admitted,
    Finish,
    Graded,
    Group,
    Outcome,
    OutcomeEvent,
    RunFinished,
    Task,
    Trajectory,
)
from driftline.services.config import Config, StalePolicy
from driftline.services.dispatcher.service import DispatcherService
from driftline.services.learner.assembler import Assembler
from driftline.services.runtime import run_topology

RUN = "lengths"
GROUPS_PER_STEP, GROUP_SIZE = 8, 8
ENGINES, ROWS = 2, 64  # 1.1 s of sampling for a step's groups, if no row was ever empty
TOKEN_S = 0.02
CASES = ((1, 1.0), (2, 1.0), (4, 1.0), (1, 8.0))  # max_lag, and how long a step takes; the longest sample takes 41 s
MAX_TOKENS, MEDIAN, SPREAD = 2048, 64.0, (0.8, 0.8)  # log-normal: between tasks, between members of one
EQUAL = 0.15
LONG = 512
Row = dict[str, object]


class JumpingSelector(selectors.DefaultSelector):
    """Never waits: the time it was to wait for has passed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            sys.exit("the loop waits for something that never happens")
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualTime(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = JumpingSelector()
        super().__init__(self._jumping)
        self.set_default_executor(Inline())

    def time(self) -> float:
        return self._jumping.now


class Inline(ThreadPoolExecutor):
    """Work for a thread is done at once: it takes no virtual time."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


def lengths_of(index: int) -> np.ndarray:
    """How long the members of a group will be."""
    rng = np.random.default_rng((7, index))
    between, within = SPREAD
    lengths = MEDIAN * np.exp(between * rng.standard_normal() + within * rng.standard_normal(GROUP_SIZE))
    return np.clip(np.rint(lengths), 1, MAX_TOKENS).astype(int)


def has_equal_rewards(index: int) -> bool:
    return bool(np.random.default_rng((8, index)).random() < EQUAL)


class Tasks:
    def task(self, index: int, seed: int) -> Task:
        return Task(id=f"task/{index}", source="script", family="lengths", prompt="p")


class Head:
    """The newest version, and since when."""

    def __init__(self) -> None:
        self.since = [0.0]

    @property
    def version(self) -> int:
        return len(self.since) - 1

    def at(self, times: np.ndarray) -> np.ndarray:
        return (np.searchsorted(self.since, times, side="right") - 1).astype("<i4")

    def move(self) -> None:
        self.since.append(asyncio.get_running_loop().time())


class ScriptedEngine:
    """Samples groups in order, each when its members fit, and gives up those that ended."""

    def __init__(self, bus: Bus, config: Config, head: Head) -> None:
        self._bus, self._head = bus, head
        self._subjects = Subjects(RUN)
        self._consumer = next(c for c in run_topology(config).consumers if c.durable == "rollout")
        self._free = ROWS
        self._freed = asyncio.Event()
        self._members: dict[str, list[asyncio.Task[None]]] = {}
        self.tokens = 0.0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks, Leases() as leases:
            tasks.create_task(self._follow_outcomes())
            while True:
                while self._free < GROUP_SIZE:
                    self._freed.clear()
                    await self._freed.wait()
                for delivery in await self._bus.pull(self._consumer, batch=1, timeout_s=60.0):
                    leases.add(delivery)
                    self._free -= GROUP_SIZE
                    tasks.create_task(self._sample(delivery, leases))

    async def _sample(self, delivery: Delivery, leases: Leases) -> None:
        group = delivery.message
        assert isinstance(group, Group)
        lengths = lengths_of(group.index)
        members = [asyncio.create_task(self._member(group, m, int(lengths[m]))) for m in group.to_sample]
        self._members[group.group] = members
        await asyncio.wait(members)
        del self._members[group.group]
        for member in members:
            if not member.cancelled():
                member.result()
        leases.discard(delivery)
        await delivery.ack()

    async def _member(self, group: Group, member: int, length: int) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            await asyncio.sleep(length * TOKEN_S)
        finally:
            self.tokens += (loop.time() - began) / TOKEN_S
            self._free += 1
            self._freed.set()
        reward = 0.5 if has_equal_rewards(group.index) else float(member % 2)
        versions = self._head.at(began + TOKEN_S * np.arange(1, length + 1))
        trajectory = Trajectory(
            run=RUN, group=group.group, member=member, members=group.members, index=group.index, task=group.task, prompt_tokens=1,
            tokens=np.ones(length + 1, "<i4"), action_mask=np.arange(length + 1) > 0, logprobs=np.zeros(length + 1, "<f4"),
            versions=np.concatenate([np.array([-1], "<i4"), versions]), finish=Finish.STOP,
        )
        await self._bus.publish(self._subjects.graded(group.group), Graded(run=RUN, trajectory=trajectory, reward=reward),
                                id=f"{RUN}/graded/{group.group}/{member}")

    async def _follow_outcomes(self) -> None:
        async with aclosing(self._bus.follow(self._subjects.stream("LEDGER"), self._subjects.ledger)) as events:  # type: ignore[type-var]
            async for stored in events:
                if isinstance(stored.message, OutcomeEvent):
                    for member in self._members.get(stored.message.group, ()):
                        member.cancel()


@dataclass
class ScriptedLearner:
    """What the learner service does with the assembler, without weights, until every group of the cohort has ended."""

    bus: Bus
    config: Config
    head: Head
    cohort: int
    step_s: float
    ended: dict[int, OutcomeEvent] = field(default_factory=dict)
    finished_at: float = 0.0
    held_back_s: float = 0.0

    def __post_init__(self) -> None:
        run = self.config.run
        self.assembler = Assembler(run=RUN, groups_per_step=run.groups_per_step, max_lag=run.max_lag, stale_policy=run.stale_policy)
        self._subjects = Subjects(RUN)
        self._consumer = next(c for c in run_topology(self.config).consumers if c.durable == "learner")
        self._held: dict[str, list[Delivery]] = {}
        self._changed = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks, Leases() as leases:
            helpers = [tasks.create_task(self._follow_ledger()), tasks.create_task(self._receive(leases))]
            while sum(index < self.cohort for index in self.ended) < self.cohort:
                await self._end(self.assembler.sweep(self.head.version, now=loop.time()), leases)
                held_back = bool(self.assembler.waiting_for(self.head.version))
                batch = self.assembler.next_batch(self.head.version)
                if batch is None:
                    began = loop.time()
                    await self._changed.wait()
                    self._changed.clear()
                    self.held_back_s += (loop.time() - began) * held_back
                    continue
                await asyncio.sleep(self.step_s)
                self.head.move()
                await self._end(self.assembler.commit(batch, self.head.version, now=loop.time()), leases)
            self.finished_at = loop.time()
            for helper in helpers:
                helper.cancel()
        finished = RunFinished(run=RUN, version=self.head.version, reason="the cohort has ended")
        await self.bus.publish(self._subjects.finished, finished, id=f"{RUN}/finished")

    async def _follow_ledger(self) -> None:
        async with aclosing(self.bus.follow(self._subjects.stream("LEDGER"), self._subjects.ledger)) as events:  # type: ignore[type-var]
            async for stored in events:
                match stored.message:
                    case Admitted() as admitted:
                        self.assembler.admit(admitted.group, asyncio.get_running_loop().time())
                    case OutcomeEvent() as outcome:
                        self.assembler.ended(outcome)
                self._changed.set()

    async def _receive(self, leases: Leases) -> None:
        while True:
            for delivery in await self.bus.pull(self._consumer, batch=128, timeout_s=60.0):
                graded = delivery.message
                assert isinstance(graded, Graded)
                if self.assembler.outcome(graded.trajectory.group) is not None:
                    await delivery.ack()
                    continue
                self.assembler.arrive(graded)
                leases.add(delivery)
                self._held.setdefault(graded.trajectory.group, []).append(delivery)
            self._changed.set()

    async def _end(self, events: Sequence[OutcomeEvent], leases: Leases) -> None:
        for event in events:
            await self.bus.publish(self._subjects.outcome(event.group), event, id=f"{RUN}/outcome/{event.group}", expect_last=0)
            self.ended[int(event.group[1:])] = event
            for delivery in self._held.pop(event.group, []):
                leases.discard(delivery)
                await delivery.ack()


@dataclass(frozen=True)
class Result:
    sampled: np.ndarray  # lengths of every member of the cohort
    trained: np.ndarray
    without_equal: np.ndarray  # what would be trained if no group were dropped
    stale: float
    steps_per_s: float
    trained_per_s: float
    wasted: float
    held_back: float


async def measure(policy: StalePolicy, max_lag: int, step_s: float, cohort: int) -> Result:
    config = Config.model_validate({
        "run": {"name": RUN, "groups_per_step": GROUPS_PER_STEP, "group_size": GROUP_SIZE, "max_lag": max_lag, "stale_policy": policy,
                "group_deadline_s": 1e6},
        "sampling": {"max_tokens": MAX_TOKENS},
    })
    head = Head()
    async with MemoryBus() as bus:
        await bus.declare(run_topology(config))
        engines = [ScriptedEngine(bus, config, head) for _ in range(ENGINES)]
        learner = ScriptedLearner(bus, config, head, cohort, step_s)
        async with asyncio.TaskGroup() as tasks:
            others = [tasks.create_task(DispatcherService(bus, config, Tasks()).run())]
            others += [tasks.create_task(engine.run()) for engine in engines]
            await learner.run()
            for other in others:
                other.cancel()
    of = {index: lengths_of(index) for index in range(max(cohort, *learner.ended) + 1)}
    trained = [i for i, event in learner.ended.items() if event.outcome is Outcome.TRAINED]
    tokens = sum(int(of[i].sum()) for i in trained)
    return Result(
        sampled=np.concatenate([of[i] for i in range(cohort)]),
        trained=np.concatenate([of[i] for i in trained if i < cohort]),
        without_equal=np.concatenate([of[i] for i in range(cohort) if not has_equal_rewards(i)]),
        stale=sum(e.outcome is Outcome.STALE for i, e in learner.ended.items() if i < cohort) / cohort,
        steps_per_s=head.version / learner.finished_at,
        trained_per_s=tokens / learner.finished_at,
        wasted=1 - tokens / sum(engine.tokens for engine in engines),
        held_back=learner.held_back_s / learner.finished_at,
    )


def simulate(policy: StalePolicy, max_lag: int, step_s: float, cohort: int) -> Result:
    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        return runner.run(measure(policy, max_lag, step_s, cohort))


def histogram(lengths: np.ndarray) -> np.ndarray:
    """Shares of 1, 2-3, 4-7, ... tokens."""
    counts = np.bincount(np.log2(lengths).astype(int), minlength=MAX_TOKENS.bit_length())
    return np.asarray(counts / counts.sum())


def distance(some: np.ndarray, all_: np.ndarray) -> float:
    """Total variation: the share of samples that would have to change."""
    return float(np.abs(histogram(some) - histogram(all_)).sum() / 2)


def rows_of(label: str, step_s: float, wait: Result, drop: Result) -> list[Row]:
    sampled, fair = wait.sampled, wait.without_equal

    def row(what: str, unit: str, ours: float, peer: float, bound: float | None, note: str) -> Row:
        def short(value: float | None) -> float | None:
            return None if value is None else float(f"{value:.4g}")

        ratio = ours / peer if peer else None
        return {"case": f"{label}, {what}", "ours": short(ours), "unit": unit, "peer": "drop", "peer_value": short(peer),
                "ratio": short(ratio), "bound": short(bound), "note": note}

    def long_share(lengths: np.ndarray) -> float:
        return 100 * float((lengths >= LONG).sum() / (sampled >= LONG).sum())

    def mean(lengths: np.ndarray) -> float:
        return 100 * float(lengths.mean() / sampled.mean())

    return [
        row("trained against sampled lengths", "total variation", distance(wait.trained, sampled), distance(drop.trained, sampled),
            distance(fair, sampled), "0: the same histogram, 1: disjoint; lower is better"),
        row("mean length trained on", "% of the sampled mean", mean(wait.trained), mean(drop.trained), mean(fair),
            f"sampled mean {sampled.mean():.1f} tokens"),
        row(f"samples of {LONG} tokens and more trained on", "%", long_share(wait.trained), long_share(drop.trained), long_share(fair),
            f"{(sampled >= LONG).sum()} of {len(sampled)} samples"),
        row("groups ended stale", "%", 100 * wait.stale, 100 * drop.stale, 0.0, "of the cohort"),
        row("steps", "1/s (virtual)", wait.steps_per_s, drop.steps_per_s, 1 / step_s,
            f"the price of waiting; held back {wait.held_back:.1%} of the time"),
        row("tokens trained on", "1/s (virtual)", wait.trained_per_s, drop.trained_per_s, None, "a step on short samples has fewer"),
        row("sampled tokens thrown away", "%", 100 * wait.wasted, 100 * drop.wasted, None, "equal rewards, stale, and what is in flight at the end"),
    ]


def print_histograms(label: str, wait: Result, drop: Result) -> None:
    print(f"{label}: share of samples by length, %")
    print(f"{'tokens':>12} {'sampled':>8} {'wait':>8} {'drop':>8}")
    for i, shares in enumerate(zip(histogram(wait.sampled), histogram(wait.trained), histogram(drop.trained), strict=True)):
        if any(shares):
            print(f"{f'{2**i}-{2 ** (i + 1) - 1}':>12} " + " ".join(f"{100 * share:8.2f}" for share in shares))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--device", default="cpu-2core")
    arguments.add_argument("--groups", type=int, default=800)
    given = arguments.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    rows: list[Row] = []
    for max_lag, step_s in CASES:
        label, began = f"max_lag {max_lag}, steps of {step_s:g} s", time.monotonic()
        wait, drop = (simulate(policy, max_lag, step_s, given.groups) for policy in (StalePolicy.WAIT, StalePolicy.DROP))
        rows += rows_of(label, step_s, wait, drop)
        print_histograms(label, wait, drop)
        print(f"({time.monotonic() - began:.1f} s of wall time)\n")
    print(f"{'case':68} {'wait':>9} {'drop':>9} {'ratio':>7} {'bound':>9}  unit")
    for entry in rows:
        cells = [entry["ours"], entry["peer_value"], entry["ratio"], entry["bound"]]
        texts = ["-" if cell is None else f"{cell:.4g}" for cell in cells]
        print(f"{entry['case']:68} {texts[0]:>9} {texts[1]:>9} {texts[2]:>7} {texts[3]:>9}  {entry['unit']}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    result = {
        "command": f"python benchmarks/length_bias.py --device {given.device} --groups {given.groups}",
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": given.device,
        "note": "Virtual time and scripted engines around the real dispatcher, bus (in memory) and assembler: what the policies do to lengths, not how fast "
                f"a machine is. {ENGINES} engines of {ROWS} rows, {TOKEN_S} s a token, steps of {GROUPS_PER_STEP} groups of {GROUP_SIZE}. "
                "`ours` is stale_policy = \"wait\"; `bound` is what the groups with equal rewards alone leave.",
        "rows": rows,
    }
    path = Path(__file__).parent / "results" / given.device / "length_bias.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
