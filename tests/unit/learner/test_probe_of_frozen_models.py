"""The probe of models that are trained in part: what is frozen is shared, what is remembered is what is trained, and the numbers are the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learning_samples import batch_of, grade, group, sample, small_model

from driftline.messages.errors import IntegrityError
from driftline.models.lora import add_lora
from driftline.models.model import K3ForCausalLM
from driftline.services.config import LearnerConfig
from driftline.services.learner.assembler import Batch, BatchGroup
from driftline.services.learner.probe import NumericsProbe, _shares
from driftline.services.learner.trainer import Trainer

torch.set_num_threads(1)
CONFIG = LearnerConfig(lr=1e-1, eps_low=0.2, eps_high=0.2)


def adapted() -> K3ForCausalLM:
    model = small_model()
    torch.manual_seed(4)
    add_lora(model, 2, targets=r".*proj$")
    return model


def halves() -> K3ForCausalLM:
    """Parameters in bfloat16, masters beside them."""
    return small_model().to(torch.bfloat16)


def stepped(trainer: Trainer, probe: NumericsProbe) -> Batch:
    """A group of versions 0 and 1, each half sampled under its own weights, which the probe has seen."""
    probe.remember_model(0, trainer.model)
    asked = group(0, members=8)
    old = sample(trainer.model, [asked], 0)[asked.group]
    trainer.step(batch_of(trainer.model))
    probe.remember_model(1, trainer.model)
    new = sample(trainer.model, [asked], 1)[asked.group]
    return Batch(1, (BatchGroup(asked, tuple(grade(t) for t in (*old[:4], *new[4:])), ()),))


@pytest.mark.parametrize(("make", "bound"), [(adapted, 1e-10), (halves, 1e-3)], ids=["adapters", "bfloat16"])
def test_numerics_of_each_version_are_found_under_that_version(make: object, bound: float) -> None:
    assert callable(make)
    trainer = Trainer(make(), CONFIG)
    probe = NumericsProbe(trainer.model, members=32, keep=2)
    batch = stepped(trainer, probe)
    found = probe.measure(batch)
    assert found is not None
    assert set(found.drift.by_lag) == {0, 1}
    assert found.drift.all.k3 < bound
    total = trainer.step(batch).drift.drift
    assert total.by_lag[1].k3 > 10 * found.drift.by_lag[1].k3, "what the weights moved is not in the numerics"


def test_a_frozen_base_is_shared_and_only_adapters_are_remembered() -> None:
    trainer = Trainer(adapted(), CONFIG)
    probe = NumericsProbe(trainer.model, members=4, keep=3)
    for version in range(5):
        probe.remember_model(version, trainer.model)
    trained = sum(p.numel() for p in trainer.parameters)
    assert probe.nbytes == 3 * 2 * trained, "the newest three, two bytes a trained parameter"
    ours, theirs = dict(trainer.model.named_parameters()), dict(probe._model.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        assert (parameter.data_ptr() == theirs[name].data_ptr()) == (not parameter.requires_grad), name
    assert not any(p.requires_grad for p in theirs.values())


def test_measuring_old_adapters_leaves_the_trained_ones_alone() -> None:
    trainer = Trainer(adapted(), CONFIG)
    probe = NumericsProbe(trainer.model, members=32, keep=2)
    batch = stepped(trainer, probe)
    before = [p.clone() for p in trainer.model.parameters()]
    probe.measure(batch)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_a_whole_policy_can_be_remembered_by_its_public_names_and_a_torn_one_not() -> None:
    trainer = Trainer(adapted(), CONFIG)
    probe = NumericsProbe(trainer.model, members=8, keep=1)
    state = trainer.state()
    probe.remember(0, state)
    assert probe.nbytes == 2 * sum(p.numel() for p in trainer.parameters)
    found = probe.measure(batch_of(trainer.model))
    assert found is not None
    assert found.drift.all.k3 < 1e-10
    name = next(n for n in state if n.endswith("lora_A"))
    with pytest.raises(IntegrityError, match="lacks a trained tensor"):
        probe.remember(1, {n: t for n, t in state.items() if n != name})
    with pytest.raises(IntegrityError, match="shape differs"):
        probe.remember(1, {**state, name: state[name][:1]})


def test_a_version_is_by_lag_even_when_the_head_is_far_ahead() -> None:
    trainer = Trainer(small_model(), CONFIG)
    probe = NumericsProbe(trainer.model, members=32, keep=2)
    batch = stepped(trainer, probe)
    found = probe.measure(Batch(5, batch.groups))
    assert found is not None
    assert set(found.drift.by_lag) == {4, 5}
    tokens = np.concatenate([t.versions[t.action_mask] for t in batch.trajectories])
    assert found.drift.by_lag[5].tokens == int((tokens == 0).sum())


def test_few_members_are_shared_out_over_the_versions() -> None:
    """Taken in the batch's order they would all be of the oldest groups, and one lag would stand for all."""
    trainer = Trainer(small_model(), CONFIG)
    for members in (2, 5, 8, 99):
        probe = NumericsProbe(trainer.model, members=members, keep=2)
        batch = Batch(1, stepped(Trainer(small_model(), CONFIG), probe).groups)
        found = probe.measure(batch)
        assert found is not None
        first, second = min(4, (members + 1) // 2), min(4, members // 2)
        chosen = [*batch.trajectories[:first], *batch.trajectories[4 : 4 + second]]
        assert found.drift.all.tokens == sum(int(t.action_mask.sum()) for t in chosen)
        assert found.drift.by_lag[1].tokens == sum(int(t.action_mask.sum()) for t in batch.trajectories[:first])


@given(st.integers(0, 40), st.lists(st.integers(0, 12), max_size=6))
def test_shares_are_even_and_waste_nothing(total: int, wanted: list[int]) -> None:
    given_out = _shares(total, wanted)
    assert sum(given_out) == min(total, sum(wanted))
    assert all(got <= want for got, want in zip(given_out, wanted, strict=True))
    short = [got for got, want in zip(given_out, wanted, strict=True) if got < want]
    assert not short or max(given_out) - min(short) <= 1
