"""One learner over a bus in memory: fed, watched, cut off and started again."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from loop_cases import admit, alternating, consumer_idle, eventually, grade, groups_of, sampled, tiny

from driftline.messages import decode
from driftline.messages.bus import Bus
from driftline.messages.errors import BrokerUnavailable
from driftline.messages.memory import MemoryBus
from driftline.messages.subjects import Subjects, Topology
from driftline.messages.types import Graded
from driftline.policy_store.blobs import MemoryBlobs
from driftline.policy_store.manifest import Manifest
from driftline.policy_store.reader import PolicyReader
from driftline.services.config import Config
from driftline.services.learner.service import LearnerService
from driftline.services.runtime import run_topology

T = TypeVar("T")
CONFIG = tiny("learning")
RUN = CONFIG.run.name
SUBJECTS = Subjects(RUN)


def learner(bus: Bus, blobs: MemoryBlobs, folder: Path, config: Config = CONFIG) -> LearnerService:
    return LearnerService(bus, blobs, config, folder)


def pair(step: int, config: Config = CONFIG) -> list[Graded]:
    """The two groups of a step, sampled by the version it starts from."""
    return alternating(sampled(groups_of(config, (2 * step, 2 * step + 1)), version=step))


async def feed(bus: Bus, step: int, config: Config = CONFIG) -> None:
    await admit(bus, groups_of(config, (2 * step, 2 * step + 1)))
    await grade(bus, pair(step, config))


async def manifest(bus: Bus, blobs: MemoryBlobs, version: int, run: str = RUN) -> Manifest:
    return await PolicyReader(bus, blobs, run).manifest(version)


async def ledger(bus: MemoryBus, kind: type[T], run: str = RUN) -> list[T]:
    """What of a kind the ledger holds now."""
    raws = await bus.read(Subjects(run).stream("LEDGER"), Subjects(run).ledger)
    return [message for raw in raws if isinstance(message := decode(raw.data), kind)]


async def settled(bus: MemoryBus) -> None:
    """Every member acknowledged."""
    await eventually(lambda: consumer_idle(bus, CONFIG, "learner"))


def leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]


async def failure(task: asyncio.Task[None]) -> BaseException:
    await asyncio.wait({task})
    error = task.exception()
    assert error is not None
    return leaves(error)[0]


class Cut(MemoryBus):
    """A connection that is lost at the first publish of an id that holds `at`, and at each after it."""

    def __init__(self, bus: MemoryBus, at: str) -> None:
        super().__init__(bus.broker)
        self._at, self._cut = at, False

    async def publish(self, subject: str, *args: Any, **more: Any) -> Any:
        self._cut = self._cut or self._at in more["id"]
        if self._cut:
            raise BrokerUnavailable("cut off by the test", field="subject", value=subject)
        return await super().publish(subject, *args, **more)


def short_topology(config: Config) -> Topology:
    """What a dead learner held comes back within a second."""
    full = run_topology(config)
    return replace(full, consumers=tuple(replace(c, ack_wait_s=1.0) for c in full.consumers))
