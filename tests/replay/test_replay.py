"""A committed recording, made again by everything that can: a trainer, the learner behind a broker, and live services.

Across versions of torch and kinds of processor the last bits of a step may differ, so the recorded digests are asked for where the
recorded facts are those of this machine; elsewhere a recording made here takes its place.
"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import numpy as np
import pytest
import torch
from loop_cases import admit, beside, grade, groups_of, head_at, outcomes, running, sampled, tiny, with_reward
from loop_processes import WAIT_S, driftline, service_arguments, write_config
from make_recording import CONFIG, FILE, RUN, graded_groups, make

from driftline.messages.dead_letters import dead_letters
from driftline.messages.errors import HeadConflict
from driftline.messages.memory import MemoryBus
from driftline.messages.nats_bus import NatsBus
from driftline.messages.recording import RecordedGroup
from driftline.messages.server import NatsServer
from driftline.messages.subjects import Subjects
from driftline.messages.types import Graded, Outcome
from driftline.policy_store.blobs import JetStreamBlobs, MemoryBlobs
from driftline.policy_store.reader import PolicyReader
from driftline.policy_store.tensor import state_digest
from driftline.services.config import Config
from driftline.services.dispatcher.service import DispatcherService
from driftline.services.grader.service import GraderService
from driftline.services.learner.service import LearnerService
from driftline.services.replay.into import feed_into
from driftline.services.replay.reader import Recording
from driftline.services.replay.record import record
from driftline.services.replay.replay import (
    differing,
    facts_here,
    recorded_config,
    replay_learner,
    replay_loop,
    span,
)
from driftline.services.runtime import run_topology
from driftline.services.wiring import scorer_specs, task_source

SIZE = CONFIG.run.groups_per_step


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The committed recording, or one of this machine's arithmetic."""
    if not differing(Recording.open(FILE).header.numerics, {**facts_here(CONFIG), "optimizer": "fresh"}):
        return FILE
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, make(tmp_path_factory.mktemp("recorded") / "run.dlr")).result().path


def digests(recording: Recording) -> list[str]:
    return [recording.header.start_digest, *(step.facts.digest for step in recording.steps())]


async def published(bus: NatsBus, run: str) -> list[str]:
    """Digests of the versions, each materialised and hashed again."""
    reader = PolicyReader(bus, JetStreamBlobs(bus, run), run)
    return [state_digest(await reader.materialise(version)) for version in range(CONFIG.run.steps + 1)]


def test_the_committed_recording_is_small_and_whole() -> None:
    assert FILE.stat().st_size < 200_000
    recording = Recording.open(FILE)
    assert state_digest(recording.start()) == recording.header.start_digest
    assert [len(recording.groups(step)) for step in recording.steps()] == [SIZE, SIZE]


def test_the_committed_recording_is_of_the_shipped_policy() -> None:
    recording = Recording.open(FILE)
    groups = [group for step in recording.steps() for group in recording.groups(step)]
    again = sampled([entry.group for entry in groups])
    old = [member.trajectory for entry in groups for member in entry.members]
    stale = "the shipped policy or the sampling changed: run tests/replay/make_recording.py"
    assert [t.id for t in again] == [t.id for t in old]
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(again, old, strict=True)), stale
    assert all(np.allclose(a.logprobs, b.logprobs, atol=1e-4) for a, b in zip(again, old, strict=True)), stale
    assert groups_of(CONFIG, [entry.group.index for entry in groups]) == [entry.group for entry in groups]
    rewards = [member.reward for _, members in graded_groups() for member in members]
    assert [member.reward for entry in groups for member in entry.members] == rewards


def test_two_replays_are_equal_and_equal_what_was_recorded(file: Path, tmp_path: Path) -> None:
    recording = Recording.open(file)
    first = replay_learner(recording, tmp_path / "a", span(recording, None, None))
    second = replay_learner(recording, tmp_path / "b", span(recording, None, None))
    assert first == second
    assert first.equal, str(first)
    assert len(set(digests(recording))) == 3


async def through_the_loop(bus: NatsBus, file: Path, folder: Path, last: int | None = None) -> str:
    recording = Recording.open(file)
    wanted = span(recording, None, last)
    config = recorded_config(recording, folder / "start", wanted.last)
    await bus.declare(run_topology(config))
    async with asyncio.timeout(WAIT_S):
        found = await replay_loop(bus, recording, config, folder / "learner", wanted)
    assert found.equal, str(found)
    return str(found)


@pytest.mark.slow
async def test_the_learner_behind_a_broker_makes_the_recorded_versions_and_its_record_equals_the_recording(
    file: Path, tmp_path: Path
) -> None:
    async with NatsServer(tmp_path / "broker") as server, await NatsBus.connect(server.url, name="replay") as bus:
        assert "versions 0 to 2 equal bit for bit, loop" in await through_the_loop(bus, file, tmp_path)
        recording = Recording.open(file)
        assert await published(bus, RUN) == digests(recording)
        ends = await outcomes(bus, RUN, 4)
        assert [(e.outcome, e.version) for e in sorted(ends, key=lambda e: e.group)] == [(Outcome.TRAINED, v) for v in (1, 1, 2, 2)]
        await record(bus, JetStreamBlobs(bus, RUN), CONFIG, recording.header.model, tmp_path / "again.dlr")
    again = Recording.open(tmp_path / "again.dlr")
    assert again.tensors == recording.tensors
    assert again.header.config == recording.header.config
    assert [(s.facts.digest, s.batch) for s in again.steps()] == [(s.facts.digest, s.batch) for s in recording.steps()]


@pytest.mark.slow
async def test_the_loop_stops_at_the_version_asked_for(file: Path, tmp_path: Path) -> None:
    async with NatsServer(tmp_path / "broker") as server, await NatsBus.connect(server.url, name="replay") as bus:
        assert "versions 0 to 1 equal" in await through_the_loop(bus, file, tmp_path, 1)
        assert len(await outcomes(bus, RUN, 2)) == 2


@pytest.mark.slow
async def test_a_recording_of_partial_groups_goes_through_the_loop(tmp_path: Path, file: Path) -> None:
    """Members that were left out when it was recorded are not waited for."""
    source, part = Recording.open(file), tmp_path / "part.dlr"
    await make_partial(source, part)
    assert [len(entry.members) for step in Recording.open(part).steps() for entry in step.groups(RUN)] == [3, 3, 3, 3]
    async with NatsServer(tmp_path / "broker") as server, await NatsBus.connect(server.url, name="replay") as bus:
        await through_the_loop(bus, part, tmp_path)


async def make_partial(source: Recording, out: Path) -> None:
    """The recording again, of a run in which one member of every group had failed."""
    async with MemoryBus() as bus:
        blobs = MemoryBlobs()
        await bus.declare(run_topology(CONFIG))
        async with running(LearnerService(bus, blobs, CONFIG, out.parent / "partial")) as task:
            for step in source.steps():
                await head_at(bus, blobs, RUN, step.version - 1)
                for entry in source.groups(step):
                    await admit(bus, [entry.group])
                    await grade(bus, one_failed(entry))
            await task
        await record(bus, blobs, CONFIG, source.header.model, out)


def one_failed(entry: RecordedGroup) -> list[Graded]:
    """The members with the first one failed whose going leaves rewards that differ."""
    for lost in entry.members:
        rest = {member.reward for member in entry.members if member is not lost}
        if len(rest) > 1:
            return [with_reward(m.trajectory, None) if m is lost else m for m in entry.members]
    raise AssertionError("only one member differs")


def live(run: str, steps: int = 2) -> Config:
    return tiny(run, run={"steps": steps}, tasks={"params": {"min_word_len": 7, "max_word_len": 8}}, sampling={"max_tokens": 12})


@pytest.mark.slow
async def test_fed_to_live_services_it_makes_the_same_versions(file: Path, tmp_path: Path, nats_bus: NatsBus, fresh_run: str) -> None:
    config, recording = live(fresh_run), Recording.open(file)
    await nats_bus.declare(run_topology(config))
    grader = GraderService(nats_bus, fresh_run, scorer_specs(config), workers=1)
    learner = LearnerService(nats_bus, JetStreamBlobs(nats_bus, fresh_run), config, tmp_path)
    async with running(learner) as training, running(grader) as grading:
        await head_at(nats_bus, JetStreamBlobs(nats_bus, fresh_run), fresh_run, 0)
        fed = await beside(training, feed_into(nats_bus, recording, fresh_run, in_flight=SIZE, wait_s=60.0))
        await training
        await grading
    assert (fed.groups, fed.trajectories, dict(fed.outcomes), fed.open) == (4, 16, {"trained": 4}, 0)
    assert (fed.first, fed.last) == ("g00000000", "g00000003")
    assert await published(nats_bus, fresh_run) == digests(recording)
    assert await dead_letters(nats_bus, fresh_run) == []


@pytest.mark.slow
async def test_a_run_whose_dispatcher_admits_is_not_fed(file: Path, tmp_path: Path, nats_bus: NatsBus, fresh_run: str) -> None:
    config, recording = live(fresh_run), Recording.open(file)
    await nats_bus.declare(run_topology(config))
    async with running(DispatcherService(nats_bus, config, task_source(config))):
        with pytest.raises(HeadConflict, match="dispatcher is running"):
            await feed_into(nats_bus, recording, fresh_run, in_flight=SIZE, wait_s=60.0)


@pytest.mark.slow
async def test_forced_into_a_run_it_takes_indices_nobody_has(file: Path, tmp_path: Path, nats_bus: NatsBus, fresh_run: str) -> None:
    config, recording = live(fresh_run), Recording.open(file)
    await nats_bus.declare(run_topology(config))
    async with running(DispatcherService(nats_bus, config, task_source(config))) as dispatching:
        await beside(dispatching, head_of_ledger(nats_bus, fresh_run))
        fed = await feed_into(nats_bus, recording, fresh_run, in_flight=8, force=True, wait_s=1.0)
    assert (fed.groups, fed.open, dict(fed.outcomes)) == (4, 4, {})
    assert fed.first >= "g00000004"  # the dispatcher admits (max_lag + 1) * groups_per_step by itself


async def head_of_ledger(bus: NatsBus, run: str) -> None:
    """Until the dispatcher has admitted what the bound lets it."""
    subjects = Subjects(run)
    async with aclosing(bus.follow(subjects.stream("LEDGER"), f"{subjects.root}.ledger.admitted.>")) as events:  # type: ignore[type-var]
        async for stored in events:
            if stored.subject.endswith("g00000003"):
                return


@pytest.mark.slow
async def test_the_commands_record_replay_and_feed(file: Path, tmp_path: Path) -> None:
    """A live run of processes, fed by `replay --into`, recorded by `record --follow`, replayed both ways, then damaged."""
    config, recording = live("fed"), Recording.open(file)
    path = write_config(config, tmp_path / "run.toml")
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        server = await stack.enter_async_context(NatsServer(tmp_path / "broker"))
        bus = await stack.enter_async_context(await NatsBus.connect(server.url, name="test"))
        await bus.declare(run_topology(config))
        grader, learner, recorder = [
            await stack.enter_async_context(driftline(tmp_path, *arguments)) for arguments in (
                service_arguments("grader", path, server.url), service_arguments("learner", path, server.url),
                ("record", "fed", "-o", "fed.dlr", "--url", server.url, "--run-file", str(path), "--follow"),
            )
        ]
        await head_at(bus, JetStreamBlobs(bus, "fed"), "fed", 0)
        async with driftline(tmp_path, "replay", str(file), "--into", "fed", "--url", server.url, "--in-flight", str(SIZE)) as feeding:
            ended = await feeding.ended()
            assert ended.code == 0, ended.output
            assert "fed 4 groups (16 trajectories) into fed, g00000000 to g00000003: 4 trained" in ended.output
        assert [(await process.ended()).code for process in (learner, grader, recorder)] == [0, 0, 0]
        assert "versions 0 to 2, 4 groups, 16 trajectories" in recorder.log
    assert digests(Recording.open(tmp_path / "fed.dlr")) == digests(recording)
    for arguments in (["--learner-only"], []):
        async with driftline(tmp_path, "replay", "fed.dlr", "--json", *arguments) as replaying:
            ended = await replaying.ended()
            assert ended.code == 0, ended.output
            found = json.loads(ended.output[ended.output.index("{") :])
            assert (found["equal"], found["compared"], found["difference"]) == (True, 3, None)
    data = bytearray((tmp_path / "fed.dlr").read_bytes())
    data[-100] ^= 1
    (tmp_path / "fed.dlr").write_bytes(bytes(data))
    async with driftline(tmp_path, "replay", "fed.dlr") as replaying:
        ended = await replaying.ended()
        assert ended.code == 4
        assert "(DONE) at offset" in ended.output
