"""Blobs: bytes too large for a message, content-addressed, in chunks that each are durable before `put_blob` returns.

The digest is xxh3-128 of the whole and is checked on every read: a reader gets exactly the bytes that were put, or
IntegrityError. A blob is immutable, so putting it twice is one blob, and a reader never races a writer. At most `WINDOW`
chunks are in flight. A message whose frame is above `CLAIM_ABOVE` travels as a `Claim` on such a blob (the claim check).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Container, Mapping
from typing import ClassVar, Final, NamedTuple, Protocol

import xxhash
from pydantic import Field

from driftline.messages.bus import PubAck
from driftline.messages.errors import IntegrityError, PayloadTooLarge
from driftline.messages.registry import register
from driftline.messages.subjects import Subjects
from driftline.messages.types import Message

__all__ = [
    "CHUNK_BYTES",
    "CLAIM_ABOVE",
    "CLAIM_SPACE",
    "POLICY_SPACE",
    "BlobRef",
    "Chunks",
    "Claim",
    "Listed",
    "blob_digest",
    "delete_blob",
    "get_blob",
    "has_blob",
    "put_blob",
    "stored_chunks",
]

KIB: Final = 1024
CHUNK_BYTES: Final = 512 * KIB
CLAIM_ABOVE: Final = 512 * KIB
WINDOW: Final = 16  # 8 MiB in flight: throughput is flat from here on, and the server's ingest queue stays far from its limit
MAX_BLOB_BYTES: Final = 64 * 1024 * 1024 * KIB
# Apart, so that who may send a large message may not touch the bytes of a policy.
POLICY_SPACE: Final = "blob"
CLAIM_SPACE: Final = "claim"


class Chunks(Protocol):
    """The part of a Bus that blobs need."""

    async def publish_bytes(self, subject: str, data: bytes, *, id: str) -> PubAck: ...
    async def get_bytes(self, stream: str, subject: str) -> bytes | None: ...
    async def purge(self, stream: str, subject: str) -> None: ...


class Listed(Chunks, Protocol):
    """The part of a Bus that says which chunks are stored without reading them."""

    async def subjects(self, stream: str, filter: str) -> Mapping[str, int]: ...


class BlobRef(NamedTuple):
    """What a manifest or a claim holds: xxh3-128 hex of the whole, its size, and the number of chunks."""

    digest: str
    size: int
    chunks: int


@register
class Claim(Message):
    """Stands for a message whose frame is in the blob stream."""

    schema_name: ClassVar[str] = "claim"

    schema_of: str
    digest: str = Field(pattern=r"^[0-9a-f]{32}$")
    size: int = Field(ge=0)
    chunks: int = Field(ge=0)

    @property
    def ref(self) -> BlobRef:
        return BlobRef(self.digest, self.size, self.chunks)


def blob_digest(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


async def put_blob(
    bus: Chunks, run: str, data: bytes | memoryview, *, digest: str | None = None, space: str = POLICY_SPACE,
    skip: Container[int] = (),
) -> BlobRef:
    """Store `data` in the run's stream for `space`; returns when every chunk is durable.

    `digest`: of `data`, if already known. `skip`: chunks that are stored (`stored_chunks`) and are not sent again.
    """
    view = memoryview(data).cast("B")
    if len(view) > MAX_BLOB_BYTES:
        raise PayloadTooLarge(f"the limit is {MAX_BLOB_BYTES} bytes", field="blob", value=len(view))
    ref = BlobRef(digest or blob_digest(view), len(view), -(-len(view) // CHUNK_BYTES))
    names, window = Subjects(run), asyncio.Semaphore(WINDOW)

    async def put(index: int) -> None:
        try:
            if index in skip:
                return
            await _put_chunk(bus, names, space, ref, index, bytes(view[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]))
        finally:
            window.release()

    await _windowed(window, put, ref.chunks)
    return ref


async def get_blob(bus: Chunks, run: str, ref: BlobRef, *, space: str = POLICY_SPACE) -> bytes:
    """The blob's bytes. Raises IntegrityError if a chunk is missing or the digest does not match."""
    if not 0 <= ref.size <= MAX_BLOB_BYTES or ref.chunks != -(-ref.size // CHUNK_BYTES):
        raise IntegrityError("its size and chunks disagree", field="blob", value=ref)
    parts: list[bytes] = [b""] * ref.chunks
    names, window = Subjects(run), asyncio.Semaphore(WINDOW)

    async def get(index: int) -> None:
        try:
            chunk = await bus.get_bytes(_stream(names, space), names.chunk(space, ref.digest, index))
            want = min(CHUNK_BYTES, ref.size - index * CHUNK_BYTES)
            if chunk is None or len(chunk) != want:
                found = "missing" if chunk is None else f"{len(chunk)} bytes, not {want}"
                raise IntegrityError(f"chunk {index} of {ref.chunks} is {found} in {_stream(names, space)}", field="blob", value=ref.digest,
                                     remedy="collected, or never stored whole")
            parts[index] = chunk
        finally:
            window.release()

    await _windowed(window, get, ref.chunks)
    whole = b"".join(parts)
    if blob_digest(whole) != ref.digest:
        raise IntegrityError("its bytes have another digest", field="blob", value=ref.digest, remedy="publish it again")
    return whole


async def stored_chunks(bus: Listed, run: str, digest: str, *, space: str = POLICY_SPACE) -> frozenset[int]:
    """The numbers of a blob's chunks that are stored: one question, and no bytes."""
    names = Subjects(run)
    found = await bus.subjects(_stream(names, space), names.chunk(space, digest, "*"))
    return frozenset(int(subject.rpartition(".")[2]) for subject in found)


async def has_blob(bus: Listed, run: str, ref: BlobRef, *, space: str = POLICY_SPACE) -> bool:
    """Whether every chunk is stored: a writer that died may have left any subset of them."""
    stored = await stored_chunks(bus, run, ref.digest, space=space)
    return all(index in stored for index in range(ref.chunks))  # ends at the first that is missing: the count comes off the wire


async def delete_blob(bus: Chunks, run: str, ref: BlobRef, *, space: str = POLICY_SPACE) -> None:
    names = Subjects(run)
    await bus.purge(_stream(names, space), names.chunk(space, ref.digest, "*"))


def _stream(names: Subjects, space: str) -> str:
    return names.stream(space.partition(".")[0].upper())


async def _put_chunk(bus: Chunks, names: Subjects, space: str, ref: BlobRef, index: int, chunk: bytes) -> None:
    subject, id = names.chunk(space, ref.digest, index), f"{names.run}/{space}/{ref.digest}/{index}"
    ack = await bus.publish_bytes(subject, chunk, id=id)
    if ack.duplicate and await bus.get_bytes(_stream(names, space), subject) is None:
        # Deleted and put again within the duplicate window: the broker remembers the id, but not the bytes.
        await bus.publish_bytes(subject, chunk, id=f"{id}/{uuid.uuid4().hex}")


class _Work(Protocol):
    async def __call__(self, index: int) -> None: ...


async def _windowed(window: asyncio.Semaphore, work: _Work, count: int) -> None:
    """Run `work(i)` for every i, as many at a time as the window lets; the first failure cancels the rest and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for index in range(count):
                await window.acquire()
                group.create_task(work(index))
    except ExceptionGroup as failures:
        raise _first(failures) from None


def _first(failure: Exception) -> Exception:
    while isinstance(failure, ExceptionGroup):
        failure = failure.exceptions[0]
    return failure
