"""The tokenizer that belongs to a model, by what lies beside its weights.

Guarantees: a model is never given ids that are not its own: one without a tokenizer gets bytes only if its config.json has the byte tokenizer's special tokens, and is
refused otherwise.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from driftline.messages.errors import ConfigError
from driftline.models.gguf.llama import GgufModel
from driftline.models.tokenizer import ByteTokenizer, Tokenizer
from driftline.models.tokenizers.hf import HfTokenizer

__all__ = ["TEXT_FILES", "load_tokenizer"]

TEXT_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json", "generation_config.json", "config.json")


def load_tokenizer(place: Path) -> Tokenizer:
    """The tokenizer of the model at `place`: a directory with config.json, or a .gguf file. Raises ConfigError naming the file."""
    if place.suffix == ".gguf":
        return HfTokenizer.of(GgufModel.open(place).files())
    files = _read(place)
    if "tokenizer.json" in files:
        return HfTokenizer.of(files)
    if _speaks_bytes(files.get("config.json", b"{}")):
        return ByteTokenizer()
    raise ConfigError("the model's tokenizer is not beside it", field="policy.init", value=str(place),
                      remedy="put its tokenizer.json (and tokenizer_config.json, chat_template.jinja) there; other forms of a tokenizer are not read")


def _read(place: Path) -> dict[str, bytes]:
    try:
        return {name: path.read_bytes() for name in TEXT_FILES if (path := place / name).is_file()}
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", field="policy.init", value=str(place), remedy="name a directory with config.json") from error


def _speaks_bytes(config: bytes) -> bool:
    try:
        model = json.loads(config)
    except ValueError:
        return False
    if isinstance(model, dict) and isinstance(model.get("text_config"), dict):
        model = model["text_config"]
    if not isinstance(model, dict):
        return False
    ids = (model.get("bos_token_id"), model.get("eos_token_id"), model.get("pad_token_id"))
    return ids == (ByteTokenizer.bos, ByteTokenizer.eos, ByteTokenizer.pad) and model.get("vocab_size", 0) >= ByteTokenizer.vocab_size
