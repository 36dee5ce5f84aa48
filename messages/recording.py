"""What the learner keeps of every batch it trains on, so that a version can be made again bit for bit.

A batch is durable before the manifest that names it: one blob in the record stream, under the version it makes and its digest, a
frame per group (`pack_batch`). The manifest says which digest counts, so what a learner recorded and never published is ignored.
Beside it lies, once the version is the head, a `RecordedVersion`: what of its manifest must outlive collection. The stream drops its oldest batches when it is full: recording never stops a run.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Final, Self

from pydantic import Field, model_validator

from driftline.messages.blobs import BlobRef, Chunks, get_blob, put_blob
from driftline.messages.bus import Bus
from driftline.messages.codec import decode, encode
from driftline.messages.errors import IntegrityError, MalformedMessage
from driftline.messages.registry import register
from driftline.messages.subjects import Subjects
from driftline.messages.types import Graded, Group, Message

__all__ = [
    "RecordedGroup",
    "RecordedVersion",
    "load_batch",
    "load_version",
    "pack_batch",
    "record_space",
    "store_batch",
    "store_version",
    "unpack_batch",
]

_LENGTH: Final = struct.Struct("<Q")


@register
class RecordedGroup(Message):
    """A group as it was trained on to make `version`: its usable members in order, and the members left out."""

    schema_name: ClassVar[str] = "recorded_group"

    version: int = Field(ge=1)
    group: Group
    members: tuple[Graded, ...] = Field(min_length=1)
    excluded: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _members_are_its_own(self) -> Self:
        numbers = [member.trajectory.member for member in self.members]
        if any(member.trajectory.group != self.group.group for member in self.members) or numbers != sorted(set(numbers)):
            raise ValueError(f"members: must be different members of {self.group.group}, in order")
        return self


@register
class RecordedVersion(Message):
    """What a version was made of and what came out: `digest` of the policy, `seal` of its manifest, the batch's blob (version 0
    has none) and the ids of the trajectories in it."""

    schema_name: ClassVar[str] = "recorded_version"

    version: int = Field(ge=0)
    digest: str
    seal: str
    learner_step: int
    consumed: tuple[str, ...] = ()
    batch_digest: str = ""
    batch_size: int = 0
    batch_chunks: int = 0
    numerics: dict[str, Any] = Field(default_factory=dict)
    at: float = 0.0

    @property
    def batch(self) -> BlobRef | None:
        return BlobRef(self.batch_digest, self.batch_size, self.batch_chunks) if self.batch_digest else None


def pack_batch(groups: Iterable[RecordedGroup]) -> bytes:
    """u64 length and frame, per group in order of id. Equal batches have equal bytes."""
    parts = []
    for group in groups:
        frame = encode(group)
        parts += [_LENGTH.pack(len(frame)), frame]
    return b"".join(parts)


def unpack_batch(data: bytes) -> tuple[RecordedGroup, ...]:
    """Raises MalformedMessage for anything `pack_batch` does not write."""
    groups = tuple(_frames(data))
    names = [entry.group.group for entry in groups]
    if not groups or names != sorted(set(names)) or len({entry.version for entry in groups}) != 1:
        raise MalformedMessage("not the groups of one batch in order of id", field="record", value=names[:4])
    return groups


def _frames(data: bytes) -> Iterator[RecordedGroup]:
    at = 0
    while at < len(data):
        if at + _LENGTH.size > len(data):
            raise MalformedMessage("ends inside a length", field="record", value=at)
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if length > len(data) - at:
            raise MalformedMessage(f"{len(data) - at} bytes are left", field="record length", value=length)
        message = decode(data[at : at + length])
        if not isinstance(message, RecordedGroup):
            raise MalformedMessage("not a recorded group", field="record", value=type(message).__name__)
        at += length
        yield message


def record_space(version: int) -> str:
    return f"record.{version}"


async def store_batch(bus: Chunks, run: str, groups: Iterable[RecordedGroup], version: int) -> BlobRef:
    """Durable on return; storing the same batch again changes nothing."""
    data = await asyncio.to_thread(pack_batch, tuple(groups))  # megabytes to compress
    return await put_blob(bus, run, data, space=record_space(version))


async def load_batch(bus: Chunks, run: str, version: int, ref: BlobRef) -> tuple[RecordedGroup, ...]:
    """The batch a manifest names. Raises IntegrityError when the stream has dropped it or holds something else."""
    data = await get_blob(bus, run, ref, space=record_space(version))
    groups = await asyncio.to_thread(unpack_batch, data)
    if groups[0].version != version or any(group.run != run for group in groups):
        raise IntegrityError("not the batch of this version", field="record", value=version)
    return groups


async def store_version(bus: Bus, version: RecordedVersion) -> None:
    """After the head moved to it. Safe to repeat."""
    subject = Subjects(version.run).recorded(version.version)
    await bus.publish(subject, version, id=f"{version.run}/record/{version.version}/{version.seal}")


async def load_version(bus: Bus, run: str, version: int) -> RecordedVersion | None:
    """None when it was never made, or the stream has dropped it."""
    subjects = Subjects(run)
    stored = await bus.last(subjects.stream("RECORD"), subjects.recorded(version))
    return stored.message if stored is not None and isinstance(stored.message, RecordedVersion) else None
