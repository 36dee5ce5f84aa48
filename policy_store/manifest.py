"""The manifest: everything about one version of a policy except its bytes, and a head that names one manifest.

A manifest that exists is consistent. Its seal covers every field; its tensor digests follow from its shard digests, its state
digest from those; every shard lies inside a pack it names; its parent's seal makes the manifests one chain. So a reader which
trusts the head's seal (one compare-and-set subject) can trust everything reachable from it, and two writers that both published a
version 7 cannot be confused: a manifest is stored under its seal, and only the head says which one is the policy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import BaseModel, ConfigDict, Field, model_validator

from driftline.messages.blobs import BlobRef
from driftline.messages.recording import RecordedVersion
from driftline.messages.registry import register
from driftline.messages.subjects import Subjects
from driftline.messages.types import Message, array_field
from driftline.policy_store.codec import Codec
from driftline.policy_store.tensor import (
    DIGEST_BYTES,
    DTYPES,
    SHARD_BYTES,
    Layout,
    Shard,
    shards_of,
    state_digest_of,
    tensor_digest_of,
)

__all__ = ["Encoding", "Link", "Manifest", "Pack", "PolicyHead", "TensorEntry", "VersionKind", "manifest_subject"]

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
_U8 = Annotated[np.ndarray, array_field("u1")]
_U8x2 = Annotated[np.ndarray, array_field("u1", 2)]
_I32 = Annotated[np.ndarray, array_field("<i4")]
_I64 = Annotated[np.ndarray, array_field("<i8")]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", arbitrary_types_allowed=True)


class VersionKind(StrEnum):
    """Which encodings a version carries. One with both is entered by a joiner and stepped over by a follower."""

    FULL = "full"
    DELTA = "delta"
    BOTH = "full+delta"


class Link(_Part):
    """A version by number and by seal."""

    version: int = Field(ge=0)
    seal: Digest


class Pack(_Part):
    """A blob that holds many encoded shards."""

    digest: str
    size: int = Field(ge=0)
    chunks: int = Field(ge=0)

    @property
    def ref(self) -> BlobRef:
        return BlobRef(self.digest, self.size, self.chunks)


class TensorEntry(_Part):
    name: str = Field(min_length=1, max_length=1024)
    dtype: str
    # Bounded, because sizes are multiplied: a product of a million of them is a number of megabytes.
    shape: tuple[Annotated[int, Field(ge=0, lt=2**63)], ...] = Field(max_length=32)
    digest: Digest

    @property
    def layout(self) -> Layout:
        return Layout(self.dtype, self.shape)


class Placement(NamedTuple):
    """Where a shard's encoded bytes lie: `pack` is -1 where there are none."""

    shard: Shard
    codec: Codec
    pack: int
    offset: int
    length: int


class Encoding(_Part):
    """One way to obtain the version's bytes: per shard its codec and its place in a pack."""

    packs: tuple[Pack, ...]
    codec: _U8
    pack: _I32
    offset: _I64
    length: _I64
    changed: int = Field(ge=0)

    @property
    def nbytes(self) -> int:
        return sum(pack.size for pack in self.packs)

    def check(self, shards: int, *, delta: bool) -> None:
        for name in ("codec", "pack", "offset", "length"):
            if len(getattr(self, name)) != shards:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {shards} shards")
        if shards == 0:
            return
        if int(self.codec.max()) > max(Codec):
            raise ValueError(f"codec = {int(self.codec.max())}: unknown shard codec")
        if not delta and (self.codec != Codec.FULL).any():
            raise ValueError("codec: a full encoding holds full shards only")
        placed = self.codec != Codec.UNCHANGED
        if not np.array_equal(placed, self.pack >= 0) or (self.length[~placed] != 0).any():
            raise ValueError("pack: exactly the changed shards have a place")
        if (self.pack >= len(self.packs)).any():
            raise ValueError(f"pack = {int(self.pack.max())} of {len(self.packs)} packs")
        sizes = np.asarray([pack.size for pack in self.packs], np.int64)
        inside = (self.offset >= 0) & (self.length >= 0)
        # A difference, because the sum of two int64 off the wire may wrap round and look small.
        inside[placed] &= self.length[placed] <= sizes[self.pack[placed]] - self.offset[placed]
        if not inside.all():
            raise ValueError(f"offset: shard {int(np.flatnonzero(~inside)[0])} lies outside its pack")


@register
class Manifest(Message):
    """One version of the policy.

    `parent` is the version it follows (None: the first). `chain` are the links from the newest full before this version up to
    the parent, so any version is found in one hop per full. `delta` is against the parent, `full` needs nothing; one of them at
    least is present. `shard_digests` uint8 [shards, 16] are of the result. `consumed` names what the step was trained on,
    and `batch` the blob in the record stream that holds it (None for version 0, or where nothing was recorded).
    """

    schema_name: ClassVar[str] = "manifest"

    version: int = Field(ge=0)
    parent: Link | None
    chain: tuple[Link, ...]
    shard_bytes: int
    tensors: tuple[TensorEntry, ...]
    shard_digests: _U8x2
    digest: Digest
    delta: Encoding | None
    full: Encoding | None
    learner_step: int
    consumed: tuple[str, ...]
    batch: Pack | None = None
    numerics: dict[str, Any]
    at: float
    seal: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.shard_bytes != SHARD_BYTES:
            raise ValueError(f"shard_bytes = {self.shard_bytes}: this build reads shards of {SHARD_BYTES}")
        names = [entry.name for entry in self.tensors]
        if names != sorted(set(names)):
            raise ValueError("tensors: names must be unique and sorted")
        self._check_lineage()
        self._check_digests()
        if self.delta is None and self.full is None:
            raise ValueError("delta and full are both missing: a version needs bytes")
        for name, encoding in (("delta", self.delta), ("full", self.full)):
            if encoding is not None:
                try:
                    encoding.check(len(self.shard_digests), delta=name == "delta")
                except ValueError as error:
                    raise ValueError(f"{name}.{error}") from error
        if self.seal and self.seal != self.sealed_by():
            raise ValueError(f"seal = {self.seal} of version {self.version}: the content's is {self.sealed_by()}")
        return self

    def _check_lineage(self) -> None:
        if self.parent is None:
            if self.chain or self.delta is not None:
                raise ValueError("parent: a version without one has no chain and no delta")
            return
        if self.parent.version != self.version - 1:
            raise ValueError(f"parent = {self.parent.version} of version {self.version}: versions grow by one")
        versions = [link.version for link in self.chain]
        if not versions or self.chain[-1] != self.parent or versions != list(range(versions[0], self.version)):
            raise ValueError(f"chain = {versions} does not lead to version {self.version}")

    def _check_digests(self) -> None:
        for entry in self.tensors:
            if entry.dtype not in DTYPES or any(size < 0 for size in entry.shape):
                raise ValueError(f"tensor {entry.name}: {entry.dtype}{list(entry.shape)} is not a tensor")
        shards = sum(entry.layout.shard_count for entry in self.tensors)
        if self.shard_digests.shape != (shards, DIGEST_BYTES):
            raise ValueError(f"shard_digests has shape {self.shard_digests.shape} for {shards} shards")
        first = 0
        for entry in self.tensors:
            last = first + entry.layout.shard_count
            if tensor_digest_of(entry.name, entry.layout, self.shard_digests[first:last].tobytes()) != entry.digest:
                raise ValueError(f"tensor {entry.name}: digest {entry.digest} is not that of its shards")
            first = last
        if state_digest_of(entry.digest for entry in self.tensors) != self.digest:
            raise ValueError(f"digest = {self.digest} is not that of the tensors")

    def sealed_by(self) -> str:
        """The seal this content calls for: a digest over every field in one canonical form."""
        content = self.model_dump(exclude={"seal"})
        text = json.dumps(content, default=_canonical, sort_keys=True, separators=(",", ":"))
        return xxhash.xxh3_128_hexdigest(text.encode())

    def with_seal(self) -> Self:
        return self.model_copy(update={"seal": self.sealed_by()})

    @property
    def link(self) -> Link:
        return Link(version=self.version, seal=self.seal)

    @property
    def recorded(self) -> RecordedVersion:
        """What is kept of a version beside its batch, for as long as the record is."""
        batch = self.batch
        return RecordedVersion(
            run=self.run, version=self.version, digest=self.digest, seal=self.seal, learner_step=self.learner_step,
            consumed=self.consumed, batch_digest=batch.digest if batch else "", batch_size=batch.size if batch else 0,
            batch_chunks=batch.chunks if batch else 0, numerics=self.numerics, at=self.at,
        )

    @property
    def kind(self) -> VersionKind:
        if self.full is None:
            return VersionKind.DELTA
        return VersionKind.FULL if self.delta is None else VersionKind.BOTH

    @property
    def nbytes(self) -> int:
        """Uncompressed size of the weights."""
        return sum(entry.layout.nbytes for entry in self.tensors)

    @property
    def elements(self) -> int:
        return sum(entry.layout.nbytes // entry.layout.width for entry in self.tensors)

    @property
    def packs(self) -> tuple[Pack, ...]:
        return tuple(pack for encoding in (self.delta, self.full) if encoding is not None for pack in encoding.packs)

    def layouts(self) -> dict[str, Layout]:
        return {entry.name: entry.layout for entry in self.tensors}

    def shard_digest(self, index: int) -> bytes:
        digest: bytes = self.shard_digests[index].tobytes()
        return digest

    def placements(self, encoding: Encoding) -> Iterator[Placement]:
        shards = shards_of((entry.name, entry.layout) for entry in self.tensors)
        columns = (encoding.codec.tolist(), encoding.pack.tolist(), encoding.offset.tolist(), encoding.length.tolist())
        for shard, codec, pack, offset, length in zip(shards, *columns, strict=True):
            yield Placement(shard, Codec(codec), pack, offset, length)


@register
class PolicyHead(Message):
    """The current version: `manifest` is its manifest's seal, `digest` its state's. Moved by compare-and-set only."""

    schema_name: ClassVar[str] = "head"

    version: int = Field(ge=0)
    manifest: Digest
    digest: Digest
    learner_step: int
    at: float

    @property
    def link(self) -> Link:
        return Link(version=self.version, seal=self.manifest)


def manifest_subject(run: str, link: Link) -> str:
    """Where a manifest is stored: its seal is part of the subject, so a losing writer's never hides the winner's."""
    return f"{Subjects(run).manifest(link.version)}.{link.seal}"


def _canonical(value: object) -> object:
    if isinstance(value, np.ndarray):
        return _array_text(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no canonical form: numerics holds numbers, texts, lists and maps")


def _array_text(array: npt.NDArray[Any]) -> str:
    return f"{array.dtype.str}{list(array.shape)}{xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array).data)}"
