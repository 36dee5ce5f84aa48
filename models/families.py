"""Any model of any family by the words of `policy.init`: its configuration without its weights, or the model itself."""

from __future__ import annotations

import torch

from driftline.models.architectures import AnyConfig, configuration
from driftline.models.causal_lm import CausalLM
from driftline.models.checkpoint import load_checkpoint
from driftline.models.dense.config import DenseConfig
from driftline.models.gguf.llama import GgufModel
from driftline.models.locate import located
from driftline.models.quantisation import Quantisation

__all__ = ["model_config", "open_model"]


def model_config(init: str) -> AnyConfig:
    """Of what `located` finds; of a .gguf file only the header is read. Raises ConfigError and IntegrityError naming file and field."""
    place = located(init)
    return configuration(place)[0] if place.is_dir() else DenseConfig.of(GgufModel.open(place).config, str(place))


def open_model(
    init: str, *, dtype: torch.dtype = torch.float32, experts: Quantisation | None = None, device: torch.device | str = "cpu",
) -> CausalLM:
    """`load_checkpoint`: K3ForCausalLM or DenseForCausalLM, as config.json's `model_type` says; of a .gguf file the latter."""
    return load_checkpoint(init, dtype=dtype, experts=experts, device=device)
