"""The writer: a version becomes the policy all at once, or not at all, and only one writer can make it so.

    blobs durable  ->  manifest durable, under its seal  ->  head moved by compare-and-set  ->  the diff base moves

A crash between any two leaves the old version current; what was already stored is unreachable and later collected. The base of
the next delta moves only after the head did, so a delta is always against what readers have. When it is unknown whether the
head moved (no answer, cancelled), the writer refuses to go on until `resume` has read the truth. Two writers: the second's
compare-and-set fails with HeadConflict, and its manifest, stored under its own seal, is never read by anyone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from driftline.messages.blobs import BlobRef
from driftline.messages.bus import Bus, Stored
from driftline.messages.errors import ConfigError, HeadConflict, IntegrityError
from driftline.messages.subjects import Subjects
from driftline.policy_store.blobs import BlobStore
from driftline.policy_store.manifest import (
    Encoding,
    Link,
    Manifest,
    Pack,
    PolicyHead,
    TensorEntry,
    manifest_subject,
)
from driftline.policy_store.packing import encode_state
from driftline.policy_store.reader import PolicyReader
from driftline.policy_store.tensor import (
    DIGEST_BYTES,
    SHARD_BYTES,
    State,
    state_digest_of,
    tensor_digest_of,
)
from driftline.policy_store.workers import Workers, shared_workers

__all__ = ["PolicyWriter"]

FENCE_ATTEMPTS = 8


class PolicyWriter:
    """The single writer of a run's policy. Holds one private copy of the newest version, the base of the next delta."""

    def __init__(self, bus: Bus, blobs: BlobStore, run: str, full_every: int = 10, *, workers: Workers | None = None) -> None:
        if full_every < 1:
            raise ConfigError("every version needs a full at or before it", field="full_every", value=full_every,
                              remedy="at least 1")
        self._bus, self._blobs, self.run, self.full_every = bus, blobs, run, full_every
        self._workers = workers or shared_workers()
        self._reader = PolicyReader(bus, blobs, run, workers=self._workers)
        self._subjects = Subjects(run)
        self._one = asyncio.Lock()
        self._ready = False
        self._head_seq = 0
        self._base: State = {}
        self._parent: Manifest | None = None

    @property
    def version(self) -> int:
        """The newest version this writer knows to be current; -1 for none."""
        return -1 if self._parent is None else self._parent.version

    async def resume(self, *, fence: str = "") -> PolicyHead | None:
        """Read where the run stands, and that version's weights as the base. Call before the first `publish`.

        `fence`: a name that is new with every owner of the run. The head is stored again, unchanged, so that a compare-and-set
        by anyone who read it before fails from now on: an earlier owner that wakes up late cannot move it.
        """
        async with self._one:
            self._ready = False
            stored = await self._bus.last(self._subjects.stream("POLICY"), self._subjects.head)
            if stored is not None and fence:
                stored = await self._fence(stored, fence)
            if stored is None:
                self._head_seq, self._parent, self._base = 0, None, {}
                self._ready = True
                return None
            head = stored.message
            if not isinstance(head, PolicyHead):
                raise IntegrityError("not a policy head", field="head", value=type(head).__name__)
            parent = await self._reader.load(head.link)
            self._base = await self._reader.materialise_manifest(parent)
            self._head_seq, self._parent = stored.seq, parent
            self._ready = True
            return head

    async def _fence(self, stored: Stored, fence: str) -> Stored:
        for _ in range(FENCE_ATTEMPTS):
            try:
                ack = await self._bus.publish(self._subjects.head, stored.message, id=f"{self.run}/fence/{fence}/{stored.seq}",
                                              expect_last=stored.seq)
                return Stored(ack.seq, stored.subject, stored.message)
            except HeadConflict:  # it moved in between: an earlier owner's last word
                newer = await self._bus.last(self._subjects.stream("POLICY"), self._subjects.head)
                if newer is not None:
                    stored = newer
        raise HeadConflict(f"the head moved {FENCE_ATTEMPTS} times while it was being fenced", field="run", value=self.run,
                           remedy="another learner is publishing: stop it")

    async def base(self) -> State:
        """A copy of the weights of the version the writer stands on: what a resumed learner starts from."""
        async with self._one:
            if not self._ready:
                raise _unresumed()
            return await asyncio.to_thread(lambda: {name: tensor.copy() for name, tensor in self._base.items()})

    async def publish(
        self,
        state: State,
        *,
        version: int,
        learner_step: int,
        consumed: Sequence[str] = (),
        numerics: Mapping[str, Any] | None = None,
        batch: BlobRef | None = None,
    ) -> Manifest:
        """Make `state` the policy. It must not change until this returns; afterwards it is the caller's again.

        Raises HeadConflict when another writer moved the head, or `version` does not follow it: nothing was published.
        BrokerFull and BrokerUnavailable before the head is touched leave the writer ready to try again.
        """
        async with self._one:
            self._check(state, version)
            manifest = await self._store(state, version, learner_step, tuple(consumed), dict(numerics or {}), batch)
            # From here on the head may have moved without this process hearing of it.
            self._ready = False
            self._head_seq = await self._move_head(manifest)
            self._parent = manifest
            await self._workers.run(self._adopt, state)
            self._ready = True
            return manifest

    def _check(self, state: State, version: int) -> None:
        if not self._ready:
            raise _unresumed()
        if not state:
            raise IntegrityError("no tensors", field="state", value={})
        if version < 0 or (self._parent is not None and version != self._parent.version + 1):
            raise HeadConflict(f"the head is at {self.version}", field="version", value=version,
                               remedy=f"the next version is {self.version + 1}")

    async def _store(self, state: State, version: int, learner_step: int, consumed: tuple[str, ...],
                     numerics: dict[str, Any], batch: BlobRef | None) -> Manifest:
        """Blobs, then the manifest; both durable on return."""
        parent, delta, full, digests = self._parent, None, None, b""
        if parent is not None:
            delta, digests = await encode_state(state, version, self._blobs, self._workers, base=self._base,
                                                base_digests=parent.shard_digests.tobytes())
        if parent is None or self._full_is_due(parent):
            full, digests = await encode_state(state, version, self._blobs, self._workers)
        manifest = _manifest(self.run, state, parent, digests, delta, full, version=version, learner_step=learner_step,
                             consumed=consumed, numerics=numerics, batch=batch)
        await self._bus.publish(manifest_subject(self.run, manifest.link), manifest,
                                id=f"{self.run}/manifest/{version}/{manifest.seal}")
        return manifest

    def _full_is_due(self, parent: Manifest) -> bool:
        newest = parent.version if parent.full is not None else parent.chain[0].version
        return parent.version + 1 - newest >= self.full_every

    async def _move_head(self, manifest: Manifest) -> int:
        head = PolicyHead(run=self.run, version=manifest.version, manifest=manifest.seal, digest=manifest.digest,
                          learner_step=manifest.learner_step, at=manifest.at)
        try:
            ack = await self._bus.publish(self._subjects.head, head, id=f"{self.run}/head/{head.version}/{manifest.seal}",
                                          expect_last=self._head_seq)
        except HeadConflict:
            # A retry below us may have lost against its own first attempt, whose answer never came.
            stored = await self._bus.last(self._subjects.stream("POLICY"), self._subjects.head)
            if stored is not None and stored.message == head:
                return stored.seq
            raise
        return ack.seq

    def _adopt(self, state: State) -> None:
        """The published state becomes the base, into the buffers that are there already."""
        for name in self._base.keys() - state.keys():
            del self._base[name]
        for name, tensor in state.items():
            old = self._base.get(name)
            if old is not None and old.layout == tensor.layout:
                np.copyto(old.data, tensor.data)
            else:
                self._base[name] = tensor.copy()


def _manifest(
    run: str,
    state: State,
    parent: Manifest | None,
    digests: bytes,
    delta: Encoding | None,
    full: Encoding | None,
    *,
    version: int,
    learner_step: int,
    consumed: tuple[str, ...],
    numerics: dict[str, Any],
    batch: BlobRef | None,
) -> Manifest:
    entries: list[TensorEntry] = []
    first = 0
    for name in sorted(state):
        layout = state[name].layout
        last = first + DIGEST_BYTES * layout.shard_count
        digest = tensor_digest_of(name, layout, digests[first:last])
        entries.append(TensorEntry(name=name, dtype=layout.dtype, shape=layout.shape, digest=digest))
        first = last
    return Manifest(
        run=run,
        version=version,
        parent=None if parent is None else parent.link,
        chain=_chain(parent),
        shard_bytes=SHARD_BYTES,
        tensors=tuple(entries),
        shard_digests=np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES),
        digest=state_digest_of(entry.digest for entry in entries),
        delta=delta,
        full=full,
        learner_step=learner_step,
        consumed=consumed,
        batch=None if batch is None else Pack(digest=batch.digest, size=batch.size, chunks=batch.chunks),
        numerics=numerics,
        at=time.time(),
    ).with_seal()


def _chain(parent: Manifest | None) -> tuple[Link, ...]:
    """The links from the newest full up to the parent."""
    if parent is None:
        return ()
    return (parent.link,) if parent.full is not None else (*parent.chain, parent.link)


def _unresumed() -> HeadConflict:
    return HeadConflict("the writer does not know where the head is", field="writer", value="not resumed",
                        remedy="call resume() first, and again after a publish that was cut off")
