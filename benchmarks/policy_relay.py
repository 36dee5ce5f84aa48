"""Engines that all want the same version: read from the store by each of them, or passed on by the relay.

N engines without a model, in one process and on one event loop, each with a broker connection of its own, read a version's packs (4 MiB of random
bytes, three at a time as a reader does) from JetStream blobs of a real nats-server on loopback. Reported are the bytes that leave the store and the
time until the last engine has everything, verified: with the relay (`ours`) and without (`peer`), by the median of several versions, every one
of other bytes. On one machine both ways share the same cores, so the time is one of processors and not of networks. The rows "behind a link"
are modelled: reads of the store pass through one link of the given speed, in both ways; the engines' own links are not slowed. The first row
is one engine reading pack after pack from another process, verified, beside reading them from JetStream.

    python benchmarks/policy_relay.py [--device cpu-2core] [--engines 1,4,16,32] [--mib 24] [--link-gbit 1] [--versions 3]

`ratio` is how many times better the relay is. `bound` is one version's bytes for what leaves the store, and for the time behind a link how long
one version takes through it. Writes benchmarks/results/<device>/policy_relay.json unless `--dry`.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import structlog
import uvloop

from driftline.messages.blobs import BlobRef, blob_digest
from driftline.messages.nats_bus import NatsBus
from driftline.messages.server import NatsServer
from driftline.messages.subjects import topology
from driftline.messages.types import RelayPeer
from driftline.policy_store.blobs import BlobStore, JetStreamBlobs, MemoryBlobs, StoredBlob
from driftline.policy_store.cache import CachedBlobs
from driftline.policy_store.relay import Relay, RelaySettings
from driftline.policy_store.relay_client import Partial, RelayClient
from driftline.policy_store.relay_server import RelayServer
from driftline.policy_store.workers import bounded

MIB = 2**20
PACK_BYTES = 4 * MIB
PACKS_IN_FLIGHT = 3
KNOWN_S = 60.0
STREAMED = 200
TOKEN = "0" * 32
PACK = bytes(range(256)) * (PACK_BYTES // 256)
Row = dict[str, object]


class Link:
    """A link of `gbit` shared by all who read the store: a pack leaves when those before it have left. None: as fast as it goes."""

    def __init__(self, gbit: float | None) -> None:
        self._seconds_per_byte = 0.0 if gbit is None else 8 / (gbit * 1e9)
        self._free_at = 0.0

    async def carry(self, size: int) -> None:
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + size * self._seconds_per_byte
        if self._seconds_per_byte:
            await asyncio.sleep(self._free_at - now)


class Metered:
    """A store whose reads are counted and pass through a link."""

    def __init__(self, store: BlobStore, link: Link) -> None:
        self.read_bytes = 0
        self._store, self._link = store, link

    async def put(self, data: bytes) -> BlobRef:
        return await self._store.put(data)

    async def get(self, ref: BlobRef) -> bytes:
        data = await self._store.get(ref)
        self.read_bytes += len(data)
        await self._link.carry(len(data))
        return data

    async def has(self, ref: BlobRef) -> bool:
        return await self._store.has(ref)

    async def delete(self, ref: BlobRef) -> None:
        await self._store.delete(ref)

    def list(self) -> AsyncIterator[StoredBlob]:
        return self._store.list()


@dataclass(frozen=True)
class Figures:
    store_bytes: float
    seconds: float


async def read_version(stores: Sequence[BlobStore], packs: Sequence[BlobRef]) -> None:
    async def follow(store: BlobStore) -> None:
        async def one(ref: BlobRef) -> None:
            await store.get(ref)

        await bounded(one, packs, PACKS_IN_FLIGHT)

    async with asyncio.TaskGroup() as tasks:
        for store in stores:
            tasks.create_task(follow(store))


async def measure(url: str, run: str, engines: int, nbytes: int, versions: int, *, relayed: bool, gbit: float | None) -> Figures:
    link, found = Link(gbit), list[Figures]()
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(await NatsBus.connect(url, name="writer"))
        await bus.declare(topology(run, queue_bytes=16 * MIB, blob_bytes=2 * nbytes + 64 * MIB))
        writer = JetStreamBlobs(bus, run)
        origins, stores, relays = list[Metered](), list[BlobStore](), list[Relay]()
        for number in range(engines):
            mine = await stack.enter_async_context(await NatsBus.connect(url, name=f"engine-{number}"))
            origins.append(Metered(JetStreamBlobs(mine, run), link))
            stores.append(origins[-1])
            if relayed:
                relays.append(Relay(mine, run, f"engine-{number}", origins[-1], RelaySettings(cache_bytes=nbytes + nbytes // 4, wait_s=60.0)))
                await stack.enter_async_context(relays[-1].serving())
                stores[-1] = relays[-1].blobs
        async with asyncio.timeout(KNOWN_S):
            while not all(len(relay.peers.live()) == engines - 1 for relay in relays):  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.05)
        for _ in range(versions):
            packs = [await writer.put(os.urandom(PACK_BYTES)) for _ in range(nbytes // PACK_BYTES)]
            before, began = sum(origin.read_bytes for origin in origins), time.perf_counter()
            await read_version(stores, packs)
            found.append(Figures(sum(origin.read_bytes for origin in origins) - before, time.perf_counter() - began))
            for ref in packs:
                await writer.delete(ref)
    return Figures(statistics.median(one.store_bytes for one in found), statistics.median(one.seconds for one in found))


async def serve() -> None:
    """The other process of `stream_row`: says its port, serves `PACK` until its input ends."""
    blobs = CachedBlobs(MemoryBlobs(), MemoryBlobs(), max_bytes=2 * PACK_BYTES)
    await blobs.put(PACK)
    server = RelayServer(blobs, "server", TOKEN, uploads=8, send_s=60.0)
    async with asyncio.TaskGroup() as tasks:
        await server.start("127.0.0.1", 0, tasks)
        print(server.port, flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await server.stop()


async def stream_row(url: str) -> Row:
    ref = BlobRef(blob_digest(PACK), len(PACK), len(PACK) // (512 * 1024))
    other = await asyncio.create_subprocess_exec(sys.executable, __file__, "--serve", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    try:
        port = int(await other.stdout.readline())
        peer = RelayPeer(run="r", peer="server", host="127.0.0.1", port=port, token=TOKEN, beat=1, at=0.0)
        async with RelayClient("client", wait_s=60.0) as client:
            rate = await mb_per_s(lambda: client.fetch(peer, Partial(ref), hold=False))
        async with await NatsBus.connect(url, name="stream") as bus:
            await bus.declare(topology("stream", queue_bytes=16 * MIB, blob_bytes=64 * MIB))
            store = JetStreamBlobs(bus, "stream")
            await store.put(PACK)
            direct = await mb_per_s(lambda: store.get(ref))
    finally:
        await other.communicate(b"")  # which closes its input
    made = row("one reader, pack after pack", rate, "MB/s", direct, None, "two processes; the other is JetStream on the same machine")
    return made | {"peer": "JetStream", "ratio": float(f"{rate / direct:.4g}")}


async def mb_per_s(get: Callable[[], Awaitable[object]]) -> float:
    """The better of two rounds."""
    best = 0.0
    for _ in range(2):
        began = time.perf_counter()
        for _ in range(STREAMED):
            if await get() != PACK:
                raise RuntimeError("the pack did not come")
        best = max(best, STREAMED * PACK_BYTES / 1e6 / (time.perf_counter() - began))
    return best


def rows_of(engines: int, nbytes: int, gbit: float | None, ours: Figures, direct: Figures) -> list[Row]:
    where = f"{engines} engine{'s' if engines > 1 else ''}" + (f", store behind a link of {gbit:g} Gbit/s (modelled)" if gbit is not None else "")
    bound_s = None if gbit is None else nbytes * 8 / (gbit * 1e9)
    return [
        row(f"{where}: bytes out of the store", ours.store_bytes / MIB, "MiB", direct.store_bytes / MIB, nbytes / MIB, ""),
        row(f"{where}: time to all", ours.seconds, "s", direct.seconds, bound_s,
            f"{engines * nbytes / ours.seconds / 1e6:.0f} MB/s to all engines together; without the relay {engines * nbytes / direct.seconds / 1e6:.0f}"),
    ]


def row(case: str, ours: float, unit: str, peer: float, bound: float | None, note: str) -> Row:
    def short(value: float | None) -> float | None:
        return None if value is None else float(f"{value:.4g}")

    return {"case": case, "ours": short(ours), "unit": unit, "peer": "each from the store", "peer_value": short(peer), "ratio": short(peer / ours),
            "bound": short(bound), "note": note}


async def run(counts: Sequence[int], nbytes: int, versions: int, gbit: float) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        async with NatsServer(Path(folder)) as server:
            rows.append(await stream_row(server.url))
            print(json.dumps(rows[-1]), flush=True)
            for link in (None, gbit):
                for engines in counts:
                    name = f"relay-{engines}-{'link' if link else 'free'}"
                    ours = await measure(server.url, f"{name}-on", engines, nbytes, versions, relayed=True, gbit=link)
                    direct = await measure(server.url, f"{name}-off", engines, nbytes, versions, relayed=False, gbit=link)
                    rows += rows_of(engines, nbytes, link, ours, direct)
                    for made in rows[-2:]:
                        print(json.dumps(made), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu-2core")
    parser.add_argument("--engines", default="1,4,16,32")
    parser.add_argument("--mib", type=int, default=24, help="size of a version; a multiple of 4")
    parser.add_argument("--link-gbit", type=float, default=1.0)
    parser.add_argument("--versions", type=int, default=3)
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("warning"))
    if given.serve:
        return uvloop.run(serve())
    counts = [int(count) for count in given.engines.split(",")]
    load = os.getloadavg()[0]
    rows = uvloop.run(run(counts, given.mib * MIB, given.versions, given.link_gbit))
    if given.dry:
        return None
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    result = {
        "command": f"python benchmarks/policy_relay.py --device {given.device} --engines {given.engines} --mib {given.mib} "
                   f"--link-gbit {given.link_gbit:g} --versions {given.versions}",
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": given.device,
        "note": f"a version is {given.mib} MiB; median of {given.versions} versions; load average at the start {load:.1f}",
        "rows": rows,
    }
    path = Path(__file__).parent / "results" / given.device / "policy_relay.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
