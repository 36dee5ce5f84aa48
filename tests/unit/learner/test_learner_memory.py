"""The learner holds bytes, not counts: at `learner.held_bytes` it leaves the rest in the broker, and the limit is no deadlock."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from learner_cases import RUN, learner
from loop_cases import (
    admit,
    alternating,
    beside,
    eventually,
    grade,
    groups_of,
    head_at,
    running,
    sampled,
    tiny,
)

from driftline.messages.bus import Depth
from driftline.messages.memory import MemoryBus
from driftline.messages.types import Graded
from driftline.policy_store.blobs import MemoryBlobs
from driftline.services.learner import service as learner_service
from driftline.services.learner.trainer import Trainer
from driftline.services.runtime import run_topology

LIMIT = 1 << 20
TEXT = 100_000
BATCH = 4


def long_texts(members: list[Graded]) -> list[Graded]:
    """The same members with much to hold beside their tokens."""
    return [m.model_copy(update={"trajectory": m.trajectory.model_copy(update={"text": "x" * TEXT})}) for m in members]


async def test_at_its_limit_the_learner_stops_pulling_and_goes_on_when_a_step_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M1, H29: while a step takes long, members pile up in the broker and not in the learner."""
    torch.set_num_threads(1)
    config = tiny("learning", run={"max_lag": 4})
    config = config.model_copy(update={"learner": config.learner.model_copy(update={"held_bytes": LIMIT})})
    consumer = next(c for c in run_topology(config).consumers if c.durable == "learner")
    monkeypatch.setattr(learner_service, "PULL_BATCH", BATCH)
    entered, go = threading.Event(), threading.Event()
    step = Trainer.step

    def slow(self: Trainer, batch: object, emit: object = None, **more: object) -> object:
        entered.set()
        assert go.wait(100)
        return step(self, batch, emit, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "step", slow)
    async with MemoryBus() as bus:
        await bus.declare(run_topology(config))
        blobs = MemoryBlobs()
        service = learner(bus, blobs, tmp_path, config)
        try:
            async with running(service) as task:
                groups = groups_of(config, range(10))
                await admit(bus, groups)
                members = alternating(sampled(groups))
                await grade(bus, [m for m in members if m.trajectory.group in {g.group for g in groups[:2]}])
                await beside(task, eventually(entered.is_set))
                await grade(bus, long_texts([m for m in members if m.trajectory.group not in {g.group for g in groups[:2]}]))
                # Over the limit, and waiting for room: what it does next, it does when the step is done.
                await beside(task, eventually(lambda: service.assembler.held_bytes >= LIMIT and not service._room.is_set()))
                depth: Depth = await bus.depth(consumer)
                assert depth.pending > 0
                assert service.assembler.held_bytes < LIMIT + BATCH * (TEXT + 10_000)
                go.set()
                assert (await beside(task, head_at(bus, blobs, RUN, 3))).version == 3
        finally:
            go.set()
