"""Runners: what computes a step that a scheduler decided, eagerly or by replaying CUDA graphs. See docs/runner.md."""

from __future__ import annotations

from driftline.models.causal_lm import CausalLM
from driftline.models.paged import Pool
from driftline.services.rollout.runner.batch import DecodeBatch, PrefillBatch, Sampled
from driftline.services.rollout.runner.eager import Adapters, EagerRunner, Pending, Runner
from driftline.services.rollout.runner.graphs import GraphRunner
from driftline.services.rollout.runner.step import Rule, Taps

__all__ = ["Adapters", "DecodeBatch", "EagerRunner", "GraphRunner", "Pending", "PrefillBatch", "Rule", "Runner", "Sampled", "Taps", "runner_for"]


def runner_for(
    model: CausalLM, pool: Pool, max_batch: int, *, cuda_graphs: bool = True, greedy: bool = False, rule: Rule | None = None, bank: Adapters | None = None,
    taps: Taps | None = None,
) -> Runner:
    """Graphs where they are wanted and the model is on a CUDA device, else eager."""
    if cuda_graphs and model.lm_head.weight.device.type == "cuda":
        return GraphRunner(model, pool, max_batch, greedy=greedy, rule=rule, bank=bank, taps=taps)
    return EagerRunner(model, pool, greedy=greedy, rule=rule, bank=bank, taps=taps)
