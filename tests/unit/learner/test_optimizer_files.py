"""Optimizer state on disk: found again for exactly the version and policy it belongs to, and whole."""

from __future__ import annotations

from pathlib import Path

import torch
from learning_samples import batch_of, small_model

from driftline.policy_store.tensor import State, state_digest
from driftline.services.config import LearnerConfig
from driftline.services.learner.optimizer_files import OptimizerFiles
from driftline.services.learner.trainer import Trainer
from driftline.services.tensors import to_host

torch.set_num_threads(1)
CONFIG = LearnerConfig(lr=1e-2, eps_low=0.2, eps_high=0.2)


def stepped(steps: int = 1) -> Trainer:
    trainer = Trainer(small_model(), CONFIG)
    for head in range(steps):
        trainer.step(batch_of(trainer.model, head=head))
    return trainer


def state_of(trainer: Trainer) -> State:
    return to_host(trainer.state())


def moments(trainer: Trainer) -> list[torch.Tensor]:
    return [value for master in trainer.masters for _, value in sorted(trainer.optimizer.state.get(master, {}).items())]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_state_of_a_version_comes_back_with_its_masters_and_moments(tmp_path: Path) -> None:
    trainer, files = stepped(), OptimizerFiles(tmp_path / "learner")
    state = state_of(trainer)
    files.save(trainer, 1, state)
    other = Trainer(small_model(7), CONFIG)
    assert files.load(other, 1, state_digest(state))
    assert equal(trainer.masters, other.masters)
    assert equal(moments(trainer), moments(other))
    assert len(moments(trainer)) > 0
    assert not any(p.name.endswith(".partial") for p in files.root.iterdir())


def test_masters_keep_what_the_policys_dtype_rounds_away(tmp_path: Path) -> None:
    trainer, files = stepped(), OptimizerFiles(tmp_path)
    state = state_of(trainer)
    files.save(trainer, 1, state)
    rounded = Trainer(small_model(7), CONFIG)
    rounded.load_policy(trainer.state())
    assert not equal(trainer.masters, rounded.masters)
    files.load(rounded, 1, state_digest(state))
    assert equal(trainer.masters, rounded.masters)


def test_another_version_or_another_policy_is_not_restored(tmp_path: Path) -> None:
    trainer, files = stepped(), OptimizerFiles(tmp_path)
    state = state_of(trainer)
    files.save(trainer, 1, state)
    other = Trainer(small_model(7), CONFIG)
    before = [m.clone() for m in other.masters]
    elsewhere = state_digest(state_of(other))
    assert not files.load(other, 1, elsewhere)
    assert not files.load(other, 2, state_digest(state))
    assert equal(before, other.masters)


def test_a_crash_before_the_label_leaves_nothing_to_restore(tmp_path: Path) -> None:
    trainer, files = stepped(), OptimizerFiles(tmp_path)
    state = state_of(trainer)
    files.save(trainer, 1, state)
    (tmp_path / "optimizer-00000001.json").unlink()
    assert not files.load(trainer, 1, state_digest(state))
    files.save(trainer, 1, state)
    (tmp_path / "optimizer-00000001.safetensors").unlink()
    assert not files.load(trainer, 1, state_digest(state))
    (tmp_path / "optimizer-00000001.json").write_text("{")
    assert not files.load(trainer, 1, state_digest(state))


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    trainer, files = stepped(0), OptimizerFiles(tmp_path)
    state = state_of(trainer)
    for version in (1, 2, 10):
        files.save(trainer, version, state)
    files.keep_newest(2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        f"optimizer-{version:08d}.{kind}" for version in (2, 10) for kind in ("json", "safetensors")
    ]


def test_restoring_a_state_from_before_the_first_step_forgets_later_moments(tmp_path: Path) -> None:
    fresh = stepped(0)
    fresh.save_optimizer(tmp_path / "o.safetensors")
    used = stepped(1)
    assert moments(used)
    used.load_optimizer(tmp_path / "o.safetensors")
    assert not moments(used)
    batch = batch_of(fresh.model)
    fresh.step(batch)
    used.step(batch)
    assert equal(fresh.masters, used.masters)
