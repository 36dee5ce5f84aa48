"""A configuration as text: faults as lines a person can act on, and a resolved configuration as TOML.

Every fault names the TOML path, the value found and the remedy; an unknown key names its nearest known relative, in its own
section or in another.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

__all__ = ["problems", "to_toml"]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def problems(error: ValidationError, model: type[BaseModel], origin: str) -> str:
    """One line per fault. A single fault reads as a sentence; several are listed under the file's name."""
    lines = [_line(detail, model) for detail in error.errors(include_url=False)]
    if len(lines) == 1:
        return f"{origin}: {lines[0]}"
    return f"{origin}: {len(lines)} settings are wrong\n" + "\n".join(f"  {line}" for line in lines)


def _line(detail: ErrorDetails, model: type[BaseModel]) -> str:
    path = [str(part) for part in detail["loc"]]
    value = detail.get("input")
    if detail["type"] == "extra_forbidden":
        return _unknown(path, model)
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "value_error":
        return message if not path or " = " in message else f"{_where(path)} = {_short(value)}: {message}"
    return f"{_where(path)} = {_short(value)}: {_sentence(message)}{_default(path, model, value)}"


def _unknown(path: list[str], model: type[BaseModel]) -> str:
    sections = _sections(model)
    if len(path) == 1:
        close = difflib.get_close_matches(path[0], sections, n=1)
        known = ", ".join(sections)
        owner = [f"{section}.{path[0]}" for section, fields in sections.items() if path[0] in fields]
        if owner:
            return f"{path[0]}: unknown section (did you mean {owner[0]}? settings live inside a section)"
        return f"[{path[0]}]: unknown section (" + (f"did you mean [{close[0]}]?" if close else f"known: {known}") + ")"
    section, key = path[0], path[1]
    own = sections.get(section, {})
    close = difflib.get_close_matches(key, own, n=1, cutoff=0.6)
    elsewhere = [f"{name}.{key}" for name, fields in sections.items() if key in fields]
    if elsewhere:
        remedy = f"did you mean {elsewhere[0]}?"
    elif close:
        remedy = f"did you mean {section}.{close[0]}?"
    else:
        remedy = f"[{section}] knows: {', '.join(own) or 'nothing'}"
    return f"{_where(path)}: unknown setting ({remedy})"


def _sections(model: type[BaseModel]) -> dict[str, Mapping[str, Any]]:
    return {
        name: info.annotation.model_fields
        for name, info in model.model_fields.items()
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
    }


def _where(path: list[str]) -> str:
    return ".".join(path) if path else "configuration"


def _default(path: list[str], model: type[BaseModel], value: object) -> str:
    if path == ["sampling", "temperature"] and value in (0, 0.0):
        return " (a temperature of 0 leaves no distribution to learn from: use 1.0; evaluation decodes greedily as well)"
    fields = _sections(model).get(path[0], {}) if path else {}
    if len(path) < 2 or path[1] not in fields:
        return ""
    default = fields[path[1]].get_default(call_default_factory=True)
    return f" (the default is {_short(default.value if isinstance(default, Enum) else default)})"


def _sentence(message: str) -> str:
    """Pydantic's wording without its regexes, which say nothing to a person."""
    if message.startswith("String should match pattern"):
        pattern = message.split("'")[1]
        choices = re.match(r"^\^\(([a-z0-9|]+)\)\$$", pattern)
        return f"must be one of {choices[1].replace('|', ', ')}" if choices else "may hold only letters, digits, - and _"
    message = message.replace("Input should be", "must be")
    return message[:1].lower() + message[1:]


def _short(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def to_toml(config: BaseModel) -> str:
    """The resolved values, section by section; settings without a value are comments, so that the file reads back."""
    blocks: list[str] = []
    for section, values in config.model_dump(mode="python").items():
        lines = [f"[{section}]"]
        for key, value in values.items():
            lines.append(f"# {key} is not set" if value is None else f"{key} = {_toml(value)}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def _toml(value: Any) -> str:
    match value:
        case Enum():
            return _toml(value.value)
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return repr(value)
        case str():
            return _quoted(value)
        case list() | tuple():
            return "[" + ", ".join(_toml(item) for item in value) + "]"
        case dict():
            inner = ", ".join(f"{_key(key)} = {_toml(item)}" for key, item in value.items() if item is not None)
            return "{" + f" {inner} " * bool(inner) + "}"
        case _:
            return _quoted(str(value))


def _quoted(text: str) -> str:
    """JSON's escapes are TOML's, except surrogate pairs (hence no ASCII form) and DEL, which TOML wants escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(key: object) -> str:
    text = str(key)
    return text if _BARE_KEY.fullmatch(text) else _quoted(text)
