"""On a CUDA device too, the same batches make the same policy bit for bit, from the start and from a snapshot."""

from __future__ import annotations

import pytest
import torch

from driftline.messages.types import Graded, Group, Sampling, Task
from driftline.models.config import tiny
from driftline.models.model import K3ForCausalLM
from driftline.policy_store.tensor import state_digest
from driftline.services.config import LearnerConfig
from driftline.services.learner.assembler import Batch, BatchGroup
from driftline.services.learner.determinism import compute_deterministically
from driftline.services.learner.trainer import Trainer
from driftline.services.rollout.engine import Engine
from driftline.services.tensors import to_host

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CONFIG = LearnerConfig(device="cuda", lr=1e-3, eps_low=0.2, eps_high=0.2)
STEPS = 6


def model() -> K3ForCausalLM:
    torch.manual_seed(0)
    return K3ForCausalLM(tiny()).cuda()


def batch_of(policy: K3ForCausalLM, head: int) -> Batch:
    engine = Engine(policy, version=head, max_batch=128)
    groups = [
        Group(run="gpu", group=f"g{head}{i}", index=i, task=Task(id=f"t{i}", source="test", family="none", prompt=f"a question {i}" * (i + 1)),
              members=8, sampling=Sampling(max_tokens=24)) for i in range(8)
    ]
    for group in groups:
        engine.submit(group)
    done = []
    while not engine.idle:
        done += engine.step()
    members = {g.group: sorted((t for t in done if t.group == g.group), key=lambda t: t.member) for g in groups}
    return Batch(head, tuple(
        BatchGroup(g, tuple(Graded(run="gpu", trajectory=t, reward=float(t.member % 3)) for t in members[g.group]), ()) for g in groups
    ))


def digest(trainer: Trainer) -> str:
    return state_digest(to_host(trainer.state()))


def test_the_same_batches_make_the_same_policies() -> None:
    compute_deterministically("cuda")
    first = Trainer(model(), CONFIG)
    batches, made, halfway = [], [], {}
    for head in range(STEPS):
        if head == STEPS // 2:
            halfway = first.snapshot()
        batches.append(batch_of(first.model, head))
        first.step(batches[-1])
        made.append(digest(first))
    assert len(set(made)) == STEPS
    again = Trainer(model(), CONFIG)
    for batch, expected in zip(batches, made, strict=True):
        again.step(batch)
        assert digest(again) == expected
    resumed = Trainer(model(), CONFIG)
    resumed.restore(halfway)
    for batch, expected in zip(batches[STEPS // 2:], made[STEPS // 2:], strict=True):
        resumed.step(batch)
        assert digest(resumed) == expected
