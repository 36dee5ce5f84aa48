"""The numerics probe: the same tokens, the same weights, two processes' arithmetic; and nothing else in the number."""

from __future__ import annotations

import numpy as np
import torch
from learning_samples import batch_of, grade, group, sample, small_model

from driftline.messages.types import Trajectory
from driftline.models.state import export_state
from driftline.services.config import LearnerConfig
from driftline.services.learner.assembler import Batch, BatchGroup
from driftline.services.learner.probe import NumericsProbe
from driftline.services.learner.trainer import Trainer

torch.set_num_threads(1)
CONFIG = LearnerConfig(lr=1e-2, eps_low=0.2, eps_high=0.2)


def mixed(t: Trajectory) -> Trajectory:
    """The trajectory with its last token said to be of the next version."""
    versions = t.versions.copy()
    versions[-1] += 1
    return t.model_copy(update={"versions": versions})


def two_versions() -> tuple[Trainer, NumericsProbe, Batch]:
    """One group with members of versions 0 and 1, sampled under exactly those policies."""
    trainer = Trainer(small_model(), CONFIG)
    probe = NumericsProbe(trainer.model, members=32, keep=3)
    probe.remember(0, trainer.state())
    asked = group(0, members=8)
    old = sample(trainer.model, [asked], 0)[asked.group]
    trainer.step(batch_of(trainer.model))
    probe.remember(1, trainer.state())
    new = sample(trainer.model, [asked], 1)[asked.group]
    members = tuple(grade(t) for t in (*old[:4], *new[4:]))
    return trainer, probe, Batch(1, (BatchGroup(asked, members, ()),))


def test_each_member_is_measured_under_the_version_that_sampled_it() -> None:
    _, probe, batch = two_versions()
    found = probe.measure(batch)
    assert found is not None
    assert found.drift.all.tokens == sum(int(t.action_mask.sum()) for t in batch.trajectories)
    assert found.drift.all.k3 < 1e-10


def test_a_remembered_policy_that_is_not_the_one_shows() -> None:
    _, probe, batch = two_versions()
    probe.remember(0, export_state(small_model(9)))
    found = probe.measure(batch)
    assert found is not None
    assert found.drift.all.k3 > 1e-6


def test_members_of_more_than_one_version_are_left_out() -> None:
    _, probe, batch = two_versions()
    first = batch.groups[0]
    long = [m for m in first.members if m.trajectory.oldest_version == 0 and m.trajectory.action_mask.sum() > 1]
    torn = tuple(m.model_copy(update={"trajectory": mixed(m.trajectory)}) if m in long else m for m in first.members)
    found = probe.measure(Batch(1, (BatchGroup(first.group, torn, ()),)))
    assert long
    assert found is not None
    assert found.drift.all.tokens == sum(int(m.trajectory.action_mask.sum()) for m in first.members if m not in long)
    assert found.drift.all.k3 < 1e-10


def test_the_number_of_members_is_bounded_and_zero_turns_it_off() -> None:
    trainer = Trainer(small_model(), CONFIG)
    batch = batch_of(trainer.model)
    for members in (0, 1, 5):
        probe = NumericsProbe(trainer.model, members=members, keep=1)
        probe.remember(0, trainer.state())
        found = probe.measure(batch)
        first = batch.trajectories[:members]
        assert (0 if found is None else found.drift.all.tokens) == sum(int(t.action_mask.sum()) for t in first)


def test_measuring_changes_neither_the_trained_model_nor_its_gradient() -> None:
    trainer, probe, batch = two_versions()
    before = [p.clone() for p in trainer.model.parameters()]
    probe.measure(batch)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    assert all(p.requires_grad for p in trainer.parameters)


def test_a_recorded_probability_that_is_wrong_shows() -> None:
    trainer = Trainer(small_model(), CONFIG)
    probe = NumericsProbe(trainer.model, members=4, keep=1)
    probe.remember(0, trainer.state())
    asked = group(0)
    lied = []
    for t in sample(trainer.model, [asked])[asked.group]:
        off = np.where(t.action_mask, t.logprobs - np.float32(0.01), t.logprobs).astype("<f4")
        lied.append(grade(t.model_copy(update={"logprobs": off})))
    found = probe.measure(Batch(0, (BatchGroup(asked, tuple(lied), ()),)))
    assert found is not None
    assert abs(found.drift.all.k3 - 0.01**2 / 2) < 1e-6
