"""Checkpoints on disk: `config.json` and `model.safetensors` under K3's public names. `base` is the small policy shipped with the package."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from driftline.messages.errors import ConfigError
from driftline.models.config import K3Config
from driftline.models.model import K3ForCausalLM
from driftline.models.state import export_state, load_state, policy_dtype

__all__ = ["BASE", "checkpoint_dir", "load_checkpoint", "read_tensors", "save_checkpoint"]

BASE = "base"


def checkpoint_dir(init: str) -> Path:
    """Directory of a checkpoint: `base` for the shipped one, else a path. Raises ConfigError when there is none."""
    path = Path(__file__).parent / "base" if init == BASE else Path(init)
    if not path.is_dir():
        raise ConfigError("no such checkpoint directory", field="policy.init", value=init,
                          remedy='use "base" or a directory with config.json and model.safetensors')
    return path


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of every `*.safetensors` file in the directory, by name."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError("no *.safetensors file here", field="policy.init", value=str(directory),
                          remedy="a checkpoint is config.json plus one or more safetensors files")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except SafetensorError as error:
            raise ConfigError(f"not a readable safetensors file: {error}", field="policy.init", value=str(file),
                              remedy="copy the file again from its source") from error
    return tensors


def load_checkpoint(init: str, *, dtype: torch.dtype = torch.float32) -> K3ForCausalLM:
    """Build the model of a checkpoint and load its weights. Parameters are held in `dtype`; what the release keeps in fp32 is never held in less."""
    directory = checkpoint_dir(init)
    model = K3ForCausalLM(K3Config.load(directory))
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.promote_types(policy_dtype(name, dtype), dtype))
    load_state(model, read_tensors(directory))
    return model


def save_checkpoint(model: K3ForCausalLM, directory: str | Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config.json and model.safetensors; the tensors file appears whole or not at all."""
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    model.config.save(target)
    partial = target / ".model.safetensors.partial"
    save_file(export_state(model, dtype), partial, metadata={"format": "pt"})
    os.replace(partial, target / "model.safetensors")
