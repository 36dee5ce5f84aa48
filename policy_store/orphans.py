"""Orphans: blobs that no manifest and no shortcut names, left by a publish that crashed before its manifest was stored.

A blob that nothing names may also be on its way to becoming a version's: it is content-addressed, so a learner that starts again after a
crash puts the same bytes, finds them there, and names them minutes later, however old they are. No clock tells the two apart, but a pack
opens with its version, and only the version after the head can be on its way. So a blob goes when nothing names it in two looks, the
head has moved on to at least that version between them, and `age_s` have passed too (for shortcuts, which are not versions).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from driftline.messages.bus import Bus
from driftline.messages.subjects import Subjects
from driftline.policy_store.blobs import BlobStore, StoredBlob

__all__ = ["ORPHAN_AGE_S", "Orphans", "named_in_store"]

ORPHAN_AGE_S = 3600.0


class _Sighting(NamedTuple):
    at: float
    head: int


class Orphans:
    """Remembers what nothing named; `look` from time to time."""

    def __init__(self, blobs: BlobStore, age_s: float = ORPHAN_AGE_S) -> None:
        self._blobs, self._age_s = blobs, age_s
        self._seen: dict[str, _Sighting] = {}

    @property
    def suspected(self) -> int:
        return len(self._seen)

    async def stored(self) -> list[StoredBlob]:
        return [blob async for blob in self._blobs.list()]

    def judge(
        self, stored: Collection[StoredBlob], named: Collection[str], *, head_before: int, head_after: int, now: float
    ) -> list[StoredBlob]:
        """Those of `stored` that may be deleted. `named`: digests of every blob of every manifest and shortcut, read after `stored` and
        after `head_before`, so that all that this head and those before it hold is in it; `head_after` was read after `stored`."""
        unnamed = {blob.digest: blob for blob in stored if blob.digest not in named}
        due = [
            blob for digest, blob in unnamed.items()
            if (seen := self._seen.get(digest)) is not None and head_before > seen.head and now - seen.at >= self._age_s
        ]
        self._seen = {digest: self._seen.get(digest, _Sighting(now, head_after)) for digest in unnamed}
        for blob in due:
            del self._seen[blob.digest]
        return due


async def named_in_store(bus: Bus, run: str) -> tuple[set[str], set[str]]:
    """Seals of the manifests, and subjects of the shortcuts, that are stored now: what one must know of before judging."""
    names = Subjects(run)
    stream, root = names.stream("POLICY"), f"{names.root}.policy"
    manifests = await bus.subjects(stream, f"{root}.manifest.>")
    shortcuts = await bus.subjects(stream, f"{root}.shortcut.>")
    return {subject.rpartition(".")[2] for subject in manifests}, set(shortcuts)
