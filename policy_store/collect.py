"""Collection: old versions go, and nothing that anyone may still need goes with them.

Kept are the newest `keep_versions` of the head's lineage, every pinned version, and for each of these the chain that makes it: its own
full, or the deltas back to the newest full before it. What else is known and not newer than the head is deleted, losers of races and
leftovers of crashes included. The rule is pure and says nothing on partial knowledge: when any chain it must keep is not known to
its full, it deletes nothing and says why. Within a version the blobs go first and the manifest last, so a collection that was cut off
finds the rest again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from driftline.messages.blobs import BlobRef
from driftline.messages.bus import Bus
from driftline.messages.subjects import Subjects
from driftline.policy_store.blobs import BlobStore
from driftline.policy_store.manifest import Link, Manifest, manifest_subject
from driftline.policy_store.pins import pins
from driftline.policy_store.reader import PolicyReader

__all__ = ["Collected", "Plan", "Version", "collect", "plan", "survey"]


@dataclass(frozen=True)
class Version:
    """What collection needs to know of a manifest."""

    link: Link
    parent: Link | None
    full: bool
    blobs: frozenset[BlobRef]

    @classmethod
    def of(cls, manifest: Manifest) -> Version:
        return cls(manifest.link, manifest.parent, manifest.full is not None, frozenset(pack.ref for pack in manifest.packs))


@dataclass(frozen=True)
class Plan:
    """`delete` oldest first; `blocked` says why nothing may be deleted, and is empty otherwise."""

    keep: frozenset[str]
    delete: tuple[Version, ...]
    blocked: str = ""


@dataclass(frozen=True)
class Collected:
    versions: int
    blobs: int
    nbytes: int


def plan(known: Mapping[str, Version], head: Link, keep_versions: int, pinned: Iterable[Link] = ()) -> Plan:
    """What may go, of the versions `known` by seal."""
    lineage = _lineage(known, head)
    oldest_kept = head.version - max(1, keep_versions) + 1
    # By number, not by lineage: a version whose descent is not known is kept, and then so is what it is made from.
    recent = [v.link for v in known.values() if oldest_kept <= v.link.version <= head.version and not _lost(v, lineage, head)]
    targets = [head, *recent, *pinned]
    keep: set[str] = set()
    for target in targets:
        chain = _chain(known, target)
        if chain is None:
            return Plan(frozenset(known), (), f"the chain of version {target.version} is not known to its full")
        keep |= chain
    delete = [
        version
        for seal, version in known.items()
        if seal not in keep and (version.link.version < oldest_kept or _lost(version, lineage, head))
    ]
    kept_blobs = frozenset(blob for seal in keep for blob in known[seal].blobs)
    delete.sort(key=lambda version: version.link.version)
    return Plan(frozenset(keep), tuple(
        Version(version.link, version.parent, version.full, version.blobs - kept_blobs) for version in delete
    ))


def _lost(version: Version, lineage: Mapping[int, Link], head: Link) -> bool:
    """Whether another manifest is known to be the policy of this version's number."""
    rightful = lineage.get(version.link.version)
    return version.link.version <= head.version and rightful is not None and rightful != version.link


def _lineage(known: Mapping[str, Version], head: Link) -> dict[int, Link]:
    """The head's ancestors by version, as far back as they are known."""
    lineage: dict[int, Link] = {}
    link: Link | None = head
    while link is not None and link.seal in known:
        lineage[link.version] = link
        link = known[link.seal].parent
    return lineage


def _chain(known: Mapping[str, Version], target: Link) -> set[str] | None:
    """The seals that make a version, or None when they are not all known."""
    chain: set[str] = set()
    link: Link | None = target
    while link is not None and link.seal in known:
        chain.add(link.seal)
        if known[link.seal].full:
            return chain
        link = known[link.seal].parent
    return None


async def survey(bus: Bus, reader: PolicyReader) -> dict[str, Version]:
    """The versions reachable from the head and the pins. What lost a race is seen only by following the manifests."""
    known: dict[str, Version] = {}
    head = await reader.head()
    starts = [] if head is None else [head.link]
    starts += [pin.link for pin in await pins(bus, reader.run)]
    for start in starts:
        async for manifest in reader.lineage(start):
            if manifest.seal in known:
                break
            known[manifest.seal] = Version.of(manifest)
    return known


async def collect(bus: Bus, blobs: BlobStore, run: str, deletions: Iterable[Version]) -> Collected:
    """Carry a plan out."""
    versions = count = nbytes = 0
    for version in deletions:
        for blob in sorted(version.blobs):
            await blobs.delete(blob)
            count += 1
            nbytes += blob.size
        await bus.purge(Subjects(run).stream("POLICY"), manifest_subject(run, version.link))
        versions += 1
    return Collected(versions, count, nbytes)
