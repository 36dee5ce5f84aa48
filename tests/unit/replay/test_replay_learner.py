"""A trainer stepped through a recording: the same bits, or the first version where they are others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loop_cases import tiny
from recording_cases import CONFIG, MODEL, RUN, batches, train, with_step

from driftline.messages.errors import ConfigError
from driftline.messages.memory import MemoryBus
from driftline.messages.recording import RecordedGroup
from driftline.messages.types import Graded
from driftline.policy_store.blobs import MemoryBlobs
from driftline.services.config import Config, to_toml
from driftline.services.replay.comparison import Comparison, Span
from driftline.services.replay.reader import Recording
from driftline.services.replay.record import record
from driftline.services.replay.replay import replay_learner, span
from driftline.services.replay.writer import RecordingWriter
from driftline.services.runtime import run_topology


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


async def recorded(config: Config, folder: Path, *, restart: bool = False, lose: bool = False) -> Path:
    """A run of `config`, recorded. `restart`: by two learners, one after the other; `lose`: the first one's files are lost."""
    async with MemoryBus() as bus:
        blobs, parts = MemoryBlobs(), batches(config)
        await bus.declare(run_topology(config))
        if restart:
            await train(bus, blobs, config, folder / "learner", parts[:1])
            await train(bus, blobs, config, folder / ("elsewhere" if lose else "learner"), parts[1:], first=1)
        else:
            await train(bus, blobs, config, folder / "learner", parts)
        return (await record(bus, blobs, config, MODEL, folder / "run.dlr")).path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with ThreadPoolExecutor(1) as thread:  # a module's fixture may be asked for inside a running loop
        return thread.submit(asyncio.run, recorded(CONFIG, tmp_path_factory.mktemp("recorded"))).result()


def replayed(file: Path, folder: Path, first: int | None = None, last: int | None = None) -> Comparison:
    recording = Recording.open(file)
    return replay_learner(recording, folder, span(recording, first, last))


def the_groups(file: Path, version: int) -> tuple[RecordedGroup, ...]:
    recording = Recording.open(file)
    return next(recording.groups(step) for step in recording.steps() if step.version == version)


def changed(groups: Sequence[RecordedGroup], **update: Any) -> list[RecordedGroup]:
    """The batch with its last member changed."""
    *before, last = groups
    *kept, member = last.members
    if "reward" in update:
        other = Graded(run=member.run, trajectory=member.trajectory, reward=update["reward"])
    else:
        other = member.model_copy(update={"trajectory": member.trajectory.model_copy(update=update)})
    return [*before, last.model_copy(update={"members": (*kept, other)})]


async def test_a_recorded_run_is_equal_bit_for_bit_and_twice(file: Path, tmp_path: Path) -> None:
    first, second = replayed(file, tmp_path / "a"), replayed(file, tmp_path / "b")
    assert first == second
    assert first.equal
    assert (first.computed, first.compared) == (3, 3)
    assert "versions 0 to 2 equal bit for bit" in str(first)


async def test_a_run_whose_learner_restarted_is_equal(file: Path, tmp_path: Path) -> None:
    again = await recorded(CONFIG, tmp_path / "run", restart=True)
    assert [s.facts.digest for s in Recording.open(again).steps()] == [s.facts.digest for s in Recording.open(file).steps()]
    assert replayed(again, tmp_path / "replay").equal


async def test_a_run_whose_learner_lost_its_files_is_equal(file: Path, tmp_path: Path) -> None:
    again = await recorded(CONFIG, tmp_path / "run", restart=True, lose=True)
    assert [s.facts.digest for s in Recording.open(again).steps()] == [s.facts.digest for s in Recording.open(file).steps()]
    found = replayed(again, tmp_path / "replay")
    assert found.equal, str(found)


async def test_a_changed_reward_is_caught_at_its_version(file: Path, tmp_path: Path) -> None:
    other = with_step(file, tmp_path / "other.dlr", 2, changed(the_groups(file, 2), reward=0.25))
    found = replayed(other, tmp_path / "replay")
    assert found.difference is not None
    assert (found.difference.version, found.computed) == (2, 3)
    assert "the batch, the settings or the code is another" in str(found)


async def test_a_changed_token_is_caught_at_its_version(file: Path, tmp_path: Path) -> None:
    groups = the_groups(file, 1)
    tokens = np.array(groups[-1].members[-1].trajectory.tokens)
    tokens[-1] = (tokens[-1] + 1) % 256
    other = with_step(file, tmp_path / "other.dlr", 1, changed(groups, tokens=tokens))
    found = replayed(other, tmp_path / "replay")
    assert found.difference is not None
    assert (found.difference.version, found.computed) == (1, 2)


async def test_a_changed_learning_rate_is_caught_at_the_first_step(file: Path, tmp_path: Path) -> None:
    recording = Recording.open(file)
    other = CONFIG.model_copy(update={"learner": CONFIG.learner.model_copy(update={"lr": CONFIG.learner.lr * 1.5})})
    header = recording.header.model_copy(update={"config": to_toml(other)})
    writer = RecordingWriter.create(tmp_path / "other.dlr", header, recording.start())
    for step in recording.steps():
        writer.add(step)
    writer.close()
    found = replayed(tmp_path / "other.dlr", tmp_path / "replay")
    assert found.difference is not None
    assert found.difference.version == 1


async def test_a_difference_names_what_the_two_sides_compute_with(file: Path, tmp_path: Path) -> None:
    recording = Recording.open(file)
    writer = RecordingWriter.create(tmp_path / "other.dlr", recording.header, recording.start())
    for step in recording.steps():
        numerics = {**step.facts.numerics, "device": "cuda", "torch": "9.9", "optimizer": "inexact"}
        writer.add(type(step)(step.facts.model_copy(update={"digest": "0" * 32, "numerics": numerics}), step.batch))
    writer.close()
    found = replayed(tmp_path / "other.dlr", tmp_path / "replay")
    assert found.difference is not None
    assert found.difference.facts == {
        "device": ("cuda", "cpu"), "torch": ("9.9", torch.__version__), "optimizer": ("inexact", "continued"),
    }
    assert f"torch: recorded 9.9, here {torch.__version__}" in str(found)


async def test_versions_before_from_are_computed_and_not_compared(file: Path, tmp_path: Path) -> None:
    other = with_step(file, tmp_path / "other.dlr", 1, changed(the_groups(file, 1), reward=0.25))
    found = replayed(other, tmp_path / "replay", 2)
    assert found.difference is not None
    assert found.difference.version == 2  # what version 1 became is no longer looked at, and still what 2 is made from
    whole = replayed(file, tmp_path / "whole", 2)
    assert whole.equal
    assert (whole.computed, whole.compared) == (3, 1)
    assert "2 before them computed and not compared" in str(whole)


async def test_versions_after_to_are_not_computed(file: Path, tmp_path: Path) -> None:
    other = with_step(file, tmp_path / "other.dlr", 2, changed(the_groups(file, 2), reward=0.25))
    found = replayed(other, tmp_path / "replay", None, 1)
    assert found.equal
    assert (found.computed, found.compared) == (2, 2)


@pytest.mark.parametrize(("first", "last"), [(None, 3), (3, None), (2, 1), (-1, None)])
async def test_versions_the_recording_does_not_hold_are_refused(file: Path, first: int | None, last: int | None) -> None:
    with pytest.raises(ConfigError, match="the recording holds versions 0 to 2"):
        span(Recording.open(file), first, last)


async def test_another_device_than_this_machine_has_is_named(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device"):
        replay_learner(Recording.open(file), tmp_path, Span(0, 1), device="cuda")


@pytest.mark.parametrize("learner", [
    {"lora_rank": 2}, {"proximal": "recompute", "tis_cap": 2.0, "weight_decay": 0.1, "micro_batch_groups": 1}, {"adv_std": True, "router_replay": True},
])
async def test_a_run_of_another_kind_is_equal(tmp_path: Path, learner: dict[str, Any]) -> None:
    config = tiny(RUN, run={"steps": 2}, learner={"probe_members": 0, "lr": 1e-3, **learner})
    file = await recorded(config, tmp_path / "run")
    found = replayed(file, tmp_path / "replay")
    assert found.equal, str(found)
    assert len({step.facts.digest for step in Recording.open(file).steps()} | {Recording.open(file).header.start_digest}) == 3
    assert file.stat().st_size < 1_000_000


async def test_a_float32_policy_is_embedded_and_equal(tmp_path: Path) -> None:
    config = tiny(RUN, run={"steps": 1}, learner={"probe_members": 0}, policy={"dtype": "float32"})
    file = await recorded(config, tmp_path / "run")
    assert file.stat().st_size > 3_000_000
    assert replayed(file, tmp_path / "replay").equal
