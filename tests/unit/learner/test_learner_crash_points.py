"""The commit under `kill -9` after any await: what a learner was doing is finished by the next, nothing is lost and nothing done twice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crash_cases import Killed, live
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from learner_cases import ledger
from learning_samples import small_model
from loop_cases import admit, alternating, grade, groups_of, sampled, tiny

from driftline.messages.memory import MemoryBus
from driftline.messages.recording import load_batch
from driftline.messages.subjects import Subjects, Topology
from driftline.messages.types import Admitted, Graded, Outcome, OutcomeEvent, RunFinished
from driftline.policy_store.blobs import MemoryBlobs
from driftline.policy_store.reader import PolicyReader
from driftline.services.config import Config
from driftline.services.learner import service as learner_service
from driftline.services.learner.service import LearnerService
from driftline.services.runtime import run_topology

torch.set_num_threads(1)
STEPS = 3
CONFIG = tiny("crash", run={"steps": STEPS}, learner={"probe_members": 0, "checkpoint_every": 2, "max_recompute": 2})
RUN = CONFIG.run.name
SUBJECTS = Subjects(RUN)


def topology(config: Config) -> Topology:
    """What a dead learner held comes back at once."""
    full = run_topology(config)
    return replace(full, consumers=tuple(replace(c, ack_wait_s=0.3) for c in full.consumers))


@pytest.fixture(scope="module", autouse=True)
def quick_lives() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner_service, "run_topology", topology)
        patch.setattr(learner_service, "build_model", lambda *_, **__: small_model())
        patch.setattr(learner_service, "LATE_ADMISSION_S", 0.0)
        yield


@pytest.fixture(scope="module")
def members() -> dict[int, list[Graded]]:
    """Of the two groups of each step, stamped with the version it starts from; and one group with equal rewards, one that failed."""
    steps = {step: alternating(sampled(groups_of(CONFIG, (2 * step, 2 * step + 1)), version=step)) for step in range(STEPS)}
    equal, failed = (sampled(groups_of(CONFIG, [index])) for index in (2 * STEPS, 2 * STEPS + 1))
    steps[STEPS] = [
        *(Graded(run=RUN, trajectory=t, reward=1.0) for t in equal),
        *(Graded(run=RUN, trajectory=t, reward=None, cause="raised: on purpose") for t in failed),
    ]
    return steps


class World:
    """A broker and a disk with everything sampled and graded already; learners come and go."""

    def __init__(self, folder: Path, members: dict[int, list[Graded]]) -> None:
        self.bus, self.blobs, self.folder = MemoryBus(), MemoryBlobs(), folder

        async def prepare() -> None:
            await self.bus.declare(run_topology(CONFIG))
            await admit(self.bus, groups_of(CONFIG, range(2 * STEPS + 2)))
            for step in members:
                await grade(self.bus, members[step])

        live(self.bus, prepare)

    def life(self, steps: int | None = None) -> int:
        """Of a learner that is killed after `steps` steps of its tasks, or comes to the end of the run."""
        return live(self.bus, lambda: LearnerService(self.bus, self.blobs, CONFIG, self.folder).run(), steps=steps)

    def digests(self) -> list[str]:
        found: list[str] = []

        async def read() -> None:
            reader = PolicyReader(self.bus, self.blobs, RUN)
            found.extend([(await reader.manifest(version)).digest for version in range(STEPS + 1)])

        live(self.bus, read)
        return found

    def check(self, reference: list[str]) -> None:
        """The invariants of a finished run, whatever happened on the way."""
        live(self.bus, lambda: self._check(reference))

    async def _check(self, reference: list[str]) -> None:
        reader = PolicyReader(self.bus, self.blobs, RUN)
        manifests = [await reader.manifest(version) for version in range(STEPS + 1)]
        assert [m.digest for m in manifests] == reference
        consumed = [trajectory for m in manifests for trajectory in m.consumed]
        assert len(consumed) == len(set(consumed)) == STEPS * 2 * CONFIG.run.group_size
        assert {m.numerics["optimizer"] for m in manifests[1:]} <= {"continued", "restored", "recomputed"}
        events = await ledger(self.bus, OutcomeEvent, RUN)
        assert sorted(e.group for e in events) == sorted(a.group.group for a in await ledger(self.bus, Admitted, RUN))
        named = {t.split("/")[1]: m.version for m in manifests for t in m.consumed}
        assert {e.group: e.version for e in events if e.outcome is Outcome.TRAINED} == named
        trained = sorted(f"{RUN}/{e.group}/{m}" for e in events for m in e.trained)
        assert trained == sorted(consumed)
        assert {e.outcome for e in events} == {Outcome.TRAINED, Outcome.ZERO_VARIANCE, Outcome.FAILED}
        for m in manifests[1:]:
            assert m.batch is not None
            groups = await load_batch(self.bus, RUN, m.version, m.batch.ref)
            assert [member.trajectory.id for entry in groups for member in entry.members] == list(m.consumed)
        end = await self.bus.last(SUBJECTS.stream("CONTROL"), SUBJECTS.finished)
        assert end is not None
        assert isinstance(end.message, RunFinished)
        assert end.message.version == STEPS


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, members: dict[int, list[Graded]]) -> tuple[list[str], int]:
    """The digests of a run without a crash, and how many steps its learner's tasks take."""
    world = World(tmp_path_factory.mktemp("whole"), members)
    steps = world.life()
    digests = world.digests()
    world.check(digests)
    return digests, steps


@given(crashes=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_killed_after_any_awaits_the_run_ends_as_if_it_had_not_been(
    crashes: list[float], whole: tuple[list[str], int], members: dict[int, list[Graded]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """L1, L3, L4, L6, S2: each crash is after some fraction of the steps an undisturbed learner takes."""
    reference, steps = whole
    world = World(tmp_path_factory.mktemp("crash"), members)
    for crash in crashes:
        with suppress(Killed):
            world.life(max(1, int(crash * steps)))
    world.life()
    world.check(reference)


class Mortal(MemoryBus):
    """A bus whose user dies right after its `at`-th message is stored."""

    def __init__(self, bus: MemoryBus, at: int) -> None:
        super().__init__(bus.broker)
        self._at, self.count = at, 0

    async def publish(self, subject: str, *args: Any, **more: Any) -> Any:
        return await self._one(super().publish(subject, *args, **more))

    async def publish_bytes(self, subject: str, *args: Any, **more: Any) -> Any:
        return await self._one(super().publish_bytes(subject, *args, **more))

    async def _one(self, storing: Any) -> Any:
        self.count += 1
        number = self.count
        result = await storing
        if number == self._at:
            asyncio.get_running_loop().stop()
            await asyncio.get_running_loop().create_future()
        return result


def test_killed_after_each_message_it_stores_the_run_ends_as_if_it_had_not_been(
    whole: tuple[list[str], int], members: dict[int, list[Graded]], tmp_path: Path
) -> None:
    """Between any two steps of the commit: record, taken, blobs, manifest, head, what is kept of it, outcomes, end."""
    reference, _ = whole
    at = 0
    while True:
        at += 1
        world = World(tmp_path / str(at), members)
        bus = Mortal(world.bus, at)
        with suppress(Killed):
            live(world.bus, lambda bus=bus, world=world: LearnerService(bus, world.blobs, CONFIG, world.folder).run())  # type: ignore[misc]
            break
        world.life()
        world.check(reference)
    assert at > 8 * STEPS
