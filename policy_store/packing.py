"""Packing: shards in, packs out, in the order they came, with a bound on what is in memory between.

A pack opens with the version it belongs to, so no two versions ever share a blob: collecting one cannot take bytes from another,
and a pack put in another's place is refused. Given the same shards in the same order the packs are the same bytes, so an upload that
was cut off is repeated under the same names and only the rest is sent. In memory at most: `ROOM_BYTES` of shards waiting, as much being
encoded, and `PUTS_IN_FLIGHT` packs of each encoding on their way.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from driftline.messages.errors import IntegrityError
from driftline.policy_store.blobs import BlobStore
from driftline.policy_store.codec import encode_changes, encode_delta, encode_full
from driftline.policy_store.forms import Changes, Codec, DeltaForm, EncodedShard
from driftline.policy_store.manifest import Encoding, Pack
from driftline.policy_store.tensor import (
    DIGEST_BYTES,
    DTYPES,
    Bytes1D,
    HostTensor,
    Shard,
    State,
    shard_digest,
    shard_digests,
    shards_of,
)
from driftline.policy_store.workers import Workers

__all__ = ["PACK_BYTES", "ROOM_BYTES", "EncodedState", "Job", "PackHead", "Packer", "ShardStream", "comparable", "encode_state"]

PACK_BYTES = 4 * 1024 * 1024
"""A pack is closed at this size: eight chunks of the blob stream, and a retry costs a few milliseconds."""

ROOM_BYTES = 64 * 1024 * 1024
"""Raw weights that wait to be encoded, and again as many that are being encoded."""

PUTS_IN_FLIGHT = 4

_HEAD = struct.Struct("<4sBxHQI")
_MAGIC = b"DLP1"


class PackHead(NamedTuple):
    """The first bytes of a pack. `shortcut`: of an encoding made after the version was published; `span`: versions it spans (0: a full)."""

    full: bool
    version: int
    number: int
    shortcut: bool = False
    span: int = 0

    def encode(self) -> bytes:
        return _HEAD.pack(_MAGIC, self.full + 2 * self.shortcut, self.span, self.version, self.number)

    def check(self, data: bytes) -> None:
        if data[: _HEAD.size] != self.encode():
            kind = f"{'shortcut ' if self.shortcut else ''}{'full' if self.full else 'delta'}"
            raise IntegrityError(f"not the {kind} pack {self.number} of version {self.version}", field="pack",
                                 value=data[: _HEAD.size])


class Coded(NamedTuple):
    """A shard as a worker leaves it."""

    delta: EncodedShard | None
    full: EncodedShard | None
    digest: bytes


@dataclass(frozen=True)
class Job:
    """A shard to encode, in a worker thread.

    `new` is its bytes, or the changes to `base`. `forward`: the base becomes the new shard, once that is encoded.
    """

    shard: Shard
    dtype: str
    base: Bytes1D | None
    base_digest: bytes | None
    new: Bytes1D | Changes
    delta: bool
    full: bool
    forward: bool = False
    form: DeltaForm = DeltaForm.SMALL

    @property
    def nbytes(self) -> int:
        return self.shard.stop - self.shard.start

    def encode(self) -> Coded:
        """Raises IntegrityError, which names tensor and shard."""
        try:
            return self._encode()
        except IntegrityError as error:
            raise IntegrityError(str(error), field=f"tensor {self.shard.name}", value=f"bytes {self.shard.start}:{self.shard.stop}") from error

    def _encode(self) -> Coded:
        kind = DTYPES[self.dtype]
        if self.base_digest is not None and self.base is not None and shard_digest(self.base) != self.base_digest:
            # A delta against a damaged base is one that every reader refuses.
            raise IntegrityError("it is not what it published", field="the writer's base",
                                 value=self.shard.number, remedy="resume() reads it again")
        known = self.base if self.base_digest is not None else None
        delta: EncodedShard | None = None
        if isinstance(self.new, Changes):
            if self.base is None or known is None:
                raise IntegrityError("changes of a shard that has none", field="base", value=self.shard.number,
                                     remedy="hand in the whole shard")
            if self.delta:
                delta = encode_changes(known, self.new, kind.width, exponent=kind.exponent, form=self.form)
            self.base.view(f"<u{kind.width}")[self.new.at] ^= self.new.xor
            new = self.base
        else:
            new = self.new
            if self.delta:
                delta = (encode_full(new, kind.width) if known is None
                         else encode_delta(known, new, kind.width, exponent=kind.exponent, form=self.form))
            if self.forward and self.base is not None and (delta is None or delta.codec is not Codec.UNCHANGED):
                np.copyto(self.base, new)
        full = None
        if self.full:
            full = delta if delta is not None and delta.codec is Codec.FULL else encode_full(new, kind.width)
        return Coded(delta, full, shard_digest(new))


@dataclass
class Packer:
    """One encoding of a version: places payloads into packs and puts each when it is large enough."""

    blobs: BlobStore
    head: PackHead
    shards: int
    upload_s: float = 0.0
    changed: int = 0
    _packs: list[Pack | None] = field(default_factory=list)
    _parts: list[bytes] = field(default_factory=list)
    _size: int = 0
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PUTS_IN_FLIGHT))

    def __post_init__(self) -> None:
        self._codec = np.zeros(self.shards, np.uint8)
        self._pack = np.full(self.shards, -1, np.int32)
        self._offset = np.zeros(self.shards, np.int64)
        self._length = np.zeros(self.shards, np.int64)

    async def place(self, number: int, coded: EncodedShard, puts: asyncio.TaskGroup) -> None:
        self._codec[number] = coded.codec
        self.changed += coded.changed
        if coded.codec is Codec.UNCHANGED:
            return
        if not self._parts:
            self._parts = [self.head._replace(number=len(self._packs)).encode()]
            self._size = _HEAD.size
            self._packs.append(None)
        self._pack[number] = len(self._packs) - 1
        self._offset[number], self._length[number] = self._size, len(coded.payload)
        self._parts.append(coded.payload)
        self._size += len(coded.payload)
        if self._size >= PACK_BYTES:
            await self.close(puts)

    async def close(self, puts: asyncio.TaskGroup) -> None:
        """Send what has been placed."""
        if not self._parts:
            return
        data = b"".join(self._parts)
        self._parts, self._size = [], 0
        await self._slots.acquire()
        puts.create_task(self._put(len(self._packs) - 1, data))

    async def _put(self, index: int, data: bytes) -> None:
        began = time.monotonic()
        try:
            ref = await self.blobs.put(data)
            self._packs[index] = Pack(digest=ref.digest, size=ref.size, chunks=ref.chunks)
        finally:
            self.upload_s += time.monotonic() - began
            self._slots.release()

    def encoding(self) -> Encoding:
        """After the last put."""
        return Encoding(
            packs=tuple(pack for pack in self._packs if pack is not None), codec=self._codec, pack=self._pack,
            offset=self._offset, length=self._length, changed=self.changed,
        )


class EncodedState(NamedTuple):
    encoding: Encoding
    shard_digests: bytes


class ShardStream:
    """Jobs are added as they come; behind, workers encode them and packs go out. Used inside a TaskGroup, whose first failure ends all."""

    def __init__(self, packers: tuple[Packer | None, Packer | None], shards: int, workers: Workers, group: asyncio.TaskGroup) -> None:
        """`packers`: of the delta and of the full."""
        self._delta, self._full = packers
        self._workers, self._group = workers, group
        self.digests = np.zeros((shards, DIGEST_BYTES), np.uint8)
        self.encode_s = 0.0
        self._waiting: deque[Job] = deque()
        self._waiting_bytes = 0
        self._changed = asyncio.Condition()
        self._closed = False
        self._done = asyncio.Event()
        group.create_task(self._encode(), name="encode shards")

    async def add(self, job: Job) -> None:
        """Returns when there is room for it. Its bytes must not change until the stream is finished. Raises IntegrityError when it failed."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._closed or not self._waiting or self._waiting_bytes + job.nbytes <= ROOM_BYTES)
            if self._closed:  # an adder in another task is not cancelled with the group
                raise IntegrityError("the stream has ended", field=f"tensor {job.shard.name}", value=job.shard.number,
                                     remedy="see what ended it")
            self._waiting.append(job)
            self._waiting_bytes += job.nbytes
            self._changed.notify_all()

    async def finish(self) -> None:
        """Returns when every shard is encoded and every pack handed over; the puts are the group's to wait for."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()
        await self._done.wait()  # a failure is the group's, which cancels this wait

    async def _encode(self) -> None:
        try:
            await self._encode_all()
        finally:
            self._closed = True
            async with self._changed:
                self._changed.notify_all()

    async def _encode_all(self) -> None:
        while batch := await self._next():
            began = time.monotonic()
            coded = await self._workers.map(Job.encode, batch)
            self.encode_s += time.monotonic() - began
            for job, shard in zip(batch, coded, strict=True):
                self.digests[job.shard.number] = np.frombuffer(shard.digest, np.uint8)
                if self._delta is not None and shard.delta is not None:
                    await self._delta.place(job.shard.number, shard.delta, self._group)
                if self._full is not None and shard.full is not None:
                    await self._full.place(job.shard.number, shard.full, self._group)
            del batch, coded, job, shard  # or they are held while the next batch is waited for and encoded
        for packer in (self._delta, self._full):
            if packer is not None:
                await packer.close(self._group)
        self._done.set()

    async def _next(self) -> list[Job]:
        """What is waiting; empty at the end."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._waiting or self._closed)
            batch = list(self._waiting)
            self._waiting.clear()
            self._waiting_bytes = 0
            self._changed.notify_all()
            return batch


async def encode_state(
    state: State,
    version: int,
    blobs: BlobStore,
    workers: Workers,
    *,
    base: State | None = None,
    base_digests: bytes | None = None,
    form: DeltaForm = DeltaForm.SMALL,
) -> EncodedState:
    """Encode `state`, against `base` where it has the same tensor, and put the packs; they are durable on return."""
    full = base is None
    layouts = {name: state[name].layout for name in sorted(state)}
    before: dict[tuple[str, int], bytes] = {}
    if base is not None and base_digests is not None:
        before = shard_digests({name: base[name].layout for name in base}, base_digests)
    shards = list(shards_of(layouts.items()))
    packer = Packer(blobs, PackHead(full, version, 0), len(shards))
    try:
        async with asyncio.TaskGroup() as group:
            stream = ShardStream((None, packer) if full else (packer, None), len(shards), workers, group)
            for shard in shards:
                tensor = state[shard.name]
                old = comparable(base, shard.name, tensor)
                await stream.add(Job(
                    shard, tensor.dtype, None if old is None else old.data[shard.start : shard.stop],
                    None if old is None else before.get((shard.name, shard.start)),
                    tensor.data[shard.start : shard.stop], delta=not full, full=full, form=form,
                ))
            await stream.finish()
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return EncodedState(packer.encoding(), stream.digests.tobytes())


def comparable(base: State | None, name: str, tensor: HostTensor) -> HostTensor | None:
    """The base's tensor when a delta against it means something."""
    old = base.get(name) if base is not None else None
    return old if old is not None and old.layout == tensor.layout else None
