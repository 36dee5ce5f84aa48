"""A learner that comes back: from the newest checkpoint, through the recorded steps, to exactly the bits that were published."""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path

import pytest
import torch
from learner_cases import feed, learner, leaves, manifest
from loop_cases import beside, eventually, head_at, outcomes, running, tiny

from driftline.messages.errors import BrokerUnavailable
from driftline.messages.memory import MemoryBus
from driftline.messages.recording import load_batch, load_version
from driftline.messages.subjects import Subjects
from driftline.policy_store.blobs import MemoryBlobs
from driftline.policy_store.tensor import state_digest
from driftline.services.config import Config
from driftline.services.learner.checkpoints import CheckpointFiles
from driftline.services.learner.records import batch_of
from driftline.services.learner.trainer import Trainer
from driftline.services.policy_model import build_model
from driftline.services.runtime import run_topology
from driftline.services.tensors import to_host

torch.set_num_threads(1)
RUN = "recovery"
CONFIG = tiny(RUN, run={"steps": 9}, learner={"probe_members": 0, "checkpoint_every": 1, "max_recompute": 8})
SUBJECTS = Subjects(RUN)


async def train(bus: MemoryBus, blobs: MemoryBlobs, folder: Path, steps: range, config: Config = CONFIG) -> None:
    """One life of a learner: the given steps, each fed when its version is there."""
    async with running(learner(bus, blobs, folder, config)) as task:
        for step in steps:
            await beside(task, head_at(bus, blobs, RUN, step))
            await feed(bus, step, config)
            await beside(task, head_at(bus, blobs, RUN, step + 1))
            await beside(task, outcomes(bus, RUN, 2 * step + 2))
        written = CheckpointFiles(folder / "learner")
        await beside(task, eventually(lambda: any(label.version == steps[-1] + 1 for label in written.found(at_most=100))))


async def digests(bus: MemoryBus, blobs: MemoryBlobs, versions: range) -> list[str]:
    return [(await manifest(bus, blobs, version, RUN)).digest for version in versions]


@cache
def undisturbed() -> list[str]:
    """Versions 0 to 4 by one learner."""

    async def run(folder: Path) -> list[str]:
        async with MemoryBus() as bus:
            await bus.declare(run_topology(CONFIG))
            blobs = MemoryBlobs()
            await train(bus, blobs, folder, range(4))
            return await digests(bus, blobs, range(5))

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(run(Path(folder)))


@pytest.fixture
async def bus(memory_bus: MemoryBus) -> MemoryBus:
    await memory_bus.declare(run_topology(CONFIG))
    return memory_bus


@pytest.fixture
def blobs() -> MemoryBlobs:
    return MemoryBlobs()


@pytest.fixture(scope="module")
def reference() -> list[str]:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as thread:  # a fixture may be asked for inside a running loop
        return thread.submit(undisturbed).result()


def keep_only(folder: Path, version: int) -> None:
    """The crash came before any newer checkpoint was whole."""
    files = CheckpointFiles(folder / "learner")
    for label in files.found(at_most=100):
        if label.version != version:
            (files.root / f"{label.stem}.json").unlink()


@pytest.mark.parametrize(("kept", "how"), [(3, "restored"), (2, "recomputed"), (0, "recomputed")])
async def test_what_a_crash_cost_is_computed_again_bit_for_bit(
    bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path, reference: list[str], kept: int, how: str
) -> None:
    """H27: it resumes at the head it had reached, whatever it had written of its optimizer."""
    await train(bus, blobs, tmp_path, range(3))
    keep_only(tmp_path, kept)
    await train(bus, blobs, tmp_path, range(3, 4))
    assert await digests(bus, blobs, range(5)) == reference
    assert (await manifest(bus, blobs, 4, RUN)).numerics["optimizer"] == how


async def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path, reference: list[str]
) -> None:
    await train(bus, blobs, tmp_path, range(3))
    files = CheckpointFiles(tmp_path / "learner")
    newest = files.root / f"{files.found(at_most=3)[0].stem}.safetensors"
    newest.write_bytes(newest.read_bytes()[:-8])
    await train(bus, blobs, tmp_path, range(3, 4))
    assert await digests(bus, blobs, range(5)) == reference
    assert (await manifest(bus, blobs, 4, RUN)).numerics["optimizer"] == "recomputed"


async def test_without_checkpoint_and_record_it_goes_on_from_the_weights_and_says_so(
    bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path, reference: list[str]
) -> None:
    await train(bus, blobs, tmp_path, range(3))
    keep_only(tmp_path, -1)
    await bus.purge(SUBJECTS.stream("RECORD"), f"{SUBJECTS.root}.record.1.>")
    await train(bus, blobs, tmp_path, range(3, 4))
    after = await digests(bus, blobs, range(5))
    assert after[:4] == reference[:4]
    assert after[4] != reference[4]
    assert (await manifest(bus, blobs, 4, RUN)).numerics["optimizer"] == "fresh"


async def test_a_step_that_does_not_come_out_as_published_keeps_the_published_weights(
    bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path, reference: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another device, or other settings: the bits differ, and nobody is told that they do not."""
    await train(bus, blobs, tmp_path, range(3))
    keep_only(tmp_path, 2)
    other = tiny(RUN, run={"steps": 9}, learner={"probe_members": 0, "lr": 3e-3})
    service = learner(bus, blobs, tmp_path, other)
    trainer = await service._resume()
    assert state_digest(to_host(trainer.state())) == reference[3]
    assert service._optimizer == "inexact"


async def test_the_word_on_record_is_written_again_when_a_crash_kept_it_out(bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    class Forgetful(MemoryBus):
        async def publish(self, subject: str, *args: object, **more: object) -> object:  # type: ignore[override]
            if subject == SUBJECTS.recorded(1):
                raise BrokerUnavailable("cut off by the test", field="subject", value=subject)
            return await super().publish(subject, *args, **more)  # type: ignore[arg-type]

    async with running(learner(Forgetful(bus.broker), blobs, tmp_path, CONFIG)) as task:
        await feed(bus, 0, CONFIG)
        await asyncio.wait({task})
        error = task.exception()
        assert error is not None
        assert isinstance(leaves(error)[0], BrokerUnavailable)
    assert await load_version(bus, RUN, 1) is None
    await train(bus, blobs, tmp_path, range(1, 2))
    recorded = await load_version(bus, RUN, 1)
    made = await manifest(bus, blobs, 1, RUN)
    assert recorded is not None
    assert (recorded.digest, recorded.seal, recorded.consumed) == (made.digest, made.seal, made.consumed)


async def test_a_version_is_made_again_from_nothing_but_what_is_on_record(bus: MemoryBus, blobs: MemoryBlobs, tmp_path: Path) -> None:
    await train(bus, blobs, tmp_path, range(2))
    trainer = Trainer(build_model(CONFIG, device="cpu", threads=1), CONFIG.learner)
    for version in (1, 2):
        recorded = await load_version(bus, RUN, version)
        assert recorded is not None
        assert recorded.batch is not None
        trainer.step(batch_of(await load_batch(bus, RUN, version, recorded.batch)))
        assert state_digest(to_host(trainer.state())) == recorded.digest == (await manifest(bus, blobs, version, RUN)).digest
