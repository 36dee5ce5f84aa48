"""Pairing: which attention groups may compute prompts in the next step of the expert group that they share. Pure state; the caller's clock.

Guarantees: a step in which one group computes prompts is a step in which every group that has some does; a group with prompts is let in by the first step at
or after its window has run out, whatever the others do, and at once where nobody decodes or everybody has prompts; a round ends after `longest` steps, so one
group's stream of prompts does not undo the pairing.

Why: the groups' steps end together, because each needs the experts that all of them feed. A prompt that one group computes makes the step long for all; two
that are computed in two steps make two long steps, in one step they make one.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from driftline.messages.errors import ConfigError

__all__ = ["Decision", "Load", "Pairing", "Why"]


class Why(Enum):
    NOBODY = "no group has prompts"
    WAITING = "a group has prompts, and others may have some soon"
    TOGETHER = "every group that is not idle has prompts"
    NOTHING_DECODES = "no row is kept from its next token"
    WINDOW = "a group waited as long as it may"
    ROUND = "the round goes on"


class Load(NamedTuple):
    """Of one group before a step: rows that decode, and prompt tokens that wait to be computed."""

    rows: int
    tokens: int


class Decision(NamedTuple):
    """`groups` compute prompts in this step; the others decode only."""

    groups: frozenset[int]
    why: Why


class Pairing:
    """Of `groups` groups. window: seconds of the caller's clock that prompts wait for others' at most; 0 pairs nothing. longest: steps of a round. ConfigError."""

    def __init__(self, groups: int, window: float, *, longest: int = 8) -> None:
        for field, value, good in (("groups", groups, groups >= 1), ("window", window, window >= 0), ("longest", longest, longest >= 1)):
            if not good:
                raise ConfigError("out of range", field=field, value=value, remedy="groups and longest are at least 1, a window is at least 0 s")
        self.groups, self.window, self.longest = groups, window, longest
        self._since: list[float | None] = [None] * groups
        self._round = 0

    def step(self, now: float, loads: Sequence[Load]) -> Decision:
        """The decision for the step that begins at `now`, which never goes back. Raises ValueError for loads that are not one a group."""
        if len(loads) != self.groups:
            raise ValueError(f"{len(loads)} loads; give one for each of {self.groups} groups")
        for group, load in enumerate(loads):
            since = self._since[group]
            self._since[group] = None if not load.tokens else now if since is None else since
        ready = frozenset(group for group, load in enumerate(loads) if load.tokens)
        why = self._why(now, loads, ready)
        if why in (Why.NOBODY, Why.WAITING):
            self._round = 0
            return Decision(frozenset(), why)
        self._round = self._round + 1 if why is Why.ROUND else 1
        for group in ready:
            self._since[group] = now  # what is left of its prompts has waited for nothing yet
        return Decision(ready, why)

    def _why(self, now: float, loads: Sequence[Load], ready: frozenset[int]) -> Why:
        if not ready:
            return Why.NOBODY
        if all(load.tokens or not load.rows for load in loads):
            return Why.TOGETHER if any(load.rows for load in loads) else Why.NOTHING_DECODES
        if 0 < self._round < self.longest:
            return Why.ROUND
        oldest = min(since for since in self._since if since is not None)
        return Why.WINDOW if now - oldest >= self.window else Why.WAITING
