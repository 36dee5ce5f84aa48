"""When a service that died is started again, and when the run gives up on it. A pure rule on times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["GiveUp", "Restart", "RestartPolicy"]


@dataclass(frozen=True)
class Restart:
    after_s: float


@dataclass(frozen=True)
class GiveUp:
    deaths: int
    window_s: float


@dataclass(frozen=True)
class RestartPolicy:
    """At most `budget` restarts of one service within `window_s`, each twice as late as the one before."""

    budget: int = 5
    window_s: float = 60.0
    first_s: float = 0.5
    longest_s: float = 8.0

    def after(self, deaths: Sequence[float]) -> Restart | GiveUp:
        """What follows the newest of `deaths` (times, ascending)."""
        recent = [at for at in deaths if at > deaths[-1] - self.window_s]
        if len(recent) > self.budget:
            return GiveUp(len(recent), self.window_s)
        return Restart(min(self.first_s * 2 ** (len(recent) - 1), self.longest_s))
