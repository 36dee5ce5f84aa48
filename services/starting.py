"""What a run starts from: where it lies, and the files beside its weights, the same whether it is a checkpoint folder or one .gguf file. No torch."""

from __future__ import annotations

from pathlib import Path

from driftline.messages.errors import ConfigError
from driftline.models.locate import BASE, GGUF, located
from driftline.policy_store.model_files import CONFIG, files_in
from driftline.services.config import Config

__all__ = ["starting_config", "starting_files", "starting_place"]


def starting_place(config: Config) -> Path:
    """The starting checkpoint's folder, or its .gguf file. Raises ConfigError when there is none."""
    init = config.policy.init
    place = located(init)
    if place.suffix == GGUF:
        return place
    missing = [name for name, pattern in ((CONFIG, CONFIG), ("model.safetensors", "*.safetensors")) if not any(place.glob(pattern))]
    if missing:
        raise ConfigError(f"no checkpoint there: {' and '.join(missing)} missing in {place}", field="policy.init", value=init,
                          remedy="this installation lacks the shipped checkpoint: install again" if init == BASE
                          else "name a folder that `driftline pretrain` or a run wrote, or use 'base'")
    return place


def starting_files(config: Config) -> dict[str, bytes]:
    """config.json, generation settings and the tokenizer's files, as far as there are any. Raises ConfigError as `files_in` does."""
    place = starting_place(config)
    if place.suffix == GGUF:
        from driftline.models.gguf.llama import GgufModel

        return GgufModel.open(place).files()
    return files_in(place)


def starting_config(config: Config) -> str:
    """The text of config.json."""
    return starting_files(config)[CONFIG].decode()
