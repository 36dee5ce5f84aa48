"""Rows of the rollout benchmarks, and what every case is given."""

from __future__ import annotations

import time
from typing import NamedTuple

__all__ = ["Given", "Row", "row"]

Row = dict[str, object]


class Given(NamedTuple):
    """quick: the smallest form. until: when the case must be done, by `time.perf_counter`. devices: of this machine, for what is spread over two."""

    quick: bool
    until: float
    devices: int = 1

    @property
    def left(self) -> float:
        return max(0.0, self.until - time.perf_counter())


def row(case: str, ours: float | None, unit: str, *, peer: str | None = None, peer_value: float | None = None, bound: float | None = None, note: str = "",
        smaller: bool = False) -> Row:
    """`smaller` is better: the ratio says how many times better ours is."""
    ratio = None
    if ours and peer_value:
        ratio = peer_value / ours if smaller else ours / peer_value

    def short(value: float | None) -> float | None:
        return None if value is None else float(f"{value:.4g}")

    return {"case": case, "ours": short(ours), "unit": unit, "peer": peer if peer_value is not None else None, "peer_value": short(peer_value), "ratio": short(ratio),
            "bound": short(bound), "note": note}
