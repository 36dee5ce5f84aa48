"""The settings of a run's learner: its objective and optimizer, what it holds in memory, when it writes checkpoints."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from driftline.messages.subjects import MIB
from driftline.services.policy_config import Device, Section, clash

__all__ = ["GROUP_RELATIVE", "LearnerConfig", "Objective", "Proximal", "Recompute"]


class Objective(StrEnum):
    GSPO = "gspo"
    GRPO = "grpo"
    PPO = "ppo"
    CISPO = "cispo"
    IMPORTANCE_SAMPLING = "importance_sampling"
    CROSS_ENTROPY = "cross_entropy"


class Proximal(StrEnum):
    """What the ratio is taken against: the recorded behaviour policy, or the policy at the start of the step (decoupled)."""

    BEHAVIOUR = "behaviour"
    RECOMPUTE = "recompute"


class Recompute(StrEnum):
    """What is computed again in the backward pass instead of being kept."""

    NONE = "none"
    LAYERS = "layers"


# Objectives that judge a member against its group: with one member every advantage is zero and nothing is ever learnt.
GROUP_RELATIVE = frozenset({Objective.GSPO, Objective.GRPO, Objective.PPO, Objective.CISPO, Objective.IMPORTANCE_SAMPLING})


class LearnerConfig(Section):
    """`checkpoint_every` steps the optimizer state is written beside the training; a step waits when more than `max_recompute`
    steps would have to be computed again after a crash. `lease_s`: how long a learner that is silent still owns the run.
    `held_bytes` bounds the members held in memory. Checkpoints go to `checkpoint_dir` (empty: the run folder).

    A step's forward and backward pass goes through its groups `micro_batch_groups` at a time, or where `micro_batch_tokens` is not 0 in packs of at most that
    many tokens. `recompute` = 'layers' keeps a layer's input only and runs the layer again for its gradient."""

    objective: Objective = Objective.GSPO
    lr: float = Field(default=3e-4, gt=0)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip: float = Field(default=1.0, gt=0)
    eps_low: float = Field(default=3e-4, gt=0, lt=1)
    eps_high: float = Field(default=4e-4, gt=0)
    dual_clip: float = Field(default=3.0, gt=1)
    proximal: Proximal = Proximal.BEHAVIOUR
    router_replay: bool = False
    tis_cap: float | None = Field(default=None, gt=0)
    icepop: tuple[float, float] | None = None
    adv_std: bool = False
    micro_batch_groups: int = Field(default=4, ge=1)
    micro_batch_tokens: int = Field(default=0, ge=0)
    recompute: Recompute = Recompute.NONE
    threads: int = Field(default=1, ge=1)
    device: Device = "cpu"
    lora_rank: int = Field(default=0, ge=0)
    lora_alpha: float | None = Field(default=None, gt=0)
    lora_targets: str = r".*(proj|experts)$"
    max_bad_steps: int = Field(default=8, ge=1)
    probe_members: int = Field(default=32, ge=0)
    min_group_members: int = Field(default=2, ge=1)
    checkpoint_every: int = Field(default=1, ge=1)
    max_recompute: int = Field(default=4, ge=1)
    checkpoint_dir: str = ""
    lease_s: float = Field(default=10.0, ge=1.0)
    held_bytes: int = Field(default=2048 * MIB, ge=MIB)

    @model_validator(mode="after")
    def _icepop_is_an_interval(self) -> Self:
        if self.icepop is not None and not 0 <= self.icepop[0] < self.icepop[1]:
            raise clash("learner.icepop", list(self.icepop), "masks every token", "give [low, high] with 0 <= low < high")
        return self
