"""The policy store: takes every version the way a stranger would, and says whether it is what the learner said it is.

Guarantees: a version counts as verified only when its weights, read back from the blobs, have the head's digest, and every full it
carries has been read too; the mirror holds verified versions only, each directory complete; what is let go of is needed by nobody
(`keeping`), and shortcuts for those who come late are made only from verified versions (`bypasses`). Damaged bytes that no path gets around
end the service with IntegrityError: everyone who reads that version will meet them. It ends when the run is finished and the last version
is verified.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Protocol

import structlog

from driftline.messages.bus import Bus
from driftline.messages.errors import BrokerUnavailable, IntegrityError
from driftline.policy_store.blobs import BlobStore
from driftline.policy_store.checkpoint import keep_newest, write_checkpoint
from driftline.policy_store.collect import Retention
from driftline.policy_store.digests import digest_state
from driftline.policy_store.forms import DeltaForm
from driftline.policy_store.manifest import Manifest, PolicyHead
from driftline.policy_store.paths import Path as PolicyPath
from driftline.policy_store.paths import full_step
from driftline.policy_store.pins import pin
from driftline.policy_store.reader import PolicyReader
from driftline.policy_store.shortcuts import MAX_SPAN
from driftline.policy_store.tensor import State
from driftline.policy_store.unfold import unfold
from driftline.policy_store.workers import shared_workers
from driftline.services.policy_store.bypasses import Bypasses
from driftline.services.policy_store.followers import Followers
from driftline.services.policy_store.keeping import Keeping
from driftline.services.runtime import finished
from driftline.services.telemetry import Reporter

__all__ = ["PolicyStoreService", "Reports"]

log = structlog.get_logger("policy-store")

START_OWNER = "start"


class Reports(Protocol):
    async def report(self, values: Mapping[str, float], *, step: int = -1) -> None: ...


class PolicyStoreService:
    def __init__(
        self,
        bus: Bus,
        blobs: BlobStore,
        run: str,
        *,
        keep_versions: int = 20,
        keep_s: float = 0.0,
        keep_bytes: int = 0,
        keep_start: bool = True,
        grace_s: float = 0.0,
        shortcuts: bool = True,
        form: DeltaForm = DeltaForm.SMALL,
        mirror_dir: Path | None = None,
        mirror_keep: int = 2,
        mirror_beside: Mapping[str, bytes] | None = None,
        finish_wait_s: float = 120.0,
        reporter: Reports | None = None,
    ) -> None:
        """`keep_versions` = 0 collects nothing; `keep_start` pins version 0, where every recording starts. `form`: of the shortcuts.
        `mirror_beside`: files to put next to the mirrored weights, as a model's config."""
        self._bus, self._blobs, self.run_id = bus, blobs, run
        self._finish_wait_s = finish_wait_s
        self._pin_start = keep_start and keep_versions > 0
        self._mirror_dir, self._mirror_keep, self._beside = mirror_dir, mirror_keep, dict(mirror_beside or {})
        self._reporter: Reports = reporter or Reporter(bus, run, "policy-store")
        self._reader, self._workers = PolicyReader(bus, blobs, run), shared_workers()
        self._keeping = Keeping(bus, blobs, self._reader, Retention(keep_versions, keep_s, keep_bytes) if keep_versions else None,
                                grace_s=grace_s)
        self._bypasses = Bypasses(bus, blobs, self._workers, form=form, max_span=_longest_span(keep_versions, keep_s)) if shortcuts else None
        self._followers = Followers(bus, run)
        self._state: State = {}
        self._verified = asyncio.Condition()
        self.verified_version = -1
        self.verified_count = 0

    @property
    def collected_versions(self) -> int:
        return self._keeping.counts.collected_versions

    @property
    def shortcuts_stored(self) -> int:
        return 0 if self._bypasses is None else self._bypasses.stored

    @property
    def _shortcut_s(self) -> float:
        return 0.0 if self._bypasses is None else self._bypasses.seconds

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            workers = [
                tasks.create_task(self._keeping.learn(), name="manifests"),
                tasks.create_task(self._keeping.tidy(), name="tidy"),
                tasks.create_task(self._followers.follow(), name="followers"),
                tasks.create_task(self._follow_head(), name="head"),
            ]
            end = await finished(self._bus, self.run_id)
            await self._until_verified(end.version)
            log.info("run finished", version=end.version, reason=end.reason, verified=self.verified_count)
            for worker in workers:
                worker.cancel()

    async def _follow_head(self) -> None:
        async with aclosing(self._reader.watch()) as heads:  # type: ignore[type-var]
            async for head in heads:
                await self.take(head)

    async def take(self, head: PolicyHead) -> None:
        """Verify the head's version, mirror it, collect what it made old, and report."""
        began, besides = time.monotonic(), self._shortcut_s
        manifest = await self._verify(head)
        verify_s = time.monotonic() - began - (self._shortcut_s - besides)
        log.info("version verified", version=head.version, digest=head.digest, kind=manifest.kind, seconds=round(verify_s, 3))
        if self._mirror_dir is not None:
            await asyncio.to_thread(self._mirror, self._mirror_dir, manifest)
        if self._pin_start:
            await self._keep_start()
        await self._keeping.collect(head)
        await self._reporter.report(self._numbers(manifest, verify_s), step=head.version)
        async with self._verified:
            self.verified_version = head.version
            self._verified.notify_all()

    async def _verify(self, head: PolicyHead) -> Manifest:
        manifest = await self._reader.load(head.link)
        before = self.verified_version
        if self._state:
            for version in range(before + 1, head.version + 1):
                await self._step(await self._reader.manifest_from(head.link, version))
        else:
            self._state = await self._reader.materialise_manifest(manifest)
        found = await digest_state(self._state, self._workers)
        if found != head.digest:
            raise IntegrityError(f"version {head.version} is {found} when read back", field="head digest", value=head.digest,
                                 remedy="the learner and the store disagree: stop, and compare the run's manifests")
        async for step in self._reader.lineage(head.link):
            if step.version <= before:
                break
            full = full_step(step)
            if full is not None:  # a follower steps over fulls: nobody else reads them until needed
                async for _ in unfold(PolicyPath((full,)), self._blobs, self._workers, lambda _: None):
                    pass
            self.verified_count += 1
            if before < 0:
                break  # what was published before this service started is verified when it is part of a path
        return manifest

    async def _step(self, target: Manifest) -> None:
        """The weights moved on by one version, and the shortcuts that this completes."""
        counts = self._reader.counts
        if self._bypasses is None or target.parent is None:
            self._state = await self._reader.advance(self._state, target.version - 1, target.version)
            return
        fold = self._bypasses.begin(await self._reader.load(target.parent), target)
        others = counts.materialised
        self._state = await self._reader.advance(self._state, target.version - 1, target.version, seen=fold.see)
        if counts.materialised != others:
            self._bypasses.broken()
        else:
            await self._bypasses.add(fold, target, self._state)

    def _mirror(self, root: Path, manifest: Manifest) -> None:
        metadata = {"run": manifest.run, "version": str(manifest.version), "digest": manifest.digest,
                    "learner_step": str(manifest.learner_step), "format": "pt"}
        write_checkpoint(root, manifest.version, self._state, metadata, self._beside)
        keep_newest(root, self._mirror_keep)

    async def _keep_start(self) -> None:
        """Before the first collection; once is enough, and a version that is already gone cannot be kept."""
        self._pin_start = False
        try:
            await pin(self._bus, self._reader, 0, START_OWNER)
        except IntegrityError as error:
            log.info("version 0 is not kept", cause=str(error))

    def _numbers(self, manifest: Manifest, verify_s: float) -> dict[str, float]:
        delta, full = manifest.delta, manifest.full
        counts, kept, bypasses = self._reader.counts, self._keeping, self._bypasses
        lag = self._followers.lag(manifest.version)
        return {
            "version": manifest.version,
            "verified": self.verified_count,
            "verify_s": verify_s,
            "bytes_raw": manifest.nbytes,
            "bytes_delta": delta.nbytes if delta is not None else 0,
            "bytes_full": full.nbytes if full is not None else 0,
            "changed_share": delta.changed / max(1, manifest.elements) if delta is not None else 0.0,
            "fallbacks": counts.fallbacks,
            "collected_versions": kept.counts.collected_versions,
            "collected_bytes": kept.counts.collected_bytes,
            "collected_shortcuts": kept.counts.collected_shortcuts,
            "orphans": kept.counts.orphans,
            "rebased": kept.counts.rebased,
            "known_versions": len(kept.known),
            "stored_bytes": kept.stored_bytes,
            "shortcuts": self.shortcuts_stored,
            "shortcut_bytes": 0 if bypasses is None else bypasses.stored_bytes,
            "shortcut_s": self._shortcut_s,
            "readers": lag.readers,
            "readers_behind": lag.behind,
            "readers_lag_max": lag.furthest,
        }

    async def _until_verified(self, version: int) -> None:
        try:
            async with asyncio.timeout(self._finish_wait_s), self._verified:
                await self._verified.wait_for(lambda: self.verified_version >= version)
        except TimeoutError as error:
            raise BrokerUnavailable(f"the last version is {version}, verified up to {self.verified_version}", field="version",
                                    value=version, remedy="was its head ever published?") from error


def _longest_span(keep_versions: int, keep_s: float) -> int:
    """A shortcut is of use while both its ends are kept."""
    longest = 1
    while longest < MAX_SPAN and (keep_versions == 0 or keep_s or 2 * longest <= keep_versions):
        longest *= 2
    return longest
