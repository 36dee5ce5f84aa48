"""The learner's loss and gradient against the formula written out once, a trajectory at a time in fp64: whole sequences, no cache, no packing, no shared prompt,
no micro-batch, logits of every position. It holds for each way a step can be cut and computed."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from learning_samples import batch_of, group, sample, small_model

from driftline.messages.types import Graded, Trajectory
from driftline.models.causal_lm import CausalLM
from driftline.models.dense.config import DenseConfig
from driftline.models.lora import add_lora
from driftline.models.random_weights import random_model
from driftline.models.state import round_to_policy_
from driftline.services.config import LearnerConfig
from driftline.services.learner.assembler import Batch, BatchGroup
from driftline.services.learner.trainer import Trainer

torch.set_num_threads(1)
CONFIG = LearnerConfig(lr=1e-3, eps_low=0.05, eps_high=0.08, grad_clip=1e9, micro_batch_groups=8)
DENSE = DenseConfig.of({
    "model_type": "qwen2", "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 1000.0, "max_position_embeddings": 512, "tie_word_embeddings": True,
}, "here")


def model_of(kind: str) -> CausalLM:
    model: CausalLM = random_model(DENSE, dtype=torch.float32) if kind == "dense" else small_model()
    with torch.no_grad():
        rng = torch.Generator().manual_seed(4)
        for name, parameter in model.named_parameters():
            if name.endswith("embed_tokens.weight") or "lm_head" in name:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=rng))
    if kind == "lora":
        add_lora(model, rank=3, alpha=5.0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("lora_B"):
                    parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(6))
    round_to_policy_(model)
    return model


def long_prompts(model: CausalLM, *, routes: bool) -> Batch:
    """Three groups whose prompts begin alike for some seventy tokens, one of which is no longer than that."""
    groups = [group(i, prompt="solved: " + "3 + 4 = 7; " * 6 + end) for i, end in enumerate(("", "1 + 1", "a somewhat longer question"))]
    sampled = sample(model, groups, record_routes=routes)
    return Batch(0, tuple(BatchGroup(g, tuple(Graded(run=t.run, trajectory=t, reward=0.0) for t in sampled[g.group]), ()) for g in groups))


def ragged(model: CausalLM, *, routes: bool, common: bool = False) -> Batch:
    """Sampled by this model, then moved away from it: other recorded probabilities, a tool's tokens inside, unequal lengths, a temperature of its own each."""
    rng = np.random.default_rng(3)
    groups = []
    for g in (long_prompts(model, routes=routes) if common else batch_of(model, count=3, record_routes=routes)).groups:
        members = []
        for i, m in enumerate(g.members):
            t = m.trajectory
            keep = max(t.prompt_tokens + 2, len(t.tokens) - int(rng.integers(0, 3)))
            mask, logprobs, versions = t.action_mask[:keep].copy(), t.logprobs[:keep].copy(), t.versions[:keep].copy()
            logprobs[mask] += rng.normal(0, 0.15, int(mask.sum())).astype(np.float32)
            if i == 1 and keep - t.prompt_tokens > 3:
                at = t.prompt_tokens + 1
                mask[at], logprobs[at], versions[at] = False, 0.0, -1
            change: dict[str, Any] = {"tokens": t.tokens[:keep], "action_mask": mask, "logprobs": logprobs, "versions": versions, "temperature": (0.6, 1.0, 1.3, 0.9)[i]}
            if t.routes is not None:
                recorded = t.routes[:keep].copy()
                recorded[:-1] = (recorded[:-1] + i % 2) % 4  # of half of the members another choice than the model's
                recorded[-1] = -1
                change["routes"] = recorded
            members.append(Graded(run=m.run, reward=float(rng.integers(0, 5)) / 4, trajectory=t.model_copy(update=change)))
        groups.append(BatchGroup(g.group, tuple(members), ()))
    return Batch(0, tuple(groups))


def log_ratios(model: CausalLM, t: Trajectory, *, replay: bool) -> torch.Tensor:
    """log pi - log behaviour at the action tokens of one trajectory."""
    tokens = torch.from_numpy(t.tokens.astype(np.int64))
    given = torch.from_numpy(t.routes[:-1].astype(np.int64))[None] if replay and t.routes is not None else None
    logits = model.logits(model(tokens[None, :-1], replay=given).hidden[0])
    logp = torch.log_softmax(logits / t.temperature, -1).gather(-1, tokens[1:, None])[:, 0]
    mask = torch.from_numpy(t.action_mask[1:])
    return (logp - torch.from_numpy(t.logprobs[1:].astype(np.float64)))[mask]


def by_hand(model: CausalLM, batch: Batch, *, replay: bool = False) -> tuple[float, torch.Tensor]:
    """GSPO with the behaviour policy as the proximal one: mean over sequences of max(-sA, -clip(s)A), at most -3A for a negative A; s = exp(mean log ratio)."""
    exact = copy.deepcopy(model).double()
    trained = [p for p in exact.parameters() if p.requires_grad]
    total, count = torch.zeros((), dtype=torch.float64), 0
    for judged in batch.groups:
        rewards = torch.tensor([m.reward for m in judged.members], dtype=torch.float64)
        for m, advantage in zip(judged.members, (rewards - rewards.mean()).tolist(), strict=True):
            s = log_ratios(exact, m.trajectory, replay=replay).mean().exp()
            plain, clipped = -s * advantage, -s.clamp(1 - CONFIG.eps_low, 1 + CONFIG.eps_high) * advantage
            value = torch.maximum(plain, clipped)
            total = total + (torch.clamp(value, max=-3 * advantage) if advantage < 0 else value)
            count += 1
    loss = total / count
    grads = torch.autograd.grad(loss, trained, allow_unused=True)
    return float(loss.detach()), torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten() for p, g in zip(trained, grads, strict=True)])


def by_learner(model: CausalLM, batch: Batch, **changes: Any) -> tuple[float, torch.Tensor]:
    trainer = Trainer(copy.deepcopy(model), CONFIG.model_copy(update=changes))
    values = trainer.step(batch).values
    return values["loss"], torch.cat([torch.zeros_like(m).flatten() if m.grad is None else m.grad.flatten() for m in trainer.masters])


@pytest.mark.parametrize("changes", [
    {"micro_batch_groups": 1}, {}, {"recompute": "layers"}, {"micro_batch_tokens": 12}, {"micro_batch_tokens": 60, "recompute": "layers"}, {"micro_batch_tokens": 4096},
], ids=str)
@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize("kind", ["k3", "dense", "lora"])
def test_loss_and_gradient_are_those_of_the_formula(kind: str, common: bool, changes: dict[str, Any]) -> None:
    model = model_of(kind)
    batch = ragged(model, routes=False, common=common)
    want, exact = by_hand(model, batch)
    got, gradient = by_learner(model, batch, **changes)
    assert got == pytest.approx(want, rel=1e-4, abs=1e-6)
    assert exact.norm() > 0
    assert (gradient.double() - exact).norm() < 1e-4 * exact.norm()


@pytest.mark.parametrize("changes", [{}, {"micro_batch_tokens": 40, "recompute": "layers"}], ids=str)
@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize("kind", ["k3", "lora"])
def test_replayed_routes_give_the_gradient_of_the_formula_at_those_routes(kind: str, common: bool, changes: dict[str, Any]) -> None:
    model = model_of(kind)
    batch = ragged(model, routes=True, common=common)
    want, exact = by_hand(model, batch, replay=True)
    got, gradient = by_learner(model, batch, router_replay=True, **changes)
    assert got == pytest.approx(want, rel=1e-4, abs=1e-6)
    assert (gradient.double() - exact).norm() < 1e-4 * exact.norm()
    _, free = by_hand(model, batch)
    assert (free - exact).norm() > 1e-2 * exact.norm(), "other experts, another gradient"


@pytest.mark.parametrize("mistake", ["missing", "temperature", "tool"])
def test_a_mistake_in_what_is_compared_is_further_off_than_that(mistake: str) -> None:
    """A recorded probability that is missing read as zero, the temperature left out, a tool's tokens counted as actions."""
    model = model_of("k3")
    _, exact = by_hand(model, ragged(model, routes=False))
    moved = ragged(model, routes=False)
    for judged in moved.groups:
        for i, member in enumerate(judged.members):
            t = member.trajectory
            if mistake == "missing":
                t.logprobs[np.flatnonzero(t.action_mask)[0]] = 0.0
            elif mistake == "tool":
                t.action_mask[t.prompt_tokens :] = True
            else:
                judged.members[i].__dict__["trajectory"] = t.model_copy(update={"temperature": 1.0})
    _, other = by_hand(model, moved)
    assert (other - exact).norm() > 1e-2 * exact.norm()
