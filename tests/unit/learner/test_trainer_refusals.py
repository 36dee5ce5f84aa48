"""A refused step leaves no trace, a resumed optimizer holds only what its file holds, and small steps are not rounded away."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from learning_samples import batch_of, grade, group, sample, small_model

from driftline.models.logprob import token_logprobs
from driftline.services.config import LearnerConfig
from driftline.services.learner.assembler import Batch, BatchGroup
from driftline.services.learner.trainer import Trainer

torch.set_num_threads(1)
CONFIG = LearnerConfig(lr=1e-2, eps_low=0.2, eps_high=0.2, micro_batch_groups=8)


def trainer_of(**changes: object) -> Trainer:
    return Trainer(small_model(), CONFIG.model_copy(update=changes))


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_a_sampled_token_of_probability_zero_refuses_the_step_although_its_gradient_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token-level objective clamps the log-ratio, and beyond the clamp the gradient is zero: only the count shows it."""
    trainer = trainer_of(objective="grpo")
    batch = batch_of(trainer.model)
    impossible = int(batch.trajectories[0].tokens[-1])
    before, model = trainer.state(), trainer.model

    def without_it(hidden: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gone = torch.zeros(264)
        gone[impossible] = -torch.inf
        return token_logprobs(model.logits(hidden) + gone, tokens, temperature)

    monkeypatch.setattr(model, "logprobs", without_it)
    report = trainer.step(batch)
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in trainer.parameters), "the gradient alone would have passed"
    assert report.values["skipped"] == 1
    assert same(before, trainer.state())


def test_after_a_refused_step_the_next_equals_one_that_never_saw_it() -> None:
    clean, dirty = trainer_of(), trainer_of()
    first, second = batch_of(clean.model), batch_of(small_model(4), count=2)
    clean.step(first)
    dirty.step(first)
    good = dirty.state()
    with torch.no_grad():
        dirty.model.lm_head.weight[3, 3] = torch.inf
    assert dirty.step(second).values["skipped"] == 1
    with torch.no_grad():
        dirty.model.lm_head.weight[3, 3] = good["lm_head.weight"][3, 3].float()
    clean.step(second)
    dirty.step(second)
    assert same(clean.state(), dirty.state())
    assert all(torch.equal(a, b) for a, b in zip(clean.masters, dirty.masters, strict=True))


def test_a_file_from_before_the_first_step_takes_a_used_trainer_back_there(tmp_path: Path) -> None:
    """Moments the file does not have must not be left over from the steps in between."""
    trainer = trainer_of()
    start = trainer.state()
    snapshot = trainer.snapshot()
    batch = batch_of(trainer.model)
    trainer.step(batch)
    once = trainer.state()
    trainer.step(batch)
    trainer.restore(snapshot)
    assert same(start, trainer.state())
    trainer.step(batch)
    assert same(once, trainer.state())


def test_steps_below_the_policys_resolution_add_up_in_the_masters() -> None:
    trainer = trainer_of(lr=1e-5)
    batch = batch_of(trainer.model)
    before = trainer.state()
    masters = [m.clone() for m in trainer.masters]
    trainer.step(batch)
    moved = [n for n, t in trainer.state().items() if t.dtype == torch.bfloat16 and not torch.equal(t, before[n])]
    assert all((a != b).any() for a, b in zip(masters, trainer.masters, strict=True) if a.dim() == 2 and a.shape[0] > 1)
    changed = sum(int((trainer.state()[n] != before[n]).sum()) for n in moved)
    total = sum(t.numel() for t in before.values())
    assert changed < 0.2 * total, "one small step changes few rounded weights"
    for _ in range(30):
        trainer.step(batch)
    after = sum(int((t != before[n]).sum()) for n, t in trainer.state().items())
    assert after > 3 * changed


def test_an_uneven_last_micro_batch_gives_the_same_gradient() -> None:
    grads = []
    for size in (2, 5):
        trainer = trainer_of(micro_batch_groups=size, grad_clip=1e9)
        trainer.step(batch_of(trainer.model, count=5))
        grads.append(torch.cat([m.grad.flatten() for m in trainer.masters]))
    assert (grads[0] - grads[1]).norm() < 1e-5 * grads[1].norm()


def test_members_left_out_are_in_no_count_and_no_mean() -> None:
    trainer = trainer_of()
    one = group(0)
    members = sample(trainer.model, [one])[one.group]
    kept = tuple(grade(t, reward) for t, reward in zip(members[:3], (0.0, 0.5, 1.0), strict=True))
    report = trainer.step(Batch(0, (BatchGroup(one, kept, (3,)),)))
    assert report.values["sequences_trained"] == 3
    assert report.values["reward_train"] == 0.5
    assert report.values["tokens_trained"] == sum(int(t.action_mask.sum()) for t in members[:3])


def test_the_report_says_how_old_each_sequence_was() -> None:
    trainer = trainer_of()
    fresh, old = batch_of(trainer.model, count=1, head=2), batch_of(trainer.model, count=3, head=0)
    report = trainer.step(Batch(2, (fresh.groups[0], *old.groups[1:])))
    assert report.lag_histogram == (4.0, 0.0, 8.0)
    assert report.values["lag_max"] == 2
    assert report.values["tokens_lag0"] == sum(int(m.trajectory.action_mask.sum()) for m in fresh.groups[0].members)
