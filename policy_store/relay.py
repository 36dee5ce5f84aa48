"""The relay: engines pass packs on to each other, so that the origin is read about once and not by each of them.

Guarantees: `RelayBlobs.get` returns the bytes of the digest, from a peer or from the origin, or raises what the origin raised; a peer that is
dead, slow or lying costs a bounded time (`ATTEMPTS` times `wait_s` in all before the origin is asked) and is not asked again for a while;
without peers it is the origin. When the origin fails, any peer that has the pack is as good. Nothing here can make a read fail that would
have succeeded without it. `relay_tree` says who asks whom, `docs/relay.md` the rest.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from driftline.messages.blobs import BlobRef
from driftline.messages.bus import Bus
from driftline.messages.errors import ConfigError, DriftlineError
from driftline.messages.types import RelayPeer
from driftline.policy_store.blobs import BlobStore, MemoryBlobs, StoredBlob
from driftline.policy_store.cache import CachedBlobs
from driftline.policy_store.relay_client import Partial, Refusal, RelayClient
from driftline.policy_store.relay_peers import BEAT_S, GONE_S, Peers
from driftline.policy_store.relay_server import RelayServer
from driftline.policy_store.relay_tls import make_identity
from driftline.policy_store.relay_tree import order, parent

__all__ = ["Relay", "RelayBlobs", "RelayCounts", "RelaySettings", "View"]

log = structlog.get_logger("relay")

ATTEMPTS = 3
"""Peers asked for a pack before the origin is."""

FAULT_S = 15.0
WRONG_S = 300.0
"""How long a peer that failed, and one that gave wrong bytes, is not asked again."""

KNOWN_S = 5.0

_HOST = re.compile(r"[A-Za-z0-9._:-]{1,255}")


class View(Protocol):
    """Who may be asked, as one peer sees it; `Peers` is one."""

    @property
    def me(self) -> str: ...
    def live(self) -> Mapping[str, RelayPeer]: ...
    def avoid(self, peer: RelayPeer, seconds: float) -> None: ...


@dataclass
class RelayCounts:
    """`hits` and `bytes` came from peers, `origin_reads` and `origin_bytes` from the origin; `rescued` of the hits after the origin had failed."""

    hits: int = 0
    bytes: int = 0
    origin_reads: int = 0
    origin_bytes: int = 0
    rescued: int = 0
    refusals: Counter[Refusal] = field(default_factory=Counter)


class RelayBlobs:
    """The origin with the peers before it; keeps nothing (`Relay.blobs` is this behind a cache). All but `get` is the origin's."""

    def __init__(self, origin: BlobStore, peers: View, client: RelayClient, *, fanout: int, wait_s: float) -> None:
        self.counts = RelayCounts()
        self._origin, self._peers, self._client = origin, peers, client
        self._fanout, self._wait_s = fanout, wait_s

    async def put(self, data: bytes) -> BlobRef:
        return await self._origin.put(data)

    async def has(self, ref: BlobRef) -> bool:
        return await self._origin.has(ref)

    async def delete(self, ref: BlobRef) -> None:
        await self._origin.delete(ref)

    def list(self) -> AsyncIterator[StoredBlob]:
        return self._origin.list()

    async def get(self, ref: BlobRef) -> bytes:
        asked: set[str] = set()
        data = await self._from_ancestors(ref, asked)
        if data is not None:
            return data
        try:
            data = await self._origin.get(ref)
        except (DriftlineError, OSError) as error:
            data = await self._rescue(ref)
            if data is None:
                raise
            log.warning("the origin failed, a peer had the pack", blob=ref.digest, cause=str(error))
            self.counts.rescued += 1
            return data
        self.counts.origin_reads += 1
        self.counts.origin_bytes += len(data)
        return data

    async def _from_ancestors(self, ref: BlobRef, asked: set[str]) -> bytes | None:
        if not self._client.ready or not ref.size:
            return None
        partial = Partial(ref)
        try:
            async with asyncio.timeout(ATTEMPTS * self._wait_s):
                for _ in range(ATTEMPTS):
                    # Looked up each time: peers come and go while one of them is being asked.
                    live = self._peers.live()
                    above = parent(ref.digest, self._peers.me, live.keys() - asked, self._fanout)
                    if above is None:
                        return None
                    asked.add(above)
                    data = await self._ask(live[above], partial, hold=True)
                    if data is not None:
                        return data
        except TimeoutError:
            log.info("peers took too long", blob=ref.digest, asked=sorted(asked))
        return None

    async def _rescue(self, ref: BlobRef) -> bytes | None:
        """From anyone who has it: nobody is waited for, so asking in any direction is safe, and those asked before may have it by now."""
        if not self._client.ready or not ref.size:
            return None
        live = self._peers.live()
        partial = Partial(ref)
        with suppress(TimeoutError):
            async with asyncio.timeout(ATTEMPTS * self._wait_s):
                for name in order(ref.digest, live):
                    data = await self._ask(live[name], partial, hold=False)
                    if data is not None:
                        return data
        return None

    async def _ask(self, peer: RelayPeer, partial: Partial, *, hold: bool) -> bytes | None:
        found = await self._client.fetch(peer, partial, hold=hold)
        if not isinstance(found, Refusal):
            self.counts.hits += 1
            self.counts.bytes += len(found)
            return found
        self.counts.refusals[found] += 1
        if found.is_fault:
            log.warning("peer not asked for a while", peer=peer.peer, cause=found.value, blob=partial.ref.digest)
            self._peers.avoid(peer, WRONG_S if found is Refusal.WRONG else FAULT_S)
        return None


@dataclass(frozen=True)
class RelaySettings:
    """Seconds and bytes. `host` is listened on, `advertise` is what others call it by, `port` 0 takes a free one. An answer that is not
    there within `hold_s` is "not yet"; a peer from which nothing comes for `silence_s` longer is given up. `tls`: only under TLS is what
    passes between engines hidden from who shares their network."""

    host: str = "127.0.0.1"
    advertise: str = ""
    port: int = 0
    fanout: int = 4
    cache_bytes: int = 2 * 2**30
    wait_s: float = 10.0
    tls: bool = False
    hold_s: float = 1.0
    silence_s: float = 3.0
    beat_s: float = BEAT_S
    gone_s: float = GONE_S

    def __post_init__(self) -> None:
        if self.address in ("0.0.0.0", "::") or not _HOST.fullmatch(self.address):
            raise ConfigError("others cannot call this engine by that", field="relay.advertise", value=self.address,
                              remedy="set relay.advertise to the name or address by which the other engines reach this machine")

    @property
    def address(self) -> str:
        return self.advertise or self.host


class Relay:
    """One engine's part in it: `async with relay.serving(): ...` around the work, and `relay.blobs` in place of the origin.

    Outside of `serving`, `blobs` is the origin behind a cache."""

    def __init__(self, bus: Bus, run: str, name: str, origin: BlobStore, settings: RelaySettings | None = None, *, local: BlobStore | None = None) -> None:
        """`name`: this engine among the run's, letters, digits, _ and -. `local`: where copies are kept (None: in memory)."""
        self._settings = how = settings or RelaySettings()
        self.peers = Peers(bus, run, name, beat_s=how.beat_s, gone_s=how.gone_s)
        self._client = RelayClient(name, wait_s=how.wait_s, hold_s=how.hold_s, silence_s=how.silence_s)
        self.upstream = RelayBlobs(origin, self.peers, self._client, fanout=how.fanout, wait_s=how.wait_s)
        self.blobs = CachedBlobs(self.upstream, local or MemoryBlobs(), max_bytes=how.cache_bytes)
        self.server = RelayServer(self.blobs, name, self.peers.token, uploads=2 * how.fanout, send_s=2 * how.wait_s)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve, be known and know the others, until the body ends; then leave first and stop afterwards. Raises ConfigError when the
        address cannot be listened on, and BrokerDenied when the run's credentials do not allow announcing it."""
        how = self._settings
        async with asyncio.TaskGroup() as tasks, self._client:
            identity = await asyncio.to_thread(make_identity, self.peers.me) if how.tls else None
            await self.server.start(how.host, how.port, tasks, identity.context if identity is not None else None)
            try:
                port = self.server.port
                following = tasks.create_task(self.peers.follow(), name="relay peers")
                beating = tasks.create_task(self.peers.beat(how.address, port, identity.fingerprint if identity is not None else ""), name="relay beat")
                await self.peers.caught_up(KNOWN_S)
                log.info("relay serving", peer=self.peers.me, host=how.address, port=port, peers=len(self.peers.live()))
                try:
                    yield
                finally:
                    beating.cancel()
                    following.cancel()
                    await asyncio.wait([beating, following])
                    await self.peers.leave()
            finally:
                await self.server.stop()

    def numbers(self) -> Mapping[str, float]:
        """For the engine's metrics: counts since the start, and how many peers are there now."""
        up, served = self.upstream.counts, self.server.counts
        return {
            "relay_hits": up.hits, "relay_bytes": up.bytes, "relay_served_bytes": served.served_bytes, "origin_bytes": up.origin_bytes,
            "relay_rescued": up.rescued, "relay_faults": sum(count for refusal, count in up.refusals.items() if refusal.is_fault),
            "relay_wrong": up.refusals[Refusal.WRONG], "relay_cache_bytes": self.blobs.kept_bytes, "peers": len(self.peers.live()),
        }
