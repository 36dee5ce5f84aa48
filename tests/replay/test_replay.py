"""A recording of the loop, played to a real broker, grader and learner: the same file makes the same versions, bit for bit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import msgpack
import numpy as np
import pytest
from loop_cases import admit, groups_of, head_at, outcomes, sampled
from loop_processes import WAIT_S, driftline, service_arguments, write_config
from make_recording import CONFIG, FILE, RUN

from driftline.messages.codec import decode
from driftline.messages.dead_letters import dead_letters
from driftline.messages.nats_bus import NatsBus
from driftline.messages.server import NatsServer
from driftline.messages.subjects import Subjects
from driftline.messages.types import Admitted, Group, Metrics, Outcome, OutcomeEvent, RunFinished, Trajectory
from driftline.policy_store.blobs import JetStreamBlobs
from driftline.policy_store.manifest import Manifest
from driftline.policy_store.reader import PolicyReader
from driftline.policy_store.tensor import state_digest
from driftline.services.runtime import run_topology

SUBJECTS = Subjects(RUN)


@dataclass(frozen=True)
class Recorded:
    group: Group
    members: list[Trajectory]


def recording() -> list[Recorded]:
    found = []
    for admitted, *members in msgpack.unpackb(FILE.read_bytes()):
        event = decode(admitted)
        assert isinstance(event, Admitted)
        trajectories = [decode(member) for member in members]
        found.append(Recorded(event.group, [t for t in trajectories if isinstance(t, Trajectory)]))
    return found


@dataclass(frozen=True)
class Replay:
    manifests: list[Manifest]
    outcomes: list[OutcomeEvent]
    k3_lag0: list[float]
    codes: list[int]
    dead: int
    read_back: list[str]


async def send(bus: NatsBus, part: list[Recorded], backwards: bool) -> None:
    await admit(bus, [r.group for r in part], at=0.0)
    members = [t for r in part for t in r.members]
    for t in members[::-1] if backwards else members:
        await bus.publish(SUBJECTS.trajectory(t.group), t, id=f"{RUN}/trajectory/{t.group}/{t.member}")


async def replay(folder: Path, *, backwards: bool = False) -> Replay:
    """Play the file in a fresh run: the groups of each step once the version before it is there."""
    config = write_config(CONFIG, folder / "run.toml")
    parts, size = recording(), CONFIG.run.groups_per_step
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        server = await stack.enter_async_context(NatsServer(folder / "broker"))
        bus = await stack.enter_async_context(await NatsBus.connect(server.url, name="replay"))
        await bus.declare(run_topology(CONFIG))
        blobs = JetStreamBlobs(bus, RUN)
        services = [
            await stack.enter_async_context(driftline(folder, *service_arguments(name, config, server.url))) for name in ("grader", "learner")
        ]
        for step in range(CONFIG.run.steps):
            await head_at(bus, blobs, RUN, step)
            await send(bus, parts[step * size : (step + 1) * size], backwards)
        codes = [(await service.ended()).code for service in services]
        reader = PolicyReader(bus, blobs, RUN)
        versions = range(CONFIG.run.steps + 1)
        metrics = [m async for m in _history(bus)]
        end = await bus.last(SUBJECTS.stream("CONTROL"), SUBJECTS.finished)
        assert end is not None
        assert isinstance(end.message, RunFinished)
        assert end.message.version == CONFIG.run.steps
        return Replay(
            [await reader.manifest(v) for v in versions], await outcomes(bus, RUN, len(parts)),
            [m.values["k3_lag0"] for m in metrics if m.step >= 0], codes, len(await dead_letters(bus, RUN)),
            [state_digest(await reader.materialise(v)) for v in versions],
        )


async def _history(bus: NatsBus) -> AsyncIterator[Metrics]:
    for raw in await bus.read(SUBJECTS.stream("METRICS"), SUBJECTS.metrics("learner")):
        message = decode(raw.data)
        assert isinstance(message, Metrics)
        yield message


def test_the_recording_is_of_the_shipped_policy() -> None:
    parts = recording()
    again = sampled([r.group for r in parts])
    old = [t for r in parts for t in r.members]
    stale = "the shipped policy or the sampling changed: run tests/replay/make_recording.py"
    assert [t.id for t in again] == [t.id for t in old]
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(again, old, strict=True)), stale
    assert all(np.allclose(a.logprobs, b.logprobs, atol=1e-4) for a, b in zip(again, old, strict=True)), stale
    assert groups_of(CONFIG, [r.group.index for r in parts]) == [r.group for r in parts]


@pytest.mark.slow
async def test_the_same_recording_makes_the_same_versions_bit_for_bit(tmp_path: Path) -> None:
    first = await replay(tmp_path / "first")
    second = await replay(tmp_path / "second", backwards=True)  # the order of arrival is not part of a recording
    assert [first.codes, second.codes] == [[0, 0], [0, 0]]
    parts, size = recording(), CONFIG.run.groups_per_step
    for version in (1, 2):
        want = [t.id for r in parts[(version - 1) * size : version * size] for t in r.members]
        assert list(first.manifests[version].consumed) == want
        assert first.manifests[version].parent == first.manifests[version - 1].link
    assert [(e.group, e.outcome, e.version, e.members) for e in first.outcomes] == [
        (r.group.group, Outcome.TRAINED, 1 + i // size, 4) for i, r in enumerate(parts)
    ]
    digests = [m.digest for m in first.manifests]
    assert len(set(digests)) == 3
    assert digests == first.read_back == [m.digest for m in second.manifests] == second.read_back
    assert [m.consumed for m in first.manifests] == [m.consumed for m in second.manifests]
    assert [(e.group, e.outcome, e.version, e.lag, e.reward_mean) for e in first.outcomes] == [
        (e.group, e.outcome, e.version, e.lag, e.reward_mean) for e in second.outcomes
    ]
    assert (first.dead, second.dead) == (0, 0)
    # Sampled here long ago and recomputed now by another process: the same numbers, up to arithmetic.
    assert first.k3_lag0
    assert max(first.k3_lag0) <= 1e-6
