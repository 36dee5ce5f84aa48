"""One optimizer step: exact about what it trains on, and about what it publishes."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from learning_samples import batch_of, group, sample, small_model

from driftline.messages.types import Graded
from driftline.models.logprob import token_logprobs
from driftline.models.lora import add_lora
from driftline.services.config import LearnerConfig
from driftline.services.learner.assembler import Batch, BatchGroup
from driftline.services.learner.probe import NumericsProbe
from driftline.services.learner.shared_prompts import forward_groups
from driftline.services.learner.trainer import Trainer
from driftline.services.rollout.engine import Engine

torch.set_num_threads(1)
CONFIG = LearnerConfig(lr=1e-2, eps_low=0.2, eps_high=0.2, micro_batch_groups=8)


def trainer_of(config: LearnerConfig = CONFIG) -> Trainer:
    return Trainer(small_model(), config)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_learner_and_rollout_agree_at_the_same_weights_and_not_at_others() -> None:
    trainer = trainer_of()
    batch = batch_of(trainer.model)
    fresh = trainer.step(batch)
    assert fresh.values["k3_lag0"] < 1e-10
    assert fresh.values["tokens_lag0"] == fresh.values["tokens_trained"] > 20
    stale = trainer.step(Batch(0, batch.groups))  # the weights moved: the same comparison must now see it
    assert stale.values["k3_lag0"] > 1e3 * max(fresh.values["k3_lag0"], 1e-13)


def test_the_first_step_at_lag_zero_has_ratio_one_and_clips_nothing() -> None:
    trainer = trainer_of()
    values = trainer.step(batch_of(trainer.model)).values
    assert values["clip_fraction"] == 0
    assert abs(values["ratio_mean"] - 1) < 1e-5
    assert values["lag_max"] == 0
    assert values["grad_norm"] > 0


def test_shared_prompts_give_the_log_probabilities_of_whole_sequences() -> None:
    model = small_model().double()
    batch = batch_of(model)
    flat = forward_groups(model, batch.groups, 0)
    whole = []
    for t in batch.trajectories:
        tokens = torch.from_numpy(t.tokens.astype(np.int64))[None]
        logits = model.logits(model(tokens[:, :-1]).hidden[0, t.prompt_tokens - 1 :])
        whole.append(token_logprobs(logits, tokens[0, t.prompt_tokens :])[0])
    assert (flat.logp - torch.cat(whole)).abs().max() < 1e-10
    assert flat.sequence.tolist() == [i for i, t in enumerate(batch.trajectories) for _ in range(int(t.action_mask.sum()))]


def test_micro_batches_do_not_change_the_gradient() -> None:
    grads = []
    for size in (1, 2, 8):
        trainer = trainer_of(CONFIG.model_copy(update={"micro_batch_groups": size, "grad_clip": 1e9}))
        report = trainer.step(batch_of(trainer.model))
        grads.append((report.values["loss"], torch.cat([m.grad.flatten() for m in trainer.masters])))
    for loss, grad in grads[1:]:
        assert abs(loss - grads[0][0]) < 1e-6
        assert (grad - grads[0][1]).norm() < 1e-5 * grads[0][1].norm()


def test_what_is_published_is_what_is_computed_with() -> None:
    trainer = trainer_of()
    trainer.step(batch_of(trainer.model))
    state = trainer.state()
    other = small_model(9)
    Engine(other, version=1).load(1, state)
    tokens = torch.randint(0, 256, (2, 9))
    assert torch.equal(other(tokens).hidden, trainer.model.eval()(tokens).hidden)
    assert state["lm_head.weight"].dtype == torch.bfloat16
    assert not same(state, trainer_of().state())


def test_a_step_whose_gradient_is_not_finite_changes_nothing() -> None:
    trainer = trainer_of()
    batch = batch_of(trainer.model)
    with torch.no_grad():
        trainer.model.lm_head.weight[0, 0] = float("nan")
    before = [m.clone() for m in trainer.masters]
    report = trainer.step(batch)
    assert trainer.skipped == 1
    assert report.values["skipped"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.masters, strict=True))


def test_equal_rewards_leave_the_weights_bit_identical() -> None:
    trainer = trainer_of()
    batch = batch_of(trainer.model)
    flat = tuple(
        BatchGroup(g.group, tuple(Graded(run=m.run, trajectory=m.trajectory, reward=0.7) for m in g.members), ()) for g in batch.groups
    )
    before = trainer.state()
    trainer.step(Batch(0, flat))
    assert same(before, trainer.state())


def test_an_interrupted_optimizer_continues_bit_for_bit(tmp_path: Path) -> None:
    first = trainer_of()
    first.step(batch_of(first.model))
    snapshot = first.snapshot()
    second = Trainer(small_model(5), CONFIG)
    second.load_policy(first.state())
    second.restore(snapshot)
    assert same(first.state(), second.state())
    again = batch_of(first.model, head=1)
    first.step(again)
    second.step(again)
    assert same(first.state(), second.state())


def test_lora_moves_the_adapters_alone() -> None:
    model = small_model()
    add_lora(model, rank=2)
    trainer = Trainer(model, CONFIG)
    before = trainer.state()
    trainer.step(batch_of(trainer.model))
    moved = {name for name, tensor in trainer.state().items() if not torch.equal(tensor, before[name])}
    assert moved
    assert all("lora_" in name for name in moved)


def test_environment_tokens_inside_a_completion_are_not_trained() -> None:
    trainer = trainer_of()
    batch = batch_of(trainer.model, count=1)
    members = []
    for m in batch.groups[0].members:
        t = m.trajectory
        mask, logprobs, versions = t.action_mask.copy(), t.logprobs.copy(), t.versions.copy()
        tool = t.prompt_tokens + 1
        if tool < len(t.tokens) - 1:
            mask[tool], logprobs[tool], versions[tool] = False, 0.0, -1
        members.append(Graded(run=m.run, reward=m.reward, trajectory=t.model_copy(update={"action_mask": mask, "logprobs": logprobs, "versions": versions})))
    report = trainer.step(Batch(0, (BatchGroup(batch.groups[0].group, tuple(members), ()),)))
    assert report.values["tokens_trained"] == sum(int(m.trajectory.action_mask.sum()) for m in members)
    assert report.values["k3_lag0"] < 1e-10


def test_router_replay_uses_the_recorded_experts() -> None:
    model = small_model()
    batch = batch_of(model, record_routes=True)
    plain = forward_groups(model, batch.groups, 0, replay=True).logp
    assert torch.equal(plain, forward_groups(model, batch.groups, 0).logp)
    changed = copy.deepcopy(batch)
    for t in changed.trajectories:
        assert t.routes is not None
        assert (t.routes[-1] == -1).all()
        t.routes[:-1] = (t.routes[:-1] + 1) % 4
    assert not torch.equal(plain, forward_groups(model, changed.groups, 0, replay=True).logp)


def test_the_probe_compares_under_the_version_that_sampled() -> None:
    trainer = trainer_of()
    probe = NumericsProbe(trainer.model, members=5, keep=2)
    batch = batch_of(trainer.model)
    assert probe.measure(batch) is None
    probe.remember(0, trainer.state())
    trainer.step(batch)
    found = probe.measure(Batch(1, batch.groups))
    assert found is not None
    assert found.drift.all.k3 < 1e-10
    probe.remember(1, trainer.state())
    probe.remember(2, trainer.state())
    assert probe.measure(batch) is None  # version 0 is forgotten


@pytest.mark.parametrize("proximal", ["behaviour", "recompute"])
def test_both_proximal_policies_train(proximal: str) -> None:
    trainer = trainer_of(CONFIG.model_copy(update={"proximal": proximal, "icepop": (0.5, 2.0), "tis_cap": 2.0}))
    values = trainer.step(batch_of(trainer.model)).values
    assert values["skipped"] == 0
    assert values["masked"] == 0


def test_samples_are_reproducible_whatever_the_batch() -> None:
    groups = [group(i) for i in range(4)]
    together = sample(small_model(), groups)
    for item in groups:
        alone = sample(small_model(), [item])[item.group]
        for a, b in zip(alone, together[item.group], strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
