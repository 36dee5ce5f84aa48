"""Blob stores: what was put comes back, damage is named, and a crash leaves no half blob."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from driftline.messages.blobs import CHUNK_BYTES
from driftline.messages.bus import Bus, PubAck
from driftline.messages.errors import (
    BrokerDenied,
    BrokerFull,
    BrokerUnavailable,
    DriftlineError,
    IntegrityError,
    StoreUnavailable,
)
from driftline.messages.memory import MemoryBus
from driftline.messages.subjects import Subjects, topology
from driftline.policy_store import BlobRef, BlobStore, DirectoryBlobs, JetStreamBlobs, MemoryBlobs, StoredBlob


@pytest.mark.parametrize("size", [0, 1, 512 * 1024, 512 * 1024 + 1, 3_000_000])
async def test_what_was_put_comes_back(blobs: BlobStore, size: int) -> None:
    data = os.urandom(size)
    ref = await blobs.put(data)
    assert await blobs.put(data) == ref
    assert ref.size == size
    assert await blobs.get(ref) == data
    assert await blobs.has(ref)


async def test_a_deleted_blob_is_missing_and_may_come_back(blobs: BlobStore) -> None:
    data = os.urandom(1_000_000)
    ref = await blobs.put(data)
    await blobs.delete(ref)
    await blobs.delete(ref)
    assert not await blobs.has(ref)
    with pytest.raises(IntegrityError, match=ref.digest):
        await blobs.get(ref)
    assert await blobs.put(data) == ref
    assert await blobs.get(ref) == data


async def test_a_blob_never_stored_is_named(blobs: BlobStore) -> None:
    ref = BlobRef("0123456789abcdef" * 2, 10, 1)
    with pytest.raises(IntegrityError, match=ref.digest):
        await blobs.get(ref)


@pytest.mark.parametrize("damage", ["flip", "cut", "grow"])
@pytest.mark.parametrize("kind", ["directory", "memory"])
async def test_damage_in_the_store_is_found(tmp_path: Path, kind: str, damage: str) -> None:
    data = os.urandom(1000)
    store: DirectoryBlobs | MemoryBlobs = DirectoryBlobs(tmp_path) if kind == "directory" else MemoryBlobs()
    ref = await store.put(data)
    wrong = {"flip": bytes([data[0] ^ 1]) + data[1:], "cut": data[:-1], "grow": data + b"x"}[damage]
    if isinstance(store, DirectoryBlobs):
        store.path(ref.digest).write_bytes(wrong)
    else:
        store.blobs[ref.digest] = wrong
    with pytest.raises(IntegrityError, match=ref.digest):
        await store.get(ref)
    await store.put(data)
    assert await store.get(ref) == data, "putting it again repairs it"


@pytest.mark.parametrize("step", ["fsync", "replace"])
async def test_a_crash_while_writing_a_file_leaves_no_blob_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """L6 (docs/field_failures.md)."""
    store = DirectoryBlobs(tmp_path)

    def crash(*_: object) -> None:
        raise OSError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, crash)
        with pytest.raises(OSError, match="power cut"):
            await store.put(b"x" * 1000)
    assert not [name for _, _, names in os.walk(tmp_path) for name in names]
    ref = await store.put(b"x" * 1000)
    assert await store.get(ref) == b"x" * 1000


async def test_the_bytes_are_synced_before_the_name_and_the_directory_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L6 (docs/field_failures.md)."""
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (steps.append("fsync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda a, b: (steps.append("replace"), replace(a, b)))
    await DirectoryBlobs(tmp_path).put(b"x")
    assert steps == ["fsync", "replace", "fsync"]


async def test_a_partial_file_of_a_crash_is_never_read(tmp_path: Path) -> None:
    store = DirectoryBlobs(tmp_path)
    ref = await store.put(b"whole")
    path = store.path(ref.digest)
    path.rename(path.with_name(path.name + "abc.partial"))
    assert not await store.has(ref)
    with pytest.raises(IntegrityError):
        await store.get(ref)


@pytest.mark.parametrize("digest", ["../../../etc/passwd", "", "0" * 31, "0" * 32 + "\n", "G" * 32])
async def test_a_digest_that_is_no_digest_never_becomes_a_path(tmp_path: Path, digest: str) -> None:
    with pytest.raises(IntegrityError, match="not a digest"):
        await DirectoryBlobs(tmp_path).get(BlobRef(digest, 1, 1))


async def stored_in(blobs: BlobStore) -> dict[str, StoredBlob]:
    found = [blob async for blob in blobs.list()]
    assert len({blob.digest for blob in found}) == len(found)
    return {blob.digest: blob for blob in found}


async def test_what_is_stored_is_listed_with_its_size_and_what_was_deleted_is_not(blobs: BlobStore) -> None:
    before = time.time()
    assert await stored_in(blobs) == {}
    kept, gone, large = [await blobs.put(os.urandom(size)) for size in (10, 20, CHUNK_BYTES + 1)]
    await blobs.delete(gone)
    found = await stored_in(blobs)
    assert set(found) == {kept.digest, large.digest}
    if isinstance(blobs, JetStreamBlobs):  # which knows whole chunks, and no times
        assert {found[ref.digest].size for ref in (kept,)} == {CHUNK_BYTES}
        assert found[large.digest] == StoredBlob(large.digest, 2 * CHUNK_BYTES, None)
    else:
        assert [found[ref.digest].size for ref in (kept, large)] == [10, CHUNK_BYTES + 1]
        stored_at = found[kept.digest].stored_at
        assert stored_at is not None
        assert before - 2 <= stored_at <= time.time() + 2  # S3 says whole seconds
    for blob in found.values():
        await blobs.delete(blob.ref)
    assert await stored_in(blobs) == {}


async def test_a_blob_cut_off_by_a_crash_is_listed_too(bus: Bus, fresh_run: str) -> None:
    blobs = JetStreamBlobs(bus, fresh_run)
    ref = await blobs.put(os.urandom(3 * CHUNK_BYTES))
    await bus.purge(Subjects(fresh_run).stream("BLOB"), Subjects(fresh_run).chunk("blob", ref.digest, 0))
    assert await stored_in(blobs) == {ref.digest: StoredBlob(ref.digest, 2 * CHUNK_BYTES, None)}
    await blobs.delete((await stored_in(blobs))[ref.digest].ref)
    assert await stored_in(blobs) == {}


class Counting(MemoryBus):
    """A bus that counts the chunks it stored, and goes away after `room` of them."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.stored, self.room = 0, room

    async def publish_bytes(self, subject: str, data: bytes, *, id: str) -> PubAck:
        if self.stored == self.room:
            raise BrokerUnavailable("gone", field="subject", value=subject)
        self.stored += 1
        return await super().publish_bytes(subject, data, id=id)


async def test_an_upload_to_jetstream_that_was_cut_off_goes_on_where_it_was(fresh_run: str) -> None:
    async with Counting(room=3) as bus:
        await bus.declare(topology(fresh_run))
        blobs, data = JetStreamBlobs(bus, fresh_run), os.urandom(5 * CHUNK_BYTES)
        with pytest.raises(BrokerUnavailable, match="gone"):
            await blobs.put(data)
        there = len(await bus.subjects(Subjects(fresh_run).stream("BLOB"), ">"))
        assert 0 < there <= 3
        bus.stored, bus.room = 0, 100
        ref = await blobs.put(data)
        assert bus.stored == 5 - there
        assert await blobs.put(data) == ref
        assert bus.stored == 5 - there, "what is whole is not sent again"
        assert await blobs.get(ref) == data


async def test_a_file_that_is_there_and_right_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DirectoryBlobs(tmp_path)
    ref = await store.put(b"x" * 1000)
    before = store.path(ref.digest).stat()
    synced: list[Path] = []
    monkeypatch.setattr("driftline.policy_store.blobs.sync_directory", synced.append)
    await store.put(b"x" * 1000)
    after = store.path(ref.digest).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert synced == [store.path(ref.digest).parent], "its writer may have died between the renaming and the syncing"


async def test_listing_clears_what_a_crash_left_an_hour_ago_and_nothing_else(tmp_path: Path) -> None:
    store = DirectoryBlobs(tmp_path / "store")
    ref = await store.put(b"whole")
    folder = store.path(ref.digest).parent
    old = folder / f"{ref.digest}abc.partial"
    young = folder / f"{ref.digest}def.partial"
    theirs = [folder / "notes.partial", folder / f"{'0' * 32}ghi.txt", tmp_path / "store" / f"{ref.digest}abc.partial"]
    outside = tmp_path / "outside"
    outside.mkdir()
    linked = outside / f"ab{'0' * 30}xyz.partial"
    (tmp_path / "store" / "ab").symlink_to(outside)
    for path in (old, young, linked, *theirs):
        path.write_bytes(b"half")
        if path != young:
            os.utime(path, (time.time() - 7200, time.time() - 7200))
    assert set(await stored_in(store)) == {ref.digest}
    assert not old.exists()
    assert all(path.exists() for path in (young, linked, *theirs))


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that answers once the event is set."""
    answer = threading.Event()
    monkeypatch.setattr(Path, "read_bytes", lambda path: answer.wait(60))
    yield answer
    answer.set()


async def test_a_file_system_that_does_not_answer_ends_in_an_error_that_names_store_and_blob(tmp_path: Path, slow_disk: threading.Event) -> None:
    store = DirectoryBlobs(tmp_path, deadline_s=0.1)
    ref = BlobRef("0" * 32, 5, 1)
    with pytest.raises(StoreUnavailable, match=rf"{ref.digest}.*{tmp_path}.*0\.1 s") as caught:
        await store.get(ref)
    slow_disk.set()
    assert caught.value.remedy


async def test_a_file_server_that_fails_over_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DirectoryBlobs(tmp_path)
    ref = await store.put(b"whole")
    faults = [OSError(errno.ESTALE, "Stale file handle"), OSError(errno.EIO, "Input/output error")]
    read = Path.read_bytes

    def flaky(path: Path) -> bytes:
        if faults:
            raise faults.pop()
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", flaky)
    monkeypatch.setattr("driftline.policy_store.deadlines.PAUSES_S", (0.0,))
    assert await store.get(ref) == b"whole"
    assert not faults


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, BrokerFull), (errno.EDQUOT, BrokerFull), (errno.EACCES, BrokerDenied), (errno.EROFS, BrokerDenied), (errno.ENOTDIR, DriftlineError)],
)
async def test_a_refusal_of_the_file_system_names_blob_store_and_remedy_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[DriftlineError]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(kind, match=os.strerror(number)) as caught:
        await DirectoryBlobs(tmp_path).put(b"x")
    assert caught.value.field == "blob"
    assert str(tmp_path) in caught.value.problem
    assert caught.value.remedy


async def test_a_broker_that_holds_a_blob_up_ends_in_an_error_that_names_stream_and_blob(fresh_run: str) -> None:
    class Stuck(MemoryBus):
        async def publish_bytes(self, subject: str, data: bytes, *, id: str) -> PubAck:
            await asyncio.get_running_loop().create_future()
            raise AssertionError("unreachable")

    async with Stuck() as bus:
        await bus.declare(topology(fresh_run))
        with pytest.raises(StoreUnavailable, match=f"DL-{fresh_run}-BLOB"):
            await JetStreamBlobs(bus, fresh_run, deadline_s=0.1).put(b"x")


async def test_a_file_that_is_deleted_while_it_is_looked_at_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DirectoryBlobs(tmp_path)
    ref = await store.put(b"whole")
    read = Path.read_bytes

    def deleted(path: Path) -> bytes:
        path.unlink()
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", deleted)
        await store.put(b"whole")
    assert await store.get(ref) == b"whole"


async def test_who_may_only_read_lists_past_what_a_crash_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DirectoryBlobs(tmp_path)
    ref = await store.put(b"whole")
    left = store.path(ref.digest).with_name(f"{ref.digest}abc.partial")
    left.write_bytes(b"half")
    os.utime(left, (0, 0))

    def denied(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", denied)
        assert set(await stored_in(store)) == {ref.digest}
    assert left.exists()
