"""The reader: which version is current, and any version's weights, exactly or not at all.

Everything starts from the head. A manifest is taken only under the seal that the head, or a manifest reached from it, names, so
the reader never follows a writer that lost. Weights come by the cheapest path of fulls, deltas and shortcuts (`paths.py`); when a step
turns out damaged the cheapest path without it is tried, and only when none is left is IntegrityError raised, with what was wrong with
each: VersionCollected when the reason is that the version went while it was read. A head that cannot be read is an error and never "no
version yet": serving the starting weights by mistake is worse than stopping.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection
from contextlib import suppress
from dataclasses import dataclass, field

from driftline.messages.bus import Bus
from driftline.messages.errors import BrokerUnavailable, IntegrityError, MalformedMessage
from driftline.messages.subjects import Subjects
from driftline.policy_store.applying import Seen, apply_encoding
from driftline.policy_store.blobs import BlobStore
from driftline.policy_store.manifest import Link, Manifest, PolicyHead, manifest_subject
from driftline.policy_store.mapped import Allocate, in_memory
from driftline.policy_store.paths import Edge, Path, Step, descend, ways
from driftline.policy_store.pinned import read_pins
from driftline.policy_store.shortcuts import Shortcut, bases, load_shortcut
from driftline.policy_store.tensor import State
from driftline.policy_store.workers import Workers, bounded, shared_workers

__all__ = ["DamagedStep", "Path", "PolicyReader", "ReaderCounts", "VersionCollected"]

MANIFESTS_KEPT = 64
PATHS_TRIED = 16


class VersionCollected(IntegrityError):
    """The version is not in the store any more: nothing is damaged, and the head is where to go on."""


class DamagedStep(IntegrityError):
    """A step of a path could not be taken; `edge` says which."""

    def __init__(self, step: Step, cause: IntegrityError) -> None:
        super().__init__(cause.problem, field=cause.field, value=cause.value, remedy=cause.remedy)
        self.edge = step.edge


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
        allocate: Allocate = in_memory,
    ) -> None:
        """`outage_s`: how long `watch` rides out a broker that does not answer. `allocate`: where weights are materialised."""
        self.run, self.counts = run, ReaderCounts()
        self._bus, self._blobs, self._workers = bus, blobs, workers or shared_workers()
        self._subjects = Subjects(run)
        self._policy = self._subjects.stream("POLICY")
        self._blob_timeout_s, self._outage_s, self._allocate = blob_timeout_s, outage_s, allocate
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
                    _failure(push)
                    push = asyncio.create_task(self._wake(woken))
                with suppress(TimeoutError):
                    async with asyncio.timeout(poll_s):
                        await woken.wait()
        finally:
            push.cancel()
            await asyncio.wait([push])
            _failure(push)

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
            raise VersionCollected("not in the store", field=where, value=link.seal, remedy="collected, or never published")
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

    async def shortcut(self, target: Link, base: int | None) -> Shortcut | None:
        """The shortcut to a version from another (None: its rebase), or None. IntegrityError when it is damaged."""
        try:
            return await load_shortcut(self._bus, self.run, target, base)
        except IntegrityError as error:
            self._refuse(str(error))
            raise

    async def shortcuts(self, target: Link) -> list[Shortcut]:
        """Every readable shortcut to a version."""
        found = []
        for base in (*bases(target.version, 0), None):
            with suppress(IntegrityError):
                shortcut = await self.shortcut(target, base)
                if shortcut is not None:
                    found.append(shortcut)
        return found

    async def paths(self, target: Manifest, without: Collection[Edge] = ()) -> list[Path]:
        """The ways to a version, cheapest first: from its rebase, and from each of the newest fulls at or before it."""
        return await ways(self, target, without)

    async def reachable(self, link: Link, without: Collection[str] = ()) -> Path:
        """The cheapest path to a version whose blobs are all in the store; IntegrityError when there is none. Reads no weights.

        `without`: seals of versions that are about to go.
        """
        self._manifests.pop(link.seal, None)  # the question is what the store has now
        target = await self.load(link)
        avoided: set[Edge] = set()
        for _ in range(PATHS_TRIED):
            paths = await self.paths(target, avoided)
            if not paths:
                break
            lacking = await self._lacking(paths[0], without)
            if lacking is None:
                return paths[0]
            avoided.add(lacking.edge)
        raise VersionCollected("no path to it is complete", field="version", value=link.version, remedy="it was collected")

    async def _lacking(self, path: Path, without: Collection[str] = ()) -> Step | None:
        """The first step of which a version is going or a blob is not in the store."""
        for step in path.steps:
            if step.manifest.seal in without:
                return step
            if not all(await bounded(lambda pack: self._blobs.has(pack.ref), step.encoding.packs, 8)):
                return step
        return None

    async def materialise(self, version: int) -> State:
        """The weights of a version, every shard verified."""
        return await self.materialise_manifest(await self.manifest(version))

    async def materialise_manifest(self, target: Manifest) -> State:
        """The weights of this manifest. VersionCollected when it went meanwhile, IntegrityError when every path is damaged."""
        refused: list[str] = []
        without: set[Edge] = set()
        for _ in range(PATHS_TRIED):
            paths = await self.paths(target, without)
            if not paths:
                break
            try:
                state = await self.walk(paths[0])
            except DamagedStep as error:
                without.add(error.edge)
                refused.append(f"{paths[0]}: {error}")
                self._refuse(refused[-1])
            else:
                self.counts.materialised += 1
                return state
        if await self._going(target, without):
            raise VersionCollected("it was collected", field="version", value=target.version, remedy="take the head's version")
        raise IntegrityError("; ".join(refused) or "no full leads to it", field="version", value=target.version,
                             remedy="every path is damaged or collected: restore the blobs, or take another version")

    async def _going(self, target: Manifest, failed: Collection[Edge]) -> bool:
        """Whether a version that could not be made is being collected, or what it is made from: blobs go before their manifests."""
        made_whole = any(edge.target == target.seal and edge.base is None for edge in failed)
        links = (target.link,) if made_whole else (target.link, *target.chain)
        going: set[str] = set()
        with suppress(IntegrityError):  # what is wrong with the pins is not what is wrong here
            said, _ = await read_pins(self._bus, self.run)
            going = set() if said is None else {link.seal for link in said.condemned}
        return any([link.seal in going or not await self.stored(link) for link in links])

    async def stored(self, link: Link) -> bool:
        """Whether there is a manifest under this link, readable or not."""
        try:
            return await self._bus.last(self._policy, manifest_subject(self.run, link)) is not None
        except MalformedMessage:
            return True

    async def advance(
        self, state: State, from_version: int, to_version: int, *, fallback: bool = True, seen: Seen | None = None
    ) -> State:
        """`state`, known to be `from_version`, as `to_version`: in place and the same object, where possible.

        Takes `state` over: use only what is returned. When the state is not what it was taken for, or bytes are damaged, it is
        emptied and a fresh state is materialised instead; with `fallback=False` IntegrityError is raised. `seen` is shown every
        shard that changes on the way.
        """
        target = await self.manifest(to_version)
        try:
            path = await self._between(target, from_version)
            if fallback and target.version - from_version > 1 and await self._cheaper_from_full(target, path):
                return await self.materialise_manifest(target)
            await self._take(state, path, seen)
        except IntegrityError as error:
            self._refuse(f"advance {from_version} to {to_version}: {error}")
            state.clear()
            if not fallback:
                raise
            self.counts.fallbacks += 1
            return await self.materialise_manifest(target)
        self.counts.advanced += 1
        return state

    async def _between(self, target: Manifest, from_version: int) -> Path:
        """The cheapest steps from `from_version` to the target; of its shortcuts, those whose packs are there."""
        if from_version >= target.version or from_version < 0:
            raise IntegrityError(f"not before version {target.version}", field="from_version", value=from_version)
        without: set[Edge] = set()
        while True:
            bottom, steps = await descend(self, target, from_version, without)
            if bottom.version != from_version:
                raise VersionCollected(f"no steps lead below version {bottom.version}", field="from_version", value=from_version,
                                       remedy="what lies between was collected")
            # A delta that is missing is damage; a shortcut may be collected at any time, and the state must not be torn for it.
            lacking = await self._lacking(Path(tuple(step for step in steps if step.shortcut)))
            if lacking is None:
                return Path(steps)
            without.add(lacking.edge)

    async def _cheaper_from_full(self, target: Manifest, path: Path) -> bool:
        paths = await self.paths(target)
        return bool(paths) and paths[0].nbytes < path.nbytes

    async def walk(self, path: Path) -> State:
        """The weights by this path and no other. DamagedStep says which of its steps could not be taken."""
        first = path.steps[0]
        state = self._allocate(first.manifest.layouts())
        await self._take(state, path)
        return state

    async def _take(self, state: State, path: Path, seen: Seen | None = None) -> None:
        for number, step in enumerate(path.steps):
            try:
                await apply_encoding(
                    state, step.manifest, step.encoding, self._blobs, self._workers, base=step.base, check_base=number == 0,
                    blob_timeout_s=self._blob_timeout_s, head=step.head, seen=seen,
                )
            except IntegrityError as error:
                raise DamagedStep(step, error) from error
            self.counts.bytes_read += step.encoding.nbytes

    def _refuse(self, why: str) -> None:
        self.counts.refused.append(why)
        del self.counts.refused[:-16]


def _failure(task: asyncio.Task[None]) -> BaseException | None:
    """What a finished task failed of; looking at it is what keeps asyncio from complaining that nobody did."""
    return None if task.cancelled() else task.exception()
