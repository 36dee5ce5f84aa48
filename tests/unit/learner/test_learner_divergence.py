"""The watch in the learner's service: what is said, what is halted, and that a halted batch changed nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from learner_cases import RUN, SUBJECTS, learner, ledger, settled
from loop_cases import (
    admit,
    alternating,
    beside,
    eventually,
    grade,
    groups_of,
    head_at,
    outcomes,
    running,
    sampled,
    tiny,
)

from driftline.messages.memory import MemoryBus
from driftline.messages.types import (
    Divergence,
    DivergenceLevel,
    DivergenceSignal,
    Graded,
    Metrics,
    Outcome,
    RunFinished,
)
from driftline.policy_store.blobs import MemoryBlobs
from driftline.services.audit.read import audit
from driftline.services.config import Config
from driftline.services.learner.checkpoints import CheckpointFiles
from driftline.services.runtime import run_topology

OFF = 0.5
"""Nats by which a lying rollout's log-probabilities are too low: k3 = exp(0.5) - 1.5 = 0.149."""


def watched(**watch: float) -> Config:
    return tiny(RUN, run={"steps": 6}, watch={"min_tokens": 1, **watch})


@pytest.fixture
def blobs() -> MemoryBlobs:
    return MemoryBlobs()


def step_of(config: Config, step: int, *, off: float = 0.0) -> list[Graded]:
    """The two groups of a step, of the shipped policy stamped with the head's version; `off` nats of them are a lie."""
    members = alternating(sampled(groups_of(config, (2 * step, 2 * step + 1)), version=step))
    out = []
    for m in members:
        t = m.trajectory
        lied = np.where(t.action_mask, t.logprobs - np.float32(off), t.logprobs).astype("<f4")
        out.append(m.model_copy(update={"trajectory": t.model_copy(update={"logprobs": lied})}))
    return out


async def send(bus: MemoryBus, config: Config, step: int, *, off: float = 0.0) -> None:
    await admit(bus, groups_of(config, (2 * step, 2 * step + 1)))
    await grade(bus, step_of(config, step, off=off))


async def metrics(bus: MemoryBus) -> list[dict[str, float]]:
    found: list[dict[str, float]] = []
    async for stored in bus.follow(SUBJECTS.stream("METRICS"), SUBJECTS.metrics("learner")):
        if isinstance(stored.message, Metrics) and stored.message.step >= 0:
            found.append(stored.message.values)
        newest = await bus.last(SUBJECTS.stream("METRICS"), SUBJECTS.metrics("learner"))
        if newest is not None and stored.seq >= newest.seq:
            break
    return found


def said(events: Sequence[Divergence]) -> list[tuple[int, str, str]]:
    return [(e.version, e.signal.value, e.level.value) for e in events]


async def test_an_alarm_is_in_the_ledger_the_metrics_and_the_audit_and_training_goes_on(memory_bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    bus, config = memory_bus, watched(total_alarm=0.1, numerics_alarm=0, in_a_row=2)
    await bus.declare(run_topology(config))
    async with running(learner(bus, blobs, tmp_path, config)) as task:
        for step, off in enumerate((0.0, OFF, OFF, 0.0)):
            await beside(task, head_at(bus, blobs, RUN, step))
            await send(bus, config, step, off=off)
        await beside(task, head_at(bus, blobs, RUN, 4))
        await beside(task, outcomes(bus, RUN, 8))
        assert said(await ledger(bus, Divergence)) == [(3, "total", "alarm")]
        (event,) = await ledger(bus, Divergence)
        assert event.value == pytest.approx(np.expm1(OFF) - OFF, rel=0.2)
        assert (event.limit, event.steps) == (0.1, 2)
        assert event.tokens > 0
        await eventually(lambda: metrics_of(bus, 4))
    steps = await metrics(bus)
    assert [s["alarms"] for s in steps] == [0.0, 0.0, 1.0, 1.0]
    for values in steps:
        assert values["k3_numerics"] + values["k3_staleness"] == pytest.approx(values["k3"], abs=1e-12)
    report = await audit(bus, RUN)
    assert report.divergences == {"alarm total": 1}
    assert report.findings == ()


async def metrics_of(bus: MemoryBus, count: int) -> bool:
    return len(await metrics(bus)) >= count


async def test_a_halt_ends_the_run_before_the_batch_is_trained_on(memory_bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    """The head, the weights and the optimizer are those before the step; the groups end with the run, and say why."""
    bus, config = memory_bus, watched(numerics_halt=0.1, numerics_alarm=0, in_a_row=2)
    await bus.declare(run_topology(config))
    async with running(learner(bus, blobs, tmp_path, config)) as task:
        await beside(task, head_at(bus, blobs, RUN, 0))
        await send(bus, config, 0, off=OFF)
        before = await beside(task, head_at(bus, blobs, RUN, 1))
        await send(bus, config, 1, off=OFF)
        await task
        await settled(bus)
    assert (await head_at(bus, blobs, RUN, 1)).digest == before.digest
    finished = await bus.last(SUBJECTS.stream("CONTROL"), SUBJECTS.finished)
    assert finished is not None
    end = finished.message
    assert isinstance(end, RunFinished)
    assert end.failed
    assert end.version == 1
    assert "k3 of numerics" in end.reason
    assert "watch.numerics_halt" in end.reason
    assert said(await ledger(bus, Divergence)) == [(2, "numerics", "halt")]
    newest = await bus.last(SUBJECTS.stream("METRICS"), SUBJECTS.metrics("learner"))
    assert newest is not None
    assert isinstance(newest.message, Metrics)
    assert (newest.message.step, newest.message.values["halted"]) == (-1, 1.0), "what was seen last is kept, and is no step's"
    assert newest.message.values["k3_numerics"] > 0.1
    events = await outcomes(bus, RUN, 4)
    assert [e.outcome for e in events] == [Outcome.TRAINED, Outcome.TRAINED, Outcome.CANCELLED, Outcome.CANCELLED]
    assert all(e.reason == end.reason and e.trained == () for e in events[2:])
    assert max(label.version for label in CheckpointFiles(tmp_path / "learner").found(at_most=9)) == 1
    report = await audit(bus, RUN)
    assert report.findings == ()
    assert report.divergences == {"halt numerics": 1}


async def test_a_learner_started_again_after_a_halt_trains_nothing(memory_bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    bus, config = memory_bus, watched(total_halt=0.1, numerics_alarm=0, in_a_row=1)
    await bus.declare(run_topology(config))
    async with running(learner(bus, blobs, tmp_path, config)) as task:
        await beside(task, head_at(bus, blobs, RUN, 0))
        await send(bus, config, 0, off=OFF)
        await task
    async with running(learner(bus, blobs, tmp_path, config)) as task:
        await task
    assert (await head_at(bus, blobs, RUN, 0)).version == 0
    assert [e.outcome for e in await outcomes(bus, RUN, 2)] == [Outcome.CANCELLED] * 2
    assert [e.level for e in await ledger(bus, Divergence)] == [DivergenceLevel.HALT]


async def test_a_batch_of_few_tokens_does_not_halt(memory_bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    bus, config = memory_bus, watched(total_halt=0.1, numerics_alarm=0, in_a_row=1, min_tokens=10_000)
    await bus.declare(run_topology(config))
    async with running(learner(bus, blobs, tmp_path, config)) as task:
        await beside(task, head_at(bus, blobs, RUN, 0))
        await send(bus, config, 0, off=OFF)
        await beside(task, head_at(bus, blobs, RUN, 1))
    assert await ledger(bus, Divergence) == []


async def test_stale_tokens_are_told_from_wrong_ones(memory_bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    """Groups of version 0 trained by version 3: what the weights moved is staleness, and the probe finds their numerics untouched."""
    bus = memory_bus
    config = tiny(RUN, run={"steps": 6, "max_lag": 4}, watch={"min_tokens": 1, "numerics_alarm": 1e-3}, learner={"lr": 1e-2})
    await bus.declare(run_topology(config))
    async with running(learner(bus, blobs, tmp_path, config)) as task:
        for step in range(3):
            await beside(task, head_at(bus, blobs, RUN, step))
            await admit(bus, groups_of(config, (2 * step, 2 * step + 1)))
            await grade(bus, alternating(sampled(groups_of(config, (2 * step, 2 * step + 1)), version=0)))
        await beside(task, head_at(bus, blobs, RUN, 3))
        await eventually(lambda: metrics_of(bus, 3))
    last = (await metrics(bus))[2]
    assert last["lag_max"] == 2.0
    assert last["k3"] > 1e-3
    assert last["k3_numerics"] < 1e-9
    assert last["k3_staleness"] == pytest.approx(last["k3"], rel=1e-3)
    assert await ledger(bus, Divergence) == []


async def test_a_record_of_another_models_experts_ends_its_group_on_arrival(memory_bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    """It would fail every step it is in; the learner lives, and the other groups are trained."""
    bus, config = memory_bus, tiny(RUN, learner={"router_replay": True})
    await bus.declare(run_topology(config))
    async with running(learner(bus, blobs, tmp_path, config)) as task:
        await beside(task, head_at(bus, blobs, RUN, 0))
        bad, good = step_of(config, 0), [*step_of(config, 1)]
        t = bad[0].trajectory
        wrong = t.model_copy(update={"routes": np.zeros((len(t.tokens), 1, 2), dtype="<i2")})
        group = t.group
        await admit(bus, groups_of(config, range(4)))
        await grade(bus, [bad[0].model_copy(update={"trajectory": wrong}), *bad[1:]])
        (first,) = await beside(task, outcomes(bus, RUN, 1))
        assert (first.group, first.outcome) == (group, Outcome.FAILED)
        assert "routes of" in first.reason
        assert "MoE layers" in first.reason
        await grade(bus, [m.model_copy(update={"trajectory": m.trajectory.model_copy(update={"versions": np.where(m.trajectory.action_mask, 0, -1).astype("<i4")})})
                          for m in good])
        await beside(task, head_at(bus, blobs, RUN, 1))


def test_the_signals_of_the_message_are_those_of_the_file() -> None:
    fields = set(type(Config().watch).model_fields)
    assert {f"{s.value}_{level}" for s in DivergenceSignal for level in ("alarm", "halt")} < fields


