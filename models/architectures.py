"""Which decoder a config.json describes: its `model_type` decides, and one that no decoder here computes is refused.

What differs between the families outside their modules is here: how a configuration is read and written, and which class it makes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from driftline.messages.errors import ConfigError
from driftline.models.causal_lm import CausalLM
from driftline.models.config import K3Config
from driftline.models.dense.config import Architecture, DenseConfig
from driftline.models.dense.decoder import DenseForCausalLM
from driftline.models.mlp import LatentMoe, PackedExperts
from driftline.models.model import K3ForCausalLM
from driftline.models.quantisation import Quantisation

__all__ = ["AnyConfig", "config_of", "configuration", "save_configuration", "skeleton"]

AnyConfig = K3Config | DenseConfig

_K3_TYPES = ("kimi_linear", "kimi_k3", None)
"""None: a file without the field is K3's, whose other fields no other model has."""


def configuration(directory: Path) -> tuple[AnyConfig, Quantisation]:
    """What `config.json` of the directory describes, and the form in which it says the routed experts are stored. Raises ConfigError naming file and field."""
    path = directory / "config.json"
    kind = _model_type(path)
    if isinstance(kind, str) and kind in set(Architecture):
        return DenseConfig.load(directory), Quantisation.NONE
    if kind not in _K3_TYPES:
        raise ConfigError("no decoder of this model_type", field=f"{path}: model_type", value=kind,
                          remedy=f"one of {', '.join([*(str(known) for known in _K3_TYPES if known), *Architecture])}")
    return K3Config.load_with_form(directory)


def config_of(model: CausalLM) -> AnyConfig:
    """The configuration of one of our models. Raises ConfigError for another's."""
    config = model.config
    if not isinstance(config, K3Config | DenseConfig):
        raise ConfigError("not a configuration that has files", field="model.config", value=type(config).__name__, remedy="save a K3ForCausalLM or a DenseForCausalLM")
    return config


def save_configuration(config: AnyConfig, directory: Path, experts: Quantisation) -> None:
    """Write `config.json`, whole or not at all, of a checkpoint whose routed experts are stored as `experts` says."""
    if isinstance(config, DenseConfig):
        config.save(directory)
    else:
        config.save(directory, experts)


def skeleton(config: AnyConfig, experts: Quantisation) -> CausalLM:
    """The model on the meta device, its routed experts in form `experts`: names and shapes without memory. Raises ConfigError where there are none to pack."""
    with torch.device("meta"):
        if isinstance(config, DenseConfig):
            if experts is not Quantisation.NONE:
                raise ConfigError("a dense model has no routed experts to pack", field="experts", value=experts.value, remedy=f"use {Quantisation.NONE.value}")
            return DenseForCausalLM(config)
        model = K3ForCausalLM(config)
        if experts is Quantisation.MXFP4:
            for module in model.modules():
                if isinstance(module, LatentMoe):
                    module.experts = PackedExperts(config)
        return model


def _model_type(path: Path) -> Any:
    """None where the file says none, or cannot be read: whoever reads it whole says what is wrong with it."""
    try:
        raw: Any = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    body = raw.get("text_config", raw) if isinstance(raw, dict) else None
    return body.get("model_type") if isinstance(body, dict) else None
