"""How fast a version's bytes go into each blob store and come out of it, beside the same bytes moved without the store.

    python benchmarks/policy_backends.py [--device cpu-2core] [--mib 256]

A version is packs of 4 MiB of random bytes, which do not compress, put and got as many at a time as a writer and a reader do. All of it
is on this machine: a broker, a directory, and an S3-compatible server (SeaweedFS, of the dev extra), each with its own fsync habits, so
rows of one store compare with their peer, not with those of another store. `ours` is the best of `--rounds`, MB/s of 10^6 bytes.

Peers: for the directory the same files written, synced and renamed, or read, by plain threads, without digests; for S3 obstore's own
put and get, as many at a time; for JetStream the object store of the client library, one object of at most 32 MiB (it is slow), in
chunks of the size it chooses.
`bound` is the rate of the digest alone, on one thread: no store that checks what it hands out can be faster without a second one.
"stored already" puts the same bytes again: what a writer does that comes back after a crash.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import nats
import xxhash

from driftline.messages.blobs import BlobRef
from driftline.messages.nats_bus import NatsBus
from driftline.messages.server import NatsServer
from driftline.messages.subjects import topology
from driftline.policy_store.applying import PACKS_IN_FLIGHT
from driftline.policy_store.blobs import BlobStore, DirectoryBlobs, JetStreamBlobs
from driftline.policy_store.packing import PACK_BYTES, PUTS_IN_FLIGHT
from driftline.policy_store.s3 import S3Blobs
from driftline.policy_store.workers import bounded

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from s3_server import BUCKET, OWNER, S3Server, environment

MIB = 1024 * 1024
PEER_MIB = 32
LOAD = f"load average at the start {os.getloadavg()[0]:.1f}"
Row = dict[str, object]
Step = Callable[[], Awaitable[object]]


def packs(mib: int) -> list[bytes]:
    return [os.urandom(PACK_BYTES) for _ in range(mib * MIB // PACK_BYTES)]


async def seconds(step: Step) -> float:
    start = time.perf_counter()
    await step()
    return time.perf_counter() - start


class Store:
    """Ours and its peer over the same packs, round by round, so that a disturbance meets both."""

    def __init__(self, name: str, ours: BlobStore, peer: str, data: Sequence[bytes]) -> None:
        self.name, self.ours, self.peer, self.data = name, ours, peer, data
        self.peer_bytes = sum(map(len, data))
        self.best: dict[str, float] = {}

    async def put_peer(self) -> None: ...
    async def get_peer(self) -> None: ...
    async def clear_peer(self) -> None: ...

    async def measure(self, rounds: int) -> None:
        refs: list[BlobRef] = []

        async def put() -> None:
            refs[:] = await bounded(self.ours.put, self.data, PUTS_IN_FLIGHT)

        async def get() -> None:
            await bounded(self.ours.get, refs, PACKS_IN_FLIGHT)

        for _ in range(rounds):
            for what, step in (("put", put), ("again", put), ("get", get), ("peer put", self.put_peer), ("peer get", self.get_peer)):
                self.best[what] = min(self.best.get(what, float("inf")), await seconds(step))
            if await bounded(self.ours.get, refs, PACKS_IN_FLIGHT) != list(self.data):
                sys.exit("what came back is not what was put")
            for ref in refs:
                await self.ours.delete(ref)
            await self.clear_peer()

    def rows(self, digest: float) -> list[Row]:
        mb = sum(map(len, self.data)) / 1e6

        def row(case: str, what: str, peer: str | None, note: str) -> Row:
            rate, other = mb / self.best[what], self.peer_bytes / 1e6 / self.best[peer] if peer else None
            return {"case": f"{self.name}, {case}", "ours": short(rate), "unit": "MB/s", "peer": self.peer if other else None,
                    "peer_value": short(other) if other else None, "ratio": short(rate / other) if other else None,
                    "bound": short(digest), "note": f"{mb:.0f} MB, {note}; {LOAD}"}

        return [
            row("put", "put", "peer put", f"{PUTS_IN_FLIGHT} packs at a time"),
            row("get", "get", "peer get", f"{PACKS_IN_FLIGHT} packs at a time, verified"),
            row("stored already", "again", None, "nothing is sent"),
        ]


class Directory(Store):
    def __init__(self, folder: Path, data: Sequence[bytes]) -> None:
        super().__init__("directory", DirectoryBlobs(folder / "ours"), "plain files", data)
        self.folder = folder / "peer"
        self.folder.mkdir()

    def write(self, index: int) -> None:
        partial = self.folder / f"{index}.partial"
        with partial.open("wb") as file:
            file.write(self.data[index])
            file.flush()
            os.fsync(file.fileno())
        partial.rename(self.folder / str(index))

    async def put_peer(self) -> None:
        await bounded(lambda index: asyncio.to_thread(self.write, index), range(len(self.data)), PUTS_IN_FLIGHT)

    async def get_peer(self) -> None:
        await bounded(lambda index: asyncio.to_thread((self.folder / str(index)).read_bytes), range(len(self.data)), PACKS_IN_FLIGHT)


class ObjectStore(Store):
    def __init__(self, server: S3Server, data: Sequence[bytes]) -> None:
        from obstore.store import S3Store

        super().__init__("S3", S3Blobs(BUCKET, "ours", endpoint=server.url), "obstore", data)
        self.raw = S3Store(BUCKET, prefix="peer", endpoint=server.url, region="us-east-1", access_key_id=OWNER.id,
                           secret_access_key=OWNER.secret, client_options={"allow_http": True})

    async def put_peer(self) -> None:
        import obstore

        await bounded(lambda index: obstore.put_async(self.raw, str(index), self.data[index], use_multipart=False),
                      range(len(self.data)), PUTS_IN_FLIGHT)

    async def get_peer(self) -> None:
        import obstore

        async def one(index: int) -> bytes:
            return (await (await obstore.get_async(self.raw, str(index))).bytes_async()).to_bytes()

        await bounded(one, range(len(self.data)), PACKS_IN_FLIGHT)


class JetStream(Store):
    def __init__(self, bus: NatsBus, objects: Any, data: Sequence[bytes]) -> None:
        super().__init__("JetStream", JetStreamBlobs(bus, "bench"), "nats-py object store", data)
        self.objects, self.whole = objects, b"".join(data[: PEER_MIB * MIB // PACK_BYTES])
        self.peer_bytes = len(self.whole)

    async def put_peer(self) -> None:
        await self.objects.put("version", self.whole)

    async def get_peer(self) -> None:
        await self.objects.get("version")

    async def clear_peer(self) -> None:
        await self.objects.delete("version")


async def measured(mib: int, rounds: int, folder: Path) -> list[Row]:
    data = packs(mib)
    digest = max(digest_rate(data) for _ in range(3))
    rows: list[Row] = []
    async with NatsServer(folder / "broker") as broker, await NatsBus.connect(broker.url, name="bench") as bus:
        await bus.declare(topology("bench", blob_bytes=4 * mib * MIB))
        client = await nats.connect(broker.url)
        try:
            objects = await client.jetstream(timeout=60).create_object_store("peer")
            rows += await finished(JetStream(bus, objects, data), rounds, digest)
        finally:
            await client.close()
    rows += await finished(Directory(folder, data), rounds, digest)
    os.environ.update(environment(OWNER))
    server = S3Server(folder / "s3")
    await asyncio.to_thread(server.start)
    try:
        rows += await finished(ObjectStore(server, data), rounds, digest)
    finally:
        server.stop()
    return rows


async def finished(store: Store, rounds: int, digest: float) -> list[Row]:
    await store.measure(rounds)
    rows = store.rows(digest)
    for entry in rows:
        texts = ["-" if entry[key] is None else f"{entry[key]:.4g}" for key in ("ours", "peer_value", "ratio", "bound")]
        print(f"{entry['case']:28} {texts[0]:>9} {texts[1]:>9} {texts[2]:>6} {texts[3]:>9}  {entry['unit']}, {entry['peer'] or '-'}", flush=True)
    return rows


def digest_rate(data: Sequence[bytes]) -> float:
    start = time.perf_counter()
    for pack in data:
        xxhash.xxh3_128_digest(pack)
    return sum(map(len, data)) / 1e6 / (time.perf_counter() - start)


def short(value: float) -> float:
    return float(f"{value:.4g}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--device", default="cpu-2core")
    arguments.add_argument("--mib", type=int, default=256)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--folder", type=Path, help="where the stores lie; default a temporary folder")
    arguments.add_argument("--dry", action="store_true", help="print, and write no result")
    given = arguments.parse_args()
    print(f"{'case':28} {'ours':>9} {'peer':>9} {'ratio':>6} {'bound':>9}  unit, peer")
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        rows = asyncio.run(measured(given.mib, given.rounds, Path(folder)))
    if given.dry:
        return
    root = Path(__file__).parents[1]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    path = root / "benchmarks" / "results" / given.device / "policy_backends.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({
        "command": f"python benchmarks/policy_backends.py --device {given.device} --mib {given.mib} --rounds {given.rounds}",
        "commit": commit, "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "device": given.device,
        "note": f"everything on one machine; {LOAD}", "rows": rows,
    }, indent=1) + "\n")
    print(f"wrote {path.relative_to(root)}")


if __name__ == "__main__":
    main()
