"""The learner service: what a version is made of, how groups end, and what a crash leaves."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from learner_cases import (
    CONFIG,
    RUN,
    SUBJECTS,
    Cut,
    failure,
    feed,
    learner,
    ledger,
    manifest,
    pair,
    settled,
    short_topology,
)
from loop_cases import (
    admit,
    alternating,
    base_state,
    beside,
    eventually,
    grade,
    groups_of,
    head_at,
    outcomes,
    publish_version,
    running,
    sampled,
    tiny,
    with_reward,
)

from driftline.messages.errors import BrokerUnavailable, DriftlineError, HeadConflict
from driftline.messages.memory import MemoryBus
from driftline.messages.types import Metrics, Outcome, OutcomeEvent, RunFinished
from driftline.policy_store.blobs import MemoryBlobs
from driftline.policy_store.manifest import PolicyHead
from driftline.policy_store.tensor import state_digest
from driftline.services.learner import service as learner_service
from driftline.services.learner.assembler import Batch
from driftline.services.learner.trainer import Allow, Emit, StepReport, Trainer
from driftline.services.runtime import run_topology


@pytest.fixture
async def bus(memory_bus: MemoryBus) -> MemoryBus:
    await memory_bus.declare(run_topology(CONFIG))
    return memory_bus


@pytest.fixture
def blobs() -> MemoryBlobs:
    return MemoryBlobs()


@pytest.fixture(autouse=True)
def lags(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lag of every batch any test steps on; none may exceed the bound of these configurations."""
    seen: list[int] = []
    real = Trainer.step

    def step(trainer: Trainer, batch: Batch, emit: Emit | None = None, *, allow: Allow | None = None) -> StepReport:
        seen.append(batch.lag)
        return real(trainer, batch, emit, allow=allow)

    monkeypatch.setattr(Trainer, "step", step)
    return seen


async def test_version_zero_is_the_starting_checkpoint(bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    async with running(learner(bus, blobs, tmp_path)) as task:
        head = await beside(task, head_at(bus, blobs, RUN, 0))
    assert (head.version, head.digest) == (0, state_digest(base_state()))
    assert (await manifest(bus, blobs, 0)).consumed == ()


async def test_a_version_names_what_it_consumed_in_order_and_its_groups_end_once(
    bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path
) -> None:
    """H7 (docs/field_failures.md)."""
    members = pair(0)
    async with running(learner(bus, blobs, tmp_path)) as task:
        await beside(task, head_at(bus, blobs, RUN, 0))
        await grade(bus, members[1::2][::-1])  # some before their groups are in the ledger, and backwards
        await grade(bus, members[1:4:2], suffix="/again")
        await admit(bus, groups_of(CONFIG, (0, 1)))
        await grade(bus, members[::2])
        events = await beside(task, outcomes(bus, RUN, 2))
        await grade(bus, members, suffix="/late")
        await settled(bus)
    assert [(e.group, e.outcome, e.version, e.lag, e.members, e.reward_mean) for e in events] == [
        ("g00000000", Outcome.TRAINED, 1, 0, 4, 0.5), ("g00000001", Outcome.TRAINED, 1, 0, 4, 0.5),
    ]
    made = await manifest(bus, blobs, 1)
    assert list(made.consumed) == [f"{RUN}/g0000000{g}/{m}" for g in (0, 1) for m in range(4)]
    assert made.digest != (await manifest(bus, blobs, 0)).digest
    head = await bus.last(SUBJECTS.stream("POLICY"), SUBJECTS.head)
    assert head is not None
    assert isinstance(head.message, PolicyHead)
    assert head.message.version == 1
    assert len(await ledger(bus, OutcomeEvent)) == 2


async def test_the_order_of_arrival_does_not_change_the_version(bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    digests = []
    for name, order in (("forth", 1), ("back", -1)):
        config = tiny(name)
        await bus.declare(run_topology(config))
        async with running(learner(bus, blobs, tmp_path / name, config)) as task:
            await grade(bus, pair(0, config)[::order])
            await admit(bus, groups_of(config, (0, 1)))
            digests.append((await beside(task, head_at(bus, blobs, name, 1))).digest)
    assert digests[0] == digests[1]


async def test_stale_failed_and_equal_groups_end_once_and_are_never_trained(
    bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path, lags: list[int]
) -> None:
    config = tiny(RUN, run={"max_lag": 0})
    async with running(learner(bus, blobs, tmp_path, config)) as task:
        await feed(bus, 0, config)
        await beside(task, head_at(bus, blobs, RUN, 1))
        stale, equal, broken, partly = groups_of(config, range(2, 6))
        await admit(bus, [stale, equal, broken, partly])
        await grade(bus, alternating(sampled([stale], version=0)))
        await grade(bus, [with_reward(t, 1.0) for t in sampled([equal], version=1)])
        await grade(bus, [with_reward(t, None if t.member else 1.0) for t in sampled([broken], version=1)])
        # Two members left, with different rewards: worth training on without the others.
        await grade(bus, [with_reward(t, None if t.member > 1 else float(t.member)) for t in sampled([partly], version=1)])
        good = groups_of(config, [6])
        await admit(bus, good)
        await grade(bus, alternating(sampled(good, version=1)))
        events = {e.group: e for e in await beside(task, outcomes(bus, RUN, 7))}
        await settled(bus)
    assert len(events) == 7
    assert {name: events[g.group].outcome for name, g in (("stale", stale), ("equal", equal), ("broken", broken), ("partly", partly))} == {
        "stale": Outcome.STALE, "equal": Outcome.ZERO_VARIANCE, "broken": Outcome.FAILED, "partly": Outcome.TRAINED,
    }
    assert events[partly.group].members == 2
    assert "on purpose" in events[broken.group].reason
    consumed = (await manifest(bus, blobs, 2)).consumed
    assert {c.split("/")[1] for c in consumed} == {partly.group, good[0].group}
    assert lags == [0, 0]


async def test_a_batch_never_holds_a_member_beyond_the_bound(bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path, lags: list[int]) -> None:
    """S1, S8 (docs/field_failures.md)."""
    async with running(learner(bus, blobs, tmp_path)) as task:
        for step in range(2):
            await feed(bus, step)
        await beside(task, head_at(bus, blobs, RUN, 2))
        late = groups_of(CONFIG, range(4, 8))
        await admit(bus, late)
        await grade(bus, [m for age, g in enumerate(late) for m in alternating(sampled([g], version=(0, 1, 0, 2)[age]))])
        await beside(task, head_at(bus, blobs, RUN, 3))
        await task
    ends = {e.group: e.outcome for e in await outcomes(bus, RUN, 8)}
    assert [ends[g.group] for g in late] == [Outcome.STALE, Outcome.TRAINED, Outcome.STALE, Outcome.TRAINED]
    assert max(lags) == CONFIG.run.max_lag


async def test_the_run_is_finished_at_its_last_step_and_open_groups_are_cancelled(
    bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path
) -> None:
    """H8 (docs/field_failures.md)."""
    config = tiny(RUN, run={"steps": 1})
    await admit(bus, groups_of(config, range(4)))
    await grade(bus, pair(0))
    async with running(learner(bus, blobs, tmp_path, config)) as task:
        await task
    end = await bus.last(SUBJECTS.stream("CONTROL"), SUBJECTS.finished)
    assert end is not None
    assert isinstance(end.message, RunFinished)
    assert end.message.version == 1
    ends = {e.group: e.outcome for e in await outcomes(bus, RUN, 4)}
    assert sorted(ends.values()) == [Outcome.CANCELLED] * 2 + [Outcome.TRAINED] * 2
    metrics = await bus.last(SUBJECTS.stream("METRICS"), SUBJECTS.metrics("learner"))
    assert metrics is not None
    assert isinstance(metrics.message, Metrics)
    assert metrics.message.values["k3_lag0"] <= 1e-6
    assert metrics.message.values["lag_max"] == 0


async def test_a_run_out_of_time_is_finished_with_its_groups_cancelled(bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    config = tiny(RUN, run={"time_limit_s": 50.0})
    await admit(bus, groups_of(config, range(2)), at=time.time() - 100)
    async with running(learner(bus, blobs, tmp_path, config)) as task:
        await task
    end = await bus.last(SUBJECTS.stream("CONTROL"), SUBJECTS.finished)
    assert end is not None
    assert isinstance(end.message, RunFinished)
    assert "time limit" in end.message.reason
    assert [e.outcome for e in await outcomes(bus, RUN, 2)] == [Outcome.CANCELLED] * 2


async def test_a_learner_restarted_in_the_middle_makes_the_versions_it_would_have_made(
    bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path
) -> None:
    """H6, L3 (docs/field_failures.md)."""
    digests: dict[str, list[str]] = {}
    for name, lives in (("whole", [range(3)]), ("broken", [range(2), range(2, 3)])):
        config = tiny(name)
        await bus.declare(run_topology(config))
        for life in lives:
            async with running(learner(bus, blobs, tmp_path / name, config)) as task:
                for step in life:
                    await beside(task, head_at(bus, blobs, name, step))
                    await feed(bus, step, config)
                    head = await beside(task, head_at(bus, blobs, name, step + 1))
                    digests.setdefault(name, []).append(head.digest)
                    await beside(task, outcomes(bus, name, 2 * step + 2))
    assert digests["whole"] == digests["broken"]


@pytest.fixture
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_service, "run_topology", short_topology)


@pytest.mark.usefixtures("short_leases")
@pytest.mark.parametrize(("at", "version"), [("/taken/", 0), ("/manifest/1", 0), ("/head/1", 0), ("/outcome/", 1)])
async def test_a_learner_that_dies_during_a_commit_trains_nothing_twice(
    bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path, at: str, version: int
) -> None:
    """L1, L4 (docs/field_failures.md)."""
    async with running(learner(bus, blobs, tmp_path)) as task:
        await beside(task, head_at(bus, blobs, RUN, 0))
    async with running(learner(Cut(bus, at), blobs, tmp_path)) as task:
        await feed(bus, 0)
        assert isinstance(await failure(task), BrokerUnavailable)
    assert (await head_at(bus, blobs, RUN, 0)).version == version
    assert await ledger(bus, OutcomeEvent) == []
    async with running(learner(bus, blobs, tmp_path)) as task:
        ends = await beside(task, outcomes(bus, RUN, 2))
        await settled(bus)
        await feed(bus, 1)
        await beside(task, head_at(bus, blobs, RUN, 2))
        ends = await beside(task, outcomes(bus, RUN, 4))
    assert [(e.outcome, e.version) for e in ends] == [(Outcome.TRAINED, 1)] * 2 + [(Outcome.TRAINED, 2)] * 2
    assert ("manifest" in ends[0].reason) is (version == 1)
    first, second = [set((await manifest(bus, blobs, v)).consumed) for v in (1, 2)]
    assert (len(first), len(second), first & second) == (8, 8, set())


async def test_a_second_learner_on_the_run_stops_the_one_that_lost(bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    """L20, L1 (docs/field_failures.md)."""
    async with running(learner(bus, blobs, tmp_path)) as task:
        await beside(task, head_at(bus, blobs, RUN, 0))
        await publish_version(bus, blobs, RUN, 1)
        await feed(bus, 0)
        assert isinstance(await failure(task), HeadConflict)
    assert (await head_at(bus, blobs, RUN, 1)).digest == state_digest(base_state())
    assert await ledger(bus, OutcomeEvent) == []


class Poison:
    """Makes the gradient NaN while it is on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on = False
        real = Trainer._update

        def update(trainer: Trainer, emit: Emit | None) -> float:
            gradient = trainer.masters[0].grad
            assert gradient is not None
            if self.on:
                gradient.view(-1)[0] = float("nan")
            return real(trainer, emit)

        monkeypatch.setattr(Trainer, "_update", update)


async def test_a_gradient_that_is_not_finite_changes_nothing_and_fails_its_groups(
    bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(RUN, learner={"max_bad_steps": 2})
    poison = Poison(monkeypatch)

    async def step(version: int, first: int) -> None:
        groups = groups_of(config, (first, first + 1))
        await admit(bus, groups)
        await grade(bus, alternating(sampled(groups, version)))

    async with running(learner(bus, blobs, tmp_path, config)) as task:
        poison.on = True
        await step(0, 0)
        ends = await beside(task, outcomes(bus, RUN, 2))
        assert [(e.outcome, "not finite" in e.reason) for e in ends] == [(Outcome.FAILED, True)] * 2
        poison.on = False
        await step(0, 2)
        got = (await beside(task, head_at(bus, blobs, RUN, 1))).digest
        await beside(task, outcomes(bus, RUN, 4))
        poison.on = True
        await step(1, 4)
        await beside(task, outcomes(bus, RUN, 6))  # one in a row again: the good step in between counts
        await step(1, 6)
        error = await failure(task)
    assert type(error) is DriftlineError
    assert "grad_norm" in str(error)
    assert (await head_at(bus, blobs, RUN, 1)).digest == got
    assert [e.outcome for e in await outcomes(bus, RUN, 8)][4:] == [Outcome.FAILED] * 4
    await settled(bus)


async def test_a_group_past_its_deadline_is_expired_without_any_arrival(bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    config = tiny(RUN, run={"group_deadline_s": 0.3}, grader={"deadline_s": 0.1})
    async with running(learner(bus, blobs, tmp_path, config)) as task:
        await beside(task, head_at(bus, blobs, RUN, 0))
        groups = groups_of(config, [0])
        await admit(bus, groups)
        await grade(bus, alternating(sampled(groups))[:3])
        (event,) = await beside(task, outcomes(bus, RUN, 1))
        await settled(bus)
    assert (event.outcome, event.members) == (Outcome.EXPIRED, 3)


async def test_what_is_not_a_graded_trajectory_is_dead_lettered(bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    """L20 (docs/field_failures.md)."""
    async with running(learner(bus, blobs, tmp_path)):
        event = OutcomeEvent(run=RUN, group="g0", outcome=Outcome.FAILED)
        await bus.publish(SUBJECTS.graded("g0"), event, id="odd")
        await eventually(lambda: bus.broker.stream(SUBJECTS.stream("DEAD")).last_seq == 1)
        await settled(bus)
