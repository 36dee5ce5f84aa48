"""Whole batches sampled by an engine and scored by a learner's forward, for K3 and a dense decoder, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from driftline.messages.types import Graded, Group, Sampling, Task, Trajectory
from driftline.models.causal_lm import CausalLM
from driftline.services.learner.assembler import BatchGroup
from driftline.services.learner.shared_prompts import forward_groups
from driftline.services.rollout.engine import Engine

__all__ = ["asked", "bits", "learned", "recorded", "sampled"]


def asked(count: int, *, members: int = 4, max_tokens: int = 24) -> list[Group]:
    """Groups of prompts of several lengths, temperatures and seeds."""
    made = []
    for i in range(count):
        task = Task(id=f"t{i}", source="test", family="test", prompt=f"question {i}" + " and more" * (i % 4))
        made.append(Group(run="r", group=f"g{i:08d}", index=i, task=task, members=members, seed=7,
                          sampling=Sampling(temperature=(1.0, 0.7, 1.3)[i % 3], max_tokens=max_tokens)))
    return made


def sampled(model: CausalLM, groups: Sequence[Group], *, max_batch: int = 16, every: int = 1, record_routes: bool = False) -> tuple[BatchGroup, ...]:
    """The groups, of which one more is submitted before every `every`-th step, finished; in the order of their index."""
    engine = Engine(model, version=0, max_batch=max_batch, record_routes=record_routes)
    waiting, done, steps = list(groups), list[Trajectory](), 0
    while waiting or not engine.idle:
        if waiting and steps % every == 0:
            engine.submit(waiting.pop(0))
        done += engine.step()
        steps += 1
    of = {g.group: sorted((t for t in done if t.group == g.group), key=lambda t: t.member) for g in groups}
    return tuple(BatchGroup(g, tuple(Graded(run="r", trajectory=t, reward=float(t.member % 2)) for t in of[g.group]), ())
                 for g in sorted(groups, key=lambda g: g.index))


def recorded(groups: Sequence[BatchGroup]) -> np.ndarray:
    """What the engine wrote down of every sampled token, fp32 [N]."""
    parts = [m.trajectory.logprobs[m.trajectory.action_mask] for g in groups for m in g.members]
    return np.concatenate(parts).astype("<f4")


def learned(model: CausalLM, groups: Sequence[BatchGroup], *, at_once: int = 1000, packed: bool = False, replay: bool = False) -> np.ndarray:
    """The learner's log-probabilities of the same tokens, fp32 [N], `at_once` groups a micro-batch."""
    parts = [forward_groups(model, groups[i : i + at_once], packed=packed, replay=replay).logp.detach() for i in range(0, len(groups), at_once)]
    return torch.cat(parts).float().cpu().numpy()


def bits(x: np.ndarray) -> np.ndarray:
    assert x.dtype == np.float32
    assert len(x) > 0
    return x.view(np.int32)
