"""Peers of a relay that behave and that do not, and stores that count, wait and fail."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress

import xxhash

from driftline.messages.blobs import BlobRef
from driftline.messages.bus import Bus
from driftline.messages.errors import BrokerUnavailable
from driftline.messages.types import RelayPeer
from driftline.policy_store.blobs import MemoryBlobs
from driftline.policy_store.relay import Relay, RelayBlobs, RelaySettings
from driftline.policy_store.relay_client import RelayClient
from driftline.policy_store.relay_tree import before

WAIT_S = 30.0
TOKEN = "0" * 32


def ref_of(data: bytes) -> BlobRef:
    return BlobRef(xxhash.xxh3_128_hexdigest(data), len(data), 1)


def ahead_of(me: str, digest: str, count: int = 1) -> list[str]:
    """Names that come before `me` in the order of a pack, the first of them first."""
    names = [name for name in (f"peer-{i}" for i in range(1000)) if before(digest, name, me)][:count]
    return sorted(names, key=lambda name: sum(before(digest, other, name) for other in names))


class CountingBlobs(MemoryBlobs):
    """An origin: counts what is read from it, holds reads back while `open` is not set, and can be down."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()
        self.read_bytes = 0
        self.open, self.down = asyncio.Event(), False
        self.open.set()

    async def get(self, ref: BlobRef) -> bytes:
        self.reads[ref.digest] += 1
        await self.open.wait()
        if self.down:
            raise BrokerUnavailable("down on purpose", field="blob", value=ref.digest)
        data = await super().get(ref)
        self.read_bytes += len(data)
        return data


class Known:
    """A view that the test sets."""

    def __init__(self, me: str, *peers: RelayPeer) -> None:
        self.me, self.peers = me, {peer.peer: peer for peer in peers}
        self.avoided: dict[str, float] = {}

    def live(self) -> Mapping[str, RelayPeer]:
        return {name: peer for name, peer in self.peers.items() if name not in self.avoided}

    def avoid(self, peer: RelayPeer, seconds: float) -> None:
        self.avoided[peer.peer] = seconds


@asynccontextmanager
async def asking(view: Known, origin: MemoryBlobs, *, fanout: int = 1, wait_s: float = WAIT_S, hold_s: float = 0.2, silence_s: float = 20.0) -> AsyncIterator[RelayBlobs]:
    async with RelayClient(view.me, wait_s=wait_s, hold_s=hold_s, silence_s=silence_s) as client:
        yield RelayBlobs(origin, view, client, fanout=fanout, wait_s=wait_s)


Script = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def scripted(name: str, script: Script) -> AsyncIterator[RelayPeer]:
    """A peer that does with each request (its head, as received) what `script` says, then hangs up."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):  # cancelled by the end of the test
            await script(await reader.readuntil(b"\r\n\r\n"), writer)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield RelayPeer(run="r", peer=name, host="127.0.0.1", port=port, token=TOKEN, beat=1, at=0.0)


def reply(body: bytes, *, status: str = "200 OK", length: int | None = None, more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body) if length is None else length}\r\n{more}\r\n".encode() + body


def engine(bus: Bus, run: str, name: str, origin: MemoryBlobs, *, fanout: int = 4, cache_bytes: int = 2**26, wait_s: float = WAIT_S) -> Relay:
    settings = RelaySettings(fanout=fanout, cache_bytes=cache_bytes, wait_s=wait_s, hold_s=0.5, silence_s=5.0, beat_s=0.5, gone_s=60.0)
    return Relay(bus, run, name, origin, settings)


async def until(true: Callable[[], bool], what: str) -> None:
    """Until something that others make true is; a test's own deadline."""
    try:
        async with asyncio.timeout(WAIT_S):
            while not true():  # noqa: ASYNC110 - what is waited for is counters of the code under test
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(what) from None
