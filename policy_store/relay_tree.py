"""The tree of a pack: who asks whom for it. Nothing is agreed on, and no chain of requests can close.

The peers are ordered by a hash of (pack, peer), rendezvous hashing [Thaler, Ravishankar 1998], and the one at position i asks the one at
position (i - 1) // fanout; the first asks the origin. Every pack has another order, so the load spreads by itself.

Why no loop is possible, whatever each peer believes about who is there: a peer's rank depends on the pack and its own name alone, and
a parent's rank is lower than its child's in every view that holds both. Ranks fall along every chain of requests, so it ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import xxhash

__all__ = ["Rank", "before", "depth", "order", "parent", "rank"]


class Rank(NamedTuple):
    """Compared as it is; the name decides between equal hashes, so that no two peers are level."""

    score: int
    peer: str


def rank(digest: str, peer: str) -> Rank:
    """The place of `peer` among any others for the pack `digest`; the same in every view."""
    return Rank(xxhash.xxh3_64_intdigest(f"{digest}/{peer}".encode()), peer)


def before(digest: str, one: str, other: str) -> bool:
    """Whether `one` may be asked for the pack by `other`."""
    return rank(digest, one) < rank(digest, other)


def order(digest: str, peers: Iterable[str]) -> list[str]:
    return [ranked.peer for ranked in sorted(rank(digest, peer) for peer in set(peers))]


def parent(digest: str, me: str, others: Iterable[str], fanout: int) -> str | None:
    """Whom `me`, who sees `others`, asks for the pack; None: the origin."""
    mine = rank(digest, me)
    ahead = sorted(ranked for ranked in (rank(digest, peer) for peer in set(others)) if ranked < mine)
    return ahead[(len(ahead) - 1) // fanout].peer if ahead else None


def depth(position: int, fanout: int) -> int:
    """How many peers are above `position`: at most log_fanout of the number of peers, rounded up (position itself for a fanout of 1)."""
    above = 0
    while position > 0:
        position, above = (position - 1) // fanout, above + 1
    return above
