"""The settings of a run's learner: its objective and optimizer, what it holds in memory, when it writes checkpoints."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from driftline.messages.subjects import MIB
from driftline.services.policy_config import Device, Section, clash

__all__ = ["GROUP_RELATIVE", "LearnerConfig", "LoraScaling", "Objective", "Proximal", "Recompute", "WatchConfig"]


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


class LoraScaling(StrEnum):
    """What an update B A is multiplied by: alpha / rank, or alpha / sqrt(rank), which keeps its size at any rank (rsLoRA, arXiv:2312.03732)."""

    RANK = "rank"
    ROOT = "root"


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
    many tokens. `recompute` = 'layers' keeps a layer's input only and runs the layer again for its gradient.

    `lora_rank` > 0 trains adapters beside a frozen base, of alpha `lora_alpha` (the rank). `lora_targets`: a regular expression over whole module names, a list of
    their last parts, as PEFT's target_modules, or 'all-linear', every linear layer and expert stack but the head."""

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
    lora_scaling: LoraScaling = LoraScaling.RANK
    lora_targets: str | tuple[str, ...] = r".*(proj|experts)$"
    max_bad_steps: int = Field(default=8, ge=1)
    probe_members: int = Field(default=32, ge=0)
    min_group_members: int = Field(default=2, ge=1)
    checkpoint_every: int = Field(default=1, ge=1)
    max_recompute: int = Field(default=4, ge=1)
    checkpoint_dir: str = ""
    lease_s: float = Field(default=10.0, ge=1.0)
    held_bytes: int = Field(default=2048 * MIB, ge=MIB)

    @property
    def peft_alpha(self) -> float:
        """What PEFT calls lora_alpha where it divides by the rank: the factor of an update, times the rank."""
        alpha = float(self.lora_rank if self.lora_alpha is None else self.lora_alpha)
        return alpha * math.sqrt(self.lora_rank) if self.lora_scaling is LoraScaling.ROOT else alpha

    @model_validator(mode="after")
    def _icepop_is_an_interval(self) -> Self:
        if self.icepop is not None and not 0 <= self.icepop[0] < self.icepop[1]:
            raise clash("learner.icepop", list(self.icepop), "masks every token", "give [low, high] with 0 <= low < high")
        return self


class WatchConfig(Section):
    """When learner and rollout are too far apart. Over an `_alarm` level in `in_a_row` judged steps somebody is told, over a `_halt` level the run ends as
    failed and that batch is not trained on (0: off). numerics, staleness and total are token-averaged k3 in nats; extreme is the share of tokens whose ratio is
    beyond 2, flips that of router choices that differ from the recorded ones, counted if `count_flips` (it costs a second router product a layer). A step with
    fewer than `min_tokens` tokens is not judged."""

    numerics_alarm: float = Field(default=2e-3, ge=0)
    numerics_halt: float = Field(default=0.0, ge=0)
    staleness_alarm: float = Field(default=0.0, ge=0)
    staleness_halt: float = Field(default=0.0, ge=0)
    total_alarm: float = Field(default=0.0, ge=0)
    total_halt: float = Field(default=0.0, ge=0)
    extreme_alarm: float = Field(default=0.0, ge=0, le=1)
    extreme_halt: float = Field(default=0.0, ge=0, le=1)
    flips_alarm: float = Field(default=0.0, ge=0, le=1)
    flips_halt: float = Field(default=0.0, ge=0, le=1)
    in_a_row: int = Field(default=3, ge=1)
    min_tokens: int = Field(default=128, ge=1)
    count_flips: bool = False

    @model_validator(mode="after")
    def _levels_are_in_order(self) -> Self:
        for signal in ("numerics", "staleness", "total", "extreme", "flips"):
            alarm, halt = getattr(self, f"{signal}_alarm"), getattr(self, f"{signal}_halt")
            if 0 < halt < alarm:
                raise clash(f"watch.{signal}_halt", halt, f"the run would end before the alarm at {alarm:g}",
                            "give a halt level of at least the alarm's, or turn the alarm off (0)")
        if (self.flips_alarm or self.flips_halt) and not self.count_flips:
            raise clash("watch.flips_alarm", self.flips_alarm or self.flips_halt, "flips are not counted", "set watch.count_flips = true")
        return self
