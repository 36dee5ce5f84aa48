"""Dead letters: what could not be understood or finished, kept whole, with where it came from and why.

A dead letter is the original bytes on `dl.v1.<run>.dead.<kind>`, `kind` being the plane it was on; what is known about it is in
headers, so it can be read without decoding. It is stored before the original is terminated, under an id made of stream and
sequence: a crash between the two stores it once. Reading one never fails: headers that make no sense read as nothing known.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from driftline.messages.codec import decode
from driftline.messages.errors import ConfigError, MalformedMessage
from driftline.messages.subjects import Subjects
from driftline.messages.types import Group

__all__ = [
    "Archive",
    "DeadLetter",
    "Raw",
    "dead_headers",
    "dead_id",
    "dead_letters",
    "dead_subject",
    "follow_dead",
    "group_of",
    "parse",
    "run_of",
]

REASON, SUBJECT, STREAM = "x-dead-letter-reason", "x-original-subject", "x-original-stream"
FAILED_AT, DELIVERIES, SEQUENCE = "x-failed-at", "x-delivery-count", "x-original-sequence"
_REASON_LIMIT = 1000


class Raw(NamedTuple):
    """A stored message before decoding."""

    seq: int
    subject: str
    headers: Mapping[str, str]
    data: bytes


class Archive(Protocol):
    """The part of a Bus that handles messages as they are stored, undecoded."""

    async def read(self, stream: str, subject: str, *, start: int = 1, limit: int = 1000) -> list[Raw]:
        """At most `limit` stored messages on `subject` (wildcards allowed) from sequence `start`, without waiting for more."""
        ...

    def follow_raw(self, stream: str, subject: str, *, start: int = 1) -> AsyncGenerator[Raw, None]:
        """`Bus.follow` without decoding: history from stream sequence `start`, then live, in order, across reconnects."""
        ...

    async def delete(self, stream: str, seq: int) -> bool:
        """Remove one stored message for good. False: it is not there (any more), so repeating is safe."""
        ...


@dataclass(frozen=True)
class DeadLetter:
    seq: int
    kind: str
    reason: str
    subject: str
    stream: str
    sequence: int
    deliveries: int
    failed_at: float
    data: bytes
    headers: Mapping[str, str]


def run_of(subject: str) -> tuple[str, str]:
    """Run and plane of `dl.v1.<run>.<plane>...`."""
    tokens = subject.split(".")
    if len(tokens) < 4 or tokens[:2] != ["dl", "v1"]:
        raise ConfigError("not a subject of ours", field="subject", value=subject, remedy="dl.v1.<run>.<plane>...")
    return tokens[2], tokens[3]


def dead_subject(subject: str) -> tuple[str, str]:
    """Stream and subject that take the dead letters of `subject`."""
    run, plane = run_of(subject)
    names = Subjects(run)
    return names.stream("DEAD"), names.dead(plane)


def dead_id(stream: str, seq: int) -> str:
    return f"dead/{stream}/{seq}"


def dead_headers(*, reason: str, subject: str, stream: str, seq: int, deliveries: int) -> dict[str, str]:
    line = " ".join(reason.split()).encode("ascii", "backslashreplace").decode()
    return {
        REASON: line[:_REASON_LIMIT] or "unknown",
        SUBJECT: subject,
        STREAM: stream,
        SEQUENCE: str(seq),
        FAILED_AT: f"{time.time():.3f}",
        DELIVERIES: str(deliveries),
    }


async def dead_letters(bus: Archive, run: str, *, start: int = 1, limit: int = 1000) -> list[DeadLetter]:
    """The dead letters of a run, oldest first."""
    names = Subjects(run)
    return [parse(raw) for raw in await bus.read(names.stream("DEAD"), names.dead("*"), start=start, limit=limit)]


async def follow_dead(bus: Archive, run: str, *, start: int = 1) -> AsyncGenerator[DeadLetter, None]:
    """The dead letters of a run from the first that is kept, then each as it comes. Ends only by cancellation or `aclose()`."""
    names = Subjects(run)
    async with aclosing(bus.follow_raw(names.stream("DEAD"), names.dead("*"), start=start)) as stored:
        async for raw in stored:
            yield parse(raw)


def group_of(letter: DeadLetter) -> str | None:
    """The group that lacks this message: from its subject, or from the group itself. None when that cannot be known, and for
    what was only copied: a message met by `follow` is still in its stream."""
    match letter.subject.split("."):
        case ["dl", "v1", _, "trajectories" | "graded", name]:
            return name
        case ["dl", "v1", _, "groups"]:
            return _group_in(letter.data)
        case _:
            return None


def _group_in(data: bytes) -> str | None:
    try:
        message = decode(data)
    except MalformedMessage:
        return None
    return message.group if isinstance(message, Group) else None


def parse(raw: Raw) -> DeadLetter:
    """A dead letter as it is stored."""
    headers = raw.headers
    return DeadLetter(
        seq=raw.seq,
        kind=raw.subject.rsplit(".", 1)[-1],
        reason=headers.get(REASON, ""),
        subject=headers.get(SUBJECT, ""),
        stream=headers.get(STREAM, ""),
        sequence=int(_number(headers, SEQUENCE)),
        deliveries=int(_number(headers, DELIVERIES)),
        failed_at=_number(headers, FAILED_AT),
        data=raw.data,
        headers=dict(headers),
    )


def _number(headers: Mapping[str, str], name: str) -> float:
    """Whoever may publish a dead letter must not be able to stop its readers."""
    try:
        value = float(headers.get(name, "0"))
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0
