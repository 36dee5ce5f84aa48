"""When a sequence is walked in segments: for few heads, because a walk is serial and H of them do not fill a device.

Exact: a segment's transfer (M, S~) with S_out = M S_in + S~ is computed from the zero state and from the identity, the states between segments
are composed in order in fp32, and the segments are walked again from them. Nothing is cut off, however slow the gates. The rule reads the number of
heads alone, and segments begin at multiples of SEGMENT tokens from a sequence's start: neither its batch nor its continuation moves them, and up to
SEGMENT tokens the bits are those of the plain walk.
"""

from __future__ import annotations

__all__ = ["SEGMENT", "SEGMENT_HEADS", "segmented"]

SEGMENT = 1024
"""Tokens a segment. With segments, a carried state continues with the same bits at multiples of it, not of a chunk."""

SEGMENT_HEADS = 16
"""Up to so many heads sequences are walked in segments: three walks' work in a fraction of the length."""


def segmented(heads: int) -> bool:
    """Whether sequences of so many heads are walked in segments."""
    return heads <= SEGMENT_HEADS
