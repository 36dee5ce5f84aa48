"""A learner resumed on a CUDA device has its optimizer there, and steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from driftline.messages.types import Graded, Group, Sampling, Task
from driftline.models.config import tiny
from driftline.models.model import K3ForCausalLM
from driftline.services.config import LearnerConfig
from driftline.services.learner.assembler import Batch, BatchGroup
from driftline.services.learner.trainer import Trainer
from driftline.services.rollout.engine import Engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CONFIG = LearnerConfig(device="cuda", lr=1e-2, eps_low=0.2, eps_high=0.2)


def small_model(seed: int = 0) -> K3ForCausalLM:
    torch.manual_seed(seed)
    return K3ForCausalLM(tiny(num_hidden_layers=3, hidden_size=32, intermediate_size=48, num_experts=4)).cuda()


def batch_of(model: K3ForCausalLM, head: int) -> Batch:
    task = Task(id="t", source="test", family="none", prompt="a question")
    group = Group(run="gpu", group="g", index=0, task=task, members=4, sampling=Sampling(max_tokens=6))
    engine = Engine(model, version=head)
    engine.submit(group)
    done = []
    while not engine.idle:
        done += engine.step()
    members = sorted(done, key=lambda t: t.member)
    return Batch(head, (BatchGroup(group, tuple(Graded(run="gpu", trajectory=t, reward=float(t.member)) for t in members), ()),))


def test_a_restored_optimizer_is_on_the_device_and_steps(tmp_path: Path) -> None:
    """Two steps on a device may differ by the order of atomic sums, so what is compared bit for bit is what was restored."""
    first = Trainer(small_model(), CONFIG)
    first.step(batch_of(first.model, 0))
    snapshot = first.snapshot()
    second = Trainer(small_model(5), CONFIG)
    second.load_policy(first.state())
    second.restore(snapshot)
    for ours, theirs in zip(first.masters, second.masters, strict=True):
        assert torch.equal(ours, theirs)
        for key in ("exp_avg", "exp_avg_sq"):
            restored = second.optimizer.state[theirs][key]
            assert restored.device == theirs.device
            assert torch.equal(first.optimizer.state[ours][key], restored)
    assert second.step(batch_of(second.model, 1)).values["skipped"] == 0
