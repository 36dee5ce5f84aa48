"""A published model's tokenizer: `tokenizer.json` through the tokenizers library, its chat template, and every id at which its answers end.

Guarantees: a conversation has the ids that transformers' `apply_chat_template` gives it; without a template, the turns are lines below one another with what the
tokenizer itself puts before a text. `eos_ids` are those of generation_config.json, config.json and tokenizer_config.json together: a model that ends with one
its tokenizer does not name is not sampled past its answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from driftline.messages.errors import ConfigError
from driftline.models.tokenizer import Role, Turn
from driftline.models.tokenizers.chat_template import ChatTemplate

__all__ = ["HfTokenizer"]

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_AGAIN = "copy the model's files again from their source"


class HfTokenizer:
    """`template` is None where the model has none."""

    def __init__(self, tokenizer: Tokenizer, *, eos_ids: tuple[int, ...], pad: int, template: ChatTemplate | None = None) -> None:
        if not eos_ids:
            raise ConfigError("no token ends an answer", field="eos_token_id", value=None,
                              remedy="name one in generation_config.json, config.json or tokenizer_config.json")
        self._tokenizer, self.eos_ids, self.pad, self.template = tokenizer, eos_ids, pad, template
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    @classmethod
    def of(cls, files: Mapping[str, bytes]) -> HfTokenizer:
        """From the files of a model's directory, by name: tokenizer.json, and of tokenizer_config.json, chat_template.jinja (or .json), generation_config.json and
        config.json those that are there. ConfigError naming the file."""
        try:
            tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
        except KeyError:
            raise ConfigError("is not there", field="tokenizer.json", value=sorted(files), remedy="a tokenizer is read from this file; convert other forms first") from None
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"not a tokenizer: {error}", field="tokenizer.json", remedy=_AGAIN) from error
        settings, generation, model = (_document(files, name) for name in ("tokenizer_config.json", "generation_config.json", "config.json"))
        special = {name: text for name in _NAMED if (text := _token_text(settings.get(name))) is not None}
        own = tokenizer.token_to_id(special["eos_token"]) if "eos_token" in special else None
        text_model = model.get("text_config")
        named = [own, *_ids("generation_config.json", generation), *_ids("config.json", model),
                 *(_ids("config.json", text_model) if isinstance(text_model, dict) else ())]
        eos_ids = tuple(dict.fromkeys(i for i in named if i is not None))
        pad = tokenizer.token_to_id(special["pad_token"]) if "pad_token" in special else None
        source = _template(files, settings)
        return cls(tokenizer, eos_ids=eos_ids, pad=pad if pad is not None else eos_ids[0] if eos_ids else 0,
                   template=ChatTemplate(source, special) if source else None)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(_whole(text), add_special_tokens=False).ids)

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode_chat((Turn(Role.USER, text),))

    def encode_chat(self, turns: Sequence[Turn]) -> list[int]:
        if self.template is not None:
            return self.encode(self.template.render(turns))
        text = "".join(f"{turn.content}\n" for turn in turns)
        return list(self._tokenizer.encode(_whole(text), add_special_tokens=True).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; special ones and those beyond the vocabulary are skipped."""
        text: str = self._tokenizer.decode([i for i in ids if 0 <= i < self.vocab_size], skip_special_tokens=True)
        return text


def _whole(text: str) -> str:
    """Lone surrogates are no text to the library: they become U+FFFD, as they would on their way through a file."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def _document(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        found = json.loads(files[name])
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}", field=name, remedy=_AGAIN) from error
    if not isinstance(found, dict):
        raise ConfigError("not an object", field=name, value=type(found).__name__, remedy=_AGAIN)
    return found


def _token_text(value: object) -> str | None:
    """A special token is named by its text, or by an object that has it."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _ids(file: str, document: Mapping[str, Any]) -> list[int]:
    """`eos_token_id`: none, one or several."""
    found = document.get("eos_token_id")
    numbers = found if isinstance(found, list) else [] if found is None else [found]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in numbers):
        raise ConfigError("not the number of a token, nor a list of such", field=f"{file}: eos_token_id", value=found, remedy=_AGAIN)
    return list(numbers)


def _template(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> str:
    """chat_template.jinja; else chat_template.json's or tokenizer_config.json's text, of several the one called default. Empty where there is none."""
    if "chat_template.jinja" in files:
        try:
            return files["chat_template.jinja"].decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"not UTF-8: {error}", field="chat_template.jinja", remedy=_AGAIN) from error
    found = _document(files, "chat_template.json").get("chat_template", settings.get("chat_template"))
    if isinstance(found, list):
        named = {str(entry.get("name")): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
        if found is None:
            raise ConfigError("several templates, none of them called default", field="tokenizer_config.json: chat_template", value=sorted(named),
                              remedy="put the one to use into chat_template.jinja")
    if found is not None and not isinstance(found, str):
        raise ConfigError("not a text", field="chat_template", value=type(found).__name__, remedy=_AGAIN)
    return found or ""
