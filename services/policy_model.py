"""The model a service computes with: built from the run's starting checkpoint, so every service has the same shape and adapters."""

from __future__ import annotations

import torch

from driftline.models.checkpoint import load_checkpoint
from driftline.models.lora import add_lora
from driftline.models.model import K3ForCausalLM
from driftline.services.config import Config

__all__ = ["build_model", "policy_torch_dtype"]


def policy_torch_dtype(config: Config) -> torch.dtype:
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[config.policy.dtype]


def build_model(config: Config, *, device: str, threads: int) -> K3ForCausalLM:
    """The starting checkpoint's model in fp32 on `device`, with the run's LoRA adapters if it trains any.

    The adapters' random half is drawn from the run's seed: version 0 is the same wherever it is built.
    """
    torch.set_num_threads(threads)
    model = load_checkpoint(config.policy.init)
    if config.learner.lora_rank:
        torch.manual_seed(config.run.seed)
        add_lora(model, config.learner.lora_rank, config.learner.lora_alpha, config.learner.lora_targets)
    return model.to(device)
