"""A draft: a version that is being handed in, tensor by tensor, while its first packs are already on their way.

    async with writer.draft(layouts, version=7, learner_step=7) as draft:
        for name, tensor in optimizer_step():
            await draft.put(name, tensor)
        manifest = await draft.commit(consumed=...)

The writer's base is moved forward shard by shard, right after each is encoded, so no second copy of the weights exists; `put` waits while
more than `packing.ROOM_BYTES` wait to be encoded. Nothing is the policy before `commit` returns. A draft that is left without a commit,
or fails, leaves the old version current and the writer, once anything was put, unready: its base is then no version, and `resume()` reads
it again. `put` may be called from another task than the block's, one call at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from driftline.messages.blobs import BlobRef
from driftline.messages.errors import IntegrityError
from driftline.policy_store.forms import Changes
from driftline.policy_store.manifest import Encoding, Manifest
from driftline.policy_store.packing import Job, Packer, PackHead, ShardStream
from driftline.policy_store.tensor import Bytes1D, HostTensor, Layout, Shard, shard_digests, shards_of

if TYPE_CHECKING:
    from driftline.policy_store.writer import PolicyWriter

__all__ = ["Draft", "PublishStats"]


@dataclass(frozen=True)
class PublishStats:
    """Where the time and the bytes of a version went. Seconds of encoding are those of the stage, of uploads the sum over the puts."""

    version: int
    encode_s: float
    upload_s: float
    wall_s: float
    bytes_raw: int
    bytes_delta: int
    bytes_full: int
    changed_share: float


@dataclass(frozen=True)
class Encoded:
    delta: Encoding | None
    full: Encoding | None
    digests: bytes
    encode_s: float
    upload_s: float


class Draft:
    """Made by `PolicyWriter.draft`."""

    def __init__(self, writer: PolicyWriter, layouts: Mapping[str, Layout], version: int, learner_step: int, *, forward: bool) -> None:
        self._writer, self._forward = writer, forward
        self.layouts = {name: layouts[name] for name in sorted(layouts)}
        self.version, self.learner_step = version, learner_step
        self._shards: dict[str, list[Shard]] = {name: [] for name in self.layouts}
        self._count = 0
        for shard in shards_of(self.layouts.items()):
            self._shards[shard.name].append(shard)
            self._count += 1
        self._group = AsyncExitStack()  # of the tasks behind; closed by commit or on the way out
        self._stream: ShardStream | None = None
        self._committed = False
        self._discarded = False
        self._begun = False
        self._delta: Packer | None = None
        self._full: Packer | None = None
        self._before: dict[tuple[str, int], bytes] = {}

    async def __aenter__(self) -> Self:
        parent = await self._writer.begin(self)
        try:
            self._before = {} if parent is None else shard_digests(parent.layouts(), parent.shard_digests.tobytes())
            blobs, full = self._writer.blobs, self._writer.full_is_due
            self._delta = None if parent is None else Packer(blobs, PackHead(False, self.version, 0), self._count)
            self._full = Packer(blobs, PackHead(True, self.version, 0), self._count) if full else None
            group = await self._group.enter_async_context(asyncio.TaskGroup())
            self._stream = ShardStream((self._delta, self._full), self._count, self._writer.workers, group)
        except BaseException:
            self._writer.end(torn=False)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        if error is None and not self._committed and not self._discarded:
            error = IntegrityError("left without a commit", field="draft", value=self.version, remedy="call commit() inside the block")
        try:
            if self._discarded and self._stream is not None:
                await self._stream.finish()
            await self._group.__aexit__(type(error) if error else None, error, traceback)
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        finally:
            self._writer.end(torn=self._begun and self._forward and not self._committed)
        if error is not None and kind is None:
            raise error
        return None

    async def put(self, name: str, tensor: HostTensor) -> None:
        """One tensor of the version, in any order; its bytes must not change until `commit` returns.

        Raises IntegrityError when the name is not in the layouts, was put before, or has another dtype or shape.
        """
        shards = self._take(name)
        if tensor.layout != self.layouts[name]:
            raise IntegrityError(f"declared as {self.layouts[name]}", field=f"tensor {name}", value=tensor.layout,
                                 remedy="the layouts of a draft are those of its tensors")
        await self._add(name, shards, [tensor.data[shard.start : shard.stop] for shard in shards])

    async def put_changes(self, name: str, shards: Sequence[Changes | Bytes1D | None]) -> None:
        """One tensor as what changed, a shard each: its changes, its whole new bytes, or None where it is as it was.

        Raises IntegrityError as `put` does, and when the base has no such tensor.
        """
        wanted = self._take(name)
        if len(shards) != len(wanted):
            raise IntegrityError(f"{len(shards)} shards", field=f"tensor {name}", value=len(shards), remedy=f"it has {len(wanted)}")
        if self._writer.room(name, self.layouts[name])[1] is False:
            raise IntegrityError("changes of a tensor the base does not have", field="tensor", value=name,
                                 remedy="put the whole tensor")
        await self._add(name, wanted, [_none(self.layouts[name]) if shard is None else shard for shard in shards])

    def _take(self, name: str) -> list[Shard]:
        if name not in self.layouts:
            raise IntegrityError("not in the draft's layouts", field="tensor", value=name)
        shards = self._shards.pop(name, None)
        if shards is None:
            raise IntegrityError("put twice", field="tensor", value=name)
        return shards

    async def _add(self, name: str, shards: Sequence[Shard], new: Sequence[Bytes1D | Changes]) -> None:
        assert self._stream is not None
        self._begun = True
        layout = self.layouts[name]
        base, known = self._writer.room(name, layout, make=self._forward)
        for shard, content in zip(shards, new, strict=True):
            await self._stream.add(Job(
                shard, layout.dtype, None if base is None else base.data[shard.start : shard.stop],
                self._before.get((name, shard.start)) if known else None, content, delta=self._delta is not None,
                full=self._full is not None, forward=self._forward, form=self._writer.form,
            ))

    def discard(self) -> None:
        """There is no such version after all; allowed while nothing was put, and then the writer stays ready."""
        if self._begun:
            raise IntegrityError("tensors were put already", field="draft", value=self.version,
                                 remedy="leave the block by an exception, then resume() the writer")
        self._discarded = True

    async def commit(
        self, *, consumed: Sequence[str] = (), numerics: Mapping[str, Any] | None = None, batch: BlobRef | None = None
    ) -> Manifest:
        """Make the draft the policy: returns when its bytes, its manifest and the head are durable.

        Raises IntegrityError when tensors are missing, HeadConflict when another writer was first, BrokerFull and BrokerUnavailable.
        """
        if self._shards:
            raise IntegrityError(f"{len(self._shards)} tensors were not put", field="draft", value=sorted(self._shards)[:3])
        assert self._stream is not None
        await self._stream.finish()
        try:
            await self._group.aclose()
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        stream = self._stream
        encoded = Encoded(
            None if self._delta is None else self._delta.encoding(), None if self._full is None else self._full.encoding(),
            stream.digests.tobytes(), stream.encode_s, sum(p.upload_s for p in (self._delta, self._full) if p is not None),
        )
        manifest = await self._writer.conclude(self, encoded, tuple(consumed), dict(numerics or {}), batch)
        self._committed = True
        return manifest


def _none(layout: Layout) -> Changes:
    return Changes(np.zeros(0, np.int32), np.zeros(0, f"<u{layout.width}"))
