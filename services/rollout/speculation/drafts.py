"""What is said between an engine and whoever drafts for it: rows that will take a token, and guesses at what comes behind it.

A draft is only ever a guess. No field here decides what is sampled: the rules do, from the target's own logits.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

__all__ = ["Drafter", "Drafts", "Row", "Seen"]


@dataclass(frozen=True, slots=True)
class Row:
    """A running sequence. `history`: its prompt and all it has sampled, which nobody changes here; the last token is not in the pool yet. `room`: tokens it
    may still take, at least 1. `family`: rows of one family resemble each other (a group's members). `key`, `position`: of the next token's draw."""

    id: Hashable
    history: array[int]
    room: int
    family: Hashable = None
    key: int = 0
    position: int = 0
    temperature: float = 1.0


class Drafts(NamedTuple):
    """tokens int64 [B, L], of which the first `counts` int32 [B] of a row are drafts and the rest the row's last token again; probs fp32 [B, L, V]: the
    distributions they were drawn from, None where they were not drawn or nobody asks."""

    tokens: np.ndarray
    counts: np.ndarray
    probs: torch.Tensor | None = None


class Seen(NamedTuple):
    """What the target computed of some rows: tap rows [N, F] of the last N positions of each that stand, in the rows' order one behind another, and how
    many each has. Positions of a row end right before its newest token."""

    features: torch.Tensor
    counts: Sequence[int]


class Drafter(Protocol):
    """Guesses. `taps`: which hidden states of the target it needs to be shown (none: `saw` is never called). `sampled`: whether its drafts are drawn, so
    that their distributions mean something to the rejection rule."""

    @property
    def taps(self) -> tuple[int, ...]: ...

    @property
    def sampled(self) -> bool: ...

    def propose(self, rows: Sequence[Row], limits: Sequence[int], *, probs: bool) -> Drafts:
        """At most `limits[i]` (0 or more) drafts behind row i's newest token. `probs`: for the rejection rule, with draws of their own stream."""

    def saw(self, rows: Sequence[Row], seen: Seen) -> None:
        """The target computed these positions; called before the rows' next `propose`."""

    def retire(self, row: Hashable) -> None:
        """The row is over, or went to sleep: what is kept of it may go. Unknown rows are fine."""
