"""What a grader and one of its worker processes say to each other: length-prefixed msgpack frames over two pipes.

Guarantees: a frame is at most `LONGEST_FRAME` bytes and is refused before it is read otherwise; a `Verdict` that exists has either a
finite reward or the kind and cause of its failure.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgpack

from driftline.messages.errors import MalformedMessage

__all__ = ["HEADER", "LONGEST_ANSWER", "LONGEST_FRAME", "Failure", "Verdict", "frame_length", "pack", "unpack"]

HEADER = struct.Struct("<I")
LONGEST_FRAME = 64 * 1024 * 1024
LONGEST_ANSWER = 1024 * 1024


class Failure(StrEnum):
    """Why a member has no reward: always the reward's or the data's doing, never the machinery's."""

    RAISED = "raised"
    NOT_A_NUMBER = "not_a_number"
    DEADLINE = "deadline"
    MEMORY = "memory"
    CRASHED = "crashed"
    OUTPUT = "output"
    UNSENDABLE = "unsendable"


@dataclass(frozen=True)
class Verdict:
    reward: float | None
    components: dict[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    cause: str = ""
    seconds: float = 0.0


def pack(value: Any) -> bytes:
    body: bytes = msgpack.packb(value, use_bin_type=True, unicode_errors="surrogatepass")
    if len(body) > LONGEST_FRAME:
        raise MalformedMessage("too large for a worker", field="frame", value=len(body), remedy=f"at most {LONGEST_FRAME} bytes")
    return HEADER.pack(len(body)) + body


def frame_length(header: bytes, longest: int = LONGEST_FRAME) -> int:
    (length,) = HEADER.unpack(header)
    if length > longest:
        raise MalformedMessage("a frame longer than any", field="frame", value=length)
    return int(length)


def unpack(body: bytes) -> Any:
    return msgpack.unpackb(body, raw=False, strict_map_key=False, unicode_errors="surrogatepass")
