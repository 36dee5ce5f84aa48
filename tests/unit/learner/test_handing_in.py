"""The policy leaves the trainer tensor by tensor: all of it, exactly, and never more of it in memory than there is room for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from learning_samples import batch_of, small_model
from loop_cases import admit, alternating, beside, grade, groups_of, head_at, running, sampled, tiny

from driftline.messages.errors import IntegrityError
from driftline.messages.memory import MemoryBus
from driftline.models.lora import add_lora
from driftline.policy_store import MemoryBlobs, PolicyReader
from driftline.policy_store.draft import Draft
from driftline.policy_store.forms import Changes
from driftline.policy_store.tensor import SHARD_BYTES, HostTensor, state_digest
from driftline.services.config import LearnerConfig
from driftline.services.learner import handing_in, trainer
from driftline.services.learner.device_delta import ShardContent, Started
from driftline.services.learner.handing_in import HandingIn
from driftline.services.learner.service import LearnerService
from driftline.services.learner.trainer import Emitted, Trainer
from driftline.services.runtime import run_topology
from driftline.services.tensors import to_host

torch.set_num_threads(1)
CONFIG = LearnerConfig(lr=1e-2, eps_low=0.2, eps_high=0.2, micro_batch_groups=8)


def emitted(made: Trainer) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}

    def emit(name: str, tensor: Emitted) -> None:
        assert name not in out
        assert isinstance(tensor, torch.Tensor)
        out[name] = tensor

    made.step(batch_of(made.model), emit)
    return out


@pytest.mark.parametrize("chunk", [1, 1 << 24])
def test_a_step_hands_out_the_whole_policy_and_is_the_same_step(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(trainer, "CHUNK_ELEMENTS", chunk)
    one, other = Trainer(small_model(), CONFIG), Trainer(small_model(), CONFIG)
    for _ in range(2):
        found = emitted(one)
        other.step(batch_of(other.model))
        expected = other.state()
        assert found.keys() == expected.keys() == other.layouts().keys()
        assert all(torch.equal(found[name], expected[name]) and found[name].dtype == expected[name].dtype for name in expected)
        assert {name: host.layout for name, host in to_host(expected).items()} == other.layouts()
    again, saved = other.snapshot(), one.snapshot()
    assert again.keys() == saved.keys()
    assert all(torch.equal(again[name], saved[name]) for name in again if not name.startswith("rng"))


def test_what_changed_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of a device, on the CPU."""
    monkeypatch.setattr(trainer, "CHUNK_ELEMENTS", 3000)
    made, whole = Trainer(small_model(), CONFIG), Trainer(small_model(), CONFIG)
    made.by_changes = True
    for _ in range(2):
        before = to_host(made.state())
        handed: dict[str, Emitted] = {}
        made.step(batch_of(made.model), handed.__setitem__)
        whole.step(batch_of(whole.model))
        after = to_host(whole.state())
        assert handed.keys() == after.keys()
        for name, shards in handed.items():
            assert not isinstance(shards, torch.Tensor)
            assert len(shards) == after[name].layout.shard_count
            for number, shard in enumerate(shards):
                part = slice(number * SHARD_BYTES, (number + 1) * SHARD_BYTES)
                data = before[name].data[part]
                if isinstance(shard, Changes):
                    data.view(f"<u{after[name].width}")[shard.at] ^= shard.xor
                elif shard is not None:
                    data[:] = shard
                assert np.array_equal(data, after[name].data[part])
        assert any(isinstance(shard, Changes) for shards in handed.values() for shard in shards)


def test_what_is_not_trained_is_handed_out_too() -> None:
    model = small_model()
    add_lora(model, rank=2, alpha=4.0)
    made = Trainer(model, CONFIG)
    assert emitted(made).keys() == made.state().keys()
    made.by_changes = True
    handed: dict[str, Emitted] = {}
    made.step(batch_of(made.model), handed.__setitem__)
    assert handed.keys() == made.state().keys()


def test_a_refused_step_hands_out_nothing() -> None:
    made = Trainer(small_model(), CONFIG)
    batch = batch_of(made.model)
    with torch.no_grad():
        made.parameters[-1].fill_(float("nan"))
    out: list[str] = []
    made.step(batch, lambda name, _: out.append(name))
    assert made.skipped == 1
    assert out == []


class Slow:
    """A draft that takes a tensor when it is told to."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.taken: list[str] = []

    async def put(self, name: str, tensor: HostTensor) -> None:
        await self.go.wait()
        self.taken.append(name)


async def test_the_optimizer_waits_when_there_is_no_room_and_goes_on_when_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handing_in, "ROOM_BYTES", 3 * 40)
    draft = Slow()
    handing = HandingIn(cast(Draft, draft))
    out: list[int] = []
    full = threading.Event()

    def thread() -> None:
        for i in range(10):
            if i == 3:
                full.set()
            handing.emit(str(i), torch.zeros(10))
            out.append(i)

    async with asyncio.TaskGroup() as tasks, asyncio.timeout(30):
        tasks.create_task(handing.run())
        stepping = tasks.create_task(asyncio.to_thread(thread))
        await asyncio.to_thread(full.wait)
        assert out == [0, 1, 2]
        draft.go.set()
        await stepping
        handing.close()
    assert draft.taken == [str(i) for i in range(10)]


async def test_a_tensor_larger_than_the_room_goes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handing_in, "ROOM_BYTES", 8)
    draft = Slow()
    draft.go.set()
    handing = HandingIn(cast(Draft, draft))
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(30):
        tasks.create_task(handing.run())
        for name in "ab":
            await asyncio.to_thread(handing.emit, name, torch.zeros(10))
        handing.close()
    assert draft.taken == ["a", "b"]


async def test_when_the_draft_is_gone_the_waiting_thread_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handing_in, "ROOM_BYTES", 40)
    handing = HandingIn(cast(Draft, Slow()))
    running = asyncio.create_task(handing.run())
    await asyncio.to_thread(handing.emit, "first", torch.zeros(10))
    second = asyncio.create_task(asyncio.to_thread(handing.emit, "second", torch.zeros(10)))
    running.cancel()
    async with asyncio.timeout(30):
        with pytest.raises(IntegrityError, match="see what ended"):
            await second
        with pytest.raises(IntegrityError, match="nobody takes it"):
            await asyncio.to_thread(handing.emit, "third", torch.zeros(10))


async def versions_of(folder: Path, monkeypatch: pytest.MonkeyPatch, *, by_changes: bool) -> list[str]:
    """Digests of versions 0 to 2 of a learner that hands out what changed, or the tensors."""
    real = Trainer.__init__

    def made(self: Trainer, *arguments: Any, **more: Any) -> None:
        real(self, *arguments, **more)
        self.by_changes = by_changes

    monkeypatch.setattr(Trainer, "__init__", made)
    config = tiny("handing", run={"steps": 2})
    async with MemoryBus() as bus:
        await bus.declare(run_topology(config))
        blobs = MemoryBlobs()
        found = []
        async with running(LearnerService(bus, blobs, config, folder)) as task:
            found.append((await beside(task, head_at(bus, blobs, "handing", 0))).digest)
            for step in (1, 2):
                groups = groups_of(config, range(2 * step - 2, 2 * step))
                await admit(bus, groups)
                await grade(bus, alternating(sampled(groups, version=step - 1)))
                found.append((await beside(task, head_at(bus, blobs, "handing", step))).digest)
        state = await PolicyReader(bus, blobs, "handing").materialise(2)
        assert state_digest(state) == found[2]
    return found


async def test_a_learner_by_changes_publishes_the_same_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = await versions_of(tmp_path / "whole", monkeypatch, by_changes=False)
    changes = await versions_of(tmp_path / "changes", monkeypatch, by_changes=True)
    assert whole == changes
    assert len(set(whole)) == 3


async def test_changes_that_are_not_those_of_the_weights_end_the_learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Started.tensors

    def wrong(self: Started) -> Iterator[tuple[str, list[ShardContent]]]:
        for name, shards in real(self):
            yield name, [None] * len(shards) if any(isinstance(shard, Changes) for shard in shards) else shards

    monkeypatch.setattr(Started, "tensors", wrong)
    with pytest.raises(ExceptionGroup) as raised:
        await versions_of(tmp_path, monkeypatch, by_changes=True)
    assert raised.group_contains(IntegrityError, match="the learner's weights have digest")
