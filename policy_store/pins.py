"""Pins: versions that must not be collected, and who needs them: for good (a person, a rollback point), or while they read (a lease).

One message on one subject, changed by compare-and-set, holds the pins and the versions that collection is about to delete. So a pin and a
collection never pass each other: whichever is stored first is seen by the other, which then gives way. `pin` returns only when the pin is
stored and the version can still be made from what is not going. A lease (`held`) lapses by itself when its owner dies; a lapsed one counts
for nothing, `LEASE_SLACK_S` later, which is how far two clocks may be apart.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from typing import NamedTuple

import structlog

from driftline.messages.bus import Bus
from driftline.messages.errors import BrokerUnavailable, HeadConflict, IntegrityError
from driftline.policy_store.manifest import Link, Manifest
from driftline.policy_store.pinned import LEASE_SLACK_S, Pin, Pins, pins_subject, read_pins
from driftline.policy_store.reader import PolicyReader

__all__ = ["LEASE_SLACK_S", "Pin", "Pins", "condemn", "condemned", "find", "held", "pin", "pin_link", "pins", "release", "unpin"]

log = structlog.get_logger("pins")

ATTEMPTS = 32
PAUSE_S = 0.02
"""Doubled with each lost race up to a second, and drawn at random below that: many readers that start together pass each other."""
LEASE_S = 60.0


class Held(NamedTuple):
    """What the pins say now."""

    pins: tuple[Pin, ...]
    condemned: tuple[Link, ...]


def with_pin(current: tuple[Pin, ...], pin: Pin) -> tuple[Pin, ...]:
    """One pin per version and owner."""
    return (*(held for held in current if (held.link, held.owner) != (pin.link, pin.owner)), pin)


def without_pin(current: tuple[Pin, ...], version: int, owner: str) -> tuple[Pin, ...]:
    return tuple(held for held in current if (held.link.version, held.owner) != (version, owner))


async def pins(bus: Bus, run: str) -> tuple[Pin, ...]:
    """Those that count: lapsed leases do not."""
    current, _ = await read_pins(bus, run)
    now = time.time()
    return () if current is None else tuple(held for held in current.pins if not held.lapsed(now))


async def pin(bus: Bus, reader: PolicyReader, version: int, owner: str, *, for_s: float | None = None) -> Link:
    """Keep a version until `owner` unpins it, or for `for_s` seconds. VersionCollected when it is not there any more."""
    link = (await reader.manifest(version)).link
    await pin_link(bus, reader, link, owner, for_s=for_s)
    return link


async def pin_link(bus: Bus, reader: PolicyReader, link: Link, owner: str, *, for_s: float | None = None) -> None:
    now = time.time()
    mine = Pin(link=link, owner=owner, at=now, until=None if for_s is None else now + for_s)
    stored = await _change(bus, reader.run, lambda held: held._replace(pins=with_pin(held.pins, mine)))
    try:
        # What was condemned when the pin was stored may go at any moment; nothing that the pin needs is condemned later.
        await reader.reachable(link, {gone.seal for gone in stored.condemned})
    except BaseException as error:
        if isinstance(error, IntegrityError | asyncio.CancelledError):
            await asyncio.shield(unpin(bus, reader.run, link.version, owner))
        raise


async def unpin(bus: Bus, run: str, version: int, owner: str) -> None:
    await _change(bus, run, lambda held: held._replace(pins=without_pin(held.pins, version, owner)))


@asynccontextmanager
async def held(bus: Bus, reader: PolicyReader, version: int, owner: str, *, lease_s: float = LEASE_S) -> AsyncIterator[Manifest]:
    """Keep a version while the block reads it: a lease that is renewed, and given up at the end. Yields its manifest.

    VersionCollected when the version is not there any more. A lease that cannot be renewed because the broker is away lapses; the block
    goes on, and a reader in it meets VersionCollected if the version is then collected.
    """
    manifest = await find(bus, reader, version)
    await pin_link(bus, reader, manifest.link, owner, for_s=lease_s)
    renewing = asyncio.create_task(_renew(bus, reader.run, manifest.link, owner, lease_s), name=f"lease of version {version}")
    try:
        yield manifest
    finally:
        renewing.cancel()
        await asyncio.wait([renewing])
        try:
            await asyncio.shield(unpin(bus, reader.run, version, owner))
        except (BrokerUnavailable, HeadConflict) as error:
            log.info("a lease is left to lapse", version=version, owner=owner, cause=str(error))


async def _renew(bus: Bus, run: str, link: Link, owner: str, lease_s: float) -> None:
    lost = False

    def rule(current: Held) -> Held:
        nonlocal lost
        lost = not any((pin.link, pin.owner) == (link, owner) for pin in current.pins)
        now = time.time()
        # One that has lapsed and was taken off stays off: the version may be gone, and a pin on nothing would stop all collection.
        return current if lost else current._replace(pins=with_pin(current.pins, Pin(link=link, owner=owner, at=now, until=now + lease_s)))

    while not lost:
        await asyncio.sleep(lease_s / 3)
        try:
            await _change(bus, run, rule)
        except (BrokerUnavailable, HeadConflict) as error:
            log.warning("a lease could not be renewed", version=link.version, owner=owner, cause=str(error))
    log.warning("a lease has lapsed", version=link.version, owner=owner)


async def condemn(bus: Bus, run: str, links: Iterable[Link], seen: Collection[Link]) -> bool:
    """Say that these versions are going, for a collector that knew of the pins on `seen`. False when there is a pin it did not know:
    nothing is said then, and it has to plan again. Lapsed leases are taken off on the way."""
    now = time.time()
    going = tuple(links)
    surprised = False

    def rule(current: Held) -> Held:
        nonlocal surprised
        counting = tuple(pin for pin in current.pins if not pin.lapsed(now))
        surprised = any(pin.link not in seen for pin in counting)
        if surprised:
            return current
        return Held(counting, (*current.condemned, *(link for link in going if link not in current.condemned)))

    await _change(bus, run, rule)
    return not surprised


async def release(bus: Bus, run: str, links: Iterable[Link]) -> None:
    """These versions are gone."""
    gone = set(_keys(links))
    await _change(bus, run, lambda held: held._replace(condemned=tuple(link for link in held.condemned if _key(link) not in gone)))


async def condemned(bus: Bus, run: str) -> tuple[Link, ...]:
    """Versions whose deletion was begun: a collector that starts goes on with them."""
    current, _ = await read_pins(bus, run)
    return () if current is None else current.condemned


async def find(bus: Bus, reader: PolicyReader, version: int) -> Manifest:
    """The manifest of a version, by the head's lineage or, where collection has cut that, by a pin's."""
    try:
        return await reader.manifest(version)
    except IntegrityError:
        for held in await pins(bus, reader.run):
            if held.link.version == version:
                return await reader.load(held.link)
        raise


def _key(link: Link) -> tuple[int, str]:
    return link.version, link.seal


def _keys(links: Iterable[Link]) -> Iterable[tuple[int, str]]:
    return (_key(link) for link in links)


async def _change(bus: Bus, run: str, rule: Callable[[Held], Held]) -> Held:
    """What the pins say after the rule was applied to them."""
    for attempt in range(ATTEMPTS):
        current, seq = await read_pins(bus, run)
        held = Held((), ()) if current is None else Held(current.pins, current.condemned)
        wanted = rule(held)
        if wanted == held:
            return held
        revision = 1 if current is None else current.revision + 1
        changed = Pins(run=run, revision=revision, pins=wanted.pins, condemned=wanted.condemned)
        try:
            await bus.publish(pins_subject(run), changed.model_copy(update={"seal": changed.sealed_by()}),
                              id=f"{run}/pins/{revision}/{uuid.uuid4().hex}", expect_last=seq)
        except HeadConflict:  # someone else changed them: apply the rule to what they left
            await asyncio.sleep(random.uniform(0, min(1.0, PAUSE_S * 2**attempt)))
            continue
        return wanted
    raise HeadConflict(f"changed by others {ATTEMPTS} times in a row", field="pins", value=run, remedy="try again")
