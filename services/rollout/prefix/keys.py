"""What computed a row: two rows of the same tokens are the same row only when the same weights made both."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MIXED", "PAGE", "CacheKey"]

PAGE = 64
"""Tokens a page, and the positions at which branches may share: models.paged.PAGE."""

MIXED = -1


class CacheKey(NamedTuple):
    """`base`: the model; `adapter`: the adapter's name, empty for none; `version`: the policy's, or MIXED."""

    base: str
    adapter: str
    version: int

    @staticmethod
    def of_mixed(base: str, adapter: str, owner: str) -> CacheKey:
        """The key of rows that more than one version wrote: `owner` is a name no other sequence has, so nobody else hits them."""
        return CacheKey(base, f"{adapter}#{owner}", MIXED)

    @property
    def mixed(self) -> bool:
        return self.version == MIXED
