"""Keeping: what the store knows of the run's versions and shortcuts, and what it lets go of, when nothing has needed it for a while.

Guarantees: every manifest and shortcut that is stored is known, those of lost races and crashes too; nothing is deleted that the head, a
pin, a lease or a kept version needs (`driftline.policy_store.collect`), or that was not unneeded for `grace_s`; a blob that nothing names
goes only when it cannot become a version's any more (`driftline.policy_store.orphans`). The work for one version depends on how many
are kept, not on how many were ever published, and at most `COLLECT_AT_ONCE` go at a time.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass

import structlog

from driftline.messages.bus import Bus
from driftline.messages.errors import BrokerUnavailable, IntegrityError
from driftline.messages.subjects import Subjects
from driftline.policy_store.blobs import BlobStore
from driftline.policy_store.collect import (
    Chord,
    Grace,
    Plan,
    Retention,
    Version,
    chain_of,
    collect,
    plan,
)
from driftline.policy_store.manifest import Link, Manifest, PolicyHead
from driftline.policy_store.orphans import ORPHAN_AGE_S, Orphans, named_in_store
from driftline.policy_store.pins import Pin, condemned, pins, release
from driftline.policy_store.reader import PolicyReader
from driftline.policy_store.shortcuts import Shortcut, shortcut_subject
from driftline.policy_store.squash import rebase

__all__ = ["Counts", "Keeping"]

log = structlog.get_logger("policy-store")

COLLECT_AT_ONCE = 16
ORPHANS_EVERY_S = 1800.0
CAUGHT_UP_S = 5.0
"""How soon to look for orphans again when a manifest was stored that this process has not seen yet."""
REBASE_GAIN = 0.5
"""A pinned version gets a full of its own when that frees this much more than the full takes."""


@dataclass
class Counts:
    collected_versions: int = 0
    collected_bytes: int = 0
    collected_shortcuts: int = 0
    orphans: int = 0
    rebased: int = 0


class Keeping:
    """`learn` and `tidy` run beside the service, which calls `collect` for each head."""

    def __init__(
        self, bus: Bus, blobs: BlobStore, reader: PolicyReader, retention: Retention | None, *, grace_s: float = 0.0,
        orphan_age_s: float = ORPHAN_AGE_S, orphans_every_s: float = ORPHANS_EVERY_S,
    ) -> None:
        """`retention` None: nothing is collected, and orphans stay."""
        self.known: dict[str, Version] = {}
        self.chords: dict[str, Chord] = {}
        self.counts, self.blocked = Counts(), ""
        self._bus, self._blobs, self._reader, self._retention = bus, blobs, reader, retention
        self._subjects = Subjects(reader.run)
        self._grace, self._orphans = Grace(grace_s), Orphans(blobs, orphan_age_s)
        self._orphans_every_s, self._orphans_at = orphans_every_s, 0.0
        self._one = asyncio.Lock()
        self._resumed = self._more = False
        self._head: Link | None = None
        self._moved = asyncio.Event()

    @property
    def stored_bytes(self) -> int:
        return sum(item.nbytes for item in self._stored)

    @property
    def _stored(self) -> tuple[Version | Chord, ...]:
        return (*self.known.values(), *self.chords.values())

    async def learn(self) -> None:
        """Every manifest and shortcut ever stored and not yet deleted."""
        history = self._bus.follow(self._subjects.stream("POLICY"), f"{self._subjects.root}.policy.>")
        async with aclosing(history) as stored_messages:  # type: ignore[type-var]
            async for stored in stored_messages:
                self.see(stored.message)

    def see(self, message: object) -> None:
        match message:
            case Manifest():
                self.known[message.seal] = Version.of(message)
            case Shortcut():
                self.chords[message.seal] = Chord.of(message)
            case _:
                pass

    async def tidy(self) -> None:
        """What becomes due while no version comes."""
        if self._retention is None:
            return
        while True:
            self._moved.clear()
            ripe_in = 0.0 if self._more else self._grace.next_in(time.time())
            due = [wait for wait in (ripe_in, self._orphans_at - time.monotonic()) if wait is not None]
            try:
                async with asyncio.timeout(max(0.0, min(due))):
                    await self._moved.wait()
            except TimeoutError:
                await self._tidy_now()

    async def _tidy_now(self) -> None:
        try:
            async with self._one:
                if self._head is not None:
                    await self._collect(self._head)
            if time.monotonic() >= self._orphans_at:
                caught_up = await self.sweep()
                self._orphans_at = time.monotonic() + (self._orphans_every_s if caught_up else CAUGHT_UP_S)
        except BrokerUnavailable as error:
            log.warning("not tidied now", cause=str(error))
            self._orphans_at = max(self._orphans_at, time.monotonic() + CAUGHT_UP_S)

    async def collect(self, head: PolicyHead) -> None:
        """Let go of what this head has made old, and of what was old before it for long enough."""
        if self._retention is None:
            return
        async with self._one:
            self._head = head.link
            await self._collect(head.link)
        self._moved.set()

    async def _collect(self, head: Link) -> None:
        now = time.time()
        try:
            told = await pins(self._bus, self._reader.run)
        except IntegrityError as error:  # what may not go cannot be told from what may
            self._block(str(error))
            return
        # One whose owner died between storing it and learning that the version was gone would stop all collection.
        held = tuple([pin for pin in told if pin.link.seal in self.known or await self._reader.stored(pin.link)])
        chosen = self._plan(head, held, now)
        self._block(chosen.blocked)
        ripe = self._grace.ripe([*(v.link.seal for v in chosen.delete), *(c.seal for c in chosen.chords)], now)
        if not self._resumed:
            ripe |= await self._begun(chosen)
        versions = [version for version in chosen.delete if version.link.seal in ripe][:COLLECT_AT_ONCE]
        chords = [chord for chord in chosen.chords if chord.seal in ripe][:COLLECT_AT_ONCE]
        gone = await collect(self._bus, self._blobs, self._reader.run, versions, shortcuts=chords, pinned=[pin.link for pin in told])
        self._more = not gone.refused and len(ripe) > len(versions) + len(chords)
        if gone.refused:
            return  # someone has pinned a version since: the next time is soon enough
        for version in versions:
            del self.known[version.link.seal]
            log.info("version collected", version=version.link.version, blobs=len(version.blobs), bytes=version.nbytes)
        for chord in chords:
            del self.chords[chord.seal]
        self.counts.collected_versions += gone.versions
        self.counts.collected_bytes += gone.nbytes
        self.counts.collected_shortcuts += gone.shortcuts
        await self._rebase_one(head, held, now)

    def _block(self, cause: str) -> None:
        if cause and cause != self.blocked:
            log.warning("nothing is collected yet", cause=cause)
        self.blocked = cause

    def _plan(self, head: Link, held: tuple[Pin, ...], now: float) -> Plan:
        assert self._retention is not None
        return plan(self.known, head, self._retention, [pin.link for pin in held], shortcuts=self.chords, now=now)

    async def _begun(self, chosen: Plan) -> set[str]:
        """Deletions that an earlier process began go on at once; what is kept after all, or is gone, is no longer said to be going."""
        begun = await condemned(self._bus, self._reader.run)
        going = {version.link.seal for version in chosen.delete}
        if begun:
            await release(self._bus, self._reader.run, [link for link in begun if link.seal not in going])
        self._resumed = not chosen.blocked
        return {link.seal for link in begun} & going

    async def _rebase_one(self, head: Link, held: tuple[Pin, ...], now: float) -> None:
        """A full of its own for a version that is pinned for good, where the chain it holds is worth more."""
        based = frozenset(chord.target.seal for chord in self.chords.values() if chord.base is None)
        for pin in held:
            version = self.known.get(pin.link.seal)
            if pin.until is not None or version is None or version.full or pin.link.seal in based:
                continue
            chain = chain_of(self.known, pin.link, based)
            needed = self._plan(head, tuple(other for other in held if other.link != pin.link), now)
            if chain is None or needed.blocked:
                continue
            freed = [self.known[seal] for seal in chain - needed.keep - {pin.link.seal}]
            full = max((entry.full_bytes for entry in freed), default=0)
            if full == 0 or sum(entry.nbytes for entry in freed) < (1 + REBASE_GAIN) * full:
                continue
            try:
                made = await rebase(self._bus, self._blobs, self._reader, await self._reader.load(pin.link))
            except IntegrityError as error:
                log.warning("a pinned version has no full of its own", version=pin.link.version, cause=str(error))
                continue
            self.see(made)
            self.counts.rebased += 1
            log.info("pinned version made whole", version=pin.link.version, bytes=made.encoding.nbytes)
            return

    async def sweep(self) -> bool:
        """Delete the blobs that nothing names and nothing can name any more. False when not every manifest stored is known yet."""
        before = await self._reader.head()
        stored = await self._orphans.stored()  # a long list may take long: no version waits for it
        async with self._one:
            after = await self._reader.head()
            manifests, shortcuts = await named_in_store(self._bus, self._reader.run)
            mine = {shortcut_subject(self._reader.run, chord.target, None if chord.base is None else chord.base.version)
                    for chord in self.chords.values()}
            if before is None or after is None or manifests - self.known.keys() or shortcuts - mine:
                return False
            named = {blob.digest for item in self._stored for blob in item.blobs}
            due = self._orphans.judge(stored, named, head_before=before.version, head_after=after.version, now=time.time())
            for blob in due:
                await self._blobs.delete(blob.ref)
                log.info("orphan collected", digest=blob.digest, bytes=blob.size)
            self.counts.orphans += len(due)
            return True
