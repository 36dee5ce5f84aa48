"""A model over a pool of pages and states: prefill in any pieces, decode, and the scoring of drafts, by rows that lie where an engine put them.

What a token computes does not depend on where in the pool its sequence lies, nor on what the pool held before; in deterministic mode it is, to the bit, what a
forward of the whole sequence computes. See docs/models.md.
"""

from __future__ import annotations

from driftline.models.paged.places import PAGE
from driftline.models.paged.pool import Pool, Sizes
from driftline.models.paged.steps import PagedOutput, decode, prefill

__all__ = ["PAGE", "PagedOutput", "Pool", "Sizes", "decode", "prefill"]
