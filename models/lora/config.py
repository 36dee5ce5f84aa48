"""What is adapted and how: which modules, at which rank, with which factor. A module is a target by its name alone, so a run's settings say all of it.

Targets are written in one of three ways: a regular expression over whole module names; names as PEFT's `target_modules` lists them, each a whole name or its last
parts (`q_proj`, `self_attn.q_proj`); or `all-linear`, every linear layer and expert stack but the head.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from driftline.messages.errors import ConfigError
from driftline.models.lora.adapter import Scaling

__all__ = ["ALL_LINEAR", "TARGETS", "LoraConfig"]

TARGETS = r".*(proj|experts)$"
"""Every projection and expert stack; not the head, the router, norms or embeddings."""

ALL_LINEAR = "all-linear"
_HEAD = "lm_head"


@dataclass(frozen=True)
class LoraConfig:
    """rank of every update; alpha: None for the rank, a factor of 1. Raises ConfigError for what adapts nothing."""

    rank: int
    alpha: float | None = None
    targets: str | tuple[str, ...] = TARGETS
    scaling: Scaling = Scaling.RANK

    def __post_init__(self) -> None:
        self.scaling.factor(self.lora_alpha, self.rank)
        self.matcher()

    @property
    def lora_alpha(self) -> float:
        return float(self.rank if self.alpha is None else self.alpha)

    def matcher(self) -> Callable[[str], bool]:
        """Whether a module of this name is a target."""
        if self.targets == ALL_LINEAR:
            return lambda name: name != _HEAD
        if isinstance(self.targets, str):
            try:
                pattern = re.compile(self.targets)
            except re.error as error:
                raise ConfigError(f"not a regular expression: {error}", field="learner.lora_targets", value=self.targets,
                                  remedy="use a regular expression over module names, e.g. .*(q_proj|v_proj)$") from error
            return lambda name: pattern.match(name) is not None
        if not self.targets or not all(self.targets):
            raise ConfigError("names no module", field="learner.lora_targets", value=self.targets, remedy='name some, e.g. ["q_proj", "v_proj"], or "all-linear"')
        names, ends = frozenset(self.targets), tuple(f".{name}" for name in self.targets)
        return lambda name: name in names or name.endswith(ends)
