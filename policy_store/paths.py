"""Paths: the ways to a version over fulls, deltas and shortcuts, the cheapest first.

The versions of a run are one chain; a shortcut is a chord over part of it. Chords never cross and each is cheaper than what it spans
(`shortcuts.py`), so going down from the target by the longest usable step at each version gives the cheapest way to any version below, after
O(log k) manifests. A step that turned out damaged is left out (`without`) and the next shorter one is used; every way down that remains
passes the same version, so nothing is missed by never going back.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from driftline.messages.errors import IntegrityError
from driftline.policy_store.manifest import Encoding, Link, Manifest, Pack
from driftline.policy_store.packing import PackHead
from driftline.policy_store.shortcuts import Shortcut, bases

__all__ = ["FULLS_TRIED", "Chain", "Edge", "Path", "Step", "descend", "full_step", "ways"]

FULLS_TRIED = 3
"""How many fulls back a path may start: the newest and two to fall back on."""

LAST_RESORT = 256


class Edge(NamedTuple):
    """Which step: to a version (by seal), from a version number (None: a full), and whether by a shortcut."""

    target: str
    base: int | None
    shortcut: bool


@dataclass(frozen=True)
class Step:
    """One encoding to apply: what it makes, of what (None: of nothing), and how its packs open."""

    manifest: Manifest
    base: Manifest | None
    encoding: Encoding
    shortcut: bool = False

    @property
    def edge(self) -> Edge:
        return Edge(self.manifest.seal, None if self.base is None else self.base.version, self.shortcut)

    @property
    def head(self) -> PackHead:
        span = 0 if self.base is None or not self.shortcut else self.manifest.version - self.base.version
        return PackHead(self.base is None, self.manifest.version, 0, self.shortcut, span)

    def __str__(self) -> str:
        version = self.manifest.version
        if self.base is None:
            return f"{'rebase' if self.shortcut else 'full'} {version}"
        return f"shortcut {self.base.version}-{version}" if self.shortcut else f"delta {version}"


@dataclass(frozen=True)
class Path:
    """A way to a version: a full, then steps; or, for a follower, steps only."""

    steps: tuple[Step, ...]

    @property
    def nbytes(self) -> int:
        return sum(step.encoding.nbytes for step in self.steps)

    @property
    def packs(self) -> tuple[Pack, ...]:
        return tuple(pack for step in self.steps for pack in step.encoding.packs)

    def __str__(self) -> str:
        return " + ".join(str(step) for step in self.steps)


class Chain(Protocol):
    """What the search reads: manifests, and shortcuts where there are any."""

    async def load(self, link: Link) -> Manifest: ...
    async def shortcut(self, target: Link, base: int | None) -> Shortcut | None: ...


class Descent(NamedTuple):
    """`steps` in the order they are applied, from `bottom` up; `bottom` is where it was wanted, unless the way ended above."""

    bottom: Manifest
    steps: tuple[Step, ...]


def full_step(manifest: Manifest) -> Step | None:
    return None if manifest.full is None else Step(manifest, None, manifest.full)


async def descend(chain: Chain, target: Manifest, floor: int, without: Collection[Edge] = ()) -> Descent:
    """The cheapest steps up to `target` from version `floor`, or from where the chain below is damaged or collected."""
    steps: list[Step] = []
    at = target
    while at.version > floor:
        step = await _longest(chain, at, floor, without)
        if step is None or step.base is None:
            break
        steps.append(step)
        at = step.base
    return Descent(at, tuple(reversed(steps)))


async def _longest(chain: Chain, at: Manifest, floor: int, without: Collection[Edge]) -> Step | None:
    for base in bases(at.version, floor):
        if Edge(at.seal, base, True) in without:
            continue
        try:
            shortcut = await chain.shortcut(at.link, base)
            if shortcut is not None and shortcut.base is not None and len(shortcut.encoding.codec) == len(at.shard_digests):
                return Step(at, await chain.load(shortcut.base), shortcut.encoding, True)
        except IntegrityError:
            continue  # it is damaged, or its base is gone: there are other ways
    if at.parent is None or at.delta is None or Edge(at.seal, at.parent.version, False) in without:
        return None
    try:
        return Step(at, await chain.load(at.parent), at.delta)
    except IntegrityError:
        return None


async def ways(chain: Chain, target: Manifest, without: Collection[Edge] = ()) -> list[Path]:
    """The ways to `target` from nothing, cheapest first: by itself, and from each of the newest usable fulls before it."""
    found: dict[tuple[Edge, ...], Path] = {}
    floor: Manifest | None = target
    while floor is not None and len(found) < FULLS_TRIED:
        bottom, steps = await descend(chain, target, floor.version, without)
        _add(found, await _entry(chain, bottom, without), steps)
        if bottom.version > floor.version:
            break  # nothing below can be reached either
        floor = await _full_before(chain, floor)
    else:
        if floor is None and len(found) < FULLS_TRIED:  # the next full is collected or damaged: as far as the steps go
            bottom, steps = await descend(chain, target, 0, without)
            _add(found, await _entry(chain, bottom, without), steps)
    if not found:
        await _last_resort(chain, target, without, found)
    return sorted(found.values(), key=lambda path: path.nbytes)


async def _last_resort(chain: Chain, target: Manifest, without: Collection[Edge], found: dict[tuple[Edge, ...], Path]) -> None:
    """From a version in between that was rebased, looked for one by one."""
    at = target
    for _ in range(LAST_RESORT):
        if at.parent is None:
            return
        try:
            at = await chain.load(at.parent)
        except IntegrityError:
            return
        entry = await _rebase(chain, at, without)
        if entry is not None:
            bottom, steps = await descend(chain, target, at.version, without)
            if bottom.version == at.version:
                _add(found, entry, steps)
                return


def _add(found: dict[tuple[Edge, ...], Path], entry: Step | None, steps: tuple[Step, ...]) -> None:
    if entry is not None:
        path = Path((entry, *steps))
        found[tuple(step.edge for step in path.steps)] = path


async def _entry(chain: Chain, manifest: Manifest, without: Collection[Edge]) -> Step | None:
    """How to begin at a version: its full, or one made afterwards."""
    full = full_step(manifest)
    if full is not None and full.edge not in without:
        return full
    return await _rebase(chain, manifest, without)


async def _rebase(chain: Chain, manifest: Manifest, without: Collection[Edge]) -> Step | None:
    if Edge(manifest.seal, None, True) in without:
        return None
    try:
        shortcut = await chain.shortcut(manifest.link, None)
    except IntegrityError:
        return None
    if shortcut is None or len(shortcut.encoding.codec) != len(manifest.shard_digests):
        return None
    return Step(manifest, None, shortcut.encoding, True)


async def _full_before(chain: Chain, manifest: Manifest) -> Manifest | None:
    if not manifest.chain:
        return None
    try:
        return await chain.load(manifest.chain[0])
    except IntegrityError:
        return None
