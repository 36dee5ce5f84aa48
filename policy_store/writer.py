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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from driftline.messages.blobs import BlobRef
from driftline.messages.bus import Bus, Stored
from driftline.messages.errors import ConfigError, HeadConflict, IntegrityError
from driftline.messages.subjects import Subjects
from driftline.policy_store.blobs import BlobStore
from driftline.policy_store.draft import Draft, Encoded, PublishStats
from driftline.policy_store.forms import DeltaForm
from driftline.policy_store.manifest import (
    Link,
    Manifest,
    Pack,
    PolicyHead,
    TensorEntry,
    manifest_subject,
)
from driftline.policy_store.mapped import Allocate, in_memory
from driftline.policy_store.reader import PolicyReader
from driftline.policy_store.tensor import (
    DIGEST_BYTES,
    SHARD_BYTES,
    HostTensor,
    Layout,
    State,
    state_digest_of,
    tensor_digest_of,
)
from driftline.policy_store.workers import Workers, shared_workers

__all__ = ["PolicyWriter"]

FENCE_ATTEMPTS = 8


class PolicyWriter:
    """The single writer of a run's policy. Holds one private copy of the newest version, the base of the next delta."""

    def __init__(
        self, bus: Bus, blobs: BlobStore, run: str, full_every: int = 10, *, full_share: float = 1.0,
        form: DeltaForm = DeltaForm.SMALL, workers: Workers | None = None, allocate: Allocate = in_memory,
    ) -> None:
        """`allocate`: where the base lives, e.g. `mapped_in(folder)` for one that should not count as memory."""
        if full_every < 1:
            raise ConfigError("every version needs a full at or before it", field="full_every", value=full_every,
                              remedy="at least 1")
        self._bus, self._blobs, self.run, self.full_every = bus, blobs, run, full_every
        self.full_share, self.form, self._allocate = full_share, form, allocate
        self._workers = workers or shared_workers()
        self._reader = PolicyReader(bus, blobs, run, workers=self._workers, allocate=allocate)
        self._subjects = Subjects(run)
        self._one = asyncio.Lock()
        self._ready = False
        self._head_seq = 0
        self._base: State = {}
        self._parent: Manifest | None = None
        self._full_bytes = self._delta_bytes = 0
        self._began = 0.0
        self.stats: PublishStats | None = None
        """Of the newest version this writer made."""

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
            self._count_chain([*[await self._reader.load(link) for link in parent.chain], parent])
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

    def draft(self, layouts: Mapping[str, Layout], *, version: int, learner_step: int) -> Draft:
        """Hand a version in tensor by tensor: see `policy_store.draft`."""
        return Draft(self, layouts, version, learner_step, forward=True)

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
        BrokerFull and BrokerUnavailable before the head is touched leave the writer ready to try again: unlike a draft's, the base moves
        only after the head did.
        """
        layouts = {name: state[name].layout for name in sorted(state)}
        async with Draft(self, layouts, version, learner_step, forward=False) as draft:
            for name in layouts:
                await draft.put(name, state[name])
            manifest = await draft.commit(consumed=consumed, numerics=numerics, batch=batch)
            self._ready = False
            await self._workers.run(self._adopt, state)
            self._ready = True
        return manifest

    # What a draft needs of its writer.

    @property
    def blobs(self) -> BlobStore:
        return self._blobs

    @property
    def workers(self) -> Workers:
        return self._workers

    @property
    def full_is_due(self) -> bool:
        """Whether the next version gets a full: the first does, then every `full_every`, or when following the deltas since costs more
        than `full_share` of reading one."""
        if self._parent is None:
            return True
        newest = self._parent.version if self._parent.full is not None else self._parent.chain[0].version
        return (self._parent.version + 1 - newest >= self.full_every
                or self._delta_bytes > self.full_share * self._full_bytes)

    async def begin(self, draft: Draft) -> Manifest | None:
        """Take the writer for a draft; the parent's manifest. `end` gives it back."""
        await self._one.acquire()
        try:
            if not self._ready:
                raise _unresumed()
            if not draft.layouts:
                raise IntegrityError("no tensors", field="state", value={})
            if draft.version < 0 or (self._parent is not None and draft.version != self._parent.version + 1):
                raise HeadConflict(f"the head is at {self.version}", field="version", value=draft.version,
                                   remedy=f"the next version is {self.version + 1}")
        except BaseException:
            self._one.release()
            raise
        self._began = time.monotonic()
        return self._parent

    def end(self, *, torn: bool) -> None:
        """`torn`: the base was moved forward for a version that is not the policy."""
        self._ready = self._ready and not torn
        self._one.release()

    def room(self, name: str, layout: Layout, *, make: bool = False) -> tuple[HostTensor | None, bool]:
        """The base's tensor of this layout, and whether it holds the parent's weights. `make`: a new one where there is none."""
        held = self._base.get(name)
        if held is not None and held.layout == layout:
            return held, True
        if make:
            self._base[name] = self._allocate({name: layout})[name]
            return self._base[name], False
        return None, False

    async def conclude(self, draft: Draft, encoded: Encoded, consumed: tuple[str, ...], numerics: dict[str, Any],
                       batch: BlobRef | None) -> Manifest:
        """The bytes are durable: manifest, then head."""
        manifest = _manifest(self.run, draft, self._parent, encoded, consumed=consumed, numerics=numerics, batch=batch)
        await self._bus.publish(manifest_subject(self.run, manifest.link), manifest,
                                id=f"{self.run}/manifest/{draft.version}/{manifest.seal}")
        # From here on the head may have moved without this process hearing of it.
        self._ready = False
        self._head_seq = await self._move_head(manifest)
        for name in self._base.keys() - draft.layouts.keys():
            del self._base[name]
        self._parent = manifest
        self._count_chain((manifest,))
        self.stats = _stats(manifest, encoded, time.monotonic() - self._began)
        self._ready = True
        return manifest

    def _count_chain(self, steps: Iterable[Manifest]) -> None:
        """Keep what following the chain since its full costs; `steps` in order."""
        for step in steps:
            if step.full is not None:
                self._full_bytes, self._delta_bytes = step.full.nbytes, 0
            elif step.delta is not None:
                self._delta_bytes += step.delta.nbytes

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
        for name, tensor in state.items():
            held, _ = self.room(name, tensor.layout, make=True)
            assert held is not None
            np.copyto(held.data, tensor.data)


def _stats(manifest: Manifest, encoded: Encoded, wall_s: float) -> PublishStats:
    delta, full = manifest.delta, manifest.full
    return PublishStats(
        manifest.version, encoded.encode_s, encoded.upload_s, wall_s, manifest.nbytes, delta.nbytes if delta else 0,
        full.nbytes if full else 0, (delta or full).changed / max(1, manifest.elements),  # type: ignore[union-attr]
    )


def _manifest(
    run: str, draft: Draft, parent: Manifest | None, encoded: Encoded, *, consumed: tuple[str, ...], numerics: dict[str, Any],
    batch: BlobRef | None,
) -> Manifest:
    entries: list[TensorEntry] = []
    first = 0
    for name, layout in draft.layouts.items():
        last = first + DIGEST_BYTES * layout.shard_count
        digest = tensor_digest_of(name, layout, encoded.digests[first:last])
        entries.append(TensorEntry(name=name, dtype=layout.dtype, shape=layout.shape, digest=digest))
        first = last
    return Manifest(
        run=run,
        version=draft.version,
        parent=None if parent is None else parent.link,
        chain=_chain(parent),
        shard_bytes=SHARD_BYTES,
        tensors=tuple(entries),
        shard_digests=np.frombuffer(encoded.digests, np.uint8).reshape(-1, DIGEST_BYTES),
        digest=state_digest_of(entry.digest for entry in entries),
        delta=encoded.delta,
        full=encoded.full,
        learner_step=draft.learner_step,
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
