"""The model a service computes with: built from the run's starting checkpoint, so every service has the same shape and adapters, and computes in the same way."""

from __future__ import annotations

import torch

from driftline.kernels.mode import Numerics, set_numerics
from driftline.models.causal_lm import CausalLM
from driftline.models.families import open_model
from driftline.models.lora import LoraConfig, Scaling, adapt
from driftline.models.quantisation import Quantisation
from driftline.services.config import Compute, Config, ExpertsForm

__all__ = ["build_model", "compute_dtype", "lora_of", "policy_torch_dtype"]

_EXPERTS = {ExpertsForm.KEEP: None, ExpertsForm.UNPACK: Quantisation.NONE, ExpertsForm.PACK: Quantisation.MXFP4}


def policy_torch_dtype(config: Config) -> torch.dtype:
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[config.policy.dtype]


def compute_dtype(config: Config, device: str) -> torch.dtype:
    """What parameters are held and multiplied in on `device`: the policy's dtype, or float32 of the same values. What the release keeps in float32 always is."""
    match config.policy.compute:
        case Compute.POLICY:
            return policy_torch_dtype(config)
        case Compute.FLOAT32:
            return torch.float32
        case Compute.AUTO:
            return policy_torch_dtype(config) if device.startswith("cuda") else torch.float32


def lora_of(config: Config) -> LoraConfig:
    """The adapters of a run that trains some. Raises ConfigError for targets that are none."""
    learner = config.learner
    return LoraConfig(learner.lora_rank, learner.lora_alpha, learner.lora_targets, Scaling(learner.lora_scaling.value))


def build_model(config: Config, *, device: str, threads: int) -> CausalLM:
    """The starting checkpoint's model on `device`, in the dtype of `compute_dtype`, with the run's LoRA adapters if it trains any. Sets the process's numerics.

    The adapters' random half is drawn from the run's seed: version 0 is the same wherever it is built.
    """
    torch.set_num_threads(threads)
    set_numerics(Numerics(config.run.numerics.value))
    model = open_model(config.policy.init, dtype=compute_dtype(config, device), experts=_EXPERTS[config.policy.experts], device=device)
    if config.learner.lora_rank:
        torch.manual_seed(config.run.seed)
        adapt(model, lora_of(config))
    return model.to(device)
