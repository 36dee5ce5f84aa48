"""Ranges of one buffer, given out and taken back: no two overlap, neighbours that are free are one."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

__all__ = ["Extent", "Extents"]


class Extent(NamedTuple):
    """Bytes `start` to `start + size` of the buffer."""

    start: int
    size: int


class Extents:
    """First fit within `size` bytes."""

    def __init__(self, size: int) -> None:
        self.size, self.free = size, size
        self._gaps: list[Extent] = [Extent(0, size)] if size else []

    def take(self, size: int) -> Extent | None:
        """None: no gap is that long."""
        for i, gap in enumerate(self._gaps):
            if gap.size >= size:
                if gap.size == size:
                    del self._gaps[i]
                else:
                    self._gaps[i] = Extent(gap.start + size, gap.size - size)
                self.free -= size
                return Extent(gap.start, size)
        return None

    def give(self, extent: Extent) -> None:
        at = bisect_left(self._gaps, extent)
        self.free += extent.size
        start, end = extent.start, extent.start + extent.size
        if at < len(self._gaps) and self._gaps[at].start == end:
            end += self._gaps.pop(at).size
        if at and sum(self._gaps[at - 1]) == start:
            start = self._gaps.pop(at - 1).start
        insort(self._gaps, Extent(start, end - start))

    def gaps(self) -> tuple[Extent, ...]:
        return tuple(self._gaps)
