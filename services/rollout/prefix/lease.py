"""What a running sequence holds of the pool: its own references, so that nothing that happens to the cache takes a row from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from driftline.services.rollout.prefix.keys import CacheKey
from driftline.services.rollout.prefix.node import Node, Routes, Tokens

__all__ = ["Lease", "Parked"]


@dataclass(eq=False)
class Lease:
    """`pages`: the sequence's table, page i has tokens 64 i to 64 i + 63. `slot`: its state (0 in a pool without states). The first `hit` tokens were
    there already: `routes` int16 [hit, layers, k] of them where they are recorded, `versions` the policies that wrote them, `key` whose they were."""

    slot: int
    pages: list[int]
    hit: int = 0
    routes: Routes | None = None
    versions: tuple[int, ...] = ()
    key: CacheKey | None = None
    at: Node | None = field(default=None, repr=False)  # the deepest node of the tree on its path, pinned
    source: Node | None = field(default=None, repr=False)  # the leaf that it continues
    writers: set[CacheKey] = field(default_factory=set, repr=False)
    ended: bool = False


class Parked(NamedTuple):
    """A sequence without a lease: its first `length` tokens were computed under `key`, and may still be cached."""

    key: CacheKey
    tokens: Tokens
    length: int
