"""The reader: which version is current, and any version's weights, exactly or not at all.

Everything starts from the head. A manifest is taken only under the seal that the head, or a manifest reached from it, names, so
the reader never follows a writer that lost. Weights come by the cheapest path of a full and deltas; when a path turns out
damaged the next one is tried, and only when none is left is IntegrityError raised, with what was wrong with each. A head that
cannot be read is an error and never "no version yet": serving the starting weights by mistake is worse than stopping.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field

from driftline.messages.bus import Bus
from driftline.messages.errors import BrokerUnavailable, IntegrityError, MalformedMessage
from driftline.messages.subjects import Subjects
from driftline.policy_store.applying import apply_encoding
from driftline.policy_store.blobs import BlobStore
from driftline.policy_store.manifest import Link, Manifest, PolicyHead, manifest_subject
from driftline.policy_store.tensor import HostTensor, State
from driftline.policy_store.workers import Workers, bounded, shared_workers

__all__ = ["Path", "PolicyReader", "ReaderCounts"]

MANIFESTS_KEPT = 64
FULLS_TRIED = 3
"""How many fulls back a path may start: the newest and two to fall back on."""


@dataclass(frozen=True)
class Path:
    """A way to a version: the full of `steps[0]`, then the deltas of the rest."""

    steps: tuple[Manifest, ...]

    @property
    def nbytes(self) -> int:
        first = self.steps[0].full
        return (first.nbytes if first else 0) + delta_bytes(self.steps[1:])

    def __str__(self) -> str:
        return "full " + " + delta ".join(str(step.version) for step in self.steps)


@dataclass
class ReaderCounts:
    """What the reader did; the holder turns these into metrics."""

    materialised: int = 0
    advanced: int = 0
    fallbacks: int = 0
    bytes_read: int = 0
    refused: list[str] = field(default_factory=list)


class PolicyReader:
    def __init__(
        self,
        bus: Bus,
        blobs: BlobStore,
        run: str,
        *,
        workers: Workers | None = None,
        blob_timeout_s: float = 120.0,
        outage_s: float = 120.0,
    ) -> None:
        """`outage_s`: how long `watch` rides out a broker that does not answer."""
        self.run, self.counts = run, ReaderCounts()
        self._bus, self._blobs, self._workers = bus, blobs, workers or shared_workers()
        self._subjects = Subjects(run)
        self._policy = self._subjects.stream("POLICY")
        self._blob_timeout_s, self._outage_s = blob_timeout_s, outage_s
        self._manifests: OrderedDict[str, Manifest] = OrderedDict()

    async def head(self) -> PolicyHead | None:
        """The current version, or None before the first. An unreadable head is an error: see the module."""
        stored = await self._bus.last(self._policy, self._subjects.head)
        if stored is None:
            return None
        if not isinstance(stored.message, PolicyHead):
            raise IntegrityError("not a policy head", field="head", value=type(stored.message).__name__)
        return stored.message

    async def watch(self, *, poll_s: float = 1.0) -> AsyncIterator[PolicyHead]:
        """The head now and each later one (the newest: some may be skipped). Ends only by cancellation or `aclose()`.

        A push wakes it; the poll makes a lost push cost at most `poll_s`. The store is the truth.
        """
        woken = asyncio.Event()
        seen: PolicyHead | None = None
        heard = time.monotonic()
        push = asyncio.create_task(self._wake(woken))
        try:
            while True:
                woken.clear()
                try:
                    head = await self.head()
                    heard = time.monotonic()
                except BrokerUnavailable:
                    if time.monotonic() - heard > self._outage_s:
                        raise
                    head = None
                if head is not None and head != seen:
                    if seen is not None and head.version <= seen.version:
                        raise IntegrityError(f"it was at version {seen.version}", field="head", value=head.version,
                                             remedy="the policy stream was rewritten: restart the run's services")
                    seen = head
                    yield head
                if push.done():  # the push is only an accelerator: its failures are the poll's to judge
                    push = asyncio.create_task(self._wake(woken))
                with suppress(TimeoutError):
                    async with asyncio.timeout(poll_s):
                        await woken.wait()
        finally:
            push.cancel()
            await asyncio.wait([push])

    async def _wake(self, woken: asyncio.Event) -> None:
        with suppress(BrokerUnavailable, MalformedMessage):
            async for _ in self._bus.follow(self._policy, self._subjects.head):
                woken.set()

    async def manifest(self, version: int) -> Manifest:
        """The manifest of a version in the head's lineage. IntegrityError when there is none or it was collected."""
        head = await self.head()
        if head is None or version > head.version or version < 0:
            newest = "nothing is published" if head is None else f"the head is at {head.version}"
            raise IntegrityError(newest, field="version", value=version)
        return await self.manifest_from(head.link, version)

    async def manifest_from(self, start: Link, version: int) -> Manifest:
        """The manifest of `version`, reached from the one of `start` (the head, or a pin)."""
        link = start
        while True:
            manifest = await self.load(link)
            if manifest.version == version:
                return manifest
            if not manifest.chain:
                raise IntegrityError(f"no such ancestor of version {start.version}", field="version", value=version)
            first = manifest.chain[0].version
            link = manifest.chain[max(0, version - first)]

    async def load(self, link: Link) -> Manifest:
        """The manifest a link names, checked against the link's seal."""
        known = self._manifests.get(link.seal)
        if known is not None:
            self._manifests.move_to_end(link.seal)
            return known
        where = f"manifest of version {link.version}"
        try:
            stored = await self._bus.last(self._policy, manifest_subject(self.run, link))
        except MalformedMessage as error:
            raise IntegrityError(f"unreadable: {error}", field=where, value=link.seal) from error
        if stored is None:
            raise IntegrityError("not in the store", field=where, value=link.seal, remedy="collected, or never published")
        manifest = stored.message
        if not isinstance(manifest, Manifest) or manifest.link != link or manifest.run != self.run:
            raise IntegrityError("another message is in its place", field=where, value=link.seal)
        self._manifests[link.seal] = manifest
        if len(self._manifests) > MANIFESTS_KEPT:
            self._manifests.popitem(last=False)
        return manifest

    async def lineage(self, start: Link) -> AsyncIterator[Manifest]:
        """The manifest of `start`, its parent, and so on back to the first or to where they were collected."""
        link: Link | None = start
        while link is not None:
            try:
                manifest = await self.load(link)
            except IntegrityError:
                if link == start:
                    raise
                return
            yield manifest
            link = manifest.parent

    async def paths(self, target: Manifest) -> list[Path]:
        """The ways to a version, cheapest first: from each of the newest `FULLS_TRIED` fulls at or before it."""
        found: list[Path] = []
        steps: list[Manifest] = []
        async for manifest in self.lineage(target.link):
            steps.insert(0, manifest)
            if manifest.full is not None:
                found.append(Path(tuple(steps)))
            if manifest.delta is None or len(found) == FULLS_TRIED:
                break
        return sorted(found, key=lambda path: path.nbytes)

    async def reachable(self, link: Link) -> Path:
        """The cheapest path to a version whose blobs are all in the store; IntegrityError when there is none. Reads no weights."""
        self._manifests.pop(link.seal, None)  # the question is what the store has now
        target = await self.load(link)
        for path in await self.paths(target):
            first, rest = path.steps[0], path.steps[1:]
            packs = [*(first.full.packs if first.full else ()), *(pack for step in rest if step.delta for pack in step.delta.packs)]
            if all(await bounded(lambda pack: self._blobs.has(pack.ref), packs, 8)):
                return path
        raise IntegrityError("no path to it is complete", field="version", value=link.version, remedy="it was collected")

    async def materialise(self, version: int) -> State:
        """The weights of a version, every shard verified."""
        return await self.materialise_manifest(await self.manifest(version))

    async def materialise_manifest(self, target: Manifest) -> State:
        refused: list[str] = []
        for path in await self.paths(target):
            try:
                state = await self.walk(path)
            except IntegrityError as error:
                refused.append(f"{path}: {error}")
                self._refuse(refused[-1])
            else:
                self.counts.materialised += 1
                return state
        raise IntegrityError("; ".join(refused) or "no full leads to it", field="version", value=target.version,
                             remedy="every path is damaged or collected: restore the blobs, or take another version")

    async def advance(self, state: State, from_version: int, to_version: int, *, fallback: bool = True) -> State:
        """`state`, known to be `from_version`, as `to_version`: in place by deltas, and the same object, where possible.

        Takes `state` over: use only what is returned. When the state is not what it was taken for, or bytes are damaged, it is
        emptied and a fresh state is materialised instead; with `fallback=False` IntegrityError is raised.
        """
        target = await self.manifest(to_version)
        try:
            steps = await self._between(target, from_version)
            if fallback and len(steps) > 2 and await self._cheaper_from_full(target, steps[1:]):
                return await self.materialise_manifest(target)
            base = steps[0]
            for step in steps[1:]:
                if step.delta is None:
                    raise IntegrityError("it has no delta", field="version", value=step.version)
                await apply_encoding(state, step, step.delta, self._blobs, self._workers, base=base,
                                     check_base=base is steps[0], blob_timeout_s=self._blob_timeout_s)
                self.counts.bytes_read += step.delta.nbytes
                base = step
        except IntegrityError as error:
            self._refuse(f"advance {from_version} to {to_version}: {error}")
            state.clear()
            if not fallback:
                raise
            self.counts.fallbacks += 1
            return await self.materialise_manifest(target)
        self.counts.advanced += 1
        return state

    async def _between(self, target: Manifest, from_version: int) -> list[Manifest]:
        """The manifests from `from_version` to the target, in order."""
        if from_version >= target.version:
            raise IntegrityError(f"not before version {target.version}", field="from_version", value=from_version)
        steps = [target]
        while steps[0].version > from_version:
            if steps[0].parent is None:
                raise IntegrityError(f"not an ancestor of version {target.version}", field="from_version",
                                     value=from_version)
            steps.insert(0, await self.load(steps[0].parent))
        return steps

    async def _cheaper_from_full(self, target: Manifest, deltas: list[Manifest]) -> bool:
        paths = await self.paths(target)
        return bool(paths) and paths[0].nbytes < delta_bytes(deltas)

    async def walk(self, path: Path) -> State:
        """The weights by this path and no other."""
        first = path.steps[0]
        if first.full is None:
            raise IntegrityError("it has no full", field="version", value=first.version)
        state: State = {name: HostTensor.empty(layout) for name, layout in first.layouts().items()}
        await apply_encoding(state, first, first.full, self._blobs, self._workers, base=None,
                             blob_timeout_s=self._blob_timeout_s)
        for base, step in zip(path.steps, path.steps[1:], strict=False):
            if step.delta is None:
                raise IntegrityError("it has no delta", field="version", value=step.version)
            await apply_encoding(state, step, step.delta, self._blobs, self._workers, base=base, check_base=False,
                                 blob_timeout_s=self._blob_timeout_s)
        self.counts.bytes_read += path.nbytes
        return state

    def _refuse(self, why: str) -> None:
        self.counts.refused.append(why)
        del self.counts.refused[:-16]


def delta_bytes(steps: tuple[Manifest, ...] | list[Manifest]) -> int:
    return sum(step.delta.nbytes for step in steps if step.delta is not None)
