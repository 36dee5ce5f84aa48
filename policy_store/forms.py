"""The words of the delta format: how a shard may be coded, and what coding one gives."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Changes", "Codec", "DeltaForm", "EncodedShard"]


class Codec(IntEnum):
    """How one shard is coded; the number is on the wire, in the manifest."""

    UNCHANGED = 0
    SPARSE = 1
    DENSE = 2
    FULL = 3
    RANKED = 4


class DeltaForm(StrEnum):
    """What to spare when a changed shard is coded: bytes, or CPU seconds. Readers understand both."""

    SMALL = "small"
    FAST = "fast"


class EncodedShard(NamedTuple):
    codec: Codec
    payload: bytes
    changed: int
    """Elements that differ from the base; all of them for a full."""


class Changes(NamedTuple):
    """What a delta does to one shard, decoded and not yet applied.

    `at` int32 [n]: positions of elements in the shard, ascending, each once. `xor` unsigned of the element's width [n]: old XOR new,
    never zero.
    """

    at: npt.NDArray[np.int32]
    xor: npt.NDArray[np.unsignedinteger[Any]]
