"""What the policy-delta operators are given and give back: spans of memory, and what changed in them.

A span is one contiguous tensor. Where positions inside it are listed it has fewer than 2^31 elements (the policy store's shards are 2 MiB), so that a
position fits an int32 whatever the size of the model; positions never run over the end of a span into the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import torch

__all__ = ["BITS", "BLOCKS", "LONGEST_SPAN", "Rounding", "SpanChanges", "checked", "checked_block"]

LONGEST_SPAN = 2**31 - 2**16
"""Less than 2^31 by more than a block, so that the positions of a block's unused lanes do not wrap."""

BITS: dict[int, torch.dtype] = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""The integers that elements of a width are compared as."""


BLOCKS = (256, 65_536)
"""The smallest and the largest block that changes are counted of: two counts of the largest fit the halves of one word."""


class Rounding(Enum):
    """How a new value becomes what the old span holds: not at all (both of one dtype), from fp32 to bfloat16, or from fp32 to a
    bfloat16 value that is held as fp32 (a model that computes in fp32 with bfloat16 weights). To nearest, ties to even."""

    NONE = "none"
    BFLOAT16 = "bfloat16"
    BFLOAT16_IN_FLOAT32 = "bfloat16 in float32"

    def width(self, old: torch.Tensor) -> int:
        """Bytes of the elements that are compared."""
        return old.element_size() if self is Rounding.NONE else 2


class SpanChanges(NamedTuple):
    """The changed elements of several spans, laid end to end.

    `at` int32 [n]: positions in their span, ascending. `xor` int8, int16 or int32 [n]: old bits XOR new bits, never zero. `starts` int64 [spans + 1]:
    span i's are `starts[i]:starts[i + 1]`. `counts` int64 [spans]: how many elements of each span changed; of a span where these are more
    than the share that was asked for, none is listed. `at` and `xor` may be longer than `starts[-1]`: what follows is undefined.
    """

    at: torch.Tensor
    xor: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor


def checked(old: Sequence[torch.Tensor], new: Sequence[torch.Tensor], rounding: Rounding, *, longest: int | None = LONGEST_SPAN) -> None:
    """Raise ValueError unless each old span can be compared with its new one. `longest`: elements of a span at most; None where no position is kept."""
    if len(old) != len(new):
        raise ValueError(f"{len(old)} old spans and {len(new)} new ones")
    for one, other in zip(old, new, strict=True):
        if one.numel() != other.numel() or one.numel() == 0 or (longest is not None and one.numel() > longest):
            most = "on" if longest is None else f"to {longest}"
            raise ValueError(f"spans of {one.numel()} and {other.numel()} elements; both need as many, from 1 {most}")
        if not (one.is_contiguous() and other.is_contiguous()):
            raise ValueError("a span must be contiguous")
        if one.element_size() not in BITS or (one.dtype, other.dtype) not in _pairs(one.dtype, rounding):
            raise ValueError(f"rounding {rounding.value} does not take {other.dtype} to {one.dtype}")
        if one.device != old[0].device or other.device != old[0].device or one.dtype != old[0].dtype:
            raise ValueError("all spans must be on one device, and all old ones of one dtype")


def checked_block(block: int) -> None:
    """Raise ValueError unless changes can be counted in blocks of that many elements."""
    if block & (block - 1) or not BLOCKS[0] <= block <= BLOCKS[1]:
        raise ValueError(f"block is {block} elements; it must be a power of two from {BLOCKS[0]} to {BLOCKS[1]}")


def _pairs(dtype: torch.dtype, rounding: Rounding) -> set[tuple[torch.dtype, torch.dtype]]:
    match rounding:
        case Rounding.NONE:
            return {(dtype, dtype)}
        case Rounding.BFLOAT16:
            return {(torch.bfloat16, torch.float32)}
        case Rounding.BFLOAT16_IN_FLOAT32:
            return {(torch.float32, torch.float32)}
