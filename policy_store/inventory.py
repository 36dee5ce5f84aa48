"""Inventory: everything a run's policy stream and blob store hold, each against the other.

Where the service follows the stream and remembers, this looks once: every manifest there is (also of lost races and of crashes), every
shortcut, and every blob. `unnamed` are blobs that nothing names: leftovers, or a version on its way; `lacking` are blobs that something
names and the store does not have: damage. Nothing is changed.
"""

from __future__ import annotations

from dataclasses import dataclass

from driftline.messages.blobs import BlobRef
from driftline.messages.bus import Bus
from driftline.messages.errors import IntegrityError
from driftline.messages.subjects import Subjects
from driftline.policy_store.blobs import BlobStore, StoredBlob
from driftline.policy_store.collect import Chord, Version, survey_shortcuts
from driftline.policy_store.manifest import Link
from driftline.policy_store.reader import PolicyReader
from driftline.policy_store.workers import bounded

__all__ = ["Inventory", "take_stock"]

ASKED_AT_ONCE = 8


@dataclass(frozen=True)
class Lacking:
    """A blob that a version or a shortcut to it names and that is not in the store."""

    link: Link
    digest: str


@dataclass(frozen=True)
class Inventory:
    """`versions` and `chords` by seal; `unreadable`: manifests that are there and cannot be used, with why."""

    head: Link | None
    versions: dict[str, Version]
    chords: dict[str, Chord]
    unreadable: tuple[str, ...]
    unnamed: tuple[StoredBlob, ...]
    lacking: tuple[Lacking, ...]
    stored: int
    stored_bytes: int


async def take_stock(bus: Bus, blobs: BlobStore, reader: PolicyReader) -> Inventory:
    """Look at everything. What comes in meanwhile is known or not, and never wrongly called unnamed or lacking."""
    stored = [blob async for blob in blobs.list()]  # first: whoever names one of these has named it by the time manifests are read
    names = Subjects(reader.run)
    subjects = await bus.subjects(names.stream("POLICY"), f"{names.root}.policy.manifest.>")
    versions: dict[str, Version] = {}
    unreadable: list[str] = []
    for subject in sorted(subjects):
        number, seal = subject.split(".")[-2:]
        try:
            versions[seal] = Version.of(await reader.load(Link(version=int(number), seal=seal)))
        except (IntegrityError, ValueError) as error:  # pydantic's and int's: a subject that is no manifest's
            unreadable.append(f"{subject}: {error}")
    chords = await survey_shortcuts(reader, versions)
    head = await reader.head()
    named: dict[BlobRef, Link] = {blob: version.link for version in versions.values() for blob in version.blobs}
    named |= {blob: chord.target for chord in chords.values() for blob in chord.blobs}
    there = {blob.digest for blob in stored}
    suspects = sorted((blob for blob in named if blob.digest not in there), key=lambda blob: (named[blob].version, blob))
    found = await bounded(blobs.has, suspects, ASKED_AT_ONCE)  # it may have come since the list
    wanted = {blob.digest for blob in named}
    return Inventory(
        head=None if head is None else head.link, versions=versions, chords=chords, unreadable=tuple(unreadable),
        unnamed=tuple(blob for blob in stored if blob.digest not in wanted),
        lacking=tuple(Lacking(named[blob], blob.digest) for blob, has in zip(suspects, found, strict=True) if not has),
        stored=len(stored), stored_bytes=sum(blob.size for blob in stored),
    )
