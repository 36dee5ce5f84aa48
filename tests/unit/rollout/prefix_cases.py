"""A pool whose rows say what computed them, so that any wrong row, state or reference of the prefix cache shows."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache

import torch

from driftline.services.rollout.prefix import PAGE, CacheKey, Lease

KEY = CacheKey("base", "", 1)
NEXT = CacheKey("base", "", 2)
ADAPTED = CacheKey("base", "poet", 1)
STALE = -7


@lru_cache(maxsize=2048)
def _fingerprints(key: CacheKey, tokens: bytes) -> torch.Tensor:
    made, last = [], hash(key)
    for token in array("i", tokens):
        last = hash((last, token))
        made.append(last)
    return torch.tensor(made, dtype=torch.int64)


def fingerprints(writers: Sequence[CacheKey], tokens: array[int]) -> torch.Tensor:
    """int64 [len(writers)]: of the row, and the state, behind each token as its writer computes it."""
    text = tokens[: len(writers)].tobytes()
    out = torch.empty(len(writers), dtype=torch.int64)
    for key in set(writers):
        mine = torch.tensor([writer == key for writer in writers])
        out[mine] = _fingerprints(key, text)[mine]
    return out


class RecordingPool:
    """rows int64 [pages, PAGE], states int64 [slots, 3]: fingerprints. `copies` counts what was moved."""

    def __init__(self, pages: int = 32, slots: int = 6, *, page_bytes: int = PAGE * 8, state_bytes: int = 24) -> None:
        self.pages, self.slots = pages, slots
        self.page_bytes, self.state_bytes = page_bytes, state_bytes
        self.device = torch.device("cpu")
        self.rows = torch.full((pages, PAGE), STALE, dtype=torch.int64)
        self.states = torch.full((slots, 3), STALE, dtype=torch.int64)
        self.copies = {"pages": 0, "states": 0, "cleared": 0}

    def copy_pages(self, src: Sequence[int], dst: Sequence[int]) -> None:
        self.rows[list(dst)] = self.rows[list(src)]
        self.copies["pages"] += len(dst)

    def copy_states(self, src: Sequence[int], dst: Sequence[int]) -> None:
        self.states[list(dst)] = self.states[list(src)]
        self.copies["states"] += len(dst)

    def clear_states(self, slots: Sequence[int]) -> None:
        self.states[list(slots)] = 0
        self.copies["cleared"] += len(slots)

    def export_pages(self, pages: Sequence[int]) -> list[torch.Tensor]:
        rows = self.rows[list(pages)]
        return [rows[:, :16].clone(), rows[:, 16:].clone()]  # two layers

    def import_pages(self, pages: Sequence[int], tensors: Sequence[torch.Tensor], non_blocking: bool = False) -> None:
        self.rows[list(pages)] = torch.cat(list(tensors), dim=1)

    def export_states(self, slots: Sequence[int]) -> list[torch.Tensor]:
        return [self.states[list(slots)].clone()]

    def import_states(self, slots: Sequence[int], tensors: Sequence[torch.Tensor], non_blocking: bool = False) -> None:
        self.states[list(slots)] = tensors[0]

    # What an engine does with a lease.

    def compute(self, lease: Lease, key: CacheKey, tokens: array[int], begin: int, end: int) -> None:
        """Rows of tokens[begin:end], and the state behind them."""
        if end > begin:
            made = fingerprints([key] * end, tokens)
            at = torch.arange(begin, end)
            self.rows[torch.tensor(lease.pages)[at // PAGE], at % PAGE] = made[begin:]
            if self.state_bytes:
                self.states[lease.slot] = made[-1]

    def holds(self, lease: Lease, writers: Sequence[CacheKey], tokens: array[int]) -> bool:
        """Whether the lease has the row of each of these tokens, by its writer, and the state behind the last."""
        if not writers:
            return not self.state_bytes or not self.states[lease.slot].any()
        expected, at = fingerprints(writers, tokens), torch.arange(len(writers))
        rows = bool((self.rows[torch.tensor(lease.pages)[at // PAGE], at % PAGE] == expected).all())
        return rows and (not self.state_bytes or bool((self.states[lease.slot] == expected[-1]).all()))


def text(seed: int, length: int) -> array[int]:
    """Tokens that no other seed has."""
    return array("i", (seed * 100_000 + i for i in range(length)))
