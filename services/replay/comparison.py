"""What a replay found: every version compared, or the first that differs and how the two sides compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

__all__ = ["Comparison", "Difference", "Mode", "Span"]


class Mode(StrEnum):
    LOOP = "loop"  # a broker and the learner service
    LEARNER = "learner-only"


@dataclass(frozen=True)
class Span:
    """Versions `first` to `last` are compared; those before `first` are computed, because a step needs the state they leave."""

    first: int
    last: int

    def __contains__(self, version: int) -> bool:
        return self.first <= version <= self.last


@dataclass(frozen=True)
class Difference:
    """The first version that came out otherwise. `facts`: how the recording's learner and this one compute, where they differ."""

    version: int
    recorded: str
    here: str
    facts: Mapping[str, tuple[Any, Any]]

    def __str__(self) -> str:
        lines = [f"version {self.version} differs: recorded {self.recorded}, here {self.here}"]
        lines += [f"  {name}: recorded {recorded}, here {here}" for name, (recorded, here) in sorted(self.facts.items())]
        if not self.facts:
            lines.append("  both sides say that they compute alike: the batch, the settings or the code is another")
        return "\n".join(lines)


@dataclass(frozen=True)
class Comparison:
    """`problems` are sentences about the ledger of a replay through the loop."""

    file: str
    run: str
    mode: Mode
    span: Span
    computed: int
    compared: int
    difference: Difference | None = None
    problems: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        return self.difference is None and not self.problems

    def document(self) -> dict[str, Any]:
        return {**asdict(self), "equal": self.equal}

    def __str__(self) -> str:
        if not self.equal:
            return "\n".join([*([str(self.difference)] if self.difference else []), *self.problems])
        before = self.computed - self.compared
        unseen = f" ({before} before them computed and not compared)" if before > 0 else ""
        return f"{self.file}: run {self.run}, versions {self.span.first} to {self.span.last} equal bit for bit, {self.mode}{unseen}"
