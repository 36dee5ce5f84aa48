"""What shortcuts save those who come late, and what they cost the policy store.

    python benchmarks/policy_shortcuts.py [--elements 64000000] [--versions 64] [--device cpu-2core]

bf16 weights ~ N(0, 0.02) over an fp32 master that steps by N(0, 0.23 lr) at lr 1e-6, as AdamW does under noise; blobs in memory, so
that the figures are the coding's and not a disk's. `ours`: a follower that is k versions behind by the cheapest way; `peer`: by one delta after
the other, in the same process. The store's row: seconds for a version with shortcuts, and without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog

from driftline.messages.memory import MemoryBus
from driftline.messages.subjects import topology
from driftline.policy_store import HostTensor, MemoryBlobs, PolicyReader, PolicyWriter, State
from driftline.policy_store.applying import apply_encoding
from driftline.policy_store.workers import shared_workers
from driftline.services.policy_store.service import PolicyStoreService

RUN, ROOT = "shortcuts", Path(__file__).parents[1]
STEP = 0.23e-6
REPEATS = 3


class Quiet:
    async def report(self, values: Mapping[str, float], *, step: int = -1) -> None: ...


def rounded(master: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = master.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


async def by_deltas(reader: PolicyReader, blobs: MemoryBlobs, state: State, start: int, end: int) -> int:
    """Bytes read."""
    nbytes = 0
    for version in range(start + 1, end + 1):
        manifest, base = await reader.manifest(version), await reader.manifest(version - 1)
        assert manifest.delta is not None
        await apply_encoding(state, manifest, manifest.delta, blobs, shared_workers(), base=base, check_base=version == start + 1)
        nbytes += manifest.delta.nbytes
    return nbytes


async def measure(elements: int, versions: int) -> list[dict[str, Any]]:
    rng, raw = np.random.default_rng(0), 2 * elements
    master = rng.standard_normal(elements, np.float32) * np.float32(0.02)
    async with MemoryBus() as bus:
        await bus.declare(topology(RUN, queue_bytes=1 << 28))
        blobs = MemoryBlobs()
        writer = PolicyWriter(bus, blobs, RUN, versions + 1, full_share=1e9)
        await writer.resume()
        stores = {on: PolicyStoreService(bus, blobs, RUN, keep_versions=0, shortcuts=on, reporter=Quiet()) for on in (False, True)}
        seconds: dict[bool, list[float]] = {False: [], True: []}
        reader = PolicyReader(bus, blobs, RUN)
        for version in range(versions + 1):
            await writer.publish({"w": HostTensor.from_numpy(rounded(master), "bfloat16")}, version=version, learner_step=version)
            master += rng.standard_normal(elements, np.float32) * np.float32(STEP)
            head = await reader.head()
            assert head is not None
            for on, store in stores.items():
                began = time.perf_counter()
                await store.take(head)
                seconds[on].append(time.perf_counter() - began)
        rows = []
        behind = 1
        while 2 * behind <= versions:
            behind *= 2
            rows += await catch_up(reader, blobs, versions - behind, versions, raw)
        rows += await catch_up(reader, blobs, 1, versions - 1, raw)
        with_them, without = statistics.fmean(seconds[True][1:]), statistics.fmean(seconds[False][1:])
        rows.append(row("the store, a version", "s", with_them, without, f"{stores[True].shortcuts_stored} shortcuts over {versions} versions"))
        return rows


async def catch_up(reader: PolicyReader, blobs: MemoryBlobs, start: int, end: int, raw: int) -> list[dict[str, Any]]:
    base = await reader.materialise(start)
    ours, peer, nbytes, peer_bytes = [], [], 0, 0
    for _ in range(REPEATS):
        state, before = {name: tensor.copy() for name, tensor in base.items()}, reader.counts.bytes_read
        began = time.perf_counter()
        await reader.advance(state, start, end, fallback=False)
        ours.append(time.perf_counter() - began)
        nbytes = reader.counts.bytes_read - before
        state = {name: tensor.copy() for name, tensor in base.items()}
        began = time.perf_counter()
        peer_bytes = await by_deltas(reader, blobs, state, start, end)
        peer.append(time.perf_counter() - began)
    case = f"{end - start} versions behind"
    return [
        row(f"{case}: bytes", "% of the weights", 100 * nbytes / raw, 100 * peer_bytes / raw, f"from version {start} to {end}"),
        row(f"{case}: time", "s", statistics.median(ours), statistics.median(peer), f"median of {REPEATS}"),
    ]


def row(case: str, unit: str, ours: float, peer: float, note: str) -> dict[str, Any]:
    return {"case": case, "ours": round(ours, 5), "unit": unit, "peer": "one delta after the other" if "behind" in case else "without shortcuts",
            "peer_value": round(peer, 5), "ratio": round(ours / peer, 3), "bound": None, "note": note}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--elements", type=int, default=64_000_000)
    parser.add_argument("--versions", type=int, default=64)
    parser.add_argument("--device", default="cpu-2core")
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    rows = asyncio.run(measure(given.elements, given.versions))
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    out = ROOT / "benchmarks" / "results" / given.device / "policy_shortcuts.json"
    out.write_text(json.dumps({
        "command": f"python benchmarks/policy_shortcuts.py --elements {given.elements} --versions {given.versions} --device {given.device}",
        "commit": commit, "date": datetime.now(UTC).date().isoformat(), "device": given.device,
        "note": "bf16 ~ N(0, 0.02), master steps by N(0, 0.23 lr) at lr 1e-6, blobs in memory", "rows": rows,
    }, indent=2) + "\n")
    for line in rows:
        print(f"{line['case']:32} {line['ours']:10.4f} {line['unit']:18} peer {line['peer_value']:10.4f}  {line['ratio']:.2f}x  {line['note']}")


if __name__ == "__main__":
    main()
