"""Collection: old versions go, and nothing that anyone may still need goes with them.

Kept are the versions that `Retention` asks for, every pinned version, the head, and for each of these the chain that makes it: its own full
(one made afterwards too), or the deltas back to the newest full before it. What else is known and not newer than the head is deleted,
losers of races and leftovers of crashes included; a shortcut goes with either of its ends. The rule is pure and says nothing on partial
knowledge: when any chain it must keep is not known to its full, it deletes nothing and says why. It looks at what is kept, never at what
was ever published.

`collect` says in the pins which versions are going before it touches them (`pins.py`), then deletes blobs first and the manifest last, so a
collection that was cut off finds the rest again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from driftline.messages.blobs import BlobRef
from driftline.messages.bus import Bus
from driftline.messages.frames import claim_in, drop_claim
from driftline.messages.subjects import Subjects
from driftline.policy_store.blobs import BlobStore
from driftline.policy_store.manifest import Link, Manifest, manifest_subject
from driftline.policy_store.pins import condemn, pins, release
from driftline.policy_store.reader import PolicyReader, VersionCollected
from driftline.policy_store.shortcuts import Shortcut, shortcut_subject
from driftline.policy_store.workers import bounded

__all__ = ["Chord", "Collected", "Grace", "Plan", "Retention", "Version", "chain_of", "collect", "plan", "survey", "survey_shortcuts"]

DELETES_IN_FLIGHT = 4


@dataclass(frozen=True)
class Retention:
    """The newest `versions`, and those younger than `seconds`; `nbytes` (0: no bound) lets the oldest of these go until the rest fits."""

    versions: int
    seconds: float = 0.0
    nbytes: int = 0


@dataclass(frozen=True)
class Version:
    """What collection needs to know of a manifest. `at`: when it was published, in seconds since the epoch; `full_bytes`: of its full."""

    link: Link
    parent: Link | None
    full: bool
    blobs: frozenset[BlobRef]
    at: float = 0.0
    full_bytes: int = 0

    @classmethod
    def of(cls, manifest: Manifest) -> Version:
        full = manifest.full
        return cls(manifest.link, manifest.parent, full is not None, frozenset(pack.ref for pack in manifest.packs), manifest.at,
                   0 if full is None else full.nbytes)

    @property
    def nbytes(self) -> int:
        return sum(blob.size for blob in self.blobs)


@dataclass(frozen=True)
class Chord:
    """What collection needs to know of a shortcut."""

    seal: str
    target: Link
    base: Link | None
    blobs: frozenset[BlobRef]

    @classmethod
    def of(cls, shortcut: Shortcut) -> Chord:
        return cls(shortcut.seal, shortcut.target, shortcut.base, frozenset(pack.ref for pack in shortcut.encoding.packs))

    @property
    def ends(self) -> tuple[Link, ...]:
        return (self.target,) if self.base is None else (self.target, self.base)

    @property
    def nbytes(self) -> int:
        return sum(blob.size for blob in self.blobs)


@dataclass(frozen=True)
class Plan:
    """`delete` oldest first; `blocked` says why nothing may be deleted, and is empty otherwise."""

    keep: frozenset[str]
    delete: tuple[Version, ...]
    blocked: str = ""
    chords: tuple[Chord, ...] = ()
    """Shortcuts to delete."""


@dataclass(frozen=True)
class Collected:
    """`refused`: someone pinned a version meanwhile, so nothing was touched; plan again."""

    versions: int
    blobs: int
    nbytes: int
    shortcuts: int = 0
    refused: bool = False


def plan(
    known: Mapping[str, Version], head: Link, keep: int | Retention, pinned: Iterable[Link] = (), *,
    shortcuts: Mapping[str, Chord] | None = None, now: float = 0.0,
) -> Plan:
    """What may go, of the versions `known` by seal, and of the shortcuts. `keep`: how many versions, or a whole retention."""
    retention = Retention(keep) if isinstance(keep, int) else keep
    chords = tuple((shortcuts or {}).values())
    based = frozenset(chord.target.seal for chord in chords if chord.base is None)
    lineage = _lineage(known, head)
    oldest_kept = head.version - max(1, retention.versions) + 1
    # By number, not by lineage: a version whose descent is not known is kept, and then so is what it is made from.
    wanted = [
        version for version in known.values()
        if version.link.version <= head.version and not _lost(version, lineage, head)
        and (version.link.version >= oldest_kept or (retention.seconds > 0 and now - version.at < retention.seconds))
    ]
    wanted.sort(key=lambda version: -version.link.version)
    keep_seals: set[str] = set()
    for target in (head, *pinned):
        chain = chain_of(known, target, based)
        if chain is None:
            return _blocked(known, target)
        keep_seals |= chain
    weights = _weights(known, chords) if retention.nbytes else {}
    total = sum(weights.get(seal, 0) for seal in keep_seals)
    for version in wanted:
        chain = chain_of(known, version.link, based)
        if chain is None:
            return _blocked(known, version.link)
        more = sum(weights.get(seal, 0) for seal in chain - keep_seals)
        if retention.nbytes and total + more > retention.nbytes:
            break  # this one and all that are older
        keep_seals |= chain
        total += more
    newest_old = head.version - 1 if retention.nbytes else oldest_kept - 1
    delete = [
        version for seal, version in known.items()
        if seal not in keep_seals and (version.link.version <= newest_old or _lost(version, lineage, head))
    ]
    delete.sort(key=lambda version: version.link.version)
    return _without_shared(known, chords, keep_seals, delete)


def _without_shared(known: Mapping[str, Version], chords: tuple[Chord, ...], keep: set[str], delete: list[Version]) -> Plan:
    """The plan, with what stays taken out of what goes."""
    gone = {version.link.seal for version in delete}
    newest = max((version.link.version for version in known.values()), default=-1)
    going = [chord for chord in chords if any(
        end.seal in gone or (end.seal not in known and end.version <= newest) for end in chord.ends)]
    if not delete and not going:
        return Plan(frozenset(keep), ())
    going_seals = {chord.seal for chord in going}
    staying = {blob for seal, version in known.items() if seal not in gone for blob in version.blobs}
    staying |= {blob for chord in chords if chord.seal not in going_seals for blob in chord.blobs}
    return Plan(
        frozenset(keep), tuple(replace(version, blobs=version.blobs - staying) for version in delete),
        chords=tuple(replace(chord, blobs=chord.blobs - staying) for chord in going),
    )


def _blocked(known: Mapping[str, Version], target: Link) -> Plan:
    return Plan(frozenset(known), (), f"the chain of version {target.version} is not known to its full")


def _weights(known: Mapping[str, Version], chords: Iterable[Chord]) -> dict[str, int]:
    """Bytes by seal, each shortcut's with its target."""
    weights = {seal: version.nbytes for seal, version in known.items()}
    for chord in chords:
        if chord.target.seal in weights:
            weights[chord.target.seal] += chord.nbytes
    return weights


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


def chain_of(known: Mapping[str, Version], target: Link, based: Collection[str] = ()) -> set[str] | None:
    """The seals that make a version, or None when they are not all known. `based`: versions with a full made afterwards."""
    chain: set[str] = set()
    link: Link | None = target
    while link is not None and link.seal in known:
        chain.add(link.seal)
        if known[link.seal].full or link.seal in based:
            return chain
        link = known[link.seal].parent
    return None


class Grace:
    """How long each thing was unneeded; `ripe` after `seconds` of it without a break."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._since: dict[str, float] = {}

    def ripe(self, unneeded: Iterable[str], now: float) -> set[str]:
        """Of what is unneeded now, what has been so for long enough."""
        self._since = {key: self._since.get(key, now) for key in unneeded}
        return {key for key, since in self._since.items() if now - since >= self.seconds}

    def next_in(self, now: float) -> float | None:
        """Seconds until something more is ripe; None when nothing waits."""
        waits = [since + self.seconds - now for since in self._since.values()]
        later = [wait for wait in waits if wait > 0]
        return min(later) if later else None


async def survey(bus: Bus, reader: PolicyReader) -> dict[str, Version]:
    """The versions reachable from the head and the pins. What lost a race is seen only by following the manifests."""
    known: dict[str, Version] = {}
    head = await reader.head()
    starts = [] if head is None else [head.link]
    starts += [pin.link for pin in await pins(bus, reader.run)]
    for start in starts:
        try:
            async for manifest in reader.lineage(start):
                if manifest.seal in known:
                    break
                known[manifest.seal] = Version.of(manifest)
        except VersionCollected:
            continue  # a pin that came too late, and is about to be taken back
    return known


async def survey_shortcuts(reader: PolicyReader, known: Mapping[str, Version]) -> dict[str, Chord]:
    """The shortcuts to the versions `known`."""
    found: dict[str, Chord] = {}
    for version in known.values():
        for shortcut in await reader.shortcuts(version.link):
            found[shortcut.seal] = Chord.of(shortcut)
    return found


async def collect(
    bus: Bus, blobs: BlobStore, run: str, deletions: Iterable[Version], *, shortcuts: Iterable[Chord] = (),
    pinned: Iterable[Link] | None = None,
) -> Collected:
    """Carry a plan out. `pinned`: what was known of the pins when it was made (None: what they are now); a pin that came since stops it."""
    versions, chords = list(deletions), list(shortcuts)
    if not versions and not chords:
        return Collected(0, 0, 0)
    seen = [pin.link for pin in await pins(bus, run)] if pinned is None else list(pinned)
    if not await condemn(bus, run, [version.link for version in versions], seen):
        return Collected(0, 0, 0, refused=True)
    stream = Subjects(run).stream("POLICY")
    count = nbytes = 0
    for blob_set, subject in [
        *((chord.blobs, shortcut_subject(run, chord.target, None if chord.base is None else chord.base.version)) for chord in chords),
        *((version.blobs, manifest_subject(run, version.link)) for version in versions),
    ]:
        await bounded(blobs.delete, sorted(blob_set), DELETES_IN_FLIGHT)
        await _forget(bus, stream, subject)
        count += len(blob_set)
        nbytes += sum(blob.size for blob in blob_set)
    if versions:
        await release(bus, run, [version.link for version in versions])
    return Collected(len(versions), count, nbytes, len(chords))


async def _forget(bus: Bus, stream: str, subject: str) -> None:
    """Delete a message, and what holds its content where it was too large for the stream: nobody else would ever delete that."""
    frame = await bus.get_bytes(stream, subject)
    await bus.purge(stream, subject)
    claim = None if frame is None else claim_in(frame)
    if claim is not None:
        await drop_claim(bus, claim)
