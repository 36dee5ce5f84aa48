"""The rollout service played with: what it stored, a gate inside a step, versions whose weights differ, and a consumer that forgets quickly."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from loop_cases import WAIT_S, base_state, consumer_idle, tiny

from driftline.messages.bus import Bus, Delivery, Depth
from driftline.messages.dead_letters import Archive, DeadLetter, dead_letters
from driftline.messages.subjects import ConsumerSpec, Topology
from driftline.messages.types import Metrics, Trajectory
from driftline.policy_store.blobs import BlobStore
from driftline.policy_store.tensor import State
from driftline.policy_store.writer import PolicyWriter
from driftline.services.config import Config
from driftline.services.rollout.engine import Engine
from driftline.services.rollout.service import RolloutService
from driftline.services.runtime import run_topology
from driftline.services.tensors import from_host, to_host

CONFIG = tiny("rolling")
RUN = CONFIG.run.name


async def stored(bus: Bus, count: int, config: Config = CONFIG) -> list[Trajectory]:
    """Pull and acknowledge until there are `count`, in order of (group, member)."""
    consumer = next(c for c in run_topology(config).consumers if c.durable == "grader")
    found: list[Trajectory] = []
    async with asyncio.timeout(WAIT_S):
        while len(found) < count:
            for delivery in await bus.pull(consumer, batch=64, timeout_s=1.0):
                assert isinstance(delivery.message, Trajectory)
                found.append(delivery.message)
                await delivery.ack()
    return sorted(found, key=lambda t: (t.group, t.member))


def lies_ready(service: RolloutService, version: int) -> bool:
    """The next version was fetched while the engine was held, and is applied as soon as it is not."""
    return service._ready is not None and service._policy.version == version


async def is_idle(bus: Bus, config: Config = CONFIG) -> bool:
    return await consumer_idle(bus, config, "rollout")


def versions(trajectory: Trajectory) -> set[int]:
    return set(trajectory.versions[trajectory.action_mask].tolist())


def names(trajectories: list[Trajectory]) -> list[tuple[str, int]]:
    return [(t.group, t.member) for t in trajectories]


def rollout_consumer(config: Config = CONFIG, **changes: Any) -> ConsumerSpec:
    spec = next(c for c in run_topology(config).consumers if c.durable == "rollout")
    return replace(spec, **changes)


def topology_with(consumer: ConsumerSpec, config: Config = CONFIG) -> Topology:
    topology = run_topology(config)
    return replace(topology, consumers=tuple(consumer if c.durable == consumer.durable else c for c in topology.consumers))


async def depth(bus: Bus, config: Config = CONFIG) -> Depth:
    return await bus.depth(rollout_consumer(config))


async def dead(bus: Archive, run: str = RUN) -> list[DeadLetter]:
    return await dead_letters(bus, run)


def shifted(version: int) -> State:
    """Weights that are a version's own: nearly the shipped ones, and another digest for every version."""
    tensors = {name: t.clone() for name, t in from_host(base_state()).items()}
    tensors["model.norm.weight"] += 0.02 * version
    return to_host(tensors)


async def publish_shifted(bus: Bus, blobs: BlobStore, run: str, version: int) -> None:
    writer = PolicyWriter(bus, blobs, run, 10)
    await writer.resume()
    await writer.publish(shifted(version), version=version, learner_step=version, consumed=())


def same_state(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Gate:
    """Holds the engine in one step, in the middle of a slice, until it is opened; that step then ends the slice. Every step that is held waits for
    an opening of its own, so none slips through one that was meant for the step before it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._reached = threading.Event()
        self._next: threading.Event | None = None
        self._held: threading.Event | None = None
        real = Engine.step

        def step(engine: Engine) -> list[Trajectory]:
            done = real(engine)
            if (hold := self._next) is not None:
                self._next, self._held = None, hold
                self._reached.set()
                assert hold.wait(WAIT_S)
                time.sleep(0.06)  # longer than a slice
            return done

        monkeypatch.setattr(Engine, "step", step)

    def close(self) -> None:
        """The next step is held."""
        self._reached.clear()
        self._next = threading.Event()

    async def entered(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, WAIT_S)

    def open(self) -> None:
        for hold in (self._next, self._held):
            if hold is not None:
                hold.set()

    def step(self) -> None:
        """The held step goes on, and the one after it is held."""
        assert self._held is not None
        held = self._held
        self.close()
        held.set()


@contextmanager
def gated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """The gate, opened at the end whatever happens, so that no thread is left in it."""
    gate = Gate(monkeypatch)
    try:
        yield gate
    finally:
        gate.open()


class Tapped:
    """A bus whose publishes and deliveries can be looked at, delayed or refused; the rest is the bus's own."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.before_publish: Callable[[str], Awaitable[None]] | None = None
        self.wrap_delivery: Callable[[Delivery], Any] = lambda delivery: delivery
        self.published: list[str] = []
        self.metrics: list[dict[str, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def publish(self, subject: str, message: Any, **more: Any) -> Any:
        if isinstance(message, Metrics):
            self.metrics.append(message.values)
        if self.before_publish is not None:
            await self.before_publish(subject)
        ack = await self._bus.publish(subject, message, **more)
        self.published.append(subject)
        return ack

    async def pull(self, consumer: ConsumerSpec, *, batch: int, timeout_s: float) -> list[Any]:
        return [self.wrap_delivery(d) for d in await self._bus.pull(consumer, batch=batch, timeout_s=timeout_s)]


class Wrapped:
    """A delivery that counts what is done with it; a call can be made to fail."""

    def __init__(self, delivery: Delivery, calls: Counter[str], fail: Callable[[str], None] = lambda call: None) -> None:
        self._delivery, self._calls, self._fail = delivery, calls, fail

    def __getattr__(self, name: str) -> Any:
        return getattr(self._delivery, name)

    async def _do(self, call: str, *args: Any) -> None:
        self._calls[call] += 1
        self._fail(call)
        await getattr(self._delivery, call)(*args)

    async def ack(self) -> None:
        await self._do("ack")

    async def renew(self) -> None:
        await self._do("renew")

    async def nak(self, delay_s: float = 0.0) -> None:
        await self._do("nak", delay_s)

    async def dead_letter(self, reason: str) -> None:
        await self._do("dead_letter", reason)


async def killed(service: RolloutService, task: asyncio.Task[None], monkeypatch: pytest.MonkeyPatch) -> None:
    """As by SIGKILL: gone at once, and nothing is given back."""

    async def nothing() -> None: ...

    monkeypatch.setattr(service, "_give_back", nothing)
    task.cancel()
    await asyncio.wait({task})
