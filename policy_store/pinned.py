"""The pins as they are stored: one sealed message on one subject, with the versions that collection is about to delete."""

from __future__ import annotations

import json
from typing import ClassVar, Self

import xxhash
from pydantic import BaseModel, ConfigDict, Field, model_validator

from driftline.messages.bus import Bus
from driftline.messages.errors import IntegrityError, MalformedMessage
from driftline.messages.registry import register
from driftline.messages.subjects import Subjects
from driftline.messages.types import Message
from driftline.policy_store.manifest import Link

__all__ = ["LEASE_SLACK_S", "Pin", "Pins", "pins_subject", "read_pins"]

LEASE_SLACK_S = 30.0
"""How long after its end a lease still counts: how far two clocks may be apart."""


class Pin(BaseModel):
    """`until`: seconds since the epoch when it lapses; None: when it is taken off."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    link: Link
    owner: str = Field(min_length=1, max_length=64)
    at: float
    until: float | None = None

    def lapsed(self, now: float) -> bool:
        return self.until is not None and self.until + LEASE_SLACK_S < now


@register
class Pins(Message):
    schema_name: ClassVar[str] = "pins"

    revision: int = Field(ge=1)
    pins: tuple[Pin, ...]
    condemned: tuple[Link, ...] = ()
    """Versions that are being deleted: no pin that needs them is given any more."""
    seal: str = ""

    @model_validator(mode="after")
    def _sealed(self) -> Self:
        # A version number with one bit flipped would be a pin on another version, and the one that was meant would go.
        if self.seal and self.seal != self.sealed_by():
            raise ValueError(f"seal = {self.seal} of revision {self.revision}: the content's is {self.sealed_by()}")
        return self

    def sealed_by(self) -> str:
        text = json.dumps(self.model_dump(exclude={"seal"}), sort_keys=True, separators=(",", ":"))
        return xxhash.xxh3_128_hexdigest(text.encode())

    @property
    def links(self) -> tuple[Link, ...]:
        return tuple(pin.link for pin in self.pins)


async def read_pins(bus: Bus, run: str) -> tuple[Pins | None, int]:
    """The newest pins and their sequence in the stream; None and 0 where there are none. IntegrityError when they cannot be read."""
    remedy = f"nothing is collected until {pins_subject(run)} is purged and what was pinned is pinned again"
    try:
        stored = await bus.last(Subjects(run).stream("POLICY"), pins_subject(run))
    except MalformedMessage as error:
        raise IntegrityError(f"unreadable: {error}", field="pins", value=run, remedy=remedy) from error
    if stored is None:
        return None, 0
    if not isinstance(stored.message, Pins):
        raise IntegrityError("not the pins", field="pins", value=type(stored.message).__name__, remedy=remedy)
    return stored.message, stored.seq


def pins_subject(run: str) -> str:
    return f"{Subjects(run).root}.policy.pins"
