"""Other names of the same module: of stacked experts there is one update here and one for each expert in files; below a prefix lies a multimodal file's text model."""

from __future__ import annotations

import re
from collections.abc import Mapping

from driftline.models.lora.adapter import Update

__all__ = ["EXPERT", "apart", "text_model_s"]

EXPERT = re.compile(r"^(?P<experts>.+\.experts)\.(?P<number>0|[1-9][0-9]*)\.(?P<which>w[123])$")
_STACKED = re.compile(r"^(?P<experts>.+\.experts)\.(?P<which>w[123])$")

_PREFIXED = (("model.language_model.", "model."), ("language_model.", ""))
"""Where wrappers of several models keep the text model, and what stands there in its own checkpoint."""


def text_model_s(module: str) -> str:
    """The name that a module of the text model has in the text model."""
    for theirs, ours in _PREFIXED:
        if module.startswith(theirs):
            return ours + module.removeprefix(theirs)
    return module


def apart(updates: Mapping[str, Update]) -> dict[str, Update]:
    """By the names of linear layers: each expert is one."""
    out = {}
    for name, update in updates.items():
        found = _STACKED.match(name)
        if update.experts is None or found is None:
            out[name] = update
            continue
        for number in range(update.experts):
            out[f"{found['experts']}.{number}.{found['which']}"] = update.of_expert(number)
    return out
