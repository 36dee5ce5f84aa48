"""Blob stores: what was put comes back, damage is named, and a crash leaves no half blob."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from driftline.messages.errors import IntegrityError
from driftline.policy_store import BlobRef, BlobStore, DirectoryBlobs, MemoryBlobs


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
