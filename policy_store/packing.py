"""Packing: the encoded shards of one version, many to a blob, and back.

A pack opens with the version it belongs to, so no two versions ever share a blob: collecting one cannot take bytes from another,
and a pack put in another's place is refused. At most `PUTS_IN_FLIGHT` packs and one batch of shards are in memory while encoding.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from driftline.messages.errors import IntegrityError
from driftline.policy_store.blobs import BlobStore
from driftline.policy_store.codec import Codec, EncodedShard, encode_delta, encode_full
from driftline.policy_store.manifest import Encoding, Pack
from driftline.policy_store.tensor import (
    Bytes1D,
    HostTensor,
    Shard,
    State,
    shard_digest,
    shard_digests,
    shards_of,
)
from driftline.policy_store.workers import Workers

__all__ = ["PACK_BYTES", "EncodedState", "PackHead", "batches", "encode_state"]

PACK_BYTES = 4 * 1024 * 1024
"""A pack is closed at this size: eight chunks of the blob stream, and a retry costs a few milliseconds."""

BATCH_BYTES = 64 * 1024 * 1024
"""Raw weights encoded per round of the workers; bounds what is encoded but not yet packed."""

PUTS_IN_FLIGHT = 2

_HEAD = struct.Struct("<4sBxxxQI")
_MAGIC = b"DLP1"


class PackHead(NamedTuple):
    """The first bytes of a pack."""

    full: bool
    version: int
    number: int

    def encode(self) -> bytes:
        return _HEAD.pack(_MAGIC, self.full, self.version, self.number)

    def check(self, data: bytes) -> None:
        if data[: _HEAD.size] != self.encode():
            raise IntegrityError(f"not the {'full' if self.full else 'delta'} pack {self.number} of version {self.version}", field="pack",
                                 value=data[: _HEAD.size])


@dataclass(frozen=True)
class Job:
    """A shard to encode, in a worker thread."""

    shard: Shard
    base: Bytes1D | None
    base_digest: bytes | None
    new: Bytes1D
    width: int

    def encode(self) -> tuple[EncodedShard, bytes]:
        digest = shard_digest(self.new)
        if self.base is None:
            return encode_full(self.new, self.width), digest
        if self.base_digest is not None and shard_digest(self.base) != self.base_digest:
            # A delta against a damaged base is one that every reader refuses.
            raise IntegrityError("the writer's base is not what it published", field=self.shard.name,
                                 value=self.shard.number, remedy="resume() reads it again")
        return encode_delta(self.base, self.new, self.width), digest


@dataclass
class _Packer:
    blobs: BlobStore
    head: PackHead
    packs: list[Pack | None] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)
    size: int = 0

    def place(self, payload: bytes) -> tuple[int, int]:
        """(pack, offset) of a payload added to the open pack."""
        if not self.parts:
            self.parts = [self.head._replace(number=len(self.packs)).encode()]
            self.size = _HEAD.size
            self.packs.append(None)
        at = (len(self.packs) - 1, self.size)
        self.parts.append(payload)
        self.size += len(payload)
        return at

    def close(self) -> tuple[int, bytes]:
        data = b"".join(self.parts)
        self.parts, self.size = [], 0
        return len(self.packs) - 1, data


class EncodedState(NamedTuple):
    encoding: Encoding
    shard_digests: bytes


async def encode_state(
    state: State,
    version: int,
    blobs: BlobStore,
    workers: Workers,
    *,
    base: State | None = None,
    base_digests: bytes | None = None,
) -> EncodedState:
    """Encode `state`, against `base` where it has the same tensor, and put the packs; they are durable on return."""
    packer = _Packer(blobs, PackHead(base is None, version, 0))
    slots = asyncio.Semaphore(PUTS_IN_FLIGHT)
    rows: list[tuple[Codec, int, int, int]] = []
    digests: list[bytes] = []
    changed = 0

    async def put(index: int, data: bytes) -> None:
        try:
            ref = await blobs.put(data)
            packer.packs[index] = Pack(digest=ref.digest, size=ref.size, chunks=ref.chunks)
        finally:
            slots.release()

    try:
        async with asyncio.TaskGroup() as puts:

            async def close() -> None:
                index, data = packer.close()
                await slots.acquire()
                puts.create_task(put(index, data))

            for batch in batches(_jobs(state, base, base_digests), BATCH_BYTES):
                for encoded, digest in await workers.map(Job.encode, batch):
                    digests.append(digest)
                    changed += encoded.changed
                    if encoded.codec is Codec.UNCHANGED:
                        rows.append((encoded.codec, -1, 0, 0))
                        continue
                    pack, offset = packer.place(encoded.payload)
                    rows.append((encoded.codec, pack, offset, len(encoded.payload)))
                    if packer.size >= PACK_BYTES:
                        await close()
            if packer.parts:
                await close()
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    encoding = Encoding(
        packs=tuple(pack for pack in packer.packs if pack is not None),
        codec=np.asarray([row[0] for row in rows], np.uint8),
        pack=np.asarray([row[1] for row in rows], np.int32),
        offset=np.asarray([row[2] for row in rows], np.int64),
        length=np.asarray([row[3] for row in rows], np.int64),
        changed=changed,
    )
    return EncodedState(encoding, b"".join(digests))


def batches(jobs: Iterable[Job], limit: int) -> Iterator[list[Job]]:
    """Consecutive jobs of about `limit` raw bytes together."""
    batch: list[Job] = []
    size = 0
    for job in jobs:
        batch.append(job)
        size += job.new.size
        if size >= limit:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _jobs(state: State, base: State | None, base_digests: bytes | None) -> Iterator[Job]:
    before: dict[tuple[str, int], bytes] = {}
    if base is not None and base_digests is not None:
        before = shard_digests({name: base[name].layout for name in base}, base_digests)
    for shard in shards_of((name, state[name].layout) for name in sorted(state)):
        tensor = state[shard.name]
        old = _comparable(base, shard.name, tensor)
        yield Job(
            shard,
            None if old is None else old.data[shard.start : shard.stop],
            None if old is None else before.get((shard.name, shard.start)),
            tensor.data[shard.start : shard.stop],
            tensor.width,
        )


def _comparable(base: State | None, name: str, tensor: HostTensor) -> HostTensor | None:
    """The base's tensor when a delta against it means something."""
    old = base.get(name) if base is not None else None
    return old if old is not None and old.layout == tensor.layout else None
