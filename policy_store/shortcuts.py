"""Shortcuts: encodings of a version made after it was published, for those who come late or stay long.

Two kinds. A **squash** leads from an older version to this one in one step: whoever is k versions behind takes O(log k) steps. A
**rebase** is a full made afterwards, so that a version which stays needs nothing older. Neither says anything new: what comes out is held to
the shard digests of the version's manifest, so a wrong shortcut is refused like a wrong delta, and every version can be had without one.

A squash goes from v - 2^k to v where 2^k divides v, and exists only where it is at least 10 % cheaper than the cheapest steps it stands
for: such spans either contain each other or do not overlap, so the longest one at hand is always the cheapest way down, and nothing else
has to be looked at.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import ClassVar, Self

import numpy as np
import xxhash
from pydantic import Field, model_validator

from driftline.messages.bus import Bus
from driftline.messages.errors import IntegrityError, MalformedMessage
from driftline.messages.registry import register
from driftline.messages.subjects import Subjects
from driftline.messages.types import Message
from driftline.policy_store.manifest import Encoding, Link
from driftline.policy_store.packing import PackHead

__all__ = ["MAX_SPAN", "WORTH", "Shortcut", "bases", "load_shortcut", "shortcut_subject", "store_shortcut"]

WORTH = 0.9
"""A squash is stored at this share, or less, of the bytes it stands for: its manifest and its collection are not free."""

MAX_SPAN = 1024


@register
class Shortcut(Message):
    """`encoding` makes `target` from `base` (a squash), or from nothing (`base` None: a rebase). `replaces`: bytes of the cheapest steps
    that a squash stands for."""

    schema_name: ClassVar[str] = "shortcut"

    target: Link
    base: Link | None
    encoding: Encoding
    replaces: int = Field(default=0, ge=0)
    at: float
    seal: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.base is not None:
            if self.base.version not in bases(self.target.version, self.base.version):
                raise ValueError(f"base = {self.base.version} of version {self.target.version}: a squash spans an aligned power of two")
            if self.encoding.nbytes > WORTH * self.replaces:
                raise ValueError(f"replaces = {self.replaces}: {self.encoding.nbytes} bytes are more than {WORTH:g} of that")
        try:
            self.encoding.check(len(self.encoding.codec), delta=self.base is not None)
        except ValueError as error:
            raise ValueError(f"encoding.{error}") from error
        if self.seal and self.seal != self.sealed_by():
            raise ValueError(f"seal = {self.seal} of a shortcut to version {self.target.version}: the content's is {self.sealed_by()}")
        return self

    def sealed_by(self) -> str:
        """The seal this content calls for: a digest over every field in one canonical form."""
        text = json.dumps(self.model_dump(exclude={"seal"}), default=_canonical, sort_keys=True, separators=(",", ":"))
        return xxhash.xxh3_128_hexdigest(text.encode())

    def with_seal(self) -> Self:
        return self.model_copy(update={"seal": self.sealed_by()})

    @property
    def span(self) -> int:
        """Versions it leads over; 0 for a rebase."""
        return 0 if self.base is None else self.target.version - self.base.version

    @property
    def head(self) -> PackHead:
        """How its packs open: no pack of a version, nor of another shortcut, can be taken for one of them."""
        return shortcut_head(self.target.version, self.span)


def shortcut_head(version: int, span: int) -> PackHead:
    return PackHead(span == 0, version, 0, shortcut=True, span=span)


def bases(version: int, floor: int) -> Iterator[int]:
    """Where a squash to `version` may start, at or above `floor`; the farthest first."""
    longest = min(version & -version, MAX_SPAN) if version else 0
    while longest > 1:
        if version - longest >= floor:
            yield version - longest
        longest //= 2


def shortcut_subject(run: str, target: Link, base: int | None) -> str:
    return f"{Subjects(run).root}.policy.shortcut.{target.version}.{target.seal}.{'full' if base is None else base}"


async def load_shortcut(bus: Bus, run: str, target: Link, base: int | None) -> Shortcut | None:
    """The shortcut to `target` from `base` (None: its rebase), or None. IntegrityError when it is damaged."""
    where = f"shortcut to version {target.version}"
    try:
        stored = await bus.last(Subjects(run).stream("POLICY"), shortcut_subject(run, target, base))
    except MalformedMessage as error:
        raise IntegrityError(f"unreadable: {error}", field=where, value=base) from error
    if stored is None:
        return None
    found = stored.message
    if (
        not isinstance(found, Shortcut) or not found.seal or found.run != run or found.target != target
        or (None if found.base is None else found.base.version) != base
    ):
        raise IntegrityError("another message is in its place", field=where, value=base)
    return found


async def store_shortcut(bus: Bus, shortcut: Shortcut) -> None:
    """Durable on return; its packs were before."""
    base = None if shortcut.base is None else shortcut.base.version
    await bus.publish(shortcut_subject(shortcut.run, shortcut.target, base), shortcut, id=f"{shortcut.run}/shortcut/{shortcut.seal}")


def _canonical(value: object) -> object:
    if isinstance(value, np.ndarray):
        return f"{value.dtype.str}{list(value.shape)}{xxhash.xxh3_128_hexdigest(np.ascontiguousarray(value).data)}"
    raise TypeError(f"{type(value).__name__} has no canonical form")
