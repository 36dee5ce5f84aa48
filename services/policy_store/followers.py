"""Followers: which version each engine last said it has, against the head. It says what engines report on the metrics stream, so an
engine that is silent for `SILENT_S` is not counted, and one that fails between two reports still is."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import NamedTuple

from driftline.messages.bus import Bus
from driftline.messages.subjects import Subjects
from driftline.messages.types import Metrics

__all__ = ["Followers", "Lag"]

SILENT_S = 120.0


class Lag(NamedTuple):
    """Engines heard of lately, how many of them are behind the head, and by how many versions at most."""

    readers: int
    behind: int
    furthest: int


class Followers:
    def __init__(self, bus: Bus, run: str) -> None:
        self._bus, self._subjects = bus, Subjects(run)
        self._versions: dict[str, tuple[int, float]] = {}

    async def follow(self) -> None:
        """From the newest report on; until cancelled."""
        stream, subject = self._subjects.stream("METRICS"), self._subjects.metrics("rollout")
        newest = await self._bus.last(stream, subject)
        reports = self._bus.follow(stream, subject, start=1 if newest is None else newest.seq)
        async with aclosing(reports) as stored_reports:  # type: ignore[type-var]
            async for stored in stored_reports:
                if isinstance(stored.message, Metrics):
                    self.see(stored.message)

    def see(self, report: Metrics) -> None:
        if "version" in report.values:
            self._versions[report.instance] = (int(report.values["version"]), report.at)

    def lag(self, head: int, now: float | None = None) -> Lag:
        until = (time.time() if now is None else now) - SILENT_S
        lags = [max(0, head - version) for version, at in self._versions.values() if at >= until]
        return Lag(len(lags), sum(lag > 0 for lag in lags), max(lags, default=0))
