"""What lies beside the weights of a run's versions, said when the first is published: so that whoever exports one has to be told nothing."""

from __future__ import annotations

from collections.abc import Mapping

from driftline.policy_store.adapters import AdapterConfig, is_adapter
from driftline.policy_store.model_files import ADAPTER_CONFIG
from driftline.policy_store.tensor import Layout
from driftline.services.config import Config
from driftline.services.starting import starting_files

__all__ = ["start_files"]


def start_files(config: Config, layouts: Mapping[str, Layout]) -> dict[str, bytes]:
    """The files of the starting checkpoint, and of a run that trains adapters how PEFT is to read them. Raises ConfigError as `files_in` does."""
    found = starting_files(config)
    learner = config.learner
    if learner.lora_rank and any(is_adapter(name) for name in layouts):
        found[ADAPTER_CONFIG] = AdapterConfig.of(layouts, learner.peft_alpha, "").document(layouts)
    return found
