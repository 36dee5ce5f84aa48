"""Two names for one update: of stacked experts it is one here and one for each expert in files, whose linears they are."""

from __future__ import annotations

import re
from collections.abc import Mapping

from driftline.models.lora.adapter import Update

__all__ = ["EXPERT", "apart"]

EXPERT = re.compile(r"^(?P<experts>.+\.experts)\.(?P<number>0|[1-9][0-9]*)\.(?P<which>w[123])$")
_STACKED = re.compile(r"^(?P<experts>.+\.experts)\.(?P<which>w[123])$")


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
