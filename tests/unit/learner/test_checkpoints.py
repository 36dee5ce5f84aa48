"""Checkpoints: whole or not at all, for exactly their version and policy, and never further behind than the bound."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import torch
from learning_samples import batch_of, small_model

from driftline.messages.errors import IntegrityError
from driftline.policy_store.tensor import state_digest
from driftline.services.config import LearnerConfig
from driftline.services.learner.checkpoints import Checkpointer, CheckpointFiles, Label
from driftline.services.learner.trainer import Trainer
from driftline.services.tensors import to_host

torch.set_num_threads(1)
CONFIG = LearnerConfig(lr=1e-2, eps_low=0.2, eps_high=0.2)


def stepped(steps: int = 1) -> Trainer:
    trainer = Trainer(small_model(), CONFIG)
    for head in range(steps):
        trainer.step(batch_of(trainer.model, head=head))
    return trainer


def label_of(trainer: Trainer, version: int) -> Label:
    return Label(version, state_digest(to_host(trainer.state())))


def moments(trainer: Trainer) -> list[torch.Tensor]:
    return [value for master in trainer.masters for _, value in sorted(trainer.optimizer.state.get(master, {}).items())]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_state_of_a_version_comes_back_with_masters_moments_and_generators(tmp_path: Path) -> None:
    trainer, files = stepped(), CheckpointFiles(tmp_path / "learner")
    label = label_of(trainer, 1)
    files.save(label, trainer.snapshot())
    drawn = torch.rand(3)
    other = Trainer(small_model(7), CONFIG)
    (found,) = files.found(at_most=1)
    assert found == label
    other.restore(files.load(found))
    assert torch.equal(torch.rand(3), drawn)
    assert equal(trainer.masters, other.masters)
    assert equal(moments(trainer), moments(other))
    assert len(moments(trainer)) > 0
    assert sorted(p.name for p in files.root.iterdir()) == [f"{label.stem}.json", f"{label.stem}.safetensors"]


def test_masters_keep_what_the_policys_dtype_rounds_away() -> None:
    trainer = stepped()
    rounded = Trainer(small_model(7), CONFIG)
    rounded.load_policy(trainer.state())
    assert not equal(trainer.masters, rounded.masters)
    rounded.restore(trainer.snapshot())
    assert equal(trainer.masters, rounded.masters)


def test_masters_start_as_the_rounded_policy() -> None:
    """So that version 0 as it was published is all that a replay needs."""
    first = Trainer(small_model(), CONFIG)
    again = Trainer(small_model(7), CONFIG)
    again.load_policy(first.state())
    assert equal(first.masters, again.masters)


def test_adopting_a_policy_keeps_the_masters_that_round_to_it() -> None:
    trainer = stepped()
    masters = [m.clone() for m in trainer.masters]
    policy = trainer.state()
    assert trainer.adopt(policy) == 0
    assert equal(trainer.masters, masters)
    name = next(n for n, t in policy.items() if t.numel() > 1 and t.dtype is torch.bfloat16)
    policy[name].view(-1)[0] += 1.0
    assert trainer.adopt(policy) == 1
    assert state_digest(to_host(trainer.state())) == state_digest(to_host(policy))


def test_a_snapshot_is_not_changed_by_later_steps() -> None:
    trainer = stepped()
    snapshot = trainer.snapshot()
    before = {name: tensor.clone() for name, tensor in snapshot.items()}
    trainer.step(batch_of(trainer.model, head=1))
    assert all(torch.equal(snapshot[name], before[name]) for name in before)


def test_a_snapshot_of_another_model_is_refused() -> None:
    snapshot = {k: v for k, v in stepped().snapshot().items() if "master" not in k}
    with pytest.raises(IntegrityError, match="parameters missing"):
        Trainer(small_model(), CONFIG).restore(snapshot)


@pytest.mark.parametrize("damage", ["label", "tensors", "cut", "bit", "garbage"])
def test_what_a_crash_or_the_disk_did_to_a_checkpoint_is_noticed(tmp_path: Path, damage: str) -> None:
    """L6: a file that was cut off between write and rename, or damaged later, is never loaded."""
    trainer, files = stepped(), CheckpointFiles(tmp_path)
    label = label_of(trainer, 1)
    files.save(label, trainer.snapshot())
    tensors, named = tmp_path / f"{label.stem}.safetensors", tmp_path / f"{label.stem}.json"
    match damage:
        case "label":
            named.unlink()
            assert files.found(at_most=1) == []
        case "tensors":
            tensors.unlink()
        case "cut":
            tensors.write_bytes(tensors.read_bytes()[:-1])
        case "bit":
            data = bytearray(tensors.read_bytes())
            data[-1] ^= 1
            tensors.write_bytes(data)
        case "garbage":
            named.write_text("{")
    with pytest.raises(IntegrityError):
        files.load(label)


def test_only_the_newest_are_kept_and_leftovers_go(tmp_path: Path) -> None:
    trainer, files = stepped(0), CheckpointFiles(tmp_path)
    labels = [label_of(trainer, version) for version in (1, 2, 10)]
    for label in labels:
        files.save(label, trainer.snapshot())
    (tmp_path / "checkpoint-00000011-" f"{'0' * 32}.safetensors").write_bytes(b"cut off before its label")
    files.keep_newest(2)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        f"{label.stem}.{kind}" for label in labels[1:] for kind in ("json", "safetensors")
    )
    assert [label.version for label in files.found(at_most=9)] == [2]


def test_restoring_a_state_from_before_the_first_step_forgets_later_moments() -> None:
    fresh = stepped(0)
    snapshot = fresh.snapshot()
    used = stepped(1)
    assert moments(used)
    used.restore(snapshot)
    assert not moments(used)
    batch = batch_of(fresh.model)
    fresh.step(batch)
    used.step(batch)
    assert equal(fresh.masters, used.masters)


class SlowFiles(CheckpointFiles):
    """A disk that writes when it is told to."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.began, self.gate = threading.Event(), threading.Event()
        self.saving = 0

    def save(self, label: Label, tensors: object) -> None:
        self.saving += 1
        self.began.set()
        assert self.gate.wait(60)
        super().save(label, tensors)  # type: ignore[arg-type]


async def test_steps_go_on_while_a_checkpoint_is_written_until_the_bound(tmp_path: Path) -> None:
    trainer, files = stepped(0), SlowFiles(tmp_path)
    writer = Checkpointer(files, every=1, bound=3)
    for version in range(1, 4):
        async with asyncio.timeout(60):
            await writer.before(trainer, version - 1, f"{version - 1:032x}")
        await writer.after(trainer, version, f"{version:032x}")
    async with asyncio.timeout(60):
        await asyncio.to_thread(files.began.wait)
    assert (files.saving, writer.durable) == (1, 0)  # one is being written, the others were skipped
    waiting = asyncio.create_task(writer.before(trainer, 3, f"{3:032x}"))
    await asyncio.sleep(0.05)
    assert not waiting.done()  # version 4 would make four steps that a crash costs
    files.gate.set()
    async with asyncio.timeout(60):
        await waiting
    assert writer.durable >= 1
    await writer.last(trainer, 3, f"{3:032x}")
    assert writer.durable == 3


async def test_a_disk_that_fails_is_noticed_at_the_next_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    writer = Checkpointer(CheckpointFiles(tmp_path / "file"), every=1, bound=1)
    trainer = stepped(0)
    await writer.after(trainer, 1, "0" * 32)
    with pytest.raises(OSError, match="file"):
        await writer.before(trainer, 1, "0" * 32)
