"""Unfolding: the shards of a version one after another, straight from the packs of a path, without the version ever being in memory.

Each shard is made by itself: from its full, then by each delta, every one held to the digest its manifest names. In memory are one batch of
shards and, for each step of the path, the packs that the batch lies in and `PACKS_KEPT` more: packs are laid out in the order of the
shards, so each is fetched about once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from driftline.messages.errors import IntegrityError
from driftline.policy_store.blobs import BlobStore
from driftline.policy_store.codec import apply
from driftline.policy_store.fetching import fetch
from driftline.policy_store.forms import Codec
from driftline.policy_store.paths import Path, Step
from driftline.policy_store.tensor import DTYPES, SHARD_BYTES, Bytes1D, Layout, Shard, shard_digest, shards_of
from driftline.policy_store.workers import Workers, bounded

__all__ = ["Make", "Unfolded", "unfold"]

BATCH_BYTES = 32 * 1024 * 1024
PACKS_KEPT = 2
PACKS_IN_FLIGHT = 4

T = TypeVar("T")


@dataclass(frozen=True)
class Unfolded:
    """A shard of the last version of a path. `base`: the same bytes of the version at `mark`, None where it has no such tensor."""

    shard: Shard
    dtype: str
    data: Bytes1D
    base: Bytes1D | None


Make = Callable[[Unfolded], T]


async def unfold(
    path: Path, blobs: BlobStore, workers: Workers, make: Make[T], *, mark: int = -1, blob_timeout_s: float = 120.0
) -> AsyncGenerator[tuple[Shard, T], None]:
    """`make` of each shard of the path's last version, in order, from worker threads. `mark`: after which step to keep the base, by
    its place in the path. Raises IntegrityError, naming version and shard, when bytes are damaged."""
    sources = [_Source(step) for step in path.steps]
    last = path.steps[-1].manifest
    for batch in _batches(shards_of((entry.name, entry.layout) for entry in last.tensors)):
        dtypes = {shard.name: sources[-1].layouts[shard.name].dtype for shard in batch}
        work = []
        for source in sources:
            await source.fetch(batch, blobs, blob_timeout_s)
        for shard in batch:
            work.append(_Work(shard, dtypes[shard.name], [(source, source.piece(shard)) for source in sources], mark))
        made = await workers.map(lambda item: make(item.run()), work)
        for shard, item in zip(batch, made, strict=True):
            yield shard, item


@dataclass(frozen=True)
class _Piece:
    """A shard in one step: None in `_Work` where that version has no such tensor."""

    number: int
    codec: Codec
    payload: memoryview


@dataclass
class _Source:
    """One step, and the packs of it that are in memory."""

    step: Step
    packs: OrderedDict[int, memoryview] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        manifest = self.step.manifest
        self.layouts: dict[str, Layout] = {}
        self._first: dict[str, int] = {}
        first = 0
        for entry in manifest.tensors:
            self.layouts[entry.name], self._first[entry.name] = entry.layout, first
            first += entry.layout.shard_count

    def number(self, shard: Shard) -> int | None:
        """Which shard of this version these bytes are; None when its tensor is not there."""
        layout = self.layouts.get(shard.name)
        if layout is None or shard.start >= layout.nbytes:
            return None
        return self._first[shard.name] + shard.start // SHARD_BYTES

    async def fetch(self, batch: Sequence[Shard], blobs: BlobStore, timeout_s: float) -> None:
        encoding = self.step.encoding
        numbers = [number for shard in batch if (number := self.number(shard)) is not None]
        wanted = sorted({int(encoding.pack[number]) for number in numbers} - {-1})
        for index in wanted:
            if index in self.packs:
                self.packs.move_to_end(index)

        async def one(index: int) -> None:
            data = await fetch(blobs, encoding.packs[index].ref, timeout_s)
            self.step.head._replace(number=index).check(data)
            self.packs[index] = memoryview(data)

        await bounded(one, [index for index in wanted if index not in self.packs], PACKS_IN_FLIGHT)
        while len(self.packs) > len(wanted) + PACKS_KEPT:
            self.packs.popitem(last=False)

    def piece(self, shard: Shard) -> _Piece | None:
        number = self.number(shard)
        if number is None:
            return None
        encoding = self.step.encoding
        index, offset, length = int(encoding.pack[number]), int(encoding.offset[number]), int(encoding.length[number])
        payload = memoryview(b"") if index < 0 else self.packs[index][offset : offset + length]
        return _Piece(number, Codec(int(encoding.codec[number])), payload)


@dataclass(frozen=True)
class _Work:
    """One shard through all the steps, in a worker thread."""

    shard: Shard
    dtype: str
    pieces: list[tuple[_Source, _Piece | None]]
    mark: int

    def run(self) -> Unfolded:
        layout = self.pieces[-1][0].layouts[self.shard.name]
        data: Bytes1D | None = None
        base: Bytes1D | None = None
        held: Layout | None = None
        for place, (source, piece) in enumerate(self.pieces):
            data = None if piece is None else self._step(source, piece, data if held == source.layouts[self.shard.name] else None)
            held = source.layouts.get(self.shard.name)
            if place == self.mark and data is not None and held == layout:
                base = data.copy()
        assert data is not None  # the last version has the shard: it is walked over its shards
        return Unfolded(self.shard, self.dtype, data, base)

    def _step(self, source: _Source, piece: _Piece, data: Bytes1D | None) -> Bytes1D:
        manifest, layout = source.step.manifest, source.layouts[self.shard.name]
        kind = DTYPES[layout.dtype]
        where = f"shard {piece.number} of version {manifest.version}"
        if data is None:
            if piece.codec is not Codec.FULL:
                raise IntegrityError(f"{where} is a change of nothing", field=f"tensor {self.shard.name}", value=piece.codec.name)
            data = np.empty(min(SHARD_BYTES, layout.nbytes - self.shard.start), np.uint8)
        try:
            apply(piece.codec, piece.payload, data, kind.width, exponent=kind.exponent)
        except IntegrityError as error:
            raise IntegrityError(f"{where}: {error}", field=f"tensor {self.shard.name}", value=self.shard.start) from error
        if shard_digest(data) != manifest.shard_digest(piece.number):
            raise IntegrityError(f"{where}: the result has another digest", field=f"tensor {self.shard.name}", value=self.shard.start,
                                 remedy="damaged bytes: take another path")
        return data


def _batches(shards: Iterator[Shard]) -> Iterator[list[Shard]]:
    batch: list[Shard] = []
    size = 0
    for shard in shards:
        batch.append(shard)
        size += shard.stop - shard.start
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
