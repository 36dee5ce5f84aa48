"""How often a router would have chosen otherwise than it was told to: counts over (token, MoE layer) pairs that have a recorded choice. Depends on nothing."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Flips"]


@dataclass(frozen=True)
class Flips:
    """`rows` (token, layer) pairs were compared; in `sets` of them the chosen experts differ, in `orders` their ordered lists do, so `sets <= orders <= rows`.

    Only the set decides which experts a token meets; the order decides the rounding of their sum. Counts add up over micro-batches.
    """

    rows: int = 0
    sets: int = 0
    orders: int = 0

    def __add__(self, other: Flips) -> Flips:
        return Flips(self.rows + other.rows, self.sets + other.sets, self.orders + other.orders)

    @property
    def share(self) -> float:
        """The fraction of pairs whose set differs; 0 without any."""
        return self.sets / self.rows if self.rows else 0.0

    @property
    def ordered_share(self) -> float:
        """The fraction of pairs whose ordered list differs; 0 without any."""
        return self.orders / self.rows if self.rows else 0.0
