"""Blob stores: immutable bytes under the digest of their content.

A `put` that returned is durable; the same bytes put twice are stored once; `get` returns exactly the bytes that were put or raises
IntegrityError naming the digest, never something else. Every call ends within a deadline (`deadlines`). Four of them: JetStream
chunks (the default: no other system to run), a directory (a shared file system), S3 (`s3`), and memory (tests). `location` opens
the one a run uses.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import stat
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import xxhash

from driftline.messages.blobs import (
    CHUNK_BYTES,
    POLICY_SPACE,
    BlobRef,
    delete_blob,
    get_blob,
    has_blob,
    put_blob,
    stored_chunks,
)
from driftline.messages.bus import Bus
from driftline.messages.errors import (
    BrokerDenied,
    BrokerFull,
    DriftlineError,
    IntegrityError,
    StoreUnavailable,
)
from driftline.messages.subjects import Subjects
from driftline.policy_store.deadlines import DEADLINE_S, patiently, within

__all__ = [
    "BlobRef", "BlobStore", "DirectoryBlobs", "JetStreamBlobs", "MemoryBlobs", "StoredBlob", "checked_digest", "missing",
    "sync_directory", "verified", "write_whole",
]  # fmt: skip

STALE_S = 3600.0
"""A `.partial` file this old is of a process that died: none takes an hour over one blob."""

_DIGEST = re.compile(r"[0-9a-f]{32}")
_FOLDER = re.compile(r"[0-9a-f]{2}")
_PARTIAL = re.compile(r"[0-9a-f]{32}.*\.partial")

T = TypeVar("T")


class StoredBlob(NamedTuple):
    """What `list` found: `size` in bytes (in JetStream rounded up to whole chunks), `stored_at` in seconds of the store's clock
    since 1970, None where the store does not say."""

    digest: str
    size: int
    stored_at: float | None

    @property
    def ref(self) -> BlobRef:
        """For `delete`, which looks at the digest alone."""
        return BlobRef(self.digest, self.size, -(-self.size // CHUNK_BYTES))


@runtime_checkable
class BlobStore(Protocol):
    async def put(self, data: bytes) -> BlobRef:
        """Store durably; the reference is what `get` needs. Of what is stored already nothing is sent again.

        Raises StoreUnavailable or BrokerUnavailable after the deadline, BrokerFull when there is no room, BrokerDenied when the
        credentials are refused, ConfigError when there is no such store.
        """
        ...

    async def get(self, ref: BlobRef) -> bytes:
        """The bytes, verified. IntegrityError when they are missing, cut off or different; else as `put`."""
        ...

    async def has(self, ref: BlobRef) -> bool: ...
    async def delete(self, ref: BlobRef) -> None:
        """Forget the bytes; deleting what is not there is not an error."""

    def list(self) -> AsyncIterator[StoredBlob]:
        """Every blob of the run, in no order; what is stored or deleted meanwhile may be missed. Blobs cut off by a crash are
        listed too, where they can be seen."""
        ...


def checked_digest(digest: str) -> str:
    """A digest comes off the wire and becomes a name: IntegrityError unless it is one."""
    if not _DIGEST.fullmatch(digest):
        raise IntegrityError("not a digest", field="blob", value=digest, remedy="the manifest is damaged, or not ours")
    return digest


def verified(data: bytes, ref: BlobRef, store: str) -> bytes:
    """`data` if it is what `ref` names."""
    if len(data) != ref.size:
        raise IntegrityError(f"{len(data)} bytes instead of {ref.size} in {store}", field="blob", value=ref.digest,
                             remedy="the store is damaged; another path or copy is needed")
    found = xxhash.xxh3_128_hexdigest(data)
    if found != ref.digest:
        raise IntegrityError(f"its content in {store} has digest {found}", field="blob", value=ref.digest,
                             remedy="the store is damaged; another path or copy is needed")
    return data


def missing(ref: BlobRef, store: str) -> IntegrityError:
    return IntegrityError(f"not in {store}", field="blob", value=ref.digest, remedy="collected, or never stored")


class MemoryBlobs:
    """A store in a dict; `blobs` is open for tests to damage."""

    name = "memory"

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self._stored_at: dict[str, float] = {}

    async def put(self, data: bytes) -> BlobRef:
        ref = BlobRef(digest=xxhash.xxh3_128_hexdigest(data), size=len(data), chunks=1)
        self.blobs[ref.digest] = bytes(data)
        self._stored_at[ref.digest] = time.time()
        return ref

    async def get(self, ref: BlobRef) -> bytes:
        if ref.digest not in self.blobs:
            raise missing(ref, self.name)
        return verified(self.blobs[ref.digest], ref, self.name)

    async def has(self, ref: BlobRef) -> bool:
        return ref.digest in self.blobs

    async def delete(self, ref: BlobRef) -> None:
        self.blobs.pop(ref.digest, None)
        self._stored_at.pop(ref.digest, None)

    async def list(self) -> AsyncIterator[StoredBlob]:
        for digest, data in tuple(self.blobs.items()):
            yield StoredBlob(digest, len(data), self._stored_at.get(digest))


class DirectoryBlobs:
    """Files under `<root>/<first two hex digits>/<digest>`.

    A file appears under its name whole and synced, or not at all: it is written beside its place, synced, renamed, and the
    directory synced. A crash leaves at most a `.partial` file, which nothing reads and `list` clears away after an hour.
    """

    def __init__(self, root: Path, *, deadline_s: float = DEADLINE_S) -> None:
        self.root, self.name = root, f"file:{root}"
        self._deadline_s = deadline_s

    def path(self, digest: str) -> Path:
        return self.root / checked_digest(digest)[:2] / digest

    async def put(self, data: bytes) -> BlobRef:
        ref = BlobRef(digest=xxhash.xxh3_128_hexdigest(data), size=len(data), chunks=1)
        path = self.path(ref.digest)
        await self._threaded(lambda: self._write(path, data), ref.digest)
        return ref

    async def get(self, ref: BlobRef) -> bytes:
        path = self.path(ref.digest)
        data = await self._threaded(lambda: _content(path), ref.digest)
        if data is None:
            raise missing(ref, self.name)
        return verified(data, ref, self.name)

    async def has(self, ref: BlobRef) -> bool:
        return await self._threaded(self.path(ref.digest).is_file, ref.digest)

    async def delete(self, ref: BlobRef) -> None:
        path = self.path(ref.digest)
        await self._threaded(lambda: path.unlink(missing_ok=True), ref.digest)

    async def list(self) -> AsyncIterator[StoredBlob]:
        for folder in await self._threaded(lambda: _folders(self.root), ""):
            for blob in await self._threaded(lambda folder=folder: tuple(_swept(folder)), ""):  # type: ignore[misc]
                yield blob

    async def _threaded(self, work: Callable[[], T], blob: str) -> T:
        async def attempt() -> T:
            try:
                return await asyncio.to_thread(work)
            except OSError as error:
                raise _refusal(error, self.name, blob) from error

        return await patiently(attempt, store=self.name, blob=blob, deadline_s=self._deadline_s)

    def _write(self, path: Path, data: bytes) -> None:
        # Compared by content, because one that is there may be damaged: reading it is cheaper than writing and syncing it.
        if _size(path) == len(data) and _content(path) == data:
            sync_directory(path.parent)  # its writer may have died between the renaming and the syncing
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)


def _size(path: Path) -> int | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _content(path: Path) -> bytes | None:
    """None when there is no such file."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _folders(root: Path) -> tuple[Path, ...]:
    try:
        with os.scandir(root) as entries:
            return tuple(Path(e.path) for e in entries if _FOLDER.fullmatch(e.name) and e.is_dir(follow_symlinks=False))
    except FileNotFoundError:  # nothing was put yet
        return ()


def _swept(folder: Path) -> Iterator[StoredBlob]:
    """The blobs of one folder; what a crash left there is removed. Touches no file that is not of this store's making."""
    oldest = time.time() - STALE_S
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # deleted meanwhile
                continue
            if not stat.S_ISREG(found.st_mode) or not entry.name.startswith(folder.name):
                continue
            if _DIGEST.fullmatch(entry.name):
                yield StoredBlob(entry.name, found.st_size, found.st_mtime)
            elif _PARTIAL.fullmatch(entry.name) and found.st_mtime < oldest:
                with suppress(OSError):  # gone meanwhile, or this user may only read
                    Path(entry.path).unlink()


_TRANSIENT = {errno.EAGAIN, errno.EINTR, errno.EIO, errno.EBUSY, errno.ESTALE, errno.ETIMEDOUT, errno.ENETDOWN, errno.EHOSTDOWN}
"""What a file server says while it restarts or fails over."""

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}


def _refusal(error: OSError, store: str, blob: str) -> Exception:
    """The file system's error as ours, with what to do; one without a number is none of its."""
    problem = f"{error.strerror} in {store}"
    if error.errno is None:
        return error
    if error.errno in _TRANSIENT:
        return StoreUnavailable(problem, field="blob", value=blob, remedy="is the file server up?")
    if error.errno in _NO_ROOM:
        return BrokerFull(problem, field="blob", value=blob, remedy="free room there, or keep fewer versions")
    if error.errno in _DENIED:
        return BrokerDenied(problem, field="blob", value=blob, remedy="let this user read and write there")
    return DriftlineError(problem, field="blob", value=blob, remedy="policy.store must name a folder")


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
    """Chunks in the run's blob stream. The bus tries again by itself; the deadline is over all chunks of a blob."""

    def __init__(self, bus: Bus, run: str, *, deadline_s: float = DEADLINE_S) -> None:
        self._bus, self._run, self._deadline_s = bus, run, deadline_s
        self._subjects = Subjects(run)
        self.name = self._subjects.stream("BLOB")

    async def put(self, data: bytes) -> BlobRef:
        digest = xxhash.xxh3_128_hexdigest(data)
        async with within(self._deadline_s, store=self.name, blob=digest):
            skip = await stored_chunks(self._bus, self._run, digest)
            return await put_blob(self._bus, self._run, data, digest=digest, skip=skip)

    async def get(self, ref: BlobRef) -> bytes:
        async with within(self._deadline_s, store=self.name, blob=ref.digest):
            return await get_blob(self._bus, self._run, ref)  # which verifies the digest

    async def has(self, ref: BlobRef) -> bool:
        async with within(self._deadline_s, store=self.name, blob=ref.digest):
            return await has_blob(self._bus, self._run, ref)

    async def delete(self, ref: BlobRef) -> None:
        async with within(self._deadline_s, store=self.name, blob=ref.digest):
            await delete_blob(self._bus, self._run, ref)

    async def list(self) -> AsyncIterator[StoredBlob]:
        async with within(self._deadline_s, store=self.name, blob=""):
            found = await self._bus.subjects(self.name, self._subjects.chunk(POLICY_SPACE, "*", "*"))
        chunks = Counter(subject.split(".")[-2] for subject in found)
        for digest, count in chunks.items():
            yield StoredBlob(digest, count * CHUNK_BYTES, None)
