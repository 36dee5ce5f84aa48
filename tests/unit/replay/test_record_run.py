"""Recording a run from the broker: what it holds, what is gone, and a recording that was cut off."""

from __future__ import annotations

import asyncio
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from loop_cases import admit, base_state, beside, finish, grade, groups_of, head_at, publish_version, running
from recording_cases import CONFIG, MODEL, RUN, batches, read_all, train

from driftline.messages.errors import ConfigError, IntegrityError
from driftline.messages.memory import MemoryBus
from driftline.messages.recording import record_space
from driftline.messages.subjects import Subjects
from driftline.policy_store.blobs import MemoryBlobs
from driftline.policy_store.manifest import manifest_subject
from driftline.policy_store.reader import PolicyReader
from driftline.policy_store.tensor import state_digest
from driftline.services.config import resolve
from driftline.services.learner.service import LearnerService
from driftline.services.replay.reader import Recording
from driftline.services.replay.record import portable, record
from driftline.services.runtime import run_topology

SUBJECTS = Subjects(RUN)
RECORD = SUBJECTS.stream("RECORD")
PARTS = batches(CONFIG)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
async def bus(memory_bus: MemoryBus) -> MemoryBus:
    await memory_bus.declare(run_topology(CONFIG))
    return memory_bus


@pytest.fixture
def blobs() -> MemoryBlobs:
    return MemoryBlobs()


@dataclass(frozen=True)
class FinishedRun:
    """What a run of two versions leaves on its broker."""

    stored: list[tuple[str, bytes]]
    blobs: dict[str, bytes]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    async def make() -> FinishedRun:
        async with MemoryBus() as bus:
            blobs = MemoryBlobs()
            await bus.declare(run_topology(CONFIG))
            await train(bus, blobs, CONFIG, tmp_path_factory.mktemp("learner"), PARTS)
            stored = [(raw.subject, raw.data) for plane in ("POLICY", "RECORD", "CONTROL") for raw in await bus.read(SUBJECTS.stream(plane), ">")]
            return FinishedRun(stored, blobs.blobs)

    with ThreadPoolExecutor(1) as thread:  # a module's fixture may be asked for inside a running loop
        return thread.submit(asyncio.run, make()).result()


@pytest.fixture
async def trained(bus: MemoryBus, blobs: MemoryBlobs, finished_run: FinishedRun) -> MemoryBus:
    """A broker with the finished run, to be damaged at will."""
    for number, (subject, data) in enumerate(finished_run.stored):
        await bus.publish_bytes(subject, data, id=str(number))
    blobs.blobs.update(finished_run.blobs)
    return bus


async def test_a_recording_holds_the_start_and_every_batch(trained: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    said: list[str] = []
    done = await record(trained, blobs, CONFIG, MODEL, tmp_path / "run.dlr", say=said.append)
    recording, state, steps = read_all(tmp_path / "run.dlr")
    reader = PolicyReader(trained, blobs, RUN)
    manifests = [await reader.manifest(version) for version in range(3)]
    assert (done.last_version, done.groups, done.trajectories) == (2, 4, 16)
    assert len(said) == 2
    assert state_digest(state) == manifests[0].digest == state_digest(base_state())
    assert [step.facts.digest for step in steps] == [manifest.digest for manifest in manifests[1:]]
    assert [step.facts.numerics for step in steps] == [manifest.numerics for manifest in manifests[1:]]
    for step, manifest, part in zip(steps, manifests[1:], PARTS, strict=True):
        members = [member for group in recording.groups(step) for member in group.members]
        assert [(m.trajectory.id, m.reward) for m in members] == [(m.trajectory.id, m.reward) for m in part]
        assert [m.trajectory.id for m in members] == list(manifest.consumed)
    assert not (tmp_path / "run.dlr.partial").exists()


async def test_a_recording_knows_no_credentials_and_no_addresses(trained: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    secret = CONFIG.model_copy(update={
        "broker": CONFIG.broker.model_copy(update={"url": "nats://user:hunter2@far:4222", "credentials": "/keys/hunter2.creds"}),
        "tasks": CONFIG.tasks.model_copy(update={"params": {"source": "https://me:hunter2@host/x"}}),
    })
    await record(trained, blobs, secret, MODEL, tmp_path / "run.dlr")
    data = (tmp_path / "run.dlr").read_bytes()
    assert b"hunter2" not in data
    assert b"far:4222" not in data
    config = resolve(tomllib.loads(Recording.open(tmp_path / "run.dlr").header.config))
    assert (config.learner, config.run) == (CONFIG.learner, CONFIG.run)


async def test_to_records_no_further(trained: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    await record(trained, blobs, CONFIG, MODEL, tmp_path / "run.dlr", to=1)
    assert Recording.open(tmp_path / "run.dlr").last_version == 1
    with pytest.raises(ConfigError, match="the head is at version 2"):
        await record(trained, blobs, CONFIG, MODEL, tmp_path / "more.dlr", to=3)


async def test_an_existing_file_is_not_replaced(trained: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    (tmp_path / "run.dlr").write_bytes(b"mine")
    with pytest.raises(ConfigError, match="there already"):
        await record(trained, blobs, CONFIG, MODEL, tmp_path / "run.dlr")
    assert (tmp_path / "run.dlr").read_bytes() == b"mine"


async def test_a_run_without_a_version_says_so(bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing is published"):
        await record(bus, blobs, CONFIG, MODEL, tmp_path / "run.dlr")


async def test_a_dropped_batch_names_what_can_be_recorded_and_the_setting(trained: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    await trained.purge(RECORD, f"{SUBJECTS.root}.{record_space(1)}.>")
    with pytest.raises(IntegrityError, match=r"version = 1: .*holds versions 2 to 2, no version can be recorded .*broker\.record_bytes"):
        await record(trained, blobs, CONFIG, MODEL, tmp_path / "run.dlr")
    assert not (tmp_path / "run.dlr").exists()


async def test_what_is_before_a_dropped_batch_can_be_recorded(trained: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    await trained.purge(RECORD, f"{SUBJECTS.root}.{record_space(2)}.>")
    with pytest.raises(IntegrityError, match=r"version = 2: .*holds none after it, versions 0 to 1 can be recorded .*--to 1"):
        await record(trained, blobs, CONFIG, MODEL, tmp_path / "run.dlr")
    await record(trained, blobs, CONFIG, MODEL, tmp_path / "run.dlr", to=1)
    assert Recording.open(tmp_path / "run.dlr").last_version == 1


async def test_manifests_may_be_collected_and_the_run_recorded(trained: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    manifest = await PolicyReader(trained, blobs, RUN).manifest(1)
    await trained.purge(SUBJECTS.stream("POLICY"), manifest_subject(RUN, manifest.link))
    await record(trained, blobs, CONFIG, MODEL, tmp_path / "run.dlr")
    assert read_all(tmp_path / "run.dlr")[2][0].facts.digest == manifest.digest


async def test_a_version_whose_learner_died_before_its_word_is_read_from_its_manifest(
    trained: MemoryBus, blobs: MemoryBlobs, tmp_path: Path
) -> None:
    await record(trained, blobs, CONFIG, MODEL, tmp_path / "run.dlr")
    for version in range(3):
        await trained.purge(RECORD, SUBJECTS.recorded(version))
    await record(trained, blobs, CONFIG, MODEL, tmp_path / "again.dlr")
    assert read_all(tmp_path / "again.dlr")[2] == read_all(tmp_path / "run.dlr")[2]


async def test_a_start_that_was_collected_names_the_setting(trained: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    manifest = await PolicyReader(trained, blobs, RUN).manifest(0)
    await trained.purge(SUBJECTS.stream("POLICY"), manifest_subject(RUN, manifest.link))
    with pytest.raises(IntegrityError, match=r"version 0, where a recording starts, is gone.*policy_store\.keep_start"):
        await record(trained, blobs, CONFIG, MODEL, tmp_path / "run.dlr")


async def test_versions_published_without_a_record_cannot_be_recorded(bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    for version in (0, 1):
        await publish_version(bus, blobs, RUN, version)
    with pytest.raises(IntegrityError, match=r"version = 1: its learner recorded no batch"):
        await record(bus, blobs, CONFIG, MODEL, tmp_path / "run.dlr")


async def test_a_recording_that_was_cut_off_is_continued(trained: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    await record(trained, blobs, CONFIG, MODEL, tmp_path / "whole.dlr")
    first = Recording.open(tmp_path / "whole.dlr").sections[-1]
    whole = (tmp_path / "whole.dlr").read_bytes()
    (tmp_path / "run.dlr.partial").write_bytes(whole[: first.payload + 5])
    said: list[str] = []
    done = await record(trained, blobs, CONFIG, MODEL, tmp_path / "run.dlr", say=said.append)
    assert said[0].endswith("from version 2")
    assert (tmp_path / "run.dlr").read_bytes() == whole
    assert (done.groups, done.trajectories) == (4, 16)


async def test_another_runs_partial_recording_is_not_continued(trained: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    await record(trained, blobs, CONFIG, MODEL, tmp_path / "whole.dlr")
    partial = tmp_path / "run.dlr.partial"
    partial.write_bytes((tmp_path / "whole.dlr").read_bytes())
    other = CONFIG.model_copy(update={"learner": CONFIG.learner.model_copy(update={"lr": 0.5})})
    with pytest.raises(ConfigError, match="of another run, start or configuration"):
        await record(trained, blobs, other, MODEL, tmp_path / "run.dlr")
    assert partial.exists()


async def test_following_records_each_version_as_it_is_made(bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    seen: asyncio.Queue[str] = asyncio.Queue()
    following = asyncio.create_task(record(bus, blobs, CONFIG, MODEL, tmp_path / "run.dlr", follow=True, say=seen.put_nowait))
    size = CONFIG.run.groups_per_step
    async with running(LearnerService(bus, blobs, CONFIG, tmp_path / "learner")) as task:
        for version, part in enumerate(PARTS):
            await head_at(bus, blobs, RUN, version)
            await admit(bus, groups_of(CONFIG, range(version * size, (version + 1) * size)))
            await grade(bus, part)
            said = await beside(task, seen.get())
            assert said.startswith(f"version {version + 1} of")
            # Nobody needs the broker's copy any more.
            await bus.purge(RECORD, f"{SUBJECTS.root}.{record_space(version + 1)}.>")
        await task
    async with asyncio.timeout(60):
        done = await following
    assert done.last_version == 2
    assert len(read_all(tmp_path / "run.dlr")[2]) == 2


async def test_following_a_finished_run_ends(trained: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    async with asyncio.timeout(60):
        done = await record(trained, blobs, CONFIG, MODEL, tmp_path / "run.dlr", follow=True)
    assert done.last_version == 2


async def test_following_ends_at_the_version_asked_for(bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"run": CONFIG.run.model_copy(update={"steps": 3})})
    await train(bus, blobs, config, tmp_path / "learner", PARTS)
    async with asyncio.timeout(60):
        done = await record(bus, blobs, config, MODEL, tmp_path / "run.dlr", follow=True, to=1)
    assert done.last_version == 1


async def test_a_follower_that_is_stopped_leaves_what_it_has(trained: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    said = asyncio.Event()
    fresh = MemoryBlobs()
    fresh.blobs = blobs.blobs
    config = CONFIG.model_copy(update={"run": CONFIG.run.model_copy(update={"name": "other"})})
    await trained.declare(run_topology(config))
    await train(trained, fresh, config.model_copy(update={"run": config.run.model_copy(update={"steps": 9})}), tmp_path / "other",
                batches(config)[:1])
    task = asyncio.create_task(record(trained, fresh, config, MODEL, tmp_path / "run.dlr", follow=True, say=lambda _: said.set()))
    async with asyncio.timeout(60):
        await said.wait()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert not (tmp_path / "run.dlr").exists()
    left = Recording.salvage(tmp_path / "run.dlr.partial")
    assert left is not None
    assert left.last_version == 1
    await finish(trained, "other", 1)
    async with asyncio.timeout(60):
        done = await record(trained, fresh, config, MODEL, tmp_path / "run.dlr", follow=True)
    assert done.last_version == 1


def test_a_portable_configuration_is_a_run_file() -> None:
    assert resolve(tomllib.loads(portable(CONFIG))) == CONFIG
