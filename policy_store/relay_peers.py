"""The peers of a relay: who passes packs on, told on the run's control stream, and who is not asked for now.

A peer is there from its first beat until it says that it leaves, or until it was silent for `gone_s`. Silence is measured against the newest beat
heard from anyone, our own among them: a broker that is away makes nobody look dead. What a peer can serve needs no telling: it fetches what
it is asked for. Views may differ for a while; the tree is safe under any (`relay_tree`).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass

import structlog

from driftline.messages.bus import Bus
from driftline.messages.errors import BrokerDenied, BrokerFull, BrokerUnavailable
from driftline.messages.subjects import Subjects
from driftline.messages.types import RelayPeer

__all__ = ["BEAT_S", "Membership", "Peers"]

log = structlog.get_logger("relay")

BEAT_S = 3.0
GONE_S = 10.0
LEAVE_S = 2.0


@dataclass
class _Heard:
    peer: RelayPeer
    at: float


class Membership:
    """Pure: who is there, from what was heard and when. Times are seconds of one monotonic clock, the caller's."""

    def __init__(self, me: str, *, gone_s: float = GONE_S) -> None:
        self._me, self._gone_s = me, gone_s
        self._heard: dict[str, _Heard] = {}
        self._avoided: dict[str, float] = {}
        self._newest = float("-inf")

    def hear(self, peer: RelayPeer, now: float) -> None:
        self._newest = max(self._newest, now)
        if peer.peer == self._me:
            return
        if peer.leaving:
            known = self._heard.get(peer.peer)
            if known is not None and known.peer.token == peer.token:  # not of a later life under the same name
                del self._heard[peer.peer]
            return
        self._heard[peer.peer] = _Heard(peer, now)

    def avoid(self, peer: RelayPeer, until: float) -> None:
        """Do not ask this life of `peer` before `until`."""
        self._avoided[peer.token] = max(until, self._avoided.get(peer.token, until))

    def live(self, now: float) -> Mapping[str, RelayPeer]:
        """The others who beat and are not avoided."""
        self._avoided = {token: until for token, until in self._avoided.items() if until > now}
        oldest = self._newest - self._gone_s
        return {name: heard.peer for name, heard in self._heard.items() if heard.at >= oldest and heard.peer.token not in self._avoided}


class Peers:
    """The shell around `Membership`: `follow` and `beat` run beside the work until cancelled, then `leave` says so."""

    def __init__(self, bus: Bus, run: str, me: str, *, beat_s: float = BEAT_S, gone_s: float = GONE_S) -> None:
        self.token = secrets.token_hex(16)
        self._me = me
        self._bus, self._run, self._beat_s, self._gone_s = bus, run, beat_s, gone_s
        self._subjects = Subjects(run)
        self._stream = self._subjects.stream("CONTROL")
        self._membership = Membership(me, gone_s=gone_s)
        self._address: tuple[str, int, str] | None = None
        self._beats = 0
        self._caught_up = asyncio.Event()

    @property
    def me(self) -> str:
        return self._me

    def live(self) -> Mapping[str, RelayPeer]:
        return self._membership.live(time.monotonic())

    def avoid(self, peer: RelayPeer, seconds: float) -> None:
        self._membership.avoid(peer, time.monotonic() + seconds)

    async def caught_up(self, wait_s: float) -> None:
        """Until the beats that were stored before our first one are known, which is when we hear that; at most `wait_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._caught_up.wait()

    async def follow(self) -> None:
        following, start = self._subjects.relay("*"), 1
        while True:
            try:
                async with aclosing(self._bus.follow(self._stream, following, start=start)) as events:  # type: ignore[type-var]
                    async for stored in events:
                        start = stored.seq + 1
                        if isinstance(stored.message, RelayPeer):
                            self._hear(stored.message)
            except BrokerUnavailable as error:  # the packs have another way
                log.warning("peers not followed", cause=str(error))
            await asyncio.sleep(self._beat_s)

    async def beat(self, host: str, port: int, certificate: str = "") -> None:
        """Say where we serve, again and again. BrokerDenied when the credentials do not allow it."""
        self._address = host, port, certificate
        while True:
            await self._say(leaving=False)
            await asyncio.sleep(self._beat_s)

    async def leave(self) -> None:
        """Best effort: without it we are gone after `gone_s`."""
        if self._address is not None:
            with suppress(TimeoutError, BrokerDenied):
                async with asyncio.timeout(LEAVE_S):
                    await self._say(leaving=True)

    def _hear(self, peer: RelayPeer) -> None:
        if peer.token == self.token:
            self._caught_up.set()
        # What was said before our first beat may be of a process long gone; where clocks disagree it counts from its next one on.
        if self._caught_up.is_set() or abs(time.time() - peer.at) < self._gone_s:
            self._membership.hear(peer, time.monotonic())

    async def _say(self, *, leaving: bool) -> None:
        assert self._address is not None
        host, port, certificate = self._address
        self._beats += 1
        peer = RelayPeer(run=self._run, peer=self.me, host=host, port=port, token=self.token, certificate=certificate, beat=self._beats,
                         at=time.time(), leaving=leaving)
        subject = self._subjects.relay(self.me)
        try:
            await self._bus.publish(subject, peer, id=f"{subject}/{self.token}/{self._beats}")
        except (BrokerUnavailable, BrokerFull) as error:
            log.warning("not announced", peer=self.me, cause=str(error))
