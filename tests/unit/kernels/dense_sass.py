"""A kernel's machine instructions, disassembled once and counted by name."""

from __future__ import annotations

import re
from collections import Counter

from driftline.kernels.offline import CompiledKernel

__all__ = ["Instructions"]


class Instructions:
    """How often each instruction is there: `count("STG")` of all whose name begins so, `count("STG.E.128")` of those in particular."""

    def __init__(self, kernel: CompiledKernel) -> None:
        self._names = Counter(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", kernel.sass(), re.MULTILINE))

    def count(self, name: str) -> int:
        return sum(times for full, times in self._names.items() if full == name or full.startswith(name + "."))
