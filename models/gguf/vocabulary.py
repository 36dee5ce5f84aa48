"""The vocabulary of a GGUF file as the files that a Hugging Face tokenizer is read from.

Guarantees: what cannot be said in `tokenizer.json` exactly (another kind of vocabulary, a way of splitting text that is not known here) is refused by its name and
never replaced by something near it. Byte-level BPE is read; the ways of splitting text are llama.cpp's, by the names in its files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from driftline.messages.errors import ConfigError, IntegrityError
from driftline.models.gguf.file import GgufFile

__all__ = ["end_ids", "special_ids", "tokenizer_files"]

_SECTION = "tokenizer.ggml"
_CONTROL, _USER_DEFINED = 3, 4
_IDS = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""A text's end, a turn's, and a message's that is no turn's."""

_HERE = "load the model from a Hugging Face directory with tokenizer.json"

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class _Splitting:
    """How text falls into pieces before merging: `pattern` empty is GPT-2's own. `whole`: a piece that is a token is taken without merging."""

    pattern: str = ""
    digits: bool = False
    composed: bool = False
    whole: bool = False


_SPLITTINGS: Mapping[str, _Splitting] = {
    "gpt-2": _Splitting(), "smollm": _Splitting(digits=True),
    "llama-bpe": _Splitting(_WORDS % 3, whole=True), "qwen2": _Splitting(_WORDS % 1, composed=True),
}


def special_ids(file: GgufFile) -> dict[str, int]:
    """bos_token_id, eos_token_id and pad_token_id of config.json, those that the file names. IntegrityError when one is no token."""
    named = {f"{short}_token_id": _id(file, key) for short, key in _IDS.items() if short != "unk"}
    return {name: number for name, number in named.items() if number is not None}


def end_ids(file: GgufFile) -> list[int]:
    """Every id at which an answer ends. IntegrityError when one is no token."""
    return list(dict.fromkeys(number for key in _ENDS if (number := _id(file, key)) is not None))


def tokenizer_files(file: GgufFile) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and, where the file has one, chat_template.jinja. ConfigError for a vocabulary that is not read."""
    kind = file.metadata.get(f"{_SECTION}.model")
    if kind != "gpt2":
        raise ConfigError("a kind of vocabulary that is not read from GGUF", field=f"{file.path}: {_SECTION}.model", value=kind,
                          remedy=f"byte-level BPE (gpt2) is; {_HERE}")
    name = file.metadata.get(f"{_SECTION}.pre", "gpt-2")
    splitting = _SPLITTINGS.get(name) if isinstance(name, str) else None
    if splitting is None:
        raise ConfigError("a way of splitting text that is not known", field=f"{file.path}: {_SECTION}.pre", value=name,
                          remedy=f"known: {', '.join(_SPLITTINGS)}; {_HERE}")
    tokens, merges = _texts(file, "tokens"), _texts(file, "merges")
    if len(set(tokens)) != len(tokens):
        raise IntegrityError("a token is there twice", field=f"{file.path}: {_SECTION}.tokens", value=len(tokens) - len(set(tokens)), remedy="convert the model again")
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not splitting.pattern}
    document: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": _added(file, tokens),
        "normalizer": {"type": "NFC"} if splitting.composed else None, "pre_tokenizer": _pieces(splitting, level),
        "post_processor": _beginning(file, tokens), "decoder": level | {"use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
                  "byte_fallback": False, "ignore_merges": splitting.whole, "vocab": {token: i for i, token in enumerate(tokens)},
                  "merges": [_pair(file, merge) for merge in merges]},
    }
    names = {f"{short}_token": tokens[number] for short, key in _IDS.items() if (number := _id(file, key)) is not None}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "clean_up_tokenization_spaces": False,
                "model_max_length": file.metadata.get(f"{file.metadata.get('general.architecture')}.context_length", 2**30)}
    template = file.metadata.get("tokenizer.chat_template")
    return {"tokenizer.json": _text(document), "tokenizer_config.json": _text(settings),
            **({"chat_template.jinja": template.encode()} if isinstance(template, str) and template else {})}


def _pieces(splitting: _Splitting, level: dict[str, Any]) -> dict[str, Any]:
    first: list[dict[str, Any]] = []
    if splitting.digits:
        first = [{"type": "Digits", "individual_digits": True}]
    elif splitting.pattern:
        first = [{"type": "Split", "pattern": {"Regex": splitting.pattern}, "behavior": "Isolated", "invert": False}]
    return {"type": "Sequence", "pretokenizers": [*first, level]} if first else level


def _added(file: GgufFile, tokens: list[str]) -> list[dict[str, Any]]:
    """The tokens that a text's own spelling of them stands for: control tokens, and those that a user added."""
    kinds = file.metadata.get(f"{_SECTION}.token_type")
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise IntegrityError("not one kind for each token", field=f"{file.path}: {_SECTION}.token_type",
                             value=len(kinds) if isinstance(kinds, list) else None, remedy="convert the model again")
    return [{"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": kind == _CONTROL}
            for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind in (_CONTROL, _USER_DEFINED)]


def _beginning(file: GgufFile, tokens: list[str]) -> dict[str, Any] | None:
    """What puts bos before a text, where the file asks for it."""
    number = _id(file, _IDS["bos"])
    if file.metadata.get(f"{_SECTION}.add_bos_token") is not True or number is None:
        return None
    bos = {"SpecialToken": {"id": tokens[number], "type_id": 0}}
    text = [{"Sequence": {"id": name, "type_id": kind}} for name, kind in (("A", 0), ("B", 1))]
    return {"type": "TemplateProcessing", "single": [bos, text[0]], "pair": [bos, *text],
            "special_tokens": {tokens[number]: {"id": tokens[number], "ids": [number], "tokens": [tokens[number]]}}}


def _pair(file: GgufFile, merge: str) -> list[str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right) or " " in right:
        raise IntegrityError("a merge is two pieces", field=f"{file.path}: {_SECTION}.merges", value=merge, remedy="convert the model again")
    return [left, right]


def _texts(file: GgufFile, name: str) -> list[str]:
    found = file.metadata.get(f"{_SECTION}.{name}")
    if not isinstance(found, list) or not found or not isinstance(found[0], str):
        raise IntegrityError("not a list of texts", field=f"{file.path}: {_SECTION}.{name}", value=type(found).__name__, remedy="convert the model again")
    return found


def _id(file: GgufFile, key: str) -> int | None:
    number = file.metadata.get(f"{_SECTION}.{key}")
    if number is None:
        return None
    tokens = file.metadata.get(f"{_SECTION}.tokens")
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < (len(tokens) if isinstance(tokens, list) else 0):
        raise IntegrityError("not the number of a token", field=f"{file.path}: {_SECTION}.{key}", value=number, remedy="convert the model again")
    return number


def _text(document: object) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode() + b"\n"
