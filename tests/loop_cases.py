"""The loop in small: settings, groups and members for tests that run one service and play the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import cache
from typing import Any, Protocol, TypeVar

import torch

from driftline.messages.bus import Bus
from driftline.messages.subjects import Subjects
from driftline.messages.types import Admitted, Graded, Group, OutcomeEvent, RunFinished, Trajectory
from driftline.models.model import K3ForCausalLM
from driftline.models.state import export_state
from driftline.policy_store.blobs import BlobStore
from driftline.policy_store.manifest import PolicyHead
from driftline.policy_store.reader import PolicyReader
from driftline.policy_store.tensor import State
from driftline.policy_store.writer import PolicyWriter
from driftline.services.config import Config
from driftline.services.dispatcher.admission import group_id
from driftline.services.policy_model import build_model
from driftline.services.rollout.engine import Engine
from driftline.services.runtime import run_topology
from driftline.services.tensors import to_host
from driftline.services.wiring import task_source

WAIT_S = 120.0
T = TypeVar("T")

TINY: dict[str, dict[str, Any]] = {
    "run": {"steps": 3, "groups_per_step": 2, "group_size": 4, "max_lag": 1},
    "tasks": {"family": "spell_backward", "params": {"min_word_len": 3, "max_word_len": 5}, "heldout": 8},
    "sampling": {"max_tokens": 8},
    "rollout": {"engines": 1, "max_batch": 16},
    "learner": {"objective": "grpo", "eps_low": 0.2, "eps_high": 0.2, "lr": 1e-4, "probe_members": 8},
    "evaluator": {"every": 2, "samples": 1},
}


def tiny_document(run: str, /, **sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    names = [*TINY, *(name for name in sections if name not in TINY)]
    document = {name: {**TINY.get(name, {}), **sections.get(name, {})} for name in names}
    document["run"] |= {"name": run}
    return document


def tiny(run: str, /, **sections: dict[str, Any]) -> Config:
    return Config.model_validate(tiny_document(run, **sections))


def groups_of(config: Config, indices: Iterable[int]) -> list[Group]:
    """What the dispatcher would admit."""
    source, run = task_source(config), config.run
    return [
        Group(run=run.name, group=group_id(i), index=i, task=source.task(i, run.seed), members=run.group_size,
              sampling=config.sampling.message(), seed=run.seed, deadline_s=run.group_deadline_s)
        for i in indices
    ]


@cache
def base_model() -> K3ForCausalLM:
    return build_model(Config(), device="cpu", threads=1)


def base_state() -> State:
    return to_host(export_state(base_model(), torch.bfloat16))


def sampled(groups: Sequence[Group], version: int = 0) -> list[Trajectory]:
    """Members by the shipped policy, stamped with `version`."""
    engine = Engine(base_model(), version=version, max_batch=64, name="test")
    for group in groups:
        engine.submit(group)
    done: list[Trajectory] = []
    while not engine.idle:
        done += engine.step()
    return sorted(done, key=lambda t: (t.group, t.member))


def with_reward(trajectory: Trajectory, reward: float | None) -> Graded:
    return Graded(run=trajectory.run, trajectory=trajectory, reward=reward, cause="" if reward is not None else "raised: on purpose")


def alternating(trajectories: Sequence[Trajectory]) -> list[Graded]:
    """Rewards 0 and 1 by member: every group is worth training on."""
    return [with_reward(t, float(t.member % 2)) for t in trajectories]


async def admit(bus: Bus, groups: Sequence[Group], at: float | None = None) -> None:
    for group in groups:
        event = Admitted(run=group.run, group=group, at=time.time() if at is None else at)
        await bus.publish(Subjects(group.run).admitted(group.group), event, id=f"{group.run}/admitted/{group.group}", expect_last=0)


async def queue(bus: Bus, groups: Sequence[Group], suffix: str = "") -> None:
    for group in groups:
        await bus.publish(Subjects(group.run).groups, group, id=f"{group.run}/group/{group.group}{suffix}")


async def grade(bus: Bus, members: Sequence[Graded], suffix: str = "") -> None:
    for graded in members:
        t = graded.trajectory
        await bus.publish(Subjects(t.run).graded(t.group), graded, id=f"{t.run}/graded/{t.group}/{t.member}{suffix}")


async def publish_version(bus: Bus, blobs: BlobStore, run: str, version: int) -> None:
    """A version of the shipped weights, as a learner would publish it."""
    writer = PolicyWriter(bus, blobs, run, 10)
    await writer.resume()
    await writer.publish(base_state(), version=version, learner_step=version, consumed=())


async def finish(bus: Bus, run: str, version: int) -> None:
    await bus.publish(Subjects(run).finished, RunFinished(run=run, version=version, reason="test"), id=f"{run}/finished/{version}")


async def outcomes(bus: Bus, run: str, count: int) -> list[OutcomeEvent]:
    """The first `count` outcomes of the ledger, waited for."""
    subjects = Subjects(run)
    found: list[OutcomeEvent] = []
    events = bus.follow(subjects.stream("LEDGER"), f"{subjects.root}.ledger.outcome.>")
    async with aclosing(events) as stored_events:  # type: ignore[type-var]
        async for stored in stored_events:
            if isinstance(stored.message, OutcomeEvent):  # not the word before a step, on the same subjects
                found.append(stored.message)
            if len(found) >= count:
                break
    return found


async def head_at(bus: Bus, blobs: BlobStore, run: str, version: int) -> PolicyHead:
    async with aclosing(PolicyReader(bus, blobs, run).watch()) as heads:  # type: ignore[type-var]
        async for head in heads:
            if head.version >= version:
                return head
    raise AssertionError("the head is no longer followed")


async def eventually(true: Callable[[], Any] | Callable[[], Awaitable[Any]]) -> None:
    """Until the condition holds; for states that nothing announces."""
    async with asyncio.timeout(WAIT_S):
        while True:
            value = true()
            if (await value) if isinstance(value, Awaitable) else value:
                return
            await asyncio.sleep(0.01)


class Runs(Protocol):
    async def run(self) -> None: ...


@asynccontextmanager
async def running(service: Runs) -> AsyncIterator[asyncio.Task[None]]:
    """The service beside the test; cancelled at the end, when it has not ended by itself."""
    task = asyncio.create_task(service.run())
    try:
        async with asyncio.timeout(WAIT_S):
            yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


async def beside(task: asyncio.Task[None], wanted: Awaitable[T]) -> T:
    """`wanted`, or the service's failure when that comes first."""
    waiting = asyncio.ensure_future(wanted)
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if not waiting.done() and not task.cancelled() and task.exception() is None:
        await asyncio.wait({waiting}, timeout=10.0)  # the service ended in order: what it wrote last may be on its way
    if not waiting.done():
        waiting.cancel()
        task.result()
        raise AssertionError("the service ended before the test saw what it waited for")
    return waiting.result()


async def consumer_idle(bus: Bus, config: Config, durable: str) -> bool:
    """Nothing queued and nothing leased."""
    consumer = next(c for c in run_topology(config).consumers if c.durable == durable)
    depth = await bus.depth(consumer)
    return depth.pending == 0 and depth.ack_pending == 0
