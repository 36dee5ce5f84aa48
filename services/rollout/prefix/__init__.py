"""The prefix cache of the rollout engine: who owns which page and which state of a pool. See docs/prefix_cache.md."""

from __future__ import annotations

from driftline.services.rollout.prefix.cache import PrefixCache
from driftline.services.rollout.prefix.host import HostTier
from driftline.services.rollout.prefix.keys import PAGE, CacheKey
from driftline.services.rollout.prefix.lease import Lease, Parked
from driftline.services.rollout.prefix.stats import Stats

__all__ = ["PAGE", "CacheKey", "HostTier", "Lease", "Parked", "PrefixCache", "Stats"]
