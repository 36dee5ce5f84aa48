"""The policy store: takes every version the way a stranger would, and says whether it is what the learner said it is.

Guarantees: a version counts as verified only when its weights, read back from the blobs, have the head's digest, and every full it
carries has been read too; the mirror holds verified versions only, each directory complete; collection deletes nothing that the
head, a pin or a kept version needs (`driftline.policy_store.collect`). Damaged bytes that no path gets around end the service with
IntegrityError: everyone who reads that version will meet them. It ends when the run is finished and the last version is verified.
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
from driftline.messages.subjects import Subjects
from driftline.policy_store.blobs import BlobStore
from driftline.policy_store.checkpoint import keep_newest, write_checkpoint
from driftline.policy_store.collect import Version, collect, plan
from driftline.policy_store.manifest import Manifest, PolicyHead
from driftline.policy_store.paths import Path as PolicyPath
from driftline.policy_store.paths import full_step
from driftline.policy_store.pins import pin, pins
from driftline.policy_store.reader import PolicyReader
from driftline.policy_store.tensor import State, state_digest
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
        keep_start: bool = True,
        mirror_dir: Path | None = None,
        mirror_keep: int = 2,
        mirror_beside: Mapping[str, bytes] | None = None,
        finish_wait_s: float = 120.0,
        reporter: Reports | None = None,
    ) -> None:
        """`keep_versions` = 0 collects nothing; `keep_start` pins version 0, where every recording starts. `mirror_beside`: files to put next to the mirrored weights, as a model's config."""
        self._bus, self._blobs, self.run_id = bus, blobs, run
        self._keep_versions, self._finish_wait_s = keep_versions, finish_wait_s
        self._pin_start = keep_start and keep_versions > 0
        self._mirror_dir, self._mirror_keep, self._beside = mirror_dir, mirror_keep, dict(mirror_beside or {})
        self._reporter: Reports = reporter or Reporter(bus, run, "policy-store")
        self._subjects = Subjects(run)
        self._reader = PolicyReader(bus, blobs, run)
        self._known: dict[str, Version] = {}
        self._state: State = {}
        self._verified = asyncio.Condition()
        self.verified_version = -1
        self.verified_count = 0
        self.collected_versions = 0
        self.collected_bytes = 0
        self.collection_blocked = ""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            workers = [
                tasks.create_task(self._learn_manifests(), name="manifests"),
                tasks.create_task(self._follow_head(), name="head"),
            ]
            end = await finished(self._bus, self.run_id)
            await self._until_verified(end.version)
            log.info("run finished", version=end.version, reason=end.reason, verified=self.verified_count)
            for worker in workers:
                worker.cancel()

    async def _learn_manifests(self) -> None:
        """Every manifest ever stored and not yet deleted, those of lost races and crashes too: collection needs to know them."""
        history = self._bus.follow(self._subjects.stream("POLICY"), f"{self._subjects.root}.policy.manifest.>")
        async with aclosing(history) as stored_manifests:  # type: ignore[type-var]
            async for stored in stored_manifests:
                if isinstance(stored.message, Manifest):
                    self._known[stored.message.seal] = Version.of(stored.message)

    async def _follow_head(self) -> None:
        async with aclosing(self._reader.watch()) as heads:  # type: ignore[type-var]
            async for head in heads:
                await self.take(head)

    async def take(self, head: PolicyHead) -> None:
        """Verify the head's version, mirror it, collect what it made old, and report."""
        began = time.monotonic()
        manifest = await self._verify(head)
        verify_s = time.monotonic() - began
        log.info("version verified", version=head.version, digest=head.digest, kind=manifest.kind, seconds=round(verify_s, 3))
        if self._mirror_dir is not None:
            await asyncio.to_thread(self._mirror, self._mirror_dir, manifest)
        if self._pin_start:
            await self._keep_start()
        if self._keep_versions:
            await self._collect(head)
        await self._reporter.report(self._numbers(manifest, verify_s), step=head.version)
        async with self._verified:
            self.verified_version = head.version
            self._verified.notify_all()

    async def _verify(self, head: PolicyHead) -> Manifest:
        manifest = await self._reader.load(head.link)
        before = self.verified_version
        if self._state:
            self._state = await self._reader.advance(self._state, before, head.version)
        else:
            self._state = await self._reader.materialise_manifest(manifest)
        found = await asyncio.to_thread(state_digest, self._state)
        if found != head.digest:
            raise IntegrityError(f"version {head.version} is {found} when read back", field="head digest", value=head.digest,
                                 remedy="the learner and the store disagree: stop, and compare the run's manifests")
        async for step in self._reader.lineage(head.link):
            if step.version <= before:
                break
            full = full_step(step)
            if full is not None:
                await self._reader.walk(PolicyPath((full,)))  # a follower steps over fulls: nobody else reads them until needed
            self.verified_count += 1
            if before < 0:
                break  # what was published before this service started is verified when it is part of a path
        return manifest

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

    async def _collect(self, head: PolicyHead) -> None:
        held = [pin.link for pin in await pins(self._bus, self.run_id)]
        chosen = plan(self._known, head.link, self._keep_versions, held)
        if chosen.blocked != self.collection_blocked and chosen.blocked:
            log.info("nothing is collected yet", cause=chosen.blocked)
        self.collection_blocked = chosen.blocked
        for version in chosen.delete:
            gone = await collect(self._bus, self._blobs, self.run_id, [version])
            del self._known[version.link.seal]
            self.collected_versions += gone.versions
            self.collected_bytes += gone.nbytes
            log.info("version collected", version=version.link.version, blobs=gone.blobs, bytes=gone.nbytes)

    def _numbers(self, manifest: Manifest, verify_s: float) -> dict[str, float]:
        delta, full = manifest.delta, manifest.full
        counts = self._reader.counts
        return {
            "version": manifest.version,
            "verified": self.verified_count,
            "verify_s": verify_s,
            "bytes_raw": manifest.nbytes,
            "bytes_delta": delta.nbytes if delta is not None else 0,
            "bytes_full": full.nbytes if full is not None else 0,
            "changed_share": delta.changed / max(1, manifest.elements) if delta is not None else 0.0,
            "fallbacks": counts.fallbacks,
            "collected_versions": self.collected_versions,
            "collected_bytes": self.collected_bytes,
            "known_versions": len(self._known),
        }

    async def _until_verified(self, version: int) -> None:
        try:
            async with asyncio.timeout(self._finish_wait_s), self._verified:
                await self._verified.wait_for(lambda: self.verified_version >= version)
        except TimeoutError as error:
            raise BrokerUnavailable(f"the last version is {version}, verified up to {self.verified_version}", field="version",
                                    value=version, remedy="was its head ever published?") from error
