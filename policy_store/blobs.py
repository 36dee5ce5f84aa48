"""Blob stores: immutable bytes under the digest of their content.

A `put` that returned is durable; the same bytes put twice are stored once; `get` returns exactly the bytes that were put or raises
IntegrityError naming the digest, never something else. Three of them: JetStream chunks (the default: no other system to run), a
directory (a shared file system), and memory (tests).
"""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
from pathlib import Path
from typing import Protocol, runtime_checkable

import xxhash

from driftline.messages.blobs import BlobRef, delete_blob, get_blob, has_blob, put_blob
from driftline.messages.bus import Bus
from driftline.messages.errors import IntegrityError

__all__ = ["BlobRef", "BlobStore", "DirectoryBlobs", "JetStreamBlobs", "MemoryBlobs", "sync_directory", "write_whole"]

_DIGEST = re.compile(r"[0-9a-f]{32}")


@runtime_checkable
class BlobStore(Protocol):
    async def put(self, data: bytes) -> BlobRef:
        """Store durably; the reference is what `get` needs."""
        ...

    async def get(self, ref: BlobRef) -> bytes:
        """The bytes, verified. IntegrityError when they are missing, cut off or different."""
        ...

    async def has(self, ref: BlobRef) -> bool: ...
    async def delete(self, ref: BlobRef) -> None:
        """Forget the bytes; deleting what is not there is not an error."""


def _verified(data: bytes, ref: BlobRef) -> bytes:
    if len(data) != ref.size:
        raise IntegrityError(f"{len(data)} bytes instead of {ref.size}", field="blob", value=ref.digest)
    found = xxhash.xxh3_128_hexdigest(data)
    if found != ref.digest:
        raise IntegrityError(f"its content has digest {found}", field="blob", value=ref.digest,
                             remedy="the store is damaged; another path or copy is needed")
    return data


def _missing(ref: BlobRef) -> IntegrityError:
    return IntegrityError("not in the store", field="blob", value=ref.digest, remedy="collected, or never stored")


class MemoryBlobs:
    """A store in a dict; `blobs` is open for tests to damage."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}

    async def put(self, data: bytes) -> BlobRef:
        ref = BlobRef(digest=xxhash.xxh3_128_hexdigest(data), size=len(data), chunks=1)
        self.blobs[ref.digest] = bytes(data)
        return ref

    async def get(self, ref: BlobRef) -> bytes:
        if ref.digest not in self.blobs:
            raise _missing(ref)
        return _verified(self.blobs[ref.digest], ref)

    async def has(self, ref: BlobRef) -> bool:
        return ref.digest in self.blobs

    async def delete(self, ref: BlobRef) -> None:
        self.blobs.pop(ref.digest, None)


class DirectoryBlobs:
    """Files under `<root>/<first two hex digits>/<digest>`.

    A file appears under its name whole and synced, or not at all: it is written beside its place, synced, renamed, and the
    directory synced. A crash leaves at most a `.partial` file, which nothing reads.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):  # a digest comes off the wire and becomes a path
            raise IntegrityError("not a digest", field="blob", value=digest)
        return self.root / digest[:2] / digest

    async def put(self, data: bytes) -> BlobRef:
        ref = BlobRef(digest=xxhash.xxh3_128_hexdigest(data), size=len(data), chunks=1)
        await asyncio.to_thread(self._write, self.path(ref.digest), data)
        return ref

    async def get(self, ref: BlobRef) -> bytes:
        try:
            data = await asyncio.to_thread(self.path(ref.digest).read_bytes)
        except FileNotFoundError as error:
            raise _missing(ref) from error
        return _verified(data, ref)

    async def has(self, ref: BlobRef) -> bool:
        return await asyncio.to_thread(self.path(ref.digest).is_file)

    async def delete(self, ref: BlobRef) -> None:
        path = self.path(ref.digest)
        await asyncio.to_thread(lambda: path.unlink(missing_ok=True))

    def _write(self, path: Path, data: bytes) -> None:
        # Written even when a file of this name is there: it may be a damaged one.
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)


def write_whole(path: Path, data: bytes) -> None:
    """The file appears with all of `data` or not at all, durable, readable by its owner alone."""
    handle, partial = tempfile.mkstemp(prefix=path.name, suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make a rename in `path` survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class JetStreamBlobs:
    """Chunks in the run's blob stream."""

    def __init__(self, bus: Bus, run: str) -> None:
        self._bus, self._run = bus, run

    async def put(self, data: bytes) -> BlobRef:
        return await put_blob(self._bus, self._run, data)

    async def get(self, ref: BlobRef) -> bytes:
        return await get_blob(self._bus, self._run, ref)  # which verifies the digest

    async def has(self, ref: BlobRef) -> bool:
        return await has_blob(self._bus, self._run, ref)

    async def delete(self, ref: BlobRef) -> None:
        await delete_blob(self._bus, self._run, ref)
