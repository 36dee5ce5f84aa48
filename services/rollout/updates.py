"""The policy under an engine: the newest head that is known, and weights that are a version exactly or not at all.

Guarantees: `state` has the digest of the manifest of `version`, compared after every move, or the move failed and nothing may be served from it;
every move has a deadline: one that does not end is given up and the version is read afresh, and when that does not end either the service ends
with the cause, so an engine never waits for ever on an update. A broker that is away for less than `outage_s` is waited for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Protocol

import structlog

from driftline.messages.errors import BrokerUnavailable, IntegrityError
from driftline.policy_store.digests import digest_state
from driftline.policy_store.manifest import PolicyHead
from driftline.policy_store.reader import PolicyReader, VersionCollected
from driftline.policy_store.tensor import Bytes1D, Shard, State

__all__ = ["Follower", "Updates"]

log = structlog.get_logger("rollout")

RETRY_S = 0.5


class Follower(Protocol):
    """Who keeps a copy of the state and is told what changes in it."""

    def seen(self, shard: Shard, dtype: str, before: Bytes1D | None, after: Bytes1D) -> None:
        """A shard changed; called from worker threads."""

    def afresh(self) -> None:
        """It was read anew."""


class Updates:
    def __init__(
        self, reader: PolicyReader, *, outage_s: float, newer: Callable[[], None], advance_s: float = 120.0, read_s: float = 600.0
    ) -> None:
        """`newer` is called when a head comes that is newer than the last. `advance_s`, `read_s`: how long a move by deltas, and
        reading a whole version, may take."""
        self._reader, self._newer = reader, newer
        self._outage_s, self._advance_s, self._read_s = outage_s, advance_s, read_s
        self.head: PolicyHead | None = None
        self.version = -1
        self.state: State = {}
        self.given_up = 0

    def behind(self, version: int) -> bool:
        return self.head is not None and self.head.version > version

    async def first(self) -> None:
        """Wait for a head, however long it takes the run to have one, and read its version."""
        async with aclosing(self._reader.watch()) as heads:  # type: ignore[type-var]
            async for head in heads:
                self._offer(head)
                break
        if self.head is None:
            raise BrokerUnavailable("the policy head is no longer followed", field="run", value=self._reader.run)
        await self._read()

    async def follow(self) -> None:
        async with aclosing(self._reader.watch()) as heads:  # type: ignore[type-var]
            async for head in heads:
                self._offer(head)

    async def look(self) -> None:
        """Ask for the head now, so that what was taken from the queue before is not sampled by an older version."""
        until = time.monotonic() + self._outage_s
        while True:
            try:
                head = await self._reader.head()
            except BrokerUnavailable as error:
                if time.monotonic() > until:
                    raise
                log.warning("the head cannot be read, waiting", cause=str(error))
                await asyncio.sleep(RETRY_S)
                continue
            if head is not None:
                self._offer(head)
            return

    async def move(self, follower: Follower | None = None) -> None:
        """Make `state` the version of the newest head: by deltas in place, or else read afresh."""
        assert self.head is not None
        head = self.head
        state, self.state = self.state, {}  # whatever happens to it midway, nothing else has it
        try:
            async with asyncio.timeout(self._advance_s):
                moved = await self._reader.advance(state, self.version, head.version, seen=follower.seen if follower else None)
        except (TimeoutError, BrokerUnavailable, VersionCollected) as error:
            self.given_up += 1
            cause = str(error) or f"it did not end within {self._advance_s:g} s"
            log.warning("update given up, reading the version afresh", from_version=self.version, version=head.version, cause=cause)
            await self.look()
            await self._read()
            if follower is not None:
                follower.afresh()
            return
        await self._adopt(head, moved)
        if follower is not None and moved is not state:
            follower.afresh()

    async def _read(self) -> None:
        try:
            async with asyncio.timeout(self._read_s):
                head, state = await self._newest()
        except TimeoutError as error:
            raise BrokerUnavailable(f"the policy was not read within {self._read_s:g} s", field="version",
                                    value=self.head.version if self.head else -1, remedy="is the blob store reachable from here?") from error
        await self._adopt(head, state)

    async def _newest(self) -> tuple[PolicyHead, State]:
        """The head's weights; when a slow read outlived its version, those of the head there is by then."""
        while True:
            head = self.head
            assert head is not None
            try:
                return head, await self._reader.materialise_manifest(await self._reader.load(head.link))
            except VersionCollected as error:
                await self.look()
                if self.head == head:
                    raise
                log.warning("the version was collected while it was read, going on with the head", version=head.version, cause=str(error))

    async def _adopt(self, head: PolicyHead, state: State) -> None:
        digest = await digest_state(state)
        if digest != head.digest:
            raise IntegrityError(f"the weights read have digest {digest}", field=f"digest of version {head.version}", value=head.digest,
                                 remedy="nothing is served from them; start the engine again")
        self.version, self.state = head.version, state

    def _offer(self, head: PolicyHead) -> None:
        if self.head is None or head.version > self.head.version:
            self.head = head
            self._newer()
