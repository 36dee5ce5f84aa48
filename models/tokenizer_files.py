"""The byte-level tokenizer and the generation settings as the files transformers reads, for models that come without any.

`tokenizer.json` (the format of Hugging Face's tokenizers) gives a text the ids `ByteTokenizer` gives it: its byte-level pre-tokenizer
turns each byte into one character, the vocabulary maps that character to the byte's value, and there is nothing to merge.
"""

from __future__ import annotations

import json
from typing import Any

from driftline.models.tokenizer import ByteTokenizer

__all__ = ["byte_tokenizer_files", "generation_config"]

_SPECIAL = {ByteTokenizer.bos: "<|begin|>", ByteTokenizer.eos: "<|end|>", ByteTokenizer.pad: "<|pad|>"}


def byte_tokenizer_files(config: bytes) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json, if `config` (a config.json) is of a model with the byte-level tokenizer; else nothing."""
    model = _document(config)
    ids = (model.get("bos_token_id"), model.get("eos_token_id"), model.get("pad_token_id"))
    room = model.get("vocab_size")
    if ids != (ByteTokenizer.bos, ByteTokenizer.eos, ByteTokenizer.pad) or not isinstance(room, int) or not ByteTokenizer.vocab_size <= room < 512:
        return {}
    added = [{"id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
             for number, text in _SPECIAL.items()]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None, "pre_tokenizer": level,
        "post_processor": None, "decoder": level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": _vocabulary(), "merges": []},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": _SPECIAL[ByteTokenizer.bos], "eos_token": _SPECIAL[ByteTokenizer.eos],
        "pad_token": _SPECIAL[ByteTokenizer.pad], "clean_up_tokenization_spaces": False, "model_max_length": model.get("max_position_embeddings", 2**30),
    }
    return {"tokenizer.json": _text(tokenizer), "tokenizer_config.json": _text(settings)}


def generation_config(config: bytes) -> bytes:
    """generation_config.json with the special tokens of a config.json; empty when it names none."""
    model = _document(config)
    special = {key: model[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if model.get(key) is not None}
    return _text({"_from_model_config": True, **special}) if special else b""


def _vocabulary() -> dict[str, int]:
    """The character that stands for each byte, as in GPT-2's encoder: printable bytes are themselves, the others are moved above 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = iter(range(256, 512))
    return {chr(byte if byte in printable else next(moved)): byte for byte in range(256)}


def _document(config: bytes) -> dict[str, Any]:
    found = json.loads(config)
    return found if isinstance(found, dict) else {}


def _text(document: object) -> bytes:
    return json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"
