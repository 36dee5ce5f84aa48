"""The engine that a run's `[rollout]` section asks for: its memory, who drafts for it, and how it computes."""

from __future__ import annotations

from functools import partial

from driftline.models.causal_lm import CausalLM
from driftline.models.mlp import route_shape
from driftline.models.tokenizer import Tokenizer
from driftline.services.config import Config
from driftline.services.rollout.engine import Engine, EngineMemory
from driftline.services.rollout.runner import runner_for
from driftline.services.rollout.speculation.opening import speculator_for
from driftline.services.rollout_config import PolicyUpdate, RolloutConfig

__all__ = ["engine_of", "memory_of"]

MIB = 2**20


def engine_of(config: Config, model: CausalLM, *, version: int, name: str, tokenizer: Tokenizer | None) -> Engine:
    """An engine of `version`, whose weights are still the model's own. ConfigError when the memory or the drafter does not do."""
    rollout = config.rollout
    return Engine(
        model, version=version, max_batch=rollout.max_batch, name=name, tokenizer=tokenizer,
        record_routes=config.learner.router_replay and route_shape(model) is not None, memory=memory_of(rollout), prefill_tokens=rollout.prefill_tokens,
        queue_bytes=rollout.queue_mb * MIB, speculator=speculator_for(rollout, model, refresh=True), runner=partial(runner_for, cuda_graphs=rollout.cuda_graphs),
        resume_stale=rollout.policy_update is PolicyUpdate.IN_FLIGHT,
    )


def memory_of(rollout: RolloutConfig) -> EngineMemory:
    return EngineMemory(cache_bytes=rollout.cache_mb * MIB, host_bytes=rollout.host_cache_mb * MIB, prefix_cache=rollout.prefix_cache)
