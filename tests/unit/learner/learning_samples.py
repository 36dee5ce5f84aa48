"""Groups sampled by a small model, graded by a rule: what trainer and service tests train on."""

from __future__ import annotations

import torch

from driftline.messages.types import Graded, Group, Sampling, Task, Trajectory
from driftline.models.causal_lm import CausalLM
from driftline.models.config import tiny
from driftline.models.model import K3ForCausalLM
from driftline.services.learner.assembler import Batch, BatchGroup
from driftline.services.rollout.engine import Engine

RUN = "learning"


def small_model(seed: int = 0) -> K3ForCausalLM:
    torch.manual_seed(seed)
    return K3ForCausalLM(tiny(num_hidden_layers=3, hidden_size=32, intermediate_size=48, num_experts=4, attn_res_block_size=2))


def group(index: int, members: int = 4, prompt: str | None = None, max_tokens: int = 6) -> Group:
    name = f"g{index:08d}"
    task = Task(id=f"test/{index}", source="test", family="none", prompt=prompt or f"question {index}", answer="")
    return Group(run=RUN, group=name, index=index, task=task, members=members, sampling=Sampling(max_tokens=max_tokens), seed=3)


def sample(model: CausalLM, groups: list[Group], version: int = 0, *, record_routes: bool = False) -> dict[str, list[Trajectory]]:
    engine = Engine(model, version=version, max_batch=64, record_routes=record_routes)
    for item in groups:
        engine.submit(item)
    out: dict[str, list[Trajectory]] = {item.group: [] for item in groups}
    while not engine.idle:
        for done in engine.step():
            out[done.group].append(done)
    return {name: sorted(members, key=lambda t: t.member) for name, members in out.items()}


def grade(trajectory: Trajectory, reward: float | None = None) -> Graded:
    value = (int(trajectory.tokens[-1]) + trajectory.member) % 7 / 7 + trajectory.member if reward is None else reward
    return Graded(run=RUN, trajectory=trajectory, reward=value)


def batch_of(model: CausalLM, count: int = 3, head: int = 0, *, record_routes: bool = False) -> Batch:
    groups = [group(i, prompt="short" if i else "a somewhat longer question") for i in range(count)]
    sampled = sample(model, groups, head, record_routes=record_routes)
    return Batch(head, tuple(BatchGroup(g, tuple(grade(t) for t in sampled[g.group]), ()) for g in groups))
