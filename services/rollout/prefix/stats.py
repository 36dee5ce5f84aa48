"""What the cache did and what it holds, in bytes by kind: counted from what is there, so that it cannot drift."""

from __future__ import annotations

from dataclasses import dataclass, replace

from driftline.services.rollout.prefix.stock import Moves, Stock

__all__ = ["Stats"]


@dataclass(frozen=True)
class Stats:
    """`hit_tokens` of the prompts' needed no computing, `missed_tokens` did. Bytes of pages and states that leases hold, and that only the tree does: a
    page that both hold is a lease's."""

    hits: int
    misses: int
    hit_tokens: int
    missed_tokens: int
    leased_page_bytes: int
    leased_state_bytes: int
    cached_page_bytes: int
    cached_state_bytes: int
    free_page_bytes: int
    free_state_bytes: int
    host_bytes: int
    moves: Moves

    @property
    def hit_rate(self) -> float:
        """Of prompt tokens; 0 of none."""
        return self.hit_tokens / max(1, self.hit_tokens + self.missed_tokens)

    @staticmethod
    def of(stock: Stock, pages: int, leases: int, hits: int, misses: int, hit_tokens: int, missed_tokens: int) -> Stats:
        """`pages`: how many the `leases` have."""
        slots = leases if stock.stateful else 0
        page_bytes, state_bytes = stock.storage.page_bytes, stock.storage.state_bytes
        return Stats(
            hits, misses, hit_tokens, missed_tokens, pages * page_bytes, slots * state_bytes,
            (stock.pages.total - stock.pages.free - pages) * page_bytes, (stock.slots.total - stock.slots.free - slots) * state_bytes,
            stock.pages.free * page_bytes, stock.slots.free * state_bytes, stock.host.used if stock.host else 0, replace(stock.moves),
        )
