"""Who goes first when memory is short: the least worth a byte, by GreedyDual-Size with frequency (Cherkasova, HPL-98-69R1).

A node's priority is the floor at its last use plus (uses x tokens that would be computed again) / bytes; the floor rises to the priority of whatever was
evicted, so what is not used is overtaken, without a clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from driftline.services.rollout.prefix.node import Node

__all__ = ["Ranking"]

_SERIAL = count(1)  # of all rankings: a node stands in one of them, and its last entry counts


class Ranking:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Node]] = []
        self._live = 0

    def put(self, node: Node) -> None:
        """By the priority it has."""
        node.entry = next(_SERIAL)
        heapq.heappush(self._heap, (node.priority, node.entry, node))
        if len(self._heap) > 64 + 2 * self._live:
            self._heap = [e for e in self._heap if e[2].entry == e[1]]
            heapq.heapify(self._heap)
            self._live = len(self._heap)

    def least(self, may_go: Callable[[Node], bool], below: float = float("inf")) -> Node | None:
        """Takes out the least node that may go, if its priority is under `below`. Those that may not stay."""
        passed: list[tuple[float, int, Node]] = []
        found: Node | None = None
        while self._heap and found is None and self._heap[0][0] < below:
            entry = heapq.heappop(self._heap)
            if entry[2].entry != entry[1]:
                continue
            if may_go(entry[2]):
                found = entry[2]
                found.entry = 0
            else:
                passed.append(entry)
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found
