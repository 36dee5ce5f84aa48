"""Small recordings: by hand for the format, from a real learner on a bus in memory for what is computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash
from loop_cases import admit, alternating, grade, groups_of, head_at, running, sampled, tiny

from driftline.messages.bus import Bus
from driftline.messages.recording import RecordedGroup, pack_batch
from driftline.messages.types import Finish, Graded, Group, Task, Trajectory
from driftline.policy_store.blobs import BlobStore
from driftline.policy_store.tensor import HostTensor, State, state_digest
from driftline.services.config import Config
from driftline.services.learner.service import LearnerService
from driftline.services.replay.format import Header, Step, StepFacts
from driftline.services.replay.reader import Recording
from driftline.services.replay.writer import RecordingWriter
from driftline.services.starting import starting_config

RUN = "recorded"
CONFIG = tiny(RUN, run={"steps": 2}, learner={"probe_members": 0})
MODEL = starting_config(CONFIG)


def member(group: str, number: int, reward: float) -> Graded:
    task = Task(id="t", source="test", family="spell", prompt="abc", answer="a b c")
    trajectory = Trajectory(
        run=RUN, group=group, member=number, members=2, index=0, task=task, prompt_tokens=2, tokens=[1, 2, 3, 4],
        action_mask=np.array([False, False, True, True]), logprobs=[0.0, 0.0, -0.5, -0.25], versions=[-1, -1, 0, 0], finish=Finish.STOP,
    )
    return Graded(run=RUN, trajectory=trajectory, reward=reward)


def small_state() -> State:
    values = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "b.bias": np.zeros(0, np.float32), "c": np.array([7], np.int64)}
    return {name: HostTensor.from_numpy(value) for name, value in values.items()}


def small_header(state: State) -> Header:
    return Header(run=RUN, driftline="0", created_at=1.0, start_version=0, start_digest=state_digest(state), config="[run]\n", model="{}",
                  numerics={"device": "cpu"})


def small_step(version: int) -> Step:
    task = Task(id="t", source="test", family="spell", prompt="abc", answer="a b c")
    groups = []
    for name in (f"g{version}a", f"g{version}b"):
        group = Group(run=RUN, group=name, index=0, task=task, members=2)
        groups.append(RecordedGroup(run=RUN, version=version, group=group, members=(member(name, 0, 0.0), member(name, 1, 1.0))))
    batch = pack_batch(groups)
    facts = StepFacts(version=version, digest=f"{version:032x}", seal="", learner_step=version, batch=xxhash.xxh3_128_hexdigest(batch),
                      groups=2, trajectories=4, numerics={"device": "cpu"}, at=float(version))
    return Step(facts, batch)


def write_small(path: Path, versions: int = 3) -> Path:
    state = small_state()
    writer = RecordingWriter.create(path, small_header(state), state)
    for version in range(1, versions + 1):
        writer.add(small_step(version))
    writer.close()
    return path


def read_all(path: Path) -> tuple[Recording, State, list[Step]]:
    """Everything a reader can be asked for; the batches decoded too."""
    recording = Recording.open(path)
    state, steps = recording.start(), list(recording.steps())
    for step in steps:
        recording.groups(step)
    return recording, state, steps


def batches(config: Config) -> list[list[Graded]]:
    """What a run is fed: per step its graded members, sampled by the shipped policy."""
    size = config.run.groups_per_step
    return [alternating(sampled(groups_of(config, range(step * size, (step + 1) * size)))) for step in range(config.run.steps)]


async def train(
    bus: Bus, blobs: BlobStore, config: Config, folder: Path, parts: Sequence[Sequence[Graded]], *, first: int = 0
) -> None:
    """Let the learner service make a version of each part, after version `first`; it is stopped when the last is there, or has ended."""
    size = config.run.groups_per_step
    async with running(LearnerService(bus, blobs, config, folder)) as task:
        for version, members in enumerate(parts, first):
            await head_at(bus, blobs, config.run.name, version)
            await admit(bus, groups_of(config, range(version * size, (version + 1) * size)))
            await grade(bus, members)
        await head_at(bus, blobs, config.run.name, first + len(parts))
        if first + len(parts) == config.run.steps:
            await task


def with_step(path: Path, out: Path, version: int, change: Sequence[RecordedGroup]) -> Path:
    """A copy whose batch of one version is another, sealed as if it had been recorded so."""
    recording = Recording.open(path)
    writer = RecordingWriter.create(out, recording.header, recording.start())
    for step in recording.steps():
        if step.version == version:
            batch = pack_batch(change)
            step = Step(step.facts.model_copy(update={"batch": xxhash.xxh3_128_hexdigest(batch)}), batch)
        writer.add(step)
    writer.close()
    return out
