"""The rows decoded together as arrays: built when rows come or go, and only advanced by a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from driftline.services.rollout.engine.row import Row
from driftline.services.rollout.engine.scheduler import CHUNK

__all__ = ["Batch"]


class Batch:
    """Of B rows that hold leases: last tokens int64 [B], slots int32 [B], tables int32 [B, P], lengths int32 [B] computed tokens, keys uint64 [B], positions
    int64 [B] of the next draw, temperatures float32 [B], accepted int32 [B]: what of the last window the states lack."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        leases = [row.lease for row in rows]
        self.tokens = np.array([row.tokens[-1] for row in rows], dtype=np.int64)
        self.slots = np.array([lease.slot if lease else -1 for lease in leases], dtype=np.int32)
        self.tables = np.zeros((len(leases), max((len(lease.pages) for lease in leases if lease), default=1)), dtype=np.int32)
        for table, lease in zip(self.tables, leases, strict=True):
            if lease:
                table[: len(lease.pages)] = lease.pages
        self._pages = np.array([len(lease.pages) if lease else 0 for lease in leases], dtype=np.int32)
        self.lengths = np.array([row.length for row in rows], dtype=np.int32)
        self.keys = np.array([row.key for row in rows], dtype=np.uint64)
        self.positions = np.array([row.first_draw + len(row.tokens) for row in rows], dtype=np.int64)
        self.temperatures = np.array([row.temperature for row in rows], dtype=np.float32)
        self.accepted = np.array([row.pending for row in rows], dtype=np.int32)

    def short(self, steps: int) -> list[int]:
        """The rows that have no page for that many more tokens."""
        return np.flatnonzero(self.lengths + steps > self._pages * CHUNK).tolist()

    def grew(self, i: int) -> None:
        """Row i's lease has more pages."""
        lease = self.rows[i].lease
        assert lease is not None
        count = len(lease.pages)
        if count > self.tables.shape[1]:
            self.tables = np.pad(self.tables, ((0, 0), (0, count - self.tables.shape[1])))
        self.tables[i, :count] = lease.pages
        self._pages[i] = count

    def advance(self, tokens: np.ndarray, steps: np.ndarray | int = 1) -> None:
        """tokens int64 [B]: the last of those that each row was given, `steps` of them."""
        self.tokens = tokens
        self.lengths += np.asarray(steps, dtype=np.int32)
        self.positions += steps
