"""Pins: versions that must not be collected, and who needs them (an evaluation, a person, a rollback point).

One message on one subject, changed by compare-and-set, so two owners never overwrite each other. `pin` returns only when the pin is
stored *and* the version was still there afterwards: a collector that read the pins before has then not taken it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from driftline.messages.bus import Bus
from driftline.messages.errors import HeadConflict, IntegrityError
from driftline.messages.registry import register
from driftline.messages.subjects import Subjects
from driftline.messages.types import Message
from driftline.policy_store.manifest import Link, Manifest
from driftline.policy_store.reader import PolicyReader

__all__ = ["Pin", "Pins", "find", "pin", "pins", "unpin"]

ATTEMPTS = 16


class Pin(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    link: Link
    owner: str = Field(min_length=1, max_length=64)
    at: float


@register
class Pins(Message):
    schema_name: ClassVar[str] = "pins"

    revision: int = Field(ge=1)
    pins: tuple[Pin, ...]

    @property
    def links(self) -> tuple[Link, ...]:
        return tuple(pin.link for pin in self.pins)


def with_pin(current: tuple[Pin, ...], pin: Pin) -> tuple[Pin, ...]:
    """One pin per version and owner."""
    return (*(held for held in current if (held.link, held.owner) != (pin.link, pin.owner)), pin)


def without_pin(current: tuple[Pin, ...], version: int, owner: str) -> tuple[Pin, ...]:
    return tuple(held for held in current if (held.link.version, held.owner) != (version, owner))


async def pins(bus: Bus, run: str) -> tuple[Pin, ...]:
    current, _ = await _read(bus, run)
    return current.pins if current is not None else ()


async def pin(bus: Bus, reader: PolicyReader, version: int, owner: str) -> Link:
    """Keep a version until `owner` unpins it. IntegrityError when it is not there any more."""
    link = (await reader.manifest(version)).link
    await _change(bus, reader.run, lambda held: with_pin(held, Pin(link=link, owner=owner, at=time.time())))
    try:
        await reader.reachable(link)
    except IntegrityError:
        await unpin(bus, reader.run, version, owner)
        raise
    return link


async def unpin(bus: Bus, run: str, version: int, owner: str) -> None:
    await _change(bus, run, lambda held: without_pin(held, version, owner))


async def find(bus: Bus, reader: PolicyReader, version: int) -> Manifest:
    """The manifest of a version, by the head's lineage or, where collection has cut that, by a pin's."""
    try:
        return await reader.manifest(version)
    except IntegrityError:
        for held in await pins(bus, reader.run):
            if held.link.version == version:
                return await reader.load(held.link)
        raise


async def _read(bus: Bus, run: str) -> tuple[Pins | None, int]:
    stored = await bus.last(Subjects(run).stream("POLICY"), _subject(run))
    if stored is None:
        return None, 0
    if not isinstance(stored.message, Pins):
        raise IntegrityError("not the pins", field="pins", value=type(stored.message).__name__)
    return stored.message, stored.seq


async def _change(bus: Bus, run: str, rule: Callable[[tuple[Pin, ...]], tuple[Pin, ...]]) -> None:
    for _ in range(ATTEMPTS):
        current, seq = await _read(bus, run)
        held = current.pins if current is not None else ()
        wanted = rule(held)
        if wanted == held:
            return
        revision = 1 if current is None else current.revision + 1
        try:
            await bus.publish(_subject(run), Pins(run=run, revision=revision, pins=wanted),
                              id=f"{run}/pins/{revision}/{uuid.uuid4().hex}", expect_last=seq)
        except HeadConflict:
            continue  # someone else changed them: apply the rule to what they left
        return
    raise HeadConflict(f"changed by others {ATTEMPTS} times in a row", field="pins", value=run, remedy="try again")


def _subject(run: str) -> str:
    return f"{Subjects(run).root}.policy.pins"
