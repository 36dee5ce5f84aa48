"""Folding: what several deltas in a row change, gathered shard by shard while they are applied, so that squashes cost no second reading.

A fold holds, for each shard that changed, the XOR of its bytes before and after, coded: XORs of consecutive versions add up exactly. Two
folds of 2^k versions side by side make one of 2^(k+1), like the digits of a binary counter, so at most one of each size waits for its
neighbour and each version is folded about once. All that wait hold at most `FOLD_SHARE` of the size of the weights: beyond that the
longest is dropped, and with it its shortcut. A shard without a common past (a tensor added or reshaped), or of which a fold would cost more
than the shard, is only marked, and stands whole in the shortcut.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from driftline.messages.errors import IntegrityError
from driftline.policy_store.codec import apply, encode_delta, encode_full
from driftline.policy_store.forms import Codec, DeltaForm, EncodedShard
from driftline.policy_store.manifest import Manifest
from driftline.policy_store.shortcuts import MAX_SPAN
from driftline.policy_store.tensor import (
    DTYPES,
    Bytes1D,
    Shard,
    State,
    shard_digest,
    shard_digests,
    shards_of,
)
from driftline.policy_store.workers import Workers

__all__ = ["FOLD_SHARE", "Fold", "Folds"]

FOLD_SHARE = 0.5
"""Of the size of the weights, for all that wait together."""

PART_SHARE = 0.7
"""Of the size of a shard. bf16 weights take about 0.67 of it by themselves: a fold above that stands for nothing."""

BATCH_BYTES = 64 * 1024 * 1024

_Key: TypeAlias = tuple[str, int]


class _Part(NamedTuple):
    """The XOR of one shard before and after, as a change of zeros."""

    codec: Codec
    payload: bytes
    size: int
    width: int

    @classmethod
    def of(cls, image: Bytes1D, width: int) -> _Part | None:
        """None when it would cost more than the shard."""
        coded = encode_delta(np.zeros_like(image), image, width, form=DeltaForm.FAST)
        if len(coded.payload) > PART_SHARE * image.size:
            return None
        return cls(coded.codec, coded.payload, image.size, width)

    def image(self) -> Bytes1D:
        out = np.zeros(self.size, np.uint8)
        apply(self.codec, self.payload, out, self.width)
        return out


@dataclass
class Fold:
    """From `base` to `version`. A shard that is not in `parts` is as it was; None: it is not known how it was."""

    base: Manifest
    version: int
    replaces: int = 0
    """Bytes of the cheapest steps over the span."""
    parts: dict[_Key, _Part | None] = field(default_factory=dict)

    @property
    def span(self) -> int:
        return self.version - self.base.version

    @property
    def nbytes(self) -> int:
        return sum(len(part.payload) for part in self.parts.values() if part is not None)

    def see(self, shard: Shard, dtype: str, before: Bytes1D | None, after: Bytes1D) -> None:
        """Note one changed shard; called from worker threads while a delta is applied."""
        part = None if before is None else _Part.of(before ^ after, DTYPES[dtype].width)
        if part is None or part.codec is not Codec.UNCHANGED:
            self.parts[shard.name, shard.start] = part

    async def followed_by(self, later: Fold, workers: Workers) -> Fold:
        """Both as one. `later` starts where this one ends."""
        parts = {**self.parts, **later.parts}
        both = sorted(self.parts.keys() & later.parts.keys())
        for key, part in zip(both, await workers.map(_both, [(self.parts[key], later.parts[key]) for key in both]), strict=True):
            if part is not None and part.codec is Codec.UNCHANGED:
                del parts[key]
            else:
                parts[key] = part
        return Fold(self.base, later.version, self.replaces + later.replaces, parts)

    async def shards(
        self, target: Manifest, state: State, workers: Workers, form: DeltaForm
    ) -> AsyncGenerator[tuple[Shard, EncodedShard], None]:
        """The shards of `target`, whose weights `state` holds, as changes of the base; every base is held to its digest."""
        digests = shard_digests(self.base.layouts(), self.base.shard_digests.tobytes())
        before = self.base.layouts()

        def encode(shard: Shard) -> EncodedShard:
            tensor = state[shard.name]
            data = tensor.data[shard.start : shard.stop]
            part = self.parts.get((shard.name, shard.start), _SAME)
            if part is None or before.get(shard.name) != tensor.layout:
                return encode_full(data, tensor.width)
            base = data if part is _SAME else data ^ part.image()
            if shard_digest(base) != digests[shard.name, shard.start]:
                raise IntegrityError(f"a fold of version {self.version} does not lead back to version {self.base.version}",
                                     field=f"tensor {shard.name}", value=shard.start, remedy="the shortcut is not stored")
            return encode_delta(base, data, tensor.width, exponent=DTYPES[tensor.dtype].exponent, form=form)

        batch: list[Shard] = []
        size = 0
        for shard in shards_of((entry.name, entry.layout) for entry in target.tensors):
            batch.append(shard)
            size += shard.stop - shard.start
            if size >= BATCH_BYTES:
                for done, coded in zip(batch, await workers.map(encode, batch), strict=True):
                    yield done, coded
                batch, size = [], 0
        for done, coded in zip(batch, await workers.map(encode, batch), strict=True):
            yield done, coded


class Folds:
    """The folds that wait for their neighbour, longest first; each is as long as a power of two and starts at a multiple of that."""

    def __init__(self, workers: Workers, max_span: int = MAX_SPAN) -> None:
        self._workers, self._max_span = workers, min(max_span, MAX_SPAN)
        self.waiting: list[Fold] = []
        self.dropped = 0

    def clear(self) -> None:
        """What was gathered does not lead to the version at hand."""
        self.waiting.clear()

    async def add(self, fold: Fold, raw_bytes: int) -> AsyncGenerator[Fold, None]:
        """The fold of one version; yields what it completes, shortest first. `replaces` of what is yielded may be lowered by the caller."""
        if self.waiting and self.waiting[-1].version != fold.base.version:
            self.clear()
        while True:
            if fold.span >= self._max_span:
                return
            if fold.base.version % (2 * fold.span) == 0:
                break  # the first half of the next longer one
            if not self.waiting or self.waiting[-1].span != fold.span:
                return  # its first half was never seen, or was dropped
            fold = await self.waiting.pop().followed_by(fold, self._workers)
            yield fold
        self.waiting.append(fold)
        while self.waiting and sum(held.nbytes for held in self.waiting) > FOLD_SHARE * raw_bytes:
            self.waiting.pop(0)
            self.dropped += 1


_SAME = _Part(Codec.UNCHANGED, b"", 0, 1)


def _both(parts: tuple[_Part | None, _Part | None]) -> _Part | None:
    older, newer = parts
    if older is None or newer is None:
        return None
    image = older.image()
    image ^= newer.image()
    return _Part.of(image, older.width)
