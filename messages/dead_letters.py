"""Dead letters: what could not be understood or finished, kept whole, with where it came from and why.

A dead letter is the original bytes on `dl.v1.<run>.dead.<kind>`, `kind` being the plane it was on; what is known about it is in
headers, so it can be read without decoding. It is stored before the original is terminated, under an id made of stream and
sequence: a crash between the two stores it once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from driftline.messages.errors import ConfigError
from driftline.messages.subjects import Subjects

__all__ = ["Archive", "DeadLetter", "Raw", "dead_headers", "dead_id", "dead_letters", "dead_subject", "run_of"]

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
    """A bus whose streams can be read as stored; both implementations are."""

    async def read(self, stream: str, subject: str, *, start: int = 1, limit: int = 1000) -> list[Raw]:
        """At most `limit` stored messages on `subject` (wildcards allowed) from sequence `start`, without waiting for more."""
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
    return [_parse(raw) for raw in await bus.read(names.stream("DEAD"), names.dead("*"), start=start, limit=limit)]


def _parse(raw: Raw) -> DeadLetter:
    headers = raw.headers
    return DeadLetter(
        seq=raw.seq,
        kind=raw.subject.rsplit(".", 1)[-1],
        reason=headers.get(REASON, ""),
        subject=headers.get(SUBJECT, ""),
        stream=headers.get(STREAM, ""),
        sequence=int(headers.get(SEQUENCE, "0")),
        deliveries=int(headers.get(DELIVERIES, "0")),
        failed_at=float(headers.get(FAILED_AT, "0")),
        data=raw.data,
    )
