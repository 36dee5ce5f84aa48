"""How much memory and time a version takes as checkpoints grow, and as versions add up.

    python benchmarks/policy_scale.py --gib 1 4 16
    python benchmarks/policy_scale.py --versions 1000

`--gib`: a full and a delta (1 % of the elements moved by one ulp) of a bf16 checkpoint are handed to a writer tensor by tensor, each made
when its turn comes, and read back by another process: shards verified, and every tensor compared with how it was made. Packs lie in
a directory, the writer's base and the reader's state in files mapped into memory, the bus is a broker of its own. Each process looks
at its own anonymous memory (RssAnon) every 5 ms; `ours` is the most there was above what it had before its first version, `peer` the same
of the smallest checkpoint of the run, `bound` what the bounds in the code add up to. Making the tensors is in the times, beside the coding; the notes say how
long it took.

`--versions`: that many versions of a small policy through the broker's blob streams, verified and collected meanwhile. `ours` is the last
hundred, `peer` the first.

Needs about twice the largest checkpoint on the disk of `--folder`; it is deleted at the end. A run replaces its own kind of rows in
the result and leaves the others.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import logging
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import nats
import numpy as np
import structlog

from driftline.messages.nats_bus import NatsBus
from driftline.messages.server import NatsServer
from driftline.messages.subjects import Subjects, topology
from driftline.policy_store import DirectoryBlobs, HostTensor, JetStreamBlobs, PolicyReader, PolicyWriter
from driftline.policy_store.applying import GROUP_BYTES, PACKS_IN_FLIGHT
from driftline.policy_store.mapped import mapped_in
from driftline.policy_store.packing import PACK_BYTES, PUTS_IN_FLIGHT, ROOM_BYTES
from driftline.policy_store.tensor import SHARD_BYTES, Layout
from driftline.policy_store.workers import shared_workers
from driftline.services.policy_store.service import PolicyStoreService

RUN = "scale"
GIB, MIB = 2**30, 2**20
TENSOR_BYTES = 64 * MIB
SHARE = 0.01
SAMPLE_S = 0.005
KEEP = 20
STRETCH = 100
Row = dict[str, object]


class Weights:
    """A checkpoint that is never in memory: tensor `number` of `version` is a function of the two.

    Each is one block of N(0, 0.02) in bf16, from another place on; in version 1, 1 % of the block's elements are one ulp off.
    """

    def __init__(self, nbytes: int) -> None:
        rng = np.random.Generator(np.random.Philox(key=17))
        elements = TENSOR_BYTES // 2
        first = ((rng.standard_normal(elements, np.float32) * np.float32(0.02)).view(np.uint32) >> 16).astype(np.uint16)
        moved = np.flatnonzero(rng.random(elements, np.float32) < SHARE)
        second = first.copy()
        second[moved] += np.where(rng.random(moved.size) < 0.5, 1, 0xFFFF).astype(np.uint16)
        self._blocks = (first, second)
        count, rest = divmod(nbytes, TENSOR_BYTES)
        sizes = [elements] * count + ([rest // 2] if rest else [])
        self.layouts = {f"layer.{number:05d}": Layout("bfloat16", (size,)) for number, size in enumerate(sizes)}
        self.made_s = 0.0

    def tensor(self, name: str, version: int) -> HostTensor:
        began = time.perf_counter()
        block, start = self._blocks[version], 7919 * int(name.split(".")[1]) % (TENSOR_BYTES // 2)
        bits = np.concatenate((block[start:], block[:start]))[: self.layouts[name].shape[0]]
        self.made_s += time.perf_counter() - began
        return HostTensor("bfloat16", bits.shape, bits.view(np.uint8))


@dataclass
class Measured:
    """One stage. Memory in bytes; `made_s` of the seconds one thread was making tensors, while others coded them."""

    stage: str
    anonymous: int = 0
    before: int = 0
    resident: int = 0
    seconds: float = 0.0
    made_s: float = 0.0
    stored: int = 0


@contextmanager
def measured(stage: str, weights: Weights, before: int) -> Iterator[Measured]:
    found = Measured(stage, before=before)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    over = threading.Event()

    def look() -> None:
        while not over.wait(SAMPLE_S):
            found.anonymous = max(found.anonymous, status("RssAnon"))

    looking = threading.Thread(target=look)
    looking.start()
    made, began = weights.made_s, time.perf_counter()
    try:
        yield found
    finally:
        found.seconds, found.made_s = time.perf_counter() - began, weights.made_s - made
        over.set()
        looking.join()
        found.resident = status("VmHWM")


def status(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


async def publish(url: str, folder: Path, nbytes: int) -> list[Measured]:
    weights = Weights(nbytes)
    results = []
    async with await NatsBus.connect(url, name="publish") as bus:
        writer = PolicyWriter(bus, DirectoryBlobs(folder / "blobs"), RUN, 1000, allocate=mapped_in(folder))
        await writer.resume()
        before = status("RssAnon")
        for version, stage in enumerate(("publish a full", "publish a delta")):
            with measured(stage, weights, before) as found:
                async with writer.draft(weights.layouts, version=version, learner_step=version) as draft:
                    for name in weights.layouts:
                        await draft.put(name, weights.tensor(name, version))
                    manifest = await draft.commit()
            found.stored = sum(pack.size for pack in manifest.packs)
            results.append(found)
    return results


async def read(url: str, folder: Path, nbytes: int) -> list[Measured]:
    weights = Weights(nbytes)
    results = []
    async with await NatsBus.connect(url, name="read") as bus:
        blobs = DirectoryBlobs(folder / "blobs")
        reader = PolicyReader(bus, blobs, RUN, allocate=mapped_in(folder))
        first = await reader.manifest(0)
        assert first.full is not None
        before = status("RssAnon")
        with measured("read a full", weights, before) as found:
            state = await reader.materialise_manifest(first)
        found.stored = first.full.nbytes
        results.append(found)
        compare(state, weights, 0)
        with measured("apply a delta", weights, before) as found:
            state = await reader.advance(state, 0, 1, fallback=False)
        delta = (await reader.manifest(1)).delta
        assert delta is not None
        found.stored = delta.nbytes
        results.append(found)
        compare(state, weights, 1)
    return results


def compare(state: dict[str, HostTensor], weights: Weights, version: int) -> None:
    for name, tensor in state.items():
        if not np.array_equal(tensor.data, weights.tensor(name, version).data):
            sys.exit(f"{name} of version {version} is not what was published")


def bound_of(stage: str) -> int:
    """What the code says it holds: see `packing`, `draft` and `applying`."""
    if "publish" in stage:
        # The tensor being made and the one being put; shards that wait, that are encoded, and those coded; for a full beside a delta, packs
        # being filled, joined and sent.
        return 2 * TENSOR_BYTES + 2 * ROOM_BYTES + ROOM_BYTES + 2 * (PUTS_IN_FLIGHT + 2) * (PACK_BYTES + SHARD_BYTES)
    # A pack as read, and what its shards become in the workers on the way.
    return PACKS_IN_FLIGHT * 2 * (PACK_BYTES + SHARD_BYTES) + shared_workers().threads * (GROUP_BYTES + 4 * SHARD_BYTES)


async def grow(sizes: list[float], folder: Path) -> list[Row]:
    rows: list[Row] = []
    smallest: dict[str, float] = {}
    for gib in sizes:
        with tempfile.TemporaryDirectory(prefix="policy-scale-", dir=folder) as place:
            need = int(2.2 * gib * GIB)  # packs, and the weights of the writer or of the reader
            if shutil.disk_usage(place).free < need:
                sys.exit(f"{gib:g} GiB need {need / GIB:.0f} GiB free in {folder}: name another --folder")
            server = NatsServer(Path(place) / "nats")
            await server.start()
            try:
                async with await NatsBus.connect(server.url, name="scale") as bus:
                    await bus.declare(topology(RUN))
                stages = [Measured(**fields) for what in ("publish", "read")
                          for fields in await child(what, server.url, Path(place), int(gib * GIB))]
            finally:
                await server.stop()
        for found in stages:
            rows += stage_rows(found, gib, smallest)
            print_rows(rows[-3:])
    return rows


async def child(what: str, url: str, folder: Path, number: int) -> list[Any]:
    """One side in a process of its own: what an earlier one left in memory would hide its growth."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--child", what, url, str(folder), str(number), stdout=asyncio.subprocess.PIPE,
    )
    try:
        out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        sys.exit(f"the {what} process ended with {process.returncode}")
    found: list[Any] = json.loads(out)
    return found


def stage_rows(found: Measured, gib: float, smallest: dict[str, float]) -> list[Row]:
    case = f"{gib:g} GiB, {found.stage}"
    above = (found.anonymous - found.before) / MIB
    first = smallest.setdefault(found.stage, above)
    note = (f"RssAnon at most {found.anonymous / MIB:.0f} MiB, {found.before / MIB:.0f} MiB before; resident with the mapped weights "
            f"{found.resident / MIB:.0f} MiB")
    return [
        row(f"{case}: memory beyond the weights", above, "MiB", "smallest checkpoint", first, above / first, bound_of(found.stage) / MIB, note),
        row(f"{case}: time", found.seconds / gib, "s per GiB", None, None, None, None,
            f"{found.seconds:.1f} s in all, making tensors for {found.made_s:.1f} s of them; load {os.getloadavg()[0]:.1f}"),
        row(f"{case}: bytes", 100 * found.stored / (gib * GIB), "% of raw", None, None, None, None, f"{found.stored / GIB:.4g} GiB in packs"),
    ]


class Heard:
    """Says when the service is through with a version."""

    def __init__(self) -> None:
        self.version = -1
        self._changed = asyncio.Condition()

    async def report(self, values: Any, *, step: int = -1) -> None:
        async with self._changed:
            self.version = step
            self._changed.notify_all()

    async def until(self, version: int) -> None:
        async with asyncio.timeout(60), self._changed:
            await self._changed.wait_for(lambda: self.version >= version)


class Lived(NamedTuple):
    """Seconds by version; and, after the first stretch and at the end, seconds to join and bytes of what may grow."""

    published: list[float]
    settled: list[float]
    joined: list[float]
    sizes: list[dict[str, int]]


async def live(url: str, folder: Path, count: int) -> Lived:
    """`count` versions of 2 MiB; each is timed until the head has moved, and until the service has verified it and collected."""
    rng = np.random.default_rng(3)
    weights = (rng.standard_normal(MIB, np.float32) * np.float32(0.02)).view(np.uint32) >> 16
    bits = weights.astype(np.uint16)
    lived = Lived([], [], [], [])
    async with await NatsBus.connect(url, name="versions") as bus:
        await bus.declare(topology(RUN))
        blobs, heard = JetStreamBlobs(bus, RUN), Heard()
        service = asyncio.create_task(PolicyStoreService(bus, blobs, RUN, keep_versions=KEEP, reporter=heard).run())
        try:
            writer = PolicyWriter(bus, blobs, RUN)
            await writer.resume()
            for version in range(count):
                moved = rng.integers(0, bits.size, bits.size // 100)
                bits[moved] ^= 1
                began = time.perf_counter()
                await writer.publish({"w": HostTensor.from_numpy(bits, "bfloat16")}, version=version, learner_step=version)
                lived.published.append(time.perf_counter() - began)
                await heard.until(version)
                lived.settled.append(time.perf_counter() - began)
                if version + 1 in (STRETCH, count):
                    lived.sizes.append(await stream_bytes(url) | {"process": status("RssAnon"), "disk": on_disk(folder)})
                    lived.joined.append(await joining(url, version))
        finally:
            service.cancel()
            await asyncio.wait([service])
    return lived


async def many(count: int, folder: Path) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="policy-scale-", dir=folder) as place:
        server = NatsServer(Path(place) / "nats")
        await server.start()
        try:
            lived = Lived(*await child("versions", server.url, Path(place), count))
        finally:
            await server.stop()
    rows = []
    for what, seconds in (("publish", lived.published), ("publish, verify and collect", lived.settled)):
        first, last = (1e3 * statistics.median(part) for part in (seconds[:STRETCH], seconds[-STRETCH:]))
        rows.append(row(f"{count} versions: {what}, last {STRETCH}", last, "ms, median", f"first {STRETCH}", first, first / last, None,
                        f"2 MiB, 1 % changed, broker's blob streams; load {os.getloadavg()[0]:.1f}"))
    first, last = (1e3 * seconds for seconds in lived.joined)
    rows.append(row(f"{count} versions: a reader joins", last, "ms", f"after {STRETCH}", first, first / last, None,
                    "connects, finds the head and reads its version"))
    for what, key, note in (
        ("bytes in the policy stream", "POLICY", f"{KEEP} versions kept"),
        ("bytes in the blob stream", "BLOB", f"{KEEP} versions kept"),
        ("the broker's files", "disk", f"blocks in use, all streams; {KEEP} versions kept"),
        ("anonymous memory of writer and service", "process", "one process; RssAnon"),
    ):
        first, last = (sizes[key] / MIB for sizes in lived.sizes)
        rows.append(row(f"{count} versions: {what}", last, "MiB", f"after {STRETCH}", first, first / last, None, note))
    print_rows(rows)
    return rows


def on_disk(folder: Path) -> int:
    """Bytes that the files under `folder` take; what vanishes meanwhile takes none."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(place, name)).st_blocks * 512
    return total


async def joining(url: str, version: int) -> float:
    began = time.perf_counter()
    async with await NatsBus.connect(url, name="joiner") as bus:
        reader = PolicyReader(bus, JetStreamBlobs(bus, RUN), RUN)
        async with aclosing(reader.watch()) as heads:
            async for head in heads:
                await reader.materialise(head.version)
                break
    assert head.version == version
    return time.perf_counter() - began


async def stream_bytes(url: str) -> dict[str, int]:
    client = await nats.connect(url)
    try:
        names = Subjects(RUN)
        return {plane: (await client.jetstream().stream_info(names.stream(plane))).state.bytes for plane in ("POLICY", "BLOB")}
    finally:
        await client.close()


def row(case: str, ours: float, unit: str, peer: str | None, peer_value: float | None, ratio: float | None, bound: float | None,
        note: str) -> Row:
    def short(value: float | None) -> float | None:
        return None if value is None else float(f"{value:.4g}")

    return {"case": case, "ours": short(ours), "unit": unit, "peer": peer, "peer_value": short(peer_value), "ratio": short(ratio),
            "bound": short(bound), "note": note}


def print_rows(rows: list[Row]) -> None:
    for entry in rows:
        cells = [entry["ours"], entry["peer_value"], entry["ratio"], entry["bound"]]
        texts = ["-" if cell is None else f"{cell:.4g}" for cell in cells]
        print(f"{entry['case']:62} {texts[0]:>9} {texts[1]:>9} {texts[2]:>6} {texts[3]:>9}  {entry['unit']:12} {entry['note']}", flush=True)


def write(path: Path, device: str, made: dict[str, tuple[str, list[Row]]]) -> None:
    """`made`: by kind, the command and its rows. What is there of the other kind stays as it was."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    kinds = json.loads(path.read_text())["kinds"] if path.exists() else {}
    kinds |= {kind: {"command": command, "rows": rows} for kind, (command, rows) in made.items()}
    ordered = [kinds[kind] for kind in sorted(kinds)]
    result = {
        "command": "; ".join(part["command"] for part in ordered),
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": device,
        "rows": [entry for part in ordered for entry in part["rows"]],
        "kinds": kinds,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--device", default="cpu-2core")
    arguments.add_argument("--gib", type=float, nargs="+", default=[])
    arguments.add_argument("--versions", type=int, default=0)
    arguments.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    arguments.add_argument("--out", type=Path, help="default benchmarks/results/<device>/policy_scale.json")
    arguments.add_argument("--child", nargs=4, metavar=("WHAT", "URL", "FOLDER", "NUMBER"), help=argparse.SUPPRESS)
    given = arguments.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that what was begun is cleared away
    if given.child:
        what, url, folder, number = given.child
        if what == "versions":
            print(json.dumps(asyncio.run(live(url, Path(folder), int(number)))))
        else:
            stages = asyncio.run((publish if what == "publish" else read)(url, Path(folder), int(number)))
            print(json.dumps([asdict(stage) for stage in stages]))
        return
    if not given.gib and given.versions < 2 * STRETCH:
        arguments.error(f"say --gib SIZE ..., or --versions with at least {2 * STRETCH}")
    print(f"{'case':62} {'ours':>9} {'peer':>9} {'ratio':>6} {'bound':>9}  unit")
    made: dict[str, tuple[str, list[Row]]] = {}
    if given.gib:
        rows = asyncio.run(grow(given.gib, given.folder))
        made["sizes"] = (f"python benchmarks/policy_scale.py --gib {' '.join(f'{gib:g}' for gib in given.gib)}", rows)
    if given.versions:
        rows = asyncio.run(many(given.versions, given.folder))
        made["versions"] = (f"python benchmarks/policy_scale.py --versions {given.versions}", rows)
    write(given.out or Path(__file__).parent / "results" / given.device / "policy_scale.json", given.device, made)


if __name__ == "__main__":
    main()
