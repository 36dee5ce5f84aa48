"""The model, engine and trainer on a CUDA device: the same functions as on the CPU, and train = rollout within rounding."""

from __future__ import annotations

import numpy as np
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


def small_model() -> K3ForCausalLM:
    torch.manual_seed(0)
    model = K3ForCausalLM(tiny())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("res.proj.weight"):
                parameter.normal_(std=0.1)
    return model


def test_forward_on_the_device_equals_the_cpu_in_fp64() -> None:
    model = small_model().double()
    tokens = torch.randint(0, 256, (3, 41))
    lengths = torch.tensor([5, 41, 17])
    here = model(tokens, lengths=lengths).hidden
    there = model.cuda()(tokens.cuda(), lengths=lengths.cuda()).hidden.cpu()
    for row, length in enumerate(lengths.tolist()):
        assert (here[row, :length] - there[row, :length]).abs().max() < 1e-10


def test_engine_and_trainer_agree_on_the_device() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = small_model().cuda()
    trainer = Trainer(model, LearnerConfig(device="cuda", eps_low=0.2, eps_high=0.2))
    rollout = small_model().cuda()
    engine = Engine(rollout, version=0)
    engine.load(0, trainer.state())
    groups = []
    for i in range(8):
        task = Task(id=f"t{i}", source="test", family="none", prompt=f"word number {i}")
        group = Group(run="gpu", group=f"g{i}", index=i, task=task, members=4, sampling=Sampling(max_tokens=12))
        engine.submit(group)
        groups.append(group)
    done = []
    while not engine.idle:
        done += engine.step()
    rng = np.random.default_rng(0)
    parts = []
    for group in groups:
        mine = sorted((t for t in done if t.group == group.group), key=lambda t: t.member)
        parts.append(BatchGroup(group, tuple(Graded(run="gpu", trajectory=t, reward=float(rng.random())) for t in mine), ()))
    report = trainer.step(Batch(0, tuple(parts)))
    assert report.values["k3_lag0"] < 1e-9
    assert report.values["skipped"] == 0
    assert 0 < report.values["grad_norm"] < 1e6
