"""A drafter on disk: `config.json` and `model.safetensors`, one of a pair or neither; what loads was checked by name and shape first."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from driftline.messages.errors import ConfigError, IntegrityError
from driftline.models.causal_lm import ModelConfig
from driftline.models.drafter.config import DrafterConfig
from driftline.models.drafter.model import Drafter

__all__ = ["load_drafter", "save_drafter"]

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"


def save_drafter(drafter: Drafter, directory: str | Path, *, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write it in `dtype`; returns the directory. Each file appears whole or not at all, the configuration last: without it nothing loads."""
    place = Path(directory)
    place.mkdir(parents=True, exist_ok=True)
    tensors = {name: (t if t.dtype == torch.int64 else t.to(dtype)).detach().cpu().contiguous() for name, t in drafter.state_dict().items()}
    (place / _CONFIG).unlink(missing_ok=True)
    part = place / f".{_WEIGHTS}.partial"
    save_file(tensors, part, metadata={"format": "pt"})
    part.replace(place / _WEIGHTS)
    part = place / f".{_CONFIG}.partial"
    part.write_text(drafter.config.model_dump_json(indent=2) + "\n", encoding="utf-8")
    part.replace(place / _CONFIG)
    return place


def load_drafter(directory: str | Path, target: ModelConfig, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Drafter:
    """The drafter of a directory for `target`. Raises ConfigError where it is none or another model's, IntegrityError where its tensors are not its own."""
    place = Path(directory)
    config = _config(place)
    config.check(target)
    try:
        tensors = load_file(place / _WEIGHTS)
    except FileNotFoundError:
        raise ConfigError("no weights beside the configuration", field="rollout.drafter", value=str(place), remedy="driftline drafter train writes both") from None
    except SafetensorError as error:
        raise IntegrityError(f"damaged: {error}", field=str(place / _WEIGHTS), remedy="copy or train it again") from error
    drafter = Drafter(config)
    for name, own in drafter.state_dict().items():
        found = tensors.pop(name, None)
        if found is None or found.shape != own.shape or found.is_floating_point() != own.is_floating_point():
            raise IntegrityError(f"config.json asks for {tuple(own.shape)}", field=f"{place / _WEIGHTS}: {name}", value="nothing" if found is None else tuple(found.shape),
                                 remedy="copy or train it again")
        own.copy_(found)
    if tensors:
        raise IntegrityError("a tensor that no drafter has", field=f"{place / _WEIGHTS}: {min(tensors)}", remedy="copy or train it again")
    drafted = drafter.drafted
    if int(drafted[0]) < 0 or int(drafted[-1]) >= config.vocab_size or bool((drafted.diff() <= 0).any()):
        raise IntegrityError("the tokens that can be drafted are ascending ids of the target", field=f"{place / _WEIGHTS}: drafted", remedy="copy or train it again")
    drafter.eval()
    return drafter.to(device=device, dtype=dtype)


def _config(place: Path) -> DrafterConfig:
    path = place / _CONFIG
    try:
        return DrafterConfig.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError("no drafter here", field="rollout.drafter", value=str(place), remedy="give a directory that driftline drafter train wrote") from None
    except (ValidationError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"not a drafter's configuration: {error}", field=str(path), remedy="driftline drafter train writes one") from error
