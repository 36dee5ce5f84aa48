"""The speculator that a run's `[rollout]` asks for."""

from __future__ import annotations

from driftline.kernels.mode import deterministic
from driftline.messages.errors import ConfigError
from driftline.models.causal_lm import CausalLM
from driftline.models.drafter.files import load_drafter
from driftline.services.rollout.speculation.drafts import Drafter
from driftline.services.rollout.speculation.learned import TrainedDrafter
from driftline.services.rollout.speculation.ngram import NgramDrafter
from driftline.services.rollout.speculation.pays import Pays
from driftline.services.rollout.speculation.refresh import Refresher
from driftline.services.rollout.speculation.speculator import Speculator
from driftline.services.rollout_config import RolloutConfig, Speculation, SpeculationRule

__all__ = ["speculator_for"]


def speculator_for(rollout: RolloutConfig, model: CausalLM, *, refresh: bool = False) -> Speculator | None:
    """None where speculation is off. `refresh`: a trained drafter learns from what its engine samples, between steps. ConfigError where the drafter is none of this model's, and where a run in deterministic mode asks for REJECTION, whose
    path depends on what was drafted."""
    if rollout.speculation is Speculation.OFF:
        return None
    if rollout.speculation_rule is SpeculationRule.REJECTION and deterministic():
        raise ConfigError("in deterministic mode a member's tokens are a function of its draws, and rejection makes them one of its drafts as well",
                          field="rollout.speculation_rule", value=rollout.speculation_rule.value, remedy=f"use {SpeculationRule.MATCH.value}")
    drafter = _drafter(rollout, model)
    refresher = Refresher(drafter.network, model) if refresh and isinstance(drafter, TrainedDrafter) else None
    return Speculator(drafter, length=rollout.draft_tokens, rule=rollout.speculation_rule, pays=Pays(), refresher=refresher)


def _drafter(rollout: RolloutConfig, model: CausalLM) -> Drafter:
    if rollout.speculation is Speculation.NGRAM:
        return NgramDrafter()
    weight = model.lm_head.weight
    return TrainedDrafter(load_drafter(rollout.drafter, model.config, dtype=weight.dtype, device=weight.device), model)
